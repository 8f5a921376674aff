//! A gateway in front of a server: it has the API below a path, or selects it by the host of a request.
//!
//! Rancher serves `/k8s/clusters/c-1`, an ingress one host. Either answers other requests itself, in plain text.

use http::header;
use http::request::Parts;
use http::uri::{Authority, PathAndQuery, Uri};
use std::sync::Mutex;

/// The rules of a gateway. The default forwards every request unchanged.
#[derive(Debug, Clone)]
pub struct Gateway {
    /// The path below which the API is, with a leading slash.
    pub prefix: String,
    /// The only host, with its port, that is served; all are if it is empty.
    pub host: String,
    /// The status of other responses.
    pub status: u16,
}

impl Default for Gateway {
    fn default() -> Self {
        Self { prefix: String::new(), host: String::new(), status: 404 }
    }
}

/// The requests that a gateway did not forward.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<Vec<String>>);

impl Refused {
    pub fn all(&self) -> Vec<String> {
        crate::lock(&self.0).clone()
    }
}

impl Gateway {
    /// Changes the target of a request to that of the server. Returns the status of the response to a request that is not
    /// forwarded, which is added to `refused`.
    pub(super) fn forward(&self, parts: &mut Parts, refused: &Refused) -> Option<u16> {
        if self.prefix.is_empty() && self.host.is_empty() {
            return None;
        }
        let of_field = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
        let host = parts.uri.authority().map(Authority::as_str).or(of_field).unwrap_or_default();
        let target = parts.uri.path_and_query().map_or("", PathAndQuery::as_str);
        let below = target.strip_prefix(&self.prefix).filter(|rest| rest.starts_with('/'));
        let is_served = self.host.is_empty() || host.eq_ignore_ascii_case(&self.host);
        let rewritten = below.filter(|_| is_served).and_then(|rest| {
            let mut uri = parts.uri.clone().into_parts();
            uri.path_and_query = Some(rest.parse().ok()?);
            Uri::from_parts(uri).ok()
        });
        let Some(rewritten) = rewritten else {
            let request = format!("{} {host} {target}", parts.method);
            crate::lock(&refused.0).push(request);
            return Some(self.status);
        };
        parts.uri = rewritten;
        None
    }
}
