//! One read that must not go back in time, over all its attempts.

use http::StatusCode;

use super::form::{Asked, FloorVersions, LISTS_FROM_CACHE, ListOrigin, ReadForm};
use crate::kubernetes_version::MinorVersion;
use crate::pool::EndpointKey;
use crate::request::info::{group_of, is_built_in_group};

/// What is known of an endpoint, for the resource of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointCache {
    /// The endpoint.
    pub endpoint: EndpointKey,
    /// The version of its apiserver.
    pub server: Option<MinorVersion>,
    /// The highest version that its watch cache has shown; 0 if it has shown none.
    pub reached: u64,
    /// The highest version of its most-recent lists; 0 if there was none. Its cache has reached it unless the server
    /// read the list from etcd.
    pub list: u64,
    /// Where its most-recent lists come from.
    pub lists: ListOrigin,
}

/// A read, or a write that shows a version, and what was asked and answered about it.
#[derive(Debug, Clone)]
pub struct ConsistentRead {
    form: ReadForm,
    /// The floor of the client when the request arrived. What concurrent requests show does not count for it.
    floor: FloorVersions,
    /// Whether it is a list of any version that kube-apiserver itself serves. The version of a custom one may come only
    /// at its end.
    is_built_in_list: bool,
    /// Whether the floor is not enforced any more, because no endpoint has reached it.
    given_up: bool,
    /// Whether another endpoint was asked because one had not reached the version.
    asked_elsewhere: bool,
    /// The highest version that an endpoint reported which had not reached the floor.
    highest_reached: u64,
    /// What was asked of endpoints that may not have reached the floor. After several, the form that shows least of a
    /// cache.
    asked: Asked,
    /// The last endpoint whose cache was asked.
    cache_read: Option<CacheRead>,
    /// The version of the list that was compared with the floor, and is not older.
    compared: Option<u64>,
}

/// A list that an endpoint answers from its cache.
#[derive(Debug, Clone, Copy)]
struct CacheRead {
    endpoint: EndpointKey,
    /// See [`EndpointCache::list`].
    list: u64,
    /// Whether the request was sent unchanged because of that version.
    expected: bool,
}

/// How a request continues after an endpoint had not reached its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterNotReached {
    /// It is sent with the floor, to any endpoint: the one that was asked got it unchanged.
    AskAgain,
    /// It is sent to another endpoint.
    AskOther,
    /// It is sent as the client sent it, to any endpoint, and the floors of all clients are lowered to
    /// [`ConsistentRead::highest_reached`].
    SendOriginal,
    /// The client gets the response.
    Respond,
}

/// What the version of a response shows of its endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shows {
    /// Its cache has reached the version.
    Cache,
    /// Its cache has reached the version, unless the server read the list from etcd.
    MostRecentList,
    /// Nothing.
    Nothing,
}

impl ConsistentRead {
    /// A read of this form. `floor`: what its client has seen of `resource`, which is group and resource.
    pub fn new(form: ReadForm, floor: FloorVersions, resource: &str) -> Self {
        Self {
            form,
            floor,
            is_built_in_list: form == ReadForm::AnyList && is_built_in_group(group_of(resource)),
            given_up: false,
            asked_elsewhere: false,
            highest_reached: 0,
            asked: Asked::NotOlderThan(0),
            cache_read: None,
            compared: None,
        }
    }

    /// What the request asks for.
    pub fn form(&self) -> ReadForm {
        self.form
    }

    /// The version that an endpoint should have reached; `None` if any will do.
    pub fn needed(&self) -> Option<u64> {
        (self.has_floor() && !self.given_up).then(|| self.form.needed(self.floor))
    }

    /// Form and floor of a request that any version would answer, while it has a floor.
    pub fn at_start(&self) -> Option<(ReadForm, FloorVersions)> {
        self.needed().map(|_| (self.form, self.floor))
    }

    /// Whether the client accepts any version, and has seen one: a rejection of the floor means nothing to it.
    pub fn has_floor(&self) -> bool {
        self.form.takes_any_version() && self.form.needed(self.floor) > 0
    }

    /// What is asked of an endpoint; `None` if it gets the request unchanged, because it is known to have reached the
    /// floor, or its list is compared with that.
    pub fn ask(&mut self, cache: &EndpointCache) -> Option<Asked> {
        let needed = self.needed()?;
        if cache.reached >= needed {
            return None;
        }
        let expected =
            self.is_compared() && cache.list >= needed && cache.lists == ListOrigin::Cache;
        let asked = self.form.asked(self.floor, cache.lists);
        let from_cache = expected || matches!(asked, Asked::NotOlderThan(_));
        let (endpoint, list) = (cache.endpoint, cache.list);
        self.cache_read = from_cache.then_some(CacheRead { endpoint, list, expected });
        if expected {
            return None;
        }
        self.asked = self.asked.max(asked);
        Some(asked)
    }

    /// Whether the version of the answer is compared with the floor before it is forwarded, and another answer can be
    /// asked for.
    fn is_compared(&self) -> bool {
        self.is_built_in_list && !self.asked_elsewhere
    }

    /// Whether the version of a response with this status is to be compared with the floor.
    pub fn compares(&self, status: StatusCode) -> bool {
        status == StatusCode::OK && self.form.is_list() && self.needed().is_some()
    }

    /// Whether a list of this version from `endpoint` shows that the servers read most-recent lists from etcd: its
    /// cache is older than its most-recent list before.
    pub fn shows_lists_from_etcd(&self, version: u64, endpoint: EndpointKey) -> bool {
        self.cache_read.is_some_and(|read| read.endpoint == endpoint && version < read.list)
    }

    /// Whether a list of this version is older than the floor ([`Self::compares`]).
    pub fn is_older(&mut self, version: u64, cache: &EndpointCache) -> bool {
        let is_older = version < self.form.asked(self.floor, cache.lists).version();
        if !is_older {
            self.compared = Some(version);
        }
        is_older
    }

    /// The oldest version that a list with this status may have which was not compared before its head is forwarded;
    /// `None` if it needs no comparison.
    pub fn oldest(&self, status: StatusCode, cache: impl FnOnce() -> EndpointCache) -> Option<u64> {
        let compares = self.compares(status) && self.compared.is_none();
        compares.then(|| self.form.asked(self.floor, cache().lists).version())
    }

    /// The version of a list that was compared, and is not older.
    pub fn compared(&self) -> Option<u64> {
        self.compared
    }

    /// Decides how the request continues after an endpoint that has reached only `version`. `other_ready`: there is a
    /// ready endpoint that was not asked, and another attempt is left after the next.
    ///
    /// | sent | condition | it continues |
    /// |---|---|---|
    /// | unchanged, because the list was expected to have reached the floor | | with the floor, at any endpoint |
    /// | with the floor | another endpoint is ready | at another endpoint |
    /// | with the floor | none is ready | without the floor |
    /// | with the client's version | the first time, and another endpoint is ready | at another endpoint |
    /// | with the client's version | otherwise | not: the client gets the response |
    pub fn not_reached(&mut self, version: u64, other_ready: bool) -> AfterNotReached {
        self.highest_reached = self.highest_reached.max(version);
        let was_expected = self.cache_read.take().is_some_and(|read| read.expected);
        let is_first = !std::mem::replace(&mut self.asked_elsewhere, true);
        let after = match (self.needed().is_some(), other_ready) {
            _ if was_expected => AfterNotReached::AskAgain,
            (true, true) => AfterNotReached::AskOther,
            (true, false) => AfterNotReached::SendOriginal,
            (false, true) if is_first => AfterNotReached::AskOther,
            (false, _) => AfterNotReached::Respond,
        };
        self.given_up |= after == AfterNotReached::SendOriginal;
        after
    }

    /// The highest version that an endpoint reported which had not reached the floor; 0 if none has.
    pub fn highest_reached(&self) -> u64 {
        self.highest_reached
    }

    /// What the version of a successful response of such a server shows of its cache; `None` if the response has no
    /// version that counts for the client.
    pub fn shows(&self, server: Option<MinorVersion>) -> Option<Shows> {
        let most_recent = self.form == ReadForm::MostRecentList;
        // Such a list may be from etcd, and its version one that a cache reaches only later.
        let is_from_etcd = server < LISTS_FROM_CACHE;
        if !self.form.shows_version()
            || is_from_etcd && (most_recent || self.form == ReadForm::OtherList)
        {
            return None;
        }
        Some(match self.asked {
            _ if most_recent => Shows::MostRecentList,
            _ if !self.form.shows_cache() => Shows::Nothing,
            Asked::NotOlderThan(_) => Shows::Cache,
            Asked::MostRecent(_) if self.form.is_list() => Shows::MostRecentList,
            Asked::MostRecent(_) | Asked::Exact(_) => Shows::Nothing,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AfterNotReached::{AskAgain, AskOther, Respond, SendOriginal};
    use ReadForm::{AnyGet, AnyList, AnyWatch, ListNotOlderThan, MostRecentList, OtherList, Write};

    const SEEN: FloorVersions = FloorVersions { objects: 12, lists: 15, bookmarks: 0 };
    const OLD: Option<MinorVersion> = MinorVersion::new(1, 30);

    fn read(form: ReadForm) -> ConsistentRead {
        ConsistentRead::new(form, SEEN, "pods")
    }

    /// An endpoint whose cache has shown `reached`, and whose most-recent lists `list`.
    fn cache(reached: u64, list: u64) -> EndpointCache {
        let (endpoint, lists) = (EndpointKey(1), ListOrigin::Cache);
        EndpointCache { endpoint, server: LISTS_FROM_CACHE, reached, list, lists }
    }

    #[test]
    fn endpoint_is_asked_for_the_floor_unless_it_has_shown_it() {
        for (form, resource, reached, list, expected) in [
            (AnyList, "pods", 14, 0, Some(Asked::MostRecent(15))),
            (AnyList, "pods", 15, 0, None),
            (AnyGet, "pods", 14, 0, Some(Asked::MostRecent(15))),
            // Its list is compared with the floor.
            (AnyList, "pods", 14, 15, None),
            (AnyGet, "pods", 14, 15, Some(Asked::MostRecent(15))),
            // The version of a custom list may come only at its end.
            (AnyList, "example.com/things", 14, 15, Some(Asked::MostRecent(15))),
            (MostRecentList, "pods", 0, 0, None),
            (ListNotOlderThan, "pods", 0, 0, None),
            (Write, "pods", 0, 0, None),
        ] {
            let mut read = ConsistentRead::new(form, SEEN, resource);
            let asked = read.ask(&cache(reached, list));
            assert_eq!(asked, expected, "{form:?} of {resource} at {reached}, list {list}");
        }
        // Lists come from etcd: the same list says nothing about the cache.
        let from_etcd = EndpointCache { lists: ListOrigin::EtcdLately, ..cache(14, 15) };
        assert_eq!(read(AnyList).ask(&from_etcd), Some(Asked::Exact(15)));
        let mut without = ConsistentRead::new(AnyList, FloorVersions::default(), "pods");
        assert_eq!((without.needed(), without.ask(&cache(0, 0))), (None, None));
    }

    #[test]
    fn request_continues_after_an_endpoint_without_its_version_by_the_table() {
        // The form, the version of the most-recent list of each endpoint, and for each that is asked whether another
        // one is ready, and how the request continues.
        for (form, list, steps) in [
            (AnyList, 15, &[(false, AskAgain), (true, AskOther), (false, SendOriginal)][..]),
            (AnyList, 15, &[(true, AskAgain), (false, SendOriginal), (true, Respond)]),
            (AnyList, 0, &[(true, AskOther), (true, AskOther), (false, SendOriginal)]),
            (AnyGet, 0, &[(false, SendOriginal), (false, Respond)]),
            (AnyWatch, 0, &[(true, AskOther), (false, SendOriginal)]),
            (ListNotOlderThan, 0, &[(true, AskOther), (true, Respond)]),
            (ListNotOlderThan, 0, &[(false, Respond)]),
        ] {
            let mut read = read(form);
            let had_floor = read.has_floor();
            for (round, &(other_ready, expected)) in steps.iter().enumerate() {
                read.ask(&cache(0, list));
                assert_eq!(read.not_reached(7, other_ready), expected, "{form:?} {round}");
            }
            assert_eq!(read.has_floor(), had_floor, "{form:?}");
            assert_eq!(read.highest_reached(), 7);
        }
    }

    #[test]
    fn given_up_floor_is_asked_of_no_endpoint_and_compared_with_no_list() {
        let mut read = read(AnyList);
        assert!(read.compares(StatusCode::OK) && read.at_start().is_some());
        assert_eq!(read.not_reached(7, false), SendOriginal);
        assert_eq!((read.needed(), read.ask(&cache(0, 0)), read.at_start()), (None, None, None));
        assert!(!read.compares(StatusCode::OK) && read.has_floor());
        assert_eq!(read.oldest(StatusCode::OK, || cache(0, 0)), None);
    }

    #[test]
    fn list_is_compared_with_what_would_be_asked() {
        let (old, at) = (StatusCode::NOT_FOUND, cache(0, 20));
        let mut read = read(AnyList);
        assert_eq!(read.oldest(old, || at), None);
        assert_eq!(read.oldest(StatusCode::OK, || at), Some(15));
        assert!(read.is_older(14, &at) && read.compared().is_none());
        assert!(!read.is_older(15, &at));
        assert_eq!((read.compared(), read.oldest(StatusCode::OK, || at)), (Some(15), None));
        // The list of a server that reads lists from etcd need not have the version of a list.
        let etcd = EndpointCache { lists: ListOrigin::Etcd, ..at };
        assert!(!read.is_older(12, &etcd) && read.is_older(11, &etcd));
    }

    #[test]
    fn cache_that_is_older_than_a_list_before_shows_that_lists_come_from_etcd() {
        let mut read = read(AnyList);
        assert!(!read.shows_lists_from_etcd(0, EndpointKey(1)), "it was not asked");
        assert_eq!(read.ask(&cache(0, 20)), None);
        assert!(read.shows_lists_from_etcd(19, EndpointKey(1)));
        assert!(!read.shows_lists_from_etcd(20, EndpointKey(1)));
        assert!(!read.shows_lists_from_etcd(19, EndpointKey(2)), "another endpoint");
        // A most-recent list says nothing about the cache.
        assert_eq!(read.ask(&cache(0, 14)), Some(Asked::MostRecent(15)));
        assert!(!read.shows_lists_from_etcd(13, EndpointKey(1)));
    }

    #[test]
    fn shows_follows_form_server_and_what_was_asked() {
        for (form, server, asked, expected) in [
            (AnyList, LISTS_FROM_CACHE, None, Some(Shows::Cache)),
            (AnyList, LISTS_FROM_CACHE, Some(ListOrigin::Cache), Some(Shows::MostRecentList)),
            (AnyList, LISTS_FROM_CACHE, Some(ListOrigin::EtcdLately), Some(Shows::Nothing)),
            (AnyList, OLD, Some(ListOrigin::Etcd), Some(Shows::Cache)),
            (AnyGet, LISTS_FROM_CACHE, Some(ListOrigin::Cache), Some(Shows::Nothing)),
            (MostRecentList, LISTS_FROM_CACHE, None, Some(Shows::MostRecentList)),
            (MostRecentList, OLD, None, None),
            (MostRecentList, None, None, None),
            (OtherList, LISTS_FROM_CACHE, None, Some(Shows::Nothing)),
            (OtherList, OLD, None, None),
            (Write, OLD, None, Some(Shows::Nothing)),
            (AnyWatch, LISTS_FROM_CACHE, None, None),
        ] {
            let mut read = read(form);
            if let Some(lists) = asked {
                read.ask(&EndpointCache { server, lists, ..cache(0, 0) });
            }
            assert_eq!(read.shows(server), expected, "{form:?} {server:?} {asked:?}");
        }
    }
}
