//! Records the resource versions that a watch shows.

use std::sync::Arc;

use tokio::time::Instant;

use crate::proxy::watch::relay::ChunkVersions;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::resource_versions::{ResourceRecord, ShownVersion};
use crate::upstream::version_floors::Floor;

/// The records that a watch raises.
pub struct WatchVersions {
    /// The resource of the watch.
    pub record: Arc<ResourceRecord>,
    /// The version that the endpoint of the current stream has shown.
    shown: Arc<ShownVersion>,
    /// The versions that the client has seen; `None` for a client without a floor.
    floor: Option<Arc<Floor>>,
}

impl WatchVersions {
    /// The records of a watch whose first stream is at `endpoint`.
    pub fn new(
        record: Arc<ResourceRecord>,
        endpoint: &Arc<Endpoint>,
        floor: Option<Arc<Floor>>,
    ) -> Self {
        Self { shown: record.shown_by(endpoint), record, floor }
    }

    /// Called when the watch continues at `endpoint`.
    pub fn switch_to(&mut self, endpoint: &Arc<Endpoint>) {
        self.shown = self.record.shown_by(endpoint);
    }

    /// Records the versions of a chunk that was received at `now`.
    pub fn record(&self, chunk: ChunkVersions, now: Instant) {
        if chunk.shown == 0 {
            return;
        }
        self.record.raise(&self.shown, chunk.shown, now);
        if let Some(floor) = &self.floor {
            floor.raise_objects(chunk.objects);
            floor.raise_bookmarks(chunk.bookmarks);
        }
    }
}
