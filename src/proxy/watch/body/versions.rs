//! Records the resource versions that a watch shows.

use std::sync::Arc;

use std::time::Instant;

use http::Request;
use jackstay_core::reads::{FloorVersions, ReadForm};
use jackstay_core::watch::relay::ChunkVersions;

use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::{ResourceRecord, ShownVersion};
use crate::upstream::version_floors::Floor;

/// The records that a watch raises.
pub struct WatchVersions {
    /// The version that the endpoint of the current stream has shown.
    shown: Arc<ShownVersion>,
    /// The versions that the client has seen.
    floor: Arc<Floor>,
    /// The highest version that the watch has shown, or the one from which it started; 0 before that.
    latest: u64,
    /// The form of the request, and the floor when it arrived, until the watch has shown a version: a watch that is
    /// started again must not begin before it.
    at_start: Option<Box<(ReadForm, FloorVersions)>>,
}

/// What a new stream of a watch must not be older than.
#[derive(Clone)]
pub struct StartFloor {
    floor: Arc<Floor>,
    form: ReadForm,
    versions: FloorVersions,
}

impl StartFloor {
    /// The head for `endpoint` with the floor; `None` if it gets the request unchanged.
    pub fn head(&self, head: &Request<()>, endpoint: &Arc<Endpoint>) -> Option<Request<()>> {
        if self.floor.is_reached_by(endpoint, self.form.needed(self.versions)) {
            return None;
        }
        let cache = self.floor.cache_of(endpoint);
        let asked = self.form.asked(self.versions, cache.lists);
        self.form.head(head, asked, (cache.server, &self.floor.record.name))
    }
}

impl WatchVersions {
    /// The records of a watch from the version `start`, or 0, whose first stream is at `endpoint`. `at_start`: the form
    /// of a request that takes any version, and its floor.
    pub fn new(
        endpoint: &Arc<Endpoint>,
        floor: Arc<Floor>,
        start: u64,
        at_start: Option<(ReadForm, FloorVersions)>,
    ) -> Self {
        let shown = floor.record.shown_by(endpoint);
        Self { shown, floor, latest: start, at_start: at_start.map(Box::new) }
    }

    /// The floor of the request, while nothing has been shown to the client.
    pub fn start_floor(&self) -> Option<StartFloor> {
        let (form, versions) = **self.at_start.as_ref()?;
        Some(StartFloor { floor: Arc::clone(&self.floor), form, versions })
    }

    /// The record of the resource.
    pub fn resource(&self) -> &ResourceRecord {
        &self.floor.record
    }

    /// The version that `endpoint` has shown, for [`Self::record`].
    pub fn shown_by(&self, endpoint: &Arc<Endpoint>) -> Arc<ShownVersion> {
        self.floor.record.shown_by(endpoint)
    }

    /// Called when the watch continues at `endpoint`.
    pub fn switch_to(&mut self, endpoint: &Arc<Endpoint>) {
        self.shown = self.shown_by(endpoint);
    }

    /// The version that an endpoint should have reached to continue the watch without a pause.
    pub fn wanted(&self) -> Option<(&Arc<ResourceRecord>, u64)> {
        let needed = match &self.at_start {
            Some(at_start) => at_start.0.needed(at_start.1),
            None => self.latest,
        };
        (needed > 0).then_some((&self.floor.record, needed))
    }

    /// Records the versions of a chunk that was received at `now`. `shown`: of the endpoint that has sent it, if that is not
    /// the one of the current stream.
    pub fn record(&mut self, shown: Option<&ShownVersion>, chunk: ChunkVersions, now: Instant) {
        if chunk.shown == 0 {
            return;
        }
        self.latest = self.latest.max(chunk.shown);
        self.at_start = None;
        let shown = shown.unwrap_or(&self.shown);
        self.floor.record.raise(shown, chunk.shown, now);
        self.floor.record.raise_event(shown, chunk.objects);
        self.floor.raise_objects(chunk.objects);
        self.floor.raise_bookmarks(chunk.bookmarks);
    }
}
