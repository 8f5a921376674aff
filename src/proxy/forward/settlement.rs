//! Executes the effects of [`jackstay_core::request::settlement`]: reads the object of a heartbeat whose outcome is unknown,
//! with the client's credential, and sends the heartbeat again.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::LocalBoxFuture;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request};
use jackstay_core::pool::PreviousFailure;
use jackstay_core::request::attempts::Refused;
use jackstay_core::request::info::RequestInfo;
use jackstay_core::request::retry::RetryRefusal;
use jackstay_core::request::settlement::{
    Found, MAX_BODY, MAX_SENDS, Settlement, SettlementEffect, SettlementInput, WriteEnd,
    WrittenObject,
};
use jackstay_core::request::status_error::StatusError;
use jackstay_core::watch::request::with_query;
use jackstay_sys::clock;
use tokio::time::timeout;

use super::execution::Executing;
use super::{ForwardedRequest, Progress};
use crate::proxy::attempt::Attempts;
use crate::proxy::group_request::GroupRequest;
use crate::proxy::heartbeat::Heartbeat;
use crate::proxy::upstream_client::UpstreamResponse;
use crate::upstream::connection::Permit;
use crate::upstream::pool::Unavailable;

/// How long the rest of an object may take whose first part has arrived. It has some kilobytes.
const MAX_BODY_TIME: Duration = Duration::from_secs(1);

/// The response to a request, or why there is none.
type Response = Result<UpstreamResponse, Box<Refused>>;

/// A heartbeat, its repetition and its look-up.
struct Settling<'a> {
    request: &'a ForwardedRequest,
    heartbeat: &'a Heartbeat,
    /// The heartbeat and its repetition, while they run.
    writes: [Option<LocalBoxFuture<'a, Response>>; MAX_SENDS],
    /// What they have come to.
    ended: [Option<Response>; MAX_SENDS],
    look_up: Option<LocalBoxFuture<'a, Response>>,
    /// The response to the look-up.
    object: Option<UpstreamResponse>,
    /// Ends when the connection of the last attempt is in trouble.
    trouble: LocalBoxFuture<'a, ()>,
    /// `None` until the outcome is in doubt.
    settlement: Option<(Settlement, WrittenObject)>,
}

/// What has happened.
enum Event {
    Troubled,
    Ended(usize, Response),
    LookedUp(Response),
}

impl ForwardedRequest {
    /// Waits for the response to a heartbeat, and settles its outcome if that is unknown.
    pub(super) fn settle<'a>(
        &'a self,
        progress: &'a mut Progress<'_>,
        acquired: Result<Permit, Unavailable>,
        heartbeat: &'a Heartbeat,
    ) -> Executing<'a> {
        let settling = Settling {
            request: self,
            heartbeat,
            writes: [Some(self.execute_acquired(progress, acquired)), None],
            ended: [None, None],
            look_up: None,
            object: None,
            trouble: Box::pin(heartbeat.last.trouble.notified()),
            settlement: None,
        };
        Box::pin(settling.run())
    }

    /// Another request on behalf of this client, which was preceded by one that has failed so.
    fn on_behalf(
        &self,
        head: Request<()>,
        info: RequestInfo,
        heartbeat: Option<Box<Heartbeat>>,
        previous_failure: Option<PreviousFailure>,
    ) -> LocalBoxFuture<'static, Response> {
        let is_heartbeat = heartbeat.is_some();
        let request = Self {
            upstream: Rc::clone(&self.upstream),
            class: Rc::clone(&self.class),
            proof: self.proof.clone(),
            head,
            body: self.body.clone().filter(|_| is_heartbeat),
            heartbeat,
            previous_failure,
            watch: None,
            frames: None,
            drain: None,
            unproven: None,
            resource_versions: None,
            gzip_for_client: false,
            group: GroupRequest::of(&info),
            versions: self.versions,
            info,
        };
        Box::pin(async move {
            let requested_at = clock::now();
            let arrival = (requested_at, None);
            let attempts = Attempts::new(request.info.kind, is_heartbeat, arrival, None);
            let mut progress = Progress { attempts, outcome: None, requested_at };
            request.response(&mut progress).await
        })
    }
}

impl Settling<'_> {
    async fn run(mut self) -> Response {
        loop {
            let event = poll_fn(|cx| self.poll_event(cx)).await;
            let input = self.input(event).await;
            let Some((settlement, _)) = &mut self.settlement else {
                match self.ended[0].take() {
                    Some(response) => return response,
                    None => continue,
                }
            };
            let Some(input) = input else { continue };
            match settlement.step(input) {
                SettlementEffect::Wait => {}
                SettlementEffect::LookUp => self.look_up = Some(self.read_object()),
                SettlementEffect::SendAgain => self.writes[1] = Some(self.send_again()),
                SettlementEffect::Respond { write } => {
                    self.heartbeat.is_settled.set(write > 0);
                    self.count(if write == 0 { "responded" } else { "sent_again" });
                    return self.take_end(write);
                }
                SettlementEffect::Answer => {
                    self.heartbeat.is_settled.set(true);
                    self.count("written");
                    return self.object.take().ok_or_else(|| Box::new(unknown_outcome()));
                }
                SettlementEffect::Refuse => {
                    self.count("unknown");
                    let first = self.ended[0].take().and_then(Result::err);
                    return Err(first.unwrap_or_else(|| Box::new(unknown_outcome())));
                }
            }
        }
    }

    /// The input that an event is; `None` if the object may not be read now.
    async fn input(&mut self, event: Event) -> Option<SettlementInput> {
        match event {
            Event::Troubled => {
                let may_look_up = self.begin() && self.request.upstream.hedge_budget.take();
                may_look_up.then_some(SettlementInput::Troubled)
            }
            Event::Ended(write, response) => {
                let end = end_of(&response);
                self.ended[write] = Some(response);
                if self.settlement.is_none() && end == WriteEnd::Unknown {
                    // Its upload may have ended early with the connection.
                    if let Some(body) = &self.request.body {
                        body.read_rest(MAX_BODY).await;
                    }
                    self.begin();
                }
                Some(SettlementInput::Ended { write, end })
            }
            Event::LookedUp(response) => Some(SettlementInput::Found(self.found(response))),
        }
    }

    /// Waits for the next event. Responses have precedence.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Event> {
        for (number, write) in self.writes.iter_mut().enumerate() {
            if let Some(running) = write
                && let Poll::Ready(response) = running.as_mut().poll(cx)
            {
                *write = None;
                return Poll::Ready(Event::Ended(number, response));
            }
        }
        if let Some(reading) = &mut self.look_up
            && let Poll::Ready(response) = reading.as_mut().poll(cx)
        {
            self.look_up = None;
            return Poll::Ready(Event::LookedUp(response));
        }
        self.trouble.as_mut().poll(cx).map(|()| {
            self.trouble = Box::pin(self.heartbeat.last.trouble.notified());
            Event::Troubled
        })
    }

    /// Begins to settle the outcome. Returns false if that is not possible.
    fn begin(&mut self) -> bool {
        if self.settlement.is_none() {
            self.settlement =
                self.written().map(|written| (Settlement::new(written.names_uid()), written));
        }
        self.settlement.is_some()
    }

    /// The object that the heartbeat writes, if it can be recognised. A token that no response has proven gets no further
    /// requests.
    fn written(&self) -> Option<WrittenObject> {
        let body = self.request.body.as_ref()?.whole()?;
        let kind = self.heartbeat.object.filter(|_| self.request.unproven.is_none())?;
        WrittenObject::parse(kind, content_type(self.request.head.headers()), &body)
    }

    /// The end of a write.
    fn take_end(&mut self, write: usize) -> Response {
        self.ended[write].take().unwrap_or_else(|| Err(Box::new(unknown_outcome())))
    }

    /// Reads the object from etcd: a GET without a resourceVersion, with the headers of the heartbeat.
    fn read_object(&self) -> LocalBoxFuture<'static, Response> {
        let (mut head, ()) = self.request.head.clone().into_parts();
        head.method = Method::GET;
        head.uri = with_query(&head.uri, "");
        for name in [CONTENT_TYPE, CONTENT_LENGTH, ACCEPT_ENCODING] {
            head.headers.remove(name);
        }
        let info = RequestInfo::new(&head, &self.request.upstream.pool.upstream().path_prefix);
        let previous = self.heartbeat.last.connection.get();
        let head = Request::from_parts(head, ());
        let response = self.request.on_behalf(head, info, None, previous);
        Box::pin(async move {
            let mut response = response.await?;
            // A body that does not end in time shows nothing.
            let _ = timeout(MAX_BODY_TIME, response.read_rest(MAX_BODY)).await;
            Ok(response)
        })
    }

    /// Sends the heartbeat a second time.
    fn send_again(&self) -> LocalBoxFuture<'static, Response> {
        let (head, info) = (self.request.head.clone(), self.request.info.clone());
        let previous = self.heartbeat.last.connection.get();
        self.request.on_behalf(head, info, Some(Box::new(self.heartbeat.again())), previous)
    }

    /// What the response to the look-up shows.
    fn found(&mut self, response: Response) -> Found {
        let (Ok(response), Some((_, written))) = (response, &self.settlement) else {
            return Found::Unknown;
        };
        let body = response.prefix.clone().unwrap_or_default();
        if !response.recv.is_end_stream() {
            return Found::Unknown;
        }
        let content_type = content_type(&response.head.headers);
        let found = written.found(response.head.status.as_u16(), content_type, &body);
        self.object = Some(response);
        found
    }

    fn count(&self, outcome: &'static str) {
        tracing::debug!(path = self.request.head.uri().path(), outcome, "heartbeat settled");
        self.request.upstream.metrics.settled(outcome);
    }
}

/// What is known of a write with this response. The client gets the failure of a write that was not processed.
fn end_of(response: &Response) -> WriteEnd {
    match response {
        Ok(response) => WriteEnd::Response(response.head.status.as_u16()),
        Err(refused) => match &**refused {
            Refused::Error(_, Some(RetryRefusal::Unsafe)) => WriteEnd::Unknown,
            Refused::Error(error, None) if error.code.as_u16() == 500 => WriteEnd::Unknown,
            Refused::Error(..) | Refused::Rejection(_) => WriteEnd::Unprocessed,
        },
    }
}

fn content_type(headers: &HeaderMap) -> &[u8] {
    headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default()
}

/// The error of a write that was sent twice, of which neither had a success.
fn unknown_outcome() -> Refused {
    let reason = "two requests to different apiservers, and their object does not show the outcome";
    Refused::Error(StatusError::unknown_outcome(reason), Some(RetryRefusal::Unsafe))
}
