//! Authentication in kube-apiserver's order: client certificate, bearer token, anonymous.
//!
//! As with Go's `RequestClientCert`, the TLS handshake accepts every client certificate whose key the
//! client holds. This module verifies the certificate, so an invalid one leads to a 401 and not to a failed
//! handshake.

use base64::prelude::{BASE64_URL_SAFE_NO_PAD, Engine as _};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use serde_json::{Value, json};

/// An authenticated user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The name.
    pub name: String,
    /// The groups, including `system:authenticated` or `system:unauthenticated`.
    pub groups: Vec<String>,
}

impl User {
    /// A user in these groups and `system:authenticated`.
    pub fn new(name: &str, groups: &[&str]) -> Self {
        let mut groups: Vec<_> = groups.iter().map(|&g| g.to_owned()).collect();
        groups.push("system:authenticated".to_owned());
        Self { name: name.to_owned(), groups }
    }

    /// `system:anonymous`.
    pub fn anonymous() -> Self {
        Self {
            name: "system:anonymous".to_owned(),
            groups: vec!["system:unauthenticated".to_owned()],
        }
    }

    /// Whether this is `system:anonymous`.
    pub fn is_anonymous(&self) -> bool {
        self.name == "system:anonymous"
    }

    /// Whether the user may do everything without RBAC.
    pub fn is_master(&self) -> bool {
        self.groups.iter().any(|group| group == "system:masters")
    }

    /// The `userInfo` of a `SelfSubjectReview`.
    pub fn user_info(&self) -> Value {
        json!({ "username": self.name, "groups": self.groups })
    }
}

/// The client certificate of a connection.
#[derive(Debug, Clone)]
pub enum Certificate {
    /// The client sent no certificate.
    None,
    /// The verification failed.
    Invalid {
        /// The serial number (hex), if the certificate can be parsed.
        serial: Option<String>,
    },
    /// The certificate is valid.
    User {
        /// The user that the subject names.
        user: Box<User>,
        /// The serial number, hex.
        serial: String,
    },
}

impl Certificate {
    /// Verifies the certificate chain of a client at the system's date.
    pub fn verify(chain: Option<&[CertificateDer<'_>]>, verifier: &dyn ClientCertVerifier) -> Self {
        Self::verify_at(chain, verifier, UnixTime::now())
    }

    /// Verifies the certificate chain of a client at the date `now`.
    pub fn verify_at(
        chain: Option<&[CertificateDer<'_>]>,
        verifier: &dyn ClientCertVerifier,
        now: UnixTime,
    ) -> Self {
        let Some((leaf, intermediates)) = chain.and_then(<[_]>::split_first) else {
            return Self::None;
        };
        let Some((user, serial)) = user_and_serial(leaf) else {
            return Self::Invalid { serial: None };
        };
        match verifier.verify_client_cert(leaf, intermediates, now) {
            Ok(_) => Self::User { user: Box::new(user), serial },
            Err(_) => Self::Invalid { serial: Some(serial) },
        }
    }

    /// The serial number, hex.
    pub fn serial(&self) -> Option<String> {
        match self {
            Self::None => None,
            Self::Invalid { serial } => serial.clone(),
            Self::User { serial, .. } => Some(serial.clone()),
        }
    }
}

/// The user that the subject of a certificate names, and the serial number (hex).
fn user_and_serial(leaf: &CertificateDer<'_>) -> Option<(User, String)> {
    let (_, certificate) = x509_parser::parse_x509_certificate(leaf).ok()?;
    let subject = certificate.subject();
    let text = |attribute: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        attribute.as_str().ok().map(str::to_owned)
    };
    let name = subject.iter_common_name().find_map(text)?;
    let mut groups: Vec<_> = subject.iter_organization().filter_map(text).collect();
    groups.push("system:authenticated".to_owned());
    let serial = certificate.raw_serial_as_string().replace(':', "");
    Some((User { name, groups }, serial))
}

/// The user of a request; `None` leads to a 401. `user_of` maps a bearer token to its user.
pub(super) fn authenticate(
    certificate: &Certificate,
    headers: &http::HeaderMap,
    user_of: impl FnOnce(&str) -> Option<User>,
) -> Option<User> {
    match (certificate, bearer(headers)) {
        (Certificate::User { user, .. }, _) => Some((**user).clone()),
        (_, Some(token)) => user_of(&token),
        (Certificate::Invalid { .. }, None) => None,
        (Certificate::None, None) => Some(User::anonymous()),
    }
}

/// The bearer token, from `Authorization` (the second of the fields that spaces separate) or from the WebSocket
/// subprotocols.
fn bearer(headers: &http::HeaderMap) -> Option<String> {
    let header = headers.get(http::header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let mut fields = header.unwrap_or_default().trim().splitn(3, ' ');
    if let (Some(scheme), Some(token)) = (fields.next(), fields.next())
        && scheme.eq_ignore_ascii_case("bearer")
        && !token.is_empty()
    {
        return Some(token.to_owned());
    }
    headers
        .get_all(http::header::SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .find_map(|p| p.trim().strip_prefix("base64url.bearer.authorization.k8s.io."))
        .and_then(|token| BASE64_URL_SAFE_NO_PAD.decode(token).ok())
        .and_then(|bytes| String::from_utf8(bytes).ok())
}

/// Applies `Impersonate-User` and `Impersonate-Group`, which only members of `system:masters` may use.
///
/// # Errors
/// The message of a 403.
pub fn impersonate(user: User, headers: &http::HeaderMap) -> Result<User, String> {
    let text = |v: &http::HeaderValue| v.to_str().unwrap_or_default().to_owned();
    let Some(name) = headers.get("impersonate-user").map(text) else {
        return Ok(user);
    };
    if !user.groups.iter().any(|g| g == "system:masters") {
        return Err(format!(
            "users \"{name}\" is forbidden: User \"{}\" cannot impersonate resource \"users\" in \
             API group \"\" at the cluster scope",
            user.name
        ));
    }
    let mut groups: Vec<_> = headers.get_all("impersonate-group").iter().map(text).collect();
    groups.push("system:authenticated".to_owned());
    Ok(User { name, groups })
}
