//! TLS errors in sentences, for logs, responses and diagnoses. The libraries' own texts are the names of Rust
//! values, such as `Other(OtherError(CaUsedAsEndEntity))`.

use std::fmt::Debug;
use std::io;

use rustls::{CertificateError, Error, InvalidMessage};

use super::refusal::CertificateRefusal;

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
    let text = describe_handshake_error(error);
    match tls_error(error).and_then(remedy_for_settings) {
        Some(remedy) => format!("{text}: {remedy}"),
        None => text,
    }
}

/// What to do about a server with which the handshake failed, as the description of the error ends.
pub fn server_remedy(error: &io::Error) -> Option<String> {
    let error = tls_error(error)?;
    let refusal = CertificateRefusal::of_error(error).map(|refusal| refusal.remedy().to_owned());
    refusal.or_else(|| remedy_for_settings(error).map(str::to_owned))
}

/// What to do if the server and jackstay do not agree on TLS, or the server refuses what jackstay shows.
fn remedy_for_settings(error: &Error) -> Option<&'static str> {
    use rustls::AlertDescription::{
        BadCertificate, CertificateExpired, CertificateRequired, CertificateUnknown,
        HandshakeFailure, InsufficientSecurity, ProtocolVersion, UnknownCA, UnrecognisedName,
        UnsupportedCertificate,
    };
    Some(match error {
        Error::PeerIncompatible(_)
        | Error::AlertReceived(HandshakeFailure | ProtocolVersion | InsufficientSecurity) => {
            "permit TLS 1.2 or 1.3 with a cipher suite of ECDHE and AES-GCM or ChaCha20 at the server \
             (`--tls-min-version`, `--tls-cipher-suites`)"
        }
        Error::AlertReceived(UnrecognisedName) => {
            "set the server name (`tls.server_name`, `tls-server-name`) to one that the server, or the proxy before it, \
             expects"
        }
        Error::AlertReceived(
            BadCertificate
            | CertificateExpired
            | CertificateRequired
            | CertificateUnknown
            | UnknownCA
            | UnsupportedCertificate,
        ) => "renew the client certificate, or name one that the server's client CA has signed",
        Error::InvalidCertificate(CertificateError::BadSignature) => {
            "give the server the certificate and the key that belong together"
        }
        _ => return None,
    })
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

/// Describes why a certificate is refused. A verifier of this package says it in a [`CertificateRefusal`]; the other
/// errors are those of the signature of a handshake.
fn describe_certificate_error(error: &CertificateError) -> String {
    match error {
        CertificateError::Other(other) => other.0.to_string(),
        CertificateError::BadSignature => {
            "the peer does not have the private key of its certificate".to_owned()
        }
        other => format!("the certificate is not valid: {}", name(other)),
    }
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

#[cfg(test)]
mod tests {
    use rustls::{AlertDescription, PeerIncompatible, PeerMisbehaved};

    use super::*;
    use crate::tls::refusal::RefusalKind;

    #[test]
    fn certificate_errors_become_sentences() {
        let kind = RefusalKind::Expired;
        let refusal = CertificateRefusal::of_peer(kind, "CN=n1", "expired today", "renew it");
        for (error, expected) in [
            (Error::from(refusal), "the certificate of CN=n1 expired today: renew it"),
            (
                CertificateError::BadSignature.into(),
                "the peer does not have the private key of its certificate",
            ),
            (
                CertificateError::UnhandledCriticalExtension.into(),
                "the certificate is not valid: unhandled critical extension",
            ),
        ] {
            assert_eq!(describe(&error), expected);
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
        let alert = Error::AlertReceived(AlertDescription::ProtocolVersion);
        let alert = io::Error::new(io::ErrorKind::InvalidData, alert);
        let text = describe_server_handshake_error(&alert);
        let start = "the peer sent the TLS alert \"protocol version\": permit TLS 1.2 or 1.3";
        assert!(text.starts_with(start), "{text}");
        assert!(text.ends_with(&server_remedy(&alert).unwrap()), "{text}");
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
