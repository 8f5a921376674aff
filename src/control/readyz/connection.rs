//! Opens the prober's connections, and decides how long they can be used.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::probe::prober::RECONNECT_CHECK;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::reachability::{PROBE_STREAMS, ReachabilityCheck};
use crate::upstream::Upstream;
use crate::upstream::backends::{dial_backend, question_credential};
use crate::upstream::connection::{Connection, ConnectionState, DrainReason};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::{ConnectFailureKind, Endpoint, Observation};

/// Interval of TLS handshakes with a server that does not speak HTTP/2; their connections are closed.
const HANDSHAKE_INTERVAL: Duration = Duration::from_secs(1);

/// A connection of the prober. It is in no pool, so it drains when this value is dropped.
pub struct ProbeConnection(pub Rc<Connection>);

impl std::ops::Deref for ProbeConnection {
    type Target = Rc<Connection>;

    fn deref(&self) -> &Rc<Connection> {
        &self.0
    }
}

impl Drop for ProbeConnection {
    fn drop(&mut self) {
        self.0.drain(DrainReason::ProbingEnded);
    }
}

/// Whether a connection is live and can carry probes. One with an older certificate or CA bundle can, until a
/// [`Succession`](super::succession::Succession) has replaced it. One that shows a certificate while probes show none any
/// more, or the other way round, starts to drain.
pub fn is_usable(upstream: &Upstream, connection: &Connection) -> bool {
    let tls = upstream.credentials.tls(CredentialClass::Probe);
    let is_alike =
        tls.is_some_and(|tls| tls.certificate.is_some() == connection.shows_certificate());
    if !is_alike {
        connection.drain(DrainReason::CertificateRotated);
    }
    is_alike && connection.state() == ConnectionState::Live
}

/// Makes one attempt to connect. `None` if it fails, or the endpoint's backoff allows no attempt yet. A failure is reported
/// if the connection would replace one that works.
pub async fn connect(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    reachability: &ReachabilityCheck,
) -> Option<ProbeConnection> {
    let tls = upstream.credentials.tls(CredentialClass::Probe)?;
    if !endpoint.claim_connect_attempt(!upstream.is_usable(), clock::now()) {
        sleep(RECONNECT_CHECK).await;
        return None;
    }
    let limit = endpoint.connect_timeout(upstream.config().health.connect_timeout);
    let credential = question_credential(upstream, CredentialClass::Probe, &tls);
    match dial_backend(upstream, (endpoint, &tls), limit, PROBE_STREAMS, &credential).await {
        Ok(established) => {
            endpoint.metrics.dialled("ok");
            let new = reachability.start_connection(established, upstream, endpoint, &tls);
            Some(ProbeConnection(new))
        }
        Err(failure)
            if failure.kind == ConnectFailureKind::NoH2 && !upstream.config().used_by.terminate =>
        {
            // Only passthrough listeners use this upstream. They do not need HTTP/2, and the TLS
            // handshake has succeeded.
            endpoint.metrics.dialled("ok");
            endpoint.observe(Observation::Connected);
            endpoint.observe(Observation::ReadyzNotProbed(
                "TLS handshake only: it does not speak HTTP/2 by ALPN",
            ));
            sleep(HANDSHAKE_INTERVAL).await;
            None
        }
        Err(mut failure) => {
            if failure.kind == ConnectFailureKind::TlsFailed && !upstream.config().used_by.terminate
            {
                // Only flows use this upstream, whose clients verify the server themselves.
                failure.kind = ConnectFailureKind::Unverified;
            }
            if reachability.has_older(tls.generation) {
                let (class, now) = (CredentialClass::Probe, clock::now());
                let waited_for = (&**endpoint, failure.reason.as_str());
                upstream.successions.wait(class, tls.generation, waited_for, now);
            }
            endpoint.connect_failed(failure, clock::now());
            None
        }
    }
}
