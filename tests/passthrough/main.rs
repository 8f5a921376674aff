//! The real L4 data plane between clients and whatever a test puts behind it.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod client_limits;
mod drain;
mod endpoint_health;
mod faults;
mod flows;
mod peer;
mod prober;
mod rebalance;
mod unread_data;
