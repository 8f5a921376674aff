//! Writes large objects, and abandons some of its uploads before their end.
//!
//! A large object does not fit into the window of a stream, neither on its way to the apiserver nor as an event on its
//! way to the informers. The body of an abandoned upload begins with a complete document, after which only white space
//! is missing: a server that takes it for a complete body carries the write out.

use std::iter::repeat_with;
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::objects::{object, token_text};
use super::peer::{EndedRequest, Peer};
use super::transport::Outgoing;
use super::writer::outcome;
use crate::checker::{ChangeKind, Collection, Seen, WriteOutcome};

/// How long an upload waits for its response.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The time between two uploads, which do not wait for each other's responses.
const INTERVAL: Duration = Duration::from_millis(400);
/// Bytes of a large object; kube-apiserver accepts 1.5 MB (etcd, `--max-request-bytes`).
const SIZES: std::ops::Range<usize> = 280_000..600_000;
/// An upload is abandoned within this time, in which what it has sent has arrived.
const ABANDONED_WITHIN: Duration = Duration::from_millis(200);

/// Uploads until the client is stopped.
pub async fn run(peer: Peer, collection: Collection) {
    // Only this client writes it.
    let name = format!("large-{}", peer.id.number);
    let mut goes_on = peer.pause_part(INTERVAL).await;
    for number in 0_u32.. {
        if !goes_on {
            break;
        }
        if number % 3 == 1 {
            abandon(&peer, collection, &name).await;
        } else {
            write(&peer, collection, &name, number == 0).await;
        }
        goes_on = peer.pause(INTERVAL).await;
    }
    peer.ended();
}

/// Writes the whole object. `is_new`: it does not exist yet.
async fn write(peer: &Peer, collection: Collection, name: &str, is_new: bool) {
    let (token, size) = (fastrand::u64(1..), fastrand::usize(SIZES));
    let mut body = object(&collection, name, token);
    // As a certificate or a key, it can hardly be compressed.
    let payload: String = repeat_with(fastrand::alphanumeric).take(size).collect();
    body["data"] = json!({ "payload": payload });
    let (kind, outgoing) = if is_new {
        (ChangeKind::Added, Outgoing::json(Method::POST, collection.path(), &body))
    } else {
        (ChangeKind::Modified, Outgoing::json(Method::PUT, collection.object(name), &body))
    };
    let ended = peer.call(&outgoing.audit_id(&token_text(token)), TIMEOUT).await;
    if ended.answer.is_none() {
        peer.observer.findings().write_open(ended.took());
    } else {
        let ok = matches!(ended.status(), Some(200 | 201));
        peer.observer.findings().write(ok, ended.took());
    }
    let (key, outcome) = (collection.key(name), outcome(&ended));
    peer.saw(collection, &ended, Seen::Write { key, kind, token, outcome });
}

/// Begins to write the object, and resets the stream before the end of its body.
async fn abandon(peer: &Peer, collection: Collection, name: &str) {
    let token = fastrand::u64(1..);
    let body = padded(&object(&collection, name, token));
    let outgoing = Outgoing::with_body(Method::PUT, collection.object(name), body);
    let outgoing = outgoing.audit_id(&token_text(token));
    let (request, began) = (peer.client.next_request(), peer.observer.moment());
    let after = ABANDONED_WITHIN.mul_f64(0.25 + 0.75 * fastrand::f64());
    // Without a response, the stream is reset.
    let _ = peer.client.send_unfinished(&outgoing, sleep(after)).await;
    peer.log(|| format!("request {request}: {} abandoned", outgoing.describe()));
    let ended = EndedRequest { request, began, ended: peer.observer.moment(), answer: None };
    // A body that has not ended is never carried out.
    let (key, kind, outcome) = (collection.key(name), ChangeKind::Modified, WriteOutcome::Refused);
    peer.saw(collection, &ended, Seen::Write { key, kind, token, outcome });
}

/// A document, and white space, which belongs to the body.
fn padded(document: &Value) -> Bytes {
    let mut body = document.to_string();
    let length = body.len() + fastrand::usize(SIZES);
    body.push_str(&" ".repeat(length - body.len()));
    body.into()
}
