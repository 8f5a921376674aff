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
