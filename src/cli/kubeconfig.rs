//! `jackstay kubeconfig`: moves the user's kubeconfig to the local endpoint, or back, and writes the
//! configuration of a jackstay that serves it.
//!
//! Reads everything, decides everything, refuses what is in the way; then writes, the kubeconfig
//! last, so that it never points at something that is not there. It connects to the apiservers to see
//! what their certificates name ([`apiservers`]); without a connection it says what it assumes.

mod apiservers;
mod revert;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, ValueEnum};

use self::apiservers::Apiservers;
use super::check;
use crate::config::{self, Overrides};
use crate::kubeconfig::moved::{self, ClientTrust, KeyChange, LocalEndpoint};
use crate::kubeconfig::setup::{self, Mode, OutputFile, SetupPlan, SetupRequest};
use crate::kubeconfig::tree::{Node, emit};
use crate::kubeconfig::{Error, KubeconfigFiles, KubeconfigPaths, entry_mut};
use crate::kubeconfig::{ResolvedContext, ServerUrl};
use crate::net::files::atomic_write::{self, PRIVATE};

/// Bad usage, or a kubeconfig that cannot be used.
const BAD_INPUT: u8 = 2;

#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools)] // each one is a flag of its own
pub(super) struct KubeconfigArgs {
    /// The local endpoint that clients are to use.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7443")]
    server: String,
    /// The kubeconfig to start from; default $KUBECONFIG (a list is merged), else ~/.kube/config.
    #[arg(long = "in", value_name = "FILE")]
    input: Option<PathBuf>,
    /// The context whose cluster moves; default the current one.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Where the moved kubeconfig goes; default `jackstay.kubeconfig` beside the input.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Change the input itself.
    #[arg(long, conflicts_with = "out")]
    in_place: bool,
    /// Replace files that exist and say something else.
    #[arg(long)]
    force: bool,
    /// Move back what was moved, in the input file.
    #[arg(long, conflicts_with_all = ["out", "in_place", "mode", "config_out", "local_ca"])]
    revert: bool,
    /// Write the configuration of jackstay as well: L4 (passthrough, needs nothing else) or L7
    /// (terminate, with a CA of this machine).
    #[arg(long, value_name = "MODE")]
    mode: Option<ModeArg>,
    /// Where that configuration goes, other files beside it; default `jackstay/jackstay.yaml`
    /// beside the moved kubeconfig.
    #[arg(long, value_name = "FILE")]
    config_out: Option<PathBuf>,
    /// Another apiserver of the cluster, beside the one in the kubeconfig. Repeatable; default those
    /// of the configuration that is there.
    #[arg(long = "upstream", value_name = "ADDR")]
    upstreams: Vec<String>,
    /// Also take the apiservers that the cluster names, which is asked for its `EndpointSlices` with
    /// the user's credential; an exec plugin is run for it.
    #[arg(long, conflicts_with_all = ["offline", "revert", "local_ca"])]
    discover: bool,
    /// Connect to nothing: certificates are not looked at, the cluster is not asked.
    #[arg(long)]
    offline: bool,
    /// The cluster's CA, where the kubeconfig names none.
    #[arg(long, value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// The CA that signs client certificates, where it is not the cluster's (terminate).
    #[arg(long, value_name = "FILE")]
    client_ca_file: Option<PathBuf>,
    /// The CA of a listener that exists already and terminates TLS.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mode", "config_out"])]
    local_ca: Option<PathBuf>,
    /// The name that every apiserver's certificate holds; default one that they share (passthrough).
    #[arg(long, value_name = "NAME")]
    tls_server_name: Option<String>,
    /// Name of this machine in the serving certificate; default its host name (terminate).
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    Passthrough,
    Terminate,
}

/// Runs the command.
pub(super) fn run(args: &KubeconfigArgs) -> ExitCode {
    let places = KubeconfigPaths::from_env(args.input.clone());
    let mut text = Vec::new();
    let result = perform(args, &places, &mut text);
    let _ = io::stdout().lock().write_all(&text);
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

enum Failure {
    /// What was given cannot be used.
    Input(String),
    /// A file could not be written.
    Write(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Input(error.to_string())
    }
}

fn perform(
    args: &KubeconfigArgs,
    places: &KubeconfigPaths,
    out: &mut Vec<u8>,
) -> Result<(), Failure> {
    let sources = KubeconfigFiles::load(places)?;
    if args.revert {
        return revert::run(args, &sources, out);
    }
    let access = ResolvedContext::resolve(&sources.merged(None), args.context.as_deref())?;
    let place = places_to_write(args, &sources, &access)?;
    let address = ServerUrl::parse(&args.server).map_err(|e| Failure::Input(format!("--{e}")))?;
    if !address.path.is_empty() || !args.server.contains(&format!(":{}", address.port)) {
        let text = format!("--server {}: write it as 127.0.0.1:7443", args.server);
        return Err(Failure::Input(text));
    }
    if args.local_ca.is_none()
        && address == (ServerUrl { path: String::new(), ..access.server.clone() })
    {
        let text = format!(
            "cluster {:?} is at {} already, and was not moved there by jackstay: requests would go \
             round in a circle; --server names the local endpoint",
            access.cluster, access.server
        );
        return Err(Failure::Input(text));
    }
    if args.discover && place.config.is_none() {
        let text = "--discover finds apiservers for a configuration: add --mode";
        return Err(Failure::Input(text.to_owned()));
    }
    let apiservers = apiservers::find(args, &access, place.config.as_deref())?;
    let plan = match &place.config {
        None => None,
        Some(file) => Some(setup::plan(&access, &request(args, &address, file, &apiservers)?)?),
    };
    let trust = trust(args, &access, &address, plan.as_ref(), &apiservers.names.client)?;
    let target = LocalEndpoint { address: address.address(), trust };

    let (text, changes) = moved_text(args, &sources, &access, &place, &target)?;
    let kubeconfig = OutputFile {
        path: place.kubeconfig.clone(),
        bytes: text.into_bytes(),
        mode: PRIVATE,
        what: "the kubeconfig",
    };
    let files: Vec<&OutputFile> =
        plan.iter().flat_map(|plan| &plan.files).chain([&kubeconfig]).collect();
    if let Some(config) = plan.iter().flat_map(|plan| &plan.files).last() {
        config::validate_text(&config.path, &String::from_utf8_lossy(&config.bytes))
            .map_err(|errors| Failure::Input(format!("nothing written:\n{errors}")))?;
    }
    refuse_to_overwrite(&files, args, &place)?;
    for file in files {
        if file.path == kubeconfig.path {
            // It must not lead to something that does not start.
            if let Some(config) = &place.config {
                check_config(config)?;
            }
        }
        write(file, out)?;
    }
    let notes = notes(&apiservers, plan.as_ref(), &target.trust);
    tell(&access, &place, &changes, &notes, out);
    if place.is_input && sources.iter().any(|s| s.path == place.kubeconfig && s.has_comments) {
        say(out, "note: its comments are gone, as after `kubectl config`");
    }
    Ok(())
}

/// Where everything goes.
struct Place {
    kubeconfig: PathBuf,
    config: Option<PathBuf>,
    /// The kubeconfig is the input itself.
    is_input: bool,
    /// kubectl finds it without being told.
    is_found: bool,
}

fn places_to_write(
    args: &KubeconfigArgs,
    sources: &KubeconfigFiles,
    access: &ResolvedContext,
) -> Result<Place, Failure> {
    let absolute = |path: &Path| {
        std::path::absolute(path).map_err(|e| Failure::Input(format!("{}: {e}", path.display())))
    };
    let kubeconfig = if args.in_place {
        let file = sources.file_of_cluster(&access.cluster).unwrap_or(sources.first());
        file.path.clone()
    } else {
        match &args.out {
            Some(file) => absolute(file)?,
            None => sources.first().path.with_file_name("jackstay.kubeconfig"),
        }
    };
    let config = match (&args.config_out, args.mode) {
        (Some(file), _) => Some(absolute(file)?),
        (None, Some(_)) => Some(directory_beside(&kubeconfig).join("jackstay.yaml")),
        (None, None) => None,
    };
    let is_found = args.in_place && args.input.is_none();
    Ok(Place { kubeconfig, config, is_input: args.in_place, is_found })
}

/// `jackstay` beside the kubeconfig; `jackstay.d` where a file has that name, as this program has.
fn directory_beside(kubeconfig: &Path) -> PathBuf {
    let directory = kubeconfig.with_file_name("jackstay");
    let is_file = std::fs::metadata(&directory).is_ok_and(|found| !found.is_dir());
    if is_file || directory == kubeconfig { directory.with_extension("d") } else { directory }
}

fn request(
    args: &KubeconfigArgs,
    address: &ServerUrl,
    config: &Path,
    apiservers: &Apiservers,
) -> Result<SetupRequest, Failure> {
    let absolute = |file: &Option<PathBuf>| {
        file.as_deref()
            .map(std::path::absolute)
            .transpose()
            .map_err(|e| Failure::Input(e.to_string()))
    };
    let host_name = || {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        name.trim().to_lowercase()
    };
    Ok(SetupRequest {
        mode: match args.mode {
            Some(ModeArg::Terminate) => Mode::Terminate,
            Some(ModeArg::Passthrough) | None => Mode::Passthrough,
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

/// What clients verify at the local endpoint.
fn trust(
    args: &KubeconfigArgs,
    access: &ResolvedContext,
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
    // Nothing is verified, or the URL holds the name already.
    let needless = access.insecure || name == address.host;
    Ok(ClientTrust::Apiserver((!needless).then(|| name.to_owned())))
}

/// The kubeconfig as it will be written, and what is different in its cluster.
fn moved_text(
    args: &KubeconfigArgs,
    sources: &KubeconfigFiles,
    access: &ResolvedContext,
    place: &Place,
    target: &LocalEndpoint,
) -> Result<(String, Vec<KeyChange>), Failure> {
    let of_cluster = sources.file_of_cluster(&access.cluster).filter(|_| place.is_input);
    let mut tree = match of_cluster {
        // kubectl, too, writes to the file that an entry came from.
        Some(source) => source.tree.clone(),
        None => sources.merged(place.kubeconfig.parent()),
    };
    if !place.is_input || args.context.is_some() {
        tree.set("current-context", Node::text(&access.context));
    }
    let cluster = entry_mut(&mut tree, "clusters", &access.cluster)
        .ok_or_else(|| Failure::Input(format!("no cluster {:?}", access.cluster)))?;
    let changes = moved::apply(cluster, &access.server, target);
    Ok((emit(&tree), changes))
}

/// A file that is there and says something else is somebody's, unless the user says otherwise.
fn refuse_to_overwrite(
    files: &[&OutputFile],
    args: &KubeconfigArgs,
    place: &Place,
) -> Result<(), Failure> {
    if let Some(obstacle) = files.iter().find_map(|file| obstacle(&file.path)) {
        return Err(Failure::Input(format!(
            "nothing written: {obstacle}; --out and --config-out name other places"
        )));
    }
    let mut in_the_way = Vec::new();
    for file in files {
        let allowed = args.force || (place.is_input && file.path == place.kubeconfig);
        match std::fs::read(&file.path) {
            Ok(bytes) if bytes != file.bytes && !allowed => {
                in_the_way.push(file.path.display().to_string());
            }
            _ => {}
        }
    }
    if in_the_way.is_empty() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "nothing written: {} there already and would change; --force replaces what is in the way{}",
        match in_the_way.as_slice() {
            [one] => format!("{one} is"),
            all => format!("{} are", all.join(", ")),
        },
        if args.out.is_none() { ", --out names another kubeconfig" } else { "" },
    )))
}

/// Why no file can be written at `path`, whatever `--force` says.
fn obstacle(path: &Path) -> Option<String> {
    if path.is_dir() {
        return Some(format!("{} is a directory", path.display()));
    }
    let nearest = path.ancestors().skip(1).find(|parent| parent.exists())?;
    let place = path.display();
    (!nearest.is_dir())
        .then(|| format!("{} is a file, so that {place} cannot be written", nearest.display()))
}

fn write(file: &OutputFile, out: &mut Vec<u8>) -> Result<(), Failure> {
    let shown = file.path.display();
    if std::fs::read(&file.path).is_ok_and(|bytes| bytes == file.bytes) {
        say(out, &format!("unchanged {shown}: {}", file.what));
        return Ok(());
    }
    let fail = |error: io::Error| {
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        Failure::Write(format!("cannot write {shown}: {reason}"))
    };
    if let Some(directory) = file.path.parent() {
        std::fs::create_dir_all(directory).map_err(fail)?;
    }
    atomic_write::replace(&file.path, &file.bytes, file.mode).map_err(fail)?;
    say(out, &format!("wrote {shown}: {}", file.what));
    Ok(())
}

/// What was written must start.
fn check_config(file: &Path) -> Result<(), Failure> {
    let fail = |errors: &config::ConfigErrors| {
        Failure::Input(format!("this configuration cannot run, the kubeconfig stays:\n{errors}"))
    };
    let loaded = config::load(file, [], &Overrides::default()).map_err(|e| fail(&e))?;
    let found = check::check_files(file, &loaded.config, SystemTime::now());
    if found.errors.is_empty() { Ok(()) } else { Err(fail(&config::ConfigErrors(found.errors))) }
}

fn say(out: &mut Vec<u8>, line: &str) {
    let _ = writeln!(out, "{line}");
}

/// What the user should know: of the files, of the endpoints, and of the name that clients verify.
fn notes(apiservers: &Apiservers, plan: Option<&SetupPlan>, trust: &ClientTrust) -> Vec<String> {
    let mut notes: Vec<String> = plan.iter().flat_map(|plan| plan.notes.clone()).collect();
    notes.extend(apiservers.notes.iter().chain(&apiservers.names.notes).cloned());
    if matches!(trust, ClientTrust::Apiserver(Some(_))) {
        notes.extend(apiservers.names.client_notes.iter().cloned());
    }
    notes
}

fn tell(
    access: &ResolvedContext,
    place: &Place,
    changes: &[KeyChange],
    notes: &[String],
    out: &mut Vec<u8>,
) {
    say(out, &format!("cluster {:?} of context {:?}:", access.cluster, access.context));
    for change in changes {
        say(out, &format!("  {change}"));
    }
    if changes.is_empty() {
        say(out, "  as before");
    }
    say(out, &format!("user {:?} stays as it is ({})", access.user, access.credential.describe()));
    for note in notes {
        say(out, &format!("note: {note}"));
    }
    if let Some(proxy) = &access.proxy_url {
        say(out, &format!("note: jackstay connects directly, not through the proxy {proxy}"));
    }
    say(out, "next:");
    if let Some(config) = &place.config {
        say(out, &format!("  jackstay run --config {} &", config.display()));
        say(out, "  jackstay status --wait");
    }
    let kubeconfig = place.kubeconfig.display();
    let option = if place.is_found { String::new() } else { format!(" --kubeconfig {kubeconfig}") };
    say(out, &format!("  kubectl{option} get nodes"));
    say(out, &format!("to go back: jackstay kubeconfig --revert --in {kubeconfig}"));
}
