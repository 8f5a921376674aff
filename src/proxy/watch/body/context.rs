//! The request of a watch, and the endpoints that must not be asked to continue it.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, header, response};
use jackstay_core::kubernetes_version::MinorVersion;
use jackstay_core::request::info::is_built_in_group;
use jackstay_core::watch::request::{group, with_query};
use jackstay_core::watch::session::{AttemptResult, Candidates, Exclusion, NotResumable, Session};

use super::versions::WatchVersions;
use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::pool::ClassPool;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::{
    PreferredVersions, older_endpoints, preferred_versions_of_resume,
};

/// Upper bound of a Retry-After, so that adding it to the time cannot overflow. It is longer than any round.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// See the module documentation.
pub struct ResumeContext {
    pub(super) upstream: Rc<UpstreamClient>,
    pub(super) class: Rc<ClassPool>,
    pub(super) proof: IdentityProof,
    pub(super) drain: DrainWatcher,
    head: RequestHead,
    /// The Content-Type of the client's response.
    content_type: Box<str>,
    /// `None` if the versions of the resource are not recorded.
    pub(super) resource_versions: Option<Box<WatchVersions>>,
    /// The connection of the last stream or attempt.
    last_connection: Option<Rc<Connection>>,
    /// Boxed, because a watch that has not lost a stream has none.
    refusals: Option<Box<Refusals>>,
    /// The newest version of Kubernetes that has served the watch, if one is known.
    served_by: Option<MinorVersion>,
    /// Whether an attempt of this round may go to an apiserver of an older version, because one has failed.
    older_allowed: bool,
}

/// The versions of apiservers that may continue a watch.
pub(super) struct ResumeVersions {
    upstream: Rc<UpstreamClient>,
    user_agent: Option<HeaderValue>,
    served_by: Option<MinorVersion>,
    older_allowed: bool,
}

impl ResumeVersions {
    /// The versions to prefer.
    pub(super) fn preferred(&self) -> PreferredVersions {
        let upstream = self.upstream.pool.upstream();
        preferred_versions_of_resume(upstream, self.user_agent.as_ref(), self.served_by)
    }

    /// Adds the endpoints that must not be asked because of their version to the `excluded` ones.
    pub(super) fn exclude_older(&self, excluded: &mut Vec<Arc<Endpoint>>) {
        if !self.older_allowed {
            let upstream = self.upstream.pool.upstream();
            let older = older_endpoints(upstream, self.served_by, excluded);
            excluded.extend(older);
        }
    }
}

/// The head of the request as it was sent upstream, a GET. A list of headers takes 150 to 500 bytes less than a
/// [`HeaderMap`], which reserves space for 6, 12 or 24 of them and an index.
struct RequestHead {
    uri: Uri,
    headers: Box<[(HeaderName, HeaderValue)]>,
}

impl RequestHead {
    fn new(head: Request<()>) -> Self {
        let (head, ()) = head.into_parts();
        let headers = head.headers.iter().map(|(name, value)| (name.clone(), value.clone()));
        Self { uri: head.uri, headers: headers.collect() }
    }

    /// The request with another query.
    fn with_query(&self, query: &str) -> Request<()> {
        let mut request = Request::new(());
        *request.uri_mut() = with_query(&self.uri, query);
        request.headers_mut().extend(self.headers.iter().cloned());
        request
    }
}

/// The endpoints that have refused a watch.
#[derive(Default)]
struct Refusals {
    /// The server of [`ResumeContext::last_connection`] refused the watch, so another endpoint is preferred to
    /// another connection to the same endpoint.
    by_last: bool,
    /// Endpoints that are not asked again in this round.
    excluded: Vec<Arc<Endpoint>>,
    /// Endpoints that are not asked before a time (Retry-After).
    paused: Vec<(Arc<Endpoint>, Instant)>,
}

impl ResumeContext {
    /// The context of a watch. `head` is its request as it was sent upstream, `response` the head of the
    /// response.
    pub fn new(
        (upstream, class): (Rc<UpstreamClient>, Rc<ClassPool>),
        proof: IdentityProof,
        drain: DrainWatcher,
        head: Request<()>,
        response: &response::Parts,
        resource_versions: Option<Box<WatchVersions>>,
    ) -> Self {
        Self {
            upstream,
            class,
            proof,
            drain,
            head: RequestHead::new(head),
            content_type: content_type(&response.headers).into(),
            resource_versions,
            last_connection: None,
            refusals: None,
            served_by: None,
            older_allowed: false,
        }
    }

    /// Called when this endpoint serves the watch. A later one shall not be older.
    pub(super) fn served_by(&mut self, endpoint: &Endpoint) {
        self.served_by = self.served_by.max(endpoint.minor_version());
    }

    /// The versions of apiservers that may continue the watch.
    pub(super) fn versions(&self) -> ResumeVersions {
        let mut headers = self.head.headers.iter();
        let user_agent = headers.find(|(name, _)| name == header::USER_AGENT);
        ResumeVersions {
            upstream: Rc::clone(&self.upstream),
            user_agent: user_agent.map(|(_, value)| value.clone()),
            served_by: self.served_by,
            older_allowed: self.older_allowed,
        }
    }

    /// Called when an attempt has failed. The next one may go to an apiserver of an older version.
    pub(super) fn allow_older(&mut self) {
        self.older_allowed = true;
    }

    /// The head of the request that continues the watch, or starts it again.
    pub(super) fn head(&self, session: &Session, now: Instant) -> Request<()> {
        let query = session.resume_query(self.head.uri.query().unwrap_or_default(), now);
        self.head.with_query(&query)
    }

    /// The version that an endpoint should have reached to continue the watch without a pause.
    pub(super) fn wanted_version(&self) -> Option<(Arc<ResourceRecord>, u64)> {
        let (record, version) = self.resource_versions.as_ref()?.wanted()?;
        Some((Arc::clone(record), version))
    }

    /// The result of an attempt with this response head.
    pub(super) fn attempt_result(&self, head: &response::Parts) -> AttemptResult {
        let content_type = content_type(&head.headers).trim();
        AttemptResult::Head {
            status: head.status.as_u16(),
            same_content_type: head.headers.contains_key(header::CONTENT_TYPE)
                && content_type.eq_ignore_ascii_case(self.content_type.trim()),
            retry_after: retry_after(&head.headers),
        }
    }

    /// Whether the class still has a credential. After a reload the file of an identity may contain another
    /// subject.
    pub(super) fn has_credential(&self) -> bool {
        self.upstream.pool.upstream().credentials.tls(self.class.credential_class()).is_some()
    }

    /// Whether a watch of the same API group has shown versions that are not ordered.
    pub(super) fn is_group_unordered(&self) -> bool {
        let groups = &self.upstream.pool.upstream().unordered_groups;
        group(self.head.uri.path()).is_some_and(|group| groups.contains(group))
    }

    /// Remembers that the API group's versions are not ordered, if `reason` shows that and an aggregated apiserver
    /// may serve the group.
    pub(super) fn record_contradiction(&self, reason: NotResumable) {
        let upstream = self.upstream.pool.upstream();
        if reason.is_contradiction()
            && let Some(group) = group(self.head.uri.path())
            && !is_built_in_group(group)
            && upstream.unordered_groups.add(group, reason.as_str())
        {
            self.upstream.metrics.watch_resumed("unordered_group");
            let reason = reason.as_str();
            tracing::warn!(
                upstream = &*upstream.name,
                group,
                reason,
                "watches of group not resumed"
            );
        }
    }

    /// The connection of the last stream or attempt.
    pub(super) fn last_connection(&self) -> Option<&Rc<Connection>> {
        self.last_connection.as_ref()
    }

    /// Whether the server of that connection refused the watch.
    pub(super) fn last_refused(&self) -> bool {
        self.refusals.as_ref().is_some_and(|refusals| refusals.by_last)
    }

    /// Called when the watch has left this connection, or an attempt on it has failed.
    pub(super) fn set_last_connection(&mut self, connection: &Rc<Connection>) {
        self.last_connection = Some(Rc::clone(connection));
    }

    /// Called when an attempt to resume was accepted. Drops the last connection, which the watch would
    /// otherwise keep in memory.
    pub(super) fn record_resume(&mut self) {
        self.last_connection = None;
    }

    /// Excludes the last endpoint from the round, because it refused the watch.
    pub(super) fn exclude_last_endpoint(&mut self) {
        let refusals = self.refusals.get_or_insert_default();
        refusals.by_last = true;
        if let Some(lost) = &self.last_connection {
            refusals.excluded.push(Arc::clone(&lost.endpoint));
        }
    }

    /// Called when the server of this connection refused the watch. `once`: no endpoint is asked twice in the
    /// round.
    pub(super) fn record_refusal(
        &mut self,
        connection: &Rc<Connection>,
        result: AttemptResult,
        once: bool,
        now: Instant,
    ) {
        self.set_last_connection(connection);
        self.refusals.get_or_insert_default().by_last = true;
        let exclusion = result.exclusion();
        if once || exclusion == Some(Exclusion::Round) {
            self.exclude_last_endpoint();
        }
        if let Some(Exclusion::For(pause)) = exclusion {
            let endpoint = &connection.endpoint;
            let paused = &mut self.refusals.get_or_insert_default().paused;
            paused.retain(|(paused, _)| !Arc::ptr_eq(paused, endpoint));
            paused.push((Arc::clone(endpoint), now + pause.min(MAX_RETRY_AFTER)));
        }
    }

    /// Called when the stream was lost and a round begins, in which any endpoint may be asked.
    pub(super) fn begin_round(&mut self) {
        self.forget_round();
    }

    /// Called when the watch is held in an outage, after which any endpoint and connection may be tried.
    pub(super) fn begin_outage(&mut self) {
        self.begin_round();
        self.last_connection = None;
    }

    /// Called when an event has shown that the current stream continues the watch.
    pub(super) fn record_confirmation(&mut self) {
        self.forget_round();
    }

    fn forget_round(&mut self) {
        self.older_allowed = false;
        if let Some(refusals) = &mut self.refusals {
            refusals.by_last = false;
            refusals.excluded.clear();
            if refusals.paused.is_empty() {
                self.refusals = None;
            }
        }
    }

    fn excluded(&self) -> &[Arc<Endpoint>] {
        self.refusals.as_ref().map_or(&[], |refusals| &refusals.excluded)
    }

    fn paused(&self) -> &[(Arc<Endpoint>, Instant)] {
        self.refusals.as_ref().map_or(&[], |refusals| &refusals.paused)
    }

    /// Which endpoints are not excluded from this round.
    pub(super) fn candidates(&self, now: Instant) -> Candidates {
        let endpoints = self.upstream.pool.upstream().endpoints();
        let usable = || endpoints.iter().filter(|endpoint| self.is_usable(endpoint));
        let is_last = |endpoint| {
            self.last_connection.as_ref().is_some_and(|lost| Arc::ptr_eq(&lost.endpoint, endpoint))
        };
        let pause = |endpoint| {
            let paused = self.paused().iter().find(|(paused, _)| Arc::ptr_eq(paused, endpoint));
            paused.map_or(Duration::ZERO, |(_, until)| until.saturating_duration_since(now))
        };
        Candidates {
            any: endpoints.iter().any(|endpoint| !self.is_excluded(endpoint)),
            usable: usable().any(|endpoint| !is_last(endpoint)),
            ready: self.upstream.has_ready_endpoint_besides(self.excluded()),
            retry_after: usable().map(pause).min().unwrap_or_default(),
        }
    }

    fn is_excluded(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.excluded().iter().any(|excluded| Arc::ptr_eq(excluded, endpoint))
    }

    fn is_usable(&self, endpoint: &Arc<Endpoint>) -> bool {
        use EndpointState::{Ejected, Leaving, NoH2};
        !matches!(endpoint.state(), Ejected | NoH2 | Leaving) && !self.is_excluded(endpoint)
    }

    /// The endpoints that must not be asked at this time.
    pub(super) fn excluded_at(&self, at: Instant) -> Vec<Arc<Endpoint>> {
        let paused = self.paused().iter().filter(|(_, until)| *until > at);
        self.excluded().iter().chain(paused.map(|(endpoint, _)| endpoint)).cloned().collect()
    }
}

fn content_type(headers: &HeaderMap) -> &str {
    headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
