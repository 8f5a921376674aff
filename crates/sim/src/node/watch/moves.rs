//! A watch takes a move that its connection offers (`proxy/watch/body/moving.rs` of the program).

use std::time::Instant;

use jackstay_core::placement::MoveEligibility;
use jackstay_core::pool::{EndpointKey, Requirements};
use jackstay_core::watch::session::{Input, MoveReason, offered_move};

use super::{Phase, Watch};
use crate::net::ConnectionId;
use crate::node::request::RequestId;
use crate::node::{Io, Node};

impl Watch {
    /// The connection whose events it forwards, if it is not about to leave it.
    pub(in crate::node) fn streaming_on(&self) -> Option<ConnectionId> {
        self.stream.filter(|_| self.phase == Phase::Streaming).map(|stream| stream.0)
    }

    /// Why the watch may take a move for such watches.
    fn move_reason(&self, eligible: MoveEligibility, now: Instant) -> Option<MoveReason> {
        let reason = offered_move(eligible, &self.pace, now)?;
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
        let required = Requirements { long_running: true, excluded, ..Requirements::default() };
        let found = self.select_now(io, &required);
        self.watch_step(io, id, Input::MoveStarted(reason));
        let Some(connection) = found else {
            return self.watch_step(io, id, Input::MoveEnded { moved: false });
        };
        self.request_stream(io, id, (connection, Phase::Moving), reason.head_timeout());
    }
}
