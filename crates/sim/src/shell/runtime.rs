//! Virtual time for code that runs on tokio: the clock stands still while a task can run, and then goes on to the next
//! timer or to the next event of the network, whichever comes first.
//!
//! tokio's timers have milliseconds, packets have nanoseconds. tokio moves a paused clock to its next timer when no task
//! can run. Before it does, [`Clock::before_park`] moves the clock to the events of the network that come before the next
//! whole millisecond; a timer of its own ([`drive`]) makes tokio stop at the millisecond of each event that comes later.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use jackstay_sys::clock;
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep_until;

use super::kernel;
use crate::net::sockets::SocketNetwork;

/// The resolution of tokio's timers.
const TICK: Duration = Duration::from_millis(1);

/// Runs `main`, and the tasks that it spawns with `spawn_local`, on virtual time until it ends. `network` makes the
/// network at the beginning of time, which is `date` since the epoch.
///
/// # Panics
/// The runtime cannot be built.
pub fn run<F: Future>(
    date: Duration,
    network: impl FnOnce(Instant) -> SocketNetwork,
    main: impl FnOnce(SocketNetwork) -> F,
) -> F::Output {
    let clock = Arc::new(OnceLock::<Clock>::new());
    let before_park = Arc::clone(&clock);
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .on_thread_park(move || {
            if let Some(clock) = before_park.get() {
                clock.before_park();
            }
        })
        .build()
        .expect("a runtime with a timer");
    LocalSet::new().block_on(&runtime, async {
        let start = clock::now();
        let network = network(start);
        let driver = Arc::<Mutex<Waker>>::new(Mutex::new(Waker::noop().clone()));
        spawn_local(drive(network.clone(), start, Arc::clone(&driver)));
        clock.get_or_init(|| Clock { start, date, network: network.clone(), driver });
        main(network).await
    })
}

/// What moves the clock between two milliseconds.
#[derive(Debug)]
struct Clock {
    start: Instant,
    /// The date at the start, since the epoch.
    date: Duration,
    network: SocketNetwork,
    /// Wakes [`drive`].
    driver: Arc<Mutex<Waker>>,
}

impl Clock {
    /// Called when no task can run. Moves the clock to the next event of the network if there is one before the next whole
    /// millisecond, and else to that millisecond, from which tokio goes on.
    fn before_park(&self) {
        let now = clock::now();
        kernel::set_time(self.date + now.saturating_duration_since(self.start));
        let last = whole_ticks(self.start, now);
        match self.network.next_event_at() {
            Some(at) if at < last + TICK => {
                advance(at.saturating_duration_since(now));
                self.network.run_until(at);
                // tokio does not move the clock while a task can run.
                self.driver.lock().unwrap_or_else(PoisonError::into_inner).wake_by_ref();
            }
            _ if now > last => advance(last + TICK - now),
            _ => {}
        }
    }
}

/// The last whole tick of tokio's timers until `at`.
fn whole_ticks(start: Instant, at: Instant) -> Instant {
    let ticks = at.saturating_duration_since(start).as_millis();
    start + Duration::from_millis(u64::try_from(ticks).unwrap_or(u64::MAX))
}

/// Moves the clock. Unlike `tokio::time::advance` it does not yield.
fn advance(by: Duration) {
    if !by.is_zero() {
        // It moves the clock when it is polled for the first time.
        let _ = pin!(tokio::time::advance(by)).poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// Makes tokio stop the clock at the millisecond in which the next event of the network is.
async fn drive(network: SocketNetwork, start: Instant, driver: Arc<Mutex<Waker>>) {
    poll_fn(|cx| {
        network.set_driver(cx.waker().clone());
        driver.lock().unwrap_or_else(PoisonError::into_inner).clone_from(cx.waker());
        Poll::Ready(())
    })
    .await;
    loop {
        let next = network.next_event_at().map(|at| whole_ticks(start, at));
        let mut timer = pin!(async {
            match next {
                Some(at) if at > clock::now() => sleep_until(at.into()).await,
                // `before_park` sees to it.
                _ => pending().await,
            }
        });
        // Any wake-up may mean that another event is the next one.
        let mut woken = false;
        poll_fn(|cx| {
            let expired = timer.as_mut().poll(cx).is_ready();
            if expired || std::mem::replace(&mut woken, true) {
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
    }
}
