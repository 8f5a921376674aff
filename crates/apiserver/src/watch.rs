//! Serves watches: reads changes from the history of the cluster and writes them as events into the
//! response.

use crate::aggregated::{self, AggregatedPath};
use crate::body::ResponseBody;
use crate::cluster::{Event, Object};
use crate::handler::{Format, JSON, respond};
use crate::kinds::Kind;
use crate::route::{Query, Target};
use crate::selector::Selector;
use crate::state::{Counted, Faults, ServerState};
use crate::status_error::StatusError;
use crate::{cbor, protobuf, table, watch_cache};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, VARY};
use http::{HeaderValue, Response};
use serde_json::{Value, json};
use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Number of events that are buffered for a slow client.
const EVENT_BUFFER: usize = 64;
/// The last bookmark precedes the end of a watch by this time (apiserver, `storage/cacher/cache_watcher.go`,
/// `nextBookmarkTime`).
const BOOKMARK_BEFORE_END: Duration = Duration::from_secs(2);
/// Largest batch of events that becomes one gzip member, in bytes.
const MAX_BATCH: usize = 32 << 10;

struct Watch {
    server: Arc<ServerState>,
    kind: &'static Kind,
    namespace: String,
    selector: Selector,
    format: Format,
    /// `includeObject` of the query, for tables.
    include_object: String,
    bookmarks: bool,
    /// All changes up to this version were sent.
    cursor: u64,
    /// Number of changes that were sent.
    sent: usize,
    columns_sent: bool,
    /// When the stream is reset, while the path to its aggregated server is dark.
    lost_at: Option<Instant>,
    /// Events that wait for the others of their gzip member; `None` without compression.
    batch: Option<Vec<u8>>,
    sender: mpsc::Sender<io::Result<Bytes>>,
}

/// The client closed the stream.
struct Disconnected;

/// Starts a watch and returns the response that carries it.
pub(super) fn start(
    server: &Arc<ServerState>,
    target: &Target,
    query: &Query,
    selector: Selector,
    format: Format,
    accepts_gzip: bool,
) -> Result<Response<ResponseBody>, StatusError> {
    let version: u64 = match query.get("resourceVersion") {
        "" => 0,
        text => text.parse().map_err(|_| {
            StatusError::invalid(format!("resourceVersion: Invalid value: \"{text}\""))
        })?,
    };
    let initial_events = query.flag("sendInitialEvents");
    if initial_events && query.get("resourceVersionMatch") != "NotOlderThan" {
        return Err(StatusError::invalid(
            "resourceVersionMatch: Forbidden: sendInitialEvents requires setting \
             resourceVersionMatch to NotOlderThan",
        ));
    }
    // A number above u32 would overflow the deadline.
    let timeout = match query.get("timeoutSeconds").parse::<u32>() {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds.into()),
        // kube-apiserver chooses 30 to 60 minutes.
        _ => Duration::from_secs(fastrand::u64(1800..3600)),
    };
    // As kube-apiserver 1.37 (`WatchListCompression`).
    let compressed = accepts_gzip && initial_events && server.compresses_watch_lists;
    let (sender, receiver) = mpsc::channel(EVENT_BUFFER);
    let mut watch = Watch {
        server: server.clone(),
        kind: target.kind,
        namespace: target.namespace.clone(),
        selector,
        format,
        include_object: query.get("includeObject").to_owned(),
        bookmarks: query.flag("allowWatchBookmarks"),
        cursor: version,
        sent: 0,
        columns_sent: false,
        lost_at: None,
        batch: compressed.then(Vec::new),
        sender,
    };
    let only_changes = query.get("sendInitialEvents") == "false";
    let start_at = if initial_events || (version == 0 && !only_changes) {
        let minimum = (initial_events && query.get("resourceVersion").is_empty())
            .then(|| server.cluster.version());
        StartAt::CurrentState { announce_end: initial_events, minimum }
    } else if version == 0 {
        StartAt::Now
    } else {
        StartAt::Version
    };
    let deadline = Instant::now() + timeout;
    tokio::task::spawn_local(async move {
        // A client that disconnects is not an error.
        let _ = watch.deliver_until(start_at, deadline).await;
    });
    let content_type = match format {
        Format::Protobuf => protobuf::WATCH,
        Format::Cbor | Format::CborTable => cbor::WATCH,
        Format::Json | Format::Table => JSON,
    };
    let mut response = respond(200, content_type, ResponseBody::Stream(receiver));
    if compressed {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        response.headers_mut().insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    Ok(response)
}

/// When the bookmark after one at `now` is due: after the interval, and at the latest [`BOOKMARK_BEFORE_END`] before
/// the watch ends; `None` after that one.
fn next_bookmark(now: Instant, interval: Duration, deadline: Instant) -> Option<Instant> {
    let at = deadline.checked_sub(BOOKMARK_BEFORE_END)?.min(now + interval);
    (at > now).then_some(at)
}

enum StartAt {
    /// All current objects as ADDED events, then changes. The watch cache is to reach the `minimum` before.
    CurrentState { announce_end: bool, minimum: Option<u64> },
    /// Only changes from now on.
    Now,
    /// Changes since the version that the client names.
    Version,
}

impl Watch {
    async fn deliver_until(
        &mut self,
        start_at: StartAt,
        deadline: Instant,
    ) -> Result<(), Disconnected> {
        // Subscribed before the first read, so that no change is missed.
        let mut changes = self.server.cluster.changes_of(self.kind);
        changes.mark_changed();
        let mut faults = self.server.faults.subscribe();
        let mut end = self.server.end_watches.subscribe();
        self.server.counters.accepted_watches.fetch_add(1, Relaxed);
        // A test that sees this watch in the counters can end it by `end_watches`, subscribed above.
        let _counted = Counted::new(&self.server, |counters| &counters.watches);
        self.begin(start_at).await?;
        let interval = self.server.cluster.bookmark_interval();
        let mut bookmark = next_bookmark(Instant::now(), interval, deadline);
        let sender = self.sender.clone();
        loop {
            let held = self.is_held(&faults.borrow());
            let next = if held { None } else { self.server.cached_at(self.cursor) };
            tokio::select! {
                () = sender.closed() => return Err(Disconnected),
                () = watch_cache::sleep_until(next) => {}
                // The end of a watch does not pass a dark path.
                () = tokio::time::sleep_until(deadline), if self.lost_at.is_none() => return Ok(()),
                () = watch_cache::sleep_until(self.lost_at) => return self.reset().await,
                _ = end.changed() => return Ok(()),
                _ = changes.changed() => {}
                _ = faults.changed() => {}
                () = watch_cache::sleep_until(bookmark), if self.bookmarks => {
                    bookmark = next_bookmark(Instant::now(), interval, deadline);
                    if !self.is_held(&faults.borrow()) {
                        self.send_changes().await?;
                        self.send_bookmark(None).await?;
                    }
                }
            }
            if !self.is_held(&faults.borrow()) {
                self.send_changes().await?;
            }
            self.flush().await?;
        }
    }

    /// Sends what comes before the changes, and sets the cursor. An error event ends the watch.
    async fn begin(&mut self, start_at: StartAt) -> Result<(), Disconnected> {
        let error = match start_at {
            StartAt::CurrentState { announce_end, minimum } => {
                self.wait_while(|faults, _| faults.hold_watches).await?;
                let cached = match minimum {
                    Some(minimum) => self.server.wait_until_cached(minimum).await,
                    None => Ok(0),
                };
                match cached {
                    Ok(_) => {
                        self.send_current_state(announce_end).await?;
                        None
                    }
                    Err(current) => {
                        Some(StatusError::too_large_version(minimum.unwrap_or_default(), current))
                    }
                }
            }
            StartAt::Now => {
                self.cursor = self.server.cached_version();
                None
            }
            StartAt::Version => {
                let compacted_here = self.server.compacted.load(Relaxed);
                if self.cursor < compacted_here {
                    Some(StatusError::expired(self.cursor, compacted_here))
                } else {
                    self.server.cluster.check_not_compacted(self.cursor).err()
                }
            }
        };
        if let Some(error) = error {
            self.send_error(&error).await?;
            return Err(Disconnected);
        }
        self.flush().await
    }

    /// Whether nothing is delivered. Sets [`Self::lost_at`].
    fn is_held(&mut self, faults: &Faults) -> bool {
        let is_dark =
            aggregated::serves(self.kind.group) && faults.aggregated_path == AggregatedPath::Dark;
        let lost_at = || Instant::now() + aggregated::LOST_AFTER;
        self.lost_at = is_dark.then(|| self.lost_at.unwrap_or_else(lost_at));
        is_dark || faults.hold_watches
    }

    /// Resets the stream.
    async fn reset(&mut self) -> Result<(), Disconnected> {
        let error = io::ErrorKind::ConnectionAborted.into();
        self.sender.send(Err(error)).await.map_err(|_| Disconnected)
    }

    /// Waits while the faults and the number of changes that were sent meet a condition.
    async fn wait_while(
        &self,
        condition: impl Fn(&Faults, usize) -> bool,
    ) -> Result<(), Disconnected> {
        let mut faults = self.server.faults.subscribe();
        while condition(&faults.borrow_and_update(), self.sent) {
            tokio::select! {
                () = self.sender.closed() => return Err(Disconnected),
                _ = faults.changed() => {}
            }
        }
        Ok(())
    }

    /// Sends all objects as ADDED events; with `announce_end` also the `initial-events-end` bookmark.
    async fn send_current_state(&mut self, announce_end: bool) -> Result<(), Disconnected> {
        let version = self.server.cached_version();
        let (objects, version) = if self.server.faults.borrow().cache_lag.is_some() {
            let cluster = &self.server.cluster;
            (cluster.list_at(self.kind, &self.namespace, &self.selector, version), version)
        } else {
            self.server.cluster.list(self.kind, &self.namespace, &self.selector)
        };
        for object in objects {
            self.send("ADDED", &object).await?;
        }
        self.cursor = self.cursor.max(version);
        if announce_end && self.bookmarks {
            self.send_bookmark(Some(json!({ "k8s.io/initial-events-end": "true" }))).await?;
        }
        Ok(())
    }

    /// Sends the changes since `cursor`.
    async fn send_changes(&mut self) -> Result<(), Disconnected> {
        let cached = self.server.cached_version();
        let changes = self.server.cluster.changes_since(self.kind, &self.namespace, self.cursor);
        let (events, version) = match changes {
            Ok(changes) => changes,
            Err(expired) => {
                self.send_error(&expired).await?;
                return Err(Disconnected);
            }
        };
        for event in events.into_iter().filter(|event| event.version <= cached) {
            let is_enough =
                |faults: &Faults, sent| faults.watched_changes.is_some_and(|max| sent >= max);
            self.wait_while(is_enough).await?;
            self.sent += 1;
            let matched = event.before.as_ref().is_some_and(|o| self.selector.matches(&o.value));
            let matches = !event.deleted && self.selector.matches(&event.after.value);
            match (matched, matches) {
                (false, true) => self.send("ADDED", &event.after).await?,
                (true, true) => self.send("MODIFIED", &event.after).await?,
                (true, false) => self.send("DELETED", &deleted_object(&event)).await?,
                (false, false) => {}
            }
        }
        self.cursor = self.cursor.max(version.min(cached));
        Ok(())
    }

    async fn send_bookmark(&mut self, annotations: Option<Value>) -> Result<(), Disconnected> {
        let mut object = json!({
            "kind": self.kind.kind,
            "apiVersion": self.kind.api_version(),
            "metadata": { "resourceVersion": self.cursor.to_string(), "creationTimestamp": null },
        });
        if let Some(annotations) = annotations {
            object["metadata"]["annotations"] = annotations;
        }
        self.send("BOOKMARK", &Object::new(object, self.cursor)).await
    }

    /// Sends an ERROR event.
    async fn send_error(&mut self, error: &StatusError) -> Result<(), Disconnected> {
        let frame = self.frame("ERROR", &error.status());
        self.send_frame(frame).await?;
        self.flush().await
    }

    async fn send(&mut self, event: &str, object: &Object) -> Result<(), Disconnected> {
        let frame = match self.format {
            Format::Json => json_frame(event, &object.json),
            Format::Protobuf | Format::Cbor => self.frame(event, &object.value),
            Format::Table | Format::CborTable => {
                // Only the first event carries column definitions.
                let columns =
                    if self.columns_sent { Value::Null } else { table::definitions(self.kind) };
                self.columns_sent = true;
                let meta = json!({ "resourceVersion": object.version.to_string() });
                let now = self.server.cluster.clock().now();
                let included = &self.include_object;
                let table = table::table(self.kind, &[object], &columns, included, &meta, now);
                self.frame(event, &table)
            }
        };
        self.send_frame(frame).await
    }

    fn frame(&self, event: &str, object: &Value) -> Vec<u8> {
        match self.format {
            Format::Json | Format::Table => json_frame(event, object.to_string().as_bytes()),
            Format::Protobuf => protobuf::frame(event, object),
            Format::Cbor | Format::CborTable => cbor::frame(event, object),
        }
    }

    async fn send_frame(&mut self, frame: Vec<u8>) -> Result<(), Disconnected> {
        if let Some(batch) = &mut self.batch {
            batch.extend(frame);
            return if batch.len() > MAX_BATCH { self.flush().await } else { Ok(()) };
        }
        self.sender.send(Ok(frame.into())).await.map_err(|_| Disconnected)
    }
}

impl Watch {
    /// Sends the events that wait as one gzip member: kube-apiserver closes it when no further event waits.
    async fn flush(&mut self) -> Result<(), Disconnected> {
        let Some(batch) = self.batch.as_mut().filter(|batch| !batch.is_empty()) else {
            return Ok(());
        };
        let mut member = GzEncoder::new(Vec::new(), Compression::fast());
        let member = member.write_all(&std::mem::take(batch)).and_then(|()| member.finish());
        self.sender.send(member.map(Bytes::from)).await.map_err(|_| Disconnected)
    }
}

fn json_frame(event: &str, object: &[u8]) -> Vec<u8> {
    let mut frame = format!("{{\"type\":\"{event}\",\"object\":").into_bytes();
    frame.extend_from_slice(object);
    frame.extend_from_slice(b"}\n");
    frame
}

/// The object of a DELETED event: the deleted object, or the last version that the selector matched with
/// the `resourceVersion` of the change.
fn deleted_object(event: &Event) -> Arc<Object> {
    match &event.before {
        Some(before) if !event.deleted => {
            let mut value = before.value.clone();
            value["metadata"]["resourceVersion"] = event.version.to_string().into();
            Arc::new(Object::new(value, event.version))
        }
        _ => event.after.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_bookmark_is_due_after_the_interval_and_before_the_end() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        // Seconds until the end of the watch, and until its next bookmark.
        for (end, expected) in
            [(100, Some(60)), (62, Some(60)), (10, Some(8)), (2, None), (1, None)]
        {
            let due = next_bookmark(now, 60 * second, now + end * second);
            assert_eq!(due, expected.map(|after| now + after * second), "{end}");
        }
    }
}
