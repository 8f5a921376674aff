//! Admits the connections of one listener on one worker, and reports the refused ones.

use std::fmt::Display;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::admission::{MemoryBudget, Refusal, SourceMemory};
use jackstay_sys::clock;
use jackstay_sys::sockets::source::{Source, SourceLookup};
use jackstay_sys::sockets::stream::TcpStream;

use super::connection_slots::{Admitted, ConnectionSlot, ConnectionSlots, SlotLimit};
use crate::observe::{ListenerMetrics, RateLimitedWarnings};

/// Repeated warnings about refused connections are logged at most once in this time, with their number.
pub const WARNING_INTERVAL: Duration = Duration::from_secs(5);

/// The connections of one listener that a worker has admitted, and the account of their memory.
pub struct ListenerAdmission {
    listener: String,
    /// Counts the connections.
    pub metrics: Arc<ListenerMetrics>,
    memory: Arc<MemoryBudget>,
    slots: Rc<ConnectionSlots>,
    sources: SourceLookup,
    /// Warnings about clients that exceed a limit.
    pub warnings: RateLimitedWarnings,
}

impl ListenerAdmission {
    /// The admission of the listener with that name, whose clients are charged to `memory`.
    pub fn new(listener: String, metrics: Arc<ListenerMetrics>, memory: Arc<MemoryBudget>) -> Self {
        Self {
            listener,
            metrics,
            memory,
            slots: Rc::default(),
            sources: SourceLookup::default(),
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
        }
    }

    /// The name of the listener.
    pub fn listener(&self) -> &str {
        &self.listener
    }

    /// The account of the memory of the clients with this source.
    pub fn memory(&self, source: Source) -> Arc<SourceMemory> {
        self.memory.source(source.key())
    }

    /// The number of open connections, tunnels included.
    pub fn open(&self) -> usize {
        self.slots.open()
    }

    /// Counts a refusal in the metric of the table.
    pub fn count(&self, refusal: Refusal) {
        self.metrics.refused(refusal);
        self.memory.count(refusal);
    }

    /// Gives a slot to a new connection from `from`, whose source has the first `prefix` bits of an IPv6 address. `None`
    /// if it must be closed. A refusal is counted and logged.
    pub fn admit(
        &self,
        (stream, from): (&TcpStream, SocketAddr),
        prefix: u8,
        limit: SlotLimit,
    ) -> Option<ConnectionSlot> {
        let source = self.sources.source(stream, from, prefix)?;
        let admitted = self.slots.admit(source, limit, clock::now());
        self.report(admitted, (source, limit.slots))
    }

    /// Gives a slot to the connection of a proven identity that another thread has admitted.
    pub fn admit_proven(&self, source: Source) -> ConnectionSlot {
        self.slots.admit_proven(source, clock::now())
    }

    /// Counts and logs that a new connection of `source` got none of `limit` slots, or that of another connection.
    fn report(
        &self,
        admitted: Result<Admitted, Refusal>,
        (source, limit): (Source, usize),
    ) -> Option<ConnectionSlot> {
        let (refusal, slot, evicted) = match admitted {
            Ok(Admitted { slot, evicted: None }) => return Some(slot),
            // It is counted when it has ended.
            Ok(Admitted { slot, evicted }) => (Refusal::Evicted, Some(slot), evicted),
            Err(refusal) => {
                self.count(refusal);
                (refusal, None, None)
            }
        };
        let line = format!("{} {limit} slots (limits.max_connections)", refusal.reason());
        match evicted {
            Some(evicted) => self.warn(&line, format_args!("{evicted}, for {source}")),
            None => self.warn(&line, source),
        }
        slot
    }

    /// Warns about a client of the listener.
    pub fn warn(&self, about: &str, detail: impl Display) {
        self.warnings.warn(&format!("listener {}: {about}", self.listener), detail);
    }

    /// Warns that a connection of `source` is refused because memory is short.
    pub fn report_no_memory(&self, source: Source) {
        self.warn(Refusal::ConnectionMemory.reason(), source);
    }
}
