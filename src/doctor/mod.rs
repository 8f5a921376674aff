//! `jackstay doctor`: diagnoses the path between this machine and its apiservers.
//!
//! Data flows one way, and only the examination touches the network:
//!
//! ```text
//! target ──> examine ──> observations ──> findings ──> report
//!            (host, dns, probe, long_lived, members)
//! ```
//!
//! 1. [`target`] makes an [`ExaminationPlan`](target::ExaminationPlan) from a configuration, a
//!    kubeconfig or addresses.
//! 2. [`examine`] carries it out: [`host`] checks this machine, [`dns`] each name server, [`probe`]
//!    fresh connections step by step, [`long_lived`] connections that stay open; [`members`] asks the
//!    cluster for its apiservers.
//! 3. [`observations`] holds the results, plain data.
//! 4. [`findings`] is a pure function from observations to causes, the most likely first.
//! 5. [`report`] prints both.
//!
//! [`survey`] is a shorter examination with the same probes, for `jackstay kubeconfig`: what the
//! certificates name, and which apiservers the cluster has.
//!
//! The doctor changes nothing, and sends a credential only to a server whose certificate it has
//! verified.

// Without the feature only `survey` is used, which needs a part of the probes.
#![cfg_attr(not(feature = "doctor"), allow(dead_code))]

pub mod dns;
#[cfg(feature = "doctor")]
pub mod examine;
#[cfg(feature = "doctor")]
pub mod findings;
#[cfg(feature = "doctor")]
pub mod host;
#[cfg(feature = "doctor")]
pub mod long_lived;
pub mod members;
pub mod observations;
pub mod probe;
#[cfg(feature = "doctor")]
pub mod report;
pub mod survey;
pub mod target;

mod verify;
