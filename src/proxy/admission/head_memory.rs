//! The memory of an HTTP/1.1 head that is being read.

use std::io;
use std::sync::Arc;

use jackstay_core::admission::{MemoryCharge, MemoryKind, Refusal, SourceMemory};
use jackstay_core::credential_class::ClientRank;

/// What is part of the cost of a connection: the first size of hyper's buffer (8 KiB, `INIT_BUFFER_SIZE` in
/// `proto/h1/io.rs`), doubled once, as for a head that arrives in two pieces.
const FIRST_BUFFER: usize = 16 << 10;

/// What the buffer of a head holds beyond its first size.
#[derive(Debug)]
pub struct HeadMemory {
    source: Arc<SourceMemory>,
    rank: ClientRank,
    charge: Option<(usize, MemoryCharge)>,
}

impl HeadMemory {
    /// The head of a client that has proven this in its handshake.
    pub fn new(source: Arc<SourceMemory>, rank: ClientRank) -> Self {
        Self { source, rank, charge: None }
    }

    /// Charges the buffer, of which `free` bytes are to be filled.
    ///
    /// # Errors
    /// It does not fit, and the connection must be closed.
    pub fn charge(&mut self, free: usize) -> io::Result<()> {
        // The buffer is doubled for each read after one that has filled it, so it has nearly as many bytes already.
        let bytes = 2 * free.saturating_sub(FIRST_BUFFER);
        if bytes == 0 || self.charge.as_ref().is_some_and(|(charged, _)| bytes <= *charged) {
            return Ok(());
        }
        self.charge = None;
        let charge = self.source.try_charge(MemoryKind::Connections, bytes, self.rank);
        let Some(charge) = charge else {
            self.source.budget().count(Refusal::RequestMemory);
            return Err(io::Error::new(
                io::ErrorKind::OutOfMemory,
                Refusal::RequestMemory.reason(),
            ));
        };
        self.charge = Some((bytes, charge));
        Ok(())
    }

    /// The head is complete.
    pub fn release(&mut self) {
        self.charge = None;
    }
}
