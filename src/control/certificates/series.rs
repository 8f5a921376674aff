//! The metrics of certificates in use: their validity, and whether the present content of their files is in use.

use std::sync::Arc;
use std::time::SystemTime;

use jackstay_net::tls::ca_bundle::CaBundle;
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::utc::wall_clock;

use crate::observe::{CertificateExpiry, Metrics};
use crate::upstream::Upstream;
use crate::upstream::credentials::{IdentitySlot, is_superseded};

/// One certificate or file, as the metrics show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateState {
    /// The label `kind`.
    kind: &'static str,
    /// The label `name`.
    name: String,
    /// First and last second of the certificate in use.
    validity: Option<(SystemTime, SystemTime)>,
    /// Whether the present content of the files is in use.
    is_reloaded: bool,
}

/// The identities, the CA bundle and the token for probes of an upstream.
pub fn of_upstream(upstream: &Upstream) -> Vec<CertificateState> {
    let credentials = &upstream.credentials;
    let (slots, now) = (credentials.slots(), wall_clock());
    // The expiry of a certificate whose subject is served with another one has no effect.
    let in_use = |slot: &Arc<IdentitySlot>| !is_superseded(slot, &slots, now);
    let identities = slots.iter().map(|slot| CertificateState {
        kind: "identity",
        name: slot.source.to_string(),
        validity: slot
            .certificate()
            .filter(|_| in_use(slot))
            .map(|info| (info.not_before, info.not_after)),
        is_reloaded: !slot.has_file_error(),
    });
    let bundle = credentials.ca_bundle().map(|(bundle, _)| bundle);
    let has_ca = bundle.is_some() || credentials.has_ca_error();
    let ca = has_ca.then(|| CertificateState {
        kind: "upstream_ca",
        name: upstream.name.to_string(),
        validity: bundle.and_then(|bundle| last_to_expire(&bundle)),
        is_reloaded: !credentials.has_ca_error(),
    });
    let token = credentials.probe_token().map(|token| CertificateState {
        kind: "probe_token",
        name: upstream.name.to_string(),
        validity: None,
        is_reloaded: token.error().is_none(),
    });
    identities.chain(ca).chain(token).collect()
}

/// The serving certificate and the client CA of a listener.
pub fn of_listener(tls: &ServingTls, listener: &str) -> Vec<CertificateState> {
    let (info, errors) = (tls.certificate(), tls.errors());
    let serving = CertificateState {
        kind: "serving",
        name: listener.to_owned(),
        validity: Some((info.info.not_before, info.info.not_after)),
        is_reloaded: errors.certificate.is_none(),
    };
    let client_ca = tls.client_ca();
    let has_ca = client_ca.is_some() || errors.client_ca.is_some();
    let client_ca = has_ca.then(|| CertificateState {
        kind: "client_ca",
        name: listener.to_owned(),
        validity: client_ca.as_ref().and_then(|ca| last_to_expire(ca.bundle()?)),
        is_reloaded: errors.client_ca.is_none(),
    });
    [serving].into_iter().chain(client_ca).collect()
}

/// The validity of the last certificate of a bundle to expire: until then the bundle verifies something.
fn last_to_expire(bundle: &CaBundle) -> Option<(SystemTime, SystemTime)> {
    let last = bundle.certificates.iter().max_by_key(|info| info.not_after)?;
    Some((last.not_before, last.not_after))
}

/// The series of certificates, which exist while this does.
#[derive(Default)]
pub struct CertificateSeries {
    shown: Vec<CertificateState>,
    handles: Vec<Arc<CertificateExpiry>>,
}

impl CertificateSeries {
    /// Sets the series to `states`, and ends those of other certificates.
    pub fn update(&mut self, states: Vec<CertificateState>, metrics: &Metrics) {
        if states == self.shown {
            return;
        }
        let handle = |state: &CertificateState| {
            let handle = metrics.certificate_expiry(state.kind, &state.name);
            if let Some((not_before, not_after)) = state.validity {
                handle.set(not_before, not_after);
            }
            handle.set_reloaded(state.is_reloaded);
            handle
        };
        self.handles = states.iter().map(handle).collect();
        self.shown = states;
    }
}
