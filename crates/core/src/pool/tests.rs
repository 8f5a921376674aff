//! Tables of the decisions of a class.

use std::time::{Duration, Instant};

use super::limits::{ConnectionLimits, HEARTBEAT_WAITERS, UNPROVEN_WITH_DRAINING, max_waiters};
use super::*;
use crate::connection::ConnectionState::{self, Draining, Live, Suspect, Unresponsive};
use crate::connection::DrainReason;
use crate::credential_class::CredentialClass;
use crate::endpoint_state::EndpointState::{self, Connecting, Degraded, Leaving, Ready};

pub(super) const LIMITS: ConnectionLimits = ConnectionLimits { min: 1, max: 8, max_streams: 100 };

/// A live connection without streams to a ready endpoint.
pub(super) fn candidate(connection: usize, endpoint: usize, now: Instant) -> Candidate {
    Candidate {
        connection: ConnectionKey(connection),
        endpoint: EndpointKey(endpoint),
        state: Live,
        is_silent: false,
        endpoint_state: Ready,
        is_fallback: false,
        has_warning: false,
        free_streams: 100,
        stream_limit: 100,
        watches: 0,
        last_received: now,
        share: 1.0,
    }
}

/// A connection that has had a stream just now.
pub(super) fn connection_row(candidate: Candidate, now: Instant) -> ConnectionRow {
    ConnectionRow {
        candidate,
        generation: 1,
        probe_is_failing: false,
        has_slow_heads: false,
        is_mostly_proven: false,
        idle_since: Some(now),
        peak_streams: 1,
        draining_since: None,
    }
}

/// A ready endpoint.
pub(super) fn endpoint_row(key: usize) -> EndpointRow {
    EndpointRow {
        key: EndpointKey(key),
        state: Ready,
        is_ready_or_returns: true,
        is_fallback: false,
        rank: key as u64,
        version_side: None,
        is_usable: true,
        ready_for: Some(Duration::from_secs(60)),
        last_failure: None,
    }
}

fn around(endpoints: &[EndpointRow], now: Instant) -> Surroundings<'_> {
    Surroundings {
        endpoints,
        limits: LIMITS,
        generation: Some(1),
        is_warm: false,
        fanout: Some(FANOUT),
        is_retired: false,
        now,
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn before(at: Instant, time: Duration) -> Instant {
    at.checked_sub(time).expect("a time after the clock began")
}

const SCOPE: Scope = Scope { allow_suspect: false, max_connections: 8 };

/// The connections that take a request in 64 attempts, in order.
fn taken(
    table: &[Candidate],
    required: &StreamRequirements,
    scope: Scope,
    preferences: &[Preference],
) -> Vec<usize> {
    let mut rng = fastrand::Rng::with_seed(7);
    let preference = |index: usize| preferences.get(index).copied().unwrap_or_default();
    let mut taken: Vec<_> = (0..64)
        .filter_map(|_| select(table, required, scope, preference, |_| 1.0, &mut rng))
        .collect();
    taken.sort_unstable();
    taken.dedup();
    taken
}

/// Makes a candidate worse by one criterion.
type Worsening = fn(&mut Candidate, &mut StreamRequirements, &mut Preference);

#[test]
fn select_ranks_by_each_criterion_before_those_below_it() {
    let now = Instant::now();
    let criteria: [Worsening; 7] = [
        |candidate, _, _| candidate.endpoint_state = Connecting,
        // Candidate 0 is the one on which the request failed; its endpoint did not refuse if another did.
        |candidate, required, _| {
            required.previous_failure =
                Some(PreviousFailure::Refusal(candidate.connection, EndpointKey(99)));
        },
        |candidate, required, _| {
            required.previous_failure =
                Some(PreviousFailure::Refusal(ConnectionKey(99), candidate.endpoint));
        },
        |_, _, preference| preference.version = 1,
        |candidate, _, _| candidate.is_fallback = true,
        |_, _, preference| preference.is_behind = true,
        |candidate, _, _| candidate.has_warning = true,
    ];
    for (first, worsen) in criteria.iter().enumerate() {
        for below in &criteria[first + 1..] {
            let mut table = [candidate(0, 10, now), candidate(1, 11, now)];
            let mut required = StreamRequirements::default();
            let mut preferences = [Preference::default(); 2];
            below(&mut table[1], &mut required, &mut preferences[1]);
            worsen(&mut table[0], &mut required, &mut preferences[0]);
            assert_eq!(taken(&table, &required, SCOPE, &preferences), [1], "criterion {first}");
        }
        let mut table = [candidate(0, 10, now), candidate(1, 11, now)];
        let (mut required, mut preferences) =
            (StreamRequirements::default(), [Preference::default(); 2]);
        assert_eq!(taken(&table, &required, SCOPE, &preferences), [0, 1]);
        worsen(&mut table[0], &mut required, &mut preferences[0]);
        assert_eq!(taken(&table, &required, SCOPE, &preferences), [1], "criterion {first} alone");
        assert_eq!(taken(&table[..1], &required, SCOPE, &preferences), [0], "better than none");
    }
}

#[test]
fn select_takes_only_connections_that_may_carry_the_request() {
    let now = Instant::now();
    let suspects = Scope { allow_suspect: true, ..SCOPE };
    for (state, is_silent, free_streams, scope, expected) in [
        (Live, false, 1, SCOPE, true),
        (Live, false, 0, SCOPE, false),
        (Suspect, false, 1, SCOPE, false),
        (Suspect, false, 1, suspects, true),
        (Suspect, true, 1, suspects, false),
        (Draining, false, 1, suspects, false),
        (Unresponsive, false, 1, suspects, false),
        (ConnectionState::Dead, false, 1, suspects, false),
    ] {
        let table = [Candidate { state, is_silent, free_streams, ..candidate(0, 10, now) }];
        let took = !taken(&table, &StreamRequirements::default(), scope, &[]).is_empty();
        assert_eq!(took, expected, "{state:?} {is_silent} {free_streams} {scope:?}");
        let required =
            StreamRequirements { excluded: vec![EndpointKey(10)], ..StreamRequirements::default() };
        assert!(taken(&table, &required, scope, &[]).is_empty(), "excluded");
        let required = StreamRequirements {
            excluded_connections: vec![ConnectionKey(0)],
            ..StreamRequirements::default()
        };
        assert!(taken(&table, &required, scope, &[]).is_empty(), "excluded connection");
    }
}

#[test]
fn select_leaves_a_tenth_of_the_streams_to_requests_other_than_watches() {
    let now = Instant::now();
    // Watches on two connections to one endpoint, limit of connections, limit of streams, whether a watch fits.
    for (watches, max_connections, stream_limit, expected) in [
        ([0, 0], 2, 100, true),
        ([89, 90], 2, 100, true),
        ([90, 90], 2, 100, false),
        ([100, 79], 2, 100, true),
        ([90, 90], 8, 100, true),
        ([0, 0], 1, 1, true),
        ([1, 0], 1, 1, false),
    ] {
        let of = |watches| Candidate { stream_limit, watches, ..candidate(watches, 10, now) };
        let table = [of(watches[0]), of(watches[1])];
        let scope = Scope { max_connections, ..SCOPE };
        let watch = StreamRequirements { long_running: true, ..StreamRequirements::default() };
        let fits = !taken(&table, &watch, scope, &[]).is_empty();
        assert_eq!(fits, expected, "{watches:?} {max_connections} {stream_limit}");
        assert_eq!(taken(&table, &StreamRequirements::default(), scope, &[]), [0, 1]);
    }
}

#[test]
fn select_after_silence_takes_connections_that_received_bytes_recently() {
    let now = Instant::now();
    let received = |connection, ms| Candidate {
        last_received: now + Duration::from_millis(ms),
        ..candidate(connection, connection, now)
    };
    let table = [received(0, 0), received(1, 950), received(2, 1_000), received(3, 899)];
    let silence = Some(PreviousFailure::Silence(ConnectionKey(2), EndpointKey(99)));
    let required = |long_running, previous_failure| StreamRequirements {
        long_running,
        previous_failure,
        ..StreamRequirements::default()
    };
    // The failed connection comes last, and counts as a candidate only if it is the best.
    assert_eq!(taken(&table, &required(false, silence), SCOPE, &[]), [1, 3]);
    assert_eq!(taken(&table[..2], &required(false, silence), SCOPE, &[]), [1]);
    assert_eq!(taken(&table, &required(false, None), SCOPE, &[]), [0, 1, 2, 3]);
    let other_version = [Preference { version: 1, ..Preference::default() }; 2];
    let preferences = [other_version[0], other_version[1], Preference::default()];
    let all = [received(0, 0), received(1, 0), received(3, 0)];
    assert_eq!(taken(&all, &required(false, silence), SCOPE, &preferences), [0, 1, 2]);
    assert_eq!(taken(&all, &required(true, silence), SCOPE, &preferences), [2], "a watch");
}

#[test]
fn select_after_silence_prefers_another_endpoint_among_those_that_show_life() {
    let now = Instant::now();
    let ago = |ms| before(now, Duration::from_millis(ms));
    // Connection 0 to endpoint 10 has failed. The others with their endpoints, and how long ago each has received bytes.
    for (failed_ago, others, expected) in [
        (500, &[(1, 10, 50), (2, 11, 50)][..], &[2][..]),
        (500, &[(1, 10, 50), (2, 11, 120)], &[2]),
        // Only the same process has shown life since.
        (500, &[(1, 10, 50), (2, 11, 400)], &[1]),
        // None has: PINGs are a second apart.
        (500, &[(1, 10, 600), (2, 11, 900)], &[2]),
        (500, &[(1, 10, 600), (2, 11, 900), (3, 12, 950)], &[2, 3]),
        (500, &[(1, 10, 50), (2, 10, 60)], &[1, 2]),
        (500, &[], &[0]),
    ] {
        let of = |(key, endpoint, ms)| Candidate {
            last_received: ago(ms),
            ..candidate(key, endpoint, now)
        };
        let table: Vec<_> = [(0, 10, failed_ago)].iter().chain(others).copied().map(of).collect();
        for long_running in [false, true] {
            let required = StreamRequirements {
                long_running,
                previous_failure: Some(PreviousFailure::Silence(ConnectionKey(0), EndpointKey(10))),
                ..StreamRequirements::default()
            };
            assert_eq!(taken(&table, &required, SCOPE, &[]), expected, "{others:?}");
        }
    }
    // The failed connection was closed, and is not known any more.
    let table = [(1, 10, 50), (2, 11, 900)].map(|(key, endpoint, ms)| Candidate {
        last_received: ago(ms),
        ..candidate(key, endpoint, now)
    });
    let required = StreamRequirements {
        previous_failure: Some(PreviousFailure::Silence(ConnectionKey(0), EndpointKey(10))),
        ..StreamRequirements::default()
    };
    assert_eq!(taken(&table, &required, SCOPE, &[]), [1]);
}

#[test]
fn is_nearly_full_counts_the_free_streams_of_all_live_connections_to_the_endpoint() {
    let now = Instant::now();
    let of = |endpoint, state, free_streams| Candidate {
        state,
        free_streams,
        ..candidate(free_streams, endpoint, now)
    };
    for (others, free_streams, expected) in [
        (vec![], 10, false),
        (vec![], 9, true),
        (vec![of(10, Live, 1)], 9, false),
        (vec![of(10, Suspect, 50)], 9, true),
        (vec![of(11, Live, 50)], 9, true),
    ] {
        let table: Vec<_> = [of(10, Live, free_streams)].into_iter().chain(others).collect();
        assert_eq!(is_nearly_full(&table, 0), expected, "{table:?}");
    }
}

/// A request that has waited for this long, and the situation.
struct Wait {
    table: Vec<Candidate>,
    required: StreamRequirements,
    waited: Duration,
    is_outage: bool,
    failed_ago: Option<Duration>,
    is_dialing: bool,
    /// How long before the wait the request lost its connection.
    lost_before: Option<Duration>,
}

/// The answer to the request, or the time until the next round.
fn answer(wait: &Wait) -> Result<Result<usize, StreamRefusal>, Option<Duration>> {
    let start = Instant::now();
    let now = start + wait.waited;
    let mut class = Class::new(CredentialClass::Token, start);
    let endpoints = [EndpointRow {
        last_failure: wait.failed_ago.map(|ago| before(now, ago)),
        ..endpoint_row(10)
    }];
    if wait.is_dialing {
        let surroundings = Surroundings { limits: LIMITS, ..around(&endpoints, start) };
        let effects = class.plan(&mut [], &surroundings, |_| true);
        assert_eq!(effects, [ClassEffect::Dial(0)]);
    }
    let required = StreamRequirements {
        without_connection_since: wait.lost_before.map(|ago| before(start, ago)),
        ..wait.required.clone()
    };
    class.begin_wait(&wait.table, required, "handle", start).unwrap();
    let situation =
        Situation { endpoints: &endpoints, is_outage: wait.is_outage, max_connections: 8, now };
    let (mut round, mut rng) = (Round::default(), fastrand::Rng::with_seed(1));
    let preference = |_: &&str, _| Preference::default();
    let answer =
        class.next_answer(&mut round, &wait.table, &situation, preference, |_| 1.0, &mut rng);
    match answer {
        Some((handle, answer)) => {
            assert_eq!((handle, class.waiting()), ("handle", 0));
            Ok(answer)
        }
        None => Err(round.wake_at().map(|at| at - now)),
    }
}

#[test]
fn request_that_waits_is_answered_by_the_table() {
    let now = Instant::now();
    let ms = Duration::from_millis;
    let free = || vec![candidate(0, 10, now)];
    let full = || vec![Candidate { free_streams: 0, ..candidate(0, 10, now) }];
    let suspect = || vec![Candidate { state: Suspect, ..candidate(0, 10, now) }];
    let silent = || vec![Candidate { is_silent: true, ..suspect()[0] }];
    let full_and_suspect = || vec![full()[0], suspect()[0]];
    let none = || StreamRequirements::default();
    let live_only = || StreamRequirements { live_only: true, ..none() };
    let held = || StreamRequirements { may_be_held: true, ..none() };
    let base = |table, required, waited| Wait {
        table,
        required,
        waited: ms(waited),
        is_outage: false,
        failed_ago: None,
        is_dialing: false,
        lost_before: None,
    };
    let outage = |wait| Wait { is_outage: true, ..wait };
    let failed = |wait, ago| Wait { failed_ago: Some(ms(ago)), ..wait };
    let lost = |wait, ago| Wait { lost_before: Some(ms(ago)), ..wait };
    let dialing = |wait| Wait { is_dialing: true, ..wait };
    let wait_for = |left| Err(Some(ms(left)));
    let unreachable = Ok(Err(StreamRefusal::Unreachable));
    for (number, (wait, expected)) in [
        (base(free(), none(), 0), Ok(Ok(0))),
        // A held watch, in an outage.
        (outage(base(free(), held(), 0)), unreachable),
        (outage(base(free(), none(), 0)), Ok(Ok(0))),
        (base(free(), held(), 0), Ok(Ok(0))),
        // Connected, but full.
        (base(full(), none(), 0), wait_for(1_000)),
        (base(full(), none(), 999), wait_for(1)),
        (base(full(), none(), 1_000), Ok(Err(StreamRefusal::Exhausted))),
        (base(full_and_suspect(), none(), 999), wait_for(1)),
        (base(full_and_suspect(), none(), 1_000), Ok(Ok(1))),
        (base(full_and_suspect(), live_only(), 1_000), Ok(Err(StreamRefusal::Exhausted))),
        (failed(base(full(), none(), 500), 100), wait_for(500)),
        // Not connected.
        (base(vec![], none(), 1_199), wait_for(1)),
        (base(vec![], none(), 1_200), unreachable),
        (base(suspect(), none(), 1_199), wait_for(1)),
        (base(suspect(), none(), 1_200), Ok(Ok(0))),
        (base(suspect(), live_only(), 1_200), unreachable),
        (base(silent(), none(), 1_200), unreachable),
        // A connect has failed since the request has no connection.
        (failed(base(vec![], none(), 500), 499), unreachable),
        (failed(base(vec![], none(), 500), 501), wait_for(700)),
        (dialing(failed(base(vec![], none(), 500), 499)), wait_for(700)),
        (failed(base(suspect(), none(), 500), 499), Ok(Ok(0))),
        // The loss of a connection before the wait counts, unless another one is live.
        (lost(base(vec![], none(), 0), 1_000), wait_for(200)),
        (lost(base(vec![], none(), 200), 1_000), unreachable),
        (lost(failed(base(vec![], none(), 0), 1), 2), unreachable),
        (lost(base(full(), none(), 0), 1_000), wait_for(1_000)),
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(answer(&wait), expected, "row {number}");
    }
}

#[test]
fn request_waits_for_a_ready_endpoint_if_a_connection_to_one_may_follow() {
    let start = Instant::now();
    let unready = |state| Candidate { endpoint_state: state, ..candidate(0, 10, start) };
    let (degraded, connecting) = (unready(Degraded), unready(Connecting));
    let to_ready = |state| Candidate { state, free_streams: 0, ..candidate(1, 11, start) };
    let rows = |state, is_ready_or_returns, last_failure| {
        let degraded =
            EndpointRow { state: Degraded, is_ready_or_returns: false, ..endpoint_row(10) };
        [degraded, EndpointRow { state, is_ready_or_returns, last_failure, ..endpoint_row(11) }]
    };
    let ready = rows(Ready, true, None);
    let free = StreamRequirements::default;
    let without = |key| StreamRequirements { excluded: vec![EndpointKey(key)], ..free() };
    // The connections, what the request requires, the endpoints, how long it has waited, and whether it waits on.
    for (table, required, endpoints, waited, expected) in [
        (vec![degraded], free(), ready, 0, true),
        (vec![connecting], free(), ready, 0, true),
        (vec![degraded], free(), ready, 999, true),
        (vec![degraded], free(), ready, 1_000, false),
        (vec![candidate(0, 10, start)], free(), ready, 0, false),
        // All streams of the ready endpoint are used, or its connection drains or is suspect.
        (vec![degraded, to_ready(Live)], free(), ready, 0, false),
        (vec![degraded, to_ready(Draining)], free(), ready, 0, true),
        (vec![degraded, to_ready(Suspect)], free(), ready, 0, true),
        // The request has failed there.
        (vec![degraded], without(11), ready, 0, false),
        (vec![degraded, to_ready(Live)], without(11), ready, 0, false),
        // It was ready until its connections ended.
        (vec![degraded], free(), rows(Connecting, true, None), 0, true),
        // None is ready, or a connect has failed.
        (vec![degraded], free(), rows(Degraded, false, None), 0, false),
        (vec![degraded], free(), rows(Connecting, false, None), 0, false),
        (vec![degraded], free(), rows(Ready, true, Some(start)), 0, false),
    ] {
        let class = Class::<()>::new(CredentialClass::Token, start);
        let now = start + Duration::from_millis(waited);
        let awaits = class.awaits_ready((&table, 0), &required, &endpoints, start, now);
        assert_eq!(awaits, expected, "{table:?} {required:?} {endpoints:?} after {waited} ms");
        let mut class = Class::new(CredentialClass::Token, start);
        class.begin_wait(&table, required, (), start).unwrap();
        let situation =
            Situation { endpoints: &endpoints, is_outage: false, max_connections: 8, now };
        let (mut round, mut rng) = (Round::default(), fastrand::Rng::with_seed(1));
        let preference = |(): &(), _| Preference::default();
        let answer =
            class.next_answer(&mut round, &table, &situation, preference, |_| 1.0, &mut rng);
        let until = expected.then_some(start + READY_AFTER);
        assert_eq!((answer, round.wake_at()), ((!expected).then_some(((), Ok(0))), until));
    }
    let mut class = Class::<()>::new(CredentialClass::Token, start);
    let awaits =
        |class: &Class<()>, now| class.awaits_ready((&[degraded], 0), &free(), &ready, now, now);
    class.credential_refused(EndpointKey(11), 1, 0.5, start);
    assert!(!awaits(&class, start), "the endpoint refuses the credential");
    assert!(awaits(&class, start + Duration::from_millis(1_200)), "the next connect follows");
    while class.begin_wait(&[degraded], free(), (), start).is_ok() {}
    assert!(!awaits(&class, start), "more requests wait than half of those that may");
}

#[test]
fn requests_are_served_in_order_and_passed_over_if_they_cannot_be() {
    let now = Instant::now();
    let mut class = Class::new(CredentialClass::Token, now);
    let watch = || StreamRequirements { long_running: true, ..StreamRequirements::default() };
    let mut begin = |required, handle| class.begin_wait(&[], required, handle, now).unwrap();
    begin(watch(), "watch");
    let first = begin(StreamRequirements::default(), "first");
    let cancelled = begin(StreamRequirements::default(), "cancelled");
    begin(StreamRequirements::default(), "second");
    let heartbeat =
        || StreamRequirements { lane: Lane::Heartbeats, ..StreamRequirements::default() };
    begin(heartbeat(), "heartbeat");
    begin(heartbeat(), "another heartbeat");
    assert_eq!(class.request(false, false, now), Arrival::Wait);
    class.leave(cancelled);
    // No stream is left for watches.
    let mut table = [Candidate { watches: 90, free_streams: 1, ..candidate(0, 10, now) }];
    let serve = |class: &mut Class<&'static str>, table: &mut [Candidate]| {
        let situation = Situation { endpoints: &[], is_outage: false, max_connections: 1, now };
        let (mut round, mut rng) = (Round::default(), fastrand::Rng::with_seed(1));
        let mut served = Vec::new();
        while let Some((handle, answer)) = class.next_answer(
            &mut round,
            table,
            &situation,
            |_, _| Preference::default(),
            |_| 1.0,
            &mut rng,
        ) {
            table[answer.unwrap()].free_streams -= 1;
            served.push(handle);
        }
        served
    };
    assert_eq!(serve(&mut class, &mut table), ["heartbeat"]);
    table[0].free_streams = 2;
    assert_eq!(serve(&mut class, &mut table), ["another heartbeat", "first"]);
    assert_eq!(class.waiting(), 2);
    class.leave(first);
    table[0].free_streams = 5;
    assert_eq!(serve(&mut class, &mut table), ["second"]);
    assert_eq!(class.request(false, false, now), Arrival::Select, "only a watch waits");
    assert_eq!((class.refuse_next(), class.refuse_next()), (Some("watch"), None));
}

#[test]
fn each_request_is_considered_once_in_a_round() {
    let now = Instant::now();
    let mut class = Class::new(CredentialClass::Token, now);
    for long_running in [true, false] {
        let required = StreamRequirements { long_running, ..StreamRequirements::default() };
        class.begin_wait(&[], required, long_running, now).unwrap();
    }
    let situation = Situation { endpoints: &[], is_outage: false, max_connections: 1, now };
    let (mut round, mut rng) = (Round::default(), fastrand::Rng::with_seed(1));
    let mut next = |watches| {
        let table = [Candidate { watches, ..candidate(0, 10, now) }];
        let preference = |_: &bool, _| Preference::default();
        class.next_answer(&mut round, &table, &situation, preference, |_| 1.0, &mut rng)
    };
    assert_eq!(next(90), Some((false, Ok(0))), "no stream is left for a watch");
    assert_eq!(next(0), None, "the watch has had its turn");
    assert_eq!(next(0), None);
    assert_eq!(round.wake_at(), Some(now + EXHAUSTED_AFTER));
}

#[test]
fn begin_wait_is_limited_and_refused_as_the_connections_are() {
    let now = Instant::now();
    for class in [CredentialClass::Token, CredentialClass::Identity(0)] {
        let mut class = Class::new(class, now);
        for _ in 0..max_waiters(class.credential_class()) {
            class.begin_wait(&[], StreamRequirements::default(), (), now).unwrap();
        }
        let live = [candidate(0, 10, now)];
        let suspect = [Candidate { state: Suspect, ..live[0] }];
        for (table, refusal) in [
            (&live[..], StreamRefusal::Exhausted),
            (&suspect[..], StreamRefusal::Unreachable),
            (&[][..], StreamRefusal::Unreachable),
        ] {
            let refused = class.begin_wait(table, StreamRequirements::default(), (), now);
            assert_eq!(refused, Err(refusal));
        }
        let heartbeat =
            || StreamRequirements { lane: Lane::Heartbeats, ..StreamRequirements::default() };
        let more = (0..1_000).filter(|_| class.begin_wait(&[], heartbeat(), (), now).is_ok());
        assert_eq!(more.count(), HEARTBEAT_WAITERS);
    }
}

#[test]
fn request_is_refused_in_an_outage_only_if_it_can_be_held_and_else_keeps_its_turn() {
    let now = Instant::now();
    let mut class = Class::new(CredentialClass::Token, now);
    let outage = Arrival::Refuse(StreamRefusal::Unreachable);
    for (may_be_held, is_outage, alone, behind_another) in [
        (false, false, Arrival::Select, Arrival::Wait),
        (true, false, Arrival::Select, Arrival::Wait),
        (false, true, Arrival::Select, Arrival::Wait),
        (true, true, outage, outage),
    ] {
        assert_eq!(class.request(may_be_held, is_outage, now), alone);
        let other = class.begin_wait(&[], StreamRequirements::default(), (), now).unwrap();
        assert_eq!(class.request(may_be_held, is_outage, now), behind_another);
        class.leave(other);
    }
}

#[test]
fn begin_slow_head_round_is_due_once_in_each_interval() {
    let start = Instant::now();
    let mut class = Class::<()>::new(CredentialClass::Token, start);
    let mut due = |time| class.begin_slow_head_round(start + time);
    let short = SLOW_HEAD_INTERVAL / 2;
    assert!(!due(short), "the class has just begun");
    assert!(due(SLOW_HEAD_INTERVAL));
    assert!(!due(SLOW_HEAD_INTERVAL + short), "the last round was less than an interval ago");
    // A late round moves the next one.
    assert!(due(3 * SLOW_HEAD_INTERVAL));
    assert!(!due(3 * SLOW_HEAD_INTERVAL + short));
    assert!(due(4 * SLOW_HEAD_INTERVAL));
}

#[test]
fn plan_drains_and_notifies_by_the_table() {
    let start = Instant::now();
    let now = start + seconds(600);
    let base = || connection_row(candidate(0, 10, now), now);
    let to = |endpoint_state, row: ConnectionRow| ConnectionRow {
        candidate: Candidate { endpoint_state, ..row.candidate },
        ..row
    };
    let old = |row| ConnectionRow { generation: 0, ..row };
    let idle =
        |seconds_, row| ConnectionRow { idle_since: Some(before(now, seconds(seconds_))), ..row };
    let in_use = |row| ConnectionRow { idle_since: None, ..row };
    let burst = |row| ConnectionRow { peak_streams: 64, ..row };
    let failing = |row| ConnectionRow { probe_is_failing: true, ..row };
    let drain = |cause| Some(ClassEffect::Drain(0, cause));
    // The first connection, whether a second one is live and current, whether the class is warm.
    for (row, has_other, is_warm, expected) in [
        (base(), false, false, None),
        (old(base()), true, false, drain(DrainReason::CertificateRotated)),
        (old(base()), false, false, drain(DrainReason::CertificateRotated)),
        (old(in_use(base())), true, false, drain(DrainReason::CertificateRotated)),
        (old(in_use(base())), false, false, None),
        (to(Leaving, base()), true, false, drain(DrainReason::EndpointRemoved)),
        (to(Leaving, base()), false, false, None),
        (to(Degraded, base()), true, false, Some(ClassEffect::NotifyDegraded(0))),
        (failing(to(Degraded, base())), true, false, Some(ClassEffect::NotifyDegraded(0))),
        (failing(base()), true, false, Some(ClassEffect::NotifySuspected(0))),
        (old(failing(base())), true, false, drain(DrainReason::CertificateRotated)),
        (idle(299, base()), true, false, None),
        (idle(300, base()), true, false, drain(DrainReason::Idle)),
        (idle(300, base()), false, false, drain(DrainReason::Idle)),
        (idle(300, base()), true, true, None),
        (idle(10, base()), true, false, None),
        (idle(9, burst(base())), true, false, None),
        (idle(10, burst(base())), true, false, drain(DrainReason::Idle)),
        (idle(10, burst(base())), false, false, None),
        (idle(10, burst(base())), true, true, None),
    ] {
        let mut class: Class<()> = Class::new(CredentialClass::Token, start);
        let mut rows = vec![row];
        if has_other {
            rows.push(connection_row(candidate(1, 10, now), now));
        }
        let surroundings = Surroundings { is_warm, is_retired: true, ..around(&[], now) };
        let effects = class.plan(&mut rows, &surroundings, |_| true);
        assert_eq!(effects.first().copied(), expected, "{row:?} {has_other} {is_warm}");
    }
}

#[test]
fn connections_to_a_removed_endpoint_drain_after_a_while_and_those_with_an_older_credential_stay() {
    let start = Instant::now();
    let planned = |class: &mut Class<()>, generation, endpoint_state, after: u64| {
        let now = start + seconds(after);
        let row = connection_row(candidate(0, 10, now), now);
        let candidate = Candidate { endpoint_state, ..row.candidate };
        let row = ConnectionRow { generation, candidate, idle_since: None, ..row };
        class.plan(&mut [row], &around(&[], now), |_| true)
    };
    for (generation, endpoint, reason) in [
        (1, Leaving, Some(DrainReason::EndpointRemoved)),
        (0, Leaving, Some(DrainReason::EndpointRemoved)),
        (0, Ready, None),
    ] {
        let mut class: Class<()> = Class::new(CredentialClass::Token, start);
        for after in [0, 4] {
            assert_eq!(planned(&mut class, generation, endpoint, after), []);
        }
        for after in [5, 100_000] {
            let expected = reason.map(|reason| ClassEffect::Drain(0, reason));
            let effects = planned(&mut class, generation, endpoint, after);
            assert_eq!(effects.first().copied(), expected, "{generation} {endpoint:?} {after}");
        }
    }
}

/// An old watch outlasts the use of its class.
#[test]
fn older_credential_is_replaced_as_long_as_a_stream_uses_it() {
    let start = Instant::now();
    let now = start + 2 * IDLE_CLASS;
    let endpoints = [endpoint_row(10)];
    let planned = |idle_since| {
        let mut class: Class<()> = Class::new(CredentialClass::Token, start);
        let row = connection_row(candidate(0, 10, now), now);
        let row = ConnectionRow { generation: 0, idle_since, ..row };
        class.plan(&mut [row], &around(&endpoints, now), |_| true)
    };
    assert_eq!(planned(None), [ClassEffect::Dial(0)]);
    assert_eq!(planned(Some(now)), [ClassEffect::Drain(0, DrainReason::CertificateRotated)]);
}

#[test]
fn plan_pauses_connects_to_an_endpoint_that_refuses_the_credential() {
    let now = Instant::now();
    let endpoints = [endpoint_row(10), endpoint_row(11)];
    let mut class: Class<()> = Class::new(CredentialClass::Token, now);
    class.credential_refused(EndpointKey(10), 1, 0.5, now);
    let older = ConnectionRow { generation: 0, ..connection_row(candidate(0, 10, now), now) };
    let paused = [ClassEffect::WakeAt(now + seconds(1)), ClassEffect::Dial(1)];
    let both = [ClassEffect::Dial(0), ClassEffect::Dial(1)];
    for (generation, mut connections, expected) in
        [(1, vec![older], paused), (1, vec![], both), (2, vec![older], both)]
    {
        class.connect_ended(EndpointKey(11));
        let generation = Some(generation);
        let surroundings = Surroundings { generation, ..around(&endpoints, now) };
        assert_eq!(class.plan(&mut connections, &surroundings, |_| true), expected);
        class.connect_ended(EndpointKey(10));
    }
}

#[test]
fn plan_without_a_credential_drains_all_and_then_retires_the_class() {
    let now = Instant::now();
    let mut class: Class<()> = Class::new(CredentialClass::Identity(3), now);
    let endpoints = [endpoint_row(10)];
    let surroundings = Surroundings { generation: None, is_warm: true, ..around(&endpoints, now) };
    let mut rows = [connection_row(candidate(0, 10, now), now)];
    let effects = class.plan(&mut rows, &surroundings, |_| true);
    assert_eq!(effects, [ClassEffect::Drain(0, DrainReason::IdentityUnusable)]);
    assert_eq!(class.plan(&mut [], &surroundings, |_| true), [ClassEffect::Retire]);
}

#[test]
fn plan_dials_the_targets_of_a_class_that_is_warm_or_in_use() {
    let start = Instant::now();
    let endpoints = [10, 11].map(endpoint_row);
    let dials = |class: &mut Class<()>, after: u64, is_warm, is_retired| {
        let now = start + seconds(after);
        let surroundings = Surroundings { is_warm, is_retired, ..around(&endpoints, now) };
        let effects = class.plan(&mut [], &surroundings, |_| true);
        for (effect, endpoint) in effects.iter().zip(&endpoints) {
            assert!(matches!(effect, ClassEffect::Dial(_)), "{effect:?}");
            class.connect_ended(endpoint.key);
        }
        effects.len()
    };
    let mut class = Class::new(CredentialClass::Token, start);
    assert_eq!(dials(&mut class, 299, false, false), 2);
    assert_eq!(dials(&mut class, 300, false, false), 0, "not used for 300 s");
    assert_eq!(dials(&mut class, 300, true, false), 2, "warm");
    assert_eq!(dials(&mut class, 300, true, true), 0, "retired");
    class.hold_watch();
    assert_eq!(dials(&mut class, 300, false, false), 2, "a watch is held");
    class.release_watch();
    assert_eq!(dials(&mut class, 300, false, false), 0);
    let id = class.begin_wait(&[], StreamRequirements::default(), (), start).unwrap();
    assert_eq!(dials(&mut class, 300, false, false), 2, "a request waits");
    assert_eq!(dials(&mut class, 300, false, true), 2, "a request waits, retired");
    class.leave(id);
    class.request(false, false, start + seconds(300));
    assert_eq!(dials(&mut class, 300, false, false), 2, "a request has come");
}

#[test]
fn plan_opens_a_connection_besides_those_that_a_request_excludes() {
    let now = Instant::now();
    let endpoints = [10, 11].map(endpoint_row);
    let row = |(key, endpoint)| connection_row(candidate(key, endpoint, now), now);
    // The connections with their endpoints, those that are excluded, an excluded endpoint, and where one is opened.
    for (open, excluded, excluded_endpoint, expected) in [
        (&[(1, 10), (2, 11)][..], &[][..], 0, &[][..]),
        (&[(1, 10), (2, 11)], &[1], 11, &[0]),
        (&[(1, 10), (3, 10), (2, 11)], &[1], 11, &[]),
        (&[(1, 10), (3, 10), (2, 11)], &[1, 3], 11, &[0]),
        // One to another endpoint was lost meanwhile.
        (&[(1, 10), (2, 11)], &[7], 11, &[]),
        (&[(1, 10), (2, 11)], &[1], 10, &[]),
    ] {
        let required = StreamRequirements {
            excluded: vec![EndpointKey(excluded_endpoint)],
            excluded_connections: excluded.iter().map(|&key| ConnectionKey(key)).collect(),
            ..StreamRequirements::default()
        };
        let mut class = Class::new(CredentialClass::Token, now);
        class.begin_wait(&[], required, (), now).unwrap();
        let mut rows: Vec<_> = open.iter().copied().map(row).collect();
        let effects = class.plan(&mut rows, &around(&endpoints, now), |_| true);
        let dials: Vec<_> = expected.iter().map(|&endpoint| ClassEffect::Dial(endpoint)).collect();
        assert_eq!(effects, dials, "{open:?} {excluded:?} {excluded_endpoint}");
        // While it is opened, no further one is.
        let effects = class.plan(&mut rows, &around(&endpoints, now), |_| true);
        assert_eq!(effects, [], "{open:?} {excluded:?} {excluded_endpoint}");
    }
}

#[test]
fn plan_dials_no_more_than_claims_and_pauses_permit() {
    let now = Instant::now();
    let endpoints = [endpoint_row(10)];
    let waiting = |class| {
        let mut class = Class::new(class, now);
        for _ in 0..500 {
            class.begin_wait(&[], StreamRequirements::default(), (), now).unwrap();
        }
        class
    };
    let mut claims = 0;
    let effects = waiting(CredentialClass::Token).plan(&mut [], &around(&endpoints, now), |_| {
        claims += 1;
        claims <= 2
    });
    assert_eq!(effects, [ClassEffect::Dial(0), ClassEffect::Dial(0)]);
    let dial = |class: &mut Class<()>| class.plan(&mut [], &around(&endpoints, now), |_| true);
    for (class, burst, interval) in [
        (CredentialClass::UnprovenToken, 8, 200),
        (CredentialClass::Anonymous, 8, 200),
        (CredentialClass::SlowedToken, 4, 1_000),
    ] {
        let mut unproven = waiting(class);
        for _ in 0..burst / 2 {
            assert_eq!(
                dial(&mut unproven),
                [ClassEffect::Dial(0), ClassEffect::Dial(0)],
                "{class:?}"
            );
            unproven.connect_ended(EndpointKey(10));
            unproven.connect_ended(EndpointKey(10));
        }
        let next = now + Duration::from_millis(interval);
        assert_eq!(dial(&mut unproven), [ClassEffect::WakeAt(next)], "{class:?}");
    }
}

#[test]
fn plan_makes_room_for_a_connection_above_the_limit_with_draining_ones() {
    let start = Instant::now();
    let now = start + seconds(60);
    let endpoints = [endpoint_row(10)];
    let draining = |ago: u64| ConnectionRow {
        candidate: Candidate { state: Draining, ..candidate(ago as usize, 10, now) },
        draining_since: Some(before(now, seconds(ago))),
        idle_since: None,
        ..connection_row(candidate(0, 10, now), now)
    };
    let limit = |index| ClassEffect::Drain(index, DrainReason::ConnectionLimit);
    for (ages, expected) in [
        (&[1, 2, 3][..], vec![ClassEffect::Dial(0)]),
        (&[1, 2, 3, 9], vec![limit(0), limit(1), limit(2), limit(3)]),
        (&[1, 10, 3, 9], vec![limit(0), limit(1), limit(2), limit(3), ClassEffect::Close(1)]),
    ] {
        let mut class: Class<()> = Class::new(CredentialClass::UnprovenToken, start);
        let mut rows: Vec<_> = ages.iter().map(|&ago| draining(ago)).collect();
        assert!(rows.len() <= UNPROVEN_WITH_DRAINING);
        let effects = class.plan(&mut rows, &around(&endpoints, now), |_| true);
        assert_eq!(effects, expected, "{ages:?}");
    }
}

#[test]
fn hand_over_moves_live_connections_of_proven_tokens_up_to_the_limit() {
    let now = Instant::now();
    let limits = ConnectionLimits { max: 3, ..LIMITS };
    let of = |state, is_mostly_proven, endpoint| ConnectionRow {
        candidate: Candidate { state, ..candidate(0, endpoint, now) },
        is_mostly_proven,
        ..connection_row(candidate(0, endpoint, now), now)
    };
    let unproven = [
        of(Live, false, 10),
        of(Live, true, 10),
        of(Suspect, true, 10),
        of(Live, true, 10),
        of(Live, true, 10),
        of(Live, true, 11),
    ];
    let proven = [of(Live, true, 10), of(Draining, true, 10), of(Draining, true, 10)];
    let token = Class::new(CredentialClass::Token, now);
    for (class, expected) in [
        (CredentialClass::UnprovenToken, &[1, 3, 5][..]),
        (CredentialClass::SlowedToken, &[1, 3, 5]),
        (CredentialClass::Anonymous, &[]),
    ] {
        let mut class: Class<()> = Class::new(class, now);
        assert_eq!(class.hand_over(&unproven, &token, &proven, limits), expected);
    }
}

#[test]
fn targets_are_the_best_endpoints_and_both_sides_of_a_version_preference() {
    use VersionSide::{Newest, Older};
    let row = |rank, state: EndpointState, is_fallback, version_side| EndpointRow {
        state,
        is_fallback,
        rank,
        version_side,
        ..endpoint_row(0)
    };
    let of_side = |side| row(1, Ready, false, Some(side));
    for (endpoints, fanout, expected) in [
        (vec![], Some(1), vec![]),
        (vec![row(2, Ready, false, None), row(1, Leaving, false, None)], Some(3), vec![0]),
        (vec![row(2, Ready, false, None), row(1, Ready, false, None)], Some(1), vec![1]),
        (vec![row(1, Ready, true, None), row(2, Ready, false, None)], Some(1), vec![1]),
        (vec![row(1, Degraded, false, None), row(2, Ready, true, None)], Some(1), vec![1]),
        (vec![row(1, Degraded, false, None), row(2, Ready, true, None)], None, vec![0, 1]),
        (vec![of_side(Older), of_side(Older), of_side(Older)], Some(2), vec![0, 1]),
        (vec![of_side(Older), of_side(Older), of_side(Newest)], Some(2), vec![0, 2]),
        (vec![of_side(Newest), of_side(Newest), of_side(Older)], Some(2), vec![2, 1]),
    ] {
        assert_eq!(targets(&endpoints, fanout), expected, "{endpoints:?} {fanout:?}");
    }
}

#[test]
fn pool_state_refuses_to_wait_when_nothing_would_answer() {
    let new = || PoolState::new(Purpose::Clients(WarmClasses::Identities));
    let mut state = new();
    assert_eq!(state.may_wait(true), Ok(()));
    assert_eq!(state.may_wait(false), Err(StreamRefusal::NoCredential));
    state.retire();
    assert_eq!((state.is_retired(), state.may_wait(true)), (true, Ok(())));
    assert_eq!(state.stop(), StreamRefusal::Stopped);
    assert_eq!(state.may_wait(true), Err(StreamRefusal::Stopped));
    assert_eq!(state.close(), StreamRefusal::Closed);
    assert_eq!(
        (state.stop(), state.may_wait(true)),
        (StreamRefusal::Closed, Err(StreamRefusal::Closed))
    );
}

#[test]
fn pool_state_knows_which_classes_are_warm_and_how_far_they_reach() {
    let (identity, token) = (CredentialClass::Identity(1), CredentialClass::Token);
    for (purpose, identity_is_warm, fanouts) in [
        (Purpose::Clients(WarmClasses::Identities), true, [None, Some(FANOUT)]),
        (Purpose::Clients(WarmClasses::None), false, [Some(FANOUT), Some(FANOUT)]),
        (Purpose::Internal, false, [Some(1), Some(1)]),
    ] {
        let state = PoolState::new(purpose);
        let is_warm = [identity, token].map(|class| state.is_warm(class, Lane::Requests));
        assert_eq!(is_warm, [identity_is_warm, false]);
        let fanout = [identity, token].map(|class| state.fanout(class, Lane::Requests));
        assert_eq!(fanout, fanouts, "{purpose:?}");
        for class in [identity, token] {
            let (is_warm, fanout) =
                (state.is_warm(class, Lane::Heartbeats), state.fanout(class, Lane::Heartbeats));
            assert_eq!((is_warm, fanout), (false, Some(1)), "{purpose:?}");
        }
    }
}

#[test]
fn pool_state_runs_at_the_first_of_deadlines_and_tick() {
    let now = Instant::now();
    let mut rng = fastrand::Rng::with_seed(1);
    let mut state = PoolState::new(Purpose::Internal);
    let ms = Duration::from_millis;
    let tick = state.next_run(now, &mut rng) - now;
    assert!((ms(150)..=ms(250)).contains(&tick), "{tick:?}");
    state.wake_at(now + ms(90));
    state.wake_at(now + ms(40));
    state.wake_at(now + ms(60));
    assert_eq!(state.next_run(now, &mut rng), now + ms(40));
    assert!(state.next_run(now, &mut rng) > now + ms(100), "a deadline counts once");
}
