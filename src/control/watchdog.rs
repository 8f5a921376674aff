//! Sends `WATCHDOG=1` to the service manager while the event loop of every worker runs.
//!
//! Without notifications the service manager restarts the process. They are sent by the control thread,
//! so they end as well if that thread hangs.

use std::sync::Arc;

use jackstay_sys::process::service_manager::ServiceManager;
use tokio::time::{MissedTickBehavior, interval};

/// Sends notifications while `alive` returns `Ok`, until the future is dropped. Returns at once if the
/// service manager has set no watchdog interval.
pub async fn feed(manager: Arc<ServiceManager>, alive: impl Fn() -> Result<(), String>) {
    let Some(limit) = manager.watchdog() else { return };
    // sd_watchdog_enabled(3) recommends half of the limit. With a third, one notification may be late.
    let mut ticks = interval(limit / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut stopped = false;
    loop {
        ticks.tick().await;
        match alive() {
            Ok(()) => {
                stopped = false;
                manager.notify("WATCHDOG=1");
            }
            Err(reason) => {
                if !stopped {
                    tracing::error!(reason, "watchdog notifications stopped");
                }
                stopped = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::net::UnixDatagram;
    use std::rc::Rc;
    use std::time::Duration;

    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn feed_worker_stalled_sends_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("non-blocking");
        let received = || std::iter::from_fn(|| socket.recv(&mut [0; 16]).ok()).count();
        let manager = ServiceManager::at(path.as_os_str(), Some(30_000_000)).expect("connected");
        let alive = Rc::new(Cell::new(true));
        let state = Rc::clone(&alive);
        let is_alive = move || if state.get() { Ok(()) } else { Err("worker 0".to_string()) };
        LocalSet::new()
            .run_until(async {
                tokio::task::spawn_local(feed(Arc::new(manager), is_alive));
                tokio::time::sleep(Duration::from_secs(25)).await;
                assert_eq!(received(), 3); // At 0, 10 and 20 s.
                alive.set(false);
                tokio::time::sleep(Duration::from_secs(30)).await;
                assert_eq!(received(), 0);
                alive.set(true);
                tokio::time::sleep(Duration::from_secs(10)).await;
                assert_eq!(received(), 1);
            })
            .await;
    }

    #[tokio::test(start_paused = true)]
    async fn feed_no_watchdog_interval_returns() {
        feed(Arc::default(), || Ok(())).await;
    }
}
