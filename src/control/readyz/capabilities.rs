//! Reads on the connection of the prober whether an apiserver honours the parameters of watches that not every apiserver
//! honours ([`crate::upstream::capabilities`]).
//!
//! | wanted | read |
//! |---|---|
//! | shards | a list of services with `shardSelector` and a name that none has: an apiserver that serves shards echoes the selector in `metadata.shardInfo`. Without the right to list services: `/metrics` |
//! | equal servers | build and feature gates in `/metrics` |
//!
//! The reads run beside the probes and do not delay them.

use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use http::{HeaderValue, StatusCode};
use jackstay_core::kubernetes_features::{FeatureReader, KubernetesFeatures};
use jackstay_core::watch::parameters::{Capability, Parameters};
use jackstay_sys::clock;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::sync::Notify;
use tokio::time::{sleep_until, timeout};

use super::request::{fetch, fetch_pieces};
use crate::upstream::Upstream;
use crate::upstream::capabilities::Capabilities;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::Endpoint;

/// Limit of each read.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a read that has failed, or was refused: the rights of the prober may change.
const RETRY_PAUSE: Duration = Duration::from_secs(10);
/// The list of no services that shows whether shards are served. It is answered from the watch cache.
const SHARD: &str = "/api/v1/services?fieldSelector=metadata.name%3Djackstay-none&resourceVersion=0&shardSelector=\
                     shardRange(object.metadata.uid,%270x0000000000000000%27,%270x8000000000000000%27)";
const METRICS: &str = "/metrics";

/// Reads the abilities of one endpoint.
#[derive(Debug, Default)]
pub struct CapabilityReader {
    /// `None` while the prober has none.
    connection: RefCell<Option<Weak<Connection>>>,
    connected: Notify,
    /// When a failed read is repeated.
    retry_at: Cell<Option<Instant>>,
}

/// The beginning of a list.
#[derive(Deserialize)]
struct List {
    metadata: ListMeta,
}

#[derive(Deserialize)]
struct ListMeta {
    #[serde(rename = "shardInfo")]
    shard_info: Option<IgnoredAny>,
}

impl CapabilityReader {
    /// Reads on `connection` from now on. One that replaces a connection may lead to another process.
    pub fn set_connection(&self, connection: &Rc<Connection>, endpoint: &Endpoint) {
        let new = Rc::downgrade(connection);
        match self.connection.replace(Some(Weak::clone(&new))) {
            Some(same) if same.ptr_eq(&new) => return,
            Some(_) => endpoint.replace_process(),
            None => {}
        }
        self.retry_at.set(None);
        self.connected.notify_one();
    }

    /// Called when the prober has no connection: the process of the apiserver may have ended.
    pub fn connection_lost(&self, endpoint: &Endpoint) {
        self.connection.take();
        endpoint.replace_process();
    }

    /// Reads what is wanted and not known, until the future is dropped.
    pub async fn run(&self, upstream: &Upstream, endpoint: &Endpoint) {
        loop {
            let raised = upstream.capabilities.raised();
            let wanted = upstream.capabilities.wanted();
            tokio::select! {
                () = raised => {}
                () = self.connected.notified() => {}
                () = self.read_when_due(upstream, endpoint, wanted) => {}
            }
        }
    }

    /// Waits for ever if nothing is to be read.
    async fn read_when_due(&self, upstream: &Upstream, endpoint: &Endpoint, wanted: Parameters) {
        let process = endpoint.process();
        let connection = self.connection.borrow().as_ref().and_then(Weak::upgrade);
        let live = connection.filter(|one| one.state() == ConnectionState::Live);
        let is_known = matches!(process.capability(wanted), Capability::Known(_));
        let (false, Some(connection)) = (is_known, live) else {
            if !is_known && !upstream.has_probe_credential() {
                process.record(unavailable("no credential: set readyz.token_file".to_owned()));
                upstream.capabilities.notify_recorded();
            }
            return std::future::pending().await;
        };
        if let Some(at) = self.retry_at.get() {
            sleep_until(at.into()).await;
        }
        let token = upstream.credentials.probe_token().and_then(|token| token.header());
        let capabilities = read(&connection, token, wanted).await;
        let failed = capabilities.error.as_deref();
        self.retry_at.set(failed.map(|_| clock::now() + RETRY_PAUSE));
        if let Some(reason) = failed {
            let (upstream, endpoint) = (&*upstream.name, &*endpoint.label);
            tracing::debug!(upstream, endpoint, reason, "abilities of endpoint unknown");
        }
        process.record(capabilities);
        upstream.capabilities.notify_recorded();
    }
}

async fn read(
    connection: &Rc<Connection>,
    token: Option<HeaderValue>,
    wanted: Parameters,
) -> Capabilities {
    let mut errors = Vec::new();
    if wanted == Parameters::Sharded {
        match within_limit("list of services", serves_shards(connection, token.clone())).await {
            Ok(sharded) => return of_shards(sharded),
            Err(error) => errors.push(error),
        }
    }
    match within_limit(METRICS, features(connection, token)).await {
        Ok(KubernetesFeatures { fingerprint, sharded }) => {
            let features = Capability::Known(fingerprint);
            Capabilities { features, ..of_shards(sharded) }
        }
        Err(error) => {
            errors.push(error);
            unavailable(errors.join("; "))
        }
    }
}

fn of_shards(sharded: bool) -> Capabilities {
    Capabilities { sharded: Capability::Known(sharded.into()), ..Capabilities::default() }
}

fn unavailable(error: String) -> Capabilities {
    let (sharded, features) = (Capability::Unavailable, Capability::Unavailable);
    Capabilities { sharded, features, error: Some(error) }
}

async fn within_limit<T>(
    what: &str,
    read: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let late = |_| Err(format!("not answered within {} s", ANSWER_TIMEOUT.as_secs()));
    let read = timeout(ANSWER_TIMEOUT, read).await.unwrap_or_else(late);
    read.map_err(|error| format!("{what}: {error}"))
}

/// Whether the apiserver serves shards. One that does not know the parameter, or whose gate is off, ignores it.
async fn serves_shards(
    connection: &Rc<Connection>,
    token: Option<HeaderValue>,
) -> Result<bool, String> {
    let (status, body) = fetch(connection, SHARD, token).await.map_err(|e| e.to_string())?;
    interpret_list(status, &body)
}

fn interpret_list(status: StatusCode, body: &[u8]) -> Result<bool, String> {
    if status != StatusCode::OK {
        return Err(status.to_string());
    }
    let list: List = serde_json::from_slice(body).map_err(|_| "no list".to_owned())?;
    Ok(list.metadata.shard_info.is_some())
}

async fn features(
    connection: &Rc<Connection>,
    token: Option<HeaderValue>,
) -> Result<KubernetesFeatures, String> {
    let mut reader = FeatureReader::default();
    let read = |piece: &[u8]| {
        if reader.push(piece) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let status = fetch_pieces(connection, METRICS, token, read).await.map_err(|e| e.to_string())?;
    if status != StatusCode::OK {
        return Err(status.to_string());
    }
    reader.finish().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_shows_whether_shards_are_served() {
        let interpret = |code: u16, body: &str| {
            interpret_list(StatusCode::from_u16(code).unwrap(), body.as_bytes())
        };
        let echo = r#"{"kind":"ServiceList","metadata":{"resourceVersion":"7","shardInfo":{"selector":"x"}},"items":[]}"#;
        assert_eq!(interpret(200, echo), Ok(true));
        assert_eq!(interpret(200, r#"{"metadata":{"resourceVersion":"7"},"items":[]}"#), Ok(false));
        assert_eq!(interpret(200, r#"{"metadata":{"shardInfo":null}}"#), Ok(false));
        assert_eq!(interpret(200, "<html>"), Err("no list".to_owned()));
        assert_eq!(interpret(403, echo), Err("403 Forbidden".to_owned()));
    }
}
