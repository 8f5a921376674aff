//! A small Kubernetes control plane in one process: what the demo shows, the tests doubt and the
//! benches measure against, so that all three speak of the same apiserver.
//!
//! * [`cluster`] is the shared store (the part of etcd and of the watch cache): several servers
//!   over one [`Cluster`](cluster::Cluster) answer alike, as apiservers over one etcd do.
//! * [`apiserver`] serves it over TLS, HTTP/2 and HTTP/1.1, on a thread of its own that can be
//!   killed, stopped, made sick or slow.
//! * [`hole`] is a relay whose established flows can fall silent while new ones work.
//! * [`client`] is a client as client-go is one: one connection, requests, watches.
//! * [`pki`] makes the certificates.
//!
//! On top of these stands what `jackstay demo` shows: [`clients`] that work through the proxy and
//! count what goes wrong, a [`schedule`] of faults, a [`witness`] that asks the proxy what it has
//! noticed, and [`show`], which prints.
//!
//! It knows nothing of the proxy: it shares no code with what it is used to judge. It keeps
//! nothing on disk, authorises nearly everybody, and runs no controllers.

pub mod apiserver;
pub mod audit;
pub mod client;
pub mod clients;
pub mod cluster;
pub mod failure;
pub mod hole;
pub mod identity;
pub mod kinds;
pub mod pki;
pub mod schedule;
pub mod seed;
pub mod selector;
pub mod show;
pub mod witness;

mod body;
mod connection;
mod discovery;
mod handler;
mod patch;
mod protobuf;
mod resource;
mod route;
mod stamp;
mod table;
mod tunnel;
mod watch;
mod websocket;
