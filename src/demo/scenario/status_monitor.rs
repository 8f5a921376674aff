//! Asks the proxy, over and over, what it knows, and says what has changed since: who noticed a
//! fault, and when.
//!
//! It reads `/status` alone, as an operator would.

use crate::demo::scenario::display::{ProgressDisplay, Row};
use crate::observe::counted;
use serde_json::Value;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two questions: what is noticed is known to this much.
const LOOK: Duration = Duration::from_millis(20);
/// Between two pictures for people.
const DRAW: Duration = Duration::from_millis(200);

/// Something that the proxy has noticed.
#[derive(Debug, Clone)]
pub struct Notice {
    /// When it was seen in its status.
    pub at: Instant,
    /// Which apiserver it is about.
    pub server: usize,
    /// In a word or two.
    pub what: String,
}

/// Asks on a thread of its own. Dropping it stops it.
pub struct StatusMonitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    notices: Mutex<Vec<Notice>>,
    rows: Mutex<Vec<Row>>,
}

/// What was known of an endpoint at the last look.
#[derive(Debug, Default)]
struct Known {
    state: String,
    /// State by local address.
    connections: HashMap<String, String>,
}

impl StatusMonitor {
    /// Starts asking with `fetch` about the endpoints of apiservers, given with their names.
    pub fn start(
        servers: Vec<(String, SocketAddr)>,
        show: Arc<ProgressDisplay>,
        fetch: impl Fn() -> io::Result<Value> + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let ours = shared.clone();
        let thread = std::thread::Builder::new().name("witness".to_owned()).spawn(move || {
            let mut known: Vec<Known> = servers.iter().map(|_| Known::default()).collect();
            let mut drawn = Instant::now();
            while !ours.stop.load(Relaxed) {
                // No answer changes nothing; the next look is near.
                if let Ok(status) = fetch() {
                    ours.look(&status, &servers, &mut known, &show);
                }
                if drawn.elapsed() >= DRAW {
                    drawn = Instant::now();
                    show.draw(&ours.rows());
                }
                std::thread::sleep(LOOK);
            }
            show.draw(&ours.rows());
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The first thing noticed about an apiserver since a moment.
    pub fn first(&self, server: usize, since: Instant) -> Option<Notice> {
        let notices = lock(&self.shared.notices);
        notices.iter().find(|n| n.server == server && n.at >= since).cloned()
    }

    /// Each apiserver as it is known now.
    pub fn rows(&self) -> Vec<Row> {
        self.shared.rows()
    }
}

impl Drop for StatusMonitor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn rows(&self) -> Vec<Row> {
        lock(&self.rows).clone()
    }

    fn look(
        &self,
        status: &Value,
        servers: &[(String, SocketAddr)],
        known: &mut [Known],
        show: &ProgressDisplay,
    ) {
        let at = Instant::now();
        let none = Vec::new();
        let upstreams = status["upstreams"].as_array().unwrap_or(&none);
        let endpoints: Vec<&Value> =
            upstreams.iter().filter_map(|u| u["endpoints"].as_array()).flatten().collect();
        let mut rows = Vec::new();
        for (server, ((name, addr), known)) in servers.iter().zip(known).enumerate() {
            let address = addr.to_string();
            let Some(endpoint) = endpoints.iter().find(|e| e["address"] == *address) else {
                continue;
            };
            let (news, row) = known.update(name, endpoint);
            for (what, line) in news {
                show.say(&line);
                lock(&self.notices).push(Notice { at, server, what });
            }
            rows.push(row);
        }
        *lock(&self.rows) = rows;
    }
}

impl Known {
    /// Takes in an endpoint's status; returns what is new, in short and in full, and its row.
    fn update(&mut self, name: &str, endpoint: &Value) -> (Vec<(String, String)>, Row) {
        let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
        let mut news = Vec::new();
        let none = Vec::new();
        let list = endpoint["connections"].as_array().unwrap_or(&none);
        let connections: HashMap<_, _> =
            list.iter().map(|c| (text(&c["local"]), text(&c["state"]))).collect();
        let mut changes: Vec<(&str, usize)> = Vec::new();
        for (local, before) in &self.connections {
            let now = connections.get(local).map_or("closed", String::as_str);
            if now != before {
                match changes.iter_mut().find(|(state, _)| *state == now) {
                    Some((_, count)) => *count += 1,
                    None => changes.push((now, 1)),
                }
            }
        }
        for (now, count) in changes {
            news.push((
                now.to_owned(),
                format!("  jackstay: {} to {name} {now}", counted(count, "connection")),
            ));
        }
        let (state, reason) = (text(&endpoint["state"]), text(&endpoint["reason"]));
        if state != self.state {
            if !self.state.is_empty() {
                news.push((state.clone(), format!("  jackstay: {name} is {state}: {reason}")));
            }
            self.state.clone_from(&state);
        }
        self.connections = connections;
        let sum = |key: &str| list.iter().filter_map(|c| c[key].as_u64()).sum();
        let rtt = list.iter().filter_map(|c| c["rtt_ms"].as_f64()).reduce(f64::min);
        let row = Row {
            name: name.to_owned(),
            address: text(&endpoint["address"]),
            state,
            reason,
            connections: list.len() as u64,
            streams: sum("streams"),
            watches: sum("watches"),
            rtt_ms: rtt,
        };
        (news, row)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn changes_are_news_and_beginnings_are_not() {
        let mut known = Known::default();
        let endpoint = |state: &str, connections: Value| json!({ "address": "x", "state": state, "reason": "why", "connections": connections });
        let live = json!([{ "local": "1", "state": "live" }, { "local": "2", "state": "live" }]);
        assert_eq!(known.update("a", &endpoint("ready", live)).0, []);
        let after =
            json!([{ "local": "1", "state": "suspect" }, { "local": "3", "state": "live" }]);
        let (news, row) = known.update("a", &endpoint("ready", after.clone()));
        let mut short: Vec<_> = news.into_iter().map(|(what, _)| what).collect();
        short.sort();
        assert_eq!((short, row.connections), (vec!["closed".to_owned(), "suspect".to_owned()], 2));
        let (news, _) = known.update("a", &endpoint("ejected", after));
        assert_eq!(news[0].1, "  jackstay: a is ejected: why");
        assert_eq!(known.update("a", &Value::Null).1.address, "-");
    }
}
