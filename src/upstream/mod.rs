//! The apiservers of one upstream: their endpoints and state, the connections to them, and the pool
//! from which a request takes a stream.
//!
//! * Shared by all workers and replaced as a whole: [`Upstream`], with its [`endpoint`]s,
//!   [`credentials`] and the results of its [`endpoint_sources`].
//! * Owned by one worker: its [`pool`], in which [`balance`] picks a [`connection`] and [`dial`] opens
//!   one. [`health`] derives the state of a connection, [`flow_health`] that of a flow on which no PING
//!   can be sent.
//! * Watches move by [`watch_moves`]: away from an apiserver whose `/readyz` fails ([`evacuation`]), and
//!   to one that has recovered ([`rebalance`]).
//! * While no endpoint is usable ([`outage`]) watches are held.
//! * An upgrade has a connection of its own ([`http1`]).

pub mod balance;
pub(crate) mod connection;
pub mod credentials;
pub(crate) mod dial;
pub mod endpoint;
pub(crate) mod endpoint_sources;
pub mod evacuation;
pub(crate) mod flow_health;
pub(crate) mod health;
pub(crate) mod http1;
pub(crate) mod outage;
pub mod pool;
pub(crate) mod probe_token;
pub(crate) mod readyz;
pub mod rebalance;
mod shared;
pub(crate) mod stats;
pub mod watch_moves;

pub use shared::Upstream;
