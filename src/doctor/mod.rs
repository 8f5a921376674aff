//! `jackstay doctor`: what is wrong between this machine and its apiservers, before installation and
//! in trouble.
//!
//! Looking and judging are apart:
//!
//! 1. [`target`] says what to examine, from a configuration, a kubeconfig or addresses.
//! 2. [`host`] looks at this machine, [`dns`] at its name servers, [`probe`] at one fresh connection
//!    step by step, [`lasting`] at one that stays; [`examine`] runs them side by side, over and over.
//! 3. What they saw is [`observations`]: plain data.
//! 4. [`findings`] is a pure function from that to causes, the most likely first.
//! 5. [`report`] prints.
//!
//! [`survey`] is a short look with the same probes, at certificates and at the apiservers that the
//! cluster names ([`members`]), for `jackstay kubeconfig`.
//!
//! It changes nothing, and sends a credential only to a server whose certificate it has verified.

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
pub mod lasting;
pub mod members;
pub mod observations;
pub mod probe;
#[cfg(feature = "doctor")]
pub mod report;
pub mod survey;
pub mod target;

mod verify;
