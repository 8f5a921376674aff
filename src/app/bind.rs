//! The start of a process up to its bound sockets: alone, in place of a running process, or beside one that drains.
//!
//! | process with the same `state_dir` | `run` | `run --take-over` |
//! |---|---|---|
//! | none | binds | binds |
//! | serves | fails: an address is in use | takes over its sockets |
//! | drains | binds the addresses of the listeners, and takes over the socket of the admin endpoint | the same |
//! | does not answer, and has closed the sockets of its listeners: stopped or another version, in its drain | binds the addresses of the listeners; the admin endpoint waits for its address | the same |
//! | does not answer, and has the sockets: stopped | fails | fails |

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jackstay_core::admission::MemoryBudget;
use jackstay_sys::clock;
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use tokio::runtime::Handle;

use super::App;
use super::active::{self, PreparedConfig};
use super::admin_socket::AdminBind;
use super::start_error::StartError;
use super::takeover::{self, Found, Predecessor, Request};
use crate::config::Config;
use crate::control::discovery::SharedContext;
use crate::control::discovery::dns::ResolverFiles;
use crate::net::loaded_files::LoadedFiles;
use crate::observe::log::PidInLines;
use crate::observe::{LivenessMonitor, Metrics};

/// Time for a process that has got a termination signal to close its sockets or to end. Until then an address in use
/// is tried again.
const CLOSING: Duration = Duration::from_millis(500);
/// Time for a process that accepts connections to open its takeover socket, as long as it waits for that itself.
const OPENING: Duration = Duration::from_secs(2);
/// How often an address in use is tried.
const CLOSING_POLL: Duration = Duration::from_millis(20);

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
        (config, files): (Config, LoadedFiles),
        inherited: InheritedSockets,
    ) -> Result<Self, StartError> {
        let path = config.state_dir.as_deref().map(takeover::socket_path);
        Attempt { config, files, inherited }.bind_alone(path.as_deref(), Request::IfDraining)
    }

    /// Like [`App::bind_with`], also with the sockets of the running process that has the same `state_dir`.
    /// That process drains once this one serves. If no process runs, this is an ordinary start.
    ///
    /// # Errors
    /// Those of [`App::bind_with`], or the running process does not hand over its sockets.
    pub fn take_over(
        (config, files): (Config, LoadedFiles),
        inherited: InheritedSockets,
    ) -> Result<Self, StartError> {
        let Some(path) = config.state_dir.as_deref().map(takeover::socket_path) else {
            tracing::warn!("state_dir is \"\": there is no socket to take over through");
            return Self::bind_with((config, files), inherited);
        };
        let mut attempt = Attempt { config, files, inherited };
        match takeover::request(&path, Request::TakeOver)? {
            Found::Predecessor(predecessor, sockets) => attempt.bind_after(predecessor, sockets),
            Found::Silent(pid) => attempt.bind_beside_silent(&path, pid),
            Found::Nothing | Found::Serving(_) => {
                tracing::info!(path = %path.display(), "no process to take over from");
                attempt.bind_alone(Some(&path), Request::TakeOver)
            }
        }
    }
}

/// A start that may be tried again.
struct Attempt {
    config: Config,
    files: LoadedFiles,
    inherited: InheritedSockets,
}

impl Attempt {
    /// Starts without another process, unless an address is in use: then sends `request` to the process that has it.
    fn bind_alone(mut self, path: Option<&Path>, request: Request) -> Result<App, StartError> {
        let limit = match request {
            Request::TakeOver => OPENING,
            Request::IfDraining => CLOSING,
        };
        let start = clock::now();
        loop {
            let error = match self.bind(AdminBind::Required) {
                Err(error) if error.is_address_in_use() => error,
                result => return result,
            };
            let Some(path) = path else { return Err(error) };
            match takeover::request(path, request) {
                Ok(Found::Predecessor(predecessor, sockets)) => {
                    return self.bind_after(predecessor, sockets);
                }
                // The process has not handled its termination signal yet, has ended in the meantime, or has not
                // opened its takeover socket yet.
                Ok(Found::Nothing | Found::Serving(_)) if clock::elapsed(start) < limit => {}
                Ok(Found::Silent(pid)) => return self.bind_beside_silent(path, pid),
                Ok(Found::Serving(pid)) => return Err(error.beside_serving(pid)),
                Ok(Found::Nothing) | Err(_) => return Err(error),
            }
            takeover::pause(CLOSING_POLL);
        }
    }

    /// Starts with the sockets of a process that serves or drains.
    fn bind_after(
        mut self,
        predecessor: Predecessor,
        sockets: InheritedSockets,
    ) -> Result<App, StartError> {
        if predecessor.is_draining() {
            return self.bind_beside(predecessor, sockets);
        }
        let from = predecessor.pid();
        tracing::info!(from, sockets = sockets.len(), "taking over from a running process");
        let manager_sockets = !self.inherited.is_empty();
        self.inherited.append(sockets);
        let app = self.bind(AdminBind::Required)?;
        Ok(App { predecessor: Some(predecessor), manager_sockets, replaces: true, ..app })
    }

    /// Starts beside a process that drains, with the socket of its admin endpoint.
    fn bind_beside(
        mut self,
        predecessor: Predecessor,
        sockets: InheritedSockets,
    ) -> Result<App, StartError> {
        let (from, admin_sockets) = (predecessor.pid(), sockets.len());
        tracing::info!(from, admin_sockets, "starting beside a process that drains");
        self.inherited.append(sockets);
        let start = clock::now();
        loop {
            match self.bind(AdminBind::WhenFree) {
                Err(error) if error.is_address_in_use() && clock::elapsed(start) < CLOSING => {
                    takeover::pause(CLOSING_POLL);
                }
                result => {
                    let predecessor = Some(predecessor);
                    return Ok(App { predecessor, replaces: true, ..result? });
                }
            }
        }
    }

    /// Starts beside a process that does not answer, if that has closed the sockets of its listeners.
    fn bind_beside_silent(&mut self, path: &Path, pid: Option<i32>) -> Result<App, StartError> {
        let overlap = PidInLines::start();
        let app = self.bind(AdminBind::WhenFree).map_err(|error| {
            if error.is_address_in_use() { StartError::silent(path, pid, &error) } else { error }
        })?;
        tracing::warn!(
            from = pid,
            "the running process does not answer, but the addresses of the listeners are free: starting beside it"
        );
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(takeover::show_pid_beside(pid, overlap)));
        }
        Ok(App { replaces: true, ..app })
    }

    /// Uses duplicates of the inherited sockets.
    fn bind(&mut self, admin: AdminBind) -> Result<App, StartError> {
        let (config, mut inherited) = (&self.config, self.inherited.try_clone()?);
        active::raise_descriptor_limit(config);
        let metrics = Metrics::new();
        let memory = MemoryBudget::new(active::client_memory_limit(config));
        let sockets = (&mut inherited, admin);
        let shared = (&metrics, &memory);
        let active = PreparedConfig::new((config.clone(), &mut self.files), None, sockets, shared)?
            .activate();
        if !inherited.is_empty() {
            let addresses = inherited.addresses();
            tracing::warn!(?addresses, "sockets that no listener uses are closed");
        }
        let context = Arc::new(SharedContext {
            bound: ArcSwap::from_pointee(active.listen_addresses().to_vec()),
            state_dir: ArcSwap::from_pointee(active.config.state_dir.clone()),
            liveness: LivenessMonitor::start()?,
            system: ResolverFiles::default(),
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
            replaces: false,
            sandbox,
        })
    }
}
