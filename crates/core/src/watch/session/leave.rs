//! When a watch leaves a stream that has not failed.
//!
//! | the connection | reason |
//! |---|---|
//! | does not respond; it is kept only for watches that cannot leave it | `Unresponsive` |
//! | drains | `Drain` |
//! | any other | none; an offered move may be taken |
//!
//! | reason | condition | the watch |
//! |---|---|---|
//! | `Drain` | would continue at its cursor | searches a stream on another connection |
//! | `Unresponsive` | would continue or end cleanly | counts its stream as lost |
//! | `GroupFailed`, `GroupSilent`: its API group fails at the endpoint ([`crate::group_health`]) | would continue at its cursor | searches a stream on another connection |
//! | `GroupSilent`: the endpoint does not answer either, and nothing has arrived for a second | would not | counts its stream as lost |
//! | `Shutdown` of the listener | would end cleanly | ends |
//! | any | otherwise | stays, and tries again after each chunk |
//!
//! | end of a search | the watch |
//! |---|---|
//! | it would not continue at its cursor any more | stays, as above |
//! | nothing was found, or it may not be moved now | searches again after a pause that doubles |
//! | a stream was found | moves |
//!
//! | offer | watch | it moves |
//! |---|---|---|
//! | to settled watches | any | for balance |
//! | to silent watches | was delivering and has fallen silent | away from its endpoint |
//! | to silent watches | any other | no |
//! | to all | any | away from its endpoint |
//!
//! While it moves it does not read its stream, because the new one delivers the same events. So the response head must
//! arrive within 250 ms if the old stream works and may have events, and within 1 s if it is likely to be silent.

use std::time::{Duration, Instant};

use super::Session;
use super::input::{Ending, MoveReason};
use crate::backoff::Backoff;
use crate::connection::{ConnectionState, DrainUrgency};
use crate::placement::MoveEligibility;
use crate::watch::pace::DeliveryPace;

/// Time limit of one search.
pub const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait for the first frame of the stream to which a watch moves. An apiserver whose history does not reach
/// back to the cursor answers 200 and sends an ERROR event at once.
pub const FIRST_FRAME_TIMEOUT: Duration = Duration::from_millis(50);
/// Maximum jitter of the first search if the connection must be left at once. All watches of the connection search at
/// the same moment.
const JITTER_IMMEDIATE: Duration = Duration::from_millis(200);
/// Maximum jitter of the first search if the stream works, so that waiting costs nothing.
const JITTER_RELAXED: Duration = Duration::from_secs(1);
/// The pause after the first failed search, and its upper bound without the random part.
const SEARCHES: Backoff =
    Backoff::new(Duration::from_secs(2), Duration::from_secs(60)).with_factors(1.0, 1.5);

/// Why a watch should leave a stream that has not failed, as soon as the client would not notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveReason {
    /// The connection drains.
    Drain,
    /// The connection does not respond; it is kept only for watches that cannot leave it.
    Unresponsive,
    /// The API group fails at the endpoint, which answers that it cannot reach the server of the group.
    GroupFailed,
    /// The API group fails at the endpoint, which does not answer its requests, and nothing arrives
    /// on the stream.
    GroupSilent,
    /// The listener drains.
    Shutdown,
}

impl LeaveReason {
    /// Why the watches of a connection should leave it.
    pub fn of_connection(state: ConnectionState, urgency: Option<DrainUrgency>) -> Option<Self> {
        match (state, urgency) {
            (ConnectionState::Unresponsive, _) => Some(Self::Unresponsive),
            (_, Some(_)) => Some(Self::Drain),
            (_, None) => None,
        }
    }
}

/// What a watch does that should leave its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leave {
    /// Searches a stream on another connection.
    Search,
    /// Counts its stream as lost.
    Lose,
    /// Ends.
    End,
    /// Stays.
    Stay,
}

/// What a watch does after a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterSearch {
    /// Moves to the stream that was found.
    Move,
    /// Searches again later.
    SearchAgain,
    /// Stays.
    Stay,
}

impl Session {
    /// What the watch does at `now` for this reason.
    pub fn leave(&self, reason: LeaveReason, now: Instant) -> Leave {
        match reason {
            LeaveReason::Drain | LeaveReason::GroupFailed | LeaveReason::GroupSilent
                if self.is_resumable() =>
            {
                Leave::Search
            }
            LeaveReason::GroupSilent => Leave::Lose,
            LeaveReason::Unresponsive if self.can_lose_stream() => Leave::Lose,
            LeaveReason::Shutdown if self.ending_by_choice(now) == Ending::Clean => Leave::End,
            _ => Leave::Stay,
        }
    }

    /// What the watch does after a search for this reason. `found`: a stream to which it may go.
    pub fn after_search(&self, found: bool, reason: MoveReason, now: Instant) -> AfterSearch {
        if !self.is_resumable() {
            AfterSearch::Stay
        } else if found && self.can_move(reason, now) {
            AfterSearch::Move
        } else {
            AfterSearch::SearchAgain
        }
    }
}

/// Why a watch with this pace takes an offered move; `None` if the offer is not for it.
pub fn offered_move(
    eligible: MoveEligibility,
    pace: &DeliveryPace,
    now: Instant,
) -> Option<MoveReason> {
    match eligible {
        MoveEligibility::Settled => Some(MoveReason::Rebalance),
        MoveEligibility::Silent if !pace.has_fallen_silent(now) => None,
        MoveEligibility::Silent | MoveEligibility::All => Some(MoveReason::Evacuate),
    }
}

impl MoveReason {
    /// Maximum wait for the response head of the new stream.
    pub fn head_timeout(self) -> Duration {
        match self {
            Self::Rebalance => Duration::from_millis(250),
            Self::Evacuate | Self::Drain => Duration::from_secs(1),
        }
    }
}

/// The searches of a watch for a stream on another connection, while it reads one.
#[derive(Debug, Clone, Copy, Default)]
pub struct Searches {
    failed: u32,
}

impl Searches {
    /// A search has found nothing, or the watch has not moved.
    pub fn failed(&mut self) {
        self.failed = self.failed.saturating_add(1);
    }

    /// The pause before the next search. `immediate`: the connection must be left at once.
    pub fn pause(self, immediate: bool, rng: &mut fastrand::Rng) -> Duration {
        match self.failed {
            0 if immediate => JITTER_IMMEDIATE.mul_f64(rng.f64()),
            0 => JITTER_RELAXED.mul_f64(rng.f64()),
            failures => SEARCHES.after(failures).random_pause(rng),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::codec::event::{Event, EventType};
    use crate::watch::request::WatchRequest;
    use crate::watch::session::SessionInput;
    use crate::watch::tests::events::request;

    fn session(request: WatchRequest, event_type: Option<EventType>) -> Session {
        let mut session = Session::new(request, Instant::now());
        if let Some(event_type) = event_type {
            let version = Some(&b"9"[..]);
            let event = Event { event_type, version, initial_events_end: false, status_code: None };
            session.step(SessionInput::Frame(Some(event)), Instant::now());
        }
        session
    }

    #[test]
    fn connection_that_does_not_respond_or_drains_is_left() {
        use ConnectionState::{Draining, Live, Suspect, Unresponsive};
        let immediate = Some(DrainUrgency::Immediate);
        for (state, urgency, expected) in [
            (Live, None, None),
            (Suspect, None, None),
            (Draining, None, None),
            (Draining, Some(DrainUrgency::Relaxed), Some(LeaveReason::Drain)),
            (Draining, immediate, Some(LeaveReason::Drain)),
            (Unresponsive, immediate, Some(LeaveReason::Unresponsive)),
        ] {
            assert_eq!(LeaveReason::of_connection(state, urgency), expected, "{state:?}");
        }
    }

    #[test]
    fn watch_leaves_only_if_its_client_does_not_notice() {
        use EventType::{Added, Unknown};
        use LeaveReason::{Drain, GroupFailed, GroupSilent, Shutdown, Unresponsive};
        let now = Instant::now();
        // A watch in order; one whose next event would be missing; one within the initial events.
        for (name, session, drain, unresponsive, shutdown) in [
            ("ordered", session(request("5"), Some(Added)), Leave::Search, Leave::Lose, Leave::End),
            ("unknown", session(request("5"), Some(Unknown)), Leave::Stay, Leave::Lose, Leave::End),
            ("initial", session(request(""), Some(Added)), Leave::Stay, Leave::Stay, Leave::Stay),
            ("repeatable", session(request(""), None), Leave::Stay, Leave::Lose, Leave::Stay),
        ] {
            assert_eq!(session.leave(Drain, now), drain, "{name}");
            assert_eq!(session.leave(GroupFailed, now), drain, "{name}");
            let silent = if drain == Leave::Search { drain } else { Leave::Lose };
            assert_eq!(session.leave(GroupSilent, now), silent, "{name}");
            assert_eq!(session.leave(Unresponsive, now), unresponsive, "{name}");
            assert_eq!(session.leave(Shutdown, now), shutdown, "{name}");
        }
    }

    #[test]
    fn search_ends_with_a_move_or_with_another_search() {
        let now = Instant::now();
        let after = |session: &Session, found| session.after_search(found, MoveReason::Drain, now);
        let ordered = session(request("5"), Some(EventType::Added));
        assert_eq!(after(&ordered, true), AfterSearch::Move);
        assert_eq!(after(&ordered, false), AfterSearch::SearchAgain);
        let unknown = session(request("5"), Some(EventType::Unknown));
        assert_eq!(after(&unknown, true), AfterSearch::Stay);
        let short = WatchRequest { timeout: Some(Duration::from_secs(1)), ..request("5") };
        assert_eq!(after(&session(short, None), true), AfterSearch::SearchAgain, "too late");
    }

    #[test]
    fn offer_to_silent_watches_is_not_for_others() {
        use MoveEligibility::{All, Settled, Silent};
        let start = Instant::now();
        let later = start + Duration::from_secs(5);
        let quiet = DeliveryPace::new(start);
        let mut silent = quiet;
        silent.delivered(start + Duration::from_millis(100));
        for (eligible, pace, expected) in [
            (Settled, quiet, Some(MoveReason::Rebalance)),
            (Silent, quiet, None),
            (Silent, silent, Some(MoveReason::Evacuate)),
            (All, quiet, Some(MoveReason::Evacuate)),
        ] {
            assert_eq!(offered_move(eligible, &pace, later), expected, "{eligible:?}");
        }
    }

    #[test]
    fn pause_before_a_search_doubles_with_each_failure() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut longest = |failures, immediate| {
            let mut searches = Searches::default();
            (0..failures).for_each(|_| searches.failed());
            let pauses = (0..1000).map(|_| searches.pause(immediate, &mut rng).as_millis());
            let pauses: Vec<_> = pauses.collect();
            (*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap())
        };
        for (failures, immediate, least, most) in [
            (0, true, 0, 200),
            (0, false, 0, 1_000),
            (1, true, 2_000, 3_000),
            (2, false, 4_000, 6_000),
            (30, true, 60_000, 90_000),
        ] {
            let (min, max) = longest(failures, immediate);
            assert!(min >= least && max <= most && max > most * 9 / 10, "{failures}: {min} {max}");
        }
    }
}
