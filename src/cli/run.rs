//! `jackstay run`: loads the configuration, starts the proxy, handles signals, and drains when a
//! termination signal arrives or a new process takes over.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use jackstay_config::{self as config, Config, ConfigDraft, Overrides};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::key_log;
use jackstay_operator::commands::check;
use jackstay_operator::options::{ConfigArgs, EXIT_USAGE, missing_default_hint};
use jackstay_sys::clock;
use jackstay_sys::process::inherited_sockets;
use jackstay_sys::process::inherited_sockets::{InheritedSockets, PassedDescriptor};
use jackstay_sys::process::sandbox::file_rules;
use jackstay_sys::process::service_manager::ServiceManager;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Sleep, sleep, timeout};

use super::upgrade::Upgrade;
use crate::app::reload::{CheckedConfig, ConfigSource};
use crate::app::sandbox::ProcessSandbox;
use crate::app::{App, Running, StartError};
use crate::observe::{build, log};

const HELP: &str = "\
Signals: SIGTERM and SIGINT drain and exit, a second one cuts the drain
short; SIGHUP reads the configuration again; SIGUSR2 starts a new process
of the binary, which takes over; SIGURG before SIGTERM announces a restart
by the service manager, which keeps the listening sockets meanwhile.

Exit codes: 0 drained, 1 failure, 2 bad usage or bad configuration.

Examples:
  jackstay run
  jackstay run --config jackstay.yaml --log-level debug
  jackstay run --listen 127.0.0.1:7443 --endpoint 10.0.0.1:6443";

/// How long a start may still take after a termination signal. It may already serve clients, which a completed start
/// drains.
const START_COMPLETION: Duration = Duration::from_secs(1);

/// Maximum time from the announcement of a restart to its termination signal.
const ANNOUNCED: Duration = Duration::from_secs(10);
/// When open connections are closed before a restart, also those of a process that drains already.
const RESTART_END: Duration = Duration::from_secs(2);

/// Arguments of `jackstay run`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(super) struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Without a file: pass connections through (L4) from this address. Repeatable.
    #[arg(long, value_name = "ADDR", requires = "endpoints", conflicts_with = "config")]
    listen: Vec<String>,
    /// Without a file: an apiserver to pass connections to. Repeatable.
    #[arg(
        long = "endpoint",
        alias = "upstream",
        value_name = "ADDR",
        requires = "listen",
        conflicts_with = "config"
    )]
    endpoints: Vec<String>,
    /// Take over the listening sockets of the jackstay that runs with the same `state_dir`, which
    /// then drains and exits. If none runs, start as usual.
    #[arg(long)]
    take_over: bool,
    /// Write a newline to this open descriptor once clients can connect, and close it. To wait for
    /// an apiserver as well, use `jackstay status --wait`.
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    ready_fd: Option<i32>,
    #[command(flatten)]
    overrides: Overrides,
}

/// Where the configuration comes from.
struct ConfigInput {
    /// Its name in messages.
    name: PathBuf,
    /// Whether it is a file, which may change while the process runs.
    is_file: bool,
    /// Reads it, with the environment and the overrides of the command line.
    read: Box<dyn Fn() -> ConfigDraft + Send>,
}

impl ConfigInput {
    fn new(args: RunArgs) -> Self {
        let RunArgs { config: ConfigArgs { config: file }, listen, endpoints, overrides, .. } =
            args;
        if listen.is_empty() {
            let name = file.clone();
            let read = move || config::draft(&file, config::environment(), &overrides);
            return Self { name, is_file: true, read: Box::new(read) };
        }
        let read = move || {
            config::draft_from_flags(&listen, &endpoints, config::environment(), &overrides)
        };
        Self { name: PathBuf::from("command line"), is_file: false, read: Box::new(read) }
    }

    /// The file of the configuration.
    fn file(&self) -> Option<&Path> {
        self.is_file.then_some(&self.name)
    }

    /// Reads the configuration and checks every file that it names. The second value lists the checks
    /// that passed, for the log. In a sandbox, files outside of it are errors.
    fn load(
        &self,
        sandbox: Option<&ProcessSandbox>,
    ) -> Result<(CheckedConfig, Vec<String>), Vec<String>> {
        if let Some(denial) = sandbox.and_then(|_| file_rules::describe_denial(&self.name)) {
            return Err(vec![denial]);
        }
        let draft = (self.read)();
        if let (Some(sandbox), Some(config)) = (sandbox, &draft.config) {
            sandbox.check(config)?;
        }
        let mut files = LoadedFiles::default();
        let report = check::check_draft(&self.name, &draft, SystemTime::now(), &mut files);
        let (config, mut warnings) = match draft.config {
            Some(config) if report.errors.is_empty() => (config, draft.warnings),
            _ => return Err(report.errors.iter().map(ToString::to_string).collect()),
        };
        // The proxy starts with a broken source of endpoints and reads it again until it is valid.
        warnings.extend(report.sources.iter().map(ToString::to_string));
        warnings.extend(report.warnings);
        warnings.extend(report.notes);
        Ok((CheckedConfig { config, warnings, files }, report.passed_checks))
    }
}

/// Why the process drains and exits.
enum EndReason {
    /// A termination signal.
    Signal(Termination),
    /// A new process has taken over.
    Replaced,
}

/// Runs the command: until SIGTERM or SIGINT, or until a new process has taken over; then drains.
pub(super) fn run(args: RunArgs) -> ExitCode {
    // Before any other descriptor is opened, which could be mistaken for an inherited one.
    let descriptors = inherited_sockets::from_service_manager();
    let ready = args.ready_fd.map(|number| {
        let taken = inherited_sockets::take_descriptor(number, &descriptors);
        taken.inspect_err(|error| eprintln!("--ready-fd {number}: {error}"))
    });
    let Ok(ready) = ready.transpose() else { return ExitCode::from(EXIT_USAGE) };
    let stored = stored_names(&descriptors);
    let take_over = args.take_over;
    let input = ConfigInput::new(args);
    let (CheckedConfig { config, warnings, files }, passed_checks) = match input.load(None) {
        Ok(loaded) => loaded,
        Err(errors) => return refuse(&input.name, &errors, &stored),
    };
    let upgrade = Upgrade::prepare(&config);
    // Before the sandbox, which forbids to connect to it.
    let manager = ServiceManager::from_environment();
    // Before the first thread, which the log starts.
    let sandbox = Arc::new(ProcessSandbox::enter(&config, input.file()));
    let log = match log::init(&config.log, std::io::stderr()) {
        Ok(guard) => guard,
        Err(error) => {
            eprintln!("cannot start the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    log_start(&input.name, &config, take_over, &sandbox.summary());
    // Until it is known whether another process runs.
    let overlap = take_over.then(log::PidInLines::start);
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    for check in passed_checks {
        tracing::info!("{check}");
    }
    sandbox.warn_if_incomplete();
    let checked = Arc::clone(&sandbox);
    let source = input.is_file.then(|| ConfigSource {
        file: input.name.clone(),
        read: Box::new(move || input.load(Some(&checked)).map(|(loaded, _)| loaded)),
        log: log.control(),
    });
    let manager = Arc::new(or_none(manager).with_ready_descriptor(ready));
    let app_manager = Arc::clone(&manager);
    let start = move || {
        let inherited = inherit(descriptors, &config, &app_manager);
        let app = if take_over {
            App::take_over((config, files), inherited)?
        } else {
            App::bind_with((config, files), inherited)?
        };
        drop(overlap);
        let app = match source {
            Some(source) => app.with_config_source(source),
            None => app,
        };
        app.with_sandbox(sandbox).start_under(app_manager)
    };
    serve_to_end(start, (&manager, &stored), upgrade)
}

/// Reports a configuration that cannot be used, and has the service manager close the `stored` sockets.
fn refuse(file: &Path, errors: &[String], stored: &BTreeSet<String>) -> ExitCode {
    discard_stored(stored, &ServiceManager::from_environment().unwrap_or_default());
    eprintln!("{}", errors.join("\n"));
    if let Some(hint) = missing_default_hint(file) {
        eprintln!("{hint}, or use --listen and --endpoint");
    }
    ExitCode::from(EXIT_USAGE)
}

/// Starts the application and serves until the process ends.
fn serve_to_end(
    start: impl FnOnce() -> Result<Running, StartError> + Send + 'static,
    manager: (&ServiceManager, &BTreeSet<String>),
    upgrade: Upgrade,
) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.and_then(|runtime| {
        let result = runtime.block_on(serve(start, manager, upgrade));
        // A start that hangs does not delay the exit.
        runtime.shutdown_background();
        result
    });
    result.unwrap_or_else(|error| {
        tracing::error!(%error, "cannot serve: stopped");
        ExitCode::FAILURE
    })
}

/// The service manager that is notified, if there is one.
fn or_none(connected: io::Result<ServiceManager>) -> ServiceManager {
    connected.unwrap_or_else(|error| {
        tracing::warn!(%error, "service manager unreachable at NOTIFY_SOCKET; it is not notified");
        ServiceManager::default()
    })
}

/// Writes the first line of the log: which program runs how, for a reader of many restarts.
fn log_start(file: &Path, config: &Config, take_over: bool, sandbox: &str) {
    let listeners = |terminates: bool| {
        let all = config.listeners.iter().filter(|l| l.terminate().is_some() == terminates);
        let names: Vec<_> = all.map(|listener| listener.name.as_str()).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(",") }
    };
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    tracing::info!(
        version = build::VERSION,
        commit = build::COMMIT,
        pid = std::process::id(),
        config = %file.display(),
        user = %format_args!("{}:{}", uid.as_raw(), gid.as_raw()),
        l7 = %listeners(true),
        l4 = %listeners(false),
        take_over,
        sandbox,
        "jackstay starts"
    );
    if key_log::is_active() {
        tracing::warn!(
            "TLS secrets are written to the file in SSLKEYLOGFILE: its readers can decrypt all sessions"
        );
    }
}

/// The listening sockets among the descriptors of the service manager. Stored ones that no listener has are closed.
fn inherit(
    descriptors: Vec<PassedDescriptor>,
    config: &Config,
    manager: &ServiceManager,
) -> InheritedSockets {
    let mut inherited = InheritedSockets::default();
    for descriptor in descriptors {
        if let Err(error) = inherited.add_passed(descriptor) {
            tracing::warn!(%error, "descriptor of the service manager (LISTEN_FDS) ignored");
        }
    }
    let bound: HashSet<_> = config.listeners.iter().flat_map(|one| &one.bind).collect();
    for name in inherited.close_unwanted_stored(|address| bound.contains(&address)) {
        tracing::info!(name, "stored socket closed: no listener has its address");
        manager.discard(&name);
    }
    inherited
}

/// The names of the sockets that an earlier process has stored.
fn stored_names(descriptors: &[PassedDescriptor]) -> BTreeSet<String> {
    let stored = descriptors.iter().filter(|passed| passed.is_stored());
    stored.map(|passed| passed.name.clone()).collect()
}

/// Has the service manager close the stored sockets, because no process will accept on them: clients are refused rather
/// than kept waiting.
fn discard_stored(names: &BTreeSet<String>, manager: &ServiceManager) {
    for name in names {
        manager.discard(name);
    }
}

/// Starts, serves until a signal or a takeover, and drains.
async fn serve(
    start: impl FnOnce() -> Result<Running, StartError> + Send + 'static,
    (manager, stored): (&ServiceManager, &BTreeSet<String>),
    upgrade: Upgrade,
) -> io::Result<ExitCode> {
    // Before clients can connect: once they can, a signal must drain the process, not kill it.
    let mut signals = Signals::new(upgrade)?;
    let mut starting = tokio::task::spawn_blocking(start);
    let (started, signal) = tokio::select! {
        biased;
        started = &mut starting => (started?, None),
        signal = signals.terminations.next() => {
            let Ok(started) = timeout(START_COMPLETION, starting).await else {
                tracing::info!(signal = signal.name, "termination signal before the start was complete: stopped");
                return Ok(ExitCode::SUCCESS);
            };
            (started?, Some(signal))
        }
    };
    let running = match started {
        Ok(running) => running,
        Err(error) => {
            discard_stored(stored, manager);
            tracing::error!("{error}");
            let code = if error.is_configuration() { EXIT_USAGE } else { 1 };
            return Ok(ExitCode::from(code));
        }
    };
    let end = match signal {
        Some(signal) => EndReason::Signal(signal),
        None => signals.wait_for_end(&running).await,
    };
    Ok(drain(running, end, manager, signals).await)
}

/// Drains, for at most [`RESTART_END`] before a restart.
async fn drain(
    running: Running,
    end: EndReason,
    manager: &ServiceManager,
    mut signals: Signals,
) -> ExitCode {
    // When the drain is cut short.
    let mut end_by = pin!(None);
    let mut signalled = match end {
        // Without STOPPING=1: the service continues in the new process.
        EndReason::Replaced => {
            tracing::info!("draining: a new process has taken over");
            false
        }
        EndReason::Signal(signal) => {
            manager.notify("STOPPING=1");
            tracing::info!(signal = signal.name, restart = signal.restarts, "draining");
            if signal.restarts {
                running.restarts();
                end_by.as_mut().set(Some(sleep(RESTART_END)));
            }
            true
        }
    };
    let force_close = running.force_close();
    let mut stopped = tokio::task::spawn_blocking(move || running.stop());
    loop {
        tokio::select! {
            stopped = &mut stopped => {
                if stopped.unwrap_or(false) {
                    tracing::info!("stopped");
                    return ExitCode::SUCCESS;
                }
                // A worker has panicked.
                return ExitCode::FAILURE;
            }
            () = over(end_by.as_mut()) => {
                end_by.set(None);
                force_close();
            }
            signal = signals.terminations.next() => {
                let signal_name = signal.name;
                if signalled {
                    tracing::info!(signal = signal_name, "second termination signal: drain cut short");
                    force_close();
                } else if signal.restarts {
                    // The service manager starts the next process when all of the service have ended.
                    tracing::info!(signal = signal_name, "restart while draining; drain ends soon");
                    end_by.set(Some(sleep(RESTART_END)));
                } else {
                    tracing::info!(
                        signal = signal_name,
                        "termination signal while draining; drain continues"
                    );
                }
                signalled = true;
            }
        }
    }
}

/// Waits for a time; for ever without one.
async fn over(mut time: Pin<&mut Option<Sleep>>) {
    match time.as_mut().as_pin_mut() {
        Some(time) => time.await,
        None => std::future::pending().await,
    }
}

/// A signal that ends the process.
#[derive(Clone, Copy)]
struct Termination {
    name: &'static str,
    /// Whether the service manager has announced that it starts another process then.
    restarts: bool,
}

/// The signals that end the process.
struct Terminations {
    restart: Signal,
    /// When a restart was announced.
    announced: Option<Instant>,
    terminate: Signal,
    interrupt: Signal,
}

impl Terminations {
    fn new() -> io::Result<Self> {
        Ok(Self {
            restart: signal(SignalKind::from_raw(libc::SIGURG))?,
            announced: None,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for a termination signal.
    async fn next(&mut self) -> Termination {
        let name = loop {
            tokio::select! {
                // The announcement was sent before the signal that it is about.
                biased;
                _ = self.restart.recv() => self.announced = Some(clock::now()),
                _ = self.terminate.recv() => break "SIGTERM",
                _ = self.interrupt.recv() => break "SIGINT",
            }
        };
        let restarts = self.announced.take().is_some_and(|at| clock::elapsed(at) < ANNOUNCED);
        Termination { name, restarts }
    }
}

/// The signals that `run` handles.
struct Signals {
    terminations: Terminations,
    hangup: Signal,
    start_successor: Signal,
    upgrade: Upgrade,
}

impl Signals {
    fn new(upgrade: Upgrade) -> io::Result<Self> {
        Ok(Self {
            terminations: Terminations::new()?,
            hangup: signal(SignalKind::hangup())?,
            start_successor: signal(SignalKind::user_defined2())?,
            upgrade,
        })
    }

    /// Waits for a termination signal or a takeover, and handles SIGHUP and SIGUSR2 meanwhile.
    async fn wait_for_end(&mut self, running: &Running) -> EndReason {
        loop {
            tokio::select! {
                signal = self.terminations.next() => return EndReason::Signal(signal),
                () = running.replaced() => return EndReason::Replaced,
                _ = self.start_successor.recv() => self.upgrade.begin(),
                // The reload logs its outcome.
                _ = self.hangup.recv() => drop(running.reload("SIGHUP")),
            }
        }
    }
}
