//! What the body asks a session between two steps.

use std::time::{Duration, Instant};

use bytes::Bytes;

use super::Session;
use super::cursor::Cursor;
use super::input::{Ending, MoveReason, NotResumable};
use super::limiter::{MIN_REMAINING, MIN_REMAINING_TO_REBALANCE};
use super::round::ATTEMPT_TIMEOUT_AFTER_REFUSED_ENCODING;
use super::state::State;
use crate::pool::EndpointKey;
use crate::watch::codec::version::as_u64;
use crate::watch::request::resume_query;

impl Session {
    /// The name of the state, for the log line about an input that is impossible in it.
    pub fn state_name(&self) -> &'static str {
        self.state.name()
    }

    /// The query of the request that continues the watch, or starts it again. `query` is the query of the
    /// first upstream request.
    pub fn resume_query(&self, query: &str, now: Instant) -> String {
        let version = self.state.cursor().map(Cursor::resume_version);
        resume_query(query, &self.request, version.as_ref(), self.remaining(now))
    }

    /// Whether the watch may be moved now, for this reason. A watch of a group that an aggregated apiserver may
    /// serve is not moved for balance: another stream may lead to another replica.
    pub fn can_move(&self, reason: MoveReason, now: Instant) -> bool {
        if reason == MoveReason::Rebalance && !self.request.built_in_group {
            return false;
        }
        let min_remaining = match reason {
            MoveReason::Rebalance => MIN_REMAINING_TO_REBALANCE,
            MoveReason::Evacuate | MoveReason::Drain => MIN_REMAINING,
        };
        self.is_resumable()
            && self.remaining(now).is_none_or(|remaining| remaining >= min_remaining)
            && self.limiter.as_ref().is_none_or(|limiter| limiter.may_move(reason, now))
    }

    /// Whether the watch would continue at its cursor if it lost its stream now.
    pub fn is_resumable(&self) -> bool {
        matches!(self.state.resume_cursor(&self.request), Ok(Some(_)))
    }

    /// Whether the watch would continue or end cleanly if it lost its stream now.
    pub fn can_lose_stream(&self) -> bool {
        self.state.resume_cursor(&self.request).is_ok() || self.ending() == Ending::Clean
    }

    /// Whether the initial events are complete.
    pub fn is_ordered(&self) -> bool {
        self.state.is_ordered()
    }

    /// Whether an event has shown that the current stream continues the watch.
    pub fn is_confirmed(&self) -> bool {
        self.state.is_confirmed()
    }

    /// Why the received frames prevent a resume, permanently or until the next frame.
    pub fn not_resumable(&self) -> Option<NotResumable> {
        self.state.not_resumable(&self.request)
    }

    /// How the client's stream would end if its upstream stream were lost now and not replaced.
    pub fn ending(&self) -> Ending {
        let is_clean = self.state.may_end_cleanly(&self.request) && !self.mid_frame;
        if is_clean { Ending::Clean } else { Ending::Reset }
    }

    /// How the client's stream would end if jackstay ended it now, although its upstream stream works.
    pub fn ending_by_choice(&self, now: Instant) -> Ending {
        match &self.state {
            State::Ordered(watch)
                if watch.cursor.is_settled(now) && !watch.stream.is_behind() && !self.mid_frame =>
            {
                Ending::Clean
            }
            _ => self.ending(),
        }
    }

    /// Whether the client waits for events after a version, and has no part of an incomplete set of initial events.
    pub fn follows_versions(&self) -> bool {
        let starts_at_version = |request| State::first(request, None).is_ordered();
        match &self.state {
            State::Resuming { cursor: None, .. } => starts_at_version(&self.request),
            State::Ended { .. } => false,
            state => state.cursor().is_some() || state.is_ordered(),
        }
    }

    /// The version after which the client waits for events; `None` if it is not known, or not a number of 64 bits.
    pub fn cursor_version(&self) -> Option<u64> {
        let cursor = self.state.cursor().map(Cursor::version).or(self.request.version.as_ref())?;
        as_u64(cursor.as_str().as_bytes())
    }

    /// Whether the session withholds an ERROR event while other endpoints are asked.
    pub fn withholds_error(&self) -> bool {
        matches!(&self.state, State::Resuming { round, .. } if round.withholds_error())
    }

    /// The withheld ERROR event, after [`Ending::Withheld`].
    pub fn take_error_event(&mut self) -> Option<Bytes> {
        match &mut self.state {
            State::Ended { error_event } => error_event.take(),
            _ => None,
        }
    }

    /// How long the next attempt may take.
    pub fn attempt_timeout(&self) -> Duration {
        match (&self.state, &self.exclusions) {
            (State::Resuming { round, .. }, Some(exclusions)) if exclusions.encoding_refused => {
                round.attempt_timeout().min(ATTEMPT_TIMEOUT_AFTER_REFUSED_ENCODING)
            }
            (State::Resuming { round, .. }, _) => round.attempt_timeout(),
            _ => Duration::ZERO,
        }
    }

    /// The endpoints that must not be asked at this time.
    pub fn excluded_at(&self, at: Instant) -> Vec<EndpointKey> {
        self.exclusions.as_ref().map_or_else(Vec::new, |exclusions| exclusions.excluded_at(at))
    }

    /// Whether the endpoint of the last stream or attempt has refused the watch, so that another endpoint is preferred
    /// to another connection to it.
    pub fn last_refused(&self) -> bool {
        self.exclusions.as_ref().is_some_and(|exclusions| exclusions.last_refused)
    }

    /// Whether the watch may go to an apiserver of an older version, because an attempt of this round has failed.
    pub fn may_ask_older(&self) -> bool {
        self.exclusions.as_ref().is_some_and(|exclusions| exclusions.older_allowed)
    }

    /// When the client's `timeoutSeconds` expires; `None` if the client has set none.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Time until the timeout that the client asked for.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    /// Whether so little time is left that another attempt is not worth it.
    pub fn is_late(&self, now: Instant) -> bool {
        self.remaining(now).is_some_and(|remaining| remaining < MIN_REMAINING)
    }
}
