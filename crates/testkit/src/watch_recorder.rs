//! Records the events of a watch, for comparison with the events that the apiserver has sent.

use crate::wait::{soon, until};
use http::Method;
use jackstay_apiserver::cbor;
use jackstay_apiserver::client::{Client, next_data};
use jackstay_core::watch::codec::Encoding;
use serde_json::Value;
use std::sync::{Arc, Mutex};
use tokio::task::JoinHandle;

/// An event of a watch.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub kind: String,
    pub name: String,
    pub version: u64,
}

/// A watch that a task reads until its end. Bookmarks are not recorded. Dropping it closes the watch.
pub struct WatchRecorder {
    events: Arc<Mutex<Vec<Event>>>,
    end: Arc<Mutex<Option<Result<(), String>>>>,
    task: JoinHandle<()>,
}

impl Drop for WatchRecorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl WatchRecorder {
    /// Starts a watch of JSON events, and waits for its response head.
    pub async fn start(client: &Client, path: &str) -> Self {
        Self::accepting(client, path, "application/json").await
    }

    /// [`Self::start`] with another `Accept` header.
    pub async fn accepting(client: &Client, path: &str, accept: &str) -> Self {
        let headers = [("accept", accept)];
        let sent = soon(path, client.send(Method::GET, path, &headers, "")).await;
        let response = sent.unwrap_or_else(|e| panic!("{path}: {e}"));
        assert_eq!(response.status(), 200, "{path}");
        let content_type = response.headers()["content-type"].to_str().unwrap();
        let encoding = Encoding::from_content_type(content_type).expect("the type of a watch");
        let mut body = response.into_body();
        let events = Arc::<Mutex<Vec<Event>>>::default();
        let end = Arc::<Mutex<Option<Result<(), String>>>>::default();
        let (recorded, recorded_end) = (events.clone(), end.clone());
        let task = tokio::spawn(async move {
            let mut buffer = Vec::new();
            let result = loop {
                match next_data(&mut body).await {
                    Ok(Some(data)) => {
                        buffer.extend_from_slice(&data);
                        while let Some(event) = take_event(&mut buffer, encoding) {
                            if event.kind != "BOOKMARK" {
                                recorded.lock().unwrap().push(event);
                            }
                        }
                    }
                    Ok(None) if buffer.is_empty() => break Ok(()),
                    Ok(None) => break Err("the body ended in the middle of an event".to_owned()),
                    Err(error) => break Err(error.to_string()),
                }
            };
            *recorded_end.lock().unwrap() = Some(result);
        });
        Self { events, end, task }
    }

    pub fn events(&self) -> Vec<Event> {
        self.events.lock().unwrap().clone()
    }

    /// The resource versions of the recorded events.
    pub fn versions(&self) -> Vec<u64> {
        self.events.lock().unwrap().iter().map(|event| event.version).collect()
    }

    /// Whether an event for an object with this name was recorded.
    pub fn has_seen(&self, name: &str) -> bool {
        self.events.lock().unwrap().iter().any(|event| event.name == name)
    }

    /// `None` while the watch runs, `Some(Ok(()))` after a clean end.
    pub fn end(&self) -> Option<Result<(), String>> {
        self.end.lock().unwrap().clone()
    }

    /// Waits until the watch ends.
    pub async fn wait_end(&self) -> Result<(), String> {
        until("the watch ends", async || self.end().is_some()).await;
        self.end().unwrap()
    }

    /// Waits for the last of these resource versions. Asserts that the watch has delivered each of them once and
    /// in order, and has not ended.
    pub async fn expect_versions(&self, expected: &[u64]) {
        until("the last event arrives or the watch ends", async || {
            self.end().is_some()
                || self.events.lock().unwrap().last().map(|e| e.version) == expected.last().copied()
        })
        .await;
        assert_eq!(self.end(), None, "the watch ended");
        assert_eq!(self.versions(), expected);
    }
}

/// Removes the first complete event from the buffer and decodes it.
fn take_event(buffer: &mut Vec<u8>, encoding: Encoding) -> Option<Event> {
    let (event, length) = match encoding {
        Encoding::Protobuf => return take_protobuf(buffer),
        Encoding::Json => {
            let length = buffer.iter().position(|byte| *byte == b'\n')? + 1;
            (serde_json::from_slice(&buffer[..length]).unwrap(), length)
        }
        Encoding::Cbor => {
            let mut rest = &buffer[..];
            let event: Value = cbor::take_value(&mut rest)?;
            (event, buffer.len() - rest.len())
        }
    };
    buffer.drain(..length);
    let mut object = &event["object"];
    if object["kind"] == "Table" {
        object = &object["rows"][0]["object"];
    }
    let meta = &object["metadata"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let version = text(&meta["resourceVersion"]).parse().unwrap_or_default();
    Some(Event { kind: text(&event["type"]), name: text(&meta["name"]), version })
}

fn take_protobuf(buffer: &mut Vec<u8>) -> Option<Event> {
    let length = u32::from_be_bytes(buffer.get(..4)?.try_into().unwrap()) as usize;
    let frame = buffer.get(4..4 + length)?.to_vec();
    buffer.drain(..4 + length);
    let kind = String::from_utf8(field(&frame, 1)?).unwrap();
    let raw = field(&field(&frame, 2)?, 1)?;
    let object = field(raw.strip_prefix(b"k8s\0").unwrap(), 2)?;
    let meta = field(&object, 1)?;
    let text = |number| String::from_utf8(field(&meta, number).unwrap_or_default()).unwrap();
    Some(Event { kind, name: text(1), version: text(6).parse().unwrap_or_default() })
}

/// The first length-delimited field with this number in a protobuf message.
fn field(message: &[u8], wanted: u64) -> Option<Vec<u8>> {
    let mut at = 0;
    let varint = |at: &mut usize| {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = *message.get(*at)?;
            *at += 1;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
        }
    };
    while at < message.len() {
        let key = varint(&mut at)?;
        match key & 7 {
            0 => {
                varint(&mut at)?;
            }
            2 => {
                let length = usize::try_from(varint(&mut at)?).unwrap();
                let value = message.get(at..at + length)?;
                if key >> 3 == wanted {
                    return Some(value.to_vec());
                }
                at += length;
            }
            _ => return None,
        }
    }
    None
}
