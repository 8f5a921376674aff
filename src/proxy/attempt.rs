//! One attempt at a request: one stream on one connection. Requests ([`super::forward`]) and watches that continue on
//! another stream ([`super::watch::body`]) make the same attempts.

use std::rc::Rc;

use bytes::Bytes;
use h2::RecvStream;
use h2::client::ResponseFuture;
use http::{Request, response};
use jackstay_core::group_health::{self, GroupSignal};
use jackstay_core::lag::current_of_too_large;
use jackstay_core::request::attempts::{self, AttemptFailure};
use jackstay_core::request::head_hold::prefix_size;
use jackstay_core::request::info::RequestKind;
use jackstay_core::request::overload_rejection::{is_overload, may_be_overload};
use jackstay_core::request::retry;
use jackstay_core::request::retry::Stage;
use jackstay_core::request::shutdown_rejection::{
    REJECTION_MAX_BODY, is_at_most, is_rejection, is_short, may_be_rejection,
};
use jackstay_core::request::start_up;
use jackstay_net::http2_error::describe_h2_error;
use jackstay_sys::clock;

use super::body_prefix::body_prefix;
use super::group_request::GroupRequest;
use super::request_body::{RequestBody, UploadTask};
use super::upstream_client::UpstreamResponse;
use crate::upstream::connection::{Connection, Permit};

/// An attempt whose stream is open.
pub(super) struct Attempt {
    permit: Permit,
    response: ResponseFuture,
    upload: Option<UploadTask>,
}

/// The state machine of the attempts at a request.
pub(super) type Attempts = attempts::Attempts<Rc<Connection>>;
/// What has happened to one of them.
pub(super) type AttemptInput = attempts::AttemptInput<Rc<Connection>>;

/// A failed attempt.
pub(super) type FailedAttempt = AttemptFailure<Rc<Connection>>;

/// The failure of a stream or its connection, without a response.
pub(super) fn failed(stage: Stage, reason: &str, connection: &Rc<Connection>) -> FailedAttempt {
    AttemptFailure {
        stage,
        reason: format!("{reason} on the connection to {}", connection.endpoint.label),
        connection: Rc::clone(connection),
        endpoint: connection.endpoint.key(),
        response: None,
        reached: 0,
    }
}

impl Attempt {
    /// Opens the stream and starts to send the body.
    ///
    /// # Errors
    /// The stream was not opened, so nothing was sent.
    pub(super) fn open(
        mut permit: Permit,
        head: Request<()>,
        body: Option<&Rc<RequestBody>>,
    ) -> Result<Self, h2::Error> {
        let (response, stream) = permit.open(head, body.is_none())?;
        let upload = body.map(|body| body.send(stream));
        Ok(Self { permit, response, upload })
    }

    /// Waits for the response head.
    ///
    /// # Errors
    /// The stream was reset, or its connection was lost.
    pub(super) async fn head(&mut self) -> Result<(response::Parts, RecvStream), h2::Error> {
        (&mut self.response).await.map(http::Response::into_parts)
    }

    /// The response to the request of a watch whose head has just arrived.
    pub(super) fn watch_response(
        mut self,
        (head, recv): (response::Parts, RecvStream),
    ) -> UpstreamResponse {
        self.permit.head_arrived(clock::now());
        UpstreamResponse { head, recv, prefix: None, permit: self.permit, upload: self.upload }
    }

    /// Waits for the response head, and for the beginning of the body if the request may be sent again.
    /// Nothing is forwarded before that, so the request can be repeated if the connection is lost.
    pub(super) async fn response(
        self,
        expected: Expected<'_>,
    ) -> Result<UpstreamResponse, FailedAttempt> {
        let Self { mut permit, response, upload } = self;
        let extension = expected.group.filter(|group| group.is_extension());
        let sent_at = extension.map(|_| clock::now());
        let connection = Rc::clone(permit.connection());
        let failed = |stage, reason: &str| failed(stage, reason, &connection);
        let (head, mut recv) = match response.await {
            Ok(response) => response.into_parts(),
            Err(_) if permit.is_unsent() => {
                return Err(failed(Stage::NotSent, "the request was not sent"));
            }
            Err(error) => return Err(failed(stage_of(&error), &describe_h2_error(&error))),
        };
        let arrived = clock::now();
        if let Some(group) = expected.group {
            group.head_arrived(expected.attempt);
        }
        connection.response_received(head.status.as_u16());
        let possible = PossibleRejection::of(expected, &head, &connection);
        let longest = possible.longest_body(&head);
        let mut prefix = None;
        if let Some(size) = longest.map(|longest| longest + 1).or(prefix_size(expected.kind)) {
            let read = body_prefix(size, arrived, &mut recv, &connection).await;
            prefix = read.map_err(|e| failed(Stage::HeadHeld, &describe_h2_error(&e)))?;
        }
        // A body that comes late is no rejection that another apiserver is asked about: its head is not held for that.
        if longest.is_some() && recv.is_end_stream() {
            let body = prefix.clone().unwrap_or_default();
            if let Some((stage, reason, reached)) = possible.rejection(&head, &body) {
                permit.finished();
                let response = Some(Box::new((head, body)));
                return Err(FailedAttempt { response, reached, ..failed(stage, reason) });
            }
        }
        // The server of the group was slow, or the path to it: other requests need not avoid the apiserver.
        let waited = sent_at.map(|sent_at| arrived.saturating_duration_since(sent_at));
        if waited.is_some_and(|waited| waited >= group_health::SLOW_HEAD) {
            permit.head_arrived_without_sample();
        } else {
            permit.head_arrived(arrived);
        }
        Ok(UpstreamResponse { head, recv, prefix, permit, upload })
    }
}

/// What decides whether a response is a rejection that another endpoint is asked about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    /// The number of the attempt in its round.
    pub(super) attempt: usize,
    /// The kind of the request.
    pub(super) kind: RequestKind,
    /// Another endpoint is asked if the apiserver has not reached the version of the request.
    pub(super) has_versions: bool,
    /// `None` if the request is not one of an API group.
    pub(super) group: Option<&'a GroupRequest>,
}

/// Which rejections a response may be, after its head.
#[derive(Debug, Clone, Copy)]
struct PossibleRejection<'a> {
    stage: Option<Stage>,
    /// It may show that this API group fails at the endpoint.
    group: Option<&'a GroupRequest>,
}

impl<'a> PossibleRejection<'a> {
    fn of(expected: Expected<'a>, head: &response::Parts, connection: &Connection) -> Self {
        let Expected { kind, has_versions, group, .. } = expected;
        let stage = retry::stage_of_rejection(kind, head.status.as_u16());
        let may_be_signal = retry::may_ask_after_group_failure(kind)
            && group_health::may_be_signal(head.status, &head.headers)
            && is_at_most(&head.headers, group_health::MAX_BODY);
        let stage = stage.filter(|stage| match stage {
            Stage::Starting => {
                is_at_most(&head.headers, start_up::MAX_BODY) && connection.endpoint.is_starting()
            }
            Stage::NotReached => has_versions && is_short(&head.headers),
            Stage::Rejected => may_be_overload(head.status, &head.headers),
            // Only a group decides.
            Stage::GroupFailed => false,
            _ => is_short(&head.headers),
        });
        Self { stage, group: group.filter(|group| may_be_signal && group.is_extension()) }
    }

    /// The longest body of such a rejection in bytes; `None` if the response is none.
    fn longest_body(self, head: &response::Parts) -> Option<usize> {
        match self.stage {
            _ if self.group.is_some() => Some(group_health::MAX_BODY),
            Some(Stage::Starting) => Some(start_up::MAX_BODY),
            Some(_) => Some(REJECTION_MAX_BODY),
            None => may_be_rejection(head.status, &head.headers).then_some(REJECTION_MAX_BODY),
        }
    }

    /// Which rejection the response is, why, and the version that the endpoint has reached if it is about that; `None`
    /// if it is none.
    fn rejection(self, head: &response::Parts, body: &Bytes) -> Option<(Stage, &'static str, u64)> {
        if let Some(group) = self.group
            && let Some(signal) = group.signal_of(head.status, &head.headers, body)
        {
            let stage = match signal {
                GroupSignal::Failed => Stage::GroupFailed,
                GroupSignal::Unavailable => Stage::GroupUnavailable,
            };
            return Some((stage, "the apiserver cannot reach the server of the API group", 0));
        }
        let (stage, reason) = match self.stage {
            Some(Stage::Starting) if body.len() <= start_up::MAX_BODY => {
                (Stage::Starting, "the apiserver may have just started, and refuses the client")
            }
            Some(Stage::TooOld) if body.len() <= REJECTION_MAX_BODY => {
                (Stage::TooOld, "the apiserver's watch cache starts after this version")
            }
            Some(Stage::NotReached) => {
                let reached = current_of_too_large(body)?;
                let reason = "the apiserver's watch cache has not reached this version";
                return Some((Stage::NotReached, reason, reached));
            }
            _ if is_rejection(head.status, &head.headers, body) => {
                (Stage::Unprocessed, "the apiserver is shutting down")
            }
            Some(Stage::Rejected) if is_overload(head.status, &head.headers, body) => {
                (Stage::Rejected, "the apiserver rejects requests")
            }
            _ => return None,
        };
        Some((stage, reason, 0))
    }
}

/// The stage of an attempt whose stream ended with `error` before its response head. Since version
/// 0.4.20 h2 reports a GOAWAY only on streams above its last stream id.
fn stage_of(error: &h2::Error) -> Stage {
    let refused = error.reason() == Some(h2::Reason::REFUSED_STREAM);
    if error.is_remote() && (error.is_go_away() || refused) {
        Stage::Unprocessed
    } else {
        Stage::NoHead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_of_local_reset_is_no_head() {
        assert_eq!(stage_of(&h2::Reason::REFUSED_STREAM.into()), Stage::NoHead);
        assert_eq!(stage_of(&h2::Reason::INTERNAL_ERROR.into()), Stage::NoHead);
    }
}
