//! Memory of idle watches that were opened at the same time, as after a restart of a client or an apiserver. A proxy
//! needs more memory to open watches than to keep them open, and must return the difference to the kernel.

use std::time::Duration;

use tokio::time::sleep;

use crate::{
    Result, client, origin,
    proxies::{Environment, Layer, Target},
};

/// Number of watches and of their client connections.
const WATCHES: usize = 2000;
const CONNECTIONS: usize = 25;

/// Time in which a proxy returns the temporary memory of its start and of the burst to the kernel. mimalloc, jackstay's
/// allocator, keeps free memory for a second.
const SETTLE: Duration = Duration::from_secs(5);

/// Starts a proxy and opens the watches. Returns KiB per idle watch.
pub async fn run(environment: &Environment<'_>, target: Target) -> Result<f64> {
    let proxy = environment.start(target, Layer::L7).await?;
    sleep(SETTLE).await;
    let before = proxy.process.pss_kib()?;
    let (address, tls) = (proxy.address, environment.tls);
    let each = WATCHES / CONNECTIONS;
    let watches =
        client::open_watches_at_once(address, tls, origin::WATCH, CONNECTIONS, each).await?;
    sleep(SETTLE).await;
    let each = (proxy.process.pss_kib()? - before) / WATCHES as f64;
    drop(watches); // the watches must stay open until the measurement
    Ok(each)
}
