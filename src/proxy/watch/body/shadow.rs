//! The second stream of a watch, from the search for it, and its place among the shadows of the process.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use jackstay_core::watch::shadow::opening::{
    CATCH_UP_LIMIT, MAX_PER_ENDPOINT, MAX_PER_PROCESS, ShadowCount,
};
use jackstay_sys::clock;
use tokio::time::{Sleep, sleep};

use super::attempt::AttemptError;
use super::stream::{StreamEvent, UpstreamStream};
use crate::observe::{GzipBytes, Metrics};
use crate::proxy::upstream_client::UpstreamResponse as Response;
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ShownVersion;

/// A request for a second stream.
pub(super) type ShadowAttempt = LocalBoxFuture<'static, Result<Response, AttemptError>>;

/// The shadows of the process.
static OPEN: ShadowCount = ShadowCount::new();

/// The shadow of a watch, or the attempt to open one.
pub(super) struct ShadowSource {
    stage: Stage,
    /// Number of shadows that were requested before in this suspicion, and have failed.
    failures: u32,
    /// When the first stream is given up, although its connection answers again.
    catch_up_limit: Option<Pin<Box<Sleep>>>,
}

enum Stage {
    /// Waits, then searches a stream on another connection.
    Searching(LocalBoxFuture<'static, Option<Permit>>),
    /// Waits for the response head.
    Requesting(ShadowAttempt, ShadowPlace),
    /// The stream is read.
    Streaming(Box<SecondStream>),
}

/// How far a shadow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is not requested yet.
    Searching,
    /// It waits for the response head.
    Requested,
    /// Its stream is read.
    Accepted,
}

/// The stream of a shadow.
pub(super) struct SecondStream {
    pub(super) stream: UpstreamStream,
    /// The version that its endpoint has shown.
    pub(super) shown: Option<Arc<ShownVersion>>,
    place: ShadowPlace,
}

/// A place among the shadows of the process and of an endpoint.
pub(super) struct ShadowPlace {
    endpoint: Arc<Endpoint>,
    requested_at: Instant,
}

impl ShadowPlace {
    /// A place of a shadow that is requested now; `None` if there are too many.
    pub(super) fn take(endpoint: &Arc<Endpoint>) -> Option<Self> {
        if !OPEN.try_add(MAX_PER_PROCESS) {
            return None;
        }
        if !endpoint.shadows.try_add(MAX_PER_ENDPOINT) {
            OPEN.remove();
            return None;
        }
        Some(Self { endpoint: Arc::clone(endpoint), requested_at: clock::now() })
    }
}

impl Drop for ShadowPlace {
    fn drop(&mut self) {
        self.endpoint.shadows.remove();
        OPEN.remove();
    }
}

/// An event of a shadow.
pub(super) enum ShadowEvent {
    /// The search has ended; `None` if it found no stream.
    Found(Option<Permit>),
    /// The request was answered, or has failed.
    Answered(Box<Result<Response, AttemptError>>),
    /// An event of its stream.
    Stream(StreamEvent),
    /// The first stream answers, but does not show what the client has received.
    FirstLags,
}

impl ShadowSource {
    /// A shadow for which `search` finds a stream, after so many `failures` in the suspicion.
    pub(super) fn search(
        search: impl Future<Output = Option<Permit>> + 'static,
        failures: u32,
    ) -> Self {
        let stage = Stage::Searching(Box::pin(search));
        Self { stage, failures, catch_up_limit: None }
    }

    pub(super) fn requested(&mut self, attempt: ShadowAttempt, place: ShadowPlace) {
        self.stage = Stage::Requesting(attempt, place);
    }

    /// The request was accepted.
    pub(super) fn accepted(&mut self, stream: UpstreamStream, shown: Option<Arc<ShownVersion>>) {
        let none = Stage::Searching(Box::pin(std::future::pending()));
        if let Stage::Requesting(_, place) = std::mem::replace(&mut self.stage, none) {
            self.stage = Stage::Streaming(Box::new(SecondStream { stream, shown, place }));
        }
    }

    /// The stream that is read.
    pub(super) fn second(&mut self) -> Option<&mut SecondStream> {
        match &mut self.stage {
            Stage::Streaming(second) => Some(second),
            _ => None,
        }
    }

    /// The stream that is read.
    pub(super) fn into_stream(self) -> Option<UpstreamStream> {
        match self.stage {
            Stage::Streaming(second) => Some(second.stream),
            _ => None,
        }
    }

    /// Number of shadows that have failed before in the suspicion.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// The connection of the first stream answers again, and must show what the client has received in time, unless it is
    /// suspect again.
    pub(super) fn first_answers(&mut self, answers: bool) {
        self.catch_up_limit = answers.then(|| Box::pin(sleep(CATCH_UP_LIMIT)));
    }

    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        gzip_bytes: &GzipBytes,
    ) -> Poll<ShadowEvent> {
        if let Some(limit) = &mut self.catch_up_limit
            && limit.as_mut().poll(cx).is_ready()
        {
            self.catch_up_limit = None;
            return Poll::Ready(ShadowEvent::FirstLags);
        }
        match &mut self.stage {
            Stage::Searching(search) => search.as_mut().poll(cx).map(ShadowEvent::Found),
            Stage::Requesting(attempt, _) => {
                attempt.as_mut().poll(cx).map(|result| ShadowEvent::Answered(Box::new(result)))
            }
            Stage::Streaming(second) => second.stream.poll(cx, gzip_bytes).map(ShadowEvent::Stream),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        match &self.stage {
            Stage::Searching(_) => Progress::Searching,
            Stage::Requesting(..) => Progress::Requested,
            Stage::Streaming(_) => Progress::Accepted,
        }
    }

    /// Records how the shadow has ended.
    pub(super) fn record(&self, outcome: &'static str, metrics: &Metrics) {
        let place = match &self.stage {
            Stage::Searching(_) => None,
            Stage::Requesting(_, place) => Some(place),
            Stage::Streaming(second) => Some(&second.place),
        };
        let ran = place.map_or(Duration::ZERO, |place| clock::elapsed(place.requested_at));
        metrics.shadow_ended(outcome, ran);
    }
}
