//! Reloads on real sockets: their effects, and that they do not disturb clients.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod flows;
mod listeners;
mod rejected;
mod setup;
mod successors;
