//! Records the resource versions that a watch shows.

use std::sync::Arc;

use std::time::Instant;

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
}

impl WatchVersions {
    /// The records of a watch from the version `start`, or 0, whose first stream is at `endpoint`.
    pub fn new(endpoint: &Arc<Endpoint>, floor: Arc<Floor>, start: u64) -> Self {
        Self { shown: floor.record.shown_by(endpoint), floor, latest: start }
    }

    /// Called when the watch continues at `endpoint`.
    pub fn switch_to(&mut self, endpoint: &Arc<Endpoint>) {
        self.shown = self.floor.record.shown_by(endpoint);
    }

    /// The version that an endpoint should have reached to continue the watch without a pause.
    pub fn wanted(&self) -> Option<(&Arc<ResourceRecord>, u64)> {
        (self.latest > 0).then_some((&self.floor.record, self.latest))
    }

    /// Records the versions of a chunk that was received at `now`.
    pub fn record(&mut self, chunk: ChunkVersions, now: Instant) {
        if chunk.shown == 0 {
            return;
        }
        self.latest = self.latest.max(chunk.shown);
        self.floor.record.raise(&self.shown, chunk.shown, now);
        self.floor.record.raise_event(&self.shown, chunk.objects);
        self.floor.raise_objects(chunk.objects);
        self.floor.raise_bookmarks(chunk.bookmarks);
    }
}
