//! The flags of `jackstay install` and `jackstay uninstall`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::install::service::ServiceForm;
use crate::kubeconfig::setup::SetupMode;
use crate::options::{DurationFlagError, OutputArgs, parse_flag_duration};

const INSTALL_HELP: &str = "\
On a node that has jackstay, the version of this program replaces the other
one, without a gap if it runs as a unit.

Exit codes: 0 the node is Ready through jackstay in this version, 1 the
installation or the upgrade failed and was undone, 2 bad usage or an input
that cannot be used; nothing changed.

Examples:
  jackstay install --dry-run
  jackstay install --endpoint 10.0.0.12:6443 --endpoint 10.0.0.13:6443
  jackstay install --as static-pod --image localhost/jackstay:0.1.0
  jackstay install --dry-run -o json";

const UNINSTALL_HELP: &str = "\
Exit codes: 0 removed, or not installed, 1 a step failed, 2 bad usage.

Examples:
  jackstay uninstall --dry-run
  jackstay uninstall";

/// Arguments of `jackstay install`.
#[derive(Debug, Args)]
#[command(after_help = INSTALL_HELP)]
#[allow(clippy::struct_excessive_bools)] // each is a separate flag
pub struct InstallArgs {
    /// L7 (terminate, with a local CA) or L4 (passthrough).
    #[arg(long, value_name = "MODE", default_value = "terminate")]
    pub(super) mode: SetupMode,
    /// Run jackstay as a systemd unit or as a static pod.
    #[arg(long = "as", value_name = "FORM", default_value = "unit")]
    pub(super) form: ServiceForm,
    /// Another apiserver of the cluster, besides the one in kubelet's kubeconfig. Repeatable.
    #[arg(long = "endpoint", value_name = "ADDR")]
    pub(super) endpoints: Vec<String>,
    /// The address of jackstay for local clients.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7443")]
    pub(super) listen: SocketAddr,
    /// The image of the static pod, which must be on the node.
    #[arg(long, value_name = "IMAGE", default_value = concat!("localhost/jackstay:", env!("CARGO_PKG_VERSION")))]
    pub(super) image: String,
    /// Install on a control-plane node, too. Its kubelet normally uses the apiserver of its own node.
    #[arg(long)]
    pub(super) control_plane: bool,
    /// Install although `jackstay doctor` finds a problem, such as the one that jackstay is to solve.
    #[arg(long)]
    pub(super) ignore_findings: bool,
    /// Replace an existing /etc/jackstay/jackstay.yaml; `jackstay uninstall` restores it.
    #[arg(long)]
    pub(super) force: bool,
    /// How long the node may take to become Ready; a number without a unit is seconds.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_limit)]
    pub(super) timeout: Duration,
    /// Print every file and command, and change nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Undo an installation that was interrupted, after the process that carries it out has ended.
    #[arg(long, hide = true)]
    pub(super) recover: bool,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

/// Arguments of `jackstay uninstall`.
#[derive(Debug, Args)]
#[command(after_help = UNINSTALL_HELP)]
pub struct UninstallArgs {
    /// Print what would be restored, and change nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    #[command(flatten)]
    pub(super) output: OutputArgs,
}

fn parse_limit(text: &str) -> Result<Duration, DurationFlagError> {
    let duration = parse_flag_duration(text).map_err(DurationFlagError::Unit)?;
    if (Duration::from_secs(5)..=Duration::from_secs(3600)).contains(&duration) {
        Ok(duration)
    } else {
        Err(DurationFlagError::OutsideLimits("from 5s to 1h"))
    }
}

/// The name of a value on the command line.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

impl InstallArgs {
    /// The arguments that decide the result.
    pub(super) fn request_text(&self) -> String {
        let mut endpoints = self.endpoints.clone();
        endpoints.sort();
        let (mode, form) = (name_of(&self.mode), name_of(&self.form));
        let mut text = format!("--mode {mode} --as {form} --listen {}", self.listen);
        if self.form == ServiceForm::StaticPod {
            text.push_str(" --image ");
            text.push_str(&self.image);
        }
        for endpoint in endpoints {
            text.push_str(" --endpoint ");
            text.push_str(&endpoint);
        }
        text
    }
}
