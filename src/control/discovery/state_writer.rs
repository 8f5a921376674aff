//! When the state on disk is written, and that nobody waits for it: a disk may hang.
//!
//! It is written when what should be there is not, once an hour so that it shows its age, and again
//! a minute after a failure: the directory may be mounted late.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::merge::SavedEndpoints;
use super::state_file;
use crate::upstream::Upstream;
use crate::upstream::endpoint_sources::EndpointSource;

/// How often it is written although nothing has changed.
const REFRESH: Duration = Duration::from_secs(3600);
/// The same after a failure.
const AGAIN: Duration = Duration::from_secs(60);
/// A write that takes longer is told.
const SLOW: Duration = Duration::from_secs(10);

/// What is to be found in which directory.
type Content = (PathBuf, SavedEndpoints);

/// The state on disk, as far as we know it.
#[derive(Debug, Default)]
pub struct StateWriter {
    /// What was written last, well or not, and until when that will do.
    done: Option<(Content, Instant)>,
    writing: Option<Writing>,
}

#[derive(Debug)]
struct Writing {
    content: Content,
    begun: Instant,
    told: bool,
    task: JoinHandle<io::Result<()>>,
}

impl StateWriter {
    /// Looks what has become of the last write, and begins the next one if `good` is another thing
    /// to be remembered, with the time at which it was said. Returns at once.
    pub fn turn(
        &mut self,
        upstream: &Upstream,
        dir: PathBuf,
        good: Option<(SavedEndpoints, SystemTime)>,
        now: Instant,
    ) {
        self.look(upstream, now);
        let Some((answers, said)) = good.filter(|_| self.writing.is_none()) else { return };
        let content = (dir, answers);
        if self.done.as_ref().is_some_and(|(done, until)| *done == content && now < *until) {
            return;
        }
        let (name, (dir, answers)) = (upstream.name.clone(), content.clone());
        let write = move || state_file::write(&dir, &name, &answers, said);
        let task = tokio::task::spawn_blocking(write);
        self.writing = Some(Writing { content, begun: now, told: false, task });
    }

    /// Looks whether what was being written is.
    fn look(&mut self, upstream: &Upstream, now: Instant) {
        let Some(mut writing) = self.writing.take() else { return };
        if !writing.task.is_finished() {
            if now >= writing.begun + SLOW && !writing.told {
                failed(upstream, &writing.content, "the disk does not answer");
                writing.told = true;
            }
            self.writing = Some(writing);
            return;
        }
        let error = match writing.task.now_or_never() {
            Some(Ok(Err(error))) => Some(error.to_string()),
            Some(Err(error)) => Some(error.to_string()),
            Some(Ok(Ok(()))) | None => None,
        };
        match &error {
            Some(error) => failed(upstream, &writing.content, error),
            // What could not be read, or written, is good from now on.
            None if upstream.sources.is_failing(EndpointSource::State) => {
                upstream.sources.confirmed(EndpointSource::State);
            }
            None => {}
        }
        let pause = if error.is_some() { AGAIN } else { REFRESH };
        self.done = Some((writing.content, now + pause));
    }
}

/// Tells a failure, unless it is the one that was told last.
fn failed(upstream: &Upstream, (dir, _): &Content, why: &str) {
    let path = state_file::path(dir, &upstream.name);
    let what = "cannot be saved, and a restart will have to find the endpoints anew";
    let words = format!("{}: {what}: {why}", path.display());
    let reports = upstream.sources.reports();
    let known = reports.get(&EndpointSource::State).is_some_and(|r| r.complaint() == Some(&words));
    drop(reports);
    if !known {
        upstream.sources.failed(EndpointSource::State, &words);
    }
}
