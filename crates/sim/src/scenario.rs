//! A scenario: its clients and apiservers, the faults, and the promises.
//!
//! ```
//! use std::time::Duration;
//! use jackstay_sim::scenario::{Role, Sim};
//!
//! let second = Duration::from_secs(1);
//! let run = Sim::seed(7).endpoints(3).clients(Role::Readers, 4).blackhole(0).at(5 * second).run(10 * second);
//! assert_eq!(run.findings.failed_reads, 0);
//! ```

use std::time::{Duration, Instant};

use crate::apiserver::{Apiserver, Resource};
use crate::client::{
    BulkMode, BulkReader, Burst, Client, Informer, LeaseHolder, Model, Reader, Writer,
};
use crate::faults::{Fault, FaultKind, random_fault};
use crate::fleet::{FleetRun, Load};
use crate::invariants::{Findings, Promises};
use crate::node::{Node, Settings};
use crate::trace::Trace;
use crate::world::{self, World};

/// What clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Each reads ten times a second.
    Readers,
    /// Each writes five times a second.
    Writers,
    /// Informers, by turns of config maps, which the writers change, and of pods, which stay as they are.
    Informers,
    /// kubelets: a lease each.
    Kubelets,
    /// Leaders: a lease each.
    Leaders,
    /// Clients that list 6 MB again and again, by turns in pages, whole, and whole and slowly.
    Bulk,
    /// Hostile clients: 200 requests at once, twice a second, of which half are cancelled.
    Hostile,
}

/// How clients reach the apiservers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Through jackstay on their host.
    Jackstay,
    /// Through a load balancer, without jackstay.
    Balancer,
}

/// A scenario.
#[derive(Debug, Clone)]
pub struct Sim {
    pub(crate) seed: u64,
    pub(crate) endpoints: usize,
    pub(crate) nodes: usize,
    access: Access,
    clients: Vec<(Role, usize)>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) settings: Settings,
    pub(crate) max_streams: usize,
    pub(crate) link: Option<(Duration, Duration)>,
    pub(crate) rate: u64,
    is_fleet: bool,
}

/// The result of a run.
#[derive(Debug)]
pub struct Run {
    /// The seed.
    pub seed: u64,
    /// What was found.
    pub findings: Findings,
    /// The log.
    pub trace: Trace,
    /// Events of the simulator.
    pub events: u64,
}

impl Sim {
    /// A scenario without clients and faults, on one node with three apiservers.
    pub fn seed(seed: u64) -> Self {
        Self {
            seed,
            endpoints: 3,
            nodes: 1,
            access: Access::Jackstay,
            clients: Vec::new(),
            faults: Vec::new(),
            settings: Settings::default(),
            max_streams: 100,
            link: None,
            rate: 0,
            is_fleet: false,
        }
    }

    /// The number of apiservers.
    #[must_use]
    pub fn endpoints(mut self, count: usize) -> Self {
        self.endpoints = count;
        self
    }

    /// The number of nodes. Each has all clients.
    #[must_use]
    pub fn nodes(mut self, count: usize) -> Self {
        self.nodes = count;
        self
    }

    /// Adds clients.
    #[must_use]
    pub fn clients(mut self, role: Role, count: usize) -> Self {
        self.clients.push((role, count));
        self
    }

    /// Clients connect through a load balancer, without jackstay.
    #[must_use]
    pub fn direct(mut self) -> Self {
        self.access = Access::Balancer;
        self
    }

    /// `SETTINGS_MAX_CONCURRENT_STREAMS` of the apiservers.
    #[must_use]
    pub fn max_streams(mut self, count: usize) -> Self {
        self.max_streams = count;
        self
    }

    /// `connections.max` of the nodes.
    #[must_use]
    pub fn max_connections(mut self, count: usize) -> Self {
        self.settings.max_connections = count;
        self
    }

    /// Latency and jitter between hosts, in one direction.
    #[must_use]
    pub fn latency(mut self, latency: Duration, jitter: Duration) -> Self {
        self.link = Some((latency, jitter));
        self
    }

    /// The time between two PINGs (`health.ping_interval`).
    #[must_use]
    pub fn ping_interval(mut self, interval: Duration) -> Self {
        self.settings.health.ping_interval = interval;
        self
    }

    /// The nodes are many: the network is coarse, there is no log, and bookmarks and histories of the watch caches are
    /// those of kube-apiserver.
    #[must_use]
    pub fn fleet(mut self) -> Self {
        self.is_fleet = true;
        self
    }

    /// Bytes a second between two hosts, in one direction; without a limit by default.
    #[must_use]
    pub fn rate(mut self, rate: u64) -> Self {
        self.rate = rate;
        self
    }

    /// Adds a fault of a server, from the beginning; see [`Self::at`].
    #[must_use]
    pub fn fault(mut self, server: usize, kind: FaultKind) -> Self {
        self.faults.push(Fault { kind, server, at: Duration::ZERO, until: None });
        self
    }

    /// All packets to and from a server are dropped.
    #[must_use]
    pub fn blackhole(self, server: usize) -> Self {
        self.fault(server, FaultKind::Blackhole)
    }

    /// The last fault begins at this time.
    #[must_use]
    pub fn at(mut self, at: Duration) -> Self {
        if let Some(fault) = self.faults.last_mut() {
            fault.at = at;
        }
        self
    }

    /// The last fault ends at this time.
    #[must_use]
    pub fn until(mut self, until: Duration) -> Self {
        if let Some(fault) = self.faults.last_mut() {
            fault.until = Some(until);
        }
        self
    }

    /// Adds random faults in a window of time. They may overlap.
    #[must_use]
    pub fn random_faults(mut self, count: usize, window: (Duration, Duration)) -> Self {
        let mut rng = fastrand::Rng::with_seed(self.seed ^ 0x5eed);
        for _ in 0..count {
            self.faults.push(random_fault(&mut rng, self.endpoints, window));
        }
        self
    }

    /// The faults.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// What each client of a node does, in the order of their numbers.
    pub fn roles(&self) -> impl Iterator<Item = Role> {
        self.clients.iter().flat_map(|&(role, count)| std::iter::repeat_n(role, count))
    }

    /// Runs for this time, then ends the clients and looks for what is left over.
    #[must_use]
    pub fn run(self, time: Duration) -> Run {
        let seed = self.seed;
        let mut world = self.build();
        world.schedule_faults();
        world.start();
        world.advance(time);
        world.finish();
        let events = world.s.events();
        Run { seed, findings: world.findings, trace: world.s.trace, events }
    }

    /// Runs for this many seconds and reports what the apiservers bear in each. `finishes`: it then ends the clients and
    /// looks for what is left over.
    #[must_use]
    pub fn run_fleet(self, seconds: usize, finishes: bool) -> FleetRun {
        let mut world = self.build();
        world.schedule_faults();
        world.start();
        let mut load = Load::default();
        for _ in 0..seconds {
            world.advance(Duration::from_secs(1));
            load.sample(&world);
        }
        if finishes {
            world.finish();
        }
        FleetRun { load, events: world.s.events(), findings: world.findings }
    }

    fn build(self) -> World {
        let hosts = self.endpoints + self.nodes;
        let mut world = World::new(self.seed, hosts, self.endpoints);
        if self.is_fleet {
            world.net.be_coarse();
            world.s.trace.turn_off();
        }
        world.net.change_all_links(|link| {
            link.rate = self.rate;
            if let Some((latency, jitter)) = self.link {
                (link.latency, link.jitter) = (latency, jitter);
            }
        });
        if self.clients.iter().any(|client| client.0 == Role::Bulk) {
            world.secrets = world::SECRETS;
        }
        let mut servers = Vec::new();
        for at in 0..self.endpoints {
            let process = world.add_process(at, world::Role::Server(at));
            let mut server = Apiserver::new(at, process);
            server.conditions.max_streams = self.max_streams;
            if self.is_fleet {
                server.conditions.bookmarks = Duration::from_secs(60);
                server.conditions.history = u64::MAX;
            }
            world.servers.push(server);
            servers.push(process);
        }
        for at in 0..self.nodes {
            let host = self.endpoints + at;
            let targets = match self.access {
                Access::Jackstay => {
                    let process = world.add_process(host, world::Role::Node(at));
                    let node = Node::new(at as u16, process, &servers, self.settings, &mut world.s);
                    world.nodes.push(node);
                    vec![process]
                }
                Access::Balancer => servers.clone(),
            };
            for role in self.roles() {
                let number = world.clients.len();
                let process = world.add_process(host, world::Role::Client(number));
                let client = Client::new(
                    number as u16,
                    process,
                    targets.clone(),
                    model(role, number, world.s.now),
                );
                world.clients.push(client);
            }
        }
        world.faults = self.faults;
        world
    }
}

fn model(role: Role, number: usize, now: Instant) -> Box<dyn Model> {
    let key = number as u32;
    match role {
        Role::Readers => Box::new(Reader::new(Duration::from_millis(100))),
        Role::Writers => Box::new(Writer::new(Duration::from_millis(200))),
        Role::Informers if number.is_multiple_of(4) => Box::new(Informer::new(Resource::Pods)),
        Role::Informers => Box::new(Informer::new(Resource::ConfigMaps)),
        Role::Kubelets => Box::new(LeaseHolder::kubelet(key)),
        Role::Leaders => Box::new(LeaseHolder::leader(key)),
        Role::Bulk => {
            let modes = [BulkMode::Pages, BulkMode::Whole, BulkMode::Slow];
            Box::new(BulkReader::new(modes[number % modes.len()], now))
        }
        Role::Hostile => Box::new(Burst::new(Duration::from_millis(500), 200)),
    }
}

/// A scenario with a name, as `jackstay-sim` and the tests run it.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// The name.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// The scenario of a seed.
    pub sim: fn(u64) -> Sim,
    /// The virtual time.
    pub time: Duration,
    /// What is promised.
    pub promises: Promises,
}

impl Scenario {
    /// Runs a seed.
    ///
    /// # Errors
    /// The broken promises, the command that repeats the run, and its log.
    pub fn check(&self, seed: u64) -> Result<Run, String> {
        let run = (self.sim)(seed).run(self.time);
        let broken = self.promises.broken_by(&run.findings);
        if broken.is_empty() {
            return Ok(run);
        }
        Err(format!(
            "{}: seed {seed} broke {} promises:\n  {}\n  {}\n{}\n",
            self.name,
            broken.len(),
            broken.join("\n  "),
            run.findings,
            self.repeat_command(seed)
        ))
    }

    /// Whether seeds of it are run with the program as it ships. The others still need the copy of its executor.
    pub fn is_run_by_the_shell(&self) -> bool {
        // `pool-ends` ends the task of a pool, which the program does only when its requests have ended. A run of `bulk`
        // takes seconds.
        !matches!(self.name, "bulk" | "pool-ends")
    }

    /// What is promised of the program as it ships.
    pub fn shell_promises(&self) -> Promises {
        match self.name {
            // Unlike those of the model, readers also make most-recent reads. A list of them waits until the cache has
            // caught up, for at most 3 s (apiserver, `cacher/watch_cache.go`, `blockTimeout`).
            "lag" => Promises { slowest_read: Duration::from_millis(3_100), ..self.promises },
            _ => self.promises,
        }
    }

    /// The command that repeats the run of a seed with its log.
    pub fn repeat_command(&self, seed: u64) -> String {
        format!(
            "repeat it: cargo run --release -p jackstay-sim --bin jackstay-sim --no-default-features -- --scenario {} --seed {seed} --trace",
            self.name
        )
    }
}
