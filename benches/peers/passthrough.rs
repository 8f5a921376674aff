//! The measurements at L4: idle flows, bulk transfers and new connections. Rounds are interleaved as at L7.

use std::{mem, process::Command, time::Duration};

use tokio::{net::TcpStream, task::JoinSet, time::Instant};

use crate::{
    Result,
    phases::Bench,
    proxies::Proxy,
    raw,
    report::{Metric, Samples},
};

/// Idle flows through each proxy, or as many as the limit of descriptors allows.
const FLOWS: u64 = 10_000;
/// Descriptors of a proxy besides two for each flow.
const OTHER_DESCRIPTORS: u64 = 500;
/// Flows that are opened concurrently.
const OPENING: usize = 64;
/// Concurrent connections in the measurement of new connections.
const CONNECTING: usize = 16;
/// Time for a proxy to become idle after its last new flow.
const SETTLE: Duration = Duration::from_secs(2);

/// Raises the descriptor limit of this process and its children as far as allowed. Returns the number of idle flows for
/// which it suffices.
///
/// # Errors
/// `prlimit` is not installed.
pub fn raise_descriptor_limit() -> Result<usize> {
    let prlimit = |args: &[&str]| -> Result<String> {
        let pid = std::process::id().to_string();
        let out = Command::new("prlimit").args(["--pid", &pid]).args(args).output();
        let out = out.map_err(|error| format!("prlimit (util-linux): {error}"))?;
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let wanted = 2 * FLOWS + OTHER_DESCRIPTORS;
    // Raising the hard limit needs privileges; raising the soft limit up to it does not.
    prlimit(&[&format!("--nofile={wanted}:{wanted}")])?;
    let hard = prlimit(&["--nofile", "--output=HARD", "--noheadings"])?;
    prlimit(&[&format!("--nofile={hard}:{hard}")])?;
    let hard = hard.parse().unwrap_or(u64::MAX);
    Ok((hard.saturating_sub(OTHER_DESCRIPTORS) / 2).min(FLOWS) as usize)
}

impl Bench<'_> {
    /// Memory and CPU of idle flows, one proxy after another. The proxies must be new processes, because allocators keep
    /// memory from earlier load.
    pub async fn idle_flows(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        for proxy in proxies {
            let measured = self.idle_flows_of(proxy).await;
            let Some((memory, cpu)) = proxy.target.skip_failed_peer(measured)? else { continue };
            samples.add(Metric::FlowMemory, proxy.target, memory);
            samples.add(Metric::FlowsCpu, proxy.target, cpu);
        }
        Ok(())
    }

    /// KiB per idle flow, and the CPU of all of them in percent of a core.
    async fn idle_flows_of(&self, proxy: &Proxy) -> Result<(f64, f64)> {
        tokio::time::sleep(SETTLE).await;
        let before = proxy.process.rss_kib()?;
        let flows = open(proxy, self.flows).await?;
        tokio::time::sleep(SETTLE).await;
        let each = (proxy.process.rss_kib()? - before) / self.flows as f64;

        let cpu = proxy.process.cpu_seconds(self.ticks_per_second)?;
        let start = Instant::now();
        tokio::time::sleep(self.plan.idle).await;
        let used = proxy.process.cpu_seconds(self.ticks_per_second)? - cpu;
        let percent = 100.0 * used / start.elapsed().as_secs_f64();
        // Fail if a flow was closed during the measurement.
        for flow in &flows {
            match flow.try_read(&mut [0]) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                other => return Err(format!("an idle flow: {other:?}").into()),
            }
        }
        Ok((each, percent))
    }

    /// Bulk in both directions and new connections, round by round.
    pub async fn flow_rounds(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        let mut order: Vec<&Proxy> = proxies.iter().collect();
        for round in 0..self.plan.rounds {
            eprintln!("L4, round {} of {}", round + 1, self.plan.rounds);
            for proxy in mem::take(&mut order) {
                let moved = self.transfer(proxy, samples).await;
                order.extend(proxy.target.skip_failed_peer(moved)?.map(|()| proxy));
            }
            for proxy in mem::take(&mut order) {
                let connected = self.connect(proxy, samples).await;
                order.extend(proxy.target.skip_failed_peer(connected)?.map(|()| proxy));
            }
            if order.is_empty() {
                break;
            }
            order.rotate_left(1);
        }
        Ok(())
    }

    /// CPU of a bulk transfer in each direction, and the speed of the one to the client.
    async fn transfer(&self, proxy: &Proxy, samples: &mut Samples) -> Result<()> {
        let bytes = self.plan.flow_bytes;
        let gigabytes = bytes as f64 / 1e9;
        let cpu = || proxy.process.cpu_seconds(self.ticks_per_second);
        let (cpu_before, start) = (cpu()?, Instant::now());
        raw::down(proxy.address, bytes).await?;
        let (cpu_between, seconds) = (cpu()?, start.elapsed().as_secs_f64());
        raw::up(proxy.address, bytes).await?;
        let cpu_after = cpu()?;
        samples.add(Metric::FlowDownCpu, proxy.target, (cpu_between - cpu_before) / gigabytes);
        samples.add(Metric::FlowUpCpu, proxy.target, (cpu_after - cpu_between) / gigabytes);
        samples.add(Metric::FlowSpeed, proxy.target, bytes as f64 / 1e6 / seconds);
        Ok(())
    }

    /// CPU of new connections that exchange one byte.
    async fn connect(&self, proxy: &Proxy, samples: &mut Samples) -> Result<()> {
        let cpu = proxy.process.cpu_seconds(self.ticks_per_second)?;
        let end = Instant::now() + self.plan.load;
        let mut tasks = JoinSet::new();
        for _ in 0..CONNECTING {
            let address = proxy.address;
            tasks.spawn(async move {
                let mut count = 0_u32;
                while Instant::now() < end {
                    raw::once(address).await?;
                    count += 1;
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(count)
            });
        }
        let mut count = 0.0;
        while let Some(done) = tasks.join_next().await {
            count += f64::from(done??);
        }
        let used = proxy.process.cpu_seconds(self.ticks_per_second)? - cpu;
        samples.add(Metric::ConnectionCpu, proxy.target, 1e6 * used / count);
        samples.add(Metric::ConnectionRate, proxy.target, count / used);
        Ok(())
    }
}

/// Opens `count` idle flows through one proxy.
async fn open(proxy: &Proxy, count: usize) -> Result<Vec<TcpStream>> {
    let mut flows = Vec::with_capacity(count);
    let mut opening = JoinSet::new();
    let mut started = 0;
    while flows.len() < count {
        while started < count && opening.len() < OPENING {
            opening.spawn(raw::idle(proxy.address));
            started += 1;
        }
        let Some(opened) = opening.join_next().await else { break };
        let flow = opened?.map_err(|error| format!("{error} ({} are open)", flows.len()))?;
        flows.push(flow);
    }
    Ok(flows)
}
