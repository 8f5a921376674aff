//! `jackstay demo`: runs a control plane, jackstay, clients and faults in one process.
//!
//! It needs no root, cluster or configuration. Its files are in a temporary directory, which is removed
//! at the end. The exit code is 0 if every promise was kept, else 1.

use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use clap::Args;
use jackstay_apiserver as apiserver;
use jackstay_apiserver::client::Credentials;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_apiserver::pki::{Issued, Pki, Subject};
use jackstay_apiserver::{Options, pki, seed};
use jackstay_config::{self as config, Overrides};
use jackstay_operator::admin_client::fetch_status;
use jackstay_operator::options::{OutputArgs, OutputFormat, has_colour, has_cursor};
use jackstay_sys::files;
use jackstay_sys::files::PRIVATE;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{App, Running};
use crate::demo::scenario::clients::{self, Clients};
use crate::demo::scenario::display::{ProgressDisplay, Step, StepProgress, Style, format_duration};
use crate::demo::scenario::ledger::{self, Counts};
use crate::demo::scenario::schedule::{self, FAULTS, RelayedServer, Results, Schedule};
use crate::demo::scenario::status_monitor::StatusMonitor;
use crate::observe::log;
use crate::observe::quantity;

/// Names of the apiservers.
const NAMES: [&str; 3] = ["a", "b", "c"];
/// Time within which all apiservers must be ready.
const START_TIMEOUT: Duration = Duration::from_secs(10);

const HELP: &str = "\
Exit codes: 0 every promise held, 1 one was broken or the demo cannot run,
2 bad usage.

Examples:
  jackstay demo
  jackstay demo --faults 2 --seconds 15 --plain
  jackstay demo --faults 2 -o json";

/// Arguments of `jackstay demo`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct DemoArgs {
    /// Inject only the first N of the 6 faults, after a baseline without a fault.
    #[arg(long, value_name = "N")]
    faults: Option<usize>,
    /// Approximate duration of all faults in seconds [default: 45; all faults take at least 35].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
    /// Print only the result. `-o json` and `-o yaml` imply it.
    #[arg(long)]
    quiet: bool,
    /// Print lines instead of a live table, as without a terminal.
    #[arg(long)]
    plain: bool,
    /// Repeat the faults until Ctrl-C.
    #[arg(long)]
    forever: bool,
    /// Write the log of jackstay to this file, which stays after the demo.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> ExitCode {
    match demo(args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("the demo cannot run: {error}");
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &DemoArgs) -> io::Result<bool> {
    let interrupted = Arc::new(AtomicBool::new(false));
    raise_on_signal(&interrupted)?;
    let private = fs::Permissions::from_mode(0o700);
    let home = tempfile::Builder::new().prefix("jackstay-demo-").permissions(private).tempdir()?;
    let result = demo_in(home.path(), args, &interrupted);
    if let Err(error) = home.close() {
        eprintln!("cannot remove the files of the demo: {error}");
    }
    result
}

/// Runs the demo with its files in `home`, and returns whether every promise was kept.
fn demo_in(home: &Path, args: &DemoArgs, interrupted: &Arc<AtomicBool>) -> io::Result<bool> {
    let display = Arc::new(ProgressDisplay::new(style(args)));

    let (cluster, pki) = (Cluster::new(), Pki::new("jackstay demo")?);
    seed::fill(&cluster).map_err(|failure| io::Error::other(failure.message))?;
    let user = pki.client(&Subject::admin())?;
    let servers = NAMES
        .iter()
        .map(|name| relayed_server(&cluster, &pki, name))
        .collect::<io::Result<Vec<_>>>()?;
    let proxy = Proxy::start(home, &pki, &user, &servers, args.log.as_deref())?;
    let kubeconfig = write_kubeconfig(home, &proxy, &pki, &user)?;
    show_header(&display, &proxy, &kubeconfig);

    let credentials = Credentials::anonymous(&pki.ca_pem()).certificate(&user);
    let endpoints =
        servers.iter().map(|server| (server.server.name().to_owned(), server.relay.addr)).collect();
    let admin = proxy.admin;
    let fetch = move || fetch_status(admin);
    let monitor = StatusMonitor::start(endpoints, display.clone(), fetch)?;
    let clients = Clients::start(proxy.listener, &credentials, &cluster)?;
    let schedule = Schedule {
        servers: &servers,
        ledger: &clients.ledger.clone(),
        monitor: &monitor,
        display: &display,
        interrupted,
        scale: args.seconds.map_or(1.0, |s| s as f64 / schedule::USUAL_DURATION.as_secs_f64()),
    };
    let ready = wait_ready(&schedule, interrupted)?;
    // Failures before the apiservers were ready do not count.
    clients.ledger.start_period();

    let faults = &FAULTS[..=args.faults.unwrap_or(FAULTS.len()).min(FAULTS.len() - 1)];
    let mut results = Results::default();
    loop {
        schedule.run(faults, &mut results)?;
        if !args.forever || interrupted.load(Relaxed) {
            break;
        }
    }
    let counts = clients.finish();
    if ready {
        results.broken.extend(broken_at_the_end(&counts));
    }
    drop(monitor);
    if !proxy.running.stop() {
        results.broken.push("a thread of jackstay panicked".to_owned());
    }
    match args.output.format {
        OutputFormat::Text => display.end(&verdict(&results)),
        format => format.print(&summary(&results, &display.steps()), String::new),
    }
    Ok(results.broken.is_empty())
}

/// Says what runs and how to reach it.
fn show_header(display: &ProgressDisplay, proxy: &Proxy, kubeconfig: &Path) {
    display.header(&[
        format!(
            "jackstay proxies {} apiservers for {} readers, {} writers and {} watches.",
            NAMES.len(),
            clients::READERS,
            clients::WRITERS,
            2 * ledger::WATCHES_PER_TOPIC
        ),
        "Default settings, but /readyz is probed every second. Try it while it runs:".to_owned(),
        format!("  kubectl --kubeconfig {} get pods -w", kubeconfig.display()),
        format!("  http://{}/", proxy.admin),
    ]);
}

/// The promises that were broken in the whole run.
fn broken_at_the_end(counts: &Counts) -> Option<String> {
    let Counts { lost, failed_reads, broken, .. } = counts;
    (*lost > 0 || *failed_reads > 0 || *broken > 0).then(|| {
        format!(
            "at the end: {} never arrived, {}, {}",
            quantity(*lost, "event"),
            quantity(*failed_reads, "failed read"),
            quantity(*broken, "broken watch")
        )
    })
}

/// Waits until all apiservers are ready. Returns whether they are, after an interruption maybe not.
fn wait_ready(schedule: &Schedule<'_>, interrupted: &AtomicBool) -> io::Result<bool> {
    let started_at = Instant::now();
    let mut ready = schedule.all_ready();
    while !ready && !interrupted.load(Relaxed) {
        if started_at.elapsed() > START_TIMEOUT {
            return Err(io::Error::other("the apiservers did not become ready"));
        }
        std::thread::sleep(Duration::from_millis(20));
        ready = schedule.all_ready();
    }
    Ok(ready)
}

/// Writes a kubeconfig for the proxy, and returns its path.
fn write_kubeconfig(home: &Path, proxy: &Proxy, pki: &Pki, user: &Issued) -> io::Result<PathBuf> {
    let kubeconfig = home.join("kubeconfig");
    let server = format!("https://{}", proxy.listener);
    let text = pki::kubeconfig(&server, &pki.ca_pem(), Some(user), None);
    files::replace(&kubeconfig, text.as_bytes(), PRIVATE)?;
    Ok(kubeconfig)
}

fn verdict(results: &Results) -> Vec<String> {
    let mut lines = vec![format!(
        "{} reads, the slowest took {} (promised {}); {} events.",
        results.reads,
        format_duration(results.slowest_read),
        format_duration(schedule::READ_PROMISE),
        results.events
    )];
    if results.stalled > Duration::from_millis(100) {
        let stalled = format_duration(results.stalled);
        lines.push(format!("This machine was busy: the clients did not run for {stalled}."));
    }
    if results.broken.is_empty() {
        lines.push(
            "Every promise held: no failed request, no broken watch, no event lost or twice."
                .to_owned(),
        );
    } else {
        lines.push("Not every promise held:".to_owned());
        lines.extend(results.broken.iter().map(|promise| format!("  {promise}")));
    }
    lines
}

/// The result in JSON and YAML.
fn summary(results: &Results, steps: &[Step]) -> Value {
    let millis = |time: Duration| time.as_millis() as u64;
    let scenario = |step: &Step| {
        let counts = &step.counts;
        json!({
            "fault": step.title,
            // Null if an interruption prevented the scenario.
            "ok": match step.stage {
                StepProgress::Passed => Some(true),
                StepProgress::Failed => Some(false),
                StepProgress::Waiting | StepProgress::Running => None,
            },
            "detected": step.detected,
            "reads": counts.reads,
            "failed_reads": counts.failed_reads,
            "slowest_read_ms": millis(counts.slowest_read),
            "writes": counts.writes,
            "failed_writes": counts.failed_writes,
            "slowest_write_ms": millis(counts.slowest_write),
            "broken_watches": counts.broken,
            "events": counts.events,
            "lost_events": counts.lost,
            "duplicated_events": counts.duplicated,
            "latest_event_ms": millis(counts.silence),
        })
    };
    json!({
        "ok": results.broken.is_empty(),
        "broken_promises": results.broken,
        "reads": results.reads,
        "slowest_read_ms": millis(results.slowest_read),
        "promised_read_ms": millis(schedule::READ_PROMISE),
        "events": results.events,
        "machine_stalled_ms": millis(results.stalled),
        "scenarios": steps.iter().map(scenario).collect::<Vec<_>>(),
    })
}

fn style(args: &DemoArgs) -> Style {
    if args.quiet || args.output.format != OutputFormat::Text {
        Style::Quiet
    } else if args.plain || !has_cursor() {
        Style::Plain
    } else {
        Style::Live { colour: has_colour() }
    }
}

fn relayed_server(cluster: &Cluster, pki: &Pki, name: &str) -> io::Result<RelayedServer> {
    let server = apiserver::start(cluster, pki, Options::named(name))?;
    let relay = FaultyRelay::start(server.addr)?;
    Ok(RelayedServer { server, relay })
}

/// A running jackstay, with its log and its addresses.
struct Proxy {
    running: Running,
    listener: SocketAddr,
    admin: SocketAddr,
    /// Writes the last log lines before the directory is removed.
    _log: log::LogGuard,
}

impl Proxy {
    fn start(
        home: &Path,
        pki: &Pki,
        user: &Issued,
        servers: &[RelayedServer],
        log_file: Option<&Path>,
    ) -> io::Result<Self> {
        let ca = pki.write_ca(home)?;
        let (cert, key) = pki.server()?.write_to(home, "serving")?;
        let pair = user.write_pair(home, "user")?;
        // Every JSON document is YAML, and JSON escapes the paths.
        let endpoints: Vec<_> =
            servers.iter().map(|server| server.relay.addr.to_string()).collect();
        let text = json!({
            "admin": { "bind": "127.0.0.1:0" },
            "state_dir": "",
            "shutdown": { "drain_timeout": "1s" },
            "upstreams": [{
                "name": "control-plane",
                "endpoints": endpoints,
                "tls": { "ca_file": ca },
                // Shorter than the default of 10 s, so that the demo stays short.
                "health": { "readyz": { "interval": "1s" } },
            }],
            "listeners": [{
                "name": "apiserver",
                "bind": ["127.0.0.1:0"],
                "upstream": "control-plane",
                "tls": { "cert_file": cert, "key_file": key },
                "client_ca_file": ca,
                "identities": [{ "cert_file": pair, "key_file": pair }],
            }],
        });
        let file = home.join("jackstay.yaml");
        fs::write(&file, text.to_string())?;
        // Ignores the environment variables of this machine's jackstay.
        let config =
            config::load(&file, [], &Overrides::default()).map_err(io::Error::other)?.config;
        let log = File::create(log_file.map_or(home.join("jackstay.log"), Path::to_owned))?;
        let log = log::init(&config.log, log)?;
        let app = App::bind(config).map_err(io::Error::other)?;
        let listener = app.listener_addresses("apiserver").first().copied();
        let listener = listener.ok_or_else(|| io::Error::other("127.0.0.1 cannot be bound"))?;
        let admin = app.admin_address()?;
        let running = app.start().map_err(io::Error::other)?;
        Ok(Self { running, listener, admin, _log: log })
    }
}

/// Sets the flag on SIGINT, SIGTERM or SIGHUP; the demo ends at its next step.
fn raise_on_signal(flag: &Arc<AtomicBool>) -> io::Result<()> {
    let flag = flag.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entered = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    drop(entered);
    let wait = async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
            flag.store(true, Relaxed);
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || runtime.block_on(wait))?;
    Ok(())
}
