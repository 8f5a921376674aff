//! A simulated run on this thread: what the program otherwise does on other threads or takes from the limits of its process
//! does not depend on the machine.
//!
//! While a [`SimulatedRun`] lives, [`run_blocking`] runs its function at once on its thread, there is no limit on
//! descriptors ([`crate::process::resource_limits`]), and free memory is kept ([`crate::process::allocator`]). Other threads
//! are not affected.

use std::cell::Cell;
use std::marker::PhantomData;

use tokio::task::{JoinError, spawn_blocking};

thread_local! {
    static IS_RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Ends the run on this thread when it is dropped.
#[derive(Debug)]
pub struct SimulatedRun(PhantomData<*const ()>);

impl SimulatedRun {
    /// Begins a run on this thread.
    ///
    /// # Panics
    /// A run takes place on this thread already.
    pub fn begin() -> Self {
        assert!(!IS_RUNNING.replace(true), "one run at a time");
        Self(PhantomData)
    }
}

impl Drop for SimulatedRun {
    fn drop(&mut self) {
        IS_RUNNING.set(false);
    }
}

/// Whether a run takes place on this thread.
pub fn is_running() -> bool {
    IS_RUNNING.get()
}

/// Runs a function that takes long on a thread for blocking work, in a simulated run at once.
///
/// # Errors
/// The function has panicked, or the runtime ends.
pub async fn run_blocking<T: Send + 'static>(
    function: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if is_running() { Ok(function()) } else { spawn_blocking(function).await }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[tokio::test]
    async fn blocking_work_of_a_run_stays_on_its_thread() {
        let id = || thread::current().id();
        let own = id();
        let run = SimulatedRun::begin();
        assert_eq!(run_blocking(id).await.unwrap(), own);
        drop(run);
        assert_ne!(run_blocking(id).await.unwrap(), own);
    }
}
