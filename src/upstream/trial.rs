//! The trial of a new client certificate, before connections with it replace those with the previous one.
//!
//! kube-apiserver asks for a client certificate in the handshake and verifies it with each request
//! (`tls.RequestClientCert` in `SecureServingInfo.Serve`, and its x509 authenticator), so a handshake does not show
//! whether it accepts the certificate. It answers 401 if not.

use std::ops::ControlFlow;
use std::rc::Rc;
use std::time::Duration;

use http::StatusCode;
use jackstay_net::http2_error::describe_h2_error;
use tokio::time::timeout;

use super::connection::Connection;
use super::question;

/// Limit for the answer. Requests do not wait for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a request on a new connection that shows a client certificate, without another credential. If the certificate
/// is refused, the end of the connection stays expected.
///
/// # Errors
/// The endpoint has refused the certificate, or has not answered.
pub async fn try_certificate(connection: &Rc<Connection>) -> Result<(), String> {
    // After a 401 the apiserver ends the connection (`UnauthenticatedHTTP2DOSMitigation`).
    connection.set_end_expected(true);
    let request = question::get(&connection.endpoint, "/version", None);
    let answer = question::ask(connection, request, |_| ControlFlow::Continue(()));
    let endpoint = &connection.endpoint.label;
    let reason = match timeout(ANSWER_TIMEOUT, answer).await {
        Ok(Ok(StatusCode::UNAUTHORIZED)) => {
            format!("{endpoint} answers 401 to the new certificate")
        }
        Ok(Ok(_)) => {
            connection.set_end_expected(false);
            return Ok(());
        }
        Ok(Err(error)) => {
            let error = describe_h2_error(&error);
            format!("{endpoint} answers no request with the new certificate: {error}")
        }
        Err(_) => {
            let limit = ANSWER_TIMEOUT.as_secs();
            format!("{endpoint} answers no request with the new certificate within {limit} s")
        }
    };
    Err(reason)
}
