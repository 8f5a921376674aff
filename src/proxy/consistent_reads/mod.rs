//! Keeps the reads of a client from going back in time. [`jackstay_core::reads`] explains how, and decides
//! ([`ConsistentRead`]).
//!
//! jackstay remembers for each client (a proven subject or token) and resource the versions that the client has seen
//! ([`crate::upstream::version_floors`]), and how far the cache of each endpoint has come
//! ([`crate::upstream::resource_versions`]).
//!
//! After a floor that no endpoint has reached, a group of an aggregated apiserver or of custom resources has no floors
//! any more ([`crate::upstream::unordered_groups`]).
//!
//! | module | purpose |
//! |---|---|
//! | [`body_version`] | the version in a response body |
//! | [`learner`] | what the body of a response shows, and the reset of an older list |
//! | [`client`] | the client of a request |

pub(super) mod body_version;
pub(super) mod client;
pub(super) mod learner;

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, response};
use jackstay_config::ConsistentReads;
use jackstay_core::admission::ByteAccount;
use jackstay_core::reads::{ConsistentRead, FloorVersions, ReadForm, form};
use jackstay_core::request::info::{RequestInfo, group_of};
use jackstay_net::tls::certificate::Subject;
use jackstay_sys::clock;

use self::body_version::{BodyVersion, ReadProgress};
use self::client::LastClient;
use self::learner::{OldestList, VersionLearner, lower_floors};
use super::credential_selector::SelectedCredential;
use super::upstream_client::UpstreamClient;
use super::watch::body::WatchVersions;
use crate::upstream::Upstream;
use crate::upstream::client_key::ClientKey;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_floors::Floor;

/// What identifies the client of a request.
pub type RequestClient<'a> =
    (&'a LastClient, SelectedCredential, Option<&'a Subject>, &'a HeaderMap);

/// The client of a request, and what it has seen of the resource.
pub struct RequestVersions {
    client: ClientKey,
    form: ReadForm,
    /// The floor of the client for the resource; `None` if it has seen none.
    floor: Option<Arc<Floor>>,
    /// The floor when the request arrived.
    at_start: FloorVersions,
    /// What the decoder of a compressed response may hold.
    gzip_state: ByteAccount,
}

impl RequestVersions {
    /// The versions of a request with this credential, subject and headers, whose connection has had this client
    /// before; `None` if they mean nothing: it is no request for a resource, nothing identifies its client, or the
    /// configuration says so. `gzip_state` bounds what the decoder of its response holds.
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
            gzip_state: gzip_state(),
        }))
    }

    /// The read for the attempts at the request.
    pub fn read(&self) -> ConsistentRead {
        let resource = self.floor.as_ref().map_or("", |floor| &floor.record.name);
        ConsistentRead::new(self.form, self.at_start, resource)
    }

    /// The record, and the version of `read` that an endpoint should have reached.
    pub fn wanted(&self, read: &ConsistentRead) -> Option<(&Arc<ResourceRecord>, u64)> {
        Some((&self.floor.as_ref()?.record, read.needed()?))
    }

    /// The floor that `read` must not go below.
    pub fn enforced(&self, read: &ConsistentRead) -> Option<&Floor> {
        self.floor.as_deref().filter(|_| read.needed().is_some())
    }

    /// Records that `endpoint` is only at this version.
    #[cold]
    pub fn is_at(&self, version: u64, endpoint: &Arc<Endpoint>) {
        if let Some(floor) = &self.floor {
            let record = &floor.record;
            record.set(&record.shown_by(endpoint), version, clock::now());
        }
    }

    /// The version of a list that is older than the floor; `None` for any other response. `body`: what has arrived of
    /// it, and whether that is all.
    pub fn older_list(
        &self,
        read: &mut ConsistentRead,
        head: &response::Parts,
        body: (Option<&Bytes>, bool),
        endpoint: &Arc<Endpoint>,
    ) -> Option<u64> {
        let floor = self.enforced(read).filter(|_| read.compares(head.status))?;
        let version = self.version_of_list(head, body)?;
        if read.shows_lists_from_etcd(version, endpoint.key()) {
            floor.record.lists.found_in_etcd(clock::now());
        }
        read.is_older(version, &floor.cache_of(endpoint)).then_some(version)
    }

    fn version_of_list(
        &self,
        head: &response::Parts,
        (body, is_whole): (Option<&Bytes>, bool),
    ) -> Option<u64> {
        let body = body?;
        BodyVersion::of_prefix(head, body).or_else(|| {
            // The metadata of a list of custom resources follows its items.
            let mut read =
                is_whole.then(|| BodyVersion::new(head, self.form, &self.gzip_state))??;
            match read.read(body) {
                ReadProgress::Version(version) => Some(version),
                ReadProgress::Unknown => read.end(),
                ReadProgress::StatusVersion(_) | ReadProgress::None => None,
            }
        })
    }

    /// No endpoint has reached the floor: lowers it for all clients, to this version or what an endpoint has reached
    /// meanwhile.
    pub fn lower_floors(&self, reached: u64, client: &UpstreamClient) {
        if let Some(floor) = &self.floor {
            lower_floors(floor, reached, client);
        }
    }

    /// The records that a watch raises whose first stream is at `endpoint`.
    pub fn of_watch(
        &self,
        read: &ConsistentRead,
        info: &RequestInfo,
        upstream: &Upstream,
        endpoint: &Arc<Endpoint>,
    ) -> Option<Box<WatchVersions>> {
        let floor = self.floor_to_raise(info, upstream)?;
        let start = match self.form {
            ReadForm::WatchFrom => form::version(info).unwrap_or(0),
            _ => 0,
        };
        Some(Box::new(WatchVersions::new(endpoint, floor, start, read.at_start())))
    }

    /// Learns from the body of a response with this head at `endpoint`; `None` if it shows nothing, or nothing more
    /// than what was compared.
    pub fn learn(
        &self,
        read: &ConsistentRead,
        info: &RequestInfo,
        head: &response::Parts,
        (client, endpoint): (&Rc<UpstreamClient>, &Arc<Endpoint>),
    ) -> Option<VersionLearner> {
        let shows = read.shows(endpoint.minor_version()).filter(|_| head.status.is_success())?;
        let body = BodyVersion::new(head, self.form, &self.gzip_state)?;
        let floor = self.floor_to_raise(info, client.pool.upstream())?;
        let oldest = self
            .enforced(read)
            .and_then(|floor| read.oldest(head.status, || floor.cache_of(endpoint)))
            .map(|version| Box::new(OldestList { version, client: Rc::clone(client) }));
        let (is_list, endpoint) = (self.form.is_list(), Arc::clone(endpoint));
        let learner = VersionLearner { body, floor, is_list, endpoint, shows, oldest };
        if let Some(version) = read.compared() {
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
