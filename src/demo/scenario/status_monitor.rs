//! Polls the proxy's `/status`, as an operator would, and records when the proxy reported which change.

use crate::demo::lock;
use crate::demo::scenario::display::{ProgressDisplay, Row};
use crate::observe::quantity;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Polling interval, which limits the accuracy of detection times.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Interval between two redraws of the table.
const DRAW_INTERVAL: Duration = Duration::from_millis(200);

/// A state change that the proxy reported.
#[derive(Debug, Clone)]
pub struct Detection {
    /// When `/status` first showed the change.
    pub at: Instant,
    /// Index of the apiserver.
    pub server: usize,
    /// The new state.
    pub state: String,
}

/// The handle of the thread that polls. Dropping it stops the thread.
pub struct StatusMonitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    detections: Mutex<Vec<Detection>>,
    rows: Mutex<Vec<Row>>,
}

/// State of an endpoint at the last poll.
#[derive(Debug, Default)]
struct EndpointSnapshot {
    state: String,
    /// Connection states by local address.
    connections: HashMap<String, String>,
}

impl StatusMonitor {
    /// Starts polling with `fetch`. `servers` holds name and address of each apiserver.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub fn start(
        servers: Vec<(String, SocketAddr)>,
        display: Arc<ProgressDisplay>,
        fetch: impl Fn() -> io::Result<Value> + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let polled = shared.clone();
        let thread = std::thread::Builder::new().name("status".to_owned()).spawn(move || {
            let mut known = Vec::new();
            known.resize_with(servers.len(), EndpointSnapshot::default);
            let mut drawn = Instant::now();
            while !polled.stop.load(Relaxed) {
                // A failed poll is repeated after the interval.
                if let Ok(status) = fetch() {
                    polled.apply(&status, &servers, &mut known, &display);
                }
                if drawn.elapsed() >= DRAW_INTERVAL {
                    drawn = Instant::now();
                    display.draw(&polled.rows());
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            display.draw(&polled.rows());
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The first state change of an apiserver or its connections since a moment.
    pub fn first_detection(&self, server: usize, since: Instant) -> Option<Detection> {
        let detections = lock(&self.shared.detections);
        detections.iter().find(|found| found.server == server && found.at >= since).cloned()
    }

    /// The rows of all apiservers at the last poll.
    pub fn rows(&self) -> Vec<Row> {
        self.shared.rows()
    }
}

impl Drop for StatusMonitor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic was printed by the thread.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn rows(&self) -> Vec<Row> {
        lock(&self.rows).clone()
    }

    fn apply(
        &self,
        status: &Value,
        servers: &[(String, SocketAddr)],
        known: &mut [EndpointSnapshot],
        display: &ProgressDisplay,
    ) {
        let at = Instant::now();
        let upstreams = status["upstreams"].as_array().into_iter().flatten();
        let endpoints: Vec<&Value> =
            upstreams.filter_map(|upstream| upstream["endpoints"].as_array()).flatten().collect();
        let mut rows = Vec::new();
        for (server, ((name, addr), known)) in servers.iter().zip(known).enumerate() {
            let address = addr.to_string();
            let Some(endpoint) = endpoints.iter().find(|e| e["address"] == *address) else {
                continue;
            };
            let (changes, row) = known.update(name, endpoint);
            for (state, line) in changes {
                display.log(&line);
                lock(&self.detections).push(Detection { at, server, state });
            }
            rows.push(row);
        }
        *lock(&self.rows) = rows;
    }
}

impl EndpointSnapshot {
    /// Applies an endpoint's status; returns its changes (state, log line) and its row.
    fn update(&mut self, name: &str, endpoint: &Value) -> (Vec<(String, String)>, Row) {
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let mut changes = Vec::new();
        let none = Vec::new();
        let list = endpoint["connections"].as_array().unwrap_or(&none);
        let connections: HashMap<_, _> =
            list.iter().map(|c| (text(&c["local"]), text(&c["state"]))).collect();
        let mut changed_connections: BTreeMap<&str, usize> = BTreeMap::new();
        for (local, previous) in &self.connections {
            let state = connections.get(local).map_or("closed", String::as_str);
            if state != previous {
                *changed_connections.entry(state).or_default() += 1;
            }
        }
        for (state, count) in changed_connections {
            let line = format!("  jackstay: {} to {name} {state}", quantity(count, "connection"));
            changes.push((state.to_owned(), line));
        }
        let state = text(&endpoint["state"]);
        if state != self.state && !self.state.is_empty() {
            let reason = text(&endpoint["reason"]);
            changes.push((state.clone(), format!("  jackstay: {name} is {state}: {reason}")));
        }
        self.state.clone_from(&state);
        self.connections = connections;
        let sum = |key: &str| list.iter().filter_map(|c| c[key].as_u64()).sum();
        let rtt = list.iter().filter_map(|c| c["rtt_ms"].as_f64()).reduce(f64::min);
        let row = Row {
            name: name.to_owned(),
            address: text(&endpoint["address"]),
            state,
            connections: list.len() as u64,
            streams: sum("streams"),
            watches: sum("watches"),
            rtt_ms: rtt,
        };
        (changes, row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn update_reports_changes_and_not_the_initial_state() {
        let mut known = EndpointSnapshot::default();
        let endpoint = |state: &str, connections: Value| json!({ "address": "x", "state": state, "reason": "why", "connections": connections });
        let live = json!([{ "local": "1", "state": "live" }, { "local": "2", "state": "live" }]);
        assert_eq!(known.update("a", &endpoint("ready", live)).0, []);
        let after =
            json!([{ "local": "1", "state": "suspect" }, { "local": "3", "state": "live" }]);
        let (changes, row) = known.update("a", &endpoint("ready", after.clone()));
        let states: Vec<_> = changes.iter().map(|(state, _)| state.as_str()).collect();
        assert_eq!((states, row.connections), (vec!["closed", "suspect"], 2));
        let (changes, _) = known.update("a", &endpoint("ejected", after));
        assert_eq!(changes[0].1, "  jackstay: a is ejected: why");
        assert_eq!(known.update("a", &Value::Null).1.address, "-");
    }
}
