//! Points the kubeconfig of a user at jackstay, and reverts it.
//!
//! * [`rewrite`] points one cluster at jackstay.
//! * [`verified_names`] selects the name to verify in the apiservers' certificates.
//! * [`setup`] plans the configuration and the certificates of a jackstay for the cluster.
//!
//! Every error names the file or the entry and holds no secret.

pub mod rewrite;
pub mod setup;
pub mod verified_names;
