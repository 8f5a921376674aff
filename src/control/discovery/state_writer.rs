//! Writes the state file in the background: a disk may hang, and discovery must not wait for it.
//!
//! The file is written when its content changes, every hour so that its time stays recent, and a minute
//! after a failure, because the directory may be mounted late.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use jackstay_core::discovery::source::{EndpointSource, SavedEndpoints};
use tokio::task::JoinHandle;

use super::state_file;
use crate::upstream::Upstream;

/// Time after which an unchanged file is written again.
const REFRESH_AFTER: Duration = Duration::from_secs(3600);
/// Time after which a failed write is repeated.
const RETRY_AFTER: Duration = Duration::from_secs(60);
/// A write that takes longer is reported as a failure.
const SLOW_AFTER: Duration = Duration::from_secs(10);

/// The directory and the endpoints of one write.
type Content = (PathBuf, SavedEndpoints);

/// Writes the state file of one upstream, one write at a time.
#[derive(Debug, Default)]
pub struct StateWriter {
    /// The content of the last write that ended, and when it is due to be written again.
    last: Option<(Content, Instant)>,
    running: Option<Write>,
}

#[derive(Debug)]
struct Write {
    content: Content,
    started: Instant,
    reported_slow: bool,
    task: JoinHandle<io::Result<()>>,
}

impl StateWriter {
    /// Collects the result of a running write, and starts the next one if it is due. `endpoints` come
    /// with the time at which they were last confirmed; without them no write is started. Never blocks.
    pub fn step(
        &mut self,
        upstream: &Upstream,
        dir: PathBuf,
        endpoints: Option<(SavedEndpoints, SystemTime)>,
        now: Instant,
    ) {
        self.collect(upstream, now);
        let Some((endpoints, saved_at)) = endpoints.filter(|_| self.running.is_none()) else {
            return;
        };
        let content = (dir, endpoints);
        if self.last.as_ref().is_some_and(|(last, due)| *last == content && now < *due) {
            return;
        }
        let (name, (dir, endpoints)) = (upstream.name.clone(), content.clone());
        let write = move || state_file::write(&dir, &name, &endpoints, saved_at);
        let task = tokio::task::spawn_blocking(write);
        self.running = Some(Write { content, started: now, reported_slow: false, task });
    }

    /// Reports the result of a running write if it has ended, or that it is slow.
    fn collect(&mut self, upstream: &Upstream, now: Instant) {
        let Some(mut write) = self.running.take() else { return };
        if !write.task.is_finished() {
            if now >= write.started + SLOW_AFTER && !write.reported_slow {
                let error = format!("the write takes longer than {} s", SLOW_AFTER.as_secs());
                report_failure(upstream, &write.content, &error);
                write.reported_slow = true;
            }
            self.running = Some(write);
            return;
        }
        let error = match write.task.now_or_never() {
            Some(Ok(Err(error))) => Some(error.to_string()),
            Some(Err(error)) => Some(error.to_string()),
            Some(Ok(Ok(()))) | None => None,
        };
        match &error {
            Some(error) => report_failure(upstream, &write.content, error),
            None if upstream.sources.is_failing(EndpointSource::State) => {
                upstream.sources.confirmed(EndpointSource::State);
            }
            None => {}
        }
        let pause = if error.is_some() { RETRY_AFTER } else { REFRESH_AFTER };
        self.last = Some((write.content, now + pause));
    }
}

/// Reports a failed write, unless it is the current error of the source already.
fn report_failure(upstream: &Upstream, (dir, _): &Content, why: &str) {
    let path = state_file::path(dir, &upstream.name);
    let effect = "cannot be saved; after a restart the endpoints must be discovered again";
    let message = format!("{}: {effect}: {why}", path.display());
    let reports = upstream.sources.reports();
    let known =
        reports.get(&EndpointSource::State).is_some_and(|r| r.current_error() == Some(&message));
    drop(reports);
    if !known {
        upstream.sources.failed(EndpointSource::State, &message);
    }
}
