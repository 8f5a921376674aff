//! The input and the output of a plan.

use std::fmt;
use std::path::PathBuf;
use std::time::SystemTime;

use clap::ValueEnum;
use jackstay_kubeconfig::PemSource;
use serde::Serialize;

/// The mode of the planned listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SetupMode {
    /// L4: the client and the apiserver terminate TLS.
    Passthrough,
    /// L7: jackstay terminates TLS with a certificate of a local CA.
    Terminate,
}

/// The input of a plan.
#[derive(Debug, Clone)]
pub struct SetupRequest {
    /// The mode of the listener.
    pub mode: SetupMode,
    /// Host of the local endpoint, as in the URL of clients.
    pub host: String,
    /// Port of the local endpoint.
    pub port: u16,
    /// Path of the configuration. The other files are in the same directory.
    pub config: PathBuf,
    /// Apiservers besides the one in the kubeconfig.
    pub upstreams: Vec<String>,
    /// Whether an endpoint leads to several apiservers.
    pub is_balancer: bool,
    /// The authority of requests; `None` leaves that of the clients.
    pub authority: Option<String>,
    /// Name that the certificates of all apiservers must contain; `None` means the host of each one.
    pub server_name: Option<String>,
    /// A DNS name in the certificates of all apiservers, if one is known.
    pub shared_name: Option<String>,
    /// The cluster's CA; replaces the one in the kubeconfig.
    pub ca_file: Option<PathBuf>,
    /// The CA that verifies client certificates; `None` means the cluster's CA.
    pub client_ca_file: Option<PathBuf>,
    /// The kubeconfig that holds the user, if jackstay can read it for years (`client_certificate::can_be_followed`):
    /// an identity follows it. `None` copies the certificate.
    pub user_file: Option<PathBuf>,
    /// A file with the rotated certificate of the user that kubelet is yet to write.
    pub awaited: Option<PathBuf>,
    /// Name of this machine, for the serving certificate.
    pub node_name: String,
    /// The current time.
    pub now: SystemTime,
    /// The directory of saved endpoints; `None` means `state` beside the configuration.
    pub state: Option<PathBuf>,
}

/// A planned file.
#[derive(Clone, PartialEq, Eq)]
pub struct OutputFile {
    /// Absolute path.
    pub path: PathBuf,
    /// The content of the file.
    pub bytes: Vec<u8>,
    /// Unix permissions, as in chmod(2).
    pub mode: u32,
    /// Its purpose, for messages.
    pub description: &'static str,
}

impl fmt::Debug for OutputFile {
    /// Omits the content, which may be a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutputFile").field("path", &self.path).finish_non_exhaustive()
    }
}

/// The files that jackstay needs to serve one kubeconfig context.
#[derive(Default)]
pub struct SetupPlan {
    /// The files to write, the configuration last.
    pub files: Vec<OutputFile>,
    /// The certificate of the local CA that clients trust, PEM (mode `terminate` only).
    pub local_ca: Option<Vec<u8>>,
    /// Certificates of the kubeconfig that are not read.
    pub warnings: Vec<String>,
    /// Messages to the user.
    pub notes: Vec<String>,
}

impl SetupPlan {
    /// Returns the file that contains `pem`. For inline data this is a planned file at `path`.
    pub(super) fn file_of(
        &mut self,
        pem: &PemSource,
        path: PathBuf,
        mode: u32,
        description: &'static str,
    ) -> PathBuf {
        match pem {
            PemSource::File(file) => file.clone(),
            PemSource::Inline(bytes) => {
                let bytes = bytes.clone();
                self.files.push(OutputFile {
                    path: path.clone(),
                    bytes: bytes.to_vec(),
                    mode,
                    description,
                });
                path
            }
        }
    }
}
