//! The data plane as a whole, on real sockets: before demo apiservers and before peers that break
//! the rules of HTTP/2 on purpose.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod bodies;
mod clients;
mod held;
mod hostile;
mod identity;
mod kubectl;
mod limits;
mod outage;
mod own_errors;
mod peer;
mod proofs;
mod rebalance;
mod resuming;
mod retry;
mod silence;
mod sparing;
mod stale;
mod streams;
mod token_users;
mod too_old;
mod unwell;
mod watches;
mod writes;
