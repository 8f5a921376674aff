//! Detects that an apiserver's process is stopped or unreachable, on behalf of passthrough flows.
//!
//! jackstay can send no PING on a connection that it passes through. If the process is stopped, its
//! kernel still acknowledges, and the flow looks alive. The prober's connection shows the truth:
//!
//! | observation | conclusion |
//! |---|---|
//! | PONGs arrive | the process is alive |
//! | a PING is late, and a new handshake succeeds | alive; that connection was lost and is replaced |
//! | neither a PONG nor a new handshake for 2.5 s | dead: the endpoint is ejected |
//!
//! A lost packet is not enough for the last row: the kernel retransmits PINGs after 200 ms, and each
//! handshake is raced by a second one.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use crate::net::sockets::connector::Connector;
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState, DrainReason};
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::dial::{DialedConnection, dial_h2};
use crate::upstream::endpoint::{ConnectFailure, ConnectTimeout, Endpoint, Observation};

/// Time without a byte from the peer, while PINGs are sent, after which it counts as silent.
const SILENT_AFTER: Duration = Duration::from_millis(2_500);
/// Time for which a new handshake must have been tried. With a PING each second, the verdict falls at
/// most 3 s after the last sign of life.
const HANDSHAKE_FOR: Duration = Duration::from_millis(1_800);
/// Limit for one handshake, including the second one that races it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Pause after a refused handshake.
const HANDSHAKE_PAUSE: Duration = Duration::from_millis(200);
/// Interval of the checks during an examination.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// A check that is later than this suggests that this process did not run.
const CHECK_LATE: Duration = Duration::from_millis(250);
/// How long the verdict is then withheld, once in an examination.
const GRACE: Duration = Duration::from_millis(500);

/// Checks whether one endpoint can be reached.
#[derive(Debug, Default)]
pub struct ReachabilityCheck {
    current: RefCell<Option<Rc<Connection>>>,
    replacement: RefCell<Option<Rc<Connection>>>,
    /// Notified when the connection changes its state.
    changed: Rc<Notify>,
}

impl ReachabilityCheck {
    /// Starts a connection for the prober, whose state changes this check observes.
    pub fn start_connection(
        &self,
        established: DialedConnection,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
        tls: &ClientTls,
    ) -> Rc<Connection> {
        Connection::start(
            established,
            endpoint,
            CredentialClass::Probe,
            tls,
            &upstream.config(),
            Rc::clone(&self.changed),
        )
    }

    /// Observes `connection` from now on.
    pub fn set_connection(&self, connection: &Rc<Connection>) {
        *self.current.borrow_mut() = Some(Rc::clone(connection));
    }

    /// Takes the connection that has replaced a lost one, if there is one.
    pub fn take_replacement(&self) -> Option<Rc<Connection>> {
        self.replacement.borrow_mut().take()
    }

    /// Examines the endpoint whenever the connection becomes suspect, until the future is dropped.
    pub async fn run(&self, upstream: &Upstream, endpoint: &Arc<Endpoint>) {
        loop {
            let suspect = self.until_suspect().await;
            if upstream.config().used_by.passthrough {
                self.examine(&suspect, upstream, endpoint).await;
            }
            self.until_settled(&suspect).await;
        }
    }

    /// Waits until a suspect connection is no longer suspect, or no longer the current one. Without
    /// this wait, [`Self::run`] would spin on a suspect connection that it does not examine.
    async fn until_settled(&self, suspect: &Rc<Connection>) {
        let is_suspect = || suspect.state() == ConnectionState::Suspect;
        self.until(|| (!self.is_current(suspect) || !is_suspect()).then_some(())).await;
    }

    /// Waits until the current connection becomes suspect.
    async fn until_suspect(&self) -> Rc<Connection> {
        let is_suspect = |current: &Rc<Connection>| current.state() == ConnectionState::Suspect;
        self.until(|| self.current.borrow().clone().filter(is_suspect)).await
    }

    /// Checks after each change of a connection until `check` returns a value.
    async fn until<T>(&self, check: impl Fn() -> Option<T>) -> T {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the check, so that no change is missed between check and wait.
            changed.as_mut().enable();
            if let Some(value) = check() {
                return value;
            }
            changed.await;
        }
    }

    fn is_current(&self, connection: &Rc<Connection>) -> bool {
        self.current.borrow().as_ref().is_some_and(|current| Rc::ptr_eq(current, connection))
    }

    /// Finds out whether the process behind a suspect connection still answers.
    async fn examine(
        &self,
        suspect: &Rc<Connection>,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) {
        let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else { return };
        let connector = upstream.outgoing();
        let mut handshake = std::pin::pin!(handshake(&connector, endpoint, &tls));
        let mut detector = SilenceDetector::new(Instant::now());
        let mut reported = false;
        loop {
            tokio::select! {
                established = &mut handshake => {
                    if let Some(established) = established {
                        let new = self.start_connection(established, upstream, endpoint, &tls);
                        *self.replacement.borrow_mut() = Some(new);
                    }
                    suspect.close(DrainReason::Superseded);
                    return;
                }
                () = self.changed.notified() => {}
                () = sleep_until(detector.check_at) => {}
            }
            let now = Instant::now();
            if suspect.state() == ConnectionState::Live {
                return endpoint.observe(Observation::Responsive);
            }
            if !self.is_current(suspect) || (reported && suspect.state() == ConnectionState::Dead) {
                // The prober reconnects.
                return;
            }
            if detector.is_dead(suspect.last_received(), now) && !reported {
                reported = true;
                endpoint.observe(Observation::Unresponsive(
                    "no PONG and no new handshake for 2.5 s: stopped or unreachable",
                ));
            }
        }
    }
}

/// Tells a silent process from one whose bytes this process was too late to read.
#[derive(Debug)]
struct SilenceDetector {
    /// No verdict before this.
    verdict_from: Instant,
    /// When the next check is due.
    check_at: Instant,
    /// A check was late.
    was_late: bool,
}

impl SilenceDetector {
    /// The detector for a connection that became suspect `now`.
    fn new(now: Instant) -> Self {
        Self { verdict_from: now + HANDSHAKE_FOR, check_at: now + CHECK_INTERVAL, was_late: false }
    }

    /// Whether the peer is dead if its last byte arrived at `heard`. The first late check withholds
    /// the verdict for [`GRACE`]. Later ones do not: where every check is late, silence must still
    /// be detected.
    fn is_dead(&mut self, heard: Instant, now: Instant) -> bool {
        if now > self.check_at + CHECK_LATE && !std::mem::replace(&mut self.was_late, true) {
            self.verdict_from = self.verdict_from.max(now + GRACE);
        }
        self.check_at = now + CHECK_INTERVAL;
        now >= self.verdict_from && now >= heard + SILENT_AFTER
    }
}

/// Connects until it succeeds. `None` if a process answers but its certificate is not trusted, or it
/// does not speak HTTP/2; the prober reports that.
async fn handshake(
    connector: &Connector,
    endpoint: &Arc<Endpoint>,
    tls: &ClientTls,
) -> Option<DialedConnection> {
    loop {
        match dial_h2(connector, endpoint, &tls.h2, ConnectTimeout::fixed(HANDSHAKE_TIMEOUT)).await
        {
            Ok(established) => return Some(established),
            Err(ConnectFailure::NoH2(_) | ConnectFailure::TlsFailed(_)) => return None,
            Err(ConnectFailure::Refused(_) | ConnectFailure::LocalShortage(_)) => {
                sleep(HANDSHAKE_PAUSE).await;
            }
            Err(ConnectFailure::Timeout(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a detector on a connection whose last byte came 1 s before the suspicion. This process
    /// does not run for the first `paused`, and then makes each check `late`. Returns the time from
    /// the suspicion to the verdict.
    fn dead_after(paused: Duration, late: Duration) -> Option<Duration> {
        let suspected = Instant::now() + Duration::from_secs(1);
        let heard = suspected - Duration::from_secs(1);
        let mut detector = SilenceDetector::new(suspected);
        let mut now = suspected + paused;
        while now < suspected + Duration::from_secs(60) {
            now = now.max(detector.check_at) + late;
            if detector.is_dead(heard, now) {
                return Some(now - suspected);
            }
        }
        None
    }

    #[test]
    fn is_dead_late_checks_withhold_the_verdict_once() {
        const MS: Duration = Duration::from_millis(1);
        for (paused, late, expected) in [
            (0, 0, 1_800),
            (0, 240, 2_030),
            // Each check is late; only the first one counts, and its grace is over by the verdict.
            (0, 260, 1_860),
            (0, 1_500, 3_100),
            // A process that was paused first reads what has arrived meanwhile.
            (10_000, 0, 10_500),
            (10_000, 260, 10_880),
        ] {
            let dead = dead_after(paused * MS, late * MS);
            assert_eq!(dead, Some(expected * MS), "{late} ms late after {paused} ms");
        }
    }
}
