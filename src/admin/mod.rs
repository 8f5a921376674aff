//! The admin endpoint: health, metrics and status for operators, read-only, off the request path.
//!
//! Its content comes from a [`StatusProvider`]; this module does not know the data plane. [`Admin::serve`]
//! runs on the caller's runtime, which must not be a worker's. Its resources are bounded: each socket has at
//! most [`MAX_CONNECTIONS`] connections, each with one request and for at most [`CONNECTION_TIME`]. When all
//! are taken, idle and slow connections are evicted for new ones ([`connections`]).
//!
//! A Unix socket can be configured in addition to the TCP address ([`serve_unix`]). Every process in the
//! host's network namespace can flood a TCP port, but not a socket in a private directory. Probes whose
//! failure restarts the process should therefore use the Unix socket.
//!
//! Another address can serve the metrics alone to authorised clients in the network ([`authorised_metrics`]). Here
//! there is no authentication: every process that can connect can read. The address is therefore on
//! loopback by default, and no response contains a secret. By DNS rebinding, a page in a browser on the node
//! can also connect: its host name is made to resolve to 127.0.0.1. On a loopback address, only requests
//! whose `Host` is an IP literal or `localhost` are therefore served; such a page cannot use these names. On
//! other addresses every `Host` is accepted: kubelet's probes use the host's IP, Prometheus may use a name,
//! and the operator has opened the address to the network.

pub mod authorised_metrics;
mod connections;
mod routes;
mod server;
mod status_provider;

pub use self::connections::{CONNECTION_TIME, MAX_CONNECTIONS};
pub use self::server::{Admin, SOCKET_MODE, StopReason, serve_unix};
pub use self::status_provider::{Readiness, ReadinessCheck, StatusProvider, node_name};
