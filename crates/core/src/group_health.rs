//! Which API groups an apiserver fails to serve although it is healthy.
//!
//! kube-apiserver serves some groups itself. It forwards the requests of others to an aggregated apiserver, and asks a
//! webhook to convert the objects of some custom resources. If one apiserver loses its path to such a server, its
//! `/readyz` stays ok, and the requests of that group fail there alone:
//!
//! | response to a request of a group that is not built in | sent by | the group fails at this endpoint |
//! |---|---|---|
//! | 503, `text/plain`, "service unavailable" | the aggregator: the `APIService` has the condition `Available=False` (`proxyError` in `handler_proxy.go` of `k8s.io/kube-aggregator`) | no. All apiservers share that state; one that cannot reach the server sets it, and the others correct it, in turn: a safe request is sent again after a pause |
//! | 503, `text/plain`, any other text | the aggregator, whose request to the server has failed (`responder.Error`) | yes |
//! | 504 | the aggregator or the filter for timeouts | yes |
//! | 500, "conversion webhook for … failed: Post …" | the converter of custom resources (`webhook_converter.go` in `k8s.io/apiextensions-apiserver`) | yes |
//! | none for [`HEAD_WAIT`], while another endpoint answers the same request | | suspected; yes if the probe is not answered either |
//! | 401, 403, 429 | often filters before the aggregator | not known |
//! | any other | | no; it shows that the path works |
//!
//! A `Status` with 503 is the answer of the aggregated apiserver, which all endpoints would forward. A failure of a built-in
//! group concerns the whole apiserver, and `/readyz` shows that.
//!
//! # What follows
//!
//! | state of a group at an endpoint | requests | next state |
//! |---|---|---|
//! | works | as any | a failure: *fails*, for a pause |
//! | fails or is suspected, in its pause | prefer other endpoints | the pause is over: *due* |
//! | due | one safe request prefers it, the probe; all others as in the pause | its answer: *works*; its failure: *fails*, for twice the pause, at most [`LONGEST_PAUSE`] |
//!
//! The built-in groups count as one, [`BUILT_IN`], of which only silence is remembered: an apiserver that has lost its etcd
//! does not answer what another one does ([`crate::request::late_reads`]). It still answers much from its caches, so only
//! requests that etcd must answer ([`asks_etcd`]) are probes and end the failure.
//!
//! If a group fails at all endpoints, its requests prefer none. Each is sent once, and its client gets the response of the
//! apiserver. An answer to a request that was sent after the last failure ends the failure. If the group fails again within
//! twice the pause, the pause goes on growing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use http::{HeaderMap, StatusCode, header};

use crate::backoff::Backoff;
use crate::lag::current_of_too_large;
use crate::pool::EndpointKey;
use crate::reads::form::ReadForm;
use crate::request::info::{RequestInfo, is_built_in_group};

/// The name of the built-in groups together. No group can have it: groups are DNS names.
pub const BUILT_IN: &str = "(built-in)";

/// The name under which failures of a group are remembered.
pub fn remembered_name(group: &str) -> &str {
    if is_built_in_group(group) { BUILT_IN } else { group }
}

/// Whether an apiserver that has lost its etcd does not answer this request of a built-in group with success
/// ([`shows_etcd`]). Events may have an etcd of their own (`--etcd-servers-overrides`).
pub fn asks_etcd(info: &RequestInfo) -> bool {
    let is_event = || ["", "events.k8s.io"].iter().any(|group| info.is_about(group, "events", ""));
    info.is_resource() && ReadForm::of(info).is_some_and(ReadForm::needs_etcd) && !is_event()
}

/// Whether an apiserver has read etcd for a response with this status to such a request. Many requests are rejected without
/// etcd, for example with 404 for a resource that the apiserver does not know.
pub fn shows_etcd(status: StatusCode) -> bool {
    status.is_success() || status == StatusCode::CONFLICT
}

/// How long a safe request of a group that is not built in waits for its response head before another endpoint is asked,
/// too. Longer for a group that is usually slower.
pub const HEAD_WAIT: Duration = Duration::from_secs(1);
/// The same for the first probe of a group that has failed; twice as long for each further one.
const PROBE_WAIT: Duration = Duration::from_millis(250);
/// The longest of these waits.
const LONGEST_HEAD_WAIT: Duration = Duration::from_secs(5);
/// A head that takes longer than this shows that the group is slow.
pub const SLOW_HEAD: Duration = Duration::from_millis(125);
/// How long the slowest head of a group counts.
const SLOW_MEMORY: Duration = Duration::from_secs(300);
/// The pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two probes.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Number of requests without an answer after which watches leave, although the probe was not sent yet.
const SUSPECTED_AFTER: u64 = 2;
/// How long a failure counts that no request has confirmed.
const MEMORY: Duration = Duration::from_secs(600);
/// Maximum number of groups for which failures or slow heads are remembered.
const MAX_GROUPS: usize = 256;
/// Maximum length of a group's name: it is a DNS name (RFC 1035, section 2.3.4).
const MAX_NAME: usize = 253;
/// Maximum length of the body of a failure, in bytes. That of a conversion names object and URL.
pub const MAX_BODY: usize = 4 * 1024;
/// The aggregator's text for a group that is unavailable.
const UNAVAILABLE: &[u8] = b"service unavailable";
/// What Go says of an exceeded deadline.
const DEADLINE: &[u8] = b"context deadline exceeded";
/// How long ago a group must have been available for its requests to be sent again.
const UNAVAILABLE_TIME: Duration = Duration::from_secs(1);
/// The same if the group fails at one endpoint and works at another: they change the shared state in turn, on busy machines
/// after more than a second.
const DISPUTED_TIME: Duration = Duration::from_secs(3);
/// Maximum length of a reason, in bytes.
const MAX_REASON: usize = 200;

/// What the response to a request of a group that is not built in shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupSignal {
    /// The endpoint cannot reach the server of the group.
    Failed,
    /// The endpoint does not try, because the state that all apiservers share says that the server is unavailable.
    Unavailable,
}

/// Whether a response with this head may be such a signal, so that its body is read.
pub fn may_be_signal(status: StatusCode, headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    match status {
        StatusCode::SERVICE_UNAVAILABLE => content_type.starts_with(b"text/plain"),
        StatusCode::GATEWAY_TIMEOUT | StatusCode::INTERNAL_SERVER_ERROR => true,
        _ => false,
    }
}

/// The signal of a response with this head and body; `None` if it is none. `has_timeout`: the query of the request has
/// `timeout`, by which its client chooses the deadline of the apiserver (`request_deadline.go` in `k8s.io/apiserver`).
pub fn signal_of(
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    has_timeout: bool,
) -> Option<GroupSignal> {
    if !may_be_signal(status, headers) || body.len() > MAX_BODY {
        return None;
    }
    match status {
        StatusCode::GATEWAY_TIMEOUT if has_timeout || current_of_too_large(body).is_some() => None,
        _ if has_timeout && find(body, DEADLINE).is_some() => None,
        StatusCode::SERVICE_UNAVAILABLE if body.trim_ascii() == UNAVAILABLE => {
            Some(GroupSignal::Unavailable)
        }
        StatusCode::INTERNAL_SERVER_ERROR if !is_failed_conversion(body) => None,
        _ => Some(GroupSignal::Failed),
    }
}

/// Whether this is the body of a 500 because a conversion webhook could not be reached.
fn is_failed_conversion(body: &[u8]) -> bool {
    find(body, b"conversion webhook for ")
        .is_some_and(|at| find(&body[at..], b" failed: Post ").is_some())
}

/// The name of the admission webhook that could not be reached, and why, from the body of a 500. A webhook that has answered
/// with an error is none.
pub fn unreachable_webhook(body: &[u8]) -> Option<(&str, &[u8])> {
    const CALLING: &[u8] = b"failed calling webhook ";
    let rest = &body[find(body, CALLING)? + CALLING.len()..];
    // In JSON, the quotes are escaped.
    let rest = rest.strip_prefix(b"\\").unwrap_or(rest).strip_prefix(b"\"")?;
    let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\'))?;
    let (name, rest) = rest.split_at(end);
    let reason = &rest[find(rest, b": Post ")? + 2..];
    let reason = &reason[..end_of_text(reason)];
    let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let name =
        std::str::from_utf8(name).ok().filter(|name| name.bytes().all(|byte| is_name(&byte)))?;
    (1..=MAX_NAME).contains(&name.len()).then_some((name, reason))
}

/// The length of the text at the beginning: up to a quote that is not escaped, or a control byte.
fn end_of_text(bytes: &[u8]) -> usize {
    // In protobuf, the quotes of the URL are not escaped.
    let url = if bytes.starts_with(b"Post \"") { 6 } else { 0 };
    let in_url = bytes[url..].iter().position(|byte| *byte == b'"').map_or(0, |at| url + at + 1);
    let from = if url > 0 { in_url } else { 0 };
    let mut is_escaped = false;
    let is_end = |byte: &u8| {
        let is_end = byte.is_ascii_control() || *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    };
    bytes[from..].iter().position(is_end).map_or(bytes.len(), |at| from + at)
}

fn find(body: &[u8], text: &[u8]) -> Option<usize> {
    body.windows(text.len()).position(|part| part == text)
}

/// The reason for a log line: the printable part of a message in text, or of the message of a `Status` in JSON.
pub fn reason(body: &[u8]) -> String {
    let status = || serde_json::from_slice::<serde_json::Value>(body).ok();
    let message = status().and_then(|status| Some(status["message"].as_str()?.to_owned()));
    let body = message.as_deref().map_or(body, str::as_bytes);
    let text = String::from_utf8_lossy(&body[..body.len().min(MAX_REASON)]);
    // Characters that change the direction of text are no control characters (UAX 9).
    let is_format = |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_bad = |c: char| c.is_control() || is_format(c) || c == char::REPLACEMENT_CHARACTER;
    let printable = |c: char| if is_bad(c) { ' ' } else { c };
    text.trim().chars().map(printable).collect()
}

/// A failure of a group at an endpoint.
#[derive(Debug, Clone, Copy)]
pub struct GroupFailure<'a> {
    /// The text for status and log.
    pub reason: &'a str,
    /// The endpoint has not answered, which is a suspicion until the probe is not answered either.
    pub is_silent: bool,
    /// The request was the probe ([`GroupHealth::sent`]).
    pub is_probe: bool,
}

/// What a failure has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupNews {
    /// Nothing that is reported.
    None,
    /// Several requests were not answered: watches should leave.
    Suspected,
    /// The group fails at the endpoint.
    Fails,
    /// The same, a short time after it worked again.
    FailsAgain,
}

/// A group that fails at an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingGroup {
    /// The group.
    pub group: Box<str>,
    /// The endpoint.
    pub endpoint: EndpointKey,
    /// When it began to fail.
    pub since: Instant,
    /// Why.
    pub reason: Box<str>,
    /// Number of failed requests since then.
    pub failures: u64,
    /// When the next probe may be sent.
    pub probe_at: Instant,
}

/// The groups that fail, and those that are slow.
#[derive(Debug, Default)]
pub struct GroupHealth(BTreeMap<Box<str>, Group>);

#[derive(Debug, Default)]
struct Group {
    endpoints: Vec<AtEndpoint>,
    /// The slowest head, and when it arrived.
    slowest: Option<(Duration, Instant)>,
    /// When a response first said that the group is unavailable after one that did not, and when the last one did.
    unavailable: Option<(Instant, Instant)>,
}

/// What shows that a group fails at an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Evidence {
    /// A request was not answered: a suspicion.
    Suspicion,
    /// The apiserver has said so.
    Answer,
    /// The probe was not answered either.
    Silence,
}

/// A group that fails at an endpoint, or did so recently.
#[derive(Debug)]
struct AtEndpoint {
    endpoint: EndpointKey,
    since: Instant,
    last_failure: Instant,
    reason: Box<str>,
    evidence: Evidence,
    /// It has failed a short time before.
    is_resumed: bool,
    failures: u64,
    pause: Backoff,
    /// When the pause ends.
    due: Instant,
    is_probed: bool,
    /// It works again; until this time a failure continues the pauses.
    works_until: Option<Instant>,
}

impl AtEndpoint {
    /// Nothing has failed yet.
    fn new(endpoint: EndpointKey, now: Instant) -> Self {
        Self {
            endpoint,
            since: now,
            last_failure: now,
            reason: "".into(),
            evidence: Evidence::Suspicion,
            is_resumed: false,
            failures: 0,
            pause: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            due: now,
            is_probed: false,
            works_until: Some(now),
        }
    }

    fn fails(&self) -> bool {
        self.works_until.is_none()
    }

    fn is_known_to_fail(&self) -> bool {
        self.fails() && self.evidence != Evidence::Suspicion
    }

    /// Whether watches should leave: after one late response alone they stay.
    fn may_have_lost_path(&self) -> bool {
        self.is_known_to_fail() || self.fails() && self.failures >= SUSPECTED_AFTER
    }

    fn is_due(&self, now: Instant) -> bool {
        self.fails() && !self.is_probed && now >= self.due
    }
}

impl GroupHealth {
    /// Whether a group fails anywhere, or is unavailable.
    pub fn any_fails(&self) -> bool {
        let fails = |group: &Group| group.endpoints.iter().any(AtEndpoint::fails);
        self.0.values().any(|group| group.unavailable.is_some() || fails(group))
    }

    /// Whether a slow head of a group is remembered.
    pub fn any_slow(&self) -> bool {
        self.0.values().any(|group| group.slowest.is_some())
    }

    /// The endpoints at which the group fails or is suspected to, which its requests do not prefer.
    pub fn avoided(&self, group: &str) -> Vec<EndpointKey> {
        let endpoints = self.0.get(group).map_or(&[][..], |group| &group.endpoints);
        endpoints.iter().filter(|one| one.fails()).map(|one| one.endpoint).collect()
    }

    /// An endpoint at which the group fails, and to which a probe may be sent.
    pub fn due(&self, group: &str, now: Instant) -> Option<EndpointKey> {
        let mut endpoints = self.0.get(group)?.endpoints.iter();
        endpoints.find(|one| one.is_due(now)).map(|one| one.endpoint)
    }

    /// Whether watches of the group should leave this endpoint. `Some(true)` if it is known that their streams may have lost
    /// their path, too.
    pub fn fails_at(&self, group: &str, endpoint: EndpointKey) -> Option<bool> {
        let one = self.0.get(group)?.endpoints.iter().find(|one| one.endpoint == endpoint)?;
        one.may_have_lost_path().then_some(one.evidence == Evidence::Silence)
    }

    /// A safe request of the group was sent to this endpoint. Returns whether it is the probe, whose end the caller reports:
    /// by [`Self::failed`], [`Self::answered`] or [`Self::probe_abandoned`].
    pub fn sent(&mut self, group: &str, endpoint: EndpointKey, now: Instant) -> bool {
        let Some(one) = self.at(group, endpoint) else { return false };
        let is_probe = one.is_due(now);
        one.is_probed |= is_probe;
        is_probe
    }

    /// The client of the probe has left before its answer.
    pub fn probe_abandoned(&mut self, group: &str, endpoint: EndpointKey) {
        if let Some(one) = self.at(group, endpoint) {
            one.is_probed = false;
        }
    }

    /// The group has failed at this endpoint. Returns what is new; `None` if it is not remembered, because there are too many
    /// groups.
    pub fn failed(
        &mut self,
        group: &str,
        endpoint: EndpointKey,
        failure: GroupFailure<'_>,
        now: Instant,
    ) -> Option<GroupNews> {
        let GroupFailure { reason, is_silent, is_probe } = failure;
        self.prune(now);
        if !self.may_remember(group) {
            return None;
        }
        let endpoints = &mut self.0.entry(group.into()).or_default().endpoints;
        let position = endpoints.iter().position(|one| one.endpoint == endpoint);
        let at = position.unwrap_or(endpoints.len());
        if position.is_none() {
            endpoints.push(AtEndpoint::new(endpoint, now));
        }
        let one = &mut endpoints[at];
        let begins = one.works_until.take().is_some();
        if begins {
            (one.since, one.failures, one.evidence) = (now, 0, Evidence::Suspicion);
            one.is_resumed = one.pause.failures() > 0;
        }
        let (was_known, was_left) = (one.is_known_to_fail(), one.may_have_lost_path());
        one.evidence = match is_silent {
            false => Evidence::Answer,
            true if is_probe || was_known => Evidence::Silence,
            true => Evidence::Suspicion,
        };
        if begins || is_probe || one.is_due(now) {
            one.due = now + one.pause.failed();
            one.is_probed = false;
        }
        one.failures += 1;
        (one.last_failure, one.reason) = (now, reason.into());
        let is_left = one.may_have_lost_path() && !was_left;
        Some(match (one.is_known_to_fail() && !was_known, one.is_resumed) {
            (false, false) if is_left => GroupNews::Suspected,
            (false, _) => GroupNews::None,
            (true, false) => GroupNews::Fails,
            (true, true) => GroupNews::FailsAgain,
        })
    }

    /// A response says that the group is unavailable. Returns whether it was available a moment ago, so that a request may be
    /// sent again. `is_disputed`: it fails at one endpoint and works at another.
    pub fn unavailable(&mut self, group: &str, is_disputed: bool, now: Instant) -> bool {
        self.prune(now);
        if !self.may_remember(group) {
            return false;
        }
        let unavailable = &mut self.0.entry(group.into()).or_default().unavailable;
        let (since, _) = unavailable.unwrap_or((now, now));
        *unavailable = Some((since, now));
        now < since + if is_disputed { DISPUTED_TIME } else { UNAVAILABLE_TIME }
    }

    /// An endpoint has answered a request of the group that was sent at `sent_at`. Returns whether the group has failed there
    /// and works again.
    pub fn answered(
        &mut self,
        group: &str,
        endpoint: EndpointKey,
        (sent_at, is_probe): (Instant, bool),
        now: Instant,
    ) -> bool {
        if let Some(group) = self.0.get_mut(group) {
            group.unavailable = None;
        }
        let Some(one) = self.at(group, endpoint) else { return false };
        let ends = one.fails() && (is_probe || sent_at > one.last_failure);
        let is_reported = ends && one.is_known_to_fail();
        if ends {
            one.works_until = Some(now + 2 * one.pause.pause());
            one.is_probed = false;
        }
        is_reported
    }

    /// A head of the group took this long.
    pub fn took(&mut self, group: &str, latency: Duration, now: Instant) {
        self.prune(now);
        if self.may_remember(group) {
            let slowest = &mut self.0.entry(group.into()).or_default().slowest;
            if slowest.is_none_or(|(longest, _)| latency >= longest) {
                *slowest = Some((latency, now));
            }
        }
    }

    /// How long a safe request of the group waits for its head before another endpoint is asked, too: twice as long as the
    /// slowest answer of the last minutes.
    /// `probed`: the endpoint of the probe, if the request is one.
    pub fn head_wait(&self, group: &str, probed: Option<EndpointKey>, now: Instant) -> Duration {
        let slowest = self.0.get(group).and_then(|group| group.slowest);
        let recent = slowest.filter(|(_, at)| now < *at + SLOW_MEMORY);
        let slowest = recent.map_or(Duration::ZERO, |(latency, _)| latency);
        let probes = |endpoint| {
            let at = self.0.get(group)?.endpoints.iter().find(|one| one.endpoint == endpoint)?;
            Some(at.pause.failures().saturating_sub(1))
        };
        let least = match probed {
            Some(endpoint) => {
                let probes = probes(endpoint).unwrap_or_default().min(8);
                (PROBE_WAIT * (1 << probes)).min(HEAD_WAIT)
            }
            None => HEAD_WAIT,
        };
        (2 * slowest).clamp(least, LONGEST_HEAD_WAIT)
    }

    /// Forgets all other endpoints, and failures that no request has confirmed for [`MEMORY`]. Returns the failures that end
    /// by this.
    pub fn retain(
        &mut self,
        endpoints: &[EndpointKey],
        now: Instant,
    ) -> Vec<(Box<str>, EndpointKey)> {
        let mut ended = Vec::new();
        for (name, group) in &mut self.0 {
            group.endpoints.retain(|one| {
                let is_kept = endpoints.contains(&one.endpoint) && now < one.last_failure + MEMORY;
                if !is_kept && one.is_known_to_fail() {
                    ended.push((name.clone(), one.endpoint));
                }
                is_kept
            });
        }
        self.prune(now);
        ended
    }

    /// The groups that fail, in alphabetical order.
    pub fn failing(&self) -> Vec<FailingGroup> {
        let mut list = Vec::new();
        for (group, health) in &self.0 {
            let failing = health.endpoints.iter().filter(|one| one.is_known_to_fail());
            list.extend(failing.map(|one| FailingGroup {
                group: group.clone(),
                endpoint: one.endpoint,
                since: one.since,
                reason: one.reason.clone(),
                failures: one.failures,
                probe_at: one.due,
            }));
        }
        list
    }

    fn at(&mut self, group: &str, endpoint: EndpointKey) -> Option<&mut AtEndpoint> {
        self.0.get_mut(group)?.endpoints.iter_mut().find(|one| one.endpoint == endpoint)
    }

    fn may_remember(&self, group: &str) -> bool {
        let is_known = group == BUILT_IN || self.0.contains_key(group);
        is_known || group.len() <= MAX_NAME && self.0.len() < MAX_GROUPS
    }

    /// Forgets what does not count any more.
    fn prune(&mut self, now: Instant) {
        self.0.retain(|_, group| {
            group.endpoints.retain(|one| one.works_until.is_none_or(|until| now < until));
            group.slowest = group.slowest.filter(|(_, at)| now < *at + SLOW_MEMORY);
            group.unavailable = group.unavailable.filter(|(_, last)| now < *last + LONGEST_PAUSE);
            !group.endpoints.is_empty() || group.slowest.is_some() || group.unavailable.is_some()
        });
    }
}

#[cfg(test)]
mod tests;
