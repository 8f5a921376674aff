//! The changes of credentials.

use std::sync::Arc;

use jackstay_net::tls::certificate::Subject;

use super::slot::IdentitySlot;

/// A change found by [`Credentials::refresh`](super::Credentials::refresh), for the log.
#[derive(Debug)]
pub enum CredentialChange {
    /// A new certificate is in use; its subject is unchanged or the first one.
    Identity(Arc<IdentitySlot>),
    /// A new certificate is in use; the previous one had this other subject.
    Replaced(Arc<IdentitySlot>, Subject),
    /// The files of an identity cannot be used; the last valid certificate stays in use.
    IdentityFailed(Arc<IdentitySlot>, String),
    /// The CA bundle has changed.
    Ca,
    /// The CA bundle cannot be used; the last valid one stays in use.
    CaFailed(String),
    /// The token for probes cannot be used; the last valid one stays in use.
    TokenFailed(String),
}
