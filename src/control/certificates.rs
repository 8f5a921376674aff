//! Reloads certificates, keys, CA bundles and tokens when their files change, and renews serving
//! certificates that this machine's own CA has issued.
//!
//! Valid files are put into use. While a file is invalid, its last valid content stays in use. Changes and
//! failures are reported in the log and in `/events`, and so is the expiry of a certificate in use.

mod expiry_watch;
mod late_renewal;
mod series;
mod skipped_watch;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jackstay_net::tls::ca_bundle::CaBundle;
use jackstay_net::tls::certificate::{VERSION_1, VERSION_1_EFFECT, Validity};
use jackstay_net::tls::serving::{ServingRefresh, ServingTls};
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};

use self::expiry_watch::{ExpiryWatch, ValidityChange, WatchedCertificate};
use self::late_renewal::LateRenewal;
use self::series::CertificateSeries;
use self::skipped_watch::{SkippedByName, SkippedChange, SkippedWatch};
use super::file_watch::{FileWatch, poll_ticks};
use crate::observe::events::{Change, EventKind, Events};
use crate::observe::{ListenerMetrics, Metrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::{CredentialChange, IdentitySlot, is_superseded};

/// Interval of the checks whether a certificate is due for renewal. It is due when a third of its lifetime
/// is left, so a delay of one interval does not matter.
const RENEWAL_CHECK: Duration = Duration::from_secs(60);
/// The name of the CA bundle of an upstream in events.
const CA_BUNDLE: &str = "CA bundle of the apiservers";
/// The name of the token for probes in events.
const PROBE_TOKEN: &str = "token for /readyz";
/// The state of a file whose content is in use.
const IN_USE: &str = "in use";
/// The state of a file that could not be read again. Its last valid content stays in use.
const FAILED: &str = "reload failed";

/// The state of a file of which some certificates are not read.
const IN_PART: &str = "in use in part";

/// Reloads the credentials of one upstream until the future is dropped.
pub async fn watch_credentials(upstream: Arc<Upstream>) {
    let credentials = &upstream.credentials;
    // A file may have changed since it was loaded at the start.
    let mut files = FileWatch::unread(credentials.paths());
    let mut metrics = CertificateSeries::default();
    let (mut validity, mut skipped) = (ExpiryWatch::default(), SkippedWatch::default());
    let events = CertificateEvents::new(upstream.metrics.events(), Some(&upstream.name));
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        // A reload of the configuration may have replaced the credentials.
        metrics.update(series::of_upstream(&upstream), &upstream.metrics);
        for change in validity.update(watched_credentials(&upstream), wall_clock()) {
            // The check of a configuration has logged those that were not valid when it was read.
            events.validity(&change, change.from.is_some());
        }
        events.skipped(skipped.update(skipped_of_upstream(&upstream)));
        files.follow(credentials.paths());
        if files.changed() {
            let changes = credentials.refresh();
            metrics.update(series::of_upstream(&upstream), &upstream.metrics);
            let identity_failed = credentials.slots().iter().any(|slot| slot.is_invalid());
            let token_failed =
                credentials.probe_token().is_some_and(|token| token.error().is_some());
            let ca_failed = credentials.has_ca_error();
            files.set_settled(!identity_failed && !token_failed && !ca_failed);
            for change in changes {
                report(&events, &change);
            }
            events.skipped(skipped.update(skipped_of_upstream(&upstream)));
            events.report_restored(&failures(&upstream));
            for change in validity.update(watched_credentials(&upstream), wall_clock()) {
                events.validity(&change, true);
            }
        }
    }
}

/// The names of the credentials of an upstream in events, and whether the content of their files is not in use.
fn failures(upstream: &Upstream) -> Vec<(String, bool)> {
    let credentials = &upstream.credentials;
    let slots = credentials.slots();
    let identities = slots.iter().map(|slot| (slot.source.to_string(), slot.has_file_error()));
    let ca = (CA_BUNDLE.to_owned(), credentials.has_ca_error());
    let token = credentials.probe_token();
    let token = token.map(|token| (PROBE_TOKEN.to_owned(), token.error().is_some()));
    identities.chain([ca]).chain(token).collect()
}

/// The slots of an upstream except those whose subject is served with the certificate of another one: their expiry has
/// no effect.
fn slots_in_use(upstream: &Upstream) -> Vec<Arc<IdentitySlot>> {
    let (mut slots, now) = (upstream.credentials.slots(), wall_clock());
    let all = slots.clone();
    slots.retain(|slot| !is_superseded(slot, &all, now));
    slots
}

/// The certificates of the identities and of the CA bundle of an upstream.
fn watched_credentials(upstream: &Upstream) -> Vec<WatchedCertificate> {
    let identities = slots_in_use(upstream).into_iter().filter_map(|slot| {
        Some(WatchedCertificate {
            name: slot.source.to_string(),
            info: slot.certificate()?,
            effect: "the identity is not used until the file is renewed; its clients get 401",
        })
    });
    let bundle = upstream.credentials.ca_bundle();
    let authorities = bundle.map(|(bundle, _)| watched_bundle(CA_BUNDLE, &bundle));
    identities.chain(authorities.into_iter().flatten()).collect()
}

/// What is not read of the CA bundle of an upstream, and of its identities.
fn skipped_of_upstream(upstream: &Upstream) -> SkippedByName {
    let slots = upstream.credentials.slots();
    let identities = slots.iter().filter_map(|slot| {
        let certificate = slot.loaded()?;
        Some((slot.source.to_string(), certificate.skipped.clone()))
    });
    let bundle = upstream.credentials.ca_bundle();
    let bundle =
        bundle.map(|(bundle, _)| (bundle_name(CA_BUNDLE, &bundle), bundle.skipped.clone()));
    identities.chain(bundle).collect()
}

fn bundle_name(name: &str, bundle: &CaBundle) -> String {
    format!("{name} {}", bundle.file.display())
}

/// The certificates of a CA bundle.
fn watched_bundle(name: &str, bundle: &CaBundle) -> Vec<WatchedCertificate> {
    let effect = match bundle.all_expired(wall_clock()) {
        Some(_) => "every certificate of the bundle has expired: renew the CA file",
        None => "it verifies no certificate any more",
    };
    let certificates = bundle.certificates.iter();
    certificates
        .map(|info| WatchedCertificate {
            name: format!("{}, {}", bundle_name(name, bundle), info.subject),
            info: info.clone(),
            effect,
        })
        .collect()
}

fn report(events: &CertificateEvents<'_>, change: &CredentialChange) {
    match change {
        CredentialChange::Identity(slot) => {
            let Some(info) = slot.certificate() else { return };
            if info.validity(wall_clock()) == Validity::Expired {
                return; // `CertificateEvents::validity` reports it
            }
            let name = slot.source.to_string();
            let serial = format!("serial {}", info.serial);
            let reason = format!("the file has changed: {}", info.subject);
            if info.is_version_1 {
                let reason = format!("{reason}: {VERSION_1}");
                let states = (events.forget_failure(&name), serial.as_str());
                return events.changed(&name, states, (&reason, VERSION_1_EFFECT), true);
            }
            let effect = "identity is in use for new connections; the others drain when an apiserver accepts it";
            events.loaded(&name, &serial, &reason, effect);
        }
        CredentialChange::Replaced(slot, before) => {
            let Some(info) = slot.certificate() else { return };
            let name = slot.source.to_string();
            events.forget_failure(&name);
            let (before, after) = (before.to_string(), info.subject.to_string());
            let effect = "clients with the old subject get 401; their connections drain";
            let reason = "the file names another subject";
            events.changed(&name, (&before, &after), (reason, effect), true);
        }
        CredentialChange::IdentityFailed(slot, error) => {
            events.failed(&slot.source.to_string(), error);
        }
        CredentialChange::Ca => events.loaded(
            CA_BUNDLE,
            "new content",
            "the file has changed",
            "new connections are verified with it; the others drain when one is accepted",
        ),
        CredentialChange::CaFailed(error) => events.failed(CA_BUNDLE, error),
        CredentialChange::TokenFailed(error) => events.failed(PROBE_TOKEN, error),
    }
}

/// Reports changes of certificates in the log and in `/events`.
struct CertificateEvents<'a> {
    events: &'a Events,
    upstream: Option<&'a str>,
    /// The names whose last reported state is [`FAILED`].
    failed: RefCell<BTreeSet<String>>,
}

impl<'a> CertificateEvents<'a> {
    fn new(events: &'a Events, upstream: Option<&'a str>) -> Self {
        Self { events, upstream, failed: RefCell::default() }
    }

    /// Reports that a certificate has expired, is not valid yet, or has become valid.
    fn validity(&self, change: &ValidityChange, logged: bool) {
        let WatchedCertificate { name, info, effect } = &change.certificate;
        let until = format!(
            "valid from {} to {}",
            Utc(info.not_before).seconds(),
            Utc(info.not_after).seconds()
        );
        let reason = format!("{}: {until}", info.subject);
        let (to, effect) = match change.to {
            Validity::Valid => ("valid", "it is used"),
            Validity::NotYet => ("not yet valid", "it is used; is this machine's clock right?"),
            Validity::Expired => ("expired", *effect),
        };
        let from = if change.from == Some(Validity::NotYet) { "not yet valid" } else { "in use" };
        let bad = change.to != Validity::Valid;
        let change = self.change(name, (from, to), (&reason, effect), bad);
        if logged { self.events.changed(&change) } else { self.events.remember(&change) }
    }

    /// Reports the certificates of a file that are not read, or that all of them are read again.
    fn skipped(&self, changes: Vec<SkippedChange>) {
        for SkippedChange { name, from, to } in changes {
            let was_in_part = from.as_ref().is_some_and(|from| !from.is_empty());
            let before = if was_in_part { IN_PART } else { IN_USE };
            let reason = to.join("; ");
            let change = if to.is_empty() {
                let reason = ("every certificate of the file is read", "all of them are in use");
                self.change(&name, (before, IN_USE), reason, false)
            } else {
                let effect = "the other certificates of the file are in use";
                self.change(&name, (before, IN_PART), (&reason, effect), true)
            };
            // The check of a configuration has logged what was not read of a file that is new in it.
            if from.is_some() {
                self.events.changed(&change);
            } else {
                self.events.remember(&change);
            }
        }
    }

    fn loaded(&self, name: &str, to: &str, reason: &str, effect: &str) {
        self.changed(name, (self.forget_failure(name), to), (reason, effect), false);
    }

    fn failed(&self, name: &str, error: &str) {
        let is_new = self.failed.borrow_mut().insert(name.to_owned());
        let states = (if is_new { IN_USE } else { FAILED }, FAILED);
        self.changed(name, states, (error, "the last valid content stays in use"), true);
    }

    /// The last reported state of `name`, which becomes [`IN_USE`].
    fn forget_failure(&self, name: &str) -> &'static str {
        if self.failed.borrow_mut().remove(name) { FAILED } else { IN_USE }
    }

    /// Reports names that were reported as failed and have not failed any more. `now` has every configured name, and
    /// whether it has failed.
    fn report_restored(&self, now: &[(String, bool)]) {
        let mut restored = std::mem::take(&mut *self.failed.borrow_mut());
        for (name, _) in now.iter().filter(|(_, has_failed)| *has_failed) {
            if restored.remove(name) {
                self.failed.borrow_mut().insert(name.clone());
            }
        }
        // Others are no longer configured.
        restored.retain(|name| now.iter().any(|(configured, _)| configured == name));
        for name in restored {
            let reason = "the files are readable and valid again";
            self.changed(&name, (FAILED, IN_USE), (reason, "their content is in use"), false);
        }
    }

    /// Reports a serving certificate that should have been renewed by now.
    fn late(&self, name: &str, end: SystemTime) {
        let to = format!("not renewed, expires {}", Utc(end).seconds());
        let reason = "less than a twentieth of its lifetime is left";
        let effect =
            "renew it; `jackstay kubeconfig --renew` says why a local CA is not renewed yet";
        self.changed(name, (IN_USE, &to), (reason, effect), true);
    }

    /// Reports a change of the state of `name`, with its reason and effect.
    fn changed(
        &self,
        name: &str,
        (from, to): (&str, &str),
        (reason, effect): (&str, &str),
        bad: bool,
    ) {
        self.events.changed(&self.change(name, (from, to), (reason, effect), bad));
    }

    fn change<'b>(
        &self,
        name: &'b str,
        (from, to): (&'b str, &'b str),
        (reason, effect): (&'b str, &'b str),
        bad: bool,
    ) -> Change<'b>
    where
        'a: 'b,
    {
        let (kind, upstream) = (EventKind::Certificate, self.upstream);
        Change { kind, upstream, name, detail: "", from, to, reason, effect, bad }
    }
}

/// The serving certificate of a listener and the certificates of its client CA.
fn watched_serving(tls: &ServingTls, name: &str, client_ca: &str) -> Vec<WatchedCertificate> {
    let mut certificates = vec![WatchedCertificate {
        name: name.to_owned(),
        info: tls.certificate().info.clone(),
        effect: "it is still served: clients decide",
    }];
    if let Some(bundle) = tls.client_ca().as_ref().and_then(|ca| ca.bundle()) {
        certificates.extend(watched_bundle(client_ca, bundle));
    }
    certificates
}

/// What is not read of the client CA of a listener, and of its serving certificate.
fn skipped_of_listener(tls: &ServingTls, name: &str, client_ca: &str) -> SkippedByName {
    let mut skipped = SkippedByName::from([(name.to_owned(), tls.certificate().skipped.clone())]);
    if let Some(bundle) = tls.client_ca().as_ref().and_then(|ca| ca.bundle()) {
        skipped.insert(bundle_name(client_ca, bundle), bundle.skipped.clone());
    }
    skipped
}

/// Reloads the serving certificate and the client CA of one listener, and renews the certificate,
/// until the future is dropped.
pub async fn watch_serving(
    tls: Arc<ServingTls>,
    listener: Arc<ListenerMetrics>,
    metrics: Arc<Metrics>,
) {
    let events = CertificateEvents::new(metrics.events(), None);
    let name = format!("serving certificate of listener {}", listener.name());
    let client_ca = format!("client CA bundle of listener {}", listener.name());
    let mut files = FileWatch::unread(tls.paths());
    let mut last_error = None;
    let (mut renewal, mut late) = (Renewal::default(), LateRenewal::default());
    if tls.has_issuer() {
        tracing::warn!(
            listener = listener.name(),
            "this process can read the key of the CA in tls.issuer; `jackstay kubeconfig --mode terminate` \
             creates a CA whose key is not stored"
        );
    }
    let mut shown = CertificateSeries::default();
    let (mut validity, mut skipped) = (ExpiryWatch::default(), SkippedWatch::default());
    let watched = || watched_serving(&tls, &name, &client_ca);
    let not_read = || skipped_of_listener(&tls, &name, &client_ca);
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        // A reload of the configuration may have replaced the certificate.
        shown.update(series::of_listener(&tls, listener.name()), &metrics);
        for change in validity.update(watched(), wall_clock()) {
            // The check of a configuration has logged one that was not valid when it was read.
            events.validity(&change, change.from.is_some());
        }
        events.skipped(skipped.update(not_read()));
        renewal.check(&name, &events, &tls);
        if let Some(end) = late.update(&tls.certificate().info, wall_clock()) {
            events.late(&name, end);
        }
        files.follow(tls.paths());
        if !files.changed() {
            continue;
        }
        let ServingRefresh { changed, error } = tls.refresh();
        shown.update(series::of_listener(&tls, listener.name()), &metrics);
        files.set_settled(error.is_none());
        if changed {
            listener.certificate_reloaded("ok");
            let to = format!("serial {}", tls.certificate().info.serial);
            let reason = "its file, or that of the client CA, has changed";
            let effect =
                "new connections use the new files; client certificates are verified again";
            events.loaded(&name, &to, reason, effect);
            for change in validity.update(watched(), wall_clock()) {
                events.validity(&change, true);
            }
            events.skipped(skipped.update(not_read()));
        }
        if let Some(error) = &error
            && (changed || last_error.as_ref() != Some(error))
        {
            listener.certificate_reloaded("failed");
            events.failed(&name, error);
        }
        events.report_restored(&[(name.clone(), error.is_some())]);
        last_error = error;
    }
}

/// Renews a serving certificate that this machine's own CA has issued.
#[derive(Default)]
struct Renewal {
    last_check: Option<Instant>,
    last_error: Option<String>,
}

impl Renewal {
    /// Renews the certificate if it is due. The new file is then loaded like any other changed file.
    fn check(&mut self, name: &str, events: &CertificateEvents<'_>, tls: &ServingTls) {
        if self.last_check.is_some_and(|at| clock::elapsed(at) < RENEWAL_CHECK) {
            return;
        }
        self.last_check = Some(clock::now());
        match tls.renew_if_due(wall_clock()) {
            Ok(None) => {}
            Ok(Some(info)) => {
                self.last_error = None;
                let to = format!("valid until {}", Utc(info.not_after).seconds());
                let reason = "two thirds of its lifetime have passed";
                events.changed(name, ("due", &to), (reason, "renewed"), false);
            }
            Err(error) => {
                let error = error.to_string();
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

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;
    use jackstay_config::CertPaths;
    use jackstay_net::loaded_files::LoadedFiles;

    /// Writes a self-signed certificate that expires at the start of `year`, and its key.
    fn write_certificate(paths: &CertPaths, year: i32) {
        let mut params = CertificateParams::new(vec!["node".into()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = KeyPair::generate().unwrap();
        std::fs::write(&paths.cert_file, params.self_signed(&key).unwrap().pem()).unwrap();
        std::fs::write(&paths.key_file, key.serialize_pem()).unwrap();
    }

    #[test]
    fn certificate_series_follow_reloaded_files_and_a_reloaded_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let paths = |name: &str| CertPaths {
            cert_file: dir.path().join(format!("{name}.crt")),
            key_file: dir.path().join(format!("{name}.key")),
        };
        let (ca, first, second) = (paths("ca"), paths("first"), paths("second"));
        write_certificate(&ca, 2100);
        write_certificate(&first, 2101);
        write_certificate(&second, 2102);
        let mut config = crate::control::discovery::tests::config();
        config.tls.ca_file = Some(ca.cert_file);
        let metrics = Metrics::new();
        let upstream = Upstream::load(config.clone(), &[first.clone().into()], &metrics);
        let mut series = CertificateSeries::default();
        // The years in which the certificates of the metrics expire, by kind.
        let mut exported = || {
            series.update(series::of_upstream(&upstream), &metrics);
            let page = metrics.render();
            let mut years: Vec<(String, u64)> = page
                .lines()
                .filter(|line| line.starts_with("jackstay_certificate_expiry_timestamp_seconds{"))
                .map(|line| {
                    let (series, value) = line.rsplit_once(' ').unwrap();
                    let kind = series.split('"').nth(1).unwrap();
                    let year = 1970.0 + value.parse::<f64>().unwrap() / (365.2425 * 86_400.0);
                    (kind.to_owned(), year.round() as u64)
                })
                .collect();
            years.sort();
            years
        };
        let expected =
            |identity| vec![("identity".to_owned(), identity), ("upstream_ca".to_owned(), 2100)];
        assert_eq!(exported(), expected(2101));
        write_certificate(&first, 2103);
        upstream.credentials.refresh();
        assert_eq!(exported(), expected(2103));
        // A file that cannot be used, and one whose content is in use.
        std::fs::write(&first.cert_file, "").unwrap();
        upstream.credentials.refresh();
        assert_eq!(exported(), expected(2103));
        let page = metrics.render();
        let reloads = page.lines().filter_map(|line| {
            let line = line.strip_prefix("jackstay_certificate_last_reload_successful{kind=\"")?;
            Some((line.split('"').next()?, line.rsplit(' ').next()?))
        });
        assert_eq!(reloads.collect::<Vec<_>>(), [("identity", "0"), ("upstream_ca", "1")]);
        // A reloaded configuration names another identity.
        let identities = [second.into()];
        let prepared = upstream
            .credentials
            .prepare(&config, &identities, &mut LoadedFiles::default())
            .unwrap();
        upstream.credentials.install(prepared);
        upstream.credentials.retire(&identities);
        assert_eq!(exported(), expected(2102));
    }

    /// The changes of `name` in the events, once the files were polled again.
    async fn polled_changes(metrics: &Metrics, name: &str) -> Vec<(String, String, bool)> {
        // The clock is paused.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let events = metrics.events().last(usize::MAX).into_iter();
        let events = events.filter(|event| event.name.ends_with(name));
        events.map(|event| (event.from, event.to, event.bad)).collect()
    }

    fn expected(changes: &[(&str, &str)]) -> Vec<(String, String, bool)> {
        let change = |(from, to): &(&str, &str)| ((*from).into(), (*to).into(), *to == FAILED);
        changes.iter().map(change).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn watch_credentials_reports_that_restored_files_are_in_use_again() {
        let dir = tempfile::tempdir().unwrap();
        let paths = |name: &str| CertPaths {
            cert_file: dir.path().join(format!("{name}.crt")),
            key_file: dir.path().join(format!("{name}.key")),
        };
        let (ca, identity) = (paths("ca"), paths("identity"));
        let token = dir.path().join("token");
        write_certificate(&ca, 2100);
        write_certificate(&identity, 2100);
        std::fs::write(&token, "t").unwrap();
        let mut config = crate::control::discovery::tests::config();
        config.tls.ca_file = Some(ca.cert_file.clone());
        config.health.readyz.token_file = Some(token.clone());
        let metrics = Metrics::new();
        let upstream = Upstream::load(config, &[identity.clone().into()], &metrics);
        let watch = watch_credentials(Arc::clone(&upstream));
        let checks = async {
            for (file, name) in [
                (&identity.cert_file, "identity.crt"),
                (&identity.key_file, "identity.crt"),
                (&ca.cert_file, CA_BUNDLE),
                (&token, PROBE_TOKEN),
            ] {
                let content = std::fs::read(file).unwrap();
                let before = polled_changes(&metrics, name).await.len();
                for _ in 0..2 {
                    std::fs::remove_file(file).unwrap();
                    polled_changes(&metrics, name).await;
                    std::fs::write(file, &content).unwrap();
                    polled_changes(&metrics, name).await;
                }
                let changes = polled_changes(&metrics, name).await;
                let once = [(IN_USE, FAILED), (FAILED, IN_USE)];
                assert_eq!(changes[before..], expected(&[once, once].concat()), "{file:?}");
            }
            // With another content.
            let before = polled_changes(&metrics, "identity.crt").await.len();
            std::fs::write(&identity.cert_file, "").unwrap();
            polled_changes(&metrics, "identity.crt").await;
            write_certificate(&identity, 2101);
            let changes = polled_changes(&metrics, "identity.crt").await;
            let serial =
                format!("serial {}", upstream.credentials.slots()[0].certificate().unwrap().serial);
            let last = [(IN_USE, FAILED), (FAILED, &*serial)];
            assert_eq!(changes[before..], expected(&last));
        };
        tokio::select! {
            () = watch => {}
            () = checks => {}
        }
    }
}
