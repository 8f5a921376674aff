//! Random numbers and the time from the run in place of the kernel.
//!
//! The standard library and tokio draw the keys of hash maps and the order of the branches of `select!` from the
//! kernel, and h2 measures how long it remembers streams. All of them ask the C library, two of whose functions this
//! module takes the place of. So a seed decides the order, different seeds try different orders, and no measured time
//! is that of the machine. Cryptography makes its own system call and is not seeded; what it makes has a fixed length.
//!
//! tokio also counts the runtimes of the process for its seed. A process therefore makes one run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::rand::GetRandomFlags;
use rustix::time::{ClockId, Timespec};

/// The date at the beginning of every run, since the epoch: 2030-01-01.
pub const START: Duration = Duration::from_secs(1_893_456_000);
/// The date at which the process starts, an hour before.
pub const STARTED: Duration = Duration::from_secs(1_893_452_400);

/// The state of the generator; 0 before the run.
static RANDOM: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds since the epoch of all clocks; 0 before the run.
static NANOSECONDS: AtomicU64 = AtomicU64::new(0);
/// Nanoseconds that each look at a clock takes.
static LOOK: AtomicU64 = AtomicU64::new(0);

/// Makes all random numbers that this process draws from now on a function of `seed`. Its clocks show `time` since
/// their epoch, and go on by a millisecond with each look at them until [`stop_clocks`]. Called by the only thread,
/// before it draws the first number.
pub fn begin_run(seed: u64, time: Duration) {
    RANDOM.store(mixed(seed) | 1, Ordering::Relaxed);
    fastrand::seed(seed);
    LOOK.store(1_000_000, Ordering::Relaxed);
    set_time(time);
}

/// Stops the clocks, which [`set_time`] sets from then on.
pub fn stop_clocks() {
    LOOK.store(0, Ordering::Relaxed);
}

/// Sets the time that the clocks show, since their epoch.
pub fn set_time(time: Duration) {
    NANOSECONDS.store(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// A permutation of the numbers (splitmix64).
fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// `getrandom(2)`.
///
/// # Safety
/// `buffer` has `length` bytes.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, flags: u32) -> isize {
    // SAFETY: the caller provides `length` bytes. They are set before they are read.
    let bytes = unsafe {
        std::ptr::write_bytes(buffer, 0, length);
        std::slice::from_raw_parts_mut(buffer, length)
    };
    if RANDOM.load(Ordering::Relaxed) == 0 {
        let flags = GetRandomFlags::from_bits_retain(flags);
        return rustix::rand::getrandom(bytes, flags).map_or(-1, usize::cast_signed);
    }
    for chunk in bytes.chunks_mut(8) {
        let state = RANDOM.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        chunk.copy_from_slice(&mixed(state).to_le_bytes()[..chunk.len()]);
    }
    length.cast_signed()
}

/// `clock_gettime(2)` for the clocks of the standard library, which are those of the wall and of the time since the
/// start of the machine. Before a run all clocks are the kernel's.
///
/// # Safety
/// `time` is valid for a write.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
unsafe extern "C" fn clock_gettime(clock: i32, time: *mut Timespec) -> i32 {
    let look = LOOK.load(Ordering::Relaxed);
    let nanoseconds = NANOSECONDS.fetch_add(look, Ordering::Relaxed).cast_signed();
    let now = if nanoseconds == 0 {
        let others = [ClockId::Realtime, ClockId::ProcessCPUTime, ClockId::ThreadCPUTime];
        let other = others.into_iter().find(|id| *id as i32 == clock);
        rustix::time::clock_gettime(other.unwrap_or(ClockId::Monotonic))
    } else {
        Timespec { tv_sec: nanoseconds / 1_000_000_000, tv_nsec: nanoseconds % 1_000_000_000 }
    };
    // SAFETY: the caller provides a place for the time.
    unsafe { time.write(now) };
    0
}
