//! The apiservers as we know them: endpoints and their state, connections and their life, the pool
//! that a request takes a stream from.
//!
//! * Shared by all workers, and replaced whole: [`shared`], with each [`endpoint`] and its state, the
//!   [`credentials`] that it is shown, what the [`sources`] of endpoints said.
//! * A worker's own: its [`pool`], in which [`balance`] picks a [`connection`] and [`dial`] opens one;
//!   [`health`] judges whether it lives, as [`flow`] does where no PING can be sent.
//! * Watches move by [`offers`]: away from an apiserver that is unwell ([`flight`]), and to one that
//!   has come back ([`rebalance`]).
//! * While nothing can be reached ([`outage`]) watches are held.
//! * An upgrade has a connection of its own ([`http1`]).

pub mod balance;
pub mod connection;
pub mod credentials;
pub mod dial;
pub mod endpoint;
pub mod flight;
pub mod flow;
pub mod health;
pub mod http1;
pub mod offers;
pub mod outage;
pub mod pool;
pub mod probe_token;
pub mod readyz;
pub mod rebalance;
pub mod shared;
pub mod sources;
pub mod stats;
