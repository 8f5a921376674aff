//! The prober's own connections: how they are opened, and when they can be asked on.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::reachability::ReachabilityCheck;
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState, DrainReason};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::dial::dial_h2;
use crate::upstream::endpoint::{ConnectFailure, Endpoint};

/// Pause between two handshakes with a server that does not speak HTTP/2, so that there is no
/// connection to listen to.
const HANDSHAKE_INTERVAL: Duration = Duration::from_secs(1);
/// How often a disconnected prober looks whether it may connect.
const RECONNECT_TICK: Duration = Duration::from_millis(50);

/// The prober's connection: it drains when this is dropped, since no pool closes it.
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

/// Whether a connection can be asked on, and shows the certificate that is in use now.
pub fn is_current(upstream: &Upstream, connection: &Connection) -> bool {
    let generation = upstream.credentials.tls(CredentialClass::Probe).map(|tls| tls.generation);
    let current = generation == Some(connection.generation);
    if !current {
        connection.drain(DrainReason::CertificateRotated);
    }
    current && connection.state() == ConnectionState::Live
}

/// Waits until a connection takes no new streams any more.
pub async fn gone(connection: &Connection) {
    while connection.state() == ConnectionState::Live
        || connection.state() == ConnectionState::Suspect
    {
        connection.changed().await;
    }
}

/// Connects; `None` after an attempt that failed, or where it is not the time for one.
pub async fn connect(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    witness: &ReachabilityCheck,
) -> Option<Rc<Connection>> {
    let tls = upstream.credentials.tls(CredentialClass::Probe)?;
    if !endpoint.claim_connect_attempt(!upstream.is_usable(), Instant::now()) {
        sleep(RECONNECT_TICK).await;
        return None;
    }
    let limit = endpoint.connect_timeout(upstream.config().health.connect_timeout);
    match dial_h2(&upstream.outgoing(), endpoint, &tls.h2, limit).await {
        Ok(established) => {
            endpoint.metrics.dialled("ok");
            Some(witness.start(established, upstream, endpoint, &tls))
        }
        Err(ConnectFailure::NoH2(_)) if !upstream.config().used_by.terminate => {
            // Passthrough listeners need no HTTP/2: the TLS handshake succeeded.
            endpoint.metrics.dialled("ok");
            endpoint.connected();
            endpoint.readyz_not_probed("TLS handshake only: it does not speak HTTP/2 by ALPN");
            sleep(HANDSHAKE_INTERVAL).await;
            None
        }
        Err(failure) => {
            endpoint.record_connect_failure(&failure);
            endpoint.connect_failed(failure, Instant::now());
            None
        }
    }
}
