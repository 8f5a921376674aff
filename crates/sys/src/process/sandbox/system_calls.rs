//! The system calls that a running proxy makes.
//!
//! `tests/program/trace_sandbox` traces the tests with a real process and prints the calls that this list lacks, and
//! those in it that were not traced. The latter are here because another libc, architecture or kernel uses them,
//! or because only a rare event does: each such line says so.

/// A system call and, if not all of its uses are allowed, the allowed ones.
#[derive(Debug, Clone, Copy)]
pub struct SystemCall {
    /// `SYS_` and its name.
    pub constant: &'static str,
    /// Its number on this architecture.
    pub number: i64,
    /// The allowed uses; empty for all.
    pub uses: &'static [Use],
}

impl SystemCall {
    /// Its name as in section 2 of the manual pages.
    pub fn name(&self) -> &'static str {
        self.constant.trim_start_matches("SYS_")
    }
}

/// A use of a system call: all conditions must hold.
pub type Use = &'static [Condition];

/// A condition on an argument, of which only the lower 32 bits count: the kernel reads an `int`.
#[derive(Debug, Clone, Copy)]
pub enum Condition {
    /// The argument with this index has this value.
    Is(u8, i32),
    /// Of these bits, the argument with this index has exactly those of the second value.
    Bits(u8, i32, i32),
    /// The argument with this index is the number of this process.
    OwnPid(u8),
}

use Condition::{Bits, Is, OwnPid};

macro_rules! calls {
    ($($constant:ident $(($($uses:expr),+))?,)+) => {
        &[$(SystemCall {
            constant: stringify!($constant),
            number: libc::$constant,
            uses: &[$($($uses),+)?],
        }),+]
    };
}

/// Netlink: the owner of a loopback connection, and the interfaces of the host.
const NETLINK_PROTOCOLS: [i32; 2] = [libc::NETLINK_ROUTE, libc::NETLINK_SOCK_DIAG];

/// The calls of every architecture.
pub const COMMON: &[SystemCall] = calls![
    // Events and bytes.
    SYS_epoll_create1,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_eventfd2,
    SYS_ppoll,
    SYS_read,
    SYS_readv,   // rare: vectored reads of small buffers
    SYS_pread64, // rare: files of the standard library
    SYS_write,
    SYS_writev,
    SYS_sendto,
    SYS_sendmsg,
    SYS_sendmmsg, // rare: several UDP datagrams to a name server
    SYS_recvfrom,
    SYS_recvmsg,
    SYS_recvmmsg, // rare: several UDP datagrams of a name server
    SYS_splice,
    SYS_pipe2,
    // Sockets. Families other than these (packet, vsock, AF_ALG) had many kernel defects.
    SYS_socket(
        &[Is(0, libc::AF_INET)],
        &[Is(0, libc::AF_INET6)],
        &[Is(0, libc::AF_UNIX)],
        &[Is(0, libc::AF_NETLINK), Is(2, NETLINK_PROTOCOLS[0])],
        &[Is(0, libc::AF_NETLINK), Is(2, NETLINK_PROTOCOLS[1])]
    ),
    SYS_socketpair(&[Is(0, libc::AF_UNIX)]),
    SYS_bind,
    SYS_listen,
    SYS_accept4,
    SYS_accept, // rare: a kernel without accept4
    SYS_connect,
    SYS_shutdown,
    SYS_getsockname,
    SYS_getpeername,
    SYS_getsockopt,
    SYS_setsockopt,
    // Descriptors. TIOCSTI, which writes to a terminal, is not among the allowed requests.
    SYS_close,
    SYS_fcntl,
    SYS_dup,
    SYS_lseek,
    SYS_ioctl(
        &[Is(1, libc::FIONBIO as i32)],
        &[Is(1, libc::FIONREAD as i32)],
        &[Is(1, libc::TIOCOUTQ as i32)],
        &[Is(1, libc::TCGETS as i32)],
        // The interface of an address with a zone.
        &[Is(1, libc::SIOCGIFINDEX as i32)],
        &[Is(1, libc::TIOCGWINSZ as i32)]
    ),
    // Files, within the limits of Landlock.
    SYS_openat,
    SYS_statx,
    SYS_fstat,
    SYS_newfstatat,
    SYS_faccessat,
    SYS_faccessat2, // another libc
    SYS_readlinkat,
    SYS_getdents64,
    SYS_getcwd,
    SYS_fsync,
    SYS_fdatasync, // rare: files of the standard library
    SYS_ftruncate, // rare: files of the standard library
    SYS_fchmod,
    SYS_fchmodat,
    SYS_mkdirat,
    SYS_unlinkat,
    SYS_renameat,
    SYS_renameat2, // another libc
    SYS_umask,     // rare: files of the standard library
    // Memory, but none that is executable.
    SYS_mmap(&[Bits(2, libc::PROT_EXEC, 0)]),
    SYS_mprotect(&[Bits(2, libc::PROT_EXEC, 0)]),
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    SYS_brk,
    SYS_mincore, // rare: the libc's check of an address
    // Threads, but no processes. clone3, whose flags a filter cannot read, fails with ENOSYS, and the libc
    // then calls clone.
    SYS_clone(&[Bits(0, libc::CLONE_THREAD | libc::CLONE_VM, libc::CLONE_THREAD | libc::CLONE_VM)]),
    SYS_set_robust_list,
    SYS_set_tid_address, // another libc
    SYS_rseq,
    SYS_futex,
    SYS_gettid,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_membarrier, // rare: crossbeam and the allocator
    SYS_prctl(&[Is(0, libc::PR_SET_NAME)], &[Is(0, libc::PR_SET_VMA)]),
    SYS_exit,
    SYS_exit_group,
    // Signals: handlers, and abort(3), which signals its own process.
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_tgkill(&[OwnPid(0)]),
    SYS_restart_syscall,
    // Time. Without a vDSO, as on some virtual machines, the kernel is asked.
    SYS_clock_gettime,
    SYS_clock_getres,
    SYS_clock_nanosleep,
    SYS_nanosleep, // another libc
    SYS_gettimeofday,
    // The process and the host.
    SYS_getpid,
    SYS_getppid,
    SYS_getuid,
    SYS_geteuid,
    SYS_getgid,
    SYS_getegid,
    SYS_getcpu,
    SYS_getrandom,
    SYS_getrusage,
    SYS_sysinfo,
    SYS_uname,
    SYS_prlimit64(&[Is(0, 0)], &[OwnPid(0)]),
];

/// The older calls that only x86-64 has.
#[cfg(target_arch = "x86_64")]
pub const LEGACY: &[SystemCall] = calls![
    SYS_epoll_wait,
    SYS_poll,
    SYS_open,   // another libc
    SYS_stat,   // another libc
    SYS_lstat,  // another libc
    SYS_access, // another libc
    SYS_readlink,
    SYS_chmod,
    SYS_mkdir,
    SYS_unlink,
    SYS_rmdir, // another libc
    SYS_rename,
    SYS_getrlimit, // another libc
    SYS_time,      // another libc
];

/// Other architectures have the newer calls only.
#[cfg(not(target_arch = "x86_64"))]
pub const LEGACY: &[SystemCall] = &[];

/// All allowed calls.
pub fn allowed() -> impl Iterator<Item = &'static SystemCall> {
    COMMON.iter().chain(LEGACY)
}
