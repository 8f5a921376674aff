//! Whether bookmarks come that used to come.
//!
//! An apiserver sends one a minute (`cacher.go`, `bookmarkFrequency`). Where they stay away its watch
//! cache may be stale, which is for an operator to know and no verdict.

/// Looks, one a minute, without a bookmark after which a watch counts as stale.
const LOOKS_WITHOUT_BOOKMARK: u8 = 3;

/// Of one watch.
#[derive(Debug, Default)]
pub struct Bookmarks {
    /// One has come since the last look.
    news: bool,
    /// One has ever come.
    had: bool,
    /// Looks in a row without one.
    missed: u8,
}

impl Bookmarks {
    /// One has come.
    pub fn came(&mut self) {
        *self = Self { news: true, had: true, missed: 0 };
    }

    /// Another server has the watch now, or nobody: it has time to send one.
    pub fn begin_anew(&mut self) {
        self.missed = 0;
    }

    /// Called once a minute: true, once, when they have stayed away for [`LOOKS_WITHOUT_BOOKMARK`]
    /// of them on a watch that had them.
    pub fn have_stayed_away(&mut self) -> bool {
        if std::mem::take(&mut self.news) || !self.had {
            self.missed = 0;
            return false;
        }
        self.missed = self.missed.saturating_add(1);
        self.missed == LOOKS_WITHOUT_BOOKMARK
    }
}
