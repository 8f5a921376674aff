//! The user's kubeconfig: read as kubectl reads it, moved to the local endpoint, moved back.
//!
//! * [`tree`] keeps what it does not know.
//! * [`load`] finds the files and merges them.
//! * [`access`] says what one context stands for: a server, how to verify it, who the user is.
//! * [`exec`] runs a credential plugin.
//! * [`moved`] changes one cluster, and remembers in it what it was.
//! * [`names`] chooses the name that is verified in the apiservers' certificates.
//! * [`setup`] makes the files that a jackstay between the two needs.

mod access;
mod exec;
mod load;
pub mod moved;
pub mod names;
pub mod setup;
pub mod tree;

pub use access::{Credential, PemSource, ResolvedContext, ServerUrl, decode};
pub use exec::{ExecCredential, ExecPlugin};
pub use load::{Error, KubeconfigFiles, KubeconfigPaths, entry, entry_mut, names};
pub use names::CertificateNames;
pub use setup::system_cas;
