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
    /// Whether its connections may reach several apiservers. Then a version that one connection has shown says nothing
    /// about the cache that the next one reads.
    pub is_shared: bool,
}

impl EndpointCache {
    /// Whether each connection to the endpoint reads a cache that has reached `version`.
    fn has_reached(&self, version: u64) -> bool {
        !self.is_shared && self.reached >= version
    }

    /// The highest version that a list of the endpoint has shown, so that its next one is probably not older.
    fn expected_of_list(&self) -> u64 {
        if self.is_shared { self.list.max(self.reached) } else { self.list }
    }
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
    enforcement: Enforcement,
    /// Number of answers by an apiserver that was asked for the floor and had not reached it.
    denials: u32,
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

/// How the floor of a read is enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Enforcement {
    /// A cache that has reached it is asked.
    Cache,
    /// The most recent state is asked: no cache that was asked has reached it.
    MostRecent,
    /// Not any more: nothing that was asked has reached it.
    GivenUp,
}

/// Where else a read can be sent after an apiserver that has not reached its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unasked {
    /// A ready endpoint that was not asked.
    Endpoint,
    /// Another connection to the same endpoint, which may reach another apiserver.
    Connection,
    /// No endpoint, but behind an address of the upstream there may be an apiserver that is no endpoint.
    Hidden,
    /// Nothing.
    Nothing,
}

/// Number of connections to an endpoint of several apiservers that are asked for the floor. kube-apiserver waits 3 s for
/// its cache before it answers that it has not reached it, and clients wait 10 s.
const MAX_DENIALS: u32 = 2;

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
    /// It is sent with the floor to another endpoint, or on another connection ([`Unasked`]).
    AskOther,
    /// It is sent as a most-recent read, which is not older than the floor unless etcd has lost that version.
    AskMostRecent,
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
            enforcement: Enforcement::Cache,
            denials: 0,
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
        let is_enforced = self.has_floor() && self.enforcement != Enforcement::GivenUp;
        is_enforced.then(|| self.form.needed(self.floor))
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
        if self.enforcement == Enforcement::MostRecent {
            self.cache_read = None;
            self.asked = self.asked.max(Asked::MostRecent(needed));
            return Some(Asked::MostRecent(needed));
        }
        if cache.has_reached(needed) {
            return None;
        }
        let expected = self.is_compared()
            && cache.expected_of_list() >= needed
            && cache.lists == ListOrigin::Cache;
        let asked = self.form.asked(self.floor, cache.lists);
        let from_cache = expected || matches!(asked, Asked::NotOlderThan(_));
        // The list of another apiserver shows nothing about this one.
        let list = if cache.is_shared { 0 } else { cache.list };
        let endpoint = cache.endpoint;
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
        let is_older = version < self.oldest_accepted(cache);
        if !is_older {
            self.compared = Some(version);
        }
        is_older
    }

    /// The oldest version that a list with this status may have which was not compared before its head is forwarded;
    /// `None` if it needs no comparison.
    pub fn oldest(&self, status: StatusCode, cache: impl FnOnce() -> EndpointCache) -> Option<u64> {
        let compares = self.compares(status) && self.compared.is_none();
        compares.then(|| self.oldest_accepted(&cache()))
    }

    fn oldest_accepted(&self, cache: &EndpointCache) -> u64 {
        match self.enforcement {
            Enforcement::MostRecent => self.form.needed(self.floor),
            Enforcement::Cache | Enforcement::GivenUp => {
                self.form.asked(self.floor, cache.lists).version()
            }
        }
    }

    /// The version of a list that was compared, and is not older.
    pub fn compared(&self) -> Option<u64> {
        self.compared
    }

    /// Decides how the request continues after an apiserver that has reached only `version`. `attempts_left`: how often
    /// it may be sent. The first row that applies decides:
    ///
    /// | sent | condition | it continues |
    /// |---|---|---|
    /// | unchanged, because the list was expected to have reached the floor | | with the floor, at any endpoint |
    /// | with the floor | another endpoint is ready, and an attempt follows the next | at another endpoint |
    /// | with the floor | another connection may reach another apiserver, fewer than [`MAX_DENIALS`] answers, and two attempts follow | on another connection |
    /// | with the floor | an apiserver may not have been asked; an attempt follows the next | most recent |
    /// | the same | the same, but the attempts are used up | not: the client gets the response, after which it repeats the request |
    /// | with the floor, or most recent | otherwise | without the floor |
    /// | with the client's version | the first time, and another endpoint or connection is left | there |
    /// | with the client's version | otherwise | not: the client gets the response |
    ///
    /// So the floor is not lowered because of what the caches behind one address have reached, but only after a
    /// most-recent list was older, too. The response to a most-recent GET is used as it is: the version of an object
    /// says nothing about that of the cache or of etcd.
    pub fn not_reached(
        &mut self,
        version: u64,
        unasked: Unasked,
        attempts_left: u32,
    ) -> AfterNotReached {
        self.highest_reached = self.highest_reached.max(version);
        let was_expected = self.cache_read.take().is_some_and(|read| read.expected);
        let is_first = !std::mem::replace(&mut self.asked_elsewhere, true);
        self.denials += u32::from(!was_expected);
        let asks_cache = self.enforcement == Enforcement::Cache;
        let may_be_hidden = matches!(unasked, Unasked::Connection | Unasked::Hidden);
        let after = match (self.needed().is_some(), unasked) {
            _ if was_expected => AfterNotReached::AskAgain,
            (true, Unasked::Endpoint) if asks_cache && attempts_left >= 2 => {
                AfterNotReached::AskOther
            }
            (true, Unasked::Connection)
                if asks_cache && self.denials < MAX_DENIALS && attempts_left >= 3 =>
            {
                AfterNotReached::AskOther
            }
            (true, _) if asks_cache && may_be_hidden => {
                if attempts_left >= 2 {
                    AfterNotReached::AskMostRecent
                } else {
                    AfterNotReached::Respond
                }
            }
            (true, _) => AfterNotReached::SendOriginal,
            (false, Unasked::Endpoint | Unasked::Connection) if is_first && attempts_left >= 2 => {
                AfterNotReached::AskOther
            }
            (false, _) => AfterNotReached::Respond,
        };
        match after {
            AfterNotReached::AskMostRecent => self.enforcement = Enforcement::MostRecent,
            AfterNotReached::SendOriginal => self.enforcement = Enforcement::GivenUp,
            AfterNotReached::AskAgain | AfterNotReached::AskOther | AfterNotReached::Respond => {}
        }
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
    use crate::request::retry::ATTEMPTS;
    use AfterNotReached::{AskAgain, AskMostRecent, AskOther, Respond, SendOriginal};
    use ReadForm::{
        AnyGet, AnyList, AnyWatch, AnyWatchList, GetNotOlderThan, ListNotOlderThan, MostRecentList,
        OtherList, Write,
    };
    use Unasked::{Connection, Endpoint, Hidden, Nothing};

    const SEEN: FloorVersions = FloorVersions { objects: 12, lists: 15, bookmarks: 0 };
    const OLD: Option<MinorVersion> = MinorVersion::new(1, 30);

    fn read(form: ReadForm) -> ConsistentRead {
        ConsistentRead::new(form, SEEN, "pods")
    }

    /// An endpoint whose cache has shown `reached`, and whose most-recent lists `list`.
    fn cache(reached: u64, list: u64) -> EndpointCache {
        let (endpoint, lists) = (EndpointKey(1), ListOrigin::Cache);
        EndpointCache { endpoint, server: LISTS_FROM_CACHE, reached, list, lists, is_shared: false }
    }

    /// [`cache`] of an endpoint that may lead to several apiservers.
    fn shared(reached: u64, list: u64) -> EndpointCache {
        EndpointCache { is_shared: true, ..cache(reached, list) }
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

    /// The body of a GET has the version of the object, so it cannot be compared with the floor. The apiserver compares
    /// it: `resourceVersion` is the version that its cache must have reached.
    #[test]
    fn get_and_list_at_a_shared_endpoint_are_asked_for_the_floor_whatever_a_connection_has_shown() {
        let objects = FloorVersions { objects: 15, ..FloorVersions::default() };
        for (form, resource, floor, cache, expected) in [
            (AnyGet, "pods", objects, shared(15, 15), Some(Asked::NotOlderThan(15))),
            (AnyGet, "pods", SEEN, shared(15, 15), Some(Asked::MostRecent(15))),
            (AnyGet, "pods", objects, cache(15, 15), None),
            (AnyList, "example.com/things", objects, shared(15, 15), Some(Asked::NotOlderThan(15))),
            (AnyList, "pods", objects, shared(14, 14), Some(Asked::NotOlderThan(15))),
            // Its version is compared with the floor before it is forwarded.
            (AnyList, "pods", objects, shared(15, 0), None),
            (AnyList, "pods", objects, shared(0, 15), None),
            (AnyWatchList, "pods", objects, shared(15, 15), Some(Asked::NotOlderThan(15))),
        ] {
            let mut read = ConsistentRead::new(form, floor, resource);
            assert_eq!(read.ask(&cache), expected, "{form:?} of {resource} at {cache:?}");
        }
        // A list of another apiserver behind the address says nothing about where this one reads lists.
        let mut read = read(AnyList);
        assert_eq!(read.ask(&shared(0, 20)), None);
        assert!(!read.shows_lists_from_etcd(13, EndpointKey(1)));
    }

    #[test]
    fn request_continues_after_an_endpoint_without_its_version_by_the_table() {
        // The form, the version of the most-recent list of each endpoint, and for each answer what was not asked and how
        // the request continues.
        for (form, list, steps) in [
            (
                AnyList,
                15,
                &[(Nothing, AskAgain), (Endpoint, AskOther), (Nothing, SendOriginal)][..],
            ),
            (AnyList, 15, &[(Endpoint, AskAgain), (Nothing, SendOriginal), (Endpoint, Respond)]),
            (AnyList, 0, &[(Endpoint, AskOther), (Endpoint, AskOther), (Nothing, SendOriginal)]),
            (AnyGet, 0, &[(Nothing, SendOriginal), (Nothing, Respond)]),
            (AnyWatch, 0, &[(Endpoint, AskOther), (Nothing, SendOriginal)]),
            (ListNotOlderThan, 0, &[(Endpoint, AskOther), (Endpoint, Respond)]),
            (ListNotOlderThan, 0, &[(Nothing, Respond)]),
            // Behind one address.
            (
                AnyList,
                0,
                &[(Connection, AskOther), (Connection, AskMostRecent), (Connection, SendOriginal)],
            ),
            (AnyGet, 0, &[(Connection, AskOther), (Connection, AskMostRecent)]),
            (AnyList, 15, &[(Connection, AskAgain), (Connection, AskOther)]),
            (AnyList, 0, &[(Endpoint, AskOther), (Hidden, AskMostRecent), (Hidden, SendOriginal)]),
            // The endpoints of two addresses: each is asked before a further connection.
            (AnyList, 0, &[(Endpoint, AskOther), (Connection, AskMostRecent)]),
            (GetNotOlderThan, 0, &[(Connection, AskOther), (Connection, Respond)]),
            (GetNotOlderThan, 0, &[(Hidden, Respond)]),
        ] {
            let mut read = read(form);
            let had_floor = read.has_floor();
            for (round, &(unasked, expected)) in steps.iter().enumerate() {
                read.ask(&cache(0, list));
                let left = ATTEMPTS - 1 - round as u32;
                assert_eq!(read.not_reached(7, unasked, left), expected, "{form:?} {round}");
            }
            assert_eq!(read.has_floor(), had_floor, "{form:?}");
            assert_eq!(read.highest_reached(), 7);
        }
    }

    #[test]
    fn request_continues_with_few_attempts_left_by_the_table() {
        for (form, resource, unasked, left, expected) in [
            (AnyList, "pods", Endpoint, 2, AskOther),
            (AnyList, "pods", Endpoint, 1, SendOriginal),
            (AnyList, "pods", Connection, 3, AskOther),
            (AnyList, "pods", Connection, 2, AskMostRecent),
            (AnyList, "pods", Connection, 1, Respond),
            (AnyGet, "pods", Hidden, 2, AskMostRecent),
            (AnyGet, "pods", Hidden, 1, Respond),
            (AnyGet, "example.com/things", Hidden, 4, AskMostRecent),
            (ListNotOlderThan, "pods", Endpoint, 1, Respond),
        ] {
            let mut read = ConsistentRead::new(form, SEEN, resource);
            let after = read.not_reached(7, unasked, left);
            assert_eq!(after, expected, "{form:?} of {resource} {unasked:?} {left}");
        }
    }

    #[test]
    fn most_recent_read_is_compared_with_the_floor_and_shows_nothing_of_a_cache() {
        for (form, shows) in [(AnyList, Shows::MostRecentList), (AnyGet, Shows::Nothing)] {
            let mut read = read(form);
            assert_eq!(read.not_reached(7, Hidden, 4), AskMostRecent);
            // What the endpoint has shown before does not count.
            assert_eq!(read.ask(&cache(20, 20)), Some(Asked::MostRecent(15)));
            assert_eq!((read.needed(), read.compares(StatusCode::OK)), (Some(15), form == AnyList));
            let from_etcd = EndpointCache { lists: ListOrigin::Etcd, ..cache(0, 0) };
            assert!(read.is_older(14, &from_etcd) && !read.is_older(15, &from_etcd));
            assert_eq!(read.shows(LISTS_FROM_CACHE), Some(shows));
        }
    }

    #[test]
    fn given_up_floor_is_asked_of_no_endpoint_and_compared_with_no_list() {
        let mut read = read(AnyList);
        assert!(read.compares(StatusCode::OK) && read.at_start().is_some());
        assert_eq!(read.not_reached(7, Nothing, 4), SendOriginal);
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
