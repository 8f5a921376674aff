//! The measurements at L7, in the order in which they run; the larger ones have files of their own.
//!
//! Rounds are interleaved (A B C, B C A, …), so that changes in the speed of the machine affect all proxies alike. The
//! results are medians over the rounds, and medians over the ratios of each round.

use std::{mem, path::Path, sync::Arc, time::Duration};

use rustls::ClientConfig;

use crate::{
    Result,
    bulk::Transfer,
    client::Client,
    h2load, origin,
    pin::OneCore,
    process::Process,
    proxies::{Proxy, Target},
    report::{Metric, Samples},
};

/// Number of watches through each proxy and of their client connections. Many watches share one connection, because a
/// component such as kubelet has all its watches on one.
const WATCHES: usize = 1000;
const WATCH_CONNECTIONS: usize = 10;

/// Watches that each have a client connection of their own, as those of many small clients. Their memory includes the
/// connection's buffers and TLS state. The number fits into the usual limit of 1,024 descriptors.
const LONE_WATCHES: usize = 250;

/// Time for a proxy to become idle after its start or its last new stream.
const SETTLE: Duration = Duration::from_secs(2);

/// The sizes of the measurements.
pub struct Plan {
    pub rounds: usize,
    /// Duration of the request load, and at L4 of the new connections, for one proxy in one round.
    pub load: Duration,
    /// Duration of the sequential requests for one proxy in one round.
    pub latency: Duration,
    /// Number of bulk bodies for one proxy in one round.
    pub bulk_bodies: u32,
    /// Rounds with every kind of bulk. The other rounds have only the first kind.
    pub bulk_rounds: usize,
    /// Duration of busy watches through one proxy, and with growing numbers.
    pub busy: Duration,
    pub growth_watches: Duration,
    /// Measurements of each cost with growing work.
    pub growth_repeats: usize,
    /// Starts of each proxy for its start time.
    pub starts: usize,
    /// Bytes of a bulk transfer at L4, in each direction.
    pub flow_bytes: u64,
    /// Duration of the measurement of idle CPU.
    pub idle: Duration,
    /// Number of jackstay processes whose memory after a burst of watches is measured.
    pub bursts: usize,
}

impl Plan {
    /// The plan of `--quick`.
    pub const QUICK: Self = Self {
        rounds: 2,
        load: Duration::from_secs(1),
        latency: Duration::from_millis(600),
        bulk_bodies: 1,
        bulk_rounds: 1,
        busy: Duration::from_secs(2),
        growth_watches: Duration::from_millis(500),
        growth_repeats: 1,
        starts: 3,
        flow_bytes: 400_000_000,
        idle: Duration::from_secs(3),
        bursts: 1,
    };
    /// The usual plan.
    pub const FULL: Self = Self {
        rounds: 7,
        load: Duration::from_secs(4),
        latency: Duration::from_secs(2),
        bulk_bodies: 2,
        bulk_rounds: 7,
        busy: Duration::from_secs(10),
        growth_watches: Duration::from_secs(2),
        growth_repeats: 2,
        starts: 10,
        flow_bytes: 4_000_000_000,
        idle: Duration::from_secs(20),
        bursts: 10,
    };
}

/// The parameters of all measurements.
pub struct Bench<'a> {
    pub plan: Plan,
    pub dir: &'a Path,
    pub h2load: &'a Path,
    pub origin: std::net::SocketAddr,
    pub origin_process: &'a Process,
    pub tls: &'a Arc<ClientConfig>,
    pub tls_without_certificate: &'a Arc<ClientConfig>,
    pub ticks_per_second: f64,
    /// Number of idle flows at L4.
    pub flows: usize,
}

impl Bench<'_> {
    /// Memory and CPU of idle proxies, then memory with idle watches. The proxies must be new processes, because
    /// allocators keep memory from earlier load.
    pub async fn idle(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        tokio::time::sleep(SETTLE).await;
        let mut before = Vec::new();
        for proxy in proxies {
            let rss = proxy.process.rss_kib()?;
            samples.add(Metric::IdleRss, proxy.target, rss / 1024.0);
            before.push((rss, proxy.process.cpu_seconds(self.ticks_per_second)?));
        }
        let start = tokio::time::Instant::now();
        tokio::time::sleep(self.plan.idle).await;
        for (proxy, (_, cpu)) in proxies.iter().zip(&before) {
            let used = proxy.process.cpu_seconds(self.ticks_per_second)? - cpu;
            let percent = 100.0 * used / start.elapsed().as_secs_f64();
            samples.add(Metric::IdleCpu, proxy.target, percent);
        }
        for (proxy, (rss, _)) in proxies.iter().zip(&before) {
            let watches =
                self.open_watches(proxy, WATCH_CONNECTIONS, WATCHES / WATCH_CONNECTIONS).await;
            let Some(watches) = proxy.target.skip_failed_peer(watches)? else { continue };
            let with_shared = proxy.process.rss_kib()?;
            let each = (with_shared - rss) / WATCHES as f64;
            samples.add(Metric::WatchMemory, proxy.target, each);

            let lone = self.open_watches(proxy, LONE_WATCHES, 1).await;
            let Some(lone) = proxy.target.skip_failed_peer(lone)? else { continue };
            let each = (proxy.process.rss_kib()? - with_shared) / LONE_WATCHES as f64;
            samples.add(Metric::LoneWatchMemory, proxy.target, each);
            drop((watches, lone)); // the watches must stay open until the measurement
        }
        Ok(())
    }

    /// Opens `each` watches on each of `connections` and waits until the proxy's memory is stable.
    async fn open_watches(
        &self,
        proxy: &Proxy,
        connections: usize,
        each: usize,
    ) -> Result<Vec<h2::RecvStream>> {
        let mut watches = Vec::new();
        for _ in 0..connections {
            let mut client = Client::connect(proxy.address, self.tls).await?;
            let opened = client.open_watches(origin::WATCH, each).await;
            watches.extend(
                opened.map_err(|error| format!("{error} ({} watches are open)", watches.len()))?,
            );
        }
        tokio::time::sleep(SETTLE).await;
        Ok(watches)
    }

    /// Requests, latency and bulk, round by round.
    pub async fn rounds(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        // `None` is the direct connection.
        let mut order: Vec<Option<&Proxy>> = vec![None];
        order.extend(proxies.iter().map(Some));
        for round in 0..self.plan.rounds {
            eprintln!("round {} of {}", round + 1, self.plan.rounds);
            for proxy in mem::take(&mut order) {
                let loaded = self.load(proxy, samples).await;
                order.extend(target(proxy).skip_failed_peer(loaded)?.map(|()| proxy));
            }
            order = self.latency(&order, samples).await?;
            let kinds = if round < self.plan.bulk_rounds { Transfer::ALL.len() } else { 1 };
            for transfer in &Transfer::ALL[..kinds] {
                for proxy in mem::take(&mut order) {
                    let moved = self.bulk(proxy, transfer, samples).await;
                    order.extend(target(proxy).skip_failed_peer(moved)?.map(|()| proxy));
                }
            }
            order.rotate_left(1);
        }
        Ok(())
    }

    /// CPU per request and the rate of requests under load.
    async fn load(&self, proxy: Option<&Proxy>, samples: &mut Samples) -> Result<()> {
        let (target, address) = self.target_and_address(proxy);
        let (amount, log) = (h2load::Amount::Time(self.plan.load), self.dir.join("h2load.log"));
        let cpu = self.cpu(proxy)?;
        let load = h2load::run(self.h2load, address, h2load::CONNECTIONS, amount, &log).await?;
        if load.failed > 0.0 {
            let failures = format!(
                "{} of {} requests failed at {}",
                load.failed,
                load.requests,
                target.name()
            );
            // HAProxy and Envoy return 5xx for a few of tens of thousands of requests; jackstay must not.
            let few = load.failed < load.requests / 100.0;
            if !few || !matches!(target, Target::Haproxy | Target::Envoy) {
                return Err(failures.into());
            }
            println!("{failures}");
        }
        if let (Some(before), Some(after)) = (cpu, self.cpu(proxy)?) {
            samples.add(Metric::CpuPerRequest, target, 1e6 * (after - before) / load.requests);
        }
        samples.add(Metric::Requests, target, load.per_second);
        Ok(())
    }

    /// The latency that each proxy adds to sequential requests. Returns the proxies that responded.
    async fn latency<'p>(
        &self,
        order: &[Option<&'p Proxy>],
        samples: &mut Samples,
    ) -> Result<Vec<Option<&'p Proxy>>> {
        let proxies = order.iter().flatten().map(|proxy| proxy.process.id());
        let _one_core = OneCore::pin(proxies.chain([self.origin_process.id()]))?;
        let (mut responding, mut measured) = (Vec::new(), Vec::new());
        for &proxy in order {
            let (target, address) = self.target_and_address(proxy);
            let latencies = self.latencies(address).await;
            let Some(latencies) = target.skip_failed_peer(latencies)? else { continue };
            let last = (latencies.len() - 1) as f64;
            let quantile = |q: f64| latencies[(last * q) as usize].as_secs_f64() * 1e6;
            responding.push(proxy);
            measured.push((target, quantile(0.5), quantile(0.99)));
        }
        let direct = measured.iter().find(|(target, ..)| *target == Target::Direct);
        let &(_, median, p99) = direct.ok_or("no direct run")?;
        samples.add(Metric::LatencyMedian, Target::Direct, median);
        samples.add(Metric::LatencyP99, Target::Direct, p99);
        for (target, its_median, its_p99) in measured {
            if target != Target::Direct {
                samples.add(Metric::LatencyMedian, target, its_median - median);
                samples.add(Metric::LatencyP99, target, its_p99 - p99);
            }
        }
        Ok(responding)
    }

    /// Latencies of sequential requests, sorted.
    async fn latencies(&self, address: std::net::SocketAddr) -> Result<Vec<Duration>> {
        let mut client = Client::connect(address, self.tls).await?;
        client.get(origin::OBJECT).await?;
        let mut latencies = client.sequential_requests(self.plan.latency).await?;
        latencies.sort_unstable();
        Ok(latencies)
    }

    /// A proxy or the direct connection, and where it listens.
    pub fn target_and_address(&self, proxy: Option<&Proxy>) -> (Target, std::net::SocketAddr) {
        (target(proxy), proxy.map_or(self.origin, |proxy| proxy.address))
    }

    /// CPU seconds of a proxy; `None` for the direct connection.
    fn cpu(&self, proxy: Option<&Proxy>) -> Result<Option<f64>> {
        proxy.map(|proxy| proxy.process.cpu_seconds(self.ticks_per_second)).transpose()
    }
}

fn target(proxy: Option<&Proxy>) -> Target {
    proxy.map_or(Target::Direct, |proxy| proxy.target)
}
