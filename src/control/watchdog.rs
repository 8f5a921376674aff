//! Tells the service manager that we live, as long as every worker's loop turns.
//!
//! It runs on the control thread, so that a control thread that hangs is silent too; the manager then
//! ends the process and starts another one.

use std::sync::Arc;

use tokio::time::{MissedTickBehavior, interval};

use crate::net::process::service_manager::ServiceManager;

/// Signs of life for ever, each only if `alive`; returns at once if nobody watches.
pub async fn feed(manager: Arc<ServiceManager>, alive: impl Fn() -> Result<(), String>) {
    let Some(patience) = manager.watchdog() else { return };
    // sd_watchdog_enabled(3) recommends half of it; a third forgives one that came late.
    let mut ticks = interval(patience / 3);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut silent = false;
    loop {
        ticks.tick().await;
        match alive() {
            Ok(()) => {
                silent = false;
                manager.notify("WATCHDOG=1");
            }
            Err(reason) => {
                if !silent {
                    tracing::error!(reason, "the watchdog of the service manager is not fed");
                }
                silent = true;
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
    async fn silent_while_a_worker_hangs() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("non-blocking");
        let heard = || std::iter::from_fn(|| socket.recv(&mut [0; 16]).ok()).count();
        let manager = ServiceManager::at(path.as_os_str(), Some(30_000_000)).expect("connected");
        let alive = Rc::new(Cell::new(true));
        let asked = Rc::clone(&alive);
        let verdict = move || if asked.get() { Ok(()) } else { Err("worker 0".to_string()) };
        LocalSet::new()
            .run_until(async {
                tokio::task::spawn_local(feed(Arc::new(manager), verdict));
                tokio::time::sleep(Duration::from_secs(25)).await;
                assert_eq!(heard(), 3); // At 0, 10 and 20 s.
                alive.set(false);
                tokio::time::sleep(Duration::from_secs(30)).await;
                assert_eq!(heard(), 0);
                alive.set(true);
                tokio::time::sleep(Duration::from_secs(10)).await;
                assert_eq!(heard(), 1);
            })
            .await;
    }

    #[tokio::test(start_paused = true)]
    async fn ends_where_nobody_watches() {
        feed(Arc::default(), || Ok(())).await;
    }
}
