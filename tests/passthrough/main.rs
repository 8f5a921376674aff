//! The real L4 data plane between clients and whatever a test puts behind it.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod bounds;
mod drain;
mod endpoints;
mod faults;
mod flows;
mod last_words;
mod peer;
mod prober;
mod rebalance;
