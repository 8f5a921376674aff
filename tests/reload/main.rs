//! Reloads: what changes, what stays, and that nobody notices either, on real sockets.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod listeners;
mod rejected;
mod setup;
