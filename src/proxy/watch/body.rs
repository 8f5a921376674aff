//! The response body of a watch. The client sees one stream; the body reads it from one upstream stream after
//! another.
//!
//! The body reports inputs to [`Session`](jackstay_core::watch::session::Session) and executes the effects
//! that it returns. [`stream`] reads an upstream stream and waits for a reason to leave it, [`attempt`] opens the
//! next stream or waits for the end of an outage, [`moving`] opens a stream while the current one works, [`shadowed`]
//! reads a second stream while the connection of the first is suspect, [`suitable`] says which endpoints may continue the
//! watch, and [`context`] holds the request.

mod attempt;
mod context;
mod moving;
mod pieces;
mod shadow;
mod shadowed;
mod stream;
mod suitable;
mod versions;

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http_body::Frame;
use jackstay_core::credential_class::ClientRank;
use jackstay_core::watch::codec::error_event;
use jackstay_core::watch::gzip::{ContentCoding, GzipError};
use jackstay_core::watch::relay::{FirstEnd, Relay};
use jackstay_core::watch::session::{
    AttemptResult, Ending, Leave, LeaveReason, NotResumable, SessionEffect, SessionInput,
};
use jackstay_core::watch::shadow::Side;
use jackstay_sys::clock;

use self::attempt::{AttemptError, AttemptErrorKind, Hold, MoveAttempt, ResumeAttempt};
use self::pieces::next_output;
use self::shadow::{Progress, ShadowSource};
use self::stream::{StreamEvent, UpstreamStream};
use crate::observe::{self, Outcome};
use crate::proxy::client_certificate::ProofExpiry;
use crate::proxy::upstream_client::UpstreamResponse as Response;
use crate::upstream::connection::Permit;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::restores::{AfterNotice, HistoryMark};

pub use self::context::ResumeContext;
pub use self::versions::WatchVersions;

/// Why a watch ends after a restore of etcd, for its client and for logs.
const HISTORY_LOST: &str = "jackstay: etcd was restored from a backup, list again";

/// The body of a watch.
pub struct WatchBody {
    relay: Relay,
    /// Bytes for the client.
    out: VecDeque<Bytes>,
    source: Source,
    /// The shadow of the stream that is the source.
    shadow: Option<Box<ShadowSource>>,
    context: ResumeContext,
    /// Completes when the client certificate no longer proves the client's identity; `None` without a
    /// certificate.
    proof_expiry: Option<ProofExpiry>,
    outcome: Box<Outcome>,
    /// The client receives gzip members.
    with_gzip: bool,
    /// Whether the log contains the line that the watch cannot be resumed.
    warned: bool,
    /// What the watch knows about restores of etcd.
    history: HistoryMark,
}

/// The source of the next bytes.
enum Source {
    Stream(UpstreamStream),
    Requesting(ResumeAttempt),
    /// The watch is held in a total outage.
    Held(Hold),
    /// The current stream, and the attempt to replace it.
    Moving(Box<(UpstreamStream, MoveAttempt)>),
    /// The body has ended. The error resets the client's stream.
    Ended(Option<String>),
}

impl WatchBody {
    /// Creates the body of a response whose head has arrived, and whose data have this coding. The client receives gzip
    /// members `with_gzip`.
    pub fn new(
        mut context: ResumeContext,
        relay: Relay,
        (recv, coding): (RecvStream, ContentCoding),
        permit: Permit,
        outcome: Box<Outcome>,
        with_gzip: bool,
    ) -> Self {
        context.served_by(&permit.connection().endpoint);
        let account = context.upstream.watches.gzip_state(relay.account());
        let stream = UpstreamStream::new((recv, coding), permit, &context.drain, account);
        let session = relay.session();
        let version = session.cursor_version().filter(|_| session.follows_versions());
        Self {
            history: context.restores().mark(version),
            relay,
            out: VecDeque::new(),
            source: Source::Stream(stream),
            shadow: None,
            with_gzip,
            proof_expiry: context.proof.expiry(),
            context,
            outcome,
            warned: false,
        }
    }

    /// The head of the response has proven the token of the client. The watch continues on connections for proven
    /// tokens when it leaves this stream.
    pub fn token_proven(&mut self) {
        if let Source::Stream(stream) = &mut self.source {
            stream.permit.token_proven();
            stream.raise_rank(ClientRank::Token);
        }
        self.context.class = self.context.upstream.pool.class(CredentialClass::Token);
        self.raise_rank_of_shadow(ClientRank::Token);
        self.relay.raise_rank(ClientRank::Token);
    }

    /// Returns the next piece for the client.
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, String>>> {
        loop {
            if let Some(data) = next_output(&mut self.out, self.with_gzip) {
                self.outcome.bytes += data.len() as u64;
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(expiry) = &mut self.proof_expiry
                && let Poll::Ready(cause) = expiry.as_mut().poll(cx)
            {
                self.proof_expiry = None;
                if !matches!(self.source, Source::Ended(_)) {
                    self.stop(NotResumable::Unproven, &cause);
                }
            }
            if self.context.restores().is_news(self.history) {
                self.look_at_history();
                continue;
            }
            if let Some(shadow) = &mut self.shadow
                && let Poll::Ready(event) =
                    shadow.poll(cx, &self.context.upstream.watches.gzip_bytes)
            {
                self.shadow_event(event);
                continue;
            }
            match &mut self.source {
                Source::Stream(stream) => {
                    match ready!(stream.poll(cx, &self.context.upstream.watches.gzip_bytes)) {
                        StreamEvent::Data(data) => self.receive_from(Side::First, &data),
                        StreamEvent::End => self.server_ended(),
                        StreamEvent::Lost(cause) => self.stream_lost(&cause),
                        StreamEvent::Undecodable(error) => self.undecodable(error),
                        StreamEvent::Leave(reason) => {
                            stream.defer(reason, &self.context.drain);
                            self.leave_if_possible();
                        }
                        StreamEvent::SearchEnded(permit) => self.search_ended(permit),
                        StreamEvent::Notified => self.notified(),
                    }
                }
                Source::Requesting(attempt) => match ready!(attempt.as_mut().poll(cx)) {
                    Some(result) => self.attempt_ended(result),
                    None => self.stop(NotResumable::Shutdown, "shutdown"),
                },
                Source::Held(hold) => {
                    let (input, cause) = ready!(hold.as_mut().poll(cx));
                    self.step(input, cause);
                }
                Source::Moving(moving) => {
                    let result = ready!(moving.1.as_mut().poll(cx));
                    self.move_ended(result);
                }
                Source::Ended(error) => return Poll::Ready(error.take().map(Err)),
            }
        }
    }

    fn server_ended(&mut self) {
        let rest = match self.relay.first_ended(clock::now()) {
            FirstEnd::Ended(rest) => rest,
            FirstEnd::Lost(effect) => {
                self.detach();
                return self.continue_after_loss(effect, "the server has ended a stream that lags");
            }
        };
        if !rest.is_empty() {
            self.out.push_back(rest);
        }
        if let Source::Stream(stream) = &mut self.source {
            stream.permit.finished();
        }
        self.end_shadow("watch_ended");
        self.source = Source::Ended(None);
        self.outcome.complete();
    }

    fn stream_lost(&mut self, cause: &str) {
        let now = clock::now();
        let quiet = match &self.source {
            // A watch that has not delivered all initial events is never quiet.
            Source::Stream(stream) => {
                self.relay.session().is_ordered() && stream.pace.is_quiet(now)
            }
            _ => false,
        };
        self.detach();
        if self.context.is_group_unordered() {
            let effect = self.relay.group_unordered(now);
            self.end_shadow("watch_ended");
            if effect != SessionEffect::None {
                return self.execute(effect, cause);
            }
        }
        let effect = self.relay.stream_lost(quiet, now);
        self.continue_after_loss(effect, cause);
    }

    /// Continues on the shadow, or executes the effect of the loss of the first stream.
    fn continue_after_loss(&mut self, effect: SessionEffect, cause: &str) {
        if effect != SessionEffect::None {
            return self.execute(effect, cause);
        }
        tracing::debug!(reason = cause, "watch continues on its shadow");
        self.continue_on_shadow();
    }

    /// Leaves a compressed stream that cannot be decoded.
    fn undecodable(&mut self, error: GzipError) {
        if let Source::Stream(stream) = &self.source {
            let connection = Rc::clone(stream.permit.connection());
            self.context.gzip_failed(&connection.endpoint, error);
        }
        self.stream_lost(error.as_str());
    }

    /// Resets the stream of an endpoint that has sent an ERROR event, and asks other endpoints, whose history
    /// may reach further back.
    fn rejected(&mut self, error_event: Option<Bytes>) {
        let Source::Stream(stream) = &self.source else { return };
        let endpoint = stream.permit.connection().endpoint.key();
        if error_event.is_some() {
            self.context.upstream.metrics.watch_resumed("withheld");
        }
        self.detach();
        let endpoints = &self.context.endpoint_conditions();
        let cause = "the endpoint's history does not reach back to the cursor";
        self.step(SessionInput::Rejected { error_event, endpoint, endpoints }, cause);
    }

    fn attempt_ended(&mut self, result: Result<Response, AttemptError>) {
        let (result, connection, cause) = match result {
            Ok(response) => {
                let result = self.context.attempt_result(&response);
                if result.is_accepted() {
                    self.switch_to(response, "resumed");
                    return self.step(SessionInput::Accepted, "an endpoint continues the watch");
                }
                let cause = self.context.describe_refusal(&response);
                (result, Some(Rc::clone(response.permit.connection())), cause)
            }
            Err(AttemptError { reason, kind: AttemptErrorKind::Parameter, .. }) => {
                return self.stop(NotResumable::Parameter, &reason);
            }
            Err(AttemptError { reason, connection, kind }) => {
                let outage = kind == AttemptErrorKind::Outage;
                (AttemptResult::NoHead { outage }, connection, reason)
            }
        };
        let endpoint = connection.as_ref().map(|connection| connection.endpoint.key());
        if let Some(connection) = &connection {
            self.context.set_last_connection(connection);
        }
        let endpoints = &self.context.endpoint_conditions();
        self.step(SessionInput::AttemptFailed { result, endpoint, endpoints }, &cause);
    }

    /// Leaves the stream for the deferred reason, if the client would not notice now.
    fn leave_if_possible(&mut self) {
        let Source::Stream(stream) = &mut self.source else { return };
        if matches!(stream.deferred, Some(LeaveReason::GroupFailed | LeaveReason::GroupSilent)) {
            // The group may work again, and a chunk may have arrived.
            stream.deferred = stream.group_leave_reason(&self.context);
        }
        let (session, reason) = (self.relay.session(), stream.deferred);
        match reason.map(|reason| session.leave(reason, clock::now())) {
            Some(Leave::Search) => match self.shadow.as_deref().map(ShadowSource::progress) {
                Some(Progress::Accepted) => self.stream_lost("the stream is to be left"),
                Some(Progress::Requested) => {}
                Some(Progress::Searching) | None => {
                    self.shadow = None;
                    stream.search_stream(&self.context, session);
                }
            },
            Some(Leave::Lose) if reason == Some(LeaveReason::GroupSilent) => {
                self.stream_lost("the API group fails at the endpoint");
            }
            Some(Leave::Lose) => self.stream_lost("the connection does not respond"),
            Some(Leave::End) => self.stop(NotResumable::Shutdown, "shutdown"),
            Some(Leave::Stay) | None => {}
        }
    }

    /// The stream is one at `endpoint` from now on. `result` is the label in the metric of resumes.
    fn continues_at(&mut self, endpoint: &Arc<Endpoint>, result: &'static str) {
        self.context.forget_move_answers();
        self.context.forget_last_connection();
        self.context.served_by(endpoint);
        self.outcome.resumes += 1;
        self.outcome.sent_to(&endpoint.label, true);
        if let Some(versions) = &mut self.context.resource_versions {
            versions.switch_to(endpoint);
        }
        self.context.upstream.metrics.watch_resumed(result);
        tracing::debug!(endpoint = &*endpoint.label, "watch {result}");
    }

    /// Reads from a new stream from now on. `result` is the label in the metric of resumes.
    fn switch_to(&mut self, response: Response, result: &'static str) {
        self.continues_at(&response.permit.connection().endpoint, result);
        // A response whose coding is unknown is not accepted.
        let coding = ContentCoding::of(&response.head.headers).unwrap_or(ContentCoding::Identity);
        let account = self.context.upstream.watches.gzip_state(self.relay.account());
        let drain = &self.context.drain;
        let recv = (response.recv, coding);
        let mut stream = UpstreamStream::new(recv, response.permit, drain, account);
        let first = response.prefix.and_then(|first| stream.decode(first));
        self.source = Source::Stream(stream);
        if let Some(first) = first {
            self.receive_from(Side::First, &first);
        }
    }

    fn step(&mut self, input: SessionInput<'_>, cause: &str) {
        let (input_name, state) = (input.name(), self.relay.session().state_name());
        let effect = self.relay.session_mut().step(input, clock::now());
        if matches!(effect, SessionEffect::End(_, NotResumable::InternalError)) {
            let upstream = &self.context.upstream;
            let name = &upstream.pool.upstream().name;
            let line = format!("upstream {name}: watch ended because of a defect of jackstay");
            let detail = format_args!("input {input_name} in state {state}: {cause}");
            upstream.warnings.warn(&line, detail);
        }
        self.execute(effect, cause);
    }

    /// Ends the watch before the server does.
    fn stop(&mut self, reason: NotResumable, cause: &str) {
        self.detach();
        let effect = self.relay.stop(reason, clock::now());
        self.execute(effect, cause);
    }

    /// Executes an effect other than one on a frame. No stream is read any more.
    fn execute(&mut self, effect: SessionEffect, cause: &str) {
        self.end_shadow("watch_ended");
        match effect {
            SessionEffect::Request { max_jitter, pause } => {
                self.request(max_jitter.mul_f64(fastrand::f64()).max(pause), cause);
            }
            SessionEffect::Hold => {
                self.context.upstream.metrics.watch_resumed("held");
                self.context.forget_last_connection();
                self.hold(true);
            }
            SessionEffect::HoldUntilDeadline => self.hold(false),
            SessionEffect::End(ending, reason) => self.end(ending, reason, cause),
            // The relay executes the effects of frames.
            _ => {}
        }
    }

    fn hold(&mut self, until_reachable: bool) {
        let deadline = self.relay.session().deadline();
        self.source = Source::Held(attempt::hold(&self.context, deadline, until_reachable));
    }

    /// Asks an endpoint to continue the watch.
    fn request(&mut self, delay: Duration, cause: &str) {
        let upstream = &self.context.upstream;
        let session = self.relay.session();
        if session.withholds_error() && !upstream.watches.may_retry_too_old(&upstream.metrics) {
            return self.stop(NotResumable::OverBudget, cause);
        }
        if !self.context.has_credential() {
            let cause = "the client's identity is no longer configured";
            return self.stop(NotResumable::GaveUp, cause);
        }
        tracing::debug!(reason = cause, "watch requested again");
        let head = self.context.head(session, clock::now());
        self.source = Source::Requesting(attempt::resume(&self.context, session, head, delay));
    }

    /// Counts, and logs once, that the watch can no longer be resumed.
    fn warn_not_resumable(&mut self, reason: NotResumable) {
        self.context.upstream.metrics.watch_resumed(match reason {
            // The watch ends with this ERROR event, so there is nothing to resume.
            NotResumable::ServerError => return,
            NotResumable::Oversized => "oversized",
            _ => "not_resumable",
        });
        self.context.record_contradiction(reason);
        let Source::Stream(stream) = &self.source else { return };
        if !std::mem::replace(&mut self.warned, true) {
            tracing::info!(
                endpoint = &*stream.permit.connection().endpoint.label,
                reason = reason.as_str(),
                "watch cannot be resumed if it loses its apiserver"
            );
        }
    }

    /// Ends the watch if etcd was restored from a backup, and its cursor is a version of the lost history: it would be
    /// silent, and then miss events.
    fn look_at_history(&mut self) {
        let (session, restores) = (self.relay.session(), self.context.restores());
        let after = restores.look_at_notices(&mut self.history, session.cursor_version());
        let is_over = matches!(self.source, Source::Ended(_));
        if after == AfterNotice::Continue || is_over || !session.follows_versions() {
            return;
        }
        self.detach();
        let event = error_event::expired(self.relay.encoding(), HISTORY_LOST).into();
        let effect = self.relay.history_lost(event, clock::now());
        self.execute(effect, HISTORY_LOST);
    }

    /// Drops the stream, which resets it, and records its connection.
    fn detach(&mut self) {
        if let Source::Stream(stream) = &self.source {
            // Its version may have been unknown when the watch began.
            self.context.served_by(&stream.permit.connection().endpoint);
            self.context.set_last_connection(stream.permit.connection());
            self.source = Source::Ended(None);
        }
    }

    /// Ends the client's stream.
    fn end(&mut self, ending: Ending, reason: NotResumable, cause: &str) {
        if let Some(outcome) = reason.outcome() {
            self.context.upstream.metrics.watch_resumed(outcome);
        }
        self.context.record_contradiction(reason);
        self.source = Source::Ended(None);
        if ending == Ending::Withheld {
            tracing::debug!(reason = cause, "watch ended: its history is not available");
            self.out.extend(self.relay.session_mut().take_error_event());
            return self.outcome.complete();
        }
        if let Some(suppressed) = self.outcome.admit_watch_line() {
            tracing::info!(
                endpoint = self.context.last_connection().map(|c| &*c.endpoint.label),
                clean = ending == Ending::Clean,
                not_resumable = reason.as_str(),
                reason = cause,
                suppressed = (suppressed > 0).then_some(suppressed),
                "watch ended"
            );
        }
        let side = match reason {
            NotResumable::InternalError => observe::Side::Jackstay,
            _ => observe::Side::Upstream,
        };
        self.outcome.cut(side, cause.to_owned());
        if ending == Ending::Reset {
            let cause = format!("the watch was lost and cannot be resumed: {cause}");
            self.source = Source::Ended(Some(cause));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every running watch has one of these. The limit is a size class of the allocator; the next one is 768.
    #[test]
    fn watch_body_is_small() {
        assert!(size_of::<WatchBody>() <= 640, "{}", size_of::<WatchBody>());
    }
}
