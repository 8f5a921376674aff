//! The table of decisions: what each input does in each state.

use super::*;
use ConnectionState::{Dead, Draining, Live, Suspect, Unresponsive};
use DrainUrgency::{Immediate, Relaxed};
use Responsiveness::{Responds, Silent, Unanswered};
use Significance::{Expected, Fault, Notable, OrderlyEnd, ServerShutdown};

/// A connection in a state, with one stream, and the time.
struct Setup {
    connection: ConnectionMachine,
    stream: Stream,
    now: Instant,
}

/// Statistics of a kernel that has received nothing for `silent`.
fn silent(silent: Duration) -> TcpInfo {
    TcpInfo { last_ack_recv: silent, last_data_recv: silent, ..TcpInfo::default() }
}

impl Setup {
    fn live_with(established: Established) -> Self {
        let now = established.ping_grid;
        let mut connection = ConnectionMachine::new(established, now);
        let mut stream = connection.reserve(true, now);
        connection.opened(&mut stream);
        connection.set_pinned(&mut stream, true);
        Self { connection, stream, now }
    }

    fn live() -> Self {
        Self::live_with(established(Instant::now()))
    }

    /// Runs checks every 50 ms for `time` after the next PING, while the kernel answers or not.
    fn without_pong(&mut self, time: Duration, kernel_answers: bool) -> Vec<ConnectionTransition> {
        self.now = self.now.max(self.connection.wake_at());
        let ping = self.now;
        let mut transitions = Vec::new();
        while self.now <= ping + time {
            let silence = if kernel_answers { Duration::ZERO } else { self.now - ping };
            let effects = self.connection.check(Some(&silent(silence)), self.now);
            transitions.extend(effects.transition);
            self.now += ms(50);
        }
        transitions
    }

    fn state(&self) -> ConnectionState {
        self.connection.state()
    }

    /// A connection in `state` with one pinned stream.
    fn in_state(state: ConnectionState) -> Self {
        let mut setup = Self::live();
        match state {
            Live => {}
            Suspect => drop(setup.without_pong(ms(200), false)),
            Draining => {
                let _ = setup.connection.refused(H2Refusal::GracefulGoaway, setup.now);
            }
            Unresponsive => drop(setup.without_pong(ms(2100), false)),
            Dead => {
                let _ = setup.connection.ended(H2End::Failed, None);
            }
        }
        assert_eq!(setup.state(), state);
        setup
    }
}

/// The transition to a state.
#[allow(clippy::unnecessary_wraps)] // an entry of a row
fn to(
    state: ConnectionState,
    reason: ChangeReason,
    significance: Significance,
) -> Option<(ConnectionState, ChangeReason, Significance)> {
    Some((state, reason, significance))
}

/// Checks a row of the table: what the input does in each state, in the order of [`ConnectionState::ALL`].
fn check_row(
    name: &str,
    input: impl Fn(&mut Setup) -> Effects,
    expected: [Option<(ConnectionState, ChangeReason, Significance)>; 5],
) {
    for (state, expected) in ConnectionState::ALL.into_iter().zip(expected) {
        let mut setup = Setup::in_state(state);
        let effects = input(&mut setup);
        let expected = expected.map(|(to, reason, significance)| ConnectionTransition {
            from: state,
            to,
            reason,
            significance,
        });
        assert_eq!(effects.transition, expected, "{name} in {state:?}");
        assert_eq!(setup.state(), expected.map_or(state, |t| t.to), "{name} in {state:?}");
        let changed = expected.is_some();
        assert!(!changed || effects.notify_requests && effects.notify_pool, "{name} in {state:?}");
    }
}

#[test]
fn pong_ends_a_suspicion_and_lets_an_unresponsive_connection_drain() {
    let reason = ChangeReason::Health(StateChangeReason::Pong);
    check_row(
        "PONG",
        |setup| setup.connection.pong(setup.now),
        [None, to(Live, reason, Notable), None, to(Draining, reason, Notable), None],
    );
    let mut setup = Setup::in_state(Unresponsive);
    let _ = setup.connection.pong(setup.now);
    assert_eq!(setup.connection.drain_urgency(), Some(Immediate));
    assert_eq!(setup.connection.draining_since(), Some(setup.now));
    assert!(setup.connection.suspect_since().is_some());
    assert!(!setup.connection.ping_outstanding());
}

#[test]
fn check_without_a_pong_enters_the_state_that_the_evidence_demands() {
    use StateChangeReason::{NoFrames, NothingArrives, PingLate, ProcessStopped};
    type Row = (u64, bool, bool, [Option<(ConnectionState, StateChangeReason)>; 5]);
    // Milliseconds after the PING, whether the kernel answers, whether the stream is pinned, and the last transition
    // of a connection that was live, suspect, draining, unresponsive or dead.
    let late = Some((Suspect, PingLate));
    let stopped = Some((Draining, ProcessStopped));
    let (lost, dead) = (Some((Unresponsive, NothingArrives)), Some((Dead, NothingArrives)));
    let no_frames = Some((Dead, NoFrames));
    let table: &[Row] = &[
        (50, false, true, [None; 5]),
        (150, false, true, [late, None, None, None, None]),
        (150, true, true, [late, None, None, None, None]),
        (5_050, true, true, [stopped, stopped, None, None, None]),
        (2_050, false, true, [lost, lost, lost, None, None]),
        (2_050, false, false, [dead, dead, dead, dead, None]),
        (20_050, false, true, [dead, dead, dead, dead, None]),
        (20_050, true, true, [no_frames, no_frames, no_frames, no_frames, None]),
    ];
    for (time, kernel_answers, pinned, expected) in table {
        for (state, expected) in ConnectionState::ALL.into_iter().zip(*expected) {
            let mut setup = Setup::in_state(state);
            // The next PING is sent in the same state.
            match state {
                Suspect | Unresponsive => continue_outstanding(&mut setup),
                Live | Draining | Dead => {}
            }
            setup.connection.set_pinned(&mut setup.stream, *pinned);
            let last = setup.without_pong(ms(*time), *kernel_answers).pop();
            let expected = expected.map(|(to, reason)| (to, ChangeReason::Health(reason)));
            let last = last.map(|transition| (transition.to, transition.reason));
            assert_eq!(last, expected, "{time} ms, {kernel_answers} {pinned} in {state:?}");
        }
    }
}

/// A suspect or unresponsive connection has an outstanding PING, so the time of [`Setup::without_pong`] counts from
/// that one: bytes arrive, as if it had just been sent.
fn continue_outstanding(setup: &mut Setup) {
    assert!(setup.connection.ping_outstanding());
    setup.now = setup.now.max(setup.connection.wake_at());
    let _ = setup.connection.received(100, setup.now);
}

#[test]
fn refusal_drains_a_connection_in_service() {
    for (refusal, significance) in [
        (H2Refusal::GracefulGoaway, ServerShutdown),
        (H2Refusal::Goaway, Notable),
        (H2Refusal::OwnGoaway, Notable),
        (H2Refusal::Failure, Fault),
    ] {
        let input = |setup: &mut Setup| setup.connection.refused(refusal, setup.now);
        let drains = to(Draining, ChangeReason::Error, significance);
        check_row("refusal", input, [drains, drains, None, None, None]);
        let mut setup = Setup::live();
        let _ = setup.connection.refused(refusal, setup.now);
        assert_eq!(setup.connection.drain_urgency(), None, "streams may finish");
    }
}

#[test]
fn goaway_announces_a_shutdown_on_the_connection_of_the_prober_unless_its_end_is_expected() {
    for (is_probe, end_expected, expected) in
        [(false, false, false), (true, false, true), (true, true, false)]
    {
        let new = || {
            let probe = Established { is_probe, ..established(Instant::now()) };
            let mut setup = Setup::live_with(probe);
            if end_expected {
                setup.connection.set_end_expected(true);
            }
            setup
        };
        let mut setup = new();
        let refused = setup.connection.refused(H2Refusal::GracefulGoaway, setup.now);
        assert_eq!(refused.shutdown_announced, expected, "{is_probe} {end_expected}");
        let ended = setup.connection.ended(H2End::Closed, Some(H2Refusal::GracefulGoaway));
        assert!(!ended.shutdown_announced, "announced once");
        for (end, refusal, announces) in [
            (H2End::Closed, Some(H2Refusal::GracefulGoaway), expected),
            (H2End::Failed, Some(H2Refusal::Goaway), expected),
            (H2End::Failed, Some(H2Refusal::OwnGoaway), false),
            (H2End::Failed, Some(H2Refusal::Failure), false),
            (H2End::Closed, None, false),
        ] {
            let ended = new().connection.ended(end, refusal);
            assert_eq!(ended.shutdown_announced, announces, "{end:?} {refusal:?}");
        }
    }
}

#[test]
fn drain_of_a_connection_in_service_stops_new_streams() {
    let drains = to(Draining, ChangeReason::Drain(DrainReason::EndpointRemoved), Notable);
    check_row(
        "drain",
        |setup| setup.connection.drain(DrainReason::EndpointRemoved, setup.now),
        [drains, drains, None, None, None],
    );
    // An idle connection ends as expected, unless it is suspect.
    let idle = ChangeReason::Drain(DrainReason::Idle);
    check_row(
        "idle",
        |setup| setup.connection.drain(DrainReason::Idle, setup.now),
        [to(Draining, idle, Expected), to(Draining, idle, Notable), None, None, None],
    );
    for reason in DrainReason::ALL {
        let mut setup = Setup::live();
        let effects = setup.connection.drain(reason, setup.now);
        assert!(effects.wake_driver, "{reason:?}");
        assert_eq!(setup.connection.drain_urgency(), reason.urgency(), "{reason:?}");
        assert_eq!(setup.connection.draining_since(), Some(setup.now));
    }
}

#[test]
fn drain_of_a_draining_connection_makes_streams_leave_that_might_stay() {
    // The urgency before, and after another reason or the degradation of the endpoint.
    for (first, second, expected, notifies) in [
        (DrainReason::Superseded, DrainReason::ConnectionLimit, Some(Relaxed), true),
        (DrainReason::Superseded, DrainReason::ProbeFailed, None, false),
        (DrainReason::EndpointRemoved, DrainReason::ConnectionLimit, Some(Relaxed), false),
    ] {
        let mut setup = Setup::live();
        let _ = setup.connection.drain(first, setup.now);
        let effects = setup.connection.drain(second, setup.now + ms(1));
        assert_eq!(effects, Effects { notify_requests: notifies, ..Effects::default() });
        assert_eq!(setup.connection.drain_urgency(), expected, "{first:?} {second:?}");
        assert_eq!(setup.connection.draining_since(), Some(setup.now), "unchanged");
    }
}

#[test]
fn degraded_endpoint_makes_the_streams_of_a_draining_connection_leave_at_once() {
    for (state, expected) in
        ConnectionState::ALL.into_iter().zip([None, None, Some(Immediate), Some(Immediate), None])
    {
        let mut setup = Setup::in_state(state);
        let effects = setup.connection.endpoint_degraded();
        assert_eq!(effects, Effects { notify_requests: true, ..Effects::default() });
        assert_eq!((setup.state(), setup.connection.drain_urgency()), (state, expected));
    }
}

#[test]
fn check_notifies_the_requests_when_a_response_head_may_be_late() {
    let mut setup = Setup::live();
    let late_at = setup.now + ms(20);
    for (at, wake_driver) in [(late_at, true), (late_at + ms(1), false)] {
        let effects = setup.connection.notify_at(at);
        assert_eq!(effects, Effects { wake_driver, ..Effects::default() });
    }
    assert_eq!(setup.connection.wake_at(), late_at);
    let notifies = [19, 20, 21].map(|at| {
        let effects = setup.connection.check(None, setup.now + ms(at));
        effects.notify_requests
    });
    assert_eq!(notifies, [false, true, false]);
    let _ = setup.connection.notify_at(setup.now + ms(40));
    setup.connection.head_arrived(&mut setup.stream, setup.now + ms(39));
    assert!(!setup.connection.check(None, setup.now + ms(40)).notify_requests, "none waits");
}

#[test]
fn late_ping_on_a_draining_connection_makes_streams_leave_at_once() {
    let mut setup = Setup::in_state(Draining);
    assert_eq!(setup.without_pong(ms(200), false), []);
    assert_eq!(setup.connection.drain_urgency(), Some(Immediate));
    let mut notified = Setup::in_state(Draining);
    notified.now = notified.now.max(notified.connection.wake_at());
    let ping = notified.now;
    let notifies = [0, 50, 100, 150, 200, 250]
        .map(|at| notified.connection.check(Some(&silent(ms(at))), ping + ms(at)).notify_requests);
    assert_eq!(notifies, [false, false, true, false, false, false], "once, when the PING is late");
    let mut stopped = Setup::live();
    drop(stopped.without_pong(ms(5_100), true));
    assert_eq!((stopped.state(), stopped.connection.drain_urgency()), (Draining, Some(Immediate)));
}

#[test]
fn closed_connection_ends_in_every_state_and_nothing_has_failed() {
    let reason = ChangeReason::Drain(DrainReason::ProbeFailed);
    let dead = to(Dead, reason, Notable);
    let close = |setup: &mut Setup| {
        let effects = setup.connection.close(DrainReason::ProbeFailed);
        assert_eq!(effects, Effects { wake_driver: true, ..Effects::default() });
        setup.connection.end_if_due()
    };
    check_row("close", close, [dead, dead, dead, dead, None]);
}

#[test]
fn connection_that_takes_no_new_streams_ends_with_its_last_one() {
    check_row("no end is due", |setup| setup.connection.end_if_due(), [None; 5]);
    let release = |setup: &mut Setup| {
        let released = setup.connection.release(&mut setup.stream, setup.now);
        let state = setup.connection.state();
        assert_eq!(released.wake_driver, matches!(state, Draining | Unresponsive), "{state:?}");
        assert_eq!(setup.connection.is_end_due(), released.wake_driver);
        setup.connection.end_if_due()
    };
    let lost = ChangeReason::Health(StateChangeReason::NothingArrives);
    let (drained, unresponsive) =
        (to(Dead, ChangeReason::Drained, OrderlyEnd), to(Dead, lost, Fault));
    check_row("release", release, [None, None, drained, unresponsive, None]);
    let mut idle = Setup::live();
    let _ = idle.connection.drain(DrainReason::Idle, idle.now);
    let effects = release(&mut idle);
    assert_eq!(effects.transition.map(|t| t.significance), Some(Expected));
}

#[test]
fn end_of_h2_is_orderly_if_it_is_finished_or_closed_without_open_streams() {
    use ChangeReason::{ClosedByApiserver, Error};
    let goaway = Some(H2Refusal::GracefulGoaway);
    for (end, refusal, with_stream, without) in [
        (H2End::Finished, goaway, (ClosedByApiserver, OrderlyEnd), (ClosedByApiserver, OrderlyEnd)),
        (H2End::Closed, None, (ClosedByApiserver, Fault), (ClosedByApiserver, OrderlyEnd)),
        (H2End::Closed, goaway, (ClosedByApiserver, Fault), (ClosedByApiserver, OrderlyEnd)),
        (H2End::Failed, None, (Error, Fault), (Error, Fault)),
        (H2End::Failed, goaway, (Error, Fault), (ClosedByApiserver, OrderlyEnd)),
        (H2End::Failed, Some(H2Refusal::Goaway), (Error, Fault), (Error, Fault)),
        (H2End::FrameLimit, goaway, (Error, Fault), (Error, Fault)),
    ] {
        for state in ConnectionState::ALL {
            let mut setup = Setup::in_state(state);
            let effects = setup.connection.ended(end, refusal);
            let change = effects.transition.map(|t| (t.to, t.reason, t.significance));
            let (reason, significance) = with_stream;
            let expected = (state != Dead).then_some((Dead, reason, significance));
            assert_eq!(change, expected, "{end:?} {refusal:?} in {state:?}");
        }
        let mut setup = Setup::live();
        let _ = setup.connection.release(&mut setup.stream, setup.now);
        let transition = setup.connection.ended(end, refusal).transition.unwrap();
        assert_eq!((transition.reason, transition.significance), without, "{end:?} {refusal:?}");
    }
    let mut expected = Setup::live();
    expected.connection.set_end_expected(true);
    let effects = expected.connection.ended(H2End::Failed, None);
    assert_eq!(effects.transition.map(|t| t.significance), Some(Expected));
}

#[test]
fn finding_is_reported_to_the_endpoint_once_and_only_in_service() {
    let mut setup = Setup::live();
    setup.now = setup.now.max(setup.connection.wake_at());
    let ping = setup.now;
    let mut reported = Vec::new();
    while setup.now <= ping + ms(1_500) {
        let effects = setup.connection.check(Some(&silent(setup.now - ping)), setup.now);
        reported.extend(effects.responsiveness.map(|change| (change.from, change.to)));
        setup.now += ms(50);
    }
    assert_eq!(reported, [(Responds, Unanswered), (Unanswered, Silent)]);
    let change = setup.connection.pong(setup.now).responsiveness;
    assert_eq!(change, Some(ResponsivenessChange { from: Silent, to: Responds }));
    let mut draining = Setup::in_state(Draining);
    drop(draining.without_pong(ms(1_500), false));
    assert_eq!(draining.connection.responsiveness(), Silent);
    assert_eq!(draining.connection.pong(draining.now).responsiveness, None);
}

#[test]
fn slot_of_a_cancelled_stream_stays_taken_for_500_ms() {
    let now = Instant::now();
    let limited = Established { peer_streams: 2, ..established(now) };
    let mut connection = ConnectionMachine::new(limited, now);
    let mut streams = [connection.reserve(false, now), connection.reserve(true, now)];
    assert_eq!((connection.free_streams(now), connection.watches()), (0, 1));
    for stream in &mut streams {
        connection.opened(stream);
    }
    connection.finished(&mut streams[0]);
    assert!(connection.release(&mut streams[0], now).notify_pool, "it was full");
    assert_eq!(connection.free_streams(now), 1);
    assert!(!connection.release(&mut streams[1], now).notify_pool);
    assert_eq!((connection.streams(), connection.watches()), (0, 0));
    assert_eq!(connection.free_streams(now + ms(499)), 1);
    assert_eq!(connection.free_streams(now + ms(500)), 2);
    assert_eq!((connection.peak_streams(), connection.idle_since()), (2, Some(now)));
    let grown = connection.received(50, now);
    assert!(grown.notify_pool && connection.stream_limit() == 50);
    assert!(!connection.received(20, now).notify_pool);
}

#[test]
fn request_without_a_byte_for_50_ms_is_a_warning() {
    let now = Instant::now();
    let mut connection = ConnectionMachine::new(established(now), now);
    let mut stream = connection.reserve(false, now);
    connection.opened(&mut stream);
    assert!(!connection.has_waiting_request(now + ms(49)));
    assert!(connection.has_waiting_request(now + ms(50)));
    let _ = connection.received(100, now + ms(30));
    assert!(!connection.has_waiting_request(now + ms(79)));
    connection.head_arrived(&mut stream, now + ms(60));
    assert!(!connection.has_waiting_request(now + ms(200)));
    assert!(connection.cost(now + ms(60)) > 0.05, "the latency is a sample");
}

#[test]
fn pool_is_notified_when_most_streams_have_proven_a_token() {
    let now = Instant::now();
    let limited = Established { peer_streams: 4, ..established(now) };
    let mut connection = ConnectionMachine::new(limited, now);
    let mut streams = [connection.reserve(true, now), connection.reserve(true, now)];
    assert!(!connection.token_proven(&mut streams[0]).notify_pool);
    assert!(!connection.token_proven(&mut streams[0]).notify_pool, "counted once");
    assert!(connection.token_proven(&mut streams[1]).notify_pool);
    let _ = connection.release(&mut streams[1], now);
    assert!(!connection.is_mostly_proven());
}

#[test]
fn kernel_is_asked_for_a_probe_unless_the_connection_is_unresponsive_or_dead() {
    let expected = [true, true, true, false, false];
    for (state, expected) in ConnectionState::ALL.into_iter().zip(expected) {
        let mut setup = Setup::in_state(state);
        setup.now = setup.now.max(setup.connection.wake_at());
        let ping = setup.now;
        let mut probes = Vec::new();
        while setup.now < ping + ms(700) {
            let effects = setup.connection.check(Some(&silent(ms(0))), setup.now);
            probes.push(effects.probe_kernel);
            setup.now += ms(50);
        }
        assert_eq!(probes.contains(&true), expected, "{state:?}");
        // The PING of a suspect connection is older.
        assert!(state == Suspect || !probes[..9].contains(&true), "{state:?}: not before 500 ms");
    }
}

#[test]
fn pong_reports_the_round_trip_time_of_its_ping() {
    let mut setup = Setup::live();
    assert_eq!(setup.connection.pong(setup.now).round_trip, None, "without a PING");
    setup.now = setup.now.max(setup.connection.wake_at());
    assert!(setup.connection.check(None, setup.now).send_ping);
    assert_eq!(setup.connection.pong(setup.now + ms(7)).round_trip, Some(ms(7)));
}

#[test]
fn head_of_a_watch_is_neither_slow_nor_a_sample_of_the_latency() {
    let now = Instant::now();
    for (watch, expected) in [(true, false), (false, true)] {
        let mut connection = ConnectionMachine::new(established(now), now);
        let mut stream = connection.reserve(watch, now);
        connection.opened(&mut stream);
        let slow = [1, 2, 3].map(|_| connection.has_slow_response_heads(ms(200), now));
        assert_eq!(slow.contains(&true), expected, "watch: {watch}");
        connection.head_arrived(&mut stream, now + ms(900));
        assert_eq!(connection.cost(now + ms(900)) > 0.05, expected, "watch: {watch}");
    }
}

#[test]
fn request_with_a_response_head_is_not_slow() {
    let now = Instant::now();
    let mut connection = ConnectionMachine::new(established(now), now);
    let mut answered = connection.reserve(false, now);
    connection.opened(&mut answered);
    connection.head_arrived(&mut answered, now + ms(1));
    for _ in 0..8 {
        assert!(!connection.has_slow_response_heads(ms(200), now));
    }
}

#[test]
fn no_response_is_expected_on_an_unresponsive_connection() {
    for state in ConnectionState::ALL {
        let connection = Setup::in_state(state).connection;
        let lost = (state == Unresponsive).then_some(StateChangeReason::NothingArrives);
        let reasons = [true, false].map(|safe| connection.no_response_reason(safe));
        assert_eq!(reasons, [lost, lost], "{state:?}");
    }
}

#[test]
fn requests_are_notified_when_a_finding_concerns_them() {
    let notified = |until: u64| {
        let mut setup = Setup::in_state(Draining);
        setup.now = setup.now.max(setup.connection.wake_at());
        let ping = setup.now;
        let mut times = Vec::new();
        for at in (0..until).step_by(50) {
            setup.now = ping + ms(at);
            // The kernel answers.
            if setup.connection.check(Some(&silent(ms(0))), setup.now).notify_requests {
                times.push(at);
            }
        }
        (times, setup.connection.pong(setup.now).notify_requests)
    };
    // The PING is late, the connection is silent, and requests that must not be sent twice fail, until a PONG arrives.
    assert_eq!(notified(2_000), (vec![100, 1_000], false));
    assert_eq!(notified(7_500), (vec![100, 1_000, 7_000], true));
}
