//! One configured identity and the credential that its files held last.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    error: Mutex<Option<SlotError>>,
}

/// Why the content of the files is not in use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SlotError {
    text: String,
    /// No credential was loaded so far, and the files do not exist.
    is_awaited: bool,
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
        self.last_error().as_ref().map(|error| error.text.clone())
    }

    /// Whether the files exist and cannot be used. They may have been read in the middle of a
    /// rotation, and must be read again even if they do not change.
    pub fn is_invalid(&self) -> bool {
        self.last_error().as_ref().is_some_and(|error| !error.is_awaited)
    }

    pub(super) fn clear_error(&self) {
        *self.last_error() = None;
    }

    fn last_error(&self) -> MutexGuard<'_, Option<SlotError>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The files cannot be used. Returns the error, unless it is the same as before.
    pub(super) fn failed(&self, error: &TlsFileError) -> Option<String> {
        let is_awaited = error.is_missing() && self.current.load().is_none();
        let text = if is_awaited { format!("awaited: {error}") } else { error.to_string() };
        let previous = self.last_error().replace(SlotError { text: text.clone(), is_awaited });
        previous.is_none_or(|previous| previous.text != text).then_some(text)
    }
}
