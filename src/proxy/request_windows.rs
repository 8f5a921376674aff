//! The receive windows of request bodies.

use crate::observe::MemoryClass;

/// The receive windows of request bodies on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Window of a stream.
    pub stream: u32,
    /// Window of the connection.
    pub connection: u32,
}

impl Windows {
    /// Those of a client without a configured identity. A loopback client fills 64 KiB as fast as larger
    /// ones; a hundred connections hold 25 MiB.
    const UNPROVEN: Self = Self { stream: 64 << 10, connection: 256 << 10 };
    /// The connection has sixteen windows of a stream, so that other uploads continue while one is stalled
    /// upstream.
    const IDENTITY: Self = Self { stream: 256 << 10, connection: 4 << 20 };

    /// Those of a client of this class.
    pub fn of(class: MemoryClass) -> Self {
        match class {
            MemoryClass::Identity => Self::IDENTITY,
            MemoryClass::Token | MemoryClass::Unproven => Self::UNPROVEN,
        }
    }
}
