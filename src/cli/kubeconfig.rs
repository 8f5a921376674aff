//! `jackstay kubeconfig`: writes a kubeconfig that points at jackstay, and the configuration of a
//! jackstay for it; or restores the original kubeconfig.
//!
//! The command reads everything, decides, and refuses before it writes. It writes the kubeconfig
//! last, so that the kubeconfig never points at a missing configuration. It connects to the
//! apiservers to read the names in their certificates (`apiservers`); without a connection it
//! prints its assumptions.

mod apiservers;
mod args;
mod output;
mod revert;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use self::apiservers::Apiservers;
pub(super) use self::args::KubeconfigArgs;
use self::args::{Failure, ModeArg};
use self::output::{Destinations, check_configuration, refuse_to_overwrite, write_file};
use crate::config;
use crate::kubeconfig::rewrite::{ClientTrust, KeyChange, LocalEndpoint, point_at};
use crate::kubeconfig::setup::{self, OutputFile, SetupMode, SetupPlan, SetupRequest};
use crate::kubeconfig::{
    KubeconfigFiles, KubeconfigPaths, ResolvedContext, ServerUrl, find_cluster_mut, kubeconfig_yaml,
};
use crate::net::files::PRIVATE;

/// Exit code for wrong usage, and for a kubeconfig that cannot be used.
const BAD_INPUT: u8 = 2;

/// Runs the command.
pub(super) fn run(args: &KubeconfigArgs) -> ExitCode {
    let paths = KubeconfigPaths::from_env(args.input.clone());
    let mut out = String::new();
    let result = perform(args, &paths, &mut out);
    let _ = io::stdout().lock().write_all(out.as_bytes());
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(error)) => {
            eprintln!("{error}");
            ExitCode::from(BAD_INPUT)
        }
        Err(Failure::Write(error)) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn perform(
    args: &KubeconfigArgs,
    paths: &KubeconfigPaths,
    out: &mut String,
) -> Result<(), Failure> {
    let files = KubeconfigFiles::load(paths)?;
    if args.revert {
        return revert::run(args, &files, out);
    }
    let context = ResolvedContext::resolve(&files.merged(None)?, args.context.as_deref())?;
    let destinations = Destinations::new(args, &files, &context)?;
    let address = local_address(args, &context)?;
    if args.discover && destinations.config.is_none() {
        return Err(Failure::input("--discover finds apiservers for a configuration: add --mode"));
    }
    let apiservers = apiservers::find(args, &context, destinations.config.as_deref())?;
    let plan = match &destinations.config {
        None => None,
        Some(file) => Some(setup::plan(&context, &request(args, &address, file, &apiservers)?)?),
    };
    let trust = trust(args, &context, &address, plan.as_ref(), &apiservers.names.client)?;
    let endpoint = LocalEndpoint { address: address.address(), trust };

    let (text, changes) = rewritten(args, &files, &context, &destinations, &endpoint)?;
    let kubeconfig = OutputFile {
        path: destinations.kubeconfig.clone(),
        bytes: text.into_bytes(),
        mode: PRIVATE,
        what: "the kubeconfig",
    };
    let planned = plan.as_ref().map_or(&[][..], |plan| &plan.files);
    if let Some(config) = planned.last() {
        config::validate_text(&config.path, &String::from_utf8_lossy(&config.bytes))
            .map_err(|errors| Failure::Input(format!("nothing written:\n{errors}")))?;
    }
    let outputs: Vec<&OutputFile> = planned.iter().chain([&kubeconfig]).collect();
    refuse_to_overwrite(&outputs, args, &destinations)?;
    for file in planned {
        write_file(file, out)?;
    }
    if let Some(config) = &destinations.config {
        check_configuration(config)?;
    }
    write_file(&kubeconfig, out)?;
    let notes = notes(&apiservers, plan.as_ref(), &endpoint.trust);
    print_result(&context, &destinations, &changes, &notes, out);
    let had_comments = files.iter().any(|file| file.path == kubeconfig.path && file.has_comments);
    if args.in_place && had_comments {
        let _ = writeln!(out, "note: its comments are gone, as after `kubectl config`");
    }
    Ok(())
}

/// The local endpoint, which must differ from the apiserver of the context.
fn local_address(args: &KubeconfigArgs, context: &ResolvedContext) -> Result<ServerUrl, Failure> {
    let address =
        ServerUrl::parse(&args.server).map_err(|error| Failure::Input(format!("--{error}")))?;
    if !address.path.is_empty() || !args.server.contains(&format!(":{}", address.port)) {
        let text = format!("--server {}: write it as 127.0.0.1:7443", args.server);
        return Err(Failure::Input(text));
    }
    let apiserver = ServerUrl { path: String::new(), ..context.server.clone() };
    if args.local_ca.is_none() && address == apiserver {
        return Err(Failure::Input(format!(
            "cluster {:?} is at {} already, and the kubeconfig does not say where it was before: \
             requests would loop; --server names the local endpoint",
            context.cluster, context.server
        )));
    }
    Ok(address)
}

fn request(
    args: &KubeconfigArgs,
    address: &ServerUrl,
    config: &Path,
    apiservers: &Apiservers,
) -> Result<SetupRequest, Failure> {
    let absolute = |file: &Option<PathBuf>| {
        file.as_deref().map(std::path::absolute).transpose().map_err(Failure::input)
    };
    let host_name = || {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        name.trim().to_lowercase()
    };
    Ok(SetupRequest {
        mode: match args.mode {
            Some(ModeArg::Terminate) => SetupMode::Terminate,
            Some(ModeArg::Passthrough) | None => SetupMode::Passthrough,
        },
        host: address.host.clone(),
        port: address.port,
        config: config.to_owned(),
        upstreams: apiservers.upstreams.clone(),
        server_name: apiservers.names.upstream.clone(),
        ca_file: absolute(&args.ca_file)?,
        client_ca_file: absolute(&args.client_ca_file)?,
        node_name: args.node_name.clone().unwrap_or_else(host_name),
        now: SystemTime::now(),
    })
}

/// How clients verify the certificate at the local endpoint; `name` is in the apiservers'
/// certificates.
fn trust(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    address: &ServerUrl,
    plan: Option<&SetupPlan>,
    name: &str,
) -> Result<ClientTrust, Failure> {
    if let Some(ca) = plan.and_then(|plan| plan.local_ca.clone()) {
        return Ok(ClientTrust::Local(ca));
    }
    if let Some(file) = &args.local_ca {
        let ca = std::fs::read(file)
            .map_err(|e| Failure::Input(format!("cannot read {}: {e}", file.display())))?;
        return Ok(ClientTrust::Local(ca));
    }
    let needs_name = !context.insecure && name != address.host;
    Ok(ClientTrust::Apiserver(needs_name.then(|| name.to_owned())))
}

/// The text of the new kubeconfig, and the changes to its cluster.
fn rewritten(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    context: &ResolvedContext,
    destinations: &Destinations,
    endpoint: &LocalEndpoint,
) -> Result<(String, Vec<KeyChange>), Failure> {
    let file = files.file_of_cluster(&context.cluster).filter(|_| args.in_place);
    let mut config = match file {
        // As kubectl: an entry is written to the file that it comes from.
        Some(file) => file.config.clone(),
        None => files.merged(destinations.kubeconfig.parent())?,
    };
    if !args.in_place || args.context.is_some() {
        config.current_context = Some(context.context.clone());
    }
    let cluster = find_cluster_mut(&mut config, &context.cluster)
        .ok_or_else(|| Failure::Input(format!("no cluster {:?}", context.cluster)))?;
    let changes = point_at(cluster, &context.server, endpoint);
    Ok((kubeconfig_yaml(&config)?, changes))
}

/// The notes about the planned files, the apiservers, and the name that clients verify.
fn notes(apiservers: &Apiservers, plan: Option<&SetupPlan>, trust: &ClientTrust) -> Vec<String> {
    let mut notes: Vec<String> = plan.iter().flat_map(|plan| plan.notes.clone()).collect();
    notes.extend(apiservers.notes.iter().chain(&apiservers.names.notes).cloned());
    if matches!(trust, ClientTrust::Apiserver(Some(_))) {
        notes.extend(apiservers.names.client_notes.iter().cloned());
    }
    notes
}

/// Prints the changes, the notes and the next commands.
fn print_result(
    context: &ResolvedContext,
    destinations: &Destinations,
    changes: &[KeyChange],
    notes: &[String],
    out: &mut String,
) {
    let mut line = |text: String| {
        let _ = writeln!(out, "{text}");
    };
    line(format!("cluster {:?} of context {:?}:", context.cluster, context.context));
    for change in changes {
        line(format!("  {change}"));
    }
    if changes.is_empty() {
        line("  as before".to_owned());
    }
    let credential = context.credential.describe();
    line(format!("user {:?} stays as it is ({credential})", context.user));
    for note in notes {
        line(format!("note: {note}"));
    }
    if let Some(proxy) = &context.proxy_url {
        line(format!("note: jackstay connects directly, not through the proxy {proxy}"));
    }
    line("next:".to_owned());
    if let Some(config) = &destinations.config {
        line(format!("  jackstay run --config {} &", config.display()));
        line("  jackstay status --wait".to_owned());
    }
    let kubeconfig = destinations.kubeconfig.display();
    let option = if destinations.is_default_for_kubectl {
        String::new()
    } else {
        format!(" --kubeconfig {kubeconfig}")
    };
    line(format!("  kubectl{option} get nodes"));
    line(format!("to go back: jackstay kubeconfig --revert --in {kubeconfig}"));
}
