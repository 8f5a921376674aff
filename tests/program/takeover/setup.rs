//! jackstay as a process, and the processes that replace it.

use crate::support::child::{PROCESS_TIMEOUT, Process, free_address};
use crate::support::{TestCluster, pages, until, write_config};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use jackstay_config::Config;

/// The drain timeout. Watches end within its first quarter, and L4 flows are reset by its end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The program under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_jackstay");

/// Runs a program with this configuration.
pub fn command(binary: &Path, file: &Path, flags: &[&str]) -> Command {
    let mut command = Command::new(binary);
    command.args(["run", "--config"]).arg(file).args(flags);
    command
}

/// Starts a binary as another user.
pub fn start_as(binary: &Path, file: &Path, flags: &[&str], user: u32) -> Process {
    let mut command = command(binary, file, flags);
    command.uid(user);
    Process::spawn(command)
}

/// Starts a passthrough listener on a free port, with a drain timeout of an hour.
pub fn start_passthrough(upstream: SocketAddr) -> Process {
    let mut command = Command::new(BINARY);
    command.args(["run", "--listen", "127.0.0.1:0", "--endpoint", &upstream.to_string()]);
    command.env("JACKSTAY__ADMIN__BIND", "127.0.0.1:0").env("JACKSTAY__STATE_DIR", "");
    command.env("JACKSTAY__SHUTDOWN__DRAIN_TIMEOUT", "1h");
    Process::spawn(command)
}

/// A service manager that receives notifications (`sd_notify`).
pub struct ServiceManager {
    socket: UnixDatagram,
    dir: tempfile::TempDir,
}

impl ServiceManager {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(PROCESS_TIMEOUT)).unwrap();
        Self { socket, dir }
    }

    /// The next message that does not store or remove a descriptor.
    pub fn receive(&self) -> String {
        loop {
            let message = self.receive_any();
            if !message.starts_with("FDSTORE") {
                return message;
            }
        }
    }

    /// The next message.
    pub fn receive_any(&self) -> String {
        let mut buffer = [0; 256];
        let length = loop {
            match self.socket.recv(&mut buffer) {
                // A receive with a timeout is not restarted after a stop of the process (signal(7)).
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                received => break received.expect("a message"),
            }
        };
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

/// Apiservers, and the current jackstay process in front of them.
pub struct Setup {
    pub process: Process,
    pub cluster: TestCluster,
    /// The configuration of the next process.
    pub config: Config,
    pub address: SocketAddr,
    admin: SocketAddr,
    /// The file with `config`.
    file: PathBuf,
    /// The file of `process`.
    current_file: PathBuf,
    /// Number of configuration files before `file`.
    changes: usize,
}

impl Setup {
    pub async fn new(servers: usize, workers: usize) -> Self {
        Self::with(servers, |config| config.workers = workers).await
    }

    pub async fn with(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(servers);
        let mut config = cluster.config();
        config.shutdown.drain_timeout = DRAIN_TIMEOUT;
        change(&mut config);
        config.state_dir = Some(cluster.certs.path().join("state"));
        // The next processes use the ports of the first one.
        let (admin, address) = (free_address(), free_address());
        config.admin.bind = admin;
        config.listeners[0].bind = vec![address];
        let file = cluster.certs.path().join("jackstay.yaml");
        write_config(&file, &config);
        let mut process = Process::spawn(command(Path::new(BINARY), &file, &[]));
        process.wait_output("the admin endpoint listens").await;
        let current_file = file.clone();
        let setup =
            Self { process, cluster, config, address, admin, file, current_file, changes: 0 };
        setup.wait_ready().await;
        setup
    }

    pub fn state_dir(&self) -> PathBuf {
        self.cluster.certs.path().join("state")
    }

    /// Writes a changed configuration into a new file for the next process. The running process would reload
    /// its own file.
    pub fn change(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
        self.changes += 1;
        self.file.set_file_name(format!("next-{}.yaml", self.changes));
        write_config(&self.file, &self.config);
    }

    /// Writes `config`, changed, into the file of the current process, which reads it again.
    pub fn rewrite(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
        write_config(&self.current_file, &self.config);
        self.process.signal("HUP");
    }

    /// Starts a process with `config`.
    pub fn start(&self, flags: &[&str]) -> Process {
        Process::spawn(command(Path::new(BINARY), &self.file, flags))
    }

    pub fn start_under(&self, manager: &ServiceManager, flags: &[&str]) -> Process {
        let mut command = command(Path::new(BINARY), &self.file, flags);
        command.env("NOTIFY_SOCKET", manager.dir.path().join("notify"));
        Process::spawn(command)
    }

    /// Starts a process that inherits a listening socket, as under systemd (`LISTEN_FDS`).
    pub fn start_with_socket(&self, socket: OwnedFd) -> Process {
        let script = "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\" 3<&0 </dev/null";
        let mut command = Command::new("sh");
        command.args(["-c", script, BINARY, "run", "--config"]);
        command.arg(&self.file).stdin(Stdio::from(socket));
        Process::spawn(command)
    }

    /// Makes `new` the current process, and returns the previous one.
    pub fn replace(&mut self, new: Process) -> Process {
        self.current_file.clone_from(&self.file);
        std::mem::replace(&mut self.process, new)
    }

    /// Head and body of a page of the admin endpoint.
    pub async fn page(&self, path: &str) -> String {
        self.try_page(path).await.unwrap()
    }

    /// [`Self::page`]; fails while no process has the admin endpoint.
    pub async fn try_page(&self, path: &str) -> std::io::Result<String> {
        pages::get(self.admin, path).await
    }

    pub async fn wait_ready(&self) {
        let ready = async || self.page("/readyz").await.contains("readyz check passed");
        until("jackstay is ready", ready).await;
    }
}
