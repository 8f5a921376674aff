//! A watch takes a move that its connection offers (`proxy/watch/body/moving.rs` of the program).

use std::time::{Duration, Instant};

use jackstay_core::placement::MoveEligibility;
use jackstay_core::pool::{EndpointKey, Requirements};
use jackstay_core::watch::session::{Input, MoveReason};

use super::{MAX_INTERVAL, Phase, Watch};
use crate::net::ConnectionId;
use crate::node::request::RequestId;
use crate::node::{Io, Node};

/// Limit of the response head if the watch moves to balance load …
const HEAD_TIMEOUT: Duration = Duration::from_millis(250);
/// … and if it leaves an endpoint that fails.
const HEAD_TIMEOUT_UNRESPONSIVE: Duration = Duration::from_secs(1);
/// A watch that was delivering has fallen silent after at least this time …
const MIN_SILENCE: Duration = Duration::from_millis(800);
/// … and this many times the interval between its last two chunks.
const MIN_SILENT_INTERVALS: u32 = 3;

impl Watch {
    fn has_fallen_silent(&self, now: Instant) -> bool {
        self.interval.is_some_and(|interval| {
            let silence = now.saturating_duration_since(self.last_chunk);
            interval <= MAX_INTERVAL && silence >= MIN_SILENCE.max(interval * MIN_SILENT_INTERVALS)
        })
    }

    /// The connection whose events it forwards, if it is not about to leave it.
    pub(in crate::node) fn streaming_on(&self) -> Option<ConnectionId> {
        self.stream.filter(|_| self.phase == Phase::Streaming).map(|stream| stream.0)
    }

    /// Why the watch may take a move for such watches.
    fn move_reason(&self, eligible: MoveEligibility, now: Instant) -> Option<MoveReason> {
        let reason = match eligible {
            MoveEligibility::Silent if !self.has_fallen_silent(now) => return None,
            MoveEligibility::Settled => MoveReason::Rebalance,
            MoveEligibility::Silent | MoveEligibility::All => MoveReason::Evacuate,
        };
        self.relay.session().can_move(reason, now).then_some(reason)
    }
}

impl Node {
    /// Takes one of the moves that the connection of a watch offers, if the watch may move.
    pub(super) fn take_offered_move(&mut self, io: &mut Io<'_>, id: RequestId) {
        let now = io.s.now;
        let Some(connection) = self.watch_mut(id).and_then(|watch| watch.streaming_on()) else {
            return;
        };
        let Some(eligible) = self.placement.offered(connection) else { return };
        let reason = self.watch_mut(id).and_then(|watch| watch.move_reason(eligible, now));
        let (Some(reason), Some(targets)) = (reason, self.placement.take(connection)) else {
            return;
        };
        let others = (0..self.endpoints.len()).filter(|at| !targets.contains(at));
        let excluded = others.map(EndpointKey).collect();
        let required = Requirements { watch: true, excluded, ..Requirements::default() };
        let found = self.select_now(io, &required);
        self.watch_step(io, id, Input::MoveStarted(reason));
        let Some(connection) = found else {
            return self.watch_step(io, id, Input::MoveEnded { moved: false });
        };
        let limit =
            if reason == MoveReason::Rebalance { HEAD_TIMEOUT } else { HEAD_TIMEOUT_UNRESPONSIVE };
        self.request_stream(io, id, (connection, Phase::Moving), limit);
    }
}
