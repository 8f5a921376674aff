//! Recognizes an apiserver by its response to `/version`.

use http::StatusCode;
use jackstay_core::kubernetes_version::ServerVersion;
use serde_json::Value;

use super::probe::{PeerConfig, ProbeConnection, get};

/// Why a server does not respond as an apiserver does.
#[derive(Debug, thiserror::Error)]
pub(super) enum VersionResponseError {
    /// The request failed.
    #[error("/version: {0}")]
    Request(#[source] h2::Error),
    /// The response is that of an etcd.
    #[error("it is an etcd")]
    Etcd,
    /// The response is neither a version of Kubernetes nor a `Status`. This is its status.
    #[error("/version responds with {} and not as Kubernetes does", .0.as_u16())]
    Response(StatusCode),
}

/// Requests `/version` over an open connection. Every user may read it by default (`system:public-info-viewer`).
/// Returns the version if the response names one.
///
/// # Errors
/// Why the peer does not respond as an apiserver does.
pub(super) async fn request(
    opened: &mut ProbeConnection,
    peer: &PeerConfig,
) -> Result<Option<ServerVersion>, VersionResponseError> {
    let response = get(&mut opened.send, "/version", peer).await;
    let (status, body, _) = response.map_err(VersionResponseError::Request)?;
    check(status, &body)?;
    Ok(ServerVersion::parse(body.as_bytes()).ok().filter(|_| status.is_success()))
}

/// Accepts the version of Kubernetes, and a `Status` of any code: an apiserver may refuse the user or be
/// overloaded.
fn check(status: StatusCode, body: &str) -> Result<(), VersionResponseError> {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    let is_status = value["kind"] == "Status" && value["apiVersion"] == "v1";
    if is_status || (status.is_success() && value["gitVersion"].is_string()) {
        return Ok(());
    }
    Err(if value["etcdserver"].is_string() {
        VersionResponseError::Etcd
    } else {
        VersionResponseError::Response(status)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_accepts_a_version_or_a_status_of_kubernetes_only() {
        let status = |code: u16| {
            format!(
                "{{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"code\":{code},\"details\":{{}}}}"
            )
        };
        let (unauthorized, forbidden, unavailable) = (status(401), status(403), status(503));
        let other = |code| format!("/version responds with {code} and not as Kubernetes does");
        for (code, body, expected) in [
            (200, "{\"major\":\"1\",\"gitVersion\":\"v1.36.0\"}", Ok(())),
            (401, unauthorized.as_str(), Ok(())),
            (403, &forbidden, Ok(())),
            (503, &unavailable, Ok(())),
            (401, "Unauthorized", Err(other(401))),
            (200, "<html>", Err(other(200))),
            (404, "404 page not found\n", Err(other(404))),
            (500, "{\"gitVersion\":\"v1.36.0\"}", Err(other(500))),
            (200, "{\"etcdserver\":\"3.6.1\"}", Err("it is an etcd".to_owned())),
        ] {
            let checked = check(StatusCode::from_u16(code).unwrap(), body);
            assert_eq!(checked.map_err(|error| error.to_string()), expected, "{code} {body}");
        }
    }
}
