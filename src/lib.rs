//! jackstay: the line between a Kubernetes node and its control plane.
//!
//! # Reading map
//!
//! The path of a request, in the order in which it happens:
//!
//! 1. [`proxy::listener`] accepts a connection and does the TLS handshake.
//! 2. [`proxy::serve`] hands each request of it to the phases below and records its outcome once.
//! 3. [`proxy::hygiene`] refuses or cleans the head; [`proxy::request_info`] says what it is in
//!    Kubernetes terms; [`proxy::identify`] says whose credential may go upstream.
//! 4. [`upstream::pool`] picks a connection ([`upstream::balance`]) or opens one.
//! 5. [`proxy::forward`] sends the request, and again elsewhere where [`proxy::retry`] allows it.
//!    An upgrade (exec, attach, port-forward, cp) leaves here for [`proxy::upgrade`].
//! 6. [`proxy::body`] and [`proxy::watch`] stream the answer; [`proxy::respond`] speaks for us when
//!    there is none.
//!
//! What keeps the picture of the world true, beside that path and never on it:
//!
//! * [`upstream::connection`] drives one HTTP/2 connection and judges its life ([`upstream::health`]).
//! * [`upstream::flight`] moves watches away from an apiserver that is unwell, and
//!   [`upstream::rebalance`], slowly, to one that has come back.
//! * [`control`] asks every endpoint for its `/readyz` and re-reads certificates.
//! * [`kubeconfig`] moves a user's kubeconfig to the local endpoint, and makes the configuration
//!   for it.
//! * [`doctor`] examines the way to the apiservers and says what is wrong with it.
//! * [`admin`] answers operators; [`observe`] counts and logs.
//! * [`app`] binds everything, starts the workers, and drains them; it takes the place of a running
//!   process, and leaves its own to the next.
//!
//! Imports go one way: `app → {admin, proxy, control} → upstream → {net, observe} → config`. The
//! test `tests/house.rs` holds us to it.

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
pub mod control;
pub mod demo;
pub mod doctor;
pub mod kubeconfig;
pub mod net;
pub mod observe;
pub mod proxy;
pub mod upstream;
