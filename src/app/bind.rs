//! The start of a process up to its bound sockets: alone, in place of a running process, or beside one that drains.
//! [`jackstay_core::takeover::start`] decides which.

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use jackstay_config::Config;
use jackstay_core::admission::MemoryBudget;
use jackstay_core::takeover::start::{
    Bound, Found, Start, StartEffect, StartFailure, StartInput, StartMode,
};
use jackstay_net::dns::ResolverFiles;
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_sys::clock;
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use tokio::runtime::Handle;

use super::App;
use super::active::{self, PreparedConfig};
use super::admin_socket::AdminBind;
use super::descriptors;
use super::start_error::StartError;
use super::takeover::{self, Predecessor, Request};
use crate::control::discovery::SharedContext;
use crate::control::host_addresses::HostAddresses;
use crate::observe::log::PidInLines;
use crate::observe::{LivenessMonitor, Metrics};

impl App {
    /// Loads every file and binds every address.
    ///
    /// # Errors
    /// The first file that cannot be loaded or address that cannot be bound.
    pub fn bind(config: Config) -> Result<Self, StartError> {
        Self::bind_with((config, LoadedFiles::default()), InheritedSockets::default())
    }

    /// Loads every file that is not loaded yet, uses the matching inherited sockets, and binds all other addresses.
    /// If a process with the same `state_dir` drains, starts beside it.
    ///
    /// # Errors
    /// The first file that cannot be loaded or address that cannot be bound.
    pub fn bind_with(
        loaded: (Config, LoadedFiles),
        inherited: InheritedSockets,
    ) -> Result<Self, StartError> {
        Attempt::new(loaded, inherited).run(Request::IfDraining)
    }

    /// Like [`App::bind_with`], also with the sockets of the running process that has the same `state_dir`.
    /// That process drains once this one serves. If no process runs, this is an ordinary start.
    ///
    /// # Errors
    /// Those of [`App::bind_with`], or the running process does not hand over its sockets.
    pub fn take_over(
        loaded: (Config, LoadedFiles),
        inherited: InheritedSockets,
    ) -> Result<Self, StartError> {
        if loaded.0.state_dir.is_none() {
            tracing::warn!("state_dir is \"\": there is no socket to take over through");
        }
        Attempt::new(loaded, inherited).run(Request::TakeOver)
    }
}

/// A start that may be tried again.
struct Attempt {
    config: Config,
    files: LoadedFiles,
    inherited: InheritedSockets,
    /// The takeover socket.
    path: Option<PathBuf>,
    /// The process that this one replaces.
    predecessor: Option<Predecessor>,
    /// A service manager has passed sockets.
    manager_sockets: bool,
    /// A process that does not answer, if it is in the same PID namespace.
    silent: Option<i32>,
    /// Shows the process id in log lines beside a process that does not answer.
    overlap: Option<PidInLines>,
    /// The process that serves, if it is in the same PID namespace.
    serving: Option<i32>,
}

impl Attempt {
    fn new((config, files): (Config, LoadedFiles), inherited: InheritedSockets) -> Self {
        Self {
            path: config.state_dir.as_deref().map(takeover::socket_path),
            config,
            files,
            inherited,
            predecessor: None,
            manager_sockets: false,
            silent: None,
            overlap: None,
            serving: None,
        }
    }

    fn run(mut self, request: Request) -> Result<App, StartError> {
        let (mut start, mut effect) = Start::new(request, self.path.is_some(), clock::now());
        let (mut bound, mut asked) = (None, None);
        loop {
            let input = match effect {
                StartEffect::Bind { admin_may_wait } => {
                    let result = self.bind(admin_may_wait);
                    let input = StartInput::Bound(kind_of(&result));
                    bound = Some(result);
                    input
                }
                StartEffect::Ask(request) => match self.ask(request) {
                    Ok(found) => StartInput::Found(found),
                    Err(error) => {
                        asked = Some(error);
                        StartInput::Found(Found::Failed)
                    }
                },
                StartEffect::BeginAlone => {
                    if let Some(path) = &self.path {
                        tracing::info!(path = %path.display(), "no process to take over from");
                    }
                    StartInput::Continue
                }
                StartEffect::Pause(time) => {
                    takeover::pause(time);
                    StartInput::Continue
                }
                StartEffect::Start(mode) => return self.start(mode, bound),
                StartEffect::Fail(failure) => return self.fail(failure, bound, asked),
            };
            effect = start.step(input, clock::now());
        }
    }

    /// Asks the process that serves the takeover socket, and keeps what it sends.
    fn ask(&mut self, request: Request) -> Result<Found, StartError> {
        let Some(path) = &self.path else { return Ok(Found::Nothing) };
        Ok(match takeover::request(path, request)? {
            takeover::Found::Nothing => Found::Nothing,
            takeover::Found::Serving(pid) => {
                self.serving = pid;
                Found::Serving
            }
            takeover::Found::Silent(pid) => {
                self.silent = pid;
                self.overlap = Some(PidInLines::start());
                Found::Silent
            }
            takeover::Found::Predecessor(predecessor, sockets) => {
                let (from, count) = (predecessor.pid(), sockets.len());
                self.manager_sockets = self.inherited.has_sockets_of_manager();
                self.inherited.append(sockets);
                let is_draining = predecessor.is_draining();
                self.predecessor = Some(predecessor);
                if is_draining {
                    tracing::info!(
                        from,
                        admin_sockets = count,
                        "starting beside a process that drains"
                    );
                    Found::Draining
                } else {
                    tracing::info!(from, sockets = count, "taking over from a running process");
                    Found::HandsOver
                }
            }
        })
    }

    /// The process with its bound sockets.
    fn start(
        mut self,
        mode: StartMode,
        bound: Option<Result<App, StartError>>,
    ) -> Result<App, StartError> {
        let Some(bound) = bound else { return self.bind(false) };
        let app = bound?;
        let Self { predecessor, silent, overlap, .. } = self;
        match mode {
            StartMode::Alone => Ok(app),
            StartMode::Beside => Ok(App { predecessor, replaces: true, ..app }),
            StartMode::InPlace => {
                let manager_sockets = self.manager_sockets;
                Ok(App { predecessor, manager_sockets, replaces: true, ..app })
            }
            StartMode::BesideSilent => {
                tracing::warn!(
                    from = silent,
                    "the running process does not answer, but the addresses of the listeners are free: starting \
                     beside it"
                );
                if let (Some(overlap), Ok(runtime)) = (overlap, Handle::try_current()) {
                    drop(runtime.spawn(takeover::show_pid_beside(silent, overlap)));
                }
                Ok(App { replaces: true, ..app })
            }
        }
    }

    /// The error of the start.
    fn fail(
        mut self,
        failure: StartFailure,
        bound: Option<Result<App, StartError>>,
        asked: Option<StartError>,
    ) -> Result<App, StartError> {
        match (failure, bound, asked) {
            (StartFailure::Ask, _, Some(error)) => Err(error),
            (StartFailure::Serving, Some(Err(error)), _) => Err(error.beside_serving(self.serving)),
            (StartFailure::Silent, Some(Err(error)), _) => {
                let path = self.path.unwrap_or_default();
                Err(StartError::silent(&path, self.silent, &error))
            }
            (_, Some(result), _) => result,
            (_, None, _) => self.bind(false),
        }
    }

    /// Uses duplicates of the inherited sockets.
    fn bind(&mut self, admin_may_wait: bool) -> Result<App, StartError> {
        let admin = if admin_may_wait { AdminBind::WhenFree } else { AdminBind::Required };
        let (config, mut inherited) = (&self.config, self.inherited.try_clone()?);
        descriptors::raise_descriptor_limit(config);
        let metrics = Metrics::new();
        let memory = MemoryBudget::new(active::client_memory_limit(config));
        let sockets = (&mut inherited, admin);
        let shared = (&metrics, &memory);
        let active = PreparedConfig::new((config.clone(), &mut self.files), None, sockets, shared)?
            .activate();
        let unused_sockets = inherited.addresses();
        if !inherited.is_empty() {
            let addresses = &unused_sockets;
            tracing::warn!(?addresses, "sockets that no listener uses are closed");
        }
        let context = Arc::new(SharedContext {
            bound: ArcSwap::from_pointee(active.listen_addresses().to_vec()),
            state_dir: Arc::new(ArcSwap::from_pointee(active.config.state_dir.clone())),
            liveness: LivenessMonitor::start()?,
            system: ResolverFiles::default(),
            host: HostAddresses::of_process(),
        });
        let (follower, predecessor, sandbox) = (None, None, None);
        Ok(App {
            active,
            metrics,
            memory,
            context,
            follower,
            predecessor,
            manager_sockets: false,
            unused_sockets,
            replaces: false,
            sandbox,
        })
    }
}

fn kind_of(result: &Result<App, StartError>) -> Bound {
    match result {
        Ok(_) => Bound::Yes,
        Err(error) if error.is_address_in_use() => Bound::InUse,
        Err(_) => Bound::Failed,
    }
}
