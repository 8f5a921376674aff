//! The source `discovery.kubeconfig`: watches the `EndpointSlices` of the Service
//! `default/kubernetes`.
//!
//! The watch uses the credential of a kubeconfig and connections of jackstay ([`super::transport`]). It
//! watches the first resource that the server has and that the user may list: `discovery.k8s.io/v1`,
//! `v1beta1`, or `Endpoints` of the core group. kube's watcher lists, watches and resumes;
//! [`ObjectStore`] drops the replays among its events.
//!
//! After a failure the watch resumes. After 410 Gone, and after every third failure in a row, the watcher
//! lists again, so that a wrong resourceVersion cannot hide the current endpoints for long.

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use http::Request;
use jackstay_core::backoff::Backoff;
use jackstay_core::discovery::source::EndpointSource;
use jackstay_sys::clock;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::client::Body as KubeBody;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Error as KubeError};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;

use super::kubeconfig::{self, DiscoveryUser};
use super::objects::{ObjectStore, SERVICE, SERVICE_LABEL, WatchStartVersion, WatchedResource};
use super::source_states::SourceStates;
use super::transport::{Transport, TransportTask};
use crate::control::file_watch::{FileWatch, poll_ticks};

/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(15);
/// Thousands of nodes that have lost the same apiserver must not send their requests to the next one at the same moment.
const RETRIES: Backoff = Backoff::new(RETRY_MIN, RETRY_MAX).with_factors(0.5, 1.0);
/// Limit for a list with its whole body. The limit of the transport, 30 s, covers only the response
/// head, and an apiserver may stop after it.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Failures in a row after which the watch lists again.
const RELIST_AFTER: u32 = 3;
/// Time without a failure after which earlier failures no longer count.
const STABLE_AFTER: Duration = Duration::from_secs(60);

/// Watches with the credential of the kubeconfig at `path`, and loads that again after each change,
/// until the future is dropped.
pub async fn follow(path: PathBuf, states: Rc<SourceStates>) {
    let upstream = Arc::clone(states.upstream());
    let mut files = FileWatch::unread(vec![path.clone()]);
    let mut user: Option<DiscoveryUser> = None;
    // The tasks of the transport and of the watch, which are replaced when the token changes.
    let mut tasks = JoinSet::new();
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        if files.changed() {
            match kubeconfig::load(&path) {
                Ok(new) => {
                    files.set_settled(true);
                    // If the list of files is a new one, `follow` marks them as unread, because they may
                    // have changed since they were loaded.
                    files.follow(new.files.clone());
                    let same_token = user.as_ref().is_some_and(|old| old.token == new.token);
                    upstream.credentials.set_discovery_certificate(new.certificate.as_ref());
                    if !same_token || tasks.is_empty() {
                        tasks.abort_all();
                        let (transport, task) = TransportTask::start(&upstream, new.token.clone());
                        tasks.spawn_local(task);
                        tasks.spawn_local(watch_forever(transport, Rc::clone(&states)));
                    }
                    user = Some(new);
                }
                Err(error) => {
                    files.set_settled(false);
                    states.fail(EndpointSource::Slices, &error.to_string());
                }
            }
        }
        if let Some(user) = &user {
            // Rebuilds the TLS configuration if the CA bundle has changed.
            upstream.credentials.set_discovery_certificate(user.certificate.as_ref());
        }
        while tasks.try_join_next().is_some() {}
    }
}

/// Watches over `transport` until the future is dropped.
async fn watch_forever(transport: Transport, states: Rc<SourceStates>) {
    let watch_start = WatchStartVersion::default();
    let recorded = watch_start.clone();
    let transport = transport.map_request(move |request: Request<KubeBody>| {
        recorded.record(request.uri().query().unwrap_or_default());
        request
    });
    let client = Client::new(transport, "default");
    let mut backoff = RETRIES;
    loop {
        let choice = timeout(LIST_TIMEOUT, choose_resource(&client)).await;
        match choice.unwrap_or(Err(ListError::TimedOut)) {
            Ok(resource) => {
                tracing::info!(upstream = &*states.upstream().name, %resource, "watching endpoints");
                let store = ObjectStore::new(resource, watch_start.clone());
                watch(&client, resource, store, &states, &mut backoff).await;
            }
            Err(error) => {
                backoff.failed();
                states.fail(EndpointSource::Slices, &error.to_string());
            }
        }
        sleep(backoff.random_pause(&mut fastrand::Rng::new())).await;
    }
}

/// Why the endpoints cannot be listed.
#[derive(Debug)]
enum ListError {
    /// A list was not complete in time.
    TimedOut,
    /// The user may list none of the resources, or the server has none. The reasons are those of the server.
    NoResource(Vec<(WatchedResource, String)>),
    /// The request failed.
    Request(KubeError),
}

impl fmt::Display for ListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TimedOut => {
                write!(f, "a list was not complete within {} s", LIST_TIMEOUT.as_secs())
            }
            Self::NoResource(reasons) => {
                let reasons = reasons.iter().map(|(resource, why)| format!("{resource}: {why}"));
                let reasons = reasons.collect::<Vec<_>>().join("; ");
                write!(
                    f,
                    "no resource with endpoints can be listed; apply the manifests in deploy/rbac: \
                     {reasons}"
                )
            }
            Self::Request(error) => f.write_str(&describe(error)),
        }
    }
}

/// Returns the first resource that the server has and that the user may list.
async fn choose_resource(client: &Client) -> Result<WatchedResource, ListError> {
    let mut reasons = Vec::new();
    for resource in WatchedResource::ALL {
        let (label_selector, field_selector) = selectors(resource);
        let params = ListParams { label_selector, field_selector, ..ListParams::default() };
        match api(client, resource).list(&params.limit(1)).await {
            Ok(_) => return Ok(resource),
            Err(KubeError::Api(status)) if matches!(status.code, 403 | 404) => {
                reasons.push((resource, status.message));
            }
            Err(error) => return Err(ListError::Request(error)),
        }
    }
    Err(ListError::NoResource(reasons))
}

/// The label selector and the field selector of the objects of [`SERVICE`].
fn selectors(resource: WatchedResource) -> (Option<String>, Option<String>) {
    match resource {
        WatchedResource::Endpoints => (None, Some(format!("metadata.name={SERVICE}"))),
        _ => (Some(format!("{SERVICE_LABEL}={SERVICE}")), None),
    }
}

fn api(client: &Client, resource: WatchedResource) -> Api<DynamicObject> {
    let (group, version, kind, plural) = match resource {
        WatchedResource::SlicesV1 => ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
        WatchedResource::SlicesV1Beta1 => {
            ("discovery.k8s.io", "v1beta1", "EndpointSlice", "endpointslices")
        }
        WatchedResource::Endpoints => ("", "v1", "Endpoints", "endpoints"),
    };
    let kind = GroupVersionKind::gvk(group, version, kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    Api::namespaced_with(client.clone(), "default", &resource)
}

/// Lists and watches `resource`, until it must be chosen and listed again. Counts failures in a row in
/// `backoff`.
async fn watch(
    client: &Client,
    resource: WatchedResource,
    mut store: ObjectStore,
    states: &SourceStates,
    backoff: &mut Backoff,
) {
    let (label_selector, field_selector) = selectors(resource);
    let config = watcher::Config { label_selector, field_selector, ..watcher::Config::default() };
    let mut events = std::pin::pin!(watcher(api(client, resource), config));
    let mut last_failure = clock::now();
    let upstream = states.upstream();
    let restore = upstream.restores.recognised_notice();
    // Whether the watcher lists, as at its start and after 410 Gone.
    let mut listing = true;
    loop {
        // A list has a time limit. A watch has none, because it is silent while nothing changes.
        let next = async {
            if listing {
                timeout(LIST_TIMEOUT, events.next()).await
            } else {
                Ok(events.next().await)
            }
        };
        let next = tokio::select! {
            next = next => next,
            // The version from which the watcher would continue is one of the lost history.
            () = upstream.restores.recognised_after(restore) => return,
        };
        let event = match next {
            Ok(Some(event)) => event,
            Ok(None) => return,
            Err(_) => {
                backoff.failed();
                return states.fail(EndpointSource::Slices, &ListError::TimedOut.to_string());
            }
        };
        let stable = clock::elapsed(last_failure) > STABLE_AFTER;
        match event {
            Ok(event) => {
                listing = matches!(event, Event::Init | Event::InitApply(_));
                if stable || matches!(event, Event::Apply(_) | Event::Delete(_)) {
                    backoff.reset();
                }
                if store.apply(event) {
                    states.update(EndpointSource::Slices, store.endpoints());
                }
            }
            Err(error) => {
                if stable {
                    backoff.reset();
                }
                backoff.failed();
                last_failure = clock::now();
                states.fail(EndpointSource::Slices, &describe_watch(&error));
                if needs_list(&error) || backoff.failures().is_multiple_of(RELIST_AFTER) {
                    return;
                }
                sleep(backoff.random_pause(&mut fastrand::Rng::new())).await;
            }
        }
    }
}

/// Whether the watch cannot resume after `error`: its version or the resource is no longer available,
/// or the user may no longer read it.
fn needs_list(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchError(status) => matches!(status.code, 404 | 410),
        watcher::Error::InitialListFailed(KubeError::Api(status))
        | watcher::Error::WatchStartFailed(KubeError::Api(status)) => {
            matches!(status.code, 403 | 404 | 410)
        }
        watcher::Error::NoResourceVersion => true,
        watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchStartFailed(_)
        | watcher::Error::WatchFailed(_) => false,
    }
}

/// Describes an error in one line, with its causes.
fn describe(error: &KubeError) -> String {
    match error {
        KubeError::Api(status) => {
            format!("the apiserver answers {}: {}", status.code, status.message)
        }
        other => with_causes(other),
    }
}

fn describe_watch(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => describe(error),
        watcher::Error::WatchError(status) => {
            format!("the watch ended with {}: {}", status.code, status.message)
        }
        watcher::Error::NoResourceVersion => "an object without a resourceVersion".to_owned(),
    }
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        source = cause.source();
    }
    message
}

#[cfg(test)]
mod tests;
