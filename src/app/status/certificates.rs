//! The serving certificates and the identities, in the status.

use std::path::Path;
use std::time::SystemTime;

use serde::Serialize;

use crate::net::tls::certificate::{CertInfo, Validity};
use crate::observe::utc::Utc;
use crate::upstream::credentials::{IdentitySlot, IdentityState};

/// A certificate. Its values are null if none is loaded.
#[derive(Serialize)]
pub(super) struct CertificateStatus {
    state: &'static str,
    subject: Option<String>,
    serial: Option<String>,
    not_after: Option<String>,
    /// Why it, or the present content of its file, cannot be used.
    error: Option<String>,
}

/// An identity.
#[derive(Serialize)]
pub(super) struct IdentityStatus<'a> {
    cert_file: &'a Path,
    #[serde(flatten)]
    certificate: CertificateStatus,
}

impl CertificateStatus {
    fn new(state: IdentityState, info: Option<&CertInfo>, error: Option<String>) -> Self {
        Self {
            state: state.as_str(),
            subject: info.map(|info| info.subject.to_string()),
            serial: info.map(|info| info.serial.clone()),
            not_after: info.map(|info| Utc(info.not_after).seconds()),
            error,
        }
    }

    /// A serving certificate at `now`. It is served even if it is not valid: clients decide.
    pub(super) fn serving(info: &CertInfo, now: SystemTime) -> Self {
        let state = match info.validity(now) {
            Validity::Valid => IdentityState::Loaded,
            Validity::NotYet => IdentityState::NotYetValid,
            Validity::Expired => IdentityState::Expired,
        };
        Self::new(state, Some(info), info.invalidity(now))
    }
}

impl<'a> IdentityStatus<'a> {
    /// An identity at `now`.
    pub(super) fn new(slot: &'a IdentitySlot, now: SystemTime) -> Self {
        let certificate =
            CertificateStatus::new(slot.state(now), slot.certificate().as_ref(), slot.error(now));
        Self { cert_file: &slot.paths.cert_file, certificate }
    }
}
