//! Tests of the watch against a simulated apiserver that replays, reorders, cuts off and refuses events by
//! a random script. In the end the published endpoints must be the current ones. kube's watcher, the
//! object store and the source states are real.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::Response;
use jackstay_core::discovery::own_addresses::OwnAddresses;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::task::LocalSet;

use super::super::transport::{TransportBody, TransportError};
use super::*;
use crate::config;
use crate::observe::Metrics;
use crate::upstream::Upstream;

#[test]
fn backoff_after_failures_doubles_up_to_the_limit() {
    assert_eq!(RETRIES.after(1).pause_at(1.0), RETRY_MIN);
    assert_eq!(RETRIES.after(2).pause_at(1.0), RETRY_MIN * 2);
    assert_eq!(RETRIES.after(100).pause_at(1.0), RETRY_MAX);
    assert_eq!(RETRIES.after(100).pause_at(0.0), RETRY_MAX / 2);
}

/// Applies to both lists: the first one, by which the resource is chosen, and the second one, which the
/// watcher makes.
#[tokio::test(start_paused = true)]
async fn watch_list_that_stalls_is_requested_again_after_timeout() {
    let script = Arc::new(Mutex::new(Script::new(Vec::new())));
    let states = SourceStates::new(upstream(), Box::new(OwnAddresses::default));
    let test = async {
        for lists in 1..3 {
            script.lock().unwrap().stall = lists;
            let scripted = scripted(&script);
            let watching = tokio::task::spawn_local(watch_forever(scripted, Rc::clone(&states)));
            sleep(LIST_TIMEOUT.mul_f64(0.9)).await;
            assert!(states.read(|answers, _| answers.is_empty()), "list {lists}");
            sleep(Duration::from_secs(20)).await;
            assert!(states.read(|answers, _| !answers.is_empty()), "list {lists}");
            watching.abort();
            states.remove(EndpointSource::Slices);
        }
    };
    LocalSet::new().run_until(test).await;
}

/// The next action of the server.
#[derive(Debug, Clone)]
enum Op {
    /// A slice is created or changed.
    Put { slice: u8, host: u8 },
    /// A slice is deleted.
    Delete { slice: u8 },
    /// An earlier event is sent again; its index is this number modulo their count.
    Replay(u8),
    /// DELETED with the version of an earlier event, if its object has a newer version now.
    StaleDelete(u8),
    /// The last event is sent twice.
    Duplicate,
    /// The next two events are sent in reverse order.
    Swap,
    /// A bookmark with the current version, or with the one of the last compaction (`old`).
    Bookmark { old: bool },
    /// The stream ends.
    End,
    /// The stream ends in the middle of an event.
    Cut,
    /// The stream ends with an ERROR event: 410.
    Gone,
    /// All versions before the current one are compacted. A watch from one of them gets 410 as the status
    /// of its response (`at_once`), or as an ERROR event.
    Compact { at_once: bool },
    /// The next request fails.
    Fail,
    /// The next list stops in the middle.
    Stall,
    /// A line that is not JSON is sent.
    Garbage,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..3_u8, 1..250_u8).prop_map(|(slice, host)| Op::Put { slice, host }),
        2 => (0..3_u8).prop_map(|slice| Op::Delete { slice }),
        2 => any::<u8>().prop_map(Op::Replay),
        2 => any::<u8>().prop_map(Op::StaleDelete),
        1 => Just(Op::Duplicate),
        2 => Just(Op::Swap),
        1 => any::<bool>().prop_map(|old| Op::Bookmark { old }),
        1 => Just(Op::End),
        1 => Just(Op::Cut),
        1 => Just(Op::Gone),
        1 => any::<bool>().prop_map(|at_once| Op::Compact { at_once }),
        1 => Just(Op::Fail),
        1 => Just(Op::Stall),
        1 => Just(Op::Garbage),
    ];
    proptest::collection::vec(op, 0..60)
}

#[derive(Debug)]
struct Script {
    ops: VecDeque<Op>,
    version: u64,
    /// The current address of each slice.
    current: BTreeMap<String, String>,
    /// All events: version and JSON.
    log: Vec<(u64, Value)>,
    /// A watch from an earlier version gets 410.
    compacted: u64,
    refuse_at_once: bool,
    /// Whether the next request fails.
    fail: bool,
    /// The number of the next list that stalls, counted from 1; 0 for none.
    stall: usize,
    /// The senders of bodies that have not ended.
    open: Vec<mpsc::Sender<Result<Bytes, TransportError>>>,
    /// Notified when all operations have been executed.
    done: Arc<Notify>,
    requests: usize,
}

impl Script {
    fn new(ops: Vec<Op>) -> Self {
        let mut script = Self {
            ops: ops.into(),
            version: 96, // so that the number of digits changes after a few events
            current: BTreeMap::new(),
            log: Vec::new(),
            compacted: 0,
            refuse_at_once: false,
            fail: false,
            stall: 0,
            open: Vec::new(),
            done: Arc::default(),
            requests: 0,
        };
        // One slice is never deleted, so that the answer is never empty.
        script.put("anchor", "10.9.9.9");
        script
    }

    fn put(&mut self, name: &str, address: &str) -> Value {
        self.version += 1;
        let kind = if self.current.contains_key(name) { "MODIFIED" } else { "ADDED" };
        self.current.insert(name.to_owned(), address.to_owned());
        self.event(kind, name, address)
    }

    fn delete(&mut self, name: &str) -> Option<Value> {
        let address = self.current.remove(name)?;
        self.version += 1;
        Some(self.event("DELETED", name, &address))
    }

    fn event(&mut self, kind: &str, name: &str, address: &str) -> Value {
        let event = json!({ "type": kind, "object": slice(name, self.version, address) });
        self.log.push((self.version, event.clone()));
        event
    }

    /// The response to a request: its status, the frames of its body, and whether the body stays open.
    fn respond(&mut self, path: &str, query: &str) -> (u16, Vec<String>, bool) {
        self.requests += 1;
        assert!(path.ends_with("/namespaces/default/endpointslices"), "{path}");
        assert!(
            query.contains("labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes"),
            "{query}"
        );
        let status = |code: u16, reason: &str| {
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                "reason": reason, "message": reason,
            });
            (code, vec![status.to_string()], false)
        };
        if std::mem::take(&mut self.fail) {
            return status(500, "InternalError");
        }
        if !query.contains("watch=true") {
            let items: Vec<_> = self
                .current
                .iter()
                .map(|(name, address)| slice(name, self.version_of(name), address))
                .collect();
            let list = json!({
                "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
                "metadata": { "resourceVersion": self.version.to_string() }, "items": items,
            });
            let mut list = list.to_string();
            let stall = self.stall == 1;
            self.stall = self.stall.saturating_sub(1);
            if stall {
                list.truncate(list.len() / 2);
            }
            return (200, vec![list], stall);
        }
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        let from: u64 = from.expect("a version to resume from").parse().expect("a number");
        if from < self.compacted {
            if self.refuse_at_once {
                return status(410, "Expired");
            }
            return (200, vec![gone()], false);
        }
        let missed = self.log.iter().filter(|(version, _)| *version > from);
        let mut frames: Vec<String> = missed.map(|(_, event)| line(event)).collect();
        // The first of two events that are sent in reverse order.
        let mut delayed: Option<String> = None;
        let mut swap = false;
        while let Some(op) = self.ops.pop_front() {
            let mut emit = |frames: &mut Vec<String>, frame: String| {
                if std::mem::take(&mut swap) {
                    frames.extend(delayed.replace(frame));
                } else {
                    frames.push(frame);
                    frames.extend(delayed.take());
                }
            };
            match op {
                Op::Put { slice, host } => {
                    let event = self.put(&format!("s{slice}"), &format!("10.0.0.{host}"));
                    emit(&mut frames, line(&event));
                }
                Op::Delete { slice } => {
                    if let Some(event) = self.delete(&format!("s{slice}")) {
                        emit(&mut frames, line(&event));
                    }
                }
                Op::Replay(at) => {
                    let at = usize::from(at) % self.log.len();
                    frames.push(line(&self.log[at].1));
                }
                Op::StaleDelete(at) => {
                    let (version, event) = &self.log[usize::from(at) % self.log.len()];
                    let name = event["object"]["metadata"]["name"].as_str().unwrap();
                    if *version < self.version_of(name) {
                        let mut event = event.clone();
                        event["type"] = "DELETED".into();
                        frames.push(line(&event));
                    }
                }
                Op::Duplicate => frames.extend(frames.last().cloned()),
                Op::Swap => swap = true,
                Op::Bookmark { old } => {
                    let version = if old { self.compacted } else { self.version };
                    // A bookmark must not overtake a delayed event.
                    if delayed.is_none() {
                        let object = json!({
                            "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
                            "metadata": { "resourceVersion": version.to_string() },
                        });
                        frames.push(line(&json!({ "type": "BOOKMARK", "object": object })));
                    }
                }
                Op::Gone => {
                    frames.extend(delayed.take());
                    frames.push(gone());
                    return (200, frames, false);
                }
                Op::End | Op::Cut => {
                    frames.extend(delayed.take());
                    if matches!(op, Op::Cut) {
                        frames.push("{\"type\":\"ADDED\",\"obj".into());
                    }
                    return (200, frames, false);
                }
                Op::Compact { at_once } => {
                    (self.compacted, self.refuse_at_once) = (self.version, at_once);
                }
                Op::Fail => self.fail = true,
                Op::Stall => self.stall = 1,
                Op::Garbage => frames.push("garbage\n".into()),
            }
        }
        frames.extend(delayed);
        self.done.notify_one();
        (200, frames, true)
    }

    fn version_of(&self, name: &str) -> u64 {
        let of = |(version, event): &(u64, Value)| {
            (event["object"]["metadata"]["name"] == name).then_some(*version)
        };
        self.log.iter().filter_map(of).max().unwrap_or(0)
    }
}

fn slice(name: &str, version: u64, address: &str) -> Value {
    json!({
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name, "namespace": "default", "resourceVersion": version.to_string(),
            "labels": { "kubernetes.io/service-name": "kubernetes" },
        },
        "addressType": "IPv4",
        "ports": [{ "name": "https", "protocol": "TCP", "port": 6443 }],
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
    })
}

fn line(event: &Value) -> String {
    format!("{event}\n")
}

fn gone() -> String {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410,
        "reason": "Expired", "message": "too old resource version",
    });
    line(&json!({ "type": "ERROR", "object": status }))
}

/// A transport for kube's client that responds by the script.
fn scripted(script: &Arc<Mutex<Script>>) -> Transport {
    let script = Arc::clone(script);
    Transport::new(tower::service_fn(move |request: Request<KubeBody>| {
        let (send, body) = mpsc::channel(10_000);
        let query = request.uri().query().unwrap_or_default().to_owned();
        let mut script = script.lock().unwrap();
        let (code, frames, stays_open) = script.respond(request.uri().path(), &query);
        for frame in frames {
            send.try_send(Ok(frame.into())).unwrap();
        }
        if stays_open {
            script.open.push(send);
        }
        let response = Response::builder().status(code).body(TransportBody(body)).unwrap();
        std::future::ready(Ok(response))
    }))
}

fn upstream() -> Arc<Upstream> {
    let config = config::Upstream {
        endpoints: Vec::new(),
        endpoints_file: None,
        ..crate::control::discovery::tests::config()
    };
    Upstream::load(config, &[], &Metrics::new())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn watch_scripted_faults_ends_with_current_endpoints(ops in ops()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        let script = Arc::new(Mutex::new(Script::new(ops)));
        let done = Arc::clone(&script.lock().unwrap().done);
        let states = SourceStates::new(upstream(), Box::new(OwnAddresses::default));
        let mut published: Vec<_> = LocalSet::new().block_on(&runtime, async {
            let scripted = scripted(&script);
            let watching = tokio::task::spawn_local(watch_forever(scripted, Rc::clone(&states)));
            // An hour of paused time is enough for the script.
            tokio::time::timeout(Duration::from_secs(3600), done.notified()).await.expect("the script ends");
            // The last events may arrive after a timeout and a pause.
            sleep(LIST_TIMEOUT + Duration::from_secs(120)).await;
            watching.abort();
            states.read(|answers, _| {
                answers[&EndpointSource::Slices].candidates.iter().map(|c| c.address.host.clone()).collect()
            })
        });
        published.sort_unstable();
        let script = script.lock().unwrap();
        let mut current: Vec<_> = script.current.values().cloned().collect();
        current.sort_unstable();
        current.dedup();
        prop_assert_eq!(published, current);
        prop_assert!(script.requests < 300, "{} requests", script.requests);
    }
}
