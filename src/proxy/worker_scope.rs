//! What a worker keeps in its thread, for threads on which several workers take turns.
//!
//! A socket's memory and the connections that linger are found by thread, so that each read and write finds them
//! without a reference. A worker of the program has a thread of its own. In a simulation all workers run on one thread,
//! so each has its values in place while it is polled and while it is dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::admission::socket_memory::SocketTable;
use super::lingering::LingeringConnections;

/// The values of a worker that is not polled.
#[derive(Default)]
struct WorkerValues {
    sockets: SocketTable,
    lingering: LingeringConnections,
}

impl WorkerValues {
    fn swap(&mut self) {
        self.sockets.swap();
        self.lingering.swap();
    }
}

/// A worker with its own values.
pub struct WorkerScope<F> {
    values: WorkerValues,
    /// `None` during the drop.
    worker: Option<Pin<Box<F>>>,
}

impl<F: Future> WorkerScope<F> {
    /// Runs `worker` with values of its own.
    pub fn new(worker: F) -> Self {
        Self { values: WorkerValues::default(), worker: Some(Box::pin(worker)) }
    }
}

impl<F: Future> Future for WorkerScope<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Self { values, worker } = &mut *self;
        let Some(worker) = worker else { return Poll::Pending };
        let _entered = Entered::new(values);
        worker.as_mut().poll(cx)
    }
}

impl<F> Drop for WorkerScope<F> {
    fn drop(&mut self) {
        let _entered = Entered::new(&mut self.values);
        drop(self.worker.take());
    }
}

/// The values are those of the thread until this is dropped.
struct Entered<'a>(&'a mut WorkerValues);

impl<'a> Entered<'a> {
    fn new(values: &'a mut WorkerValues) -> Self {
        values.swap();
        Self(values)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.swap();
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::task::Waker;

    use jackstay_core::admission::MemoryBudget;
    use jackstay_sys::sockets::stream::SocketRef;

    use super::super::admission::socket_memory::{self, SocketMemory};
    use super::*;

    #[test]
    fn workers_that_take_turns_on_a_thread_have_their_own_sockets() {
        let budget = MemoryBudget::new(1 << 20);
        let socket = || SocketMemory::new(SocketRef::Kernel(-1), budget.source(1), 1 << 20);
        let worker = |count: usize| {
            WorkerScope::new(async move {
                let sockets: Vec<_> = std::iter::repeat_with(socket).take(count).collect();
                assert_eq!(socket_memory::count(), count);
                tokio::task::yield_now().await;
                assert_eq!(socket_memory::count(), count);
                pending::<()>().await;
                drop(sockets);
            })
        };
        let mut cx = Context::from_waker(Waker::noop());
        let mut workers = [worker(1), worker(2)];
        for _ in 0..2 {
            for worker in &mut workers {
                assert!(Pin::new(worker).poll(&mut cx).is_pending());
                assert_eq!(socket_memory::count(), 0);
            }
        }
        let of_thread = socket();
        drop(workers);
        assert_eq!(socket_memory::count(), 1);
        assert!(!of_thread.is_shed());
    }
}
