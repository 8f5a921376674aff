//! Finds the endpoints of an upstream and keeps its endpoint set up to date.
//!
//! ```text
//! static   file   dns   slices   state file     each source gives answers: lists of endpoints
//!     \      \     |      /        /
//!              SourceStates                     holds the last usable answer of each source
//!                   |
//!          DiscoveryController                  one task per upstream, woken by every new answer
//!                   |  merge                    answers -> wanted set (pure)
//!                   |  Debouncer                wanted set -> set to apply now (pure)
//!                  / \
//!   endpoint_set      StateWriter               the endpoint set of the upstream, and the state file
//! ```
//!
//! The files in the order in which an update passes them: a source ([`mod@file`], [`dns`], or `slices` with
//! [`requests`], [`watch_events`] and [`objects`]), [`source_states`], [`controller`],
//! [`merge`](jackstay_core::discovery::merge), [`debounce`](jackstay_core::discovery::debounce), and
//! [`endpoint_set`](super::endpoint_set), which replaces the set of the [`Upstream`](crate::upstream::Upstream). In
//! parallel [`state_writer`] writes the endpoints of all sources but the static one to the [`state_file`].
//!
//! The controller never waits for a source, a disk or a drain: sources run in tasks of their own,
//! the state file is written on another thread, and connections drain in their pool. It never
//! applies an empty set.

mod controller;
pub mod dns;
pub mod file;
pub mod objects;
mod panics;
pub mod requests;
mod slices;
mod source_states;
pub mod state_file;
mod state_writer;
pub mod watch_events;

pub use controller::{SharedContext, run};

#[cfg(test)]
pub(super) mod tests;
