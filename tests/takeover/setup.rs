//! The binary as a process, what it says, and what it is replaced by.

use crate::support::{TestCluster, until, wait};
use jackstay::config::Config;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Long enough for a process on a slow machine to start, to drain and to end.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Watches end within a quarter of it; nothing else takes as long.
const DRAIN: Duration = Duration::from_secs(10);

/// A process and what it has said so far.
pub struct Process {
    child: Option<Child>,
    /// Who is signalled: the child, or what it has started.
    pid: String,
    said: Arc<Mutex<String>>,
}

impl Process {
    fn spawn(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let said = Arc::<Mutex<String>>::default();
        let into = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut said = into.lock().unwrap();
                said.push_str(&line);
                said.push('\n');
            }
        });
        Self { pid: child.id().to_string(), child: Some(child), said }
    }

    fn command(binary: &Path, file: &Path, flags: &[&str]) -> Command {
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(file).args(flags);
        command
    }

    pub fn start_as(binary: &Path, file: &Path, flags: &[&str], user: u32) -> Self {
        let mut command = Self::command(binary, file, flags);
        command.uid(user);
        Self::spawn(command)
    }

    /// Starts one that passes connections through, on a free port, and lets them finish for an hour.
    pub fn pass_through(upstream: SocketAddr) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(["run", "--listen", "127.0.0.1:0", "--upstream", &upstream.to_string()]);
        command.env("JACKSTAY__ADMIN__BIND", "127.0.0.1:0").env("JACKSTAY__STATE_DIR", "");
        command.env("JACKSTAY__SHUTDOWN__DRAIN_TIMEOUT", "1h");
        Self::spawn(command)
    }

    /// What it has said.
    pub fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Waits until it says that; the line.
    pub async fn says(&mut self, words: &str) -> String {
        wait::until_ok(PATIENCE, &format!("it says `{words}`"), async || {
            let said = self.said();
            // A line may still grow.
            let whole = said.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let line = whole.lines().find(|line| line.contains(words));
            line.map(str::to_owned).ok_or_else(|| said.clone())
        })
        .await
    }

    /// Waits for its end, and for its last words.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = self.child.as_mut().expect("a child");
        wait::until_ok(PATIENCE, "it ends", async || {
            child.try_wait().unwrap().ok_or_else(|| self.said.lock().unwrap().clone())
        })
        .await
    }

    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// It is this process from now on, which says what it says in the same place.
    pub fn becomes(&mut self, pid: &str) {
        self.child = None;
        pid.clone_into(&mut self.pid);
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid]).status();
        assert!(status.unwrap().success(), "no process {}", self.pid);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        match &mut self.child {
            Some(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            None => drop(Command::new("kill").args(["-KILL", &self.pid]).output()),
        }
    }
}

/// A service manager.
pub struct Managed {
    socket: UnixDatagram,
    dir: tempfile::TempDir,
}

impl Managed {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(dir.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket, dir }
    }

    /// The next message.
    pub fn hears(&self) -> String {
        let mut buffer = [0; 256];
        let length = loop {
            match self.socket.recv(&mut buffer) {
                // As after a stop of this process: a timeout keeps the kernel from going on (signal(7)).
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                heard => break heard.expect("a message"),
            }
        };
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

/// Apiservers, and the process before them.
pub struct Setup {
    pub process: Process,
    pub cluster: TestCluster,
    pub config: Config,
    pub address: SocketAddr,
    admin: SocketAddr,
    /// What the next process reads, and how often that was another file.
    file: PathBuf,
    changes: usize,
}

impl Setup {
    pub async fn new(servers: usize, workers: usize) -> Self {
        Self::with(servers, |config| config.workers = workers).await
    }

    pub async fn with(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(servers);
        let mut config = cluster.config();
        change(&mut config);
        config.shutdown.drain_timeout = DRAIN;
        config.state_dir = Some(cluster.certs.path().join("state"));
        let file = cluster.certs.path().join("jackstay.yaml");
        write(&file, &config);
        let binary = Path::new(env!("CARGO_BIN_EXE_jackstay"));
        let mut process = Process::spawn(Process::command(binary, &file, &[]));
        let admin = address(&process.says("the admin endpoint listens").await);
        let address = address(&process.says("\"apiserver\"").await);
        // The next ones find them by their ports.
        config.admin.bind = admin;
        config.listeners[0].bind = vec![address];
        write(&file, &config);
        let setup = Self { process, cluster, config, address, admin, file, changes: 0 };
        setup.is_ready().await;
        setup
    }

    pub fn state(&self) -> PathBuf {
        self.cluster.certs.path().join("state")
    }

    /// Writes what the next process will read, and the one that runs will not: it would follow the
    /// change by itself where the next one is slow.
    pub fn change(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
        self.changes += 1;
        self.file.set_file_name(format!("next-{}.yaml", self.changes));
        write(&self.file, &self.config);
    }

    /// Starts a process with the configuration as it is now.
    pub fn start(&self, flags: &[&str]) -> Process {
        let binary = Path::new(env!("CARGO_BIN_EXE_jackstay"));
        Process::spawn(Process::command(binary, &self.file, flags))
    }

    pub fn start_under(&self, manager: &Managed, flags: &[&str]) -> Process {
        let binary = Path::new(env!("CARGO_BIN_EXE_jackstay"));
        let mut command = Process::command(binary, &self.file, flags);
        command.env("NOTIFY_SOCKET", manager.dir.path().join("notify"));
        Process::spawn(command)
    }

    /// Starts one that has a listening socket from the beginning, as systemd gives it.
    pub fn start_with(&self, socket: OwnedFd) -> Process {
        let script = "export LISTEN_FDS=1 LISTEN_PID=$$; exec \"$0\" \"$@\" 3<&0 </dev/null";
        let mut command = Command::new("sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_jackstay"), "run", "--config"]);
        command.arg(&self.file).stdin(Stdio::from(socket));
        Process::spawn(command)
    }

    /// The process that is spoken of from now on; the one before.
    pub fn replace(&mut self, new: Process) -> Process {
        std::mem::replace(&mut self.process, new)
    }

    /// A page of the admin endpoint.
    pub async fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).await.unwrap();
        let request = format!("GET {path} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn is_ready(&self) {
        let ready = async || self.page("/readyz").await.contains("readyz check passed");
        until("it is ready", ready).await;
    }
}

fn write(file: &Path, config: &Config) {
    let new = file.with_extension("new");
    std::fs::write(&new, config.to_json().to_string()).unwrap();
    std::fs::rename(&new, file).unwrap();
}

/// The first address in a line.
pub fn address(line: &str) -> SocketAddr {
    let at = line.find("127.0.0.1:").expect(line);
    let port = |c: &char| c.is_ascii_digit() || *c == '.' || *c == ':';
    line[at..].chars().take_while(port).collect::<String>().parse().expect(line)
}
