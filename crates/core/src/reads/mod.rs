//! Keeps the reads of a client from going back in time.
//!
//! A client with one connection to one kube-apiserver reads from one watch cache, which only moves forward. jackstay
//! sends each request to any endpoint, and the caches of the endpoints lag behind etcd by different times. So it
//! remembers for each client (a proven subject or token) and resource the highest version that the client has seen, the
//! *floor* ([`FloorVersions`]), and how far the cache of each endpoint has come ([`EndpointCache`]). An endpoint that
//! is known to have reached the floor is preferred and gets the request unchanged. So does one whose most-recent list
//! of a built-in resource has shown the floor, if the request is a list: its version is compared with the floor before
//! it is forwarded. For any other endpoint:
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
//! Why these forms: kube-apiserver answers `resourceVersion=0` from its cache, whatever its age, and `NotOlderThan`
//! from its cache as soon as that is new enough (Kubernetes documentation, *API concepts*, *resource versions*). It
//! waits 3 s and answers 504 `Too large resource version` then (apiserver, `storage/cacher/watch_cache.go`,
//! `blockTimeout`). A server before 1.31 would read a list with a limit and a version above 0 from etcd instead
//! (`cacher.go`, `shouldDelegateList`); later ones answer it from the cache, in pages. Events have no watch cache and
//! are always read in pages from etcd, so a list of them keeps its limit.
//!
//! A cache reaches the version of an object by an event. That of a list or a bookmark may be one that no event of the
//! resource has; then a cache reaches it only when etcd reports its progress, perhaps never, so nothing waits for it. A
//! most-recent read needs no such version. From Kubernetes 1.31 and etcd 3.5.13 on, a most-recent list comes from the
//! cache, which asks etcd for its progress (`ConsistentListFromCache`); that of a GET reads one key of etcd. To an
//! older server, or one of unknown version, a list goes with the floor of objects, and the version of a list that it
//! read from etcd is not remembered. A newer one may read a list from etcd as well, with an older etcd, without the
//! feature gate, or as a fallback. So the version of a most-recent list counts for the next list only. If that was
//! older, the apiservers of the upstream read lists from etcd ([`list_source`]): the versions of lists and bookmarks
//! then count for a few seconds only, until the caches of all ready endpoints have the events of that time. Otherwise
//! each list of a client that has seen a most-recent one would be a most-recent one, which etcd would answer. In these
//! seconds a list is of exactly the floor: a most-recent one would raise the floor, so the next list would need the
//! same, and the seconds would not end while the client lists every few seconds.
//!
//! A 504 of that kind, or a list that is older than the floor, is asked of the other ready endpoints. If none has
//! reached the floor, an etcd was restored from a backup, or the only endpoint that had reached it is gone: the floor
//! is lowered to the highest version that an endpoint has, and the original request is sent. A group of an aggregated
//! apiserver or of custom resources has no floors after that, and its watches are not resumed: the replicas of such a
//! server may have stores of their own.
//!
//! # One address with several apiservers
//!
//! A load balancer sends each connection to one of its apiservers. Those that can be recognised are endpoints
//! ([`crate::backends`]). If they cannot be, the address is one endpoint, and what one connection has shown of a cache
//! says nothing about the next one ([`EndpointCache::is_shared`]):
//!
//! | situation | what follows |
//! |---|---|
//! | a read at such an endpoint | it is sent with the floor, whatever the endpoint has shown, except for a list that is compared |
//! | an apiserver has not reached the floor, and no other endpoint is ready | another connection is asked, which is opened if there is none |
//! | that one has not reached it either, or an apiserver behind an address may be no endpoint | a most-recent read |
//! | the most-recent list is older | the floor is lowered, as above |
//!
//! # What a write shows
//!
//! A successful response to a write raises the floor of the resource that was written; any other response raises
//! nothing. So a client reads its own writes, whichever apiserver answers:
//!
//! | response | raises |
//! |---|---|
//! | an object, also of `status`, `scale` and other subresources that answer with an object of the resource or its version | the version of objects |
//! | a Status with a version: a delete from Kubernetes 1.38 on, `pods/binding`, `pods/eviction` and `bindings` (of pods) as soon as they have one | the version of lists |
//! | a Status without a version | nothing |
//! | the list that answers the delete of a collection | the version of lists |
//!
//! The version of a Status is that of the deletion, or, if another request had deleted the object meanwhile, one at which
//! it did not exist (apiserver, from 1.38 on). The second is no version of an event, so no cache is sure to reach
//! it by one, as with that of a list. A response does not say which of the two it has.
//!
//! Without a version, nothing in the response bounds the version of the deletion: a read of any version may then show the
//! object until the cache of its endpoint has the event. The same is true after the delete of a collection, whose list
//! was read before the objects were deleted. A client that must not see them reads without `resourceVersion`.
//!
//! # What the answer to a read shows
//!
//! A list has the version of the cache in its metadata, so it can be compared with the floor. A GET has only the version
//! of its object:
//!
//! | comparison | sound |
//! |---|---|
//! | the object is at the floor or above it, so the cache has reached the floor | yes: a cache has the events of a resource in their order |
//! | the object is below the floor, so the cache is older | no: the object may not have changed since |
//! | the object is below a version of the same object that the client has seen, so the cache is older | yes, but it takes memory for each object and client, and shows nothing of an object that others have changed |
//!
//! So a GET is compared by the apiserver: with `resourceVersion=<floor>` its answer is at least as fresh as the floor
//! (apiserver, `storage/cacher/delegator.go`, `Get`), or it is a 504. It is sent unchanged only where each connection is
//! known to read a cache that has reached the floor.
//!
//! A list is compared with the floor as soon as its version has arrived. If its head has been forwarded by then,
//! because the body began late or its version follows the items, an older list is reset before its end, and the client
//! lists again.
//!
//! | module | purpose |
//! |---|---|
//! | [`form`] | which version a request asks for, and its query with a floor |
//! | [`read`] | one read over all its attempts |
//! | [`list_source`] | whether the apiservers read most-recent lists from etcd |

pub mod form;
pub mod list_source;
pub mod read;

pub use self::form::{Asked, FloorVersions, ListOrigin, ReadForm};
pub use self::list_source::ListSource;
pub use self::read::{AfterNotReached, ConsistentRead, EndpointCache, Shows, Unasked};
