//! What must hold in every run of a node, besides the promises to its clients. These rules are counted here, apart from
//! the machines of the core that keep them.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Hedges that may be sent before more are earned (`RetryBudget::hedges`).
const HEDGE_BURST: usize = 128;
/// Requests of clients that earn a hedge.
const REQUESTS_PER_HEDGE: u64 = 10;
/// Connects to an endpoint that may fail in a row whatever the pauses between them are: those that were in progress when
/// the first one failed, and those after the first, short pauses.
const FAILED_CONNECTS: u32 = 12;
/// The shortest pause between two more of them: half of the longest pause while no endpoint is usable.
const CONNECT_PAUSE: Duration = Duration::from_millis(400);
/// Watches that may continue at one moment by accident.
const RESUMED_AT_ONCE: u32 = 2;

/// Failed connects to an endpoint since the last one that succeeded.
#[derive(Debug, Clone, Copy)]
struct FailedConnects {
    first: Instant,
    count: u32,
}

/// Counts of a node, and the rules that were broken.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Requests of clients.
    requests: u64,
    hedges: u64,
    /// Requests before the first hedge.
    before_hedges: u64,
    /// The waits of requests that can use any free stream.
    unrestricted: BTreeSet<u64>,
    failed_connects: Vec<Option<FailedConnects>>,
    /// When watches last asked for streams to continue, and how many did.
    resumed: Option<(Instant, u32)>,
    broken: Vec<String>,
}

impl Checks {
    fn broken(&mut self, text: String) {
        // One is enough, and a rule may be broken at each event.
        if self.broken.len() < 5 {
            self.broken.push(text);
        }
    }

    /// The rules that were broken.
    pub(super) fn all_broken(&self) -> &[String] {
        &self.broken
    }

    /// A client has sent a request.
    pub(super) fn requested(&mut self) {
        self.requests += 1;
    }

    /// A hedge was sent. Hedges are at most a tenth of the requests, after a first burst. `is_excluded`: it was sent to
    /// the endpoint of the attempt before, which fails while others work.
    pub(super) fn hedged(&mut self, streams_per_connection: usize, is_excluded: bool) {
        if is_excluded {
            self.broken("a hedge was sent to the endpoint that fails".to_owned());
        }
        if self.hedges == 0 {
            self.before_hedges = self.requests;
        }
        self.hedges += 1;
        let earned = (self.requests - self.before_hedges) / REQUESTS_PER_HEDGE + 1;
        let limit = streams_per_connection.max(HEDGE_BURST) as u64 + earned;
        if self.hedges > limit {
            self.broken(format!("{} hedges were sent, at most {limit} allowed", self.hedges));
        }
    }

    /// A request has ended whose machine has counted its hedges.
    pub(super) fn hedges_counted(&mut self, sent: u32, counted: u32) {
        if sent != counted {
            self.broken(format!("{sent} hedges of a request were sent, and {counted} counted"));
        }
    }

    /// A request begins to wait for a stream.
    pub(super) fn wait_begun(&mut self, wait: u64, is_unrestricted: bool) {
        if is_unrestricted {
            self.unrestricted.insert(wait);
        }
    }

    /// The wait of a request has ended.
    pub(super) fn wait_ended(&mut self, wait: u64) {
        self.unrestricted.remove(&wait);
    }

    /// A request that waits has its answer; `wait` is `None` if it waits no longer. With a stream of a live connection it
    /// must not overtake one that could use it.
    pub(super) fn answered(&mut self, wait: Option<u64>, is_live: bool) {
        let Some(wait) = wait else {
            return self.broken("the pool has answered a request that does not wait".to_owned());
        };
        let first = self.unrestricted.first().copied().filter(|&first| is_live && first < wait);
        if let Some(first) = first {
            self.broken(format!("wait {wait} got a stream before wait {first}"));
        }
    }

    /// A connect to an endpoint has failed. The pauses between such connects grow.
    pub(super) fn connect_failed(&mut self, endpoint: usize, now: Instant) {
        let length = self.failed_connects.len().max(endpoint + 1);
        self.failed_connects.resize(length, None);
        let start = FailedConnects { first: now, count: 0 };
        let failed = self.failed_connects[endpoint].get_or_insert(start);
        failed.count += 1;
        let (count, since) = (failed.count, now - failed.first);
        let limit = FAILED_CONNECTS + (since.as_nanos() / CONNECT_PAUSE.as_nanos()) as u32;
        if count > limit {
            let text = format!("{count} connects to endpoint {endpoint} failed within {since:.1?}");
            self.broken(text);
        }
    }

    /// A connect to an endpoint has succeeded.
    pub(super) fn connect_succeeded(&mut self, endpoint: usize) {
        if let Some(failed) = self.failed_connects.get_mut(endpoint) {
            *failed = None;
        }
    }

    /// Whether a connect to an endpoint may start was asked. It may, unless one has failed since the last success.
    pub(super) fn connect_claimed(&mut self, endpoint: usize, may_start: bool) {
        let has_failed = self.failed_connects.get(endpoint).is_some_and(Option::is_some);
        if !may_start && !has_failed {
            self.broken(format!("a connect to endpoint {endpoint} was delayed without a failure"));
        }
    }

    /// A watch asks for a stream to continue. Watches that were lost together do so at different times.
    pub(super) fn watch_resumes(&mut self, now: Instant) {
        let before = self.resumed.filter(|(at, _)| *at == now).map_or(0, |(_, count)| count);
        self.resumed = Some((now, before + 1));
        if before == RESUMED_AT_ONCE {
            self.broken("watches continue at the same moment, without jitter".to_owned());
        }
    }
}
