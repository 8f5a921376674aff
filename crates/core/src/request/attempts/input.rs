//! The inputs and effects of [`super::Attempts::step`].

#![allow(missing_docs)] // the text of a variant explains its fields

use std::borrow::Cow;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::response;

use crate::pool::{ConnectionKey, EndpointKey, PreviousFailure};
use crate::request::retry::{RetryRefusal, Stage};
use crate::request::status_error::StatusError;

/// A short response that is held back: its head and its whole body.
pub type HeldResponse = (response::Parts, Bytes);

/// What has happened. An `attempt` is the number of one of the parallel attempts of a round, from 0.
#[derive(Debug)]
pub enum AttemptInput<C> {
    /// The pool has reserved a stream ([`AttemptEffect::Acquire`], [`AttemptEffect::Retry`], [`AttemptEffect::Hedge`]).
    Granted { attempt: usize },
    /// The pool has no stream for the first attempt of a round.
    NoStream { reason: NoStream },
    /// The pool has no stream for a hedge.
    NoHedgeStream { attempt: usize },
    /// The response has arrived as far as it is held back.
    Responded { attempt: usize },
    /// The attempt has failed, and its stream is closed.
    Failed { attempt: usize, failure: AttemptFailure<C> },
    /// The request should not rely on the connection of this attempt alone ([`Awaited::Trouble`]).
    Troubled { attempt: usize },
    /// The safe request has waited for its response head for one
    /// [`crate::request::late_reads::LateReads::check_interval`], or for the time of
    /// [`crate::group_health::GroupHealth::head_wait`], and its connection is not in trouble ([`Awaited::Trouble`]).
    Slow { attempt: usize },
    /// The pause after a failed hedge is over, and the connection is in trouble ([`Awaited::Loss`]).
    HedgeDue { attempt: usize },
    /// The connection of a safe request is silent.
    Silent { attempt: usize },
    /// [`super::Attempts::heartbeat_due`] has come.
    HeartbeatDue,
    /// The new watch was held for this time, and an attempt may succeed again.
    OutageEnded { held: Duration },
    /// [`AttemptEffect::Pause`] or [`AttemptEffect::PauseRetry`] is over.
    PauseEnded,
    /// The deadline of [`AttemptEffect::Hold`] has passed, or the listener drains.
    HoldEnded,
    /// The shell cannot execute the last effect, or no attempt is left that it could wait for: a defect.
    NotExecutable,
}

impl<C> AttemptInput<C> {
    /// The name, for the message about an input that is impossible.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Granted { .. } => "Granted",
            Self::NoStream { .. } => "NoStream",
            Self::NoHedgeStream { .. } => "NoHedgeStream",
            Self::Responded { .. } => "Responded",
            Self::Failed { .. } => "Failed",
            Self::Troubled { .. } => "Troubled",
            Self::Slow { .. } => "Slow",
            Self::HedgeDue { .. } => "HedgeDue",
            Self::Silent { .. } => "Silent",
            Self::HeartbeatDue => "HeartbeatDue",
            Self::OutageEnded { .. } => "OutageEnded",
            Self::PauseEnded => "PauseEnded",
            Self::HoldEnded => "HoldEnded",
            Self::NotExecutable => "NotExecutable",
        }
    }
}

/// What the shell does after a step. Each effect leads to one input.
#[derive(Debug)]
pub enum AttemptEffect {
    /// Wait for the next input of the attempts that run ([`super::Attempts::awaited`]).
    Wait,
    /// Take a stream for the first attempt of a round, as [`super::Attempts::requirements`] says.
    Acquire,
    /// As [`Self::Acquire`], after the failed attempt [`super::Attempts::failure`], which is counted and logged.
    Retry,
    /// Send the request on the granted stream.
    Send { attempt: usize },
    /// Take a stream for this attempt, a hedge, on another live connection than that of the attempt before. `exclude`:
    /// on another endpoint, too. `probe`: the endpoint of the attempt before is probed.
    Hedge { attempt: usize, exclude: bool, probe: bool },
    /// Take a stream for this attempt, a hedge, on none of these endpoints: the response head of the attempt before is late.
    HedgeLate { attempt: usize, excluded: Vec<EndpointKey> },
    /// End this attempt, which then fails with this stage and reason.
    GiveUp { attempt: usize, stage: Stage, reason: Cow<'static, str> },
    /// Probe the endpoint of this attempt, and wait.
    Probe { attempt: usize },
    /// Hold the new watch until an apiserver can be reached, at most until this time or the drain of the listener.
    Hold { until: Instant },
    /// Wait for this time, with the same limits, and until the client's identity is confirmed.
    Pause { delay: Duration },
    /// Wait for this time, then continue with [`Self::Retry`].
    PauseRetry { delay: Duration },
    /// Forward the response of this attempt. All others are cancelled.
    Respond { attempt: usize },
    /// Answer the client without a response of an attempt.
    Refuse(Box<Refused>),
}

/// What the client gets instead of a response of an attempt.
#[derive(Debug)]
pub enum Refused {
    /// The rejection by an apiserver that was held back.
    Rejection(Box<HeldResponse>),
    /// An error, and why the request was not sent again, if that is a rule of [`crate::request::retry`].
    Error(StatusError, Option<RetryRefusal>),
}

/// Why the pool has no stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoStream {
    /// No endpoint can be reached. The text has the reason for each endpoint.
    Unreachable(String),
    /// Any other reason.
    Other(StatusError),
}

/// A failed attempt.
#[derive(Debug)]
pub struct AttemptFailure<C> {
    /// The stage that the attempt had reached.
    pub stage: Stage,
    /// The cause, for logs and errors.
    pub reason: String,
    pub connection: C,
    /// The endpoint of the connection.
    pub endpoint: EndpointKey,
    /// The rejection by the apiserver, if it sent one.
    pub response: Option<Box<HeldResponse>>,
    /// In the stage *not reached*: the version that the endpoint has reached.
    pub reached: u64,
}

impl<C> AttemptFailure<C> {
    /// How the pool considers the failure, on a connection with this key, when it chooses the next connection.
    pub fn previous(&self, connection: ConnectionKey) -> PreviousFailure {
        match self.stage {
            Stage::Unprocessed
            | Stage::TooOld
            | Stage::NotReached
            | Stage::Rejected
            | Stage::Starting
            | Stage::GroupFailed
            | Stage::GroupUnavailable => PreviousFailure::Refusal(connection, self.endpoint),
            Stage::NotSent | Stage::NoHead | Stage::Unanswered | Stage::HeadHeld => {
                PreviousFailure::Silence(connection, self.endpoint)
            }
        }
    }
}

/// What an attempt waits for, besides its response if it is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// A stream.
    Stream,
    /// Trouble of its connection ([`AttemptInput::Troubled`]). `may_be_slow`: also a late response head
    /// ([`AttemptInput::Slow`]).
    Trouble { may_be_slow: bool },
    /// The loss of its connection ([`AttemptInput::Failed`]). `silence_from`: from this time on also its silence
    /// ([`AttemptInput::Silent`]); `None` for a request that must not be sent twice. `hedge_from`: from this time on
    /// also trouble ([`AttemptInput::HedgeDue`]).
    Loss { silence_from: Option<Instant>, hedge_from: Option<Instant> },
}

/// How a request that was hedged ended, or why a hedge was not sent: a label of `jackstay_hedges_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HedgeOutcome {
    /// The hedged attempt got its response first.
    Original,
    /// The hedge did.
    Hedge,
    /// Both failed.
    Failed,
    /// The budget of hedges is used up.
    OverBudget,
    /// There was no stream for the hedge. Its token goes back to the budget.
    NoConnection,
    /// The hedge waited for a stream when the request got its response, was given up or was abandoned by its client.
    /// Its token goes back to the budget.
    Cancelled,
}

impl HedgeOutcome {
    /// The label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Original => "original",
            Self::Hedge => "hedge",
            Self::Failed => "failed",
            Self::OverBudget => "over_budget",
            Self::NoConnection => "no_connection",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the hedge was not sent, so that its token goes back to the budget.
    pub const fn returns_token(self) -> bool {
        matches!(self, Self::NoConnection | Self::Cancelled)
    }
}
