//! jackstay beside what a user would pick instead: `HAProxy` and Envoy in front of the same HTTP/2
//! origin, with nginx at L4 too, in one run, because absolute figures of two runs or two machines
//! compare nothing.
//!
//! ```text
//! benches/setup                                            # once: haproxy, nginx, h2load, envoy
//! cargo bench --bench peers                                # about eight minutes
//! cargo bench --bench peers -- --quick --json peers.json   # about two
//! cargo bench --bench peers -- --layer l4                  # passthrough alone
//! cargo bench --bench peers -- --bursts 10 --check         # memory after a burst, about two
//! ```
//!
//! Everything is on loopback with 2 KiB answers, HTTP/2 and TLS 1.3 (AES-128-GCM) on both sides.
//! Requests come from h2load, 8 connections × 16 streams, with a bearer token; latency (one
//! connection, one stream, everyone on one core), bulk (one 200 MB body at a time) and watches (1,000 over 10
//! connections, and 2,000 at once over 25) come from our own client with a client certificate. At L4 only bytes pass (`raw`):
//! 10,000 idle flows, one bulk flow in each direction, and one byte there and back on new
//! connections, 16 at once. A peer that is not installed
//! is left out with a word about it. `JACKSTAY_BIN` measures another jackstay binary, and
//! `JACKSTAY_BENCH_BEFORE` one more beside it: what a change costs is seen in one run alone.

mod burst;
mod client;
mod h2load;
mod origin;
mod passthrough;
mod phases;
mod pin;
mod pki;
mod process;
mod proxies;
mod raw;
mod report;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use clap::Parser;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    phases::{Bench, Plan},
    pki::Pki,
    process::{Process, find_program, ticks_per_second},
    proxies::{Layer, Proxy, Setting, Target},
    report::{Metric, Samples},
};

/// An error is for the person who reads the terminal; nobody here acts on its kind.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A run that takes longer than this has a hang somewhere.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Compares jackstay with `HAProxy` and Envoy in front of one origin.
#[derive(Parser)]
struct Args {
    /// About two minutes instead of eight.
    #[arg(long)]
    quick: bool,
    /// Also write medians, ratios and samples here.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure these alone.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Target::PROXIES)]
    only: Vec<Target>,
    /// Measure at these layers alone.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Layer::L7, Layer::L4])]
    layer: Vec<Layer>,
    /// Only measure memory after a burst of watches, on this many new processes of jackstay.
    #[arg(long, value_name = "RUNS", conflicts_with_all = ["quick", "only", "layer"])]
    bursts: Option<usize>,
    /// Fail unless jackstay was measured and meets every bar.
    #[arg(long)]
    check: bool,
    /// Given by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(clap::Subcommand)]
enum Role {
    /// The origin, as a process of its own.
    #[command(hide = true)]
    Origin { dir: PathBuf },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.role {
        Some(Role::Origin { dir }) => origin::run(dir).map(|()| true),
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

/// Runs it all under a limit and under signals, so that every way out drops, and thereby kills,
/// every child.
fn supervise(args: &Args) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            outcome = run(args) => outcome,
            () = tokio::time::sleep(LIMIT) => Err(format!("not done in {LIMIT:?}").into()),
            _ = interrupt.recv() => Err("interrupted".into()),
            _ = terminate.recv() => Err("terminated".into()),
        }
    })
}

async fn run(args: &Args) -> Result<bool> {
    let flows = passthrough::allow_descriptors()?; // for all that is started from here on
    let dir = tempfile::Builder::new().prefix("jackstay-peers-").tempdir()?;
    let pki = Pki::create(dir.path())?;
    let tls = pki.client_config()?;
    let (origin, origin_process) = start_origin(dir.path()).await?;
    let setting = Setting { dir: dir.path(), pki: &pki, origin, flows, tls: &tls };
    let mut samples = Samples::default();

    if let Some(runs) = args.bursts {
        bursts(&setting, &[Target::Jackstay], runs, &mut samples).await?;
        write_json(args, &machine(), &samples)?;
        return Ok(!args.check || samples.meets(Metric::BurstMemory) == Some(true));
    }

    let Some(h2load) = find_program([Path::new("h2load")]) else {
        return Err("no h2load: run benches/setup".into());
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
        ticks_per_second: ticks_per_second()?,
        flows,
    };

    let mut targets = args.only.clone();
    if std::env::var_os("JACKSTAY_BENCH_BEFORE").is_some() && !targets.contains(&Target::Before) {
        targets.push(Target::Before);
    }
    targets.retain(|&target| match target.program() {
        Ok(_) => true,
        Err(reason) => {
            println!("{} is left out: {reason}", target.name());
            false
        }
    });
    let (mut met, mut bounded) = (true, true);
    for layer in [Layer::L7, Layer::L4] {
        if !args.layer.contains(&layer) {
            continue;
        }
        let mut targets: Vec<_> =
            targets.iter().copied().filter(|target| target.works_at(layer)).collect();
        eprintln!("{layer:?}: idle, and idle watches or flows");
        let proxies = start_all(&setting, &mut targets, layer, true).await?;
        match layer {
            Layer::L7 => bench.idle(&proxies, &mut samples).await?,
            Layer::L4 => bench.idle_flows(&proxies, &mut samples).await?,
        }
        drop(proxies);
        if layer == Layer::L7 {
            bursts(&setting, &targets, bench.plan.bursts, &mut samples).await?;
        }
        // New processes: what the watches made them allocate must not colour the rest.
        let proxies = start_all(&setting, &mut targets, layer, false).await?;
        match layer {
            Layer::L7 => bench.rounds(&proxies, &mut samples).await?,
            Layer::L4 => bench.flow_rounds(&proxies, &mut samples).await?,
        }
        drop(proxies);
        println!("\n{}", samples.table(layer));
        met &= samples.meets_all(layer);
        bounded &= report_figures(&samples.figures(layer))?;
    }

    write_json(args, &machine, &samples)?;
    Ok(bounded && (!args.check || met))
}

/// Writes figures to the report that `JACKSTAY_REPORT` names (`tests/report` begins it), and says
/// whether all are within their bounds: four times the bar, since a short run on a noisy machine is
/// no measurement, and the bar itself with `JACKSTAY_STRICT=1`. Without a report nothing is bounded.
fn report_figures(figures: &[(&str, f64, f64)]) -> Result<bool> {
    let Some(path) = std::env::var_os("JACKSTAY_REPORT") else { return Ok(true) };
    let strict = std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1");
    let mut report = fs::OpenOptions::new().append(true).open(path)?;
    let mut all = true;
    for (name, measured, bar) in figures {
        let (ratio, bound) = (measured / bar, if strict { *bar } else { 4.0 * bar });
        let row = format!("| bench | {name} | {measured:.2} | {bar} | {ratio:.2} | {bound} |\n");
        report.write_all(row.as_bytes())?;
        if *measured > bound {
            eprintln!("{name}: {measured:.2}, bound {bound}, bar {bar}");
            all = false;
        }
    }
    Ok(all)
}

fn write_json(args: &Args, machine: &str, samples: &Samples) -> Result<()> {
    if let Some(file) = &args.json {
        let all = json!({ "machine": machine, "quick": args.quick, "metrics": samples.json() });
        fs::write(file, serde_json::to_string_pretty(&all)? + "\n")?;
    }
    Ok(())
}

/// Memory after a burst: of jackstay in each of `runs` new processes, since one good run proves
/// nothing; of a peer in one.
async fn bursts(
    setting: &Setting<'_>,
    targets: &[Target],
    runs: usize,
    samples: &mut Samples,
) -> Result<()> {
    for &target in targets {
        let runs = if matches!(target, Target::Before | Target::Jackstay) { runs } else { 1 };
        for run in 1..=runs {
            let Some(each) = target.unless_left_out(burst::run(setting, target).await)? else {
                break;
            };
            println!("{}: {each:.1} KiB per idle watch after burst {run} of {runs}", target.name());
            samples.add(Metric::BurstMemory, target, each);
        }
    }
    Ok(())
}

/// Starts the proxies. At the first time, one that does not come up is left out with its reason;
/// later that is an error.
async fn start_all(
    setting: &Setting<'_>,
    targets: &mut Vec<Target>,
    layer: Layer,
    first: bool,
) -> Result<Vec<Proxy>> {
    let mut proxies = Vec::new();
    for target in targets.clone() {
        match setting.start(target, layer).await {
            Ok(proxy) => proxies.push(proxy),
            Err(error) if first => println!("{} is left out: {error}", target.name()),
            Err(error) => return Err(format!("{}: {error}", target.name()).into()),
        }
    }
    *targets = proxies.iter().map(|proxy| proxy.target).collect();
    Ok(proxies)
}

/// This program again, as the origin; it says where it listens.
async fn start_origin(dir: &Path) -> Result<(std::net::SocketAddr, Process)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("origin").arg(dir);
    let mut process = Process::start(command, &dir.join("origin.log"))?;
    for _ in 0..500 {
        let out = process.output();
        if let Some((address, _)) = out.split_once('\n') {
            return Ok((address.parse().map_err(|_| format!("origin: {out}"))?, process));
        }
        if process.ended()?.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Err(format!("the origin did not start: {}", process.output()).into())
}

/// What the figures were made on, for whoever reads them later.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let read = |file: &str| fs::read_to_string(file).unwrap_or_default();
    let cpu = read("/proc/cpuinfo");
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("\t: ?");
    let model = model.trim_start_matches([' ', '\t', ':']);
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("?");
    format!("{cores} × {model}; load average at the start {load}")
}
