//! The control plane: discovers endpoints, probes them, and reloads and renews certificates. It runs on
//! a thread of its own; requests never wait for it.
//!
//! * [`discovery`] finds the endpoints of an upstream. Only [`endpoint_set`] writes the set that the
//!   upstream uses. [`host_addresses`] are those that belong to this host.
//! * [`backends`] finds the apiservers behind one address.
//! * [`readyz`] probes the endpoints.
//! * [`canary`] watches the errors of a new version of Kubernetes.
//! * [`certificates`] reloads and renews certificates; [`file_watch`] detects changed files.
//! * [`watchdog`] reports liveness to the service manager.

pub mod backends;
pub mod canary;
pub mod certificates;
pub mod discovery;
pub mod endpoint_set;
pub mod file_watch;
pub mod host_addresses;
pub mod readyz;
pub mod saved_floors;
pub mod watchdog;
