//! Reloads on real sockets: their effects, and that they do not disturb clients.

mod changes;
mod flows;
mod listeners;
mod rejected;
pub mod setup;
mod successors;
