//! One configured identity and the credential that its files held last.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;

use super::client_tls::ClientTls;
use crate::config::CertPaths;
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::net::tls::file_error::TlsFileError;
use crate::net::tls::pem_files::LoadedCert;

/// A configured identity: its files, which may not exist yet, and the last valid credential in them.
#[derive(Debug)]
pub struct IdentitySlot {
    /// The files.
    pub paths: CertPaths,
    pub(super) current: ArcSwapOption<Identity>,
    error: Mutex<Option<String>>,
}

/// The credential in a slot.
#[derive(Debug)]
pub(super) struct Identity {
    /// Number of the subject in this slot, never reused for another subject.
    pub(super) number: usize,
    pub(super) certificate: Arc<LoadedCert>,
    pub(super) tls: Arc<ClientTls>,
}

impl IdentitySlot {
    pub(super) fn new(paths: &CertPaths) -> Arc<Self> {
        Arc::new(Self {
            paths: paths.clone(),
            current: ArcSwapOption::empty(),
            error: Mutex::new(None),
        })
    }

    /// The certificate in use.
    pub fn certificate(&self) -> Option<CertInfo> {
        self.current.load().as_ref().map(|identity| identity.certificate.info.clone())
    }

    /// The number of the credential in use, if its subject is `subject`.
    pub fn number_of(&self, subject: &Subject) -> Option<usize> {
        let current = self.current.load();
        let identity = current.as_ref()?;
        (identity.certificate.info.subject == *subject).then_some(identity.number)
    }

    /// Why the content of the files is not in use.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the error; returns whether it has changed.
    pub(super) fn set_error(&self, error: Option<String>) -> bool {
        let mut slot = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *slot != error;
        *slot = error;
        changed
    }

    /// The files cannot be used. Returns the error, unless it is the same as before.
    pub(super) fn failed(&self, error: &TlsFileError) -> Option<String> {
        let text = if error.is_missing() && self.current.load().is_none() {
            format!("awaited: {error}")
        } else {
            error.to_string()
        };
        self.set_error(Some(text.clone())).then_some(text)
    }
}
