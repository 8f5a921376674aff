//! Memory of idle watches that were all opened at once, as after the restart of a client or of an
//! apiserver. Opening them takes more memory than holding them, and the proxy must return the
//! difference to the kernel.

use std::time::Duration;

use tokio::{task::JoinSet, time::sleep};

use crate::{
    Result,
    client::Client,
    proxies::{Layer, Setting, Target},
};

/// Watches, and the client connections that they are opened over.
const WATCHES: usize = 2000;
const CONNECTIONS: usize = 25;

/// Time for a proxy to return what its start, and then the burst, needed for a moment: mimalloc
/// keeps free memory for a second.
const SETTLE: Duration = Duration::from_secs(5);

/// KiB for each idle watch of a new process after one burst.
pub async fn run(setting: &Setting<'_>, target: Target) -> Result<f64> {
    let proxy = setting.start(target, Layer::L7).await?;
    sleep(SETTLE).await;
    let before = proxy.process.pss_kib()?;
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(Client::connect(proxy.address, setting.tls).await?);
    }
    let mut opening = JoinSet::new();
    for mut client in clients {
        opening.spawn(async move { client.watch_at_once(WATCHES / CONNECTIONS).await });
    }
    let mut watches = Vec::new();
    while let Some(opened) = opening.join_next().await {
        watches.extend(opened??);
    }
    sleep(SETTLE).await;
    let each = (proxy.process.pss_kib()? - before) / WATCHES as f64;
    drop(watches); // all of them were open until here
    Ok(each)
}
