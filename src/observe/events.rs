//! State changes: one log line each, and the latest ones for `/events` and the status page.
//!
//! Every state change goes through [`Events::changed`], so that the log, `/events` and the page agree. A
//! change that repeats within [`WINDOW`] is not logged again; the next line of the same change, or a line
//! after the burst, reports how many were suppressed, and how many streams they concerned. `/events` has one
//! entry for a burst, with a count. At most [`MAX_EVENTS`] entries are kept.
//!
//! Losses of connections with open streams are never suppressed, but written as sums ([`jackstay_core::fault_lines`]),
//! and so are endpoints that fail together.
//!
//! Requests are not events: metrics and the access log cover them.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use jackstay_core::endpoint_state::Availability;
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;

pub use super::change::{Change, EventKind};
use super::change::{level_of, write, write_fault};
use super::lock;
use super::repeat_filter::{RepeatFilter, Suppressed};
use jackstay_core::fault_lines::{FaultLines, Loss};
use jackstay_core::open_streams::OpenStreams;

/// Maximum number of remembered events: about 100 KiB, at a few hundred bytes each.
pub const MAX_EVENTS: usize = 256;

/// Time within which a repeated change is logged only once.
pub const WINDOW: Duration = Duration::from_secs(5);

/// Maximum length of a reason, in bytes: it may quote an error from the network.
const MAX_REASON: usize = 512;

/// How much a change of a connection matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Usual in healthy operation, such as a GOAWAY. Logged only if streams are open, and not in `/status`.
    Routine,
    /// Worth a line.
    Notable,
    /// A fault. Open streams fail or move to another connection.
    Fault,
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
    /// Sum of the open streams or flows that were concerned.
    #[serde(skip_serializing_if = "OpenStreams::is_empty")]
    pub open: OpenStreams,
    #[serde(skip)]
    routine: bool,
    #[serde(skip)]
    noted_at: Option<Instant>,
    #[serde(skip)]
    key: String,
}

#[derive(Debug)]
struct Recent {
    ring: VecDeque<Event>,
    seq: u64,
    repeats: RepeatFilter,
    faults: FaultLines,
}

/// The latest state changes.
#[derive(Debug)]
pub struct Events(Mutex<Recent>);

impl Default for Events {
    fn default() -> Self {
        let repeats = RepeatFilter::new(WINDOW);
        let (ring, faults) = (VecDeque::new(), FaultLines::default());
        Self(Mutex::new(Recent { ring, seq: 0, repeats, faults }))
    }
}

impl Events {
    /// Logs and remembers a change. Does not block.
    pub fn changed(&self, change: &Change<'_>) {
        let suppressed = self.record(change, Noted::default(), clock::now(), wall_clock());
        if let Some(suppressed) = suppressed {
            write(change, level_of(change), suppressed, None);
        }
    }

    /// Logs and remembers the change of an endpoint that has this availability now. `lost` are flows that end
    /// with it. The line also reports the connections that were lost shortly before, and may be bundled with
    /// those of other endpoints.
    pub fn endpoint_changed(
        &self,
        change: &Change<'_>,
        availability: Availability,
        mut lost: Loss,
    ) {
        let (upstream, now) = (change.upstream.unwrap_or("-"), clock::now());
        lost.add(lock(&self.0).faults.available(upstream, change.name, availability, now));
        let noted = Noted { open: lost.open, routine: false };
        let Some(suppressed) = self.record(change, noted, now, wall_clock()) else { return };
        let state = (change.to, change.reason);
        let mut level = level_of(change);
        if change.bad {
            let faults = &mut lock(&self.0).faults;
            if faults.has_outage(upstream) {
                level = tracing::Level::INFO;
            } else if !faults.admit(upstream, change.name, state, lost, now) {
                return;
            }
        }
        write(change, level, suppressed, Some(lost));
    }

    /// Records that an endpoint has ended a flow in an orderly way. The line of the endpoint counts it if the
    /// endpoint fails at once: the kernel also ends the flows of a process that is killed.
    pub fn flow_ended(&self, upstream: &str, endpoint: &str) {
        lock(&self.0).faults.ended(upstream, endpoint, clock::now());
    }

    /// Records that the caller has reported an outage of the upstream, or that it is over. Meanwhile faults of
    /// its endpoints and connections are logged at level info, because the line of the outage covers them.
    pub fn set_outage(&self, upstream: &str, active: bool) {
        lock(&self.0).faults.set_outage(upstream, active);
    }

    /// Logs and remembers the change of a connection with `open` streams, or the end of a flow.
    pub fn connection_changed(&self, change: &Change<'_>, open: OpenStreams, severity: Severity) {
        let now = clock::now();
        let routine = severity == Severity::Routine;
        let fault = severity == Severity::Fault && !open.is_empty();
        let change = &Change { bad: fault, ..*change };
        let suppressed = self.record(change, Noted { open, routine }, now, wall_clock());
        if fault {
            let (upstream, loss) = (change.upstream.unwrap_or("-"), Loss { connections: 1, open });
            let reason = super::redact::shorten(change.reason, MAX_REASON);
            lock(&self.0).faults.lost(upstream, change.name, &reason, loss, now);
        } else if let Some(suppressed) = suppressed {
            let quiet = routine && open.is_empty();
            let level = if quiet { tracing::Level::DEBUG } else { tracing::Level::INFO };
            write(change, level, suppressed, None);
        }
    }

    /// Logs a routine change at debug level and does not remember it.
    pub fn routine(&self, change: &Change<'_>) {
        write(change, tracing::Level::DEBUG, Suppressed::default(), None);
    }

    /// Remembers a change that the caller logs itself.
    pub fn remember(&self, change: &Change<'_>) {
        self.record(change, Noted::default(), clock::now(), wall_clock());
    }

    /// Logs the suppressed repetitions of bursts that are over, and the lines about faults that are due. Call
    /// it about once a second.
    pub fn flush(&self) {
        let now = clock::now();
        let (ended, faults) = {
            let mut recent = lock(&self.0);
            (recent.repeats.flush(now), recent.faults.due(now))
        };
        for (line, Suppressed { times, open }) in ended {
            let open = (!open.is_empty()).then(|| open.to_string());
            tracing::info!(times, open, change = line, "repeated events suppressed");
        }
        faults.iter().for_each(write_fault);
    }

    /// The latest `max` changes that are not routine, oldest first, for `/status`.
    pub fn last_notable(&self, max: usize) -> Vec<Event> {
        let recent = lock(&self.0);
        let notable = recent.ring.iter().rev().filter(|event| !event.routine).take(max);
        let mut events: Vec<_> = notable.cloned().collect();
        events.reverse();
        events
    }

    /// The latest `max` changes, oldest first.
    pub fn last(&self, max: usize) -> Vec<Event> {
        let recent = lock(&self.0);
        let skip = recent.ring.len().saturating_sub(max);
        recent.ring.iter().skip(skip).cloned().collect()
    }

    /// Remembers a change. Returns `None` if its line is suppressed, and otherwise the lines suppressed before
    /// it. The line of a fault with open streams is written elsewhere and not counted as suppressed.
    fn record(
        &self,
        change: &Change<'_>,
        Noted { mut open, routine }: Noted,
        now: Instant,
        at: SystemTime,
    ) -> Option<Suppressed> {
        let key = key(change, open);
        let mut recent = lock(&self.0);
        let bundled = change.kind == EventKind::Connection && change.bad;
        let admitted = if bundled { None } else { recent.repeats.admit_with(&key, open, now) };
        recent.seq += 1;
        let seq = recent.seq;
        let mut times = 1;
        if admitted.is_none() {
            // The entry moves to the end, so that the ring stays ordered by time.
            let is_recent = |event: &Event| {
                event.noted_at.is_some_and(|at| now.saturating_duration_since(at) < WINDOW)
            };
            let is_same = |event: &Event| event.key == key && (!bundled || is_recent(event));
            if let Some(index) = recent.ring.iter().rposition(is_same)
                && let Some(previous) = recent.ring.remove(index)
            {
                times += previous.times;
                open += previous.open;
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
            open,
            routine,
            noted_at: Some(now),
            key,
        });
        admitted
    }
}

/// What is remembered beside a change.
#[derive(Debug, Clone, Copy, Default)]
struct Noted {
    open: OpenStreams,
    routine: bool,
}

/// The key under which repetitions are counted. It omits digits of the reason: ports and durations. A change
/// without open streams does not suppress one with them.
fn key(change: &Change<'_>, open: OpenStreams) -> String {
    let reason: String = super::redact::shorten(change.reason, MAX_REASON)
        .chars()
        .map(|c| if c.is_ascii_digit() { '#' } else { c })
        .collect();
    let upstream = change.upstream.unwrap_or("-");
    let kind = change.kind.as_str();
    let open = if open.is_empty() { "" } else { " with open streams" };
    format!("{kind} {upstream} {}{open}: {} to {}: {reason}", change.name, change.from, change.to)
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::*;
    use jackstay_config::LogFormat;

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
        let (events, start) = (Events::default(), clock::now());
        let at = |ms| start + Duration::from_millis(ms);
        let (change, wall_time) = (change("a", "refused"), SystemTime::UNIX_EPOCH);
        let record = |ms| {
            let suppressed = events.record(&change, Noted::default(), at(ms), wall_time);
            suppressed.map(|suppressed| suppressed.times)
        };
        assert_eq!(record(0), Some(0));
        for i in 1..10 {
            assert_eq!(record(i), None);
        }
        assert_eq!(record(6000), Some(9));
        let times: Vec<_> = events.last(MAX_EVENTS).iter().map(|event| event.times).collect();
        assert_eq!(times, [10, 1], "a new burst is a new entry");
    }

    #[test]
    fn last_is_bounded_and_serialises_to_json() {
        let events = Events::default();
        let long = "é".repeat(10_000);
        for i in 0..MAX_EVENTS * 3 {
            let (name, at) = (i.to_string(), SystemTime::UNIX_EPOCH);
            events.record(&change(&name, &long), Noted::default(), clock::now(), at);
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
    fn closed<'a>(name: &'a str, to: &'a str, reason: &'a str) -> Change<'a> {
        let kind = EventKind::Connection;
        Change { kind, name, from: "live", to, reason, bad: false, ..change(name, reason) }
    }

    /// The prober's connection, which has no streams, ends first. The lines after it are about watches.
    #[tokio::test(start_paused = true)]
    async fn connection_changed_writes_each_loss_of_open_streams() {
        let (events, captured) = (Events::default(), Captured::default());
        let none = OpenStreams::default();
        captured.during(LogFormat::Text, || {
            let lost = closed("a", "dead", "closed by the apiserver: EOF");
            events.connection_changed(&lost, none, Severity::Fault);
            events.connection_changed(&lost, none, Severity::Fault);
            for _ in 0..1_000 {
                let open = OpenStreams::of_connection(21, 20);
                events.connection_changed(&lost, open, Severity::Fault);
            }
        });
        tokio::time::advance(Duration::from_secs(5)).await;
        captured.during(LogFormat::Text, || events.flush());
        let lines = captured.lines();
        assert_eq!(lines.len(), 3, "{lines:#?}");
        assert!(lines[0].contains(" INFO connection changed its state "), "{lines:#?}");
        assert!(
            lines[1].contains(" INFO repeated events suppressed times=1 change="),
            "{lines:#?}"
        );
        for part in [
            " WARN connections lost upstream=\"control-plane\" endpoint=\"a\" ",
            r#"connections=1000 open="1000 requests, 20000 watches""#,
        ] {
            assert!(lines[2].contains(part), "no {part} in {lines:#?}");
        }
        let kept = events.last(MAX_EVENTS);
        assert_eq!(
            kept.iter().map(|event| (event.times, event.bad)).collect::<Vec<_>>(),
            [(2, false), (1_000, true)]
        );
        assert_eq!(kept[1].open, OpenStreams { requests: 1_000, watches: 20_000, flows: 0 });
    }

    #[tokio::test(start_paused = true)]
    async fn suppressed_lines_of_connections_are_summed() {
        let (events, captured) = (Events::default(), Captured::default());
        captured.during(LogFormat::Text, || {
            for _ in 0..4 {
                let open = OpenStreams::of_connection(9, 7);
                events.connection_changed(&closed("a", "suspect", "late"), open, Severity::Notable);
            }
        });
        tokio::time::advance(WINDOW).await;
        captured.during(LogFormat::Text, || events.flush());
        let lines = captured.lines();
        assert_eq!(lines.len(), 2, "{lines:#?}");
        assert!(lines[1].contains(r#"times=3 open="6 requests, 21 watches""#), "{lines:#?}");
    }

    #[test]
    fn endpoint_changed_reports_lost_connections_in_one_line() {
        let (events, captured) = (Events::default(), Captured::default());
        captured.during(LogFormat::Text, || {
            let open = OpenStreams::of_connection(21, 20);
            let lost = closed("10.0.0.1:6443", "dead", "EOF");
            events.connection_changed(&lost, open, Severity::Fault);
            let ejected = change("10.0.0.1:6443", "refused");
            events.endpoint_changed(&ejected, Availability::Down, Loss::default());
            events.flush();
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:#?}");
        assert!(lines[0].contains(" WARN endpoint changed its state "), "{lines:#?}");
        assert!(
            lines[0].contains(r#"connections_lost=1 open="1 request, 20 watches""#),
            "{lines:#?}"
        );
    }

    #[test]
    fn endpoint_changed_during_a_reported_outage_is_no_warning() {
        let (events, captured) = (Events::default(), Captured::default());
        let eject = |name| {
            let ejected = change(name, "refused");
            events.endpoint_changed(&ejected, Availability::Down, Loss::default());
        };
        captured.during(LogFormat::Text, || {
            events.set_outage("control-plane", true);
            eject("10.0.0.1:6443");
            events.set_outage("control-plane", false);
            eject("10.0.0.2:6443");
        });
        let lines = captured.lines();
        assert!(lines[0].contains(" INFO endpoint changed its state "), "{lines:#?}");
        assert!(lines[1].contains(" WARN endpoint changed its state "), "{lines:#?}");
    }

    #[test]
    fn last_notable_omits_goaways_of_healthy_connections() {
        let (events, captured) = (Events::default(), Captured::default());
        captured.during(LogFormat::Text, || {
            events.changed(&change("10.0.0.1:6443", "refused"));
            for name in 0..20 {
                let name = name.to_string();
                let goaway = closed(&name, "draining", "GOAWAY NO_ERROR");
                events.connection_changed(&goaway, OpenStreams::default(), Severity::Routine);
            }
            let open = OpenStreams::of_connection(1, 0);
            let goaway = closed("b", "draining", "GOAWAY NO_ERROR");
            events.connection_changed(&goaway, open, Severity::Routine);
        });
        assert_eq!(events.last(usize::MAX).len(), 22);
        let notable = events.last_notable(8);
        assert_eq!(notable.len(), 1);
        assert_eq!(notable[0].reason, "refused");
        assert_eq!(captured.lines().len(), 2, "{:#?}", captured.lines());
    }
}
