//! The judge of a connection, driven through scripted time: what it decides, and when.

use std::time::Duration;

use tokio::time::Instant;

use super::*;

const RTT: Duration = Duration::from_millis(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[allow(clippy::struct_excessive_bools)] // what may go wrong, each by itself
/// A connection, its peer, and a clock that moves from look to look.
struct Scene {
    health: ConnectionHealth,
    start: Instant,
    now: Instant,
    /// When it wants to look.
    next: Instant,
    /// The peer's process answers PINGs.
    answers: bool,
    /// Its packets reach us.
    inbound: bool,
    /// Ours reach it.
    outbound: bool,
    last_segment: Instant,
    acked: u64,
    pending: bool,
    waiting_since: Option<Instant>,
    /// How late our timers fire.
    lag: Duration,
    seen: Vec<(u64, Life, Reason)>,
    /// When it became dark, or no longer was.
    dark: Vec<(u64, bool)>,
    pings: Vec<u64>,
}

impl Scene {
    fn new() -> Self {
        let start = Instant::now();
        let limits =
            Thresholds { ping_interval: ms(1000), suspect_after: None, dead_after: ms(2000) };
        Self {
            health: ConnectionHealth::new(limits, RTT, start),
            start,
            now: start,
            next: start + ms(1000),
            answers: true,
            inbound: true,
            outbound: true,
            last_segment: start,
            acked: 0,
            pending: false,
            waiting_since: None,
            lag: Duration::ZERO,
            seen: Vec::new(),
            dark: Vec::new(),
            pings: Vec::new(),
        }
    }

    fn at(&self) -> u64 {
        self.now.duration_since(self.start).as_millis() as u64
    }

    fn evidence(&mut self) -> Evidence {
        // Keepalives are answered by a kernel that is reached, within a second.
        if self.inbound && self.outbound {
            self.last_segment = self.last_segment.max(self.now.checked_sub(ms(900)).unwrap());
            self.pending = false;
        }
        let silent = self.now.duration_since(self.last_segment);
        Evidence {
            tcp: Some(TcpInfo {
                last_ack_recv: silent,
                last_data_recv: silent,
                bytes_acked: self.acked,
                unacked: u32::from(self.pending),
                ..TcpInfo::default()
            }),
            waiting_since: self.waiting_since,
        }
    }

    /// Runs for so long; PONGs come back where they can.
    fn run(&mut self, length: Duration) -> &mut Self {
        let end = self.now + length;
        if let Some(since) = self.waiting_since {
            self.next = self.next.min(since + HEAD_WAIT);
        }
        while self.next + self.lag < end {
            self.now = self.next + self.lag;
            let evidence = self.evidence();
            let decision = self.health.look(evidence, self.now);
            if let Some((life, reason)) = decision.change {
                self.seen.push((self.at(), life, reason));
            }
            if self.health.is_dark() != self.dark.last().is_some_and(|(_, dark)| *dark) {
                self.dark.push((self.at(), self.health.is_dark()));
            }
            self.next = decision.wake_at;
            if decision.ping {
                self.pings.push(self.at());
                self.pending = true;
                if self.outbound && self.inbound {
                    self.acked += 40;
                    self.pending = false;
                    self.last_segment = self.now;
                    if self.answers {
                        self.now += RTT;
                        let (_, change) = self.health.pong(self.now);
                        if let Some((life, reason)) = change {
                            self.seen.push((self.at(), life, reason));
                        }
                        self.next = self.now;
                    }
                }
            }
            if self.health.life() == Life::Dead {
                return self;
            }
        }
        self.now = end;
        self
    }

    fn lives(&self) -> Vec<(Life, Reason)> {
        self.seen.iter().map(|(_, life, reason)| (*life, *reason)).collect()
    }
}

#[test]
fn a_quiet_connection_is_pinged_once_an_interval_and_stays_live() {
    let mut scene = Scene::new();
    scene.run(ms(60_000));
    assert_eq!(scene.seen, []);
    assert!((58..=60).contains(&scene.pings.len()), "{:?}", scene.pings.len());
}

#[test]
fn a_dead_path_is_suspected_soon_and_dead_two_seconds_after_its_ping() {
    for (inbound, outbound, reason) in
        [(false, false, Reason::NothingArrives), (false, true, Reason::NothingArrives)]
    {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        (scene.inbound, scene.outbound) = (inbound, outbound);
        scene.run(ms(10_000));
        let ping = *scene.pings.last().unwrap();
        assert_eq!(scene.lives(), [(Life::Suspect, Reason::PingLate), (Life::Dead, reason)]);
        let (suspected, dead) = (scene.seen[0].0 - ping, scene.seen[1].0 - ping);
        assert!((100..=110).contains(&suspected), "{suspected}");
        assert!((2000..=2100).contains(&dead), "{dead}");
    }
}

#[test]
fn what_we_send_is_lost_while_the_peer_goes_on_talking() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.outbound = false;
    // Events keep arriving: without the outbound evidence this would look alive for ever.
    for _ in 0..300 {
        scene.run(ms(20));
        scene.last_segment = scene.now;
        scene.next = scene.next.min(scene.health.heard(scene.now));
        if scene.health.life() == Life::Dead {
            break;
        }
    }
    assert_eq!(
        scene.lives(),
        [(Life::Suspect, Reason::PingLate), (Life::Dead, Reason::NothingAcknowledged)]
    );
}

#[test]
fn a_stopped_process_drains_after_5_s_and_is_dead_after_20() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(30_000));
    let ping = *scene.pings.last().unwrap();
    assert_eq!(
        scene.lives(),
        [
            (Life::Suspect, Reason::PingLate),
            (Life::Draining, Reason::ProcessStopped),
            (Life::Dead, Reason::NoFrames)
        ]
    );
    assert!((5000..=5110).contains(&(scene.seen[1].0 - ping)), "{:?}", scene.seen);
    assert!((20_000..=20_110).contains(&(scene.seen[2].0 - ping)), "{:?}", scene.seen);
}

#[test]
fn what_shows_no_life_for_a_second_is_dark() {
    for (inbound, outbound) in [(false, false), (false, true), (true, false)] {
        let mut scene = Scene::new();
        scene.run(ms(1500));
        (scene.inbound, scene.outbound) = (inbound, outbound);
        scene.run(ms(10_000));
        let ping = *scene.pings.last().unwrap();
        let [(at, true)] = scene.dark[..] else { panic!("{:?}", scene.dark) };
        assert!((1000..=1110).contains(&(at - ping)), "{at} after the PING at {ping}");
    }
    // Its kernel answers.
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(30_000));
    assert_eq!(scene.dark, []);
}

#[test]
fn what_is_dark_is_so_until_it_answers() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(1900));
    assert_eq!(scene.dark.len(), 1, "{:?}", scene.dark);
    (scene.inbound, scene.outbound) = (true, true);
    scene.health.pong(scene.now);
    scene.next = scene.now;
    scene.run(ms(5000));
    assert_eq!(scene.dark.len(), 2, "{:?}", scene.dark);
    // A look that comes late says nothing.
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    scene.lag = ms(1500);
    scene.run(ms(4000));
    assert_eq!(scene.dark, []);
}

#[test]
fn a_pong_clears_a_suspicion() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    scene.answers = false;
    scene.run(ms(900));
    assert_eq!(scene.health.life(), Life::Suspect);
    let (rtt, change) = scene.health.pong(scene.now);
    assert!(rtt.unwrap() > ms(100));
    assert_eq!(change, Some((Life::Live, Reason::Pong)));
}

#[test]
fn a_late_pong_does_not_hide_the_next_death() {
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
    assert_eq!(scene.lives().first(), Some(&(Life::Suspect, Reason::PingLate)));
    assert!(scene.seen[0].0 - ping <= 600, "{:?} after the PING at {ping}", scene.seen);
}

#[test]
fn a_request_that_waits_makes_it_ask_after_100_ms() {
    let mut scene = Scene::new();
    scene.run(ms(300));
    let since = scene.now;
    scene.waiting_since = Some(since);
    (scene.inbound, scene.outbound) = (false, false);
    scene.run(ms(400));
    assert_eq!(scene.pings, [400]);
    assert_eq!(scene.lives(), [(Life::Suspect, Reason::PingLate)]);
    assert!(scene.seen[0].0 <= 510, "suspected within 300 ms of the request: {:?}", scene.seen);
}

#[test]
fn a_slow_handler_is_never_suspected() {
    let mut scene = Scene::new();
    scene.waiting_since = Some(scene.now);
    scene.run(ms(15_000));
    assert_eq!(scene.seen, []);
}

#[test]
fn falling_silent_after_delivering_is_asked_about_after_400_ms() {
    let mut scene = Scene::new();
    scene.run(ms(100));
    scene.next = scene.health.heard(scene.now);
    assert_eq!(scene.next, scene.now + SILENCE);
    scene.run(ms(600));
    assert_eq!(scene.pings.first(), Some(&500));
}

#[test]
fn verdicts_of_a_process_that_was_not_scheduled_are_withheld() {
    let mut scene = Scene::new();
    scene.run(ms(1500));
    (scene.inbound, scene.outbound) = (false, false);
    // Every timer fires 3 s late: by the clock the PING is out for longer than `dead_after`.
    scene.lag = ms(3000);
    scene.run(ms(6100));
    assert_eq!(scene.seen, [], "the first look after a pause decides nothing");
    scene.lag = Duration::ZERO;
    scene.run(ms(3000));
    assert_eq!(scene.health.life(), Life::Dead, "and the next ones do");
}

#[test]
fn adaptive_suspicion_follows_rtt_and_its_variance() {
    let mut rtt = Rtt::default();
    assert_eq!(rtt.suspect_after(), SUSPECT_FLOOR);
    rtt.sample(ms(100));
    assert_eq!(rtt.suspect_after(), ms(600));
    for _ in 0..100 {
        rtt.sample(ms(100));
    }
    let settled = rtt.suspect_after();
    assert!(settled >= ms(400) && settled < ms(410), "{settled:?}");
}

#[test]
fn whoever_drains_has_the_last_word() {
    let mut scene = Scene::new();
    scene.health.drain();
    scene.run(ms(5000));
    assert_eq!(scene.health.life(), Life::Draining);
    assert_eq!(scene.seen, []);
}
