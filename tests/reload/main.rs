//! Reloads on real sockets: what changes, what stays, and that no client is disturbed.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod listeners;
mod rejected;
mod setup;
