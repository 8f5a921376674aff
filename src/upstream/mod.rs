//! The apiservers as we know them: endpoints and their state, connections and their life, the pool
//! that a request takes a stream from.

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
pub mod pool;
pub mod readyz;
pub mod rebalance;
pub mod shared;
pub mod sources;
pub mod stats;
