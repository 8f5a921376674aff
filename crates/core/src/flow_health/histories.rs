//! Properties of verdicts over the whole life of a flow: requests are answered, until the path is lost or the peer
//! withdraws its window at any time.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);
/// The step of the model.
const TICK: Duration = Duration::from_millis(10);
/// The flow table scans its flows at this interval.
const SCAN: Duration = Duration::from_millis(50);

/// The path, the peer, and when the client writes.
#[derive(Debug, Clone)]
struct Script {
    round_trip: Duration,
    /// The first retransmission timeout, more than the round trip.
    timeout: Duration,
    /// Up to six retransmissions of a thin stream have equal pauses (`tcp_thin_linear_timeouts`).
    is_thin: bool,
    /// When, and how many segments.
    writes: Vec<(Duration, u32)>,
    /// From then on the peer has no memory: it answers with a closed window, and acknowledges nothing.
    withdrawn_at: Option<Duration>,
    /// From then on no packet arrives.
    lost_at: Option<Duration>,
}

/// What arrives from the peer.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Answer {
    /// An acknowledgement of all bytes, with a response.
    Response,
    /// An acknowledgement of a keepalive.
    Alive,
    /// An acknowledgement of nothing, with a closed window.
    Withdrawn,
}

/// The kernel of this side, and the truth about what it has sent.
struct Kernel {
    script: Script,
    now: Duration,
    next_write: usize,
    /// When each segment was sent.
    sent: Vec<Duration>,
    /// When each segment with data was sent.
    data_sent: Vec<Duration>,
    /// When the oldest byte was written that is not acknowledged.
    unacked_since: Option<Duration>,
    unacked: u32,
    retransmits: u8,
    pause: Duration,
    retransmit_at: Duration,
    answers: VecDeque<(Duration, Answer)>,
    last_segment: Duration,
    last_data: Duration,
    probes: u8,
    keepalive_at: Duration,
    window: u32,
    bytes_acked: u64,
    segments_in: u32,
    data_segments_in: u32,
}

impl Kernel {
    fn new(script: Script) -> Self {
        Self {
            script,
            now: Duration::ZERO,
            next_write: 0,
            sent: Vec::new(),
            data_sent: Vec::new(),
            unacked_since: None,
            unacked: 0,
            retransmits: 0,
            pause: Duration::ZERO,
            retransmit_at: Duration::ZERO,
            answers: VecDeque::new(),
            last_segment: Duration::ZERO,
            last_data: Duration::ZERO,
            probes: 0,
            keepalive_at: Duration::from_secs(1),
            window: 64_000,
            bytes_acked: 1,
            segments_in: 1,
            data_segments_in: 0,
        }
    }

    /// Sends a segment, which the peer answers unless it is lost.
    fn send(&mut self, answer: Answer) {
        let at = self.now;
        self.sent.push(at);
        let is_answered =
            self.script.lost_at.is_none_or(|lost| at + self.script.round_trip / 2 < lost);
        if is_answered {
            self.answers.push_back((at + self.script.round_trip, answer));
        }
    }

    fn send_data(&mut self, segments: u32) {
        // The others of a burst are lost or acknowledged with the last.
        let others = (1..segments).map(|_| self.now);
        self.sent.extend(others.clone());
        self.data_sent.extend(others);
        self.data_sent.push(self.now);
        let is_withdrawn = self.script.withdrawn_at.is_some_and(|withdrawn| self.now >= withdrawn);
        self.send(if is_withdrawn { Answer::Withdrawn } else { Answer::Response });
    }

    fn keepalive(&mut self) {
        self.probes = self.probes.saturating_add(1);
        self.keepalive_at = self.now + Duration::from_secs(1);
        self.send(Answer::Alive);
    }

    /// Does what is due at `now`. Returns whether the client has written.
    fn step(&mut self, now: Duration) -> bool {
        self.now = now;
        while self.answers.front().is_some_and(|(at, _)| *at <= now) {
            let Some((at, answer)) = self.answers.pop_front() else { break };
            (self.last_segment, self.probes) = (at, 0);
            self.keepalive_at = self.keepalive_at.max(at + Duration::from_secs(1));
            self.segments_in += 1;
            match answer {
                Answer::Response => {
                    self.data_segments_in += 1;
                    self.last_data = at;
                    self.bytes_acked += 100;
                    (self.unacked, self.unacked_since, self.retransmits) = (0, None, 0);
                }
                Answer::Alive => {}
                Answer::Withdrawn => self.window = 0,
            }
        }
        let write = self.script.writes.get(self.next_write).filter(|(at, _)| *at <= now).copied();
        if let Some((_, segments)) = write {
            self.next_write += 1;
            // Into a closed window nothing is sent; this model only repeats what was sent.
            if self.window > 0 || self.unacked == 0 {
                self.unacked += segments;
                self.send_data(segments);
                if self.unacked_since.is_none() {
                    self.unacked_since = Some(now);
                    (self.pause, self.retransmit_at) =
                        (self.script.timeout, now + self.script.timeout);
                }
            }
        }
        if self.unacked > 0 && now >= self.retransmit_at {
            if self.window > 0 {
                self.retransmits = self.retransmits.saturating_add(1);
            }
            if !self.script.is_thin || self.retransmits > 6 {
                self.pause = (2 * self.pause).min(Duration::from_secs(120));
            }
            self.retransmit_at = now + self.pause;
            self.send_data(1);
        }
        if self.unacked == 0 && now >= self.keepalive_at {
            self.keepalive();
        }
        write.is_some()
    }

    fn info(&self) -> TcpInfo {
        TcpInfo {
            retransmits: self.retransmits,
            probes: self.probes,
            rtt: self.script.round_trip,
            min_rtt: self.script.round_trip,
            send_mss: 1_400,
            unacked: self.unacked,
            segments_out: 1 + self.sent.len() as u32,
            segments_in: self.segments_in,
            data_segments_in: self.data_segments_in,
            last_ack_recv: self.now.saturating_sub(self.last_segment),
            last_data_recv: self.now.saturating_sub(self.last_data),
            bytes_acked: self.bytes_acked,
            data_segments_sent: self.data_sent.len() as u32,
            send_window: Some(self.window),
            ..TcpInfo::default()
        }
    }

    /// How many of these segments were sent at this time or later.
    fn since(sent: &[Duration], time: Duration) -> usize {
        sent.iter().rev().take_while(|at| **at >= time).count()
    }

    /// Whether segments were sent at `many` times since then; or as many at `few` times, and the last can be answered.
    fn is_often(&self, sent: &[Duration], since: Duration, (many, few): (usize, u8)) -> bool {
        let mut times = sent[sent.len() - Self::since(sent, since)..].to_vec();
        let (segments, last) = (times.len(), times.last().copied());
        times.dedup();
        let time = LAST_PROBE_TIMEOUT + additional_time(self.script.round_trip);
        times.len() >= many
            || (segments >= many
                && times.len() >= few.into()
                && last.is_some_and(|last| self.now >= last + time))
    }

    /// Whether the truth allows this verdict now.
    fn allows(&self, death: FlowDeath, thresholds: &FlowThresholds) -> bool {
        let silent_for = self.now.saturating_sub(self.last_segment) + ROUNDING;
        let in_silence = Self::since(&self.sent, self.last_segment);
        let Some(since) = self.unacked_since else {
            return death == FlowDeath::Unanswered
                && thresholds.idle_after.is_some_and(|after| silent_for >= after)
                && self.probes >= thresholds.unanswered;
        };
        let waited = self.now.saturating_sub(since);
        let few = thresholds.retransmits;
        let is_silent = thresholds.idle_after.is_some_and(|after| silent_for >= after)
            && self.is_often(&self.sent, self.last_segment, (thresholds.unanswered.into(), few));
        let closed = self.window == 0;
        death == FlowDeath::Unacknowledged
            && if closed {
                let is_last_unanswered =
                    || self.sent.last().is_some_and(|last| *last + LAST_PROBE_TIMEOUT <= self.now);
                silent_for >= Duration::from_secs(4)
                    && (in_silence >= 6 || (in_silence >= 4 && is_last_unanswered()))
            } else {
                is_silent
                    || (waited >= thresholds.unacked_after
                        && (self.retransmits >= 6
                            || self.is_often(&self.data_sent, since, (6, few))))
                    || (waited >= thresholds.unacked_after + LAST_PROBE_TIMEOUT
                        && self.retransmits >= thresholds.retransmits)
            }
    }
}

/// The end of a history.
struct Outcome {
    /// When and why the flow was dead, and whether the truth allowed that.
    death: Option<(Duration, FlowDeath, bool)>,
    /// Refuted suspicions.
    refuted: u32,
}

/// Runs a history for this time.
fn run(script: Script, time: Duration) -> Outcome {
    let start = Instant::now();
    let allowed = SERVER.at_distance(additional_time(script.round_trip));
    let (mut kernel, mut health) = (Kernel::new(script), FlowHealth::new(start));
    let (mut now, mut due, mut refuted) = (Duration::ZERO, Duration::ZERO, 0);
    while now < time {
        if kernel.step(now) {
            due = due.min(health.record_write(start + now) - start);
        }
        if now >= due && now.as_millis().is_multiple_of(SCAN.as_millis()) {
            match health.check(&kernel.info(), &SERVER, start + now) {
                FlowDecision::Dead(death) => {
                    let death = Some((now, death, kernel.allows(death, &allowed)));
                    return Outcome { death, refuted };
                }
                FlowDecision::CheckAgain { after, probe } => {
                    if probe {
                        kernel.keepalive();
                    }
                    due = now + after;
                }
            }
            refuted += u32::from(health.take_refuted_suspicion());
        }
        now += TICK;
    }
    Outcome { death: None, refuted }
}

/// A path of any length, and requests of any size at any times within its first seconds.
fn scripts() -> impl Strategy<Value = Script> {
    let writes = prop::collection::vec((0_u64..600, 1_u32..20), 1..40);
    (1_u64..700, 0_u64..1_500, any::<bool>(), writes).prop_map(|(rtt, more, is_thin, gaps)| {
        let mut at = Duration::ZERO;
        let writes = gaps.into_iter().map(|(gap, segments)| {
            at += 10 * (1 + gap / 10) as u32 * MS;
            (at, segments)
        });
        Script {
            round_trip: rtt as u32 * MS,
            timeout: (rtt + 200 + more) as u32 * MS,
            is_thin,
            writes: writes.collect(),
            withdrawn_at: None,
            lost_at: None,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::default())]

    #[test]
    fn flow_whose_peer_answers_is_never_suspected(script in scripts()) {
        let outcome = run(script, Duration::from_secs(60));
        prop_assert_eq!(outcome.death, None);
        prop_assert_eq!(outcome.refuted, 0);
    }

    #[test]
    fn flow_on_a_lost_path_is_dead_only_after_enough_was_sent(script in scripts(), at in 0_u64..12_000) {
        let lost_at = at as u32 * MS;
        let script = Script { lost_at: Some(lost_at), ..script };
        let outcome = run(script.clone(), Duration::from_secs(120));
        let (died_at, death, is_allowed) = outcome.death.expect("a lost path is found");
        prop_assert!(died_at > lost_at);
        prop_assert!(is_allowed, "{:?} at {:?}, lost at {:?}", death, died_at, lost_at);
        // Nearby endpoints, whose retransmissions follow each other closely.
        if script.timeout <= 250 * MS && script.is_thin {
            prop_assert!(died_at <= lost_at + 3_100 * MS, "lost at {:?}, dead at {:?}", lost_at, died_at);
        }
    }

    #[test]
    fn flow_whose_peer_has_withdrawn_its_window_is_alive_while_it_answers(
        script in scripts(),
        withdrawn in 0_u64..12_000,
    ) {
        let script = Script { withdrawn_at: Some(withdrawn as u32 * MS), ..script };
        prop_assert_eq!(run(script, Duration::from_secs(120)).death, None);
    }

    #[test]
    fn flow_whose_peer_is_lost_behind_a_withdrawn_window_is_dead_after_four_segments(
        script in scripts(),
        withdrawn in 0_u64..6_000,
        lost in 0_u64..20_000,
    ) {
        let (withdrawn_at, lost_at) = (withdrawn as u32 * MS, (withdrawn + lost) as u32 * MS);
        let script = Script { withdrawn_at: Some(withdrawn_at), lost_at: Some(lost_at), ..script };
        let outcome = run(script, Duration::from_secs(1200));
        let (died_at, death, is_allowed) = outcome.death.expect("a lost path is found");
        prop_assert!(died_at > lost_at);
        prop_assert!(is_allowed, "{:?} at {:?}, lost at {:?}", death, died_at, lost_at);
    }
}
