//! The open tunnels of one listener on one worker. A drain counts them, waits for them and, at its
//! deadline, closes them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::Notify;

/// The open tunnels.
#[derive(Debug, Clone, Default)]
pub struct Tunnels(Rc<Registry>);

#[derive(Debug, Default)]
struct Registry {
    /// How many tunnels lead to each endpoint.
    open: RefCell<HashMap<Arc<str>, usize>>,
    closing: Cell<bool>,
    changed: Notify,
}

impl Tunnels {
    /// How many tunnels are open.
    pub fn open(&self) -> usize {
        self.0.open.borrow().values().sum()
    }

    /// Waits until no tunnel is open.
    pub async fn closed(&self) {
        self.0.wait(|| self.open() == 0).await;
    }

    /// Closes the open tunnels, and each that opens from now on.
    pub fn end(&self) {
        self.0.closing.set(true);
        self.0.changed.notify_waiters();
    }

    /// How many tunnels lead to `endpoint`.
    pub(super) fn to(&self, endpoint: &Arc<str>) -> usize {
        self.0.open.borrow().get(endpoint).copied().unwrap_or(0)
    }

    /// Counts a tunnel to `endpoint` as open until the guard is dropped.
    pub(super) fn enter(&self, endpoint: &Arc<str>) -> OpenTunnel {
        *self.0.open.borrow_mut().entry(Arc::clone(endpoint)).or_default() += 1;
        OpenTunnel { tunnels: self.clone(), endpoint: Arc::clone(endpoint) }
    }

    /// Waits until [`Self::end`] is called.
    async fn ended(&self) {
        self.0.wait(|| self.0.closing.get()).await;
    }
}

impl Registry {
    async fn wait(&self, done: impl Fn() -> bool) {
        loop {
            // Registered before the check, so that a change between the check and the wait wakes it.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if done() {
                return;
            }
            changed.await;
        }
    }
}

/// Keeps one tunnel counted as open.
pub(super) struct OpenTunnel {
    tunnels: Tunnels,
    endpoint: Arc<str>,
}

impl OpenTunnel {
    /// Waits until the tunnel has to close.
    pub(super) async fn ended(&self) {
        self.tunnels.ended().await;
    }
}

impl Drop for OpenTunnel {
    fn drop(&mut self) {
        let registry = &self.tunnels.0;
        let mut open = registry.open.borrow_mut();
        if let Some(count) = open.get_mut(&self.endpoint) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.endpoint);
            }
        }
        // Only a drain waits for the number of tunnels, and it waits for zero.
        if open.is_empty() {
            registry.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn closed_waits_for_the_last_open_tunnel() {
        let tunnels = Tunnels::default();
        let (here, there) = (Arc::from("here"), Arc::from("there"));
        let open = [tunnels.enter(&here), tunnels.enter(&here), tunnels.enter(&there)];
        assert_eq!((tunnels.open(), tunnels.to(&here), tunnels.to(&there)), (3, 2, 1));
        let mut cx = Context::from_waker(Waker::noop());
        let mut closed = pin!(tunnels.closed());
        let mut ended = pin!(tunnels.ended());
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        assert_eq!(ended.as_mut().poll(&mut cx), Poll::Pending);
        tunnels.end();
        assert_eq!(ended.as_mut().poll(&mut cx), Poll::Ready(()));
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        drop(open);
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Ready(()));
        assert_eq!(tunnels.open(), 0);
    }
}
