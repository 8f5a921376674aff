//! Tells a dead flow from a quiet one where no PING can be sent: once a connection is a tunnel, the
//! bytes on it are not ours, and the kernel is the only witness.
//!
//! | what waits to be acknowledged | dead when |
//! |---|---|
//! | bytes in flight | none acknowledged, and no segment arrived, for 2.5 s |
//! | bytes not sent (a closed window, or dropped by our own netfilter) | no segment for 2.5 s, and four probes in a row unanswered |
//! | nothing | no segment for 10 s, in which nine or so keepalives went out |
//!
//! A peer whose window is closed is alive, only full: the kernel asks it at growing intervals, so
//! its silence alone says nothing, and each of its answers sets the count of probes back to zero.
//! A stopped process is alive as well: its kernel answers, as it would without us.

use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::net::tcp_info::TcpInfo;
use crate::net::tracked::Observer;

/// Pause between looks. One costs a system call of about a microsecond.
const TICK: Duration = Duration::from_millis(500);
/// A look that is later than this says more about us than about the flow.
const LATE: Duration = Duration::from_millis(1_500);
/// Silence that kills while bytes wait. Retransmissions of a thin stream are 200 ms apart, so this
/// is some ten of them lost in a row.
const DEAD_AFTER: Duration = Duration::from_millis(2_500);
/// Window probes in a row without an answer: at 200 ms, doubling, the fourth is out after 3 s.
const PROBES: u8 = 4;
/// Silence that kills while nothing waits: a keepalive goes out every second.
const IDLE_DEAD_AFTER: Duration = Duration::from_secs(10);

/// Remembers since when nothing of ours has been acknowledged. Time is an argument.
#[derive(Debug)]
struct Judge {
    looked: Instant,
    acked: u64,
    stuck_since: Instant,
}

impl Judge {
    fn new(now: Instant) -> Self {
        Self { looked: now, acked: 0, stuck_since: now }
    }

    /// Why the flow is dead, if it is.
    fn verdict(&mut self, info: &TcpInfo, now: Instant) -> Option<&'static str> {
        let late = now.saturating_duration_since(self.looked) > LATE;
        self.looked = now;
        if late || !info.has_pending() || info.bytes_acked != self.acked {
            self.acked = info.bytes_acked;
            self.stuck_since = now;
        }
        let silent = info.last_ack_recv.min(info.last_data_recv);
        if !info.has_pending() {
            return (!late && silent >= IDLE_DEAD_AFTER).then_some("keepalives are not answered");
        }
        let stuck = now.saturating_duration_since(self.stuck_since);
        if stuck < DEAD_AFTER || silent < DEAD_AFTER {
            return None;
        }
        (info.unacked > 0 || info.probes >= PROBES).then_some("nothing is acknowledged any more")
    }
}

/// Waits until the flow is dead, and says why.
pub async fn died(observer: &Observer) -> &'static str {
    let mut judge = Judge::new(Instant::now());
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        // Without evidence (a kernel before 4.6) there is no verdict.
        if let Ok(info) = observer.tcp_info()
            && let Some(why) = judge.verdict(&info, Instant::now())
        {
            return why;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks twice a second for 60 s; `info` is asked with the time since the start.
    fn killed_after(info: impl Fn(Duration) -> TcpInfo) -> Option<Duration> {
        let start = Instant::now();
        let mut judge = Judge::new(start);
        (0..120).map(|n| TICK * n).find(|&at| judge.verdict(&info(at), start + at).is_some())
    }

    fn quiet(silent: Duration) -> TcpInfo {
        TcpInfo {
            last_ack_recv: silent,
            last_data_recv: Duration::from_secs(3600),
            bytes_acked: 7,
            ..TcpInfo::default()
        }
    }

    #[test]
    fn quiet_with_answered_keepalives_lives() {
        assert_eq!(killed_after(|_| quiet(SECOND)), None);
    }

    #[test]
    fn unanswered_keepalives_kill_after_ten_seconds() {
        assert_eq!(killed_after(quiet), Some(10 * SECOND));
    }

    #[test]
    fn bytes_in_flight_that_nobody_acknowledges_kill_sooner() {
        let killed = killed_after(|at| TcpInfo { unacked: 1, ..quiet(SECOND + at) });
        assert!(killed.is_some_and(|at| at <= 4 * SECOND), "{killed:?}");
    }

    #[test]
    fn acknowledgements_or_data_keep_it_alive() {
        let acked = |at: Duration| TcpInfo {
            unacked: 9,
            bytes_acked: at.as_millis() as u64,
            ..quiet(Duration::ZERO)
        };
        assert_eq!(killed_after(acked), None);
        let data =
            |_| TcpInfo { unacked: 9, last_data_recv: SECOND, ..quiet(Duration::from_secs(60)) };
        assert_eq!(killed_after(data), None);
    }

    #[test]
    fn a_closed_window_is_not_death() {
        let full = |at| TcpInfo { notsent_bytes: 5000, probes: 1, ..quiet(at) };
        assert_eq!(killed_after(full), None);
    }

    #[test]
    fn bytes_that_our_own_netfilter_drops_are() {
        let dropped = |at: Duration| TcpInfo {
            notsent_bytes: 50,
            probes: [0, 1, 2, 3, 4][at.as_secs().min(4) as usize],
            ..quiet(at)
        };
        assert_eq!(killed_after(dropped), Some(4 * SECOND));
    }

    #[test]
    fn a_late_look_is_no_verdict() {
        let start = Instant::now();
        let mut judge = Judge::new(start);
        let late = start + Duration::from_secs(30);
        assert!(judge.verdict(&quiet(30 * SECOND), late).is_none());
        assert!(judge.verdict(&quiet(31 * SECOND), late + SECOND).is_some());
    }
}
