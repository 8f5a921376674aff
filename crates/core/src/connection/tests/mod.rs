//! Tests of the connection: its health under scripted time, the table of decisions, and properties of random inputs.

mod decisions;
mod health;
mod properties;

use super::*;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A connection of clients, with a round-trip time of 1 ms and 100 streams.
fn established(at: Instant) -> Established {
    Established {
        thresholds: Thresholds {
            ping_interval: ms(1000),
            suspect_after: None,
            dead_after: ms(2000),
            tunnel_dead_after: ms(20_000),
        },
        first_rtt: ms(1),
        ping_grid: at,
        max_streams: 100,
        peer_streams: 100,
        is_probe: false,
    }
}
