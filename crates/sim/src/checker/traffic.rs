//! Rules of what jackstay sends, by what apiservers receive, by the connects of its process and by its metrics.
//!
//! | rule | what it says |
//! |---|---|
//! | counted | a request that arrives more than once has been retried or hedged, and the metrics count that |
//! | hedges | hedges are at most a tenth of the requests, after a first burst |
//! | other endpoint | a hedge is not sent to the apiserver whose requests hang, while another one works |
//! | connects | the pauses between failed connects to an apiserver grow, and none follows a success; not behind a balancer, which selects the apiserver |
//! | order | requests that share one stream arrive in the order in which clients have sent them |
//! | outage | watches that are held in an outage do not continue before an apiserver is ready |
//! | jitter | watches that were lost together continue at different times |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::invariants::Findings;

/// Hedges that may be sent before more are earned (`RetryBudget::hedges`).
const HEDGE_BURST: u64 = 128;
/// Requests of clients that earn a hedge.
const REQUESTS_PER_HEDGE: u64 = 10;
/// Hedges of a request that are under way at once.
const HEDGES_OF_A_REQUEST: u64 = 2;
/// Connects to an apiserver that may fail in a row whatever the pauses between them are: those that were in progress
/// when the first one failed, and those after the first, short pauses.
const FAILED_CONNECTS: u32 = 12;
/// The shortest pause between two more of them: half of the longest pause while no endpoint is usable.
const CONNECT_PAUSE: Duration = Duration::from_millis(400);
/// A connect follows the loss of the last connection within this time: the pool looks for it every 200 ms.
const RECONNECT: Duration = Duration::from_millis(300);
/// Watches that continue with less than [`SAME_MOMENT`] between the first and the last of them have no jitter. The
/// jitter of the first attempt is at most 50 ms, so so many do it by accident once in a million times.
const WATCHES_AT_ONCE: usize = 6;
const SAME_MOMENT: Duration = Duration::from_millis(2);
/// Requests that clients have sent within this time of each other may reach jackstay in any order: three times the
/// latency of loopback.
const SENT_TOGETHER: Duration = Duration::from_micros(50);
/// Watches that continue with longer pauses between them were not lost together.
const LOST_TOGETHER: Duration = Duration::from_millis(200);

/// The time for which a scenario may bound the connects of a node.
pub const CONNECTS_WITHIN: Duration = Duration::from_secs(10);

/// A request as an apiserver has received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrival {
    /// When, since the start of the run.
    pub at: Duration,
    /// The apiserver.
    pub server: usize,
    /// The request of the client; a request that the client sends again is another one.
    pub id: String,
    /// Whether it is a watch.
    pub is_watch: bool,
    /// Whether it changes nothing.
    pub is_read: bool,
    /// When its client sent it, since the start of the run, if requests share one stream.
    pub sent: Option<Duration>,
}

/// A connect of jackstay's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect {
    /// When it began, since the start of the run.
    pub at: Duration,
    /// The apiserver.
    pub server: usize,
    /// Whether the TCP connection was established.
    pub established: bool,
    /// When it was closed, since the start of the run.
    pub closed: Option<Duration>,
}

/// A time in which the requests of one apiserver hang and the others work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hang {
    /// The apiserver.
    pub server: usize,
    /// When jackstay knows of it.
    pub from: Duration,
    /// When it ends.
    pub until: Duration,
}

/// What a node has sent, and what its jackstay has counted.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    /// The requests of its clients that apiservers have received, in the order of their times.
    pub arrivals: Vec<Arrival>,
    /// Its connects, in the order of their times.
    pub connects: Vec<Connect>,
    /// Whether a balancer selects the apiserver of each connection.
    pub is_balanced: bool,
    /// Requests that its clients have sent.
    pub requests: u64,
    /// Requests that were retried.
    pub retries: u64,
    /// Requests whose hedge was sent.
    pub hedges: u64,
    /// Apiservers to which no hedge is sent.
    pub hangs: Vec<Hang>,
    /// The time after an outage in which no apiserver is ready.
    pub not_ready: Option<Range<Duration>>,
    /// Apiservers to which jackstay keeps a connection at all times until the end of the run, and that end.
    pub kept: (BTreeSet<usize>, Duration),
}

impl Traffic {
    /// Checks all rules.
    pub fn check(&self, node: usize, findings: &mut Findings) {
        let broken = [
            self.uncounted(),
            self.too_many_hedges(),
            self.hedge_to_the_same(),
            self.connects_without_pauses(),
            self.pause_after_success(),
            self.out_of_order(),
            self.watches_without_jitter(),
            self.watch_before_ready(),
        ];
        for text in broken.into_iter().flatten() {
            findings.violation(format!("node {node}: {text}"));
        }
        findings.connects = findings.connects.max(self.most_connects());
    }

    /// The largest number of connects within [`CONNECTS_WITHIN`].
    fn most_connects(&self) -> u64 {
        let until = |first: &Connect| first.at + CONNECTS_WITHIN;
        let most = self.connects.iter().enumerate().map(|(number, first)| {
            let later = self.connects[number..].iter();
            later.take_while(|connect| connect.at < until(first)).count()
        });
        most.max().unwrap_or_default() as u64
    }

    /// The arrivals of each request that is no watch, in the order of their times.
    fn requests(&self) -> BTreeMap<&str, Vec<&Arrival>> {
        let mut requests: BTreeMap<&str, Vec<&Arrival>> = BTreeMap::new();
        for arrival in self.arrivals.iter().filter(|arrival| !arrival.is_watch) {
            requests.entry(&arrival.id).or_default().push(arrival);
        }
        requests
    }

    /// Arrivals of reads after the first one.
    fn repeated(&self) -> u64 {
        let requests = self.requests();
        requests.values().map(|arrivals| arrivals.len() as u64 - 1).sum()
    }

    fn uncounted(&self) -> Option<String> {
        let (repeated, counted) =
            (self.repeated(), self.retries + HEDGES_OF_A_REQUEST * self.hedges);
        (repeated > counted).then(|| {
            format!(
                "requests arrived {repeated} times again, and {} retries and {} hedges were counted",
                self.retries, self.hedges
            )
        })
    }

    fn too_many_hedges(&self) -> Option<String> {
        let hedges = self.hedges.max(self.repeated().saturating_sub(self.retries));
        let limit = HEDGE_BURST + self.requests / REQUESTS_PER_HEDGE + 1;
        let requests = self.requests;
        (hedges > limit)
            .then(|| format!("{hedges} hedges of {requests} requests, at most {limit} allowed"))
    }

    fn hedge_to_the_same(&self) -> Option<String> {
        let requests = self.requests();
        let mut pairs = requests.iter().flat_map(|(id, arrivals)| {
            arrivals.iter().zip(arrivals.iter().skip(1)).map(move |pair| (id, pair))
        });
        let (id, (_, again)) = pairs.find(|(_, (first, again))| {
            let is_in = |hang: &Hang| {
                hang.server == first.server && (hang.from..hang.until).contains(&first.at)
            };
            again.is_read && first.server == again.server && self.hangs.iter().any(is_in)
        })?;
        let (server, at) = (again.server, again.at);
        Some(format!("request {id} was hedged to apiserver {server}, which hangs, at {at:.3?}"))
    }

    fn out_of_order(&self) -> Option<String> {
        let mut last: Option<(Duration, &str)> = None;
        for Arrival { id, sent, .. } in &self.arrivals {
            let Some(sent) = *sent else { continue };
            match last {
                Some((before, earlier)) if sent + SENT_TOGETHER < before => {
                    return Some(format!(
                        "request {id} of {sent:.3?} arrived after {earlier} of {before:.3?}"
                    ));
                }
                Some((before, _)) if sent <= before => {}
                _ => last = Some((sent, id)),
            }
        }
        None
    }

    fn connects_without_pauses(&self) -> Option<String> {
        if self.is_balanced {
            return None;
        }
        let servers: BTreeSet<_> = self.connects.iter().map(|connect| connect.server).collect();
        servers.into_iter().find_map(|server| {
            let (mut first, mut count) = (Duration::ZERO, 0);
            for connect in self.connects.iter().filter(|connect| connect.server == server) {
                if connect.established {
                    count = 0;
                    continue;
                }
                if count == 0 {
                    first = connect.at;
                }
                count += 1;
                let since = connect.at.saturating_sub(first);
                let pauses = since.as_nanos() / CONNECT_PAUSE.as_nanos();
                if count > FAILED_CONNECTS + u32::try_from(pauses).unwrap_or(u32::MAX) {
                    return Some(format!(
                        "{count} connects to apiserver {server} failed within {since:.1?}"
                    ));
                }
            }
            None
        })
    }

    /// A connection that had succeeded was the last one, and no connect has followed in time.
    fn pause_after_success(&self) -> Option<String> {
        let (kept, end) = &self.kept;
        kept.iter().find_map(|&server| {
            let connects: Vec<_> =
                self.connects.iter().filter(|connect| connect.server == server).collect();
            let lost = connects.iter().filter(|connect| connect.established);
            lost.filter_map(|connect| connect.closed).find_map(|lost| {
                let is_open = |connect: &&&Connect| {
                    connect.at <= lost && connect.closed.is_none_or(|closed| closed > lost)
                };
                let next = connects.iter().map(|connect| connect.at).find(|at| *at > lost);
                let pause = next.unwrap_or(*end).saturating_sub(lost);
                let is_late = pause > RECONNECT && !connects.iter().any(|one| is_open(&one));
                is_late.then(|| {
                    format!("no connect to apiserver {server} for {pause:.1?} after {lost:.3?}")
                })
            })
        })
    }

    /// Watches that continue: their arrivals after the first one.
    fn continued(&self) -> Vec<&Arrival> {
        let mut known = BTreeSet::new();
        let watches = self.arrivals.iter().filter(|arrival| arrival.is_watch);
        watches.filter(|arrival| !known.insert(&arrival.id)).collect()
    }

    fn watches_without_jitter(&self) -> Option<String> {
        let again: Vec<_> = self.continued().iter().map(|arrival| arrival.at).collect();
        let mut groups =
            again.chunk_by(|before, after| after.saturating_sub(*before) < LOST_TOGETHER);
        groups.find_map(|group| {
            let spread = group.last()?.saturating_sub(*group.first()?);
            let count = group.len();
            (count >= WATCHES_AT_ONCE && spread < SAME_MOMENT)
                .then(|| format!("{count} watches continue within {spread:.1?}, without jitter"))
        })
    }

    fn watch_before_ready(&self) -> Option<String> {
        let not_ready = self.not_ready.as_ref()?;
        let early = self.continued().into_iter().find(|watch| not_ready.contains(&watch.at))?;
        let Arrival { id, at, server, .. } = early;
        Some(format!("watch {id} continues at apiserver {server} at {at:.3?}, before one is ready"))
    }
}

#[cfg(test)]
mod tests;
