//! Reads objects and lists at an interval, from any state and most recent.

use std::cell::Cell;
use std::rc::Rc;
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
    /// Whether it names the highest version that it has seen, in three of four reads.
    pub names_versions: bool,
}

#[derive(Debug, Clone)]
struct Read {
    collection: Collection,
    /// The object; `None` for the list.
    name: Option<String>,
    recency: Recency,
}

impl Read {
    /// `highest`: the highest version of a list that the reader has seen.
    fn nth(plan: &ReaderPlan, number: u32, highest: u64) -> Self {
        if plan.names_versions && highest > 0 {
            return Self::of_version(plan, number, highest);
        }
        Self::of_any(plan, number)
    }

    /// Of four reads one is a most recent list, and the others name a version: a list of exactly that, and a list and an
    /// object that are not older.
    fn of_version(plan: &ReaderPlan, number: u32, version: u64) -> Self {
        let (name, recency) = match number % 4 {
            0 => (None, Recency::MostRecent),
            1 => (None, Recency::Exact(version)),
            2 => (None, Recency::NotOlderThan(version)),
            _ => {
                let name = format!("o{}", fastrand::u32(0..plan.objects.max(1)));
                (Some(name), Recency::NotOlderThan(version))
            }
        };
        Self { collection: plan.collection, name, recency }
    }

    /// Of eight reads two are lists; a half is most recent.
    fn of_any(plan: &ReaderPlan, number: u32) -> Self {
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
            Recency::Exact(version) => {
                format!("{path}?resourceVersion={version}&resourceVersionMatch=Exact")
            }
        })
    }
}

/// Reads until the client is stopped.
pub async fn run(peer: Peer, plan: ReaderPlan) {
    let mut reads = JoinSet::new();
    let highest = Rc::new(Cell::new(0));
    peer.pause_part(plan.interval).await;
    let mut timer = tokio::time::interval(plan.interval);
    for number in 1.. {
        tokio::select! {
            biased;
            () = peer.stop.stopped() => break,
            _ = timer.tick() => {}
        }
        while reads.try_join_next().is_some() {}
        let (peer, highest) = (peer.clone(), Rc::clone(&highest));
        let read = Read::nth(&plan, number, highest.get());
        reads.spawn_local(async move {
            let ended = peer.call(&read.outgoing(), TIMEOUT).await;
            finish(&peer, &read, &ended, &highest);
        });
    }
    while reads.join_next().await.is_some() {}
    peer.ended();
}

fn finish(peer: &Peer, read: &Read, ended: &EndedRequest, highest: &Cell<u64>) {
    let is_aggregated = read.collection.is_aggregated();
    if ended.answer.is_none() {
        let mut findings = peer.observer.findings();
        return if is_aggregated {
            findings.group.read_open(ended.took());
        } else {
            findings.read_open(ended.took());
        };
    }
    if ended.status() == Some(401) {
        // [`Peer::call`] counts it.
        return;
    }
    let (is_ok, took) = (ended.status() == Some(200), ended.took());
    if is_aggregated {
        peer.check_aggregated(ended);
        peer.observer.findings().group.read(is_ok, took);
    } else {
        peer.observer.findings().read(is_ok, took);
    }
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
        Some(seen) => {
            if let Seen::List { version, .. } = seen {
                highest.set(highest.get().max(version));
            }
            peer.saw(read.collection, ended, seen);
        }
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
