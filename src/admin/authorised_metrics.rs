//! The metrics for authorised clients in the network: TLS, a client certificate or a bearer token, and `/metrics`
//! alone.
//!
//! A client certificate with the configured name needs no apiserver, so that it reads the metrics of an outage. Other
//! certificates and tokens are [reviewed](reviews) by an apiserver, as kubelet and kube-rbac-proxy do: the user of the
//! token (`TokenReview`), and whether it may get the path `/metrics` (`SubjectAccessReview`).
//!
//! A peer in the network may be hostile. So connections have the limits of [`connections`](super::connections), and
//! each source has a rate of connections, since a handshake costs the control thread about a millisecond.

pub mod review_cache;
pub mod review_task;
pub mod reviews;
pub mod source_rates;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jackstay_net::tls::certificate;
use jackstay_net::tls::client_chain::{self, ClientChain};
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::{Source, SourceLookup};
use jackstay_sys::utc::wall_clock;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use self::reviews::{Access, Credential, Reviewer};
use self::source_rates::{Rate, SourceRates};
use super::connections::{Connections, http1_server};
use super::routes;
use super::server::{log_and_pause, source_of};
use super::status_provider::StatusProvider;
use crate::observe::{Metrics, RepeatFilter};

/// Maximum time of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Connections of one source, and of all. Prometheus opens one for each scrape, each 15 s.
const SOURCE_RATE: Rate = Rate { burst: 20, interval: Duration::from_millis(200) };
const TOTAL_RATE: Rate = Rate { burst: 60, interval: Duration::from_millis(20) };
/// A bearer token, in bytes. Those of Kubernetes have about 1 KiB.
const MAX_TOKEN: usize = 8 << 10;
/// Failed accepts are logged at most once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Serves the metrics to authorised clients.
pub struct AuthorisedMetrics {
    /// The serving certificate and the CA of client certificates.
    pub tls: Arc<ServingTls>,
    /// The common name of client certificates that need no review.
    pub client_name: Option<String>,
    /// Reviews tokens and other client certificates.
    pub reviewer: Option<Reviewer>,
    /// The content.
    pub provider: Arc<dyn StatusProvider>,
    /// Counts the responses.
    pub metrics: Arc<Metrics>,
}

impl AuthorisedMetrics {
    /// Accepts connections until the future is dropped, which closes them.
    pub async fn serve(self, listener: TcpListener) {
        let this = Arc::new(self);
        let mut connections = Connections::new(&this.provider);
        let sources = SourceLookup::default();
        let (mut rates, mut total) = (SourceRates::new(SOURCE_RATE), SourceRates::new(TOTAL_RATE));
        let mut warnings = RepeatFilter::new(LOG_INTERVAL);
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    log_and_pause(&error, &mut warnings).await;
                    continue;
                }
            };
            let Some(source) = source_of(&sources, &stream, from) else { continue };
            let now = clock::now();
            if !rates.admit(source, now) || !total.admit((), now) {
                this.metrics.metrics_response("too_many_connections");
                continue;
            }
            let this = Arc::clone(&this);
            connections
                .add_with(source, move |arrived| this.serve_connection(stream, source, arrived))
                .await;
        }
    }

    async fn serve_connection(
        self: Arc<Self>,
        stream: TcpStream,
        source: Source,
        has_request: Arc<AtomicBool>,
    ) {
        let mut config = (*self.tls.config()).clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let handshake = TlsAcceptor::from(Arc::new(config)).accept(stream);
        let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, handshake).await else { return };
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let certificates = certificates.iter().map(|der| der.clone().into_owned()).collect();
        let chain = ClientChain::new(certificates).map(Arc::new);
        let service = service_fn(|request| {
            has_request.store(true, Ordering::Relaxed);
            let (this, chain) = (Arc::clone(&self), chain.clone());
            async move { Ok::<_, Infallible>(this.respond(&request, chain, source).await) }
        });
        let connection = http1_server().serve_connection(TokioIo::new(stream), service);
        let _ = pin!(connection).await;
    }

    /// The response to `request`. hyper omits the body for HEAD.
    async fn respond<B>(
        &self,
        request: &Request<B>,
        chain: Option<Arc<ClientChain>>,
        source: Source,
    ) -> Response<String> {
        if request.uri().path() != "/metrics" {
            return routes::line(
                StatusCode::NOT_FOUND,
                "not found; this address serves /metrics only",
            );
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return routes::line(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD");
        }
        let token = request.headers().get(header::AUTHORIZATION).cloned();
        let access = self.access(token, chain, source).await;
        self.metrics.metrics_response(access.as_str());
        response(access, &*self.provider)
    }

    /// Whether the client may read the metrics.
    async fn access(
        &self,
        token: Option<HeaderValue>,
        chain: Option<Arc<ClientChain>>,
        source: Source,
    ) -> Access {
        let credential = match self.certificate_user(chain, source).await {
            Ok(Some((name, _))) if self.client_name.as_ref() == Some(&name) => {
                return Access::Allowed;
            }
            Ok(Some((name, groups))) => Credential::Certificate { name, groups },
            Ok(None) => match bearer(token.as_ref()) {
                Some(token) => Credential::Token(token.to_owned()),
                None => return Access::Unauthenticated,
            },
            Err(access) => return access,
        };
        match &self.reviewer {
            Some(reviewer) => reviewer.review(credential, source).await,
            None => match credential {
                Credential::Certificate { .. } => Access::Forbidden,
                Credential::Token(_) => Access::Unauthenticated,
            },
        }
    }

    /// Common name and organizations of a valid client certificate; `None` without a certificate.
    async fn certificate_user(
        &self,
        chain: Option<Arc<ClientChain>>,
        source: Source,
    ) -> Result<Option<(String, Vec<String>)>, Access> {
        let ca = self.tls.client_ca().clone();
        let (Some(chain), Some(ca)) = (chain, ca) else { return Ok(None) };
        let verdict = if let Some(verdict) = ca.cached_verdict(&chain, wall_clock()) {
            verdict
        } else {
            let slot = client_chain::acquire_slot(&chain, source.key()).await;
            let mut slot = slot.ok_or(Access::Busy)?;
            let verdict = slot.verify(&chain, &ca).await;
            tokio::spawn(slot.pause());
            verdict
        };
        let info = certificate::cert_info(chain.leaf()).map_err(|_| Access::Unauthenticated)?;
        let now = wall_clock();
        if verdict.result.is_err() || now > info.not_after || now < info.not_before {
            return Err(Access::Unauthenticated);
        }
        let name = info.subject.common_name().ok_or(Access::Unauthenticated)?;
        Ok(Some((name.to_owned(), info.subject.organizations().to_vec())))
    }
}

/// The token of an `Authorization` header, as kube-apiserver reads it: the scheme in any case, and no empty token.
fn bearer(header: Option<&HeaderValue>) -> Option<&str> {
    let (scheme, token) = header?.to_str().ok()?.trim().split_once(' ')?;
    let token = token.trim();
    let is_token = scheme.eq_ignore_ascii_case("bearer") && !token.is_empty();
    (is_token && token.len() <= MAX_TOKEN && !token.contains(' ')).then_some(token)
}

fn response(access: Access, provider: &dyn StatusProvider) -> Response<String> {
    let (code, text) = match access {
        Access::Allowed => return routes::metrics(provider),
        Access::Unauthenticated => (
            StatusCode::UNAUTHORIZED,
            "a bearer token or a client certificate is required".to_owned(),
        ),
        Access::Forbidden => (
            StatusCode::FORBIDDEN,
            "this user may not get the non-resource URL /metrics".to_owned(),
        ),
        Access::Busy => (StatusCode::TOO_MANY_REQUESTS, "too many reviews; try again".to_owned()),
        Access::Unavailable(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("no review: {why}")),
    };
    let mut response = routes::line(code, &text);
    let headers = response.headers_mut();
    if code == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if code == StatusCode::TOO_MANY_REQUESTS {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bearer_reads_tokens_as_kube_apiserver() {
        let long = format!("Bearer {}", "a".repeat(MAX_TOKEN + 1));
        for (header, token) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("Bearer ", None),
            ("Bearer", None),
            ("Basic abc", None),
            ("Bearer a b", None),
            ("", None),
            (&long, None),
        ] {
            let value = HeaderValue::from_str(header).expect("a header");
            assert_eq!(bearer(Some(&value)), token, "{header}");
        }
        assert_eq!(bearer(None), None);
    }
}
