//! Reloads on real sockets: their effects, and that they do not disturb clients.

#![cfg(feature = "demo")]

#[path = "../support/mod.rs"]
mod support;

mod changes;
mod listeners;
mod passed_through;
mod rejected;
mod setup;
