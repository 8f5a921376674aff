//! TLS errors in sentences, for logs, responses and diagnoses. The libraries' own texts are the names of Rust
//! values, such as `Other(OtherError(CaUsedAsEndEntity))`.

use std::fmt::Debug;
use std::io;
use std::time::UNIX_EPOCH;

use rustls::pki_types::UnixTime;
use rustls::{CertificateError, Error, InvalidMessage};

use super::certificate::{VERSION_1, format_seconds};

/// The TLS error in an I/O error. If there is one, the peer has answered.
pub fn tls_error(error: &io::Error) -> Option<&Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

/// Describes why a handshake, or a connection after it, failed.
pub fn describe_handshake_error(error: &io::Error) -> String {
    match tls_error(error) {
        Some(error) => describe(error),
        None if is_closed(error) => {
            "the peer closed the connection in the TLS handshake".to_owned()
        }
        None => error.to_string(),
    }
}

/// Describes why a handshake with a server failed. One that closes the connection may speak another protocol:
/// a server of plain HTTP may not answer bytes that are no HTTP.
pub fn describe_server_handshake_error(error: &io::Error) -> String {
    if tls_error(error).is_none() && is_closed(error) {
        return "the server closed the connection in the TLS handshake: it may not speak TLS, or be \
                starting or stopping"
            .to_owned();
    }
    describe_handshake_error(error)
}

/// Whether the peer closed or reset the connection.
fn is_closed(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
    )
}

/// Describes a TLS error.
pub fn describe(error: &Error) -> String {
    match error {
        Error::InvalidCertificate(error) => describe_certificate_error(error),
        Error::AlertReceived(alert) => format!("the peer sent the TLS alert \"{}\"", name(alert)),
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the peer does not speak TLS".to_owned()
        }
        Error::InvalidMessage(why) => {
            format!("the peer sent a malformed TLS message: {}", name(why))
        }
        Error::PeerIncompatible(why) => {
            format!("the peer has incompatible TLS settings: {}", name(why))
        }
        Error::PeerMisbehaved(why) => format!("the peer violates the TLS protocol: {}", name(why)),
        Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => {
            "the peer sent a TLS message out of order".to_owned()
        }
        Error::NoCertificatesPresented => "the peer sent no certificate".to_owned(),
        Error::InvalidCertRevocationList(why) => {
            format!("the certificate revocation list is not valid: {}", name(why))
        }
        Error::InvalidEncryptedClientHello(why) => {
            format!("the encrypted ClientHello is not valid: {}", name(why))
        }
        Error::InconsistentKeys(_) => {
            "the private key does not belong to the certificate".to_owned()
        }
        other => other.to_string(),
    }
}

/// Names of a certificate in a sentence, at most this number.
const MAX_NAMES: usize = 8;

/// The first names, and how many more there are.
fn some_of(names: &[&str]) -> String {
    let shown = names[..names.len().min(MAX_NAMES)].join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Describes why a certificate, or its chain, is refused.
#[allow(deprecated)] // the variants without context are still sent by some verifiers
#[allow(clippy::too_many_lines, reason = "a table of texts")]
pub fn describe_certificate_error(error: &CertificateError) -> String {
    let text = match error {
        CertificateError::BadEncoding => "the certificate is damaged: not valid DER",
        CertificateError::Expired => "the certificate has expired",
        CertificateError::ExpiredContext { time, not_after } => {
            let (not_after, time) = (utc(*not_after), utc(*time));
            return format!("the certificate expired on {not_after}; the clock here says {time}");
        }
        CertificateError::NotValidYet => "the certificate is not valid yet: is the clock right?",
        CertificateError::NotValidYetContext { time, not_before } => {
            return format!(
                "the certificate is not valid before {}; the clock here says {}",
                utc(*not_before),
                utc(*time)
            );
        }
        CertificateError::Revoked => "the certificate is revoked",
        CertificateError::UnknownRevocationStatus => {
            "it is not known whether the certificate is revoked"
        }
        CertificateError::ExpiredRevocationList
        | CertificateError::ExpiredRevocationListContext { .. } => {
            "the certificate revocation list has expired"
        }
        CertificateError::UnhandledCriticalExtension => {
            "the certificate has a critical extension that is not supported"
        }
        CertificateError::UnknownIssuer => "the certificate is not signed by a trusted CA",
        CertificateError::BadSignature => {
            "a signature does not match: is the trusted CA another one with the same name?"
        }
        CertificateError::UnsupportedSignatureAlgorithm
        | CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "the certificate is signed with an algorithm that is not supported; SHA-1 and RSA keys \
             below 2048 bits are not"
        }
        CertificateError::NotValidForName => "the certificate is not valid for the server's name",
        CertificateError::NotValidForNameContext { expected, presented } => {
            let names: Vec<&str> = presented.iter().map(|name| plain_name(name)).collect();
            let valid_for = if names.is_empty() {
                ": it has no subject alternative name".to_owned()
            } else {
                format!(", only for {}", some_of(&names))
            };
            return format!("the certificate is not valid for {}{valid_for}", expected.to_str());
        }
        CertificateError::InvalidPurpose => {
            "the extended key usage of the certificate does not permit this purpose"
        }
        CertificateError::InvalidPurposeContext { required, presented } => {
            let presented: Vec<_> = presented.iter().map(ToString::to_string).collect();
            return format!(
                "the extended key usage of the certificate does not permit {required}, only {}",
                if presented.is_empty() { "nothing".to_owned() } else { presented.join(", ") }
            );
        }
        CertificateError::InvalidOcspResponse => "the OCSP response is not valid",
        CertificateError::ApplicationVerificationFailure => "the certificate is refused",
        CertificateError::Other(other) => {
            return match other.0.downcast_ref::<webpki::Error>() {
                Some(error) => describe_chain_error(error),
                None => other.0.to_string(),
            };
        }
        // The enum may gain variants.
        other => return other.to_string(),
    };
    text.to_owned()
}

/// Describes the errors of webpki for which rustls has no variant.
fn describe_chain_error(error: &webpki::Error) -> String {
    let text = match error {
        webpki::Error::UnsupportedCertVersion => VERSION_1,
        webpki::Error::CaUsedAsEndEntity => {
            "the certificate is that of a CA (basicConstraints CA:TRUE), which cannot be used as that of \
             a client or server"
        }
        webpki::Error::EndEntityUsedAsCa => {
            "a certificate of the chain is signed by one that is not a CA"
        }
        webpki::Error::PathLenConstraintViolated => {
            "the chain is longer than the path length of one of its CAs permits"
        }
        webpki::Error::NameConstraintViolation => {
            "a CA of the chain does not permit the names of the certificate"
        }
        webpki::Error::MaximumPathBuildCallsExceeded
        | webpki::Error::MaximumPathDepthExceeded
        | webpki::Error::MaximumSignatureChecksExceeded
        | webpki::Error::MaximumNameConstraintComparisonsExceeded => {
            "the chain takes too long to verify"
        }
        other => return format!("the certificate is not valid: {}", name(other)),
    };
    text.to_owned()
}

/// Replaces the text of an alert in that of an error of another library, which keeps only the text: `received
/// fatal alert: CertificateExpired`.
pub fn describe_alert_in(text: &str) -> String {
    const ALERT: &str = "received fatal alert: ";
    match text.split_once(ALERT) {
        Some((before, alert)) => {
            format!("{before}the peer sent the TLS alert \"{}\"", spaced(alert))
        }
        None => text.to_owned(),
    }
}

/// The name of a variant without its fields, in words: `no cipher suites in common`.
fn name(value: &impl Debug) -> String {
    let name = format!("{value:?}");
    spaced(name.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default())
}

/// `CertificateExpired` as `certificate expired`.
fn spaced(name: &str) -> String {
    let mut words = String::new();
    let mut follows_lower_case = false;
    for c in name.chars() {
        if c.is_ascii_uppercase() && follows_lower_case {
            words.push(' ');
        }
        follows_lower_case = c.is_ascii_lowercase() || c.is_ascii_digit();
        words.push(c.to_ascii_lowercase());
    }
    words
}

/// Extracts the name from its debug form, in which rustls passes it: `kubernetes` from
/// `DnsName("kubernetes")`, `10.0.0.1` from `IpAddress(10.0.0.1)`.
fn plain_name(debug: &str) -> &str {
    let inside = debug.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inside.unwrap_or(debug).trim_matches('"')
}

fn utc(time: UnixTime) -> String {
    let time = UNIX_EPOCH.checked_add(std::time::Duration::from_secs(time.as_secs()));
    format_seconds(time.unwrap_or(UNIX_EPOCH))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use rustls::pki_types::ServerName;
    use rustls::{
        AlertDescription, ExtendedKeyPurpose, OtherError, PeerIncompatible, PeerMisbehaved,
    };

    use super::*;

    /// An error of webpki as rustls passes it.
    fn other(error: webpki::Error) -> CertificateError {
        CertificateError::Other(OtherError(Arc::new(error)))
    }

    #[test]
    fn certificate_errors_become_sentences() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let wrong_name = |presented| CertificateError::NotValidForNameContext {
            expected: ServerName::try_from("lb.example").unwrap(),
            presented,
        };
        for (error, expected) in [
            (
                CertificateError::ExpiredContext { time: at(86_400), not_after: at(0) },
                "the certificate expired on 1970-01-01T00:00:00Z; the clock here says \
                 1970-01-02T00:00:00Z",
            ),
            (
                CertificateError::NotValidYetContext { time: at(0), not_before: at(86_400) },
                "the certificate is not valid before 1970-01-02T00:00:00Z; the clock here says \
                 1970-01-01T00:00:00Z",
            ),
            (
                wrong_name(vec!["DnsName(\"kubernetes\")".into(), "IpAddress(10.0.0.1)".into()]),
                "the certificate is not valid for lb.example, only for kubernetes, 10.0.0.1",
            ),
            (
                wrong_name((1..=38).map(|n| format!("IpAddress(10.0.0.{n})")).collect()),
                "the certificate is not valid for lb.example, only for 10.0.0.1, 10.0.0.2, 10.0.0.3, \
                 10.0.0.4, 10.0.0.5, 10.0.0.6, 10.0.0.7, 10.0.0.8 and 30 more",
            ),
            (
                wrong_name(vec![]),
                "the certificate is not valid for lb.example: it has no subject alternative name",
            ),
            (CertificateError::UnknownIssuer, "the certificate is not signed by a trusted CA"),
            (
                CertificateError::InvalidPurposeContext {
                    required: ExtendedKeyPurpose::ClientAuth,
                    presented: vec![ExtendedKeyPurpose::ServerAuth],
                },
                "the extended key usage of the certificate does not permit client authentication, only \
                 server authentication",
            ),
            (
                other(webpki::Error::CaUsedAsEndEntity),
                "the certificate is that of a CA (basicConstraints CA:TRUE), which cannot be used as \
                 that of a client or server",
            ),
            (other(webpki::Error::UnsupportedCertVersion), VERSION_1),
            (
                other(webpki::Error::MalformedExtensions),
                "the certificate is not valid: malformed extensions",
            ),
        ] {
            assert_eq!(describe(&Error::InvalidCertificate(error)), expected);
        }
    }

    #[test]
    fn other_tls_errors_become_sentences() {
        for (error, expected) in [
            (
                Error::AlertReceived(AlertDescription::CertificateExpired),
                "the peer sent the TLS alert \"certificate expired\"",
            ),
            (
                Error::AlertReceived(AlertDescription::UnknownCA),
                "the peer sent the TLS alert \"unknown ca\"",
            ),
            (
                Error::InvalidMessage(InvalidMessage::InvalidContentType),
                "the peer does not speak TLS",
            ),
            (
                Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon),
                "the peer has incompatible TLS settings: no cipher suites in common",
            ),
            (
                Error::PeerMisbehaved(PeerMisbehaved::TooManyEmptyFragments),
                "the peer violates the TLS protocol: too many empty fragments",
            ),
        ] {
            let io = io::Error::new(io::ErrorKind::InvalidData, error);
            assert_eq!(describe_handshake_error(&io), expected);
        }
        for kind in [io::ErrorKind::UnexpectedEof, io::ErrorKind::ConnectionReset] {
            let closed = io::Error::new(kind, "tls handshake eof");
            assert_eq!(
                describe_handshake_error(&closed),
                "the peer closed the connection in the TLS handshake"
            );
            let of_server = describe_server_handshake_error(&closed);
            let expected =
                "the server closed the connection in the TLS handshake: it may not speak TLS";
            assert!(of_server.starts_with(expected), "{of_server}");
        }
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert_eq!(describe_handshake_error(&refused), refused.to_string());
        assert_eq!(describe_server_handshake_error(&refused), refused.to_string());
        assert_eq!(
            describe_alert_in("connection error: received fatal alert: CertificateRequired"),
            "connection error: the peer sent the TLS alert \"certificate required\""
        );
        assert_eq!(describe_alert_in("closed"), "closed");
    }
}
