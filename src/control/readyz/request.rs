//! One question for `/readyz` on a connection, and what its answer says.

use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, StatusCode, header};
use tokio::time::{Instant, timeout};

use crate::config::Readyz;
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, ReadyzCheck};
use crate::upstream::readyz::failed_checks;

/// Bytes of an answer that are read to tell what failed.
const MAX_ANSWER: usize = 16 * 1024;

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadyzResult {
    /// It is ready, or will not tell us.
    Ready,
    /// It is not, in these words.
    NotReady(String),
    /// The connection was lost: a matter of transport, not of readiness.
    Lost,
}

/// Asks on `connection`, with `token` if there is one.
pub async fn ask(
    connection: &Rc<Connection>,
    config: &Readyz,
    token: Option<HeaderValue>,
) -> ReadyzResult {
    let (at, started) = (SystemTime::now(), Instant::now());
    let (code, finding) = match timeout(config.timeout, exchange(connection, config, token)).await {
        Ok(Ok((status, finding))) => (Some(status.as_u16()), finding),
        // A response that is late on a live connection says that the apiserver is not ready; on any
        // other connection it says only that the connection is lost.
        Err(_) if connection.state() == ConnectionState::Live => {
            let limit = config.timeout.as_millis();
            (
                None,
                ReadyzResult::NotReady(format!("{} not answered within {limit} ms", config.path)),
            )
        }
        Ok(Err(_)) | Err(_) => (None, ReadyzResult::Lost),
    };
    let error = match &finding {
        ReadyzResult::Ready => None,
        ReadyzResult::NotReady(why) => Some(why.clone()),
        ReadyzResult::Lost => Some("connection lost".to_owned()),
    };
    let duration = started.elapsed();
    connection.endpoint.record_check(ReadyzCheck { at, duration, code, error });
    finding
}

/// No verdict yet, but whether the others are any better is worth knowing now, once: watches may
/// want to move there.
pub fn doubt(upstream: &Upstream, endpoint: &Arc<Endpoint>) {
    if !endpoint.note_probe_failing(Instant::now()) {
        return;
    }
    for other in upstream.endpoints().iter().filter(|other| !Arc::ptr_eq(other, endpoint)) {
        other.request_confirmation_probe();
    }
}

async fn exchange(
    connection: &Rc<Connection>,
    config: &Readyz,
    token: Option<HeaderValue>,
) -> Result<(StatusCode, ReadyzResult), h2::Error> {
    let mut request = Request::new(());
    let target = format!("https://kubernetes.default.svc{}", config.path);
    *request.uri_mut() = target.parse().unwrap_or_default();
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static("jackstay-readyz"));
    if let Some(token) = token {
        headers.insert(header::AUTHORIZATION, token);
    }
    let mut permit = connection.reserve(false, Instant::now());
    let (response, _) = permit.open(request, true)?;
    let response = response.await?;
    permit.head_arrived(Instant::now());
    let status = response.status();
    let mut recv = response.into_body();
    let mut body = BytesMut::new();
    while let Some(data) = recv.data().await {
        let data: Bytes = data?;
        let _ = recv.flow_control().release_capacity(data.len());
        if body.len() < MAX_ANSWER {
            body.extend_from_slice(&data);
        }
    }
    permit.finished();
    Ok((status, judge(status, &String::from_utf8_lossy(&body), &config.path)))
}

/// What an answer says. 401 and 403 say that we may not know, which is no reason to avoid it.
pub fn judge(status: StatusCode, body: &str, path: &str) -> ReadyzResult {
    match status {
        StatusCode::OK | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ReadyzResult::Ready,
        _ => {
            let detail = failed_checks(body);
            ReadyzResult::NotReady(format!("{path} answers {}{detail}", status.as_u16()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let judge =
            |code: u16, body: &str| judge(StatusCode::from_u16(code).unwrap(), body, "/readyz");
        assert_eq!(judge(200, "ok"), ReadyzResult::Ready);
        assert_eq!(judge(401, ""), ReadyzResult::Ready);
        assert_eq!(judge(403, ""), ReadyzResult::Ready);
        assert_eq!(
            judge(500, "[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed"),
            ReadyzResult::NotReady("/readyz answers 500: etcd".into())
        );
        assert_eq!(judge(404, "no"), ReadyzResult::NotReady("/readyz answers 404".into()));
    }
}
