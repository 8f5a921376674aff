//! A process: tasks that stop together and die together.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::task::{LocalSet, spawn_local};

/// A process.
#[derive(Debug, Clone)]
pub struct Process {
    state: Rc<RefCell<State>>,
}

#[derive(Debug)]
struct State {
    /// The tasks; `None` while they run and when the process is dead.
    tasks: Option<LocalSet>,
    stopped: bool,
    dead: bool,
    /// Wakes the task that runs the process.
    waker: Waker,
}

impl Process {
    /// Starts a process with one task.
    pub fn start(main: impl Future<Output = ()> + 'static) -> Self {
        Self::start_with(|| spawn_local(main)).0
    }

    /// Starts a process with the tasks that `main` spawns with `spawn_local`. It ends when they and the tasks that they have
    /// spawned have ended.
    pub fn start_with<T>(main: impl FnOnce() -> T) -> (Self, T) {
        let tasks = LocalSet::new();
        let result = {
            let _entered = tasks.enter();
            main()
        };
        let waker = Waker::noop().clone();
        let state = State { tasks: Some(tasks), stopped: false, dead: false, waker };
        let process = Self { state: Rc::new(RefCell::new(state)) };
        spawn_local(Running(process.clone()));
        (process, result)
    }

    /// Calls a function whose `spawn_local` begins tasks of the process; `None` if the process is dead. A task of the
    /// process itself needs no call of this.
    pub fn enter<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let tasks = self.state.borrow_mut().tasks.take()?;
        let result = {
            let _entered = tasks.enter();
            call()
        };
        let mut state = self.state.borrow_mut();
        if !state.dead {
            state.tasks = Some(tasks);
        }
        state.waker.wake_by_ref();
        Some(result)
    }

    /// SIGSTOP: its tasks do not run. Their timers expire meanwhile.
    pub fn stop(&self) {
        self.state.borrow_mut().stopped = true;
    }

    /// SIGCONT.
    pub fn cont(&self) {
        let mut state = self.state.borrow_mut();
        state.stopped = false;
        state.waker.wake_by_ref();
    }

    /// SIGKILL: its tasks are dropped.
    pub fn kill(&self) {
        let (tasks, waker) = {
            let mut state = self.state.borrow_mut();
            state.dead = true;
            (state.tasks.take(), state.waker.clone())
        };
        drop(tasks);
        waker.wake();
    }
}

/// Runs the tasks of a process.
struct Running(Process);

impl Future for Running {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let tasks = {
            let mut state = self.0.state.borrow_mut();
            state.waker.clone_from(cx.waker());
            if state.stopped && !state.dead {
                return Poll::Pending;
            }
            state.tasks.take()
        };
        let Some(mut tasks) = tasks else { return Poll::Ready(()) };
        let result = Pin::new(&mut tasks).poll(cx);
        // A task may have killed its own process.
        let mut state = self.0.state.borrow_mut();
        if state.dead {
            return Poll::Ready(());
        }
        state.tasks = Some(tasks);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use tokio::time::{interval, sleep};

    use super::*;

    /// Tasks that are begun from outside run, stop and die with the process.
    #[tokio::test(start_paused = true)]
    async fn enter_begins_tasks_of_the_process() {
        let set = LocalSet::new();
        let test = async {
            let process = Process::start(std::future::pending());
            let ticks = Rc::new(Cell::new(0));
            let count = Rc::clone(&ticks);
            let begun = process.enter(|| {
                spawn_local(async move {
                    let mut seconds = interval(Duration::from_secs(1));
                    loop {
                        seconds.tick().await;
                        count.set(count.get() + 1);
                    }
                })
            });
            assert!(begun.is_some());
            let mut seen = Vec::new();
            let changes: [fn(&Process); 3] = [|_| {}, Process::stop, Process::kill];
            for change in changes {
                change(&process);
                sleep(Duration::from_millis(3_500)).await;
                seen.push(ticks.get());
            }
            assert_eq!(seen, [4, 4, 4]);
            assert!(process.enter(|| {}).is_none());
        };
        set.run_until(test).await;
    }
}
