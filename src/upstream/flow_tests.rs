use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

/// Looks when the judge asks for it, for ten minutes. `kernel` is asked for what it knows, with the
/// time since the start and the probes that were asked for. Says when it was dead, and of what.
fn judged(
    rules: &Rules,
    wrote_at: Option<Duration>,
    kernel: impl Fn(Duration, u32) -> TcpInfo,
) -> Option<(Duration, Death)> {
    let start = Instant::now();
    let mut judge = Judge::new(start);
    let (mut at, mut probes, mut wrote) = (Duration::ZERO, 0, wrote_at);
    while at < Duration::from_secs(600) {
        match judge.look(&kernel(at, probes), rules, start + at) {
            Look::Dead(death) => return Some((at, death)),
            Look::Again { after, probe } => {
                assert!(after >= 20 * MS, "a look every {after:?} is a busy loop");
                probes += u32::from(probe);
                at += after;
                if let Some(written) = wrote.take_if(|written| *written <= at) {
                    at = judge.wrote(start + written) - start;
                }
            }
        }
    }
    None
}

/// Nothing waits, and the last segment came this long ago.
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

/// One keepalive of the kernel a second, and those that were asked for.
fn keepalives(silent: Duration, asked: u32) -> u8 {
    (silent.as_secs() as u32 + asked).min(255) as u8
}

#[test]
fn quiet_with_answered_keepalives_lives() {
    let answered = |at: Duration, _| quiet(Duration::from_millis(at.as_millis() as u64 % 1001));
    assert_eq!(judged(&SERVER, None, answered), None);
}

#[test]
fn one_lost_keepalive_is_not_death() {
    // Of three in a row one is answered.
    let lossy = |at: Duration, asked: u32| {
        let silent = Duration::from_millis(at.as_millis() as u64 % 1500);
        TcpInfo { probes: keepalives(silent, asked % 3), ..quiet(silent) }
    };
    assert_eq!(judged(&SERVER, None, lossy), None);
}

#[test]
fn unanswered_keepalives_kill_within_three_seconds() {
    let lost = |at, asked| TcpInfo { probes: keepalives(at, asked), ..quiet(at) };
    let (at, death) = judged(&SERVER, None, lost).unwrap();
    assert_eq!(death, Death::Unanswered);
    assert!((2750 * MS..3000 * MS).contains(&at), "{at:?}");
    let (at, _) = judged(&LOSSY_SERVER, None, lost).unwrap();
    assert!((4500 * MS..4800 * MS).contains(&at), "{at:?}");
    // Silence alone is no proof: the probes have to have gone out.
    let few = |at, _| TcpInfo { probes: 7, ..quiet(at) };
    assert_eq!(judged(&SERVER, None, few), None);
    // A client that is idle is the kernel's own matter.
    assert_eq!(judged(&CLIENT, None, lost), None);
}

#[test]
fn bytes_in_flight_that_nobody_acknowledges_kill() {
    // Written at 1.1 s, retransmitted every 200 ms.
    let wrote = 1100 * MS;
    let kernel = |at: Duration, _| {
        if at < wrote {
            return quiet(at.min(SECOND));
        }
        let lost = at.saturating_sub(wrote);
        TcpInfo { unacked: 1, retransmits: (lost.as_millis() / 200).min(255) as u8, ..quiet(at) }
    };
    let (at, death) = judged(&SERVER, Some(wrote), kernel).unwrap();
    assert_eq!(death, Death::Unacknowledged);
    let after = at.saturating_sub(wrote);
    assert!((2500 * MS..2800 * MS).contains(&after), "{after:?}");
    let (at, _) = judged(&CLIENT, Some(wrote), kernel).unwrap();
    assert!(at >= 30 * SECOND, "{at:?}");
}

#[test]
fn retransmissions_that_double_kill_when_the_fourth_is_out() {
    let doubling = |at: Duration, _| {
        let gone = [200, 600, 1400, 3000, 6200].map(|ms| at > ms * MS);
        let retransmits = gone.iter().filter(|gone| **gone).count() as u8;
        TcpInfo { unacked: 40, retransmits, ..quiet(at) }
    };
    let (at, _) = judged(&SERVER, None, doubling).unwrap();
    assert!((3000 * MS..3300 * MS).contains(&at), "{at:?}");
}

#[test]
fn a_writer_that_goes_on_needs_no_retransmissions() {
    // Each write puts the next retransmission off.
    let writes = |at: Duration, _| TcpInfo {
        unacked: 1 + at.as_millis() as u32 / 300,
        data_segments_sent: 1 + at.as_millis() as u32 / 300,
        ..quiet(at)
    };
    let (at, _) = judged(&SERVER, None, writes).unwrap();
    assert!((2500 * MS..2800 * MS).contains(&at), "{at:?}");
}

#[test]
fn one_direction_is_enough() {
    // The peer's segments arrive, ours do not.
    let outbound = |at: Duration, _| TcpInfo {
        unacked: 3,
        retransmits: (at.as_millis() / 200).min(255) as u8,
        last_data_recv: 10 * MS,
        ..quiet(10 * MS)
    };
    let (at, _) = judged(&SERVER, None, outbound).unwrap();
    assert!(at < 3 * SECOND, "{at:?}");
}

#[test]
fn acknowledgements_keep_it_alive() {
    let acked = |at: Duration, _| TcpInfo {
        unacked: 9,
        retransmits: 5,
        bytes_acked: (at.as_millis() / 2400) as u64,
        ..quiet(Duration::ZERO)
    };
    assert_eq!(judged(&SERVER, None, acked), None);
}

#[test]
fn a_closed_window_is_not_death_while_probes_are_answered() {
    // Answers come at growing intervals, up to two minutes.
    let full = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: 1,
        ..quiet(at.min(120 * SECOND))
    };
    assert_eq!(judged(&SERVER, None, full), None);
    let blind = |at, asked| TcpInfo { send_window: None, ..full(at, asked) };
    assert_eq!(judged(&SERVER, None, blind), None);
    // A small opening is none: the next segment does not fit.
    let narrow = |at, asked| TcpInfo { send_window: Some(700), ..full(at, asked) };
    assert_eq!(judged(&SERVER, None, narrow), None);
    let lost = |at: Duration, _| TcpInfo {
        notsent_bytes: 5000,
        send_window: Some(0),
        probes: at.as_secs().min(255) as u8,
        ..quiet(at)
    };
    let (at, _) = judged(&SERVER, None, lost).unwrap();
    assert!((6 * SECOND..7 * SECOND).contains(&at), "{at:?}");
}

#[test]
fn bytes_that_our_own_netfilter_drops_are_death() {
    let probes = |at: Duration| [200, 600, 1400, 3000].iter().filter(|ms| at > **ms * MS).count();
    let dropped =
        |at: Duration, _| TcpInfo { notsent_bytes: 50, probes: probes(at) as u8, ..quiet(at) };
    let (at, death) = judged(&SERVER, None, dropped).unwrap();
    assert_eq!(death, Death::Unacknowledged);
    assert!((2500 * MS..2800 * MS).contains(&at), "{at:?}");
    // A kernel that cannot tell it from a closed window waits for one probe more.
    let blind = |at, asked| TcpInfo { send_window: None, ..dropped(at, asked) };
    let (at, _) = judged(&SERVER, None, blind).unwrap();
    assert!((3000 * MS..3300 * MS).contains(&at), "{at:?}");
}

#[test]
fn a_late_look_is_no_verdict() {
    let start = Instant::now();
    let mut judge = Judge::new(start);
    let lost = TcpInfo { probes: 30, ..quiet(30 * SECOND) };
    assert!(matches!(judge.look(&quiet(Duration::ZERO), &SERVER, start), Look::Again { .. }));
    let late = start + 30 * SECOND;
    assert_eq!(judge.look(&lost, &SERVER, late), Look::Again { after: GRACE, probe: false });
    assert_eq!(judge.look(&lost, &SERVER, late + GRACE), Look::Dead(Death::Unanswered));
}

#[test]
fn an_answer_that_comes_after_all_refutes_a_suspicion_once() {
    let start = Instant::now();
    let mut judge = Judge::new(start);
    let mut look = |silent: Duration, at: Duration| {
        let _ = judge.look(&quiet(silent), &SERVER, start + at);
        judge.was_refuted()
    };
    assert!(!look(Duration::ZERO, Duration::ZERO));
    assert!(!look(1220 * MS, 1220 * MS));
    assert!(look(10 * MS, 1380 * MS));
    assert!(!look(900 * MS, 2000 * MS));
}

#[test]
fn a_flow_that_talks_is_looked_at_soon_and_seldom() {
    let start = Instant::now();
    let mut judge = Judge::new(start);
    let Look::Again { after, .. } = judge.look(&quiet(Duration::ZERO), &SERVER, start) else {
        panic!("dead at once");
    };
    assert!(after > SECOND);
    let now = start + 10 * MS;
    assert_eq!(judge.wrote(now), now + WAITING);
    // A thousand more writes do not move it.
    assert_eq!(judge.wrote(now + 100 * MS), now + WAITING);
}
