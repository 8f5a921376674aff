//! Where the API of a cluster begins: the authority of requests, and the path below which the server has the API.

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};
use jackstay_core::request::path_prefix::PathPrefix;

use crate::Upstream;

/// The authority of jackstay's own requests if the configuration has none. An apiserver ignores it.
pub const DEFAULT_AUTHORITY: &str = "kubernetes.default.svc";

/// The authority of a request that has none and an upstream that has none.
pub fn default_authority() -> Authority {
    Authority::from_static(DEFAULT_AUTHORITY)
}

/// Where the API of a cluster begins, for jackstay's own requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiRoot {
    /// `:authority`, or the field `Host`.
    pub authority: Authority,
    /// The path below which the API is.
    pub prefix: PathPrefix,
}

impl Default for ApiRoot {
    fn default() -> Self {
        Self { authority: default_authority(), prefix: PathPrefix::default() }
    }
}

impl From<&Upstream> for ApiRoot {
    fn from(config: &Upstream) -> Self {
        let authority = config.authority.clone().unwrap_or_else(default_authority);
        Self { authority, prefix: config.path_prefix.clone() }
    }
}

impl ApiRoot {
    /// The path of `target`, a path of the API with a query.
    pub fn path(&self, target: &str) -> String {
        [self.prefix.encoded(), target].concat()
    }

    /// The URI of `target`, a path of the API with a query.
    pub fn uri(&self, target: &str) -> Uri {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTPS);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = PathAndQuery::from_maybe_shared(self.path(target)).ok();
        Uri::from_parts(parts).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_has_the_authority_and_the_prefix() {
        let root = ApiRoot {
            authority: Authority::from_static("rancher.example.com"),
            prefix: PathPrefix::parse("/clusters/root:org:ws").unwrap(),
        };
        let uri = "https://rancher.example.com/clusters/root:org:ws/version?timeout=32s";
        assert_eq!(root.uri("/version?timeout=32s").to_string(), uri);
        let uri = "https://kubernetes.default.svc/readyz";
        assert_eq!(ApiRoot::default().uri("/readyz").to_string(), uri);
    }
}
