//! Compares the watch cache of one endpoint with those of the others, and asks about its version on suspicion
//! ([`jackstay_core::lag`]).

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::StatusCode;
use jackstay_core::backoff::Backoff;
use jackstay_core::lag::{
    DeliveryPace, Expectations, Expected, Lag, Reference, ResourceView, TICK, current_of_too_large,
    question,
};
use jackstay_sys::clock;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::request::fetch;
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, EndpointState, Observation, ProbeTrigger};
use crate::upstream::resource_versions::{ResourceRecord, group_of};

/// Limit of a question. kube-apiserver waits 3 s for its cache (`blockTimeout` in `watch_cache.go`).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a question about a resource. It doubles with each one that finds the known state again.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two questions about a resource while the endpoint does not lag: a selector may hide events for
/// ever.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Longest pause between two questions while it lags.
const MAX_LAGGING_PAUSE: Duration = Duration::from_secs(10);

/// Compares one endpoint with the others.
#[derive(Debug, Default)]
pub struct LagCheck {
    connection: RefCell<Weak<Connection>>,
}

/// The answer about a version.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Reached,
    Behind(u64),
    /// The credential of the prober may not ask about this resource.
    Refused,
    Unknown,
}

impl LagCheck {
    /// Asks on `connection` from now on.
    pub fn set_connection(&self, connection: &Rc<Connection>) {
        *self.connection.borrow_mut() = Rc::downgrade(connection);
    }

    /// Compares every [`TICK`], until the future is dropped. An answer may take longer.
    pub async fn run(&self, upstream: &Arc<Upstream>, endpoint: &Arc<Endpoint>) {
        let mut pace = DeliveryPace::default();
        let mut inquiry = Inquiry::default();
        let mut asked: Option<LocalBoxFuture<'_, (Expected, Answer)>> = None;
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some((expected, answer)) = async { Some(asked.as_mut()?.await) } => {
                    asked = None;
                    inquiry.record(expected, answer, upstream, endpoint);
                    continue;
                }
                _ = ticks.tick() => {}
            }
            let (views, now) = (views(upstream, endpoint), clock::now());
            if pace.observe(&views, now) {
                endpoint.probe.request(ProbeTrigger::PassiveEvidence);
            }
            let due = inquiry.due(&views, now);
            if asked.is_some() {
                continue;
            }
            let is_ready = endpoint.state() == EndpointState::Ready || inquiry.lag.is_some();
            let connection = self.connection.borrow().upgrade().filter(|_| is_ready);
            let live = connection.filter(|c| c.state() == ConnectionState::Live);
            if let (Some(expected), Some(connection)) = (due, live) {
                let answer = async move {
                    let answer = ask(upstream, &connection, &expected).await;
                    (expected, answer)
                };
                asked = Some(answer.boxed_local());
            }
        }
    }
}

/// Which question about an endpoint is due, and what the answers have shown.
#[derive(Default)]
struct Inquiry {
    expectations: Expectations,
    /// Resources about which the credential of the prober may not ask.
    refused: HashSet<Arc<str>>,
    lag: Option<Lag>,
    /// The pauses after questions about each resource, and when the last one ends.
    pauses: HashMap<Arc<str>, (Backoff, Instant)>,
}

impl Inquiry {
    /// The version about which the endpoint is asked now, if any.
    fn due(&mut self, views: &[ResourceView], now: Instant) -> Option<Expected> {
        let of_lag = self.lag.as_ref().map(|lag| Arc::clone(&lag.expected.resource));
        self.pauses.retain(|resource, _| {
            of_lag.as_ref() == Some(resource) || views.iter().any(|v| v.resource == *resource)
        });
        let pauses = &self.pauses;
        let is_over = |resource: &str| pauses.get(resource).is_none_or(|(_, end)| now >= *end);
        let can_be_asked = |resource: &str| {
            question(resource, 0).is_some() && !self.refused.contains(resource) && is_over(resource)
        };
        let late = self.expectations.observe(views, can_be_asked, now);
        match &self.lag {
            Some(lag) => Some(lag.expected.clone()).filter(|lag| is_over(&lag.resource)),
            None => late,
        }
    }

    /// Takes in an answer, and reports what it shows.
    fn record(
        &mut self,
        expected: Expected,
        answer: Answer,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) {
        let now = clock::now();
        let resource = Arc::clone(&expected.resource);
        let changed = match (answer, &mut self.lag) {
            (Answer::Behind(current), None) => {
                let new = Lag::new(expected, current, now);
                report(upstream, endpoint, &new.reason(now), now);
                self.lag = Some(new);
                true
            }
            (Answer::Behind(current), Some(lag)) => {
                let is_other_etcd = lag.is_at(current, now);
                let reason = lag.reason(now);
                if is_other_etcd {
                    let (name, label) = (&*upstream.name, &*endpoint.label);
                    tracing::warn!(upstream = name, endpoint = label, reason, "endpoint lags");
                }
                endpoint.observe(Observation::Lagging { reason: &reason, at: now });
                false
            }
            (Answer::Reached | Answer::Refused, lag @ Some(_)) => {
                *lag = None;
                endpoint.observe(Observation::CaughtUp);
                true
            }
            (Answer::Reached, None) => {
                if let Some(record) = upstream.resource_versions.record(&expected.resource) {
                    record.raise(&record.shown_by(endpoint), expected.version, now);
                }
                false
            }
            (Answer::Refused, None) => {
                self.refused.insert(expected.resource);
                return;
            }
            (Answer::Unknown, _) => false,
        };
        let longest = if self.lag.is_some() { MAX_LAGGING_PAUSE } else { MAX_PAUSE };
        let unasked = (Backoff::new(MIN_PAUSE, MAX_PAUSE), now);
        let (backoff, end) = self.pauses.entry(resource).or_insert(unasked);
        if changed {
            backoff.reset();
        }
        *end = now + backoff.failed().min(longest);
    }
}

/// Reports a lag, and requests probes of the other endpoints, to which watches may move.
fn report(upstream: &Upstream, endpoint: &Arc<Endpoint>, reason: &str, at: Instant) {
    endpoint.observe(Observation::Lagging { reason, at });
    for other in upstream.endpoints().iter().filter(|other| !Arc::ptr_eq(other, endpoint)) {
        other.probe.request(ProbeTrigger::Confirmation);
    }
}

/// The versions of all resources of which `endpoint` has a watch, as it and the best other ready endpoint have shown
/// them.
fn views(upstream: &Upstream, endpoint: &Arc<Endpoint>) -> Vec<ResourceView> {
    if upstream.endpoints().len() < 2 {
        return Vec::new();
    }
    let view = |record: &Arc<ResourceRecord>| {
        if !record.has_watch(endpoint) || upstream.unordered_groups.contains(group_of(&record.name))
        {
            return None;
        }
        let all = record.endpoints_with_versions();
        let own = all.iter().find(|shown| Arc::ptr_eq(&shown.endpoint, endpoint))?;
        let may_refer = |other: &Arc<Endpoint>| {
            !Arc::ptr_eq(other, endpoint)
                && other.state() == EndpointState::Ready
                && !other.probe.is_failing()
        };
        let best = all.iter().filter(|shown| may_refer(&shown.endpoint)).max_by_key(|s| s.event);
        Some(ResourceView {
            resource: Arc::clone(&record.name),
            version: own.version,
            raised_at: own.raised_at,
            reference: best.map(|shown| Reference {
                endpoint: Arc::clone(&shown.endpoint.label),
                version: shown.event,
                raised_at: shown.raised_at,
            }),
        })
    };
    upstream.resource_versions.snapshot().iter().filter_map(view).collect()
}

async fn ask(upstream: &Upstream, connection: &Rc<Connection>, expected: &Expected) -> Answer {
    let Some(path) = question(&expected.resource, expected.version) else { return Answer::Refused };
    let token = upstream.credentials.probe_token().and_then(|token| token.header());
    match timeout(ANSWER_TIMEOUT, fetch(connection, &path, token)).await {
        Ok(Ok((status, body))) => answer(status, &body),
        Ok(Err(_)) | Err(_) => Answer::Unknown,
    }
}

fn answer(status: StatusCode, body: &[u8]) -> Answer {
    match status {
        StatusCode::OK | StatusCode::NOT_FOUND => Answer::Reached,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Answer::Refused,
        StatusCode::GATEWAY_TIMEOUT => {
            current_of_too_large(body).map_or(Answer::Unknown, Answer::Behind)
        }
        _ => Answer::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Metrics;
    use jackstay_core::discovery::address::EndpointAddress;

    /// An endpoint without a watch of a resource shows no new versions of it, which is no lag.
    #[test]
    fn views_leave_out_resources_without_a_watch() {
        let config = crate::control::discovery::tests::config();
        let metrics = Metrics::new();
        let upstream = Upstream::load(config, &[], &metrics);
        let endpoint = |port| {
            let address = EndpointAddress { host: "10.0.0.1".to_owned(), port };
            let metrics = metrics.endpoint("u", &address.to_string());
            Endpoint::new(&"u".into(), &address, None, metrics).unwrap()
        };
        let (watched, other) = (endpoint(1), endpoint(2));
        upstream.set_endpoints(vec![Arc::clone(&watched), other]);
        let record = upstream.resource_versions.record("pods").unwrap();
        let watch = record.shown_by(&watched);
        record.raise(&watch, 5, clock::now());
        assert_eq!(views(&upstream, &watched).len(), 1);
        drop(watch);
        assert_eq!(views(&upstream, &watched).len(), 0);
    }

    #[test]
    fn answer_follows_the_status() {
        let too_large = b"Timeout: Too large resource version: 99, current: 42";
        for (status, body, expected) in [
            (200, &b"{}"[..], Answer::Reached),
            (404, b"", Answer::Reached),
            (403, b"", Answer::Refused),
            (401, b"", Answer::Refused),
            (504, too_large, Answer::Behind(42)),
            (504, b"request did not complete", Answer::Unknown),
            (500, b"", Answer::Unknown),
            (429, b"", Answer::Unknown),
        ] {
            assert_eq!(answer(StatusCode::from_u16(status).unwrap(), body), expected, "{status}");
        }
    }

    #[test]
    fn questions_about_one_resource_do_not_delay_those_about_another() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let view = |resource: &str| ResourceView {
            resource: resource.into(),
            version: 5,
            raised_at: start,
            reference: Some(Reference { endpoint: "b".into(), version: 9, raised_at: start }),
        };
        let mut inquiry = Inquiry::default();
        // Selectors hide events of pods, so that the pause has become long.
        let backoff = Backoff::new(MIN_PAUSE, MAX_PAUSE).after(7);
        inquiry.pauses.insert("pods".into(), (backoff, at(60)));
        let mut due = |resources: &[&str], seconds| {
            let views: Vec<_> = resources.iter().map(|name| view(name)).collect();
            inquiry.due(&views, at(seconds)).map(|expected| expected.resource.to_string())
        };
        assert_eq!(due(&["pods", "nodes"], 0), None);
        assert_eq!(due(&["pods", "nodes"], 1).as_deref(), Some("nodes"));
        assert_eq!(due(&["pods"], 59), None);
        assert_eq!(due(&["pods"], 60).as_deref(), Some("pods"));
    }
}
