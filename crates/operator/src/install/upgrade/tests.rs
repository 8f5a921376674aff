//! A node with an installation, upgraded with each interruption and each failure.

use std::cell::{Cell, RefCell};
use std::fs;

use super::super::journal::{JournalDraft, UnitRecord};
use super::*;

const OLD: &str = "old program";
const NEW: &str = "new program";

/// A service manager and a jackstay. Its program is the file of the installation at the time of its start.
struct Node {
    dir: tempfile::TempDir,
    store: Store,
    /// The main process and its program.
    running: RefCell<Option<(u32, String)>>,
    /// Commands and signals in their order.
    calls: RefCell<Vec<String>>,
    /// The number of the call that fails, or at which the installing process is killed.
    fails_at: Cell<usize>,
    /// Whether the new program can serve: before it takes over, and afterwards.
    new_takes_over: bool,
    new_serves: bool,
    clock: Cell<Duration>,
    /// Whether the unit is not started yet.
    boots: Cell<bool>,
    /// The number of the pod that serves.
    pod: Cell<u32>,
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path().join("journal"));
        let node = Self {
            dir,
            store,
            running: RefCell::new(Some((10, digest_of(OLD.as_bytes())))),
            calls: RefCell::default(),
            fails_at: Cell::new(0),
            new_takes_over: true,
            new_serves: true,
            clock: Cell::default(),
            boots: Cell::default(),
            pod: Cell::new(1),
        };
        node.install();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn install(&self) {
        let files = [("program", OLD), ("jackstay.service", "old unit"), ("edited", "old")];
        for (name, text) in files.iter().chain(&[("kubelet.conf", "")]) {
            fs::write(self.path(name), text).unwrap();
        }
        let paths = files.map(|(name, text)| (self.path(name), text));
        let contents = paths.iter().map(|(path, text)| NewContent {
            path,
            bytes: text.as_bytes(),
            keep_if_changed: true,
        });
        let draft = JournalDraft {
            request: "old",
            node: "n",
            kubelet_unit: "kubelet.service",
            state_directories: &[],
            units: &[UnitRecord { name: UNIT.to_owned(), was_enabled: false }],
            admin: "127.0.0.1:1".parse().unwrap(),
            listen: "127.0.0.1:7443".parse().unwrap(),
            program: &self.path("program"),
        };
        let kubeconfig =
            NewContent { path: &self.path("kubelet.conf"), bytes: b"", keep_if_changed: false };
        let contents: Vec<_> = contents.collect();
        let mut journal = self.store.begin(&draft, kubeconfig, &contents).unwrap();
        journal.phase = super::super::journal::Phase::Installed;
        self.store.write(&journal).unwrap();
        fs::write(self.path("edited"), "edited by the operator").unwrap();
    }

    fn journal(&self) -> Journal {
        self.store.read().unwrap().unwrap()
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// The program at the path of the installation starts.
    fn start(&self) {
        let program = digest_of(&fs::read(self.path("program")).unwrap());
        if program == digest_of(NEW.as_bytes()) && !self.new_takes_over {
            return;
        }
        let pid = self.running.borrow().as_ref().map_or(10, |(pid, _)| *pid) + 1;
        *self.running.borrow_mut() = Some((pid, program));
    }

    fn call(&self, call: &str) -> Result<(), String> {
        self.calls.borrow_mut().push(call.to_owned());
        if self.calls.borrow().len() == self.fails_at.get() {
            return Err(format!("{call} failed"));
        }
        Ok(())
    }

    fn runs(&self) -> String {
        self.running.borrow().as_ref().map(|(_, program)| program.clone()).unwrap_or_default()
    }

    fn upgrade(&self) -> Result<bool, String> {
        let offered = Offered::new(self);
        let offered = offered.version();
        let mut journal = self.journal();
        let plan = plan(&journal, &offered, self).map_err(|error| error.to_string())?;
        if plan.is_empty() {
            return Ok(false);
        }
        upgrade(&self.store, &mut journal, (&plan, &offered), self)
            .map(|()| true)
            .map_err(|error| error.to_string())
    }

    /// Files and running program are those of one version; which one.
    fn version(&self) -> &'static str {
        let is = |text: &str, unit: &str| {
            self.text("program") == text
                && self.text("jackstay.service") == unit
                && self.runs() == digest_of(text.as_bytes())
        };
        match (is(OLD, "old unit"), is(NEW, "new unit")) {
            (true, _) => "old",
            (_, true) => "new",
            _ => "mixed",
        }
    }
}

/// The new version of the files of [`Node`].
struct Offered(OutputFile, Service);

impl Offered {
    fn new(node: &Node) -> Self {
        let file = |name: &str, text: &str| OutputFile {
            path: node.path(name),
            bytes: text.into(),
            mode: 0o644,
            description: "",
        };
        let files = vec![file("jackstay.service", "new unit"), file("edited", "new")];
        Self(file("program", NEW), Service { files, units: Vec::new() })
    }

    fn version(&self) -> OfferedVersion<'_> {
        OfferedVersion { program: &self.0, service: &self.1, request: "new" }
    }
}

impl ServiceManager for Node {
    fn systemctl(&self, arguments: &[&str]) -> Result<String, CommandError> {
        let command = arguments.join(" ");
        let running = self.running.borrow().clone();
        if command.contains("MainPID") {
            return Ok(running.map_or(0, |(pid, _)| pid).to_string());
        }
        if command.contains("ActiveState") {
            let ended = if self.boots.get() { "inactive" } else { "failed" };
            return Ok(if running.is_some() { "active" } else { ended }.to_owned());
        }
        let failed = |why| CommandError::Failed(command.clone(), why);
        self.call(&command).map_err(failed)?;
        if arguments[0] == "restart" {
            self.start();
        }
        Ok(String::new())
    }
}

impl UpgradeHost for Node {
    fn program_of(&self, pid: u32) -> Option<String> {
        self.running.borrow().as_ref().filter(|(main, _)| *main == pid).map(|(_, p)| p.clone())
    }

    fn request_takeover(&self, pid: u32) -> io::Result<()> {
        self.call(&format!("SIGUSR2 {pid}")).map_err(io::Error::other)?;
        self.start();
        Ok(())
    }

    fn serving_since(&self) -> Result<String, String> {
        if self.runs() == digest_of(NEW.as_bytes()) && !self.new_serves {
            return Err("no endpoint".to_owned());
        }
        Ok(format!("{}", self.pod.get()))
    }

    fn protect(&self, _: &Journal) -> Result<(), UndoError> {
        self.call("protect")
            .map_err(|why| UndoError::from(CommandError::Failed("protect".to_owned(), why)))
    }

    fn release(&self, _: &Journal) -> Result<(), UndoError> {
        self.calls.borrow_mut().push("release".to_owned());
        Ok(())
    }

    fn now(&self) -> Duration {
        self.clock.get()
    }

    fn pause(&self) {
        self.clock.set(self.clock.get() + Duration::from_millis(500));
    }
}

#[test]
fn upgrade_replaces_program_and_units_and_takes_over_once() {
    let node = Node::new();
    assert_eq!(node.upgrade(), Ok(true));
    assert_eq!((node.version(), node.text("edited").as_str()), ("new", "edited by the operator"));
    let expected = [
        "protect",
        "start jackstay-install-guard.service",
        "daemon-reload",
        "SIGUSR2 10",
        "release",
    ];
    assert_eq!(*node.calls.borrow(), expected);
    let journal = node.journal();
    assert_eq!((journal.upgrade.as_ref(), journal.request.as_str()), (None, "new"));
    assert_eq!(journal.file(&node.path("program")).unwrap().digest, digest_of(NEW.as_bytes()));
    assert!(!node.path("journal/previous-0").exists());
    // The same version again changes nothing.
    assert_eq!(node.upgrade(), Ok(false));
    assert_eq!(node.calls.borrow().len(), expected.len());
}

#[test]
fn upgrade_takes_over_if_only_the_running_program_is_another_one() {
    let node = Node::new();
    assert_eq!(node.upgrade(), Ok(true));
    *node.running.borrow_mut() = Some((7, digest_of(OLD.as_bytes())));
    assert_eq!((node.upgrade(), node.version()), (Ok(true), "new"));
    // A unit that has failed is started.
    *node.running.borrow_mut() = None;
    assert_eq!((node.upgrade(), node.version()), (Ok(true), "new"));
    assert!(node.calls.borrow().contains(&"restart jackstay.service".to_owned()));
}

#[test]
fn upgrade_is_undone_after_the_failure_of_each_call() {
    for fails_at in 1..=4 {
        let node = Node::new();
        node.fails_at.set(fails_at);
        let error = node.upgrade().unwrap_err();
        assert_eq!(node.version(), "old", "call {fails_at}: {error}");
        assert_eq!(node.journal().upgrade, None, "call {fails_at}");
        let changed = if fails_at == 1 { "nothing changed" } else { "was undone" };
        assert!(error.contains(changed), "call {fails_at}: {error}");
        node.fails_at.set(0);
        assert_eq!((node.upgrade(), node.version()), (Ok(true), "new"), "call {fails_at}");
    }
}

#[test]
fn upgrade_to_a_program_that_cannot_serve_ends_with_the_old_one() {
    for (new_takes_over, new_serves, reason) in [
        (false, true, "is of another program (after 20 s)"),
        (true, false, "no endpoint (after 60 s)"),
    ] {
        let node = Node { new_takes_over, new_serves, ..Node::new() };
        let error = node.upgrade().unwrap_err();
        assert!(error.contains("was undone") && error.contains(reason), "{error}");
        assert_eq!((node.version(), node.journal().upgrade), ("old", None));
    }
}

#[test]
fn upgrade_of_a_full_disk_changes_nothing() {
    let node = Node::new();
    // The journal's directory cannot be written: it is a file.
    fs::rename(node.path("journal"), node.path("moved")).unwrap();
    let mut journal = Store::new(node.path("moved")).read().unwrap().unwrap();
    fs::write(node.path("journal"), "").unwrap();
    let offered = Offered::new(&node);
    let offered = offered.version();
    let plan = plan(&journal, &offered, &node).unwrap();
    let error = upgrade(&node.store, &mut journal, (&plan, &offered), &node).unwrap_err();
    assert!(error.to_string().starts_with("nothing changed: "), "{error}");
    assert_eq!((node.version(), journal.upgrade), ("old", None));
}

/// The installing process is killed: what it has done by then is on disk, and no call follows.
#[test]
fn recovery_of_an_upgrade_killed_at_each_step_leaves_one_version() {
    for boots in [false, true] {
        for written in 0..=2 {
            for taken_over in [false, true] {
                let node = Node::new();
                let offered = Offered::new(&node);
                let offered = offered.version();
                let mut journal = node.journal();
                let planned = plan(&journal, &offered, &node).unwrap();
                let files: Vec<_> = planned.files.iter().map(|file| new_content(file)).collect();
                let program = digest_of(NEW.as_bytes());
                node.store.begin_upgrade(&mut journal, ("new", &program), &files).unwrap();
                for file in planned.files.iter().take(written) {
                    write(&file.path, &file.bytes, file.mode).unwrap();
                }
                if taken_over && written == 2 {
                    node.start();
                }
                if boots {
                    *node.running.borrow_mut() = None;
                    node.boots.set(true);
                }
                let mut journal = node.journal();
                let recovered = recover(&node.store, &mut journal, &node).unwrap();
                if boots {
                    assert_eq!(node.runs(), "", "systemd starts the unit afterwards");
                    node.start();
                }
                let complete = taken_over && written == 2 && !boots;
                let what = format!("boots {boots}, {written} files, taken over {taken_over}");
                assert_eq!(node.version(), if complete { "new" } else { "old" }, "{what}");
                assert_eq!(recovered == UpgradeRecovery::Completed, complete, "{what}");
                assert_eq!(node.journal().upgrade, None, "{what}");
                assert_eq!((node.upgrade(), node.version()), (Ok(!complete), "new"), "{what}");
            }
        }
    }
}

#[test]
fn started_program_is_that_of_the_command_of_the_unit() {
    struct Show(&'static str);
    impl ServiceManager for Show {
        fn systemctl(&self, _: &[&str]) -> Result<String, CommandError> {
            Ok(self.0.to_owned())
        }
    }
    let of = |text| started_program(&Show(text));
    let shown =
        "{ path=/usr/bin/jackstay ; argv[]=/usr/bin/jackstay run ; ignore_errors=no ; pid=0 }";
    assert_eq!(of(shown), Some(PathBuf::from("/usr/bin/jackstay")));
    assert_eq!(of(""), None);
}
