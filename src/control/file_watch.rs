//! Detects that files have changed, by polling.
//!
//! kubelet renames a symlink over the old one, a Secret volume swaps a directory, and an editor
//! writes a new file. Polling the file to which a path resolves detects all of these changes, and unlike
//! inotify it cannot lose a watch.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior, interval};

/// Polling interval.
const INTERVAL: Duration = Duration::from_secs(1);

/// Device, inode, size and modification time of a file. They differ for another file at the same path and
/// after a write. `None` if the file does not exist.
pub type FileVersion = Option<(u64, u64, u64, i64, i64)>;

/// The current version of a file. Follows symlinks.
pub fn file_version(path: &Path) -> FileVersion {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

/// Ticks at the polling interval. A late tick delays the next ones.
pub fn poll_ticks() -> Interval {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Watched files and their versions at the last check.
#[derive(Debug)]
pub struct FileWatch {
    paths: Vec<PathBuf>,
    versions: Vec<FileVersion>,
    /// Whether the last reading of the files succeeded.
    settled: bool,
}

impl FileWatch {
    /// Watches files that have just been read.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let versions = paths.iter().map(|path| file_version(path)).collect();
        Self { paths, versions, settled: true }
    }

    /// Watches files that have not been read yet: [`Self::changed`] is true until
    /// [`Self::set_settled`] reports a successful reading.
    pub fn unread(paths: Vec<PathBuf>) -> Self {
        Self { settled: false, ..Self::new(paths) }
    }

    /// Sets whether the last reading succeeded. After a failed one [`Self::changed`] stays true: the
    /// files may have been read in the middle of a rotation.
    pub fn set_settled(&mut self, settled: bool) {
        self.settled = settled;
    }

    /// Watches `paths` from now on. If they differ from the watched paths, the files count as unread.
    pub fn follow(&mut self, paths: Vec<PathBuf>) {
        if paths != self.paths {
            *self = Self::unread(paths);
        }
    }

    /// Whether a file has changed since the last call, or the last reading did not succeed.
    pub fn changed(&mut self) -> bool {
        let now: Vec<_> = self.paths.iter().map(|path| file_version(path)).collect();
        let changed = now != self.versions;
        self.versions = now;
        changed || !self.settled
    }
}
