//! Simulates clients, jackstay, the network and apiservers on virtual time, from a seed.
//!
//! A run is a function of its scenario and its seed: one thread, no real clock, no I/O. Ten seconds of a node take a few
//! milliseconds, so thousands of seeds can be tried.
//!
//! * [`queue`], [`scheduler`], [`trace`]: virtual time, and the log of a run.
//! * [`net`]: hosts, links, and TCP with the facts of `TCP_INFO`; byte sockets on it ([`net::sockets`]).
//! * [`http2`]: what processes send to each other.
//! * [`apiserver`]: servers over one store.
//! * [`client`]: Go's HTTP/2 and the clients above it.
//! * [`peers`], [`checker`]: clients on simulated sockets, and the rules that what they see is compared with.
//! * [`shell`]: the program as it ships between them.
//! * [`node`]: jackstay, around the decisions of `jackstay-core`.
//! * [`faults`], [`scenario`], [`scenarios`], [`invariants`]: what goes wrong, and what must hold.

#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![cfg_attr(not(feature = "shell"), allow(dead_code))] // what sockets and real clients use

pub mod apiserver;
#[cfg(feature = "shell")]
pub mod checker;
pub mod client;
pub mod faults;
pub mod fleet;
pub mod http2;
pub mod invariants;
pub mod net;
pub mod node;
#[cfg(feature = "shell")]
pub mod peers;
pub mod plots;
pub mod queue;
pub mod scenario;
pub mod scenarios;
pub mod scheduler;
#[cfg(feature = "shell")]
pub mod shell;
pub mod storms;
pub mod trace;
pub mod world;
