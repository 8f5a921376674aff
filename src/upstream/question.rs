//! jackstay's own requests on a connection, which are all GET requests.

use std::ops::ControlFlow;
use std::rc::Rc;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, StatusCode, header};
use jackstay_sys::clock;

use super::connection::Connection;
use super::endpoint::Endpoint;

/// Size in bytes at which no more of a response body is stored. The failed checks are looked for in the
/// stored part.
const MAX_BODY: usize = 16 * 1024;

/// The head of a request to `endpoint` for `target`, a path of the API with a query.
pub fn get(endpoint: &Endpoint, target: &str, token: Option<HeaderValue>) -> Request<()> {
    let mut request = Request::new(());
    *request.uri_mut() = endpoint.api_root().uri(target);
    let headers = request.headers_mut();
    headers.insert(header::USER_AGENT, HeaderValue::from_static("jackstay-readyz"));
    if let Some(token) = token {
        headers.insert(header::AUTHORIZATION, token);
    }
    request
}

/// Sends a request and passes the body of the response to `read` piece by piece, until it breaks off. Returns the
/// status.
///
/// # Errors
/// The stream or its connection was lost.
pub async fn ask(
    connection: &Rc<Connection>,
    request: Request<()>,
    mut read: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> Result<StatusCode, h2::Error> {
    let mut permit = connection.reserve(false, clock::now());
    let (response, _) = permit.open(request, true)?;
    let response = response.await?;
    permit.head_arrived(clock::now());
    let status = response.status();
    let mut recv = response.into_body();
    while let Some(data) = recv.data().await {
        let data: Bytes = data?;
        let _ = recv.flow_control().release_capacity(data.len());
        if read(&data).is_break() {
            return Ok(status);
        }
    }
    permit.finished();
    Ok(status)
}

/// Gets `target`, a path with a query. Returns the status and the beginning of the body.
///
/// # Errors
/// The stream or its connection was lost.
pub async fn fetch(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    fetch_body(connection, get(&connection.endpoint, target, token)).await
}

/// [`fetch`] with an `Accept` header.
pub async fn fetch_accepting(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
    accept: &'static str,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    let mut request = get(&connection.endpoint, target, token);
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(accept));
    fetch_body(connection, request).await
}

async fn fetch_body(
    connection: &Rc<Connection>,
    request: Request<()>,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    let mut body = BytesMut::new();
    let store = |piece: &[u8]| {
        if body.len() < MAX_BODY {
            body.extend_from_slice(piece);
        }
        ControlFlow::Continue(())
    };
    let status = ask(connection, request, store).await?;
    Ok((status, body))
}

/// Gets `target` and passes the body to `read` piece by piece, until it breaks off. Returns the status.
///
/// # Errors
/// The stream or its connection was lost.
pub async fn fetch_pieces(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
    read: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> Result<StatusCode, h2::Error> {
    let request = get(&connection.endpoint, target, token);
    ask(connection, request, read).await
}
