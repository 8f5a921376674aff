//! When the connections of a worker end in a drain: after all workers have closed their listening sockets
//! ([`jackstay_core::drain`]).

use jackstay_core::drain::MAX_SOCKETS_CLOSE;
use tokio::sync::watch;
use tokio::time::sleep;

/// Tells a worker when its connections shall end.
#[derive(Debug, Clone)]
pub struct DrainSignal {
    requested: watch::Receiver<bool>,
    sockets_closed: watch::Receiver<bool>,
}

impl DrainSignal {
    /// `requested` becomes true with the termination signal, and `sockets_closed` when no worker accepts any more.
    pub fn new(requested: watch::Receiver<bool>, sockets_closed: watch::Receiver<bool>) -> Self {
        Self { requested, sockets_closed }
    }

    /// Waits until connections shall end: the sockets are closed, or [`MAX_SOCKETS_CLOSE`] has passed since the request. A
    /// dropped sender means that the process ends.
    pub async fn connections_end(mut self) {
        let overdue = async {
            let _ = self.requested.wait_for(|requested| *requested).await;
            sleep(MAX_SOCKETS_CLOSE).await;
        };
        tokio::select! {
            _ = self.sockets_closed.wait_for(|closed| *closed) => {}
            () = overdue => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn connections_end_waits_for_the_sockets_for_at_most_a_second() {
        for (closed_after, expected) in [(Some(50), 50), (Some(5000), 1000), (None, 1000)] {
            let (request, requested) = watch::channel(false);
            let (close, sockets_closed) = watch::channel(false);
            let signal = DrainSignal::new(requested, sockets_closed);
            let start = clock::now();
            request.send_replace(true);
            tokio::spawn(async move {
                if let Some(millis) = closed_after {
                    sleep(Duration::from_millis(millis)).await;
                    close.send_replace(true);
                }
                sleep(Duration::from_secs(3600)).await;
            });
            signal.connections_end().await;
            let waited = clock::elapsed(start).as_millis();
            assert!((expected..=expected + 1).contains(&waited), "{closed_after:?}: {waited} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connections_end_returns_when_the_control_thread_has_ended() {
        let (_request, requested) = watch::channel(false);
        let (close, sockets_closed) = watch::channel(false);
        drop(close);
        let start = clock::now();
        DrainSignal::new(requested, sockets_closed).connections_end().await;
        assert!(clock::elapsed(start) < MAX_SOCKETS_CLOSE);
    }
}
