//! The apiservers of one upstream: their endpoints, the connections to them, and the pool that gives each
//! request a stream.
//!
//! * All workers share one [`Upstream`]: its [`endpoint`]s, its [`credentials`] and the results of its
//!   [`endpoint_sources`].
//! * Each worker has its own [`pool`]. [`dial`] opens a [`connection`], by a [`connect_race`]. `jackstay_core` picks one for a request, and
//!   decides which connection is dead. [`flow_check`] asks it about an upgrade.
//! * [`evacuation`] moves watches away from an apiserver whose `/readyz` fails, and [`rebalance`] moves
//!   watches to one that has recovered. Both offer moves by [`watch_moves`].
//! * [`shared_address`] decides which endpoints may lead to several apiservers.
//! * [`question`] is a request of jackstay itself. [`backends`] asks which apiserver a connection has reached, and a
//!   `connection_probe` whether that one is ready, if it cannot be told apart from others.
//! * [`resource_versions`] records how far the watch cache of each endpoint has come.
//!   [`version_floors`] records which versions each client has seen.
//! * While the apiservers differ in their version, [`version_preference`] ranks them for each
//!   request, and the [`canary`] limits what the newest one gets.
//! * [`compression`] decides whether watches ask for gzip.
//! * [`restores`] holds whether etcd was restored from a backup, and [`list_source`] whether the apiservers read
//!   most-recent lists from it.
//! * [`capabilities`] holds which parameters of watches an apiserver honours.
//! * [`trial`] tries a new client certificate before it replaces the previous one, and [`succession`] says which endpoints
//!   have not accepted it.
//! * Each upgrade has an HTTP/1.1 connection of its own ([`http1`]).

pub(crate) mod address_backends;
pub(crate) mod backends;
pub(crate) mod canary;
pub mod capabilities;
pub mod client_key;
pub mod compression;
pub(crate) mod connect_race;
pub(crate) mod connection;
pub(crate) mod connection_probe;
pub mod credentials;
pub(crate) mod dial;
pub mod endpoint;
pub(crate) mod endpoint_sources;
pub mod evacuation;
pub(crate) mod flow_check;
pub mod group_failures;
pub(crate) mod http1;
pub mod list_source;
pub mod pool;
pub(crate) mod question;
pub(crate) mod readyz;
pub(crate) mod readyz_question;
pub mod rebalance;
pub mod resource_versions;
pub mod restores;
mod shared;
pub(crate) mod shared_address;
pub(crate) mod stats;
pub mod succession;
pub(crate) mod trial;
pub mod unordered_groups;
pub mod unreachable_webhooks;
pub mod version_floors;
pub mod version_preference;
pub mod watch_moves;

pub use shared::Upstream;
