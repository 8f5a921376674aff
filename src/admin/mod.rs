//! The admin endpoint: health, metrics and status for operators, read-only, off the request path.
//!
//! It shows what a [`StatusProvider`] returns and does not know the data plane. [`Admin::serve`] runs
//! on the caller's runtime, which must not be a worker's. Its resources are bounded: at most
//! [`MAX_CONNECTIONS`] connections for each socket, each with one request and at most
//! [`CONNECTION_TIME`]. Idle and slow connections are evicted for new ones ([`connections`]).
//!
//! A Unix socket can be configured beside the TCP address ([`serve_unix`]). Every process in the
//! host's network namespace can flood a TCP port, but not a socket in a private directory, so probes
//! whose failure restarts the process should use the socket.
//!
//! There is no authentication: every process that can connect can read. The address is therefore on
//! loopback by default, and no response contains a secret. A browser on the node can connect for any
//! page whose name is made to resolve to 127.0.0.1 (DNS rebinding). On a loopback address only
//! requests whose `Host` is an IP literal or `localhost` are answered, since such a page cannot have
//! these names. On other addresses every `Host` is accepted: kubelet's probes use the host's IP,
//! Prometheus may use a name, and the operator has opened the address to the network.

mod connections;
mod routes;
mod server;
mod status_provider;

pub use self::connections::{CONNECTION_TIME, MAX_CONNECTIONS};
pub use self::server::{Admin, StopReason, serve_unix};
pub use self::status_provider::{Readiness, ReadinessCheck, StatusProvider, node_name};
