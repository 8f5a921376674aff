//! A request that is forwarded: what jackstay needs to send it, once or several times.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use http::Request;

use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::request_body::RequestBody;
use crate::proxy::request_info::{RequestInfo, RequestKind};
use crate::proxy::upstream_client::UpstreamClient;
use crate::proxy::watch::request::WatchRequest;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements};

/// A request that is forwarded.
pub struct ForwardedRequest {
    /// The client of the upstream that gets the request.
    pub upstream: Rc<UpstreamClient>,
    /// The connections that the request may use.
    pub class: Rc<ClassPool>,
    /// Proves that the request may use these connections.
    pub proof: IdentityProof,
    /// The head as it goes upstream.
    pub head: Request<()>,
    /// The body; `None` if the head ends the request.
    pub body: Option<Rc<RequestBody>>,
    /// The request in Kubernetes terms.
    pub info: RequestInfo,
    /// The parameters of a watch whose frames can be followed.
    pub watch: Option<WatchRequest>,
    /// The drain of the listener; `Some` for every watch.
    pub drain: Option<DrainWatcher>,
    /// How many hedges were sent so far.
    pub hedges: Cell<u32>,
}

impl ForwardedRequest {
    pub(super) fn is_watch(&self) -> bool {
        self.info.kind == RequestKind::Watch
    }

    /// Whether the body can be sent again from its beginning.
    pub(super) fn body_is_held(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_held())
    }

    /// What the pool needs to know to choose a connection: the attempt that failed before, and the
    /// endpoints that must not get this one.
    pub(super) fn need<'a>(
        &'a self,
        after: Option<PreviousFailure<'a>>,
        excluded: &'a [Arc<Endpoint>],
    ) -> StreamRequirements<'a> {
        let without = after.as_ref().and_then(PreviousFailure::suspect_since);
        StreamRequirements {
            watch: self.info.long_running(),
            held: self.is_watch(),
            previous_failure: after,
            excluded_endpoints: excluded,
            without_connection_since: without,
            live_only: false,
            client_subject: self.proof.subject(),
        }
    }
}
