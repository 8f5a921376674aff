//! `jackstay run`: the proxy, from a configuration file to a clean exit, or to the process that takes
//! its place.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{check, upgrade};
use crate::app::reload::{ConfigSource, LoadedConfig};
use crate::app::{App, Running, StartError};
use crate::config::Draft;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::process::service_manager::ServiceManager;
use crate::observe::log;

/// Bad usage or bad configuration.
const BAD_CONFIGURATION: u8 = 2;

/// Where a configuration is from.
pub struct Place {
    /// Its name in messages.
    pub name: PathBuf,
    /// Whether that is a file, which can change while we run.
    pub is_file: bool,
    /// Reads it.
    pub read: Box<dyn Fn() -> Draft + Send>,
}

/// Descriptors that this process was started with.
pub struct ParentDescriptors {
    /// The sockets of the service manager.
    pub sockets: Vec<OwnedFd>,
    /// Is written to when this process serves.
    pub ready: Option<OwnedFd>,
}

/// Why a process ends.
enum End {
    /// By a signal.
    Signal(&'static str),
    /// A new process has taken its place.
    Replaced,
}

/// Runs until SIGTERM or SIGINT, or until a new process has taken over, and drains; the second of
/// these signals cuts the drain short. SIGHUP reads the
/// configuration again, SIGUSR2 starts the binary again, as such a new process.
pub fn run(place: Place, descriptors: ParentDescriptors, take_over: bool) -> ExitCode {
    let (LoadedConfig { config, warnings }, facts) = match read(&place) {
        Ok(read) => read,
        Err(errors) => {
            eprintln!("{}", errors.join("\n"));
            return ExitCode::from(BAD_CONFIGURATION);
        }
    };
    let log = match log::init(&config.log) {
        Ok(guard) => guard,
        Err(error) => {
            eprintln!("cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    for fact in facts {
        tracing::info!("{fact}");
    }
    let origin = place.is_file.then(|| ConfigSource {
        file: place.name.clone(),
        read: Box::new(move || read(&place).map(|(fresh, _)| fresh)),
        log: log.knobs(),
    });
    let manager = ServiceManager::from_environment().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot reach the service manager at NOTIFY_SOCKET; going on without it");
        ServiceManager::default()
    });
    let ParentDescriptors { sockets: given, ready } = descriptors;
    let manager = Arc::new(manager.with_ready_descriptor(ready));
    let told = Arc::clone(&manager);
    let start = move || {
        let inherited = inherit(given);
        let app = if take_over {
            App::take_over(config, inherited)?
        } else {
            App::bind_with(config, inherited)?
        };
        let app = match origin {
            Some(origin) => app.following(origin),
            None => app,
        };
        app.start_under(told)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = runtime.and_then(|runtime| {
        let ended = runtime.block_on(serve(start, &manager));
        // A start that hangs has been told to end: nobody waits for it.
        runtime.shutdown_background();
        ended
    });
    ended.unwrap_or_else(|error| {
        tracing::error!(%error, "cannot serve: stopped");
        ExitCode::FAILURE
    })
}

/// The sockets that the service manager has given.
fn inherit(given: Vec<OwnedFd>) -> InheritedSockets {
    let mut inherited = InheritedSockets::default();
    for descriptor in given {
        if let Err(error) = inherited.add(descriptor) {
            tracing::warn!(%error, "a descriptor of the service manager (LISTEN_FDS) is of no use");
        }
    }
    inherited
}

/// Reads the configuration and every file that it names. The lines are what is as it should be.
fn read(place: &Place) -> Result<(LoadedConfig, Vec<String>), Vec<String>> {
    let draft = (place.read)();
    let found = check::check_draft(&place.name, &draft, SystemTime::now());
    let (config, mut warnings) = match draft.config {
        Some(config) if found.errors.is_empty() => (config, draft.warnings),
        _ => return Err(found.errors.iter().map(ToString::to_string).collect()),
    };
    // It starts when nothing else does: a source that is broken is followed until it is mended.
    warnings.extend(found.sources.iter().map(ToString::to_string));
    warnings.extend(found.notes);
    Ok((LoadedConfig { config, warnings }, found.facts))
}

/// Starts, serves until it is told to end, and drains.
async fn serve(
    start: impl FnOnce() -> Result<Running, StartError> + Send + 'static,
    manager: &ServiceManager,
) -> io::Result<ExitCode> {
    // Before anybody can connect: whoever does is owed a drain.
    let mut signals = Signals::new()?;
    let starting = tokio::task::spawn_blocking(start);
    let running = tokio::select! {
        biased;
        started = starting => match started? {
            Ok(running) => running,
            Err(error) => {
                tracing::error!("{error}");
                let bad = error.is_configuration();
                return Ok(ExitCode::from(if bad { BAD_CONFIGURATION } else { 1 }));
            }
        },
        signal = signals.next() => {
            tracing::info!(signal, "told to end before it has started: stopped");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut told = true;
    match signals.end(&running).await {
        // The service goes on: it must not hear that it ends.
        End::Replaced => {
            told = false;
            tracing::info!("draining: a new process has taken over");
        }
        End::Signal(signal) => {
            manager.notify("STOPPING=1");
            tracing::info!(signal, "draining");
        }
    }
    let cut = running.force_close();
    let mut stopped = tokio::task::spawn_blocking(move || running.stop());
    loop {
        tokio::select! {
            stopped = &mut stopped => {
                if stopped.unwrap_or(false) {
                    tracing::info!("stopped");
                    return Ok(ExitCode::SUCCESS);
                }
                // A worker has panicked.
                return Ok(ExitCode::FAILURE);
            }
            signal = signals.next() => {
                tracing::info!(signal, first = !told, "told to end while draining");
                if told {
                    cut();
                }
                told = true;
            }
        }
    }
}

/// What ends a process, and what else it is told by signals.
struct Signals {
    term: Signal,
    interrupt: Signal,
    hangup: Signal,
    upgrade: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            upgrade: signal(SignalKind::user_defined2())?,
        })
    }

    /// Does what it is told until that is the end.
    async fn end(&mut self, running: &Running) -> End {
        loop {
            tokio::select! {
                _ = self.term.recv() => return End::Signal("SIGTERM"),
                _ = self.interrupt.recv() => return End::Signal("SIGINT"),
                () = running.replaced() => return End::Replaced,
                _ = self.upgrade.recv() => upgrade::begin(),
                // What came of it is in the log.
                _ = self.hangup.recv() => drop(running.reload("SIGHUP")),
            }
        }
    }

    /// The next one that asks for the end.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
