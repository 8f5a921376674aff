//! What changed, when, from what to what and why: one log line each, and the last ones for people.
//!
//! Every state change goes through [`Events::changed`], so that the log, `/events` and the page tell
//! the same story. A change that repeats within [`WINDOW`] is not written again: the next line like
//! it, or the end of the burst, says how many were left out. The ring keeps one entry for it that
//! counts. Both are bounded.
//!
//! Not promised: an event for every request. What happens to requests is counted in metrics and told
//! by the access log.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use super::repeat_filter::RepeatFilter;
use super::utc::Utc;

/// Events that are remembered; with a few hundred bytes each, some 100 KiB at most.
pub const KEPT: usize = 256;

/// A change that repeats is written once in this time.
pub const WINDOW: Duration = Duration::from_secs(5);

/// Longest reason that is kept, in bytes: it may quote an error from the network.
const MAX_REASON: usize = 512;

/// What kind of thing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
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
    /// The program itself.
    Process,
}

impl Kind {
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

/// A change of state, as whoever sees it happen tells it.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// What kind of thing.
    pub kind: Kind,
    /// The upstream it belongs to, if any.
    pub upstream: Option<&'a str>,
    /// Which one: an endpoint's address, a file, a source. Never a secret.
    pub name: &'a str,
    /// More for the log that does not make it another change: our address, a class.
    pub detail: &'a str,
    /// The state before.
    pub from: &'a str,
    /// The state now.
    pub to: &'a str,
    /// The cause.
    pub reason: &'a str,
    /// The effect, in a few words.
    pub effect: &'a str,
    /// Whether somebody should look at it: the line is a warning.
    pub bad: bool,
}

/// A remembered change.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    /// Counts up from 1, so that a reader knows what is new.
    pub seq: u64,
    /// When it happened (the last time, if it repeated), RFC 3339.
    pub at: String,
    /// What kind of thing.
    pub kind: Kind,
    /// The upstream it belongs to.
    pub upstream: Option<String>,
    /// Which one.
    pub name: String,
    /// More, of the last one where it repeated: our address, a class.
    pub detail: String,
    /// The state before.
    pub from: String,
    /// The state after.
    pub to: String,
    /// The cause.
    pub reason: String,
    /// The effect.
    pub effect: String,
    /// Whether somebody should look at it.
    pub bad: bool,
    /// How often it happened within a burst.
    pub times: u64,
    #[serde(skip)]
    key: String,
}

#[derive(Debug)]
struct Kept {
    ring: VecDeque<Event>,
    seq: u64,
    repeats: RepeatFilter,
}

/// The last changes.
#[derive(Debug)]
pub struct Events {
    kept: Mutex<Kept>,
}

impl Default for Events {
    fn default() -> Self {
        let repeats = RepeatFilter::new(WINDOW);
        Self { kept: Mutex::new(Kept { ring: VecDeque::new(), seq: 0, repeats }) }
    }
}

impl Events {
    /// Writes and remembers a change. Nothing here waits.
    pub fn changed(&self, change: &Change<'_>) {
        let left_out = self.keep(change, Instant::now(), SystemTime::now());
        if let Some(left_out) = left_out {
            write(change, if change.bad { Level::Bad } else { Level::News }, left_out);
        }
    }

    /// Writes a change of everyday operation, at debug, and does not remember it.
    pub fn routine(&self, change: &Change<'_>) {
        write(change, Level::Routine, 0);
    }

    /// Remembers a change that has lines of its own in the log.
    pub fn remember(&self, change: &Change<'_>) {
        self.keep(change, Instant::now(), SystemTime::now());
    }

    /// Tells how bursts ended that nobody heard of since. Call it about once a second.
    pub fn flush(&self) {
        let ended = self.kept().repeats.flush(Instant::now());
        for (line, times) in ended {
            tracing::info!(times, change = line, "this happened more often than it was written");
        }
    }

    /// The last changes, oldest first, at most `most` of them.
    pub fn last(&self, most: usize) -> Vec<Event> {
        let kept = self.kept();
        let skip = kept.ring.len().saturating_sub(most);
        kept.ring.iter().skip(skip).cloned().collect()
    }

    /// Remembers a change. How many like it were left out of the log if it is to be written.
    fn keep(&self, change: &Change<'_>, now: Instant, at: SystemTime) -> Option<u64> {
        let key = key(change);
        let mut kept = self.kept();
        let admitted = kept.repeats.admit(&key, now);
        kept.seq += 1;
        let seq = kept.seq;
        let mut times = 1;
        if admitted.is_none() {
            // The newest is at the end, so that the ring stays in the order of time.
            if let Some(at) = kept.ring.iter().rposition(|event| event.key == key) {
                times += kept.ring.remove(at).map_or(0, |event| event.times);
            }
        }
        if kept.ring.len() >= KEPT {
            kept.ring.pop_front();
        }
        kept.ring.push_back(Event {
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

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What makes two changes the same: not the numbers in the reason, which are ports and durations.
fn key(change: &Change<'_>) -> String {
    let reason: String = super::redact::shorten(change.reason, MAX_REASON)
        .chars()
        .map(|c| if c.is_ascii_digit() { '#' } else { c })
        .collect();
    let upstream = change.upstream.unwrap_or("-");
    let kind = change.kind.as_str();
    format!("{kind} {upstream} {}: {} to {}: {reason}", change.name, change.from, change.to)
}

/// How much attention a change deserves.
#[derive(Debug, Clone, Copy)]
enum Level {
    Routine,
    News,
    Bad,
}

/// The log calls what changed what metrics and other lines call it.
fn write(change: &Change<'_>, level: Level, left_out: u64) {
    let (mut endpoint, mut source, mut name) = (None, None, None);
    match change.kind {
        Kind::Endpoint | Kind::Connection => endpoint = Some(change.name),
        Kind::Source => source = Some(change.name),
        Kind::Certificate | Kind::Configuration | Kind::Process => name = Some(change.name),
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
                left_out = (left_out > 0).then_some(left_out),
                "{} changed its state",
                change.kind.as_str()
            )
        };
    }
    match level {
        Level::Routine => line!(debug),
        Level::News => line!(info),
        Level::Bad => line!(warn),
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::*;
    use crate::config::LogFormat;

    fn change<'a>(name: &'a str, reason: &'a str) -> Change<'a> {
        Change {
            kind: Kind::Endpoint,
            upstream: Some("control-plane"),
            name,
            detail: "",
            from: "ready",
            to: "ejected",
            reason,
            effect: "no request goes there",
            bad: true,
        }
    }

    #[test]
    fn a_line_tells_cause_and_effect_and_a_burst_is_one_line() {
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
            r#"effect="no request goes there""#,
        ] {
            assert!(lines[0].contains(part), "no {part} in {}", lines[0]);
        }
        let kept = events.last(KEPT);
        assert_eq!(kept.len(), 2);
        assert_eq!((kept[0].times, kept[0].reason.as_str()), (40, "refused from port 40039"));
        assert_eq!((kept[1].seq, kept[1].times), (41, 1));
        assert_eq!(events.last(1)[0].name, "10.0.0.2:6443");
    }

    #[test]
    fn the_next_burst_says_what_was_left_out() {
        let (events, start) = (Events::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let (line, clock) = (change("a", "refused"), SystemTime::UNIX_EPOCH);
        assert_eq!(events.keep(&line, at(0), clock), Some(0));
        for i in 1..10 {
            assert_eq!(events.keep(&line, at(i), clock), None);
        }
        assert_eq!(events.keep(&line, at(6000), clock), Some(9));
        let times: Vec<_> = events.last(KEPT).iter().map(|event| event.times).collect();
        assert_eq!(times, [10, 1], "a new burst is a new entry");
    }

    #[test]
    fn memory_is_bounded_and_json_is_for_machines() {
        let events = Events::default();
        let long = "é".repeat(10_000);
        for i in 0..KEPT * 3 {
            events.keep(&change(&i.to_string(), &long), Instant::now(), SystemTime::UNIX_EPOCH);
        }
        let kept = events.last(usize::MAX);
        assert_eq!(kept.len(), KEPT);
        assert!(kept[0].reason.len() < MAX_REASON + 4);
        let json = serde_json::to_value(&kept[0]).expect("plain data");
        assert_eq!(
            (&json["kind"], &json["at"]),
            (&"endpoint".into(), &"1970-01-01T00:00:00.000Z".into())
        );
        assert!(json.get("key").is_none());
    }
}
