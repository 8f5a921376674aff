//! The evidence of a connection's life over time, and the verdict on it.
//!
//! A wrong suspicion costs little, but a wrong verdict closes a working connection. So suspicion and death
//! have thresholds of their own. A third threshold applies to streams that no other connection can
//! continue: those that are pinned.
//!
//! The path is lost when a PING is outstanding for `dead_after` without evidence of life in one of the two
//! directions. Inbound evidence is any byte or any segment (`tcpi_last_ack_recv`). Outbound evidence is an
//! acknowledgement of sent bytes (`tcpi_bytes_acked`). A peer whose window is closed acknowledges no bytes.
//! Then the answers to the kernel's window probes are the evidence for both directions, and the path is
//! lost when three probes in a row are unanswered (`tcpi_probes`). When the window opens, the time without
//! an acknowledgement starts again, because bytes that could not be sent could not be acknowledged. A peer
//! whose window stays closed for 20 s is dead.
//!
//! A check that runs late withholds all verdicts for 300 ms, once for each PING, so that a process without
//! CPU time or a paused machine does not declare its peers dead. Later verdicts count even if the checks
//! are late: the driver reads the socket until it is empty before each check, and the kernel counts
//! silence whether or not the process is scheduled.
//!
//! If the endpoint limits PINGs ([`super::ping_limit`]), they are sent at longer intervals and, apart from that, once for
//! a request that waits for its response head. In between, the kernel's keepalive probes show whether the path is
//! alive: 1.25 s without a segment more probes are requested, and after 2 s a PING is due, whose verdict is the usual one.

pub(super) mod rtt;
pub(super) mod silence;
pub(super) mod thresholds;

use std::time::{Duration, Instant};

use self::rtt::Rtt;
use self::silence::{Silence, window_answers_probes};
use self::thresholds::{
    CHECK_INTERVAL, EVENT_PING_PAUSE, EVENT_WAIT, HEAD_WAIT, LATE_CHECK, PATH_QUIET_AFTER,
    PATH_SILENT_AFTER, PING_AFTER_SILENCE, PROBE_AFTER, SILENT_AFTER, SILENT_DEATH, STOPPED_AFTER,
    Thresholds, VERDICT_PAUSE, WRITE_PATIENCE,
};
use super::state::{ConnectionState, Responsiveness, StateChangeReason};
use crate::tcp_info::TcpInfo;

/// What a check finds.
#[derive(Debug, Clone, Copy)]
pub(super) enum Check {
    /// No PING is due.
    NotDue,
    /// No PING is due, but the kernel should probe the path.
    ProbeDue,
    /// A PING is due. It counts as sent. `request_waits`: a request has waited for its response head.
    PingDue { request_waits: bool },
    /// A PING is outstanding. Without a `verdict`, verdicts are withheld.
    Outstanding { silence: Silence, verdict: bool },
}

/// What is known of the life of a connection. The state follows from it, and is not stored here.
#[derive(Debug)]
pub(super) struct Health {
    limits: Thresholds,
    grid: Instant,
    rtt: Rtt,
    /// When the outstanding PING was sent.
    ping_sent: Option<Instant>,
    next_ping: Instant,
    /// The interval of PINGs, if the endpoint limits them.
    limit: Option<Duration>,
    /// By how much answers may be late, because the queue of the line is long.
    line_delay: Duration,
    /// When the last PONG arrived.
    pong_at: Instant,
    /// When bytes last arrived.
    last_received: Instant,
    /// Why the next PING may be due early.
    recent: Recent,
    /// The same once the outstanding PING is answered.
    after_pong: Recent,
    /// Since when an event should arrive that another connection has shown.
    event_expected: Option<Instant>,
    /// The last known `tcpi_bytes_acked`, and when it last grew or no byte was pending.
    acked: u64,
    acked_at: Instant,
    /// When the peer's window was last closed with no probe unanswered.
    window_answered_at: Instant,
    /// When `acked` last grew by a whole segment while more bytes were pending: an upload makes progress. Small requests
    /// do not count, which the kernel of a stopped process acknowledges too.
    progress_at: Instant,
    /// When the next check is due, without what has happened since the last one.
    check_at: Instant,
    /// Verdicts are withheld until then, because a check was late.
    withhold_until: Instant,
    /// Whether a check was late since the outstanding PING was sent.
    was_late: bool,
}

/// What has arrived since the last PING or check. Without the PONG after bytes, the path of a busy watch could be lost for a
/// whole `ping_interval` before a PING notices it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Recent {
    #[default]
    Nothing,
    Bytes,
    /// The PONG of a PING before which bytes had arrived.
    Pong,
}

impl Health {
    /// The health of a live connection. `first_rtt` is the round-trip time of its first PING. `grid` is the
    /// time from which the times of its PINGs are counted ([`Thresholds::next_ping`]).
    pub(super) fn new(
        limits: Thresholds,
        first_rtt: Duration,
        grid: Instant,
        now: Instant,
    ) -> Self {
        let mut rtt = Rtt::default();
        let is_doubtful = rtt.sample(first_rtt);
        let next_ping = if is_doubtful { now } else { limits.next_ping(grid, now) };
        Self {
            limits,
            grid,
            rtt,
            ping_sent: None,
            next_ping,
            limit: None,
            line_delay: Duration::ZERO,
            pong_at: now,
            last_received: now,
            recent: Recent::Nothing,
            after_pong: Recent::Nothing,
            event_expected: None,
            acked: 0,
            acked_at: now,
            window_answered_at: now,
            progress_at: now,
            check_at: next_ping,
            withhold_until: now,
            was_late: false,
        }
    }

    /// Whether a PING is outstanding; h2 allows one at a time.
    pub(super) fn ping_outstanding(&self) -> bool {
        self.ping_sent.is_some()
    }

    pub(super) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// The smoothed round-trip time.
    pub(super) fn rtt(&self) -> Duration {
        self.rtt.smoothed().unwrap_or_default()
    }

    /// Records that bytes arrived. Those of a PONG are recorded before [`Self::pong`] is called.
    pub(super) fn received(&mut self, now: Instant) {
        self.last_received = now;
        self.event_expected = None;
        if self.ping_sent.is_some() {
            // These may be the bytes of the PONG, those before them were not.
            self.note_bytes();
        }
        self.recent = Recent::Bytes;
    }

    /// Records that the PONG of the outstanding PING arrived. Returns the round-trip time.
    pub(super) fn pong(&mut self, now: Instant) -> Option<Duration> {
        let rtt = self.ping_sent.take().map(|sent| now.saturating_duration_since(sent));
        let is_doubtful = rtt.is_some_and(|rtt| self.rtt.sample(rtt));
        self.last_received = now;
        self.pong_at = now;
        // The bytes that were recorded last are those of the PONG.
        self.recent = std::mem::take(&mut self.after_pong);
        self.next_ping = match self.limit {
            Some(interval) => now + interval,
            None if is_doubtful => now,
            None => self.limits.next_ping(self.grid, now),
        };
        self.check_at = self.next_ping;
        if self.limit.is_some() {
            self.check_at = self.check_at.min(now + PATH_QUIET_AFTER);
        }
        rtt
    }

    /// Answers may be late by `line_delay`.
    pub(super) fn expect_delay(&mut self, line_delay: Duration) {
        self.line_delay = line_delay;
    }

    /// The endpoint limits PINGs to one in `interval`.
    pub(super) fn limit_pings(&mut self, interval: Duration) {
        if self.limit.replace(interval) != Some(interval) {
            self.next_ping = self.next_ping.max(self.pong_at + interval);
        }
    }

    /// The interval between two PINGs of an idle connection.
    pub(super) fn ping_interval(&self) -> Duration {
        self.limit.unwrap_or(self.limits.ping_interval)
    }

    /// Something suggests that the endpoint fails: the next PING is due now, although the endpoint limits them. Returns
    /// whether that is earlier than planned.
    pub(super) fn suspect_endpoint(&mut self, now: Instant) -> bool {
        let is_due = self.limit.is_some() && self.ping_sent.is_none();
        if is_due {
            (self.next_ping, self.check_at) = (now, now);
        }
        is_due
    }

    /// Another connection has shown an event that this one should show, too. Returns whether the next PING may be due
    /// earlier than planned.
    pub(super) fn expect_event(&mut self, now: Instant) -> bool {
        if self.limit.is_some() || self.ping_sent.is_some() || self.event_expected.is_some() {
            return false;
        }
        self.event_expected = Some(now);
        true
    }

    /// A request has waited on another connection and may be sent again on this one: a PING is due now, unless a PONG has
    /// arrived recently. Returns whether it is.
    pub(super) fn ask(&mut self, now: Instant) -> bool {
        let is_asked = self.limit.is_none()
            && self.ping_sent.is_none()
            // A PONG after the request was sent would say that the connection works.
            && now.saturating_duration_since(self.pong_at) >= HEAD_WAIT;
        if is_asked {
            (self.next_ping, self.check_at) = (now, now);
        }
        is_asked
    }

    /// When the next check is due, while a request has waited for its response head since `waiting_since`.
    pub(super) fn wake_at(&self, waiting_since: Option<Instant>) -> Instant {
        if self.ping_sent.is_none() {
            return self.check_at.min(self.ping_due(waiting_since));
        }
        let bytes = self.recent == Recent::Bytes;
        let after_bytes = bytes.then(|| self.last_received + PING_AFTER_SILENCE);
        after_bytes.map_or(self.check_at, |at| at.min(self.check_at))
    }

    /// Bytes that have arrived bring the PING after the next PONG forward, too.
    fn note_bytes(&mut self) {
        if std::mem::take(&mut self.recent) == Recent::Bytes {
            self.after_pong = Recent::Pong;
        }
    }

    /// When the next PING is due.
    fn ping_due(&self, waiting_since: Option<Instant>) -> Instant {
        let mut due = self.next_ping;
        if self.limit.is_some() {
            // One PING for each wait. The probes of the kernel show the rest.
            let wait = waiting_since.filter(|&since| since > self.pong_at);
            return wait.map_or(due, |since| due.min(since.max(self.last_received) + HEAD_WAIT));
        }
        if self.recent != Recent::Nothing {
            due = due.min(self.last_received + PING_AFTER_SILENCE);
        }
        if let Some(since) = self.event_expected {
            due = due.min((since + EVENT_WAIT).max(self.pong_at + EVENT_PING_PAUSE));
        }
        waiting_since.map_or(due, |since| due.min(self.wait_from(since) + HEAD_WAIT))
    }

    /// From when the wait of a request counts that has waited since then. One PING does not wait for the bytes of other
    /// streams to end: only one direction may be lost. Later ones do: otherwise a request that has waited for long would
    /// need a PING after each PONG.
    fn wait_from(&self, since: Instant) -> Instant {
        if self.pong_at < since { since } else { since.max(self.last_received) }
    }

    /// Measures the evidence, or begins a PING if one is due.
    pub(super) fn check(
        &mut self,
        tcp: Option<&TcpInfo>,
        waiting_since: Option<Instant>,
        now: Instant,
    ) -> Check {
        let Some(sent) = self.ping_sent else {
            let due = self.ping_due(waiting_since);
            let quiet = self.limit.zip(tcp).map(|(_, tcp)| self.quiet_for(tcp, now));
            if now < due && quiet.is_none_or(|quiet| quiet < PATH_SILENT_AFTER) {
                return self.check_path(due, quiet, now);
            }
            self.ping_sent = Some(now);
            self.event_expected = None;
            self.note_bytes();
            self.was_late = false;
            self.acked_at = now;
            if let Some(tcp) = tcp {
                self.acked = tcp.bytes_acked;
            }
            self.check_at = now + self.suspect_after();
            let waits = |since: Instant| now >= self.wait_from(since) + HEAD_WAIT;
            return Check::PingDue { request_waits: waiting_since.is_some_and(waits) };
        };
        let late = now.saturating_duration_since(self.check_at) >= LATE_CHECK;
        if late && !std::mem::replace(&mut self.was_late, true) {
            self.withhold_until = now + VERDICT_PAUSE;
        }
        self.note_bytes();
        let suspect_at = sent + self.suspect_after();
        self.check_at = if now < suspect_at { suspect_at } else { now + CHECK_INTERVAL };
        Check::Outstanding {
            silence: self.measure(sent, tcp, now),
            verdict: now >= self.withhold_until,
        }
    }

    /// For how long no segment has arrived.
    fn quiet_for(&self, tcp: &TcpInfo, now: Instant) -> Duration {
        tcp.silent().min(now.saturating_duration_since(self.last_received))
    }

    /// Plans the next check while no PING is due before `due`. `quiet` is for how long no segment has arrived, if PINGs
    /// are limited.
    fn check_path(&mut self, due: Instant, quiet: Option<Duration>, now: Instant) -> Check {
        let Some(quiet) = quiet else {
            self.check_at = due;
            return Check::NotDue;
        };
        let remaining = PATH_QUIET_AFTER.saturating_sub(quiet);
        self.check_at = due.min(now + remaining.max(CHECK_INTERVAL));
        if remaining.is_zero() { Check::ProbeDue } else { Check::NotDue }
    }

    fn suspect_after(&self) -> Duration {
        // A connection must be suspect before it is dead.
        let adaptive = || self.rtt.suspect_after().min(self.limits.dead_after / 2);
        self.limits.suspect_after.unwrap_or_else(adaptive) + self.line_delay
    }

    /// Measures for how long which evidence of life has been missing.
    fn measure(&mut self, sent: Instant, tcp: Option<&TcpInfo>, now: Instant) -> Silence {
        let since = |then| now.saturating_duration_since(then);
        let mut inbound = since(self.last_received);
        let (mut pending, mut window_answers) = (false, false);
        if let Some(tcp) = tcp {
            inbound = inbound.min(tcp.silent());
            pending = tcp.has_pending();
            let newly_acked = tcp.bytes_acked.saturating_sub(self.acked);
            if newly_acked > 0 || !pending {
                self.acked = tcp.bytes_acked;
                self.acked_at = now;
            }
            if pending && newly_acked >= u64::from(tcp.send_mss.max(1)) {
                self.progress_at = now;
            }
            window_answers = pending && window_answers_probes(tcp, self.limits.dead_after);
            if window_answers && tcp.probes == 0 {
                self.window_answered_at = now;
            }
        }
        let ping_age = since(sent);
        let without_frame = ping_age.min(since(self.last_received));
        Silence {
            ping_age,
            inbound,
            outbound: since(self.acked_at.max(self.window_answered_at)),
            unacknowledged: since(self.acked_at),
            without_frame,
            without_progress: without_frame.min(since(self.progress_at)),
            pending,
            window_answers,
        }
    }

    /// The state that a connection in `state` must enter, and the reason.
    pub(super) fn verdict(
        &self,
        state: ConnectionState,
        silence: &Silence,
        pinned: bool,
    ) -> Option<(ConnectionState, StateChangeReason)> {
        if state == ConnectionState::Dead {
            return None;
        }
        let [dead_after, tunnel_dead_after, stopped_after] =
            [self.limits.dead_after, self.limits.tunnel_dead_after, STOPPED_AFTER]
                .map(|after| after + self.line_delay);
        if let Some(reason) = silence.lost_for(dead_after) {
            if !pinned || silence.lost_for(tunnel_dead_after).is_some() {
                return Some((ConnectionState::Dead, reason));
            }
            if state != ConnectionState::Unresponsive {
                return Some((ConnectionState::Unresponsive, reason));
            }
        }
        let silent_death = if pinned { SILENT_DEATH.max(tunnel_dead_after) } else { SILENT_DEATH };
        if silence.without_progress >= silent_death {
            return Some((ConnectionState::Dead, StateChangeReason::NoFrames));
        }
        if silence.window_answers && silence.ping_age.min(silence.unacknowledged) >= silent_death {
            return Some((ConnectionState::Dead, StateChangeReason::WindowClosed));
        }
        if state.is_in_service() && silence.without_progress >= stopped_after {
            return Some((ConnectionState::Draining, StateChangeReason::ProcessStopped));
        }
        if state == ConnectionState::Live && self.is_late(silence) {
            return Some((ConnectionState::Suspect, StateChangeReason::PingLate));
        }
        None
    }

    /// Whether the PING is late.
    pub(super) fn is_late(&self, silence: &Silence) -> bool {
        silence.unanswered_for(self.suspect_after())
    }

    /// Whether the PINGs are answered.
    pub(super) fn responsiveness(&self, silence: &Silence) -> Responsiveness {
        let quiet = silence.ping_age.min(silence.inbound.max(silence.outbound));
        let silent_after = SILENT_AFTER.min(self.limits.dead_after / 2) + self.line_delay;
        let path_silent = !silence.window_answers && quiet >= silent_after;
        if path_silent || silence.without_progress >= silent_after {
            Responsiveness::Silent
        } else if silence.unanswered_for(PROBE_AFTER + self.line_delay) {
            Responsiveness::Unanswered
        } else {
            Responsiveness::Responds
        }
    }

    /// Whether the process has been stopped for so long that requests fail which must not be sent twice.
    pub(super) fn process_is_stopped(&self, silence: &Silence) -> bool {
        silence.without_progress >= STOPPED_AFTER + WRITE_PATIENCE + self.line_delay
    }
}

/// Whether the peer's kernel should be probed, because nothing else is to be acknowledged.
pub(super) fn needs_probe(silence: &Silence) -> bool {
    !silence.pending && silence.ping_age >= PROBE_AFTER
}
