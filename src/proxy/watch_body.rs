//! A watch as its client sees it: one stream, whatever becomes of the connections below it.
//!
//! [`super::watch`] decides; this file moves the bytes, notices that a stream is lost or that its
//! connection should be left. [`running`] is the stream, [`asking`] looks for another one with what
//! [`again`] knows, [`holding`] waits while no apiserver is reachable; [`moving`] is about a watch that
//! leaves a stream which works.

mod again;
mod asking;
mod holding;
mod moving;
mod pace;
mod running;

use std::collections::VecDeque;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::RecvStream;
use http::{HeaderMap, Request, StatusCode, header, response};
use http_body::Frame;
use tokio::time::Instant;

use self::again::Again;
use self::holding::{Hold, HoldEnd};
use self::moving::Moving;
use self::running::{Event, Leave, Running, Stay};
use super::body_progress::PIECE;
use super::client_certificate::{IdentityProof, ProofExpiry};
use super::drain::DrainWatcher;
use super::respond::BodyError;
use super::upstream_client::{Answer as Answered, UpstreamClient, release};
use super::watch::attempt::AttemptError;
use super::watch::codec::Encoding;
use super::watch::relay::{Flow, Relay};
use super::watch::request::Asked;
use super::watch::state::Phase;
use super::watch::verdict::{AfterLoss, Bar, Ending, Obstacle};
use crate::observe::{Outcome, Side};
use crate::upstream::connection::Permit;
use crate::upstream::pool::ClassPool;

/// An attempt at going on elsewhere while the stream still works.
type Attempt = Pin<Box<dyn Future<Output = Result<Answered, AttemptError>>>>;

/// An attempt at going on; `None`: its listener ends, and this is its turn.
type Search = Pin<Box<dyn Future<Output = Option<Result<Answered, AttemptError>>>>>;

/// The body of a watch.
pub struct WatchBody {
    relay: Relay,
    /// What the client gets next.
    out: VecDeque<Bytes>,
    leg: Leg,
    again: Again,
    /// If it goes upstream with a certificate.
    proof_end: Option<ProofExpiry>,
    outcome: Box<Outcome>,
    /// It was not delivering when its stream was lost.
    quiet: bool,
    /// It was logged that it cannot be resumed.
    told: bool,
}

enum Leg {
    Running(Running),
    Asking(Search),
    /// No apiserver can be reached: it waits for one.
    Held(Hold),
    /// Another apiserver is asked to take over; until it does nothing is lost.
    Moving(Box<Moving>),
    /// Over: how, if not cleanly.
    Done(Option<BodyError>),
}

/// A watch that was answered: what it takes to ask for it again.
pub struct Watched {
    /// The line it takes.
    pub line: Rc<UpstreamClient>,
    /// The connections it may use.
    pub class: Rc<ClassPool>,
    /// What entitles it to them.
    pub proof: IdentityProof,
    /// Its head as it went upstream.
    pub head: Request<()>,
    /// What the client asked for.
    pub asked: Asked,
    /// How its events are written.
    pub encoding: Encoding,
    /// When it was asked for.
    pub asked_at: Instant,
    /// When it is to end.
    pub drain: DrainWatcher,
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
        let Watched { line, class, proof, head: request, asked, encoding, asked_at, drain } =
            watched;
        let proof_end = proof.end();
        let again = Again {
            line,
            class,
            proof,
            head: request,
            content_type: text(&head.headers, &header::CONTENT_TYPE),
            asked,
            drain,
            lost: None,
            refused: false,
            shunned: Vec::new(),
            resting: Vec::new(),
        };
        Self {
            relay: Relay::new(
                encoding,
                &again.asked,
                asked_at.into_std(),
                &again.line.watches.partial_frames(),
            ),
            out: VecDeque::new(),
            leg: Leg::Running(Running::new(recv, permit, &again.drain)),
            again,
            proof_end,
            outcome,
            quiet: false,
            told: false,
        }
    }

    /// The next of what the client gets.
    pub fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            if let Some(data) = next_piece(&mut self.out) {
                self.outcome.add_bytes(data.len());
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(end) = &mut self.proof_end
                && let Poll::Ready(why) = end.as_mut().poll(cx)
            {
                self.proof_end = None;
                self.proof_ended(&why);
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
                    Event::Leave(Leave::Connection) => {
                        running.stay(Stay::Connection, &self.again.drain);
                        self.leave();
                    }
                    Event::Leave(Leave::Unresponsive) => {
                        running.stay(Stay::Unresponsive, &self.again.drain);
                        self.leave();
                    }
                    Event::Leave(Leave::Place(permit)) => self.take_place(permit),
                    Event::Leave(Leave::Shutdown) => {
                        running.stay(Stay::Shutdown, &self.again.drain);
                        self.leave();
                    }
                },
                Leg::Asking(search) => match ready!(search.as_mut().poll(cx)) {
                    Some(answer) => self.answered(answer),
                    None => self.called_off(),
                },
                Leg::Held(hold) => match ready!(hold.as_mut().poll(cx)) {
                    HoldEnd::Returned(after) => self.returned(after),
                    HoldEnd::Deadline => self.expired(),
                    HoldEnd::Shutdown => self.called_off(),
                },
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
        let withheld = self.relay.withholds();
        let before = self.relay.state().obstacle();
        let out = &mut self.out;
        let step = self.relay.push(data, |piece| out.push_back(piece));
        let can_leave = self.relay.state().can_leave();
        if let Leg::Running(running) = &mut self.leg {
            running.permit.pin(!can_leave);
            let mut absorbed = step.absorbed;
            release(&mut running.recv, &mut absorbed);
            running.unreleased += data.len() - step.absorbed;
        }
        if let Some(obstacle) = self.relay.state().obstacle()
            && before != Some(obstacle)
        {
            self.barred(obstacle);
        }
        match step.flow {
            Flow::Continue => {
                if self.relay.state().has_settled() {
                    self.again.shunned.clear();
                }
                self.leave();
            }
            Flow::NextPeer => {
                if !withheld && self.relay.withholds() {
                    self.again.line.metrics.watch_resumed("withheld");
                }
                self.turned_away();
            }
            Flow::End(ending) => {
                self.again.line.metrics.watch_resumed("diverged");
                self.give_way();
                self.finish(ending, "its history diverged");
            }
        }
    }

    /// Follows a reason to leave, if there is one and this is a moment where nobody notices.
    fn leave(&mut self) {
        let Leg::Running(running) = &mut self.leg else { return };
        match running.stays {
            Some(Stay::Connection) if self.relay.state().resumable() => running.seek(&self.again),
            Some(Stay::Unresponsive) if self.relay.state().can_leave() => {
                self.lost("its connection does not respond");
            }
            Some(Stay::Shutdown) if self.relay.state().ending() == Ending::Clean => {
                self.give_way();
                self.finish(Ending::Clean, "shutdown");
            }
            Some(Stay::Connection | Stay::Unresponsive | Stay::Shutdown) | None => {}
        }
    }

    fn lost(&mut self, why: &str) {
        let now = std::time::Instant::now();
        self.quiet = self.is_quiet();
        self.give_way();
        self.again.shunned.clear();
        self.again.refused = false;
        match self.relay.on_lost(now, self.quiet, fastrand::u64(..)) {
            AfterLoss::Restart(delay) | AfterLoss::Resume(delay) => {
                tracing::debug!(reason = why, "watch goes on elsewhere");
                self.ask(delay);
            }
            AfterLoss::End(ending, stop) => {
                self.again.line.metrics.watch_resumed(stop.as_str());
                self.finish(ending, why);
            }
        }
    }

    /// Whether its client does not notice a second of silence. One that waits for the objects there
    /// are does.
    fn is_quiet(&self) -> bool {
        let Leg::Running(running) = &self.leg else { return false };
        self.relay.state().phase() == Phase::Ordered && running.pace.is_quiet(Instant::now())
    }

    /// What its server sent stands in the way of resuming it, which was not so before.
    fn barred(&mut self, obstacle: Obstacle) {
        self.again.line.metrics.watch_resumed(match obstacle {
            // That it has failed is an answer like any other, and it ends with it.
            Obstacle::Bar(Bar::ServerError) => return,
            Obstacle::Bar(_) => "barred",
            Obstacle::Oversized => "oversized",
        });
        let Leg::Running(running) = &self.leg else { return };
        if !std::mem::replace(&mut self.told, true) {
            tracing::info!(
                endpoint = &*running.permit.connection().endpoint.label,
                reason = obstacle.as_str(),
                "a watch cannot be resumed: should it lose its apiserver now, it ends"
            );
        }
    }

    /// Its client has no proof any more of who it is: it ends as if the server's timeout had come, and
    /// what the client asks next is answered with 401.
    fn proof_ended(&mut self, why: &str) {
        if matches!(self.leg, Leg::Done(_)) {
            return;
        }
        let ending = self.relay.state().ending();
        self.again.line.metrics.watch_resumed("unproven");
        self.give_way();
        self.finish(ending, why);
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

    /// Ends the client's stream: cleanly, or visibly broken.
    fn finish(&mut self, ending: Ending, why: &str) {
        self.leg = Leg::Done(None);
        let bar = self.relay.state().bar().map_or("", |bar| bar.as_str());
        tracing::info!(
            endpoint = self.again.lost.as_ref().map(|c| &*c.endpoint.label),
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

/// The next piece for the client: of a large event, the next part.
fn next_piece(out: &mut VecDeque<Bytes>) -> Option<Bytes> {
    match out.front_mut() {
        Some(front) if front.len() > PIECE => Some(front.split_to(PIECE)),
        _ => out.pop_front(),
    }
}

fn text(headers: &HeaderMap, name: &header::HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}
