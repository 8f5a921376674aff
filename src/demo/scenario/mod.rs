//! What `jackstay demo` runs: [`clients`] that use the proxy, a [`ledger`] of what they observe, a
//! [`schedule`] of faults, a [`status_monitor`] that polls the proxy's `/status`, and a [`display`] of the
//! results.

pub mod clients;
pub mod display;
pub mod ledger;
pub mod schedule;
pub mod status_monitor;
