//! The warnings about one fault as few lines: one fault can end thousands of connections, and connections to
//! several endpoints.
//!
//! | reported | written |
//! |---|---|
//! | the first endpoint that fails | at once |
//! | more endpoints of the upstream that enter the same state | as one line, [`BURST`] after the first line |
//! | endpoints that are suspect | as one line, [`COLLECT`] after the first, unless they serve or are down by then |
//! | connections with open streams that are lost | as one line with sums, [`COLLECT`] after the first; the next one [`BURST`] later |
//! | the same, while it is uncertain whether their endpoint fails too | when this is known: in the line of the endpoint, or as a line of their own |
//! | connections lost after the line of their endpoint | at level info |
//! | flows that the endpoint has ended in an orderly way, as the kernel does when it kills a process | in the line of the endpoint if it fails within [`KILL_TIME`] |
//! | anything about an upstream with a reported outage, whose line names its endpoints | at level info |

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::endpoint_state::Availability;
use crate::open_streams::OpenStreams;

/// How long losses of connections are collected before their line.
const COLLECT: Duration = Duration::from_millis(500);
/// Time between two lines of one kind about an upstream.
const BURST: Duration = Duration::from_secs(3);
/// Longest wait for the state of an endpoint that is uncertain. A connect takes 3 s, and a stopped process is
/// ejected after 5 s.
const UNCERTAIN_LIMIT: Duration = Duration::from_secs(10);
/// Time in which the kernel ends the flows and connections of a process that is killed.
const KILL_TIME: Duration = Duration::from_millis(100);
/// Maximum number of endpoints in a line that are named.
const MAX_NAMED: usize = 8;
/// Maximum number of endpoints that are counted one by one.
const MAX_ENDPOINTS: usize = 64;

/// What connections of an endpoint lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Loss {
    /// Number of connections, or of flows.
    pub connections: u64,
    /// Their open streams.
    pub open: OpenStreams,
}

/// A line about endpoints of one upstream.
#[derive(Debug, PartialEq, Eq)]
pub struct FaultLine {
    /// Its name.
    pub upstream: String,
    /// The state that the endpoints have entered; `None` if connections were lost.
    pub state: Option<String>,
    /// The addresses.
    pub endpoints: String,
    /// Their number.
    pub count: usize,
    /// The reason, of each endpoint if there are several.
    pub reason: String,
    /// What was lost, in total.
    pub loss: Loss,
    /// The fault was reported, so the line is no warning.
    pub reported: bool,
}

/// Collects faults. All times are arguments.
#[derive(Debug, Default)]
pub struct FaultLines {
    /// By upstream, and by the state that endpoints enter; `None` for losses of connections.
    bursts: BTreeMap<(String, Option<String>), Burst>,
    /// Upstream and address of the endpoints that do not serve.
    not_serving: HashMap<(String, String), Availability>,
    /// The upstreams whose outage is reported.
    outages: HashSet<String>,
}

#[derive(Debug, Default)]
struct Burst {
    entries: Vec<Entry>,
    /// When the last warning was written.
    written: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    endpoint: String,
    reason: String,
    loss: Loss,
    /// Flows that the endpoint has ended within [`KILL_TIME`] of each other, which is a loss only if it is down.
    ended: Loss,
    ended_at: Instant,
    since: Instant,
    /// The endpoint is suspect: its line is not needed once its availability is known.
    uncertain: bool,
    /// The line of an outage that is over has covered it.
    covered: bool,
}

impl Burst {
    fn is_paused(&self, now: Instant) -> bool {
        self.written.is_some_and(|written| now.saturating_duration_since(written) < BURST)
    }

    /// The entry of the endpoint; of the last one if there are too many. A new one has no loss.
    fn entry(&mut self, endpoint: &str, now: Instant) -> &mut Entry {
        let full = self.entries.len() >= MAX_ENDPOINTS;
        let known = self.entries.iter_mut().position(|entry| entry.endpoint == endpoint);
        let index = known.or_else(|| full.then(|| self.entries.len() - 1));
        let index = index.unwrap_or_else(|| {
            self.entries.push(Entry {
                endpoint: endpoint.to_owned(),
                reason: String::new(),
                loss: Loss::default(),
                ended: Loss::default(),
                ended_at: now,
                since: now,
                uncertain: false,
                covered: false,
            });
            self.entries.len() - 1
        });
        &mut self.entries[index]
    }

    fn add(&mut self, endpoint: &str, reason: &str, loss: Loss, now: Instant) -> &mut Entry {
        let entry = self.entry(endpoint, now);
        entry.loss.add(loss);
        entry.covered = false;
        if entry.reason.is_empty() {
            reason.clone_into(&mut entry.reason);
        }
        entry
    }
}

impl Entry {
    /// Forgets the flows that ended too early to belong to a kill of the process at `now`.
    fn forget_ended_before(&mut self, now: Instant) {
        if now.saturating_duration_since(self.ended_at) > KILL_TIME {
            self.ended = Loss::default();
        }
    }
}

impl Loss {
    /// Adds the loss of another connection.
    pub fn add(&mut self, other: Self) {
        self.connections += other.connections;
        self.open += other.open;
    }
}

impl FaultLines {
    /// Records that connections with open streams were lost. [`Self::due`] returns their line.
    pub fn lost(&mut self, upstream: &str, endpoint: &str, reason: &str, loss: Loss, now: Instant) {
        let burst = self.bursts.entry((upstream.to_owned(), None)).or_default();
        burst.add(endpoint, reason, loss, now);
    }

    /// Records that the endpoint has ended a flow in an orderly way.
    pub fn ended(&mut self, upstream: &str, endpoint: &str, now: Instant) {
        let burst = self.bursts.entry((upstream.to_owned(), None)).or_default();
        let flow = Loss { connections: 1, open: OpenStreams::of_flows(1) };
        let entry = burst.entry(endpoint, now);
        entry.forget_ended_before(now);
        entry.ended.add(flow);
        entry.ended_at = now;
    }

    /// Records the availability of an endpoint. If it is down now, returns what its connections have lost,
    /// which its line reports.
    pub fn available(
        &mut self,
        upstream: &str,
        endpoint: &str,
        availability: Availability,
        now: Instant,
    ) -> Loss {
        let key = (upstream.to_owned(), endpoint.to_owned());
        let served = !self.not_serving.contains_key(&key);
        if served && let Some(burst) = self.bursts.get_mut(&(upstream.to_owned(), None)) {
            let of_endpoint = burst.entries.iter_mut().filter(|entry| entry.endpoint == endpoint);
            of_endpoint.for_each(|entry| entry.forget_ended_before(now));
        }
        if availability == Availability::Uncertain {
            self.not_serving.insert(key, availability);
            return Loss::default();
        }
        let of_upstream = self.bursts.iter_mut().filter(|((name, _), _)| name == upstream);
        for (_, burst) in of_upstream {
            burst.entries.retain(|entry| !entry.uncertain || entry.endpoint != endpoint);
        }
        if availability == Availability::Serving {
            self.not_serving.remove(&key);
            return Loss::default();
        }
        self.not_serving.insert(key, availability);
        let mut loss = Loss::default();
        if let Some(burst) = self.bursts.get_mut(&(upstream.to_owned(), None)) {
            for entry in burst.entries.extract_if(.., |entry| entry.endpoint == endpoint) {
                loss.add(entry.loss);
                loss.add(entry.ended);
            }
        }
        loss
    }

    /// Records that an outage of the upstream was reported, or that it is over.
    pub fn set_outage(&mut self, upstream: &str, active: bool) {
        if active {
            self.outages.insert(upstream.to_owned());
        } else if self.outages.remove(upstream) {
            let of_upstream = self.bursts.iter_mut().filter(|((name, _), _)| name == upstream);
            let entries = of_upstream.flat_map(|(_, burst)| &mut burst.entries);
            entries.for_each(|entry| entry.covered = true);
        }
    }

    /// Whether an outage of the upstream was reported and is not over.
    pub fn has_outage(&self, upstream: &str) -> bool {
        self.outages.contains(upstream)
    }

    /// Whether the line about an endpoint that has entered `state` is written now. Otherwise [`Self::due`]
    /// returns it with those of others.
    pub fn admit(
        &mut self,
        upstream: &str,
        endpoint: &str,
        (state, reason): (&str, &str),
        loss: Loss,
        now: Instant,
    ) -> bool {
        let name = (upstream.to_owned(), endpoint.to_owned());
        let uncertain = self.not_serving.get(&name) == Some(&Availability::Uncertain);
        let key = (upstream.to_owned(), Some(state.to_owned()));
        let burst = self.bursts.entry(key).or_default();
        if uncertain {
            burst.add(endpoint, reason, loss, now).uncertain = true;
            return false;
        }
        if burst.is_paused(now) || !burst.entries.is_empty() {
            burst.add(endpoint, reason, loss, now);
            return false;
        }
        burst.written = Some(now);
        true
    }

    /// The lines that are due, and forgets bursts that are over.
    pub fn due(&mut self, now: Instant) -> Vec<FaultLine> {
        let mut lines = Vec::new();
        let (not_serving, outages) = (&self.not_serving, &self.outages);
        self.bursts.retain(|(upstream, state), burst| {
            if burst.is_paused(now) {
                return true;
            }
            let availability = |entry: &Entry| {
                let key = (upstream.clone(), entry.endpoint.clone());
                not_serving.get(&key).copied().unwrap_or(Availability::Serving)
            };
            let age = |entry: &Entry| now.saturating_duration_since(entry.since);
            let is_known = |entry: &Entry| {
                state.is_some()
                    || availability(entry) != Availability::Uncertain
                    || age(entry) >= UNCERTAIN_LIMIT
            };
            let collected = |entry: &Entry| age(entry) >= COLLECT;
            burst.entries.retain_mut(|entry| {
                if is_known(entry) && collected(entry) {
                    entry.ended = Loss::default();
                }
                state.is_some() || entry.loss.connections + entry.ended.connections > 0
            });
            if burst.entries.iter().any(|entry| is_known(entry) && collected(entry)) {
                // Without a loss, an entry has only flows that its endpoint has just ended.
                let has_line = |e: &Entry| state.is_some() || e.loss.connections > 0;
                let known: Vec<_> =
                    burst.entries.extract_if(.., |e| is_known(e) && has_line(e)).collect();
                let outage = outages.contains(upstream);
                let is_reported = |e: &Entry| {
                    outage || e.covered || state.is_none() && availability(e) == Availability::Down
                };
                let (reported, new): (Vec<_>, Vec<_>) = known.into_iter().partition(is_reported);
                for (entries, reported) in [(new, false), (reported, true)] {
                    if !entries.is_empty() {
                        lines.push(line(upstream, state.clone(), &entries, reported));
                        burst.written = if reported { burst.written } else { Some(now) };
                    }
                }
            }
            !burst.entries.is_empty() || burst.is_paused(now)
        });
        lines
    }
}

fn line(upstream: &str, state: Option<String>, entries: &[Entry], reported: bool) -> FaultLine {
    let mut loss = Loss::default();
    for entry in entries {
        loss.add(entry.loss);
    }
    let named = &entries[..entries.len().min(MAX_NAMED)];
    let mut endpoints: Vec<_> = named.iter().map(|entry| entry.endpoint.clone()).collect();
    let same = entries.iter().all(|entry| entry.reason == entries[0].reason);
    let reason = if same {
        entries[0].reason.clone()
    } else {
        let reasons = named.iter().map(|entry| format!("{}: {}", entry.endpoint, entry.reason));
        reasons.collect::<Vec<_>>().join("; ")
    };
    if entries.len() > MAX_NAMED {
        endpoints.push(format!("{} more", entries.len() - MAX_NAMED));
    }
    let upstream = upstream.to_owned();
    let (count, endpoints) = (entries.len(), endpoints.join(", "));
    FaultLine { upstream, state, endpoints, count, reason, loss, reported }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_WATCH: OpenStreams = OpenStreams { requests: 1, watches: 20, flows: 0 };
    const LOSS: Loss = Loss { connections: 1, open: OF_WATCH };

    fn texts(lines: &[FaultLine]) -> Vec<String> {
        let text = |line: &FaultLine| {
            let level = if line.reported { "info" } else { "warn" };
            let state = line.state.as_deref().unwrap_or("lost");
            let FaultLine { endpoints, reason, loss, .. } = line;
            format!("{level} {state} {endpoints}: {reason}; {} {}", loss.connections, loss.open)
        };
        lines.iter().map(text).collect()
    }

    #[test]
    fn lost_connections_of_a_fault_are_one_line_with_sums() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for n in 0..3_000 {
            let endpoint = ["a", "b"][n as usize % 2];
            faults.lost("u", endpoint, "PING unanswered", LOSS, at(n / 10));
        }
        assert_eq!(texts(&faults.due(at(400))), [""; 0], "still collecting");
        assert_eq!(
            texts(&faults.due(at(1_000))),
            ["warn lost a, b: PING unanswered; 3000 3000 requests, 60000 watches"]
        );
        faults.lost("u", "c", "reset", LOSS, at(1_500));
        assert_eq!(texts(&faults.due(at(3_900))), [""; 0], "one line per burst");
        assert_eq!(
            texts(&faults.due(at(4_000))),
            ["warn lost c: reset; 1 1 request, 20 watches"],
            "a loss is never dropped"
        );
        assert_eq!(faults.due(at(10_000)), []);
        assert!(faults.bursts.is_empty());
    }

    #[test]
    fn loss_at_an_uncertain_endpoint_is_in_the_line_of_its_ejection() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        faults.available("u", "a", Availability::Uncertain, start);
        faults.lost("u", "a", "PING unanswered", LOSS, at(0));
        assert_eq!(faults.due(at(5_000)), []);
        assert_eq!(faults.available("u", "a", Availability::Down, start), LOSS);
        assert!(faults.admit("u", "a", ("ejected", "stopped"), LOSS, at(5_000)));
        // Streams that could not move, after the line of the endpoint.
        faults.lost("u", "a", "closed", LOSS, at(6_000));
        assert_eq!(texts(&faults.due(at(7_000))), ["info lost a: closed; 1 1 request, 20 watches"]);
        // The endpoint recovers: only connections were lost.
        faults.available("u", "b", Availability::Uncertain, start);
        faults.lost("u", "b", "PING unanswered", LOSS, at(20_000));
        faults.available("u", "b", Availability::Serving, start);
        assert_eq!(
            texts(&faults.due(at(21_000))),
            ["warn lost b: PING unanswered; 1 1 request, 20 watches"]
        );
        // It stays uncertain.
        faults.available("u", "b", Availability::Uncertain, start);
        faults.lost("u", "b", "PING unanswered", LOSS, at(30_000));
        assert_eq!(faults.due(at(39_900)), []);
        assert_eq!(faults.due(at(40_000)).len(), 1);
    }

    #[test]
    fn flows_that_the_endpoint_has_ended_are_lost_only_if_it_fails_at_once() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        faults.ended("u", "a", at(0));
        assert_eq!(faults.due(at(600)), [], "an idle connection was closed");
        assert!(faults.bursts.is_empty());
        faults.ended("u", "a", at(900));
        faults.available("u", "a", Availability::Serving, at(1_100));
        faults.ended("u", "a", at(1_110));
        faults.ended("u", "a", at(1_120));
        faults.available("u", "a", Availability::Uncertain, at(1_130));
        assert_eq!(faults.due(at(2_000)), []);
        let two = Loss { connections: 2, open: OpenStreams::of_flows(2) };
        assert_eq!(faults.available("u", "a", Availability::Down, start), two);
        // The client of a third one closes it later.
        faults.ended("u", "a", at(3_000));
        assert_eq!(faults.due(at(4_000)), []);
        // Another endpoint has a line meanwhile.
        faults.lost("u", "b", "reset", LOSS, at(11_000));
        faults.available("u", "c", Availability::Serving, at(11_000));
        faults.ended("u", "c", at(11_450));
        assert_eq!(texts(&faults.due(at(11_500))), ["warn lost b: reset; 1 1 request, 20 watches"]);
        let one = Loss { connections: 1, open: OpenStreams::of_flows(1) };
        assert_eq!(faults.available("u", "c", Availability::Down, at(11_510)), one);
        // Of two flows, only one was reset.
        faults.available("u", "a", Availability::Serving, start);
        faults.lost("u", "a", "reset", LOSS, at(15_000));
        faults.ended("u", "a", at(15_000));
        assert_eq!(texts(&faults.due(at(16_000))), ["warn lost a: reset; 1 1 request, 20 watches"]);
    }

    #[test]
    fn endpoints_that_fail_together_are_two_lines() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert!(faults.admit("u", "a", ("ejected", "refused"), Loss::default(), at(0)));
        for n in 0..100 {
            let (name, reason) = (format!("e{n}"), format!("refused {n}"));
            assert!(!faults.admit("u", &name, ("ejected", &reason), LOSS, at(n)));
        }
        assert!(faults.admit("v", "a", ("ejected", "refused"), Loss::default(), at(0)));
        let lines = faults.due(at(3_000));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].endpoints.ends_with("e7, 56 more"), "{lines:?}");
        assert!(lines[0].reason.starts_with("e0: refused 0; e1: refused 1; "), "{lines:?}");
        assert_eq!(lines[0].loss.connections, 100);
    }

    #[test]
    fn lines_that_a_reported_outage_covers_are_no_warnings() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert!(faults.admit("u", "a", ("ejected", "refused"), Loss::default(), at(0)));
        assert!(!faults.admit("u", "b", ("ejected", "refused"), Loss::default(), at(100)));
        faults.set_outage("u", true);
        faults.lost("u", "b", "closed", LOSS, at(1_000));
        faults.lost("v", "b", "closed", LOSS, at(1_000));
        assert!(faults.has_outage("u") && !faults.has_outage("v"));
        assert_eq!(
            texts(&faults.due(at(3_000))),
            [
                "info lost b: closed; 1 1 request, 20 watches",
                "info ejected b: refused; 0 0 requests, 0 watches",
                "warn lost b: closed; 1 1 request, 20 watches"
            ]
        );
        faults.lost("u", "c", "closed", LOSS, at(8_000));
        faults.set_outage("u", false);
        assert_eq!(
            texts(&faults.due(at(8_500))),
            ["info lost c: closed; 1 1 request, 20 watches"],
            "collected before the end of the outage"
        );
        faults.lost("u", "b", "closed", LOSS, at(9_000));
        assert_eq!(texts(&faults.due(at(9_500))), ["warn lost b: closed; 1 1 request, 20 watches"]);
    }

    #[test]
    fn suspect_endpoints_are_one_line_unless_they_recover_or_are_ejected_at_once() {
        let (mut faults, start) = (FaultLines::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for (name, ms) in [("a", 0), ("b", 100), ("c", 200), ("d", 300)] {
            faults.available("u", name, Availability::Uncertain, start);
            assert!(!faults.admit("u", name, ("suspect", "late"), Loss::default(), at(ms)));
        }
        faults.available("u", "b", Availability::Serving, start);
        faults.available("u", "c", Availability::Down, start);
        assert_eq!(texts(&faults.due(at(400))), [""; 0]);
        assert_eq!(
            texts(&faults.due(at(600))),
            ["warn suspect a, d: late; 0 0 requests, 0 watches"]
        );
    }
}
