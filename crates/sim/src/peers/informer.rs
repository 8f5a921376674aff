//! A reflector of client-go: it lists, watches from the version of the list, and lists again if the watch has failed.
//!
//! One that lists by a watch (client-go, `WatchListClient`) gets all objects as events, then a bookmark that says so,
//! and the changes on the same stream.
//!
//! What follows the end of a watch is that of client-go (`tools/cache/reflector.go`, and `watch/streamwatcher.go` for
//! broken streams):
//!
//! | end | what follows |
//! |---|---|
//! | clean, or the connection was closed or reset | a watch from the last version, at once; a list if it lasted less than 1 s without an event |
//! | the connection did not answer a PING, the stream was reset | a list after a pause |
//! | 410 as the status or in an ERROR event, another ERROR | a list after a pause |
//! | the watch was refused: no connection, 429 | a watch from the last version after a pause |
//! | any other failure without a head, another status | a list after a pause |

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::objects::{List, WatchLine, parse, watch_line};
use super::peer::{EndedRequest, Peer};
use super::transport::{Failure, Outgoing, Response};
use crate::checker::{ChangeKind, Collection, Moment, Recency, Seen};
use jackstay_sys::clock;

const FIRST_PAUSE: Duration = Duration::from_millis(800);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Pauses start anew when none was needed for this time.
const PAUSES_RESET_AFTER: Duration = Duration::from_secs(120);
/// Time limit of a page.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Objects of a page (`tools/pager`, `defaultPageSize`).
const PAGE: usize = 500;
const MIN_WATCH_SECONDS: f64 = 300.0;
/// The same for informers with short watches.
const SHORT_WATCH_SECONDS: f64 = 3.0;
/// A watch ends so much after its `timeoutSeconds` at the latest, unless its path is lost unnoticed then.
const MAX_OVERTIME: Duration = Duration::from_secs(1);
/// A watch that ends earlier without an event counts as failed.
const SHORT_WATCH: Duration = Duration::from_secs(1);

/// What an informer does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// A watch.
    Watch,
    /// A watch after a pause.
    WatchLater,
    /// A list after a pause.
    List,
    /// It has to end.
    Stop,
}

#[derive(Debug)]
struct Informer {
    peer: Peer,
    collection: Collection,
    /// The version of the list, or of the last event or bookmark.
    version: u64,
    has_listed: bool,
    /// The server cannot answer a list of [`Self::version`].
    is_version_unavailable: bool,
    /// Its watches end after this time, to which as much is added at random.
    min_watch_seconds: f64,
    /// Whether it gets its lists by watches.
    lists_by_watch: bool,
    backoff: Backoff,
}

/// Pauses that double, with jitter (apimachinery, `wait.NewExponentialBackoffManager`).
#[derive(Debug)]
struct Backoff {
    pause: Duration,
    last: Option<Instant>,
}

impl Backoff {
    fn next(&mut self, now: Instant) -> Duration {
        if self.last.is_none_or(|last| now > last + PAUSES_RESET_AFTER) {
            self.pause = FIRST_PAUSE;
        }
        self.last = Some(now);
        let pause = self.pause;
        self.pause = (pause * 2).min(MAX_PAUSE);
        pause.mul_f64(1.0 + fastrand::f64())
    }
}

/// Follows a collection until the client is stopped.
pub async fn run(peer: Peer, collection: Collection) {
    follow(peer, collection, (MIN_WATCH_SECONDS, false)).await;
}

/// [`run`] with lists by watches.
pub async fn run_watch_lists(peer: Peer, collection: Collection) {
    follow(peer, collection, (MIN_WATCH_SECONDS, true)).await;
}

/// [`run`] with watches that end after a few seconds.
pub async fn run_short_watches(peer: Peer, collection: Collection) {
    follow(peer, collection, (SHORT_WATCH_SECONDS, false)).await;
}

async fn follow(
    peer: Peer,
    collection: Collection,
    (min_watch_seconds, lists_by_watch): (f64, bool),
) {
    let backoff = Backoff { pause: FIRST_PAUSE, last: None };
    let mut informer = Informer {
        peer,
        collection,
        version: 0,
        has_listed: false,
        is_version_unavailable: false,
        min_watch_seconds,
        lists_by_watch,
        backoff,
    };
    if informer.peer.pause_part(Duration::from_millis(500)).await {
        let mut next = Next::List;
        loop {
            next = match next {
                Next::Stop => break,
                Next::Watch => informer.watch().await,
                Next::WatchLater if informer.pause().await => informer.watch().await,
                Next::List if !informer.has_listed || informer.pause().await => {
                    if informer.lists_by_watch {
                        informer.watch_list().await
                    } else {
                        informer.list().await
                    }
                }
                _ => Next::Stop,
            }
        }
    }
    informer.peer.saw_now(collection, 0, Seen::InformerStopped(informer.version));
    informer.peer.ended();
}

impl Informer {
    async fn pause(&mut self) -> bool {
        let pause = self.backoff.next(clock::now());
        self.peer.pause(pause).await
    }

    /// The version and the limit of a list: the first one is from the cache, whole.
    fn list_query(&self) -> (Recency, String) {
        let recency = match self.version {
            _ if self.is_version_unavailable => Recency::MostRecent,
            0 => Recency::Any,
            version => Recency::NotOlderThan(version),
        };
        let query = match recency {
            Recency::MostRecent => format!("limit={PAGE}"),
            Recency::Any => format!("limit={PAGE}&resourceVersion=0"),
            // With a limit an apiserver would ask etcd.
            Recency::NotOlderThan(version) | Recency::Exact(version) => {
                format!("resourceVersion={version}")
            }
        };
        (recency, query)
    }

    fn begin_list(&self) {
        if self.has_listed {
            self.peer.observer.findings().relists += 1;
            self.peer.log(|| "lists again".to_owned());
        }
    }

    async fn list(&mut self) -> Next {
        self.begin_list();
        let (recency, first_query) = self.list_query();
        let mut query = first_query;
        let mut objects = Vec::new();
        let mut began = None;
        loop {
            let outgoing = Outgoing::get(format!("{}?{query}", self.collection.path()));
            let mut ended = self.peer.call(&outgoing, LIST_TIMEOUT).await;
            ended.began = *began.get_or_insert(ended.began);
            let answer = match &ended.answer {
                None => return Next::Stop,
                Some(Ok(answer)) if answer.status == 200 => answer,
                Some(answer) => {
                    let is_too_old = answer.as_ref().is_ok_and(|answer| answer.status == 410);
                    self.is_version_unavailable |= is_too_old;
                    return self.list_failed().await;
                }
            };
            let Some(list) = parse::<List>(&answer.body) else {
                self.peer.violation(ended.request, "a list with parts of another response");
                return self.list_failed().await;
            };
            let items = list.items.iter().map(|item| &item.metadata);
            objects.extend(items.filter_map(|item| Some((item.key(), item.version()?))));
            if !list.metadata.r#continue.is_empty() {
                query = format!("limit={PAGE}&continue={}", list.metadata.r#continue);
                continue;
            }
            let Some(version) = list.metadata.version() else {
                self.peer.violation(ended.request, "a list without a version");
                return self.list_failed().await;
            };
            self.peer.saw(self.collection, &ended, Seen::List { recency, version, objects });
            self.version = version;
            (self.has_listed, self.is_version_unavailable) = (true, false);
            return Next::Watch;
        }
    }

    /// A list has failed. The pause before the first list that succeeds is made here.
    async fn list_failed(&mut self) -> Next {
        if self.has_listed || self.pause().await { Next::List } else { Next::Stop }
    }

    /// Watches from the last version on.
    async fn watch(&mut self) -> Next {
        let start = format!("resourceVersion={}", self.version);
        self.watch_from(&start, None).await
    }

    /// Lists by a watch, and goes on with it.
    async fn watch_list(&mut self) -> Next {
        self.begin_list();
        let (recency, version) = if self.version == 0 || self.is_version_unavailable {
            (Recency::MostRecent, String::new())
        } else {
            (Recency::NotOlderThan(self.version), format!("&resourceVersion={}", self.version))
        };
        let start = format!("resourceVersionMatch=NotOlderThan{version}&sendInitialEvents=true");
        let initial =
            InitialEvents { recency, began: self.peer.observer.moment(), objects: BTreeMap::new() };
        let next = self.watch_from(&start, Some(initial)).await;
        // The pause before the first list that succeeds is made here.
        if !self.has_listed && next != Next::Stop { self.list_failed().await } else { next }
    }

    /// Sends a watch whose query has `start`, and follows it. `initial`: it begins with all objects.
    async fn watch_from(&mut self, start: &str, initial: Option<InitialEvents>) -> Next {
        let seconds = (self.min_watch_seconds * (1.0 + fastrand::f64())) as u32;
        let target = format!(
            "{}?allowWatchBookmarks=true&{start}&timeoutSeconds={seconds}&watch=true",
            self.collection.path(),
        );
        let request = self.peer.client.next_request();
        let began = clock::now();
        let response = match self.open(request, &Outgoing::get(target), initial.is_some()).await {
            Ok(response) => response,
            Err(next) => {
                if let Some(initial) = &initial {
                    self.not_listed(initial, next);
                }
                return next;
            }
        };
        // A watch that begins in an outage is held, and its time counts from the end of that.
        let head_at = clock::now();
        if initial.is_none() {
            self.peer.saw_now(self.collection, request, Seen::WatchStarted(self.version));
        }
        let mut follower = Follower { informer: self, request, events: 0, initial };
        let next = follower.follow(response).await;
        let is_short = follower.events == 0 && clock::now() < began + SHORT_WATCH;
        let is_listed = follower.initial.is_none();
        if let Some(initial) = follower.initial.take() {
            self.not_listed(&initial, next);
        }
        let lasted = clock::now() - head_at;
        if lasted > Duration::from_secs(seconds.into()) + MAX_OVERTIME {
            self.peer.violation(request, &format!("a watch of {seconds} s lasted {lasted:?}"));
        }
        match next {
            Next::Watch | Next::WatchLater if is_short || !is_listed => Next::List,
            next => next,
        }
    }

    /// A list by a watch has ended before all objects had arrived.
    fn not_listed(&self, initial: &InitialEvents, next: Next) {
        let since = clock::now() - initial.began.at;
        let mut findings = self.peer.observer.findings();
        if next == Next::Stop { findings.list_open(since) } else { findings.list(false, since) }
    }

    /// Sends a watch and waits for its head. An error is what follows. If a list by a watch was too old, client-go asks
    /// for the most recent version next (`reflector.go`, `watchList`); after any other watch, the list names the
    /// version that the informer has.
    async fn open(
        &mut self,
        request: u64,
        outgoing: &Outgoing,
        is_list: bool,
    ) -> Result<Response, Next> {
        let client = self.peer.client.clone();
        let was_revoked = client.is_revoked();
        let opened = tokio::select! {
            biased;
            () = self.peer.stop.stopped() => return Err(Next::Stop),
            opened = client.open(request, outgoing) => opened,
        };
        if let Ok(response) = &opened {
            let status = response.head.status.as_u16();
            self.peer.check_credential(request, status, was_revoked);
        }
        match opened {
            Ok(response) if response.head.status == 200 => Ok(response),
            Ok(response) => {
                let status = response.head.status.as_u16();
                self.peer.log(|| format!("request {request}: watch refused with {status}"));
                self.is_version_unavailable |= is_list && status == 410;
                Err(if status == 429 { Next::WatchLater } else { Next::List })
            }
            Err(failure) => {
                // A refused connection has broken none.
                let is_broken = failure != Failure::Refused;
                self.peer.observer.findings().watches_broken += u64::from(is_broken);
                self.peer.log(|| format!("request {request}: watch: {}", failure.as_str()));
                Err(if failure == Failure::Refused { Next::WatchLater } else { Next::List })
            }
        }
    }
}

/// The objects of a watch that begins with all of them, as far as they have arrived.
#[derive(Debug)]
struct InitialEvents {
    recency: Recency,
    began: Moment,
    /// The version of each object.
    objects: BTreeMap<String, u64>,
}

/// Reads the body of a watch.
#[derive(Debug)]
struct Follower<'a> {
    informer: &'a mut Informer,
    request: u64,
    /// Events and bookmarks.
    events: u32,
    /// `None` once it has all objects.
    initial: Option<InitialEvents>,
}

impl Follower<'_> {
    async fn follow(&mut self, mut response: Response) -> Next {
        let stop = self.informer.peer.stop.clone();
        let mut unread = Vec::new();
        loop {
            let chunk = tokio::select! {
                biased;
                chunk = response.chunk() => chunk,
                () = stop.stopped() => return Next::Stop,
            };
            match chunk {
                Ok(Some(chunk)) => unread.extend_from_slice(&chunk),
                Ok(None) => return self.ended(unread.is_empty()),
                Err(failure) => return self.broken(failure),
            }
            let Some(end) = unread.iter().rposition(|&byte| byte == b'\n') else { continue };
            let rest = unread.split_off(end + 1);
            for line in unread.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
                if let Some(next) = self.line(line) {
                    return next;
                }
            }
            unread = rest;
        }
    }

    fn ended(&self, at_boundary: bool) -> Next {
        let peer = &self.informer.peer;
        peer.log(|| format!("request {}: watch ended", self.request));
        peer.observer.findings().watches_ended += 1;
        if !at_boundary {
            peer.violation(self.request, "a watch ended in the middle of an event");
        }
        Next::Watch
    }

    fn broken(&self, failure: Failure) -> Next {
        let peer = &self.informer.peer;
        peer.log(|| format!("request {}: watch broken: {}", self.request, failure.as_str()));
        peer.observer.findings().watches_broken += 1;
        if failure == Failure::Undecodable {
            peer.violation(self.request, "an undecodable watch");
        }
        if failure == Failure::Closed { Next::Watch } else { Next::List }
    }

    /// Takes a line in. Returns what follows if the watch is over.
    fn line(&mut self, line: &[u8]) -> Option<Next> {
        let informer = &mut *self.informer;
        let (peer, collection) = (&informer.peer, informer.collection);
        let (version, seen) = match watch_line(line) {
            Some(WatchLine::Changed(kind, object)) if self.initial.is_some() => {
                let objects = &mut self.initial.as_mut()?.objects;
                let (key, version) = (object.metadata.key(), object.metadata.version()?);
                if kind == ChangeKind::Deleted {
                    objects.remove(&key);
                } else {
                    objects.insert(key, version);
                }
                return None;
            }
            Some(WatchLine::InitialEventsEnd(version)) if self.initial.is_some() => {
                let InitialEvents { recency, began, objects } = self.initial.take()?;
                let (request, ended) = (self.request, peer.observer.moment());
                peer.observer.findings().list(true, ended.at - began.at);
                let ended = EndedRequest { request, began, ended, answer: None };
                let objects = objects.into_iter().collect();
                peer.saw(collection, &ended, Seen::List { recency, version, objects });
                (informer.has_listed, informer.is_version_unavailable) = (true, false);
                (version, Seen::WatchStarted(version))
            }
            Some(WatchLine::Changed(kind, object)) => {
                let (key, token) = (object.metadata.key(), object.metadata.token());
                let version = object.metadata.version()?;
                (version, Seen::Event { kind, key, version, token })
            }
            Some(WatchLine::Bookmark(version) | WatchLine::InitialEventsEnd(version)) => {
                (version, Seen::Bookmark(version))
            }
            Some(WatchLine::Error(status)) => {
                peer.log(|| format!("request {}: watch failed with {status}", self.request));
                return Some(Next::List);
            }
            None => {
                peer.violation(self.request, "unreadable event");
                return Some(Next::List);
            }
        };
        peer.log(|| format!("request {}: {seen:?}", self.request));
        peer.saw_now(collection, self.request, seen);
        self.events += 1;
        informer.version = version;
        None
    }
}
