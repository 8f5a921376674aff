//! What is known about the abilities of the apiservers of one upstream, for watches with parameters that not every
//! apiserver honours ([`jackstay_core::watch::parameters`]).
//!
//! Nothing is read before a client sends such a watch. The probers then read it, and read it again after each new
//! connection, because an apiserver has other feature gates only after a restart.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::watch::parameters::{Capability, Parameters};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Which abilities are wanted, and signals between watches and probers.
#[derive(Debug, Default)]
pub struct CapabilityDemand {
    wanted: AtomicU8,
    raised: Notify,
    recorded: Notify,
}

impl CapabilityDemand {
    /// Called for each watch with such parameters.
    pub fn want(&self, parameters: Parameters) {
        if self.wanted.fetch_max(parameters as u8, Ordering::Relaxed) < parameters as u8 {
            self.raised.notify_waiters();
        }
    }

    /// The parameters of all watches so far.
    pub fn wanted(&self) -> Parameters {
        let wanted = self.wanted.load(Ordering::Relaxed);
        let all = [Parameters::Common, Parameters::Sharded, Parameters::Unknown];
        all.into_iter().find(|one| *one as u8 == wanted).unwrap_or_default()
    }

    /// Completes when more is wanted than at this call.
    pub fn raised(&self) -> Notified<'_> {
        self.raised.notified()
    }

    /// Called when a capability was recorded.
    pub fn notify_recorded(&self) {
        self.recorded.notify_waiters();
    }

    /// Completes when a capability is recorded after this call.
    pub fn recorded(&self) -> Notified<'_> {
        self.recorded.notified()
    }
}

/// One process of an apiserver, as far as the prober can tell: it has ended when the prober has lost its connection. A
/// watch keeps that which has served it.
#[derive(Debug, Default)]
pub struct ApiserverProcess(Mutex<Capabilities>);

/// What is known about the abilities of one process.
#[derive(Debug, Clone, Default)]
pub struct Capabilities {
    /// Whether it serves shards, 0 or 1.
    pub sharded: Capability,
    /// Its build and feature gates.
    pub features: Capability,
    /// Why something is unavailable.
    pub error: Option<String>,
}

/// The abilities of an endpoint in `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct CapabilityStatus {
    /// Whether it serves shards (KEP-5866); null while unknown.
    pub sharded: Option<bool>,
    /// Equal for endpoints of the same build with the same feature gates; null while unknown, or if no client has sent
    /// a watch with a parameter that jackstay does not know.
    pub features: Option<String>,
    /// Why something is unknown.
    pub error: Option<String>,
}

impl ApiserverProcess {
    /// What is known about the ability to honour these parameters.
    pub fn capability(&self, parameters: Parameters) -> Capability {
        let capabilities = self.lock();
        match parameters {
            Parameters::Common => Capability::Known(0),
            Parameters::Sharded => capabilities.sharded,
            Parameters::Unknown => capabilities.features,
        }
    }

    /// Records what was read. The caller calls [`CapabilityDemand::notify_recorded`].
    pub fn record(&self, capabilities: Capabilities) {
        *self.lock() = capabilities;
    }

    /// The abilities in `/status`; `None` before anything was read.
    pub fn status(&self) -> Option<CapabilityStatus> {
        let Capabilities { sharded, features, error } = self.lock().clone();
        if (sharded, features) == (Capability::Unread, Capability::Unread) {
            return None;
        }
        let known = |capability| match capability {
            Capability::Known(number) => Some(number),
            Capability::Unread | Capability::Unavailable => None,
        };
        let features = known(features).map(|fingerprint| format!("{fingerprint:016x}"));
        Some(CapabilityStatus {
            sharded: known(sharded).map(|number| number == 1),
            features,
            error,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Capabilities> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_only_grows() {
        let demand = CapabilityDemand::default();
        assert_eq!(demand.wanted(), Parameters::Common);
        demand.want(Parameters::Unknown);
        demand.want(Parameters::Sharded);
        assert_eq!(demand.wanted(), Parameters::Unknown);
    }

    #[test]
    fn status_says_what_is_known_and_why_something_is_not() {
        let process = ApiserverProcess::default();
        assert!(process.status().is_none());
        assert_eq!(process.capability(Parameters::Common), Capability::Known(0));
        process.record(Capabilities {
            sharded: Capability::Known(1),
            features: Capability::Unavailable,
            error: Some("403".to_owned()),
        });
        assert_eq!(process.capability(Parameters::Unknown), Capability::Unavailable);
        let status = process.status().unwrap();
        assert_eq!((status.sharded, status.features), (Some(true), None));
        assert_eq!(status.error.as_deref(), Some("403"));
    }
}
