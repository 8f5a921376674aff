//! The limit on open files: raised at the start, and shared by the connections of all listeners if it is low.

use jackstay_config::{Config, Listener};
use jackstay_sys::process::resource_limits;

use crate::proxy::lingering::MAX_LINGERING;

/// Descriptors needed besides those of client connections: for endpoints, files and threads.
const OTHER_DESCRIPTORS: usize = 64;
/// Connections that are being closed for others, at most, as connections that wait for their clients
/// ([`crate::proxy::lingering`]).
const CLOSING: usize = 256;
/// Each of both may have this part of the descriptors.
const CLOSED_DIVISOR: usize = 8;

/// Raises the limit on open files as far as the system allows, and warns if it is too low for the
/// configuration.
pub fn raise_descriptor_limit(config: &Config) {
    let limit = match resource_limits::raise_descriptor_limit() {
        Ok(limit) => limit,
        Err(error) => return tracing::warn!(%error, "cannot raise the limit on open files"),
    };
    // Two for each client connection, since an L4 flow also has a connection to its endpoint.
    let clients: usize = config.listeners.iter().map(|l| l.limits().max_connections).sum();
    let needed = 2 * clients as u64 + OTHER_DESCRIPTORS as u64;
    if limit < needed {
        tracing::warn!(
            limit,
            needed,
            "too few open files are allowed for limits.max_connections of all listeners: clients \
             will be refused earlier (systemd: LimitNOFILE=; elsewhere: ulimit -Hn)"
        );
    }
}

/// What the connections of all listeners want, and what there is.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorShare {
    wanted: usize,
    available: usize,
}

impl DescriptorShare {
    /// The share of the connections of these listeners. The limit must have been raised before.
    pub fn of(config: &Config) -> Self {
        Self {
            wanted: config.listeners.iter().map(wanted).sum(),
            available: available(resource_limits::for_connections()),
        }
    }

    /// The listener with as many slots as it has descriptors. Otherwise a source with its share of the slots could use
    /// all descriptors, also those for the connections of identities.
    pub fn bounded(self, listener: &Listener) -> Listener {
        let mut listener = listener.clone();
        let limits = listener.limits_mut();
        limits.max_connections = self.slots(limits.max_connections);
        listener
    }

    fn slots(self, max_connections: usize) -> usize {
        if self.wanted <= self.available {
            return max_connections;
        }
        let share = max_connections as u128 * self.available as u128 / self.wanted as u128;
        usize::try_from(share).unwrap_or(max_connections).max(1)
    }
}

/// Descriptors of all connections of a listener. A flow also has a connection to its endpoint.
fn wanted(listener: &Listener) -> usize {
    let each = if listener.terminate().is_some() { 1 } else { 2 };
    each * listener.limits().max_connections
}

/// What open connections may use of `descriptors`.
fn available(descriptors: usize) -> usize {
    let of_each = descriptors / CLOSED_DIVISOR;
    let closed = MAX_LINGERING.min(of_each) + CLOSING.min(of_each);
    descriptors.saturating_sub(closed + OTHER_DESCRIPTORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fit_into_the_descriptors_that_closed_connections_leave() {
        // Descriptors, what the listeners want, and the slots of one with 4,096 connections.
        for (descriptors, wanted, slots) in [
            (65_504, 4_096, 4_096),
            (65_504, 12_288, 4_096),
            // An L7 listener alone, with the limit of `ulimit -n` 8192, 4096, 2048 and 1024.
            (8_160, 4_096, 4_096),
            (4_064, 4_096, 3_236),
            (2_016, 4_096, 1_448),
            (992, 4_096, 680),
            // With an L4 listener.
            (8_160, 12_288, 2_273),
            (2_016, 12_288, 482),
            (64, 12_288, 1),
        ] {
            let share = DescriptorShare { wanted, available: available(descriptors) };
            assert_eq!(share.slots(4_096), slots, "{wanted} of {descriptors}");
        }
    }
}
