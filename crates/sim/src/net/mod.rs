//! Hosts, processes, links and TCP connections between them.
//!
//! Kernels and processes are distinct: the kernel of a stopped process accepts connections and acknowledges bytes until
//! its receive buffer is full, and the process answers nothing.
//!
//! * `network`: hosts with their links, and what a packet does on arrival; `lifecycle` and `segments` have the
//!   parts for the life of a connection and for its data, `timers` those for lost packets.
//! * `balancer`: an address that leads to one of several hosts.
//! * `tcp`, `socket_state`, `connections`: the state of connections.
//! * `clock`, `event`, `queue`, `log`: what happens, and when.
//! * [`sockets`]: byte sockets.

mod balancer;
mod clock;
mod connections;
mod event;
mod ids;
mod lifecycle;
mod link;
mod log;
mod network;
pub mod queue;
mod segments;
mod socket_state;
pub mod sockets;
mod tcp;
mod timers;

pub use self::ids::{ConnectionId, HostId, ProcessId, ProcessState};
pub use self::link::Link;
pub use self::socket_state::{Keepalive, SocketOptions};
pub use self::tcp::Side;
