//! Asks an endpoint that may lead to several apiservers on further connections: the connection of the prober has reached
//! only one of them.

use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::Notify;

use super::connection::ProbeConnection;
use super::reachability::PROBE_STREAMS;
use crate::upstream::Upstream;
use crate::upstream::backends::{dial_backend, question_credential};
use crate::upstream::connection::Connection;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::Endpoint;

/// Number of further connections. With that of the prober, each of them reaches the same one of three backends at random in
/// one of 81 cases.
pub const FURTHER_CONNECTIONS: usize = 4;

/// Opens a connection for a few questions; `None` if it was not opened.
pub async fn open_further(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
) -> Option<ProbeConnection> {
    let class = CredentialClass::Probe;
    let tls = upstream.credentials.tls(class)?;
    let limit = endpoint.connect_timeout(upstream.config().health.connect_timeout);
    let credential = question_credential(upstream, class, &tls);
    let dialed =
        dial_backend(upstream, (endpoint, &tls), limit, PROBE_STREAMS, &credential).await.ok()?;
    let (config, memory) = (upstream.config(), &upstream.memory);
    let changed = Rc::new(Notify::new());
    let connection = Connection::start(dialed, endpoint, class, &tls, &config, memory, changed);
    Some(ProbeConnection(connection))
}
