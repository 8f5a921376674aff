//! Endpoints that come, go and lie: what the set becomes, and that traffic never notices.

#![cfg(feature = "demo")]

#[path = "../reload/setup.rs"]
mod setup;
#[path = "../support/mod.rs"]
mod support;

mod bootstrap;
mod endpoint_set;
mod endpoint_slices;
mod endpoints_file;
mod host_faults;
mod readyz_token;
mod stress;
mod traffic;
