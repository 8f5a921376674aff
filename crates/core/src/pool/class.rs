//! The decisions of one class of a pool.

use std::time::{Duration, Instant};

use super::dials::{ConnectionCounts, Dials};
use super::endpoints::{EndpointRow, all_failed_at, targets};
use super::lane::Lane;
use super::limits::{
    ConnectionLimits, HEARTBEAT_WAITERS, UNPROVEN_WITH_DRAINING, connect_pace, max_connections,
    max_waiters,
};
use super::select::{
    Candidate, EndpointKey, Preference, Scope, StreamRequirements, has_free_stream, has_live,
    select,
};
use super::waiters::Waiters;
use super::waiting::{
    Decision, READY_AFTER, Situation, StreamRefusal, Streams, decide, unavailable,
};
use crate::connection::{ConnectionState, DrainReason};
use crate::credential_class::CredentialClass;
use crate::endpoint_state::EndpointState;

/// A class other than a configured identity keeps its connections for this long after its last use.
pub const IDLE_CLASS: Duration = Duration::from_secs(300);
/// Interval of the search for slow response heads. A request that has waited for a whole interval is a sign
/// of a failing endpoint if responses usually take less than a quarter of it, and after five in any case.
pub const SLOW_HEAD_INTERVAL: Duration = Duration::from_millis(200);
/// Such a class replaces a connection that is idle for this long after it carried [`BURST`] streams at once. h2
/// keeps the memory for the largest number of streams until a connection closes.
const IDLE_AFTER_BURST: Duration = Duration::from_secs(10);
const BURST: usize = 64;
/// Time for which connections to a removed endpoint stay in use without a live replacement.
const REMOVED_ENDPOINT_GRACE: Duration = Duration::from_secs(5);
/// Time after which a connection that drains may be closed for a new one, if the limit requires it.
pub(super) const DRAINING_TIME: Duration = Duration::from_secs(10);

/// A connection of a class, as far as maintenance distinguishes it.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionRow {
    /// What requests see of it.
    pub candidate: Candidate,
    /// The generation of its credential.
    pub generation: u64,
    /// Whether the latest `/readyz` of its endpoint failed or is overdue.
    pub probe_is_failing: bool,
    /// Whether a request has waited for too long for its response head ([`Class::begin_slow_head_round`]).
    pub has_slow_heads: bool,
    /// Whether most of its streams are those of proven tokens.
    pub is_mostly_proven: bool,
    /// When the last open stream ended; `None` while a stream is open.
    pub idle_since: Option<Instant>,
    /// The largest number of streams that were open at once.
    pub peak_streams: usize,
    /// When it began to drain, if it has.
    pub draining_since: Option<Instant>,
}

impl ConnectionRow {
    fn idle_for(&self, limit: Duration, now: Instant) -> bool {
        self.idle_since.is_some_and(|since| now >= since + limit)
    }

    /// Whether the connection carried many streams and has had none since. It is replaced, and stays in use until its
    /// replacement is live.
    fn is_idle_after_burst(&self, now: Instant) -> bool {
        self.peak_streams >= BURST && self.idle_for(IDLE_AFTER_BURST, now)
    }

    fn is_live(&self) -> bool {
        self.candidate.state == ConnectionState::Live
    }

    fn is_older_in_service(&self, generation: u64) -> bool {
        self.generation != generation && self.candidate.state.is_in_service()
    }
}

/// What surrounds a class when it plans.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings<'a> {
    /// The endpoints of the set.
    pub endpoints: &'a [EndpointRow],
    /// The configured limits.
    pub limits: ConnectionLimits,
    /// The generation of the credential of the class; `None` if it is not loaded.
    pub generation: Option<u64>,
    /// Whether connections are kept while no request uses them.
    pub is_warm: bool,
    /// Number of endpoints to which connections are kept; `None` for all.
    pub fanout: Option<usize>,
    /// Whether connections are opened only for requests that wait.
    pub is_retired: bool,
    /// The time.
    pub now: Instant,
}

/// What the caller does, in this order. Connections and endpoints are indices into the tables.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ClassEffect {
    /// Requests a probe of the endpoint of the connection.
    Probe(usize),
    /// The connection takes no new streams. It may drain already, for a reason for which its streams stay.
    Drain(usize, DrainReason),
    /// The connection is closed because of the limit, and open streams fail.
    Close(usize),
    /// Notifies the requests on the connection that its endpoint is degraded.
    NotifyDegraded(usize),
    /// Notifies the requests on the connection that the probe of its endpoint fails.
    NotifySuspected(usize),
    /// Starts a connect to the endpoint. [`Class::connect_ended`] follows.
    Dial(usize),
    /// Plans again at this time.
    WakeAt(Instant),
    /// The class has no connections and no credential; it is removed unless requests use it.
    Retire,
}

/// What happens to a request that asks for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It gets an error.
    Refuse(StreamRefusal),
    /// It gets the connection that [`select`] finds, and waits if there is none.
    Select,
    /// It waits behind others.
    Wait,
}

/// A round of answers to the requests that wait. Each is considered once.
#[derive(Debug, Default)]
pub struct Round {
    /// The last request that got an answer.
    after: Option<u64>,
    /// The first deadline of those that wait on.
    wake_at: Option<Instant>,
    is_over: bool,
}

impl Round {
    /// When the next round is due at the latest; `None` if no request waits.
    pub fn wake_at(&self) -> Option<Instant> {
        self.wake_at
    }
}

/// A class of a pool. `W` is what the caller keeps for each request that waits.
#[derive(Debug)]
pub struct Class<W> {
    credential: CredentialClass,
    waiters: Waiters<W>,
    dials: Dials,
    /// Number of watches that are held until a total outage ends.
    held_watches: usize,
    /// When a request last asked for a stream.
    last_used: Instant,
    /// Since when there has been no live connection with the current credential to an endpoint of the set.
    without_current_since: Option<Instant>,
    slow_heads_checked: Instant,
}

impl<W> Class<W> {
    /// A class without connections.
    pub fn new(class: CredentialClass, now: Instant) -> Self {
        Self {
            credential: class,
            waiters: Waiters::new(),
            dials: Dials::default(),
            held_watches: 0,
            last_used: now,
            without_current_since: None,
            slow_heads_checked: now,
        }
    }

    /// The credential class.
    pub fn credential_class(&self) -> CredentialClass {
        self.credential
    }

    /// Number of requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// What the caller keeps for the requests that wait, in order.
    pub fn waiters(&self) -> impl Iterator<Item = &W> {
        self.waiters.behind(None).map(|(_, waiter)| &waiter.handle)
    }

    /// Number of held watches. They are no waiters, so no connections are opened for them. When the outage ends, they
    /// ask for streams, spread over time.
    pub fn held_watches(&self) -> usize {
        self.held_watches
    }

    /// Counts a held watch until [`Self::release_watch`].
    pub fn hold_watch(&mut self) {
        self.held_watches += 1;
    }

    /// Ends the hold of a watch.
    pub fn release_watch(&mut self) {
        self.held_watches = self.held_watches.saturating_sub(1);
    }

    /// A request asks for a stream. `may_be_held` is that of its [`StreamRequirements`].
    pub fn request(&mut self, may_be_held: bool, is_outage: bool, now: Instant) -> Arrival {
        self.last_used = now;
        if may_be_held && is_outage {
            Arrival::Refuse(StreamRefusal::Unreachable)
        } else if self.waiters.block_newcomers() {
            Arrival::Wait
        } else {
            Arrival::Select
        }
    }

    /// A request begins to wait behind its like. Returns its number, for [`Self::leave`].
    ///
    /// # Errors
    /// Too many wait.
    pub fn begin_wait(
        &mut self,
        table: &[Candidate],
        required: StreamRequirements,
        handle: W,
        now: Instant,
    ) -> Result<u64, StreamRefusal> {
        let further = if required.lane == Lane::Heartbeats { HEARTBEAT_WAITERS } else { 0 };
        if self.waiters.len() >= max_waiters(self.credential) + further {
            return Err(unavailable(has_live(table)));
        }
        Ok(self.waiters.add(required, now, handle))
    }

    /// A request waits no longer. Does nothing if it has had an answer.
    pub fn leave(&mut self, id: u64) {
        self.waiters.remove(id);
    }

    /// Whether a request that would get the connection with this index waits for one to a ready endpoint instead: it
    /// has waited for less than [`READY_AFTER`] since `start`, no connection to such an endpoint is live, one of them is
    /// ready or was until its connections ended, no connect to it has failed or is known to be refused, and there is
    /// room for more that wait.
    pub fn awaits_ready(
        &self,
        (table, index): (&[Candidate], usize),
        required: &StreamRequirements,
        endpoints: &[EndpointRow],
        start: Instant,
        now: Instant,
    ) -> bool {
        let may_use = |endpoint: EndpointKey| !required.excluded.contains(&endpoint);
        let is_connected = |candidate: &Candidate| {
            candidate.state == ConnectionState::Live
                && candidate.endpoint_state == EndpointState::Ready
                && may_use(candidate.endpoint)
        };
        let may_follow = |endpoint: &EndpointRow| {
            endpoint.is_ready_or_returns
                && endpoint.last_failure.is_none()
                && may_use(endpoint.key)
                && !self.dials.is_refused(endpoint.key, now)
        };
        table[index].endpoint_state != EndpointState::Ready
            && now < start + READY_AFTER
            && self.waiters.len() < max_waiters(self.credential) / 2
            && !table.iter().any(is_connected)
            && endpoints.iter().any(may_follow)
    }

    /// The next request of the round that waits no longer, and the connection that it gets or why it gets none, by
    /// the table of [`super`]. The caller takes the stream and updates `table` before the next call.
    pub fn next_answer(
        &mut self,
        round: &mut Round,
        table: &[Candidate],
        situation: &Situation<'_>,
        preference: impl Fn(&W, usize) -> Preference,
        cost: impl Fn(usize) -> f64,
        rng: &mut fastrand::Rng,
    ) -> Option<(W, Result<usize, StreamRefusal>)> {
        if round.is_over {
            return None;
        }
        let streams = Streams {
            is_connected: has_live(table),
            has_free: has_free_stream(table),
            all_failed_at: if self.dials.any() { None } else { all_failed_at(situation.endpoints) },
        };
        let mut answered = None;
        for (id, waiter) in self.waiters.behind(round.after) {
            let mut find = |allow_suspect| {
                let scope = Scope { allow_suspect, max_connections: situation.max_connections };
                let preference = |index| preference(&waiter.handle, index);
                select(table, &waiter.required, scope, preference, &cost, rng)
            };
            let awaits_ready = |index| {
                let (required, start) = (&waiter.required, waiter.start);
                let (endpoints, now) = (situation.endpoints, situation.now);
                self.awaits_ready((table, index), required, endpoints, start, now)
            };
            match decide(waiter, streams, situation, &mut find, &awaits_ready) {
                Decision::Answer(answer) => {
                    answered = Some((id, answer));
                    break;
                }
                Decision::Wait(deadline) => round.wait_until(deadline),
                Decision::Stop(deadline) => {
                    round.wait_until(deadline);
                    break;
                }
            }
        }
        let Some((id, answer)) = answered else {
            round.is_over = true;
            return None;
        };
        round.after = Some(id);
        Some((self.waiters.remove(id)?.handle, answer))
    }

    /// Takes the first request that waits out of the queue, because the pool has ended.
    pub fn refuse_next(&mut self) -> Option<W> {
        Some(self.waiters.remove_first()?.handle)
    }

    /// Ends a connect that [`ClassEffect::Dial`] started.
    pub fn connect_ended(&mut self, endpoint: EndpointKey) {
        self.dials.ended(endpoint);
    }

    /// An endpoint has refused this generation of the credential on a new connection. While there are connections with
    /// an older one, the next connects there follow after 1, 2, 4 … 20 s. `random` is in 0..1.
    pub fn credential_refused(
        &mut self,
        endpoint: EndpointKey,
        generation: u64,
        random: f64,
        now: Instant,
    ) {
        self.dials.refused(endpoint, generation, random, now);
    }

    /// Whether a search for slow response heads is due. Records that it is made.
    pub fn begin_slow_head_round(&mut self, now: Instant) -> bool {
        let is_due = now >= self.slow_heads_checked + SLOW_HEAD_INTERVAL;
        if is_due {
            self.slow_heads_checked = now;
        }
        is_due
    }

    /// Hands the connections that mostly carry streams of proven tokens to the class of these tokens. Returns their
    /// indices in ascending order.
    ///
    /// The first request of a client with a token is sent on a connection of a class that has few of them, because an
    /// invalid token makes the apiserver end the connection. If the request is a watch, it keeps its stream for
    /// minutes after its response head has proven the token. With many new clients, as after a restart, such watches
    /// would use up the streams of the class for all that follow.
    ///
    /// A live connection joins the `proven` class, up to its limit, when most of its streams are those of proven
    /// tokens. No stream is moved, and the class that it leaves may open another one. This lets no client with invalid
    /// tokens open connections: each takes several tokens that the apiserver has accepted, and the class of proven
    /// tokens keeps its own limit. A request with an invalid token that is open on the connection at that moment may
    /// still end it with a GOAWAY, on which the other streams continue.
    pub fn hand_over(
        &mut self,
        connections: &[ConnectionRow],
        proven: &Self,
        proven_connections: &[ConnectionRow],
        limits: ConnectionLimits,
    ) -> Vec<usize> {
        let mut handed_over = Vec::new();
        if !self.credential.is_unproven_token() {
            return handed_over;
        }
        let limit = max_connections(proven.credential, limits.max);
        let mut joined: Vec<EndpointKey> = Vec::new();
        for (index, row) in connections.iter().enumerate() {
            if !row.is_mostly_proven || !row.is_live() {
                continue;
            }
            let endpoint = row.candidate.endpoint;
            let in_service = proven_connections.iter().filter(|other| {
                other.candidate.endpoint == endpoint && other.candidate.state.is_in_service()
            });
            let joining = joined.iter().filter(|other| **other == endpoint).count();
            if in_service.count() + proven.dials.count(endpoint) + joining < limit {
                joined.push(endpoint);
                // The connections stay in use.
                self.dials.forget(endpoint);
                handed_over.push(index);
            }
        }
        handed_over
    }

    /// Plans what happens to the connections, by the table of [`super`]. The rows of connections that drain change,
    /// so that their replacements are planned, too. `claim` asks whether a connect to the endpoint with an index may
    /// start now, which depends on the failures that all workers have seen.
    ///
    /// Old connections (with an older generation of the credential, or to a removed endpoint) drain when a replacement
    /// is live, so that no request waits for one. Those to a removed endpoint drain after 5 s in any case. Those with an
    /// older generation stay, because every apiserver may refuse the new one, and then each request would fail. A class is
    /// in use if a request waits, a watch is held, a request asked for a stream within [`IDLE_CLASS`], or a connection
    /// with an older generation has a stream.
    pub fn plan(
        &mut self,
        connections: &mut [ConnectionRow],
        around: &Surroundings<'_>,
        claim: impl FnMut(usize) -> bool,
    ) -> Vec<ClassEffect> {
        let mut effects = Vec::new();
        let Some(generation) = around.generation else {
            let all = 0..connections.len();
            effects
                .extend(all.map(|index| ClassEffect::Drain(index, DrainReason::IdentityUnusable)));
            if connections.is_empty() {
                effects.push(ClassEffect::Retire);
            }
            return effects;
        };
        for (index, row) in connections.iter().enumerate() {
            if row.has_slow_heads {
                effects.push(ClassEffect::Probe(index));
            }
        }
        let is_wanted = self.is_wanted(connections, generation, around);
        self.plan_drains(connections, (generation, is_wanted), around, &mut effects);
        if is_wanted {
            self.plan_dials(connections, generation, around, claim, &mut effects);
        }
        effects
    }

    fn plan_drains(
        &mut self,
        connections: &mut [ConnectionRow],
        (generation, is_wanted): (u64, bool),
        around: &Surroundings<'_>,
        effects: &mut Vec<ClassEffect>,
    ) {
        let now = around.now;
        let without_current_for = self.without_current_for(connections, generation, now);
        let is_replaced = without_current_for.is_none();
        let drains_removed = without_current_for.is_none_or(|time| time >= REMOVED_ENDPOINT_GRACE);
        for index in 0..connections.len() {
            let row = connections[index];
            let endpoint = row.candidate.endpoint_state;
            // Without a replacement none is opened for a class that is not in use.
            let is_unused = !is_wanted && row.idle_since.is_some();
            let cause = if row.generation != generation && (is_replaced || is_unused) {
                DrainReason::CertificateRotated
            } else if drains_removed && endpoint == EndpointState::Leaving {
                DrainReason::EndpointRemoved
            } else if endpoint == EndpointState::Degraded {
                effects.push(ClassEffect::NotifyDegraded(index));
                continue;
            } else if row.probe_is_failing {
                effects.push(ClassEffect::NotifySuspected(index));
                continue;
            } else if !around.is_warm
                && (row.idle_for(IDLE_CLASS, now)
                    || row.is_idle_after_burst(now)
                        && has_replacement(connections, row.candidate.endpoint, generation, now))
            {
                DrainReason::Idle
            } else {
                continue;
            };
            drain(connections, index, cause, now, effects);
        }
    }

    /// How long there has been no live connection with the current credential to an endpoint of the set; `None` if
    /// there is one.
    fn without_current_for(
        &mut self,
        connections: &[ConnectionRow],
        generation: u64,
        now: Instant,
    ) -> Option<Duration> {
        let is_current = |row: &ConnectionRow| {
            row.generation == generation
                && row.is_live()
                && row.candidate.endpoint_state != EndpointState::Leaving
        };
        if connections.iter().any(is_current) {
            self.without_current_since = None;
            return None;
        }
        let since = *self.without_current_since.get_or_insert(now);
        Some(now.saturating_duration_since(since))
    }

    /// Whether connections are opened.
    fn is_wanted(
        &self,
        connections: &[ConnectionRow],
        generation: u64,
        around: &Surroundings<'_>,
    ) -> bool {
        let waits = self.waiters.len() > 0;
        let is_old_in_use =
            |row: &ConnectionRow| row.is_older_in_service(generation) && row.idle_since.is_none();
        let is_in_use = waits
            || self.held_watches > 0
            || around.now < self.last_used + IDLE_CLASS
            || connections.iter().any(is_old_in_use);
        (around.is_warm || is_in_use) && (!around.is_retired || waits)
    }

    fn plan_dials(
        &mut self,
        connections: &mut [ConnectionRow],
        generation: u64,
        around: &Surroundings<'_>,
        mut claim: impl FnMut(usize) -> bool,
        effects: &mut Vec<ClassEffect>,
    ) {
        let now = around.now;
        self.dials.retain(|key| around.endpoints.iter().any(|endpoint| endpoint.key == key));
        let pace = connect_pace(self.credential);
        let has_older = connections.iter().any(|row| row.is_older_in_service(generation));
        let targets = targets(around.endpoints, around.fanout);
        for &target in &targets {
            let endpoint = around.endpoints[target].key;
            let counts = self.counts(connections, endpoint, generation, around);
            let counts = ConnectionCounts {
                // The endpoints share the requests that wait.
                waiters: self.waiters.len().div_ceil(targets.len()),
                ..counts
            };
            let min = if around.is_warm { around.limits.min } else { 1 };
            let min = min.max(self.wanted_besides_excluded(connections, endpoint));
            let mut to_open =
                counts.to_open(min, max_connections(self.credential, around.limits.max));
            if pace.is_some() {
                let is_to = |row: &&ConnectionRow| row.candidate.endpoint == endpoint;
                let open = connections.iter().filter(is_to).count();
                let room = UNPROVEN_WITH_DRAINING.saturating_sub(open + counts.dialing);
                if to_open > 0 && room == 0 {
                    make_room(connections, endpoint, now, effects);
                }
                to_open = to_open.min(room);
            }
            for _ in 0..to_open {
                let paused_until = self.dials.paused_until(endpoint, pace, now);
                // Without older connections the clients learn it from the endpoint.
                let refused_until = self.dials.refused_until(endpoint, generation, now);
                if let Some(at) = paused_until.max(refused_until.filter(|_| has_older)) {
                    effects.push(ClassEffect::WakeAt(at));
                    break;
                }
                if !claim(target) {
                    break;
                }
                self.dials.started(endpoint, pace, now);
                effects.push(ClassEffect::Dial(target));
            }
        }
    }

    /// Number of connections to an endpoint without which a request that waits has none besides those that it excludes; 0
    /// if no request excludes one.
    fn wanted_besides_excluded(
        &self,
        connections: &[ConnectionRow],
        endpoint: EndpointKey,
    ) -> usize {
        let wanted = self.waiters.behind(None).map(|(_, waiter)| {
            let excluded = &waiter.required.excluded_connections;
            if excluded.is_empty() || waiter.required.excluded.contains(&endpoint) {
                return 0;
            }
            let is_excluded = |row: &&ConnectionRow| {
                row.candidate.endpoint == endpoint
                    && row.is_live()
                    && excluded.contains(&row.candidate.connection)
            };
            match connections.iter().filter(is_excluded).count() {
                0 => 0,
                count => count + 1,
            }
        });
        wanted.max().unwrap_or(0)
    }

    /// Counts the connections to an endpoint. One that is to be replaced does not count, so that its replacement is
    /// opened.
    fn counts(
        &self,
        connections: &[ConnectionRow],
        endpoint: EndpointKey,
        generation: u64,
        around: &Surroundings<'_>,
    ) -> ConnectionCounts {
        let current = || {
            connections
                .iter()
                .filter(|row| row.generation == generation && row.candidate.endpoint == endpoint)
                .filter(|row| around.is_warm || !row.is_idle_after_burst(around.now))
                .map(|row| &row.candidate)
        };
        let of = |state| current().filter(move |candidate| candidate.state == state);
        let stream_limit = current().map(|candidate| candidate.stream_limit).max();
        ConnectionCounts {
            live: of(ConnectionState::Live).count(),
            suspect: of(ConnectionState::Suspect).count(),
            dialing: self.dials.count(endpoint),
            free_streams: of(ConnectionState::Live).map(|candidate| candidate.free_streams).sum(),
            stream_limit: stream_limit.unwrap_or(around.limits.max_streams).max(1),
            waiters: 0,
        }
    }
}

impl Round {
    fn wait_until(&mut self, deadline: Instant) {
        self.wake_at = Some(self.wake_at.map_or(deadline, |wake_at| wake_at.min(deadline)));
    }
}

/// Whether a live connection to the endpoint has this `generation` of the credential and is not idle after a burst.
fn has_replacement(
    connections: &[ConnectionRow],
    endpoint: EndpointKey,
    generation: u64,
    now: Instant,
) -> bool {
    connections.iter().any(|row| {
        row.candidate.endpoint == endpoint
            && row.generation == generation
            && row.is_live()
            && !row.is_idle_after_burst(now)
    })
}

/// Drains a connection. One in service takes no part any more in the decisions that follow.
fn drain(
    connections: &mut [ConnectionRow],
    index: usize,
    cause: DrainReason,
    now: Instant,
    effects: &mut Vec<ClassEffect>,
) {
    effects.push(ClassEffect::Drain(index, cause));
    let row = &mut connections[index];
    if row.candidate.state.is_in_service() {
        row.candidate.state = ConnectionState::Draining;
        row.draining_since = Some(now);
    }
}

/// Moves the watches off the connections to the endpoint that drain, and closes the one that has been draining for
/// longest if it has had [`DRAINING_TIME`]. Otherwise clients with responses that do not end could use up the limit for
/// all.
fn make_room(
    connections: &[ConnectionRow],
    endpoint: EndpointKey,
    now: Instant,
    effects: &mut Vec<ClassEffect>,
) {
    let draining = || {
        let to_endpoint = connections.iter().enumerate();
        to_endpoint
            .filter(move |(_, row)| row.candidate.endpoint == endpoint)
            .filter_map(|(index, row)| Some((row.draining_since?, index)))
    };
    effects.extend(
        draining().map(|(_, index)| ClassEffect::Drain(index, DrainReason::ConnectionLimit)),
    );
    if let Some((since, oldest)) = draining().min()
        && now >= since + DRAINING_TIME
    {
        effects.push(ClassEffect::Close(oldest));
    }
}
