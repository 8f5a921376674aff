//! Requests of a script, and what it checks of each response.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use http::{HeaderMap, Method};
use jackstay_sys::clock;
use serde_json::Value;
use tokio::task::{JoinHandle, spawn_local};

use super::objects::{CONFIG_MAPS, config_map};
use super::testbed::{Testbed, all, until};
use crate::peers::objects::{WatchLine, watch_line};
use crate::peers::transport::{Client, Failure, Outgoing, Response};

/// The log of a pod that the store has.
pub const LOG: &str = "/api/v1/namespaces/default/pods/o1/log";
/// The promise for a request that no apiserver can serve.
pub const ANSWERED_WITHIN: Duration = Duration::from_millis(1_500);

/// A whole response.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Vec<u8>,
    /// The time from the request to the end of the response.
    pub took: Duration,
}

impl Reply {
    /// The body of a response in JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("a body in JSON")
    }

    /// The message of the `Status` of an error that jackstay answers itself. Its client does not repeat the request.
    #[track_caller]
    pub fn own_error(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        assert!(!self.headers.contains_key("retry-after"), "{:?}", self.headers);
        let body = self.json();
        assert_eq!(body["kind"], "Status", "{body}");
        body["message"].as_str().unwrap_or_default().to_owned()
    }
}

/// Sends a request and reads the whole response.
pub async fn send(client: &Client, outgoing: Outgoing) -> Reply {
    let began = clock::now();
    let what = outgoing.describe();
    let exchange = async {
        let mut response = client.open(client.next_request(), &outgoing).await?;
        let mut body = BytesMut::new();
        while let Some(chunk) = response.chunk().await? {
            body.extend_from_slice(&chunk);
        }
        Ok::<_, Failure>((response.head, body.to_vec()))
    };
    let (head, body) = exchange.await.unwrap_or_else(|failure| panic!("{what}: {failure:?}"));
    let took = clock::elapsed(began);
    Reply { status: head.status.as_u16(), headers: head.headers, body, took }
}

/// Reads a path.
pub async fn get(client: &Client, path: &str) -> Reply {
    send(client, Outgoing::get(path)).await
}

/// Creates a config map.
pub async fn create(client: &Client, name: &str) -> Reply {
    send(client, Outgoing::json(Method::POST, CONFIG_MAPS, &config_map(name, "1"))).await
}

/// Sends requests of all kinds but watches, and expects 503 in time with the address of an apiserver.
pub async fn expect_503(testbed: &Testbed, client: &Client) {
    let requests = [
        Outgoing::get(CONFIG_MAPS),
        Outgoing::json(Method::POST, CONFIG_MAPS, &config_map("new", "1")),
        Outgoing::delete(format!("{CONFIG_MAPS}/o1")),
        Outgoing::get(LOG),
    ];
    for reply in all(requests.map(|outgoing| send(client, outgoing))).await {
        let message = reply.own_error(503);
        assert!(message.contains("10.0.0."), "{message}");
        testbed.check("an answer in the outage", reply.took, ANSWERED_WITHIN);
    }
}

/// Repeats a read until it succeeds. Returns how long that took.
pub async fn until_read(client: &Client) -> Duration {
    let began = clock::now();
    while get(client, CONFIG_MAPS).await.status != 200 {
        let waited = clock::elapsed(began);
        assert!(waited < Duration::from_secs(60), "no read has succeeded");
    }
    clock::elapsed(began)
}

/// An event of a watch.
#[derive(Debug, Clone)]
pub struct WatchEvent {
    /// `NAMESPACE/NAME` of the object.
    pub key: String,
    /// Its version.
    pub version: u64,
    /// When it arrived.
    pub at: Instant,
}

/// A watch that a task reads. Dropping it closes the watch.
#[derive(Debug)]
pub struct Watch {
    recorded: Rc<RefCell<Recorded>>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Recorded {
    events: Vec<WatchEvent>,
    end: Option<Result<(), Failure>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    /// Starts a watch, and waits for its response head.
    pub async fn start(client: &Client, path: &str) -> Self {
        let response = client.open(client.next_request(), &Outgoing::get(path)).await;
        let response = response.unwrap_or_else(|failure| panic!("{path}: {failure:?}"));
        assert_eq!(response.head.status, 200, "{path}");
        let recorded = Rc::<RefCell<Recorded>>::default();
        let task = spawn_local(read(response, Rc::clone(&recorded)));
        Self { recorded, task }
    }

    /// The events.
    pub fn events(&self) -> Vec<WatchEvent> {
        self.recorded.borrow().events.clone()
    }

    /// The number of events.
    pub fn count(&self) -> usize {
        self.recorded.borrow().events.len()
    }

    /// `None` while it runs, `Some(Ok(()))` after a clean end.
    pub fn end(&self) -> Option<Result<(), Failure>> {
        self.recorded.borrow().end
    }

    /// Waits for its end, which is a clean one. Returns how long that took.
    pub async fn until_end(&self) -> Duration {
        let took = until("the watch ends", || self.end().is_some()).await;
        assert_eq!(self.end(), Some(Ok(())), "the end of the watch");
        took
    }

    /// Waits for the last of these versions. The watch has delivered each of them once and in order, and has not ended.
    pub async fn expect_versions(&self, expected: &[u64]) {
        until("the last event arrives", || {
            let last = self.recorded.borrow().events.last().map(|event| event.version);
            self.end().is_some() || last == expected.last().copied()
        })
        .await;
        assert_eq!(self.end(), None, "the watch ended");
        let versions: Vec<_> = self.events().iter().map(|event| event.version).collect();
        assert_eq!(versions, expected);
    }
}

async fn read(mut response: Response, recorded: Rc<RefCell<Recorded>>) {
    let mut buffer = Vec::new();
    let end = loop {
        match response.chunk().await {
            Ok(Some(chunk)) => buffer.extend_from_slice(&chunk),
            Ok(None) => break Ok(()),
            Err(failure) => break Err(failure),
        }
        while let Some(end) = buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<_> = buffer.drain(..=end).collect();
            if let Some(WatchLine::Changed(_, object)) = watch_line(&line) {
                let key = object.metadata.key();
                let version = object.metadata.version().unwrap_or_default();
                let event = WatchEvent { key, version, at: clock::now() };
                recorded.borrow_mut().events.push(event);
            }
        }
    };
    recorded.borrow_mut().end = Some(end);
}

/// A followed log, read line by line.
#[derive(Debug)]
pub struct FollowedLog {
    response: Response,
    text: Vec<u8>,
}

impl FollowedLog {
    /// Follows the log of a pod. The third line is the last one that it has.
    pub async fn start(client: &Client) -> Self {
        let outgoing = Outgoing::get(format!("{LOG}?follow=true"));
        let response = client.open(client.next_request(), &outgoing).await;
        let response = response.unwrap_or_else(|failure| panic!("{LOG}: {failure:?}"));
        assert_eq!(response.head.status, 200);
        Self { response, text: Vec::new() }
    }

    /// The number of the next line; `None` at a clean end.
    ///
    /// # Errors
    /// The log was cut off.
    pub async fn next(&mut self) -> Result<Option<u64>, Failure> {
        loop {
            if let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
                let line: Vec<_> = self.text.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line).into_owned();
                return Ok(line.split(' ').nth(1).and_then(|number| number.parse().ok()));
            }
            match self.response.chunk().await? {
                Some(chunk) => self.text.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }

    /// Reads these lines, one after the other.
    pub async fn expect_lines(&mut self, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            assert_eq!(self.next().await, Ok(Some(number)), "a line of the log");
        }
    }
}
