//! The journal of a change to this node: on disk before the first change, and until the change is undone.

use std::fmt::{self, Write as _};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest;
use jackstay_sys::files::{self, PRIVATE};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

/// The directory of the journal and of the old content of changed files.
pub const DIRECTORY: &str = "/var/lib/jackstay-install";
/// The lock of the process that changes the node. It ends with the process, however that ends.
pub const LOCK: &str = "/run/jackstay-install.lock";
/// The version of the format.
const VERSION: u32 = 1;
/// Maximum size of a file whose content is saved, in bytes: more than the binary of jackstay.
const MAX_FILE: u64 = 256 << 20;

/// How far the change is. A process that finds one of the first two undoes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Files and services are being written; kubelet is untouched.
    Prepared,
    /// The kubeconfig of kubelet is being changed.
    Switched,
    /// The node became Ready through jackstay.
    Installed,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prepared => "prepared",
            Self::Switched => "switched",
            Self::Installed => "installed",
        })
    }
}

/// The old content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// The file in the directory of the journal that has it.
    pub backup: String,
    /// Permissions, as in chmod(2).
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A file that the change writes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its absolute path.
    pub path: PathBuf,
    /// The SHA-256 of its new content, in hexadecimal.
    pub digest: String,
    /// The content before the change; `None` if the file did not exist.
    pub original: Option<Original>,
    /// Whether the file is kept if its content is no longer the new one: configuration, units and program, which an
    /// operator edits or replaces. Certificates are renewed, and the static pod must end, so these are removed in any
    /// case.
    pub keep_if_changed: bool,
}

/// A unit that the change enables and starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredUnit")]
pub struct UnitRecord {
    /// Its name.
    pub name: String,
    /// Whether it was enabled before, as a package does it.
    pub was_enabled: bool,
}

/// A unit in a journal: the first journals have names alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredUnit {
    Name(String),
    Record { name: String, was_enabled: bool },
}

impl From<StoredUnit> for UnitRecord {
    fn from(unit: StoredUnit) -> Self {
        match unit {
            StoredUnit::Name(name) => Self { name, was_enabled: false },
            StoredUnit::Record { name, was_enabled } => Self { name, was_enabled },
        }
    }
}

/// A change of a complete installation to another version, until it is complete or undone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// See [`Journal::request`]; of the installation after the change.
    pub request: String,
    /// The SHA-256 of the new program, in hexadecimal.
    pub program: String,
    /// The files with their content before the change, in the order in which they are written.
    pub files: Vec<FileRecord>,
}

impl FileRecord {
    /// Whether this is the manifest of a static pod.
    pub fn is_manifest(&self) -> bool {
        self.path.file_name().is_some_and(|name| name == "jackstay.yaml") && !self.keep_if_changed
    }

    /// Whether this file of an upgrade is the manifest of the installation.
    pub fn is_manifest_at(&self, journal: &Journal) -> bool {
        journal.manifest().is_some_and(|manifest| manifest.path == self.path)
    }
}

/// A change of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Journal {
    version: u32,
    /// How far the change is.
    pub phase: Phase,
    /// The arguments of the installation, to compare with those of another one.
    pub request: String,
    /// The name of the node.
    pub node: String,
    /// The unit of kubelet.
    pub kubelet_unit: String,
    /// The kubeconfig of kubelet.
    pub kubeconfig: FileRecord,
    /// The other files in the order in which they are written.
    pub files: Vec<FileRecord>,
    /// The directories that did not exist, each before those in it. They are removed if they are empty.
    pub directories: Vec<PathBuf>,
    /// The directories that did not exist and that jackstay fills: they are removed with their content.
    pub state_directories: Vec<PathBuf>,
    /// The units that are enabled and started.
    pub units: Vec<UnitRecord>,
    /// The admin endpoint of jackstay: when nothing listens there, jackstay has ended.
    pub admin: SocketAddr,
    /// The address of jackstay in the kubeconfig. The first journals do not have it.
    #[serde(default = "first_listen")]
    pub listen: SocketAddr,
    /// The path of the program, with which an interruption is continued. The first journals do not have it.
    #[serde(default = "first_program")]
    pub program: PathBuf,
    /// A change to another version that has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade: Option<Upgrade>,
}

/// The default of `--listen` when journals did not record it.
fn first_listen() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 7443))
}

/// The only path at which the first version installed its program.
fn first_program() -> PathBuf {
    "/usr/local/bin/jackstay".into()
}

impl Journal {
    /// The manifest of the static pod, if jackstay runs as one.
    pub fn manifest(&self) -> Option<&FileRecord> {
        self.files.iter().find(|file| file.is_manifest())
    }

    /// The record of a file.
    pub fn file(&self, path: &Path) -> Option<&FileRecord> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// A file to write.
#[derive(Debug, Clone, Copy)]
pub struct NewContent<'a> {
    /// Its absolute path.
    pub path: &'a Path,
    /// The content.
    pub bytes: &'a [u8],
    /// See [`FileRecord::keep_if_changed`].
    pub keep_if_changed: bool,
}

/// Why the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file cannot be read or written.
    #[error("cannot read or write {0}: {1}")]
    Io(PathBuf, #[source] io::Error),
    /// The journal is not one of this version of jackstay.
    #[error(
        "{0} is not a journal that this version understands ({1}): use the version of jackstay that wrote it"
    )]
    Invalid(PathBuf, String),
    /// Another process changes the node.
    #[error(
        "another `jackstay install` or `jackstay uninstall` changes this node: wait until it ends"
    )]
    Locked,
}

/// The right to change the node; ends when it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Takes the lock; with `wait` after the process that has it.
///
/// # Errors
/// Another process has it, or the file cannot be opened.
pub fn lock(path: &Path, wait: bool) -> Result<Lock, JournalError> {
    let fail = |error| JournalError::Io(path.to_owned(), error);
    // The descriptor is closed in programs that this process starts (O_CLOEXEC, which std sets).
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).mode(PRIVATE).open(path);
    let file = file.map_err(fail)?;
    let operation =
        if wait { FlockOperation::LockExclusive } else { FlockOperation::NonBlockingLockExclusive };
    loop {
        match rustix::fs::flock(&file, operation) {
            Ok(()) => return Ok(Lock { _file: file }),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(JournalError::Locked),
            Err(error) => return Err(fail(error.into())),
        }
    }
}

/// The SHA-256 of a content in hexadecimal.
pub fn digest_of(bytes: &[u8]) -> String {
    let digest = digest::digest(&digest::SHA256, bytes);
    digest.as_ref().iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The content of a file; `None` if there is none.
///
/// # Errors
/// The path cannot be read or is no file.
pub fn content(path: &Path) -> Result<Option<Vec<u8>>, JournalError> {
    match files::read(path, MAX_FILE) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(JournalError::Io(path.to_owned(), error)),
    }
}

/// The directory with the journal.
#[derive(Debug, Clone)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// The journal in this directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    fn journal(&self) -> PathBuf {
        self.directory.join("journal.json")
    }

    /// Reads the journal; `None` if this node is unchanged.
    ///
    /// # Errors
    /// It cannot be read or is not of this version.
    pub fn read(&self) -> Result<Option<Journal>, JournalError> {
        let path = self.journal();
        let Some(bytes) = content(&path)? else { return Ok(None) };
        let invalid = |why: String| JournalError::Invalid(path.clone(), why);
        let journal: Journal =
            serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))?;
        if journal.version != VERSION {
            return Err(invalid(format!("version {}", journal.version)));
        }
        Ok(Some(journal))
    }

    /// Saves the old content of every file and writes the journal, before the first change.
    ///
    /// # Errors
    /// A file cannot be read or saved. Nothing has changed then.
    pub fn begin(
        &self,
        draft: &JournalDraft<'_>,
        kubeconfig: NewContent<'_>,
        new_files: &[NewContent<'_>],
    ) -> Result<Journal, JournalError> {
        let fail = |error| JournalError::Io(self.directory.clone(), error);
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&self.directory).map_err(fail)?;
        let mut directories = Vec::new();
        for file in new_files {
            let missing = file.path.ancestors().skip(1).take_while(|parent| !parent.exists());
            let missing: Vec<PathBuf> = missing.map(Path::to_owned).collect();
            for directory in missing.into_iter().rev() {
                if !directories.contains(&directory) {
                    directories.push(directory);
                }
            }
        }
        let journal = Journal {
            version: VERSION,
            phase: Phase::Prepared,
            request: draft.request.to_owned(),
            node: draft.node.to_owned(),
            kubelet_unit: draft.kubelet_unit.to_owned(),
            kubeconfig: self.record("original-0".to_owned(), kubeconfig)?,
            files: (1..)
                .zip(new_files)
                .map(|(index, file)| self.record(format!("original-{index}"), *file))
                .collect::<Result<_, _>>()?,
            directories,
            state_directories: {
                let state = draft.state_directories.iter();
                state.filter(|path| !path.exists()).cloned().collect()
            },
            units: draft.units.to_vec(),
            admin: draft.admin,
            listen: draft.listen,
            program: draft.program.to_owned(),
            upgrade: None,
        };
        self.write(&journal)?;
        Ok(journal)
    }

    /// Saves the content of the files that a change to another version replaces, and writes the journal.
    ///
    /// # Errors
    /// A file cannot be read or saved. Nothing has changed then.
    pub fn begin_upgrade(
        &self,
        journal: &mut Journal,
        (request, program): (&str, &str),
        new_files: &[NewContent<'_>],
    ) -> Result<(), JournalError> {
        let name = |index: usize| format!("previous-{index}");
        let records = new_files.iter().enumerate();
        let files = records.map(|(index, file)| self.record(name(index), *file));
        let files: Result<Vec<_>, JournalError> = files.collect();
        let begun = files.and_then(|files| {
            let (request, program) = (request.to_owned(), program.to_owned());
            let upgrade = Some(Upgrade { request, program, files });
            let begun = Journal { upgrade, ..journal.clone() };
            self.write(&begun).map(|()| begun)
        });
        if begun.is_err() {
            // On a full disk, what was saved so far must not stay.
            for index in 0..new_files.len() {
                let _ = fs::remove_file(self.directory.join(name(index)));
            }
        }
        *journal = begun?;
        Ok(())
    }

    /// Makes the files of a change to another version those of the installation.
    ///
    /// # Errors
    /// The journal cannot be written; the change is incomplete then.
    pub fn commit_upgrade(&self, journal: &mut Journal) -> Result<(), JournalError> {
        let mut done = journal.clone();
        let Some(upgrade) = done.upgrade.take() else { return Ok(()) };
        done.request = upgrade.request;
        for new in &upgrade.files {
            match done.files.iter_mut().find(|file| file.path == new.path) {
                Some(file) => file.digest.clone_from(&new.digest),
                None => done.files.push(FileRecord { original: None, ..new.clone() }),
            }
        }
        self.end_upgrade(done, &upgrade.files, journal)
    }

    /// Forgets a change to another version whose files were restored.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn forget_upgrade(&self, journal: &mut Journal) -> Result<(), JournalError> {
        let mut done = journal.clone();
        let Some(upgrade) = done.upgrade.take() else { return Ok(()) };
        self.end_upgrade(done, &upgrade.files, journal)
    }

    fn end_upgrade(
        &self,
        done: Journal,
        files: &[FileRecord],
        journal: &mut Journal,
    ) -> Result<(), JournalError> {
        self.write(&done)?;
        *journal = done;
        for original in files.iter().filter_map(|file| file.original.as_ref()) {
            // A saved file that stays needs space and does no harm; `remove` removes it.
            let _ = fs::remove_file(self.directory.join(&original.backup));
        }
        Ok(())
    }

    /// Saves the old content of a file.
    fn record(&self, backup: String, file: NewContent<'_>) -> Result<FileRecord, JournalError> {
        let original = match content(file.path)? {
            None => None,
            Some(old) => {
                let fail = |error| JournalError::Io(file.path.to_owned(), error);
                let metadata = fs::metadata(file.path).map_err(fail)?;
                self.save(&backup, &old)?;
                let (uid, gid) = (metadata.uid(), metadata.gid());
                Some(Original { backup, mode: metadata.mode() & 0o7777, uid, gid })
            }
        };
        Ok(FileRecord {
            path: file.path.to_owned(),
            digest: digest_of(file.bytes),
            original,
            keep_if_changed: file.keep_if_changed,
        })
    }

    fn save(&self, name: &str, bytes: &[u8]) -> Result<(), JournalError> {
        let path = self.directory.join(name);
        files::replace(&path, bytes, PRIVATE).map_err(|error| JournalError::Io(path, error))
    }

    /// The old content of a file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn original(&self, original: &Original) -> Result<Vec<u8>, JournalError> {
        let path = self.directory.join(&original.backup);
        files::read(&path, MAX_FILE).map_err(|error| JournalError::Io(path, error))
    }

    /// Replaces the journal on disk.
    ///
    /// # Errors
    /// It cannot be written; the old one stays.
    pub fn write(&self, journal: &Journal) -> Result<(), JournalError> {
        let bytes = serde_json::to_vec_pretty(journal)
            .map_err(|error| JournalError::Invalid(self.journal(), error.to_string()))?;
        self.save("journal.json", &bytes)
    }

    /// Marks a complete installation as one that is being undone.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn reopen(&self, journal: &mut Journal) -> Result<(), JournalError> {
        if journal.phase != Phase::Installed {
            return Ok(());
        }
        journal.phase = Phase::Switched;
        self.write(journal)
    }

    /// Removes the journal, then the saved files.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(&self) -> Result<(), JournalError> {
        let gone = |result: io::Result<()>, path: &Path| match result {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(JournalError::Io(path.to_owned(), error))
            }
            _ => Ok(()),
        };
        let journal = self.journal();
        gone(fs::remove_file(&journal), &journal)?;
        gone(fs::remove_dir_all(&self.directory), &self.directory)
    }
}

/// What a change consists of besides its files.
#[derive(Debug)]
pub struct JournalDraft<'a> {
    /// See [`Journal::request`].
    pub request: &'a str,
    /// See [`Journal::node`].
    pub node: &'a str,
    /// See [`Journal::kubelet_unit`].
    pub kubelet_unit: &'a str,
    /// See [`Journal::state_directories`].
    pub state_directories: &'a [PathBuf],
    /// See [`Journal::units`].
    pub units: &'a [UnitRecord],
    /// See [`Journal::admin`].
    pub admin: SocketAddr,
    /// See [`Journal::listen`].
    pub listen: SocketAddr,
    /// See [`Journal::program`].
    pub program: &'a Path,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_is_held_by_one_process_and_ends_with_its_handle() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = lock(&path, false).unwrap();
        assert!(matches!(lock(&path, false), Err(JournalError::Locked)));
        drop(first);
        lock(&path, true).unwrap();
    }

    /// The format of the first version, whose journals had no `listen` and `program`, and units without `was_enabled`.
    #[test]
    fn read_takes_the_journal_of_the_first_version() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let file = r#"{"path": "/k", "digest": "00", "original": null, "keep_if_changed": false}"#;
        let text = format!(
            r#"{{"version": 1, "phase": "installed", "request": "--mode terminate", "node": "n",
                "kubelet_unit": "kubelet.service", "kubeconfig": {file}, "files": [{file}], "directories": [],
                "state_directories": ["/var/lib/jackstay"], "units": ["jackstay.service"],
                "admin": "127.0.0.1:9643"}}"#
        );
        fs::write(dir.path().join("journal.json"), text).unwrap();
        let journal = store.read().unwrap().unwrap();
        assert_eq!(
            journal.units,
            [UnitRecord { name: "jackstay.service".into(), was_enabled: false }]
        );
        assert_eq!(journal.listen.to_string(), "127.0.0.1:7443");
        assert_eq!(journal.program, Path::new("/usr/local/bin/jackstay"));
        assert_eq!(journal.upgrade, None);
        // What is written is in the format of this version.
        store.write(&journal).unwrap();
        assert_eq!(store.read().unwrap().unwrap(), journal);
    }

    #[test]
    fn read_of_an_invalid_or_newer_journal_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        assert!(store.read().unwrap().is_none());
        for text in ["", "{}", "{\"version\": 2}", "not JSON"] {
            fs::write(dir.path().join("journal.json"), text).unwrap();
            let error = store.read().unwrap_err().to_string();
            assert!(error.contains("is not a journal that this version understands"), "{error}");
        }
    }
}
