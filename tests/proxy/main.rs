//! The data plane as a whole, on real sockets: before demo apiservers and before peers that break
//! the rules of HTTP/2 on purpose.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod client_certificates;
mod clients;
mod degraded_upstream;
mod expired_versions;
mod held_watches;
mod hostile_upstream;
mod identity;
mod kubectl;
mod limits;
mod outage;
mod own_errors;
mod request_bodies;
mod resume_limits;
mod retry;
mod scripted_peer;
mod stale_watches;
mod stream_capacity;
mod token_users;
mod unresponsive_connections;
mod upstream_load;
mod watch_continuity;
mod watch_rebalance;
mod writes;
