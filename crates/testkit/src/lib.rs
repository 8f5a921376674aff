//! What the tests and benches of jackstay share.
//!
//! * [`wait`]: waiting for a condition; [`stopwatch`] and [`figures`]: measured durations and their bounds.
//! * [`child`]: processes; [`netns`]: faults of the network; [`peers`]: other proxies.
//! * [`http2`] and [`wire`]: frames and bytes, valid or not, on TLS connections; [`tls`]: clients and servers.
//! * [`name_server`]: a name server; [`recorder`]: an upstream that records the requests it receives.
//! * [`pages`]: pages of the admin endpoint; [`watch_recorder`]: the events of a watch.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![allow(missing_docs)] // names of test helpers say what they do

pub mod child;
pub mod figures;
pub mod http2;
pub mod name_server;
pub mod netns;
pub mod pages;
pub mod peers;
pub mod recorder;
pub mod stopwatch;
pub mod tls;
pub mod wait;
pub mod watch_recorder;
pub mod wire;
