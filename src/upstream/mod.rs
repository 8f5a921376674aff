//! The apiservers as we know them: endpoints and their state, connections and their life, the pool
//! that a request takes a stream from.
//!
//! * Shared by all workers, and replaced whole: [`shared`], with each [`endpoint`] and its state, the
//!   [`credentials`] that it is shown, what the [`endpoint_sources`] of endpoints said.
//! * A worker's own: its [`pool`], in which [`balance`] picks a [`connection`] and [`dial`] opens one;
//!   [`health`] judges whether it lives, as [`flow_health`] does where no PING can be sent.
//! * Watches move by [`watch_moves`]: away from an apiserver that is unwell ([`evacuation`]), and to one that
//!   has come back ([`rebalance`]).
//! * While nothing can be reached ([`outage`]) watches are held.
//! * An upgrade has a connection of its own ([`http1`]).

pub mod balance;
pub mod connection;
pub mod credentials;
pub mod dial;
pub mod endpoint;
pub mod endpoint_sources;
pub mod evacuation;
pub mod flow_health;
pub mod health;
pub mod http1;
pub mod outage;
pub mod pool;
pub mod probe_token;
pub mod readyz;
pub mod rebalance;
mod shared;
pub mod stats;
pub mod watch_moves;

pub use shared::Upstream;
