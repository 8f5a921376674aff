//! The lead: events that the client has received from one of two streams, and that the other has yet to show.

use std::collections::VecDeque;

use crate::admission::ByteAccount;
use crate::credential_class::ClientRank;
use crate::watch::codec::event::{Event, EventType};
use crate::watch::codec::version::as_u64;

/// Maximum number of events in the lead. A healthy server is behind another one by less than a second (a lagging watch
/// cache), which is some hundred events of the busiest resources.
pub const LEAD_LIMIT: usize = 1024;

/// One of the two streams of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The stream that the watch had before.
    First,
    /// The stream that was opened beside it.
    Shadow,
}

impl Side {
    /// The other stream.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Shadow,
            Self::Shadow => Self::First,
        }
    }
}

/// What identifies a frame in the sequence of a watch: its type and its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShownFrame {
    /// The resource version.
    pub version: u64,
    /// Not ERROR, and not unknown.
    pub event_type: EventType,
}

impl ShownFrame {
    /// `None` for an ERROR event, an unknown type, and a version that is not a number of 64 bits.
    pub fn of(event: Event<'_>) -> Option<Self> {
        let version = as_u64(event.version?)?;
        let event_type = event.event_type;
        let is_known = !matches!(event_type, EventType::Error | EventType::Unknown);
        is_known.then_some(Self { version, event_type })
    }

    /// Whether this is a bookmark, which is no event.
    pub fn is_bookmark(self) -> bool {
        self.event_type == EventType::Bookmark
    }

    /// Whether a stream that has shown `version` may show this frame next: only a DELETED and a bookmark may have the
    /// version of the frame before it.
    pub fn may_follow(self, version: u64) -> bool {
        let may_share = self.is_bookmark() || self.event_type == EventType::Deleted;
        self.version > version || may_share && self.version == version
    }
}

/// The lead is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// The queue of the events that one stream has yet to show, in order. Its memory counts in the budget of the buffered
/// frames.
#[derive(Debug)]
pub struct Lead {
    /// The stream that has yet to show the events, if there are any.
    follower: Side,
    events: VecDeque<ShownFrame>,
    account: ByteAccount,
    limit: usize,
}

impl Lead {
    /// An empty lead of at most `limit` events.
    pub fn new(account: ByteAccount, limit: usize) -> Self {
        Self { follower: Side::First, events: VecDeque::new(), account, limit }
    }

    /// The event that this stream must show next; `None` if it has shown all.
    pub fn next_of(&self, side: Side) -> Option<ShownFrame> {
        self.events.front().copied().filter(|_| side == self.follower)
    }

    /// The follower has shown the next event.
    pub fn pop(&mut self) {
        self.events.pop_front();
    }

    /// `follower` has yet to show this event. It is the one that has yet to show the others, if there are any.
    pub fn push(&mut self, follower: Side, event: ShownFrame) -> Result<(), Full> {
        debug_assert!(self.events.is_empty() || self.follower == follower, "{self:?}");
        if self.events.len() >= self.limit {
            return Err(Full);
        }
        let before = self.events.capacity();
        if self.events.len() == before {
            let more = before.max(8).min(self.limit);
            if more * size_of::<ShownFrame>() > self.account.left() {
                return Err(Full);
            }
            self.events.reserve_exact(more);
            self.account.take((self.events.capacity() - before) * size_of::<ShownFrame>());
        }
        self.follower = follower;
        self.events.push_back(event);
        Ok(())
    }

    /// The shadow is the only stream from now on.
    pub fn promote_shadow(&mut self) {
        match self.follower {
            Side::First => self.events.clear(),
            Side::Shadow => self.follower = Side::First,
        }
    }

    /// The first stream is the only one from now on.
    pub fn drop_shadow(&mut self) {
        if self.follower == Side::Shadow {
            self.events.clear();
        }
    }

    /// The client has proven this, by which the memory is limited.
    pub fn raise_rank(&mut self, rank: ClientRank) {
        self.account.raise_rank(rank);
    }

    /// A copy whose memory counts in another budget.
    #[cfg(test)]
    #[must_use]
    pub fn fork(&self, account: ByteAccount) -> Self {
        let mut events = VecDeque::with_capacity(self.events.capacity());
        events.extend(&self.events);
        account.take(events.capacity() * size_of::<ShownFrame>());
        Self { follower: self.follower, events, account, limit: self.limit }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        self.account.release(self.events.capacity() * size_of::<ShownFrame>());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(version: u64) -> ShownFrame {
        ShownFrame { version, event_type: EventType::Modified }
    }

    #[test]
    fn lead_is_bounded_by_its_limit_and_by_the_budget() {
        for (budget, limit, expected) in [(usize::MAX, 20, 20), (128, 1000, 8), (127, 1000, 0)] {
            let account = ByteAccount::unmetered(budget);
            let mut lead = Lead::new(account.clone(), limit);
            let pushed = (1..=limit as u64 + 1)
                .take_while(|n| lead.push(Side::First, event(*n)).is_ok())
                .count();
            assert_eq!(pushed, expected, "{budget} {limit}");
            assert!(account.budget().held() <= budget);
            for version in 1..=pushed as u64 {
                assert_eq!(lead.next_of(Side::Shadow), None);
                assert_eq!(lead.next_of(Side::First), Some(event(version)));
                lead.pop();
            }
            assert_eq!(lead.next_of(Side::First), None);
            drop(lead);
            assert_eq!(account.budget().held(), 0);
        }
    }

    #[test]
    fn only_deletions_and_bookmarks_share_the_version_before_them() {
        use EventType::{Added, Bookmark, Deleted, Modified};
        for (event_type, shares) in
            [(Added, false), (Modified, false), (Deleted, true), (Bookmark, true)]
        {
            let frame = ShownFrame { version: 7, event_type };
            assert!(frame.may_follow(6) && !frame.may_follow(8));
            assert_eq!(frame.may_follow(7), shares, "{event_type:?}");
        }
    }
}
