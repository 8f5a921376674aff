//! The drain of the process, from the view of the control thread.

use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jackstay_core::drain::RESTART_DRAIN;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::sleep;

use super::tasks::Tasks;
use super::{ControlThread, own_pid, wait_for_workers};
use crate::app::takeover::TakeoverRequest;

/// Time for TCP handshakes to complete that have started on a socket that a drain closes: some round trips within a
/// data center. Meanwhile new connections are refused, and a new process cannot bind the address.
const TCP_HANDSHAKE: Duration = Duration::from_millis(50);

impl ControlThread {
    /// Closes or leaves all listening sockets, makes the workers end their connections, and answers takeover requests until this
    /// thread is stopped.
    pub(super) async fn drain(
        &mut self,
        tasks: &mut Tasks,
        takeovers: &mut UnboundedReceiver<TakeoverRequest>,
    ) -> Infallible {
        // After a takeover, the main thread starts the drain.
        let mut draining = self.draining.clone();
        let _ = draining.wait_for(|draining| *draining).await;
        let own = self.active.shares_sockets_with_one();
        if self.restarts.load(Ordering::Acquire) && self.manager.keeps_descriptors() {
            self.leave_sockets().await;
        } else {
            // New connections are refused rather than queued for a process that may never start.
            self.manager.discard_all();
            self.close_sockets().await;
        }
        self.sockets_closed.send_replace(true);
        while let Some(request) = takeovers.recv().await {
            match request {
                TakeoverRequest::DuplicateSockets { request, reply } => {
                    // The receiver may be dropped.
                    let _ = reply.send(self.offer(true, request));
                }
                TakeoverRequest::ReleaseSockets { pid, done } => {
                    self.notify_main_process(pid);
                    tasks.release_admin();
                    let effect = "handed over: this process drains and ends";
                    self.report_takeover(own_pid(), pid, "a new process serves", effect);
                    // The receiver may be dropped.
                    let _ = done.send(own);
                }
            }
        }
        pending().await
    }

    /// Has every worker accept what its queues hold and close its sockets.
    async fn close_sockets(&mut self) {
        if self.active.divert_new_connections() {
            sleep(TCP_HANDSHAKE).await;
        }
        // The workers close the last duplicates.
        self.active.sockets.clear();
        let closed = self.workers.close_sockets();
        wait_for_workers(closed, "a worker has not closed its sockets after 5 s").await;
    }

    /// Has every worker stop accepting, and leaves the queues to the process that the service manager starts next.
    async fn leave_sockets(&mut self) {
        tracing::info!("the service manager keeps the listening sockets for the next process");
        let limited = self.workers.limit_drain(RESTART_DRAIN);
        wait_for_workers(limited, "a worker has not begun its drain after 5 s").await;
        self.active.sockets.clear();
        let released = self.workers.release_sockets();
        wait_for_workers(released, "a worker still accepts connections after 5 s").await;
    }
}
