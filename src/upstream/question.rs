//! jackstay's own requests on a connection, which are all GET requests.

use std::ops::ControlFlow;
use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use jackstay_sys::clock;

use super::connection::Connection;
use super::endpoint::Endpoint;

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
