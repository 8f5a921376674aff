//! Notices that a file has changed.
//!
//! kubelet renames a symlink over the old one, a Secret volume swaps a directory, an editor writes
//! a new file: what a path resolves to is looked at every second, which sees all of them and needs
//! no watch that could be lost.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What tells a file from its successor under the same name; `None` is a file that is not there.
pub type FileVersion = Option<(u64, u64, u64, i64, i64)>;

/// What a file looks like now.
pub fn file_version(path: &Path) -> FileVersion {
    // Follows symlinks: what matters is what is there now.
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

/// Files and what they looked like when they were last read.
#[derive(Debug)]
pub struct FileWatch {
    paths: Vec<PathBuf>,
    seen: Vec<FileVersion>,
    /// The last reading did not succeed: half a rotation was seen, the rest will follow.
    pub unsettled: bool,
}

impl FileWatch {
    /// Files that have just been read.
    pub fn new(paths: Vec<PathBuf>) -> Self {
        let seen = paths.iter().map(|path| file_version(path)).collect();
        Self { paths, seen, unsettled: false }
    }

    /// The files.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Watches these files from now on: a reload may have named others.
    pub fn follow(&mut self, paths: Vec<PathBuf>) {
        if paths != self.paths {
            *self = Self { unsettled: true, ..Self::new(paths) };
        }
    }

    /// Whether anything has changed since the last call, or the last reading did not succeed.
    pub fn changed(&mut self) -> bool {
        let now: Vec<_> = self.paths.iter().map(|path| file_version(path)).collect();
        let changed = now != self.seen;
        self.seen = now;
        changed || self.unsettled
    }
}
