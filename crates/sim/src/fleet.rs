//! What the apiservers of a fleet bear, second by second.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use jackstay_apiserver::ApiServer;
use jackstay_sys::clock;
use tokio::time::sleep_until;

use crate::net::HostId;
use crate::net::sockets::SocketNetwork;
use crate::shell::ShellRun;
use crate::shell::program::Program;

/// The result of the run of a fleet.
#[derive(Debug)]
pub struct FleetRun {
    /// What the apiservers bore.
    pub load: Load,
    /// What every run shows.
    pub run: ShellRun,
}

/// One second. Each has an element for each apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Second {
    /// Connects (SYNs) that arrived, also those that were refused.
    pub connects: Vec<u64>,
    /// Lists that were answered.
    pub lists: Vec<u64>,
    /// Watches at the end of the second, as the nodes see them.
    pub watches: Vec<u64>,
}

/// The load of the apiservers.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Load {
    /// Every second of the run.
    pub seconds: Vec<Second>,
    counted: [Vec<u64>; 2],
}

/// Counts what the apiservers bear.
pub(crate) struct Sampler {
    /// The network, whose first hosts are those of the apiservers.
    pub network: SocketNetwork,
    /// The apiservers.
    pub servers: Vec<ApiServer>,
    /// The nodes.
    pub programs: Vec<Rc<Program>>,
}

impl Sampler {
    /// Samples at the end of each of so many seconds from now on.
    pub async fn run(&self, seconds: usize) -> Load {
        let mut end = clock::now();
        let mut load = Load::default();
        for _ in 0..seconds {
            end += Duration::from_secs(1);
            sleep_until(end.into()).await;
            self.sample(&mut load);
        }
        load
    }

    fn sample(&self, load: &mut Load) {
        let hosts = 0..self.servers.len() as HostId;
        let connects: Vec<_> = hosts.map(|host| self.network.connects(host)).collect();
        let lists = self.servers.iter().map(|server| server.counters().lists.load(Relaxed));
        let lists: Vec<_> = lists.collect();
        let mut watches = vec![0; self.servers.len()];
        for upstream in self.programs.iter().flat_map(|program| &program.active.upstreams) {
            for (count, endpoint) in watches.iter_mut().zip(upstream.endpoints().iter()) {
                *count += endpoint.watches() as u64;
            }
        }
        let [connects_before, lists_before] = &load.counted;
        load.seconds.push(Second {
            connects: since(&connects, connects_before),
            lists: since(&lists, lists_before),
            watches,
        });
        load.counted = [connects, lists];
    }
}

impl Load {
    /// The largest number within one second at one apiserver, from a second on.
    pub fn peak(&self, from: usize, of: impl Fn(&Second) -> &Vec<u64>) -> u64 {
        self.seconds[from..].iter().flat_map(|second| of(second).iter().copied()).max().unwrap_or(0)
    }

    /// The largest share of the watches that one apiserver has at the end of a second, in 0..=1.
    pub fn largest_share(&self, second: usize) -> f64 {
        let watches = &self.seconds[second].watches;
        let all: u64 = watches.iter().sum();
        watches.iter().max().map_or(0.0, |&most| most as f64 / all.max(1) as f64)
    }

    /// Seconds after which the watches of all apiservers stay within 10 % of their mean, if they do at the end.
    pub fn even_from(&self) -> Option<usize> {
        let is_uneven = |second: &Second| {
            let mean = second.watches.iter().sum::<u64>() as f64 / second.watches.len() as f64;
            second.watches.iter().any(|&watches| (watches as f64 - mean).abs() > 0.1 * mean)
        };
        let uneven = self.seconds.iter().rposition(is_uneven).map_or(0, |last| last + 1);
        (uneven < self.seconds.len()).then_some(uneven)
    }
}

fn since(now: &[u64], before: &[u64]) -> Vec<u64> {
    now.iter()
        .zip(before.iter().chain(std::iter::repeat(&0)))
        .map(|(now, before)| now - before)
        .collect()
}
