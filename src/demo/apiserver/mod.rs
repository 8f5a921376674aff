//! A small kube-apiserver for the demo, the tests and the benches.
//!
//! * [`cluster`] is the shared store, in place of etcd and the watch cache. Several servers over one
//!   [`Cluster`](cluster::Cluster) respond alike, as apiservers over one etcd do.
//! * [`server`] runs one apiserver on a thread of its own; its handle injects faults.
//! * A request passes [`connection`], [`handler`] (audit, scripted faults, authentication, authorization)
//!   and `handler::verbs`; [`watch`] and [`tunnel`] serve long-running requests.
//!
//! The server keeps nothing on disk, authorizes every authenticated user and runs no controllers.

pub mod audit;
pub mod cluster;
pub mod identity;
pub mod kinds;
pub mod selector;
pub mod status_error;

mod body;
mod connection;
mod discovery;
mod handler;
mod patch;
mod protobuf;
mod resource;
mod route;
mod server;
mod state;
mod table;
pub(super) mod timestamps;
mod tunnel;
mod watch;

pub(super) use body::ResponseBody;
pub use server::{ApiServerHandle, Options, start};
pub use state::{Counters, Faults, RequestHook, ScriptedResponse};
