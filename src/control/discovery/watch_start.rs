//! Records the resourceVersion at which a watch started, which kube's watcher does not expose.
//!
//! A watch delivers only events after its start version. An event at or before that version is a
//! replay, even of an object that is no longer in the list. The version is in the query of the
//! watch request, which [`RecordingLayer`] reads.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::Request;
use tower_service::Service;

/// The start version of the first watch after the last list.
#[derive(Debug, Clone, Default)]
pub struct WatchStartVersion(Arc<Mutex<Option<String>>>);

impl WatchStartVersion {
    /// The version; `None` until a watch has started.
    pub fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn record(&self, query: &str) {
        let mut pairs = query.split('&');
        let mut version = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !pairs.clone().any(|pair| pair.starts_with("watch=")) {
            *version = None;
        } else if version.is_none() {
            *version =
                pairs.find_map(|pair| pair.strip_prefix("resourceVersion=").map(str::to_owned));
        }
    }
}

/// A transport that records start versions and passes every request on.
#[derive(Debug, Clone)]
pub struct RecordingLayer<S> {
    inner: S,
    version: WatchStartVersion,
}

impl<S> RecordingLayer<S> {
    /// Wraps `inner`; returns the layer and the version that it records.
    pub fn new(inner: S) -> (Self, WatchStartVersion) {
        let version = WatchStartVersion::default();
        (Self { inner, version: version.clone() }, version)
    }
}

impl<S, B> Service<Request<B>> for RecordingLayer<S>
where
    S: Service<Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> S::Future {
        self.version.record(request.uri().query().unwrap_or_default());
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_first_watch_after_list_sets_version() {
        let version = WatchStartVersion::default();
        for (query, expected) in [
            ("limit=500", None),
            ("watch=true&resourceVersion=7&timeoutSeconds=290", Some("7")),
            ("watch=true&resourceVersion=9", Some("7")),
            ("resourceVersion=0", None),
            ("watch=true", None),
            ("watch=true&resourceVersion=12", Some("12")),
        ] {
            version.record(query);
            assert_eq!(version.get().as_deref(), expected, "{query}");
        }
    }
}
