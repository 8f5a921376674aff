//! `jackstay doctor`: diagnoses the path to the apiservers.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::Args;
use jackstay_config as config;
use jackstay_config::{CertPaths, Overrides};
use jackstay_core::discovery::address::{AddressError, EndpointAddress};
use jackstay_core::quantity::quantity;
use jackstay_core::request::path_prefix::PathPrefixError;
use jackstay_kubeconfig::{
    KubeconfigError, KubeconfigFiles, KubeconfigPaths, ResolveError, ResolvedContext, ServerUrl,
    ServerUrlError,
};

use super::check;
use crate::admin_client::{DEFAULT_ADMIN, fetch_status};
use crate::doctor::dns::Resolver;
use crate::doctor::observations::EndpointSource;
use crate::doctor::target::{
    self, ApiRoot, CredentialFiles, ExaminationPlan, ExecPlugins, PlannedListener, Target,
    TargetError, Trust, root_of_context, root_of_url,
};
use crate::doctor::{examine, findings, report};
use crate::install::kubelet::Kubelet;
use crate::install::{bypass, kubelet};
use crate::options::{
    DEFAULT_CONFIG, DurationFlagError, EXIT_NO_ANSWER, EXIT_USAGE, OutputArgs, OutputFormat,
    parse_flag_duration,
};
use crate::systemd::Systemd;

/// The directory of static pods of kubeadm.
const STATIC_PODS: &str = "/etc/kubernetes/manifests";

const HELP: &str = "\
Without --config and --endpoint the cluster of the kubeconfig is examined.

Exit codes: 0 no problem, 1 problems, 2 bad usage or an input that cannot
be used, 3 nothing could be examined.

Examples:
  jackstay doctor
  jackstay doctor --config /etc/jackstay/jackstay.yaml
  jackstay doctor --endpoint 10.0.0.1:6443 --ca-file ca.crt -o json";

/// Arguments of `jackstay doctor`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct DoctorArgs {
    /// Examine the endpoints and listeners of this configuration [default file:
    /// /etc/jackstay/jackstay.yaml].
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = DEFAULT_CONFIG,
          conflicts_with_all = ["kubeconfig", "endpoints"])]
    config: Option<PathBuf>,
    /// Examine the cluster of this kubeconfig [default: $KUBECONFIG, else ~/.kube/config].
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: the current one].
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Examine this apiserver, in addition to the one of --kubeconfig if that is given. Repeatable.
    #[arg(long = "endpoint", value_name = "ADDR")]
    endpoints: Vec<String>,
    /// CA that verifies the certificates of the endpoints.
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Name that the certificates of the endpoints must contain [default: the host of each].
    #[arg(long = "tls-server-name", alias = "server-name", value_name = "NAME")]
    server_name: Option<String>,
    /// Client certificate for the endpoints.
    #[arg(long, value_name = "FILE", requires = "key_file")]
    cert_file: Option<PathBuf>,
    /// Key of the client certificate.
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    key_file: Option<PathBuf>,
    /// Bearer token for the endpoints.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Address on which jackstay will listen, without a configuration. Repeatable.
    #[arg(long = "listen", value_name = "ADDR", conflicts_with = "config")]
    listen: Vec<SocketAddr>,
    /// Duration of the examination; a number without a unit is seconds.
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = parse_time)]
    duration: Duration,
    #[command(flatten)]
    output: OutputArgs,
}

fn parse_time(text: &str) -> Result<Duration, DurationFlagError> {
    let duration = parse_flag_duration(text).map_err(DurationFlagError::Unit)?;
    if (Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&duration) {
        Ok(duration)
    } else {
        Err(DurationFlagError::OutsideLimits("from 1s to 1h"))
    }
}

/// Runs the command.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let kubelet = kubelet::find(Path::new("/proc"), &Systemd).ok();
    let mut plan = match plan(args, kubelet.as_ref()) {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    // That of kubeadm if no kubelet runs.
    let static_pods = kubelet.and_then(|kubelet| kubelet.static_pods);
    plan.static_pods = Some(static_pods.unwrap_or_else(|| STATIC_PODS.into()));
    let format = args.output.format;
    if format == OutputFormat::Text {
        let (seconds, more) = (args.duration.as_secs(), examine::OVERTIME.as_secs());
        eprintln!(
            "examining {} for {seconds} s, and up to {more} s more if one does not answer …",
            quantity(plan.targets.len(), "endpoint")
        );
    }
    let notes = std::mem::take(&mut plan.notes);
    let observations = match examine::run(plan, Resolver::of_system(), args.duration) {
        Ok(observations) => observations,
        Err(error) => {
            eprintln!("cannot examine: {error}");
            return ExitCode::from(EXIT_NO_ANSWER);
        }
    };
    let findings = findings::diagnose(&observations);
    let value = report::json(&observations, &findings, &notes);
    format.print(&value, || report::text(&observations, &findings, &notes));
    if findings::has_problems(&findings) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Why nothing can be examined.
enum DoctorError {
    Config(PathBuf, io::Error),
    Kubeconfig(KubeconfigError),
    Context(ResolveError),
    Target(TargetError),
    EndpointUrl(ServerUrlError),
    EndpointPath(PathPrefixError),
    EndpointAddress(AddressError),
}

impl fmt::Display for DoctorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(file, error) => write!(f, "cannot read {}: {error}", file.display()),
            Self::Kubeconfig(error) => error.fmt(f),
            Self::Context(error) => error.fmt(f),
            Self::Target(error) => error.fmt(f),
            Self::EndpointUrl(error) => write!(f, "--endpoint: {error}"),
            Self::EndpointPath(error) => write!(f, "--endpoint: the path {error}"),
            Self::EndpointAddress(error) => write!(f, "--endpoint: {error}"),
        }
    }
}

impl From<TargetError> for DoctorError {
    fn from(error: TargetError) -> Self {
        Self::Target(error)
    }
}

/// Decides what to examine. `kubelet` is that of this node.
fn plan(args: &DoctorArgs, kubelet: Option<&Kubelet>) -> Result<ExaminationPlan, DoctorError> {
    if let Some(file) = &args.config {
        return plan_of_config(file, kubelet);
    }
    let mut plan = ExaminationPlan::default();
    let pair = args.cert_file.clone().zip(args.key_file.clone());
    let mut trust = Trust::of_files(&CredentialFiles {
        ca: args.ca_file.clone(),
        certificate: pair.map(|(cert_file, key_file)| CertPaths { cert_file, key_file }),
        token: args.token_file.clone(),
    })?;
    if args.kubeconfig.is_some() || args.endpoints.is_empty() {
        let context = kubeconfig_context(args)?;
        plan.notes.extend(context.proxy_note());
        let context_trust = Trust::of_context(&context, ExecPlugins::Run, &mut plan.notes)?;
        let name = Some(context.verified_name());
        let target = Target::new(&context.server, EndpointSource::Given, name, &context_trust)?;
        plan.targets.push(target.with_root(root_of_context(&context)));
        if args.ca_file.is_none() {
            trust = context_trust;
        }
    } else if args.ca_file.is_none() {
        plan.notes.push(
            "no --ca-file: certificates are shown and not verified, no credential is sent"
                .to_owned(),
        );
    }
    for endpoint in &args.endpoints {
        let (server, root) = parse_endpoint(endpoint)?;
        let name = args.server_name.as_deref();
        let target = Target::new(&server, EndpointSource::Given, name, &trust)?;
        plan.targets.push(target.with_root(root));
    }
    let listener = |bind: &SocketAddr| PlannedListener {
        name: "jackstay".into(),
        bind: *bind,
        freebind: false,
    };
    plan.listeners = args.listen.iter().map(listener).collect();
    if !plan.listeners.is_empty() {
        plan.running = running_addresses(DEFAULT_ADMIN);
    }
    Ok(plan)
}

/// Reads the address of an endpoint as a configuration does, or a URL as a kubeconfig does.
fn parse_endpoint(text: &str) -> Result<(ServerUrl, ApiRoot), DoctorError> {
    if text.contains("://") {
        let server = ServerUrl::parse(text).map_err(DoctorError::EndpointUrl)?;
        let root = root_of_url(text, &server.path).map_err(DoctorError::EndpointPath)?;
        return Ok((server, root));
    }
    let EndpointAddress { host, port } =
        EndpointAddress::parse(text).map_err(DoctorError::EndpointAddress)?;
    Ok((ServerUrl { host, port, path: String::new() }, ApiRoot::default()))
}

fn kubeconfig_context(args: &DoctorArgs) -> Result<ResolvedContext, DoctorError> {
    let files = KubeconfigFiles::load(&KubeconfigPaths::from_env(args.kubeconfig.clone()))
        .map_err(DoctorError::Kubeconfig)?;
    files.resolve(args.context.as_deref()).map_err(DoctorError::Context)
}

/// The addresses on which the jackstay with this admin endpoint listens; empty if none answers.
fn running_addresses(admin: SocketAddr) -> Vec<SocketAddr> {
    let Ok(status) = fetch_status(admin) else { return Vec::new() };
    let Some(listeners) = status["listeners"].as_array() else { return Vec::new() };
    let binds = listeners.iter().filter_map(|listener| listener["bind"].as_array()).flatten();
    let addresses = binds.filter_map(|bind| bind.as_str()?.parse().ok());
    addresses.chain([admin]).collect()
}

/// Plans the examination of a configuration. A file that cannot be read is bad usage; an invalid
/// configuration is a finding.
fn plan_of_config(file: &Path, kubelet: Option<&Kubelet>) -> Result<ExaminationPlan, DoctorError> {
    if let Err(error) = std::fs::metadata(file) {
        return Err(DoctorError::Config(file.to_owned(), error));
    }
    let invalid = |configuration_errors| ExaminationPlan {
        configuration_errors,
        ..ExaminationPlan::default()
    };
    Ok(match config::load(file, config::environment(), &Overrides::default()) {
        Ok(loaded) => match target::of_config(&loaded.config) {
            Ok(plan) => {
                let mut notes =
                    check::check_files(file, &loaded.config, SystemTime::now()).warnings;
                notes.extend(kubelet.and_then(bypass::note));
                let running = running_addresses(loaded.config.admin.bind);
                ExaminationPlan { running, notes, ..plan }
            }
            Err(error) => invalid(vec![error.to_string()]),
        },
        Err(errors) => invalid(errors.0.iter().map(ToString::to_string).collect()),
    })
}
