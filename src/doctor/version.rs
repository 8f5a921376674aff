//! Recognizes an apiserver by its response to `/version`.

use http::StatusCode;
use jackstay_core::kubernetes_version::ServerVersion;
use serde_json::Value;

use super::probe::{PeerConfig, ProbeConnection, get};

/// Requests `/version` over an open connection; `prefix` is the path of the cluster's URL. Every user may read
/// it by default (`system:public-info-viewer`). Returns the version if the response names one.
///
/// # Errors
/// Why the peer does not respond as an apiserver does.
pub(super) async fn request(
    opened: &mut ProbeConnection,
    peer: &PeerConfig,
    prefix: &str,
) -> Result<Option<ServerVersion>, String> {
    let response = get(&mut opened.send, &format!("{prefix}/version"), peer).await;
    let (status, body, _) = response.map_err(|error| format!("/version: {error}"))?;
    check(status, &body)?;
    Ok(ServerVersion::parse(body.as_bytes()).ok().filter(|_| status.is_success()))
}

/// Accepts the version of Kubernetes, and a `Status` of any code: an apiserver may refuse the user or be
/// overloaded.
fn check(status: StatusCode, body: &str) -> Result<(), String> {
    let value: Value = serde_json::from_str(body).unwrap_or_default();
    let is_status = value["kind"] == "Status" && value["apiVersion"] == "v1";
    if is_status || (status.is_success() && value["gitVersion"].is_string()) {
        return Ok(());
    }
    Err(if value["etcdserver"].is_string() {
        "it is an etcd".to_owned()
    } else {
        format!("/version responds with {} and not as Kubernetes does", status.as_u16())
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
            assert_eq!(check(StatusCode::from_u16(code).unwrap(), body), expected, "{code} {body}");
        }
    }
}
