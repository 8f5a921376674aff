//! Reloads: the source of the configuration, requests to reload, and results.

use std::fmt;
use std::path::{Path, PathBuf};

use jackstay_config::{Config, Listener, LoadedConfig, Log, Sandbox, Upstream};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_sys::utc::Utc;
use serde::Serialize;
use tokio::sync::oneshot;

use crate::control::file_watch::{FileVersion, file_version};
use crate::observe::events::{Change, EventKind, Events};
use crate::observe::log::LogControl;

/// Where the configuration comes from, so that it can be read again.
pub struct ConfigSource {
    /// The configuration file. The configuration is reloaded when it changes.
    pub file: PathBuf,
    /// Reads the file, applies all overrides and checks every file that it names. The errors are complete,
    /// with one line for each.
    pub read: Box<dyn Fn() -> Result<CheckedConfig, Vec<String>> + Send>,
    /// The control of the log, whose settings a reload changes too.
    pub log: Option<LogControl>,
}

/// A valid configuration, with the files that were loaded to check it.
#[derive(Debug)]
pub struct CheckedConfig {
    /// The configuration.
    pub config: Config,
    /// What is valid but probably a mistake, one line each.
    pub warnings: Vec<String>,
    /// Its files, as far as they are loaded.
    pub files: LoadedFiles,
}

impl From<LoadedConfig> for CheckedConfig {
    /// A configuration whose files are not loaded yet.
    fn from(LoadedConfig { config, warnings }: LoadedConfig) -> Self {
        Self { config, warnings, files: LoadedFiles::default() }
    }
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSource").field("file", &self.file).finish_non_exhaustive()
    }
}

/// The trigger of a reload because the configuration file has changed.
const FILE_CHANGED: &str = "file changed";
/// The trigger of a reload because the last one has failed. It is reported only if its result differs.
pub const RETRY: &str = "retry";

/// A request to reload.
#[derive(Debug)]
pub struct ReloadRequest {
    /// The cause, for the log.
    pub trigger: &'static str,
    /// Receives the result.
    pub reply: Option<oneshot::Sender<ReloadResult>>,
}

/// A completed reload, as `/status` shows it.
#[derive(Debug, Clone, Serialize)]
pub struct ReloadResult {
    at: String,
    trigger: &'static str,
    #[serde(flatten)]
    outcome: ReloadOutcome,
}

/// The outcome of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub enum ReloadOutcome {
    /// The configuration was applied.
    Ok {
        /// The sections that differ from the previous configuration, one line each.
        changed: Vec<String>,
        /// The settings that only a restart applies.
        needs_restart: Vec<String>,
    },
    /// The previous configuration stays in use.
    Failed {
        /// Every error.
        errors: Vec<String>,
    },
}

impl ReloadResult {
    /// A reload that ends now.
    pub fn new(trigger: &'static str, outcome: ReloadOutcome) -> Self {
        Self { at: Utc::now().seconds(), trigger, outcome }
    }

    /// The outcome.
    pub fn outcome(&self) -> &ReloadOutcome {
        &self.outcome
    }

    /// Whether the configuration was applied.
    pub fn is_ok(&self) -> bool {
        matches!(self.outcome, ReloadOutcome::Ok { .. })
    }

    /// Why the configuration was not applied.
    pub fn errors(&self) -> &[String] {
        match &self.outcome {
            ReloadOutcome::Ok { .. } => &[],
            ReloadOutcome::Failed { errors } => errors,
        }
    }

    /// Whether the reload is recorded as an event: only if the configuration has changed, or the result
    /// differs from the `previous` one. Otherwise a `touch` of the file each minute would displace all other
    /// events from the list.
    pub fn is_event(&self, previous: Option<&Self>) -> bool {
        match (&self.outcome, previous.map(Self::outcome)) {
            (ReloadOutcome::Ok { changed, .. }, _) if !changed.is_empty() => true,
            (ReloadOutcome::Ok { needs_restart, .. }, None) => !needs_restart.is_empty(),
            (
                ReloadOutcome::Ok { needs_restart, .. },
                Some(ReloadOutcome::Ok { needs_restart: previous, .. }),
            ) => needs_restart != previous,
            (outcome, previous) => previous != Some(outcome),
        }
    }

    /// Logs the reload, a failed one with all errors in one line, and records an event if [`Self::is_event`].
    pub fn report(&self, previous: Option<&Self>, events: &Events) {
        let trigger = self.trigger;
        let (to, reason, effect) = match &self.outcome {
            ReloadOutcome::Ok { changed, needs_restart } => {
                let changed =
                    if changed.is_empty() { "nothing".to_owned() } else { changed.join("; ") };
                tracing::info!(trigger, changed, "configuration reloaded");
                let mut reason = vec![format!("changed: {changed}")];
                for setting in needs_restart {
                    tracing::warn!(setting, "restart needed");
                }
                if !needs_restart.is_empty() {
                    reason.push(format!("restart needed: {}", needs_restart.join("; ")));
                }
                ("reloaded", reason.join("; "), "configuration applied")
            }
            ReloadOutcome::Failed { errors } => {
                let reason = errors.join("; ");
                tracing::error!(
                    trigger,
                    error = reason,
                    "reload failed; the old configuration stays"
                );
                ("refused", reason, "the old configuration stays")
            }
        };
        if !self.is_event(previous) {
            return;
        }
        events.remember(&Change {
            kind: EventKind::Configuration,
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
}

/// Reads the configuration again when its file changes.
#[derive(Debug)]
pub struct ConfigFollower {
    source: ConfigSource,
    /// The version of the file when it was last read.
    read: FileVersion,
    /// The version of the file when it was last checked for a change.
    checked: FileVersion,
    /// The settings in the file that only a restart applies.
    workers: usize,
    /// Whether the file has an identity lane.
    identity_lane: bool,
    sandbox: Sandbox,
}

impl ConfigFollower {
    /// Follows the source of a configuration that was just read.
    pub fn new(source: ConfigSource, config: &Config) -> Self {
        let version = file_version(&source.file);
        let Config { workers, identity_lane, sandbox, .. } = *config;
        Self { source, read: version, checked: version, workers, identity_lane, sandbox }
    }

    /// The configuration file.
    pub fn file(&self) -> &Path {
        &self.source.file
    }

    /// Checks the file, and returns why the configuration shall be reloaded now, if it shall.
    ///
    /// A new version of the file counts only when two calls in a row have found it, since editors write a file in
    /// several steps. The same version is tried again after the `last` reload has failed: a file that it names, or
    /// an address, may be usable meanwhile.
    pub fn trigger(&mut self, last: Option<&ReloadResult>) -> Option<&'static str> {
        let version = file_version(&self.source.file);
        let is_stable = version == std::mem::replace(&mut self.checked, version);
        let has_changed = version != self.read;
        let has_failed = last.is_some_and(|last| !last.is_ok());
        let trigger = if has_changed { FILE_CHANGED } else { RETRY };
        (is_stable && (has_changed || has_failed)).then_some(trigger)
    }

    /// Reads the configuration again.
    ///
    /// # Errors
    /// All errors in it.
    pub fn read(&mut self) -> Result<CheckedConfig, Vec<String>> {
        self.read = file_version(&self.source.file);
        if std::fs::metadata(&self.source.file).is_ok_and(|metadata| !metadata.is_file()) {
            // A start may read a pipe, but reading it again would block the control thread.
            let file = self.source.file.display();
            return Err(vec![format!("{file}: not a regular file: it cannot be read again")]);
        }
        let loaded = (self.source.read)()?;
        self.workers = loaded.config.workers;
        self.identity_lane = loaded.config.identity_lane;
        self.sandbox = loaded.config.sandbox;
        Ok(loaded)
    }

    /// Applies the settings of the log.
    pub fn set_log(&self, log: &Log) {
        if let Some(control) = &self.source.log
            && let Err(error) = control.set(log)
        {
            tracing::error!(%error, "cannot apply the configuration of the log");
        }
    }

    /// The settings in the file that only a restart applies.
    pub fn needs_restart(&self, config: &Config) -> Vec<String> {
        let mut settings = Vec::new();
        if self.workers != config.workers {
            settings.push(format!("workers {} → {}", config.workers, self.workers));
        }
        if self.identity_lane != config.identity_lane {
            let (running, file) = (config.identity_lane, self.identity_lane);
            settings.push(format!("identity_lane {running} → {file}"));
        }
        if self.sandbox != config.sandbox {
            settings.push("sandbox changed".to_owned());
        }
        settings
    }
}

/// The sections that differ between two configurations, one line each.
pub fn changes(before: &Config, after: &Config) -> Vec<String> {
    let mut found = Vec::new();
    for (is_changed, section) in [
        (before.admin != after.admin, "admin"),
        (before.state_dir != after.state_dir, "state_dir"),
        (before.log != after.log, "log"),
        (before.shutdown != after.shutdown, "shutdown"),
    ] {
        if is_changed {
            found.push(format!("{section} changed"));
        }
    }
    // A change of `used_by` is reported with the listener.
    let is_same = |a: &Upstream, b: &Upstream| Upstream { used_by: b.used_by, ..a.clone() } == *b;
    let (old, new) = (&before.upstreams, &after.upstreams);
    named_changes("upstream", old, new, |upstream| &upstream.name, is_same, &mut found);
    let (old, new) = (&before.listeners, &after.listeners);
    named_changes("listener", old, new, |listener| &listener.name, Listener::eq, &mut found);
    found
}

/// Appends a line for each item of a list that was added, changed or removed.
fn named_changes<T>(
    kind: &str,
    before: &[T],
    after: &[T],
    name: impl Fn(&T) -> &str,
    is_same: impl Fn(&T, &T) -> bool,
    found: &mut Vec<String>,
) {
    let find = |list: &'_ [T], item: &T| list.iter().position(|other| name(other) == name(item));
    for item in after {
        let change = match find(before, item) {
            None => "added",
            Some(old) if !is_same(&before[old], item) => "changed",
            Some(_) => continue,
        };
        found.push(format!("{kind} `{}` {change}", name(item)));
    }
    let removed = before.iter().filter(|old| find(after, old).is_none());
    found.extend(removed.map(|old| format!("{kind} `{}` removed", name(old))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::log::tests::Captured;
    use jackstay_config::LogFormat;

    fn ok(changed: &[&str]) -> ReloadResult {
        let changed = changed.iter().map(|&line| line.to_owned()).collect();
        ReloadResult::new("file changed", ReloadOutcome::Ok { changed, needs_restart: Vec::new() })
    }

    fn failed(error: &str) -> ReloadResult {
        ReloadResult::new("file changed", ReloadOutcome::Failed { errors: vec![error.to_owned()] })
    }

    /// A certificate and a key that are both missing have one cause.
    #[test]
    fn report_of_a_failed_reload_is_one_line_with_all_errors() {
        let errors = ["tls.cert_file: cannot read a", "tls.key_file: cannot read b"];
        let errors = errors.map(str::to_owned).to_vec();
        let failed = ReloadResult::new("SIGHUP", ReloadOutcome::Failed { errors });
        let captured = Captured::default();
        captured.during(LogFormat::Text, || failed.report(None, &Events::default()));
        let lines = captured.lines();
        let error = "error=\"tls.cert_file: cannot read a; tls.key_file: cannot read b\"";
        assert!(lines.len() == 1 && lines[0].contains("ERROR reload failed"), "{lines:?}");
        assert!(lines[0].contains(error), "{lines:?}");
    }

    #[test]
    fn report_records_an_event_only_if_the_configuration_or_the_result_changed() {
        let events = Events::default();
        let results = [
            ok(&[]),
            ok(&["log changed"]), // an event: the configuration has changed
            ok(&[]),
            failed("workers: many"), // an event: the first failure
            failed("workers: many"),
            failed("workers: more"), // an event: another error
            ok(&[]),                 // an event: the first success after failures
            ok(&[]),
        ];
        let mut previous = None;
        for result in &results {
            result.report(previous, &events);
            previous = Some(result);
        }
        let recorded = events.last(usize::MAX).into_iter();
        let recorded: Vec<_> = recorded.map(|e| (e.to, e.reason, e.times)).collect();
        let expected = [
            ("reloaded", "changed: log changed"),
            ("refused", "workers: many"),
            ("refused", "workers: more"),
            ("reloaded", "changed: nothing"),
        ];
        let expected = expected.map(|(to, reason)| (to.to_owned(), reason.to_owned(), 1));
        assert_eq!(recorded, expected);
    }
}
