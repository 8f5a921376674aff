//! The program of `jackstay demo`: [`clients`] use the proxy, a [`ledger`] counts what they observe, a
//! [`schedule`] injects faults and compares the counts with the promises, a [`status_monitor`] polls the
//! proxy's `/status`, and a [`display`] shows the results.

pub mod clients;
pub mod display;
pub mod ledger;
pub mod schedule;
pub mod status_monitor;
