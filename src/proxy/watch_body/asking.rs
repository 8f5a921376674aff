//! A watch without a stream asks one apiserver after another to go on with it.
//!
//! [`crate::proxy::watch::resume`] judges their answers. While it lasts the client waits; where it
//! is owed an answer already, each of the others is asked once, and not for long, and only while
//! there is a budget for that.

use std::rc::Rc;
use std::time::Duration;

use http::{HeaderMap, StatusCode, header};
use tokio::time::sleep;

use super::running::Running;
use super::{Answered, AttemptError, Leg, WatchBody, text};
use crate::proxy::watch::attempt::send_on_new_stream;
use crate::proxy::watch::resume::{ATTEMPT, Answer, BRIEF, Shun};
use crate::proxy::watch::verdict::{AfterAttempt, Ending};
use crate::upstream::pool::PreviousFailure;

/// Longest pause that an apiserver may ask for before a watch is better left to its client.
const MAX_SILENCE: Duration = Duration::from_secs(30);

impl WatchBody {
    pub(super) fn ask(&mut self, delay: Duration) {
        if !self.again.has_credential() {
            let why = "the identity of its client is configured no longer";
            return self.give_up(self.relay.state().ending(), why);
        }
        let now = std::time::Instant::now();
        let head = self.again.head(&self.relay.state().reissue(now));
        let line = Rc::clone(&self.again.line);
        let (class, proof) = (Rc::clone(&self.again.class), self.again.proof.clone());
        let lost = self.again.lost.clone();
        let shunned = self.again.not_to_ask(now + delay);
        let refused = self.again.refused;
        let limit = if self.relay.withholds() { BRIEF } else { ATTEMPT };
        let mut drain = self.again.drain.clone();
        self.leg = Leg::Asking(Box::pin(async move {
            let attempt = async {
                sleep(delay).await;
                // Where it does not hold, the watch ends (`WatchBody::proof_ended`).
                proof.confirmed().await;
                let after =
                    if refused { PreviousFailure::Refusal } else { PreviousFailure::Silence };
                let after = lost.as_ref().map(after);
                send_on_new_stream(&line, (&class, &proof), head, after, &shunned, limit).await
            };
            tokio::select! {
                answer = attempt => Some(answer),
                () = drain.staggered_end() => None,
            }
        }));
    }

    /// Its listener ends, and it has no stream: there is nothing to wait for.
    pub(super) fn called_off(&mut self) {
        let ending = self.relay.state().ending();
        if self.relay.withholds() {
            self.give_up(ending, "shutdown");
        } else {
            self.finish(ending, "shutdown");
        }
    }

    pub(super) fn answered(&mut self, answer: Result<Answered, AttemptError>) {
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
        if let Ok(answered) = &answer
            && answered.head.status != StatusCode::OK
        {
            self.again.lost = Some(Rc::clone(answered.permit.connection()));
            if self.relay.withholds() {
                // Each is asked once.
                self.again.shun_lost();
            }
        }
        let peers_left = match judged {
            // A history that is too short there is so tomorrow: only others count then.
            Answer::Head { status: 410, .. } if !self.relay.withholds() => self.again.has_others(),
            _ => self.peers_left(),
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
                tracing::debug!(endpoint = &*connection.endpoint.label, "watch resumed");
                // A dead connection must not be kept, and shown, for as long as the watch runs.
                self.again.lost = None;
                self.leg =
                    Leg::Running(Running::new(answered.recv, answered.permit, &self.again.drain));
            }
            Ok(answered) => {
                self.again.lost = Some(Rc::clone(answered.permit.connection()));
                self.again.refused = true;
                if matches!(next, AfterAttempt::Another { shun: Shun::Round, .. }) {
                    self.again.shun_lost();
                }
                self.after(next, &format!("{} there", answered.head.status));
            }
            Err(AttemptError { outage: true, .. }) if !self.relay.withholds() => self.hold(),
            Err(AttemptError { reason: why, connection: by, .. }) => {
                // Rather somebody else next time.
                self.again.lost = by.or(self.again.lost.take());
                self.after(next, &why);
            }
        }
    }

    fn after(&mut self, next: AfterAttempt, why: &str) {
        match next {
            AfterAttempt::Accept => {}
            AfterAttempt::Another { delay, shun } => {
                let now = std::time::Instant::now();
                if let Shun::For(pause) = shun {
                    self.again.rest_lost(now, pause);
                }
                // Nobody else to ask: when they say, unless that is too long to be silent.
                let delay = delay.max(self.again.until_rested(now));
                let patience = if self.relay.withholds() { BRIEF } else { MAX_SILENCE };
                if delay > patience {
                    self.give_up(self.relay.state().ending(), why);
                    return;
                }
                if self.relay.withholds()
                    && !self.again.line.watches.may_retry_too_old(&self.again.line.metrics)
                {
                    self.pass_on_withheld();
                    return;
                }
                tracing::debug!(reason = why, "watch asks another apiserver");
                self.ask(delay);
            }
            AfterAttempt::End(ending) => self.give_up(ending, why),
        }
    }

    /// Nobody takes it.
    fn give_up(&mut self, ending: Ending, why: &str) {
        let metrics = &self.again.line.metrics;
        if !self.relay.withholds() {
            metrics.watch_resumed("gave_up");
            return self.finish(ending, why);
        }
        metrics.watch_resumed("too_old");
        tracing::debug!(reason = why, "no apiserver has the history that a watch asks for");
        self.pass_on_withheld();
    }

    /// The server that was asked first has had the last word: it has ended the watch, with this.
    fn pass_on_withheld(&mut self) {
        self.leg = Leg::Done(None);
        self.out.extend(self.relay.take_withheld());
        self.outcome.complete();
    }

    /// Its server ended it by an ERROR event: history is per server, and others may have more of it.
    pub(super) fn turned_away(&mut self) {
        let now = std::time::Instant::now();
        self.give_way();
        self.again.refused = true;
        self.again.shun_lost();
        let peers_left = self.peers_left();
        let next = self.relay.state_mut().on_error_event(
            &self.again.content_type,
            peers_left,
            now,
            fastrand::u64(..),
        );
        self.after(next, "the history there is too short");
    }

    /// Whether there is somebody left to ask. One who may come back is worth waiting for only where
    /// there is no answer yet.
    fn peers_left(&self) -> bool {
        if self.relay.withholds() { self.again.has_ready() } else { self.again.has_peers() }
    }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}
