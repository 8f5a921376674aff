//! Compares jackstay with `HAProxy`, Envoy and, at L4, nginx in front of the same HTTP/2 origin. All figures come from
//! one run, because absolute figures of two runs or two machines are not comparable.
//!
//! ```text
//! benches/setup                                            # once: haproxy, nginx, h2load, envoy
//! cargo bench --bench peers                                # about twenty minutes
//! cargo bench --bench peers -- --quick --json peers.json   # about two minutes
//! cargo bench --bench peers -- --layer l4                  # passthrough only
//! cargo bench --bench peers -- --bursts 10 --check         # memory after bursts, about two minutes
//! cargo bench --bench peers -- --line 5 --check            # long lines, about seven minutes
//! cargo bench --bench peers -- --instructions compare --check   # callgrind, two minutes
//! ```
//!
//! `benches/README.md` describes the method. h2load sends the requests with a bearer token. [`client`] measures
//! latency, bulk and watches with a client certificate; [`raw`] is the byte protocol at L4. Proxies that are not
//! installed are skipped with a message. `JACKSTAY_BIN` selects the jackstay binary; `JACKSTAY_BENCH_BEFORE` adds a
//! second one, to measure the cost of a change in one run.

mod bulk;
mod burst;
mod busy_watches;
mod client;
mod footprint;
mod growth;
mod h2load;
mod instructions;
mod line;
mod origin;
mod passthrough;
mod phases;
mod pin;
mod pki;
mod process;
mod proxies;
mod raw;
mod relay;
mod report;
mod tls_relay;

use std::{
    fmt::Display,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use clap::Parser;
use jackstay_testkit::peers::find_program;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    phases::{Bench, Plan},
    pki::Pki,
    process::{Process, ticks_per_second},
    proxies::{Environment, Layer, Proxy, Target},
    report::{Metric, Samples},
};

/// Errors are printed and not distinguished, so they have no types.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A run that takes longer is aborted, because it hangs.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// Number of idle flows in the short form.
const QUICK_FLOWS: usize = 3_000;

/// Compares jackstay with other proxies in front of one origin.
#[derive(Parser)]
struct Args {
    /// Run the short form: about two minutes instead of twenty.
    #[arg(long)]
    quick: bool,
    /// Also write medians, ratios and samples to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure only these proxies.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Target::PROXIES)]
    only: Vec<Target>,
    /// Measure only at these layers.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Layer::L7, Layer::L4])]
    layer: Vec<Layer>,
    /// Measure only this at L7. `--check` then checks only what was measured.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Phase::ALL)]
    phase: Vec<Phase>,
    /// Measure only memory after a burst of watches, in this many new jackstay processes.
    #[arg(long, value_name = "RUNS", conflicts_with_all = ["quick", "only", "layer"])]
    bursts: Option<usize>,
    /// Measure only over lines of 2, 20 and 80 ms, in at most this many rounds; about seven minutes.
    #[arg(long, value_name = "RUNS", conflicts_with_all = ["quick", "layer", "bursts"])]
    line: Option<usize>,
    /// Count only the instructions of a request and of a watch event, with callgrind; two minutes.
    #[arg(long, value_enum, conflicts_with_all = ["quick", "only", "layer", "bursts", "line"])]
    instructions: Option<Counts>,
    /// Fail unless jackstay meets every limit. This requires the peers to which the limits are relative.
    #[arg(long)]
    check: bool,
    /// Set by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(clap::Subcommand)]
enum Role {
    /// Run as the origin process.
    #[command(hide = true)]
    Origin { dir: PathBuf },
    /// Run as the TLS relay.
    #[command(hide = true)]
    TlsRelay { dir: PathBuf, listen: std::net::SocketAddr, origin: std::net::SocketAddr },
    /// Run as the relay.
    #[command(hide = true)]
    Relay { target: std::net::SocketAddr, delay_micros: u64 },
}

/// What is done with counted instructions.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Counts {
    /// Compare them with `benches/instructions.json`.
    Compare,
    /// Write them to this file.
    Record,
}

/// A part of the measurements at L7.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Phase {
    /// Memory and CPU of idle proxies, and memory of idle watches.
    Idle,
    /// Memory after a burst of watches.
    Bursts,
    /// Start time and size of the program.
    Start,
    /// Memory of 10,000 watches.
    ManyWatches,
    /// Requests, latency and bulk.
    Rounds,
    /// Watches with events.
    BusyWatches,
    /// Costs with growing work.
    Growth,
}

impl Phase {
    const ALL: [Self; 7] = [
        Self::Idle,
        Self::Bursts,
        Self::Start,
        Self::ManyWatches,
        Self::Rounds,
        Self::BusyWatches,
        Self::Growth,
    ];
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.role {
        Some(Role::Origin { dir }) => origin::run(dir).map(|()| true),
        Some(Role::Relay { target, delay_micros }) => {
            relay::run(*target, Duration::from_micros(*delay_micros)).map(|()| true)
        }
        Some(Role::TlsRelay { dir, listen, origin }) => {
            tls_relay::run(dir, *listen, *origin).map(|()| true)
        }
        // `cargo test --all-targets` runs benches too, without this flag.
        None if !args.bench => {
            println!("run by `cargo bench --bench peers`");
            return ExitCode::SUCCESS;
        }
        None => supervise(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("peers: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the bench with a time limit and signal handlers, so that every exit drops, and thereby kills, all children.
fn supervise(args: &Args) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            outcome = run(args) => outcome,
            () = tokio::time::sleep(LIMIT) => Err(format!("not finished within {LIMIT:?}").into()),
            _ = interrupt.recv() => Err("interrupted".into()),
            _ = terminate.recv() => Err("terminated".into()),
        }
    })
}

async fn run(args: &Args) -> Result<bool> {
    // The number of idle flows for which the limit suffices. Child processes inherit the limit.
    let flows = passthrough::raise_descriptor_limit()?;
    let flows = if args.quick { flows.min(QUICK_FLOWS) } else { flows };
    let dir = tempfile::Builder::new().prefix("jackstay-peers-").tempdir()?;
    let pki = Pki::create(dir.path())?;
    let tls = pki.client_config()?;
    let tls_without_certificate = pki.client_config_without_certificate()?;
    let (origin, origin_process) = start_origin(dir.path()).await?;
    let environment = Environment { dir: dir.path(), pki: &pki, origin, flows, tls: &tls };
    let mut samples = Samples::default();

    if let Some(runs) = args.bursts {
        bursts(&environment, &[Target::Jackstay], runs, &mut samples).await?;
        write_json(args, &machine(), &samples.json())?;
        return Ok(!args.check || samples.meets(Metric::BurstMemory) == Some(true));
    }

    if let Some(counts) = args.instructions {
        let met = instructions::run(&environment, counts == Counts::Record).await?;
        return Ok(!args.check || met);
    }

    if let Some(runs) = args.line {
        let machine = machine();
        println!("{machine}");
        let lines = line::run(&environment, &available(&args.only), runs).await?;
        println!("\n{}", lines.table());
        let within_bounds = report_figures(&lines.figures())?;
        write_json(args, &machine, &lines.json())?;
        return Ok(within_bounds && (!args.check || lines.meets_all()));
    }

    let Some(h2load) = find_program(Path::new("h2load")) else {
        return Err("h2load is not installed: run benches/setup".into());
    };
    let machine = machine();
    println!("{machine}; {flows} idle flows");
    let bench = Bench {
        plan: if args.quick { Plan::QUICK } else { Plan::FULL },
        dir: dir.path(),
        h2load: &h2load,
        origin,
        origin_process: &origin_process,
        tls: &tls,
        tls_without_certificate: &tls_without_certificate,
        ticks_per_second: ticks_per_second()?,
        flows,
    };

    let targets = available(&args.only);
    let (mut limits_met, mut within_bounds) = (true, true);
    for layer in [Layer::L7, Layer::L4] {
        if !args.layer.contains(&layer) {
            continue;
        }
        let mut targets: Vec<_> =
            targets.iter().copied().filter(|target| target.works_at(layer)).collect();
        match layer {
            Layer::L7 => l7(&environment, &bench, args, &targets, &mut samples).await?,
            Layer::L4 => l4(&environment, &bench, args, &mut targets, &mut samples).await?,
        }
        println!("\n{}", samples.table(layer));
        if layer == Layer::L7 {
            println!(
                "× the CPU of the TLS relay, the physical limit:\n{}",
                samples.distance_to_limit()
            );
        }
        limits_met &= samples.meets_all(layer, args.phase.len() == Phase::ALL.len());
        within_bounds &= report_figures(&samples.figures(layer))?;
    }

    write_json(args, &machine, &samples.json())?;
    Ok(within_bounds && (!args.check || limits_met))
}

/// All phases at L7.
async fn l7(
    environment: &Environment<'_>,
    bench: &Bench<'_>,
    args: &Args,
    targets: &[Target],
    samples: &mut Samples,
) -> Result<()> {
    let selected = |phase| args.phase.contains(&phase);
    let log = |phase| eprintln!("L7: {phase}");
    if selected(Phase::Idle) {
        log("idle, and idle watches");
        let mut targets = with_limit(args, targets);
        let proxies = start_all(environment, &mut targets, Layer::L7, true).await?;
        bench.idle(&proxies, samples).await?;
    }
    if selected(Phase::Bursts) {
        log("bursts of watches");
        bursts(environment, &with_limit(args, targets), bench.plan.bursts, samples).await?;
    }
    if selected(Phase::Start) {
        log("start");
        footprint::start(environment, targets, bench.plan.starts, samples).await?;
    }
    if selected(Phase::ManyWatches) {
        log("many watches");
        footprint::many_watches(environment, &with_limit(args, targets), samples).await?;
    }
    // New processes are started, so that memory allocated for the watches does not affect these figures.
    if selected(Phase::Rounds) {
        let mut targets: Vec<_> = targets.iter().copied().chain([Target::TlsRelay]).collect();
        let proxies = start_all(environment, &mut targets, Layer::L7, true).await?;
        bench.rounds(&proxies, samples).await?;
    }
    if selected(Phase::BusyWatches) {
        log("busy watches");
        let mut targets: Vec<_> = targets.iter().copied().chain([Target::TlsRelay]).collect();
        let proxies = start_all(environment, &mut targets, Layer::L7, true).await?;
        bench.busy_watches(&proxies, samples).await?;
    }
    if selected(Phase::Growth) {
        log("growth");
        let mut targets = with_limit(args, targets);
        let proxies = start_all(environment, &mut targets, Layer::L7, true).await?;
        bench.growth(&proxies, samples).await?;
    }
    Ok(())
}

/// The proxies of a measurement in which only jackstay has a limit. The short form omits the others.
fn with_limit(args: &Args, targets: &[Target]) -> Vec<Target> {
    let is_measured = |target: &Target| !args.quick || *target == Target::Jackstay;
    targets.iter().copied().filter(is_measured).collect()
}

/// All phases at L4.
async fn l4(
    environment: &Environment<'_>,
    bench: &Bench<'_>,
    args: &Args,
    targets: &mut Vec<Target>,
    samples: &mut Samples,
) -> Result<()> {
    eprintln!("L4: idle, and idle flows");
    let mut measured = with_limit(args, targets);
    let proxies = start_all(environment, &mut measured, Layer::L4, true).await?;
    bench.idle_flows(&proxies, samples).await?;
    drop(proxies);
    // New processes are started, so that memory allocated for the flows does not affect these figures.
    let proxies = start_all(environment, targets, Layer::L4, false).await?;
    bench.flow_rounds(&proxies, samples).await
}

/// Appends the figures to the report that `JACKSTAY_REPORT` names (`tests/report` creates it). Returns whether all are
/// within their bounds: the limit with `JACKSTAY_STRICT=1`, else four times the limit, because short runs on a noisy
/// machine are inexact. Without a report there are no bounds.
fn report_figures(figures: &[(impl Display, f64, f64)]) -> Result<bool> {
    let Some(path) = std::env::var_os("JACKSTAY_REPORT") else { return Ok(true) };
    let strict = std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1");
    let mut report = fs::OpenOptions::new().append(true).open(path)?;
    let mut all = true;
    for (name, measured, limit) in figures {
        let (ratio, bound) = (measured / limit, if strict { *limit } else { 4.0 * limit });
        let row = format!("| bench | {name} | {measured:.2} | {limit} | {ratio:.2} | {bound} |\n");
        report.write_all(row.as_bytes())?;
        if *measured > bound {
            eprintln!("{name}: {measured:.2}, bound {bound}, limit {limit}");
            all = false;
        }
    }
    Ok(all)
}

/// The proxies of `only` that are installed, and the second jackstay, if there is one.
fn available(only: &[Target]) -> Vec<Target> {
    let mut targets = only.to_vec();
    if std::env::var_os("JACKSTAY_BENCH_BEFORE").is_some() && !targets.contains(&Target::Before) {
        targets.push(Target::Before);
    }
    targets.retain(|&target| match target.program() {
        Ok(_) => true,
        Err(reason) => {
            println!("{} is skipped: {reason}", target.name());
            false
        }
    });
    targets
}

fn write_json(args: &Args, machine: &str, metrics: &serde_json::Value) -> Result<()> {
    if let Some(file) = &args.json {
        let all = json!({ "machine": machine, "quick": args.quick, "metrics": metrics });
        fs::write(file, serde_json::to_string_pretty(&all)? + "\n")?;
    }
    Ok(())
}

/// Memory after a burst: of jackstay in `runs` new processes, because every one must meet the limit; of other proxies in
/// one.
async fn bursts(
    environment: &Environment<'_>,
    targets: &[Target],
    runs: usize,
    samples: &mut Samples,
) -> Result<()> {
    for &target in targets {
        let runs = if matches!(target, Target::Before | Target::Jackstay) { runs } else { 1 };
        for run in 1..=runs {
            let Some(each) = target.skip_failed_peer(burst::run(environment, target).await)? else {
                break;
            };
            println!("{}: {each:.1} KiB per idle watch after burst {run} of {runs}", target.name());
            samples.add(Metric::BurstMemory, target, each);
        }
    }
    Ok(())
}

/// Starts the proxies. If `first`, a proxy that does not start is removed from `targets` with a message; otherwise this
/// is an error.
async fn start_all(
    environment: &Environment<'_>,
    targets: &mut Vec<Target>,
    layer: Layer,
    first: bool,
) -> Result<Vec<Proxy>> {
    let mut proxies = Vec::new();
    for target in targets.clone() {
        match environment.start(target, layer).await {
            Ok(proxy) => proxies.push(proxy),
            Err(error) if first => println!("{} is skipped: {error}", target.name()),
            Err(error) => return Err(format!("{}: {error}", target.name()).into()),
        }
    }
    *targets = proxies.iter().map(|proxy| proxy.target).collect();
    Ok(proxies)
}

/// Starts this program as the origin.
async fn start_origin(dir: &Path) -> Result<(std::net::SocketAddr, Process)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("origin").arg(dir);
    started_address(command, &dir.join("origin.log")).await
}

/// Starts a program whose first line of output is its address.
async fn started_address(command: Command, log: &Path) -> Result<(std::net::SocketAddr, Process)> {
    let mut process = Process::start(command, log)?;
    for _ in 0..500 {
        let out = process.output();
        if let Some((address, _)) = out.split_once('\n') {
            return Ok((address.parse().map_err(|_| format!("no address: {out}"))?, process));
        }
        if process.try_wait()?.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(format!("{} has no address: {}", log.display(), process.output()).into())
}

/// The machine of the run: cores, processor model and load average.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("\t: ?");
    let model = model.trim_start_matches([' ', '\t', ':']);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?");
    format!("{cores} × {model}; load average {load} at the start")
}
