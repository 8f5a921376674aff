//! `jackstay kubeconfig`: writes a kubeconfig that points at jackstay, and the configuration of a
//! jackstay for it; or restores the original kubeconfig (`--revert`); or renews the local CA (`--renew`).
//!
//! The command makes and checks every file under a temporary name before the first file changes
//! (`output`). It writes the kubeconfig last, so that the kubeconfig never points at a missing configuration. It
//! connects to the apiservers to read the names in their certificates (`apiservers`); without a connection it prints
//! its assumptions.

// `jackstay install` uses a part, and needs the feature `doctor`.
#![cfg_attr(not(feature = "doctor"), allow(dead_code, unused_imports))]

mod apiservers;
mod args;
mod client_certificate;
mod listener;
mod lock;
mod output;
mod readers;
mod renew;
mod report;

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use jackstay_config::{self as config, Overrides};
use jackstay_core::discovery::address::is_dns_name;
use jackstay_kubeconfig::{
    KubeconfigFiles, KubeconfigPaths, ProxyEnvironment, ResolvedContext, ServerUrl,
    find_cluster_mut, kubeconfig_yaml, recorded_configuration, recorded_original,
};
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files;

use self::apiservers::Apiservers;
pub use self::args::KubeconfigArgs;
pub(super) use self::args::NodeSetup;
use self::listener::UserPath;
pub(super) use self::output::Failure;
use self::output::{Destinations, directory_beside, kubeconfig_file, refuse_to_overwrite, stage};
use self::report::{KubeconfigReport, ReportedCluster, ReportedContext};
use crate::kubeconfig::rewrite::{ClientTrust, KeyChange, LocalEndpoint, point_at, revert};
use crate::kubeconfig::setup::{self, OutputFile, SetupMode, SetupPlan, SetupRequest, node_name};
use crate::options::EXIT_USAGE;

/// What a local CA needs, unless a timer renews it.
const RENEWAL_NOTE: &str = "the local CA and the serving certificate are valid for one year: run `jackstay kubeconfig \
    --renew` each day, which replaces them in two steps in the last third of it";

/// Runs the command.
pub fn run(args: &KubeconfigArgs) -> ExitCode {
    let mut report = KubeconfigReport::default();
    let (error, code) = match perform(args, &mut report) {
        Ok(()) => (None, ExitCode::SUCCESS),
        Err(Failure::Input(error)) => (Some(error), ExitCode::from(EXIT_USAGE)),
        Err(Failure::Write(error)) => (Some(error), ExitCode::FAILURE),
    };
    report.ok = error.is_none();
    report.error = error;
    args.output.format.print(&report, || report.text());
    if let Some(error) = &report.error {
        eprintln!("{error}");
    }
    code
}

fn perform(args: &KubeconfigArgs, report: &mut KubeconfigReport) -> Result<(), Failure> {
    if args.renew {
        return renew::renew(args, report);
    }
    let files = KubeconfigFiles::load(&KubeconfigPaths::from_env(args.input.clone()))?;
    if args.revert {
        return revert_files(args, &files, report);
    }
    let draft = Draft::new(args, &files)?;
    refuse_to_overwrite(&draft.outputs(), args, &draft.destinations)?;
    let _locks = lock::acquire([&draft.kubeconfig], &files.iter().collect::<Vec<_>>())?;
    let staged = stage(draft.outputs(), args)?;
    if let Some(config) = draft.configuration() {
        staged.check_configuration(config)?;
    }
    staged.commit(report)?;

    report.warnings.clone_from(&draft.warnings);
    report.notes.clone_from(&draft.notes);
    if draft.has_local_ca {
        report.notes.push(RENEWAL_NOTE.to_owned());
    }
    report.notes.extend(files.iter().filter(|_| args.in_place).find_map(|file| {
        let is_written = file.path() == draft.kubeconfig.path;
        let parts = [
            ("comments", file.has_comments()),
            ("YAML documents after the first one", file.has_more_documents()),
        ];
        let lost = parts.iter().filter(|(_, has)| *has && is_written).map(|(part, _)| *part);
        let lost: Vec<&str> = lost.collect();
        let lost = (!lost.is_empty()).then(|| lost.join(" and "))?;
        Some(format!("the {lost} of the kubeconfig are lost, as with `kubectl config`"))
    }));
    report_commands(&draft.destinations, &draft.context.context, report);
    let Draft { context, changes, .. } = draft;
    report.clusters.push(ReportedCluster { name: context.cluster, changes });
    report.context = Some(ReportedContext {
        credential: context.credential.describe(),
        context: context.context,
        user: context.user,
    });
    Ok(())
}

/// The files of the command before any is written.
pub(super) struct Draft {
    /// The context that will point at jackstay.
    pub(super) context: ResolvedContext,
    /// Apiservers besides that of the context.
    pub(super) upstreams: Vec<String>,
    /// The files of jackstay, its configuration last.
    pub(super) files: Vec<OutputFile>,
    /// The kubeconfig.
    pub(super) kubeconfig: OutputFile,
    /// Endpoints at which no apiserver responds.
    pub(super) warnings: Vec<String>,
    /// Messages to the user.
    pub(super) notes: Vec<String>,
    has_local_ca: bool,
    destinations: Destinations,
    /// The changes of the kubeconfig.
    pub(super) changes: Vec<KeyChange>,
}

impl Draft {
    /// Plans the files.
    ///
    /// # Errors
    /// The input cannot be used.
    pub(super) fn new(args: &KubeconfigArgs, files: &KubeconfigFiles) -> Result<Self, Failure> {
        let mut context = files.resolve(args.context.as_deref())?;
        let destinations = Destinations::new(args, files, &context)?;
        let source =
            client_certificate::find(args, files, &mut context, destinations.config.as_deref());
        let address = local_address(args, &context)?;
        let (node_name, name_note) = node_name(args)?;
        check_server_name(args)?;
        if args.discover && destinations.config.is_none() {
            let why = "--discover finds apiservers for a configuration: add --mode";
            return Err(Failure::input(why));
        }
        let path = listener::user_path(args, &context, &address)?;
        let apiservers = apiservers::find(args, &context, destinations.config.as_deref(), &path)?;
        let plan = match &destinations.config {
            None => None,
            Some(file) => {
                let request = SetupRequest {
                    user_file: source.followed.clone(),
                    awaited: source.awaited.clone(),
                    ..setup_request(args, &address, file, &apiservers, &node_name)?
                };
                Some(setup::plan(&context, &request)?)
            }
        };
        let trust = trust(args, &context, &address, plan.as_ref(), (&apiservers, &path))?;
        let configuration = destinations.config.as_ref().map(|file| file.display().to_string());
        let endpoint = LocalEndpoint { address: address.address(), trust, configuration };
        let (kubeconfig, changes) =
            rewrite_kubeconfig(args, files, &context, &destinations, &endpoint)?;
        let mut notes = notes(&context, (&apiservers, &path), plan.as_ref(), &endpoint.trust);
        notes.extend(name_note);
        notes.extend(source.notes);
        let mut warnings = plan.as_ref().map(|plan| plan.warnings.clone()).unwrap_or_default();
        warnings.extend(apiservers.warnings);
        if context.proxy_url.is_none() {
            notes.extend(ProxyEnvironment::of_process().notes(&context.server, &address));
        }
        Ok(Self {
            context,
            upstreams: apiservers.upstreams,
            has_local_ca: plan.as_ref().is_some_and(|plan| plan.local_ca.is_some()),
            files: plan.map(|plan| plan.files).unwrap_or_default(),
            kubeconfig,
            warnings,
            notes,
            destinations,
            changes,
        })
    }

    /// All files in the order in which they are written: the kubeconfig last, so that it never points at a missing
    /// configuration.
    fn outputs(&self) -> Vec<&OutputFile> {
        self.files.iter().chain([&self.kubeconfig]).collect()
    }

    /// The configuration of jackstay.
    fn configuration(&self) -> Option<&OutputFile> {
        self.files.last()
    }

    /// Checks that every file can be written and that jackstay starts with the configuration, and writes nothing.
    ///
    /// # Errors
    /// A directory cannot be written, or the configuration is invalid.
    pub(super) fn check(&self, args: &KubeconfigArgs) -> Result<(), Failure> {
        let staged = stage(self.outputs(), args)?;
        self.configuration().map_or(Ok(()), |config| staged.check_configuration(config))
    }
}

/// Restores every cluster that points at jackstay, or only that of `--context`.
fn revert_files(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    report: &mut KubeconfigReport,
) -> Result<(), Failure> {
    let only = match &args.context {
        None => None,
        Some(name) => Some(files.resolve(Some(name))?.cluster),
    };
    let (mut outputs, mut left) = (Vec::new(), Vec::new());
    for file in files.iter() {
        let mut config = file.config().clone();
        let before = report.clusters.len();
        for named in &mut config.clusters {
            let selected = only.as_ref().is_none_or(|only| *only == named.name);
            let Some(cluster) = named.cluster.as_mut().filter(|_| selected) else { continue };
            if recorded_original(cluster).is_some() {
                let default = || directory_beside(file.path()).join("jackstay.yaml");
                let configuration =
                    recorded_configuration(cluster).map_or_else(default, PathBuf::from);
                left.extend(setup::files_with(&configuration));
                let (name, changes) = (named.name.clone(), revert(cluster));
                report.clusters.push(ReportedCluster { name, changes });
            }
        }
        if report.clusters.len() > before {
            outputs.push(kubeconfig_file(file.path().to_owned(), kubeconfig_yaml(&config)?));
        }
    }
    let _locks = lock::acquire(&outputs, &files.iter().collect::<Vec<_>>())?;
    stage(&outputs, args)?.commit(report)?;
    if report.clusters.is_empty() {
        let paths: Vec<_> = files.iter().map(|file| file.path().display().to_string()).collect();
        report.notes.push(format!("nothing to revert in {}", paths.join(", ")));
        return Ok(());
    }
    report.notes.push(
        "users, contexts and current-context are unchanged, a running jackstay serves on".into(),
    );
    let mut paths: Vec<String> = left.iter().map(|path| path.display().to_string()).collect();
    paths.sort();
    paths.dedup();
    if !paths.is_empty() {
        report.notes.push(format!(
            "these files of jackstay are left, remove them if nothing uses them: {}",
            paths.join(", ")
        ));
    }
    Ok(())
}

/// The address of the local endpoint, which must differ from the apiserver of the context.
fn local_address(args: &KubeconfigArgs, context: &ResolvedContext) -> Result<ServerUrl, Failure> {
    let address = ServerUrl::parse(&args.listen)
        .map_err(|error| Failure::Input(format!("--listen: {error}")))?;
    if !address.path.is_empty() || !args.listen.contains(&format!(":{}", address.port)) {
        let why = format!("--listen {}: write it as 127.0.0.1:7443", args.listen);
        return Err(Failure::Input(why));
    }
    if args.local_ca.is_none() && address.address() == context.server.address() {
        return Err(Failure::Input(format!(
            "cluster {:?} is at {} already, and the kubeconfig does not record the apiserver: requests \
             would loop; --listen names the local endpoint",
            context.cluster, context.server
        )));
    }
    Ok(address)
}

fn setup_request(
    args: &KubeconfigArgs,
    address: &ServerUrl,
    config: &Path,
    apiservers: &Apiservers,
    node_name: &str,
) -> io::Result<SetupRequest> {
    let absolute = |file: &Option<PathBuf>| file.as_deref().map(std::path::absolute).transpose();
    Ok(SetupRequest {
        mode: args.mode.unwrap_or(SetupMode::Passthrough),
        host: address.host.clone(),
        port: address.port,
        config: config.to_owned(),
        upstreams: apiservers.upstreams.clone(),
        is_balancer: apiservers.is_balancer,
        authority: apiservers.authority.as_ref().map(ToString::to_string),
        server_name: apiservers.names.upstream.clone(),
        shared_name: apiservers.names.shared_name().map(ToOwned::to_owned),
        ca_file: absolute(&args.ca_file)?,
        client_ca_file: absolute(&args.client_ca_file)?,
        user_file: None,
        awaited: None,
        node_name: node_name.to_owned(),
        now: SystemTime::now(),
        state: args.state_dir.clone().or_else(|| existing_state_dir(config)),
    })
}

/// The directory of saved endpoints in the configuration that is written again: the sandbox of a running jackstay is
/// for that one.
fn existing_state_dir(config: &Path) -> Option<PathBuf> {
    config::load(config, [], &Overrides::default()).ok()?.config.state_dir
}

/// Checks the name that clients verify, which stands in the kubeconfig and in SNI.
fn check_server_name(args: &KubeconfigArgs) -> Result<(), Failure> {
    match &args.tls_server_name {
        Some(name) if name.parse::<IpAddr>().is_err() && !is_dns_name(name) => Err(Failure::Input(
            format!("--tls-server-name {name:?}: it is neither a DNS name nor an IP address"),
        )),
        _ => Ok(()),
    }
}

/// The name of this machine in the serving certificate; empty if its host name cannot be one, with a note.
fn node_name(args: &KubeconfigArgs) -> Result<(String, Option<String>), Failure> {
    if let Some(name) = &args.node_name {
        let refuse = |error| Failure::Input(format!("--node-name {name:?}: {error}"));
        return node_name::parse(name).map(|name| (name, None)).map_err(refuse);
    }
    let name = host_name();
    Ok(match node_name::parse(&name) {
        Ok(name) => (name, None),
        Err(_) if args.mode != Some(SetupMode::Terminate) => (String::new(), None),
        Err(error) => {
            let note = format!(
                "the host name {name:?} is not in the serving certificate: {error}; --node-name gives another"
            );
            (String::new(), Some(note))
        }
    })
}

/// The host name in lower case, as kubelet names its node.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_lowercase()
}

/// How clients verify the certificate at the local endpoint.
fn trust(
    args: &KubeconfigArgs,
    context: &ResolvedContext,
    address: &ServerUrl,
    plan: Option<&SetupPlan>,
    (apiservers, path): (&Apiservers, &UserPath),
) -> Result<ClientTrust, Failure> {
    let name = &apiservers.names.client;
    if let UserPath::ByServerName { .. } = path {
        return Ok(ClientTrust::Apiserver(Some(name.clone())));
    }
    if let Some(ca) = plan.and_then(|plan| plan.local_ca.clone()) {
        return Ok(ClientTrust::Local(ca));
    }
    if let Some(file) = &args.local_ca {
        let refuse = |error: TlsFileError| Failure::Input(format!("--local-ca: {error}"));
        let ca = pem_files::read(file).map_err(refuse)?;
        pem_files::ca_from_pem(file, &ca).map_err(refuse)?;
        return Ok(ClientTrust::Local(ca.to_vec()));
    }
    let needs_name = !context.insecure && *name != address.host;
    Ok(ClientTrust::Apiserver(needs_name.then(|| name.to_owned())))
}

/// The new kubeconfig, and the changes to its cluster.
fn rewrite_kubeconfig(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    context: &ResolvedContext,
    destinations: &Destinations,
    endpoint: &LocalEndpoint,
) -> Result<(OutputFile, Vec<KeyChange>), Failure> {
    let file = files.file_of_cluster(&context.cluster).filter(|_| args.in_place);
    let mut config = match file {
        // Like kubectl, write an entry to the file that contains it.
        Some(file) => file.config().clone(),
        None => files.merged(destinations.kubeconfig.parent())?,
    };
    if !args.in_place || args.context.is_some() {
        config.current_context = Some(context.context.clone());
    }
    let cluster = find_cluster_mut(&mut config, &context.cluster)
        .ok_or_else(|| Failure::Input(format!("no cluster {:?}", context.cluster)))?;
    let changes = point_at(cluster, &context.server, endpoint);
    Ok((kubeconfig_file(destinations.kubeconfig.clone(), kubeconfig_yaml(&config)?), changes))
}

/// The notes about the planned files, the apiservers, the name that clients verify, and a proxy.
fn notes(
    context: &ResolvedContext,
    (apiservers, path): (&Apiservers, &UserPath),
    plan: Option<&SetupPlan>,
    trust: &ClientTrust,
) -> Vec<String> {
    let mut notes: Vec<String> = plan.iter().flat_map(|plan| plan.notes.clone()).collect();
    match path {
        UserPath::AsConfigured { notes: of_path } => notes.extend(of_path.iter().cloned()),
        UserPath::ByServerName { reason, .. } => notes.push(reason.clone()),
    }
    notes.extend(apiservers.notes.iter().chain(&apiservers.names.notes).cloned());
    if matches!(trust, ClientTrust::Apiserver(Some(_))) {
        notes.extend(apiservers.names.client_notes.iter().cloned());
    }
    notes.extend(context.proxy_note());
    notes
}

/// Adds the commands to run next, and the one that restores the kubeconfig.
fn report_commands(destinations: &Destinations, context: &str, report: &mut KubeconfigReport) {
    if let Some(config) = &destinations.config {
        let config = shell_word(&config.display().to_string());
        report.next.push(format!("jackstay run --config {config} &"));
        report.next.push("jackstay status --wait".to_owned());
    }
    let kubeconfig = shell_word(&destinations.kubeconfig.display().to_string());
    let file = if destinations.is_default_for_kubectl {
        String::new()
    } else {
        format!(" --kubeconfig {kubeconfig}")
    };
    report.next.push(format!("kubectl{file} --context {} get nodes", shell_word(context)));
    report.revert = Some(format!("jackstay kubeconfig --revert --kubeconfig {kubeconfig}"));
}

/// A text as one word of a POSIX shell, in quotes if it needs them.
fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./-_".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::shell_word;

    #[test]
    fn shell_word_quotes_what_a_shell_would_split_or_expand() {
        for (text, expected) in [
            ("kubernetes-admin@kubernetes", "kubernetes-admin@kubernetes"),
            ("arn:aws:eks:eu-1:1:cluster/x", "arn:aws:eks:eu-1:1:cluster/x"),
            ("my cluster", "'my cluster'"),
            ("it's $HOME", "'it'\\''s $HOME'"),
            ("", "''"),
        ] {
            assert_eq!(shell_word(text), expected);
        }
    }
}
