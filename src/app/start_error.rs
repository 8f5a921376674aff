//! Why the process cannot start, each with what the operator can do about it.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use super::takeover::TakeoverError;
use crate::net::tls::file_error::TlsFileError;

/// Why the process cannot start, or cannot apply a configuration.
#[derive(Debug)]
pub enum StartError {
    /// A certificate, key or CA bundle cannot be loaded.
    Tls(TlsFileError),
    /// A listening socket cannot be opened.
    Bind {
        /// The listener, or `admin`.
        what: String,
        /// The configured address.
        address: SocketAddr,
        /// The error of the kernel.
        error: io::Error,
    },
    /// An endpoint's certificate cannot be verified by the configured server name.
    ServerName(String),
    /// The process lacks a capability that a transparent listener needs.
    Capability {
        /// The name of the listener.
        listener: String,
        /// The operation that was refused.
        what: &'static str,
        /// The error of the kernel.
        error: io::Error,
    },
    /// An inherited socket is transparent and its listener is not, or the reverse.
    TransparencyMismatch {
        /// The name of the listener.
        listener: String,
        /// The address of the socket.
        address: SocketAddr,
        /// What the listener is configured to be.
        transparent: bool,
    },
    /// The running process does not hand over its sockets.
    Takeover(TakeoverError),
    /// A thread or a runtime cannot be created.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tls(error) => error.fmt(f),
            Self::Bind { what, address, error } => {
                write!(f, "{what} cannot listen on {address}: {error}")?;
                let port = address.port();
                match error.kind() {
                    io::ErrorKind::AddrInUse => write!(
                        f,
                        "; another process listens there (`ss -ltnp 'sport = :{port}'` shows which; \
                         to replace a running jackstay, start with `--take-over`)"
                    ),
                    io::ErrorKind::AddrNotAvailable => f.write_str(
                        "; this host does not have the address (`ip addr` lists its addresses); \
                         with `freebind: true` a listener can be bound before the address exists",
                    ),
                    io::ErrorKind::PermissionDenied if (1..1024).contains(&port) => f.write_str(
                        "; a port below 1024 needs CAP_NET_BIND_SERVICE (systemd: \
                         AmbientCapabilities=CAP_NET_BIND_SERVICE; a pod: \
                         securityContext.capabilities.add: [NET_BIND_SERVICE])",
                    ),
                    _ => Ok(()),
                }
            }
            Self::ServerName(error) => f.write_str(error),
            Self::Capability { listener, what, error } => write!(
                f,
                "listener `{listener}` is transparent, and this process cannot {what}: {error}; \
                 give it CAP_NET_ADMIN (systemd: AmbientCapabilities=CAP_NET_ADMIN; a pod: \
                 securityContext.capabilities.add: [NET_ADMIN]), or set `transparent: false`"
            ),
            Self::TransparencyMismatch { listener, address, transparent } => write!(
                f,
                "listener `{listener}` is configured with `transparent: {transparent}`, but the \
                 inherited socket on {address} has `transparent: {}`; change the running process \
                 first (edit its configuration and send SIGHUP; for a systemd socket unit set \
                 Transparent={}), or stop it and start anew",
                !transparent,
                if *transparent { "yes" } else { "no" }
            ),
            Self::Takeover(error) => error.fmt(f),
            Self::System(error) => write!(f, "cannot start: {error}"),
        }
    }
}

impl std::error::Error for StartError {}

impl StartError {
    /// Whether the configuration is wrong, as opposed to the machine it runs on.
    pub fn is_configuration(&self) -> bool {
        matches!(self, Self::Tls(_) | Self::ServerName(_))
    }
}
