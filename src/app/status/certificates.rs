//! The serving certificates, the identities and the CA bundles, in the status.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use jackstay_config::{COPIED_IDENTITY, IdentitySource, KubeconfigUser};
use jackstay_net::tls::ca_bundle::CaBundle;
use jackstay_net::tls::certificate::{CertInfo, Validity};
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::utc::Utc;
use serde::Serialize;

use crate::upstream::Upstream;
use crate::upstream::credentials::{IdentitySlot, IdentityState, is_superseded};

/// A certificate. Its values are null if none is loaded.
#[derive(Serialize)]
pub(super) struct CertificateStatus {
    state: &'static str,
    subject: Option<String>,
    serial: Option<String>,
    not_after: Option<String>,
    /// Why it, or the present content of its file, cannot be used.
    pub(super) error: Option<String>,
}

/// An identity.
#[derive(Serialize)]
pub(super) struct IdentityStatus<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    cert_file: Option<&'a Path>,
    #[serde(flatten)]
    kubeconfig: Option<&'a KubeconfigUser>,
    #[serde(flatten)]
    pub(super) certificate: CertificateStatus,
    /// That nothing renews its files.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

/// A CA bundle.
#[derive(Serialize)]
pub(super) struct CaStatus {
    /// The file.
    pub(super) file: PathBuf,
    certificates: usize,
    expired: usize,
    /// Which of its certificates are not used or have expired, and why the present content of its file cannot be used.
    pub(super) error: Option<String>,
}

impl CaStatus {
    fn new(bundle: &CaBundle, error: Option<String>, now: SystemTime) -> Self {
        Self {
            file: bundle.file.clone(),
            certificates: bundle.count,
            expired: bundle.expired(now).len(),
            error: joined(bundle.skipped.iter().cloned().chain(bundle.expiry(now)).chain(error)),
        }
    }

    /// The client CA of a listener at `now`.
    pub(super) fn of_clients(tls: &ServingTls, now: SystemTime) -> Option<Self> {
        let ca = tls.client_ca();
        let bundle = ca.as_ref()?.bundle()?;
        Some(Self::new(bundle, tls.errors().client_ca.clone(), now))
    }

    /// The CA bundle of an upstream at `now`.
    pub(super) fn of_apiservers(upstream: &Upstream, now: SystemTime) -> Option<Self> {
        let (bundle, error) = upstream.credentials.ca_bundle()?;
        Some(Self::new(&bundle, error.map(|error| String::clone(&error)), now))
    }
}

/// The errors as one text; `None` if there is none.
fn joined(errors: impl IntoIterator<Item = String>) -> Option<String> {
    let errors: Vec<String> = errors.into_iter().collect();
    (!errors.is_empty()).then(|| errors.join("; "))
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
    pub(super) fn serving(tls: &ServingTls, now: SystemTime) -> Self {
        let info = &tls.certificate().info;
        let state = match info.validity(now) {
            Validity::Valid => IdentityState::Loaded,
            Validity::NotYet => IdentityState::NotYetValid,
            Validity::Expired => IdentityState::Expired,
        };
        let error = tls.errors().certificate.clone();
        let error = joined(info.invalidity(now).into_iter().chain(error));
        Self::new(state, Some(info), error)
    }
}

impl<'a> IdentityStatus<'a> {
    /// An identity of a listener with `slots` at `now`. `config` is the file of the configuration.
    pub(super) fn new(
        slot: &'a Arc<IdentitySlot>,
        slots: &[Arc<IdentitySlot>],
        config: Option<&Path>,
        now: SystemTime,
    ) -> Self {
        let info = slot.certificate();
        let certificate = if is_superseded(slot, slots, now) {
            CertificateStatus::new(IdentityState::Superseded, info.as_ref(), slot.file_error())
        } else {
            CertificateStatus::new(slot.state(now), info.as_ref(), slot.error(now))
        };
        let is_used = certificate.state != IdentityState::Superseded.as_str();
        let is_copy = is_used && config.is_some_and(|config| slot.source.is_copy(config));
        let (cert_file, kubeconfig) = match &slot.source {
            IdentitySource::Files(paths) => (Some(&*paths.cert_file), None),
            IdentitySource::Kubeconfig(user) => (None, Some(user)),
        };
        let note = is_copy.then(|| COPIED_IDENTITY.to_owned());
        Self { cert_file, kubeconfig, certificate, note }
    }
}
