//! Compares the watch cache of one endpoint with those of the others, and asks about its version on suspicion
//! ([`jackstay_core::lag`]).

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::StatusCode;
use jackstay_core::backoff::Backoff;
use jackstay_core::lag::{
    EndpointDeliveryPace, Expectations, Expected, Lag, Reference, ResourceView, TICK,
    current_of_too_large, question,
};
use jackstay_core::request::info::group_of;
use jackstay_sys::clock;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, EndpointState, Observation, ProbeTrigger};
use crate::upstream::question::fetch;
use crate::upstream::resource_versions::ResourceRecord;

/// Limit of a question. kube-apiserver waits 3 s for its cache (`blockTimeout` in `watch_cache.go`).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause after a question about a resource. It doubles with each one that finds the known state again.
const MIN_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two questions about a resource while the endpoint does not lag: a selector may hide events for
/// ever.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// Longest pause after refusals: the rights of the prober may change, and an apiserver that starts refuses everybody.
const MAX_REFUSED_PAUSE: Duration = Duration::from_secs(600);
/// A lag about which every question has been refused for this time ends: it cannot be proven any more.
const MAX_REFUSED_LAG: Duration = Duration::from_secs(300);
/// Longest pause between two questions while it lags.
const MAX_LAGGING_PAUSE: Duration = Duration::from_secs(10);

/// Compares one endpoint with the others.
#[derive(Debug, Default)]
pub struct LagCheck {
    connection: RefCell<Weak<Connection>>,
}

/// The answer about a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The cache has reached it.
    Reached,
    /// The cache is at this version.
    Behind(u64),
    /// The credential of the prober may not ask about this resource, or not yet.
    Refused,
    /// It says nothing about the cache.
    Unknown,
}

impl LagCheck {
    /// Asks on `connection` from now on.
    pub fn set_connection(&self, connection: &Rc<Connection>) {
        *self.connection.borrow_mut() = Rc::downgrade(connection);
    }

    /// Compares every [`TICK`], until the future is dropped. An answer may take longer.
    pub async fn run(&self, upstream: &Arc<Upstream>, endpoint: &Arc<Endpoint>) {
        let mut pace = EndpointDeliveryPace::default();
        let mut inquiry = Inquiry::default();
        let mut asked: Option<LocalBoxFuture<'_, (Expected, Answer)>> = None;
        let mut restore = upstream.restores.recognised_notice();
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
            let latest = upstream.restores.recognised_notice();
            if std::mem::replace(&mut restore, latest) != latest {
                // What was expected and asked are versions of the lost history.
                asked = None;
                inquiry.restored(endpoint);
            }
            let (views, now) = (views(upstream, endpoint), clock::now());
            inquiry.observe_own(&views, endpoint);
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
    lag: Option<Lag>,
    /// Since when each question about the lag has been refused.
    lag_refused_since: Option<Instant>,
    /// The pauses after questions about each resource.
    pauses: HashMap<Arc<str>, Pause>,
}

/// The pause after questions about one resource.
struct Pause {
    backoff: Backoff,
    end: Instant,
    /// Whether the last question was refused. Such a pause is kept without a view of the resource.
    is_refused: bool,
}

impl Inquiry {
    /// The version about which the endpoint is asked now, if any.
    fn due(&mut self, views: &[ResourceView], now: Instant) -> Option<Expected> {
        let of_lag = self.lag.as_ref().map(|lag| Arc::clone(&lag.expected.resource));
        self.pauses.retain(|resource, pause| {
            of_lag.as_ref() == Some(resource)
                || pause.is_refused && now < pause.end
                || views.iter().any(|v| v.resource == *resource)
        });
        let pauses = &self.pauses;
        let is_over = |resource: &str| pauses.get(resource).is_none_or(|pause| now >= pause.end);
        let can_be_asked = |resource: &str| question(resource, 0).is_some() && is_over(resource);
        let late = self.expectations.observe(views, can_be_asked, now);
        match &self.lag {
            Some(lag) => Some(lag.expected.clone()).filter(|lag| is_over(&lag.resource)),
            None => late,
        }
    }

    /// etcd was restored from a backup: the endpoint does not lag behind versions that do not exist any more.
    fn restored(&mut self, endpoint: &Endpoint) {
        self.expectations = Expectations::default();
        self.pauses.clear();
        self.end_lag(endpoint);
    }

    /// Ends a lag if a watch of the endpoint has shown the version.
    fn observe_own(&mut self, views: &[ResourceView], endpoint: &Endpoint) {
        let has_reached = |lag: &Lag| {
            let is_same = |view: &&ResourceView| view.resource == lag.expected.resource;
            views.iter().find(is_same).is_some_and(|view| view.version >= lag.expected.version)
        };
        if self.lag.as_ref().is_some_and(has_reached) {
            self.end_lag(endpoint);
        }
    }

    fn end_lag(&mut self, endpoint: &Endpoint) {
        self.lag_refused_since = None;
        if self.lag.take().is_some() {
            endpoint.observe(Observation::CaughtUp);
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
        if let Answer::Behind(current) = answer {
            upstream.resource_versions.forget_if_ahead(endpoint, &resource, current);
            upstream.restores.suspect(&expected, now);
        }
        let is_refused = answer == Answer::Refused;
        let is_refused_lag = is_refused && self.lag.is_some();
        let refused_since = *self.lag_refused_since.get_or_insert(now);
        if !is_refused_lag {
            self.lag_refused_since = None;
        }
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
            (Answer::Reached, Some(_)) => {
                self.end_lag(endpoint);
                true
            }
            (Answer::Reached, None) => {
                if let Some(record) = upstream.resource_versions.record(&expected.resource) {
                    record.raise(&record.shown_by(endpoint), expected.version, now);
                }
                false
            }
            // A refusal says nothing about the cache: an apiserver that starts refuses everybody.
            (Answer::Refused, Some(_)) if now >= refused_since + MAX_REFUSED_LAG => {
                self.end_lag(endpoint);
                true
            }
            (Answer::Refused | Answer::Unknown, _) => false,
        };
        let longest = match (&self.lag, is_refused) {
            (Some(_), _) => MAX_LAGGING_PAUSE,
            (None, true) => MAX_REFUSED_PAUSE,
            (None, false) => MAX_PAUSE,
        };
        let unasked =
            Pause { backoff: Backoff::new(MIN_PAUSE, MAX_REFUSED_PAUSE), end: now, is_refused };
        let pause = self.pauses.entry(resource).or_insert(unasked);
        if changed || pause.is_refused != is_refused {
            pause.backoff.reset();
        }
        pause.is_refused = is_refused;
        pause.end = now + pause.backoff.failed().min(longest);
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
    // The connections to an indistinct endpoint reach different caches.
    if upstream.endpoints().len() < 2 || endpoint.is_indistinct() {
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

/// Asks whether the cache of an endpoint has reached a version.
pub(super) async fn ask(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    expected: &Expected,
) -> Answer {
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
    use std::slice;

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

    #[tokio::test(start_paused = true)]
    async fn refusal_neither_ends_a_lag_nor_the_comparison() {
        let config = crate::control::discovery::tests::config();
        let metrics = Metrics::new();
        let upstream = Upstream::load(config, &[], &metrics);
        let address = EndpointAddress { host: "10.0.0.1".to_owned(), port: 1 };
        let metrics = metrics.endpoint("u", "10.0.0.1:1");
        let endpoint = Endpoint::new(&"u".into(), &address, None, metrics).unwrap();
        let start = clock::now();
        let view = ResourceView {
            resource: "pods".into(),
            version: 5,
            raised_at: start,
            reference: Some(Reference { endpoint: "b".into(), version: 9, raised_at: start }),
        };
        let mut inquiry = Inquiry::default();
        assert_eq!(inquiry.due(slice::from_ref(&view), start), None);
        let mut pauses = Vec::new();
        for _ in 0..12 {
            let mut pause = Duration::ZERO;
            let expected = loop {
                tokio::time::advance(Duration::from_millis(500)).await;
                pause += Duration::from_millis(500);
                if let Some(expected) = inquiry.due(slice::from_ref(&view), clock::now()) {
                    break expected;
                }
            };
            pauses.push(pause.as_secs());
            inquiry.record(expected, Answer::Refused, &upstream, &endpoint);
        }
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]);

        let expected =
            Expected { resource: "pods".into(), version: 9, shown_by: "b".into(), at: start };
        inquiry.record(expected.clone(), Answer::Behind(5), &upstream, &endpoint);
        for answer in [Answer::Refused, Answer::Unknown, Answer::Refused] {
            inquiry.record(expected.clone(), answer, &upstream, &endpoint);
            assert!(inquiry.lag.is_some(), "{answer:?}");
            tokio::time::advance(MAX_REFUSED_LAG.saturating_sub(Duration::from_secs(1))).await;
        }
        // Refused all the time.
        tokio::time::advance(Duration::from_secs(1)).await;
        inquiry.record(expected.clone(), Answer::Refused, &upstream, &endpoint);
        assert!(inquiry.lag.is_none());
        // A watch of the endpoint shows the version.
        inquiry.record(expected, Answer::Behind(5), &upstream, &endpoint);
        inquiry.observe_own(slice::from_ref(&view), &endpoint);
        assert!(inquiry.lag.is_some());
        inquiry.observe_own(&[ResourceView { version: 9, ..view }], &endpoint);
        assert!(inquiry.lag.is_none());
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
        inquiry.pauses.insert("pods".into(), Pause { backoff, end: at(60), is_refused: false });
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
