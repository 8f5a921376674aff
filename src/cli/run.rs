//! `jackstay run`: the proxy, from a configuration file to a clean exit.

use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use super::check;
use crate::app::{App, Running};
use crate::config::{self, Overrides};
use crate::net::notify::ServiceManager;
use crate::observe::log;

/// Bad usage or bad configuration.
const BAD_CONFIGURATION: u8 = 2;

/// Runs until SIGTERM or SIGINT.
pub fn run(file: &Path, overrides: &Overrides) -> ExitCode {
    let loaded = match config::load(file, config::environment(), overrides) {
        Ok(loaded) => loaded,
        Err(errors) => {
            eprintln!("{errors}");
            return ExitCode::from(BAD_CONFIGURATION);
        }
    };
    let found = check::check_files(file, &loaded.config, SystemTime::now());
    if !found.errors.is_empty() {
        eprintln!("{}", config::ConfigErrors(found.errors));
        return ExitCode::from(BAD_CONFIGURATION);
    }
    let _log = match log::init(&loaded.config.log) {
        Ok(guard) => guard,
        Err(error) => {
            eprintln!("cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    for warning in loaded.warnings.iter().chain(&found.notes) {
        tracing::warn!("{warning}");
    }
    let manager = Arc::new(ServiceManager::from_environment().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot reach the service manager at NOTIFY_SOCKET; going on without it");
        ServiceManager::default()
    }));
    let start = |app: App| app.start_under(Arc::clone(&manager));
    let running = match App::bind(loaded.config).and_then(start) {
        Ok(running) => running,
        Err(error) => {
            tracing::error!("{error}");
            return ExitCode::from(if error.is_configuration() { BAD_CONFIGURATION } else { 1 });
        }
    };
    // Bound and served; whether an apiserver can be reached is not what others should wait for.
    manager.tell("READY=1");
    let signal = wait_for_signal();
    manager.tell("STOPPING=1");
    match signal {
        Ok(signal) => tracing::info!(signal, "draining"),
        Err(error) => tracing::error!(%error, "cannot wait for signals: draining"),
    }
    stop(running)
}

fn stop(running: Running) -> ExitCode {
    if running.stop() {
        tracing::info!("stopped");
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn wait_for_signal() -> io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // A reload is not a reason to die.
        let mut hangup = signal(SignalKind::hangup())?;
        loop {
            tokio::select! {
                _ = term.recv() => return Ok("SIGTERM"),
                _ = interrupt.recv() => return Ok("SIGINT"),
                _ = hangup.recv() => {
                    tracing::info!("SIGHUP: certificates are re-read by themselves");
                }
            }
        }
    })
}
