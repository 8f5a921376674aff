//! A small Kubernetes control plane in one process, for the demo, the tests and the benches.
//!
//! * [`cluster`] is the shared store, in place of etcd and the watch cache. Several servers over one
//!   [`Cluster`](cluster::Cluster) respond alike, as apiservers over one etcd do.
//! * [`ApiServer`] is one apiserver. It runs on the caller's runtime, on sockets of the kernel or of a simulated network;
//!   with tokio's clock paused and the seed of `fastrand` set, a run is a function of the seed.
//! * [`start`] runs one apiserver on a thread of its own; its handle injects faults: a test can kill, freeze, slow
//!   down or fail each server.
//! * A request passes `connection`, `handler` (audit, scripted faults, authentication, authorization)
//!   and `handler::verbs`; `watch` and `tunnel` serve long-running requests.
//! * [`aggregated`] is a group that each server reaches on a path of its own, which can be cut.
//! * [`faulty_relay`] relays TCP. It can drop the packets of established flows while new flows work.
//! * [`client`] is a plain client: one connection, requests, watches.
//! * [`pki`] issues certificates; [`seed`] fills the store.
//!
//! The server keeps nothing on disk, authorizes every authenticated user and runs no controllers.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]

pub mod aggregated;
mod aggregator;
pub mod cbor;
pub mod client;
pub mod faulty_relay;
pub mod pki;
pub mod seed;

pub mod audit;
pub mod cluster;
pub mod identity;
pub mod kinds;
pub mod requested_certificate;
pub mod selector;
pub mod status_error;

mod body;
mod compression;
mod connection;
mod discovery;
mod gateway;
mod goaway;
mod handle;
mod handler;
mod patch;
mod protobuf;
mod resource;
mod route;
mod server;
mod state;
mod table;
pub mod timestamps;
mod tunnel;
mod wall_clock;
mod watch;
mod watch_cache;

use body::ResponseBody;
pub use gateway::Gateway;
pub use handle::{ApiServerHandle, start};
pub use server::{ApiServer, Options};
pub use state::{Counters, Faults, RequestHook, ScriptedResponse};
pub use wall_clock::WallClock;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of another thread, which that thread has printed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
