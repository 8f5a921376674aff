//! Asks an endpoint whether its etcd was restored from a backup ([`jackstay_core::restore`]).
//!
//! | when | what is asked |
//! |---|---|
//! | the prober has a new connection, and the endpoint is ready: its process may have been replaced | the [question] about the highest version that was seen of a resource, which the cache answers; if it has not reached the version, a suspicion is raised |
//! | a suspicion is open, also one of the [lag check](super::lag) | a most-recent list with a limit of one object |
//! | a watch has begun at a version that a restore may have lost | the same, by one of the endpoints |
//!
//! Without a credential for the prober nothing is asked. Then reads lower the floors ([`crate::proxy`]), and a watch of the
//! lost history is silent until etcd has passed its version, as without jackstay.
//!
//! [question]: jackstay_core::lag::question

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::StatusCode;
use jackstay_core::backoff::Backoff;
use jackstay_core::lag::{Expected, TICK};
use jackstay_core::restore::{Report, Suspicion, revision_question};
use jackstay_core::watch::codec::head::json_head;
use jackstay_core::watch::codec::version::HeadVersion;
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::lag::{Answer, ask};
use super::request::fetch;
use crate::observe::events::{Change, EventKind};
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::resource_versions::ResourceRecord;

/// Limit of a list. kube-apiserver waits 3 s for its cache before it reads etcd.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Pauses after a question that was not answered. They double.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// How often a connection is asked again, in about 4 minutes.
const MAX_REPEATS: u32 = 8;
/// Number of resources about which a new connection is asked, if the credential may not read the first ones.
const MAX_RESOURCES: usize = 4;
/// kubelet may get and list these, so they are asked about first.
const FIRST_RESOURCE: &str = "services";
/// How long the loop waits while nothing is asked. A notification ends the wait.
const IDLE: Duration = Duration::from_secs(3600);

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
                IDLE
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
            let revision = ask_revision(upstream, &connection, &resource).await;
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
            let revision = ask_revision(upstream, &connection, &resource).await;
            upstream.restores.revision_read(revision);
            self.set_pause(revision.is_some());
            return revision.is_some();
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
    let mut is_refused = false;
    for seen in versions_to_check(upstream) {
        match ask(upstream, connection, &seen).await {
            Answer::Reached => return true,
            Answer::Behind(current) => {
                upstream.resource_versions.forget_if_ahead(endpoint, &seen.resource, current);
                let (resource, shown_by) = (&seen.resource, &seen.shown_by);
                upstream.restores.suspect(resource, seen.version, shown_by, clock::now());
                return true;
            }
            Answer::Refused => is_refused = true,
            Answer::Unknown => return false,
        }
    }
    !is_refused
}

/// The highest versions that endpoints have shown or clients have seen, of a few resources.
fn versions_to_check(upstream: &Upstream) -> Vec<Expected> {
    let now = clock::now();
    let expected = |record: Arc<ResourceRecord>| {
        revision_question(&record.name)?;
        let (shown_by, shown) = match record.highest() {
            Some((endpoint, version)) => (Arc::clone(&endpoint.label), version),
            None => ("a client".into(), 0),
        };
        let version = shown.max(upstream.version_floors.highest_of(&record.name));
        let resource = Arc::clone(&record.name);
        (version > 0).then_some(Expected { resource, version, shown_by, at: now })
    };
    let records = upstream.resource_versions.snapshot();
    let mut all: Vec<_> = records.into_iter().filter_map(expected).collect();
    all.sort_by_key(|seen| (*seen.resource != *FIRST_RESOURCE, std::cmp::Reverse(seen.version)));
    all.truncate(MAX_RESOURCES);
    all
}

/// The version of a most-recent list; `None` if it is not answered.
async fn ask_revision(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    resource: &str,
) -> Option<u64> {
    let path = revision_question(resource)?;
    let token = upstream.credentials.probe_token().and_then(|token| token.header());
    match timeout(LIST_TIMEOUT, fetch(connection, &path, token)).await {
        Ok(Ok((StatusCode::OK, body))) => match json_head(&body) {
            HeadVersion::Version(version) => Some(version),
            HeadVersion::Incomplete | HeadVersion::None => None,
        },
        Ok(_) | Err(_) => None,
    }
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
