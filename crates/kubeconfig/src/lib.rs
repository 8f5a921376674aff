//! Reads kubeconfigs by the rules of kubectl.
//!
//! * [`model`] is the content of a kubeconfig.
//! * `files` finds and merges the files; `file` reads one and formats it, `parse` parses its text.
//! * `context` resolves a context to a server, its verification and a `credential`.
//! * `proxy` reads the proxies of the environment.
//! * `exec` runs a credential plugin.
//! * [`client_certificate`] reads the client certificate of a user, as an identity; [`discovery`] the credential for
//!   discovery.
//! * [`original`] is the record of the values that a cluster had before it was pointed at jackstay.
//!
//! Every error names the file or the entry and holds no secret.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::too_many_lines))]
#![warn(clippy::disallowed_methods)]

pub mod client_certificate;
mod context;
mod credential;
pub mod discovery;
mod discovery_error;
mod error;
mod exec;
mod file;
mod files;
pub mod model;
pub mod original;
mod parse;
mod proxy;
mod sent_authority;
mod server_url;

pub use context::{ClusterError, ContextError, ResolvedContext};
pub use credential::{Credential, CredentialError, PemSource, TokenSource, UserCredentials};
pub use discovery_error::{DiscoveryError, DiscoveryTokenError, UnsupportedCredential, UserError};
pub use error::{ContentError, KubeconfigError, Unwritable};
pub use exec::{ExecCredential, ExecError, ExecPlugin, ExecProblem};
pub use file::{
    KubeconfigFile, MAX_KUBECONFIG, find_cluster, find_cluster_mut, kubeconfig_yaml, to_yaml,
};
pub use files::{KubeconfigFiles, KubeconfigPaths, ResolveError};
pub use original::{recorded_configuration, recorded_original};
pub use proxy::ProxyEnvironment;
pub use sent_authority::sent_authority;
pub use server_url::{ServerUrl, ServerUrlError, ServerUrlMistake, user_in, without_user};
