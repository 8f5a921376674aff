//! A watch moves to another apiserver, or another connection, while its stream still works.
//!
//! Its server has more watches than others ([`crate::upstream::rebalance`]) or is unwell
//! ([`crate::upstream::evacuation`]), or its connection has no future: its certificate is old, its endpoint
//! was removed, its process is stopped. The new stream is opened at the cursor before the old one is
//! given up, and from then on nothing more is read of the old one: what it delivers meanwhile comes
//! again from the other. So events wait for one round trip and [`FIRST_FRAME`], at most [`PATIENCE`]
//! where the old one delivers, and if the other one does not take the watch, it goes on where it is as
//! if nothing had been.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Request, header};
use tokio::time::{Instant, timeout};

use super::running::{Running, Stay};
use super::{Answered, Attempt, AttemptError, Leg, WatchBody, text};
use crate::proxy::watch::attempt::send;
use crate::proxy::watch::resume::{Answer, Judgement, judge};
use crate::upstream::connection::{Permit, describe_h2_error};
use crate::upstream::pool::StreamRequirements;
use crate::upstream::watch_moves::MoveEligibility;

/// How long events may wait for the other apiserver's answer.
const PATIENCE: Duration = Duration::from_millis(250);

/// The same where the old server is unwell: its stream is not likely to have anything.
const PATIENCE_UNWELL: Duration = Duration::from_secs(1);

/// How long the first frame of the new stream is waited for. An apiserver whose history does not reach
/// back to the cursor answers 200 and sends an ERROR event at once.
const FIRST_FRAME: Duration = Duration::from_millis(50);

/// A stream that works, and the attempt to replace it.
pub(super) struct Moving {
    from: Running,
    pub(super) attempt: Attempt,
}

impl WatchBody {
    /// Its connection has asked all its watches to look after themselves, and perhaps some to go.
    pub(super) fn asked(&mut self) {
        let Leg::Running(running) = &mut self.leg else { return };
        running.watch_out(&self.again.drain);
        let connection = Rc::clone(running.permit.connection());
        let minutes = connection.self_check_count();
        if std::mem::replace(&mut running.minutes, minutes) != minutes
            && self.relay.state_mut().has_gone_stale()
        {
            connection.endpoint.metrics.watch_stale();
        }
        let now = std::time::Instant::now();
        let Some(who) = connection.offered_move() else { return };
        if who == MoveEligibility::Silent && !running.pace.has_fallen_silent(Instant::now()) {
            return;
        }
        let state = self.relay.state();
        let (reissue, patience) = match who {
            MoveEligibility::Settled => (state.reissue_to_move(now), PATIENCE),
            MoveEligibility::Silent | MoveEligibility::All => {
                (state.reissue_to_flee(now), PATIENCE_UNWELL)
            }
        };
        let Some(reissue) = reissue else { return };
        if !self.again.proof.is_current(SystemTime::now()) {
            return;
        }
        let Some(targets) = connection.take_move() else { return };
        let head = self.again.head(&reissue);
        match who {
            MoveEligibility::Settled => self.relay.state_mut().tried_to_move(now),
            MoveEligibility::Silent | MoveEligibility::All => {
                self.relay.state_mut().tried_to_flee(now)
            }
        }
        let pool = &self.again.line.pool;
        let mut others = pool.upstream().endpoints().to_vec();
        others.retain(|other| !targets.iter().any(|target| Arc::ptr_eq(other, target)));
        let proven = self.again.proof.subject();
        let need = StreamRequirements {
            watch: true,
            excluded_endpoints: &others,
            ..StreamRequirements::for_client(proven)
        };
        let Some(permit) = pool.try_acquire(&self.again.class, need) else { return };
        self.move_to(permit, head, patience);
    }

    /// There is a place on another connection, or none, for a watch whose connection has no future.
    pub(super) fn take_place(&mut self, permit: Option<Permit>) {
        let Leg::Running(running) = &mut self.leg else { return };
        if !self.relay.state().resumable() {
            running.stay(Stay::Connection, &self.again.drain);
            return;
        }
        let now = std::time::Instant::now();
        let proven = self.again.proof.is_current(SystemTime::now());
        let reissue = self.relay.state().reissue_to_leave(now).filter(|_| proven);
        let (Some(permit), Some(reissue)) = (permit, reissue) else {
            running.seek_later(&self.again);
            return;
        };
        let head = self.again.head(&reissue);
        self.relay.state_mut().tried_to_flee(now);
        self.move_to(permit, head, PATIENCE_UNWELL);
    }

    fn move_to(&mut self, permit: Permit, head: Request<()>, patience: Duration) {
        let line = Rc::clone(&self.again.line);
        let attempt = Box::pin(async move {
            let mut answered = send(&line, permit, head, Instant::now() + patience).await?;
            if let Ok(first) = timeout(FIRST_FRAME, answered.recv.data()).await {
                let why = match first {
                    Some(Ok(first)) => {
                        answered.first = Some(first);
                        return Ok(answered);
                    }
                    Some(Err(error)) => describe_h2_error(&error),
                    None => "it ended at once".to_owned(),
                };
                let by = Some(Rc::clone(answered.permit.connection()));
                return Err(AttemptError { reason: why, connection: by, outage: false });
            }
            Ok(answered)
        });
        let Leg::Running(from) = std::mem::replace(&mut self.leg, Leg::Done(None)) else { return };
        self.leg = Leg::Moving(Box::new(Moving { from, attempt }));
    }

    /// The other apiserver has answered, or not.
    pub(super) fn moved(&mut self, answer: Result<Answered, AttemptError>) {
        let Leg::Moving(moving) = std::mem::replace(&mut self.leg, Leg::Done(None)) else { return };
        let taken = answer.map_err(|error| error.reason).and_then(|answered| {
            let status = answered.head.status.as_u16();
            let content_type = text(&answered.head.headers, &header::CONTENT_TYPE);
            let head =
                Answer::Head { status, content_type: Some(&content_type), retry_after: None };
            let refused =
                answered.first.as_ref().is_some_and(|first| self.relay.begins_with_error(first));
            match judge(head, &self.again.content_type) {
                Judgement::Accept if refused => Err("its history is too short".to_owned()),
                Judgement::Accept => Ok(answered),
                Judgement::Another(_) | Judgement::GiveUp => Err(format!("{status} there")),
            }
        });
        match taken {
            Ok(answered) => {
                let endpoint = &answered.permit.connection().endpoint;
                self.outcome.resumed();
                self.outcome.sent_to(&endpoint.label, true);
                self.again.line.metrics.watch_resumed("moved");
                tracing::debug!(endpoint = &*endpoint.label, "watch moved");
                self.relay.moved(std::time::Instant::now());
                self.again.shunned.clear();
                // Dropping the old stream resets it.
                let running = Running::new(answered.recv, answered.permit, &self.again.drain);
                self.leg = Leg::Running(running);
                if let Some(first) = answered.first {
                    self.take(&first);
                }
            }
            Err(why) => {
                self.again.line.metrics.watch_resumed("not_moved");
                tracing::debug!(reason = why, "watch stays where it is");
                let mut from = moving.from;
                if from.permit.connection().should_drain() {
                    from.seek_later(&self.again);
                }
                self.leg = Leg::Running(from);
            }
        }
    }
}
