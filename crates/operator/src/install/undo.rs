//! Undoes an installation, complete or interrupted.
//!
//! The order keeps a working kubeconfig at every moment: kubelet gets the old kubeconfig and is restarted while
//! jackstay still serves. Each step can be repeated, so that the next process continues what was interrupted.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use jackstay_kubeconfig::{KubeconfigFile, ServerUrl, kubeconfig_yaml, recorded_original};
use jackstay_sys::{clock, files};
use serde_json::Value;

use super::journal::{FileRecord, Journal, JournalError, Phase, Store, content, digest_of};
use super::service::{RECOVERY_UNIT, RECOVERY_UNIT_FILE, RENEWAL_TIMER, RENEWAL_UNIT};
use super::transaction::{
    Restored, put_back, remove_directories, restore, restore_previous, write, write_like,
};
use crate::kubeconfig::rewrite::revert;
use crate::kubeconfig::setup::renewal::kept_files;
use crate::systemd::{CommandError, ServiceManager, property};

/// Limit for the end of a static pod: `terminationGracePeriodSeconds` of the manifest, and what kubelet needs to
/// notice.
const END_LIMIT: Duration = Duration::from_secs(45);
/// Interval of the checks.
const POLL: Duration = Duration::from_millis(200);

/// What was done.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Undone {
    /// Whether kubelet was restarted.
    pub kubelet_restarted: bool,
    /// Files that have changed since the installation and are kept.
    pub kept: Vec<PathBuf>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// A step that failed. The journal stays, so the next run repeats all steps.
#[derive(Debug, thiserror::Error)]
pub enum UndoError {
    /// A file cannot be restored.
    #[error("{0}")]
    File(#[from] JournalError),
    /// A command failed.
    #[error("{0}")]
    Command(#[from] CommandError),
}

/// Undoes the change in the journal and removes the journal. A complete installation is marked as incomplete first, so
/// that an interruption is continued.
///
/// # Errors
/// The first step that failed.
pub fn undo(
    store: &Store,
    journal: &Journal,
    manager: &impl ServiceManager,
) -> Result<Undone, UndoError> {
    let mut journal = journal.clone();
    store.reopen(&mut journal)?;
    if journal.upgrade.is_some() {
        restore_previous(store, &journal)?;
        store.forget_upgrade(&mut journal)?;
    }
    let journal = &journal;
    let mut undone = Undone::default();
    // A renewal that runs would write the new kubeconfig again.
    let renewal = journal.units.iter().any(|unit| unit.name == RENEWAL_TIMER);
    for unit in [RENEWAL_TIMER, RENEWAL_UNIT].iter().filter(|_| renewal) {
        run(&["stop", unit], unit, manager)?;
    }
    if journal.phase != Phase::Prepared {
        restore_kubeconfig(store, journal, &mut undone)?;
        undone.kubelet_restarted = restart_kubelet(journal, manager)?;
    }
    // Units that were written and not loaded yet are known after this.
    manager.systemctl(&["daemon-reload"])?;
    for unit in journal.units.iter().rev() {
        let disabled = ["disable", "--now", unit.name.as_str()];
        let stopped = ["stop", unit.name.as_str()];
        run(if unit.was_enabled { &stopped } else { &disabled }, &unit.name, manager)?;
    }
    let is_needed_last = |file: &FileRecord| {
        file.path == Path::new(RECOVERY_UNIT_FILE) || file.path == journal.program
    };
    for file in journal.files.iter().rev().filter(|file| !is_needed_last(file)) {
        if restore(store, file)? == Restored::Kept {
            undone.kept.push(file.path.clone());
        }
        if file.is_manifest() {
            await_end(journal, END_LIMIT);
        }
    }
    remove_renewal_files(journal)?;
    remove_directories(journal)?;
    finish(journal, store, manager)?;
    // The program is the last file: until then, an interruption can be continued with it.
    for file in journal.files.iter().filter(|file| file.path == journal.program) {
        if restore(store, file)? == Restored::Kept {
            undone.kept.push(file.path.clone());
        }
    }
    // The program's own directory, such as /opt/bin, is empty only now.
    remove_directories(journal)?;
    store.remove()?;
    Ok(undone)
}

/// Waits until the static pod has ended: kubelet stops it when its manifest is gone, and until then it writes its
/// state. While the kubelet does not run, the pod stays.
fn await_end(journal: &Journal, limit: Duration) {
    let end = clock::now() + limit;
    while TcpStream::connect_timeout(&journal.admin, POLL).is_ok() && clock::now() < end {
        thread::sleep(POLL);
    }
}

/// Removes the recovery unit.
///
/// # Errors
/// The unit cannot be disabled or removed.
pub fn finish(
    journal: &Journal,
    store: &Store,
    manager: &impl ServiceManager,
) -> Result<(), UndoError> {
    // Not `--now`: it may be this process.
    run(&["disable", RECOVERY_UNIT], RECOVERY_UNIT, manager)?;
    let recovery = journal.files.iter().find(|file| file.path == Path::new(RECOVERY_UNIT_FILE));
    if let Some(file) = recovery {
        // Another version has written another text.
        restore(store, &FileRecord { keep_if_changed: false, ..file.clone() })?;
    }
    manager.systemctl(&["daemon-reload"])?;
    Ok(())
}

/// Removes what renewals have written beside the serving certificate.
fn remove_renewal_files(journal: &Journal) -> Result<(), UndoError> {
    let is_serving =
        |file: &&FileRecord| file.path.file_name().is_some_and(|name| name == "serving.pem");
    let serving = journal.files.iter().filter(is_serving);
    for path in serving.flat_map(|file| kept_files(&file.path)) {
        files::remove_incomplete(&path);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(JournalError::Io(path, error).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Runs a command on a unit. A unit that does not exist is ignored.
fn run(arguments: &[&str], unit: &str, manager: &impl ServiceManager) -> Result<(), CommandError> {
    match manager.systemctl(arguments) {
        Err(error) => match property(manager, unit, "LoadState").as_str() {
            "not-found" | "" => Ok(()),
            _ => Err(error),
        },
        Ok(_) => Ok(()),
    }
}

/// Restarts kubelet if it runs. At boot it does not run yet, and a restart would wait for this process.
fn restart_kubelet(journal: &Journal, manager: &impl ServiceManager) -> Result<bool, CommandError> {
    let unit = journal.kubelet_unit.as_str();
    match property(manager, unit, "ActiveState").as_str() {
        "active" | "activating" | "reloading" => {
            manager.systemctl(&["restart", unit])?;
            Ok(true)
        }
        "failed" => {
            manager.systemctl(&["reset-failed", unit])?;
            manager.systemctl(&["start", unit])?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Restores the kubeconfig of kubelet.
///
/// | its content now | becomes |
/// |---|---|
/// | what the installation wrote, or missing | the old content |
/// | the same but for the CA, which was renewed, or the layout | the old content |
/// | other changes, and clusters that record their original | itself, with the original clusters |
/// | points at jackstay without a record, or cannot be parsed | the old content; it is saved beside the file |
/// | does not point at jackstay | itself |
fn restore_kubeconfig(
    store: &Store,
    journal: &Journal,
    undone: &mut Undone,
) -> Result<(), UndoError> {
    let file = &journal.kubeconfig;
    files::remove_incomplete(&file.path);
    let Some(now) = content(&file.path)? else {
        put_back(store, file)?;
        return Ok(());
    };
    let Some(original) = &file.original else { return Ok(()) };
    let old = store.original(original)?;
    let path = file.path.display();
    let unchanged = digest_of(&now) == file.digest || now == old;
    match KubeconfigNow::of(&file.path, &now, journal.listen) {
        _ if unchanged => {
            put_back(store, file)?;
        }
        KubeconfigNow::Recorded(text) if is_same_kubeconfig(&file.path, &text, &old) => {
            put_back(store, file)?;
        }
        KubeconfigNow::Recorded(text) => {
            write_like(&file.path, text.as_bytes(), original)?;
            undone.notes.push(format!(
                "{path} has changed since the installation: only the keys that jackstay wrote were restored"
            ));
        }
        KubeconfigNow::Elsewhere => undone.notes.push(format!(
            "{path} has changed since the installation and does not point at jackstay: it is kept"
        )),
        KubeconfigNow::Unusable => {
            let saved = file.path.with_extension("jackstay-saved");
            write(&saved, &now, files::PRIVATE)?;
            put_back(store, file)?;
            undone.notes.push(format!(
                "{path} would not have worked without jackstay: its content is in {}, and the one of before the \
                 installation is restored",
                saved.display()
            ));
        }
    }
    Ok(())
}

/// A kubeconfig that has changed since the installation.
enum KubeconfigNow {
    /// Its clusters record their original; this is the text with them.
    Recorded(String),
    /// No cluster points at jackstay.
    Elsewhere,
    /// It cannot be parsed, or a cluster points at jackstay without a record.
    Unusable,
}

impl KubeconfigNow {
    fn of(path: &Path, bytes: &[u8], listen: SocketAddr) -> Self {
        let Ok(file) = KubeconfigFile::parse(path, bytes) else { return Self::Unusable };
        let mut config = file.config().clone();
        let mut recorded = false;
        for cluster in config.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
            if recorded_original(cluster).is_some() {
                revert(cluster);
                recorded = true;
            }
        }
        let mut servers = config.clusters.iter().filter_map(|named| named.cluster.as_ref());
        let listen = listen.to_string();
        let is_jackstay = |server: &String| {
            ServerUrl::parse(server).is_ok_and(|server| server.address() == listen)
        };
        if servers.any(|cluster| cluster.server.as_ref().is_some_and(is_jackstay)) {
            return Self::Unusable;
        }
        match (recorded, kubeconfig_yaml(&config)) {
            (false, _) => Self::Elsewhere,
            (true, Ok(text)) => Self::Recorded(text),
            (true, Err(_)) => Self::Unusable,
        }
    }
}

fn is_same_kubeconfig(path: &Path, text: &str, old: &[u8]) -> bool {
    let tree = |bytes: &[u8]| -> Option<Value> {
        serde_json::to_value(KubeconfigFile::parse(path, bytes).ok()?.config()).ok()
    };
    let old = tree(old);
    old.is_some() && tree(text.as_bytes()) == old
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::super::journal::{JournalDraft, NewContent, UnitRecord};
    use super::super::service::UNIT;
    use super::*;

    const KUBELET: &str = "kubelet.service";
    const OLD: &str =
        "clusters:\n- name: k\n  cluster: {server: 'https://10.0.0.1:6443'} # a comment\n";
    const NEW: &str = "clusters: [{name: k, cluster: {server: 'https://127.0.0.1:7443', extensions: [{name: \
                       jackstay.example/original, extension: {original: {server: 'https://10.0.0.1:6443'}}}]}}]";

    /// A service manager that records its commands and what the kubeconfig is meanwhile, and fails once.
    struct Recorder<'a> {
        kubeconfig: &'a Path,
        commands: RefCell<Vec<(String, String)>>,
        calls: Cell<usize>,
        fails_at: Option<usize>,
    }

    impl<'a> Recorder<'a> {
        fn new(kubeconfig: &'a Path, fails_at: Option<usize>) -> Self {
            Self { kubeconfig, commands: RefCell::default(), calls: Cell::new(0), fails_at }
        }
    }

    impl ServiceManager for Recorder<'_> {
        fn systemctl(&self, arguments: &[&str]) -> Result<String, CommandError> {
            let command = arguments.join(" ");
            if arguments[0] == "show" {
                let active = command.contains("ActiveState");
                return Ok(if active { "active" } else { "loaded" }.to_owned());
            }
            self.calls.set(self.calls.get() + 1);
            if self.fails_at == Some(self.calls.get()) {
                return Err(CommandError::Failed(command, "killed".to_owned()));
            }
            let kubeconfig = fs::read_to_string(self.kubeconfig).unwrap();
            self.commands.borrow_mut().push((command, kubeconfig));
            Ok(String::new())
        }
    }

    /// A node with a kubeconfig and an old unit; an installation changes both and adds two files.
    struct TestNode {
        dir: tempfile::TempDir,
        store: Store,
        kubeconfig: PathBuf,
    }

    impl TestNode {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let kubeconfig = dir.path().join("kubelet.conf");
            fs::write(&kubeconfig, OLD).unwrap();
            fs::write(dir.path().join("old.service"), "old").unwrap();
            let store = Store::new(dir.path().join("journal"));
            Self { dir, store, kubeconfig }
        }

        fn files(&self) -> [(PathBuf, &'static str); 3] {
            let path = |name: &str| self.dir.path().join(name);
            [
                (path("etc/config.yaml"), "config"),
                (path("etc/tls/serving.pem"), "key"),
                (path("old.service"), "new"),
            ]
        }

        fn begin(&self) -> Journal {
            let files = self.files();
            let contents: Vec<NewContent<'_>> = files
                .iter()
                .map(|(path, text)| NewContent {
                    path,
                    bytes: text.as_bytes(),
                    keep_if_changed: path.ends_with("config.yaml"),
                })
                .collect();
            let kubeconfig = NewContent {
                path: &self.kubeconfig,
                bytes: NEW.as_bytes(),
                keep_if_changed: false,
            };
            let draft = JournalDraft {
                request: "",
                node: "n",
                kubelet_unit: KUBELET,
                state_directories: &[self.dir.path().join("state")],
                units: &[UnitRecord { name: UNIT.to_owned(), was_enabled: false }],
                admin: "127.0.0.1:1".parse().unwrap(),
                listen: "127.0.0.1:7443".parse().unwrap(),
                program: Path::new("/none"),
            };
            self.store.begin(&draft, kubeconfig, &contents).unwrap()
        }

        /// Carries out the first `steps` of the writes, as a process does that is killed during the next one.
        fn install(&self, steps: usize) -> Journal {
            let mut journal = self.begin();
            if let Some((path, _)) = self.files().get(steps) {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                let name = path.file_name().unwrap().to_str().unwrap();
                fs::write(path.with_file_name(format!(".{name}.jackstay-a1B2c3")), "half").unwrap();
            }
            for (path, text) in self.files().into_iter().take(steps) {
                write(&path, text.as_bytes(), 0o644).unwrap();
            }
            if steps > 3 {
                fs::create_dir(self.dir.path().join("state")).unwrap();
                fs::write(self.dir.path().join("state/endpoints"), "").unwrap();
                journal.phase = Phase::Switched;
                self.store.write(&journal).unwrap();
            }
            if steps > 4 {
                fs::write(&self.kubeconfig, NEW).unwrap();
                for path in kept_files(&self.files()[1].0) {
                    fs::write(path, "of a renewal").unwrap();
                }
            }
            self.store.read().unwrap().unwrap()
        }

        fn assert_as_before(&self, what: &str) {
            let mut names: Vec<String> = fs::read_dir(self.dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            assert_eq!(names, ["kubelet.conf", "old.service"], "{what}");
            assert_eq!(fs::read_to_string(&self.kubeconfig).unwrap(), OLD, "{what}");
            let old = fs::read_to_string(self.dir.path().join("old.service")).unwrap();
            assert_eq!(old, "old", "{what}");
        }
    }

    #[test]
    fn undo_after_every_step_and_every_interruption_restores_the_node() {
        for steps in 0..=5 {
            for fails_at in [None, Some(1), Some(2), Some(3), Some(4), Some(5)] {
                let node = TestNode::new();
                let journal = node.install(steps);
                let what = format!("{steps} steps, command {fails_at:?} fails");
                let first = Recorder::new(&node.kubeconfig, fails_at);
                if undo(&node.store, &journal, &first).is_err() {
                    let journal = node.store.read().unwrap().expect(&what);
                    undo(&node.store, &journal, &Recorder::new(&node.kubeconfig, None)).unwrap();
                }
                node.assert_as_before(&what);
                assert!(node.store.read().unwrap().is_none(), "{what}");
            }
        }
    }

    #[test]
    fn undo_of_a_complete_installation_that_is_interrupted_is_continued() {
        let node = TestNode::new();
        let mut journal = node.install(5);
        journal.phase = Phase::Installed;
        node.store.write(&journal).unwrap();
        undo(&node.store, &journal, &Recorder::new(&node.kubeconfig, Some(1))).unwrap_err();
        let left = node.store.read().unwrap().unwrap();
        assert_eq!(left.phase, Phase::Switched);
        undo(&node.store, &left, &Recorder::new(&node.kubeconfig, None)).unwrap();
        node.assert_as_before("continued");
    }

    #[test]
    fn undo_restarts_kubelet_with_the_old_kubeconfig_before_jackstay_stops() {
        let node = TestNode::new();
        let recorder = Recorder::new(&node.kubeconfig, None);
        let undone = undo(&node.store, &node.install(5), &recorder).unwrap();
        assert!(undone.kubelet_restarted);
        let commands = recorder.commands.borrow();
        let names: Vec<&str> = commands.iter().map(|(command, _)| command.as_str()).collect();
        let expected = [
            "restart kubelet.service",
            "daemon-reload",
            "disable --now jackstay.service",
            "disable jackstay-recovery.service",
            "daemon-reload",
        ];
        assert_eq!(names, expected);
        assert!(commands.iter().all(|(_, kubeconfig)| kubeconfig == OLD));
        // Before the kubeconfig was changed, kubelet is not touched.
        let node = TestNode::new();
        let recorder = Recorder::new(&node.kubeconfig, None);
        undo(&node.store, &node.install(3), &recorder).unwrap();
        assert_eq!(recorder.commands.borrow()[0].0, "daemon-reload");
    }

    #[test]
    fn undo_of_a_changed_kubeconfig_keeps_the_change_or_restores_a_working_one() {
        let with_jackstay = |text: &str| {
            let file = KubeconfigFile::parse(Path::new("/k"), text.as_bytes()).unwrap();
            let mut config = file.config().clone();
            let cluster = config.clusters[0].cluster.as_mut().unwrap();
            let server = jackstay_kubeconfig::ServerUrl::parse("https://10.0.0.1:6443").unwrap();
            let endpoint = crate::kubeconfig::rewrite::LocalEndpoint {
                address: "127.0.0.1:7443".into(),
                trust: crate::kubeconfig::rewrite::ClientTrust::Local(b"another CA".to_vec()),
                configuration: None,
            };
            crate::kubeconfig::rewrite::point_at(cluster, &server, &endpoint);
            kubeconfig_yaml(&config).unwrap()
        };
        let elsewhere = "clusters: [{name: k, cluster: {server: 'https://10.0.0.9:6443'}}]\n";
        let with_user = format!("{OLD}users: [{{name: added, user: {{}}}}]\n");
        for (now, expected, note) in [
            // The CA was renewed, or only the layout differs: the old bytes.
            (with_jackstay(OLD), OLD.to_owned(), None),
            (with_jackstay(&with_user), "10.0.0.1:6443".to_owned(), Some("only the keys")),
            (elsewhere.to_owned(), elsewhere.to_owned(), Some("it is kept")),
            // Without jackstay, these would not work.
            ("not YAML: [".to_owned(), OLD.to_owned(), Some("would not have worked")),
            (elsewhere.replace("10.0.0.9:6443", "127.0.0.1:7443"), OLD.to_owned(), Some("saved")),
        ] {
            let node = TestNode::new();
            let journal = node.install(5);
            fs::write(&node.kubeconfig, &now).unwrap();
            fs::write(&node.files()[0].0, "edited").unwrap();
            let undone =
                undo(&node.store, &journal, &Recorder::new(&node.kubeconfig, None)).unwrap();
            let restored = fs::read_to_string(&node.kubeconfig).unwrap();
            assert!(restored.contains(&expected), "{now}: {restored}");
            assert!(!restored.contains("7443"), "{restored}");
            assert_eq!(restored.contains("added"), now.contains("added"));
            assert_eq!(undone.notes.len(), usize::from(note.is_some()), "{:?}", undone.notes);
            assert!(note.is_none_or(|note| undone.notes[0].contains(note)), "{:?}", undone.notes);
            assert_eq!(undone.kept, [node.files()[0].0.clone()]);
        }
    }
}
