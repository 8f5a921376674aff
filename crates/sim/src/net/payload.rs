//! What TCP carries, and what it needs of the simulation around it.

use std::fmt::Debug;
use std::time::Instant;

use super::NetEvent;
use crate::http2::Frame;
use crate::trace::Entry;

/// The content of a segment.
pub trait Payload: Debug + Sized {
    /// The receiving process reads the payload when it wants to, as from a socket. Otherwise the network passes it to
    /// the process as soon as that runs.
    const IS_READ: bool;

    /// Removes the first bytes and returns them. The network calls it only for payloads that are read.
    #[must_use]
    fn split_to(&mut self, bytes: u32) -> Self;
}

/// Messages are passed to processes, and are not divided.
impl Payload for Frame {
    const IS_READ: bool = false;

    fn split_to(&mut self, _: u32) -> Self {
        self.clone()
    }
}

/// The time, the events, the random numbers and the log of a simulation.
pub trait Schedule {
    /// The present.
    fn now(&self) -> Instant;

    /// The random numbers.
    fn rng(&mut self) -> &mut fastrand::Rng;

    /// Adds an event of the network, which is handled at `at` but not before the present.
    fn queue(&mut self, at: Instant, event: NetEvent);

    /// Writes to the log.
    fn record(&mut self, entry: Entry);
}
