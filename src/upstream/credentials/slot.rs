//! One configured identity: its files and the last valid credential in them.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwapOption;
use jackstay_config::IdentitySource;
use jackstay_net::tls::certificate::{CertInfo, Subject, VERSION_1, VERSION_1_EFFECT, Validity};
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files::LoadedCert;

use super::client_tls::ClientTls;

/// A configured identity. Its files may not exist yet.
#[derive(Debug)]
pub struct IdentitySlot {
    /// The files of the certificate and its key, or the kubeconfig of its user.
    pub source: IdentitySource,
    pub(super) current: ArcSwapOption<Identity>,
    error: Mutex<Option<SlotError>>,
}

/// Whether an identity can be used. Only a loaded one and one that is not valid yet are: whether the clock
/// of this machine or that of the certificate's issuer is wrong, the apiserver decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdentityState {
    /// A valid certificate is loaded.
    Loaded,
    /// No certificate is loaded: its files do not exist yet.
    Awaited,
    /// The loaded certificate has expired. It is not used until its files are renewed.
    Expired,
    /// The loaded certificate is not valid yet.
    NotYetValid,
    /// Another identity of the listener has the same subject, and its certificate is used: it expires later.
    Superseded,
}

impl IdentityState {
    /// Its name in `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loaded => "loaded",
            Self::Awaited => "awaited",
            Self::Expired => "expired",
            Self::NotYetValid => "not yet valid",
            Self::Superseded => "superseded",
        }
    }
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
    pub(super) number: u32,
    pub(super) certificate: Arc<LoadedCert>,
    pub(super) tls: Arc<ClientTls>,
}

impl Identity {
    /// Whether the certificate has not expired. An apiserver refuses an expired one.
    pub(super) fn is_usable(&self, now: SystemTime) -> bool {
        self.certificate.info.validity(now) != Validity::Expired
    }
}

impl IdentitySlot {
    pub(super) fn new(source: &IdentitySource) -> Arc<Self> {
        Arc::new(Self {
            source: source.clone(),
            current: ArcSwapOption::empty(),
            error: Mutex::new(None),
        })
    }

    /// The paths of its files, also of those that its kubeconfig names.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        let configured = self.source.files().into_iter().map(Path::to_owned);
        let more = self.loaded().map(|loaded| loaded.more_files.clone());
        configured.chain(more.into_iter().flatten()).collect()
    }

    /// The loaded certificate with its chain, which may have expired.
    pub fn loaded(&self) -> Option<Arc<LoadedCert>> {
        self.current.load().as_ref().map(|identity| Arc::clone(&identity.certificate))
    }

    /// The loaded certificate, which may have expired.
    pub fn certificate(&self) -> Option<CertInfo> {
        self.current.load().as_ref().map(|identity| identity.certificate.info.clone())
    }

    /// The state of the identity at `now`.
    pub fn state(&self, now: SystemTime) -> IdentityState {
        match self.certificate().map(|info| info.validity(now)) {
            None => IdentityState::Awaited,
            Some(Validity::Valid) => IdentityState::Loaded,
            Some(Validity::NotYet) => IdentityState::NotYetValid,
            Some(Validity::Expired) => IdentityState::Expired,
        }
    }

    /// The credential, if it can be used at `now`.
    pub(super) fn usable(&self, now: SystemTime) -> Option<Arc<Identity>> {
        self.current.load_full().filter(|identity| identity.is_usable(now))
    }

    /// The number of the credential, if its subject is `subject` and it can be used at `now`.
    pub fn usable_number(&self, subject: &Subject, now: SystemTime) -> Option<u32> {
        let current = self.current.load();
        let identity = current.as_ref().filter(|identity| identity.is_usable(now))?;
        (identity.certificate.info.subject == *subject).then_some(identity.number)
    }

    /// The number of the credential, expired or not, if its subject is `subject`.
    pub(super) fn number_of(&self, subject: &Subject) -> Option<u32> {
        let current = self.current.load();
        let identity = current.as_ref()?;
        (identity.certificate.info.subject == *subject).then_some(identity.number)
    }

    /// Why the content of the files is not in use, why the certificate in use is not valid at `now` or is to end
    /// without a renewal, and why clients that present the same certificate are refused.
    pub fn error(&self, now: SystemTime) -> Option<String> {
        let info = self.certificate();
        let invalid = info
            .as_ref()
            .and_then(|info| info.invalidity(now).or_else(|| info.renewal_overdue(now)));
        let version_1 = info.filter(|info| info.is_version_1);
        let version_1 = version_1.map(|_| format!("{VERSION_1}; {VERSION_1_EFFECT}"));
        let error = self.last_error().as_ref().map(|error| error.text.clone());
        let all: Vec<String> = [invalid, version_1, error].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Why the content of the files is not in use, also while they are awaited.
    pub fn file_error(&self) -> Option<String> {
        self.last_error().as_ref().map(|error| error.text.clone())
    }

    /// Whether the content of the files is not in use, although they are not awaited. The files may have been
    /// read in the middle of a rotation, so they must be read again even if they do not change.
    pub fn is_invalid(&self) -> bool {
        self.last_error().as_ref().is_some_and(|error| !error.is_awaited)
    }

    /// Whether the content of the files is not in use, also while they are awaited.
    pub fn has_file_error(&self) -> bool {
        self.last_error().is_some()
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

/// The slot whose certificate of `subject` is used at `now`: one that is valid rather than not valid yet, and of these
/// the one that expires last. `None` if every certificate of the subject has expired.
pub fn in_use(
    slots: &[Arc<IdentitySlot>],
    subject: &Subject,
    now: SystemTime,
) -> Option<Arc<IdentitySlot>> {
    let mut best: Option<(&Arc<IdentitySlot>, (Validity, SystemTime))> = None;
    for slot in slots {
        let Some(identity) = slot.usable(now) else { continue };
        let info = &identity.certificate.info;
        let rank = (info.validity(now), info.not_after);
        if info.subject == *subject && best.as_ref().is_none_or(|(_, other)| *other < rank) {
            best = Some((slot, rank));
        }
    }
    best.map(|(slot, _)| Arc::clone(slot))
}

/// Whether another one of `slots` has the subject of `slot`, and its certificate is used at `now`.
pub fn is_superseded(
    slot: &Arc<IdentitySlot>,
    slots: &[Arc<IdentitySlot>],
    now: SystemTime,
) -> bool {
    let Some(info) = slot.certificate() else { return false };
    in_use(slots, &info.subject, now).is_some_and(|used| !Arc::ptr_eq(&used, slot))
}
