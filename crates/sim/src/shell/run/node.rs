//! jackstay on a node, as a process that stops, dies, drains and starts again.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use jackstay_core::drain::CLOSE_TIMEOUT;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::leftovers::is_left_over;
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, ProcessId, ProcessState};
use crate::peers::Observer;
use crate::shell::certificates::Certificates;
use crate::shell::process::Process;
use crate::shell::program::{self, Configuration, Program};

/// How long a drain may take longer than its timeout: the sockets close first.
const DRAIN_REST: Duration = Duration::from_millis(200);
/// systemd starts a service again after this time (`RestartSec`).
const RESTART_PAUSE: Duration = Duration::from_millis(100);

/// jackstay on a node. Clones share it.
#[derive(Clone)]
pub(super) struct Proxy(Rc<Shared>);

struct Shared {
    network: SocketNetwork,
    number: ProcessId,
    node: usize,
    configuration: Configuration,
    certificates: Rc<Certificates>,
    observer: Observer,
    running: RefCell<Running>,
}

struct Running {
    process: Process,
    program: Rc<Program>,
}

impl Proxy {
    /// Starts jackstay.
    pub fn start(
        (network, host): (&SocketNetwork, HostId),
        node: usize,
        configuration: Configuration,
        certificates: &Rc<Certificates>,
        observer: &Observer,
    ) -> io::Result<Self> {
        let number = network.add_process(host);
        let running = start(&configuration, certificates, (network, number))?;
        Ok(Self(Rc::new(Shared {
            network: network.clone(),
            number,
            node,
            configuration,
            certificates: Rc::clone(certificates),
            observer: observer.clone(),
            running: RefCell::new(running),
        })))
    }

    /// The program as it runs now.
    pub fn program(&self) -> Rc<Program> {
        Rc::clone(&self.0.running.borrow().program)
    }

    /// Applies a configuration whose upstream has another name ([`Program::replace_upstream`]).
    pub fn replace_upstream(&self) -> io::Result<()> {
        let running = self.0.running.borrow();
        running.process.enter(|| running.program.replace_upstream()).unwrap_or(Ok(()))
    }

    /// The number of its process, which stays the same.
    pub fn number(&self) -> ProcessId {
        self.0.number
    }

    /// SIGSTOP or SIGCONT.
    pub fn stop(&self, stops: bool) {
        let state = if stops { ProcessState::Stopped } else { ProcessState::Running };
        self.0.network.set_process(self.0.number, state);
        let running = self.0.running.borrow();
        if stops { running.process.stop() } else { running.process.cont() }
    }

    /// SIGKILL.
    pub fn kill(&self) {
        self.0.network.set_process(self.0.number, ProcessState::Dead);
        self.0.running.borrow().process.kill();
    }

    /// Starts a killed process again.
    pub fn restart(&self) -> io::Result<()> {
        let Shared { network, number, configuration, certificates, .. } = &*self.0;
        network.set_process(*number, ProcessState::Running);
        let running = start(configuration, certificates, (network, *number))?;
        self.0.running.replace(running);
        Ok(())
    }

    /// SIGTERM, and a start when the process has ended. It may not take longer than its timeout, and leaves nothing
    /// over.
    pub fn drain(&self) {
        let proxy = self.clone();
        spawn_local(async move {
            let Shared { observer, configuration, node, .. } = &*proxy.0;
            let program = proxy.program();
            let limit = configuration.drain_timeout + CLOSE_TIMEOUT + DRAIN_REST;
            if timeout(limit, program.drain()).await.is_err() {
                let text = format!("node {node}: the drain takes longer than {limit:?}");
                observer.findings().violation(text);
            }
            observer.log(|| format!("node {node}: drained"));
            let metrics = program.metrics.render();
            for line in metrics.lines().filter(|line| is_left_over(line)) {
                let text = format!("node {node}: {line} is left over after the drain");
                observer.findings().violation(text);
            }
            proxy.kill();
            sleep(RESTART_PAUSE).await;
            if let Err(error) = proxy.restart() {
                observer.findings().violation(format!("node {node}: cannot start again: {error}"));
            }
        });
    }
}

fn start(
    configuration: &Configuration,
    certificates: &Certificates,
    (network, number): (&SocketNetwork, ProcessId),
) -> io::Result<Running> {
    let (process, program) =
        Process::start_with(|| program::start(configuration, certificates, (network, number)));
    Ok(Running { process, program: program? })
}
