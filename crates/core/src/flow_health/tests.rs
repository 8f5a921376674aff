//! The health of a flow under scripted TCP statistics.

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Checks a flow for ten minutes, whenever a check is due. `kernel` returns the TCP statistics for the time
/// since the start and the number of requested probes. If it does not set `segments_in`, each newer
/// `last_ack_recv` counts as a pure acknowledgement. Returns when and why the flow was dead.
fn death_of(
    thresholds: &FlowThresholds,
    wrote_at: Option<Duration>,
    kernel: impl Fn(Duration, u32) -> TcpInfo,
) -> Option<(Duration, FlowDeath)> {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let (mut at, mut requested, mut write) = (Duration::ZERO, 0, wrote_at);
    let (mut last_segment, mut segments_in) = (Duration::ZERO, 0);
    while at < Duration::from_secs(600) {
        let mut info = kernel(at, requested);
        let received = at.saturating_sub(info.last_ack_recv);
        if received > last_segment {
            (last_segment, segments_in) = (received, segments_in + 1);
        }
        if info.segments_in == 0 {
            info.segments_in = segments_in;
        }
        match health.check(&info, thresholds, start + at) {
            FlowDecision::Dead(death) => return Some((at, death)),
            FlowDecision::CheckAgain { after, probe } => {
                assert!(after >= 20 * MS, "a check every {after:?} is a busy loop");
                requested += u32::from(probe);
                at += after;
                if let Some(written) = write.take_if(|written| *written <= at) {
                    at = health.record_write(start + written) - start;
                }
            }
        }
    }
    None
}

/// TCP statistics of a flow on which no bytes wait and the last segment arrived this long ago.
fn idle_for(silent: Duration) -> TcpInfo {
    TcpInfo {
        last_ack_recv: silent,
        last_data_recv: Duration::from_secs(3600),
        bytes_acked: 7,
        send_mss: 1400,
        send_window: Some(64_000),
        ..TcpInfo::default()
    }
}

/// Number of unanswered keepalives: the kernel's, one a second, and the requested ones.
fn keepalives(silent: Duration, requested: u32) -> u8 {
    (silent.as_secs() as u32 + requested).min(255) as u8
}

#[test]
fn idle_flow_with_answered_keepalives_is_alive() {
    let answered = |at: Duration, _| idle_for(Duration::from_millis(at.as_millis() as u64 % 1001));
    assert_eq!(death_of(&SERVER, None, answered), None);
}

#[test]
fn flow_with_one_lost_keepalive_is_alive() {
    // One of three in a row is answered.
    let lossy = |at: Duration, requested: u32| {
        let silent = Duration::from_millis(at.as_millis() as u64 % 1500);
        TcpInfo { probes: keepalives(silent, requested % 3), ..idle_for(silent) }
    };
    assert_eq!(death_of(&SERVER, None, lossy), None);
}

#[test]
fn idle_flow_with_unanswered_keepalives_is_dead_within_3_s() {
    let lost = |at, requested| TcpInfo { probes: keepalives(at, requested), ..idle_for(at) };
    let (at, death) = death_of(&SERVER, None, lost).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert_eq!(at, 2700 * MS);
    let (at, _) = death_of(&LOSSY_SERVER, None, lost).unwrap();
    assert_eq!(at, 4500 * MS);
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, lost).unwrap();
    assert_eq!(at, 2150 * MS);
    // Silence alone does not suffice: enough probes must have been sent.
    let few = |at, _| TcpInfo { probes: 7, ..idle_for(at) };
    assert_eq!(death_of(&SERVER, None, few), None);
    // Only the kernel's keepalives end the flow of an idle client.
    assert_eq!(death_of(&CLIENT, None, lost), None);
}

#[test]
fn flow_with_unacknowledged_bytes_in_flight_is_dead_after_2250_ms() {
    // Written at 1.1 s, retransmitted every 200 ms.
    let wrote_at = 1100 * MS;
    let kernel = |at: Duration, _| {
        if at < wrote_at {
            return idle_for(at.min(SECOND));
        }
        let retransmits = (at.saturating_sub(wrote_at).as_millis() / 200).min(255) as u8;
        TcpInfo { unacked: 1, retransmits, ..idle_for(at) }
    };
    let (at, death) = death_of(&SERVER, Some(wrote_at), kernel).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    let after = at.saturating_sub(wrote_at);
    assert!((2250 * MS..2400 * MS).contains(&after), "{after:?}");
    let (at, _) = death_of(&CLIENT, Some(wrote_at), kernel).unwrap();
    assert!(at >= 30 * SECOND, "{at:?}");
}

/// The path is lost right after a segment has arrived, and bytes are written at any time after that.
#[test]
fn write_before_the_end_of_a_silence_does_not_delay_its_verdict() {
    // A thin stream is retransmitted every 200 ms, six times, and then after growing pauses.
    let sent_at = [0, 200, 400, 600, 800, 1000, 1200, 1600, 2400, 4000];
    for wrote_at in (0..27).map(|step| step * 100 * MS + 50 * MS) {
        let kernel = |at: Duration, requested: u32| {
            let probes = keepalives(at.min(wrote_at), requested);
            let sent = sent_at.iter().filter(|ms| at >= wrote_at + **ms * MS).count() as u32;
            if sent == 0 {
                return TcpInfo { probes, segments_out: probes.into(), ..idle_for(at) };
            }
            TcpInfo {
                unacked: 1,
                retransmits: (sent - 1) as u8,
                data_segments_sent: sent,
                segments_out: u32::from(probes) + sent,
                ..idle_for(at)
            }
        };
        let (at, _) = death_of(&SERVER, Some(wrote_at), kernel).unwrap();
        assert!((2250 * MS..=2850 * MS).contains(&at), "written at {wrote_at:?}: dead at {at:?}");
    }
}

/// A peer that sends a segment every 600 ms is alive, although bytes wait for longer than `idle_after`.
#[test]
fn flow_whose_peer_sends_other_segments_is_alive_while_bytes_wait() {
    let kernel = |at: Duration, _| TcpInfo {
        unacked: 1,
        segments_out: (at.as_millis() / 200) as u32,
        ..idle_for(Duration::from_millis(at.as_millis() as u64 % 600))
    };
    assert_eq!(death_of(&SERVER, None, kernel), None);
}

#[test]
fn flow_with_doubling_retransmissions_is_dead_after_the_fourth() {
    let doubling = |at: Duration, _| {
        let sent_at = [200, 600, 1400, 3000, 6200];
        let retransmits = sent_at.iter().filter(|ms| at > **ms * MS).count() as u8;
        TcpInfo { unacked: 40, retransmits, ..idle_for(at) }
    };
    let (at, _) = death_of(&SERVER, None, doubling).unwrap();
    assert!((3000 * MS..3150 * MS).contains(&at), "{at:?}");
    // The third was not answered within LAST_PROBE_TIMEOUT.
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, doubling).unwrap();
    assert!((2400 * MS..2500 * MS).contains(&at), "{at:?}");
}

#[test]
fn flow_with_continued_writes_is_dead_without_retransmissions() {
    // Each write delays the next retransmission, so there is none.
    let writes = |at: Duration, _| TcpInfo {
        unacked: 1 + at.as_millis() as u32 / 300,
        data_segments_sent: 1 + at.as_millis() as u32 / 300,
        ..idle_for(at)
    };
    let (at, _) = death_of(&SERVER, None, writes).unwrap();
    assert!((2250 * MS..2400 * MS).contains(&at), "{at:?}");
}

/// A burst is lost at once, so it is no more evidence than one segment. Only what is sent later is.
#[test]
fn burst_counts_once_until_its_retransmissions_are_unanswered() {
    let burst = |pauses: &[u32], at: Duration| {
        let sent = pauses.iter().filter(|ms| at >= **ms * MS).count() as u32;
        TcpInfo {
            unacked: 12,
            retransmits: sent as u8,
            data_segments_sent: 40 + 12 + sent,
            ..idle_for(at)
        }
    };
    // The retransmissions, and when the flow is dead.
    let table: [(&[u32], u128); 4] = [
        // Three retransmissions are unanswered, the last of them for 0.85 s.
        (&[200, 600, 1_400, 2_400], 2_250),
        (&[200, 600, 1_400, 3_000], 2_250),
        // The third must have the time to be answered.
        (&[700, 1_700, 2_700, 3_700], 2_950),
        (&[700, 2_100, 4_900], 5_150),
    ];
    for (pauses, expected) in table {
        let wrote_at = 1_100 * MS;
        let kernel = |at: Duration, _| match at.checked_sub(wrote_at) {
            None => TcpInfo { data_segments_sent: 40, ..idle_for(at.min(SECOND)) },
            Some(since) => TcpInfo {
                // The peer was heard shortly before.
                last_ack_recv: since + 100 * MS,
                ..burst(pauses, since)
            },
        };
        let (at, _) = death_of(&SERVER, Some(wrote_at), kernel).unwrap();
        let after = at.saturating_sub(wrote_at).as_millis();
        assert!((expected..=expected + 200).contains(&after), "{pauses:?}: {after} ms");
    }
}

/// A kernel before Linux 5.4 does not report that the peer has withdrawn its window. It repeats the bytes that wait,
/// counts no retransmission, and the peer answers each.
#[test]
fn peer_that_answers_is_alive_although_the_window_is_unknown() {
    let answered = |at: Duration, _| TcpInfo {
        unacked: 1,
        send_window: None,
        data_segments_sent: (at.as_millis() / 200) as u32,
        segments_out: (at.as_millis() / 200) as u32,
        ..idle_for(Duration::from_millis(at.as_millis() as u64 % 200))
    };
    assert_eq!(death_of(&SERVER, None, answered), None);
    let lost = |at, requested| TcpInfo {
        last_ack_recv: at,
        last_data_recv: at,
        ..answered(at, requested)
    };
    let (at, _) = death_of(&SERVER, None, lost).unwrap();
    assert!((2_250 * MS..2_400 * MS).contains(&at), "{at:?}");
}

/// One acknowledgement took a second, for example because the machine of the peer was paused. An idle flow has no other
/// that would correct the estimate.
#[test]
fn idle_flow_on_a_near_path_is_dead_within_3_s_after_one_late_acknowledgement() {
    let lost = |at, requested| TcpInfo {
        rtt: 126 * MS,
        rtt_deviation: 250 * MS,
        min_rtt: MS,
        probes: keepalives(at, requested),
        ..idle_for(at)
    };
    let (at, _) = death_of(&SERVER, None, lost).unwrap();
    assert!((2_700 * MS..3 * SECOND).contains(&at), "{at:?}");
    let distant = |at, requested| TcpInfo { min_rtt: 300 * MS, ..lost(at, requested) };
    let (at, _) = death_of(&SERVER, None, distant).unwrap();
    assert!(at > 3 * SECOND, "{at:?}");
}

/// At a distance the pauses are as long as the answers take.
#[test]
fn last_retransmission_at_a_distance_has_the_time_to_be_answered() {
    let sent_at = [0, 800, 1_600, 2_400, 3_200, 4_000];
    let kernel = |at: Duration, _| {
        let sent = sent_at.iter().filter(|ms| at >= **ms * MS).count() as u32;
        TcpInfo {
            unacked: 1,
            retransmits: (sent - 1) as u8,
            data_segments_sent: sent,
            rtt: 600 * MS,
            rtt_deviation: 10 * MS,
            min_rtt: 590 * MS,
            ..idle_for(at)
        }
    };
    let (at, _) = death_of(&SERVER, None, kernel).unwrap();
    let answered = 3_200 * MS + 490 * MS;
    assert!((answered..answered + 150 * MS).contains(&at), "{at:?}");
}

#[test]
fn flow_with_a_lost_outbound_direction_is_dead() {
    // Segments from the peer arrive, but not those to the peer.
    let outbound = |at: Duration, _| TcpInfo {
        unacked: 3,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        last_data_recv: 10 * MS,
        ..idle_for(10 * MS)
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
        ..idle_for(Duration::ZERO)
    };
    assert_eq!(death_of(&SERVER, None, acked), None);
}

#[test]
fn closed_window_with_answered_probes_is_alive() {
    // The answers to the probes arrive at growing intervals, up to two minutes.
    let closed = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: 1,
        ..idle_for(at.min(120 * SECOND))
    };
    assert_eq!(death_of(&SERVER, None, closed), None);
    let window_unknown = |at, requested| TcpInfo { send_window: None, ..closed(at, requested) };
    assert_eq!(death_of(&SERVER, None, window_unknown), None);
    // A window smaller than a segment is closed.
    let narrow = |at, requested| TcpInfo { send_window: Some(700), ..closed(at, requested) };
    assert_eq!(death_of(&SERVER, None, narrow), None);
    let lost = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: at.as_secs().min(255) as u8,
        segments_out: at.as_secs() as u32,
        ..idle_for(at)
    };
    // The peer has LAST_PROBE_TIMEOUT to answer the last of few probes.
    let after = |probes| probes * SECOND + LAST_PROBE_TIMEOUT;
    for (thresholds, expected) in [
        (SERVER, after(4)),
        (LOSSY_SERVER, after(6)),
        (CORRELATED_LOSS_SERVER, after(2)),
        (CLIENT, 30 * SECOND),
    ] {
        let (at, death) = death_of(&thresholds, None, lost).unwrap();
        assert_eq!(death, FlowDeath::Unacknowledged);
        assert!((expected..expected + 250 * MS).contains(&at), "{at:?}, {expected:?}");
    }
    // Linux answers two probes a second, so of the first two, at 0.2 and 0.6 s, it would answer only one.
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
    // One probe is sent each second, and every `n`th is answered.
    let answered = |n: u128, at: Duration| {
        let silent = Duration::from_millis((at.as_millis() % (n * 1000 + 1)) as u64);
        TcpInfo {
            notsent_bytes: 5000,
            send_window: Some(0),
            probes: silent.as_secs() as u8,
            segments_out: at.as_secs() as u32,
            segments_in: (at.as_millis() / (n * 1000 + 1)) as u32,
            ..idle_for(silent)
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
        assert!(!probe, "the kernel sends no keepalive while bytes wait");
        refuted += u32::from(health.take_refuted_suspicion());
        at += after;
    }
    assert!((9..=10).contains(&refuted), "{refuted}");
    // If every probe is answered, there is no suspicion.
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
        |at: Duration, _| TcpInfo { notsent_bytes: 50, probes: probes(at) as u8, ..idle_for(at) };
    let (at, death) = death_of(&SERVER, None, dropped).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    assert!((2250 * MS..2400 * MS).contains(&at), "{at:?}");
    // A kernel that does not report the window needs one more probe.
    let window_unknown = |at, requested| TcpInfo { send_window: None, ..dropped(at, requested) };
    let (at, _) = death_of(&SERVER, None, window_unknown).unwrap();
    assert!((3000 * MS..3300 * MS).contains(&at), "{at:?}");
}

#[test]
fn late_check_gives_no_verdict() {
    let start = Instant::now();
    let mut health = FlowHealth::new(start);
    let lost = TcpInfo { probes: 30, ..idle_for(30 * SECOND) };
    assert!(matches!(
        health.check(&idle_for(Duration::ZERO), &SERVER, start),
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
fn flow_whose_checks_are_always_late_is_still_found_dead() {
    let late = LATE_CHECK + 50 * MS;
    // No bytes wait; or bytes wait, and the peer is silent or sends.
    let idle = |at: Duration| TcpInfo { probes: (at.as_millis() / 100) as u8, ..idle_for(at) };
    let unacked = |at: Duration| TcpInfo {
        unacked: 1,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        ..idle_for(at)
    };
    let sends = |at: Duration| TcpInfo {
        segments_in: (at.as_millis() / 10) as u32,
        ..TcpInfo { last_data_recv: Duration::ZERO, last_ack_recv: Duration::ZERO, ..unacked(at) }
    };
    let kernels: [(&dyn Fn(Duration) -> TcpInfo, FlowDeath); 3] = [
        (&idle, FlowDeath::Unanswered),
        (&unacked, FlowDeath::Unacknowledged),
        (&sends, FlowDeath::Unacknowledged),
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
            assert!(at < 10 * SECOND, "case {case} is never found dead");
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
        let answered = TcpInfo { segments_in: 1 + at.as_secs() as u32, ..idle_for(Duration::ZERO) };
        assert!(matches!(
            health.check(&answered, &SERVER, start + at),
            FlowDecision::CheckAgain { .. }
        ));
        at += 30 * SECOND;
        let lost = TcpInfo { probes: 30, ..idle_for(30 * SECOND) };
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
fn tunnel_is_dead_after_its_limit_of_silence() {
    let thresholds = FlowThresholds::tunnel(20 * SECOND);
    let idle = |at: Duration, requested: u32| {
        assert_eq!(requested, 0, "the kernel's own keepalives suffice");
        TcpInfo { probes: keepalives(at, requested), ..idle_for(at) }
    };
    let unacked = |at: Duration, _| TcpInfo {
        unacked: 1,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        ..idle_for(at)
    };
    let (at, death) = death_of(&thresholds, None, idle).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert!((20 * SECOND..20 * SECOND + 150 * MS).contains(&at), "{at:?}");
    let (at, death) = death_of(&thresholds, None, unacked).unwrap();
    assert_eq!(death, FlowDeath::Unacknowledged);
    assert!((20 * SECOND..20 * SECOND + 150 * MS).contains(&at), "{at:?}");
    // The limit is too short for the kernel's keepalives, so more are requested.
    let lost = |at, requested| TcpInfo { probes: keepalives(at, requested), ..idle_for(at) };
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
        let _ = health.check(&TcpInfo { segments_in, ..idle_for(silent) }, &SERVER, start + at);
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
        health.check(&idle_for(Duration::ZERO), &SERVER, start)
    else {
        panic!("dead at once");
    };
    assert!(after > SECOND);
    let now = start + 10 * MS;
    assert_eq!(health.record_write(now), now + PENDING_CHECK_INTERVAL);
    // Another write does not change that.
    assert_eq!(health.record_write(now + 100 * MS), now + PENDING_CHECK_INTERVAL);
}

/// The segments of a server arrive, but it receives none and retransmits at growing intervals.
#[test]
fn retransmitted_data_is_no_evidence_of_life() {
    let sent_at = [100, 500, 1300, 2900, 6100].map(|ms| ms * MS);
    let kernel = |at: Duration, requested: u32| {
        let retransmissions = sent_at.iter().filter(|time| **time <= at).count() as u32;
        let latest = sent_at.into_iter().rfind(|time| *time <= at).unwrap_or_default();
        // The kernel sends no keepalive within a second of any segment.
        let probes = if at.saturating_sub(latest) >= SECOND {
            1 + requested.min((at.saturating_sub(latest + SECOND).as_millis() / 100) as u32)
        } else {
            0
        };
        TcpInfo {
            last_data_recv: at,
            last_ack_recv: at.saturating_sub(latest),
            segments_in: 100 + retransmissions,
            data_segments_in: 50 + retransmissions,
            segments_out: 100 + retransmissions + probes,
            probes: probes as u8,
            ..idle_for(at)
        }
    };
    let (at, death) = death_of(&SERVER, None, kernel).unwrap();
    assert_eq!(death, FlowDeath::Unanswered);
    assert!((2700 * MS..3000 * MS).contains(&at), "{at:?}");
    let (at, _) = death_of(&CORRELATED_LOSS_SERVER, None, kernel).unwrap();
    assert!((2150 * MS..2600 * MS).contains(&at), "{at:?}");
    // Pure acknowledgements and segments out of order are evidence of life.
    for fresh in [|n: u32| (0, n), |n: u32| (n, 0)] {
        let alive = |at: Duration, requested: u32| {
            let (acks, out_of_order) = fresh(at.as_secs() as u32);
            let info = kernel(at, requested);
            let last_ack_recv = Duration::from_millis(at.as_millis() as u64 % 1000);
            TcpInfo { segments_in: info.segments_in + acks, out_of_order, last_ack_recv, ..info }
        };
        assert_eq!(death_of(&SERVER, None, alive), None);
    }
}

#[test]
fn correlated_loss_needs_three_stalled_flows_and_a_quarter_of_all() {
    let now = Instant::now();
    let is_path_broken = |stalled: usize, flows: usize| {
        let mut loss = CorrelatedLoss::default();
        (0..stalled).for_each(|_| loss.record_change(false, true));
        loss.is_path_broken(flows, now)
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
        assert_eq!(is_path_broken(stalled, flows), expected, "{stalled} of {flows}");
    }
    // Dead flows do not count as stalled, but the path stays broken for BROKEN_FOR.
    let mut loss = CorrelatedLoss::default();
    (0..4).for_each(|_| loss.record_change(false, true));
    assert!(loss.is_path_broken(4, now));
    (0..4).for_each(|_| loss.record_change(true, false));
    assert!(loss.is_path_broken(1, now + 900 * MS));
    assert!(!loss.is_path_broken(1, now + SECOND));
}

/// A hundred flows are idle for an hour at 5 % packet loss each way. With the thresholds of a lossy path
/// none is found dead, and almost none in the time before the path counts as lossy.
#[test]
fn idle_flows_on_a_lossy_path_stay_alive() {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut deaths = |thresholds: &FlowThresholds, until_lossy: bool| {
        let (mut deaths, mut refuted) = (0, 0);
        for _ in 0..100 {
            let start = Instant::now();
            let mut health = FlowHealth::new(start);
            let mut peer = LossyPeer { rng: rng.fork(), ..LossyPeer::default() };
            let mut at = Duration::ZERO;
            while at < 3600 * SECOND {
                // The flow table checks at multiples of its tick.
                at = 50 * MS * at.as_millis().div_ceil(50) as u32;
                let info = peer.tcp_info(at);
                match health.check(&info, thresholds, start + at) {
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
                if until_lossy && refuted >= LOSSY_AFTER {
                    return deaths;
                }
            }
        }
        deaths
    };
    assert_eq!(deaths(&LOSSY_SERVER, false), 0);
    let early: u32 = (0..1000).map(|_| deaths(&SERVER, true)).sum();
    assert!(early <= 3, "{early} deaths in a thousand runs");
}

/// An idle peer behind a lossy path, and the local kernel's keepalives.
#[derive(Default)]
struct LossyPeer {
    rng: fastrand::Rng,
    last_segment: Duration,
    /// When the peer last answered a keepalive; it answers at most two a second.
    last_answer: Option<Duration>,
    last_keepalive: Duration,
    /// Unanswered keepalives.
    probes: u8,
    segments: u32,
}

impl LossyPeer {
    /// Whether the next packet is lost.
    fn is_lost(&mut self) -> bool {
        self.rng.u8(..20) == 0
    }

    /// Sends a keepalive, which the peer answers unless a packet is lost.
    fn keepalive(&mut self, at: Duration) {
        self.probes = self.probes.saturating_add(1);
        self.last_keepalive = at;
        if self.is_lost() || self.last_answer.is_some_and(|last| at < last + 500 * MS) {
            return;
        }
        self.last_answer = Some(at);
        if !self.is_lost() {
            (self.last_segment, self.probes, self.segments) = (at, 0, self.segments + 1);
        }
    }

    /// Sends the kernel's keepalives up to `at`. Returns the TCP statistics then.
    fn tcp_info(&mut self, at: Duration) -> TcpInfo {
        loop {
            let next = self.last_segment.max(self.last_keepalive) + SECOND;
            if next > at {
                break;
            }
            self.keepalive(next);
        }
        TcpInfo {
            probes: self.probes,
            segments_in: self.segments,
            ..idle_for(at.saturating_sub(self.last_segment))
        }
    }
}
