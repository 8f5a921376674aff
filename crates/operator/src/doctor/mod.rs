//! `jackstay doctor`: diagnoses the path between this machine and its apiservers.
//!
//! Each stage uses only the result of the stage before it:
//!
//! ```text
//! target ──> examine ──> observations ──> findings ──> report
//!               └ host, image, dns, probe, long_lived, members
//! ```
//!
//! 1. [`target`] makes an [`ExaminationPlan`](target::ExaminationPlan) from a configuration, a
//!    kubeconfig or addresses.
//! 2. [`examine`] executes the plan. [`host`] checks this machine and [`dns`] checks each name server;
//!    [`image`] asks the container runtime for the image of a static pod.
//!    [`probe`] opens connections and measures each step; [`long_lived`] checks connections that stay
//!    open. [`members`] requests the addresses of the apiservers from the cluster.
//!    [`host_routing`] compares the responses to different hosts, and `backends` finds out whether an address leads to
//!    several apiservers.
//! 3. [`observations`] holds the results as plain data.
//! 4. [`findings`] derives causes from the observations, the most likely first. It is a pure function.
//! 5. [`report`] prints the observations and the findings.
//!
//! `jackstay kubeconfig` uses [`survey`] instead of [`examine`]. With the same probes, [`survey`] reads the
//! names in the certificates of the apiservers, recognizes apiservers by [`version`] and requests the addresses
//! of all of them.
//!
//! `jackstay install` uses [`examine`], and [`node`] to wait until the node is Ready.
//!
//! The doctor changes nothing. It sends a credential only to a server whose certificate it has verified.

// Without the feature `doctor` only `survey` is built, which uses a part of the probes.
#![cfg_attr(not(feature = "doctor"), allow(dead_code))]

pub mod dns;
#[cfg(feature = "doctor")]
pub mod examine;
#[cfg(feature = "doctor")]
pub mod findings;
#[cfg(feature = "doctor")]
pub mod host;
pub mod host_routing;
pub mod image;
#[cfg(feature = "doctor")]
pub mod long_lived;
pub mod members;
#[cfg(feature = "doctor")]
pub mod node;
pub mod observations;
pub mod probe;
#[cfg(feature = "doctor")]
pub mod report;
pub mod survey;
pub mod target;

mod backends;
mod first_bytes;
mod verify;
mod version;
