//! The last usable answer of each source, and the endpoints saved by an earlier run.
//!
//! Sources write here; the discovery controller waits for [`SourceStates::changed`] and merges. A
//! later answer replaces an earlier one, so a burst of answers needs no queue. An answer without a
//! usable endpoint is counted and logged, and the earlier answer stays.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::Notify;

use super::own_addresses::OwnAddresses;
use crate::config::EndpointAddress;
use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::EndpointSource;

/// Number of rejected entries that a log line names.
const MAX_NAMED: usize = 5;
/// Number of rejected entries whose reasons are kept; the rest are only counted.
const MAX_REASONS: usize = 20;

/// An address that a source offers as an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Candidate {
    /// Host and port.
    pub address: EndpointAddress,
    /// Name to verify in the serving certificate, unless the configuration sets `tls.server_name`.
    /// `None` means the host of the address.
    pub server_name: Option<String>,
}

/// The result of one reading of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredEndpoints {
    /// Ready endpoints, in the order of the source.
    pub candidates: Vec<Candidate>,
    /// Number of endpoints that the source reports as not ready.
    pub not_ready: usize,
    /// Why entries were rejected, at most the first 20.
    pub rejected: Vec<String>,
    /// Number of rejected entries.
    pub rejected_count: usize,
}

impl DiscoveredEndpoints {
    /// Records `count` entries that cannot be endpoints.
    pub fn reject(&mut self, reason: String, count: usize) {
        self.rejected_count += count;
        if self.rejected.len() < MAX_REASONS {
            self.rejected.push(reason);
        }
    }
}

/// The last usable answer of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceAnswer {
    /// The endpoints that the source offers.
    pub candidates: Vec<Candidate>,
    /// Every part of the source has answered, so its saved endpoints are obsolete. DNS with two
    /// names is incomplete until both are resolved.
    pub complete: bool,
}

/// Endpoints from the state file, each with the source that offered it in an earlier run.
pub type SavedEndpoints = Vec<(EndpointSource, Candidate)>;

/// The states of one upstream's sources. Lives on the control thread.
pub struct SourceStates {
    upstream: Arc<Upstream>,
    answers: RefCell<BTreeMap<EndpointSource, SourceAnswer>>,
    saved: RefCell<SavedEndpoints>,
    /// When `saved` was known to be right.
    saved_at: Cell<Option<SystemTime>>,
    /// What was last logged about rejected entries, by source and reason.
    logged: RefCell<BTreeMap<(EndpointSource, &'static str), String>>,
    own_addresses: Box<dyn Fn() -> OwnAddresses>,
    changed: Notify,
}

impl SourceStates {
    /// States without any answer. `own_addresses` returns the current addresses of this process.
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

    /// Takes an answer of `source`. `complete` says whether every part of the source has answered.
    pub fn update(&self, source: EndpointSource, found: DiscoveredEndpoints, complete: bool) {
        self.update_partial(source, found, complete, None);
    }

    /// Takes an answer of `source` of which a part failed with `error`.
    pub fn update_partial(
        &self,
        source: EndpointSource,
        found: DiscoveredEndpoints,
        complete: bool,
        error: Option<&str>,
    ) {
        let (not_ready, rejected) = (found.not_ready, found.rejected_count);
        self.reject(source, "invalid", rejected, &summary(&found.rejected, rejected));
        let offered = found.candidates.len();
        let own_addresses = self.own_addresses();
        let (own, candidates): (Vec<_>, Vec<_>) =
            found.candidates.into_iter().partition(|c| own_addresses.contains(&c.address));
        let addresses: Vec<_> = own.iter().map(|own| own.address.to_string()).collect();
        let loops =
            format!("{}: our own address, requests would loop", summary(&addresses, own.len()));
        self.reject(source, "own_address", own.len(), &loops);
        if candidates.is_empty() {
            let why = why_empty(offered, not_ready, rejected);
            self.reject(source, "empty", 1, &format!("an empty answer: {why}"));
            let error = format!("an empty answer changes nothing: {why}");
            return self.upstream.sources.unusable(source, &error);
        }
        self.reject(source, "empty", 0, "");
        self.upstream.sources.succeeded(source, candidates.len(), error);
        let answer = SourceAnswer { candidates, complete };
        if self.answers.borrow().get(&source) != Some(&answer) {
            self.answers.borrow_mut().insert(source, answer);
            self.notify();
        }
    }

    /// Counts `count` rejected entries. Logs `message` unless it was the last one logged for the
    /// same source and reason.
    fn reject(&self, source: EndpointSource, reason: &'static str, count: usize, message: &str) {
        let mut logged = self.logged.borrow_mut();
        if count == 0 {
            logged.remove(&(source, reason));
            return;
        }
        let before = logged.insert((source, reason), message.to_owned());
        let news = (before.as_deref() != Some(message)).then_some(message);
        self.upstream.sources.refused(source, reason, count, news);
    }

    /// Records that `source` could not be read. Its last answer stays.
    pub fn fail(&self, source: EndpointSource, error: &str) {
        self.upstream.sources.failed(source, error);
    }

    /// Removes a source that is no longer configured, with its answer and its saved endpoints.
    pub fn remove(&self, source: EndpointSource) {
        self.upstream.sources.forget(source);
        self.answers.borrow_mut().remove(&source);
        self.saved.borrow_mut().retain(|(of, _)| *of != source);
        self.notify();
    }

    /// Takes the endpoints that an earlier run saved at `saved_at`.
    pub fn restore(&self, saved: SavedEndpoints, saved_at: SystemTime) {
        *self.saved.borrow_mut() = saved;
        self.saved_at.set(Some(saved_at));
        self.notify();
    }

    /// The endpoints to save: the answers of all sources but the static one, and saved endpoints of
    /// sources that have not answered completely. If the latter are among them, their time is
    /// returned too.
    pub fn to_save(&self) -> (SavedEndpoints, Option<SystemTime>) {
        self.read(|answers, saved| {
            let mut all: SavedEndpoints = answers
                .iter()
                .filter(|(source, _)| **source != EndpointSource::Static)
                .flat_map(|(source, answer)| answer.candidates.iter().map(|c| (*source, c.clone())))
                .collect();
            let from_answers = all.len();
            let is_current = |of: &(EndpointSource, Candidate)| {
                answers.get(&of.0).is_none_or(|answer| !answer.complete) && !all.contains(of)
            };
            let kept: Vec<_> = saved.iter().filter(|of| is_current(of)).cloned().collect();
            all.extend(kept);
            let oldest = if all.len() > from_answers { self.saved_at.get() } else { None };
            (all, oldest)
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

/// Why an answer has no usable endpoint. It `offered` addresses of this process only.
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

/// The first of `items` in one line, and how many more there are of `count`.
fn summary(items: &[String], count: usize) -> String {
    let named = items.iter().take(MAX_NAMED).cloned().collect::<Vec<_>>().join("; ");
    match count.saturating_sub(MAX_NAMED.min(items.len())) {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}
