//! Tests of the watch against a simulated apiserver that replays, reorders, cuts off and refuses events by
//! a random script. In the end the published endpoints must be the current ones. The watch, the object store and the
//! source states are real.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use jackstay_core::discovery::own_addresses::OwnAddresses;
use jackstay_core::lag::Expected;
use jackstay_core::restore::Suspicion;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::task::LocalSet;

use super::super::requests::ResponseChunks;
use super::*;
use crate::observe::Metrics;
use crate::upstream::Upstream;
use jackstay_config as config;

#[test]
fn backoff_after_failures_doubles_up_to_the_limit() {
    assert_eq!(RETRIES.after(1).pause_at(1.0), RETRY_MIN);
    assert_eq!(RETRIES.after(2).pause_at(1.0), RETRY_MIN * 2);
    assert_eq!(RETRIES.after(100).pause_at(1.0), RETRY_MAX);
    assert_eq!(RETRIES.after(100).pause_at(0.0), RETRY_MAX / 2);
}

#[tokio::test(start_paused = true)]
async fn list_that_stalls_is_requested_again_after_timeout() {
    let script = Arc::new(Mutex::new(Script::new(Vec::new())));
    let states = SourceStates::new(upstream(), Box::new(OwnAddresses::default));
    let test = async {
        script.lock().unwrap().stall = true;
        let scripted = Scripted(Arc::clone(&script));
        let watching = tokio::task::spawn_local(watch_forever(scripted, Rc::clone(&states)));
        sleep(LIST_TIMEOUT.mul_f64(0.9)).await;
        assert!(states.read(|answers, _| answers.is_empty()));
        sleep(Duration::from_secs(20)).await;
        assert!(states.read(|answers, _| !answers.is_empty()));
        watching.abort();
    };
    LocalSet::new().run_until(test).await;
}

/// A proxy on the path may have lost the watch, and its connection still answers.
#[tokio::test(start_paused = true)]
async fn watch_that_does_not_end_is_left_for_another_one() {
    let script = Arc::new(Mutex::new(Script::new(Vec::new())));
    let states = SourceStates::new(upstream(), Box::new(OwnAddresses::default));
    let requests = || script.lock().unwrap().requests;
    let test = async {
        let scripted = Scripted(Arc::clone(&script));
        let watching = tokio::task::spawn_local(watch_forever(scripted, Rc::clone(&states)));
        sleep(WATCH_TIMEOUT).await;
        assert_eq!(requests(), 2, "a list and a watch");
        sleep(2 * WATCH_GRACE).await;
        assert_eq!(requests(), 3, "the watch goes on");
        watching.abort();
    };
    LocalSet::new().run_until(test).await;
}

/// Etcd is restored while the first list is on its way.
struct RestoredMeanwhile(Scripted, Rc<SourceStates>);

impl Requests for RestoredMeanwhile {
    type Body = ScriptedBody;

    async fn get(
        &self,
        target: &str,
        is_watch: bool,
    ) -> Result<(StatusCode, ScriptedBody), RequestError> {
        let restores = &self.1.upstream().restores;
        if restores.recognised_notice() == 0 {
            let now = clock::now();
            let seen =
                Expected { resource: "pods".into(), version: 100, shown_by: "a".into(), at: now };
            restores.recognised(&Suspicion::new(&seen, "pods".into(), now), 20, 100, now);
        }
        self.0.get(target, is_watch).await
    }
}

/// The version of that list may be one of the lost history.
#[tokio::test(start_paused = true)]
async fn restore_that_is_recognised_during_a_list_is_followed_by_another_list() {
    let script = Arc::new(Mutex::new(Script::new(Vec::new())));
    let states = SourceStates::new(upstream(), Box::new(OwnAddresses::default));
    let test = async {
        let requests = RestoredMeanwhile(Scripted(Arc::clone(&script)), Rc::clone(&states));
        let watching = tokio::task::spawn_local(watch_forever(requests, states));
        sleep(WATCH_TIMEOUT / 2).await;
        watching.abort();
    };
    LocalSet::new().run_until(test).await;
    let requests = script.lock().unwrap().requests;
    // Whether the first watch is still sent is left to chance.
    assert!(matches!(requests, 3 | 4), "{requests} requests: two lists and one or two watches");
}

/// A body that never ends.
struct EndlessBody;

impl ResponseChunks for EndlessBody {
    async fn next(&mut self, _: bool) -> Option<Result<Bytes, RequestError>> {
        std::future::pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn message_of_a_body_that_does_not_arrive_is_empty() {
    assert_eq!(message_of(EndlessBody).await, "");
}

/// After the answers to a watch: whether the objects must be listed again, or the version from which the watch
/// continues.
async fn follow(responses: Vec<(u16, String)>) -> Result<String, bool> {
    let server = Answers { responses: RefCell::new(responses.into()), ..Answers::default() };
    let mut version = "7".to_owned();
    let resource = WatchedResource::SlicesV1;
    let followed = follow_events(&&server, resource, &mut version, drop).await;
    followed.map(|()| version).map_err(|error| error.needs_list)
}

#[tokio::test(start_paused = true)]
async fn follow_events_needs_a_list_if_the_version_is_gone() {
    let event = |kind: &str, object: Value| line(&json!({ "type": kind, "object": object }));
    for (code, needs_list) in [(403, true), (404, true), (410, true), (401, false), (500, false)] {
        let status = json!({ "kind": "Status", "code": code }).to_string();
        assert_eq!(follow(vec![(code, status)]).await, Err(needs_list), "response {code}");
    }
    for (code, needs_list) in [(404, true), (410, true), (403, false), (500, false)] {
        let error = event("ERROR", json!({ "code": code }));
        assert_eq!(follow(vec![(200, error)]).await, Err(needs_list), "event {code}");
    }
    let unversioned = event("ADDED", json!({ "metadata": { "name": "a" } }));
    assert_eq!(follow(vec![(200, unversioned)]).await, Err(true));
    assert_eq!(follow(vec![(200, "garbage\n".to_owned())]).await, Err(false));
    assert_eq!(follow(vec![]).await, Err(false));
    let events = event("ADDED", slice("a", 8, "10.0.0.1")) + &event("DELETED", slice("a", 9, ""));
    assert_eq!(follow(vec![(200, events)]).await, Ok("9".to_owned()));
    assert_eq!(follow(vec![(200, String::new())]).await, Ok("7".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn list_of_all_pages_is_limited() {
    let page = |next: &str| {
        let metadata = json!({ "resourceVersion": "7", "continue": next });
        (200, json!({ "metadata": metadata, "items": ["x".repeat(MAX_BYTES * 2 / 3)] }))
    };
    let server = answers([page("more"), page("")]);
    let error = list(&&server, WatchedResource::SlicesV1).await.err().unwrap().to_string();
    assert!(error.contains("a list of more than"), "{error}");
}

/// A server that answers from a list of responses, and records the requests.
#[derive(Default)]
struct Answers {
    responses: RefCell<VecDeque<(u16, String)>>,
    targets: RefCell<Vec<String>>,
}

impl Requests for &Answers {
    type Body = ScriptedBody;

    async fn get(&self, target: &str, _: bool) -> Result<(StatusCode, ScriptedBody), RequestError> {
        self.targets.borrow_mut().push(target.to_owned());
        let next = self.responses.borrow_mut().pop_front();
        let (code, body) = next.ok_or_else(|| "no more answers".to_owned())?;
        let (send, chunks) = mpsc::channel(1);
        send.try_send(Ok(body.into())).unwrap();
        Ok((StatusCode::from_u16(code).unwrap(), ScriptedBody(chunks)))
    }
}

fn answers<const N: usize>(responses: [(u16, Value); N]) -> Answers {
    let responses = responses.map(|(code, body)| (code, body.to_string())).into();
    Answers { responses: RefCell::new(responses), ..Answers::default() }
}

#[tokio::test(start_paused = true)]
async fn list_has_the_objects_of_all_pages_and_the_last_version() {
    let page = |name: &str, version: &str, next: &str| {
        let metadata = json!({ "resourceVersion": version, "continue": next });
        (200, json!({ "metadata": metadata, "items": [slice(name, 1, "10.0.0.1")] }))
    };
    let server = answers([page("a", "7", "x/y="), page("b", "7", "")]);
    let list = list(&&server, WatchedResource::SlicesV1).await.unwrap();
    assert_eq!((list.objects.len(), list.version.as_str()), (2, "7"));
    let targets = server.targets.borrow();
    assert!(targets[0].ends_with("%3Dkubernetes&limit=500"), "{targets:?}");
    assert!(targets[1].ends_with("&limit=500&continue=x%2Fy%3D"), "{targets:?}");
}

#[tokio::test(start_paused = true)]
async fn first_resource_that_may_be_listed_is_watched_and_others_are_named() {
    let refusal = |code: u16| (code, json!({ "kind": "Status", "message": format!("no {code}") }));
    let list = (200, json!({ "metadata": { "resourceVersion": "9" }, "items": null }));
    let server = answers([refusal(404), refusal(403), list]);
    let found = list_first(&&server).await.unwrap();
    assert_eq!((found.resource, found.objects.len()), (WatchedResource::Endpoints, 0));
    assert!(server.targets.borrow()[2].contains("fieldSelector=metadata.name%3Dkubernetes"));
    for (responses, expected) in [
        (
            vec![refusal(403), refusal(404), refusal(403)],
            "deploy/rbac: discovery.k8s.io/v1 EndpointSlices: no 403; \
             discovery.k8s.io/v1beta1 EndpointSlices: no 404; v1 Endpoints: no 403",
        ),
        (vec![refusal(500)], "the apiserver answers 500: no 500"),
        (vec![(401, json!("<html>\u{7}</html>"))], "the apiserver answers 401: \"<html>"),
        (vec![(200, json!({ "items": [] }))], "a list without a resourceVersion"),
        (
            vec![(200, json!({ "items": [], "metadata": { "resourceVersion": "" } }))],
            "a list without a resourceVersion",
        ),
        (vec![(200, json!({ "metadata": { "resourceVersion": "5" } }))], "that is no list"),
        (vec![(200, json!("x"))], "that is no list"),
        (vec![], "no more answers"),
    ] {
        let responses = responses.into_iter().map(|(code, body)| (code, body.to_string()));
        let server = Answers { responses: RefCell::new(responses.collect()), ..Answers::default() };
        let error = list_first(&&server).await.err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
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
    /// Whether the next list stalls.
    stall: bool,
    /// The senders of bodies that have not ended.
    open: Vec<mpsc::Sender<Result<Bytes, RequestError>>>,
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
            stall: false,
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
            let stall = std::mem::take(&mut self.stall);
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
                Op::Stall => self.stall = true,
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

/// A server that responds by the script.
struct Scripted(Arc<Mutex<Script>>);

/// What a server has sent of a body.
struct ScriptedBody(mpsc::Receiver<Result<Bytes, RequestError>>);

impl ResponseChunks for ScriptedBody {
    async fn next(&mut self, _: bool) -> Option<Result<Bytes, RequestError>> {
        self.0.recv().await
    }
}

impl Requests for Scripted {
    type Body = ScriptedBody;

    async fn get(&self, target: &str, _: bool) -> Result<(StatusCode, ScriptedBody), RequestError> {
        let (send, body) = mpsc::channel(10_000);
        let mut script = self.0.lock().unwrap();
        let (path, query) = target.split_once('?').unwrap();
        let (code, frames, stays_open) = script.respond(path, query);
        for frame in frames {
            send.try_send(Ok(frame.into())).unwrap();
        }
        if stays_open {
            script.open.push(send);
        }
        Ok((StatusCode::from_u16(code).unwrap(), ScriptedBody(body)))
    }
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
            let scripted = Scripted(Arc::clone(&script));
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
