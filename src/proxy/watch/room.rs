//! What the frames of watches that have not arrived whole may hold, all together.
//!
//! A frame is held back until it is whole, and one watch may hold a few MiB. An upstream that begins a
//! frame on each of a thousand watches and ends none must not have a thousand times that: above the
//! bound frames pass through in pieces, as those above the cap do.

use metrics::Gauge;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most bytes that are held of the frames of one worker's watches on one upstream.
const TOTAL: usize = 32 << 20;

/// Counts what is held.
#[derive(Debug)]
pub struct Room {
    most: usize,
    held: AtomicUsize,
    gauge: Gauge,
}

impl Room {
    /// Shown in a gauge that others may share: it is only ever incremented and decremented.
    pub fn new(gauge: Gauge) -> Arc<Self> {
        Self::of(TOTAL, gauge)
    }

    /// For tests and fuzzing: so many bytes, shown nowhere.
    pub fn with(most: usize) -> Arc<Self> {
        Self::of(most, Gauge::noop())
    }

    fn of(most: usize, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self { most, held: AtomicUsize::new(0), gauge })
    }

    /// How many bytes more may be held.
    pub fn left(&self) -> usize {
        self.most.saturating_sub(self.held())
    }

    /// How many bytes are held.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.gauge.increment(bytes as f64);
    }

    fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.gauge.decrement(bytes as f64);
    }
}

/// Bytes that are held, counted until the last one who has them lets them go: a frame that has become
/// whole may wait for its client.
#[derive(Debug)]
pub struct Held {
    bytes: Vec<u8>,
    room: Arc<Room>,
}

impl Held {
    /// Nothing yet.
    pub fn new(room: &Arc<Room>) -> Self {
        Self { bytes: Vec::new(), room: Arc::clone(room) }
    }

    /// Where it is counted.
    pub fn room(&self) -> &Arc<Room> {
        &self.room
    }

    /// Adds to them; grows by doubling, never above `cap` unless the bytes themselves do.
    pub fn keep(&mut self, more: &[u8], cap: usize) {
        let need = self.bytes.len() + more.len();
        let before = self.bytes.capacity();
        if need > before {
            let room = (before * 2).clamp(need, cap.max(need));
            self.bytes.reserve_exact(room - self.bytes.len());
            self.room.add(self.bytes.capacity() - before);
        }
        self.bytes.extend_from_slice(more);
    }
}

impl std::ops::Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes.capacity() > 0 {
            self.room.give_back(self.bytes.capacity());
        }
    }
}
