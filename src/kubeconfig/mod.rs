//! Reads the kubeconfig of a user by the rules of kubectl, points it at jackstay, and reverts it.
//!
//! * `files` finds and merges the files; `file` reads one and formats it, `parse` parses its text.
//! * `context` resolves a context to a server, its verification and a `credential`.
//! * `proxy` reads the proxies of the environment.
//! * `exec` runs a credential plugin.
//! * [`client_certificate`] reads the client certificate of a user, as an identity.
//! * [`rewrite`] points one cluster at jackstay; `original` records the earlier values in that cluster.
//! * [`verified_names`] selects the name to verify in the apiservers' certificates.
//! * [`setup`] plans the configuration and the certificates of a jackstay for the cluster.
//!
//! Every error names the file or the entry and holds no secret.

pub mod client_certificate;
mod context;
mod credential;
mod error;
mod exec;
mod file;
mod files;
mod original;
mod parse;
mod proxy;
pub mod rewrite;
mod sent_authority;
mod server_url;
pub mod setup;
pub mod verified_names;

pub use context::{ClusterError, ContextError, ResolvedContext};
pub use credential::{Credential, CredentialError, PemSource, TokenSource, UserCredentials};
pub use error::{ContentError, KubeconfigError, Unwritable};
pub use exec::{ExecCredential, ExecError, ExecPlugin, ExecProblem};
pub use file::{KubeconfigFile, MAX_KUBECONFIG, find_cluster, find_cluster_mut, kubeconfig_yaml};
pub use files::{KubeconfigFiles, KubeconfigPaths, ResolveError};
pub use original::{recorded_configuration, recorded_original};
pub use proxy::ProxyEnvironment;
pub use sent_authority::sent_authority;
pub use server_url::{ServerUrl, ServerUrlError, ServerUrlMistake};
pub use setup::system_cas;
pub use verified_names::CertificateNames;
