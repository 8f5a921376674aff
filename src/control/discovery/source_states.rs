//! The last usable answer of each source, and the endpoints saved by an earlier run.
//!
//! Each source writes its answers here. The discovery controller waits for [`SourceStates::changed`]
//! and merges them. A later answer replaces an earlier one, so a burst of answers needs no queue. An
//! answer without a usable endpoint is counted and logged, and the earlier answer stays.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::own_addresses::OwnAddresses;
use jackstay_core::discovery::source::{
    Candidate, DiscoveredEndpoints, EndpointSource, SavedEndpoints, SourceAnswer,
};
use tokio::sync::Notify;

use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::RejectReason;

/// Number of rejected entries that a log line names.
const MAX_NAMED: usize = 5;

/// The states of one upstream's sources. Used on the control thread.
pub struct SourceStates {
    upstream: Arc<Upstream>,
    answers: RefCell<BTreeMap<EndpointSource, SourceAnswer>>,
    saved: RefCell<SavedEndpoints>,
    /// When an earlier run last confirmed the endpoints in `saved`.
    saved_at: Cell<Option<SystemTime>>,
    /// The last log message about rejected entries, by source and reason.
    logged: RefCell<BTreeMap<(EndpointSource, RejectReason), String>>,
    own_addresses: Box<dyn Fn() -> OwnAddresses>,
    changed: Notify,
}

impl SourceStates {
    /// States without an answer. `own_addresses` returns the current addresses of this process.
    pub fn new(upstream: Arc<Upstream>, own_addresses: Box<dyn Fn() -> OwnAddresses>) -> Rc<Self> {
        Rc::new(Self {
            upstream,
            answers: RefCell::default(),
            saved: RefCell::default(),
            saved_at: Cell::default(),
            logged: RefCell::default(),
            own_addresses,
            changed: Notify::new(),
        })
    }

    /// The upstream whose sources these are.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The current addresses of this process.
    pub fn own_addresses(&self) -> OwnAddresses {
        (self.own_addresses)()
    }

    /// Stores an answer of `source`.
    pub fn update(&self, source: EndpointSource, found: DiscoveredEndpoints) {
        self.update_partial(source, found, BTreeSet::new(), None);
    }

    /// Stores an answer of `source`, which has not resolved these names; one part failed with `error` if it is given.
    pub fn update_partial(
        &self,
        source: EndpointSource,
        found: DiscoveredEndpoints,
        unresolved: BTreeSet<String>,
        error: Option<&str>,
    ) {
        let (not_ready, rejected) = (found.not_ready, found.rejected_count);
        let invalid = summary(&found.rejected, rejected);
        self.report_rejected(source, RejectReason::Invalid, rejected, &invalid);
        let offered = found.candidates.len();
        let own_addresses = self.own_addresses();
        let (own, candidates): (Vec<_>, Vec<_>) =
            found.candidates.into_iter().partition(|c| own_addresses.contains(&c.address));
        let addresses: Vec<_> = own.iter().map(|own| own.address.to_string()).collect();
        let loops = format!(
            "{}: jackstay's own address, requests would loop",
            summary(&addresses, own.len())
        );
        self.report_rejected(source, RejectReason::OwnAddress, own.len(), &loops);
        if candidates.is_empty() {
            let why = why_empty(offered, not_ready, rejected);
            let message = format!("an empty answer: {why}");
            self.report_rejected(source, RejectReason::Empty, 1, &message);
            let error = format!("an empty answer changes nothing: {why}");
            return self.upstream.sources.unusable(source, &error);
        }
        self.report_rejected(source, RejectReason::Empty, 0, "");
        self.upstream.sources.succeeded(source, candidates.len(), error);
        let answer = SourceAnswer { candidates, unresolved };
        if self.answers.borrow().get(&source) != Some(&answer) {
            self.answers.borrow_mut().insert(source, answer);
            self.notify();
        }
    }

    /// Counts `count` rejected entries. Logs `message`, unless it was the last message for this source
    /// and reason.
    fn report_rejected(
        &self,
        source: EndpointSource,
        reason: RejectReason,
        count: usize,
        message: &str,
    ) {
        let mut logged = self.logged.borrow_mut();
        if count == 0 {
            logged.remove(&(source, reason));
            return;
        }
        let before = logged.insert((source, reason), message.to_owned());
        let new_message = (before.as_deref() != Some(message)).then_some(message);
        self.upstream.sources.refused(source, reason, count, new_message);
    }

    /// Records that `source` could not be read. Its last answer stays.
    pub fn fail(&self, source: EndpointSource, error: &str) {
        self.upstream.sources.failed(source, error);
    }

    /// Removes a source that is no longer configured, with its answer and its saved endpoints.
    pub fn remove(&self, source: EndpointSource) {
        self.upstream.sources.forget(source);
        self.answers.borrow_mut().remove(&source);
        self.saved.borrow_mut().retain(|(saved_source, _)| *saved_source != source);
        self.notify();
    }

    /// Stores the endpoints of an earlier run, which it last confirmed at `saved_at`.
    pub fn restore(&self, saved: SavedEndpoints, saved_at: SystemTime) {
        *self.saved.borrow_mut() = saved;
        self.saved_at.set(Some(saved_at));
        self.notify();
    }

    /// Drops the saved endpoints of names that are not configured: no answer of DNS would replace them.
    pub fn retain_names(&self, names: &[EndpointAddress]) {
        self.saved.borrow_mut().retain(|entry| is_of_configured_name(entry, names));
    }

    /// The endpoints for the state file: those in the answers of all sources but the static one, and
    /// the saved endpoints about which their sources have not answered. With the latter, also returns
    /// the time at which they were last confirmed.
    pub fn to_save(&self) -> (SavedEndpoints, Option<SystemTime>) {
        self.read(|answers, saved| {
            let mut all: SavedEndpoints = answers
                .iter()
                .filter(|(source, _)| **source != EndpointSource::Static)
                .flat_map(|(source, answer)| answer.candidates.iter().map(|c| (*source, c.clone())))
                .collect();
            let from_answers = all.len();
            let still_counts = |entry: &&(EndpointSource, Candidate)| {
                answers.get(&entry.0).is_none_or(|answer| !answer.is_about(&entry.1))
                    && !all.contains(entry)
            };
            let older: Vec<_> = saved.iter().filter(still_counts).cloned().collect();
            all.extend(older);
            let confirmed_at = if all.len() > from_answers { self.saved_at.get() } else { None };
            (all, confirmed_at)
        })
    }

    /// Wakes the task that waits in [`Self::changed`].
    pub fn notify(&self) {
        self.changed.notify_one();
    }

    /// Waits until an answer has changed, or [`Self::notify`] was called.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Reads the answers and the saved endpoints.
    pub fn read<R>(
        &self,
        read: impl FnOnce(&BTreeMap<EndpointSource, SourceAnswer>, &SavedEndpoints) -> R,
    ) -> R {
        read(&self.answers.borrow(), &self.saved.borrow())
    }
}

/// Whether a saved endpoint is not one of DNS, or its name is among `names`.
pub fn is_of_configured_name(
    (source, saved): &(EndpointSource, Candidate),
    names: &[EndpointAddress],
) -> bool {
    let is_configured = |name: &String| names.iter().any(|one| one.tls_name() == name);
    *source != EndpointSource::Dns || saved.server_name.as_ref().is_some_and(is_configured)
}

/// Why an answer has no usable endpoint. All `offered` addresses are this process's own.
fn why_empty(offered: usize, not_ready: usize, rejected: usize) -> String {
    match (offered, not_ready, rejected) {
        (0, 0, 0) => "it names no endpoint".to_owned(),
        (0, 0, 1) => "its one entry cannot be an endpoint".to_owned(),
        (0, 0, _) => format!("none of its {rejected} entries can be an endpoint"),
        (0, 1, _) => "its one endpoint is not ready".to_owned(),
        (0, ..) => format!("none of its {not_ready} endpoints is ready"),
        (1, ..) => "its one endpoint is jackstay's own address".to_owned(),
        _ => format!("all of its {offered} endpoints are jackstay's own addresses"),
    }
}

/// The first `items` in one line, and the number of the others; there are `count` in all.
fn summary(items: &[String], count: usize) -> String {
    let named = items.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
    match count.saturating_sub(MAX_NAMED.min(items.len())) {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}
