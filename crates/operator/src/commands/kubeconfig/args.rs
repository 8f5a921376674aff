//! The flags of `jackstay kubeconfig`.

use std::path::PathBuf;

use clap::Args;

use crate::admin_client::{DEFAULT_ADMIN, TcpAddress};
use crate::kubeconfig::setup::SetupMode;
use crate::options::{OutputArgs, OutputFormat};

/// Arguments of `jackstay kubeconfig`.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct KubeconfigArgs {
    /// The address of jackstay for local clients.
    #[arg(long, alias = "server", value_name = "ADDR", default_value = "127.0.0.1:7443")]
    pub(super) listen: String,
    /// The kubeconfig to read; default $KUBECONFIG (a list is merged), else ~/.kube/config.
    #[arg(long = "kubeconfig", alias = "in", value_name = "FILE")]
    pub(super) input: Option<PathBuf>,
    /// The context whose cluster changes; default the current one.
    #[arg(long, value_name = "NAME")]
    pub(super) context: Option<String>,
    /// The kubeconfig to write; default `jackstay.kubeconfig` beside the input.
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
    /// Change the input itself.
    #[arg(long, conflicts_with = "out")]
    pub(super) in_place: bool,
    /// Replace existing files whose content differs.
    #[arg(long)]
    pub(super) force: bool,
    /// Restore the original clusters in the input file.
    #[arg(long, conflicts_with_all = ["out", "in_place", "mode", "config_out", "local_ca"])]
    pub(super) revert: bool,
    /// Renew the serving certificate in the configuration (`--config-out`), its local CA, and that CA
    /// in the input files. Run it each day: after two thirds of the lifetime it publishes the next CA,
    /// and three weeks before the end the next certificate is served. With `--force` it takes the next
    /// step now. An alarm is exit code 1.
    #[arg(long, conflicts_with_all = ["revert", "context", "out", "in_place", "mode", "local_ca"])]
    pub(super) renew: bool,
    /// A unit that reads an input file at its start. It delays the step to the next certificate until
    /// it has been started with the next CA. Repeatable.
    #[arg(long = "reader", value_name = "UNIT", requires = "renew")]
    pub(super) readers: Vec<String>,
    /// Restart such a unit if it lacks the next CA: in the two weeks after the publication, at a time
    /// that differs between machines, and while jackstay serves. Each run announces it.
    #[arg(long, requires = "renew")]
    pub(super) restart_readers: bool,
    /// Write a configuration of jackstay as well: L4 (passthrough) or L7 (terminate, with a local
    /// CA).
    #[arg(long, value_name = "MODE")]
    pub(super) mode: Option<SetupMode>,
    /// The configuration to write, with its other files beside it; default `jackstay/jackstay.yaml`
    /// beside the written kubeconfig.
    #[arg(long, value_name = "FILE")]
    pub(super) config_out: Option<PathBuf>,
    /// Another apiserver of the cluster, besides the one in the kubeconfig. Repeatable; default
    /// those in the existing configuration.
    #[arg(long = "endpoint", alias = "upstream", value_name = "ADDR")]
    pub(super) endpoints: Vec<String>,
    /// Also use the apiservers in the `EndpointSlices` of the cluster. They are read with the user's
    /// credential, which may run an exec plugin.
    #[arg(long, conflicts_with_all = ["offline", "revert", "local_ca"])]
    pub(super) discover: bool,
    /// Make no connections: neither certificates nor `EndpointSlices` are read.
    #[arg(long)]
    pub(super) offline: bool,
    /// The cluster's CA, if the kubeconfig names none.
    #[arg(long, value_name = "FILE")]
    pub(super) ca_file: Option<PathBuf>,
    /// The CA that signs client certificates, if it is not the cluster's (terminate).
    #[arg(long, value_name = "FILE")]
    pub(super) client_ca_file: Option<PathBuf>,
    /// The CA of an existing local listener that terminates TLS.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mode", "config_out"])]
    pub(super) local_ca: Option<PathBuf>,
    /// The admin endpoint of that jackstay, which knows the identities of its listeners.
    #[arg(long, value_name = "ADDR", default_value_t = DEFAULT_ADMIN.into())]
    pub(super) admin: TcpAddress,
    /// The name in every apiserver's certificate; default a name that they share (passthrough). With
    /// `--local-ca`: the one of the listener's `passthrough_server_names` by which the user is passed through.
    #[arg(long, value_name = "NAME")]
    pub(super) tls_server_name: Option<String>,
    /// Name of this machine in the serving certificate; default its host name (terminate).
    #[arg(long, value_name = "NAME")]
    pub(super) node_name: Option<String>,
    /// The directory in which jackstay saves endpoints; default that of the existing configuration, else `state` beside
    /// it.
    #[arg(skip)]
    pub(super) state_dir: Option<PathBuf>,
    /// Whether jackstay will not see the kubeconfig, so that a certificate in it must be copied.
    #[arg(skip)]
    pub(super) kubeconfig_is_hidden: bool,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// What `jackstay install` decides.
#[derive(Debug)]
pub(in crate::commands) struct NodeSetup {
    /// The kubeconfig of kubelet, which is changed in place.
    pub(in crate::commands) kubeconfig: PathBuf,
    /// The address of jackstay for local clients.
    pub(in crate::commands) listen: String,
    /// The mode of the listener.
    pub(in crate::commands) mode: SetupMode,
    /// Apiservers besides the one in the kubeconfig.
    pub(in crate::commands) endpoints: Vec<String>,
    /// The configuration to write.
    pub(in crate::commands) config: PathBuf,
    /// The directory in which jackstay saves endpoints.
    pub(in crate::commands) state: PathBuf,
    /// Whether jackstay will not see the kubeconfig.
    pub(in crate::commands) kubeconfig_is_hidden: bool,
}

impl KubeconfigArgs {
    /// The arguments for the kubeconfig of kubelet.
    pub(in crate::commands) fn of_node(setup: &NodeSetup) -> Self {
        Self {
            listen: setup.listen.clone(),
            input: Some(setup.kubeconfig.clone()),
            context: None,
            out: None,
            in_place: true,
            force: true,
            revert: false,
            renew: false,
            readers: Vec::new(),
            restart_readers: false,
            mode: Some(setup.mode),
            config_out: Some(setup.config.clone()),
            endpoints: setup.endpoints.clone(),
            discover: false,
            offline: false,
            ca_file: None,
            client_ca_file: None,
            local_ca: None,
            admin: DEFAULT_ADMIN.into(),
            tls_server_name: None,
            node_name: None,
            state_dir: Some(setup.state.clone()),
            kubeconfig_is_hidden: setup.kubeconfig_is_hidden,
            output: OutputArgs { format: OutputFormat::Text },
        }
    }
}
