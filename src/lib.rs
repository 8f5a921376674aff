//! A proxy between the clients of a Kubernetes node and its apiservers.
//!
//! `src/README.md` describes the architecture: the paths of a request, a resumed watch, an L4 flow and an
//! endpoint update, the threads, the invariants and a glossary. In short:
//!
//! * [`proxy`] is the data plane: [`proxy::https_server`] and [`proxy::forward`] for requests,
//!   [`proxy::watch`] for watches, [`proxy::passthrough`] for L4 flows.
//! * [`upstream`] contains endpoints, connections and pools, and reports their health to the decisions.
//! * [`control`] discovers the endpoints, probes `/readyz` and reloads certificates.
//! * [`app`] is the life of the process: start, reload, takeover and drain.
//! * [`admin`] is the admin endpoint; [`observe`] contains metrics, logs and events.
//! * The decisions are in `jackstay_core`, the operating system in `jackstay_sys`; `jackstay_config` and
//!   `jackstay_kubeconfig` read what operators write, and `jackstay_net` is TLS and HTTP/2 below the requests.
//! * [`cli`] contains the commands, those of operators from `jackstay_operator`; `demo` is a demonstration with the small
//!   apiservers of `jackstay_apiserver`.
//!
//! Imports have one direction, which `tests/checks/architecture` checks:
//! `cli → app → {admin, proxy, control} → upstream → observe`.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![warn(clippy::disallowed_methods)]

pub mod admin;
pub mod app;
#[allow(clippy::disallowed_methods)] // commands use the real clock
pub mod cli;
pub mod control;
#[cfg(feature = "demo")]
#[allow(clippy::disallowed_methods)] // its threads use the real clock
pub mod demo;
pub mod observe;
pub mod proxy;
pub mod upstream;
