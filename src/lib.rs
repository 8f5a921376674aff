//! jackstay: the line between a Kubernetes node and its control plane.
//!
//! # Reading map
//!
//! The path of a request (L7), in the order in which it happens:
//!
//! 1. [`proxy::https_server`] accepts a connection and does the TLS handshake.
//! 2. [`proxy::client_connection`] hands each request of it to the phases below and records its outcome once.
//! 3. [`proxy::hygiene`] refuses or cleans the head; [`proxy::request_info`] says what it is in
//!    Kubernetes terms; [`proxy::client_certificate`] what the client has proven, and for how long;
//!    [`proxy::credential_selector`] says whose credential may go upstream.
//! 4. [`proxy::upstream_client`] leads to the upstream: [`upstream::pool`] picks a connection
//!    ([`upstream::balance`]) or opens one ([`upstream::dial`]).
//! 5. [`proxy::forward`] sends the request, its body held for a while ([`proxy::request_body`]), and again
//!    elsewhere where [`proxy::retry`] allows it. An upgrade (exec, attach, port-forward, cp) goes by
//!    [`proxy::upgrade`] instead.
//! 6. [`proxy::response_body`] streams the answer; [`proxy::watch::body`] that of a watch, by the rules of
//!    [`proxy::watch`]; while no apiserver can be reached watches are held ([`proxy::watch::outage`]);
//!    [`proxy::status_error`] makes jackstay's own answers. A client that reads nothing of what is queued for
//!    it is cut off ([`proxy::stall_timeout`], [`proxy::body_progress`]).
//!
//! The path of a flow (L4), all of it in [`proxy::passthrough`]:
//!
//! 1. [`forwarder`](proxy::passthrough::forwarder) runs the accept loop ([`proxy::accept`], the same
//!    for both modes) and each flow.
//! 2. [`routing`](proxy::passthrough::routing) chooses the upstream by original destination
//!    ([`transparent`](proxy::passthrough::transparent)) or by server name
//!    ([`client_hello`](proxy::passthrough::client_hello)).
//! 3. [`connect`](proxy::passthrough::connect) connects to an endpoint.
//! 4. [`pump`](proxy::passthrough::pump) moves the bytes both ways.
//! 5. [`flow_table`](proxy::passthrough::flow_table) checks all flows of a worker and ends those that
//!    are dead ([`upstream::flow_health`]) or due, with an
//!    [`end_reason`](proxy::passthrough::end_reason).
//!
//! What keeps the picture of the world true, beside that path and never on it:
//!
//! * [`upstream::connection`] drives one HTTP/2 connection and judges its life ([`upstream::health`]).
//! * [`upstream::evacuation`] moves watches away from an apiserver that is unwell, and
//!   [`upstream::rebalance`], slowly, to one that has come back.
//! * [`control`] finds the endpoints ([`control::discovery`]), asks each for its `/readyz` and
//!   re-reads certificates.
//! * [`kubeconfig`] reads a user's kubeconfig, points it at jackstay, and plans the configuration for it.
//! * [`doctor`] examines the way to the apiservers and says what is wrong with it.
//! * [`admin`] answers operators; [`observe`] counts and logs.
//! * [`app`] binds all sockets, starts the workers and the control thread, applies configuration
//!   changes, hands the sockets to a new process, and drains.
//! * [`demo`] is a small cluster with a jackstay before it and faults in between, for people, tests
//!   and benches.
//!
//! Imports go one way: `app → {admin, proxy, control} → upstream → {net, observe} → config`. The
//! test `tests/house.rs` holds us to it.

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod control;
#[cfg(feature = "demo")]
pub mod demo;
pub mod doctor;
pub mod kubeconfig;
pub mod net;
pub mod observe;
pub mod proxy;
pub mod upstream;

#[cfg(test)]
#[path = "../tests/support/wait.rs"]
pub(crate) mod wait;
