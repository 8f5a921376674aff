//! Re-reads certificates, keys and CA bundles when their files change.
//!
//! A serving certificate of a CA of this machine is renewed here as well.
//! What is good is put into use; what is not leaves the last good one in place, with one log line.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, MissedTickBehavior, interval};

use super::files::Watched;
use crate::net::serving::ServingTls;
use crate::observe::ListenerMetrics;
use crate::observe::utc::Utc;
use crate::upstream::credentials::Refreshed;
use crate::upstream::pool::Upstream;

/// How often the files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often a certificate of our own is asked for its age: it is due months before its end.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(60);

/// Watches the credentials of one upstream for ever.
pub async fn watch_credentials(upstream: Arc<Upstream>) {
    let credentials = &upstream.credentials;
    // Read once more at the start: a file may have changed since it was loaded.
    let mut files = Watched::new(credentials.paths());
    files.unsettled = true;
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        files.follow(credentials.paths());
        if files.changed() {
            let events = credentials.refresh();
            files.unsettled = credentials
                .slots()
                .iter()
                .any(|slot| slot.error().is_some_and(|error| is_half_done(&error)));
            for event in events {
                tell(&upstream, &event);
            }
        }
    }
}

/// A missing file is looked at again when it appears; anything else may be the middle of a change.
fn is_half_done(error: &str) -> bool {
    !error.starts_with("awaited")
}

fn tell(upstream: &Upstream, event: &Refreshed) {
    let name = &*upstream.name;
    match event {
        Refreshed::Identity(slot) => {
            let Some(info) = slot.certificate() else { return };
            tracing::info!(
                upstream = name,
                subject = %info.subject,
                serial = info.serial,
                file = %slot.paths.cert_file.display(),
                "identity is in use; connections with an older certificate drain"
            );
        }
        Refreshed::IdentityFailed(error) => {
            tracing::warn!(
                upstream = name,
                error,
                "identity cannot be read; the last good one stays"
            );
        }
        Refreshed::Ca => tracing::info!(upstream = name, "the CA bundle has changed"),
        Refreshed::CaFailed(error) => {
            tracing::warn!(
                upstream = name,
                error,
                "CA bundle cannot be read; the last good one stays"
            );
        }
    }
}

/// Watches the serving certificate and the client CA of one listener for ever.
pub async fn watch_serving(name: String, tls: Arc<ServingTls>, metrics: Arc<ListenerMetrics>) {
    let mut files = Watched::new(tls.paths());
    let mut last_error = None;
    let mut renewal = Renewal::default();
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        renewal.look(&name, &tls);
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
                tracing::info!(listener = name, "serving certificate or client CA has changed");
            }
            Ok(false) => last_error = None,
            Err(error) => {
                let text = error.to_string();
                if last_error.as_ref() != Some(&text) {
                    metrics.certificate_reloaded("failed");
                    tracing::warn!(
                        listener = name,
                        error = text,
                        "the last good certificate stays"
                    );
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
    fn look(&mut self, name: &str, tls: &ServingTls) {
        if self.looked.is_some_and(|looked| looked.elapsed() < RENEWAL_INTERVAL) {
            return;
        }
        self.looked = Some(Instant::now());
        match tls.renew_if_due(SystemTime::now()) {
            Ok(None) => {}
            Ok(Some(info)) => {
                self.last_error = None;
                let until = Utc(info.not_after).seconds();
                tracing::info!(listener = name, until, "serving certificate renewed");
            }
            Err(error) => {
                if self.last_error.as_ref() != Some(&error) {
                    tracing::warn!(
                        listener = name,
                        error,
                        "serving certificate is due and cannot be renewed"
                    );
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
