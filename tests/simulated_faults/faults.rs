//! The faults of the simulation, made with nftables and with the small apiservers.

use std::process::Command;
use std::time::Duration;

use jackstay_apiserver::{ApiServerHandle, ScriptedResponse};
use jackstay_sim::faults::{Fault, FaultKind};

use crate::support::netns::nft;

/// How long a server that shuts down finishes its requests.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);

/// The body of a rejection by API Priority and Fairness.
const TOO_MANY: &str = "Too many requests, please try again later.";

/// Adds the chain of the rules. Packets are dropped on arrival, as in the network: the sender's kernel does not notice.
pub fn prepare() {
    nft(
        "add table inet faults; add chain inet faults input { type filter hook input priority 0; }",
    );
}

/// Faults that begin at the same time.
pub struct Beginning<'a> {
    faults: Vec<Fault>,
    servers: &'a [ApiServerHandle],
    rules: String,
}

impl<'a> Beginning<'a> {
    /// Prepares the faults. Flows of the present connections are those to be forgotten.
    pub fn new(faults: Vec<Fault>, servers: &'a [ApiServerHandle]) -> Self {
        let rules = faults.iter().flat_map(|fault| rules(fault.kind, &servers[fault.server]));
        let rules = rules.collect();
        Self { faults, servers, rules }
    }

    pub fn begin(self) {
        if !self.rules.is_empty() {
            nft(&self.rules);
        }
        // At the same moment: a server that still runs would carry out a write that the others deliver late.
        std::thread::scope(|threads| {
            for fault in &self.faults {
                threads.spawn(|| begin_at(fault.kind, &self.servers[fault.server]));
            }
        });
    }
}

/// Ends a fault of a server.
pub fn end(fault: &Fault, servers: &[ApiServerHandle]) {
    let server = &servers[fault.server];
    match fault.kind {
        FaultKind::Stop => server.cont(),
        FaultKind::Kill | FaultKind::ShutDown => {
            server.restart().unwrap();
            // The watch cache of an apiserver that has just started has no history.
            server.compact();
        }
        kind => panic!("{kind:?} does not end"),
    }
}

/// The rules of a fault of the network.
fn rules(kind: FaultKind, server: &ApiServerHandle) -> Vec<String> {
    let ip = server.addr.ip();
    let rule = |text: String| format!("add rule inet faults input meta l4proto tcp {text};");
    let (to, from) = (format!("ip daddr {ip}"), format!("ip saddr {ip}"));
    match kind {
        FaultKind::Blackhole => vec![rule(format!("{to} drop")), rule(format!("{from} drop"))],
        FaultKind::BlackholeOneWay => vec![rule(format!("{to} drop"))],
        FaultKind::Loss(chance) => {
            let lost = format!("numgen random mod 1000 < {:.0} drop", chance * 1_000.0);
            vec![rule(format!("{to} {lost}")), rule(format!("{from} {lost}"))]
        }
        FaultKind::ForgetFlows { dropped } => {
            let ports = ports_to(server);
            // The resets pass.
            let reset = "tcp flags & rst == 0 reject with tcp reset";
            let verdict = |is_dropped| match (is_dropped, dropped) {
                (true, _) => Some("drop"),
                (false, [false, false]) => Some(reset),
                (false, _) => None,
            };
            let to = verdict(dropped[0]).map(|what| rule(format!("{to} tcp sport {ports} {what}")));
            let from =
                verdict(dropped[1]).map(|what| rule(format!("{from} tcp dport {ports} {what}")));
            to.into_iter().chain(from).collect()
        }
        _ => Vec::new(),
    }
}

/// The local ports of the established connections to a server, as a set of nftables.
fn ports_to(server: &ApiServerHandle) -> String {
    let to = format!("dst {}", server.addr.ip());
    let output = Command::new("ss").args(["-Htn", "state", "established", &to]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let local = |line: &str| Some(line.split_whitespace().nth(2)?.rsplit_once(':')?.1.to_owned());
    let ports: Vec<_> = text.lines().filter_map(local).collect();
    assert!(!ports.is_empty(), "no connection to {}", server.addr);
    format!("{{ {} }}", ports.join(", "))
}

/// Begins a fault of a process.
fn begin_at(kind: FaultKind, server: &ApiServerHandle) {
    match kind {
        FaultKind::Stop => server.stop(),
        FaultKind::Kill => server.kill(),
        FaultKind::ShutDown => server.shutdown(SHUTDOWN_GRACE),
        // As without etcd: requests have no response, and running watches and the other checks go on.
        FaultKind::Hang => server.set_faults(|faults| {
            faults.unready = true;
            faults.lose_next = usize::MAX;
        }),
        FaultKind::Overload => server.set_faults(|faults| {
            let mut rejection = ScriptedResponse::status(429, "TooManyRequests", "");
            rejection.body = TOO_MANY.into();
            faults.fail_next = Some((usize::MAX, rejection.header("retry-after", "1")));
        }),
        FaultKind::Goaway(chance) => server.set_faults(|faults| faults.goaway_chance = chance),
        FaultKind::Blackhole
        | FaultKind::BlackholeOneWay
        | FaultKind::Loss(_)
        | FaultKind::ForgetFlows { .. } => {}
        kind => panic!("{kind:?} cannot be made"),
    }
}
