//! Where a watch continues: the version of its last event or bookmark, and how much of that version the client has.
//!
//! # Events that share a version
//!
//! A write of kube-apiserver is one transaction of etcd with one key, so every event of a watch has a version of its own.
//! The objects of a lease are an exception. When the lease expires, etcd deletes them in one transaction, and the DELETED
//! of each of them has the version of that transaction (`watcher.go` of `storage/etcd3`: the old object with the revision
//! of the deletion). kube-apiserver attaches up to 1,000 Events to one lease (`lease_manager.go`), and others may attach
//! the lease of their own to any object. So a DELETED at the cursor follows the event before it.
//!
//! A watch from version V receives the events after V, never a part of those at V. A stream that is lost within such
//! events is therefore continued from the version before the cursor, and the events of the cursor's version that the
//! client has are left out, by their number. They are the first ones on every server, because
//!
//! - each etcd member deletes the keys of a lease in their order (`lessor.Revoke` sorts them, so that the members store the
//!   same), numbers the deletions of a transaction, and sends them in that order to running and to new watches
//!   (`notify` and `syncWatchers` in `mvcc/watchable_store.go`), without splitting a revision into two responses;
//! - kube-apiserver keeps the order of etcd's events, and a watch continues with the same selectors.
//!
//! Their number takes four bytes, and needs no names, which a frame of a Table may not have.
//!
//! # Where the watch continues, and how it ends
//!
//! | last event at the cursor | objects | asked for | if jackstay ends the watch |
//! |---|---|---|---|
//! | none: a bookmark, or the version that the client requested | any | the cursor | clean |
//! | ADDED, MODIFIED | any | the cursor | clean |
//! | DELETED | Events, or another two events of the watch had one version | the version before, without the events that the client has | reset: a reflector lists after it, and misses no deletion. Clean if the stream works and nothing has followed for a second |
//! | DELETED | any other of a built-in group | the same | clean |
//! | DELETED | any other group | the cursor, because an aggregated apiserver may refuse a version that it has never shown | clean |
//!
//! | the stream from the version before the cursor | decision |
//! |---|---|
//! | an event at the cursor that the client has | discard |
//! | a bookmark at the version before the cursor | discard: the server has not reached the cursor |
//! | another DELETED at the cursor | forward |
//! | a bookmark at the cursor, or a later frame, before the last event that the client has | end: the server does not have what the client has |
//! | an ERROR event, a 410 | as on any other resumed stream |
//!
//! # What a resume cannot promise
//!
//! - In the last two rows of the first table a clean end, and in the last one also a resume, loses the rest of the events
//!   that share the cursor's version, if there is one. A client without jackstay loses it at each loss of its stream.
//! - A watch cache receives the events of one version one after the other, and drops those that arrive after a new watch
//!   has begun within them (`cacheWatcher.processInterval` continues after the last version that it sent). No client sees
//!   those of such a watch. Events have no watch cache.
//! - When the server itself ends the watch within such events, its client continues after all of them, as without jackstay.

use std::time::{Duration, Instant};

use super::input::Ending;
use crate::watch::codec::event::EventType;
use crate::watch::codec::version::ResourceVersion;
use crate::watch::request::WatchRequest;

/// Events of one version arrive together: etcd sends them in one response. If nothing has followed for this time on a
/// stream that works, the last one was complete.
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct Cursor {
    version: ResourceVersion,
    /// Number of events at the version that the client has received.
    received: u32,
    /// The last of them is a DELETED.
    deleted: bool,
    sharing: Sharing,
    /// When the last of them was received.
    received_at: Option<Instant>,
}

/// Whether events of a watch share versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    /// The server may not be a kube-apiserver.
    Unknown,
    /// The objects may be attached to a lease.
    Possible,
    /// The objects expire, or two events of the watch had one version.
    Expected,
}

impl Cursor {
    /// The cursor at a version that no event has shown.
    pub fn new(version: ResourceVersion, request: &WatchRequest) -> Self {
        let sharing = if request.objects_expire {
            Sharing::Expected
        } else if request.built_in_group {
            Sharing::Possible
        } else {
            Sharing::Unknown
        };
        Self { version, received: 0, deleted: false, sharing, received_at: None }
    }

    /// The version of the last event or bookmark.
    pub fn version(&self) -> &ResourceVersion {
        &self.version
    }

    /// The client receives a frame at `version`, which is not below the cursor.
    pub fn advance(&mut self, version: ResourceVersion, event_type: EventType, now: Instant) {
        if version != self.version {
            self.version = version;
            self.received = 0;
            self.deleted = false;
        }
        if event_type == EventType::Bookmark {
            return;
        }
        if self.received > 0 {
            self.sharing = Sharing::Expected;
        }
        self.received = self.received.saturating_add(1);
        self.deleted = event_type == EventType::Deleted;
        self.received_at = Some(now);
    }

    /// The version from which the events at the cursor are repeated; `None` if the watch continues at the cursor.
    fn before(&self) -> Option<ResourceVersion> {
        if self.deleted && self.sharing != Sharing::Unknown { self.version.before() } else { None }
    }

    /// The version that the next request names.
    pub fn resume_version(&self) -> ResourceVersion {
        self.before().unwrap_or_else(|| self.version.clone())
    }

    /// Number of events that the client has received already and the response to the next request repeats.
    pub fn repeated(&self) -> u32 {
        if self.before().is_some() { self.received } else { 0 }
    }

    /// Whether `version` is that of the request that repeats the events at the cursor.
    pub fn is_before(&self, version: &ResourceVersion) -> bool {
        self.before().is_some_and(|before| before == *version)
    }

    /// How the client's stream ends if the stream was lost, or does not continue at the cursor.
    pub fn ending(&self) -> Ending {
        let may_miss = self.deleted && self.sharing == Sharing::Expected;
        if may_miss { Ending::Reset } else { Ending::Clean }
    }

    /// Whether every event at the cursor has arrived, on a stream that works.
    pub fn is_settled(&self, now: Instant) -> bool {
        self.received_at.is_none_or(|at| now.saturating_duration_since(at) >= SETTLED_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::tests::events::request;
    use EventType::{Added, Bookmark, Deleted, Modified};

    #[test]
    #[allow(clippy::type_complexity)] // a table
    fn cursor_decides_where_the_watch_continues_and_how_it_ends() {
        let start = Instant::now();
        let version = |text: &str| ResourceVersion::parse(text.as_bytes()).unwrap();
        let pods = || request("5");
        let expiring = || WatchRequest { objects_expire: true, ..pods() };
        let custom = || WatchRequest { built_in_group: false, ..pods() };
        // Request, frames; expected: the version of the next request, the repeated events, and how the watch ends.
        #[rustfmt::skip]
        let table: Vec<(WatchRequest, &[(EventType, &str)], &str, u32, Ending)> = vec![
            (expiring(), &[], "5", 0, Ending::Clean),
            (expiring(), &[(Bookmark, "9")], "9", 0, Ending::Clean),
            (expiring(), &[(Added, "9")], "9", 0, Ending::Clean),
            (expiring(), &[(Deleted, "9")], "8", 1, Ending::Reset),
            (expiring(), &[(Deleted, "9"), (Deleted, "9"), (Deleted, "9")], "8", 3, Ending::Reset),
            (expiring(), &[(Deleted, "9"), (Deleted, "9"), (Bookmark, "9")], "8", 2, Ending::Reset),
            (expiring(), &[(Deleted, "9"), (Bookmark, "10")], "10", 0, Ending::Clean),
            (expiring(), &[(Deleted, "9"), (Added, "10")], "10", 0, Ending::Clean),
            (expiring(), &[(Bookmark, "9"), (Deleted, "9")], "8", 1, Ending::Reset),
            (expiring(), &[(Deleted, "1")], "1", 0, Ending::Reset),
            (expiring(), &[(Deleted, "1000")], "999", 1, Ending::Reset),
            (pods(), &[(Modified, "9")], "9", 0, Ending::Clean),
            (pods(), &[(Deleted, "9")], "8", 1, Ending::Clean),
            (pods(), &[(Deleted, "9"), (Deleted, "9")], "8", 2, Ending::Reset),
            (pods(), &[(Deleted, "9"), (Deleted, "9"), (Deleted, "12")], "11", 1, Ending::Reset),
            (custom(), &[(Deleted, "9")], "9", 0, Ending::Clean),
            (custom(), &[(Deleted, "9"), (Deleted, "9")], "8", 2, Ending::Reset),
        ];
        for (request, frames, asked, repeated, ending) in table {
            let mut cursor = Cursor::new(version("5"), &request);
            for (event_type, at) in frames {
                // A first version below the requested one stands for a history that begins there.
                cursor.advance(version(at), *event_type, start);
            }
            assert_eq!(cursor.resume_version(), version(asked), "{frames:?}");
            assert_eq!(cursor.repeated(), repeated, "{frames:?}");
            assert_eq!(cursor.ending(), ending, "{frames:?}");
            assert_eq!(cursor.is_before(&version(asked)), repeated > 0, "{frames:?}");
        }
    }

    #[test]
    fn cursor_settles_a_second_after_its_last_event() {
        let start = Instant::now();
        let version = ResourceVersion::parse(b"9").unwrap();
        let mut cursor = Cursor::new(version.clone(), &request("5"));
        assert!(cursor.is_settled(start));
        cursor.advance(version, Deleted, start);
        assert!(!cursor.is_settled(start + Duration::from_millis(999)));
        assert!(cursor.is_settled(start + Duration::from_secs(1)));
    }
}
