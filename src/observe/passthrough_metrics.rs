//! The metrics of a passthrough listener: connections, bytes, and the reason of each close.

use std::sync::{Arc, OnceLock};

use metrics::Counter;

use super::count_gauge::CountGauge;
use super::names::{self, CLOSE_REASONS};
use super::registry::Registry;

/// The direction in which bytes are forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the apiserver.
    ToServer,
    /// From the apiserver to the client.
    ToClient,
}

/// The metrics of one passthrough listener.
#[derive(Debug)]
pub struct PassthroughMetrics {
    name: String,
    registry: Arc<Registry>,
    connections: CountGauge,
    to_server: Counter,
    to_client: Counter,
    closed: [OnceLock<Counter>; CLOSE_REASONS.len()],
}

impl PassthroughMetrics {
    pub(super) fn register(registry: &Arc<Registry>, name: &str) -> Self {
        let bytes = |direction| registry.counter(&names::PASSTHROUGH_BYTES, &[name, direction]);
        Self {
            name: name.to_owned(),
            registry: Arc::clone(registry),
            connections: CountGauge::new(registry.gauge(&names::PASSTHROUGH_CONNECTIONS, &[name])),
            to_server: bytes("to_server"),
            to_client: bytes("to_client"),
            closed: [const { OnceLock::new() }; CLOSE_REASONS.len()],
        }
    }

    /// Counts an accepted client connection.
    pub fn opened(&self) {
        self.connections.increment(1);
    }

    /// Counts a closed connection. A `reason` that is not one of [`CLOSE_REASONS`] counts as `other`.
    pub fn closed(&self, reason: &'static str) {
        self.connections.decrement(1);
        let last = CLOSE_REASONS.len() - 1;
        let index = CLOSE_REASONS.iter().position(|known| *known == reason).unwrap_or(last);
        self.closed[index]
            .get_or_init(|| {
                let labels = &[self.name.as_str(), CLOSE_REASONS[index]];
                self.registry.counter(&names::PASSTHROUGH_CLOSED, labels)
            })
            .increment(1);
    }

    /// Counts bytes transferred.
    pub fn moved(&self, direction: Direction, bytes: usize) {
        match direction {
            Direction::ToServer => self.to_server.increment(bytes as u64),
            Direction::ToClient => self.to_client.increment(bytes as u64),
        }
    }

    /// Open connections of all workers.
    pub fn open(&self) -> usize {
        usize::try_from(self.connections.get()).unwrap_or(0)
    }

    /// Copies the gauge into the registry, before a scrape.
    pub(super) fn publish(&self) {
        self.connections.publish();
    }
}
