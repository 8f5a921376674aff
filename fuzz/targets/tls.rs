//! Bytes of TLS: the first message of a client, and certificates.

use jackstay::proxy::passthrough::client_hello::{ClientHello, MAX_LENGTH, read};
use jackstay_net::tls::certificate::{Subject, cert_info, validity};
use jackstay_net::tls::client_chain::exceeded_limit;
use jackstay_net::tls::local_ca;
use rustls::pki_types::CertificateDer;

/// The start of a connection: a result from a prefix does not change when more bytes arrive.
pub(super) fn hello(bytes: &[u8]) {
    let mut result = ClientHello::Incomplete;
    for end in 0..=bytes.len().min(MAX_LENGTH) {
        let now = read(&bytes[..end]);
        let is_stable = result == ClientHello::Incomplete || result == now;
        assert!(is_stable, "{result:?}, then {now:?} at {end}");
        result = now;
    }
}

/// A certificate: names for messages contain no control character, and all readers agree about validity.
pub(super) fn certificate(bytes: &[u8]) {
    let der = CertificateDer::from(bytes);
    let has_controls = |text: &str| text.chars().any(char::is_control);
    let subject = Subject::from_der(&der);
    let info = cert_info(&der);
    if let Ok(info) = &info {
        assert_eq!(subject.as_ref().ok(), Some(&info.subject));
        assert_eq!(validity(&der).ok(), Some((info.not_before, info.not_after)));
        let _ = local_ca::renewal_time(info);
    }
    if let Ok(subject) = subject {
        let text = subject.to_string();
        assert!(!has_controls(&text), "{text:?}");
        assert!(subject.common_name() != Some(""));
    }
    for name in local_ca::subject_alt_names(&der).unwrap_or_default() {
        assert!(!has_controls(&name), "{name:?}");
    }
    assert!(!has_controls(&local_ca::issuer_name(&der)));
    let _ = local_ca::is_constrained_issuer(&der, &der);
    let others = vec![der.clone(); bytes.len() % 8];
    let _ = exceeded_limit(&der, &others);
}
