//! Keeps the picture of the world true, beside the path of requests and never on it.
//!
//! * [`discovery`] decides which endpoints an upstream has, [`members`] alone writes the set, and
//!   [`state`] keeps the last good one on disk.
//! * [`readyz`] asks an endpoint how it is; [`witness`] hears on the same connection whether its
//!   process has stopped.
//! * [`certificates`] reads what has changed ([`files`]) and renews what is ours.
//! * [`heartbeat`] logs a loop that is stuck; [`watchdog`] tells the service manager that none is.

pub mod certificates;
pub mod discovery;
pub mod files;
pub mod heartbeat;
pub mod members;
pub mod readyz;
pub mod state;
pub mod watchdog;
pub mod witness;
