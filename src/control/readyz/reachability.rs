//! Listens to the prober's connection on behalf of those who cannot: a passed connection carries
//! nothing of ours, so that a stopped process, whose kernel still acknowledges, looks alive to it.
//!
//! | what is seen | what it means |
//! |---|---|
//! | PONGs | alive |
//! | a PING is late, a fresh handshake is done | alive: that one connection was lost, and is replaced |
//! | neither a PONG nor a fresh handshake for 2.5 s | dead for whoever passes connections through |
//!
//! A lost packet is not enough: PINGs are sent again every 200 ms by the kernel, and a handshake is
//! raced by a second one.

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
use crate::upstream::dial::{Established, dial_h2};
use crate::upstream::endpoint::{ConnectFailure, ConnectTimeout, Endpoint};

/// Nothing heard for this long, while it was asked, is silence.
const SILENT_AFTER: Duration = Duration::from_millis(2_500);
/// So long a fresh handshake must have been under way. With a PING each second the two together
/// come at most 3 s after the last sign of life.
const HANDSHAKE_FOR: Duration = Duration::from_millis(1_800);
/// One fresh handshake, which is raced by a second one.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(3);
/// Pause after one that was refused.
const PAUSE: Duration = Duration::from_millis(200);
/// How often the evidence is looked at.
const LOOK: Duration = Duration::from_millis(50);
/// A look that is later than this says more about us.
const LATE: Duration = Duration::from_millis(250);
/// How long verdicts are withheld then, once for each suspicion.
const GRACE: Duration = Duration::from_millis(500);

/// Listens to one endpoint.
#[derive(Debug, Default)]
pub struct ReachabilityCheck {
    current: RefCell<Option<Rc<Connection>>>,
    replacement: RefCell<Option<Rc<Connection>>>,
    /// Told of every change of the connection's state.
    changed: Rc<Notify>,
}

impl ReachabilityCheck {
    /// Takes a connection for the prober into use.
    pub fn start(
        &self,
        established: Established,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
        tls: &ClientTls,
    ) -> Rc<Connection> {
        Connection::start(
            established,
            endpoint,
            CredentialClass::Probe,
            tls,
            &upstream.settings(),
            Rc::clone(&self.changed),
        )
    }

    /// Listens to this connection from now on.
    pub fn listen_to(&self, connection: &Rc<Connection>) {
        *self.current.borrow_mut() = Some(Rc::clone(connection));
    }

    /// A connection that took the place of a lost one.
    pub fn replacement(&self) -> Option<Rc<Connection>> {
        self.replacement.borrow_mut().take()
    }

    /// Listens for ever.
    pub async fn watch(&self, upstream: &Upstream, endpoint: &Arc<Endpoint>) {
        loop {
            let suspect = self.suspect().await;
            if upstream.config().used_by.passthrough {
                self.examine(&suspect, upstream, endpoint).await;
            }
            self.settled(&suspect).await;
        }
    }

    /// Waits until a suspect is none any more, or is listened to no longer: without this, one that
    /// nobody examines would be looked at without an end.
    async fn settled(&self, suspect: &Rc<Connection>) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let current = self.current.borrow().as_ref().is_some_and(|c| Rc::ptr_eq(c, suspect));
            if !current || suspect.state() != ConnectionState::Suspect {
                return;
            }
            changed.await;
        }
    }

    /// Waits until the current connection becomes suspect.
    async fn suspect(&self) -> Rc<Connection> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the look, so that no change falls between look and wait.
            changed.as_mut().enable();
            let current = self.current.borrow().clone();
            if let Some(current) =
                current.filter(|current| current.state() == ConnectionState::Suspect)
            {
                return current;
            }
            changed.await;
        }
    }

    /// Finds out whether anybody is still there. Returns when that is settled.
    async fn examine(
        &self,
        suspect: &Rc<Connection>,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) {
        let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else { return };
        let outgoing = upstream.outgoing();
        let mut fresh = std::pin::pin!(handshake(&outgoing, endpoint, &tls));
        let mut silence = Silence::new(Instant::now());
        let mut told = false;
        loop {
            tokio::select! {
                established = &mut fresh => {
                    if let Some(established) = established {
                        let connection = self.start(established, upstream, endpoint, &tls);
                        *self.replacement.borrow_mut() = Some(connection);
                    }
                    suspect.close(DrainReason::Superseded);
                    return;
                }
                () = self.changed.notified() => {}
                () = sleep_until(silence.look_at) => {}
            }
            let now = Instant::now();
            if suspect.state() == ConnectionState::Live {
                return endpoint.mark_responsive();
            }
            let moved_on =
                self.current.borrow().as_ref().is_none_or(|now| !Rc::ptr_eq(now, suspect));
            if moved_on || (told && suspect.state() == ConnectionState::Dead) {
                // The prober connects anew.
                return;
            }
            if silence.is_death(suspect.last_received(), now) && !told {
                told = true;
                endpoint.mark_unresponsive(
                    "no PONG and no fresh handshake for 2.5 s: stopped, or cut off",
                );
            }
        }
    }
}

/// Tells a process that is silent from one that was not listened to.
#[derive(Debug)]
struct Silence {
    /// No verdict before this.
    verdict_from: Instant,
    /// When the next look is due.
    look_at: Instant,
    /// A look was late.
    distrusted: bool,
}

impl Silence {
    /// Of a connection that has become suspect.
    fn new(now: Instant) -> Self {
        Self { verdict_from: now + HANDSHAKE_FOR, look_at: now + LOOK, distrusted: false }
    }

    /// Whether nothing since `heard` means death. A look that comes late withholds the verdict once:
    /// where looks are always late, silence is noticed all the same.
    fn is_death(&mut self, heard: Instant, now: Instant) -> bool {
        if now > self.look_at + LATE && !std::mem::replace(&mut self.distrusted, true) {
            self.verdict_from = self.verdict_from.max(now + GRACE);
        }
        self.look_at = now + LOOK;
        now >= self.verdict_from && now >= heard + SILENT_AFTER
    }
}

/// Connects anew until it works; `None` if there is an answer, but neither trust nor HTTP/2.
async fn handshake(
    outgoing: &Connector,
    endpoint: &Arc<Endpoint>,
    tls: &ClientTls,
) -> Option<Established> {
    loop {
        match dial_h2(outgoing, endpoint, &tls.h2, ConnectTimeout::fixed(HANDSHAKE_LIMIT)).await {
            Ok(established) => return Some(established),
            // Somebody answers; what is wrong with the answer is the prober's business.
            Err(ConnectFailure::NoH2(_) | ConnectFailure::TlsFailed(_)) => return None,
            Err(ConnectFailure::Refused(_) | ConnectFailure::LocalShortage(_)) => {
                sleep(PAUSE).await
            }
            Err(ConnectFailure::Timeout(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks `late` after each is due, the first time after `paused`: how long after the suspicion
    /// the connection, on which the last byte came a second before, is dead.
    fn dead_after(paused: Duration, late: Duration) -> Option<Duration> {
        let suspected = Instant::now() + Duration::from_secs(1);
        let heard = suspected - Duration::from_secs(1);
        let mut silence = Silence::new(suspected);
        let mut now = suspected + paused;
        while now < suspected + Duration::from_secs(60) {
            now = now.max(silence.look_at) + late;
            if silence.is_death(heard, now) {
                return Some(now - suspected);
            }
        }
        None
    }

    #[test]
    fn late_look_withholds_the_verdict_on_a_silent_process_once() {
        const MS: Duration = Duration::from_millis(1);
        for (paused, late, expected) in [
            (0, 0, 1_800),
            (0, 240, 2_030),
            // Each look is late: the first one alone counts, and is forgiven by the time of the verdict.
            (0, 260, 1_860),
            (0, 1_500, 3_100),
            // A process that was paused reads first what has come meanwhile.
            (10_000, 0, 10_500),
            (10_000, 260, 10_880),
        ] {
            let dead = dead_after(paused * MS, late * MS);
            assert_eq!(dead, Some(expected * MS), "{late} ms late after {paused} ms");
        }
    }
}
