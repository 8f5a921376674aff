//! What a jackstay process shows: the states of its endpoints and connections in `/status`, and its log.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use jackstay_core::connection::ConnectionState;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_sys::utc::Utc;
use serde_json::Value;

use crate::clients::Ledger;
use crate::support::{pages, pause};
use crate::timeline::{Entry, Timeline};

/// Time between two reads of `/status`.
const INTERVAL: Duration = Duration::from_millis(20);

/// The body of an admin page as JSON.
async fn json(admin: SocketAddr, path: &str) -> Option<Value> {
    let page = pages::get(admin, path).await.ok()?;
    serde_json::from_str(page.split_once("\r\n\r\n")?.1).ok()
}

/// Records every change of the states in `/status`.
pub async fn follow_status(admin: SocketAddr, endpoints: Vec<SocketAddr>, ledger: Arc<Ledger>) {
    let mut known = Known::default();
    loop {
        if let Some(status) = json(admin, "/status").await {
            known.update(&status, &endpoints, &ledger);
        }
        pause(INTERVAL).await;
    }
}

#[derive(Default)]
struct Known {
    endpoints: BTreeMap<usize, EndpointState>,
    /// By endpoint and local address: the number and the state.
    connections: BTreeMap<(usize, String), (u32, ConnectionState)>,
    numbers: u32,
}

impl Known {
    fn update(&mut self, status: &Value, addresses: &[SocketAddr], ledger: &Ledger) {
        let mut present = BTreeSet::new();
        for value in status["upstreams"][0]["endpoints"].as_array().into_iter().flatten() {
            let is_of = |address: &SocketAddr| value["address"] == address.to_string();
            let Some(endpoint) = addresses.iter().position(is_of) else { continue };
            let is = |state: &EndpointState| value["state"] == state.as_str();
            if let Some(state) = EndpointState::ALL.into_iter().find(is)
                && self.endpoints.insert(endpoint, state) != Some(state)
            {
                ledger.record(Entry::Endpoint { endpoint, state });
            }
            for connection in value["connections"].as_array().into_iter().flatten() {
                let key = (endpoint, connection["local"].as_str().unwrap_or_default().to_owned());
                self.connection(&key, &connection["state"], ledger);
                present.insert(key);
            }
        }
        self.connections.retain(|key, (number, state)| {
            let is_present = present.contains(key);
            if !is_present && *state != ConnectionState::Dead {
                let (endpoint, number) = (key.0, *number);
                ledger.record(Entry::Connection { endpoint, number, state: ConnectionState::Dead });
            }
            is_present
        });
    }

    fn connection(&mut self, key: &(usize, String), state: &Value, ledger: &Ledger) {
        let is = |known: &ConnectionState| *state == known.as_str();
        let Some(state) = ConnectionState::ALL.into_iter().find(is) else { return };
        let known = self.connections.entry(key.clone()).or_insert_with(|| {
            self.numbers += 1;
            (self.numbers, ConnectionState::Draining)
        });
        if known.1 != state {
            known.1 = state;
            ledger.record(Entry::Connection { endpoint: key.0, number: known.0, state });
        }
    }
}

/// The entries of a log in JSON that only the log shows. `started` is the time of the start of the run.
pub fn read_log(log: &str, started: SystemTime, endpoints: &[SocketAddr]) -> Timeline {
    let mut timeline = Timeline::new();
    for line in log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        let entry = match line["message"].as_str() {
            Some("watch resumed") => Entry::WatchResumed,
            Some("watch moved") => Entry::WatchMoved,
            // A connection may be suspect for a shorter time than that between two reads of `/status`.
            Some("connection changed its state") if line["to"] == "suspect" => {
                let is_of = |address: &SocketAddr| line["endpoint"] == address.to_string();
                let Some(endpoint) = endpoints.iter().position(is_of) else { continue };
                Entry::Connection { endpoint, number: 0, state: ConnectionState::Suspect }
            }
            Some("request") if line["hedged"] == true => Entry::HedgedReadAnswered,
            _ => continue,
        };
        let time = line["timestamp"].as_str().and_then(Utc::parse).expect("a time");
        let at = time.0.duration_since(started).unwrap_or_default();
        timeline.push((at, entry));
    }
    timeline
}
