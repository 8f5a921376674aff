//! Finds the endpoints of an upstream and keeps its endpoint set up to date.
//!
//! ```text
//! static   file   dns   slices   state file     each source leaves its last usable answer
//!     \      \     |      /        /
//!              SourceStates
//!                   |
//!          DiscoveryController                  one task per upstream, woken by every change
//!                   |  merge                    answers -> wanted set (pure)
//!                   |  Debouncer                wanted set -> set to apply now (pure)
//!                  / \
//!   endpoint_set      StateWriter               the pool's set, and the state file
//! ```
//!
//! An update takes this path: a source ([`file`], [`dns`], or [`slices`] with [`objects`]),
//! [`source_states`], [`controller`], [`merge`], [`debounce`], then
//! [`endpoint_set`](super::endpoint_set), which swaps the set of the
//! [`Upstream`](crate::upstream::Upstream); beside it, [`state_writer`] and [`state_file`].
//!
//! The controller never waits for a source, a disk or a drain: sources run in tasks of their own,
//! the state file is written on another thread, and connections drain in their pool. It never
//! applies an empty set. A changed configuration is handled like a changed source.

mod controller;
mod debounce;
pub mod dns;
pub mod file;
pub mod kubeconfig;
mod merge;
mod objects;
mod own_addresses;
mod slices;
mod source_states;
mod state_file;
mod state_writer;
mod transport;

pub use controller::{SharedContext, run};

#[cfg(test)]
mod tests;
