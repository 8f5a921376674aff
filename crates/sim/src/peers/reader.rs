//! Reads objects and lists at an interval, from any state and most recent.

use std::time::Duration;

use tokio::task::JoinSet;

use super::objects::{List, Object, parse};
use super::peer::{EndedRequest, Peer};
use super::transport::Outgoing;
use crate::checker::{Collection, Recency, Seen, ShownObject};

/// How long a reader waits for its response.
const TIMEOUT: Duration = Duration::from_secs(30);

/// What a reader reads.
#[derive(Debug, Clone, Copy)]
pub struct ReaderPlan {
    /// The collection.
    pub collection: Collection,
    /// Its objects `o0`, `o1`, … of which it reads one after another, at random.
    pub objects: u32,
    /// The time between two requests, which do not wait for each other.
    pub interval: Duration,
}

#[derive(Debug, Clone)]
struct Read {
    collection: Collection,
    /// The object; `None` for the list.
    name: Option<String>,
    recency: Recency,
}

impl Read {
    /// Of eight reads two are lists; a half is most recent.
    fn nth(plan: &ReaderPlan, number: u32) -> Self {
        let name = (!number.is_multiple_of(4))
            .then(|| format!("o{}", fastrand::u32(0..plan.objects.max(1))));
        let is_any = if name.is_none() { number.is_multiple_of(8) } else { number % 2 == 1 };
        let recency = if is_any { Recency::Any } else { Recency::MostRecent };
        Self { collection: plan.collection, name, recency }
    }

    fn outgoing(&self) -> Outgoing {
        let path = match &self.name {
            Some(name) => self.collection.object(name),
            None => self.collection.path(),
        };
        Outgoing::get(match self.recency {
            Recency::MostRecent => path,
            Recency::Any => format!("{path}?resourceVersion=0"),
            Recency::NotOlderThan(version) => format!("{path}?resourceVersion={version}"),
        })
    }
}

/// Reads until the client is stopped.
pub async fn run(peer: Peer, plan: ReaderPlan) {
    let mut reads = JoinSet::new();
    peer.pause_part(plan.interval).await;
    let mut timer = tokio::time::interval(plan.interval);
    for number in 1.. {
        tokio::select! {
            biased;
            () = peer.stop.stopped() => break,
            _ = timer.tick() => {}
        }
        while reads.try_join_next().is_some() {}
        let (peer, read) = (peer.clone(), Read::nth(&plan, number));
        reads.spawn_local(async move {
            let ended = peer.call(&read.outgoing(), TIMEOUT).await;
            finish(&peer, &read, &ended);
        });
    }
    while reads.join_next().await.is_some() {}
    peer.ended();
}

fn finish(peer: &Peer, read: &Read, ended: &EndedRequest) {
    if ended.answer.is_none() {
        return peer.observer.findings().read_open(ended.took());
    }
    peer.observer.findings().read(ended.status() == Some(200), ended.took());
    let Some(Ok(answer)) = &ended.answer else { return };
    let seen = match (&read.name, answer.status) {
        (Some(name), 404) => {
            let key = read.collection.key(name);
            Some(Seen::Object { recency: read.recency, key, shown: None })
        }
        (Some(_), 200) => parse::<Object>(&answer.body).and_then(|object| {
            let version = object.metadata.version()?;
            let shown = Some(ShownObject { version, token: object.metadata.token() });
            Some(Seen::Object { recency: read.recency, key: object.metadata.key(), shown })
        }),
        (None, 200) => list_seen(&answer.body, read.recency),
        _ => return,
    };
    match seen {
        Some(Seen::Object { key, .. })
            if read.name.as_ref().is_some_and(|name| read.collection.key(name) != key) =>
        {
            peer.violation(ended.request, "the response of another request");
        }
        Some(seen) => peer.saw(read.collection, ended, seen),
        None => peer.violation(ended.request, "an unreadable body"),
    }
}

/// What a body with a whole list shows.
pub(super) fn list_seen(body: &bytes::Bytes, recency: Recency) -> Option<Seen> {
    let list = parse::<List>(body)?;
    let version = list.metadata.version()?;
    let objects = list.items.iter();
    let objects: Option<_> =
        objects.map(|object| Some((object.metadata.key(), object.metadata.version()?))).collect();
    Some(Seen::List { recency, version, objects: objects? })
}
