//! The `EndpointSlices` of `default/kubernetes`, watched with a credential of our own over our own
//! connections.
//!
//! The best resource that the server has is watched: `discovery.k8s.io/v1`, then `v1beta1`, then
//! the `Endpoints` of the core group. kube's watcher lists, watches and resumes; what it delivers
//! goes through [`Store`], which knows what may be a replay. After a failure the watch goes on
//! where it was; after 410 Gone, or when it fails again and again, everything is asked for anew:
//! no version that we remember can keep us from the truth.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{Request, Response};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::client::Body as KubeBody;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Error as KubeError};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower_service::Service;

use super::kubeconfig::{self, User};
use super::objects::{Resource, SERVICE, SERVICE_LABEL, Store};
use super::source_states::SourceStates;
use super::transport::TransportTask;
use super::watch_start::{RecordingLayer, WatchStartVersion};
use crate::control::certificates::ticks;
use crate::control::file_watch::FileWatch;
use crate::upstream::endpoint_sources::EndpointSource;

/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_millis(250);
const RETRY_MAX: Duration = Duration::from_secs(15);
/// How long a list may take with all of its body, of which an apiserver that lives may yet fail to
/// send the rest. The head of an answer has half of it.
const LIST: Duration = Duration::from_secs(60);
/// Failures in a row after which everything is asked for anew.
const RELIST_AFTER: u32 = 3;
/// A watch that has lived this long was a good one.
const GOOD_AFTER: Duration = Duration::from_secs(60);

/// Follows the slices with the credential of the kubeconfig until it is dropped.
pub async fn follow(path: PathBuf, board: Rc<SourceStates>) {
    let upstream = Arc::clone(board.upstream());
    let mut files = FileWatch::new(vec![path.clone()]);
    files.unsettled = true;
    let mut user: Option<User> = None;
    // Ends with this future, and is replaced with the credential's token.
    let mut watch = JoinSet::new();
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        if files.changed() {
            match kubeconfig::load(&path) {
                Ok(new) => {
                    files.unsettled = false;
                    // Files that were not watched while they were read are read once more.
                    files.follow(new.files.clone());
                    let same_token = user.as_ref().is_some_and(|old| old.token == new.token);
                    upstream.credentials.show_for_discovery(new.certificate.as_ref());
                    if !same_token || watch.is_empty() {
                        watch.abort_all();
                        let (carrier, road) = TransportTask::open(&upstream, new.token.clone());
                        watch.spawn_local(road);
                        watch.spawn_local(observe(carrier, Rc::clone(&board)));
                    }
                    user = Some(new);
                }
                Err(why) => {
                    files.unsettled = true;
                    board.fail(EndpointSource::Slices, &why);
                }
            }
        }
        if let Some(user) = &user {
            // The CA bundle may have changed.
            upstream.credentials.show_for_discovery(user.certificate.as_ref());
        }
        while watch.try_join_next().is_some() {}
    }
}

/// Watches for ever over a transport.
async fn observe<S, B>(transport: S, board: Rc<SourceStates>)
where
    S: Service<Request<KubeBody>, Response = Response<B>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let horizon = WatchStartVersion::default();
    let noting = RecordingLayer { horizon: horizon.clone(), inner: transport };
    let client = Client::new(noting, "default");
    let mut failures: u32 = 0;
    loop {
        match timeout(LIST, choose(&client)).await.unwrap_or_else(|_| Err(stalled())) {
            Ok(resource) => {
                tracing::info!(upstream = &*board.upstream().name, %resource, "watching endpoints");
                let store = Store::new(resource, horizon.clone());
                watch(&client, resource, store, &board, &mut failures).await;
            }
            Err(why) => {
                failures = failures.saturating_add(1);
                board.fail(EndpointSource::Slices, &why);
            }
        }
        sleep(pause(failures, fastrand::f64())).await;
    }
}

/// Pause after the `failures`-th failure in a row; `jitter` is in 0..1, so that 5,000 nodes that
/// lost the same apiserver do not ask the next one at once.
fn pause(failures: u32, jitter: f64) -> Duration {
    let doubled = RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(10));
    doubled.min(RETRY_MAX).mul_f64(0.5 + jitter / 2.0)
}

fn stalled() -> String {
    format!("a list was not complete within {} s", LIST.as_secs())
}

/// The best resource that this server has and that we may list.
async fn choose(client: &Client) -> Result<Resource, String> {
    let mut reasons = Vec::new();
    for resource in Resource::ALL {
        let params = match resource {
            Resource::Endpoints => ListParams::default().fields(&name_field()),
            _ => ListParams::default().labels(&service_label()),
        };
        match api(client, resource).list(&params.limit(1)).await {
            Ok(_) => return Ok(resource),
            Err(KubeError::Api(status)) if matches!(status.code, 403 | 404) => {
                reasons.push(format!("{resource}: {}", status.message));
            }
            Err(error) => return Err(words(&error)),
        }
    }
    Err(format!(
        "no list of endpoints may be read (the manifests in deploy/rbac allow it): {}",
        reasons.join("; ")
    ))
}

fn api(client: &Client, resource: Resource) -> Api<DynamicObject> {
    let (group, version, kind, plural) = match resource {
        Resource::SlicesV1 => ("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices"),
        Resource::SlicesV1Beta1 => {
            ("discovery.k8s.io", "v1beta1", "EndpointSlice", "endpointslices")
        }
        Resource::Endpoints => ("", "v1", "Endpoints", "endpoints"),
    };
    let kind = GroupVersionKind::gvk(group, version, kind);
    Api::namespaced_with(
        client.clone(),
        "default",
        &ApiResource::from_gvk_with_plural(&kind, plural),
    )
}

fn service_label() -> String {
    format!("{SERVICE_LABEL}={SERVICE}")
}

fn name_field() -> String {
    format!("metadata.name={SERVICE}")
}

/// Watches one resource until everything must be asked for anew.
async fn watch(
    client: &Client,
    resource: Resource,
    mut store: Store,
    board: &SourceStates,
    failures: &mut u32,
) {
    let config = match resource {
        Resource::Endpoints => watcher::Config::default().fields(&name_field()),
        _ => watcher::Config::default().labels(&service_label()),
    };
    let mut events = std::pin::pin!(watcher(api(client, resource), config));
    let mut since = Instant::now();
    // It begins with a list, and with 410 there is another one.
    let mut listing = true;
    loop {
        // A watch may be silent for as long as nothing happens.
        let next = async {
            if listing { timeout(LIST, events.next()).await } else { Ok(events.next().await) }
        };
        let event = match next.await {
            Ok(Some(event)) => event,
            Ok(None) => return,
            Err(_) => {
                *failures = failures.saturating_add(1);
                return board.fail(EndpointSource::Slices, &stalled());
            }
        };
        match event {
            Ok(event) => {
                listing = matches!(event, Event::Init | Event::InitApply(_));
                if matches!(event, Event::Apply(_) | Event::Delete(_))
                    || since.elapsed() > GOOD_AFTER
                {
                    *failures = 0;
                }
                if store.feed(event) {
                    board.update(EndpointSource::Slices, store.said(), true);
                }
            }
            Err(error) => {
                *failures =
                    if since.elapsed() > GOOD_AFTER { 1 } else { failures.saturating_add(1) };
                since = Instant::now();
                board.fail(EndpointSource::Slices, &words_of_watch(&error));
                if is_over(&error) || failures.is_multiple_of(RELIST_AFTER) {
                    return;
                }
                sleep(pause(*failures, fastrand::f64())).await;
            }
        }
    }
}

/// Whether the version that the watch goes on from is no good any more, or the resource itself.
fn is_over(error: &watcher::Error) -> bool {
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

/// An error in one line, with its causes.
fn words(error: &KubeError) -> String {
    match error {
        KubeError::Api(status) => format!("the apiserver says {}: {}", status.code, status.message),
        other => causes(other),
    }
}

fn words_of_watch(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => words(error),
        watcher::Error::WatchError(status) => {
            format!("the watch ended with {}: {}", status.code, status.message)
        }
        watcher::Error::NoResourceVersion => "an object without a resourceVersion".to_owned(),
    }
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if !words.contains(&text) {
            words = format!("{words}: {text}");
        }
        source = cause.source();
    }
    words
}

#[cfg(test)]
mod tests;
