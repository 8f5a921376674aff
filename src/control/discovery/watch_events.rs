//! The events of a watch, which are lines of JSON, as their parts arrive.

use serde_json::Value;

use super::requests::{MAX_BYTES, RequestError, ResponseChunks};

/// An event (Kubernetes API, `WatchEvent`).
#[derive(Debug, PartialEq)]
pub enum WatchEvent {
    /// An object was added or modified.
    Applied(Value),
    /// An object was deleted.
    Deleted(Value),
    /// The watch has reached this version, without an object.
    Bookmark(String),
    /// The server ends the watch with this status.
    Error {
        /// Its code, as of HTTP.
        code: u64,
        /// Its text.
        message: String,
    },
}

impl WatchEvent {
    fn parse(line: &[u8]) -> Result<Self, RequestError> {
        let invalid = |why: String| format!("an event is not valid: {why}");
        let mut event: Value =
            serde_json::from_slice(line).map_err(|error| invalid(error.to_string()))?;
        let object = event.get_mut("object").map(Value::take).unwrap_or_default();
        let error = |status: &Value| Self::Error {
            code: status["code"].as_u64().unwrap_or(0),
            message: status["message"].as_str().unwrap_or_default().to_owned(),
        };
        Ok(match event["type"].as_str() {
            Some("ADDED" | "MODIFIED") => Self::Applied(object),
            Some("DELETED") => Self::Deleted(object),
            Some("BOOKMARK") => Self::Bookmark(version_of(&object).unwrap_or_default()),
            Some("ERROR") => error(&object),
            // An apiserver may write the status of an error as it is.
            _ if event["kind"] == "Status" => error(&event),
            _ => return Err(invalid("it has an unknown type".to_owned())),
        })
    }

    /// The version from which the watch continues after this event.
    pub fn version(&self) -> Option<String> {
        match self {
            Self::Applied(object) | Self::Deleted(object) => version_of(object),
            Self::Bookmark(version) => Some(version.clone()).filter(|version| !version.is_empty()),
            Self::Error { .. } => None,
        }
    }
}

/// The `resourceVersion` of an object or a list; `None` if it has none.
pub fn version_of(object: &Value) -> Option<String> {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.filter(|version| !version.is_empty()).map(str::to_owned)
}

/// The events of one response body.
pub struct WatchEvents<B> {
    body: B,
    /// The complete events that were not read yet, and the beginning of the next one.
    buffer: Vec<u8>,
    /// The end of the last event that was read.
    read: usize,
    /// No event ends between there and here.
    searched: usize,
}

impl<B: ResponseChunks> WatchEvents<B> {
    /// The events in a body.
    pub fn new(body: B) -> Self {
        Self { body, buffer: Vec::new(), read: 0, searched: 0 }
    }

    /// The next event; `None` at the end of the body. An event that is not complete then comes again in the next watch.
    ///
    /// # Errors
    /// The connection was lost within an event, or an event is longer than [`MAX_BYTES`] or no valid one.
    pub async fn next(&mut self) -> Option<Result<WatchEvent, RequestError>> {
        loop {
            let is_end = |byte: &u8| *byte == b'\n';
            if let Some(length) = self.buffer[self.searched..].iter().position(is_end) {
                let end = self.searched + length;
                let line = &self.buffer[self.read..end];
                (self.read, self.searched) = (end + 1, end + 1);
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Some(WatchEvent::parse(line));
            }
            self.buffer.drain(..self.read);
            (self.read, self.searched) = (0, self.buffer.len());
            match self.body.next(!self.buffer.is_empty()).await {
                Some(Ok(data)) if self.buffer.len() + data.len() > MAX_BYTES => {
                    return Some(Err(too_long()));
                }
                Some(Ok(data)) => self.buffer.extend_from_slice(&data),
                Some(Err(error)) => return Some(Err(error)),
                None => {
                    let rest = std::mem::take(&mut self.buffer);
                    self.searched = 0;
                    return WatchEvent::parse(&rest).ok().map(Ok);
                }
            }
        }
    }
}

/// Reads a whole body.
///
/// # Errors
/// It breaks off, or is longer than [`MAX_BYTES`].
pub async fn whole_body(mut body: impl ResponseChunks) -> Result<Vec<u8>, RequestError> {
    let mut whole = Vec::new();
    while let Some(data) = body.next(true).await {
        let data = data?;
        if whole.len() + data.len() > MAX_BYTES {
            return Err(too_long());
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole)
}

fn too_long() -> RequestError {
    format!("a response of more than {MAX_BYTES} bytes")
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::rc::Rc;

    use bytes::Bytes;
    use serde_json::json;

    use super::*;

    /// Parts that arrive, and then the end. Records whether a part of an event had arrived before each.
    #[derive(Default)]
    struct Parts(VecDeque<Result<Bytes, RequestError>>, Rc<RefCell<Vec<bool>>>);

    impl ResponseChunks for Parts {
        async fn next(&mut self, in_event: bool) -> Option<Result<Bytes, RequestError>> {
            self.1.borrow_mut().push(in_event);
            self.0.pop_front()
        }
    }

    fn parts(texts: &[&str]) -> Parts {
        let parts = texts.iter().map(|text| Ok(Bytes::copy_from_slice(text.as_bytes())));
        Parts(parts.collect(), Rc::default())
    }

    async fn events(texts: &[&str]) -> Vec<Result<WatchEvent, RequestError>> {
        let mut events = WatchEvents::new(parts(texts));
        let mut all = Vec::new();
        while let Some(event) = events.next().await {
            let is_last = event.is_err();
            all.push(event);
            if is_last {
                break;
            }
        }
        all
    }

    #[tokio::test(start_paused = true)]
    async fn next_returns_the_same_events_for_any_split() {
        let text = "{\"type\":\"ADDED\",\"object\":{\"a\":1}}\n\n\
                    {\"type\":\"DELETED\",\"object\":{}}\r\n\
                    {\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"7\"}}}\n\
                    {\"type\":\"ERROR\",\"object\":{\"code\":410,\"message\":\"old\"}}\n";
        let (bookmark, message) = (WatchEvent::Bookmark("7".to_owned()), "old".to_owned());
        let expected = [
            Ok(WatchEvent::Applied(json!({"a": 1}))),
            Ok(WatchEvent::Deleted(json!({}))),
            Ok(bookmark),
            Ok(WatchEvent::Error { code: 410, message }),
        ];
        for size in [1, 2, 7, 64, text.len()] {
            let chunks: Vec<_> = text.as_bytes().chunks(size).collect();
            let chunks: Vec<_> = chunks.iter().map(|c| std::str::from_utf8(c).unwrap()).collect();
            assert_eq!(events(&chunks).await, expected, "parts of {size} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn next_says_whether_the_body_may_end_here() {
        let parts = parts(&["{\"type\":\"DELETED\",", "\"object\":{}", "}\n"]);
        let in_event = Rc::clone(&parts.1);
        let mut events = WatchEvents::new(parts);
        assert_eq!(events.next().await, Some(Ok(WatchEvent::Deleted(json!({})))));
        assert_eq!(events.next().await, None);
        assert_eq!(*in_event.borrow(), [false, true, true, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn event_that_is_not_valid_or_too_long_is_an_error() {
        let long = "x".repeat(MAX_BYTES);
        for (texts, expected) in [
            (&["garbage\n"][..], "not valid: expected value"),
            (&["{\"type\":\"NEW\",\"object\":{}}\n"], "unknown type"),
            (&["7\n"], "unknown type"),
            (&[&long, "x"], "more than 1048576 bytes"),
        ] {
            let all = events(texts).await;
            let [Err(error)] = &all[..] else { panic!("{all:?}") };
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(events(&[]).await, []);
        assert_eq!(events(&["{\"type\":\"ADD"]).await, [], "it comes again in the next watch");
        let deleted = WatchEvent::Deleted(json!({}));
        assert_eq!(events(&["{\"type\":\"DELETED\",\"object\":{}}"]).await, [Ok(deleted)]);
        let status = WatchEvent::Error { code: 500, message: "etcd".to_owned() };
        let line = "{\"kind\":\"Status\",\"code\":500,\"message\":\"etcd\"}\n";
        assert_eq!(events(&[line]).await, [Ok(status)]);
        assert_eq!(whole_body(parts(&["a", "b"])).await.unwrap(), b"ab");
        assert!(whole_body(parts(&[&long, "x"])).await.is_err());
    }
}
