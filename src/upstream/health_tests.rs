//! The health of a connection under scripted time: its decisions and when they are made.

use std::time::Duration;

use tokio::time::Instant;

use super::*;

const RTT: Duration = Duration::from_millis(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[allow(clippy::struct_excessive_bools)] // independent faults
/// A connection, its peer, and a clock that advances from check to check.
struct Scene {
    health: ConnectionHealth,
    start: Instant,
    now: Instant,
    /// When the next check is due.
    next: Instant,
    /// The peer's process answers PINGs.
    answers: bool,
    /// Packets from the peer arrive.
    inbound: bool,
    /// Packets to the peer arrive.
    outbound: bool,
    /// The peer's window is closed: written bytes wait for it.
    window_closed: bool,
    /// An upload is in progress; its bytes are acknowledged all the time.
    uploads: bool,
    pinned: bool,
    last_segment: Instant,
    acked: u64,
    pending: bool,
    waiting_since: Option<Instant>,
    /// How late timers fire.
    lag: Duration,
    seen: Vec<(u64, ConnectionState, StateChangeReason)>,
    /// When `path_unresponsive` changed.
    path_unresponsive: Vec<(u64, bool)>,
    /// When `ping_unanswered` and `fails_unsafe_requests` changed.
    unanswered: Vec<(u64, bool)>,
    fails_unsafe_requests: Vec<(u64, bool)>,
    pings: Vec<u64>,
}

impl Scene {
    fn new() -> Self {
        let start = Instant::now();
        let limits = Thresholds {
            ping_interval: ms(1000),
            suspect_after: None,
            dead_after: ms(2000),
            tunnel_dead_after: ms(20_000),
        };
        Self {
            health: ConnectionHealth::new(limits, RTT, start),
            start,
            now: start,
            next: start + ms(1000),
            answers: true,
            inbound: true,
            outbound: true,
            window_closed: false,
            uploads: false,
            pinned: false,
            last_segment: start,
            acked: 0,
            pending: false,
            waiting_since: None,
            lag: Duration::ZERO,
            seen: Vec::new(),
            path_unresponsive: Vec::new(),
            unanswered: Vec::new(),
            fails_unsafe_requests: Vec::new(),
            pings: Vec::new(),
        }
    }

    fn at(&self) -> u64 {
        self.now.duration_since(self.start).as_millis() as u64
    }

    fn evidence(&mut self) -> Evidence {
        let reached = self.inbound && self.outbound;
        // A reachable kernel answers keepalives and window probes within a second.
        if reached {
            self.last_segment = self.last_segment.max(self.now.checked_sub(ms(900)).unwrap());
            self.pending = self.window_closed || self.uploads;
            self.acked += u64::from(self.uploads);
        }
        let silent = self.now.duration_since(self.last_segment);
        let window = if self.window_closed { 0 } else { 64_000 };
        Evidence {
            tcp: Some(TcpInfo {
                last_ack_recv: silent,
                last_data_recv: silent,
                bytes_acked: self.acked,
                unacked: u32::from(self.pending && !self.window_closed),
                notsent_bytes: if self.pending && self.window_closed { 5000 } else { 0 },
                send_window: Some(window),
                send_mss: 1400,
                // One probe is sent each second.
                probes: if reached { 0 } else { silent.as_secs() as u8 },
                ..TcpInfo::default()
            }),
            waiting_since: self.waiting_since,
            pinned: self.pinned,
        }
    }

    /// Runs for `length`; PONGs arrive where both directions and the process work.
    fn run(&mut self, length: Duration) -> &mut Self {
        let end = self.now + length;
        if let Some(since) = self.waiting_since {
            self.next = self.next.min(since + HEAD_WAIT);
        }
        while self.next + self.lag < end {
            self.now = self.next + self.lag;
            let evidence = self.evidence();
            let decision = self.health.check(evidence, self.now);
            if let Some((state, reason)) = decision.change {
                self.seen.push((self.at(), state, reason));
            }
            let at = self.at();
            let note = |list: &mut Vec<(u64, bool)>, is: bool| {
                if is != list.last().is_some_and(|(_, was)| *was) {
                    list.push((at, is));
                }
            };
            note(&mut self.path_unresponsive, self.health.findings().path_unresponsive);
            note(&mut self.unanswered, self.health.findings().ping_unanswered);
            note(&mut self.fails_unsafe_requests, self.health.findings().fails_unsafe_requests);
            self.next = decision.wake_at;
            if decision.ping {
                self.pings.push(self.at());
                self.pending = true;
                if self.outbound && self.inbound && !self.window_closed {
                    self.acked += 40;
                    self.pending = false;
                    self.last_segment = self.now;
                    if self.answers {
                        self.now += RTT;
                        let (_, change) = self.health.pong(self.now);
                        if let Some((state, reason)) = change {
                            self.seen.push((self.at(), state, reason));
                        }
                        self.next = self.now;
                    }
                }
            }
            if self.health.state == ConnectionState::Dead {
                return self;
            }
        }
        self.now = end;
        self
    }

    fn lives(&self) -> Vec<(ConnectionState, StateChangeReason)> {
        self.seen.iter().map(|(_, state, reason)| (*state, *reason)).collect()
    }
}

#[test]
fn idle_connection_is_pinged_once_an_interval_and_stays_live() {
    let mut scene = Scene::new();
    scene.run(ms(60_000));
    assert_eq!(scene.seen, []);
    assert!((58..=60).contains(&scene.pings.len()), "{:?}", scene.pings.len());
}

#[test]
fn lost_path_is_suspect_soon_and_dead_two_seconds_after_its_ping() {
    for (inbound, outbound, reason) in [
        (false, false, StateChangeReason::NothingArrives),
        (false, true, StateChangeReason::NothingArrives),
    ] {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        (scene.inbound, scene.outbound) = (inbound, outbound);
        scene.run(ms(10_000));
        let ping = *scene.pings.last().unwrap();
        assert_eq!(
            scene.lives(),
            [
                (ConnectionState::Suspect, StateChangeReason::PingLate),
                (ConnectionState::Dead, reason)
            ]
        );
        let (suspected, dead) = (scene.seen[0].0 - ping, scene.seen[1].0 - ping);
        assert!((100..=110).contains(&suspected), "{suspected}");
        assert!((2000..=2100).contains(&dead), "{dead}");
    }
}

#[test]
fn lost_outbound_packets_are_detected_while_the_peer_sends() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.outbound = false;
    // Events keep arriving: without the outbound evidence this would stay live.
    for _ in 0..300 {
        scene.run(ms(20));
        scene.last_segment = scene.now;
        scene.next = scene.next.min(scene.health.received(scene.now));
        if scene.health.state == ConnectionState::Dead {
            break;
        }
    }
    assert_eq!(
        scene.lives(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Dead, StateChangeReason::NothingAcknowledged)
        ]
    );
}

#[test]
fn stopped_process_drains_after_5_s_and_is_dead_after_20_s() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(30_000));
    let ping = *scene.pings.last().unwrap();
    assert_eq!(
        scene.lives(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Draining, StateChangeReason::ProcessStopped),
            (ConnectionState::Dead, StateChangeReason::NoFrames)
        ]
    );
    assert!((5000..=5110).contains(&(scene.seen[1].0 - ping)), "{:?}", scene.seen);
    assert!((20_000..=20_110).contains(&(scene.seen[2].0 - ping)), "{:?}", scene.seen);
}

#[test]
fn path_without_evidence_of_life_for_a_second_is_unresponsive() {
    for (inbound, outbound) in [(false, false), (false, true), (true, false)] {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        (scene.inbound, scene.outbound) = (inbound, outbound);
        scene.run(ms(10_000));
        let ping = *scene.pings.last().unwrap();
        let [(at, true)] = scene.path_unresponsive[..] else {
            panic!("{:?}", scene.path_unresponsive)
        };
        assert!((1000..=1110).contains(&(at - ping)), "{at} after the PING at {ping}");
    }
    // Its kernel answers.
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(30_000));
    assert_eq!(scene.path_unresponsive, []);
}

#[test]
fn path_is_unresponsive_until_a_pong_arrives() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(1900));
    assert_eq!(scene.path_unresponsive.len(), 1, "{:?}", scene.path_unresponsive);
    (scene.inbound, scene.outbound) = (true, true);
    scene.health.pong(scene.now);
    scene.next = scene.now;
    scene.run(ms(5000));
    assert_eq!(scene.path_unresponsive.len(), 2, "{:?}", scene.path_unresponsive);
    // A late check gives no finding.
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    scene.lag = ms(1500);
    scene.run(ms(4000));
    assert_eq!(scene.path_unresponsive, []);
}

#[test]
fn pong_makes_a_suspect_connection_live() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(900));
    assert_eq!(scene.health.state, ConnectionState::Suspect);
    let (rtt, change) = scene.health.pong(scene.now);
    assert!(rtt.unwrap() > ms(100));
    assert_eq!(change, Some((ConnectionState::Live, StateChangeReason::Pong)));
}

#[test]
fn late_pong_does_not_delay_the_next_suspicion() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(3500));
    scene.health.pong(scene.now);
    scene.answers = true;
    scene.next = scene.now;
    scene.run(ms(2000));
    scene.seen.clear();
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(3200));
    let ping = *scene.pings.last().unwrap();
    assert_eq!(
        scene.lives().first(),
        Some(&(ConnectionState::Suspect, StateChangeReason::PingLate))
    );
    assert!(scene.seen[0].0 - ping <= 600, "{:?} after the PING at {ping}", scene.seen);
}

#[test]
fn waiting_request_triggers_a_ping_after_100_ms() {
    let mut scene = Scene::new();
    scene.run(ms(300));
    let since = scene.now;
    scene.waiting_since = Some(since);
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(400));
    assert_eq!(scene.pings, [400]);
    assert_eq!(scene.lives(), [(ConnectionState::Suspect, StateChangeReason::PingLate)]);
    assert!(scene.seen[0].0 <= 510, "suspected within 300 ms of the request: {:?}", scene.seen);
}

#[test]
fn slow_handler_with_answered_pings_stays_live() {
    let mut scene = Scene::new();
    scene.waiting_since = Some(scene.now);
    scene.run(ms(15_000));
    assert_eq!(scene.seen, []);
}

#[test]
fn silence_after_received_bytes_triggers_a_ping_after_400_ms() {
    let mut scene = Scene::new();
    scene.run(ms(100));
    scene.next = scene.health.received(scene.now);
    assert_eq!(scene.next, scene.now + PING_AFTER_SILENCE);
    scene.run(ms(600));
    assert_eq!(scene.pings.first(), Some(&500));
}

#[test]
fn late_check_withholds_verdicts() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    // Every timer fires 3 s late: by the clock the PING is outstanding for longer than `dead_after`.
    scene.lag = ms(3000);
    scene.run(ms(6100));
    assert_eq!(scene.seen, [], "the first look after a pause decides nothing");
    scene.lag = Duration::ZERO;
    scene.run(ms(3000));
    assert_eq!(scene.health.state, ConnectionState::Dead, "and the next ones do");
}

/// Runs until just after the next PING; returns its time.
fn pinged(scene: &mut Scene) -> u64 {
    let before = scene.pings.len();
    while scene.pings.len() == before {
        scene.run(ms(1));
    }
    scene.pings[before]
}

/// A process that was stopped during an upload, so that its kernel's buffer is full; with the time of
/// the next PING.
fn closed_window() -> (Scene, u64) {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.answers, scene.window_closed) = (false, true);
    let ping = pinged(&mut scene);
    (scene, ping)
}

#[test]
fn closed_window_with_answered_probes_is_suspect_then_draining_then_dead_after_20_s() {
    let (mut scene, ping) = closed_window();
    scene.run(ms(30_000));
    let expected = [
        (ConnectionState::Suspect, StateChangeReason::PingLate),
        (ConnectionState::Draining, StateChangeReason::ProcessStopped),
        (ConnectionState::Dead, StateChangeReason::NoFrames),
    ];
    assert_eq!(scene.lives(), expected);
    assert!((5000..=5110).contains(&(scene.seen[1].0 - ping)), "{:?}", scene.seen);
    assert!((20_000..=20_110).contains(&(scene.seen[2].0 - ping)), "{:?}", scene.seen);
    assert_eq!(scene.path_unresponsive, [], "its kernel answers");
}

#[test]
fn closed_window_is_live_again_when_the_process_continues() {
    let (mut scene, _) = closed_window();
    scene.run(ms(3000));
    assert_eq!(scene.health.state, ConnectionState::Suspect);
    (scene.answers, scene.window_closed) = (true, false);
    assert_eq!(
        scene.health.pong(scene.now).1,
        Some((ConnectionState::Live, StateChangeReason::Pong))
    );
}

/// The bytes that waited for the window have just been sent and not been acknowledged yet.
#[test]
fn window_that_opens_gives_the_peer_time_to_acknowledge() {
    let (mut scene, _) = closed_window();
    scene.run(ms(3000));
    (scene.window_closed, scene.outbound) = (false, false);
    let opened = scene.at();
    scene.last_segment = scene.now; // the window update
    scene.run(ms(10_000));
    assert_eq!(scene.health.state, ConnectionState::Dead);
    let (at, _, reason) = *scene.seen.last().unwrap();
    assert_eq!(reason, StateChangeReason::NothingAcknowledged);
    assert!((1900..=2110).contains(&(at - opened)), "{}", at - opened);
    let (path_unresponsive, _) = scene.path_unresponsive[0];
    assert!((900..=1110).contains(&(path_unresponsive - opened)), "{}", path_unresponsive - opened);
}

/// The peer keeps sending but accepts no bytes.
#[test]
fn window_that_stays_closed_is_dead_after_20_s_although_frames_come() {
    let (mut scene, ping) = closed_window();
    while scene.health.state != ConnectionState::Dead {
        scene.run(ms(20));
        scene.last_segment = scene.now;
        scene.next = scene.next.min(scene.health.received(scene.now));
    }
    assert_eq!(
        scene.lives(),
        [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Dead, StateChangeReason::WindowClosed)
        ]
    );
    assert!((20_000..=20_110).contains(&(scene.seen[1].0 - ping)), "{:?}", scene.seen);
}

#[test]
fn closed_window_whose_probes_are_not_answered_is_dead_after_the_third() {
    let (mut scene, _) = closed_window();
    scene.run(ms(1000));
    let from = scene.at();
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(10_000));
    let (at, state, reason) = *scene.seen.last().unwrap();
    assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NothingArrives));
    assert!((2000..=3200).contains(&(at - from)), "{}", at - from);
}

#[test]
fn upload_that_makes_progress_is_not_a_stopped_process() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    // The PING waits behind the upload.
    (scene.answers, scene.uploads) = (false, true);
    scene.run(ms(60_000));
    assert_eq!(scene.lives(), [(ConnectionState::Suspect, StateChangeReason::PingLate)]);
    assert_eq!(scene.fails_unsafe_requests, []);
    // The upload stalls.
    scene.uploads = false;
    let from = scene.at();
    scene.run(ms(30_000));
    let drains = scene.seen[1];
    assert_eq!(
        (drains.1, drains.2),
        (ConnectionState::Draining, StateChangeReason::ProcessStopped)
    );
    assert!((4900..=5210).contains(&(drains.0 - from)), "{}", drains.0 - from);
}

#[test]
fn stopped_process_fails_unsafe_requests_two_seconds_after_it_drains() {
    for goaway in [false, true] {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        if goaway {
            scene.health.drain();
        }
        scene.answers = false;
        let ping = pinged(&mut scene);
        scene.run(ms(15_000));
        let [(at, true)] = scene.fails_unsafe_requests[..] else {
            panic!("{:?}", scene.fails_unsafe_requests)
        };
        assert!((7000..=7110).contains(&(at - ping)), "{} after the PING", at - ping);
        assert_eq!(scene.health.state, ConnectionState::Draining);
        scene.health.pong(scene.now);
        assert!(!scene.health.findings().fails_unsafe_requests, "it goes on");
    }
}

#[test]
fn lost_path_with_pinned_streams_is_unresponsive_until_20_s_have_passed() {
    for (inbound, outbound, reason) in [
        (false, false, StateChangeReason::NothingArrives),
        (false, true, StateChangeReason::NothingArrives),
    ] {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        scene.pinned = true;
        (scene.inbound, scene.outbound) = (inbound, outbound);
        let ping = pinged(&mut scene);
        scene.run(ms(30_000));
        let expected = [
            (ConnectionState::Suspect, StateChangeReason::PingLate),
            (ConnectionState::Unresponsive, reason),
            (ConnectionState::Dead, reason),
        ];
        assert_eq!(scene.lives(), expected);
        assert!((2000..=2110).contains(&(scene.seen[1].0 - ping)), "{:?}", scene.seen);
        assert!((20_000..=20_110).contains(&(scene.seen[2].0 - ping)), "{:?}", scene.seen);
        assert_eq!(
            scene.fails_unsafe_requests,
            [(scene.seen[1].0, true)],
            "writes end with the path"
        );
    }
}

#[test]
fn unresponsive_connection_drains_on_a_pong_and_is_dead_without_pinned_streams() {
    let lost = || {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        scene.pinned = true;
        (scene.inbound, scene.outbound) = (false, false);
        pinged(&mut scene);
        scene.run(ms(10_000));
        assert_eq!(scene.health.state, ConnectionState::Unresponsive);
        scene
    };
    let mut scene = lost();
    (scene.inbound, scene.outbound) = (true, true);
    assert_eq!(
        scene.health.pong(scene.now).1,
        Some((ConnectionState::Draining, StateChangeReason::Pong))
    );
    assert_eq!(scene.health.findings(), ConnectionFindings::default());
    scene.next = scene.now;
    scene.run(ms(60_000));
    assert_eq!(
        scene.health.state,
        ConnectionState::Draining,
        "it takes nothing new, and what is left goes on"
    );

    let mut scene = lost();
    let from = scene.at();
    scene.pinned = false;
    scene.run(ms(10_000));
    let (at, state, reason) = *scene.seen.last().unwrap();
    assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NothingArrives));
    assert!(at - from <= 110, "{}", at - from);
}

/// The path of a draining connection is lost again.
#[test]
fn draining_connection_with_pinned_streams_is_unresponsive_too() {
    let mut scene = Scene::new();
    scene.health.drain();
    scene.run(ms(1500));
    scene.pinned = true;
    (scene.inbound, scene.outbound) = (false, false);
    pinged(&mut scene);
    scene.run(ms(3000));
    assert_eq!(scene.lives(), [(ConnectionState::Unresponsive, StateChangeReason::NothingArrives)]);
}

#[test]
fn stopped_process_with_pinned_streams_waits_for_the_longer_of_20_s_and_the_limit() {
    for (limit, dead) in [(5_000, 20_000), (40_000, 40_000)] {
        let mut scene = Scene::new();
        scene.health.limits.tunnel_dead_after = ms(limit);
        scene.run(ms(1500));
        (scene.pinned, scene.answers) = (true, false);
        let ping = pinged(&mut scene);
        scene.run(ms(60_000));
        let (at, state, reason) = *scene.seen.last().unwrap();
        assert_eq!((state, reason), (ConnectionState::Dead, StateChangeReason::NoFrames));
        assert!((dead..=dead + 110).contains(&(at - ping)), "{limit}: {}", at - ping);
    }
}

#[test]
fn ping_outstanding_for_500_ms_is_unanswered() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    let ping = pinged(&mut scene);
    scene.run(ms(4000));
    let [(at, true)] = scene.unanswered[..] else { panic!("{:?}", scene.unanswered) };
    assert!((500..=610).contains(&(at - ping)), "{}", at - ping);
    scene.health.pong(scene.now);
    assert!(!scene.health.findings().ping_unanswered);
}

#[test]
fn checks_that_are_always_late_delay_verdicts_once() {
    // A lost path, and one on which only packets to the peer are lost.
    for talks in [false, true] {
        let mut scene = Scene::new();
        scene.lag = ms(100);
        scene.run(ms(1500));
        (scene.inbound, scene.outbound) = (false, false);
        let ping = pinged(&mut scene);
        while scene.at() < ping + 10_000 && scene.health.state != ConnectionState::Dead {
            scene.run(ms(20));
            if talks {
                scene.last_segment = scene.now;
                scene.next = scene.next.min(scene.health.received(scene.now));
            }
        }
        let lives: Vec<_> = scene.lives().into_iter().map(|(state, _)| state).collect();
        assert_eq!(lives, [ConnectionState::Suspect, ConnectionState::Dead], "talks: {talks}");
        let dead = scene.seen[1].0 - ping;
        assert!((2000..=2300).contains(&dead), "talks: {talks}: dead {dead} ms after the PING");
    }
}

#[test]
fn late_check_withholds_verdicts_once_for_each_ping() {
    let mut scene = Scene::new();
    for _ in 0..2 {
        scene.run(ms(1500));
        scene.answers = false;
        pinged(&mut scene);
        // The machine is paused: the kernel counts the time, and no packet has arrived.
        scene.now += ms(10_000);
        let evidence = Evidence {
            tcp: Some(TcpInfo {
                last_ack_recv: ms(10_000),
                last_data_recv: ms(10_000),
                unacked: 1,
                ..TcpInfo::default()
            }),
            waiting_since: None,
            pinned: false,
        };
        let decision = scene.health.check(evidence, scene.now);
        assert_eq!((decision.change, scene.health.findings().path_unresponsive), (None, false));
        // Packets that waited in the network arrive.
        scene.health.pong(scene.now + ms(200));
        assert_eq!(scene.health.state, ConnectionState::Live);
        scene.answers = true;
        scene.now += ms(200);
        scene.next = scene.now;
    }
}

#[test]
fn drain_takes_precedence_over_a_pong() {
    let mut scene = Scene::new();
    scene.health.drain();
    scene.run(ms(5000));
    assert_eq!(scene.health.state, ConnectionState::Draining);
    assert_eq!(scene.seen, []);
}
