//! Writes objects at an interval. It never repeats a write, and each has a token of its own.

use std::collections::HashMap;
use std::time::Duration;

use http::Method;
use serde_json::Value;
use tokio::task::JoinSet;

use super::objects::{Object, object, parse, token_patch, token_text};
use super::peer::{EndedRequest, Peer};
use super::transport::Outgoing;
use crate::checker::{ChangeKind, Collection, Seen, WriteOutcome};

/// How long a writer waits for its response.
const TIMEOUT: Duration = Duration::from_secs(30);
const MERGE_PATCH: &str = "application/merge-patch+json";

/// What a writer writes.
#[derive(Debug, Clone, Copy)]
pub struct WriterPlan {
    /// The collection.
    pub collection: Collection,
    /// Its objects `o0`, `o1`, … which every client may write.
    pub objects: u32,
    /// The time between two requests, which do not wait for each other.
    pub interval: Duration,
}

#[derive(Debug)]
struct Write {
    collection: Collection,
    name: String,
    kind: ChangeKind,
    token: u64,
    outgoing: Outgoing,
}

/// Versions of objects as the client has seen them last, for updates with a precondition.
type Versions = HashMap<String, u64>;

impl Write {
    /// One in eight creates or deletes an object that only this client writes. The others are updates: with and without a
    /// precondition, and patches.
    fn nth(peer: &Peer, plan: &WriterPlan, number: u32, versions: &Versions) -> Self {
        let collection = plan.collection;
        let token = fastrand::u64(1..);
        let own = format!("o{}", plan.objects + u32::from(peer.id.number));
        let (name, kind) = match number % 16 {
            0 => (own, ChangeKind::Deleted),
            8 => (own, ChangeKind::Added),
            _ => (format!("o{}", fastrand::u32(0..plan.objects.max(1))), ChangeKind::Modified),
        };
        let path = collection.object(&name);
        let outgoing = match kind {
            ChangeKind::Deleted => Outgoing::delete(path),
            ChangeKind::Added => {
                let body = object(&collection, &name, token);
                Outgoing::json(Method::POST, collection.path(), &body)
            }
            ChangeKind::Modified if number % 2 == 1 => {
                Outgoing::json(Method::PATCH, path, &token_patch(token)).content_type(MERGE_PATCH)
            }
            ChangeKind::Modified => {
                let mut body = object(&collection, &name, token);
                if let Some(version) = versions.get(&name) {
                    body["metadata"]["resourceVersion"] = Value::from(version.to_string());
                }
                Outgoing::json(Method::PUT, path, &body)
            }
        };
        let outgoing = outgoing.audit_id(&token_text(token));
        Self { collection, name, kind, token, outgoing }
    }
}

/// Writes until the client is stopped.
pub async fn run(peer: Peer, plan: WriterPlan) {
    let mut writes = JoinSet::new();
    let mut versions = Versions::new();
    peer.pause_part(plan.interval).await;
    let mut timer = tokio::time::interval(plan.interval);
    for number in 1.. {
        tokio::select! {
            biased;
            () = peer.stop.stopped() => break,
            _ = timer.tick() => {}
        }
        while let Some(written) = writes.try_join_next() {
            if let Ok((name, version)) = written {
                remember(&mut versions, name, version);
            }
        }
        let (peer, write) = (peer.clone(), Write::nth(&peer, &plan, number, &versions));
        writes.spawn_local(async move {
            let ended = peer.call(&write.outgoing, TIMEOUT).await;
            let version = finish(&peer, &write, &ended);
            (write.name, version)
        });
    }
    while writes.join_next().await.is_some() {}
    peer.ended();
}

fn remember(versions: &mut Versions, name: String, version: Option<u64>) {
    match version {
        Some(version) => versions.insert(name, version),
        None => versions.remove(&name),
    };
}

/// Records the result of a write. Returns the version of the object, if it is known.
fn finish(peer: &Peer, write: &Write, ended: &EndedRequest) -> Option<u64> {
    let is_aggregated = write.collection.is_aggregated();
    let findings = || peer.observer.findings();
    // An own object may be missing or present, because an earlier write has failed. [`Peer::call`] counts 401.
    let ok = matches!(ended.status(), Some(200 | 201 | 404 | 409));
    match (&ended.answer, ended.status()) {
        (None, _) if is_aggregated => findings().group.write_open(ended.took()),
        (None, _) => findings().write_open(ended.took()),
        (_, Some(401)) => {}
        _ if is_aggregated => {
            peer.check_aggregated(ended);
            findings().group.write(ok, ended.took());
        }
        _ => findings().write(ok, ended.took()),
    }
    let outcome = outcome(ended);
    let seen = Seen::Write {
        key: write.collection.key(&write.name),
        kind: write.kind,
        token: write.token,
        outcome,
    };
    peer.saw(write.collection, ended, seen);
    if let WriteOutcome::Done(version) = outcome { version } else { None }
}

/// The result of a write for its client.
pub(super) fn outcome(ended: &EndedRequest) -> WriteOutcome {
    match &ended.answer {
        Some(Ok(answer)) if (200..300).contains(&answer.status) => {
            let object = parse::<Object>(&answer.body);
            WriteOutcome::Done(object.and_then(|object| object.metadata.version()))
        }
        Some(Ok(answer)) if (400..500).contains(&answer.status) => WriteOutcome::Refused,
        _ => WriteOutcome::Unknown,
    }
}
