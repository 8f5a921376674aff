//! Detects that the bookmarks of a watch have stopped.

/// A watch counts as stale after this many consecutive checks, one a minute, without a bookmark. An
/// apiserver sends about one bookmark a minute (`cacher.go`, `bookmarkFrequency`).
const MISSED_BOOKMARKS: u8 = 3;

/// Counts the checks of one watch that found no new bookmark.
#[derive(Debug, Default)]
pub struct BookmarkMonitor {
    /// Consecutive checks that found no new bookmark; `None` until the first bookmark.
    missed: Option<u8>,
    received_since_check: bool,
}

impl BookmarkMonitor {
    pub fn record_bookmark(&mut self) {
        self.missed = Some(0);
        self.received_since_check = true;
    }

    /// Starts the count again when the watch leaves its apiserver: the next one has three minutes to send its
    /// first bookmark.
    pub fn restart(&mut self) {
        self.missed = self.missed.map(|_| 0);
    }

    /// Called once a minute. Returns true once, at the check after which the watch counts as stale.
    pub fn has_gone_stale(&mut self) -> bool {
        let received = std::mem::take(&mut self.received_since_check);
        let Some(missed) = self.missed.as_mut().filter(|_| !received) else { return false };
        *missed = missed.saturating_add(1);
        *missed == MISSED_BOOKMARKS
    }
}
