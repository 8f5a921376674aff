//! What is known about the capabilities of the apiservers of one upstream, for watches with parameters that not every
//! apiserver honours ([`jackstay_core::watch::parameters`]).
//!
//! Nothing is read before a client sends such a watch. The probers then read it, and read it again after each new
//! connection, because an apiserver has other feature gates only after a restart.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::watch::parameters::{Capability, Parameters};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Which capabilities are read, and signals between watches and probers.
#[derive(Debug, Default)]
pub struct CapabilityDemand {
    sharded: AtomicBool,
    managed_fields: AtomicBool,
    features: AtomicBool,
    raised: Notify,
    recorded: Notify,
}

/// The capabilities that are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WantedCapabilities {
    /// Whether an apiserver serves shards.
    pub sharded: bool,
    /// Whether it leaves out `metadata.managedFields`.
    pub managed_fields: bool,
    /// Its build and feature gates.
    pub features: bool,
}

impl WantedCapabilities {
    /// Whether any is read.
    pub fn any(self) -> bool {
        self.sharded || self.managed_fields || self.features
    }
}

impl CapabilityDemand {
    /// Called for each watch with such parameters.
    pub fn want(&self, parameters: Parameters) {
        let wanted = match parameters {
            Parameters::Common => return,
            Parameters::Sharded => &self.sharded,
            Parameters::ManagedFields => &self.managed_fields,
            Parameters::Unknown => &self.features,
        };
        if !wanted.load(Ordering::Relaxed) && !wanted.swap(true, Ordering::Relaxed) {
            self.raised.notify_waiters();
        }
    }

    /// What the watches so far want.
    pub fn wanted(&self) -> WantedCapabilities {
        WantedCapabilities {
            sharded: self.sharded.load(Ordering::Relaxed),
            managed_fields: self.managed_fields.load(Ordering::Relaxed),
            features: self.features.load(Ordering::Relaxed),
        }
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
/// watch keeps the one that has served it.
#[derive(Debug, Default)]
pub struct ApiserverProcess {
    known: Mutex<Capabilities>,
    in_doubt: AtomicBool,
}

/// What is known about the capabilities of one process, or what was read in one turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether it serves shards, 0 or 1.
    pub sharded: Capability,
    /// Whether it leaves out `metadata.managedFields`, 0 or 1; by its metrics perhaps another number
    /// ([`ManagedFieldsOptOut::number`](jackstay_core::kubernetes_features::ManagedFieldsOptOut::number)).
    pub managed_fields: Capability,
    /// Its build and feature gates.
    pub features: Capability,
    /// Why something that is wanted is not known.
    pub error: Option<String>,
}

/// The capabilities of an endpoint in `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct CapabilityStatus {
    /// Whether it serves shards (KEP-5866); null while unknown.
    pub sharded: Option<bool>,
    /// Whether it leaves out `metadata.managedFields` on request (KEP-5958); null while unknown, or if no client has sent such
    /// a watch.
    pub managed_fields_opt_out: Option<bool>,
    /// Equal for endpoints of the same build with the same feature gates; null while unknown, or if no client has sent
    /// a watch with a parameter that jackstay does not know.
    pub features: Option<String>,
    /// Why something that is wanted is unknown.
    pub error: Option<String>,
}

impl ApiserverProcess {
    /// Sets whether the connection of the prober does not respond, so that the process may have been replaced.
    pub fn set_in_doubt(&self, in_doubt: bool) {
        self.in_doubt.store(in_doubt, Ordering::Relaxed);
    }

    /// The capability that the endpoint of this process has now.
    pub fn present_capability(&self, parameters: Parameters) -> Capability {
        let in_doubt = self.in_doubt.load(Ordering::Relaxed);
        if in_doubt { Capability::Unread } else { self.capability(parameters) }
    }

    /// The capability to honour these parameters.
    pub fn capability(&self, parameters: Parameters) -> Capability {
        let known = self.lock();
        match parameters {
            Parameters::Common => Capability::Known(0),
            Parameters::Sharded => known.sharded,
            Parameters::ManagedFields => known.managed_fields,
            Parameters::Unknown => known.features,
        }
    }

    /// What is known.
    pub fn capabilities(&self) -> Capabilities {
        self.lock().clone()
    }

    /// Records what was read. What is known stays. The caller calls [`CapabilityDemand::notify_recorded`].
    pub fn record(&self, read: Capabilities) {
        let mut known = self.lock();
        let update = |known: &mut Capability, read| {
            if !matches!(known, Capability::Known(_)) && read != Capability::Unread {
                *known = read;
            }
        };
        update(&mut known.sharded, read.sharded);
        update(&mut known.managed_fields, read.managed_fields);
        update(&mut known.features, read.features);
        let all = [known.sharded, known.managed_fields, known.features];
        if read.error.is_some() || !all.contains(&Capability::Unavailable) {
            known.error = read.error;
        }
    }

    /// The capabilities in `/status`; `None` before anything was read.
    pub fn status(&self) -> Option<CapabilityStatus> {
        let known = self.capabilities();
        if known == Capabilities::default() {
            return None;
        }
        let number = |capability| match capability {
            Capability::Known(number) => Some(number),
            Capability::Unread | Capability::Unavailable => None,
        };
        Some(CapabilityStatus {
            sharded: number(known.sharded).map(|number| number == 1),
            managed_fields_opt_out: number(known.managed_fields)
                .filter(|number| *number <= 1)
                .map(|number| number == 1),
            features: number(known.features).map(|fingerprint| format!("{fingerprint:016x}")),
            error: known.error,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Capabilities> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Capability::{Known, Unavailable, Unread};

    #[test]
    fn demand_only_grows() {
        let demand = CapabilityDemand::default();
        demand.want(Parameters::Common);
        assert!(!demand.wanted().any());
        demand.want(Parameters::Unknown);
        let unknown = WantedCapabilities { features: true, ..WantedCapabilities::default() };
        assert_eq!(demand.wanted(), unknown);
        demand.want(Parameters::ManagedFields);
        assert_eq!(demand.wanted(), WantedCapabilities { managed_fields: true, ..unknown });
        demand.want(Parameters::Sharded);
        let all = WantedCapabilities { sharded: true, managed_fields: true, features: true };
        assert_eq!(demand.wanted(), all);
    }

    #[test]
    fn what_is_known_about_a_process_stays() {
        let process = ApiserverProcess::default();
        for (sharded, features, expected) in [
            (Unavailable, Unread, (Unavailable, Unread)),
            (Known(1), Unread, (Known(1), Unread)),
            (Unavailable, Unavailable, (Known(1), Unavailable)),
            (Unread, Known(7), (Known(1), Known(7))),
            (Known(0), Known(8), (Known(1), Known(7))),
        ] {
            process.record(Capabilities { sharded, features, ..Capabilities::default() });
            let known = Parameters::Sharded;
            let known = (process.capability(known), process.capability(Parameters::Unknown));
            assert_eq!(known, expected);
        }
        assert_eq!(process.capability(Parameters::Common), Known(0));
        process.set_in_doubt(true);
        assert_eq!(process.present_capability(Parameters::Sharded), Unread);
        assert_eq!(process.capability(Parameters::Sharded), Known(1));
        process.set_in_doubt(false);
        assert_eq!(process.present_capability(Parameters::Sharded), Known(1));
    }

    #[test]
    fn reason_stays_while_something_is_unavailable() {
        let process = ApiserverProcess::default();
        let error = Some("/metrics: 403".to_owned());
        let refused =
            Capabilities { features: Unavailable, error: error.clone(), ..Capabilities::default() };
        let list = Capabilities { sharded: Known(1), ..Capabilities::default() };
        process.record(refused);
        process.record(list);
        assert_eq!(process.capabilities().error, error);
        process.record(Capabilities { features: Known(7), ..Capabilities::default() });
        assert_eq!(process.capabilities().error, None);
    }

    #[test]
    fn status_says_what_is_known_and_why_something_is_not() {
        let process = ApiserverProcess::default();
        assert!(process.status().is_none());
        let error = Some("403".to_owned());
        let (sharded, managed_fields) = (Known(1), Known(0));
        process.record(Capabilities { sharded, managed_fields, features: Unavailable, error });
        let status = process.status().unwrap();
        assert_eq!((status.sharded, status.features), (Some(true), None));
        assert_eq!(status.managed_fields_opt_out, Some(false));
        assert_eq!(status.error.as_deref(), Some("403"));
    }
}
