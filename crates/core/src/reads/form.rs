//! Which version a request asks for, and its query with a floor.

use http::Request;

use crate::kubernetes_version::MinorVersion;
use crate::request::info::{RequestInfo, RequestKind, Verb, first_value, parse_bool};
use crate::watch::codec::version::as_u64;
use crate::watch::request::{rewrite, with_query};

/// The versions of one resource that one client has seen; 0 for a part that it has not seen. Watch caches reach the
/// parts differently:
///
/// | part | from | a watch cache reaches it |
/// |---|---|---|
/// | objects | objects in answers to reads and writes, and in watch events | by an event |
/// | lists | the metadata of lists, and of a Status that answers a write | by an event, or when etcd reports its progress |
/// | bookmarks | bookmarks of watches | the same |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FloorVersions {
    /// The highest version of an object.
    pub objects: u64,
    /// The highest version of a list or a Status.
    pub lists: u64,
    /// The highest version of a bookmark.
    pub bookmarks: u64,
}

impl FloorVersions {
    /// The highest of all.
    pub fn highest(self) -> u64 {
        self.objects.max(self.lists).max(self.bookmarks)
    }
}

/// What a read with a floor asks of an endpoint that may not have reached it. The later ones say less about its cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Asked {
    /// A state of the cache that is not older than this version; any state if it is 0.
    NotOlderThan(u64),
    /// The most recent state, which cannot be older than this version.
    MostRecent(u64),
    /// The state at this version.
    Exact(u64),
}

impl Asked {
    /// No answer is older than this version.
    pub fn version(self) -> u64 {
        let (Self::NotOlderThan(version) | Self::MostRecent(version) | Self::Exact(version)) = self;
        version
    }
}

/// Where the most-recent lists of an endpoint come from, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListOrigin {
    /// Its cache.
    Cache,
    /// etcd, and the caches of ready endpoints may not have the events of what the client has seen.
    EtcdLately,
    /// etcd.
    Etcd,
}

impl ListOrigin {
    /// The origin at a server of this version. `from_etcd`: the answers of the upstream have shown that
    /// ([`super::list_source`]). `is_progress_recent`: the client has lately seen a list or a bookmark of a higher
    /// version, which the caches of ready endpoints may not have reached.
    pub fn of(
        server: Option<MinorVersion>,
        from_etcd: bool,
        is_progress_recent: impl FnOnce() -> bool,
    ) -> Self {
        if server < LISTS_FROM_CACHE {
            Self::Etcd
        } else if !from_etcd {
            Self::Cache
        } else if is_progress_recent() {
            Self::EtcdLately
        } else {
            Self::Etcd
        }
    }
}

/// What a request asks for or shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadForm {
    /// A LIST of any version: `resourceVersion=0`.
    AnyList,
    /// A GET of any version: `resourceVersion=0`.
    AnyGet,
    /// A watch that starts with initial events of any version, which a version would not skip
    /// (`sendInitialEvents`).
    AnyWatchList,
    /// A watch that starts with initial events of any version, which a version would skip. Without
    /// `resourceVersion` a cache of any age serves it, too (apiserver, `WatchFromStorageWithoutResourceVersion`).
    AnyWatch,
    /// A LIST from the cache that is not older than a version.
    ListNotOlderThan,
    /// A GET from the cache that is not older than a version.
    GetNotOlderThan,
    /// A watch from a version.
    WatchFrom,
    /// A LIST of the most recent version.
    MostRecentList,
    /// A LIST of an exact version, or a later page. Also a delete of a collection, which answers with the list that it
    /// has read before it deleted the objects (apiserver, `registry/generic/registry/store.go`, `DeleteCollection`).
    OtherList,
    /// A GET of the most recent version.
    MostRecentGet,
    /// A watch whose initial events are most recent.
    MostRecentWatch,
    /// A create, update, patch or delete, which answers with the object or with a Status.
    Write,
}

impl ReadForm {
    /// The form of a request; `None` for one whose response shows no version of a resource.
    pub fn of(info: &RequestInfo) -> Option<Self> {
        use ReadForm::{
            AnyGet, AnyList, AnyWatch, AnyWatchList, GetNotOlderThan, ListNotOlderThan,
            MostRecentGet, MostRecentList, MostRecentWatch, OtherList, WatchFrom, Write,
        };
        let query = info.query();
        let is_any = || first_value(query, "resourceVersion").is_some_and(|text| text == "0");
        let is_number = || version(info).is_some();
        let has_no_version =
            || first_value(query, "resourceVersion").is_none_or(|text| text.is_empty());
        Some(match (info.kind, info.verb) {
            (RequestKind::Read, Verb::Get) if is_any() => AnyGet,
            (RequestKind::Read, Verb::Get) if is_number() => GetNotOlderThan,
            (RequestKind::Read, Verb::Get) => MostRecentGet,
            (RequestKind::Read, Verb::List) => {
                let is_match = first_value(query, "resourceVersionMatch");
                let is_not_older =
                    is_match.as_deref().is_none_or(|m| m.is_empty() || m == "NotOlderThan");
                let first_page = first_value(query, "continue").is_none_or(|text| text.is_empty());
                let limited = first_value(query, "limit").is_some_and(|limit| limit != "0");
                match (is_not_older && first_page, is_match.is_some()) {
                    (true, _) if is_any() => AnyList,
                    // Without a match, a limit makes it a list of exactly this version.
                    (true, has_match) if is_number() && (has_match || !limited) => ListNotOlderThan,
                    (true, false) if has_no_version() => MostRecentList,
                    _ => OtherList,
                }
            }
            (RequestKind::Watch, _) => {
                let initial = parse_bool(first_value(query, "sendInitialEvents").as_deref());
                match (initial, is_any()) {
                    (true, true) => AnyWatchList,
                    (false, true) => AnyWatch,
                    _ if is_number() => WatchFrom,
                    (false, false) if first_value(query, "sendInitialEvents").is_none() => AnyWatch,
                    _ => MostRecentWatch,
                }
            }
            (RequestKind::Write, Verb::DeleteCollection) => OtherList,
            (RequestKind::Write, Verb::Create | Verb::Update | Verb::Patch | Verb::Delete) => Write,
            _ => return None,
        })
    }

    /// Whether the client accepts any version, so that the floor applies.
    pub fn takes_any_version(self) -> bool {
        matches!(self, Self::AnyList | Self::AnyGet | Self::AnyWatchList | Self::AnyWatch)
    }

    /// Whether it is a LIST.
    pub fn is_list(self) -> bool {
        matches!(
            self,
            Self::AnyList | Self::ListNotOlderThan | Self::MostRecentList | Self::OtherList
        )
    }

    /// Whether the body of a response, and not the events of a watch, shows a version.
    pub fn shows_version(self) -> bool {
        !matches!(
            self,
            Self::AnyWatchList | Self::AnyWatch | Self::WatchFrom | Self::MostRecentWatch
        )
    }

    /// Whether the version of a response is one that the watch cache of the endpoint has reached.
    pub fn shows_cache(self) -> bool {
        matches!(
            self,
            Self::AnyList | Self::AnyGet | Self::ListNotOlderThan | Self::GetNotOlderThan
        )
    }

    /// Whether it succeeds only if the apiserver reaches etcd. The cache answers a most-recent list, too, but asks etcd for
    /// the revision first (apiserver, `storage/cacher/cacher.go`, `GetList`).
    pub fn needs_etcd(self) -> bool {
        matches!(self, Self::MostRecentGet | Self::MostRecentList | Self::Write)
    }

    /// The version that a watch cache must have reached to answer the request; 0 for any. The bookmarks of a watch say
    /// nothing about objects that its selector excludes, so they count for lists and watches only.
    pub fn needed(self, floor: FloorVersions) -> u64 {
        if self == Self::AnyGet { floor.objects.max(floor.lists) } else { floor.highest() }
    }

    /// What is asked of an endpoint that may not have reached these versions of the floor.
    ///
    /// A cache reaches the version of an object by an event, but that of a list or a bookmark perhaps only later. A GET
    /// reads one key of etcd then. A list that read the most recent state from etcd would raise the floor, and so the
    /// next one would have to do the same.
    pub fn asked(self, floor: FloorVersions, lists: ListOrigin) -> Asked {
        let needed = self.needed(floor);
        match (self, lists) {
            _ if needed <= floor.objects => Asked::NotOlderThan(needed),
            (Self::AnyList, ListOrigin::EtcdLately) => Asked::Exact(needed),
            (Self::AnyList | Self::AnyWatchList, ListOrigin::Etcd) => {
                Asked::NotOlderThan(floor.objects)
            }
            _ => Asked::MostRecent(needed),
        }
    }

    /// The head that asks a server of this version for this; `None` if the request needs no change. `resource`: group
    /// and resource.
    pub fn head(
        self,
        head: &Request<()>,
        asked: Asked,
        (server, resource): (Option<MinorVersion>, &str),
    ) -> Option<Request<()>> {
        let keeps_limit = keeps_limit(server, resource);
        let query = self.query(head.uri().query().unwrap_or_default(), asked, keeps_limit)?;
        let mut changed = head.clone();
        *changed.uri_mut() = with_query(head.uri(), &query);
        Some(changed)
    }

    /// The query with the floor; `None` if the form takes none. Without `keeps_limit` a list loses its limit, which
    /// would make the server read it from etcd.
    fn query(self, query: &str, asked: Asked, keeps_limit: bool) -> Option<String> {
        let version = asked.version().to_string();
        let version = Some(version.as_str());
        let mut changes: &[(&str, Option<&str>)] = match (self, asked) {
            (_, Asked::NotOlderThan(0)) => return None,
            (Self::AnyList, Asked::NotOlderThan(_)) => &[
                ("resourceVersion", version),
                ("resourceVersionMatch", Some("NotOlderThan")),
                ("limit", None),
            ],
            (Self::AnyList, Asked::MostRecent(_)) => {
                &[("resourceVersion", None), ("resourceVersionMatch", None), ("limit", None)]
            }
            (Self::AnyList, Asked::Exact(_)) => {
                &[("resourceVersion", version), ("resourceVersionMatch", Some("Exact"))]
            }
            (Self::AnyGet | Self::AnyWatchList, Asked::NotOlderThan(_)) => {
                &[("resourceVersion", version)]
            }
            (Self::AnyGet | Self::AnyWatchList, Asked::MostRecent(_)) => {
                &[("resourceVersion", None)]
            }
            _ => return None,
        };
        if keeps_limit && let [rest @ .., ("limit", None)] = changes {
            changes = rest;
        }
        Some(rewrite(query, changes))
    }
}

/// The first version that answers most-recent lists from its cache by default (`ConsistentListFromCache`), and lists
/// not older than a version also if they have a limit (apiserver, `storage/cacher/cacher.go`, `shouldDelegateList`).
pub const LISTS_FROM_CACHE: Option<MinorVersion> = MinorVersion::new(1, 31);

/// Whether a list with a floor keeps its limit at a server of this version. Older ones answer `resourceVersion=0` from
/// the cache whatever the limit is, and read a list with a limit and a version from etcd. Events have no watch cache
/// (kube-apiserver, `pkg/registry/core/rest`, `DefaultWatchCacheSizes`): without the limit, etcd would send all of them
/// at once.
fn keeps_limit(server: Option<MinorVersion>, resource: &str) -> bool {
    matches!(resource, "events" | "events.k8s.io/events") || server >= LISTS_FROM_CACHE
}

/// The `resourceVersion` of a request, if it is a number above 0.
pub fn version(info: &RequestInfo) -> Option<u64> {
    as_u64(first_value(info.query(), "resourceVersion")?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::path_prefix::PathPrefix;
    use ReadForm::*;
    use http::Method;

    fn form(method: &Method, target: &str) -> Option<ReadForm> {
        let request = Request::builder().method(method).uri(target).body(()).unwrap();
        ReadForm::of(&RequestInfo::new(&request.into_parts().0, &PathPrefix::default()))
    }

    #[test]
    fn form_follows_the_table_of_kubernetes() {
        let get = |target| form(&Method::GET, target);
        for (target, expected) in [
            ("/api/v1/pods?resourceVersion=0", Some(AnyList)),
            ("/api/v1/pods?limit=500&resourceVersion=0", Some(AnyList)),
            ("/api/v1/pods?resourceVersion=0&resourceVersionMatch=NotOlderThan", Some(AnyList)),
            ("/api/v1/pods?resourceVersion=0&resourceVersionMatch=Exact", Some(OtherList)),
            ("/api/v1/pods?resourceVersion=0&continue=abc", Some(OtherList)),
            ("/api/v1/pods", Some(MostRecentList)),
            ("/api/v1/pods?resourceVersion=&limit=500", Some(MostRecentList)),
            ("/api/v1/pods?limit=500&continue=abc", Some(OtherList)),
            ("/api/v1/pods?resourceVersion=7", Some(ListNotOlderThan)),
            ("/api/v1/pods?resourceVersion=7&limit=0", Some(ListNotOlderThan)),
            ("/api/v1/pods?resourceVersion=7&limit=500", Some(OtherList)),
            (
                "/api/v1/pods?resourceVersion=7&limit=5&resourceVersionMatch=NotOlderThan",
                Some(ListNotOlderThan),
            ),
            ("/api/v1/pods?resourceVersion=7&resourceVersionMatch=Exact", Some(OtherList)),
            ("/api/v1/pods?resourceVersion=x", Some(OtherList)),
            ("/api/v1/namespaces/a/pods/p?resourceVersion=0", Some(AnyGet)),
            ("/api/v1/namespaces/a/pods/p?resourceVersion=7", Some(GetNotOlderThan)),
            ("/api/v1/namespaces/a/pods/p", Some(MostRecentGet)),
            ("/api/v1/pods?watch=1&resourceVersion=7", Some(WatchFrom)),
            ("/api/v1/pods?watch=1&resourceVersion=0", Some(AnyWatch)),
            ("/api/v1/pods?watch=1", Some(AnyWatch)),
            ("/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersion=0", Some(AnyWatchList)),
            ("/api/v1/pods?watch=1&sendInitialEvents=true", Some(MostRecentWatch)),
            ("/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersion=7", Some(WatchFrom)),
            ("/api/v1/pods?watch=1&sendInitialEvents=false", Some(MostRecentWatch)),
            ("/api/v1/namespaces/a/pods/p/log", None),
        ] {
            assert_eq!(get(target), expected, "{target}");
        }
        for (method, target, expected) in [
            (Method::POST, "/api/v1/namespaces/a/pods", Some(Write)),
            (Method::PUT, "/api/v1/nodes/n/status", Some(Write)),
            (Method::PATCH, "/api/v1/nodes/n", Some(Write)),
            (Method::DELETE, "/api/v1/nodes/n", Some(Write)),
            (Method::DELETE, "/api/v1/nodes", Some(OtherList)),
            (Method::POST, "/api/v1/namespaces/a/pods/p/binding", Some(Write)),
            (Method::POST, "/api/v1/namespaces/a/pods/p/eviction", Some(Write)),
            (Method::POST, "/api/v1/namespaces/a/pods?dryRun=All", None),
            (Method::POST, "/api/v1/namespaces/a/pods/p/eviction?dryRun=All", None),
        ] {
            assert_eq!(form(&method, target), expected, "{method} {target}");
        }
    }

    #[test]
    fn lists_come_from_the_cache_of_newer_servers_until_answers_show_another_origin() {
        let old = MinorVersion::new(1, 30);
        for (server, from_etcd, is_recent, expected) in [
            (None, false, true, ListOrigin::Etcd),
            (old, false, true, ListOrigin::Etcd),
            (LISTS_FROM_CACHE, false, true, ListOrigin::Cache),
            (LISTS_FROM_CACHE, true, true, ListOrigin::EtcdLately),
            (LISTS_FROM_CACHE, true, false, ListOrigin::Etcd),
        ] {
            assert_eq!(ListOrigin::of(server, from_etcd, || is_recent), expected, "{server:?}");
        }
    }

    #[test]
    fn what_is_asked_depends_on_where_lists_come_from() {
        use Asked::{Exact, MostRecent, NotOlderThan};
        use ListOrigin::{Cache, Etcd, EtcdLately};
        let seen = FloorVersions { objects: 12, lists: 15, bookmarks: 20 };
        let lists = FloorVersions { objects: 0, ..seen };
        let objects = FloorVersions { objects: 30, ..seen };
        for (form, floor, origin, expected) in [
            (AnyList, seen, Cache, MostRecent(20)),
            (AnyList, seen, EtcdLately, Exact(20)),
            (AnyList, seen, Etcd, NotOlderThan(12)),
            (AnyList, lists, Etcd, NotOlderThan(0)),
            (AnyList, objects, Cache, NotOlderThan(30)),
            (AnyList, objects, EtcdLately, NotOlderThan(30)),
            (AnyList, objects, Etcd, NotOlderThan(30)),
            (AnyWatchList, seen, Cache, MostRecent(20)),
            (AnyWatchList, seen, EtcdLately, MostRecent(20)),
            (AnyWatchList, seen, Etcd, NotOlderThan(12)),
            (AnyGet, seen, Etcd, MostRecent(15)),
            (AnyGet, objects, Cache, NotOlderThan(30)),
        ] {
            assert_eq!(form.asked(floor, origin), expected, "{form:?} {floor:?} {origin:?}");
        }
    }

    #[test]
    fn query_with_a_floor_changes_only_the_version() {
        let (objects, lists) = (Asked::NotOlderThan(12), Asked::MostRecent(15));
        for (form, query, asked, expected) in [
            (
                AnyList,
                "limit=500&resourceVersion=0&labelSelector=a%3Db",
                objects,
                Some("resourceVersion=12&labelSelector=a%3Db&resourceVersionMatch=NotOlderThan"),
            ),
            (
                AnyList,
                "resourceVersion=0&resourceVersionMatch=NotOlderThan",
                objects,
                Some("resourceVersion=12&resourceVersionMatch=NotOlderThan"),
            ),
            (
                AnyList,
                "labelSelector=a&limit=5&resourceVersion=0&resourceVersionMatch=NotOlderThan",
                lists,
                Some("labelSelector=a"),
            ),
            (
                AnyList,
                "labelSelector=a&limit=5&resourceVersion=0",
                Asked::Exact(15),
                Some("labelSelector=a&limit=5&resourceVersion=15&resourceVersionMatch=Exact"),
            ),
            (AnyGet, "resourceVersion=0", objects, Some("resourceVersion=12")),
            (AnyGet, "resourceVersion=0&pretty=1", lists, Some("pretty=1")),
            (
                AnyWatchList,
                "watch=1&resourceVersion=0&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
                objects,
                Some(
                    "watch=1&resourceVersion=12&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
                ),
            ),
            (AnyWatch, "watch=1&resourceVersion=0", objects, None),
            (AnyList, "resourceVersion=0", Asked::NotOlderThan(0), None),
            (MostRecentGet, "", objects, None),
            (WatchFrom, "resourceVersion=7", objects, None),
        ] {
            assert_eq!(form.query(query, asked, false).as_deref(), expected, "{form:?} {query}");
        }
    }

    #[test]
    fn query_keeps_the_limit_where_it_does_not_lead_to_etcd() {
        let (objects, lists) = (Asked::NotOlderThan(12), Asked::MostRecent(15));
        for (form, query, asked, expected) in [
            (
                AnyList,
                "limit=500&resourceVersion=0",
                objects,
                "limit=500&resourceVersion=12&resourceVersionMatch=NotOlderThan",
            ),
            (AnyList, "resourceVersion=0&limit=500", lists, "limit=500"),
            (AnyGet, "resourceVersion=0", objects, "resourceVersion=12"),
        ] {
            assert_eq!(form.query(query, asked, true).as_deref(), Some(expected), "{query}");
        }
    }
}
