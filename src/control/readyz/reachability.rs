//! Detects that an apiserver's process is stopped or unreachable, on behalf of passthrough flows and of watches over
//! WebSocket.
//!
//! jackstay can send no PING on a connection that it passes through. If the apiserver's process is
//! stopped, its kernel still acknowledges segments, so a flow looks alive. The prober's connection
//! carries PINGs, which only the process answers:
//!
//! | observation on the prober's connection | conclusion |
//! |---|---|
//! | PONGs arrive | the process is alive |
//! | a PONG is late, and a new handshake succeeds | the process is alive; the connection was lost and is replaced |
//! | no byte arrives for 2.5 s, and no new handshake succeeds | the process is stopped or unreachable: the endpoint is ejected |
//!
//! The loss of one packet does not lead to the last row: the kernel retransmits a PING after 200 ms, and
//! each handshake is raced by a second one.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::line_delay::handshake_delay;
use jackstay_core::probe::silence::SilenceDetector;
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until};

use crate::upstream::Upstream;
use crate::upstream::backends::{dial_backend, question_credential};
use crate::upstream::connection::{Connection, ConnectionState, DrainReason};
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::dial::DialedConnection;
use crate::upstream::endpoint::{ConnectFailureKind, ConnectTimeout, Endpoint, Observation};

/// Streams that the prober opens at a time on a connection: `/readyz`, `/livez`, `/version`, and questions about the lag
/// and the capabilities.
pub const PROBE_STREAMS: usize = 5;
/// Limit for one handshake, including the second one that races it.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Pause after a refused handshake.
const HANDSHAKE_PAUSE: Duration = Duration::from_millis(200);

/// Checks whether one endpoint can be reached.
#[derive(Debug, Default)]
pub struct ReachabilityCheck {
    current: RefCell<Option<Rc<Connection>>>,
    replacement: RefCell<Option<Rc<Connection>>>,
    /// Notified when a connection that this check has started changes its state.
    changed: Rc<Notify>,
}

impl ReachabilityCheck {
    /// Starts a connection for the prober. Its state changes wake this check.
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
            &upstream.memory,
            Rc::clone(&self.changed),
        )
    }

    /// Observes `connection` from now on.
    pub fn set_connection(&self, connection: &Rc<Connection>) {
        *self.current.borrow_mut() = Some(Rc::clone(connection));
    }

    /// Whether the observed connection is live and has another credential than this `generation`.
    pub fn has_older(&self, generation: u64) -> bool {
        let current = self.current.borrow();
        current.as_ref().is_some_and(|current| {
            current.generation != generation && current.state() == ConnectionState::Live
        })
    }

    /// Takes the connection that an examination has opened in place of a lost one.
    pub fn take_replacement(&self) -> Option<Rc<Connection>> {
        self.replacement.borrow_mut().take()
    }

    /// Examines the endpoint whenever the connection becomes suspect, until the future is dropped.
    pub async fn run(&self, upstream: &Upstream, endpoint: &Arc<Endpoint>) {
        loop {
            let suspect = self.until_suspect().await;
            if upstream.examines(endpoint) {
                self.examine(&suspect, upstream, endpoint).await;
            }
            self.until_settled(&suspect).await;
        }
    }

    /// Waits until `suspect` is no longer suspect, or no longer the current connection. Without this
    /// wait, [`Self::run`] would loop without a pause on a suspect connection that it does not examine.
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

    /// Determines whether the apiserver behind a suspect connection still answers.
    async fn examine(
        &self,
        suspect: &Rc<Connection>,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) {
        let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else { return };
        let mut handshake = std::pin::pin!(handshake(upstream, endpoint, &tls));
        let mut detector = SilenceDetector::new(clock::now());
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
                () = sleep_until(detector.check_at.into()) => {}
            }
            let now = clock::now();
            if suspect.state() == ConnectionState::Live {
                return endpoint.observe(Observation::Responsive);
            }
            if !self.is_current(suspect) || (reported && suspect.state() == ConnectionState::Dead) {
                // The prober reconnects.
                return;
            }
            if detector.is_dead(suspect.last_received(), endpoint.line_delay(now), now) && !reported
            {
                reported = true;
                endpoint.observe(Observation::Unresponsive(
                    "no PONG and no new handshake for 2.5 s: stopped or unreachable",
                ));
            }
        }
    }
}

/// Connects until an attempt succeeds. `None` if the server answers, but its certificate is not trusted or
/// it does not speak HTTP/2; the prober reports that.
async fn handshake(
    upstream: &Upstream,
    endpoint: &Arc<Endpoint>,
    tls: &ClientTls,
) -> Option<DialedConnection> {
    loop {
        let limit = HANDSHAKE_TIMEOUT + handshake_delay(endpoint.line_delay(clock::now()));
        let limit = ConnectTimeout::fixed(limit);
        let credential = question_credential(upstream, CredentialClass::Probe, tls);
        let dial = dial_backend(upstream, (endpoint, tls), limit, PROBE_STREAMS, &credential);
        let failure = match dial.await {
            Ok(established) => return Some(established),
            Err(failure) => failure,
        };
        match failure.kind {
            ConnectFailureKind::NoH2
            | ConnectFailureKind::TlsFailed
            | ConnectFailureKind::Unverified => return None,
            ConnectFailureKind::Failed | ConnectFailureKind::LocalShortage => {
                sleep(HANDSHAKE_PAUSE).await;
            }
            ConnectFailureKind::Timeout => {}
        }
    }
}
