//! Asks one endpoint for its own opinion of itself, on a connection of its own.
//!
//! Alive is not well: an apiserver that answers TCP and PING but has lost its etcd says so in
//! `/readyz`. The connection is of this module alone, so that a full pool cannot delay the
//! question and the question cannot delay a request; it is judged like every other one, and the
//! prober is what brings an ejected endpoint back.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, StatusCode, header};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::witness::Witness;
use crate::config::Readyz;
use crate::upstream::connection::Connection;
use crate::upstream::credentials::Class;
use crate::upstream::dial::dial_h2;
use crate::upstream::endpoint::{ConnectFailure, Endpoint, EndpointState, Wanted};
use crate::upstream::health::Life;
use crate::upstream::pool::{Upstream, note_failure};
use crate::upstream::readyz::failed_checks;

/// Pause between probes while an endpoint fails.
const FAILING_INTERVAL: Duration = Duration::from_secs(1);
/// Least pause between anonymous probes: an anonymous request makes the apiserver GOAWAY its
/// connection (`UnauthenticatedHTTP2DOSMitigation`), so each costs a new one.
const ANONYMOUS_INTERVAL: Duration = Duration::from_secs(30);
/// Pause between two handshakes with a server that does not speak HTTP/2, so that there is no
/// connection to listen to.
const HANDSHAKE_INTERVAL: Duration = Duration::from_secs(1);
/// Least pause before a probe on passive evidence. It doubles while the evidence turns out to be
/// nothing: an apiserver that is slow for everybody is not helped by being asked.
const EVIDENCE_PAUSE: Duration = Duration::from_millis(500);
/// Least pause before a probe that shows others whether watches may move here.
const PROOF_PAUSE: Duration = Duration::from_millis(200);
/// How often a disconnected prober looks whether it may connect.
const RECONNECT_TICK: Duration = Duration::from_millis(50);
/// Bytes of an answer that are read to tell what failed.
const MAX_ANSWER: usize = 16 * 1024;

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// It is ready, or will not tell us.
    Ready,
    /// It is not, in these words.
    NotReady(String),
    /// The connection was lost: a matter of transport, not of readiness.
    Lost,
}

/// Counts findings in a row.
#[derive(Debug, Default)]
pub struct Streak {
    good: u32,
    bad: u32,
    known: bool,
}

/// A verdict of [`Streak`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `rise` successes in a row, or the first finding of all.
    Ready,
    /// `fall` failures in a row, or the first finding of all.
    Failing,
}

impl Streak {
    /// Takes a finding in; the first of all decides alone.
    pub fn add(&mut self, ready: bool, rise: u32, fall: u32) -> Option<Verdict> {
        let first = !std::mem::replace(&mut self.known, true);
        if ready {
            self.bad = 0;
            self.good = self.good.saturating_add(1);
            (first || self.good >= rise).then_some(Verdict::Ready)
        } else {
            self.good = 0;
            self.bad = self.bad.saturating_add(1);
            (first || self.bad >= fall).then_some(Verdict::Failing)
        }
    }
}

/// Probes one endpoint until it leaves.
///
/// However a connection ends, the question is not asked again before its time: an apiserver sends
/// a GOAWAY after every anonymous or unauthorized answer, and 5,000 nodes that come back at once
/// would be a storm.
pub async fn probe(upstream: Arc<Upstream>, endpoint: Arc<Endpoint>) {
    let witness = Witness::default();
    tokio::select! {
        () = endpoint.left() => {}
        () = ask_until_it_leaves(&upstream, &endpoint, &witness) => {}
        () = witness.watch(&upstream, &endpoint) => {}
    }
}

async fn ask_until_it_leaves(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    witness: &Witness,
) {
    let mut streak = Streak::default();
    let mut connection: Option<Own> = None;
    let mut next = Instant::now();
    let mut wanted = None;
    let mut evidence_pause = EVIDENCE_PAUSE;
    while endpoint.state() != EndpointState::Leaving {
        let config = upstream.config.load_full();
        let config = &config.health.readyz;
        let replaced = || witness.replacement().map(Own);
        let kept = connection.take().or_else(replaced).filter(|c| is_current(upstream, c));
        let current = if let Some(current) = kept {
            current
        } else {
            // One that is well is not needed before the next question.
            if endpoint.is_usable() {
                sleep_until(next).await;
            }
            streak = Streak::default();
            let Some(fresh) = connect(upstream, endpoint, witness).await else { continue };
            Own(fresh)
        };
        witness.listen_to(&current);
        if !upstream.asks_readyz() {
            endpoint.readyz_not_asked("connected; /readyz is not asked without a credential");
            gone(&current).await;
            continue;
        }
        tokio::select! {
            () = sleep_until(next) => {}
            () = gone(&current) => continue,
        }
        let asked_at = Instant::now();
        let finding = {
            let token = upstream.credentials.probe_token().and_then(|token| token.header());
            let mut answer = pin!(ask(&current, config, token));
            tokio::select! {
                // After a stop of this process both are due.
                biased;
                finding = &mut answer => finding,
                () = sleep(config.timeout / 2) => {
                    doubt(upstream, endpoint);
                    answer.await
                }
            }
        };
        let on_evidence = wanted.take() == Some(Wanted::Evidence);
        evidence_pause = if on_evidence && finding == Finding::Ready {
            (evidence_pause * 2).min(config.interval)
        } else {
            EVIDENCE_PAUSE
        };
        let anonymous = !upstream.has_probe_credential();
        let failing = match &finding {
            Finding::Lost => {
                current.close("probe failed");
                next = asked_at + pause(config, true, anonymous, fastrand::f64());
                continue;
            }
            Finding::Ready => {
                endpoint.readyz_right(asked_at);
                if streak.add(true, config.rise, config.fall).is_some() {
                    endpoint.readyz_ok();
                }
                endpoint.state() != EndpointState::Ready
            }
            Finding::NotReady(why) => {
                doubt(upstream, endpoint);
                if streak.add(false, config.rise, config.fall).is_some() {
                    endpoint.readyz_failing(why);
                }
                true
            }
        };
        next = asked_at + pause(config, failing, anonymous, fastrand::f64());
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                why = endpoint.probe_wanted(), if !failing && !anonymous => {
                    let pause = match why {
                        Wanted::Evidence => evidence_pause,
                        Wanted::Proof => PROOF_PAUSE,
                    };
                    let soon = asked_at + pause.min(config.interval);
                    if soon < next {
                        (next, wanted) = (soon, Some(why));
                    }
                }
                () = gone(&current) => {
                    if current.life() == Life::Dead {
                        // Not a GOAWAY after an answer: what comes back is asked again soon.
                        let soon = asked_at + FAILING_INTERVAL.min(config.interval);
                        next = if anonymous { next } else { soon.min(next) };
                    }
                    break;
                }
            }
        }
        connection = Some(current);
    }
}

/// The prober's connection, which nobody else would close.
struct Own(Rc<Connection>);

impl std::ops::Deref for Own {
    type Target = Rc<Connection>;

    fn deref(&self) -> &Rc<Connection> {
        &self.0
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.0.drain("no longer probed");
    }
}

/// No verdict yet, but whether the others are any better is worth knowing now, once: watches may
/// want to move there.
fn doubt(upstream: &Upstream, endpoint: &Arc<Endpoint>) {
    if !endpoint.readyz_doubted(Instant::now()) {
        return;
    }
    for other in upstream.endpoints.load().iter().filter(|other| !Arc::ptr_eq(other, endpoint)) {
        other.prove_soon();
    }
}

/// Whether a connection can be asked on, and shows the certificate that is in use now.
fn is_current(upstream: &Upstream, connection: &Connection) -> bool {
    let generation = upstream.credentials.tls(Class::Probe).map(|tls| tls.generation);
    let current = generation == Some(connection.generation);
    if !current {
        connection.drain("certificate rotated");
    }
    current && connection.life() == Life::Live
}

/// Pause before the next probe; `jitter` is in 0..1.
pub fn pause(config: &Readyz, failing: bool, anonymous: bool, jitter: f64) -> Duration {
    let base = if failing { FAILING_INTERVAL.min(config.interval) } else { config.interval };
    let base = if anonymous { base.max(ANONYMOUS_INTERVAL) } else { base };
    base.mul_f64(0.8 + 0.4 * jitter)
}

async fn gone(connection: &Connection) {
    while connection.life() == Life::Live || connection.life() == Life::Suspect {
        connection.changed().await;
    }
}

async fn connect(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    witness: &Witness,
) -> Option<Rc<Connection>> {
    let tls = upstream.credentials.tls(Class::Probe)?;
    if !endpoint.may_connect(!upstream.is_usable(), Instant::now()) {
        sleep(RECONNECT_TICK).await;
        return None;
    }
    let limit = endpoint.connect_timeout(upstream.config().health.connect_timeout);
    match dial_h2(&upstream.outgoing(), endpoint, &tls.h2, limit).await {
        Ok(established) => {
            endpoint.metrics.dialled("ok");
            Some(witness.start(established, upstream, endpoint, &tls))
        }
        Err(ConnectFailure::NoH2(_)) if !upstream.config().used_by.terminate => {
            // Good enough for whoever passes connections through: TLS was done.
            endpoint.metrics.dialled("ok");
            endpoint.connected();
            endpoint.readyz_not_asked("TLS handshake only: it does not speak HTTP/2 by ALPN");
            sleep(HANDSHAKE_INTERVAL).await;
            None
        }
        Err(failure) => {
            note_failure(endpoint, &failure);
            endpoint.connect_failed(failure, Instant::now());
            None
        }
    }
}

async fn ask(connection: &Rc<Connection>, config: &Readyz, token: Option<HeaderValue>) -> Finding {
    match timeout(config.timeout, exchange(connection, config, token)).await {
        Ok(Ok(finding)) => finding,
        // No answer in time: unwell if its connection lives, else the connection's own matter.
        Err(_) if connection.life() == Life::Live => Finding::NotReady(format!(
            "{} not answered within {} ms",
            config.path,
            config.timeout.as_millis()
        )),
        Ok(Err(_)) | Err(_) => Finding::Lost,
    }
}

async fn exchange(
    connection: &Rc<Connection>,
    config: &Readyz,
    token: Option<HeaderValue>,
) -> Result<Finding, h2::Error> {
    let mut request = Request::new(());
    let target = format!("https://kubernetes.default.svc{}", config.path);
    *request.uri_mut() = target.parse().unwrap_or_default();
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static("jackstay-readyz"));
    if let Some(token) = token {
        headers.insert(header::AUTHORIZATION, token);
    }
    let mut permit = connection.reserve(false, Instant::now());
    let (response, _) = permit.open(request, true)?;
    let response = response.await?;
    permit.head_arrived(Instant::now());
    let status = response.status();
    let mut recv = response.into_body();
    let mut body = BytesMut::new();
    while let Some(data) = recv.data().await {
        let data: Bytes = data?;
        let _ = recv.flow_control().release_capacity(data.len());
        if body.len() < MAX_ANSWER {
            body.extend_from_slice(&data);
        }
    }
    permit.finished();
    Ok(judge(status, &String::from_utf8_lossy(&body), &config.path))
}

/// What an answer says. 401 and 403 say that we may not know, which is no reason to avoid it.
pub fn judge(status: StatusCode, body: &str, path: &str) -> Finding {
    match status {
        StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Finding::Ready,
        _ => {
            let detail = failed_checks(body);
            Finding::NotReady(format!("{path} answers {}{detail}", status.as_u16()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_finding_decides_and_then_it_takes_a_row() {
        let mut streak = Streak::default();
        assert_eq!(streak.add(true, 2, 2), Some(Verdict::Ready));
        assert_eq!(streak.add(false, 2, 2), None);
        assert_eq!(streak.add(true, 2, 2), None);
        assert_eq!(streak.add(false, 2, 2), None);
        assert_eq!(streak.add(false, 2, 2), Some(Verdict::Failing));
        assert_eq!(streak.add(false, 2, 2), Some(Verdict::Failing));
        assert_eq!(streak.add(true, 2, 2), None);
        assert_eq!(streak.add(true, 2, 2), Some(Verdict::Ready));
        assert_eq!(Streak::default().add(false, 2, 2), Some(Verdict::Failing));
    }

    #[test]
    fn answers() {
        let judge =
            |code: u16, body: &str| judge(StatusCode::from_u16(code).unwrap(), body, "/readyz");
        assert_eq!(judge(200, "ok"), Finding::Ready);
        assert_eq!(judge(401, ""), Finding::Ready);
        assert_eq!(judge(403, ""), Finding::Ready);
        assert_eq!(
            judge(500, "[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed"),
            Finding::NotReady("/readyz answers 500: etcd".into())
        );
        assert_eq!(judge(404, "no"), Finding::NotReady("/readyz answers 404".into()));
    }

    #[test]
    fn pauses() {
        let config = Readyz {
            path: "/readyz".into(),
            interval: Duration::from_secs(10),
            timeout: Duration::from_secs(1),
            rise: 2,
            fall: 2,
            cert: None,
            token_file: None,
        };
        assert_eq!(pause(&config, false, false, 0.0), Duration::from_secs(8));
        assert_eq!(pause(&config, false, false, 1.0), Duration::from_secs(12));
        assert_eq!(pause(&config, true, false, 0.5), Duration::from_secs(1));
        assert_eq!(pause(&config, true, true, 0.5), Duration::from_secs(30));
        let quick = Readyz { interval: Duration::from_millis(200), ..config };
        assert_eq!(pause(&quick, true, false, 0.5), Duration::from_millis(200));
    }
}
