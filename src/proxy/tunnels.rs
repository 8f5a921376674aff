//! The open tunnels of one listener on one worker. A drain waits until they are closed, and closes the
//! remaining ones at its deadline.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::watch;

use super::admission::connection_slots::OpenRequest;

/// The open tunnels.
#[derive(Debug, Clone, Default)]
pub struct Tunnels {
    registry: Rc<watch::Sender<Registry>>,
    /// The request of the tunnel that is registered with this handle. It keeps the slot of the connection.
    _request: Option<Rc<OpenRequest>>,
}

#[derive(Debug, Default)]
struct Registry {
    /// The number of tunnels to each endpoint. An endpoint without tunnels has no entry.
    open: HashMap<Arc<str>, usize>,
    closing: bool,
}

impl Tunnels {
    /// The number of open tunnels.
    pub fn open(&self) -> usize {
        self.registry.borrow().open.values().sum()
    }

    /// A handle for the tunnel of a request.
    pub(super) fn of_request(&self, request: OpenRequest) -> Self {
        Self { registry: Rc::clone(&self.registry), _request: Some(Rc::new(request)) }
    }

    /// Waits until no tunnel is open.
    pub async fn all_closed(&self) {
        self.wait(|registry| registry.open.is_empty()).await;
    }

    /// Closes the open tunnels, and each tunnel that opens later.
    pub fn close_all(&self) {
        self.registry.send_modify(|registry| registry.closing = true);
    }

    /// The number of open tunnels to `endpoint`.
    pub(super) fn open_to(&self, endpoint: &Arc<str>) -> usize {
        self.registry.borrow().open.get(endpoint).copied().unwrap_or(0)
    }

    /// Counts a tunnel to `endpoint` as open until the guard is dropped.
    pub(super) fn register(&self, endpoint: &Arc<str>) -> OpenTunnel {
        self.registry.send_if_modified(|registry| {
            *registry.open.entry(Arc::clone(endpoint)).or_default() += 1;
            false // no task waits for more tunnels
        });
        OpenTunnel { tunnels: self.clone(), endpoint: Arc::clone(endpoint) }
    }

    async fn wait(&self, done: impl FnMut(&Registry) -> bool) {
        // `wait_for` fails only if the sender is dropped, and `self` holds the sender.
        let _ = self.registry.subscribe().wait_for(done).await;
    }
}

/// Counts one tunnel as open until it is dropped.
pub(super) struct OpenTunnel {
    tunnels: Tunnels,
    endpoint: Arc<str>,
}

impl OpenTunnel {
    /// Waits until the tunnel has to close.
    pub(super) async fn closing(&self) {
        self.tunnels.wait(|registry| registry.closing).await;
    }
}

impl Drop for OpenTunnel {
    fn drop(&mut self) {
        self.tunnels.registry.send_if_modified(|Registry { open, .. }| {
            if let Some(count) = open.get_mut(&self.endpoint) {
                *count -= 1;
                if *count == 0 {
                    open.remove(&self.endpoint);
                }
            }
            open.is_empty() // only `closed` waits for the number of tunnels
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn all_closed_waits_for_the_last_open_tunnel() {
        let tunnels = Tunnels::default();
        let (here, there) = (Arc::from("here"), Arc::from("there"));
        let open = [tunnels.register(&here), tunnels.register(&here), tunnels.register(&there)];
        assert_eq!((tunnels.open(), tunnels.open_to(&here), tunnels.open_to(&there)), (3, 2, 1));
        let mut cx = Context::from_waker(Waker::noop());
        let mut closed = pin!(tunnels.all_closed());
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        {
            let mut ended = pin!(open[0].closing());
            assert_eq!(ended.as_mut().poll(&mut cx), Poll::Pending);
            tunnels.close_all();
            assert_eq!(ended.as_mut().poll(&mut cx), Poll::Ready(()));
        }
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        drop(open);
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Ready(()));
        assert_eq!(tunnels.open(), 0);
    }
}
