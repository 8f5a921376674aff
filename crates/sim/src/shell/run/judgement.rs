//! Ends the clients of a run and judges what they have seen.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant, UNIX_EPOCH};

use jackstay::upstream::endpoint::Endpoint;
use jackstay_core::backends::WANTED;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::EndpointKey;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::clients::{Holder, check_users, log_own_requests, writers};
use super::leftovers::is_left_over;
use super::outcome::ShellRun;
use super::world::{ClusterState, Node, World};
use crate::balancer::Balancer;
use crate::checker;
use crate::faults::{Fault, FaultKind};
use crate::invariants::Findings;
use crate::net::sockets::SocketNetwork;
use crate::peers::Record;
use crate::shell::group_traffic::group_traffic;
use crate::shell::kernel::START;
use crate::shell::program::server_of;
use crate::shell::servers::Apiserver;
use crate::shell::traffic::Sources;
use crate::shell::{panics, store};

/// The time for what clients have left to end.
const REST: Duration = Duration::from_secs(60);
/// No request of jackstay's own takes longer, if its apiserver answers. A stream that is open before and after it is
/// left over.
const LONGEST_PROBE: Duration = Duration::from_secs(1);

impl World {
    /// Whether a server has requests or watches left over, except one that hears of no end.
    fn has_leftovers(&self, number: usize, faults: &[Fault]) -> bool {
        let is_deaf = |fault: &Fault| fault.server == number && fault.drops_packets();
        self.servers[number].open_requests() > 0 && !faults.iter().any(is_deaf)
    }

    /// Ends the clients, waits, and judges the run.
    pub(crate) async fn finish(mut self, faults: &[Fault]) -> ShellRun {
        let time = clock::elapsed(self.start);
        self.stopper.stop();
        // Without another path, requests arrive in the order in which they got a stream.
        let sent = self.holders.iter().filter(|_| self.has_one_stream).flat_map(Holder::sent);
        let sent: HashMap<_, _> = sent.collect();
        self.holders.iter_mut().for_each(Holder::let_go);
        sleep(REST).await;
        let streams: Vec<_> = self.nodes.iter().map(Node::streams).collect();
        sleep(LONGEST_PROBE).await;
        if self.observer().is_logging() {
            for ClusterState { store, .. } in &self.clusters {
                log_own_requests(store, self.observer());
            }
        }
        let mut record = self.judge_clients();
        if self.is_compressed && record.findings.compressed_lists == 0 {
            record.findings.violation("no list was compressed".to_owned());
        }
        self.check_nodes((&streams, &sent), time, faults, &mut record.findings);
        for number in 0..self.servers.len() {
            if self.has_leftovers(number, faults) {
                let count = self.servers[number].open_requests();
                let text = format!("apiserver {number} has {count} streams left over");
                record.findings.violation(text);
            }
        }
        for panic in panics::take() {
            record.findings.violation(panic);
        }
        let mut hasher = DefaultHasher::new();
        self.network.hash().hash(&mut hasher);
        record.observations.hash(&mut hasher);
        let lines = record.lines.unwrap_or_default();
        let lines = lines.into_iter().map(|(at, line)| format!("{at:?} {line}\n"));
        ShellRun {
            packets: self.network.packets(),
            hash: hasher.finish(),
            log: self.network.log() + &lines.collect::<String>(),
            findings: record.findings,
        }
    }

    /// What jackstay has on each node in the end, and what it has sent. `streams`: the endpoints of each to which
    /// streams were open [`LONGEST_PROBE`] ago, `sent`: when requests were sent whose order counts.
    fn check_nodes(
        &self,
        (streams, sent): (&[Vec<EndpointKey>], &HashMap<String, Instant>),
        time: Duration,
        faults: &[Fault],
        findings: &mut Findings,
    ) {
        let records = self.clusters.iter().flat_map(|cluster| cluster.store.audit().records());
        let mut records: Vec<_> = records.collect();
        // Stable, so that those of one cluster keep their order.
        records.sort_by_key(|record| record.time);
        let servers = self.servers.len();
        if let Some(group) = group_traffic(&records, faults, (servers, UNIX_EPOCH + START)) {
            group.check(findings);
        }
        for (number, node) in self.nodes.iter().enumerate() {
            node.check((number, &self.servers), &streams[number], faults, findings);
            if let Some(balancer) = self.balancer {
                self.check_backends(number, balancer, faults, findings);
            }
            let sources = Sources {
                records: &records,
                connects: &self.network.connects_of(node.proxy.number()),
                metrics: &node.program().metrics.render(),
                sent,
                faults,
                servers: self.servers.len(),
                balancer: self.balancer,
                time,
                start: (self.start, UNIX_EPOCH + START),
            };
            sources.traffic(number).check(number, findings);
            if self.is_compressed && !has_decoded(sources.metrics) {
                findings.violation(format!("node {number}: no watch was compressed"));
            }
        }
    }
}

/// Whether jackstay has decoded compressed watches.
fn has_decoded(metrics: &str) -> bool {
    let mut series = metrics.lines().filter(|line| {
        line.starts_with("jackstay_watch_gzip_bytes_total{") && line.contains("form=\"inflated\"")
    });
    series.any(|line| !line.ends_with(" 0"))
}

impl World {
    /// Judges what the clients of each cluster have seen. Returns the record of the first one, with the observations
    /// of all and what breaks a rule.
    fn judge_clients(&self) -> Record {
        let mut all = Record::default();
        let records: Vec<_> = self.clusters.iter().map(|cluster| cluster.observer.take()).collect();
        let writers = records.iter().flat_map(|record| writers(&record.observations)).collect();
        for ((number, cluster), mut record) in self.clusters.iter().enumerate().zip(records) {
            let restores = if number == 0 { &self.restores[..] } else { &[] };
            let mut history = store::history(&cluster.store, restores);
            history.forgotten.clone_from(&self.forgotten);
            checker::check(&history, &record.observations, &mut record.findings);
            let findings = &mut record.findings;
            check_users((&cluster.store, number), &self.holders, &writers, findings);
            if number == 0 {
                all = record;
                continue;
            }
            let broken = self.other_promises.broken_by(findings).into_iter();
            let broken = broken.map(|text| format!("cluster {number}: {text}"));
            all.findings.violations.extend(broken);
            all.observations.append(&mut record.observations);
            if let (Some(lines), Some(more)) = (&mut all.lines, record.lines) {
                lines.extend(more);
            }
        }
        if let Some(lines) = &mut all.lines {
            lines.sort_by_key(|(at, _)| *at);
        }
        all
    }
}

impl World {
    /// The apiservers behind a balancer are endpoints, of which two serve, and another one that fails is none any more.
    fn check_backends(
        &self,
        node: usize,
        balancer: Balancer,
        faults: &[Fault],
        findings: &mut Findings,
    ) {
        let lasts =
            |server: usize| faults.iter().any(|fault| fault.server == server && fault.lasts());
        let work = (0..self.servers.len()).filter(|&server| !lasts(server)).count();
        let wanted = if balancer.is_sticky { 0 } else { WANTED.min(work) };
        for upstream in self.nodes[node].program().upstreams() {
            let endpoints = upstream.endpoints();
            let backends = endpoints.iter().filter(|endpoint| endpoint.backend.is_some());
            let (serving, failing): (Vec<_>, Vec<_>) =
                backends.partition(|endpoint| endpoint.state() == EndpointState::Ready);
            if serving.len() < wanted {
                let serving = serving.len();
                let text = format!(
                    "node {node}: {serving} of the apiservers behind the balancer serve, at least {wanted} expected"
                );
                findings.violation(text);
            }
            if serving.len() >= WANTED
                && let Some(failing) = failing.first()
            {
                let (label, state) = (&failing.label, failing.state().as_str());
                let text = format!("node {node}: {label} is {state} and an endpoint at the end");
                findings.violation(text);
            }
        }
    }
}

/// The number of the apiserver that the connections of an endpoint reach; `None` for a balancer that leads to any of them.
///
/// # Errors
/// They reach no apiserver.
fn reached(servers: &[Apiserver], endpoint: &Endpoint) -> Result<Option<usize>, ()> {
    let host = &endpoint.address.host;
    let backend = endpoint.backend.as_ref().filter(|backend| !backend.is_indistinct());
    if let Some(backend) = backend {
        servers.iter().position(|server| server.is_backend(backend)).map(Some).ok_or(())
    } else if *host == SocketNetwork::balancer_address().to_string() {
        Ok(None)
    } else {
        server_of(host, servers.len()).map(Some).ok_or(())
    }
}

impl Node {
    /// The endpoints to which streams are open.
    fn streams(&self) -> Vec<EndpointKey> {
        let upstreams = self.program().upstreams();
        let endpoints = upstreams.iter().flat_map(|upstream| upstream.endpoints().to_vec());
        endpoints.filter(|one| one.status().streams > 0).map(|one| one.key()).collect()
    }

    /// Every endpoint without a fault that lasts is ready again a minute after the
    /// end of the scenario, and nothing of the clients is left over.
    fn check(
        &self,
        (number, servers): (usize, &[Apiserver]),
        streams: &[EndpointKey],
        faults: &[Fault],
        findings: &mut Findings,
    ) {
        let program = self.program();
        for upstream in program.upstreams() {
            for endpoint in upstream.endpoints().iter() {
                let label = &endpoint.label;
                let Ok(server) = reached(servers, endpoint) else {
                    findings.violation(format!("node {number}: {label} is no apiserver"));
                    continue;
                };
                // The address of a balancer leads to any of them.
                let is_of_endpoint = |fault: &Fault| server.is_none_or(|one| fault.server == one);
                let lasts = |fault: &Fault| is_of_endpoint(fault) && fault.lasts();
                let server = server.map_or_else(|| label.to_string(), |one| one.to_string());
                let state = endpoint.state();
                if state != EndpointState::Ready && !faults.iter().any(lasts) {
                    let state = state.as_str();
                    let text = format!("node {number}: endpoint {server} is {state} at the end");
                    findings.violation(text);
                }
                // Its own requests hang, too.
                let hangs = |fault: &Fault| fault.kind == FaultKind::Hang && lasts(fault);
                let open = endpoint.status().streams;
                let are_left = open > 0 && streams.contains(&endpoint.key());
                if are_left && !faults.iter().any(hangs) {
                    let text =
                        format!("node {number}: {open} streams to endpoint {server} are left over");
                    findings.violation(text);
                }
            }
        }
        let metrics = program.scrape();
        for line in metrics.lines().filter(|line| is_left_over(line)) {
            findings.violation(format!("node {number}: {line} is left over"));
        }
    }
}
