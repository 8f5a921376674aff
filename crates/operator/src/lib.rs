//! The tools of operators, as functions that the program calls: `jackstay check`, `status`, `probe`, `kubeconfig`,
//! `doctor`, `install` and `uninstall`.
//!
//! * [`commands`] has the arguments, the output and the exit code of each command, with the [`options`] that several
//!   share. [`admin_client`] asks a running jackstay.
//! * [`doctor`] diagnoses the path to the apiservers.
//! * [`kubeconfig`] points a kubeconfig at jackstay, and plans the configuration and the certificates for it.
//! * `install` puts jackstay beside the kubelet of a node, with a journal that undoes it; [`systemd`] runs `systemctl`.
//!
//! The package imports nothing of the data plane: what both read is in `jackstay_config`, `jackstay_net` and
//! `jackstay_kubeconfig`.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![warn(clippy::disallowed_methods)]

pub mod admin_client;
#[allow(clippy::disallowed_methods)] // commands use the real clock
pub mod commands;
pub mod doctor;
#[cfg(feature = "doctor")]
#[allow(clippy::disallowed_methods)] // it waits for services with the real clock
pub mod install;
pub mod kubeconfig;
pub mod options;
pub mod systemd;

/// The version of these tools, which is that of the program: all packages of the workspace have one version.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
