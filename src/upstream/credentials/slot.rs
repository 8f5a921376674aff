//! One configured identity: its files and the last valid credential in them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwapOption;

use super::client_tls::ClientTls;
use crate::config::CertPaths;
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::net::tls::file_error::TlsFileError;
use crate::net::tls::pem_files::LoadedCert;

/// A configured identity. Its files may not exist yet.
#[derive(Debug)]
pub struct IdentitySlot {
    /// The files of the certificate and its key.
    pub paths: CertPaths,
    pub(super) current: ArcSwapOption<Identity>,
    error: Mutex<Option<SlotError>>,
}

/// Why the content of the files is not in use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SlotError {
    text: String,
    /// The files do not exist, and no credential has been loaded from them.
    is_awaited: bool,
}

/// The credential in a slot.
#[derive(Debug)]
pub(super) struct Identity {
    /// The number of the credential, never reused for another subject.
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

    /// Whether the content of the files is not in use, although they are not awaited. The files may have been
    /// read in the middle of a rotation, so they must be read again even if they do not change.
    pub fn is_invalid(&self) -> bool {
        self.last_error().as_ref().is_some_and(|error| !error.is_awaited)
    }

    pub(super) fn clear_error(&self) {
        *self.last_error() = None;
    }

    fn last_error(&self) -> MutexGuard<'_, Option<SlotError>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the files cannot be used. Returns the error if it is another one than before.
    pub(super) fn failed(&self, error: &TlsFileError) -> Option<String> {
        let is_awaited = error.is_missing() && self.current.load().is_none();
        let text = if is_awaited { format!("awaited: {error}") } else { error.to_string() };
        let previous = self.last_error().replace(SlotError { text: text.clone(), is_awaited });
        previous.is_none_or(|previous| previous.text != text).then_some(text)
    }
}
