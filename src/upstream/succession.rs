//! Says for which endpoints the connections with the previous certificate or CA bundle stay in use, and why.
//!
//! A new one may be wrong: an apiserver that does not know its issuer, a bundle without the issuer of the apiservers. So
//! the connections that work stay until an endpoint has accepted one with the new credential
//! ([`jackstay_core::pool::Class::plan`], [`super::trial`]). No new handshake uses the previous credential.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::credential_class::CredentialClass;

use super::endpoint::Endpoint;
use crate::observe::events::{Change, EventKind};

/// Maximum of endpoints that a report names.
const MAX_NAMED: usize = 3;
/// The least time between two reports of a class.
const INTERVAL: Duration = Duration::from_secs(10);

/// The classes of an upstream whose older connections stay in use.
#[derive(Debug, Default)]
pub struct Successions(Mutex<BTreeMap<CredentialClass, Wait>>);

#[derive(Debug)]
struct Wait {
    generation: u64,
    /// Why no connection to an endpoint is open, by its address, which each reason names.
    reasons: BTreeMap<Arc<str>, String>,
    reported: Option<(String, Instant)>,
}

impl Wait {
    /// The reasons, unless they were reported already or a report was made a short while ago.
    fn next_report(&mut self, now: Instant) -> Option<String> {
        let mut text: Vec<_> = self.reasons.values().take(MAX_NAMED).cloned().collect();
        if let Some(others @ 1..) = self.reasons.len().checked_sub(MAX_NAMED) {
            text.push(format!("{others} more"));
        }
        let text = text.join("; ");
        let is_due = self.reported.as_ref().is_none_or(|(reported, at)| {
            *reported != text && now.saturating_duration_since(*at) >= INTERVAL
        });
        is_due.then(|| {
            self.reported = Some((text.clone(), now));
            text
        })
    }
}

impl Successions {
    /// Reports that the connections of `class` with an older credential than this `generation` stay in use, because none
    /// with it could be opened to `endpoint`.
    pub fn wait(
        &self,
        class: CredentialClass,
        generation: u64,
        (endpoint, why): (&Endpoint, &str),
        now: Instant,
    ) {
        let mut waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Wait { generation, reasons: BTreeMap::new(), reported: None };
        let wait = waits.entry(class).or_insert_with(new);
        if wait.generation != generation {
            *wait = new();
        }
        wait.reasons.insert(Arc::clone(&endpoint.label), why.to_owned());
        if let Some(reasons) = wait.next_report(now) {
            drop(waits);
            let effect = "the connections with the previous one stay in use until an apiserver accepts the new one";
            report(class, endpoint, ("new", "not accepted"), (&reasons, effect), true);
        }
    }

    /// Reports that `endpoint` has accepted a connection of `class` with the new credential, if that was waited for.
    pub fn end(&self, class: CredentialClass, endpoint: &Endpoint) {
        let waited = self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&class);
        if waited.is_some_and(|wait| wait.reported.is_some()) {
            let reason = format!("{} has accepted it", endpoint.label);
            let effect = "the connections with the previous one drain";
            report(class, endpoint, ("not accepted", "in use"), (&reason, effect), false);
        }
    }
}

fn report(
    class: CredentialClass,
    endpoint: &Endpoint,
    (from, to): (&str, &str),
    (reason, effect): (&str, &str),
    bad: bool,
) {
    let name = format!("certificate or CA bundle for connections of class {}", class.as_str());
    let (kind, upstream) = (EventKind::Certificate, Some(&*endpoint.upstream));
    let change = Change { kind, upstream, name: &name, detail: "", from, to, reason, effect, bad };
    endpoint.metrics.events().changed(&change);
}

#[cfg(test)]
mod tests {
    use jackstay_core::discovery::address::EndpointAddress;
    use jackstay_sys::clock;

    use super::*;
    use crate::observe::Metrics;

    const CLASS: CredentialClass = CredentialClass::Identity(0);

    /// The states and reasons of the events.
    fn reports(metrics: &Metrics) -> Vec<(String, String)> {
        let events = metrics.events().last(100);
        events.into_iter().map(|event| (event.to, event.reason)).collect()
    }

    #[test]
    fn wait_is_reported_with_each_new_reason_until_the_credential_is_accepted() {
        let metrics = Metrics::new();
        let endpoint = |host: &str| {
            let address = EndpointAddress { host: host.to_owned(), port: 6443 };
            Endpoint::new(&"u".into(), &address, None, metrics.endpoint("u", host)).unwrap()
        };
        let endpoints = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"].map(endpoint);
        let [first, others @ ..] = &endpoints;
        let (successions, now) = (Successions::default(), clock::now());
        successions.end(CLASS, first);
        assert_eq!(reports(&metrics), []);

        let (unknown, no_route) = ("10.0.0.1:6443: unknown issuer", "no route");
        let waits = |reason: &str| ("not accepted".to_owned(), reason.to_owned());
        successions.wait(CLASS, 2, (first, unknown), now);
        assert_eq!(reports(&metrics), [waits(unknown)]);
        for other in others {
            successions.wait(CLASS, 2, (other, no_route), now + INTERVAL / 2);
        }
        assert_eq!(reports(&metrics).len(), 1);
        successions.wait(CLASS, 2, (first, unknown), now + INTERVAL);
        successions.wait(CLASS, 2, (first, unknown), now + INTERVAL * 3);
        let all = format!("{unknown}; no route; no route; 1 more");
        assert_eq!(reports(&metrics), [waits(unknown), waits(&all)]);

        // Another credential.
        successions.wait(
            CLASS,
            3,
            (&endpoints[1], "10.0.0.2:6443 answers 401"),
            now + INTERVAL * 3,
        );
        assert_eq!(reports(&metrics)[2..], [waits("10.0.0.2:6443 answers 401")]);
        successions.end(CLASS, first);
        successions.end(CLASS, first);
        let accepted = ("in use".to_owned(), "10.0.0.1:6443 has accepted it".to_owned());
        assert_eq!(reports(&metrics)[3..], [accepted]);
    }
}
