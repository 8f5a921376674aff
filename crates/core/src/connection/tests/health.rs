//! The health of a connection under scripted time: its decisions and their times.

use std::time::{Duration, Instant};

use super::*;

const RTT: Duration = Duration::from_millis(1);

/// A simulated connection and its peer, with a clock that advances from check to check.
#[allow(clippy::struct_excessive_bools)] // independent faults
struct Simulation {
    connection: ConnectionMachine,
    start: Instant,
    now: Instant,
    /// The peer's process answers PINGs.
    answers: bool,
    /// Packets from the peer arrive.
    inbound: bool,
    /// Packets to the peer arrive.
    outbound: bool,
    /// The peer's window is closed, and written bytes wait.
    window_closed: bool,
    /// Bytes of small requests are sent all the time, and acknowledged.
    sends_small_requests: bool,
    /// An upload is in progress, and its bytes are acknowledged.
    uploads: bool,
    /// A stream whose response has begun.
    stream: Stream,
    last_segment: Instant,
    acked: u64,
    pending: bool,
    /// How late timers fire.
    lag: Duration,
    /// The changes of state, with milliseconds since the start.
    changes: Vec<(u64, ConnectionState, StateChangeReason)>,
    /// The changes of each finding, with milliseconds since the start.
    silent: Vec<(u64, bool)>,
    ping_unanswered: Vec<(u64, bool)>,
    fails_unsafe_requests: Vec<(u64, bool)>,
    /// When PINGs were sent, in milliseconds since the start.
    pings: Vec<u64>,
}

impl Simulation {
    fn new() -> Self {
        Self::with(RTT, ms(20_000))
    }

    fn with(first_rtt: Duration, tunnel_dead_after: Duration) -> Self {
        let start = Instant::now();
        let thresholds = Thresholds { tunnel_dead_after, ..established(start).thresholds };
        let established = Established { thresholds, first_rtt, ..established(start) };
        let mut connection = ConnectionMachine::new(established, start);
        let mut stream = connection.reserve(false, start);
        connection.opened(&mut stream);
        connection.head_arrived(&mut stream, start);
        Self {
            connection,
            start,
            now: start,
            answers: true,
            inbound: true,
            outbound: true,
            window_closed: false,
            sends_small_requests: false,
            uploads: false,
            stream,
            last_segment: start,
            acked: 0,
            pending: false,
            lag: Duration::ZERO,
            changes: Vec::new(),
            silent: Vec::new(),
            ping_unanswered: Vec::new(),
            fails_unsafe_requests: Vec::new(),
            pings: Vec::new(),
        }
    }

    /// Milliseconds since the start.
    fn at(&self) -> u64 {
        self.now.duration_since(self.start).as_millis() as u64
    }

    fn state(&self) -> ConnectionState {
        self.connection.state()
    }

    fn set_pinned(&mut self, pinned: bool) {
        self.connection.set_pinned(&mut self.stream, pinned);
    }

    /// A request is sent, and waits for its response head.
    fn send_request(&mut self) {
        let mut stream = self.connection.reserve(false, self.now);
        self.connection.opened(&mut stream);
    }

    fn drain(&mut self) {
        let effects = self.connection.drain(DrainReason::EndpointRemoved, self.now);
        assert!(effects.transition.is_some());
    }

    /// Bytes from the peer arrive.
    fn receive(&mut self) {
        self.last_segment = self.now;
        let effects = self.connection.received(100, self.now);
        assert_eq!(effects, Effects::default());
    }

    /// The PONG arrives. Returns the new state.
    fn pong(&mut self) -> Option<ConnectionState> {
        // Its bytes are reported first, as for any frame.
        self.receive();
        let effects = self.connection.pong(self.now);
        self.record(effects);
        effects.transition.map(|transition| transition.to)
    }

    fn record(&mut self, effects: Effects) {
        let Some(ConnectionTransition { to, reason: ChangeReason::Health(reason), .. }) =
            effects.transition
        else {
            return assert_eq!(effects.transition, None);
        };
        self.changes.push((self.at(), to, reason));
    }

    fn tcp(&mut self) -> TcpInfo {
        let reachable = self.inbound && self.outbound;
        // A reachable kernel answers keepalives and window probes within a second.
        if reachable {
            self.last_segment = self.last_segment.max(self.now.checked_sub(ms(900)).unwrap());
            self.pending = self.window_closed || self.uploads || self.sends_small_requests;
            self.acked += if self.uploads { 1400 } else { 0 };
            self.acked += if self.sends_small_requests { 600 } else { 0 };
        }
        let silent = self.now.duration_since(self.last_segment);
        let window = if self.window_closed { 0 } else { 64_000 };
        TcpInfo {
            last_ack_recv: silent,
            last_data_recv: silent,
            bytes_acked: self.acked,
            unacked: u32::from(self.pending && !self.window_closed),
            notsent_bytes: if self.pending && self.window_closed { 5000 } else { 0 },
            send_window: Some(window),
            send_mss: 1400,
            // One probe is sent each second.
            probes: if reachable { 0 } else { silent.as_secs() as u8 },
            ..TcpInfo::default()
        }
    }

    /// Runs for `duration`. A PONG arrives if both directions and the process work.
    fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.connection.wake_at() + self.lag < end {
            self.now = self.now.max(self.connection.wake_at() + self.lag);
            let tcp = self.tcp();
            let effects = self.connection.check(Some(&tcp), self.now);
            self.record(effects);
            let at = self.at();
            let responsiveness = self.connection.responsiveness();
            let fails = self.connection.no_response_reason(false).is_some();
            for (changes, value) in [
                (&mut self.silent, responsiveness == Responsiveness::Silent),
                (&mut self.ping_unanswered, responsiveness != Responsiveness::Responds),
                (&mut self.fails_unsafe_requests, fails),
            ] {
                if value != changes.last().is_some_and(|(_, previous)| *previous) {
                    changes.push((at, value));
                }
            }
            if effects.send_ping {
                self.pings.push(self.at());
                self.pending = true;
                if self.outbound && self.inbound && !self.window_closed {
                    self.acked += 40;
                    self.pending = false;
                    self.last_segment = self.now;
                    if self.answers {
                        self.now += RTT;
                        self.pong();
                    }
                }
            }
            if self.state() == ConnectionState::Dead {
                return;
            }
        }
        self.now = self.now.max(end);
    }

    /// The states that were entered, and the reasons.
    fn states(&self) -> Vec<(ConnectionState, StateChangeReason)> {
        self.changes.iter().map(|(_, state, reason)| (*state, *reason)).collect()
    }
}

#[test]
fn idle_connection_is_pinged_once_an_interval_and_stays_live() {
    let mut sim = Simulation::new();
    sim.run(ms(60_000));
    assert_eq!(sim.changes, []);
    assert!((58..=60).contains(&sim.pings.len()), "{:?}", sim.pings.len());
}

#[test]
fn lost_path_is_suspect_after_100_ms_and_dead_after_2_s() {
    for outbound in [false, true] {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        (sim.inbound, sim.outbound) = (false, outbound);
        sim.run(ms(10_000));
        let ping = *sim.pings.last().unwrap();
        assert_eq!(
            sim.states(),
            [
                (ConnectionState::Suspect, StateChangeReason::PingLate),
                (ConnectionState::Dead, StateChangeReason::NothingArrives)
            ]
        );
        let (suspect, dead) = (sim.changes[0].0 - ping, sim.changes[1].0 - ping);
        assert!((100..=110).contains(&suspect), "{suspect}");
        assert!((2000..=2100).contains(&dead), "{dead}");
    }
}

/// The queue of a slow line is long ([`crate::line_delay`]).
#[test]
fn suspicion_and_verdicts_wait_for_the_delay_of_the_line() {
    for answers in [true, false] {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        // Either the path is lost, or the process is stopped.
        (sim.inbound, sim.answers) = (!answers, answers);
        sim.connection.expect_delay(ms(3_000));
        let ping = run_until_ping(&mut sim);
        sim.run(ms(15_000));
        let [(suspect, ..), (verdict, ..)] = sim.changes[..2] else { panic!("{:?}", sim.changes) };
        assert!((3_100..=3_110).contains(&(suspect - ping)), "{suspect} {ping}");
        let expected = if answers { 5_000 } else { 8_000 };
        assert!((expected..=expected + 110).contains(&(verdict - ping)), "{verdict} {ping}");
        let (silent, _) = sim.silent[0];
        assert!((4_000..=4_110).contains(&(silent - ping)), "{silent} {ping}");
        let fails = sim.fails_unsafe_requests.first().map(|(at, _)| at - ping);
        assert_eq!(fails.is_some_and(|at| (10_000..=10_110).contains(&at)), !answers, "{fails:?}");
    }
}

#[test]
fn lost_outbound_packets_are_detected_while_the_peer_sends() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.outbound = false;
    // Events arrive, so only outbound evidence is missing.
    for _ in 0..300 {
        sim.run(ms(20));
        sim.receive();
        if sim.state() == ConnectionState::Dead {
            break;
        }
    }
    assert_eq!(
        sim.states(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Dead, StateChangeReason::NothingAcknowledged)
        ]
    );
}

#[test]
fn stopped_process_drains_after_5_s_and_is_dead_after_20_s() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.answers = false;
    sim.run(ms(30_000));
    let ping = *sim.pings.last().unwrap();
    assert_eq!(
        sim.states(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Draining, StateChangeReason::ProcessStopped),
            (ConnectionState::Dead, StateChangeReason::NoFrames)
        ]
    );
    assert!((5000..=5110).contains(&(sim.changes[1].0 - ping)), "{:?}", sim.changes);
    assert!((20_000..=20_110).contains(&(sim.changes[2].0 - ping)), "{:?}", sim.changes);
}

#[test]
fn connection_without_evidence_of_life_for_a_second_is_silent() {
    // In the last row the process is stopped, and the kernel answers.
    for (inbound, outbound, answers) in
        [(false, false, true), (false, true, true), (true, false, true), (true, true, false)]
    {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        (sim.inbound, sim.outbound, sim.answers) = (inbound, outbound, answers);
        sim.run(ms(10_000));
        let ping = *sim.pings.last().unwrap();
        let [(at, true)] = sim.silent[..] else { panic!("{:?}", sim.silent) };
        assert!((1000..=1110).contains(&(at - ping)), "{at} after the PING at {ping}");
    }
}

#[test]
fn path_is_responsive_after_a_pong_and_at_a_late_check() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    (sim.inbound, sim.outbound) = (false, false);
    sim.run(ms(1900));
    assert_eq!(sim.silent.len(), 1, "{:?}", sim.silent);
    (sim.inbound, sim.outbound) = (true, true);
    sim.pong();
    sim.run(ms(5000));
    assert_eq!(sim.silent.len(), 2, "{:?}", sim.silent);
    // A late check has no finding.
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    (sim.inbound, sim.outbound) = (false, false);
    sim.lag = ms(1500);
    sim.run(ms(4000));
    assert_eq!(sim.silent, []);
}

#[test]
fn pong_makes_a_suspect_connection_live() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.answers = false;
    sim.run(ms(900));
    assert_eq!(sim.state(), ConnectionState::Suspect);
    let effects = sim.connection.pong(sim.now);
    assert!(effects.round_trip.unwrap() > ms(100));
    sim.record(effects);
    let live = (ConnectionState::Live, StateChangeReason::Pong);
    assert_eq!(sim.states().last(), Some(&live));
}

#[test]
fn late_pongs_do_not_delay_the_next_suspicion() {
    let mut sim = Simulation::new();
    // The process is stopped, or packets are lost, twice in a row.
    for duration in [3500, 1900] {
        sim.run(ms(1500));
        sim.answers = false;
        run_until_ping(&mut sim);
        sim.run(ms(duration));
        sim.pong();
        sim.answers = true;
    }
    sim.run(ms(1500));
    sim.changes.clear();
    (sim.inbound, sim.outbound) = (false, false);
    let ping = run_until_ping(&mut sim);
    sim.run(ms(3200));
    assert_eq!(
        sim.states().first(),
        Some(&(ConnectionState::Suspect, StateChangeReason::PingLate))
    );
    assert!(sim.changes[0].0 - ping <= 110, "{:?} after the PING at {ping}", sim.changes);
}

#[test]
fn ping_follows_a_doubtful_pong_at_once() {
    // A packet was lost while the connection was opened.
    let mut sim = Simulation::with(ms(700), ms(20_000));
    let first = run_until_ping(&mut sim);
    assert_eq!(first, 0);
    sim.run(ms(10));
    (sim.inbound, sim.outbound) = (false, false);
    let ping = run_until_ping(&mut sim);
    sim.run(ms(110));
    assert_eq!(sim.states(), [(ConnectionState::Suspect, StateChangeReason::PingLate)]);
    assert!(sim.changes[0].0 - ping <= 110, "{:?} after the PING at {ping}", sim.changes);
    // A process was stopped.
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.answers = false;
    run_until_ping(&mut sim);
    sim.run(ms(900));
    sim.pong();
    sim.answers = true;
    let at = sim.at();
    assert_eq!(run_until_ping(&mut sim), at);
}

#[test]
fn waiting_request_triggers_a_ping_after_100_ms() {
    let mut sim = Simulation::new();
    sim.run(ms(300));
    sim.send_request();
    (sim.inbound, sim.outbound) = (false, false);
    sim.run(ms(400));
    assert_eq!(sim.pings, [400]);
    assert_eq!(sim.states(), [(ConnectionState::Suspect, StateChangeReason::PingLate)]);
    assert!(sim.changes[0].0 <= 510, "suspect within 300 ms of the request: {:?}", sim.changes);
}

/// Only the packets to the apiserver may be lost.
#[test]
fn waiting_request_triggers_one_ping_beside_the_bytes_of_other_streams() {
    let mut sim = Simulation::new();
    run_until_ping(&mut sim);
    sim.run(ms(100));
    let (from, before) = (sim.at(), sim.pings.len());
    sim.send_request();
    for _ in 0..9 {
        sim.run(ms(50));
        sim.receive();
    }
    let after: Vec<_> = sim.pings[before..].iter().map(|at| at - from).collect();
    assert_eq!(after, [100]);
}

#[test]
fn connection_with_a_slow_handler_and_answered_pings_stays_live() {
    let mut sim = Simulation::new();
    sim.send_request();
    sim.run(ms(15_000));
    assert_eq!(sim.changes, []);
}

#[test]
fn silence_after_received_bytes_triggers_a_ping_after_250_ms() {
    let mut sim = Simulation::new();
    sim.run(ms(100));
    sim.receive();
    assert_eq!(sim.connection.wake_at(), sim.now + ms(250));
    sim.run(ms(600));
    assert_eq!(sim.pings.first(), Some(&350));
}

#[test]
fn event_that_another_connection_has_shown_triggers_a_ping_after_100_ms() {
    let mut sim = Simulation::new();
    let expect = |sim: &mut Simulation| sim.connection.event_expected(sim.now).wake_driver;
    // In the middle between two PINGs.
    sim.run(ms(600));
    let ping = run_until_ping(&mut sim);
    sim.run(ms(320));
    let from = sim.at();
    assert!(expect(&mut sim) && !expect(&mut sim), "one is expected already");
    assert_eq!(run_until_ping(&mut sim) - from, 100);
    // Another one directly after the PONG.
    sim.run(ms(10));
    let pong = sim.at();
    assert!(expect(&mut sim));
    let next = run_until_ping(&mut sim) - pong;
    assert!((280..=300).contains(&next), "{next} ms after the PONG, {ping}");
    // Bytes arrive in time.
    sim.run(ms(10));
    assert!(expect(&mut sim));
    sim.run(ms(50));
    sim.receive();
    let from = sim.at();
    assert_eq!(run_until_ping(&mut sim) - from, 250, "as after any bytes");
    // The peer limits PINGs.
    let mut sim = Simulation::new();
    sim.connection.limit_pings(ms(60_000));
    assert!(!expect(&mut sim));
}

#[test]
fn connection_is_asked_if_no_ping_was_answered_for_a_while() {
    for (since_pong, is_asked) in [(200, true), (60, false)] {
        let mut sim = Simulation::new();
        run_until_ping(&mut sim);
        sim.run(ms(since_pong));
        assert_eq!(sim.connection.ask(sim.now).wake_driver, is_asked, "{since_pong}");
        if is_asked {
            assert_eq!(sim.connection.wake_at(), sim.now);
        }
    }
}

#[test]
fn late_check_withholds_verdicts() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    (sim.inbound, sim.outbound) = (false, false);
    // Every timer fires 3 s late, so the PING is outstanding for longer than `dead_after`.
    sim.lag = ms(3000);
    sim.run(ms(6100));
    assert_eq!(sim.changes, [], "the first late check withholds its verdict");
    sim.lag = Duration::ZERO;
    sim.run(ms(3000));
    assert_eq!(sim.state(), ConnectionState::Dead, "later checks have verdicts");
}

/// Runs until a PING is sent. Returns its time.
fn run_until_ping(sim: &mut Simulation) -> u64 {
    let before = sim.pings.len();
    while sim.pings.len() == before {
        sim.run(ms(1));
    }
    sim.pings[before]
}

/// A process that was stopped during an upload, so that its kernel's buffer is full. Returns the simulation
/// and the time of the next PING.
fn closed_window() -> (Simulation, u64) {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    (sim.answers, sim.window_closed) = (false, true);
    let ping = run_until_ping(&mut sim);
    (sim, ping)
}

#[test]
fn closed_window_with_answered_probes_is_suspect_then_draining_then_dead_after_20_s() {
    let (mut sim, ping) = closed_window();
    sim.run(ms(30_000));
    let expected = [
        (ConnectionState::Suspect, StateChangeReason::PingLate),
        (ConnectionState::Draining, StateChangeReason::ProcessStopped),
        (ConnectionState::Dead, StateChangeReason::NoFrames),
    ];
    assert_eq!(sim.states(), expected);
    assert!((5000..=5110).contains(&(sim.changes[1].0 - ping)), "{:?}", sim.changes);
    assert!((20_000..=20_110).contains(&(sim.changes[2].0 - ping)), "{:?}", sim.changes);
    let [(at, true)] = sim.silent[..] else { panic!("{:?}", sim.silent) };
    assert!((1000..=1110).contains(&(at - ping)), "{at} after the PING at {ping}");
}

#[test]
fn closed_window_is_live_again_when_the_process_continues() {
    let (mut sim, _) = closed_window();
    sim.run(ms(3000));
    assert_eq!(sim.state(), ConnectionState::Suspect);
    (sim.answers, sim.window_closed) = (true, false);
    assert_eq!(sim.pong(), Some(ConnectionState::Live));
}

/// The bytes that waited for the window are sent when it opens, and are not acknowledged.
#[test]
fn opened_window_gives_the_peer_time_to_acknowledge() {
    let (mut sim, _) = closed_window();
    sim.run(ms(3000));
    (sim.window_closed, sim.outbound) = (false, false);
    let opened = sim.at();
    sim.last_segment = sim.now; // The window update.
    sim.run(ms(10_000));
    assert_eq!(sim.state(), ConnectionState::Dead);
    let (at, _, reason) = *sim.changes.last().unwrap();
    assert_eq!(reason, StateChangeReason::NothingAcknowledged);
    assert!((1900..=2110).contains(&(at - opened)), "{}", at - opened);
}

/// The peer sends, but accepts no bytes.
#[test]
fn window_that_stays_closed_is_dead_after_20_s_although_frames_arrive() {
    let (mut sim, ping) = closed_window();
    while sim.state() != ConnectionState::Dead {
        sim.run(ms(20));
        sim.receive();
    }
    assert_eq!(
        sim.states(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Dead, StateChangeReason::WindowClosed)
        ]
    );
    assert!((20_000..=20_110).contains(&(sim.changes[1].0 - ping)), "{:?}", sim.changes);
}

#[test]
fn closed_window_whose_probes_are_not_answered_is_dead_after_the_third() {
    let (mut sim, _) = closed_window();
    sim.run(ms(1000));
    let from = sim.at();
    (sim.inbound, sim.outbound) = (false, false);
    sim.run(ms(10_000));
    let (at, state, reason) = *sim.changes.last().unwrap();
    assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NothingArrives));
    assert!((2000..=3200).contains(&(at - from)), "{}", at - from);
}

#[test]
fn upload_that_makes_progress_is_not_a_stopped_process() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    // The PING waits behind the upload.
    (sim.answers, sim.uploads) = (false, true);
    sim.run(ms(60_000));
    assert_eq!(sim.states(), [(ConnectionState::Suspect, StateChangeReason::PingLate)]);
    assert_eq!(sim.fails_unsafe_requests, []);
    assert_eq!(sim.silent, []);
    // The upload stalls.
    sim.uploads = false;
    let from = sim.at();
    sim.run(ms(30_000));
    let (at, state, reason) = sim.changes[1];
    assert_eq!((state, reason), (ConnectionState::Draining, StateChangeReason::ProcessStopped));
    assert!((4900..=5210).contains(&(at - from)), "{}", at - from);
}

/// Otherwise the path of a busy watch could be lost for a whole second before a PING notices it.
#[test]
fn ping_after_bytes_is_followed_by_one_after_its_pong() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.receive();
    let from = sim.at();
    let pings: Vec<_> = (0..3).map(|_| run_until_ping(&mut sim) - from).collect();
    assert!((250..=370).contains(&pings[0]), "{pings:?}");
    assert!((250..=370).contains(&(pings[1] - pings[0])), "{pings:?}");
    assert!(pings[2] - pings[1] >= 500, "then the interval again: {pings:?}");
}

/// The kernel acknowledges them, as long as its buffer has room.
#[test]
fn stopped_process_that_gets_small_requests_drains_after_5_s() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    (sim.answers, sim.sends_small_requests) = (false, true);
    let ping = run_until_ping(&mut sim);
    sim.run(ms(10_000));
    let (at, state, reason) = sim.changes[1];
    assert_eq!((state, reason), (ConnectionState::Draining, StateChangeReason::ProcessStopped));
    assert!((5000..=5110).contains(&(at - ping)), "{} after the PING", at - ping);
    let [(at, true)] = sim.silent[..] else { panic!("{:?}", sim.silent) };
    assert!(at - ping <= 1110, "silent {} after the PING", at - ping);
}

#[test]
fn stopped_process_fails_unsafe_requests_7_s_after_the_ping() {
    for goaway in [false, true] {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        if goaway {
            sim.drain();
        }
        sim.answers = false;
        let ping = run_until_ping(&mut sim);
        sim.run(ms(15_000));
        let [(at, true)] = sim.fails_unsafe_requests[..] else {
            panic!("{:?}", sim.fails_unsafe_requests)
        };
        assert!((7000..=7110).contains(&(at - ping)), "{} after the PING", at - ping);
        assert_eq!(sim.state(), ConnectionState::Draining);
        sim.pong();
        assert_eq!(sim.connection.no_response_reason(false), None, "the process continues");
    }
}

#[test]
fn lost_path_with_pinned_streams_is_unresponsive_and_dead_after_20_s() {
    let reason = StateChangeReason::NothingArrives;
    for outbound in [false, true] {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        sim.set_pinned(true);
        (sim.inbound, sim.outbound) = (false, outbound);
        let ping = run_until_ping(&mut sim);
        sim.run(ms(30_000));
        let expected = [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Unresponsive, reason),
            (ConnectionState::Dead, reason),
        ];
        assert_eq!(sim.states(), expected);
        assert!((2000..=2110).contains(&(sim.changes[1].0 - ping)), "{:?}", sim.changes);
        assert!((20_000..=20_110).contains(&(sim.changes[2].0 - ping)), "{:?}", sim.changes);
        assert_eq!(
            sim.fails_unsafe_requests,
            [(sim.changes[1].0, true)],
            "unsafe requests fail when the path is lost"
        );
    }
}

#[test]
fn unresponsive_connection_drains_on_a_pong_and_is_dead_without_pinned_streams() {
    let unresponsive = || {
        let mut sim = Simulation::new();
        sim.run(ms(1500));
        sim.set_pinned(true);
        (sim.inbound, sim.outbound) = (false, false);
        run_until_ping(&mut sim);
        sim.run(ms(10_000));
        assert_eq!(sim.state(), ConnectionState::Unresponsive);
        sim
    };
    let mut sim = unresponsive();
    (sim.inbound, sim.outbound) = (true, true);
    assert_eq!(sim.pong(), Some(ConnectionState::Draining));
    assert_eq!(sim.connection.responsiveness(), Responsiveness::Responds);
    assert_eq!(sim.connection.no_response_reason(false), None);
    sim.run(ms(60_000));
    assert_eq!(sim.state(), ConnectionState::Draining, "open streams continue");

    let mut sim = unresponsive();
    let from = sim.at();
    sim.set_pinned(false);
    sim.run(ms(10_000));
    let (at, state, reason) = *sim.changes.last().unwrap();
    assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NothingArrives));
    assert!(at - from <= 110, "{}", at - from);
}

#[test]
fn draining_connection_with_pinned_streams_is_unresponsive_when_its_path_is_lost() {
    let mut sim = Simulation::new();
    sim.drain();
    sim.run(ms(1500));
    sim.set_pinned(true);
    (sim.inbound, sim.outbound) = (false, false);
    run_until_ping(&mut sim);
    sim.run(ms(3000));
    assert_eq!(sim.states(), [(ConnectionState::Unresponsive, StateChangeReason::NothingArrives)]);
}

#[test]
fn stopped_process_with_pinned_streams_is_dead_after_20_s_or_the_longer_limit() {
    for (limit, dead) in [(5_000, 20_000), (40_000, 40_000)] {
        let mut sim = Simulation::with(RTT, ms(limit));
        sim.run(ms(1500));
        sim.set_pinned(true);
        sim.answers = false;
        let ping = run_until_ping(&mut sim);
        sim.run(ms(60_000));
        let (at, state, reason) = *sim.changes.last().unwrap();
        assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NoFrames));
        assert!((dead..=dead + 110).contains(&(at - ping)), "{limit}: {}", at - ping);
    }
}

#[test]
fn ping_outstanding_for_500_ms_is_unanswered() {
    let mut sim = Simulation::new();
    sim.run(ms(1500));
    sim.answers = false;
    let ping = run_until_ping(&mut sim);
    sim.run(ms(4000));
    let [(at, true)] = sim.ping_unanswered[..] else { panic!("{:?}", sim.ping_unanswered) };
    assert!((500..=610).contains(&(at - ping)), "{}", at - ping);
    sim.pong();
    assert_eq!(sim.connection.responsiveness(), Responsiveness::Responds);
}

#[test]
fn connection_whose_checks_are_always_late_is_still_found_dead() {
    // No packets arrive; or the peer sends, and only packets to the peer are lost.
    for sends in [false, true] {
        let mut sim = Simulation::new();
        sim.lag = ms(100);
        sim.run(ms(1500));
        (sim.inbound, sim.outbound) = (false, false);
        let ping = run_until_ping(&mut sim);
        while sim.at() < ping + 10_000 && sim.state() != ConnectionState::Dead {
            sim.run(ms(20));
            if sends {
                sim.receive();
            }
        }
        let states: Vec<_> = sim.states().into_iter().map(|(state, _)| state).collect();
        assert_eq!(states, [ConnectionState::Suspect, ConnectionState::Dead], "sends: {sends}");
        let dead = sim.changes[1].0 - ping;
        assert!((2000..=2300).contains(&dead), "sends: {sends}: dead {dead} ms after the PING");
    }
}

#[test]
fn late_check_withholds_verdicts_once_for_each_ping() {
    let mut sim = Simulation::new();
    for _ in 0..2 {
        sim.run(ms(1500));
        sim.answers = false;
        run_until_ping(&mut sim);
        // The machine is paused. The kernel counts the time, and no packet has arrived.
        sim.now += ms(10_000);
        let tcp = TcpInfo {
            last_ack_recv: ms(10_000),
            last_data_recv: ms(10_000),
            unacked: 1,
            ..TcpInfo::default()
        };
        let effects = sim.connection.check(Some(&tcp), sim.now);
        assert_eq!(effects.transition, None);
        assert_ne!(sim.connection.responsiveness(), Responsiveness::Silent);
        // Packets that waited in the network arrive.
        sim.now += ms(200);
        sim.pong();
        assert_eq!(sim.state(), ConnectionState::Live);
        sim.answers = true;
    }
}

#[test]
fn drain_takes_precedence_over_a_pong() {
    let mut sim = Simulation::new();
    sim.drain();
    sim.run(ms(5000));
    assert_eq!(sim.state(), ConnectionState::Draining);
    assert_eq!(sim.changes, []);
}

#[test]
fn pings_of_connections_with_one_grid_are_due_at_the_same_times() {
    let grid = Instant::now();
    // Milliseconds since the grid's begin: when a PONG arrives, and when the next PING is due.
    for (pong, due) in
        [(0, 1000), (1, 1000), (120, 1000), (499, 1000), (500, 1500), (730, 1500), (90_001, 91_000)]
    {
        let limits = Thresholds {
            ping_interval: ms(1000),
            suspect_after: None,
            dead_after: ms(2000),
            tunnel_dead_after: ms(2000),
        };
        assert_eq!(limits.next_ping(grid, grid + ms(pong)), grid + ms(due), "{pong}");
    }
}

#[test]
fn next_ping_is_due_after_half_of_the_interval_at_the_earliest() {
    let grid = Instant::now();
    for interval in [1, 2, 3, 7, 1000, 3333] {
        let limits = Thresholds {
            ping_interval: ms(interval),
            suspect_after: None,
            dead_after: ms(2000),
            tunnel_dead_after: ms(2000),
        };
        for micros in (0..20_000_000).step_by(7_919) {
            let now = grid + Duration::from_micros(micros);
            let pause = limits.next_ping(grid, now) - now;
            assert!(pause <= ms(interval) && pause >= ms(interval) / 2, "{pause:?} {interval}");
        }
    }
}

#[test]
fn limited_pings_of_a_live_connection_keep_their_interval() {
    let mut sim = Simulation::new();
    sim.connection.limit_pings(ms(64_000));
    sim.run(ms(200_000));
    assert_eq!((sim.changes.len(), sim.pings.len()), (0, 3), "{:?}", sim.pings);
    // Events bring no PING forward.
    for _ in 0..10 {
        sim.receive();
        sim.run(ms(1000));
    }
    assert_eq!(sim.pings.len(), 3, "{:?}", sim.pings);
}

#[test]
fn limited_pings_notice_a_lost_path_after_4_s() {
    for outbound in [false, true] {
        let mut sim = Simulation::new();
        sim.connection.limit_pings(ms(600_000));
        sim.run(ms(10_000));
        (sim.inbound, sim.outbound) = (false, outbound);
        sim.run(ms(10_000));
        assert_eq!(
            sim.states(),
            [
                (ConnectionState::Suspect, StateChangeReason::PingLate),
                (ConnectionState::Dead, StateChangeReason::NothingArrives)
            ]
        );
        assert!(sim.changes[1].0 <= 10_000 + 4_200, "{:?}", sim.changes);
        assert_eq!(sim.pings.len(), 1, "{:?}", sim.pings);
    }
}

#[test]
fn limited_pings_are_sent_once_for_a_request_that_waits() {
    let mut sim = Simulation::new();
    sim.connection.limit_pings(ms(600_000));
    sim.run(ms(10_000));
    sim.send_request();
    sim.run(ms(20_000));
    assert_eq!(sim.pings, [10_100]);
    sim.send_request();
    sim.answers = false;
    sim.run(ms(8_000));
    // The first request still waits, and its PING was answered. The endpoint is suspected by `/readyz`.
    assert_eq!(sim.pings.len(), 1);
    let now = sim.now;
    let _ = sim.connection.endpoint_suspected(now);
    sim.run(ms(8_000));
    assert_eq!(sim.pings.len(), 2);
    assert_eq!(sim.state(), ConnectionState::Draining);
}
