//! Raises the limit on open files to what the configuration needs.

use crate::config::Config;
use crate::net::process::resource_limits;

/// Descriptors for everything but client connections: endpoints, files, threads.
const RESERVE: u64 = 64;

/// Raises the limit as far as the system allows, and warns if it is too low for the configuration.
pub fn raise(config: &Config) {
    let limit = match resource_limits::raise_descriptor_limit() {
        Ok(limit) => limit,
        Err(error) => {
            tracing::warn!(%error, "cannot raise the limit on open files");
            return;
        }
    };
    let needed = needed(config);
    if limit < needed {
        tracing::warn!(
            limit,
            needed,
            "too few open files are allowed for limits.max_connections of all listeners: clients \
             will be refused earlier (systemd: LimitNOFILE=; elsewhere: ulimit -Hn)"
        );
    }
}

/// Two descriptors for each client connection: an L4 flow has one to its endpoint as well.
fn needed(config: &Config) -> u64 {
    let clients: usize = config.listeners.iter().map(|l| l.limits.max_connections).sum();
    2 * clients as u64 + RESERVE
}
