//! Where the watch after a list began: a version that kube's watcher knows and does not tell.
//!
//! A watch that begins at a version delivers only what came after it. So an event at or before that
//! version is a replay, also of an object that the list no longer had, and of which nothing else
//! could tell that it is old. The version is in the request, which passes by here.

use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use http::Request;
use tower_service::Service;

/// The version that the first watch since the last list began at.
#[derive(Debug, Clone, Default)]
pub struct WatchStartVersion(Arc<Mutex<Option<String>>>);

impl WatchStartVersion {
    /// The version, once a watch has begun.
    pub fn version(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note(&self, query: &str) {
        let mut pairs = query.split('&');
        let value = |pair: &str, key: &str| pair.strip_prefix(key).map(str::to_owned);
        let mut version = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !pairs.clone().any(|pair| pair.starts_with("watch=")) {
            *version = None;
        } else if version.is_none() {
            *version = pairs.find_map(|pair| value(pair, "resourceVersion="));
        }
    }
}

/// A transport that notes where watches begin.
#[derive(Debug, Clone)]
pub struct RecordingLayer<S> {
    /// What was noted.
    pub horizon: WatchStartVersion,
    /// Who does the work.
    pub inner: S,
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
        self.horizon.note(request.uri().query().unwrap_or_default());
        self.inner.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_watch_after_a_list_counts() {
        let horizon = WatchStartVersion::default();
        for (query, expected) in [
            ("limit=500", None),
            ("watch=true&resourceVersion=7&timeoutSeconds=290", Some("7")),
            ("watch=true&resourceVersion=9", Some("7")),
            ("resourceVersion=0", None),
            ("watch=true", None),
            ("watch=true&resourceVersion=12", Some("12")),
        ] {
            horizon.note(query);
            assert_eq!(horizon.version().as_deref(), expected, "{query}");
        }
    }
}
