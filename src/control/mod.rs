//! Keeps the picture of the world true, beside the path of requests and never on it.

pub mod certificates;
pub mod discovery;
pub mod files;
pub mod heartbeat;
pub mod members;
pub mod readyz;
pub mod state;
pub mod watchdog;
pub mod witness;
