//! Keeps the picture of the world true, beside the path of requests and never on it.
//!
//! * [`discovery`] decides which endpoints an upstream has, [`endpoint_set`] alone writes the set, and
//!   [`discovery::state_file`] keeps the last good one on disk.
//! * [`readyz`] asks an endpoint how it is; [`readyz::reachability`] hears on the same connection whether its
//!   process has stopped.
//! * [`certificates`] reads what has changed ([`file_watch`]) and renews what is ours.
//! * [`watchdog`] tells the service manager that no worker is stalled.

pub mod certificates;
pub mod discovery;
pub mod endpoint_set;
pub mod file_watch;
pub mod readyz;
pub mod watchdog;
