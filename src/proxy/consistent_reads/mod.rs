//! Keeps the reads of a client from going back in time.
//!
//! A client with one connection to one kube-apiserver reads from one watch cache, which only moves forward. jackstay
//! sends each request to any endpoint, and the caches of the endpoints lag behind etcd by different times. So it
//! remembers for each client (a proven subject or token) and resource the highest version that the client has seen, the
//! *floor* ([`crate::upstream::version_floors`]), and how far the cache of each endpoint has come
//! ([`crate::upstream::resource_versions`]). An endpoint that is known to have reached the floor is preferred and gets
//! the request unchanged. So does one whose most-recent list of a built-in resource has shown the floor, if the request
//! is a list: its version is compared with the floor before it is forwarded. For any other endpoint:
//!
//! | request | what jackstay sends | what the client may conclude |
//! |---|---|---|
//! | LIST with `resourceVersion=0` | `resourceVersion=<floor>&resourceVersionMatch=NotOlderThan`; to a server before 1.31 without `limit`, which it ignores beside 0, except for events | the list is not older than anything that the client has seen of the resource |
//! | GET with `resourceVersion=0` | `resourceVersion=<floor>` | the object is not older |
//! | watch with `sendInitialEvents` and `resourceVersion=0` | `resourceVersion=<floor>` | the initial events are not older |
//! | each of these, with a floor of lists or bookmarks above that of objects | the request without `resourceVersion`: a most-recent read | the same |
//! | that LIST, while etcd answers most-recent lists | `resourceVersion=<floor>&resourceVersionMatch=Exact` | the list is the state at the floor |
//! | watch with `resourceVersion=0` or without one, without `sendInitialEvents` | the same | not older, if an endpoint is known to have reached the floor: a version would skip the initial events |
//! | LIST, GET, watch with a version | the same; a 504 `Too large resource version` is asked of one other endpoint | as Kubernetes documents it |
//! | LIST, GET without `resourceVersion` | the same | most recent: nothing is needed |
//! | LIST with `continue`, or `resourceVersionMatch=Exact` | the same | the state at that version, however old |
//! | any request without a credential, any resource without numeric versions | the same | nothing |
//!
//! Why these forms: kube-apiserver answers `resourceVersion=0` from its cache, whatever its age, and `NotOlderThan` from
//! its cache as soon as that is new enough (Kubernetes documentation, *API concepts*, *resource versions*). It waits 3 s
//! and answers 504 `Too large resource version` then (apiserver, `storage/cacher/watch_cache.go`, `blockTimeout`). A
//! server before 1.31 would read a list with a limit and a version above 0 from etcd instead (`cacher.go`,
//! `shouldDelegateList`); later ones answer it from the cache, in pages. Events have no watch cache and are always read in
//! pages from etcd, so a list of them keeps its limit.
//!
//! A cache reaches the version of an object by an event. That of a list or a bookmark may be one that no event of the
//! resource has; then a cache reaches it only when etcd reports its progress, perhaps never, so nothing waits for it. A
//! most-recent read needs no such version. From Kubernetes 1.31 and etcd 3.5.13 on, a most-recent list comes from the
//! cache, which asks etcd for its progress (`ConsistentListFromCache`); that of a GET reads one key of etcd. To an older
//! server, or one of unknown version, a list goes with the floor of objects, and the version of a list that it read from
//! etcd is not remembered. A newer one may read a list from etcd as well, with an older etcd, without the feature gate, or
//! as a fallback. So the version of a most-recent list counts for the next list only. If that was older, the apiservers
//! of the upstream read lists from etcd ([`crate::upstream::list_source`]): the versions of lists and bookmarks then count
//! for a few seconds only, until the caches of all ready endpoints have the events of that time. Otherwise each list of a
//! client that has seen a most-recent one would be a most-recent one, which etcd would answer. In these seconds a list is of
//! exactly the floor: a most-recent one would raise the floor, so the next list would need the same, and the seconds would
//! not end while the client lists every few seconds.
//!
//! A 504 of that kind, or a list that is older than the floor, is asked of the other ready endpoints. If none has reached
//! the floor, an etcd was restored from a backup, or the only endpoint that had reached it is gone: the floor is lowered
//! to the highest version that an endpoint has, and the original request is sent. A group of an aggregated
//! apiserver or of custom resources has no floors after that, and its watches are not resumed: the replicas of such a
//! server may have stores of their own ([`crate::upstream::unordered_groups`]).
//!
//! A list is compared with the floor as soon as its version has arrived. If its head has been forwarded by then, because the
//! body began late or its version follows the items, an older list is reset before its end, and the client lists again.
//!
//! | module | purpose |
//! |---|---|
//! | [`form`] | which version a read asks for, and its query with a floor |
//! | [`body_version`] | the version in a response body |
//! | [`learner`] | what the body of a response shows, and the reset of an older list |
//! | [`client`] | the client of a request |

pub(super) mod body_version;
pub(super) mod client;
pub(super) mod form;
pub(super) mod learner;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode, response};
use jackstay_core::admission::ByteAccount;
use jackstay_core::lag::current_of_too_large;
use jackstay_core::request::attempts::{AfterNotReached, MissedVersion, NotReached, VersionOrigin};
use jackstay_core::request::info::{RequestInfo, is_built_in_group};
use jackstay_sys::clock;

use self::body_version::{BodyVersion, ReadProgress};
use self::client::LastClient;
use self::form::{Asked, LISTS_FROM_CACHE, ReadForm, is_consistent_from_cache};
use self::learner::{OldestList, Shows, VersionLearner, lower_floors};
use super::credential_selector::SelectedCredential;
use super::upstream_client::UpstreamClient;
use super::watch::body::WatchVersions;
use crate::config::ConsistentReads;
use crate::net::tls::certificate::Subject;
use crate::upstream::Upstream;
use crate::upstream::client_key::ClientKey;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::{ResourceRecord, group_of};
use crate::upstream::version_floors::{Floor, FloorVersions};

/// What identifies the client of a request.
pub type RequestClient<'a> =
    (&'a LastClient, SelectedCredential, Option<&'a Subject>, &'a HeaderMap);

/// What the versions of one request mean for its client.
pub struct RequestVersions {
    client: ClientKey,
    form: ReadForm,
    /// The floor of the client for the resource; `None` if it has seen none.
    floor: Option<Arc<Floor>>,
    /// The floor when the request arrived. What concurrent requests show does not count for it.
    at_start: FloorVersions,
    /// Whether the floor is not enforced any more, because no endpoint has reached it.
    given_up: Cell<bool>,
    /// Whether another endpoint was asked because one had not reached the version.
    asked_elsewhere: Cell<bool>,
    /// The highest version that an endpoint reported which had not reached the floor.
    highest_reached: Cell<u64>,
    /// What was asked of endpoints that may not have reached the floor; of several, what says least about a cache.
    asked: Cell<Asked>,
    /// The last endpoint whose cache was asked.
    cache_read: RefCell<Option<CacheRead>>,
    /// The version of the list that was compared with the floor, and is not older.
    compared: Cell<Option<u64>>,
    /// What the decoder of a compressed response may hold.
    gzip_state: ByteAccount,
}

/// A list that an endpoint answers from its cache.
struct CacheRead {
    endpoint: Arc<Endpoint>,
    /// The highest version of its most-recent lists before, which the cache has reached unless the server read it from etcd.
    list: u64,
    /// Whether the request was sent unchanged for that reason.
    expected: bool,
}

impl RequestVersions {
    /// The versions of a request with this credential, subject and headers, whose connection has had this client before;
    /// `None` if they mean nothing: it is no request for a resource, nothing identifies its client, or the configuration
    /// says so. `gzip_state` bounds what the decoder of its response holds.
    pub fn new(
        info: &RequestInfo,
        (last, credential, subject, headers): RequestClient<'_>,
        upstream: &Upstream,
        gzip_state: impl FnOnce() -> ByteAccount,
    ) -> Option<Box<Self>> {
        if upstream.config().consistent_reads == ConsistentReads::Off {
            return None;
        }
        let (form, name) = (ReadForm::of(info)?, info.resource_name()?);
        if upstream.unordered_groups.contains(group_of(&name)) {
            return None;
        }
        let hasher = upstream.version_floors.hasher()?;
        let client = last.key(credential, subject, headers, hasher)?;
        let floor = upstream.version_floors.find(client, &name);
        Some(Box::new(Self {
            client,
            form,
            at_start: floor.as_ref().map(|floor| floor.versions()).unwrap_or_default(),
            floor,
            given_up: Cell::new(false),
            asked_elsewhere: Cell::new(false),
            highest_reached: Cell::new(0),
            asked: Cell::new(Asked::NotOlderThan(0)),
            cache_read: RefCell::default(),
            compared: Cell::new(None),
            gzip_state: gzip_state(),
        }))
    }

    /// Whether the client accepts any version, and has a floor: what endpoints answer about the floor is not for it.
    fn has_floor(&self) -> bool {
        self.given_up.get() || self.enforced().is_some()
    }

    /// The floor that the request must not go below.
    fn enforced(&self) -> Option<(&Floor, FloorVersions)> {
        let floor = self
            .floor
            .as_deref()
            .filter(|_| self.form.takes_any_version() && !self.given_up.get())?;
        (self.form.needed(self.at_start) > 0).then_some((floor, self.at_start))
    }

    /// The record and the version that an endpoint should have reached.
    pub fn wanted(&self) -> Option<(&Arc<ResourceRecord>, u64)> {
        let (floor, versions) = self.enforced()?;
        Some((&floor.record, self.form.needed(versions)))
    }

    /// The head for `endpoint` with the floor; `None` if it gets the request unchanged, because it is known to have
    /// reached the floor or the form takes none.
    pub fn head(&self, head: &Request<()>, endpoint: &Arc<Endpoint>) -> Option<Request<()>> {
        let (floor, versions) = self.enforced()?;
        let needed = self.form.needed(versions);
        if floor.record.has_reached(endpoint, needed) {
            return None;
        }
        let record = &floor.record;
        let list = record.list_of(endpoint);
        let expected =
            self.is_compared(floor) && list >= needed && is_consistent_from_cache(record, endpoint);
        let asked = self.form.asked((floor, versions), endpoint);
        let from_cache = expected || matches!(asked, Asked::NotOlderThan(_));
        let cache_read =
            from_cache.then(|| CacheRead { endpoint: Arc::clone(endpoint), list, expected });
        self.cache_read.replace(cache_read);
        if expected {
            return None;
        }
        self.asked.set(self.asked.get().max(asked));
        self.form.head(head, asked, (endpoint, &record.name))
    }

    /// Whether the version of the answer is compared with the floor before it is forwarded, and another answer can be asked
    /// for. The version of a custom list may come only at its end.
    fn is_compared(&self, floor: &Floor) -> bool {
        self.form == ReadForm::AnyList
            && !self.asked_elsewhere.get()
            && is_built_in_group(group_of(&floor.record.name))
    }

    /// Whether a 504 may mean that the endpoint has not reached the version.
    pub fn may_be_not_reached(&self, status: StatusCode) -> bool {
        status == StatusCode::GATEWAY_TIMEOUT && self.form.reads()
    }

    /// The version that `endpoint` has reached, according to the body of its 504; `None` if it is another 504.
    pub fn not_reached(&self, body: &[u8], endpoint: &Arc<Endpoint>) -> Option<MissedVersion> {
        let current = current_of_too_large(body)?;
        if let Some(floor) = &self.floor {
            floor.record.set(&floor.record.shown_by(endpoint), current, clock::now());
        }
        Some(self.missed(current))
    }

    fn missed(&self, reached: u64) -> MissedVersion {
        MissedVersion { reached, is_floor: self.has_floor() }
    }

    /// The floor of a list whose response has this head; `None` if the response is no list, or has no floor.
    fn floor_of_list(&self, head: &response::Parts) -> Option<(&Floor, FloorVersions)> {
        self.enforced().filter(|_| head.status == StatusCode::OK && self.form.is_list())
    }

    /// The version of a list that is older than the floor; `None` for any other response. `body`: what has arrived of it,
    /// and whether that is all.
    pub fn stale(
        &self,
        head: &response::Parts,
        body: (Option<&Bytes>, bool),
        endpoint: &Arc<Endpoint>,
    ) -> Option<MissedVersion> {
        let (floor, versions) = self.floor_of_list(head)?;
        let version = self.version_of_list(head, body)?;
        let record = &floor.record;
        let is_older =
            |read: &CacheRead| Arc::ptr_eq(&read.endpoint, endpoint) && version < read.list;
        if self.cache_read.borrow().as_ref().is_some_and(is_older) {
            record.lists.found_in_etcd(clock::now());
        }
        if version >= self.form.asked((floor, versions), endpoint).version() {
            self.compared.set(Some(version));
            return None;
        }
        record.set(&record.shown_by(endpoint), version, clock::now());
        Some(self.missed(version))
    }

    fn version_of_list(
        &self,
        head: &response::Parts,
        (body, is_whole): (Option<&Bytes>, bool),
    ) -> Option<u64> {
        let body = body?;
        BodyVersion::of_prefix(head, body).or_else(|| {
            // The metadata of a list of custom resources follows its items.
            let mut read = is_whole.then(|| BodyVersion::new(head, true, &self.gzip_state))??;
            match read.read(body) {
                ReadProgress::Version(version) => Some(version),
                ReadProgress::Unknown => read.end(),
                ReadProgress::None => None,
            }
        })
    }

    /// Decides how the request continues after an endpoint that has reached only `version`. `other_ready`: there is a
    /// ready endpoint that was not asked, and another attempt is left after the next.
    pub fn after_not_reached(&self, version: u64, other_ready: bool) -> AfterNotReached {
        self.highest_reached.set(self.highest_reached.get().max(version));
        let expected = self.cache_read.take().is_some_and(|read| read.expected);
        let origin = match (expected, self.enforced()) {
            (true, _) => VersionOrigin::Expected,
            (false, Some(_)) => VersionOrigin::Floor,
            (false, None) => VersionOrigin::Client,
        };
        let missed =
            NotReached { origin, asked_elsewhere: self.asked_elsewhere.replace(true), other_ready };
        let next = missed.next();
        self.given_up.set(self.given_up.get() || next == AfterNotReached::SendOriginal);
        next
    }

    /// No endpoint has reached the floor: lowers it for all clients.
    pub fn lower_floors(&self, client: &UpstreamClient) {
        if let Some(floor) = &self.floor {
            lower_floors(floor, self.highest_reached.get(), client);
        }
    }

    /// The records that a watch raises whose first stream is at `endpoint`.
    pub fn of_watch(
        &self,
        info: &RequestInfo,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) -> Option<Box<WatchVersions>> {
        let floor = self.floor_to_raise(info, upstream)?;
        let start = match self.form {
            ReadForm::WatchFrom => form::version(info).unwrap_or(0),
            _ => 0,
        };
        let at_start = self.enforced().map(|(_, versions)| (self.form, versions));
        Some(Box::new(WatchVersions::new(endpoint, floor, start, at_start)))
    }

    /// Learns from the body of a response with this head at `endpoint`; `None` if it shows nothing, or nothing more than
    /// what was compared.
    pub fn learn(
        &self,
        info: &RequestInfo,
        head: &response::Parts,
        client: &Rc<UpstreamClient>,
        endpoint: &Arc<Endpoint>,
    ) -> Option<VersionLearner> {
        if !head.status.is_success() || !self.form.shows_version() {
            return None;
        }
        let most_recent = self.form == ReadForm::MostRecentList;
        let is_old = endpoint.minor_version() < LISTS_FROM_CACHE;
        if is_old && (most_recent || self.form == ReadForm::OtherList) {
            return None;
        }
        let body = BodyVersion::new(head, self.form.is_list(), &self.gzip_state)?;
        let floor = self.floor_to_raise(info, client.pool.upstream())?;
        let shows = match self.asked.get() {
            _ if most_recent => Shows::MostRecentList,
            _ if !self.form.shows_cache() => Shows::Nothing,
            Asked::NotOlderThan(_) => Shows::Cache,
            Asked::MostRecent(_) if self.form.is_list() => Shows::MostRecentList,
            Asked::MostRecent(_) | Asked::Exact(_) => Shows::Nothing,
        };
        let (is_list, endpoint) = (self.form.is_list(), Arc::clone(endpoint));
        let compared = self.compared.take();
        let oldest = self
            .floor_of_list(head)
            .filter(|_| compared.is_none())
            .map(|versions| self.form.asked(versions, &endpoint).version())
            .map(|version| Box::new(OldestList { version, client: Rc::clone(client) }));
        let learner = VersionLearner { body, floor, is_list, endpoint, shows, oldest };
        if let Some(version) = compared {
            learner.raise(version);
            return None;
        }
        Some(learner)
    }

    fn floor_to_raise(&self, info: &RequestInfo, upstream: &Upstream) -> Option<Arc<Floor>> {
        if let Some(floor) = &self.floor {
            return Some(Arc::clone(floor));
        }
        let record = upstream.resource_versions.record(&info.resource_name()?)?;
        Some(upstream.version_floors.get(self.client, &record))
    }
}
