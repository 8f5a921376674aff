//! Finds an endpoint whose watch cache lags behind those of the others.
//!
//! A kube-apiserver that is cut off from etcd, or whose watch cache is overloaded, answers PINGs and serves old objects.
//! The versions that watches show (of each endpoint and resource) are compared for each resource:
//!
//! | observed | consequence |
//! |---|---|
//! | the watches of an endpoint delivered regularly and have fallen silent, while another endpoint delivers | suspicion: a probe at once |
//! | an endpoint with a watch of a resource has not shown the version of an event 0.5 s after another endpoint | suspicion, since selectors hide events: the prober asks the endpoint for an object that is not older |
//! | it answers `Too large resource version`, after the 3 s for which kube-apiserver waits | proof: degraded |
//! | it answers such a question with 200 or 404 | it has caught up |
//!
//! The endpoint that has shown the highest version is the reference, so never all endpoints lag. Bookmarks are no
//! reference: without events of the resource, a cache advances only when etcd reports its progress.
//!
//! This module is pure: it reads no clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the observations.
pub const TICK: Duration = Duration::from_millis(250);
/// Watches have fallen silent after at least this time. The same figure as for a single watch.
const MIN_SILENCE: Duration = Duration::from_millis(800);
/// Watches of another endpoint must have delivered this long after the last event of the silent ones.
const DELIVERED_AFTER: Duration = Duration::from_millis(500);
/// Watches deliver regularly if [`MIN_DELIVERIES`] of the last so many ticks (3 s) brought a new version.
const REGULAR_TICKS: u32 = 12;
/// See [`REGULAR_TICKS`].
const MIN_DELIVERIES: u32 = 3;
/// How long an endpoint may need longer than another one to show an event. With the 3 s of the proof, a cache that lags is
/// found before 4 s have passed, unless selectors hide most events, so that the pause between two questions is long.
const MAX_DELAY: Duration = Duration::from_millis(500);
/// An endpoint that lags for longer than this while it advances belongs to another etcd.
const OTHER_ETCD_AFTER: Duration = Duration::from_secs(60);

/// The versions of one resource of which an endpoint has a watch, as it and the others have shown them.
#[derive(Debug, Clone)]
pub struct ResourceView {
    /// Group and resource.
    pub resource: Arc<str>,
    /// The highest version that the endpoint has shown.
    pub version: u64,
    /// When it was raised last.
    pub raised_at: Instant,
    /// The ready endpoint besides it that has shown the highest version of an event.
    pub reference: Option<Reference>,
}

/// What another endpoint has shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// Its address.
    pub endpoint: Arc<str>,
    /// The highest version of an event.
    pub version: u64,
    /// When a version was raised last.
    pub raised_at: Instant,
}

/// Whether the watches of an endpoint deliver regularly.
#[derive(Debug, Default)]
pub struct EndpointDeliveryPace {
    last: Option<Instant>,
    /// A bit for each of the last ticks, the latest in bit 0: whether a version was raised.
    ticks: u32,
}

impl EndpointDeliveryPace {
    /// Takes in the views of an endpoint, every [`TICK`]. Returns whether its watches have fallen silent while those of
    /// another endpoint deliver.
    pub fn observe(&mut self, views: &[ResourceView], now: Instant) -> bool {
        let Some(last) = views.iter().map(|view| view.raised_at).max() else {
            *self = Self::default();
            return false;
        };
        self.ticks = self.ticks << 1 | u32::from(self.last.is_none_or(|before| last > before));
        self.last = Some(last);
        if now.saturating_duration_since(last) < MIN_SILENCE || self.ticks == 0 {
            return false;
        }
        let before_silence = self.ticks >> self.ticks.trailing_zeros();
        let deliveries = (before_silence & ((1 << REGULAR_TICKS) - 1)).count_ones();
        deliveries >= MIN_DELIVERIES
            && views.iter().any(|view| {
                view.reference.as_ref().is_some_and(|reference| {
                    reference.version > view.version
                        && reference.raised_at >= last + DELIVERED_AFTER
                })
            })
    }
}

/// A version that an endpoint should have reached, because another one has shown it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Group and resource.
    pub resource: Arc<str>,
    /// The version.
    pub version: u64,
    /// The endpoint that has shown it.
    pub shown_by: Arc<str>,
    /// When it was seen there.
    pub at: Instant,
}

/// The versions that an endpoint should reach.
#[derive(Debug, Default)]
pub struct Expectations(HashMap<Arc<str>, Expected>);

impl Expectations {
    /// Takes in the views of an endpoint. Returns a version that it has not reached [`MAX_DELAY`] after another endpoint,
    /// of a resource about which it `can_be_asked`. The versions that change since do not count, so that a constant
    /// stream of events does not hide the delay.
    pub fn observe(
        &mut self,
        views: &[ResourceView],
        can_be_asked: impl Fn(&str) -> bool,
        now: Instant,
    ) -> Option<Expected> {
        let behind = |view: &&ResourceView| {
            view.reference.as_ref().is_some_and(|r| r.version > view.version)
        };
        self.0.retain(|resource, expected| {
            views
                .iter()
                .filter(behind)
                .any(|v| v.resource == *resource && v.version < expected.version)
        });
        for view in views.iter().filter(behind) {
            let Some(reference) = &view.reference else { continue };
            self.0.entry(Arc::clone(&view.resource)).or_insert_with(|| Expected {
                resource: Arc::clone(&view.resource),
                version: reference.version,
                shown_by: Arc::clone(&reference.endpoint),
                at: now,
            });
        }
        let is_late = |expected: &&Expected| {
            now.saturating_duration_since(expected.at) >= MAX_DELAY
                && can_be_asked(&expected.resource)
        };
        self.0.values().filter(is_late).min_by_key(|expected| expected.at).cloned()
    }
}

/// A proven lag.
#[derive(Debug)]
pub struct Lag {
    /// The version that the endpoint has not reached.
    pub expected: Expected,
    proven_at: Instant,
    first: u64,
    current: u64,
    /// Whether [`Self::is_at`] has said that the endpoint belongs to another etcd.
    is_reported: bool,
}

impl Lag {
    /// The endpoint was at version `current` when it should have reached the `expected` one.
    pub fn new(expected: Expected, current: u64, now: Instant) -> Self {
        Self { expected, proven_at: now, first: current, current, is_reported: false }
    }

    /// The endpoint is at version `current` now. Returns whether this is the first time that it counts as belonging to
    /// another etcd.
    pub fn is_at(&mut self, current: u64, now: Instant) -> bool {
        self.current = current;
        let is_news = !self.is_reported && self.is_other_etcd(now);
        self.is_reported |= is_news;
        is_news
    }

    /// Whether the endpoint advances without reaching the version for so long that it belongs to another etcd.
    fn is_other_etcd(&self, now: Instant) -> bool {
        self.current > self.first
            && now.saturating_duration_since(self.proven_at) >= OTHER_ETCD_AFTER
    }

    /// The reason of the endpoint's state.
    pub fn reason(&self, now: Instant) -> String {
        let Expected { resource, version, shown_by, at } = &self.expected;
        let (current, age) = (self.current, now.saturating_duration_since(*at).as_secs());
        if self.is_other_etcd(now) {
            return format!(
                "these endpoints do not share an etcd: version {current} of {resource} here, and {version} at \
                 {shown_by} {age} s ago"
            );
        }
        format!(
            "watch cache lags: version {current} of {resource}, {shown_by} had {version} {age} s ago"
        )
    }
}

/// The path of an object that does not exist, for the question whether the cache of a resource has reached a version;
/// `None` if the question is not known. kube-apiserver looks for the object in its cache, which costs little, and the
/// permission to get an object of the resource suffices. kubelet may get services, `RuntimeClass`es and `CSIDriver`s.
pub fn question(resource: &str, version: u64) -> Option<String> {
    let collection = match resource {
        "namespaces" | "nodes" | "persistentvolumes" => format!("/api/v1/{resource}"),
        "configmaps"
        | "endpoints"
        | "persistentvolumeclaims"
        | "pods"
        | "secrets"
        | "services"
        | "serviceaccounts" => format!("/api/v1/namespaces/default/{resource}"),
        "apps/daemonsets"
        | "apps/deployments"
        | "apps/replicasets"
        | "apps/statefulsets"
        | "batch/jobs"
        | "coordination.k8s.io/leases"
        | "discovery.k8s.io/endpointslices"
        | "networking.k8s.io/networkpolicies" => {
            let (group, resource) = resource.split_once('/')?;
            format!("/apis/{group}/v1/namespaces/default/{resource}")
        }
        "node.k8s.io/runtimeclasses" | "storage.k8s.io/csidrivers" => {
            let (group, resource) = resource.split_once('/')?;
            format!("/apis/{group}/v1/{resource}")
        }
        _ => return None,
    };
    Some(format!("{collection}/jackstay-version-check?resourceVersion={version}"))
}

/// The version that a watch cache has reached, according to the `Status` of a 504 `Too large resource version: 12,
/// current: 7` in JSON, protobuf or CBOR (apiserver, `storage/errors.go`, `NewTooLargeResourceVersionError`); `None` for any
/// other response.
pub fn current_of_too_large(body: &[u8]) -> Option<u64> {
    const TEXT: &[u8] = b"Too large resource version: ";
    const CURRENT: &[u8] = b", current: ";
    let after = |bytes: &[u8], text: &[u8]| {
        bytes.windows(text.len()).position(|window| window == text).map(|at| at + text.len())
    };
    let text = &body[after(body, TEXT)?..];
    let current = &text[after(text, CURRENT)?..];
    let digits = current.iter().take_while(|byte| byte.is_ascii_digit()).count();
    // A cache that has only begun is at 0.
    Some(str::from_utf8(&current[..digits]).ok()?.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(version: u64, raised_at: Instant, reference: (u64, Instant)) -> ResourceView {
        let (reference, at) = reference;
        ResourceView {
            resource: "pods".into(),
            version,
            raised_at,
            reference: Some(Reference { endpoint: "b".into(), version: reference, raised_at: at }),
        }
    }

    #[test]
    fn pace_regular_deliveries_that_stop_while_others_continue_are_silence() {
        // Ticks between deliveries, the tick of the last one, whether others continue; the tick at which silence is
        // found first.
        for (every, last, others, expected) in [
            (1, 40, true, Some(44)),
            (4, 40, true, Some(44)),
            (1, 40, false, None),
            // Fewer than one delivery a second, or none before.
            (9, 45, true, None),
            (1, 0, true, None),
        ] {
            let start = Instant::now();
            let mut pace = EndpointDeliveryPace::default();
            let mut own = (1, start);
            let found = (1..100).find(|&tick: &u32| {
                let now = start + TICK * tick;
                if tick <= last && tick % every == 0 {
                    own = (u64::from(tick), now);
                }
                let reference = if others { (u64::from(tick) + 1, now) } else { own };
                pace.observe(&[view(own.0, own.1, reference)], now)
            });
            assert_eq!(found, expected, "every {every}, last {last}");
        }
    }

    #[test]
    fn expectations_name_a_version_that_was_not_reached_in_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut expectations = Expectations::default();
        let mut observe = |own, reference, ms| {
            let views = [view(own, start, (reference, at(ms)))];
            expectations.observe(&views, |_| true, at(ms)).map(|expected| expected.version)
        };
        assert_eq!(observe(5, 5, 0), None);
        assert_eq!(observe(5, 7, 250), None);
        // The reference goes on, and version 7 remains the expected one.
        assert_eq!(observe(5, 9, 500), None);
        assert_eq!(observe(6, 12, 750), Some(7));
        assert_eq!(observe(7, 15, 1_000), None, "reached late; 15 is expected now");
        assert_eq!(observe(14, 20, 1_400), None);
        assert_eq!(observe(14, 20, 1_500), Some(15));
        assert_eq!(observe(20, 20, 1_750), None);
        let behind = [view(5, start, (9, start))];
        let mut refused = Expectations::default();
        assert_eq!(refused.observe(&behind, |_| true, start), None);
        assert_eq!(refused.observe(&behind, |_| false, at(5_000)), None);
    }

    #[test]
    fn lag_reason_tells_an_old_cache_from_another_etcd() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let expected =
            Expected { resource: "pods".into(), version: 99, shown_by: "b".into(), at: start };
        let mut lag = Lag::new(expected, 42, at(4));
        assert_eq!(lag.reason(at(4)), "watch cache lags: version 42 of pods, b had 99 4 s ago");
        assert!(!lag.is_other_etcd(at(90)), "it stands still");
        assert!(!lag.is_at(43, at(10)));
        assert!(!lag.is_at(43, at(63)));
        assert!(lag.is_at(43, at(64)));
        assert!(!lag.is_at(43, at(74)), "it is reported once");
        assert_eq!(
            lag.reason(at(64)),
            "these endpoints do not share an etcd: version 43 of pods here, and 99 at b 64 s ago"
        );
    }

    #[test]
    fn question_names_an_object_of_the_resource() {
        for (resource, expected) in [
            ("nodes", Some("/api/v1/nodes")),
            ("services", Some("/api/v1/namespaces/default/services")),
            ("apps/deployments", Some("/apis/apps/v1/namespaces/default/deployments")),
            ("node.k8s.io/runtimeclasses", Some("/apis/node.k8s.io/v1/runtimeclasses")),
            ("example.com/machines", None),
            ("", None),
        ] {
            let expected =
                expected.map(|path| format!("{path}/jackstay-version-check?resourceVersion=7"));
            assert_eq!(question(resource, 7), expected, "{resource}");
        }
    }

    #[test]
    fn current_of_too_large_reads_the_message() {
        let json = br#"{"kind":"Status","status":"Failure","message":"Timeout: Too large resource version: 99, current: 42","reason":"Timeout","details":{"causes":[{"reason":"ResourceVersionTooLarge","message":"Too large resource version"}],"retryAfterSeconds":1},"code":504}"#;
        for (body, expected) in [
            (&json[..], Some(42)),
            (
                b"k8s\0\x1a\x30Timeout: Too large resource version: 99, current: 42\x22\x07Timeout",
                Some(42),
            ),
            (b"Too large resource version: 99, current: 0", Some(0)),
            (b"Too large resource version", None),
            (b"the request timed out", None),
            (b"", None),
        ] {
            assert_eq!(current_of_too_large(body), expected, "{}", body.escape_ascii());
        }
    }
}
