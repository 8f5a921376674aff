//! Reads two streams of a watch while the connection of the first is suspect. What arrives on both is merged by
//! [`Relay`](jackstay_core::watch::relay::Relay), as [`jackstay_core::watch::shadow`] decides;
//! [`jackstay_core::watch::shadow::opening`] says when a shadow is opened.
//!
//! The first stream stays the source of the body. If it is lost, the stream of the shadow takes its place.

use std::rc::Rc;

use bytes::Bytes;
use jackstay_core::credential_class::ClientRank;
use jackstay_core::watch::gzip::ContentCoding;
use jackstay_core::watch::relay::PushResult;
use jackstay_core::watch::session::SessionEffect;
use jackstay_core::watch::shadow::opening::{HEAD_TIMEOUT, LOSSY_FOR, Lossy, MAX_ATTEMPTS, pause};
use jackstay_core::watch::shadow::{ShadowEnd, Side};
use jackstay_sys::clock;

use super::attempt::{AttemptError, send};
use super::shadow::{Progress, ShadowEvent, ShadowPlace, ShadowSource};
use super::stream::{StreamEvent, UpstreamStream};
use super::{Source, WatchBody};
use crate::proxy::upstream_client::UpstreamResponse as Response;
use crate::upstream::connection::Permit;

impl WatchBody {
    /// Called when the connection of the first stream has become suspect, or live again.
    pub(super) fn suspicion_changed(&mut self) {
        let Source::Stream(first) = &self.source else { return };
        let is_suspect = first.permit.connection().is_suspect();
        let Some(shadow) = &mut self.shadow else {
            if is_suspect {
                self.search_shadow(0);
            }
            return;
        };
        if is_suspect {
            shadow.first_answers(false);
            self.relay.first_suspect();
        } else if shadow.progress() == Progress::Searching {
            self.shadow = None;
        } else {
            match self.relay.first_answers(clock::now()) {
                Some(end) => self.end_shadow(end.as_str()),
                None => shadow.first_answers(true),
            }
        }
    }

    /// Whether the first stream is read, and its connection is suspect.
    fn is_first_suspect(&self) -> bool {
        matches!(&self.source, Source::Stream(first) if first.permit.connection().is_suspect())
    }

    /// Searches a stream for a shadow, after this number of shadows in the suspicion.
    fn search_shadow(&mut self, failures: u32) {
        let Source::Stream(first) = &self.source else { return };
        let now = clock::now();
        if !self.relay.can_shadow(now) || !self.context.permits_moves() {
            return;
        }
        let lossy = match first.permit.connection().has_recovered_within(LOSSY_FOR, now) {
            false => Lossy::No,
            true if first.pace.is_quiet(now) => Lossy::Quiet,
            true => Lossy::Delivering,
        };
        let pause = pause(failures, lossy, &mut fastrand::Rng::new());
        let search = first.search(&self.context, self.relay.session(), pause, true);
        self.shadow = Some(Box::new(ShadowSource::search(search, failures)));
    }

    pub(super) fn shadow_event(&mut self, event: ShadowEvent) {
        match event {
            ShadowEvent::Found(permit) => self.request_shadow(permit),
            ShadowEvent::Answered(result) => self.shadow_answered(*result),
            ShadowEvent::Stream(event) => self.shadow_stream_event(event),
            ShadowEvent::FirstLags => self.stream_lost("the endpoint lags behind another one"),
        }
    }

    fn request_shadow(&mut self, permit: Option<Permit>) {
        let is_suspect = self.is_first_suspect();
        let Some(shadow) = self.shadow.as_mut().filter(|_| is_suspect) else {
            self.shadow = None;
            return;
        };
        let Some(permit) = permit else { return self.shadow_failed("no_stream") };
        let Some(place) = ShadowPlace::take(&permit.connection().endpoint) else {
            return self.shadow_failed("limited");
        };
        let now = clock::now();
        let may_move = self.context.permits_moves() && self.context.has_credential();
        if !may_move || !self.relay.request_shadow(now) {
            self.shadow = None;
            return;
        }
        let head = self.context.head(self.relay.session(), now);
        let upstream = Rc::clone(&self.context.upstream);
        let deadline = now + HEAD_TIMEOUT;
        let attempt = async move { send(&upstream, permit, head, deadline).await };
        shadow.requested(Box::pin(attempt), place);
    }

    fn shadow_answered(&mut self, result: Result<Response, AttemptError>) {
        let response = match result {
            Ok(response) if self.context.attempt_result(&response).is_accepted() => response,
            Ok(response) => {
                self.context.record_move_answer(&response);
                let reason = self.context.describe_refusal(&response);
                tracing::debug!(reason, "shadow refused");
                return self.shadow_failed("refused");
            }
            Err(error) => {
                tracing::debug!(reason = error.reason, "shadow not answered");
                return self.shadow_failed("lost");
            }
        };
        let Some(shadow) = &mut self.shadow else { return };
        let coding = ContentCoding::of(&response.head.headers).unwrap_or(ContentCoding::Identity);
        let account = self.context.upstream.watches.gzip_state(self.relay.account());
        let endpoint = &response.permit.connection().endpoint;
        let versions = self.context.resource_versions.as_ref();
        let shown = versions.map(|versions| versions.shown_by(endpoint));
        tracing::debug!(endpoint = &*endpoint.label, "shadow watch");
        let recv = (response.recv, coding);
        let stream = UpstreamStream::new(recv, response.permit, &self.context.drain, account);
        shadow.accepted(stream, shown);
        self.relay.shadow_accepted();
        // The connection of the first stream may drain by now.
        self.leave_if_possible();
    }

    fn shadow_stream_event(&mut self, event: StreamEvent) {
        let Some(second) = self.shadow.as_mut().and_then(|shadow| shadow.second()) else { return };
        let connection = second.stream.permit.connection();
        match event {
            StreamEvent::Data(data) => self.receive_from(Side::Shadow, &data),
            StreamEvent::Undecodable(error) => {
                self.context.gzip_failed(&connection.endpoint, error);
                self.shadow_failed("lost");
            }
            StreamEvent::Notified if !connection.is_suspect() => {
                second.stream.await_event(&self.context.drain);
            }
            StreamEvent::End
            | StreamEvent::Lost(_)
            | StreamEvent::Leave(_)
            | StreamEvent::SearchEnded(_)
            | StreamEvent::Notified => self.shadow_failed("lost"),
        }
    }

    /// Passes a chunk of one of the streams through the relay.
    pub(super) fn receive_from(&mut self, side: Side, data: &Bytes) {
        let Source::Stream(first) = &mut self.source else { return };
        let second = match side {
            Side::First => None,
            Side::Shadow => match self.shadow.as_mut().and_then(|shadow| shadow.second()) {
                Some(second) => Some(second),
                None => return,
            },
        };
        let before = self.relay.session().not_resumable();
        let out = &mut self.out;
        let (stream, shown) = match second {
            Some(second) => (&mut second.stream, second.shown.as_deref()),
            None => (first, None),
        };
        let received_at = stream.received_at();
        let forward = |piece| out.push_back(piece);
        let pushed = match side {
            Side::First => self.relay.push(data, received_at, forward),
            Side::Shadow => self.relay.push_shadow(data, received_at, forward),
        };
        if let Some(versions) = &mut self.context.resource_versions {
            versions.record(shown, pushed.versions, received_at);
            if pushed.versions.objects > 0 {
                let pool = &self.context.upstream.pool;
                pool.event_shown(versions.resource(), stream.permit.connection(), received_at);
            }
        }
        let session = self.relay.session();
        // The pool must not close the connection of a watch that cannot lose its stream.
        stream.permit.set_pinned(!session.can_lose_stream());
        stream.forwarded(data.len() - pushed.absorbed, pushed.absorbed);
        if let Some(reason) = session.not_resumable()
            && before != Some(reason)
        {
            self.warn_not_resumable(reason);
        }
        self.pushed(pushed);
    }

    /// Executes what the relay has decided on a chunk.
    fn pushed(&mut self, pushed: PushResult) {
        match pushed.shadow {
            None => {}
            Some(ShadowEnd::Promoted) => self.continue_on_shadow(),
            Some(end) => self.end_shadow(end.as_str()),
        }
        match pushed.effect {
            SessionEffect::None => self.leave_if_possible(),
            SessionEffect::NextEndpoint | SessionEffect::Withhold => {
                self.rejected(pushed.error_event);
            }
            effect => {
                self.detach();
                let cause = "the events of the new stream do not follow the cursor: its endpoint may not \
                             share a store with the others";
                self.execute(effect, cause);
            }
        }
    }

    /// The stream of the shadow takes the place of the first one.
    pub(super) fn continue_on_shadow(&mut self) {
        let Some(shadow) = self.shadow.take() else { return };
        shadow.record(ShadowEnd::Promoted.as_str(), &self.context.upstream.metrics);
        if let Some(stream) = shadow.into_stream() {
            self.continues_at(&stream.permit.connection().endpoint, "shadow");
            // Dropping the first stream resets it.
            self.source = Source::Stream(stream);
        }
    }

    /// The shadow could not be opened, or its stream was lost.
    fn shadow_failed(&mut self, outcome: &'static str) {
        self.relay.shadow_lost(clock::now());
        let failures = self.shadow.as_ref().map_or(0, |shadow| shadow.failures()) + 1;
        self.end_shadow(outcome);
        if self.is_first_suspect() && failures < MAX_ATTEMPTS {
            self.search_shadow(failures);
        }
        self.leave_if_possible();
    }

    /// The stream of the shadow, if there is one, is not read any more.
    pub(super) fn end_shadow(&mut self, outcome: &'static str) {
        if let Some(shadow) = self.shadow.take() {
            shadow.record(outcome, &self.context.upstream.metrics);
        }
    }

    /// The token of the client is proven.
    pub(super) fn raise_rank_of_shadow(&mut self, rank: ClientRank) {
        if let Some(second) = self.shadow.as_mut().and_then(|shadow| shadow.second()) {
            second.stream.permit.token_proven();
            second.stream.raise_rank(rank);
        }
    }
}
