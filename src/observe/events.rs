//! State changes: one log line each, and the latest ones for `/events` and the status page.
//!
//! Every state change goes through [`Events::changed`], so that the log, `/events` and the page agree. A
//! change that repeats within [`WINDOW`] is not logged again; the next line of the same change, or a line
//! after the burst, reports how many were suppressed. `/events` has one entry for a burst, with a count.
//! At most [`MAX_EVENTS`] entries are kept.
//!
//! Requests are not events: metrics and the access log cover them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::lock;
use super::repeat_filter::RepeatFilter;
use super::utc::{Utc, wall_clock};

/// Maximum number of remembered events: about 100 KiB, at a few hundred bytes each.
pub const MAX_EVENTS: usize = 256;

/// Time within which a repeated change is logged only once.
pub const WINDOW: Duration = Duration::from_secs(5);

/// Maximum length of a reason, in bytes: it may quote an error from the network.
const MAX_REASON: usize = 512;

/// The kind of object that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// An endpoint of an upstream.
    Endpoint,
    /// One connection to an endpoint.
    Connection,
    /// A certificate, a key or a CA bundle.
    Certificate,
    /// A source of endpoints.
    Source,
    /// The configuration.
    Configuration,
    /// The jackstay process.
    Process,
}

impl EventKind {
    /// Its name in logs and in `/events`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Endpoint => "endpoint",
            Self::Connection => "connection",
            Self::Certificate => "certificate",
            Self::Source => "source",
            Self::Configuration => "configuration",
            Self::Process => "process",
        }
    }
}

/// A state change.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// The kind of object.
    pub kind: EventKind,
    /// The upstream it belongs to, if any.
    pub upstream: Option<&'a str>,
    /// The object: an endpoint's address, a file, a source. Never a secret.
    pub name: &'a str,
    /// Details that do not distinguish changes: the local address, a credential class.
    pub detail: &'a str,
    /// The state before.
    pub from: &'a str,
    /// The state now.
    pub to: &'a str,
    /// The cause.
    pub reason: &'a str,
    /// The effect on requests.
    pub effect: &'a str,
    /// Whether an operator should notice the change, which is then logged as a warning.
    pub bad: bool,
}

/// A remembered change.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// Sequence number from 1, by which a reader recognises new events.
    pub seq: u64,
    /// Time of the latest occurrence, RFC 3339.
    pub at: String,
    /// The kind of object.
    pub kind: EventKind,
    /// The upstream it belongs to.
    pub upstream: Option<String>,
    /// The object.
    pub name: String,
    /// Details of the latest occurrence.
    pub detail: String,
    /// The state before.
    pub from: String,
    /// The state after.
    pub to: String,
    /// The cause.
    pub reason: String,
    /// The effect.
    pub effect: String,
    /// Whether an operator should notice the change.
    pub bad: bool,
    /// Number of occurrences in its burst.
    pub times: u64,
    #[serde(skip)]
    key: String,
}

#[derive(Debug)]
struct Recent {
    ring: VecDeque<Event>,
    seq: u64,
    repeats: RepeatFilter,
}

/// The latest state changes.
#[derive(Debug)]
pub struct Events(Mutex<Recent>);

impl Default for Events {
    fn default() -> Self {
        let repeats = RepeatFilter::new(WINDOW);
        Self(Mutex::new(Recent { ring: VecDeque::new(), seq: 0, repeats }))
    }
}

impl Events {
    /// Logs and remembers a change. Does not block.
    pub fn changed(&self, change: &Change<'_>) {
        let suppressed = self.record(change, Instant::now(), wall_clock());
        if let Some(suppressed) = suppressed {
            let level = if change.bad { tracing::Level::WARN } else { tracing::Level::INFO };
            write(change, level, suppressed);
        }
    }

    /// Logs a routine change at debug level and does not remember it.
    pub fn routine(&self, change: &Change<'_>) {
        write(change, tracing::Level::DEBUG, 0);
    }

    /// Remembers a change that the caller logs itself.
    pub fn remember(&self, change: &Change<'_>) {
        self.record(change, Instant::now(), wall_clock());
    }

    /// Logs the suppressed repetitions of bursts that are over. Call it about once a second.
    pub fn flush(&self) {
        let ended = lock(&self.0).repeats.flush(Instant::now());
        for (line, times) in ended {
            tracing::info!(times, change = line, "repeated events suppressed");
        }
    }

    /// The latest `max` changes, oldest first.
    pub fn last(&self, max: usize) -> Vec<Event> {
        let recent = lock(&self.0);
        let skip = recent.ring.len().saturating_sub(max);
        recent.ring.iter().skip(skip).cloned().collect()
    }

    /// Remembers a change. Returns `None` if its line is suppressed, and otherwise the number of lines
    /// suppressed before it.
    fn record(&self, change: &Change<'_>, now: Instant, at: SystemTime) -> Option<u64> {
        let key = key(change);
        let mut recent = lock(&self.0);
        let admitted = recent.repeats.admit(&key, now);
        recent.seq += 1;
        let seq = recent.seq;
        let mut times = 1;
        if admitted.is_none() {
            // The entry moves to the end, so that the ring stays ordered by time.
            if let Some(index) = recent.ring.iter().rposition(|event| event.key == key) {
                times += recent.ring.remove(index).map_or(0, |event| event.times);
            }
        }
        if recent.ring.len() >= MAX_EVENTS {
            recent.ring.pop_front();
        }
        recent.ring.push_back(Event {
            seq,
            at: Utc(at).to_string(),
            kind: change.kind,
            upstream: change.upstream.map(str::to_owned),
            name: change.name.to_owned(),
            detail: change.detail.to_owned(),
            from: change.from.to_owned(),
            to: change.to.to_owned(),
            reason: super::redact::shorten(change.reason, MAX_REASON).into_owned(),
            effect: change.effect.to_owned(),
            bad: change.bad,
            times,
            key,
        });
        admitted
    }
}

/// The key under which repetitions are counted. It omits digits of the reason: ports and durations.
fn key(change: &Change<'_>) -> String {
    let reason: String = super::redact::shorten(change.reason, MAX_REASON)
        .chars()
        .map(|c| if c.is_ascii_digit() { '#' } else { c })
        .collect();
    let upstream = change.upstream.unwrap_or("-");
    let kind = change.kind.as_str();
    format!("{kind} {upstream} {}: {} to {}: {reason}", change.name, change.from, change.to)
}

/// Writes the log line. The object's name is in the field `endpoint`, `source` or `name`, as in other lines.
fn write(change: &Change<'_>, level: tracing::Level, suppressed: u64) {
    let (mut endpoint, mut source, mut name) = (None, None, None);
    match change.kind {
        EventKind::Endpoint | EventKind::Connection => endpoint = Some(change.name),
        EventKind::Source => source = Some(change.name),
        EventKind::Certificate | EventKind::Configuration | EventKind::Process => {
            name = Some(change.name);
        }
    }
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                upstream = change.upstream,
                endpoint,
                source,
                name,
                from = change.from,
                to = change.to,
                reason = change.reason,
                effect = change.effect,
                detail = (!change.detail.is_empty()).then_some(change.detail),
                suppressed = (suppressed > 0).then_some(suppressed),
                "{} changed its state",
                change.kind.as_str()
            )
        };
    }
    match level {
        tracing::Level::DEBUG => line!(debug),
        tracing::Level::INFO => line!(info),
        _ => line!(warn),
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::*;
    use crate::config::LogFormat;

    fn change<'a>(name: &'a str, reason: &'a str) -> Change<'a> {
        Change {
            kind: EventKind::Endpoint,
            upstream: Some("control-plane"),
            name,
            detail: "",
            from: "ready",
            to: "ejected",
            reason,
            effect: "receives no requests",
            bad: true,
        }
    }

    #[test]
    fn changed_logs_cause_and_effect_once_per_burst() {
        let (events, captured) = (Events::default(), Captured::default());
        captured.during(LogFormat::Text, || {
            for port in 40_000..40_040 {
                events.changed(&change("10.0.0.1:6443", &format!("refused from port {port}")));
            }
            events.changed(&change("10.0.0.2:6443", "refused"));
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:?}");
        for part in [
            " WARN endpoint changed its state ",
            r#"endpoint="10.0.0.1:6443""#,
            r#"from="ready" to="ejected" reason="refused from port 40000""#,
            r#"effect="receives no requests""#,
        ] {
            assert!(lines[0].contains(part), "no {part} in {}", lines[0]);
        }
        let kept = events.last(MAX_EVENTS);
        assert_eq!(kept.len(), 2);
        assert_eq!((kept[0].times, kept[0].reason.as_str()), (40, "refused from port 40039"));
        assert_eq!((kept[1].seq, kept[1].times), (41, 1));
        assert_eq!(events.last(1)[0].name, "10.0.0.2:6443");
    }

    #[test]
    fn record_reports_suppressed_repetitions_with_the_next_burst() {
        let (events, start) = (Events::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let (change, wall_time) = (change("a", "refused"), SystemTime::UNIX_EPOCH);
        assert_eq!(events.record(&change, at(0), wall_time), Some(0));
        for i in 1..10 {
            assert_eq!(events.record(&change, at(i), wall_time), None);
        }
        assert_eq!(events.record(&change, at(6000), wall_time), Some(9));
        let times: Vec<_> = events.last(MAX_EVENTS).iter().map(|event| event.times).collect();
        assert_eq!(times, [10, 1], "a new burst is a new entry");
    }

    #[test]
    fn last_is_bounded_and_serialises_to_json() {
        let events = Events::default();
        let long = "é".repeat(10_000);
        for i in 0..MAX_EVENTS * 3 {
            events.record(&change(&i.to_string(), &long), Instant::now(), SystemTime::UNIX_EPOCH);
        }
        let kept = events.last(usize::MAX);
        assert_eq!(kept.len(), MAX_EVENTS);
        assert!(kept[0].reason.len() < MAX_REASON + 4);
        let json = serde_json::to_value(&kept[0]).expect("plain data");
        assert_eq!(
            (&json["kind"], &json["at"]),
            (&"endpoint".into(), &"1970-01-01T00:00:00.000Z".into())
        );
        assert!(json.get("key").is_none());
    }
}
