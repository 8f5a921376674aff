//! The path between two hosts, in one direction.

use std::time::{Duration, Instant};

/// What happens to a packet on its way from one host to another.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Time from the sender to the receiver.
    pub latency: Duration,
    /// Upper bound of a random addition to the latency.
    pub jitter: Duration,
    /// Probability that a packet is lost, in 0..=1.
    pub loss: f64,
    /// Bytes a second; 0 for no limit.
    pub rate: u64,
    /// All packets are dropped.
    pub blocked: bool,
    /// When the packets before have left, if there is a rate.
    busy_until: Option<Instant>,
}

impl Link {
    /// A link in a data centre.
    pub fn local_network() -> Self {
        Self {
            latency: Duration::from_micros(250),
            jitter: Duration::from_micros(100),
            loss: 0.0,
            rate: 0,
            blocked: false,
            busy_until: None,
        }
    }

    /// The loopback interface.
    pub fn loopback() -> Self {
        Self { latency: Duration::from_micros(15), jitter: Duration::ZERO, ..Self::local_network() }
    }

    /// When a packet that is sent at `now` arrives; `None` if it is lost.
    pub fn arrival(
        &mut self,
        bytes: u32,
        now: Instant,
        rng: &mut fastrand::Rng,
    ) -> Option<Instant> {
        if self.blocked || self.loss > 0.0 && rng.f64() < self.loss {
            return None;
        }
        let mut departs = now;
        if self.rate > 0 {
            departs = self.busy_until.map_or(now, |busy| busy.max(now));
            departs += Duration::from_secs_f64(f64::from(bytes) / self.rate as f64);
            self.busy_until = Some(departs);
        }
        let jitter =
            if self.jitter.is_zero() { self.jitter } else { self.jitter.mul_f64(rng.f64()) };
        Some(departs + self.latency + jitter)
    }
}
