//! The control plane: discovers endpoints, probes them and reloads certificates. It runs on a thread
//! of its own; requests never wait for it.
//!
//! * [`discovery`] decides which endpoints an upstream has; [`endpoint_set`] alone writes the set.
//! * [`readyz`] probes the endpoints.
//! * [`certificates`] reloads and renews certificates; [`file_watch`] detects changed files.
//! * [`watchdog`] reports liveness to the service manager.

pub mod certificates;
pub mod discovery;
pub mod endpoint_set;
pub mod file_watch;
pub mod readyz;
pub mod watchdog;
