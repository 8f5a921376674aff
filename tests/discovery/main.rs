//! Discovery of endpoints: the resulting set, and that requests are not affected.

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
