//! What a proxy occupies besides the work that it does: the time of its start, its program, and the memory of very many
//! watches.

use std::{fs, time::Duration};

use futures_util::FutureExt as _;
use tokio::time::sleep;

use crate::{
    Result, client, origin,
    proxies::{Environment, Layer, Target},
    report::{Metric, Samples},
};

/// Watches on one process and their client connections.
const WATCHES: usize = 10_000;
const CONNECTIONS: usize = 50;
/// Client connections of the other proxies: `HAProxy` allows 100 streams on each by default. A larger value would apply to
/// its connections to the origin, too, which refuses more. They are opened one after another, because `HAProxy` opens an
/// upstream connection for every request of a burst and answers 503 when it has no more descriptors.
const PEER_CONNECTIONS: usize = 100;

/// Time in which a proxy returns the temporary memory of opening the watches to the kernel.
const SETTLE: Duration = Duration::from_secs(5);

/// Pause between two attempts to get the first response of a new process, and thereby the resolution of its start time.
const POLL: Duration = Duration::from_millis(1);

/// Time from the start of the process to its first response from the origin, in `runs` new processes, and the size of
/// the program. The program is in the page cache.
pub async fn start(
    environment: &Environment<'_>,
    targets: &[Target],
    runs: usize,
    samples: &mut Samples,
) -> Result<()> {
    for run in 0..runs {
        for &target in targets {
            let started = environment.start_polled(target, Layer::L7, POLL).await;
            let Some(proxy) = target.skip_failed_peer(started)? else { continue };
            samples.add(Metric::StartTime, target, proxy.started.as_secs_f64() * 1e3);
            if run == 0 {
                let bytes = fs::metadata(target.program()?)?.len();
                samples.add(Metric::ProgramSize, target, bytes as f64 / f64::from(1 << 20));
            }
        }
    }
    Ok(())
}

/// Resident memory of a new process with [`WATCHES`] idle watches, which are all opened at once through jackstay.
pub async fn many_watches(
    environment: &Environment<'_>,
    targets: &[Target],
    samples: &mut Samples,
) -> Result<()> {
    for &target in targets {
        let measured = async {
            let proxy = environment.start(target, Layer::L7).await?;
            let (address, tls) = (proxy.address, environment.tls);
            let (waves, connections) = match target {
                Target::Before | Target::Jackstay => (1, CONNECTIONS),
                _ => (PEER_CONNECTIONS, 1),
            };
            let each = WATCHES / waves / connections;
            let mut watches = Vec::new();
            for _ in 0..waves {
                let path = origin::WATCH;
                watches.extend(
                    client::open_watches_at_once(address, tls, path, connections, each).await?,
                );
            }
            sleep(SETTLE).await;
            let ended = watches.iter_mut().filter_map(|watch| watch.data().now_or_never()).count();
            if ended > 0 {
                return Err(format!("{ended} of {WATCHES} idle watches ended").into());
            }
            proxy.process.rss_kib()
        };
        let Some(kib) = target.skip_failed_peer(measured.await)? else { continue };
        samples.add(Metric::ManyWatchesRss, target, kib / 1024.0);
    }
    Ok(())
}
