//! Simulates clients, jackstay, the network and apiservers on virtual time, from a seed.
//!
//! The program runs as it ships, on simulated sockets and a clock that stands still while it works. A run is a function
//! of its scenario and its seed.
//!
//! * [`net`]: hosts, links, and TCP with the facts of `TCP_INFO`; byte sockets on it ([`net::sockets`]).
//! * [`shell`]: processes on these sockets: jackstay, apiservers and clients; a run.
//! * [`peers`], [`checker`]: the clients, and the rules that what they see is compared with.
//! * [`scripts`]: clients that follow a script, and assert what it answers and when.
//! * [`fleet`], [`storms`], [`plots`]: many nodes, and what they do to the apiservers together.
//! * [`balancer`]: one address in front of the apiservers.
//! * [`credential`]: what a client proves.
//! * [`faults`], [`scenario`], [`scenarios`], [`invariants`]: what goes wrong, and what must hold.

#![cfg_attr(not(test), warn(clippy::too_many_lines))]

pub mod balancer;
pub mod checker;
pub mod credential;
pub mod faults;
pub mod fleet;
pub mod invariants;
pub mod net;
pub mod peers;
pub mod plots;
pub mod scenario;
pub mod scenarios;
pub mod scripts;
pub mod shell;
pub mod storms;
