//! Reads the version of an apiserver on the connection of its prober.
//!
//! An apiserver has another version only after a restart, which ends the connection. So `/version` is requested with the
//! first `/readyz` on a connection, before its result counts: an apiserver that has been upgraded is not ready before
//! its new version is known. By default every user may read it, also an anonymous one (`system:public-info-viewer`).

use std::time::{Duration, Instant};

use http::{HeaderValue, StatusCode};
use jackstay_core::kubernetes_version::{ServerVersion, VersionError};
use jackstay_sys::clock;
use tokio::time::timeout;

use super::connection::ProbeConnection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::question::fetch;

/// Pause before the version is read again on the same connection.
const INTERVAL: Duration = Duration::from_secs(600);
/// Pause after a request that was not answered, or with an error that may pass.
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// Reads the version of one endpoint.
#[derive(Debug, Default)]
pub(super) struct VersionReader {
    /// When it is read next; at once on a new connection.
    next: Option<Instant>,
}

impl VersionReader {
    /// Called when the prober has a new connection.
    pub(super) fn reset(&mut self) {
        self.next = None;
    }

    /// Reads the version if that is due, and waits at most `limit` for the response. Without one the endpoint keeps its
    /// version.
    pub(super) async fn read_if_due(
        &mut self,
        endpoint: &Endpoint,
        connection: &ProbeConnection,
        token: Option<HeaderValue>,
        limit: Duration,
    ) {
        let now = clock::now();
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        self.next = Some(now + RETRY_PAUSE);
        let Ok(Ok((status, body))) = timeout(limit, fetch(connection, "/version", token)).await
        else {
            return;
        };
        if let Some(version) = interpret(status, &body) {
            self.next = Some(now + pause_after(&version));
            endpoint.record_version(version);
        }
    }
}

/// An apiserver refuses every user until it has read the roles after its start (403), so that is asked again soon. A 401
/// is not: kube-apiserver closes the connection after each.
fn pause_after(version: &Result<ServerVersion, VersionError>) -> Duration {
    match version {
        Err(VersionError::Status(403)) => RETRY_PAUSE,
        _ => INTERVAL,
    }
}

/// The version in a response, or why there is none; `None` for an error that may pass.
fn interpret(status: StatusCode, body: &[u8]) -> Option<Result<ServerVersion, VersionError>> {
    match status {
        StatusCode::OK => Some(ServerVersion::parse(body)),
        StatusCode::TOO_MANY_REQUESTS => None,
        status if status.is_server_error() => None,
        status => Some(Err(VersionError::Status(status.as_u16()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_403_is_asked_again_soon() {
        for (code, body, expected) in [
            (200, r#"{"major":"1","minor":"36","gitVersion":"v1.36.2"}"#, INTERVAL),
            (200, "<html>", INTERVAL),
            (401, "", INTERVAL),
            (403, "", RETRY_PAUSE),
            (404, "", INTERVAL),
        ] {
            let version = interpret(StatusCode::from_u16(code).unwrap(), body.as_bytes());
            assert_eq!(pause_after(&version.unwrap()), expected, "{code} {body}");
        }
    }

    #[test]
    fn interpret_keeps_the_version_after_an_error_that_may_pass() {
        let interpret = |code: u16, body: &str| {
            let read = interpret(StatusCode::from_u16(code).unwrap(), body.as_bytes())?;
            Some(read.map(|version| version.minor.to_string()))
        };
        let body = r#"{"major":"1","minor":"36","gitVersion":"v1.36.2"}"#;
        assert_eq!(interpret(200, body), Some(Ok("1.36".to_owned())));
        assert_eq!(interpret(200, "<html>"), Some(Err(VersionError::NotJson)));
        assert_eq!(interpret(403, body), Some(Err(VersionError::Status(403))));
        assert_eq!(interpret(404, ""), Some(Err(VersionError::Status(404))));
        for code in [429, 500, 503] {
            assert_eq!(interpret(code, body), None, "{code}");
        }
    }
}
