//! The request of a watch, and what it needs to be sent again.

use std::borrow::Cow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue, Request, Uri, header, response};
use jackstay_core::endpoint_condition::EndpointCondition;
use jackstay_core::kubernetes_version::MinorVersion;
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::info::is_built_in_group;
use jackstay_core::watch::codec::Encoding;
use jackstay_core::watch::gzip::{ContentCoding, GzipError};
use jackstay_core::watch::request::{accept_only, group, with_query};
use jackstay_core::watch::session::{AttemptResult, NotResumable, Session};
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;

use super::suitable::{PROCESS_CHANGED, RequiredParameters, SuitableEndpoints};
use super::versions::{StartFloor, WatchVersions};
use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::{UpstreamClient, UpstreamResponse as Response};
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::ClassPool;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::restores::Restores;

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
    /// The newest version of Kubernetes that has served the watch, if one is known.
    served_by: Option<MinorVersion>,
    /// `None` for most watches.
    restrictions: Option<Box<Restrictions>>,
}

/// Why some endpoints cannot continue a watch.
#[derive(Default)]
struct Restrictions {
    /// `None` if every apiserver honours the parameters of the request.
    parameters: Option<Rc<RequiredParameters>>,
    /// Endpoints to which the watch does not move from its stream, because they do not serve its encoding.
    without_encoding: Vec<EndpointKey>,
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

    fn get(&self, name: &HeaderName) -> Option<&HeaderValue> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value)
    }

    /// The request with another query.
    fn with_query(&self, query: &str) -> Request<()> {
        let mut request = Request::new(());
        *request.uri_mut() = with_query(&self.uri, query);
        request.headers_mut().extend(self.headers.iter().cloned());
        request
    }
}

impl ResumeContext {
    /// The context of a watch. `head` is its request as it was sent upstream, `response` the head of the
    /// response.
    pub fn new(
        (upstream, class): (Rc<UpstreamClient>, Rc<ClassPool>),
        proof: IdentityProof,
        drain: DrainWatcher,
        mut head: Request<()>,
        response: &response::Parts,
        resource_versions: Option<Box<WatchVersions>>,
    ) -> Self {
        let content_type = content_type(&response.headers);
        if let Some(encoding) = Encoding::from_content_type(content_type) {
            accept_only(head.headers_mut(), encoding);
        }
        let parameters = RequiredParameters::of_request(&head, upstream.pool.upstream());
        Self {
            upstream,
            class,
            proof,
            drain,
            head: RequestHead::new(head),
            content_type: content_type.into(),
            resource_versions,
            last_connection: None,
            served_by: None,
            restrictions: parameters.map(|parameters| {
                let parameters = Some(parameters);
                Box::new(Restrictions { parameters, ..Restrictions::default() })
            }),
        }
    }

    /// Restores of etcd.
    pub(super) fn restores(&self) -> &Restores {
        &self.upstream.pool.upstream().restores
    }

    /// Called when this endpoint serves the watch. A later one shall not be older.
    pub(super) fn served_by(&mut self, endpoint: &Endpoint) {
        self.served_by = self.served_by.max(endpoint.minor_version());
        if let Some(parameters) = self.parameters() {
            parameters.served_by(endpoint);
        }
    }

    /// The endpoints of the upstream, without those that cannot continue the watch because of its parameters.
    pub(super) fn endpoint_conditions(&self) -> Vec<EndpointCondition> {
        let mut conditions = self.upstream.endpoint_conditions();
        if let Some(parameters) = self.parameters() {
            let different = parameters.different(self.upstream.pool.upstream());
            conditions.retain(|one| !different.contains(&one.key));
        }
        conditions
    }

    fn parameters(&self) -> Option<&Rc<RequiredParameters>> {
        self.restrictions.as_ref()?.parameters.as_ref()
    }

    /// The endpoints that may continue the watch.
    pub(super) fn suitable_endpoints(&self, session: &Session) -> SuitableEndpoints {
        SuitableEndpoints {
            upstream: Rc::clone(&self.upstream),
            user_agent: self.head.get(&header::USER_AGENT).cloned(),
            authorization: self.head.get(&header::AUTHORIZATION).cloned(),
            served_by: self.served_by,
            may_ask_older: session.may_ask_older(),
            parameters: self.parameters().cloned(),
            avoided: self.avoided(),
        }
    }

    /// The endpoints at which the API group of the watch fails.
    fn avoided(&self) -> Vec<EndpointKey> {
        let failures = &self.upstream.pool.upstream().group_failures;
        if !failures.any_fails() {
            return Vec::new();
        }
        self.extension_group(|group| failures.avoided(group)).unwrap_or_default()
    }

    /// Whether the API group of the watch fails at this endpoint. `Some(true)` if its streams may have lost their path, too.
    pub(super) fn group_fails_at(&self, endpoint: &Endpoint) -> Option<bool> {
        let failures = &self.upstream.pool.upstream().group_failures;
        if !failures.any_fails() {
            return None;
        }
        self.extension_group(|group| failures.fails_at(group, endpoint.key())).flatten()
    }

    /// Calls `f` with the API group of the watch, unless it is built in.
    fn extension_group<T>(&self, f: impl FnOnce(&str) -> T) -> Option<T> {
        let path = self.api_path()?;
        group(&path).filter(|group| !is_built_in_group(group)).map(f)
    }

    /// The head of the request that continues the watch, or starts it again.
    pub(super) fn head(&self, session: &Session, now: Instant) -> Request<()> {
        let query = session.resume_query(self.head.uri.query().unwrap_or_default(), now);
        let mut head = self.head.with_query(&query);
        if !self.upstream.pool.upstream().asks_for_gzip(now) {
            head.headers_mut().remove(header::ACCEPT_ENCODING);
        }
        head
    }

    /// Called when a compressed stream of this endpoint could not be decoded. For some time no watch of the upstream asks
    /// for gzip.
    pub(super) fn gzip_failed(&self, endpoint: &Endpoint, error: GzipError) {
        let upstream = self.upstream.pool.upstream();
        self.upstream.metrics.watch_gzip_failed(&upstream.name, error.label());
        if upstream.compression.failed(&endpoint.label, error, clock::now()) {
            tracing::warn!(
                upstream = &*upstream.name,
                endpoint = &*endpoint.label,
                reason = error.as_str(),
                "compressed watch could not be decoded; watches are requested without gzip"
            );
        }
    }

    /// The version that an endpoint should have reached to continue the watch without a pause.
    pub(super) fn wanted_version(&self) -> Option<(Arc<ResourceRecord>, u64)> {
        let (record, version) = self.resource_versions.as_ref()?.wanted()?;
        Some((Arc::clone(record), version))
    }

    /// The floor of a watch that has shown nothing yet.
    pub(super) fn start_floor(&self) -> Option<StartFloor> {
        self.resource_versions.as_ref()?.start_floor()
    }

    /// The result of an attempt with this response.
    pub(super) fn attempt_result(&self, response: &Response) -> AttemptResult {
        if !self.honours_parameters(response) {
            return AttemptResult::NoHead { outage: false };
        }
        let head = &response.head;
        let content_type = content_type(&head.headers).trim();
        AttemptResult::Head {
            status: head.status.as_u16(),
            same_content_type: ContentCoding::of(&head.headers).is_some()
                && head.headers.contains_key(header::CONTENT_TYPE)
                && content_type.eq_ignore_ascii_case(self.content_type.trim()),
            retry_after: retry_after(&head.headers),
        }
    }

    /// Whether the process of the endpoint is still known to honour the parameters of the watch.
    fn honours_parameters(&self, response: &Response) -> bool {
        let (endpoint, upstream) =
            (&response.permit.connection().endpoint, self.upstream.pool.upstream());
        self.parameters().is_none_or(|parameters| parameters.is_equal(endpoint, upstream))
    }

    /// The endpoints that must not be asked for a stream to which the watch moves.
    pub(super) fn excluded_from_moves(&self) -> Vec<EndpointKey> {
        let restrictions = self.restrictions.as_deref();
        let mut excluded = restrictions
            .map_or_else(Vec::new, |restrictions| restrictions.without_encoding.clone());
        excluded.extend(self.avoided());
        excluded
    }

    /// Called when an attempt to move was answered.
    pub(super) fn record_move_answer(&mut self, response: &Response) {
        if self.attempt_result(response).lacks_encoding() {
            let restrictions = self.restrictions.get_or_insert_default();
            restrictions.without_encoding.push(response.permit.connection().endpoint.key());
        }
    }

    /// Called when the watch has another stream.
    pub(super) fn forget_move_answers(&mut self) {
        if let Some(restrictions) = &mut self.restrictions {
            restrictions.without_encoding.clear();
        }
    }

    /// Why such a response is not accepted, for logs.
    pub(super) fn describe_refusal(&self, response: &Response) -> String {
        let answer = format!("the endpoint answered {}", response.head.status);
        match self.attempt_result(response) {
            AttemptResult::Head { status: 200, .. } => answer + " in another encoding",
            AttemptResult::NoHead { .. } => PROCESS_CHANGED.to_owned(),
            _ => answer,
        }
    }

    /// Whether the class still has a credential. After a reload the file of an identity may contain another
    /// subject.
    pub(super) fn has_credential(&self) -> bool {
        self.upstream.pool.upstream().credentials.tls(self.class.credential_class()).is_some()
    }

    /// Whether the watch may be moved, as far as its client and its API group decide.
    pub(super) fn permits_moves(&self) -> bool {
        self.proof.is_current(wall_clock()) && !self.is_group_unordered()
    }

    /// Whether a watch of the same API group has shown versions that are not ordered.
    pub(super) fn is_group_unordered(&self) -> bool {
        let groups = &self.upstream.pool.upstream().unordered_groups;
        self.api_path().as_deref().and_then(group).is_some_and(|group| groups.contains(group))
    }

    /// The path of the request, from where the API of its server begins.
    fn api_path(&self) -> Option<Cow<'_, str>> {
        self.upstream.pool.upstream().path_prefix.strip_sent(self.head.uri.path())
    }

    /// Remembers that the API group's versions are not ordered, if `reason` shows that and an aggregated apiserver
    /// may serve the group.
    pub(super) fn record_contradiction(&self, reason: NotResumable) {
        let upstream = self.upstream.pool.upstream();
        if reason.is_contradiction()
            && let Some(path) = self.api_path()
            && let Some(group) = group(&path)
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

    /// Called when the watch has left this connection, or an attempt on it has failed.
    pub(super) fn set_last_connection(&mut self, connection: &Rc<Connection>) {
        self.last_connection = Some(Rc::clone(connection));
    }

    /// Called when an attempt to resume was accepted, or an outage begins. Drops the last connection, which the watch
    /// would otherwise keep in memory.
    pub(super) fn forget_last_connection(&mut self) {
        self.last_connection = None;
    }
}

fn content_type(headers: &HeaderMap) -> &str {
    headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
