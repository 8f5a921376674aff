//! Child processes of a test.

use crate::wait;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Limit for each wait on a process. On a slow machine a process needs long to start, drain or exit.
pub const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);

/// A child process that is killed on drop.
pub struct KillOnDrop(pub Child);

impl Deref for KillOnDrop {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for KillOnDrop {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process with its standard error recorded. It is killed on drop.
pub struct Process {
    /// `None` after [`Self::follow_successor`].
    child: Option<KillOnDrop>,
    /// The process that receives signals: the child, or the successor that took over from it.
    pid: String,
    output: Arc<Mutex<String>>,
}

impl Process {
    pub fn spawn(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the process starts");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let output = Arc::<Mutex<String>>::default();
        let recorded = Arc::clone(&output);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                let mut recorded = recorded.lock().unwrap();
                recorded.push_str(&line);
                recorded.push('\n');
            }
        });
        Self { pid: child.id().to_string(), child: Some(KillOnDrop(child)), output }
    }

    /// The process that gets signals.
    pub fn pid(&self) -> &str {
        &self.pid
    }

    /// The standard error up to now.
    pub fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Waits for a line that contains `text`, and returns the line.
    pub async fn wait_output(&mut self, text: &str) -> String {
        wait::until_ok(PROCESS_TIMEOUT, &format!("the process writes `{text}`"), async || {
            let output = self.output();
            let line = output.lines().find(|line| line.contains(text));
            line.map(str::to_owned).ok_or_else(|| output.clone())
        })
        .await
    }

    /// Waits until the process exits.
    pub async fn wait_exit(&mut self) -> ExitStatus {
        let child = self.child.as_mut().expect("the process is a child of the test");
        wait::until_ok(PROCESS_TIMEOUT, "the process exits", async || {
            child.try_wait().unwrap().ok_or_else(|| self.output.lock().unwrap().clone())
        })
        .await
    }

    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| child.try_wait().unwrap().is_none())
    }

    /// Makes `pid` the process that receives signals. It must have inherited the standard error of the child.
    pub fn follow_successor(&mut self, pid: &str) {
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
        if self.child.is_none() {
            let _ = Command::new("kill").args(["-KILL", &self.pid]).output();
        }
    }
}

/// A free port of loopback, for a process that starts later or again. The port is below
/// `net.ipv4.ip_local_port_range` (ip(7)), so the kernel gives it to no other socket. Each process of tests begins with
/// a range of its own, selected by its PID.
pub fn free_address() -> SocketAddr {
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    let first = FIRST_PORT + std::process::id() % PORT_RANGES * PORTS;
    let next = || first + TAKEN.fetch_add(1, Ordering::Relaxed);
    let candidates = std::iter::repeat_with(next).take_while(|port| *port < END_OF_PORTS);
    let addresses =
        candidates.map(|port| SocketAddr::from(([127, 0, 0, 1], port.try_into().unwrap())));
    let mut free = addresses.filter(|address| TcpListener::bind(address).is_ok());
    free.next().expect("a port below the ephemeral ones is free")
}

/// The ports of [`free_address`]: above those of services, below the ephemeral ones.
const FIRST_PORT: u32 = 10_000;
const END_OF_PORTS: u32 = 32_768;

/// Ports of one process of tests. A process that needs more continues in the next range.
const PORTS: u32 = 8;
const PORT_RANGES: u32 = 2_750;

/// The first loopback address with a port in a log line.
pub fn first_address(line: &str) -> SocketAddr {
    let start = line.find("127.0.0.1:").expect(line);
    let in_address = |c: &char| c.is_ascii_digit() || *c == '.' || *c == ':';
    line[start..].chars().take_while(in_address).collect::<String>().parse().expect(line)
}
