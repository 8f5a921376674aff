//! The tasks of a worker in two queues: connections until the end of their handshake, and all others.
//!
//! A task waits until the tasks that are ready before it have run. Requests of one client can make thousands of tasks
//! ready, and a handshake consists of several steps. Therefore a worker runs handshakes first: between two looks at its
//! sockets it runs the handshakes that are ready, and then at most 61 other tasks (`MAX_TASKS_PER_TICK` of tokio's
//! `LocalSet`). So a new connection waits for one such batch each time that it waits for its client, however many other
//! tasks are ready. [`super::admission::handshake_queue`] limits what handshakes take: it starts one in each batch.

use std::future::pending;
use std::rc::{Rc, Weak};

use tokio::task::LocalSet;

use super::worker_scope::WorkerScope;

/// Spawns tasks in the queues of a worker.
#[derive(Debug, Clone)]
pub struct TaskQueues {
    handshakes: Weak<LocalSet>,
    others: Weak<LocalSet>,
}

impl TaskQueues {
    /// Runs `main`, and the tasks of both queues, on this thread until `main` ends. `spawn_local` spawns a task in the
    /// queue of the task that calls it; `main` counts to the other tasks. A drop of the future drops all of them.
    pub fn run<F: Future<Output = ()>>(main: impl FnOnce(Self) -> F) -> impl Future<Output = ()> {
        WorkerScope::new(Self::run_queues(main))
    }

    async fn run_queues<F: Future<Output = ()>>(main: impl FnOnce(Self) -> F) {
        let (handshakes, others) = (Rc::new(LocalSet::new()), Rc::new(LocalSet::new()));
        // The tasks have references to the queues, so strong ones would keep both forever.
        let queues =
            Self { handshakes: Rc::downgrade(&handshakes), others: Rc::downgrade(&others) };
        let main = main(queues);
        tokio::select! {
            biased;
            () = handshakes.run_until(pending()) => {}
            () = others.run_until(main) => {}
        }
    }

    /// Spawns a task that belongs to a handshake. It is dropped if the worker has ended.
    pub fn spawn_handshake(&self, task: impl Future<Output = ()> + 'static) {
        if let Some(handshakes) = self.handshakes.upgrade() {
            handshakes.spawn_local(task);
        }
    }

    /// Spawns another task. It is dropped if the worker has ended.
    pub fn spawn_other(&self, task: impl Future<Output = ()> + 'static) {
        if let Some(others) = self.others.upgrade() {
            others.spawn_local(task);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Poll;

    use tokio::net::TcpListener;
    use tokio::sync::oneshot;
    use tokio::task::{spawn_local, yield_now};

    use super::*;

    /// `MAX_TASKS_PER_TICK` of tokio's `LocalSet`.
    const BATCH: usize = 61;
    /// Other tasks that are always ready.
    const READY: usize = 1_000;

    /// Starts the other tasks, and runs `main` beside them. The counter has the number of polls of other tasks.
    fn run_beside_ready_tasks<F>(main: impl FnOnce(TaskQueues, Rc<Cell<usize>>) -> F)
    where
        F: Future<Output = ()>,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let polls = Rc::<Cell<usize>>::default();
        runtime.block_on(TaskQueues::run(|tasks| {
            for _ in 0..READY {
                let polls = Rc::clone(&polls);
                tasks.spawn_other(poll_fn(move |cx| {
                    polls.set(polls.get() + 1);
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }));
            }
            main(tasks, Rc::clone(&polls))
        }));
        assert!(polls.get() >= BATCH, "the other tasks run");
    }

    #[test]
    fn connection_is_accepted_within_two_batches_of_other_tasks() {
        run_beside_ready_tasks(async |tasks, polls| {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (accepted_at, at) = (Rc::<Cell<usize>>::default(), Rc::clone(&polls));
            let accepted = Rc::clone(&accepted_at);
            tasks.spawn_handshake(async move {
                while listener.accept().await.is_ok() {
                    accepted.set(at.get());
                }
            });
            for _ in 0..20 {
                // The connection is in the accept queue when `connect` returns.
                let connected_at = polls.get();
                let _client = std::net::TcpStream::connect(address).unwrap();
                while accepted_at.get() <= connected_at {
                    yield_now().await;
                    assert!(polls.get() <= connected_at + 2 * BATCH, "not accepted");
                }
            }
        });
    }

    #[test]
    fn steps_of_a_handshake_that_wait_for_no_client_run_without_other_tasks_between_them() {
        run_beside_ready_tasks(async |tasks, polls| {
            let (done, mut steps) = oneshot::channel();
            let at = Rc::clone(&polls);
            tasks.spawn_handshake(async move {
                let begun = at.get();
                for _ in 0..10 {
                    let (sender, receiver) = oneshot::channel();
                    spawn_local(async move { sender.send(()) });
                    receiver.await.unwrap();
                }
                done.send(at.get() - begun).unwrap();
            });
            let other = loop {
                match steps.try_recv() {
                    Ok(other) => break other,
                    Err(_) => yield_now().await,
                }
            };
            assert_eq!(other, 0);
            assert!(polls.get() <= 2 * BATCH, "{}", polls.get());
        });
    }

    #[test]
    fn open_tasks_are_dropped_when_main_ends() {
        let held = Rc::new(());
        run_beside_ready_tasks(async |tasks, _| {
            let (one, other) = (Rc::clone(&held), Rc::clone(&held));
            let (in_one, in_other) = (tasks.clone(), tasks.clone());
            tasks.spawn_handshake(async move {
                pending::<()>().await;
                drop((one, in_one));
            });
            tasks.spawn_other(async move {
                pending::<()>().await;
                drop((other, in_other));
            });
            yield_now().await;
        });
        assert_eq!(Rc::strong_count(&held), 1);
    }
}
