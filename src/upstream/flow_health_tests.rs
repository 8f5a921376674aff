use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Checks a flow for ten minutes, whenever a check is due. `kernel` returns the TCP statistics for the
/// time since the start and the number of requested probes; received segments that it does not count
/// are pure acknowledgements. Returns when and why the flow was dead.
fn death_of(
    rules: &FlowThresholds,
    wrote_at: Option<Duration>,
    kernel: impl Fn(Duration, u32) -> TcpInfo,
) -> Option<(Duration, FlowDeath)> {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let (mut at, mut probes, mut wrote) = (Duration::ZERO, 0, wrote_at);
    let (mut came, mut segments_in) = (Duration::ZERO, 0);
    while at < Duration::from_secs(600) {
        let mut info = kernel(at, probes);
        let latest = at.saturating_sub(info.last_ack_recv);
        if latest > came {
            (came, segments_in) = (latest, segments_in + 1);
        }
        if info.segments_in == 0 {
            info.segments_in = segments_in;
        }
        match health.check(&info, rules, start + at) {
            FlowDecision::Dead(death) => return Some((at, death)),
            FlowDecision::CheckAgain { after, probe } => {
                assert!(after >= 20 * MS, "a check every {after:?} is a busy loop");
                probes += u32::from(probe);
                at += after;
                if let Some(written) = wrote.take_if(|written| *written <= at) {
                    at = health.record_write(start + written) - start;
                }
            }
        }
    }
    None
}

/// No bytes wait, and the last segment arrived this long ago.
fn quiet(silent: Duration) -> TcpInfo {
    TcpInfo {
        last_ack_recv: silent,
        last_data_recv: Duration::from_secs(3600),
        bytes_acked: 7,
        send_mss: 1400,
        send_window: Some(64_000),
        ..TcpInfo::default()
    }
}

/// The kernel's keepalives, one a second, and the requested ones.
fn keepalives(silent: Duration, asked: u32) -> u8 {
    (silent.as_secs() as u32 + asked).min(255) as u8
}

#[test]
fn idle_flow_with_answered_keepalives_is_alive() {
    let answered = |at: Duration, _| quiet(Duration::from_millis(at.as_millis() as u64 % 1001));
    assert_eq!(death_of(&SERVER, None, answered), None);
}

#[test]
fn flow_with_one_lost_keepalive_is_alive() {
    // One of three in a row is answered.
    let lossy = |at: Duration, asked: u32| {
        let silent = Duration::from_millis(at.as_millis() as u64 % 1500);
        TcpInfo { probes: keepalives(silent, asked % 3), ..quiet(silent) }
    };
    assert_eq!(death_of(&SERVER, None, lossy), None);
}

#[test]
fn idle_flow_with_unanswered_keepalives_is_dead_within_3_s() {
    let lost = |at, asked| TcpInfo { probes: keepalives(at, asked), ..quiet(at) };
    let (at, death) = death_of(&SERVER, None, lost).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert_eq!(at, 2700 * MS);
    let (at, _) = death_of(&LOSSY_SERVER, None, lost).unwrap();
    assert_eq!(at, 4500 * MS);
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, lost).unwrap();
    assert_eq!(at, 2150 * MS);
    // Silence alone is not enough: the probes must have been sent.
    let few = |at, _| TcpInfo { probes: 7, ..quiet(at) };
    assert_eq!(death_of(&SERVER, None, few), None);
    // Idle clients are left to the kernel's keepalives.
    assert_eq!(death_of(&CLIENT, None, lost), None);
}

#[test]
fn flow_with_unacknowledged_bytes_in_flight_is_dead_after_2250_ms() {
    // Written at 1.1 s, retransmitted every 200 ms.
    let wrote = 1100 * MS;
    let kernel = |at: Duration, _| {
        if at < wrote {
            return quiet(at.min(SECOND));
        }
        let lost = at.saturating_sub(wrote);
        TcpInfo { unacked: 1, retransmits: (lost.as_millis() / 200).min(255) as u8, ..quiet(at) }
    };
    let (at, death) = death_of(&SERVER, Some(wrote), kernel).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    let after = at.saturating_sub(wrote);
    assert!((2250 * MS..2400 * MS).contains(&after), "{after:?}");
    let (at, _) = death_of(&CLIENT, Some(wrote), kernel).unwrap();
    assert!(at >= 30 * SECOND, "{at:?}");
}

#[test]
fn flow_with_doubling_retransmissions_is_dead_after_the_fourth() {
    let doubling = |at: Duration, _| {
        let gone = [200, 600, 1400, 3000, 6200].map(|ms| at > ms * MS);
        let retransmits = gone.iter().filter(|gone| **gone).count() as u8;
        TcpInfo { unacked: 40, retransmits, ..quiet(at) }
    };
    let (at, _) = death_of(&SERVER, None, doubling).unwrap();
    assert!((3000 * MS..3150 * MS).contains(&at), "{at:?}");
    // The third was sent and not answered in time.
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, doubling).unwrap();
    assert!((2400 * MS..2500 * MS).contains(&at), "{at:?}");
}

#[test]
fn flow_with_continued_writes_is_dead_without_retransmissions() {
    // Each write delays the next retransmission.
    let writes = |at: Duration, _| TcpInfo {
        unacked: 1 + at.as_millis() as u32 / 300,
        data_segments_sent: 1 + at.as_millis() as u32 / 300,
        ..quiet(at)
    };
    let (at, _) = death_of(&SERVER, None, writes).unwrap();
    assert!((2250 * MS..2400 * MS).contains(&at), "{at:?}");
}

#[test]
fn flow_with_a_lost_outbound_direction_is_dead() {
    // Segments from the peer arrive, those to it do not.
    let outbound = |at: Duration, _| TcpInfo {
        unacked: 3,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        last_data_recv: 10 * MS,
        ..quiet(10 * MS)
    };
    let (at, _) = death_of(&SERVER, None, outbound).unwrap();
    assert!(at < 3 * SECOND, "{at:?}");
}

#[test]
fn flow_with_acknowledgements_is_alive() {
    let acked = |at: Duration, _| TcpInfo {
        unacked: 9,
        retransmits: 5,
        bytes_acked: (at.as_millis() / 2100) as u64,
        ..quiet(Duration::ZERO)
    };
    assert_eq!(death_of(&SERVER, None, acked), None);
}

#[test]
fn closed_window_with_answered_probes_is_alive() {
    // Answers arrive at growing intervals, up to two minutes.
    let full = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: 1,
        ..quiet(at.min(120 * SECOND))
    };
    assert_eq!(death_of(&SERVER, None, full), None);
    let blind = |at, asked| TcpInfo { send_window: None, ..full(at, asked) };
    assert_eq!(death_of(&SERVER, None, blind), None);
    // A window smaller than a segment is closed.
    let narrow = |at, asked| TcpInfo { send_window: Some(700), ..full(at, asked) };
    assert_eq!(death_of(&SERVER, None, narrow), None);
    let lost = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: at.as_secs().min(255) as u8,
        ..quiet(at)
    };
    // The last probe has time to be answered.
    for (rules, probes) in
        [(SERVER, 4), (LOSSY_SERVER, 6), (CORRELATED_LOSS_SERVER, 2), (CLIENT, 30)]
    {
        let (at, death) = death_of(&rules, None, lost).unwrap();
        assert_eq!(death, FlowDeath::Unacknowledged);
        let from = probes * SECOND + LAST_PROBE_TIMEOUT;
        assert!((from..from + 250 * MS).contains(&at), "{at:?}, {probes} probes");
    }
    // Linux answers two a second: of the first, at 0.2 and 0.6 s, only one.
    let early = |at: Duration, _| {
        let sent = [200, 600, 1400].iter().filter(|ms| at > **ms * MS).count() as u8;
        TcpInfo { probes: sent + at.saturating_sub(1400 * MS).as_secs() as u8, ..lost(at, 0) }
    };
    let (at, _) = death_of(&SERVER, None, early).unwrap();
    assert!((4 * SECOND..5 * SECOND).contains(&at), "{at:?}");
}

#[test]
fn closed_window_tolerates_three_lost_probes_and_counts_refuted_suspicions() {
    let start = Instant::now();
    // One probe is sent each second; one of several is answered.
    let answered = |each: u128, at: Duration| {
        let silent = Duration::from_millis((at.as_millis() % (each * 1000 + 1)) as u64);
        TcpInfo {
            notsent_bytes: 5000,
            send_window: Some(0),
            probes: silent.as_secs() as u8,
            segments_in: (at.as_millis() / (each * 1000 + 1)) as u32,
            ..quiet(silent)
        }
    };
    let lossy = |at| answered(4, at);
    assert_eq!(death_of(&SERVER, None, |at, _| lossy(at)), None);
    let mut health = FlowHealth::new(start);
    let (mut at, mut refuted) = (Duration::ZERO, 0);
    while at < 4001 * MS * 10 {
        let FlowDecision::CheckAgain { after, probe } =
            health.check(&lossy(at), &SERVER, start + at)
        else {
            panic!("dead at {at:?}");
        };
        assert!(!probe, "the kernel would not send it");
        refuted += u32::from(health.take_refuted_suspicion());
        at += after;
    }
    assert!((9..=10).contains(&refuted), "{refuted}");
    // Answers each second cause no suspicion.
    let mut health = FlowHealth::new(start);
    for step in 0..600 {
        let at = step * 100 * MS;
        health.check(&answered(1, at), &SERVER, start + at);
        assert!(!health.take_refuted_suspicion(), "{at:?}");
    }
}

#[test]
fn flow_whose_unsent_bytes_netfilter_drops_is_dead() {
    let probes = |at: Duration| [200, 600, 1400, 3000].iter().filter(|ms| at > **ms * MS).count();
    let dropped =
        |at: Duration, _| TcpInfo { notsent_bytes: 50, probes: probes(at) as u8, ..quiet(at) };
    let (at, death) = death_of(&SERVER, None, dropped).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    assert!((2250 * MS..2400 * MS).contains(&at), "{at:?}");
    // A kernel that does not report the window needs one more probe.
    let blind = |at, asked| TcpInfo { send_window: None, ..dropped(at, asked) };
    let (at, _) = death_of(&SERVER, None, blind).unwrap();
    assert!((3000 * MS..3300 * MS).contains(&at), "{at:?}");
}

#[test]
fn late_check_gives_no_verdict() {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let lost = TcpInfo { probes: 30, ..quiet(30 * SECOND) };
    assert!(matches!(
        health.check(&quiet(Duration::ZERO), &SERVER, start),
        FlowDecision::CheckAgain { .. }
    ));
    let late = start + 30 * SECOND;
    assert_eq!(
        health.check(&lost, &SERVER, late),
        FlowDecision::CheckAgain { after: VERDICT_PAUSE, probe: false }
    );
    assert_eq!(
        health.check(&lost, &SERVER, late + VERDICT_PAUSE),
        FlowDecision::Dead(FlowDeath::Unanswered)
    );
}

#[test]
fn flow_whose_checks_are_always_late_is_dead_in_the_end() {
    let late = LATE_CHECK + 50 * MS;
    // No bytes wait; or bytes wait, and the peer sends or is silent.
    let idle = |at: Duration| TcpInfo { probes: (at.as_millis() / 100) as u8, ..quiet(at) };
    let waits = |at: Duration| TcpInfo {
        unacked: 1,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        ..quiet(at)
    };
    let talks = |at: Duration| TcpInfo {
        segments_in: (at.as_millis() / 10) as u32,
        ..TcpInfo { last_data_recv: Duration::ZERO, last_ack_recv: Duration::ZERO, ..waits(at) }
    };
    let kernels: [(&dyn Fn(Duration) -> TcpInfo, FlowDeath); 3] = [
        (&idle, FlowDeath::Unanswered),
        (&waits, FlowDeath::Unacknowledged),
        (&talks, FlowDeath::Unacknowledged),
    ];
    for (case, (kernel, death)) in kernels.into_iter().enumerate() {
        let start = Instant::now();
        let mut health = FlowHealth::new(start);
        let mut at = Duration::ZERO;
        loop {
            match health.check(&kernel(at), &SERVER, start + at) {
                FlowDecision::Dead(found) => break assert_eq!(found, death, "case {case}"),
                FlowDecision::CheckAgain { after, .. } => at += after + late,
            }
            assert!(at < 10 * SECOND, "case {case} is never noticed");
        }
        assert!(at < 2 * SERVER.idle_after.unwrap(), "case {case}: {at:?}");
    }
}

#[test]
fn late_check_withholds_verdicts_once_for_each_silence() {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let mut at = Duration::ZERO;
    for _ in 0..3 {
        let answered = TcpInfo { segments_in: 1 + at.as_secs() as u32, ..quiet(Duration::ZERO) };
        assert!(matches!(
            health.check(&answered, &SERVER, start + at),
            FlowDecision::CheckAgain { .. }
        ));
        at += 30 * SECOND;
        let lost = TcpInfo { probes: 30, ..quiet(30 * SECOND) };
        let decision = health.check(&lost, &SERVER, start + at);
        assert_eq!(
            decision,
            FlowDecision::CheckAgain { after: VERDICT_PAUSE, probe: false },
            "at {at:?}"
        );
        at += VERDICT_PAUSE;
    }
}

#[test]
fn tunnel_survives_silence_shorter_than_its_limit() {
    let rules = FlowThresholds::tunnel(20 * SECOND);
    let idle = |at: Duration, asked: u32| {
        assert_eq!(asked, 0, "the kernel's own keepalives are enough");
        TcpInfo { probes: keepalives(at, asked), ..quiet(at) }
    };
    let waits = |at: Duration, _| TcpInfo {
        unacked: 1,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        ..quiet(at)
    };
    let (at, death) = death_of(&rules, None, idle).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert!((20 * SECOND..20 * SECOND + 150 * MS).contains(&at), "{at:?}");
    let (at, death) = death_of(&rules, None, waits).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    assert!((20 * SECOND..20 * SECOND + 150 * MS).contains(&at), "{at:?}");
    // A limit too short for the kernel's keepalives: more are requested.
    let lost = |at, asked| TcpInfo { probes: keepalives(at, asked), ..quiet(at) };
    let (at, _) = death_of(&FlowThresholds::tunnel(4 * SECOND), None, lost).unwrap();
    assert!((4 * SECOND..4 * SECOND + 150 * MS).contains(&at), "{at:?}");
    let (at, _) = death_of(&FlowThresholds::tunnel(SECOND), None, lost).unwrap();
    assert_eq!(at, 2700 * MS, "no sooner than any other flow");
}

#[test]
fn late_answer_refutes_a_suspicion_once() {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let mut is_refuted_after = |silent: Duration, at: Duration| {
        let segments_in = at.saturating_sub(silent).as_millis() as u32;
        let _ = health.check(&TcpInfo { segments_in, ..quiet(silent) }, &SERVER, start + at);
        health.take_refuted_suspicion()
    };
    assert!(!is_refuted_after(Duration::ZERO, Duration::ZERO));
    assert!(!is_refuted_after(1220 * MS, 1220 * MS));
    assert!(is_refuted_after(10 * MS, 1380 * MS));
    assert!(!is_refuted_after(900 * MS, 2000 * MS));
}

#[test]
fn active_flow_is_checked_at_most_every_100_ms() {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let FlowDecision::CheckAgain { after, .. } =
        health.check(&quiet(Duration::ZERO), &SERVER, start)
    else {
        panic!("dead at once");
    };
    assert!(after > SECOND);
    let now = start + 10 * MS;
    assert_eq!(health.record_write(now), now + PENDING_CHECK_INTERVAL);
    // A thousand more writes do not change that.
    assert_eq!(health.record_write(now + 100 * MS), now + PENDING_CHECK_INTERVAL);
}

/// A server whose segments arrive, but which gets none, retransmits at growing intervals.
#[test]
fn retransmitted_data_is_no_evidence_of_life() {
    let again = [100, 500, 1300, 2900, 6100].map(|ms| ms * MS);
    let kernel = |at: Duration, asked: u32| {
        let repeats = again.iter().filter(|time| **time <= at).count() as u32;
        let latest = again.into_iter().rfind(|time| *time <= at).unwrap_or_default();
        // The kernel sends no keepalive within a second of any segment.
        let probes = if at.saturating_sub(latest) >= SECOND {
            1 + asked.min((at.saturating_sub(latest + SECOND).as_millis() / 100) as u32)
        } else {
            0
        };
        TcpInfo {
            last_data_recv: at,
            last_ack_recv: at.saturating_sub(latest),
            segments_in: 100 + repeats,
            data_segments_in: 50 + repeats,
            segments_out: 100 + repeats + probes,
            probes: probes as u8,
            ..quiet(at)
        }
    };
    let (at, death) = death_of(&SERVER, None, kernel).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert!((2700 * MS..3000 * MS).contains(&at), "{at:?}");
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, kernel).unwrap();
    assert!((2150 * MS..2600 * MS).contains(&at), "{at:?}");
    // Segments out of order are new, and so is a pure acknowledgement.
    for fresh in [|n: u32| (0, n), |n: u32| (n, 0)] {
        let lives = |at: Duration, asked: u32| {
            let (acks, out_of_order) = fresh(at.as_secs() as u32);
            let info = kernel(at, asked);
            let last_ack_recv = Duration::from_millis(at.as_millis() as u64 % 1000);
            TcpInfo { segments_in: info.segments_in + acks, out_of_order, last_ack_recv, ..info }
        };
        assert_eq!(death_of(&SERVER, None, lives), None);
    }
}

#[test]
fn correlated_loss_needs_three_stalled_flows_and_a_quarter_of_all() {
    let now = Instant::now();
    let struck = |stalled: usize, flows: usize| {
        let mut struck = CorrelatedLoss::default();
        (0..stalled).for_each(|_| struck.record_change(false, true));
        struck.is_path_broken(flows, now)
    };
    let table = [
        (1, 1, false),
        (2, 2, false),
        (3, 3, true),
        (3, 12, true),
        (3, 13, false),
        (100, 10_000, false),
    ];
    for (stalled, flows, expected) in table {
        assert_eq!(struck(stalled, flows), expected, "{stalled} of {flows}");
    }
    // Dead flows do not count as stalled, but the finding holds for a while.
    let mut struck = CorrelatedLoss::default();
    (0..4).for_each(|_| struck.record_change(false, true));
    assert!(struck.is_path_broken(4, now));
    (0..4).for_each(|_| struck.record_change(true, false));
    assert!(struck.is_path_broken(1, now + 900 * MS));
    assert!(!struck.is_path_broken(1, now + SECOND));
}

/// At 5 % packet loss each way the peer answers keepalives at most twice a second. Of a hundred idle
/// flows in an hour none is dead once the loss is known, and almost none before.
#[test]
fn idle_flows_on_a_lossy_path_stay_alive() {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut deaths = |rules: &FlowThresholds, known: bool| {
        let (mut deaths, mut refuted, mut struck) = (0, 0, 0);
        for _ in 0..100 {
            let start = Instant::now();
            let mut health = FlowHealth::new(start);
            let mut peer = Lossy { rng: rng.fork(), ..Lossy::default() };
            let mut at = Duration::ZERO;
            while at < 3600 * SECOND {
                // The flow table checks at multiples of its tick.
                at = 50 * MS * at.as_millis().div_ceil(50) as u32;
                let info = peer.until(at);
                match health.check(&info, rules, start + at) {
                    FlowDecision::Dead(_) => {
                        deaths += 1;
                        break;
                    }
                    FlowDecision::CheckAgain { after, probe } => {
                        if probe {
                            peer.keepalive(at);
                        }
                        at += after;
                    }
                }
                refuted += u32::from(health.take_refuted_suspicion());
                struck += u32::from(health.is_stalled());
                if !known && refuted >= LOSSY_AFTER {
                    return (deaths, refuted, struck);
                }
            }
        }
        (deaths, refuted, struck)
    };
    assert_eq!(deaths(&LOSSY_SERVER, true).0, 0);
    let early: u32 = (0..1000).map(|_| deaths(&SERVER, false).0).sum();
    assert!(early <= 3, "{early} of a thousand times it was too early");
}

/// An idle peer behind a lossy path, and the local kernel's keepalives.
#[derive(Default)]
struct Lossy {
    rng: fastrand::Rng,
    last_segment: Duration,
    answered: Option<Duration>,
    probed: Duration,
    probes: u8,
    segments: u32,
}

impl Lossy {
    fn is_lost(&mut self) -> bool {
        self.rng.u8(..20) == 0
    }

    fn keepalive(&mut self, at: Duration) {
        self.probes = self.probes.saturating_add(1);
        self.probed = at;
        if self.is_lost() || self.answered.is_some_and(|before| at < before + 500 * MS) {
            return;
        }
        self.answered = Some(at);
        if !self.is_lost() {
            (self.last_segment, self.probes, self.segments) = (at, 0, self.segments + 1);
        }
    }

    /// Sends the kernel's keepalives until then; returns its statistics.
    fn until(&mut self, at: Duration) -> TcpInfo {
        while self.last_segment.max(self.probed) + SECOND <= at {
            let next = self.last_segment.max(self.probed) + SECOND;
            self.keepalive(next);
        }
        TcpInfo {
            probes: self.probes,
            segments_in: self.segments,
            ..quiet(at.saturating_sub(self.last_segment))
        }
    }
}
