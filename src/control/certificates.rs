//! Re-reads certificates, keys and CA bundles when their files change.
//!
//! A serving certificate of a CA of this machine is renewed here as well.
//! What is good is put into use; what is not leaves the last good one in place. Either is told once,
//! in the log and in `/events`.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::file_watch::FileWatch;
use crate::net::tls::serving::ServingTls;
use crate::observe::events::{Change, EventKind, Events};
use crate::observe::utc::Utc;
use crate::observe::{CertificateExpiry, ListenerMetrics, Metrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::CredentialChange;

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often a certificate of our own is asked for its age: it is due months before its end.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// Watches the credentials of one upstream for ever.
pub async fn watch_credentials(upstream: Arc<Upstream>) {
    let credentials = &upstream.credentials;
    // Read once more at the start: a file may have changed since it was loaded.
    let mut files = FileWatch::new(credentials.paths());
    files.unsettled = true;
    let mut ticks = ticks();
    let mut expiries = credential_expiries(&upstream);
    loop {
        ticks.tick().await;
        files.follow(credentials.paths());
        if files.changed() {
            let events = credentials.refresh();
            expiries.clear();
            expiries.extend(credential_expiries(&upstream));
            files.unsettled = credentials
                .slots()
                .iter()
                .any(|slot| slot.error().is_some_and(|error| is_half_done(&error)))
                || credentials.probe_token().is_some_and(|token| token.error().is_some());
            for event in events {
                tell(&upstream, &event);
            }
        }
    }
}

/// Handles of the metric that says when the identities and the CA bundle of an upstream expire.
fn credential_expiries(upstream: &Upstream) -> Vec<Arc<CertificateExpiry>> {
    let mut expiries = Vec::new();
    let mut report = |kind, name: &str, not_after| {
        let expiry = upstream.metrics.certificate_expiry(kind, name);
        expiry.set(not_after);
        expiries.push(expiry);
    };
    for slot in upstream.credentials.slots() {
        if let Some(info) = slot.certificate() {
            report("identity", &slot.paths.cert_file.display().to_string(), info.not_after);
        }
    }
    if let Some(not_after) = upstream.credentials.ca_not_after() {
        report("upstream_ca", &upstream.name, not_after);
    }
    expiries
}

/// A missing file is looked at again when it appears; anything else may be the middle of a change.
fn is_half_done(error: &str) -> bool {
    !error.starts_with("awaited")
}

fn tell(upstream: &Upstream, event: &CredentialChange) {
    let told =
        CertificateEvents { events: upstream.metrics.events(), upstream: Some(&upstream.name) };
    match event {
        CredentialChange::Identity(slot) => {
            let Some(info) = slot.certificate() else { return };
            let name = slot.paths.cert_file.display().to_string();
            let serial = format!("serial {}", info.serial);
            let reason = format!("the file has changed: {}", info.subject);
            let effect = "identity is in use; connections with an older certificate drain";
            told.good(&name, &serial, &reason, effect);
        }
        CredentialChange::Replaced(slot, before) => {
            let Some(info) = slot.certificate() else { return };
            let name = slot.paths.cert_file.display().to_string();
            let states = (before.to_string(), info.subject.to_string());
            let effect = "clients with the old subject get 401; their connections drain";
            let why = ("the file names another subject", effect);
            told.changed(&name, (&states.0, &states.1), why, true);
        }
        CredentialChange::IdentityFailed(error) => told.bad("identity", error),
        CredentialChange::Ca => told.good(
            "CA bundle of the apiservers",
            "another one",
            "the file has changed",
            "new connections are verified by it",
        ),
        CredentialChange::CaFailed(error) => told.bad("CA bundle of the apiservers", error),
        CredentialChange::TokenFailed(error) => told.bad("token for /readyz", error),
    }
}

/// Tells what became of certificates, in the log and in `/events`.
struct CertificateEvents<'a> {
    events: &'a Events,
    upstream: Option<&'a str>,
}

impl CertificateEvents<'_> {
    fn good(&self, name: &str, to: &str, reason: &str, effect: &str) {
        self.changed(name, ("in use", to), (reason, effect), false);
    }

    fn bad(&self, name: &str, error: &str) {
        let states = ("in use", "cannot be read again");
        self.changed(name, states, (error, "the last good one stays"), true);
    }

    fn changed(&self, name: &str, states: (&str, &str), why: (&str, &str), bad: bool) {
        self.events.changed(&Change {
            kind: EventKind::Certificate,
            upstream: self.upstream,
            name,
            detail: "",
            from: states.0,
            to: states.1,
            reason: why.0,
            effect: why.1,
            bad,
        });
    }
}

/// Watches the serving certificate and the client CA of one listener for ever.
pub async fn watch_serving(
    tls: Arc<ServingTls>,
    metrics: Arc<ListenerMetrics>,
    everything: Arc<Metrics>,
) {
    let told = CertificateEvents { events: everything.events(), upstream: None };
    let name = format!("serving certificate of listener {}", metrics.name());
    let mut files = FileWatch::new(tls.paths());
    let mut last_error = None;
    let mut renewal = Renewal::default();
    let mut ticks = ticks();
    let expiry = everything.certificate_expiry("serving", metrics.name());
    loop {
        ticks.tick().await;
        // A reload of the configuration may have replaced it.
        expiry.set(tls.certificate().info.not_after);
        renewal.look(&name, &told, &tls);
        files.follow(tls.paths());
        if !files.changed() {
            continue;
        }
        let result = tls.refresh();
        files.unsettled = result.is_err();
        match result {
            Ok(true) => {
                last_error = None;
                metrics.certificate_reloaded("ok");
                let to = format!("serial {}", tls.certificate().info.serial);
                let reason = "its file, or that of the client CA, has changed";
                told.good(&name, &to, reason, "new connections get it; clients are verified anew");
            }
            Ok(false) => last_error = None,
            Err(error) => {
                let text = error.to_string();
                if last_error.as_ref() != Some(&text) {
                    metrics.certificate_reloaded("failed");
                    told.bad(&name, &text);
                    last_error = Some(text);
                }
            }
        }
    }
}

/// Renews a certificate that this machine made for itself.
#[derive(Default)]
struct Renewal {
    looked: Option<Instant>,
    last_error: Option<String>,
}

impl Renewal {
    /// Renews it if it is time; what it writes is seen like any other change.
    fn look(&mut self, name: &str, told: &CertificateEvents<'_>, tls: &ServingTls) {
        if self.looked.is_some_and(|looked| looked.elapsed() < RENEWAL_INTERVAL) {
            return;
        }
        self.looked = Some(Instant::now());
        match tls.renew_if_due(SystemTime::now()) {
            Ok(None) => {}
            Ok(Some(info)) => {
                self.last_error = None;
                let to = format!("valid until {}", Utc(info.not_after).seconds());
                let reason = "two thirds of its life were over";
                told.changed(name, ("due", &to), (reason, "renewed"), false);
            }
            Err(error) => {
                if self.last_error.as_ref() != Some(&error) {
                    let why = (error.as_str(), "it is shown until it expires");
                    told.changed(name, ("due", "cannot be renewed"), why, true);
                    self.last_error = Some(error);
                }
            }
        }
    }
}

pub(super) fn ticks() -> tokio::time::Interval {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}
