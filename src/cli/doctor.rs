//! `jackstay doctor`: examines the way to the apiservers and says what is wrong with it.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::admin_client::DEFAULT_ADMIN;
use super::status;
use crate::config::{self, CertPaths, Overrides, parse_duration};
use crate::doctor::dns::Resolver;
use crate::doctor::target::{self, ExecPlugins, Files, Place, Plan, Target, Trust};
use crate::doctor::{examine, findings, observations::Source, report};
use crate::kubeconfig::{KubeconfigFiles, KubeconfigPaths};
use crate::kubeconfig::{ResolvedContext, ServerUrl};
use crate::observe::counted;

/// Bad usage, or an input that cannot be used.
const BAD_INPUT: u8 = 2;

const HELP: &str = "\
Exit codes: 0 no problem, 1 problems, or the diagnosis cannot run, 2 bad
usage or an input that cannot be used.

Examples:
  jackstay doctor
  jackstay doctor --config /etc/jackstay/jackstay.yaml
  jackstay doctor --endpoint 10.0.0.1:6443 --ca-file ca.crt -o json";

/// Arguments of `jackstay doctor`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(super) struct DoctorArgs {
    /// Examine what this configuration names.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kubeconfig", "endpoints"])]
    config: Option<PathBuf>,
    /// Examine the cluster of this kubeconfig; default $KUBECONFIG, else ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Its context; default the current one.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Examine this apiserver: beside the one in the kubeconfig if one is named, else alone.
    /// Repeatable.
    #[arg(long = "endpoint", value_name = "ADDR")]
    endpoints: Vec<String>,
    /// The CA of the endpoints.
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// The name their certificates are verified against; default the host of each.
    #[arg(long, value_name = "NAME")]
    server_name: Option<String>,
    /// A client certificate to show them.
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,
    /// Its key.
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// A bearer token to send them.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Where jackstay is to listen, if no configuration says so. Repeatable.
    #[arg(long = "listen", value_name = "ADDR", conflicts_with = "config")]
    listen: Vec<SocketAddr>,
    /// How long to look.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    duration: Duration,
    /// Text for people, or JSON.
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

fn duration(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&duration) {
        Ok(duration)
    } else {
        Err("from 1s to 1h".to_owned())
    }
}

/// Runs the command: 0 nothing is wrong, 1 something is, 2 it could not be asked.
pub(super) fn run(args: &DoctorArgs) -> ExitCode {
    let mut plan = match plan(args) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(BAD_INPUT);
        }
    };
    if args.output == Output::Text {
        let seconds = args.duration.as_secs();
        eprintln!("examining {} for {seconds} s …", counted(plan.targets.len(), "endpoint"));
    }
    let notes = std::mem::take(&mut plan.notes);
    let seen = match examine::run(plan, Resolver::of_system(), args.duration) {
        Ok(seen) => seen,
        Err(error) => {
            eprintln!("cannot examine: {error}");
            return ExitCode::FAILURE;
        }
    };
    let found = findings::judge(&seen);
    let text = match args.output {
        Output::Text => report::text(&seen, &found, &notes),
        Output::Json => format!("{:#}\n", report::json(&seen, &found, &notes)),
    };
    let _ = io::stdout().lock().write_all(text.as_bytes());
    if findings::is_wrong(&found) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn plan(args: &DoctorArgs) -> Result<Plan, String> {
    if let Some(file) = &args.config {
        return of_config(file);
    }
    let mut plan = Plan::default();
    let files = Files {
        ca: args.ca_file.clone(),
        certificate: match (&args.cert_file, &args.key_file) {
            (Some(cert), Some(key)) => {
                Some(CertPaths { cert_file: cert.clone(), key_file: key.clone() })
            }
            _ => None,
        },
        token: args.token_file.clone(),
    };
    let mut trust = Trust::of_files(&files)?;
    if args.kubeconfig.is_some() || args.endpoints.is_empty() {
        let sources = KubeconfigFiles::load(&KubeconfigPaths::from_env(args.kubeconfig.clone()));
        let tree = sources.map_err(|e| e.to_string())?.merged(None);
        let access =
            ResolvedContext::resolve(&tree, args.context.as_deref()).map_err(|e| e.to_string())?;
        let of_access = Trust::of_access(&access, ExecPlugins::Run, &mut plan.notes)?;
        let name = access.verified_name();
        plan.targets.push(Target::new(&access.server, Source::Given, Some(name), &of_access)?);
        if args.ca_file.is_none() {
            trust = of_access;
        }
    } else if args.ca_file.is_none() {
        plan.notes.push(
            "no --ca-file: the certificates are shown and not verified, no credential is sent"
                .to_owned(),
        );
    }
    for endpoint in &args.endpoints {
        let server = ServerUrl::parse(endpoint).map_err(|e| format!("--endpoint: {e}"))?;
        let name = args.server_name.as_deref();
        plan.targets.push(Target::new(&server, Source::Given, name, &trust)?);
    }
    let place = |bind: &SocketAddr| Place { what: "jackstay".into(), bind: *bind, freebind: false };
    plan.places = args.listen.iter().map(place).collect();
    if let (false, Ok(admin)) = (plan.places.is_empty(), DEFAULT_ADMIN.parse()) {
        plan.running = running(admin);
    }
    Ok(plan)
}

/// Where the jackstay listens whose admin endpoint this is; nowhere if there is none.
fn running(admin: SocketAddr) -> Vec<SocketAddr> {
    let Ok(status) = status::fetch(admin) else { return Vec::new() };
    let Some(listeners) = status["listeners"].as_array() else { return Vec::new() };
    let binds = listeners.iter().filter_map(|listener| listener["bind"].as_array()).flatten();
    let addresses = binds.filter_map(|bind| bind.as_str()?.parse().ok());
    addresses.chain([admin]).collect()
}

/// A configuration that cannot be used is a finding, not bad usage: it is why one asks.
fn of_config(file: &std::path::Path) -> Result<Plan, String> {
    if let Err(error) = std::fs::metadata(file) {
        return Err(format!("cannot read {}: {error}", file.display()));
    }
    match config::load(file, config::environment(), &Overrides::default()) {
        Ok(loaded) => Ok(match target::of_config(&loaded.config) {
            Ok(plan) => Plan { running: running(loaded.config.admin.bind), ..plan },
            Err(error) => Plan { configuration: vec![error], ..Plan::default() },
        }),
        Err(errors) => {
            let configuration = errors.0.iter().map(ToString::to_string).collect();
            Ok(Plan { configuration, ..Plan::default() })
        }
    }
}
