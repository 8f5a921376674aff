//! The planned configuration file in a form that can be written as YAML.

use std::net::SocketAddr;
use std::path::PathBuf;

use jackstay_config::{CertPaths, EndpointKind, IdentitySource};
use serde::Serialize;

use super::plan::SetupMode;

/// The configuration file. The keys that it does not contain keep their defaults.
#[derive(Serialize)]
pub(super) struct ConfigFile {
    pub(super) state_dir: PathBuf,
    pub(super) upstreams: [UpstreamSection; 1],
    pub(super) listeners: [ListenerSection; 1],
}

#[derive(Serialize)]
pub(super) struct UpstreamSection {
    pub(super) name: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) path_prefix: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) authority: Option<String>,
    pub(super) endpoints: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<EndpointKind>,
    #[serde(skip_serializing_if = "UpstreamTlsSection::is_empty")]
    pub(super) tls: UpstreamTlsSection,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) health: Option<HealthSection>,
}

#[derive(Serialize)]
pub(super) struct UpstreamTlsSection {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ca_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) server_name: Option<String>,
}

impl UpstreamTlsSection {
    fn is_empty(&self) -> bool {
        self.ca_file.is_none() && self.server_name.is_none()
    }
}

#[derive(Serialize)]
pub(super) struct HealthSection {
    pub(super) readyz: ProbeCredential,
}

/// Credential of the `/readyz` probe.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum ProbeCredential {
    Certificate { cert_file: PathBuf, key_file: PathBuf },
    Token { token_file: PathBuf },
}

#[derive(Serialize)]
pub(super) struct ListenerSection {
    pub(super) name: &'static str,
    pub(super) bind: Vec<SocketAddr>,
    pub(super) upstream: &'static str,
    pub(super) mode: SetupMode,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tls: Option<ListenerTlsSection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) client_ca_file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) identities: Vec<IdentitySource>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) passthrough_server_names: Vec<String>,
}

#[derive(Serialize)]
pub(super) struct ListenerTlsSection {
    #[serde(flatten)]
    pub(super) serving: CertPaths,
}
