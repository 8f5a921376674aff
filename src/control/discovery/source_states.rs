//! Where each source leaves its last answer, and where the one who merges them finds them.
//!
//! Only the last good answer of a source is kept: an answer that is empty, or that has nothing in
//! it that could be an endpoint, changes nothing; it is counted and told. So a burst of answers
//! costs nothing but itself, and no queue can grow.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::Notify;

use super::merge::{Candidate, OwnAddresses, SavedEndpoints, SourceAnswer, without_own};
use super::objects::DiscoveredEndpoints;
use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::EndpointSource;

/// Refusals that are named in one log line.
const NAMED: usize = 5;

/// The board of one upstream. Lives on the control thread.
pub struct SourceStates {
    upstream: Arc<Upstream>,
    answers: RefCell<BTreeMap<EndpointSource, SourceAnswer>>,
    remembered: RefCell<SavedEndpoints>,
    /// When what is remembered was said.
    remembered_of: Cell<Option<SystemTime>>,
    /// What was told of the last answer of each source: what of it is refused, by the reason.
    told: RefCell<BTreeMap<(EndpointSource, &'static str), String>>,
    own: Box<dyn Fn() -> OwnAddresses>,
    changed: Notify,
}

impl SourceStates {
    /// An empty board; `own` says which addresses are ours.
    pub fn new(upstream: Arc<Upstream>, own: Box<dyn Fn() -> OwnAddresses>) -> Rc<Self> {
        Rc::new(Self {
            upstream,
            answers: RefCell::default(),
            remembered: RefCell::default(),
            remembered_of: Cell::default(),
            told: RefCell::default(),
            own,
            changed: Notify::new(),
        })
    }

    /// The upstream it is about.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The addresses that are ours now.
    pub fn own(&self) -> OwnAddresses {
        (self.own)()
    }

    /// A source has an answer; `complete` if every part of the source has answered by now.
    pub fn update(&self, source: EndpointSource, said: DiscoveredEndpoints, complete: bool) {
        self.update_partial(source, said, complete, None);
    }

    /// The same, `but` being what is wrong with a part of the source.
    pub fn update_partial(
        &self,
        source: EndpointSource,
        said: DiscoveredEndpoints,
        complete: bool,
        but: Option<&str>,
    ) {
        let invalid = few(&said.refused, said.refused_count);
        self.refuse(source, "invalid", said.refused_count, &invalid);
        let offered = said.entries.len();
        let (entries, ours) = without_own(said.entries, &self.own());
        let labels: Vec<_> = ours.iter().map(|entry| entry.address.to_string()).collect();
        let own = format!("{}: our own address, requests would loop", few(&labels, ours.len()));
        self.refuse(source, "own_address", ours.len(), &own);
        if entries.is_empty() {
            let why = match (offered, said.not_ready, said.refused_count) {
                (0, 0, 0) => "it names no endpoint".to_owned(),
                (0, 0, 1) => "its one entry cannot be an endpoint".to_owned(),
                (0, 0, refused) => format!("none of its {refused} entries can be an endpoint"),
                (0, 1, _) => "its one endpoint is not ready".to_owned(),
                (0, waiting, _) => format!("none of its {waiting} endpoints is ready"),
                (1, ..) => "the one endpoint that it names is ourselves".to_owned(),
                (ours, ..) => format!("all {ours} endpoints that it names are ourselves"),
            };
            self.refuse(source, "empty", 1, &format!("an empty answer: {why}"));
            let words = format!("an empty answer changes nothing: {why}");
            return self.upstream.sources.unusable(source, &words);
        }
        self.refuse(source, "empty", 0, "");
        self.upstream.sources.succeeded(source, entries.len(), but);
        let answer = SourceAnswer { entries, complete };
        if self.answers.borrow().get(&source) != Some(&answer) {
            self.answers.borrow_mut().insert(source, answer);
            self.turn();
        }
    }

    /// Counts what is not taken of an answer, and tells it if the answer before was another one.
    fn refuse(&self, source: EndpointSource, reason: &'static str, count: usize, words: &str) {
        let mut told = self.told.borrow_mut();
        if count == 0 {
            told.remove(&(source, reason));
            return;
        }
        let before = told.insert((source, reason), words.to_owned());
        let news = (before.as_deref() != Some(words)).then_some(words);
        self.upstream.sources.refused(source, reason, count, news);
    }

    /// A source says what it said before.
    pub fn confirm(&self, source: EndpointSource) {
        self.upstream.sources.confirmed(source);
    }

    /// A source could not be asked.
    pub fn fail(&self, source: EndpointSource, why: &str) {
        self.upstream.sources.failed(source, why);
    }

    /// A source is not configured any longer: neither what it said counts, nor what an earlier run
    /// remembers of it.
    pub fn forget(&self, source: EndpointSource) {
        self.upstream.sources.forget(source);
        self.answers.borrow_mut().remove(&source);
        self.remembered.borrow_mut().retain(|(of, _)| *of != source);
        self.turn();
    }

    /// What an earlier run left on disk, and when it was said.
    pub fn remember(&self, remembered: SavedEndpoints, said: SystemTime) {
        *self.remembered.borrow_mut() = remembered;
        self.remembered_of.set(Some(said));
        self.turn();
    }

    /// What a restart should find: every answer but what the configuration says anyhow, and what is
    /// remembered of sources that have not answered. With the latter comes when it was said.
    pub fn worth_saving(&self) -> (SavedEndpoints, Option<SystemTime>) {
        self.with(|answers, remembered| {
            let found = answers.iter().filter(|(source, _)| **source != EndpointSource::Static);
            let mut all: SavedEndpoints = found
                .flat_map(|(source, answer)| answer.entries.iter().map(|e| (*source, e.clone())))
                .collect();
            let fresh = all.len();
            let counts = |of: &(EndpointSource, Candidate)| {
                answers.get(&of.0).is_none_or(|answer| !answer.complete) && !all.contains(of)
            };
            let kept: Vec<_> = remembered.iter().filter(|of| counts(of)).cloned().collect();
            all.extend(kept);
            let old = if all.len() > fresh { self.remembered_of.get() } else { None };
            (all, old)
        })
    }

    /// Something else that is merged has changed.
    pub fn turn(&self) {
        self.changed.notify_one();
    }

    /// Waits for the next change.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Looks at the answers and at what was remembered.
    pub fn with<R>(
        &self,
        look: impl FnOnce(&BTreeMap<EndpointSource, SourceAnswer>, &SavedEndpoints) -> R,
    ) -> R {
        look(&self.answers.borrow(), &self.remembered.borrow())
    }
}

/// The first of them in one line.
fn few(words: &[String], count: usize) -> String {
    let named = words.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    match count.saturating_sub(NAMED.min(words.len())) {
        0 => named,
        more => format!("{named}; and {more} more"),
    }
}
