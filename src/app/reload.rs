//! What a reload is asked for, made from and remembered as.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::config::{Config, Log, Upstream};
use crate::control::file_watch::{FileVersion, file_version};
use crate::observe::events::{Change, Events, Kind};
use crate::observe::log::Knobs;
use crate::observe::utc::Utc;

/// Where the configuration comes from, so that it can be read again.
pub struct Origin {
    /// The file. A change of it is a reason to read it again.
    pub file: PathBuf,
    /// Reads it with everything that is laid over it, and checks every file that it names. An
    /// error is every mistake, a line each.
    pub read: Box<dyn Fn() -> Result<Fresh, Vec<String>> + Send>,
    /// The log, which follows the configuration too.
    pub log: Option<Knobs>,
}

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Origin").field("file", &self.file).finish_non_exhaustive()
    }
}

/// A configuration that was just read.
#[derive(Debug)]
pub struct Fresh {
    /// The configuration.
    pub config: Config,
    /// What is allowed and probably not meant.
    pub warnings: Vec<String>,
}

/// Asks for a reload.
#[derive(Debug)]
pub struct Request {
    /// Why.
    pub trigger: &'static str,
    /// Who wants to know what came of it.
    pub reply: Option<oneshot::Sender<Attempt>>,
}

/// A reload, and what came of it.
#[derive(Debug, Clone)]
pub struct Attempt {
    at: SystemTime,
    trigger: &'static str,
    outcome: Outcome,
}

/// What came of a reload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// What was read is what runs.
    Ok {
        /// What it changed, a line each; nothing if it says what it said before.
        changed: Vec<String>,
        /// What takes effect with the next start only.
        needs_restart: Vec<String>,
    },
    /// The old configuration stays.
    Failed {
        /// Every reason.
        errors: Vec<String>,
    },
}

impl Attempt {
    /// A reload that has just ended.
    pub fn new(trigger: &'static str, outcome: Outcome) -> Self {
        Self { at: SystemTime::now(), trigger, outcome }
    }

    /// What came of it.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Whether what was read is what runs.
    pub fn is_ok(&self) -> bool {
        matches!(self.outcome, Outcome::Ok { .. })
    }

    /// Why what was read is not what runs.
    pub fn errors(&self) -> &[String] {
        match &self.outcome {
            Outcome::Ok { .. } => &[],
            Outcome::Failed { errors } => errors,
        }
    }

    /// Whether the reload is an event: not if neither the configuration nor its error has changed. A
    /// `touch` of the file each minute would push every other event out of the list.
    fn is_event(&self, before: Option<&Self>) -> bool {
        match (&self.outcome, before.map(Self::outcome)) {
            (Outcome::Ok { changed, .. }, _) if !changed.is_empty() => true,
            (Outcome::Ok { needs_restart, .. }, Some(Outcome::Ok { needs_restart: old, .. })) => {
                needs_restart != old
            }
            (Outcome::Ok { needs_restart, .. }, None) => !needs_restart.is_empty(),
            (Outcome::Ok { .. }, Some(Outcome::Failed { .. })) => true,
            (failed, before) => before != Some(failed),
        }
    }

    /// Tells it: to the log in full, to the events in short. `before` is the reload before it.
    pub fn tell(&self, before: Option<&Self>, events: &Events) {
        let trigger = self.trigger;
        let (to, reason, effect) = match &self.outcome {
            Outcome::Ok { changed, needs_restart } => {
                let changed =
                    if changed.is_empty() { "nothing".to_owned() } else { changed.join("; ") };
                tracing::info!(trigger, changed, "configuration reloaded");
                for what in needs_restart {
                    tracing::warn!(what, "this takes effect with the next start only");
                }
                let later = needs_restart.join("; ");
                let later = Some(later).filter(|later| !later.is_empty());
                let later = later.map(|later| format!(", with the next start {later}"));
                let changed = format!("changed: {changed}{}", later.unwrap_or_default());
                ("reloaded", changed, "what was read is what runs")
            }
            Outcome::Failed { errors } => {
                for error in errors {
                    tracing::error!(trigger, error, "reload failed: the old configuration stays");
                }
                ("refused", errors.join("; "), "the old configuration stays")
            }
        };
        if !self.is_event(before) {
            return;
        }
        events.remember(&Change {
            kind: Kind::Configuration,
            upstream: None,
            name: "reload",
            detail: trigger,
            from: "begun",
            to,
            reason: &reason,
            effect,
            bad: !self.is_ok(),
        });
    }

    /// For `/status`.
    pub fn status(&self) -> Value {
        let mut status = json!({ "at": Utc(self.at).seconds(), "trigger": self.trigger });
        match &self.outcome {
            Outcome::Ok { changed, needs_restart } => {
                status["outcome"] = json!("ok");
                status["changed"] = json!(changed);
                status["needs_restart"] = json!(needs_restart);
            }
            Outcome::Failed { errors } => {
                status["outcome"] = json!("failed");
                status["errors"] = json!(errors);
            }
        }
        status
    }
}

/// Reads the configuration again, and knows when that is due.
#[derive(Debug)]
pub struct Follower {
    origin: Origin,
    /// What the file looked like when it was last read, and when it was last looked at.
    read: FileVersion,
    seen: FileVersion,
    /// The number of workers that the file wants.
    workers: usize,
}

impl Follower {
    /// Follows a configuration that was just read.
    pub fn new(origin: Origin, config: &Config) -> Self {
        let stamp = file_version(&origin.file);
        Self { origin, read: stamp, seen: stamp, workers: config.workers }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.origin.file
    }

    /// Whether the file is another than the one that was read, and has been for a moment: editors
    /// and copies write in several steps.
    pub fn has_changed(&mut self) -> bool {
        let now = file_version(&self.origin.file);
        now == std::mem::replace(&mut self.seen, now) && now != self.read
    }

    /// Reads it again.
    ///
    /// # Errors
    /// Every mistake in it.
    pub fn read(&mut self) -> Result<Config, Vec<String>> {
        self.read = file_version(&self.origin.file);
        if std::fs::metadata(&self.origin.file).is_ok_and(|metadata| !metadata.is_file()) {
            // A start may read a pipe; a second time it would hold up everything on this thread.
            let file = self.origin.file.display();
            return Err(vec![format!("{file}: not a regular file: it cannot be read again")]);
        }
        let Fresh { config, warnings } = (self.origin.read)()?;
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        self.workers = config.workers;
        Ok(config)
    }

    /// Logs as configured from now on.
    pub fn set_log(&self, log: &Log) {
        if let Some(knobs) = &self.origin.log
            && let Err(error) = knobs.set(log)
        {
            tracing::error!(%error, "the log does not follow its configuration");
        }
    }

    /// What the file says that only a start can follow.
    pub fn needs_restart(&self, config: &Config) -> Vec<String> {
        if self.workers == config.workers {
            return Vec::new();
        }
        vec![format!("workers: {} run, the file says {}", config.workers, self.workers)]
    }
}

/// What is different between two configurations, a line each.
pub fn changes(before: &Config, after: &Config) -> Vec<String> {
    let mut found = Vec::new();
    let mut sections = |changed: bool, name: &str| {
        if changed {
            found.push(format!("{name} changed"));
        }
    };
    sections(before.admin != after.admin, "admin");
    sections(before.state_dir != after.state_dir, "state_dir");
    sections(before.log != after.log, "log");
    sections(before.shutdown != after.shutdown, "shutdown");
    let named = |name: &str, was: bool, is: bool, same: bool| match (was, is) {
        (false, true) => Some(format!("{name} added")),
        (true, false) => Some(format!("{name} removed")),
        _ => (!same).then(|| format!("{name} changed")),
    };
    for upstream in &after.upstreams {
        let old = before.upstreams.iter().find(|old| old.name == upstream.name);
        let name = format!("upstream `{}`", upstream.name);
        // Who leads there is told of the listener.
        let same =
            old.is_some_and(|old| Upstream { used_by: old.used_by, ..upstream.clone() } == *old);
        found.extend(named(&name, old.is_some(), true, same));
    }
    for listener in &after.listeners {
        let old = before.listeners.iter().find(|old| old.name == listener.name);
        let name = format!("listener `{}`", listener.name);
        found.extend(named(&name, old.is_some(), true, old == Some(listener)));
    }
    for old in &before.listeners {
        let is = after.listeners.iter().any(|listener| listener.name == old.name);
        found.extend(named(&format!("listener `{}`", old.name), true, is, true));
    }
    for old in &before.upstreams {
        let is = after.upstreams.iter().any(|upstream| upstream.name == old.name);
        found.extend(named(&format!("upstream `{}`", old.name), true, is, true));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(changed: &[&str]) -> Attempt {
        let changed = changed.iter().map(|&line| line.to_owned()).collect();
        Attempt::new("file changed", Outcome::Ok { changed, needs_restart: Vec::new() })
    }

    fn failed(error: &str) -> Attempt {
        Attempt::new("file changed", Outcome::Failed { errors: vec![error.to_owned()] })
    }

    #[test]
    fn a_reload_is_an_event_only_if_it_changes_something() {
        let events = Events::default();
        let attempts = [
            ok(&[]),              // as at the start
            ok(&["log changed"]), // an event
            ok(&[]),
            failed("workers: many"), // an event
            failed("workers: many"),
            failed("workers: more"), // an event
            ok(&[]),                 // an event: it can be read again
            ok(&[]),
        ];
        let mut before = None;
        for attempt in &attempts {
            attempt.tell(before, &events);
            before = Some(attempt);
        }
        let told = events.last(usize::MAX).into_iter();
        let told: Vec<_> = told.map(|e| (e.to, e.reason, e.times)).collect();
        let expected = [
            ("reloaded", "changed: log changed"),
            ("refused", "workers: many"),
            ("refused", "workers: more"),
            ("reloaded", "changed: nothing"),
        ];
        let expected = expected.map(|(to, reason)| (to.to_owned(), reason.to_owned(), 1));
        assert_eq!(told, expected);
    }
}
