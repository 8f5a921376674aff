//! Whether costs grow faster than the work: the same measurement with one, two, four and eight times the work.

use std::fmt::Write as _;

use tokio::task::JoinSet;

use crate::{
    Result,
    client::Client,
    h2load, origin,
    phases::Bench,
    proxies::Proxy,
    report::{Metric, Samples},
};

/// The multiples of the work.
const MULTIPLES: [u32; 4] = [1, 2, 4, 8];

/// With the single amount of work: connections of the request load, and requests.
const CONNECTIONS: u32 = 2;
const REQUESTS: u32 = 4_000;
/// With the single amount of work: connections of busy watches.
const WATCH_CONNECTIONS: u32 = 3;
/// Watches on each of them.
const WATCHES: usize = 80;

/// What grows.
#[derive(Clone, Copy)]
enum Work {
    /// Requests and the connections that send them.
    Requests,
    /// Bodies that are read at the same time, each on its own connection.
    Bulk,
    /// Busy watches and their connections.
    Watches,
}

impl Work {
    const ALL: [Self; 3] = [Self::Requests, Self::Bulk, Self::Watches];

    fn metric(self) -> Metric {
        match self {
            Self::Requests => Metric::RequestGrowth,
            Self::Bulk => Metric::BulkGrowth,
            Self::Watches => Metric::WatchGrowth,
        }
    }
}

impl Bench<'_> {
    /// Adds the ratio of the cost of a unit with the most work to that with the least, and prints all costs.
    pub async fn growth(&self, proxies: &[Proxy], samples: &mut Samples) -> Result<()> {
        for work in Work::ALL {
            for proxy in proxies {
                let Some(costs) = proxy.target.skip_failed_peer(self.costs(work, proxy).await)?
                else {
                    continue;
                };
                samples.add(work.metric(), proxy.target, costs[MULTIPLES.len() - 1] / costs[0]);
                let (mut line, label) = (String::new(), work.metric().label());
                for (multiple, cost) in MULTIPLES.iter().zip(&costs) {
                    let _ = write!(line, "  {multiple}×: {cost:.2}");
                }
                println!("{label}, {}:{line}", proxy.target.name());
                samples.add_costs(work.metric(), proxy.target, costs);
            }
        }
        Ok(())
    }

    /// The cost of a unit with each multiple of the work: the smallest of the measurements, because other processes of the
    /// machine only add to it.
    async fn costs(&self, work: Work, proxy: &Proxy) -> Result<Vec<f64>> {
        let mut costs = vec![f64::INFINITY; MULTIPLES.len()];
        for _ in 0..self.plan.growth_repeats {
            for (multiple, cost) in MULTIPLES.iter().zip(&mut costs) {
                let measured = match work {
                    Work::Requests => self.request_cost(proxy, *multiple).await?,
                    Work::Bulk => self.bulk_cost(proxy, *multiple).await?,
                    Work::Watches => {
                        let connections = (WATCH_CONNECTIONS * multiple) as usize;
                        let time = self.plan.growth_watches;
                        self.busy(proxy, connections, WATCHES, time).await?.cpu_micros
                    }
                };
                *cost = cost.min(measured);
            }
        }
        Ok(costs)
    }

    /// CPU per request, in µs.
    async fn request_cost(&self, proxy: &Proxy, multiple: u32) -> Result<f64> {
        let before = proxy.process.thread_cpu_seconds()?;
        let amount = h2load::Amount::Requests(REQUESTS * multiple);
        let log = self.dir.join("h2load.log");
        let connections = CONNECTIONS * multiple;
        let load = h2load::run(self.h2load, proxy.address, connections, amount, &log).await?;
        Ok(1e6 * (proxy.process.thread_cpu_seconds()? - before) / load.requests)
    }

    /// CPU-seconds per GB of bodies that are read at the same time.
    async fn bulk_cost(&self, proxy: &Proxy, multiple: u32) -> Result<f64> {
        let mut clients = Vec::new();
        for _ in 0..multiple {
            let mut client = Client::connect(proxy.address, self.tls).await?;
            client.get(origin::OBJECT).await?;
            clients.push(client);
        }
        let before = proxy.process.thread_cpu_seconds()?;
        let mut reading = JoinSet::new();
        for mut client in clients {
            reading.spawn(async move { client.get(origin::BULK).await });
        }
        while let Some(read) = reading.join_next().await {
            read??;
        }
        let gigabytes = f64::from(multiple) * origin::BULK_BYTES as f64 / 1e9;
        Ok((proxy.process.thread_cpu_seconds()? - before) / gigabytes)
    }
}
