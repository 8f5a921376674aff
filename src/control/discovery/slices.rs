//! The source `discovery.kubeconfig`: watches the `EndpointSlices` of the Service
//! `default/kubernetes`.
//!
//! The watch uses the credential of a kubeconfig and connections of jackstay ([`super::requests`]). It
//! watches the first resource that the server has and that the user may list: `discovery.k8s.io/v1`,
//! `v1beta1`, or `Endpoints` of the core group. It lists once and follows the events from there;
//! [`ObjectStore`] drops the replays among them.
//!
//! After a failure the watch continues from the version of the last event. After 410 Gone, and after every third
//! failure in a row, it lists again, so that a wrong resourceVersion cannot hide the current endpoints for long.

use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use jackstay_core::backoff::Backoff;
use jackstay_core::discovery::source::EndpointSource;
use jackstay_kubeconfig::discovery::{self as kubeconfig, DiscoveryUser};
use jackstay_sys::clock;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::objects::{ObjectStore, WatchedResource};
use super::panics;
use super::requests::{MAX_BYTES, PooledRequests, RequestError, Requests, ResponseChunks};
use super::source_states::SourceStates;
use super::watch_events::{WatchEvent, WatchEvents, version_of, whole_body};
use crate::control::file_watch::{FileWatch, poll_ticks};

/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(15);
/// Thousands of nodes that have lost the same apiserver must not send their requests to the next one at the same
/// moment.
const RETRIES: Backoff = Backoff::new(RETRY_MIN, RETRY_MAX).with_factors(0.5, 1.0);
/// Limit for finding a resource that may be listed, and listing it with all pages. A response head may take 30 s, and
/// an apiserver may stop after it.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Failures in a row after which the watch lists again.
const RELIST_AFTER: u32 = 3;
/// Time without a failure after which earlier failures no longer count.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// Largest page of a list, as in client-go. The Service `kubernetes` normally has one object.
const PAGE: usize = 500;
/// After this time the apiserver ends a watch, and the next one continues: client-go asks for 5 to 10 minutes.
const WATCH_TIMEOUT: Duration = Duration::from_secs(290);
/// A watch without an event is left this long after its apiserver should have ended it: a proxy on the path may have
/// lost it, and still answer PINGs.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// Limit for the body of a refusal, which is read only for its message.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest text of an apiserver in an error, in characters.
const MAX_MESSAGE: usize = 256;

/// Watches with the credential of the kubeconfig at `path`, and loads that again after each change,
/// until the future is dropped.
pub async fn follow(path: PathBuf, states: Rc<SourceStates>) {
    let upstream = Arc::clone(states.upstream());
    let mut files = FileWatch::unread(vec![path.clone()]);
    let mut user: Option<DiscoveryUser> = None;
    // The task of the watch and its connections, which is replaced when the token changes.
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
                        let (requests, pool) = PooledRequests::new(&upstream, new.token.clone());
                        let watch = watch_forever(requests, Rc::clone(&states));
                        // One task: neither goes on without the other.
                        tasks.spawn_local(async move {
                            tokio::select! {
                                () = pool => {}
                                () = watch => {}
                            }
                        });
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
        panics::propagate(&mut tasks);
    }
}

/// Watches until the future is dropped.
async fn watch_forever(requests: impl Requests, states: Rc<SourceStates>) {
    let mut backoff = RETRIES;
    loop {
        // Before the list, which may show a history that is lost meanwhile.
        let restore = states.upstream().restores.recognised_notice();
        let list = timeout(LIST_TIMEOUT, list_first(&requests)).await;
        match list.unwrap_or(Err(ListError::TimedOut)) {
            Ok(list) => {
                let resource = list.resource;
                tracing::info!(upstream = &*states.upstream().name, %resource, "watching endpoints");
                let watch = watch(&requests, list, &states, &mut backoff);
                tokio::select! {
                    () = watch => {}
                    // The version from which the watch would continue is one of the lost history.
                    () = states.upstream().restores.recognised_after(restore) => {}
                }
            }
            Err(error) => {
                backoff.failed();
                states.fail(EndpointSource::Slices, &error.to_string());
            }
        }
        sleep(backoff.random_pause(&mut fastrand::Rng::new())).await;
    }
}

/// A list that is complete.
struct List {
    resource: WatchedResource,
    objects: Vec<Value>,
    version: String,
}

/// Why the endpoints cannot be listed.
#[derive(Debug)]
enum ListError {
    /// A list was not complete in time.
    TimedOut,
    /// The user may list none of the resources, or the server has none. The reasons are those of the server.
    NoResource(Vec<(WatchedResource, String)>),
    /// The request failed, or its response is no list.
    Request(RequestError),
    /// The server refuses the request.
    Refused(StatusCode, String),
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
            Self::Request(error) => f.write_str(error),
            Self::Refused(status, message) => f.write_str(&refused(*status, message)),
        }
    }
}

fn refused(status: StatusCode, message: &str) -> String {
    format!("the apiserver answers {}: {message}", status.as_u16())
}

/// Lists the first resource that the server has and that the user may list.
async fn list_first(requests: &impl Requests) -> Result<List, ListError> {
    let mut reasons = Vec::new();
    for resource in WatchedResource::ALL {
        match list(requests, resource).await {
            Err(ListError::Refused(StatusCode::FORBIDDEN | StatusCode::NOT_FOUND, message)) => {
                reasons.push((resource, message));
            }
            listed => return listed,
        }
    }
    Err(ListError::NoResource(reasons))
}

/// Lists all objects, page by page.
async fn list(requests: &impl Requests, resource: WatchedResource) -> Result<List, ListError> {
    let first = format!("{}&limit={PAGE}", resource.target());
    let (mut target, mut objects, mut size) = (first.clone(), Vec::new(), 0);
    loop {
        let (status, body) = requests.get(&target, false).await.map_err(ListError::Request)?;
        if !status.is_success() {
            return Err(ListError::Refused(status, message_of(body).await));
        }
        let body = whole_body(body).await.map_err(ListError::Request)?;
        size += body.len();
        if size > MAX_BYTES {
            return Err(ListError::Request(format!("a list of more than {MAX_BYTES} bytes")));
        }
        let mut page: Value = serde_json::from_slice(&body)
            .map_err(|error| ListError::Request(format!("a list is not valid: {error}")))?;
        match page.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => objects.extend(items),
            Some(Value::Null) => {}
            _ => return Err(ListError::Request("a response that is no list".to_owned())),
        }
        match page["metadata"]["continue"].as_str().unwrap_or_default() {
            "" => {
                let no_version = || ListError::Request("a list without a resourceVersion".into());
                let version = version_of(&page).ok_or_else(no_version)?;
                return Ok(List { resource, objects, version });
            }
            token => {
                let token = utf8_percent_encode(token, NON_ALPHANUMERIC);
                target = format!("{first}&continue={token}");
            }
        }
    }
}

/// The text of a refusal: of its `Status`, or else the beginning of the body; empty if it does not arrive.
async fn message_of(body: impl ResponseChunks) -> String {
    let body = timeout(REFUSAL_TIMEOUT, whole_body(body)).await;
    let body = body.ok().and_then(Result::ok).unwrap_or_default();
    let status: Value = serde_json::from_slice(&body).unwrap_or_default();
    one_line(status["message"].as_str().unwrap_or(&String::from_utf8_lossy(&body)))
}

/// The beginning of a text of an apiserver, for an error.
fn one_line(text: &str) -> String {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_MESSAGE).map(printable).collect()
}

/// Why a watch has failed.
struct WatchError {
    message: String,
    /// Its version or the resource is no longer available, or the user may no longer read it.
    needs_list: bool,
}

impl From<RequestError> for WatchError {
    fn from(message: RequestError) -> Self {
        Self { message, needs_list: false }
    }
}

/// Publishes the endpoints of `list`, and follows its events until it must be listed again. Counts failures in a row in
/// `backoff`.
async fn watch(requests: &impl Requests, list: List, states: &SourceStates, backoff: &mut Backoff) {
    let List { resource, objects, mut version } = list;
    let mut store = ObjectStore::new(resource, objects, &version);
    states.update(EndpointSource::Slices, store.endpoints());
    let mut last_failure = clock::now();
    loop {
        let on_event = |event| {
            if clock::elapsed(last_failure) > STABLE_AFTER
                || !matches!(event, WatchEvent::Bookmark(_))
            {
                backoff.reset();
            }
            let changed = match event {
                WatchEvent::Applied(object) => store.apply(object, false),
                WatchEvent::Deleted(object) => store.apply(object, true),
                WatchEvent::Bookmark(_) | WatchEvent::Error { .. } => false,
            };
            if changed {
                states.update(EndpointSource::Slices, store.endpoints());
            }
        };
        let followed = follow_events(requests, resource, &mut version, on_event).await;
        let Err(error) = followed else { continue };
        if clock::elapsed(last_failure) > STABLE_AFTER {
            backoff.reset();
        }
        backoff.failed();
        last_failure = clock::now();
        states.fail(EndpointSource::Slices, &error.message);
        if error.needs_list || backoff.failures().is_multiple_of(RELIST_AFTER) {
            return;
        }
        sleep(backoff.random_pause(&mut fastrand::Rng::new())).await;
    }
}

/// Follows the events of one watch from `version` on, which becomes that of the last event, until the server ends it.
///
/// # Errors
/// The watch cannot start or breaks off, or the server ends it with an error.
async fn follow_events(
    requests: &impl Requests,
    resource: WatchedResource,
    version: &mut String,
    mut on_event: impl FnMut(WatchEvent),
) -> Result<(), WatchError> {
    let from = utf8_percent_encode(version, NON_ALPHANUMERIC);
    let target = format!(
        "{}&watch=true&resourceVersion={from}&timeoutSeconds={}&allowWatchBookmarks=true",
        resource.target(),
        WATCH_TIMEOUT.as_secs()
    );
    let (status, body) = requests.get(&target, true).await?;
    if !status.is_success() {
        let message = refused(status, &message_of(body).await);
        return Err(WatchError { message, needs_list: matches!(status.as_u16(), 403 | 404 | 410) });
    }
    let mut events = WatchEvents::new(body);
    loop {
        let Ok(Some(event)) = timeout(WATCH_TIMEOUT + WATCH_GRACE, events.next()).await else {
            return Ok(());
        };
        match event? {
            WatchEvent::Error { code, message } => {
                let message = format!("the watch ended with {code}: {}", one_line(&message));
                return Err(WatchError { message, needs_list: matches!(code, 404 | 410) });
            }
            event => {
                let Some(reached) = event.version() else {
                    let message = "an object without a resourceVersion".to_owned();
                    return Err(WatchError { message, needs_list: true });
                };
                *version = reached;
                on_event(event);
            }
        }
    }
}

#[cfg(test)]
mod tests;
