//! Finds what an installation needs, and checks it before the first change.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jackstay_kubeconfig::{Credential, KubeconfigFiles, KubeconfigPaths, PemSource, ServerUrl};
use jackstay_sys::files;

use super::args::InstallArgs;
use super::node::{Node, node_name};
use super::progress::Progress;
use crate::admin_client::DEFAULT_ADMIN;
use crate::commands::kubeconfig::{Draft, Failure, KubeconfigArgs, NodeSetup};
use crate::doctor::dns::Resolver;
use crate::doctor::host;
use crate::doctor::image::{self, ImageState, InstalledTools};
use crate::doctor::observations::ListenState;
use crate::doctor::target::{ExaminationPlan, PlannedListener};
use crate::doctor::{examine, findings, report};
use crate::install::host as install_host;
use crate::install::kubelet::{self, Kubelet};
use crate::install::service::{
    CONFIG, PROGRAM, RENEWAL_TIMER, RENEWAL_UNIT, STATE, Service, ServiceForm, ServiceRequest,
    UNIT, guard_unit, recovery_unit, service,
};
use crate::kubeconfig::setup::OutputFile;
use crate::systemd::{Systemd, property};

/// How long the doctor observes the apiservers.
const EXAMINATION: Duration = Duration::from_secs(5);
/// Manifests of kubeadm for the apiserver of this node.
const APISERVER_MANIFEST: &str = "/etc/kubernetes/manifests/kube-apiserver.yaml";
/// The directories of files that the static pod mounts.
const MOUNTED: [&str; 3] = ["/var/lib/kubelet/pki", "/etc/jackstay", "/etc/kubernetes/pki/ca.crt"];
/// The only CA file of the cluster that the static pod mounts; it must exist.
const CLUSTER_CA: &str = "/etc/kubernetes/pki/ca.crt";

/// Everything that the steps of an installation use.
pub(super) struct Preparation {
    /// The kubelet of this node.
    pub(super) kubelet: Kubelet,
    /// The node, and how its state is requested.
    pub(super) node: Node,
    /// Whether the node is Ready now.
    pub(super) was_ready: bool,
    /// Configuration, certificates and kubeconfig.
    pub(super) draft: Draft,
    /// Units or manifest.
    pub(super) service: Service,
    /// The binary, if it must be copied.
    pub(super) program: Option<OutputFile>,
    /// Its path.
    pub(super) program_path: PathBuf,
    /// The recovery unit.
    pub(super) recovery: OutputFile,
    /// The guard.
    pub(super) guard: OutputFile,
    /// See `Journal::request`.
    pub(super) request: String,
}

impl Preparation {
    /// Finds and checks everything.
    ///
    /// # Errors
    /// Why nothing can be installed.
    pub(super) fn new(args: &InstallArgs, progress: &mut Progress) -> Result<Self, Failure> {
        let kubelet = kubelet::find(Path::new("/proc"), &Systemd)?;
        install_host::check_kubeconfig_stays(&kubelet.kubeconfig)?;
        refuse_control_plane(args)?;
        let setup = NodeSetup {
            kubeconfig: kubelet.kubeconfig.clone(),
            listen: args.listen.to_string(),
            mode: args.mode,
            endpoints: args.endpoints.clone(),
            config: CONFIG.into(),
            state: STATE.into(),
            // The manifest mounts the directory of kubelet's certificates, not that of its kubeconfig.
            kubeconfig_is_hidden: args.form == ServiceForm::StaticPod,
        };
        let paths = KubeconfigPaths::from_env(Some(kubelet.kubeconfig.clone()));
        let files = KubeconfigFiles::load(&paths)?;
        refuse_second_setup(&files)?;
        let kubeconfig_args = KubeconfigArgs::of_node(&setup);
        let draft = Draft::new(&kubeconfig_args, &files)?;
        refuse_own_node(&draft)?;
        refuse_existing_config(args, &draft)?;
        let mut program = program()?;
        match &mut program {
            Some(file) => file.path = install_host::program_path()?,
            None => install_host::check_selinux_type(&current_program()?)?,
        }
        let path = program.as_ref().map_or_else(current_program, |file| Ok(file.path.clone()))?;
        let service = plan_service(args, &kubelet, &draft, &path)?;
        if args.form == ServiceForm::StaticPod {
            refuse_missing_image(args, progress)?;
        }
        refuse_ports(args.listen)?;
        // An earlier run may have been killed in this check.
        for file in draft.files.iter().chain([&draft.kubeconfig]).filter(|_| !args.dry_run) {
            files::remove_incomplete(&file.path);
        }
        draft.check(&kubeconfig_args)?;
        let node = Node::new(node_name(&draft.context, kubelet.name.as_deref()), &draft)?;
        let state = node.state().map_err(|why| {
            Failure::Input(format!("cannot read the state of node {:?}: {why}", node.name))
        })?;
        if !state.ready {
            progress.note(&format!(
                "node {} is {state}: the installation waits for its lease only",
                node.name
            ));
        }
        progress.node(&node.name);
        examine(args, &node, progress)?;
        Ok(Self {
            recovery: recovery_unit(&path, &kubelet.unit),
            guard: guard_unit(&path),
            was_ready: state.ready,
            kubelet,
            node,
            draft,
            service,
            program,
            program_path: path,
            request: args.request_text(),
        })
    }
}

/// The kubelet of a control-plane node uses the apiserver of its node (kubeadm: `ControlPlaneKubeletLocalMode`).
fn refuse_control_plane(args: &InstallArgs) -> Result<(), Failure> {
    if args.control_plane || !Path::new(APISERVER_MANIFEST).exists() {
        return Ok(());
    }
    Err(Failure::input(
        "this is a control-plane node: its kubelet uses the apiserver of its own node, because a kubelet must not be \
         newer than its apiserver during an upgrade; --control-plane installs nevertheless \
         (deploy/distributions/control-plane-nodes.md)",
    ))
}

/// A kubeconfig that points at jackstay without a journal was changed by hand.
fn refuse_second_setup(files: &KubeconfigFiles) -> Result<(), Failure> {
    let file = files.first();
    let mut clusters = file.config().clusters.iter().filter_map(|named| named.cluster.as_ref());
    if clusters.any(|cluster| jackstay_kubeconfig::recorded_original(cluster).is_some()) {
        let path = file.path().display();
        return Err(Failure::Input(format!(
            "{path} points at jackstay already, and not by `jackstay install`: restore it with \
             `jackstay kubeconfig --revert --kubeconfig {path}` first"
        )));
    }
    Ok(())
}

/// Fails if every apiserver is on this machine: nothing would take over from it.
fn refuse_own_node(draft: &Draft) -> Result<(), Failure> {
    let own = draft.context.server.clone();
    let given = draft.upstreams.iter().filter_map(|address| ServerUrl::parse(address).ok());
    let servers: Vec<ServerUrl> = [own].into_iter().chain(given).collect();
    let is_here = |server: &ServerUrl| match server.host.parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback() || host::is_local(ip),
        Err(_) => server.host == "localhost",
    };
    if !servers.iter().all(is_here) {
        return Ok(());
    }
    let listed: Vec<String> = servers.iter().map(ServerUrl::address).collect();
    Err(Failure::Input(format!(
        "every known apiserver is on this node ({}): nothing would take over from it; name the others with --endpoint",
        listed.join(", ")
    )))
}

fn refuse_existing_config(args: &InstallArgs, draft: &Draft) -> Result<(), Failure> {
    let Some(config) = draft.files.last() else { return Ok(()) };
    let differs = std::fs::read(&config.path).is_ok_and(|bytes| bytes != config.bytes);
    if args.force || !differs {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "{} exists: this node has a configuration of jackstay already; move it away, or --force replaces it until \
         `jackstay uninstall` restores it",
        config.path.display()
    )))
}

/// The path of the running binary, which may have been deleted.
pub(super) fn current_program() -> Result<PathBuf, Failure> {
    std::env::current_exe()
        .map_err(|error| Failure::Input(format!("the path of this program is not known: {error}")))
}

/// The binary as a file at a path that stays; `None` if it is at such a path already.
fn program() -> Result<Option<OutputFile>, Failure> {
    let path = current_program()?;
    if ["/usr/", "/opt/"].iter().any(|stable| path.starts_with(stable)) {
        return Ok(None);
    }
    this_program().map(Some)
}

/// This program, for the path at which it stays.
pub(super) fn this_program() -> Result<OutputFile, Failure> {
    let bytes = std::fs::read("/proc/self/exe")
        .map_err(|error| Failure::Input(format!("cannot read this program: {error}")))?;
    Ok(OutputFile { path: PROGRAM.into(), bytes, mode: 0o755, description: "the program" })
}

/// Plans units or manifest.
fn plan_service(
    args: &InstallArgs,
    kubelet: &Kubelet,
    draft: &Draft,
    program: &Path,
) -> Result<Service, Failure> {
    let exists = |unit: &str| property(&Systemd, unit, "LoadState") == "loaded";
    for unit in [UNIT, RENEWAL_UNIT] {
        if property(&Systemd, unit, "LoadState") == "masked" {
            return Err(Failure::Input(format!(
                "{unit} is masked, as a removed package leaves it: `systemctl unmask {unit}` first"
            )));
        }
    }
    let has_unit = exists(UNIT);
    if has_unit {
        let state = property(&Systemd, UNIT, "ActiveState");
        if state == "active" || state == "activating" {
            return Err(Failure::Input(format!(
                "{UNIT} runs already: point kubelet at it with `jackstay kubeconfig`, or stop it first"
            )));
        }
        if args.form == ServiceForm::StaticPod
            && property(&Systemd, UNIT, "UnitFileState") == "enabled"
        {
            return Err(Failure::Input(format!(
                "{UNIT} is enabled and would take the ports of the static pod at the next boot: `systemctl disable {UNIT}` \
                 first, or --as unit"
            )));
        }
        let command = property(&Systemd, UNIT, "ExecStart");
        if args.form == ServiceForm::Unit && !command.contains(CONFIG) {
            return Err(Failure::Input(format!(
                "{UNIT} exists and does not read {CONFIG}: remove it, or --as static-pod"
            )));
        }
    }
    let static_pods = match (args.form, &kubelet.static_pods) {
        (ServiceForm::StaticPod, None) => {
            return Err(Failure::input(
                "kubelet has no directory of static pods (staticPodPath in its configuration): --as unit",
            ));
        }
        (_, directory) => directory.clone().unwrap_or_default(),
    };
    if args.form == ServiceForm::StaticPod {
        refuse_unmounted_files(draft, &static_pods)?;
    }
    let is_enabled = |unit: &&str| property(&Systemd, unit, "UnitFileState") == "enabled";
    let enabled_units: Vec<String> = [UNIT, RENEWAL_TIMER]
        .iter()
        .filter(|unit| is_enabled(unit))
        .map(ToString::to_string)
        .collect();
    Ok(service(&ServiceRequest {
        form: args.form,
        mode: args.mode,
        program,
        kubeconfig: &kubelet.kubeconfig,
        kubelet_unit: &kubelet.unit,
        static_pods: &static_pods,
        image: &args.image,
        existing_units: (has_unit, exists(RENEWAL_UNIT)),
        enabled_units: &enabled_units,
    }))
}

/// Fails if the static pod would not have a file that its configuration names, or if its name is taken.
fn refuse_unmounted_files(draft: &Draft, static_pods: &Path) -> Result<(), Failure> {
    if !Path::new(CLUSTER_CA).exists() {
        return Err(Failure::Input(format!("the static pod needs {CLUSTER_CA}: --as unit")));
    }
    let manifest = static_pods.join("jackstay.yaml");
    if manifest.exists() {
        return Err(Failure::Input(format!("{} exists: remove it first", manifest.display())));
    }
    let mut pems: Vec<&PemSource> = draft.context.ca.iter().collect();
    if let Credential::Certificate(certificate, key) = &draft.context.credential {
        pems.extend([certificate, key]);
    }
    for pem in pems {
        if let PemSource::File(file) = pem
            && !MOUNTED.iter().any(|mounted| file.starts_with(mounted))
        {
            return Err(Failure::Input(format!(
                "the static pod does not mount {}, which kubelet's kubeconfig names: --as unit",
                file.display()
            )));
        }
    }
    Ok(())
}

/// Fails if the image of the static pod is not on the node.
///
/// # Errors
/// It is missing. A runtime that does not answer is a note.
pub(super) fn refuse_missing_image(
    args: &InstallArgs,
    progress: &mut Progress,
) -> Result<(), Failure> {
    match image::state(&args.image, &InstalledTools) {
        ImageState::Missing => Err(Failure::Input(format!(
            "nothing changed: the image {} is not on this node, and its pod does not pull it: import it first \
             (`ctr -n k8s.io images import jackstay-image.tar`), or name another one with --image",
            args.image
        ))),
        ImageState::Unknown(why) => {
            let image = &args.image;
            progress
                .note(&format!("whether the image {image} is on this node is not known ({why})"));
            Ok(())
        }
        ImageState::Pinned | ImageState::Unpinned(_) => Ok(()),
    }
}

/// Fails if another process listens on an address that jackstay needs.
fn refuse_ports(listen: SocketAddr) -> Result<(), Failure> {
    let planned = |name: &str, bind| PlannedListener { name: name.into(), bind, freebind: false };
    let listeners = [planned("--listen", listen), planned("the admin endpoint", DEFAULT_ADMIN)];
    for address in host::check(&listeners, &[], 0).listen {
        let why = match address.state {
            ListenState::Free => continue,
            ListenState::Taken(Some(owner)) => format!("{owner} listens there"),
            ListenState::Taken(None) | ListenState::Jackstay => {
                "another process listens there (`ss -ltnp` lists them)".to_owned()
            }
            ListenState::NotLocal => "this machine does not have the address".to_owned(),
            ListenState::Denied => "the port needs a privilege".to_owned(),
            ListenState::Failed(why) => why,
        };
        return Err(Failure::Input(format!(
            "jackstay cannot listen on {} ({}): {why}",
            address.address, address.what
        )));
    }
    Ok(())
}

/// Runs the doctor against all apiservers. A problem is an error unless the user ignores it.
fn examine(args: &InstallArgs, node: &Node, progress: &Progress) -> Result<(), Failure> {
    let plan = ExaminationPlan { targets: node.targets()?, ..ExaminationPlan::default() };
    progress.line(&format!("examining {} for {} s …", node.addresses(), EXAMINATION.as_secs()));
    let observations = examine::run(plan, Resolver::of_system(), EXAMINATION)
        .map_err(|error| Failure::Input(format!("cannot examine the apiservers: {error}")))?;
    let found = findings::diagnose(&observations);
    if !findings::has_problems(&found) {
        return Ok(());
    }
    progress.line(report::text(&observations, &found, &[]).trim_end());
    if args.ignore_findings {
        return Ok(());
    }
    Err(Failure::input(
        "nothing changed: `jackstay doctor` found the problems above; --ignore-findings installs nevertheless",
    ))
}
