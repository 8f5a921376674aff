//! Random sequences of events on one class. After each event the class plans and answers the requests that wait, as
//! a shell does it, but runs again only when it has asked for it: there is no tick that would hide a lost wake-up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::class::DRAINING_TIME;
use super::dials::MAX_PARALLEL_DIALS;
use super::limits::{UNPROVEN_WITH_DRAINING, max_connections};
use super::tests::{LIMITS, candidate, connection_row, endpoint_row};
use super::*;
use crate::connection::{ConnectionState, DrainReason};
use crate::credential_class::CredentialClass;
use crate::endpoint_state::EndpointState;

const ENDPOINTS: usize = 4;
const STREAMS: usize = 10;

#[derive(Debug, Clone)]
enum Event {
    Request { long_running: bool, may_be_held: bool, live_only: bool, excluded: Option<usize> },
    Cancel(usize),
    StreamEnds(usize),
    Connection(usize, ConnectionState, bool),
    ConnectEnds(bool),
    Endpoint(usize, EndpointState),
    CredentialReplaced,
    Outage(bool),
    Passes(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let request = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), 0..ENDPOINTS);
    let request = request.prop_map(|(long_running, may_be_held, live_only, excludes, endpoint)| {
        let excluded = excludes.then_some(endpoint);
        Event::Request {
            long_running,
            may_be_held: may_be_held && long_running,
            live_only,
            excluded,
        }
    });
    let simple = Just(Event::Request {
        long_running: false,
        may_be_held: false,
        live_only: false,
        excluded: None,
    });
    let connection =
        (any::<usize>(), prop::sample::select(&ConnectionState::ALL[..]), any::<bool>());
    let endpoint = (0..ENDPOINTS, prop::sample::select(&EndpointState::ALL[..]));
    prop_oneof![
        8 => simple,
        8 => request,
        1 => any::<usize>().prop_map(Event::Cancel),
        4 => any::<usize>().prop_map(Event::StreamEnds),
        2 => connection.prop_map(|(index, state, silent)| Event::Connection(index, state, silent)),
        6 => any::<bool>().prop_map(Event::ConnectEnds),
        1 => endpoint.prop_map(|(index, state)| Event::Endpoint(index, state)),
        1 => Just(Event::CredentialReplaced),
        1 => any::<bool>().prop_map(Event::Outage),
        4 => (1..900_u64).prop_map(Event::Passes),
    ]
}

/// A request that waits, as the test knows it.
#[derive(Debug, Clone)]
struct Waiting {
    required: StreamRequirements,
    since: Instant,
    id: u64,
}

impl Waiting {
    fn is_like(&self, other: &Self) -> bool {
        let kind =
            |w: &Self| (w.required.long_running, w.required.may_be_held, w.required.live_only);
        kind(self) == kind(other) && self.required.excluded == other.required.excluded
    }
}

/// The shell of the class.
struct Shell {
    class: Class<usize>,
    connections: Vec<ConnectionRow>,
    endpoints: Vec<EndpointRow>,
    /// The endpoints of the connects in progress, oldest first.
    connects: Vec<usize>,
    waiting: BTreeMap<usize, Waiting>,
    granted_streams: Vec<(ConnectionKey, bool)>,
    next: usize,
    generation: u64,
    is_outage: bool,
    wake_at: Option<Instant>,
    now: Instant,
    rng: fastrand::Rng,
}

impl Shell {
    fn new(class: CredentialClass, seed: u64) -> Self {
        let now = Instant::now();
        Self {
            class: Class::new(class, now),
            connections: Vec::new(),
            endpoints: (0..ENDPOINTS).map(endpoint_row).collect(),
            connects: Vec::new(),
            waiting: BTreeMap::new(),
            granted_streams: Vec::new(),
            next: 0,
            generation: 1,
            is_outage: false,
            wake_at: None,
            now,
            rng: fastrand::Rng::with_seed(seed),
        }
    }

    fn table(&self) -> Vec<Candidate> {
        self.connections.iter().map(|row| row.candidate).collect()
    }

    fn max_connections(&self) -> usize {
        max_connections(self.class.credential_class(), LIMITS.max)
    }

    /// Takes a stream, which must be free.
    fn grant(&mut self, index: usize, required: &StreamRequirements) {
        let table = self.table();
        let row = &mut self.connections[index];
        let candidate = &mut row.candidate;
        assert!(candidate.free_streams > 0, "a stream that is not free");
        assert!(!required.excluded.contains(&candidate.endpoint), "an excluded endpoint");
        match candidate.state {
            ConnectionState::Live => {}
            ConnectionState::Suspect => assert!(!required.live_only && !candidate.is_silent),
            state => panic!("a stream on a connection in state {state:?}"),
        }
        if required.long_running {
            let to_endpoint = table.iter().filter(|other| other.endpoint == candidate.endpoint);
            let watches = to_endpoint.map(|other| other.watches).sum::<usize>() + 1;
            let streams = max_connections(self.class.credential_class(), LIMITS.max) * STREAMS;
            assert!(watches as f64 <= (streams as f64 * WATCH_SHARE).ceil(), "{watches} watches");
        }
        candidate.free_streams -= 1;
        candidate.watches += usize::from(required.long_running);
        row.idle_since = None;
        self.granted_streams.push((candidate.connection, required.long_running));
    }

    fn request(&mut self, required: StreamRequirements) {
        let table = self.table();
        let arrival = self.class.request(required.may_be_held, self.is_outage, self.now);
        if let Arrival::Refuse(_) = arrival {
            return;
        }
        let scope = Scope { allow_suspect: false, max_connections: self.max_connections() };
        let cost = |index: usize| (STREAMS - table[index].free_streams) as f64;
        if arrival == Arrival::Select
            && let Some(index) =
                select(&table, &required, scope, |_| Preference::default(), cost, &mut self.rng)
        {
            self.grant(index, &required);
            return;
        }
        let number = self.next;
        self.next += 1;
        if let Ok(id) = self.class.begin_wait(&table, required.clone(), number, self.now) {
            self.waiting.insert(number, Waiting { required, since: self.now, id });
        }
    }

    /// Plans and answers, as the task of a pool does on each change.
    fn run(&mut self) {
        self.wake_at = None;
        self.connections.retain(|row| row.candidate.state != ConnectionState::Dead);
        for row in &mut self.connections {
            let endpoint = &self.endpoints[row.candidate.endpoint.0];
            row.candidate.endpoint_state = endpoint.state;
        }
        self.plan();
        self.answer();
        assert_eq!(self.class.waiting(), self.waiting.len(), "a request was forgotten");
        for waiting in self.waiting.values() {
            let waited = self.now - waiting.since;
            assert!(waited < UNAVAILABLE_AFTER, "{waiting:?} has waited for {waited:?}");
        }
        if !self.waiting.is_empty() {
            assert!(self.wake_at.is_some_and(|at| at > self.now), "no wake-up is due");
        }
    }

    fn plan(&mut self) {
        let around = Surroundings {
            endpoints: &self.endpoints,
            limits: LIMITS,
            generation: Some(self.generation),
            is_warm: matches!(self.class.credential_class(), CredentialClass::Identity(_)),
            fanout: Some(FANOUT),
            is_retired: false,
            now: self.now,
        };
        let rng = &mut self.rng;
        let effects = self.class.plan(&mut self.connections, &around, |_| rng.u8(..4) > 0);
        for effect in effects {
            match effect {
                ClassEffect::Dial(endpoint) => {
                    self.connects.push(endpoint);
                    self.check_connects(endpoint);
                }
                ClassEffect::Close(index) => {
                    let row = &mut self.connections[index];
                    // One that drains may have become unresponsive.
                    assert!(!row.candidate.state.is_in_service(), "{row:?}");
                    assert!(row.draining_since.is_some_and(|at| self.now >= at + DRAINING_TIME));
                    row.candidate.state = ConnectionState::Dead;
                }
                ClassEffect::WakeAt(at) => {
                    assert!(at > self.now);
                    self.wake_at = Some(self.wake_at.map_or(at, |wake_at| wake_at.min(at)));
                }
                // Every endpoint may refuse the new credential.
                ClassEffect::Drain(index, DrainReason::CertificateRotated) => {
                    let is_replacement = |row: &ConnectionRow| {
                        row.generation == self.generation
                            && row.candidate.state == ConnectionState::Live
                    };
                    let is_replaced = self.connections.iter().any(is_replacement);
                    assert!(is_replaced || self.connections[index].idle_since.is_some());
                }
                // The plan changes the rows.
                ClassEffect::Drain(..) | ClassEffect::NotifyDegraded(_) => {}
                effect => panic!("{effect:?}"),
            }
        }
    }

    /// The limits of connections to an endpoint, after a connect has started.
    fn check_connects(&self, endpoint: usize) {
        let connects = self.connects.iter().filter(|other| **other == endpoint).count();
        let to = |row: &&ConnectionRow| row.candidate.endpoint == EndpointKey(endpoint);
        let in_service =
            self.connections.iter().filter(to).filter(|row| {
                row.candidate.state.is_in_service() && row.generation == self.generation
            });
        assert!(connects <= MAX_PARALLEL_DIALS, "{connects} connects");
        assert!(in_service.count() + connects <= self.max_connections(), "too many connections");
        if self.class.credential_class().is_unproven_token() {
            let all = self.connections.iter().filter(to).count() + connects;
            assert!(all <= UNPROVEN_WITH_DRAINING, "{all} connections with draining ones");
        }
    }

    fn answer(&mut self) {
        let mut round = Round::default();
        loop {
            let table = self.table();
            let endpoints = self.endpoints.clone();
            let situation = Situation {
                endpoints: &endpoints,
                is_outage: self.is_outage,
                max_connections: self.max_connections(),
                now: self.now,
            };
            let Some((number, answer)) = self.class.next_answer(
                &mut round,
                &table,
                &situation,
                |_, _| Preference::default(),
                |index| (STREAMS - table[index].free_streams) as f64,
                &mut self.rng,
            ) else {
                break;
            };
            let waiting = self.waiting.remove(&number).expect("a request has one answer");
            if let Ok(index) = answer {
                let earlier = self.waiting.range(..number);
                let passed_over = earlier.map(|(_, other)| other).find(|w| w.is_like(&waiting));
                assert!(passed_over.is_none(), "{passed_over:?} waits behind {waiting:?}");
                self.grant(index, &waiting.required);
            }
        }
        if let Some(at) = round.wake_at() {
            self.wake_at = Some(self.wake_at.map_or(at, |wake_at| wake_at.min(at)));
        }
    }

    /// Lets time pass. The class runs when it has asked for it, and at no other time.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(at) = self.wake_at.filter(|at| *at <= end) {
            self.now = at;
            self.run();
        }
        self.now = end;
    }

    fn apply(&mut self, event: &Event) {
        let count = self.connections.len().max(1);
        match event {
            Event::Request { long_running, may_be_held, live_only, excluded } => {
                self.request(StreamRequirements {
                    long_running: *long_running,
                    may_be_held: *may_be_held,
                    live_only: *live_only,
                    excluded: excluded.iter().map(|&endpoint| EndpointKey(endpoint)).collect(),
                    ..StreamRequirements::default()
                });
            }
            Event::Cancel(which) => {
                let number = self.waiting.keys().copied().nth(which % self.waiting.len().max(1));
                if let Some(waiting) = number.and_then(|number| self.waiting.remove(&number)) {
                    self.class.leave(waiting.id);
                }
            }
            Event::StreamEnds(which) if !self.granted_streams.is_empty() => {
                let which = which % self.granted_streams.len();
                let (key, watch) = self.granted_streams.swap_remove(which);
                let rows = self.connections.iter_mut();
                for row in rows.filter(|row| row.candidate.connection == key) {
                    row.candidate.free_streams += 1;
                    row.candidate.watches -= usize::from(watch);
                    if row.candidate.free_streams == STREAMS {
                        row.idle_since = Some(self.now);
                    }
                }
            }
            Event::Connection(which, state, is_silent) => {
                if let Some(row) = self.connections.get_mut(which % count)
                    && (row.candidate.state.is_in_service() || !state.is_in_service())
                {
                    row.candidate.state = *state;
                    row.candidate.is_silent = *is_silent;
                    if *state == ConnectionState::Draining {
                        row.draining_since.get_or_insert(self.now);
                    }
                }
            }
            Event::ConnectEnds(succeeds) if !self.connects.is_empty() => {
                let endpoint = self.connects.remove(0);
                self.class.connect_ended(EndpointKey(endpoint));
                self.next += 1;
                let new = Candidate {
                    free_streams: STREAMS,
                    stream_limit: STREAMS,
                    ..candidate(self.next, endpoint, self.now)
                };
                if *succeeds {
                    let row = connection_row(new, self.now);
                    self.connections.push(ConnectionRow { generation: self.generation, ..row });
                }
                self.endpoints[endpoint].last_failure = (!succeeds).then_some(self.now);
            }
            Event::Endpoint(index, state) => self.endpoints[*index].state = *state,
            Event::CredentialReplaced => self.generation += 1,
            Event::Outage(is_outage) => self.is_outage = *is_outage,
            Event::Passes(ms) => return self.pass(Duration::from_millis(*ms)),
            Event::StreamEnds(_) | Event::ConnectEnds(_) => {}
        }
        self.run();
    }
}

proptest! {
    #[test]
    fn class_keeps_its_limits_and_forgets_no_request(
        class in prop::sample::select(vec![
            CredentialClass::Token,
            CredentialClass::Identity(0),
            CredentialClass::UnprovenToken,
            CredentialClass::SlowedToken,
            CredentialClass::Anonymous,
        ]),
        seed in any::<u64>(),
        events in prop::collection::vec(event(), 1..150),
    ) {
        let mut shell = Shell::new(class, seed);
        for event in &events {
            shell.apply(event);
        }
        shell.pass(UNAVAILABLE_AFTER);
        prop_assert!(shell.waiting.is_empty(), "requests wait for ever: {:?}", shell.waiting);
    }
}
