//! A watch as its client sees it: one stream, whatever becomes of the connections below it.
//!
//! [`super::watch`] decides; this file moves the bytes, notices that a stream is lost or that its
//! connection should be left, and asks again elsewhere. [`running`] is the stream; [`moving`] is about a watch that leaves a
//! stream which works.

mod moving;
mod pace;
mod running;

use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, Request, StatusCode, Uri, header, response, uri};
use http_body::Frame;
use tokio::time::{Instant, sleep};

use self::moving::Moving;
use self::running::{Event, Leave, Running};
use super::closing::Closing;
use super::line::{Answer as Answered, Line, reissue, release};
use super::respond::BodyError;
use super::watch::Encoding;
use super::watch::relay::{Flow, Relay};
use super::watch::request::{Asked, reissued_query};
use super::watch::resume::{Answer, Shun};
use super::watch::state::{AfterAttempt, AfterLoss, Ending, Reissue};
use crate::observe::{Outcome, Side};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::pool::{After, ClassPool};

/// Longest pause that an apiserver may ask for before a watch is better left to its client.
const MAX_SILENCE: Duration = Duration::from_secs(30);

type Attempt = Pin<Box<dyn Future<Output = Result<Answered, String>>>>;

/// The body of a watch.
pub struct WatchBody {
    relay: Relay,
    /// What the client gets next.
    out: VecDeque<Bytes>,
    leg: Leg,
    again: Again,
    outcome: Box<Outcome>,
}

enum Leg {
    Running(Running),
    Asking(Attempt),
    /// Another apiserver is asked to take over; until it does nothing is lost.
    Moving(Box<Moving>),
    /// Over: how, if not cleanly.
    Done(Option<BodyError>),
}

/// What is needed to ask again.
struct Again {
    line: Rc<Line>,
    class: Rc<ClassPool>,
    head: Request<()>,
    asked: Asked,
    closing: Closing,
    content_type: String,
    /// The connection that was lost last.
    lost: Option<Rc<Connection>>,
    /// It answered, and refused: rather another server than a fresh connection to it.
    refused: bool,
    /// Endpoints that are not to be asked again in this round: their history is too short.
    shunned: Vec<Arc<Endpoint>>,
}

/// A watch that was answered: what it takes to ask for it again.
pub struct Watched {
    /// The line it takes.
    pub line: Rc<Line>,
    /// The connections it may use.
    pub class: Rc<ClassPool>,
    /// Its head as it went upstream.
    pub head: Request<()>,
    /// What the client asked for.
    pub asked: Asked,
    /// How its events are written.
    pub encoding: Encoding,
    /// When it was asked for.
    pub asked_at: Instant,
    /// When it is to end.
    pub closing: Closing,
}

/// How the events of an answer are written, if they can be followed.
pub fn encoding(head: &response::Parts) -> Option<Encoding> {
    let plain = !head.headers.contains_key(header::CONTENT_ENCODING);
    Encoding::from_header(head.headers.get(header::CONTENT_TYPE))
        .filter(|_| plain && head.status == StatusCode::OK)
}

impl WatchBody {
    /// Follows the answer to a watch whose head has arrived.
    pub fn new(
        watched: Watched,
        head: &response::Parts,
        recv: RecvStream,
        permit: Permit,
        outcome: Box<Outcome>,
    ) -> Self {
        let Watched { line, class, head: request, asked, encoding, asked_at, closing } = watched;
        let again = Again {
            line,
            class,
            head: request,
            content_type: text(&head.headers, &header::CONTENT_TYPE),
            asked,
            closing,
            lost: None,
            refused: false,
            shunned: Vec::new(),
        };
        Self {
            relay: Relay::new(encoding, &again.asked, asked_at.into_std()),
            out: VecDeque::new(),
            leg: Leg::Running(Running::new(recv, permit, &again.closing)),
            again,
            outcome,
        }
    }

    /// The next of what the client gets.
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            if let Some(data) = self.out.pop_front() {
                self.outcome.add_bytes(data.len());
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            match &mut self.leg {
                Leg::Running(running) => match ready!(running.poll(cx)) {
                    Event::Data(data) => self.take(&data),
                    Event::End => {
                        // The server's own end is passed on as it is.
                        let rest = self.relay.finish();
                        if !rest.is_empty() {
                            self.out.push_back(rest);
                        }
                        self.close();
                        self.outcome.complete();
                    }
                    Event::Lost(why) => {
                        self.lost(&why);
                    }
                    Event::Leave(Leave::Asked) => self.asked(),
                    Event::Leave(why) => {
                        running.stay(why, &self.again.closing);
                        self.leave();
                    }
                },
                Leg::Asking(attempt) => {
                    let answer = ready!(attempt.as_mut().poll(cx));
                    self.answered(answer);
                }
                Leg::Moving(moving) => {
                    let answer = ready!(moving.attempt.as_mut().poll(cx));
                    self.moved(answer);
                }
                Leg::Done(error) => return Poll::Ready(error.take().map(Err)),
            }
        }
    }

    /// Takes a piece from upstream.
    fn take(&mut self, data: &Bytes) {
        let out = &mut self.out;
        let step = self.relay.push(data, |piece| out.push_back(piece));
        if let Leg::Running(running) = &mut self.leg {
            let mut absorbed = step.absorbed;
            release(&mut running.recv, &mut absorbed);
            running.unreleased += data.len() - step.absorbed;
        }
        match step.flow {
            Flow::Continue => self.leave(),
            Flow::NextPeer => {
                let now = std::time::Instant::now();
                self.give_way();
                self.again.shun_lost();
                let next = self.relay.state_mut().on_answer(
                    Answer::FirstFrameError,
                    &self.again.content_type,
                    self.again.has_peers(),
                    now,
                    fastrand::u64(..),
                );
                self.after(next, "the history there is too short");
            }
            Flow::End(ending) => {
                self.give_way();
                self.finish(ending, "its history diverged");
            }
        }
    }

    /// Follows a reason to leave, if there is one and this is a moment where nobody notices.
    fn leave(&mut self) {
        let Leg::Running(Running { stays: Some(why), .. }) = &self.leg else { return };
        match why {
            Leave::Connection if self.relay.state().resumable() => {
                self.lost("its connection is to be left");
            }
            Leave::Shutdown if self.relay.state().ending() == Ending::Clean => {
                self.give_way();
                self.finish(Ending::Clean, "shutdown");
            }
            Leave::Connection | Leave::Shutdown | Leave::Asked => {}
        }
    }

    fn lost(&mut self, why: &str) {
        let now = std::time::Instant::now();
        self.give_way();
        self.again.shunned.clear();
        self.again.refused = false;
        match self.relay.on_lost(now, fastrand::u64(..)) {
            AfterLoss::Restart(delay) | AfterLoss::Resume(delay) => {
                tracing::debug!(reason = why, "watch goes on elsewhere");
                self.ask(delay);
            }
            AfterLoss::End(ending) => {
                self.again.line.metrics.watch_resumed(match self.relay.state().bar() {
                    Some(_) => "not_resumable",
                    None => "initial",
                });
                self.finish(ending, why);
            }
        }
    }

    fn answered(&mut self, answer: Result<Answered, String>) {
        let now = std::time::Instant::now();
        let content_type;
        let judged = match &answer {
            Ok(answered) => {
                content_type = text(&answered.head.headers, &header::CONTENT_TYPE);
                let status = answered.head.status;
                Answer::Head {
                    status: status.as_u16(),
                    content_type: Some(&content_type),
                    retry_after: retry_after(&answered.head.headers)
                        .filter(|_| status != StatusCode::OK),
                }
            }
            Err(_) => Answer::Unreachable,
        };
        // A history that is too short there is so tomorrow: only others count then.
        let peers_left = match (&answer, judged) {
            (Ok(answered), Answer::Head { status: 410, .. }) => {
                self.again.lost = Some(Rc::clone(answered.permit.connection()));
                self.again.has_others()
            }
            _ => self.again.has_peers(),
        };
        let next = self.relay.state_mut().on_answer(
            judged,
            &self.again.content_type,
            peers_left,
            now,
            fastrand::u64(..),
        );
        match answer {
            Ok(answered) if next == AfterAttempt::Accept => {
                let connection = answered.permit.connection();
                self.outcome.resumed();
                self.outcome.sent_to(&connection.endpoint.label, true);
                self.again.line.metrics.watch_resumed("resumed");
                tracing::debug!(endpoint = %connection.endpoint.label, "watch resumed");
                // A dead connection must not be kept, and shown, for as long as the watch runs.
                self.again.lost = None;
                self.leg =
                    Leg::Running(Running::new(answered.recv, answered.permit, &self.again.closing));
            }
            Ok(answered) => {
                self.again.lost = Some(Rc::clone(answered.permit.connection()));
                self.again.refused = true;
                if matches!(next, AfterAttempt::Another { shun: Shun::Round, .. }) {
                    self.again.shun_lost();
                }
                self.after(next, &format!("{} there", answered.head.status));
            }
            Err(why) => self.after(next, &why),
        }
    }

    fn after(&mut self, next: AfterAttempt, why: &str) {
        match next {
            AfterAttempt::Accept => {}
            AfterAttempt::Another { delay, shun } => {
                let delay = match shun {
                    // Nobody else to ask: when it says, unless that is too long to be silent.
                    Shun::For(pause) if !self.again.has_others() => delay.max(pause),
                    _ => delay,
                };
                if delay > MAX_SILENCE {
                    self.again.line.metrics.watch_resumed("gave_up");
                    self.finish(self.relay.state().ending(), why);
                    return;
                }
                tracing::debug!(reason = why, "watch asks another apiserver");
                self.ask(delay);
            }
            AfterAttempt::End(ending) => {
                self.again.line.metrics.watch_resumed("gave_up");
                self.finish(ending, why);
            }
        }
    }

    /// Leaves the running stream: dropping it resets it.
    fn give_way(&mut self) {
        if let Leg::Running(running) = &self.leg {
            self.again.lost = Some(Rc::clone(running.permit.connection()));
        }
        self.leg = Leg::Done(None);
    }

    fn close(&mut self) {
        if let Leg::Running(running) = &mut self.leg {
            running.permit.finished();
        }
        self.leg = Leg::Done(None);
    }

    fn ask(&mut self, delay: Duration) {
        let now = std::time::Instant::now();
        let head = self.again.head(&self.relay.state().reissue(now));
        let line = Rc::clone(&self.again.line);
        let class = Rc::clone(&self.again.class);
        let lost = self.again.lost.clone();
        let shunned = self.again.shunned.clone();
        let refused = self.again.refused;
        self.leg = Leg::Asking(Box::pin(async move {
            sleep(delay).await;
            let after = if refused { After::Refusal } else { After::Silence };
            let after = lost.as_ref().map(after);
            reissue(&line, &class, head, after, &shunned).await
        }));
    }

    /// Ends the client's stream: cleanly, or visibly broken.
    fn finish(&mut self, ending: Ending, why: &str) {
        self.leg = Leg::Done(None);
        let bar = self.relay.state().bar().map_or("", |bar| bar.as_str());
        tracing::info!(
            endpoint = self.again.lost.as_ref().map(|c| tracing::field::display(&c.endpoint.label)),
            clean = ending == Ending::Clean,
            not_resumable = bar,
            reason = why,
            "watch ended"
        );
        self.outcome.cut(Side::Upstream, why.to_owned());
        if ending == Ending::Reset {
            let why = format!("the watch was lost and cannot be resumed: {why}");
            self.leg = Leg::Done(Some(BodyError(why)));
        }
    }
}

impl Again {
    /// The head of the request that asks again.
    fn head(&self, reissue: &Reissue<'_>) -> Request<()> {
        let query = self.head.uri().query().unwrap_or_default();
        let query = reissued_query(query, &self.asked, reissue);
        let mut head = self.head.clone();
        *head.uri_mut() = with_query(self.head.uri(), &query);
        head
    }

    /// Whether there is an endpoint left to ask in this round.
    fn has_peers(&self) -> bool {
        let endpoints = self.line.pool.upstream().endpoints.load();
        endpoints.iter().any(|e| !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, e)))
    }

    /// Whether there is an endpoint that can be asked now, other than the last one.
    fn has_others(&self) -> bool {
        use EndpointState::{Ejected, Leaving, NoH2};
        let endpoints = self.line.pool.upstream().endpoints.load();
        let lost = self.lost.as_ref().map(|connection| &connection.endpoint);
        endpoints.iter().any(|e| {
            !matches!(e.state(), Ejected | NoH2 | Leaving)
                && lost.is_none_or(|lost| !Arc::ptr_eq(lost, e))
                && !self.shunned.iter().any(|shunned| Arc::ptr_eq(shunned, e))
        })
    }

    fn shun_lost(&mut self) {
        if let Some(lost) = &self.lost {
            self.shunned.push(Arc::clone(&lost.endpoint));
        }
    }
}

fn text(headers: &HeaderMap, name: &header::HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The same target with another query.
pub fn with_query(target: &Uri, query: &str) -> Uri {
    let mut parts = target.clone().into_parts();
    let path_and_query = if query.is_empty() {
        target.path().to_owned()
    } else {
        format!("{}?{query}", target.path())
    };
    // The query was made from a valid one; if that is ever wrong the watch is asked as before.
    if let Ok(path_and_query) = uri::PathAndQuery::try_from(path_and_query) {
        parts.path_and_query = Some(path_and_query);
    }
    Uri::from_parts(parts).unwrap_or_else(|_| target.clone())
}
