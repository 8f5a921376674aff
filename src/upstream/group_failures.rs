//! The API groups of one upstream that fail at some of its endpoints, and the admission webhooks that some cannot reach
//! ([`jackstay_core::group_health`]).
//!
//! All workers share them. While no group fails, a request reads one flag; otherwise, it takes a mutex.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::group_health::{BUILT_IN, GroupFailure, GroupHealth, GroupNews};
use jackstay_core::pool::EndpointKey;
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;
use tokio::sync::Notify;

use super::endpoint::{Endpoint, EndpointState};
use super::unreachable_webhooks::{UnreachableWebhook, UnreachableWebhooks};
use crate::observe::events::{Change, EventKind};
use crate::observe::{FailingGauge, Reporter};

/// The groups and webhooks of one upstream.
#[derive(Debug, Default)]
pub struct GroupFailures {
    guarded: Mutex<Guarded>,
    any_fails: AtomicBool,
    any_slow: AtomicBool,
    notices: AtomicU32,
    changed: Notify,
    /// The admission webhooks that an endpoint cannot reach.
    pub webhooks: UnreachableWebhooks,
}

#[derive(Debug, Default)]
struct Guarded {
    health: GroupHealth,
    /// The label of each endpoint at which a group has failed.
    labels: BTreeMap<usize, Arc<str>>,
    /// The gauge of each group that fails at an endpoint.
    gauges: BTreeMap<(Box<str>, usize), FailingGauge>,
}

/// A group that fails at an endpoint, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct FailingGroupStatus {
    group: Box<str>,
    /// The address of the endpoint.
    endpoint: Box<str>,
    /// The message of the apiserver.
    reason: Box<str>,
    /// When it began to fail, RFC 3339.
    since: String,
    /// Number of failed requests since then.
    failures: u64,
    /// Time until a request may show that the group works again, in seconds.
    probe_in_s: f64,
}

/// The probe of a group at an endpoint: a request of a client. Dropping it allows another one.
#[derive(Debug)]
pub struct GroupProbe {
    failures: Arc<GroupFailures>,
    group: Box<str>,
    endpoint: EndpointKey,
}

impl GroupProbe {
    /// The endpoint that it was sent to.
    pub fn endpoint(&self) -> EndpointKey {
        self.endpoint
    }
}

impl Drop for GroupProbe {
    fn drop(&mut self) {
        self.failures.lock().health.probe_abandoned(&self.group, self.endpoint);
    }
}

impl GroupFailures {
    /// Whether a group fails at an endpoint, or is unavailable.
    pub fn any_fails(&self) -> bool {
        self.any_fails.load(Ordering::Relaxed)
    }

    /// The endpoint to which a probe of this group may be sent ([`GroupHealth::due`]).
    pub fn due(&self, group: &str) -> Option<EndpointKey> {
        self.lock().health.due(group, clock::now())
    }

    /// The endpoints that a request of this group does not prefer ([`GroupHealth::avoided`]).
    pub fn avoided(&self, group: &str) -> Vec<EndpointKey> {
        if !self.any_fails() {
            return Vec::new();
        }
        self.lock().health.avoided(group)
    }

    /// Whether the group fails at this endpoint. `Some(true)` if its streams may have lost their path, too.
    pub fn fails_at(&self, group: &str, endpoint: EndpointKey) -> Option<bool> {
        if !self.any_fails() {
            return None;
        }
        self.lock().health.fails_at(group, endpoint)
    }

    /// Called when a safe request of the group is sent to this endpoint. Returns the probe if it is one.
    pub fn sent(self: &Arc<Self>, group: &str, endpoint: EndpointKey) -> Option<GroupProbe> {
        let is_probe = self.any_fails() && self.lock().health.sent(group, endpoint, clock::now());
        is_probe.then(|| GroupProbe { failures: Arc::clone(self), group: group.into(), endpoint })
    }

    /// How long a safe request of the group waits for its head ([`GroupHealth::head_wait`]).
    pub fn head_wait(&self, group: &str, probed: Option<EndpointKey>) -> Duration {
        if probed.is_some() || self.any_slow.load(Ordering::Relaxed) {
            self.lock().health.head_wait(group, probed, clock::now())
        } else {
            jackstay_core::group_health::HEAD_WAIT
        }
    }

    /// The head of a response of the group took this long.
    pub fn took(&self, group: &str, latency: Duration) {
        let mut guarded = self.lock();
        guarded.health.took(group, latency, clock::now());
        self.any_slow.store(guarded.health.any_slow(), Ordering::Relaxed);
    }

    /// A response says that the group is unavailable. Returns whether it was available a moment ago
    /// ([`GroupHealth::unavailable`]).
    pub fn unavailable(&self, group: &str, is_disputed: bool) -> bool {
        let mut guarded = self.lock();
        let is_new = guarded.health.unavailable(group, is_disputed, clock::now());
        self.publish(&guarded);
        is_new
    }

    /// The group has failed at this endpoint.
    pub fn failed(
        &self,
        group: &str,
        endpoint: &Endpoint,
        failure: GroupFailure<'_>,
        to: Reporter<'_>,
    ) {
        let (mut guarded, key) = (self.lock(), endpoint.key());
        let news = guarded.health.failed(group, key, failure, clock::now());
        self.publish(&guarded);
        let Some(news) = news else { return };
        guarded.labels.entry(key.0).or_insert_with(|| Arc::clone(&endpoint.label));
        let is_known = matches!(news, GroupNews::Fails | GroupNews::FailsAgain);
        if is_known {
            let gauge = to.metrics.group_fails(to.upstream, &endpoint.label, group);
            guarded.gauges.insert((group.into(), key.0), gauge);
        }
        drop(guarded);
        to.metrics.count_group_failure(to.upstream, &endpoint.label, group);
        if is_known {
            report(group, &endpoint.label, (true, failure.reason), to);
        }
        if matches!(news, GroupNews::Fails | GroupNews::Suspected) {
            self.notices.fetch_add(1, Ordering::Relaxed);
            self.changed.notify_waiters();
        }
    }

    /// The endpoint has answered a request of the group that was sent at this time.
    pub fn answered(
        &self,
        group: &str,
        endpoint: &Endpoint,
        (sent_at, is_probe): (Instant, bool),
        to: Reporter<'_>,
    ) {
        let (mut guarded, key) = (self.lock(), endpoint.key());
        let ends = guarded.health.answered(group, key, (sent_at, is_probe), clock::now());
        self.publish(&guarded);
        if ends {
            guarded.gauges.remove(&(group.into(), key.0));
            drop(guarded);
            report(group, &endpoint.label, (false, "a request of the group was answered"), to);
        }
    }

    /// Forgets endpoints that are ejected or not in the set, and failures that no request has confirmed for a long time.
    pub fn retain(&self, endpoints: &[Arc<Endpoint>], to: Reporter<'_>) {
        if !self.any_fails() && !self.any_slow.load(Ordering::Relaxed) {
            return;
        }
        let kept = endpoints.iter().filter(|endpoint| endpoint.state() != EndpointState::Ejected);
        let keys: Vec<_> = kept.map(|endpoint| endpoint.key()).collect();
        let mut guarded = self.lock();
        let ended = guarded.health.retain(&keys, clock::now());
        let mut labels = Vec::new();
        for (group, endpoint) in ended {
            labels.extend(
                guarded.labels.get(&endpoint.0).map(|label| (group.clone(), Arc::clone(label))),
            );
            guarded.gauges.remove(&(group, endpoint.0));
        }
        guarded.labels.retain(|key, _| keys.contains(&EndpointKey(*key)));
        self.any_slow.store(guarded.health.any_slow(), Ordering::Relaxed);
        self.publish(&guarded);
        drop(guarded);
        for (group, label) in labels {
            let reason = "endpoint ejected or removed, or no failed request for 10 minutes";
            report(&group, &label, (false, reason), to);
        }
    }

    /// Number of failures that have begun so far; wraps around.
    pub fn notices(&self) -> u32 {
        self.notices.load(Ordering::Relaxed)
    }

    /// Waits until a failure begins.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The groups that fail, in alphabetical order.
    pub fn list(&self) -> Vec<FailingGroupStatus> {
        let now = clock::now();
        let guarded = self.lock();
        let failing = guarded.health.failing().into_iter();
        let shown = failing.map(|one| FailingGroupStatus {
            endpoint: guarded.labels.get(&one.endpoint.0).map_or("", |label| label).into(),
            group: one.group,
            reason: one.reason,
            since: Utc(wall_clock() - now.saturating_duration_since(one.since)).seconds(),
            failures: one.failures,
            probe_in_s: one.probe_at.saturating_duration_since(now).as_secs_f64(),
        });
        shown.collect()
    }

    /// The webhooks that an endpoint cannot reach.
    pub fn unreachable_webhooks(&self) -> Vec<UnreachableWebhook> {
        self.webhooks.list()
    }

    fn publish(&self, guarded: &Guarded) {
        self.any_fails.store(guarded.health.any_fails(), Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn report(group: &str, endpoint: &str, (fails, reason): (bool, &str), to: Reporter<'_>) {
    let states = ["works", "fails"];
    let (from, now) = (states[usize::from(!fails)], states[usize::from(fails)]);
    to.metrics.events().changed(&Change {
        kind: EventKind::Group,
        upstream: Some(to.upstream),
        name: &format!("{group} at {endpoint}"),
        detail: "",
        from,
        to: now,
        reason,
        effect: if fails && group == BUILT_IN {
            "their requests prefer other endpoints"
        } else if fails {
            "its requests prefer other endpoints; built-in groups are not affected"
        } else {
            "its requests use the endpoint again"
        },
        bad: fails,
    });
}
