//! Detects that bookmarks have ceased on a watch that had them.
//!
//! An apiserver sends one bookmark a minute (`cacher.go`, `bookmarkFrequency`). If they cease, its watch
//! cache may be stale. The proxy counts that for operators and does nothing else about it.

/// Checks in a row, one a minute, without a bookmark after which a watch counts as stale.
const MISSED: u8 = 3;

/// The bookmarks of one watch.
#[derive(Debug, Default)]
pub(super) struct BookmarkMonitor {
    seen_since_check: bool,
    ever_seen: bool,
    missed: u8,
}

impl BookmarkMonitor {
    /// A bookmark has arrived.
    pub(super) fn seen(&mut self) {
        *self = Self { seen_since_check: true, ever_seen: true, missed: 0 };
    }

    /// The watch has lost or changed its stream: the next server has the whole time to send one.
    pub(super) fn restart(&mut self) {
        self.missed = 0;
    }

    /// Called once a minute. Returns true, once, after the third check in a row without a bookmark on
    /// a watch that had bookmarks.
    pub(super) fn check(&mut self) -> bool {
        if std::mem::take(&mut self.seen_since_check) || !self.ever_seen {
            self.missed = 0;
            return false;
        }
        self.missed = self.missed.saturating_add(1);
        self.missed == MISSED
    }
}
