//! Probes an endpoint without a credential for `/readyz`.
//!
//! After an anonymous request kube-apiserver sends GOAWAY on its connection
//! (`UnauthenticatedHTTP2DOSMitigation`, on by default), so PINGs on that connection can no longer show
//! that the endpoint lives. The prober therefore opens a new connection before it sends a probe on the
//! old one:
//!
//! | connection | carries | ends |
//! |---|---|---|
//! | current | PINGs: while they are answered the endpoint counts as ready | becomes the previous one when a new one is opened |
//! | previous | one anonymous `/readyz` request, if a listener terminates TLS (`mode: terminate`) | after the response; its end is not reported |
//!
//! A new connection is opened every 30 s or less often ([`anonymous_pause`]), and sooner while the endpoint is not ready
//! ([`ANONYMOUS_PAUSES_NOT_READY`]). Without that it would be
//! closed after 90 s, as Go's server does with a connection without requests (kube-apiserver's
//! `IdleTimeout`). An anonymous probe fails if its status is not 200, 401 or 403, if its response is late on a live
//! connection, or if a 401 or 403 is that of an apiserver that is starting ([`jackstay_core::probe::answers`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::backoff::Backoff;
use jackstay_core::probe::schedule::{ANONYMOUS_PAUSES_NOT_READY, ResultStreak, anonymous_pause};
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;
use tokio::time::{sleep, sleep_until};

use super::connection::{ProbeConnection, connect};
use super::reachability::ReachabilityCheck;
use super::request::{request_probes_of_others, send_probe};
use super::version::VersionReader;
use crate::upstream::Upstream;
use crate::upstream::connection::ConnectionState;
use crate::upstream::credentials::IdentityState;
use crate::upstream::endpoint::{Endpoint, Observation, ProbeCredential};
use crate::upstream::readyz_question::ReadyzResult;

/// Interval of the checks whether a credential has been loaded.
const CREDENTIAL_CHECK: Duration = Duration::from_secs(1);

/// Probes one endpoint without a credential.
#[derive(Debug)]
pub struct AnonymousProber {
    streak: ResultStreak,
    /// Why anonymous probes fail, if they do.
    failure: Option<String>,
    /// When the connection is replaced and the next probe is sent.
    next_probe: Instant,
    /// The pauses while the endpoint is not ready.
    not_ready: Backoff,
}

impl AnonymousProber {
    /// A prober that sends its first probe `now`.
    pub fn new(now: Instant) -> Self {
        Self {
            streak: ResultStreak::default(),
            failure: None,
            next_probe: now,
            not_ready: ANONYMOUS_PAUSES_NOT_READY,
        }
    }

    /// Forgets all results, after the connection was lost: the apiserver may have been restarted.
    pub fn reset(&mut self) {
        self.streak = ResultStreak::default();
        self.failure = None;
        self.not_ready.reset();
    }

    fn report(&self, upstream: &Upstream, endpoint: &Endpoint) {
        match &self.failure {
            Some(why) => endpoint.observe(Observation::ReadyzFailing(why)),
            None => endpoint.observe(Observation::ReadyzNotProbed(why_unknown(upstream))),
        }
    }

    /// Probes until a credential is loaded or the current connection has ended. Starts with
    /// `current` and returns the connection to continue with.
    pub async fn run(
        &mut self,
        upstream: &Arc<Upstream>,
        endpoint: &Arc<Endpoint>,
        reachability: &ReachabilityCheck,
        mut current: ProbeConnection,
    ) -> ProbeConnection {
        loop {
            self.report(upstream, endpoint);
            tokio::select! {
                () = current.until_unusable() => return current,
                () = sleep(CREDENTIAL_CHECK) => {}
                () = sleep_until(self.next_probe.into()) => {}
            }
            if upstream.has_probe_credential() {
                return current;
            }
            // A suspect connection is not replaced before it is live again or dead.
            if clock::now() >= self.next_probe && current.state() == ConnectionState::Live {
                let config = Arc::clone(&upstream.config());
                self.next_probe =
                    clock::now() + anonymous_pause(config.health.readyz.interval, fastrand::f64());
                let Some(new) = connect(upstream, endpoint, reachability).await else { continue };
                reachability.set_connection(&new);
                let previous = std::mem::replace(&mut current, new);
                previous.set_end_expected(true);
                // The connection of the next probe may lead to another process, behind a load balancer.
                endpoint.update_probe_answers(ProbeCredential::Anonymous, |answers| {
                    answers.connected(false);
                });
                if config.used_by.terminate {
                    self.send(upstream, endpoint, &previous).await;
                }
            }
        }
    }

    /// Sends a probe on `connection`, which the apiserver is expected to close afterwards.
    async fn send(
        &mut self,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
        connection: &ProbeConnection,
    ) {
        let config = Arc::clone(&upstream.config());
        let config = &config.health.readyz;
        let sent_at = clock::now();
        // The apiserver sends GOAWAY after the first of the two, and answers both.
        let mut version = VersionReader::default();
        let (result, ()) = tokio::join!(
            send_probe(upstream, connection, config, (ProbeCredential::Anonymous, None), false),
            version.read_if_due(endpoint, connection, None, config.timeout / 2),
        );
        let is_starting = matches!(result, ReadyzResult::Starting(_));
        match result {
            ReadyzResult::ConnectionLost => {}
            ReadyzResult::Ready | ReadyzResult::Refused => {
                endpoint.note_probe_ok(sent_at);
                if self.streak.record(true, config.rise, config.fall) {
                    self.failure = None;
                }
                self.not_ready.reset();
            }
            ReadyzResult::Starting(why) | ReadyzResult::NotReady(why) => {
                request_probes_of_others(upstream, endpoint);
                if is_starting {
                    // The next result decides alone.
                    self.streak = ResultStreak::default();
                    self.failure = Some(why);
                } else if self.streak.record(false, config.rise, config.fall) {
                    self.failure = Some(why);
                }
            }
        }
        if self.failure.is_some() {
            self.not_ready.failed();
            let soon = clock::now() + self.not_ready.pause_at(fastrand::f64());
            self.next_probe = self.next_probe.min(soon);
        }
    }
}

/// Why the readiness of the endpoints is unknown, and which setting changes that.
fn why_unknown(upstream: &Upstream) -> &'static str {
    if !upstream.config().used_by.terminate {
        "connected; /readyz is not probed without a credential"
    } else if upstream.credentials.probe_token().is_some() {
        "readiness unknown: readyz.token_file cannot be read"
    } else {
        let now = wall_clock();
        let slots = upstream.credentials.slots();
        let expired = slots.iter().filter(|slot| slot.state(now) == IdentityState::Expired).count();
        match (slots.len(), expired) {
            (0, _) => "readiness unknown: set readyz.token_file",
            (_, 0) => {
                "readiness unknown: no identity is loaded yet, and readyz.token_file is not set"
            }
            (1, _) => {
                "readiness unknown: the identity has expired, and readyz.token_file is not set"
            }
            _ => {
                "readiness unknown: every identity has expired or is not loaded yet, and \
                 readyz.token_file is not set"
            }
        }
    }
}
