//! `jackstay run`: the proxy, from a configuration file to a clean exit.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::SystemTime;

use super::check;
use crate::app::reload::{Fresh, Origin};
use crate::app::{App, Running};
use crate::config::{ConfigErrors, Loaded};
use crate::net::notify::ServiceManager;
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
    pub read: Box<dyn Fn() -> Result<Loaded, ConfigErrors> + Send>,
}

/// Runs until SIGTERM or SIGINT; SIGHUP reads the configuration again.
pub fn run(place: Place) -> ExitCode {
    let Fresh { config, warnings } = match read(&place) {
        Ok(fresh) => fresh,
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
    let origin = place.is_file.then(|| Origin {
        file: place.name.clone(),
        read: Box::new(move || read(&place)),
        log: log.knobs(),
    });
    let manager = Arc::new(ServiceManager::from_environment().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot reach the service manager at NOTIFY_SOCKET; going on without it");
        ServiceManager::default()
    }));
    let start = |app: App| {
        let app = match origin {
            Some(origin) => app.following(origin),
            None => app,
        };
        app.start_under(Arc::clone(&manager))
    };
    let running = match App::bind(config).and_then(start) {
        Ok(running) => running,
        Err(error) => {
            tracing::error!("{error}");
            return ExitCode::from(if error.is_configuration() { BAD_CONFIGURATION } else { 1 });
        }
    };
    // Bound and served; whether an apiserver can be reached is not what others should wait for.
    manager.tell("READY=1");
    let signal = wait_for_signal(&running);
    manager.tell("STOPPING=1");
    match signal {
        Ok(signal) => tracing::info!(signal, "draining"),
        Err(error) => tracing::error!(%error, "cannot wait for signals: draining"),
    }
    stop(running)
}

/// Reads the configuration and every file that it names.
fn read(place: &Place) -> Result<Fresh, Vec<String>> {
    let lines = |errors: ConfigErrors| errors.0.iter().map(ToString::to_string).collect();
    let Loaded { config, mut warnings } = (place.read)().map_err(lines)?;
    let found = check::check_files(&place.name, &config, SystemTime::now());
    if !found.errors.is_empty() {
        return Err(lines(ConfigErrors(found.errors)));
    }
    // It starts when nothing else does: a source that is broken is followed until it is mended.
    warnings.extend(found.sources.iter().map(ToString::to_string));
    warnings.extend(found.notes);
    Ok(Fresh { config, warnings })
}

fn stop(running: Running) -> ExitCode {
    if running.stop() {
        tracing::info!("stopped");
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn wait_for_signal(running: &Running) -> io::Result<&'static str> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hangup = signal(SignalKind::hangup())?;
        loop {
            tokio::select! {
                _ = term.recv() => return Ok("SIGTERM"),
                _ = interrupt.recv() => return Ok("SIGINT"),
                // What came of it is in the log.
                _ = hangup.recv() => drop(running.reload("SIGHUP")),
            }
        }
    })
}
