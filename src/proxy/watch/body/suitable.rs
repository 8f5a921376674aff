//! Which endpoints are suitable to continue a watch: by their version, and by the parameters that they honour
//! ([`jackstay_core::watch::parameters`]).

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Request, header};
use jackstay_core::kubernetes_version::MinorVersion;
use jackstay_core::pool::EndpointKey;
use jackstay_core::watch::parameters::{
    Candidate, Capability, Choice, Parameters, choose, different, has_starting, unequal,
};
use jackstay_sys::clock;
use tokio::time::timeout;

use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::Upstream;
use crate::upstream::capabilities::ApiserverProcess;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{StreamRequest, StreamRequirements};
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::{
    PreferredVersions, older_endpoints, preferred_versions_of_resume,
};

/// How long an attempt waits for a capability that is read. A read takes one round trip.
const READ_LIMIT: Duration = Duration::from_secs(2);
/// Pause before the states of the endpoints are compared again, meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Why a stream or response of a suitable endpoint is not used, for logs.
pub(super) const PROCESS_CHANGED: &str = "the apiserver of the endpoint may have been replaced";

/// Why no endpoint is suitable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoneSuitable {
    /// No apiserver can be reached.
    Outage,
    /// Those that honour the parameters of the watch, or may do so, must not be asked now.
    NotNow,
    /// None is known to honour the parameters of the watch.
    Parameter,
}

/// The endpoints that may continue a watch.
pub(super) struct SuitableEndpoints {
    pub(super) upstream: Rc<UpstreamClient>,
    pub(super) user_agent: Option<HeaderValue>,
    /// The `Authorization` of the client.
    pub(super) authorization: Option<HeaderValue>,
    pub(super) served_by: Option<MinorVersion>,
    pub(super) may_ask_older: bool,
    pub(super) parameters: Option<Rc<RequiredParameters>>,
    /// The endpoints at which the API group of the watch fails.
    pub(super) avoided: Vec<EndpointKey>,
}

/// The parameters of a watch that not every apiserver honours, and the process that served the watch first.
pub(super) struct RequiredParameters {
    parameters: Parameters,
    first: OnceCell<Arc<ApiserverProcess>>,
}

impl SuitableEndpoints {
    /// The versions to prefer.
    pub(super) fn preferred_versions(&self) -> PreferredVersions {
        preferred_versions_of_resume(self.upstream(), self.user_agent.as_ref(), self.served_by)
    }

    /// The request for a stream for the watch, on an endpoint that is not `excluded`. `wanted`: the version that the
    /// cache of the endpoint should have reached.
    pub(super) fn stream_request<'a>(
        &'a self,
        excluded: Vec<EndpointKey>,
        wanted: Option<&'a (Arc<ResourceRecord>, u64)>,
        proof: &'a IdentityProof,
    ) -> StreamRequest<'a> {
        let required =
            StreamRequirements { long_running: true, excluded, ..StreamRequirements::default() };
        StreamRequest {
            required,
            resource_version: wanted.map(|(record, version)| (record, *version)),
            avoided: self.avoided.clone(),
            authorization: self.authorization.as_ref(),
            versions: self.preferred_versions(),
            client_subject: proof.subject(),
        }
    }

    /// Adds the endpoints that must not be asked to the `excluded` ones.
    pub(super) fn exclude_others(&self, excluded: &mut Vec<EndpointKey>) {
        if let Some(parameters) = &self.parameters {
            excluded.extend(parameters.unequal(self.upstream()));
        }
        if !self.may_ask_older {
            excluded.extend(older_endpoints(self.upstream(), self.served_by, excluded));
        }
    }

    /// Whether the process of `endpoint` honours the parameters. It may have been replaced while the watch waited.
    pub(super) fn honours_parameters(&self, endpoint: &Endpoint) -> bool {
        let Some(parameters) = &self.parameters else { return true };
        parameters.is_equal(endpoint, self.upstream())
    }

    /// Waits until it is known which endpoints honour the parameters.
    ///
    /// # Errors
    /// No endpoint may do so, other than the `excluded` ones.
    pub(super) async fn wait_for_parameters(
        &self,
        excluded: &[EndpointKey],
    ) -> Result<(), NoneSuitable> {
        let Some(parameters) = &self.parameters else { return Ok(()) };
        let deadline = clock::now() + READ_LIMIT;
        loop {
            let recorded = self.upstream().capabilities.recorded();
            // The pool learns of an outage a moment later.
            let is_outage = self.upstream.pool.is_total_outage() || !self.upstream().is_usable();
            match parameters.choose(self.upstream(), excluded, is_outage) {
                Choice::Ask => return Ok(()),
                Choice::Hold => return Err(NoneSuitable::Outage),
                Choice::Wait if clock::now() < deadline => {
                    let _ = timeout(CHECK_INTERVAL, recorded).await;
                }
                Choice::Wait if has_starting(&parameters.candidates(self.upstream())) => {
                    return Err(NoneSuitable::NotNow);
                }
                Choice::Wait | Choice::None => {
                    let is_excluded =
                        parameters.choose(self.upstream(), &[], is_outage) == Choice::Ask;
                    let not_now = is_excluded.then_some(NoneSuitable::NotNow);
                    return Err(not_now.unwrap_or(NoneSuitable::Parameter));
                }
            }
        }
    }

    fn upstream(&self) -> &Upstream {
        self.upstream.pool.upstream()
    }
}

impl RequiredParameters {
    /// The parameters of a request; `None` if every apiserver honours them. Otherwise the probers read which ones do.
    pub(super) fn of_request(head: &Request<()>, upstream: &Upstream) -> Option<Rc<Self>> {
        let accept = head.headers().get_all(header::ACCEPT).iter();
        let accept = accept.filter_map(|value| value.to_str().ok());
        let parameters = Parameters::of(head.uri().query().unwrap_or_default(), accept);
        if parameters == Parameters::Common {
            return None;
        }
        upstream.capabilities.want(parameters);
        Some(Rc::new(Self { parameters, first: OnceCell::new() }))
    }

    /// Called when this endpoint serves the watch. Only the first one counts: the others are equal.
    pub(super) fn served_by(&self, endpoint: &Endpoint) {
        self.first.get_or_init(|| endpoint.process());
    }

    /// The endpoints that cannot continue the watch, whatever is read about the others.
    pub(super) fn different(&self, upstream: &Upstream) -> Vec<EndpointKey> {
        different(self.first().0, &self.candidates(upstream))
    }

    /// Whether the process of `endpoint` is known to honour the parameters.
    pub(super) fn is_equal(&self, endpoint: &Endpoint, upstream: &Upstream) -> bool {
        !self.unequal(upstream).contains(&endpoint.key())
    }

    fn unequal(&self, upstream: &Upstream) -> Vec<EndpointKey> {
        unequal(self.first().0, &self.candidates(upstream))
    }

    fn choose(&self, upstream: &Upstream, excluded: &[EndpointKey], is_outage: bool) -> Choice {
        let (first, process) = self.first();
        let is_process = |endpoint: &Arc<Endpoint>| {
            process.is_some_and(|process| Arc::ptr_eq(process, &endpoint.process()))
        };
        let is_current = upstream.endpoints().iter().any(is_process);
        choose((first, is_current), &self.candidates(upstream), excluded, is_outage)
    }

    /// What is known about the process that served the watch first.
    fn first(&self) -> (Capability, Option<&Arc<ApiserverProcess>>) {
        let process = self.first.get();
        (process.map(|process| process.capability(self.parameters)).unwrap_or_default(), process)
    }

    fn candidates(&self, upstream: &Upstream) -> Vec<Candidate> {
        let candidate = |endpoint: &Arc<Endpoint>| Candidate {
            condition: endpoint.condition(),
            capability: endpoint.process().present_capability(self.parameters),
        };
        upstream.endpoints().iter().map(candidate).collect()
    }
}
