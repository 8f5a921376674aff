//! Descriptors for all that the configuration lets in, as far as the system gives them.

use crate::config::Config;
use crate::net::process::resource_limits;

/// Descriptors for all that is no client's connection: endpoints, files, threads.
const OTHERS: u64 = 64;

/// Takes as many descriptors as this process may have, and says so where they may be too few.
pub fn allow(config: &Config) {
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
             will be refused before (systemd: LimitNOFILE=; elsewhere: ulimit -Hn)"
        );
    }
}

/// A client's connection has one to an endpoint beside it, where it is passed on.
fn needed(config: &Config) -> u64 {
    let clients: usize = config.listeners.iter().map(|l| l.limits.max_connections).sum();
    2 * clients as u64 + OTHERS
}
