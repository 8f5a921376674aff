//! Properties that hold for random inputs at random times.

use proptest::prelude::*;

use super::*;

/// A random input; numbers choose a stream.
#[derive(Debug, Clone, Copy)]
enum Input {
    Received(usize),
    Pong,
    Check { silent: u64, pending: bool, window_closed: bool, acknowledges: bool },
    Refused(H2Refusal),
    Drain(DrainReason),
    Close(DrainReason),
    ExpectEnd,
    EndpointDegraded,
    EndIfDue,
    Ended(H2End, Option<H2Refusal>),
    Reserve(bool),
    Opened(usize),
    HeadArrived(usize),
    SetPinned(usize, bool),
    TokenProven(usize),
    Finished(usize),
    Release(usize),
}

fn refusals() -> impl Strategy<Value = H2Refusal> {
    prop::sample::select(vec![
        H2Refusal::GracefulGoaway,
        H2Refusal::Goaway,
        H2Refusal::OwnGoaway,
        H2Refusal::Failure,
    ])
}

fn ends() -> impl Strategy<Value = H2End> {
    prop::sample::select(vec![H2End::Finished, H2End::Closed, H2End::Failed, H2End::FrameLimit])
}

fn inputs() -> impl Strategy<Value = Input> {
    let reasons = || prop::sample::select(DrainReason::ALL.to_vec());
    let check = (0..25_000_u64, any::<[bool; 3]>()).prop_map(|(silent, [a, b, c])| Input::Check {
        silent,
        pending: a,
        window_closed: b,
        acknowledges: c,
    });
    prop_oneof![
        4 => (1..12_usize).prop_map(Input::Received),
        3 => Just(Input::Pong),
        12 => check,
        1 => refusals().prop_map(Input::Refused),
        1 => reasons().prop_map(Input::Drain),
        1 => Just(Input::EndpointDegraded),
        2 => Just(Input::EndIfDue),
        6 => any::<bool>().prop_map(Input::Reserve),
        4 => (0..8_usize).prop_map(Input::Opened),
        3 => (0..8_usize).prop_map(Input::HeadArrived),
        3 => (0..8_usize, any::<bool>()).prop_map(|(n, pinned)| Input::SetPinned(n, pinned)),
        2 => (0..8_usize).prop_map(Input::TokenProven),
        2 => (0..8_usize).prop_map(Input::Finished),
        4 => (0..8_usize).prop_map(Input::Release),
    ]
}

/// [`inputs`], and rarely those that end the connection.
fn all_inputs() -> impl Strategy<Value = Input> {
    let reasons = prop::sample::select(DrainReason::ALL.to_vec());
    let ended = (ends(), prop::option::of(refusals())).prop_map(|(e, r)| Input::Ended(e, r));
    prop_oneof![
        60 => inputs(),
        1 => reasons.prop_map(Input::Close),
        1 => Just(Input::ExpectEnd),
        1 => ended,
    ]
}

/// The connection and what the shell holds of it.
struct Shell {
    connection: ConnectionMachine,
    streams: Vec<(Stream, bool)>,
    now: Instant,
    acked: u64,
}

impl Shell {
    fn new() -> Self {
        let now = Instant::now();
        let limited = Established { max_streams: 10, ..established(now) };
        Self {
            connection: ConnectionMachine::new(limited, now),
            streams: Vec::new(),
            now,
            acked: 0,
        }
    }

    /// The effects of an input, if the shell can report it now.
    fn report(&mut self, input: Input) -> Option<Effects> {
        let (connection, now) = (&mut self.connection, self.now);
        let count = self.streams.len();
        let mut streams = self.streams.iter_mut();
        let mut stream = |n: usize| streams.nth(n % count.max(1)).map(|(stream, _)| stream);
        let done = Some(Effects::default());
        match input {
            Input::Received(limit) => Some(connection.received(limit, now)),
            // h2 reports a PONG only of a PING that was sent.
            Input::Pong => connection.ping_outstanding().then(|| connection.pong(now)),
            Input::Check { silent, pending, window_closed, acknowledges } => {
                self.acked += u64::from(acknowledges);
                let silent = ms(silent);
                let tcp = TcpInfo {
                    last_ack_recv: silent,
                    last_data_recv: silent,
                    bytes_acked: self.acked,
                    unacked: u32::from(pending && !window_closed),
                    notsent_bytes: if pending { 5000 } else { 0 },
                    send_window: Some(if window_closed { 0 } else { 64_000 }),
                    send_mss: 1400,
                    ..TcpInfo::default()
                };
                Some(connection.check(Some(&tcp), now))
            }
            Input::Refused(refusal) => Some(connection.refused(refusal, now)),
            Input::Drain(reason) => Some(connection.drain(reason, now)),
            Input::Close(reason) => Some(connection.close(reason)),
            Input::ExpectEnd => {
                connection.set_end_expected(true);
                done
            }
            Input::EndpointDegraded => Some(connection.endpoint_degraded()),
            Input::EndIfDue => Some(connection.end_if_due()),
            Input::Ended(end, refusal) => Some(connection.ended(end, refusal)),
            Input::Reserve(watch) => (connection.free_streams(now) > 0).then(|| {
                self.streams.push((connection.reserve(watch, now), watch));
                Effects::default()
            }),
            Input::Opened(n) => {
                // A stream is opened once.
                let stream = stream(n).filter(|s| s.phase == StreamPhase::Reserved)?;
                connection.opened(stream);
                done
            }
            Input::HeadArrived(n) => {
                connection.head_arrived(stream(n)?, now);
                done
            }
            Input::SetPinned(n, pinned) => {
                connection.set_pinned(stream(n)?, pinned);
                done
            }
            Input::TokenProven(n) => Some(connection.token_proven(stream(n)?)),
            Input::Finished(n) => {
                let stream = stream(n).filter(|s| s.phase != StreamPhase::Reserved)?;
                connection.finished(stream);
                done
            }
            Input::Release(n) => {
                let (mut stream, _) = (count > 0).then(|| self.streams.remove(n % count))?;
                let effects = connection.release(&mut stream, now);
                assert_eq!(connection.release(&mut stream, now), Effects::default());
                Some(effects)
            }
        }
    }

    /// The figures that follow from the streams which the shell holds.
    fn assert_counts(&self) {
        let connection = &self.connection;
        let watches = self.streams.iter().filter(|(_, watch)| *watch).count();
        assert_eq!((connection.streams(), connection.watches()), (self.streams.len(), watches));
        assert_eq!(connection.idle_since().is_some(), self.streams.is_empty());
        let count = |which: fn(&Stream) -> bool| {
            self.streams.iter().filter(|(stream, _)| which(stream)).count()
        };
        assert_eq!(connection.waits.waiting(), count(|stream| stream.awaits_head));
        assert_eq!(connection.waits.waiting_since().is_some(), connection.waits.waiting() > 0);
        let pinned = count(|stream| stream.phase == StreamPhase::Pinned);
        assert_eq!(connection.slots.has_pinned(), pinned > 0);
    }
}

/// Whether a connection may go from one state to another.
fn is_allowed(from: ConnectionState, to: ConnectionState) -> bool {
    use ConnectionState::{Dead, Draining, Live, Suspect, Unresponsive};
    match from {
        Live => matches!(to, Suspect | Draining | Unresponsive | Dead),
        Suspect => matches!(to, Live | Draining | Unresponsive | Dead),
        Draining => matches!(to, Unresponsive | Dead),
        Unresponsive => matches!(to, Draining | Dead),
        Dead => false,
    }
}

proptest! {
    #[test]
    fn state_changes_are_those_of_the_table(
        steps in prop::collection::vec((all_inputs(), 0..900_u64), 1..60),
    ) {
        let mut shell = Shell::new();
        for (input, pause) in steps {
            shell.now += ms(pause);
            let before = shell.connection.state();
            let Some(effects) = shell.report(input) else { continue };
            let after = shell.connection.state();
            match effects.transition {
                None => prop_assert_eq!(before, after, "a silent change by {:?}", input),
                Some(transition) => {
                    prop_assert_eq!((transition.from, transition.to), (before, after));
                    prop_assert!(is_allowed(before, after), "{:?} to {:?}", before, after);
                    prop_assert!(effects.notify_requests && effects.notify_pool);
                }
            }
            if matches!(input, Input::Pong) {
                prop_assert!(!matches!(after, ConnectionState::Suspect | ConnectionState::Unresponsive));
                prop_assert_eq!(shell.connection.responsiveness(), Responsiveness::Responds);
            }
            let is_live = after == ConnectionState::Live;
            prop_assert!(!is_live || shell.connection.suspect_since().is_none());
            prop_assert!(!after.is_in_service() || shell.connection.drain_urgency().is_none());
            shell.assert_counts();
        }
    }

    #[test]
    fn counts_are_zero_and_the_end_is_due_when_all_streams_are_released(
        steps in prop::collection::vec((all_inputs(), 0..900_u64), 1..60),
    ) {
        let mut shell = Shell::new();
        for (input, pause) in steps {
            shell.now += ms(pause);
            let _ = shell.report(input);
        }
        let _ = shell.connection.drain(DrainReason::EndpointRemoved, shell.now);
        while !shell.streams.is_empty() {
            let was_dead = shell.connection.state() == ConnectionState::Dead;
            let effects = shell.report(Input::Release(0)).unwrap();
            let wakes = shell.streams.is_empty() && !was_dead;
            prop_assert_eq!(effects.wake_driver, wakes, "the driver ends the connection");
        }
        shell.assert_counts();
        let _ = shell.connection.end_if_due();
        prop_assert_eq!(shell.connection.state(), ConnectionState::Dead);
    }

    #[test]
    fn open_and_cancelled_streams_stay_within_the_limit(
        steps in prop::collection::vec((inputs(), 0..200_u64), 1..80),
    ) {
        let mut shell = Shell::new();
        // Until when each cancelled stream keeps its slot.
        let mut holds: Vec<Instant> = Vec::new();
        for (input, pause) in steps {
            shell.now += ms(pause);
            if matches!(input, Input::Received(_)) {
                continue; // The limit stays 10.
            }
            let cancelled = match input {
                Input::Release(n) if !shell.streams.is_empty() => {
                    let (stream, _) = &shell.streams[n % shell.streams.len()];
                    matches!(stream.phase, StreamPhase::Open | StreamPhase::Pinned)
                        && shell.connection.state() != ConnectionState::Dead
                }
                _ => false,
            };
            let _ = shell.report(input);
            holds.retain(|&until| until > shell.now);
            if cancelled {
                holds.push(shell.now + slots::CANCELLED_SLOT_HOLD);
            }
            let taken = shell.connection.streams() + holds.len();
            prop_assert!(taken <= 10, "{} slots are taken", taken);
            prop_assert_eq!(shell.connection.free_streams(shell.now), 10 - taken);
        }
    }

    /// The shell sleeps until `wake_at`. If checks did not advance it, the task would spin; if it were never due, a
    /// silent peer would not be noticed.
    #[test]
    fn check_is_due_later_than_now_and_again_within_the_longest_pause(
        steps in prop::collection::vec((inputs(), 0..3_000_u64), 1..80),
    ) {
        let mut shell = Shell::new();
        for (input, pause) in steps {
            shell.now += ms(pause);
            let _ = shell.report(input);
            let at = shell.connection.wake_at();
            prop_assert!(at <= shell.now + ms(1000), "a PING a second, or a check within half of dead_after");
            if at <= shell.now {
                let mut checks = 0;
                while shell.connection.wake_at() <= shell.now {
                    let _ = shell.connection.check(None, shell.now);
                    checks += 1;
                    prop_assert!(checks <= 2, "a check at the same time changes nothing");
                }
            }
        }
    }

    /// No frame arrives. Whatever the kernel reports, the connection is dead 20 s after the PING at the latest.
    #[test]
    fn silent_process_is_found_dead_after_20_s(
        kernel in prop::collection::vec((0..3_000_u64, any::<[bool; 3]>()), 1..20),
        pinned in any::<bool>(),
    ) {
        let mut shell = Shell::new();
        let _ = shell.report(Input::Reserve(false));
        let _ = shell.report(Input::Opened(0));
        let _ = shell.report(Input::SetPinned(0, pinned));
        let start = shell.now;
        for (silent, [pending, window_closed, _]) in kernel.into_iter().cycle() {
            shell.now = shell.connection.wake_at();
            // Acknowledged bytes of an upload are progress.
            let check = Input::Check { silent, pending, window_closed, acknowledges: false };
            let _ = shell.report(check);
            if shell.connection.state() == ConnectionState::Dead {
                break;
            }
            prop_assert!(shell.now < start + ms(21_300), "{:?}", shell.connection);
        }
    }

    /// A peer that answers each PING at once is never suspected.
    #[test]
    fn connection_whose_pings_are_answered_stays_live(
        steps in prop::collection::vec((0..300_u64, any::<bool>()), 1..80),
    ) {
        let mut shell = Shell::new();
        for (pause, bytes) in steps {
            shell.now += ms(pause);
            if bytes {
                let _ = shell.report(Input::Received(10));
            }
            while shell.connection.wake_at() <= shell.now {
                let tcp = TcpInfo::default();
                let effects = shell.connection.check(Some(&tcp), shell.now);
                prop_assert_eq!(effects.transition, None);
                if effects.send_ping {
                    shell.now += ms(1);
                    let effects = shell.connection.pong(shell.now);
                    prop_assert!(effects.transition.is_none() && effects.round_trip == Some(ms(1)));
                }
            }
        }
        prop_assert_eq!(shell.connection.state(), ConnectionState::Live);
    }
}
