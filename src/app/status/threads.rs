//! The threads of the data plane in `/status`.

use std::sync::Arc;

use jackstay_config::Config;
use serde::Serialize;

use super::super::listener::BoundListener;

/// The threads of the data plane, and their client connections.
#[derive(Serialize)]
pub(super) struct ThreadsStatus {
    workers: usize,
    worker_connections: usize,
    identity_lane: bool,
    identity_lane_connections: usize,
}

impl ThreadsStatus {
    pub(super) fn new(config: &Config, listeners: &[Arc<BoundListener>]) -> Self {
        let all: i64 = listeners.iter().map(|listener| listener.metrics.connections.get()).sum();
        let on_lane = listeners.iter().map(|listener| listener.lane_connections.get()).sum();
        Self {
            workers: config.workers,
            worker_connections: usize::try_from(all).unwrap_or(0).saturating_sub(on_lane),
            identity_lane: config.identity_lane,
            identity_lane_connections: on_lane,
        }
    }
}
