//! Asks an endpoint whether its etcd was restored from a backup ([`jackstay_core::restore`]).
//!
//! | when | what is asked |
//! |---|---|
//! | a version was seen of a resource that is not known to be stored with the [reference](jackstay_core::shared_etcd) | one of the endpoints: the revision of the reference, a most-recent list with a limit of one object |
//! | the prober has a new connection, and the endpoint is ready: its process may have been replaced | the same; if a version that was seen is above it, a suspicion is raised |
//! | the reference is refused then, or a version of another etcd was seen | the [question] about the highest version that was seen of a resource, which its cache answers |
//! | a suspicion is open, also one of the [lag check](super::lag) | the revision of the reference, or of the resource if it is not known to be stored with it; of an endpoint that may lead to several apiservers also on further connections |
//! | a watch has begun at a version that a restore may have lost | the same, by one of the endpoints |
//!
//! So a credential that may list services, as that of a node, suffices for the resources of their etcd. Without a credential
//! for the prober nothing is asked. Then reads lower the floors ([`crate::proxy`]), and a watch of the lost history is silent
//! until etcd has passed its version, as without jackstay.
//!
//! [question]: jackstay_core::lag::question

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::StatusCode;
use jackstay_core::backoff::Backoff;
use jackstay_core::lag::{Expected, TICK};
use jackstay_core::request::start_up::is_refusal;
use jackstay_core::restore::{Report, Suspicion, revision_question};
use jackstay_core::shared_etcd::REFERENCE;
use jackstay_core::watch::codec::head::json_head;
use jackstay_core::watch::codec::version::HeadVersion;
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::further_connections::{FURTHER_CONNECTIONS, open_further};
use super::lag::{Answer, ask};
use crate::observe::events::{Change, EventKind};
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::question::fetch;
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::restores::LOOK_INTERVAL;

/// Limit of a list. kube-apiserver waits 3 s for its cache before it reads etcd.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses after a question that was not answered. They double.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// How often a connection is asked again, in about 4 minutes.
const MAX_REPEATS: u32 = 8;
/// Number of resources about which a new connection is asked, if the credential may not read the first ones.
const MAX_RESOURCES: usize = 4;

/// What a most-recent list has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Revision {
    Read(u64),
    /// The credential of the prober may not list the resource, or not yet.
    Refused,
    /// There was no answer, or no version in it.
    Unknown,
}

impl Revision {
    fn read(self) -> Option<u64> {
        match self {
            Self::Read(revision) => Some(revision),
            Self::Refused | Self::Unknown => None,
        }
    }
}

/// Asks one endpoint.
#[derive(Debug)]
pub struct RestoreCheck {
    connection: RefCell<Weak<Connection>>,
    /// The process may be another one, and was not asked.
    is_unchecked: Cell<bool>,
    connection_changed: Notify,
    pauses: RefCell<(Backoff, Option<Instant>)>,
}

impl Default for RestoreCheck {
    fn default() -> Self {
        Self {
            connection: RefCell::default(),
            is_unchecked: Cell::new(false),
            connection_changed: Notify::new(),
            pauses: RefCell::new((PAUSES, None)),
        }
    }
}

impl RestoreCheck {
    /// Asks on `connection` from now on.
    pub fn set_connection(&self, connection: &Rc<Connection>) {
        let new = Rc::downgrade(connection);
        if !self.connection.replace(Weak::clone(&new)).ptr_eq(&new) {
            self.is_unchecked.set(true);
            self.pauses.replace((PAUSES, None));
            self.connection_changed.notify_one();
        }
    }

    /// Asks what is wanted, until the future is dropped.
    pub async fn run(&self, upstream: &Arc<Upstream>, endpoint: &Arc<Endpoint>) {
        loop {
            let changed = upstream.restores.changed();
            if self.ask_next(upstream, endpoint).await {
                continue;
            }
            let pause = if self.is_unchecked.get() || self.pauses.borrow().1.is_some() {
                TICK
            } else {
                LOOK_INTERVAL
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = changed => {}
                () = self.connection_changed.notified() => {}
            }
        }
    }

    /// Asks one question, if one is due. Returns whether the next one may be due.
    async fn ask_next(&self, upstream: &Arc<Upstream>, endpoint: &Arc<Endpoint>) -> bool {
        let now = clock::now();
        let connection = self.connection.borrow().upgrade();
        let live = connection.filter(|one| one.state() == ConnectionState::Live);
        let Some(connection) = live else { return false };
        if let Some(resource) = upstream.restores.wanted_report(endpoint.key(), now) {
            let revision = ask_revision(upstream, &connection, &resource).await.read();
            let revision = if endpoint.is_shared() {
                highest_of_several(upstream, endpoint, &resource, revision).await
            } else {
                revision
            };
            report(upstream, endpoint, &resource, revision);
            return true;
        }
        let is_ready = endpoint.state() == EndpointState::Ready;
        if !is_ready || self.pauses.borrow().1.is_some_and(|end| now < end) {
            return false;
        }
        self.pauses.borrow_mut().1 = None;
        if self.is_unchecked.get() {
            // An apiserver that starts refuses everybody whose rights it has not read.
            let is_answered = check_process(upstream, endpoint, &connection).await
                || self.pauses.borrow().0.failures() >= MAX_REPEATS;
            self.is_unchecked.set(!is_answered);
            self.set_pause(is_answered);
            return is_answered;
        }
        if let Some(resource) = upstream.restores.take_wanted_revision() {
            let revision = ask_revision(upstream, &connection, &resource).await.read();
            upstream.restores.revision_read(revision);
            self.set_pause(revision.is_some());
            return revision.is_some();
        }
        if upstream.restores.take_look(now) {
            let seen = versions_shown(upstream);
            if upstream.restores.is_reference_due(&seen, now) {
                read_reference(upstream, endpoint, &connection, seen).await;
            }
        }
        false
    }

    fn set_pause(&self, is_answered: bool) {
        let (backoff, end) = &mut *self.pauses.borrow_mut();
        if is_answered {
            backoff.reset();
        } else {
            *end = Some(clock::now() + backoff.failed());
        }
    }
}

/// Asks a process that may be a new one about versions that were seen before. Returns false if it must be asked again.
async fn check_process(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    connection: &Rc<Connection>,
) -> bool {
    let seen = versions_seen(upstream);
    if seen.is_empty() && upstream.restores.latest_reference().is_none() {
        return true;
    }
    let (revision, is_lost) = read_reference(upstream, endpoint, connection, seen.clone()).await;
    match revision {
        Revision::Read(_) if is_lost => true,
        // The versions above it are those of another etcd.
        Revision::Read(revision) => {
            let other = seen.into_iter().filter(|one| one.version > revision).collect();
            check_caches(upstream, endpoint, connection, other).await
        }
        Revision::Refused => check_caches(upstream, endpoint, connection, seen).await,
        Revision::Unknown => false,
    }
}

/// Reads the revision of the reference, after these versions were seen. Raises a suspicion and returns true if one of them
/// may be lost.
async fn read_reference(
    upstream: &Upstream,
    endpoint: &Arc<Endpoint>,
    connection: &Rc<Connection>,
    mut seen: Vec<Expected>,
) -> (Revision, bool) {
    let restores = &upstream.restores;
    seen.extend(restores.latest_reference());
    let notice = restores.recognised_notice();
    let revision = ask_revision(upstream, connection, REFERENCE).await;
    let (read, now) = ((revision.read(), &endpoint.label), clock::now());
    let lost = restores.reference_read(read, &seen, notice, now);
    if let Some(lost) = &lost {
        restores.suspect(lost, now);
    }
    (revision, lost.is_some())
}

/// Asks the caches of an endpoint whether they have reached versions that were seen before. Returns false if they must be
/// asked again.
async fn check_caches(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    connection: &Rc<Connection>,
    mut seen: Vec<Expected>,
) -> bool {
    seen.retain(|one| revision_question(&one.resource).is_some());
    seen.sort_by_key(|one| Reverse(one.version));
    seen.truncate(MAX_RESOURCES);
    let mut is_refused = false;
    for seen in seen {
        match ask(upstream, connection, &seen).await {
            Answer::Reached => return true,
            Answer::Behind(current) => {
                upstream.resource_versions.forget_if_ahead(endpoint, &seen.resource, current);
                upstream.restores.suspect(&seen, clock::now());
                return true;
            }
            Answer::Refused => is_refused = true,
            Answer::Unknown => return false,
        }
    }
    !is_refused
}

/// The highest version of each resource that an endpoint has shown.
fn versions_shown(upstream: &Upstream) -> Vec<Expected> {
    let at = clock::now();
    let records = upstream.resource_versions.snapshot();
    let expected = |record: &Arc<ResourceRecord>| {
        let (endpoint, version) = record.highest()?;
        let (resource, shown_by) = (Arc::clone(&record.name), Arc::clone(&endpoint.label));
        Some(Expected { resource, version, shown_by, at })
    };
    records.iter().filter_map(expected).collect()
}

/// The highest version of each resource that an endpoint has shown or a client has seen.
fn versions_seen(upstream: &Upstream) -> Vec<Expected> {
    let mut shown = versions_shown(upstream);
    for record in upstream.resource_versions.snapshot() {
        let version = upstream.version_floors.highest_of(&record.name);
        match shown.iter_mut().find(|one| one.resource == record.name) {
            Some(one) => one.version = one.version.max(version),
            None if version > 0 => shown.push(Expected {
                resource: Arc::clone(&record.name),
                version,
                shown_by: "a client".into(),
                at: clock::now(),
            }),
            None => {}
        }
    }
    shown
}

/// Asks for the version of a most-recent list.
async fn ask_revision(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    resource: &str,
) -> Revision {
    let Some(path) = revision_question(resource) else { return Revision::Refused };
    let token = upstream.credentials.probe_token().and_then(|token| token.header());
    match timeout(LIST_TIMEOUT, fetch(connection, &path, token)).await {
        Ok(Ok((StatusCode::OK, body))) => match json_head(&body) {
            HeadVersion::Version(version) => Revision::Read(version),
            HeadVersion::Incomplete | HeadVersion::None => Revision::Unknown,
        },
        Ok(Ok((status, _))) if is_refusal(status.as_u16()) => Revision::Refused,
        Ok(_) | Err(_) => Revision::Unknown,
    }
}

/// The highest revision that the connections to an endpoint have shown that may lead to several apiservers, with `first`,
/// that of the prober's connection. `None` unless two of them have answered: one of the apiservers may be the only one
/// that answers with an old state.
async fn highest_of_several(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    resource: &str,
    first: Option<u64>,
) -> Option<u64> {
    let further = (0..FURTHER_CONNECTIONS).map(|_| async {
        let connection = open_further(upstream, endpoint).await?;
        ask_revision(upstream, &connection, resource).await.read()
    });
    let revisions: Vec<_> = join_all(further).await.into_iter().chain([first]).flatten().collect();
    if revisions.len() < 2 { None } else { revisions.into_iter().max() }
}

fn report(upstream: &Upstream, endpoint: &Arc<Endpoint>, resource: &str, revision: Option<u64>) {
    let report = revision.map_or(Report::None, Report::Revision);
    let conditions: Vec<_> =
        upstream.endpoints().iter().map(|endpoint| endpoint.condition()).collect();
    let report = (resource, report);
    let restored = upstream.restores.report(endpoint.key(), report, &conditions, clock::now());
    if let Some((suspicion, revision)) = restored {
        restored_to(upstream, &suspicion, revision);
    }
}

/// Drops what was seen of the lost history, and ends the watches that wait for events after its versions.
fn restored_to(upstream: &Upstream, suspicion: &Suspicion, revision: u64) {
    let shown = upstream.resource_versions.forget_above(revision);
    let seen = upstream.version_floors.forget_above(revision);
    upstream.restores.recognised(suspicion, revision, shown.max(seen), clock::now());
    let Suspicion { resource, version, shown_by, .. } = suspicion;
    let reason = format!(
        "etcd was restored from a backup: it is at revision {revision}, and {shown_by} had version {version} of \
         {resource} before"
    );
    upstream.metrics.events().changed(&Change {
        kind: EventKind::Upstream,
        upstream: Some(&upstream.name),
        name: &upstream.name,
        detail: "",
        from: "etcd",
        to: "etcd_restored",
        reason: &reason,
        effect: "watches end with 410, so that clients list again; version floors are lowered",
        bad: true,
    });
}
