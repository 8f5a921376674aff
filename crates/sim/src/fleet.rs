//! What the apiservers of a fleet bear, second by second.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use jackstay_apiserver::ApiServer;
use jackstay_sys::clock;
use tokio::time::sleep_until;

use crate::net::HostId;
use crate::net::sockets::SocketNetwork;
use crate::shell::program::{Program, server_of};

/// One second. Each has an element for each apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Second {
    /// Connects (SYNs) that arrived, also those that were refused.
    pub connects: Vec<u64>,
    /// Lists that were answered.
    pub lists: Vec<u64>,
    /// Watches that were accepted.
    pub accepted: Vec<u64>,
    /// Watches at the end of the second, as the nodes see them.
    pub watches: Vec<u64>,
}

/// The load of the apiservers.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Load {
    /// Every second of the run.
    pub seconds: Vec<Second>,
    counted: [Vec<u64>; 3],
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
        let accepted = self.servers.iter().map(|s| s.counters().accepted_watches.load(Relaxed));
        let accepted: Vec<_> = accepted.collect();
        let mut watches = vec![0; self.servers.len()];
        for upstream in self.programs.iter().flat_map(|program| program.upstreams()) {
            for endpoint in upstream.endpoints().iter() {
                if let Some(server) = server_of(&endpoint.address.host, watches.len()) {
                    watches[server] += endpoint.watches() as u64;
                }
            }
        }
        let [connects_before, lists_before, accepted_before] = &load.counted;
        load.seconds.push(Second {
            connects: since(&connects, connects_before),
            lists: since(&lists, lists_before),
            accepted: since(&accepted, accepted_before),
            watches,
        });
        load.counted = [connects, lists, accepted];
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

    /// Seconds after which the watches of all apiservers stay within this share of their mean, if they do at the end.
    pub fn even_from(&self, tolerance: f64) -> Option<usize> {
        let is_uneven = |second: &Second| {
            let mean = second.watches.iter().sum::<u64>() as f64 / second.watches.len() as f64;
            second.watches.iter().any(|&watches| (watches as f64 - mean).abs() > tolerance * mean)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A run with these watches at the end of each second, and as many connects as watches of the first apiserver.
    fn load(watches: &[[u64; 3]]) -> Load {
        let second = |watches: &[u64; 3]| Second {
            connects: vec![watches[0], 0, 0],
            lists: vec![0; 3],
            accepted: vec![0; 3],
            watches: watches.to_vec(),
        };
        Load { seconds: watches.iter().map(second).collect(), ..Load::default() }
    }

    #[test]
    fn even_from_is_the_second_after_the_last_uneven_one() {
        let (even, uneven) = ([11, 10, 9], [12, 10, 8]);
        let table: [(&[_], _); 5] = [
            (&[even, even], Some(0)),
            (&[uneven, even], Some(1)),
            (&[even, uneven, even, even], Some(2)),
            (&[even, uneven], None),
            (&[[30, 0, 0]], None),
        ];
        for (watches, expected) in table {
            assert_eq!(load(watches).even_from(0.1), expected, "{watches:?}");
        }
        assert_eq!(load(&[uneven]).even_from(0.2), Some(0));
    }

    #[test]
    fn peak_and_share_are_those_of_one_apiserver() {
        let load = load(&[[9, 0, 0], [5, 3, 2], [4, 3, 1]]);
        assert_eq!(load.peak(1, |second| &second.connects), 5);
        assert_eq!(load.peak(1, |second| &second.lists), 0);
        assert!((load.largest_share(1) - 0.5).abs() < f64::EPSILON);
    }

    #[test]
    fn since_counts_from_zero_in_the_first_second() {
        assert_eq!(since(&[3, 4], &[]), [3, 4]);
        assert_eq!(since(&[5, 4], &[3, 4]), [2, 0]);
    }
}
