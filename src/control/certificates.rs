//! Reloads certificates, keys, CA bundles and tokens when their files change, and renews serving
//! certificates that this machine's own CA has issued.
//!
//! A valid file is put into use; after an invalid one the last valid content stays in use. Each
//! change and each failure is reported once, in the log and in `/events`.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::file_watch::{FileWatch, poll_ticks};
use crate::net::tls::serving::{ServingRefresh, ServingTls};
use crate::observe::events::{Change, EventKind, Events};
use crate::observe::utc::{Utc, wall_clock};
use crate::observe::{CertificateExpiry, ListenerMetrics, Metrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::CredentialChange;

/// Interval between two checks whether a certificate is due for renewal. It is due after two thirds of
/// its lifetime, so a delay of one interval does not matter.
const RENEWAL_CHECK: Duration = Duration::from_secs(60);

/// Reloads the credentials of one upstream until the future is dropped.
pub async fn watch_credentials(upstream: Arc<Upstream>) {
    let credentials = &upstream.credentials;
    // A file may have changed since the start loaded it.
    let mut files = FileWatch::unread(credentials.paths());
    let mut expiries = CredentialExpiries::default();
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        // A reload of the configuration may have replaced the credentials.
        expiries.update(&upstream);
        files.follow(credentials.paths());
        if files.changed() {
            let changes = credentials.refresh();
            expiries.update(&upstream);
            let identity_failed = credentials.slots().iter().any(|slot| slot.is_invalid());
            let token_failed =
                credentials.probe_token().is_some_and(|token| token.error().is_some());
            files.set_settled(!identity_failed && !token_failed);
            for change in changes {
                report(&upstream, &change);
            }
        }
    }
}

/// The metrics of when the identities and the CA bundle of an upstream expire.
#[derive(Default)]
struct CredentialExpiries {
    /// Kind, name and end of validity of each certificate.
    certificates: Vec<(&'static str, String, SystemTime)>,
    metrics: Vec<Arc<CertificateExpiry>>,
}

impl CredentialExpiries {
    /// Takes in the certificates that are in use now.
    fn update(&mut self, upstream: &Upstream) {
        let slots = upstream.credentials.slots();
        let identities = slots.iter().filter_map(|slot| {
            let name = slot.paths.cert_file.display().to_string();
            Some(("identity", name, slot.certificate()?.not_after))
        });
        let ca = upstream.credentials.ca_not_after();
        let ca = ca.map(|not_after| ("upstream_ca", upstream.name.to_string(), not_after));
        let certificates: Vec<_> = identities.chain(ca).collect();
        if certificates == self.certificates {
            return;
        }
        let metric = |(kind, name, not_after): &(&'static str, String, SystemTime)| {
            let expiry = upstream.metrics.certificate_expiry(kind, name);
            expiry.set(*not_after);
            expiry
        };
        self.metrics = certificates.iter().map(metric).collect();
        self.certificates = certificates;
    }
}

fn report(upstream: &Upstream, change: &CredentialChange) {
    let events =
        CertificateEvents { events: upstream.metrics.events(), upstream: Some(&upstream.name) };
    match change {
        CredentialChange::Identity(slot) => {
            let Some(info) = slot.certificate() else { return };
            let name = slot.paths.cert_file.display().to_string();
            let serial = format!("serial {}", info.serial);
            let reason = format!("the file has changed: {}", info.subject);
            let effect = "identity is in use; connections with an older certificate drain";
            events.loaded(&name, &serial, &reason, effect);
        }
        CredentialChange::Replaced(slot, before) => {
            let Some(info) = slot.certificate() else { return };
            let name = slot.paths.cert_file.display().to_string();
            let (before, after) = (before.to_string(), info.subject.to_string());
            let effect = "clients with the old subject get 401; their connections drain";
            let reason = "the file names another subject";
            events.changed(&name, (&before, &after), (reason, effect), true);
        }
        CredentialChange::IdentityFailed(error) => events.failed("identity", error),
        CredentialChange::Ca => events.loaded(
            "CA bundle of the apiservers",
            "another one",
            "the file has changed",
            "new connections are verified by it",
        ),
        CredentialChange::CaFailed(error) => events.failed("CA bundle of the apiservers", error),
        CredentialChange::TokenFailed(error) => events.failed("token for /readyz", error),
    }
}

/// Reports changes of certificates in the log and in `/events`.
struct CertificateEvents<'a> {
    events: &'a Events,
    upstream: Option<&'a str>,
}

impl CertificateEvents<'_> {
    fn loaded(&self, name: &str, to: &str, reason: &str, effect: &str) {
        self.changed(name, ("in use", to), (reason, effect), false);
    }

    fn failed(&self, name: &str, error: &str) {
        let states = ("in use", "cannot be read again");
        self.changed(name, states, (error, "the last valid one stays in use"), true);
    }

    /// Reports a change of `name` between `states`, with its reason and effect.
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

/// Reloads the serving certificate and the client CA of one listener, and renews the certificate,
/// until the future is dropped.
pub async fn watch_serving(
    tls: Arc<ServingTls>,
    listener: Arc<ListenerMetrics>,
    metrics: Arc<Metrics>,
) {
    let events = CertificateEvents { events: metrics.events(), upstream: None };
    let name = format!("serving certificate of listener {}", listener.name());
    let mut files = FileWatch::new(tls.paths());
    let mut last_error = None;
    let mut renewal = Renewal::default();
    let expiry = metrics.certificate_expiry("serving", listener.name());
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        // A reload of the configuration may have replaced the certificate.
        expiry.set(tls.certificate().info.not_after);
        renewal.check(&name, &events, &tls);
        files.follow(tls.paths());
        if !files.changed() {
            continue;
        }
        let ServingRefresh { changed, error } = tls.refresh();
        files.set_settled(error.is_none());
        if changed {
            listener.certificate_reloaded("ok");
            let to = format!("serial {}", tls.certificate().info.serial);
            let reason = "its file, or that of the client CA, has changed";
            let effect = "new connections get it; clients are verified anew";
            events.loaded(&name, &to, reason, effect);
        }
        if let Some(error) = &error
            && last_error.as_ref() != Some(error)
        {
            listener.certificate_reloaded("failed");
            events.failed(&name, error);
        }
        last_error = error;
    }
}

/// Renews a serving certificate that this machine's own CA has issued.
#[derive(Default)]
struct Renewal {
    checked: Option<Instant>,
    last_error: Option<String>,
}

impl Renewal {
    /// Renews the certificate if it is due. The new files are loaded like any other change.
    fn check(&mut self, name: &str, events: &CertificateEvents<'_>, tls: &ServingTls) {
        if self.checked.is_some_and(|checked| checked.elapsed() < RENEWAL_CHECK) {
            return;
        }
        self.checked = Some(Instant::now());
        match tls.renew_if_due(wall_clock()) {
            Ok(None) => {}
            Ok(Some(info)) => {
                self.last_error = None;
                let to = format!("valid until {}", Utc(info.not_after).seconds());
                let reason = "two thirds of its lifetime have passed";
                events.changed(name, ("due", &to), (reason, "renewed"), false);
            }
            Err(error) => {
                if self.last_error.as_ref() != Some(&error) {
                    let effect = "the old certificate stays in use until it expires";
                    let states = ("due", "cannot be renewed");
                    events.changed(name, states, (error.as_str(), effect), true);
                    self.last_error = Some(error);
                }
            }
        }
    }
}
