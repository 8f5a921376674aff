//! Learns the version of a response while its body is forwarded, and finds a list that is older than its client has
//! seen.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use jackstay_core::lag::Expected;
use jackstay_core::reads::Shows;
use jackstay_core::request::info::{group_of, is_built_in_group};
use jackstay_sys::clock;

use super::body_version::{BodyVersion, ReadProgress};
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::version_floors::Floor;

/// Number of older lists in a row after which the floor is lowered although an apiserver that has reached it may be behind
/// an address.
const MAX_OLDER_LISTS: u64 = 4;

/// What the bytes of a body have shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// Nothing yet: the next bytes are needed.
    Unknown,
    /// Its version, or that it has none.
    Done,
    /// It is a list that is older than one that the client has seen. It must not end as if it was complete.
    Older {
        /// Its version.
        version: u64,
        /// The version that it should have.
        oldest: u64,
    },
}

/// The oldest version that a list may have which could not be compared before its head was forwarded.
pub(super) struct OldestList {
    pub(super) version: u64,
    pub(super) client: Rc<UpstreamClient>,
}

/// Learns the version of one response while its body is forwarded.
pub struct VersionLearner {
    pub(super) body: BodyVersion,
    pub(super) floor: Arc<Floor>,
    pub(super) is_list: bool,
    pub(super) endpoint: Arc<Endpoint>,
    pub(super) shows: Shows,
    pub(super) oldest: Option<Box<OldestList>>,
}

impl VersionLearner {
    /// Reads the next bytes of the body.
    pub fn read(&mut self, data: &Bytes) -> Learned {
        match self.body.read(data) {
            ReadProgress::Version(version) => self.compare(version),
            ReadProgress::StatusVersion(version) => {
                self.floor.raise_status(version);
                Learned::Done
            }
            ReadProgress::Unknown => Learned::Unknown,
            ReadProgress::None => Learned::Done,
        }
    }

    /// Whether reading takes long, because the body is compressed.
    pub fn inflates(&self) -> bool {
        self.body.inflates()
    }

    /// The body is complete.
    pub fn end(&self) -> Learned {
        self.body.end().map_or(Learned::Done, |version| self.compare(version))
    }

    fn compare(&self, version: u64) -> Learned {
        match &self.oldest {
            Some(oldest) if version < oldest.version => {
                self.found_older(version, oldest);
                Learned::Older { version, oldest: oldest.version }
            }
            _ => {
                self.raise(version);
                Learned::Done
            }
        }
    }

    pub(super) fn raise(&self, version: u64) {
        if self.is_list {
            self.floor.raise_lists(version);
        } else {
            self.floor.raise_objects(version);
        }
        let record = &self.floor.record;
        match self.shows {
            Shows::Nothing => {}
            Shows::Cache => {
                record.raise(&record.shown_by(&self.endpoint), version, clock::now());
            }
            Shows::MostRecentList => {
                record.raise_list(&record.shown_by(&self.endpoint), version);
            }
        }
    }

    /// The next list is asked of another endpoint. If each ready one is known to be older, the floor is lowered,
    /// because the client would be reset each time. While an apiserver may be behind an address that is no endpoint, the
    /// floor stays for some lists more: one connection says nothing about the others.
    #[cold]
    fn found_older(&self, version: u64, oldest: &OldestList) {
        let (record, client) = (&self.floor.record, &oldest.client);
        record.set(&record.shown_by(&self.endpoint), version, clock::now());
        client.metrics.version_floor("cut");
        let may_have_reached = |endpoint: &&Arc<Endpoint>| {
            let shown = record.shown_by(endpoint).version();
            endpoint.state() == EndpointState::Ready && (shown == 0 || shown >= oldest.version)
        };
        let older_lists = self.floor.older_list();
        if client.pool.upstream().endpoints().iter().any(|endpoint| may_have_reached(&endpoint))
            || client.may_hide_apiserver() && older_lists < MAX_OLDER_LISTS
        {
            return;
        }
        lower_floors(&self.floor, version, client);
    }
}

/// Lowers the floors of all clients to what the endpoints have reached, of which the highest has said this version. In
/// a group that an aggregated apiserver may serve, there are no floors from now on: each of its replicas may have a
/// store of its own.
#[cold]
pub(super) fn lower_floors(floor: &Floor, reached: u64, client: &UpstreamClient) {
    let upstream = client.pool.upstream();
    // An endpoint may have advanced meanwhile.
    let reached = reached.max(floor.record.highest_of_ready());
    let before = floor.versions().highest();
    let resource = &floor.record.name;
    if before > reached {
        // Without its floor, a version of a lost history cannot be recognised any more.
        let (now, shown_by) = (clock::now(), "a client".into());
        let seen = Expected { resource: Arc::clone(resource), version: before, shown_by, at: now };
        upstream.restores.suspect(&seen, now);
    }
    upstream.version_floors.lower_all(resource, reached);
    let group = group_of(resource);
    let name = &*upstream.name;
    if !is_built_in_group(group) && upstream.unordered_groups.add(group, "version_not_reached") {
        tracing::warn!(
            upstream = name,
            group,
            "versions of group not compared: no ready endpoint has one that was seen"
        );
    }
    if before > reached {
        client.metrics.version_floor("reset");
        client.warnings.warn(
            &format!("upstream {name}: version floor of {resource} lowered"),
            format_args!(
                "a client has seen version {before}, and the newest ready apiserver is at {reached}; \
                 reads may go back once. Was etcd restored from a backup?"
            ),
        );
    }
}
