//! A proxy between the clients of a Kubernetes node and its apiservers.
//!
//! `src/README.md` is the architecture: the path of a request, of a resumed watch, of an L4 flow and of an
//! endpoint update, the threads, the invariants and a glossary. In short:
//!
//! * [`proxy`] is the data plane: [`proxy::client_connection`] and [`proxy::forward`] for requests,
//!   [`proxy::watch`] for watches, [`proxy::passthrough`] for L4 flows.
//! * [`upstream`] holds endpoints, connections and pools, and judges their health.
//! * [`control`] finds the endpoints, probes `/readyz` and reloads certificates.
//! * [`app`] is the process: it binds, starts the threads, reloads, hands over and drains.
//! * [`admin`] and [`observe`] are for operators; [`config`], [`kubeconfig`] and [`net`] are below all of them.
//! * [`cli`] holds the commands, `doctor` the diagnosis, `demo` a small apiserver for demo, tests and benches.
//!
//! Imports go one way: `app → {admin, proxy, control} → upstream → {net, observe} → config`.
//! `tests/house` checks it.

#![warn(clippy::disallowed_methods)]

pub mod admin;
pub mod app;
#[allow(clippy::disallowed_methods)] // commands block on real clocks
pub mod cli;
pub mod config;
pub mod control;
#[cfg(feature = "demo")]
#[allow(clippy::disallowed_methods)] // threads on real clocks, for tests of the whole
pub mod demo;
pub mod doctor;
pub mod kubeconfig;
pub mod net;
pub mod observe;
pub mod proxy;
pub mod upstream;

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // tests with real sockets wait in real time
#[path = "../tests/support/wait.rs"]
pub(crate) mod wait;
