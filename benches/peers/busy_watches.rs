//! Watches on which events arrive all the time, as those of controllers in a cluster with many pods.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use h2::RecvStream;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    Result,
    client::Client,
    origin,
    phases::Bench,
    proxies::Proxy,
    report::{Metric, Samples},
};

/// Number of watches and of their client connections.
const WATCHES: usize = 2000;
const CONNECTIONS: usize = 25;

/// Time after the last watch has opened, until all events have the same rate.
const SETTLE: Duration = Duration::from_millis(500);

impl Bench<'_> {
    /// CPU per event of each proxy, one after another. If origin and client have not enough CPU for the rate of the
    /// events, the rate of all watches falls: the origin leaves out events for which it is late.
    pub async fn busy_watches(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        for proxy in proxies {
            let measured =
                self.busy(proxy, CONNECTIONS, WATCHES / CONNECTIONS, self.plan.busy).await;
            let Some(busy) = proxy.target.skip_failed_peer(measured)? else { continue };
            samples.add(Metric::EventCpu, proxy.target, busy.cpu_micros);
            samples.add(Metric::Events, proxy.target, busy.per_second);
        }
        Ok(())
    }

    /// Opens `each` watches on each of `connections` and measures for `time`.
    pub async fn busy(
        &self,
        proxy: &Proxy,
        connections: usize,
        each: usize,
        time: Duration,
    ) -> Result<Busy> {
        let received = Arc::new(AtomicU64::new(0));
        let mut reading = JoinSet::new();
        // One after another on each connection: in a burst HAProxy opens an upstream connection for each watch, and then
        // needs two to eight times the CPU for an event.
        let mut opening = JoinSet::new();
        for _ in 0..connections {
            let mut client = Client::connect(proxy.address, self.tls).await?;
            opening.spawn(async move { client.open_watches(origin::BUSY_WATCH, each).await });
        }
        while let Some(watches) = opening.join_next().await {
            for watch in watches?? {
                reading.spawn(count_bytes(watch, Arc::clone(&received)));
            }
        }
        sleep(SETTLE).await;
        let (cpu, start) = (proxy.process.thread_cpu_seconds()?, Instant::now());
        let before = received.load(Ordering::Relaxed);
        sleep(time).await;
        let cpu = proxy.process.thread_cpu_seconds()? - cpu;
        let bytes = received.load(Ordering::Relaxed) - before;
        let seconds = start.elapsed().as_secs_f64();
        if let Some(ended) = reading.try_join_next() {
            return Err(format!("a busy watch ended: {:?}", ended?).into());
        }
        let events = bytes as f64 / origin::EVENT_BYTES as f64;
        if events == 0.0 {
            return Err("no event on busy watches".into());
        }
        Ok(Busy { cpu_micros: 1e6 * cpu / events, per_second: events / seconds })
    }
}

/// What busy watches cost.
pub struct Busy {
    /// CPU of the proxy per event, in µs.
    pub cpu_micros: f64,
    /// Events that the client received.
    pub per_second: f64,
}

/// Reads a watch until it ends, and adds the bytes to `received`.
async fn count_bytes(mut watch: RecvStream, received: Arc<AtomicU64>) -> Result<()> {
    while let Some(data) = watch.data().await {
        let len = data?.len();
        watch.flow_control().release_capacity(len)?;
        received.fetch_add(len as u64, Ordering::Relaxed);
    }
    Ok(())
}
