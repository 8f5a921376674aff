//! The listening socket of the admin endpoint. Another process may have its address for a time: one that drains, or the
//! one that has taken over.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use jackstay_config as config;
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use jackstay_sys::sockets::listening;
use jackstay_sys::sockets::listening::ListenOptions;

use super::shared_sockets::OtherOwners;
use super::sockets::divert_new_connections;
use super::start_error::StartError;

/// Whether the process starts while another one has the address of the admin endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminBind {
    /// It does not.
    Required,
    /// It does, and binds the address when that is free.
    WhenFree,
}

/// The listening socket of the admin endpoint.
#[derive(Debug)]
pub struct AdminSocket {
    configured: SocketAddr,
    /// `None` while another process has the address: before [`Self::bind_if_free`] and after [`Self::close`].
    socket: Mutex<Option<Arc<TcpListener>>>,
    other_owners: OtherOwners,
}

impl AdminSocket {
    /// The socket on `configured`: the `current` one, an inherited one, or a new one.
    pub fn bind(
        configured: SocketAddr,
        current: Option<&Arc<Self>>,
        inherited: &mut InheritedSockets,
        bind: AdminBind,
    ) -> Result<Arc<Self>, StartError> {
        if let Some(current) = current.filter(|admin| admin.configured == configured) {
            return Ok(Arc::clone(current));
        }
        if let Some(socket) = inherited.take(configured, false).pop() {
            return Ok(Self::new(configured, Some(socket), true));
        }
        let conflicts = |address| address != configured && config::collide(address, configured);
        let current = current.and_then(|admin| admin.socket());
        let conflicting = current.filter(|socket| socket.local_addr().is_ok_and(conflicts));
        let conflicting: Vec<_> = conflicting.iter().map(AsRef::as_ref).collect();
        match listening::listen_alongside(configured, &ListenOptions::default(), &conflicting) {
            Ok(socket) => Ok(Self::new(configured, Some(socket), false)),
            Err(error)
                if bind == AdminBind::WhenFree && error.kind() == io::ErrorKind::AddrInUse =>
            {
                Ok(Self::new(configured, None, false))
            }
            Err(error) => Err(StartError::bind("admin", configured, &error)),
        }
    }

    /// Without a socket.
    pub fn unbound(configured: SocketAddr) -> Arc<Self> {
        Self::new(configured, None, false)
    }

    fn new(configured: SocketAddr, socket: Option<TcpListener>, is_inherited: bool) -> Arc<Self> {
        let socket = Mutex::new(socket.map(Arc::new));
        Arc::new(Self { configured, socket, other_owners: OtherOwners::new(is_inherited) })
    }

    /// The socket, unless another process has the address.
    pub fn socket(&self) -> Option<Arc<TcpListener>> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The bound address, or the configured one while another process has that.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.socket().map_or(Ok(self.configured), |socket| socket.local_addr())
    }

    /// Binds the configured address.
    pub fn bind_if_free(&self) -> io::Result<()> {
        let socket = listening::listen_with(self.configured, &ListenOptions::default())?;
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(socket));
        Ok(())
    }

    /// The other processes that may have the socket.
    pub fn other_owners(&self) -> &OtherOwners {
        &self.other_owners
    }

    /// A duplicate for another process.
    pub fn duplicate(&self) -> Option<io::Result<OwnedFd>> {
        self.socket().map(|socket| socket.as_fd().try_clone_to_owned())
    }

    /// Closes the socket, which another process has.
    pub fn close(&self) {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Excludes the socket from new connections if `next` replaces it on its port. Returns whether it does.
    pub fn divert_if_replaced(self: &Arc<Self>, next: &Arc<Self>) -> bool {
        let (Some(socket), false) = (self.socket(), self.other_owners.exist()) else {
            return false;
        };
        let collide =
            || -> io::Result<bool> { Ok(config::collide(socket.local_addr()?, next.address()?)) };
        let is_replaced = !Arc::ptr_eq(self, next) && collide().unwrap_or(false);
        if is_replaced {
            divert_new_connections(&socket);
        }
        is_replaced
    }
}
