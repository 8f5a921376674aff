//! Numbers of streams and flows that a change of a connection affects.

use std::fmt;
use std::ops::AddAssign;

use serde::Serialize;

use crate::quantity::quantity;

/// The streams that are open on connections, and flows (L4).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct OpenStreams {
    /// Streams of requests that are not watches.
    pub requests: u64,
    /// Streams of watches.
    pub watches: u64,
    /// Passthrough flows.
    pub flows: u64,
}

impl OpenStreams {
    /// The streams of an HTTP/2 connection with `streams` streams, of which `watches` are watches.
    pub fn of_connection(streams: usize, watches: usize) -> Self {
        let requests = streams.saturating_sub(watches) as u64;
        Self { requests, watches: watches as u64, flows: 0 }
    }

    /// This number of flows.
    pub fn of_flows(flows: usize) -> Self {
        Self { flows: flows as u64, ..Self::default() }
    }

    /// Whether nothing is open.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl AddAssign for OpenStreams {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.watches += other.watches;
        self.flows += other.flows;
    }
}

/// `3 requests, 20 watches`; with flows also `5 flows`, and only `5 flows` without streams.
impl fmt::Display for OpenStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flows = quantity(self.flows, "flow");
        if self.requests + self.watches == 0 && self.flows > 0 {
            return f.write_str(&flows);
        }
        let watches = match self.watches {
            1 => "1 watch".to_owned(),
            watches => format!("{watches} watches"),
        };
        write!(f, "{}, {watches}", quantity(self.requests, "request"))?;
        if self.flows > 0 { write!(f, ", {flows}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_what_is_open() {
        let mut open = OpenStreams::of_connection(23, 20);
        assert_eq!(open.to_string(), "3 requests, 20 watches");
        open += OpenStreams::of_flows(1);
        assert_eq!(open.to_string(), "3 requests, 20 watches, 1 flow");
        assert_eq!(OpenStreams::of_flows(5).to_string(), "5 flows");
        assert_eq!(OpenStreams::of_connection(2, 1).to_string(), "1 request, 1 watch");
        assert!(OpenStreams::default().is_empty());
    }
}
