//! The error of a start or a reload, with advice for the operator.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;
use std::path::Path;

use jackstay_net::tls::file_error::TlsFileError;

/// Why the process cannot start, or cannot apply a configuration.
#[derive(Debug, thiserror::Error)]
#[error("{message}{advice}")]
pub struct StartError {
    message: String,
    /// What to do; empty if the message says it.
    advice: String,
    is_configuration: bool,
    is_address_in_use: bool,
}

/// What is known of the process that a new one cannot take over from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OtherProcess {
    /// It has answered that it serves.
    Serves,
    /// It has not answered, or has closed the connection.
    Unknown,
}

impl StartError {
    /// Whether the cause is in the configuration, not in this machine.
    pub fn is_configuration(&self) -> bool {
        self.is_configuration
    }

    /// Whether a socket of another process has an address of the configuration.
    pub(super) fn is_address_in_use(&self) -> bool {
        self.is_address_in_use
    }

    /// The cause is in the configuration.
    pub(super) fn configuration(error: &dyn Display) -> Self {
        Self { is_configuration: true, ..Self::machine(error.to_string()) }
    }

    /// The cause is in this machine, its processes included.
    fn machine(message: String) -> Self {
        let advice = String::new();
        Self { message, advice, is_configuration: false, is_address_in_use: false }
    }

    /// The listening socket of `owner`, a listener or the admin endpoint, cannot be opened.
    pub(super) fn bind(owner: &str, address: SocketAddr, error: &io::Error) -> Self {
        let port = address.port();
        let advice = match error.kind() {
            io::ErrorKind::AddrInUse => format!(
                "; another process listens there (`ss -ltnp 'sport = :{port}'` shows which; to \
                 replace a running jackstay, start with `--take-over`)"
            ),
            io::ErrorKind::AddrNotAvailable => "; this host does not have the address (`ip addr` \
                lists its addresses); with `freebind: true` a listener can be bound before the \
                address exists"
                .to_owned(),
            io::ErrorKind::PermissionDenied if (1..1024).contains(&port) => "; a port below 1024 \
                needs CAP_NET_BIND_SERVICE (systemd: AmbientCapabilities=CAP_NET_BIND_SERVICE; a \
                pod: securityContext.capabilities.add: [NET_BIND_SERVICE])"
                .to_owned(),
            _ => String::new(),
        };
        let is_address_in_use = error.kind() == io::ErrorKind::AddrInUse;
        let message = format!("{owner} cannot listen on {address}: {error}");
        Self { advice, is_address_in_use, ..Self::machine(message) }
    }

    /// An address is in use, and a process with the same `state_dir` serves. `pid` is its id if it is in the same PID
    /// namespace.
    pub(super) fn beside_serving(self, pid: Option<i32>) -> Self {
        let (process, stop) = match pid {
            Some(pid) => (format!("jackstay runs as process {pid}"), format!(" (`kill {pid}`)")),
            None => ("jackstay runs".to_owned(), String::new()),
        };
        let advice = format!(
            "; {process} with the same state_dir and probably listens there: replace it with \
             `run --take-over`, or stop it first{stop}"
        );
        Self { advice, ..self }
    }

    /// The process lacks the capability for an `action` that a transparent listener needs.
    pub(super) fn capability(listener: &str, action: &str, error: &io::Error) -> Self {
        Self::machine(format!(
            "listener `{listener}` is transparent, and this process cannot {action}: {error}; give it \
             CAP_NET_ADMIN (systemd: AmbientCapabilities=CAP_NET_ADMIN; a pod: \
             securityContext.capabilities.add: [NET_ADMIN]), or set `transparent: false`"
        ))
    }

    /// The inherited socket on `address` is transparent and its listener is not, or the reverse.
    /// `transparent` is the setting of the listener.
    pub(super) fn transparency_mismatch(
        listener: &str,
        address: SocketAddr,
        transparent: bool,
    ) -> Self {
        Self::machine(format!(
            "listener `{listener}` is configured with `transparent: {transparent}`, but the \
             inherited socket on {address} has `transparent: {}`; change the running process first \
             (edit its configuration and send SIGHUP; for a systemd socket unit set \
             Transparent={}), or stop it and start anew",
            !transparent,
            if transparent { "yes" } else { "no" }
        ))
    }

    /// The process that serves `path` does not hand over its sockets.
    pub(super) fn takeover(path: &Path, reason: &str, other: OtherProcess) -> Self {
        let path = path.display();
        let state = match other {
            OtherProcess::Serves => "the running process continues to serve",
            OtherProcess::Unknown => "the log of the other process has its side",
        };
        Self::machine(format!("cannot take over through {path}: {reason}; {state}"))
    }

    /// The process that serves `path` does not answer and has an address of the configuration, so that `bind` failed.
    pub(super) fn silent(path: &Path, pid: Option<i32>, bind: &Self) -> Self {
        let path = path.display();
        let (process, remedy) = match pid {
            Some(pid) => (
                format!("process {pid}"),
                format!("`kill -CONT {pid}` continues it, `kill -KILL {pid}` ends it"),
            ),
            None => ("the other process".to_owned(), "continue or kill it".to_owned()),
        };
        Self::machine(format!(
            "cannot take over through {path}: {process} does not respond (stopped?) and still has the \
             listening sockets: {remedy}, and a start then succeeds; {}",
            bind.message
        ))
    }
}

/// A certificate, key or CA bundle cannot be loaded.
impl From<TlsFileError> for StartError {
    fn from(error: TlsFileError) -> Self {
        Self::configuration(&error)
    }
}

/// A thread or a runtime cannot be created.
impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::machine(format!("cannot start: {error}"))
    }
}
