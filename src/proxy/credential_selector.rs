//! Selects the credential with which a request is sent upstream.
//!
//! jackstay terminates TLS, so the apiserver does not see the client's certificate. A request is sent
//! upstream only with the identity that its client has proven:
//!
//! | client certificate | bearer token | request |
//! |---|---|---|
//! | valid, with the subject of a configured identity | any | sent on connections with that identity's certificate; the apiserver, too, tries x509 before tokens |
//! | valid, with the subject of a configured identity whose certificate has expired | any | refused with 401 |
//! | valid, with any other subject | any | refused with 401 |
//! | expired or unverifiable | yes | sent on connections without a certificate; the apiserver, too, tries the token after x509 fails |
//! | expired or unverifiable | no | refused with 401 |
//! | none | yes | sent on connections without a certificate |
//! | none | no | sent on connections without a certificate that carry no tokens |
//! | not verified yet, because too many others wait for verification | any | refused with 429 |

use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use http::{HeaderMap, StatusCode};
use jackstay_core::admission::Refusal;
use jackstay_core::request::status_error::StatusError;
use jackstay_net::tls::certificate::CertInfo;
use jackstay_sys::sockets::source::Source;
use jackstay_sys::utc::wall_clock;

use super::admission::proven_tokens::{LastToken, ProvenTokens, TokenKey};
use super::bearer_token::BearerToken;
use super::client_certificate::ClientCertificate;
use crate::upstream::credentials::{CredentialClass, IdentitySlot};

/// Selects the credentials for the requests of one listener.
pub struct CredentialSelector {
    /// The identities that this listener may use.
    pub slots: Vec<Arc<IdentitySlot>>,
    /// Name of the listener, for error messages.
    pub listener: String,
    /// The server names of connections that the listener passes through, for error messages.
    pub passthrough_names: Vec<String>,
    /// Tokens that the apiserver has accepted.
    pub tokens: Rc<ProvenTokens>,
}

/// The credential with which a request is sent upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectedCredential {
    /// The class of the connections that the request may use.
    pub class: CredentialClass,
    /// The bearer token, if the response shows whether the apiserver accepts it.
    pub token: Option<TokenKey>,
}

/// Whether a response proves the token of a request that was sent with an unproven one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenProof {
    /// It does not, or the token was proven before the request was sent.
    Missing,
    /// It is the first response that proves the token.
    First,
    /// Another response has proven the token meanwhile.
    Repeated,
}

impl CredentialSelector {
    /// Selects the credential of a request with these headers. `upgrade` says whether the request asks for an
    /// upgrade.
    ///
    /// # Errors
    /// 401 if the client has proven no usable identity; 429 if its certificate is not verified yet.
    pub fn select(
        &self,
        certificate: Option<&ClientCertificate>,
        (last, source): (&LastToken, Source),
        headers: &HeaderMap,
        upgrade: bool,
    ) -> Result<SelectedCredential, StatusError> {
        let token = BearerToken::find(headers, upgrade);
        let without_certificate = |token| self.without_certificate(token, last, source);
        let Some(certificate) = certificate else {
            return Ok(without_certificate(token));
        };
        let now = wall_clock();
        match certificate.validity(now) {
            Some(Ok(info)) => {
                let class = self.identity_class(info, now)?;
                Ok(SelectedCredential { class, token: None })
            }
            Some(Err(_)) if token.is_some() => Ok(without_certificate(token)),
            Some(Err(reason)) => Err(StatusError::unauthorized(format_args!(
                "the client certificate {}cannot be verified: {reason}",
                certificate.info().map_or(String::new(), |info| format!("of {} ", info.subject)),
            ))),
            None => Err(Refusal::CertificateQueue.into()),
        }
    }

    /// Whether the certificate is valid now and has the subject of a configured identity that has not expired.
    pub fn is_identity(&self, certificate: &ClientCertificate) -> bool {
        let now = wall_clock();
        match certificate.validity(now) {
            Some(Ok(client)) => self.identity_number(client, now).is_some(),
            Some(Err(_)) | None => false,
        }
    }

    /// The number of the identity with the subject of this certificate, if one can be used at `now`.
    fn identity_number(&self, client: &CertInfo, now: SystemTime) -> Option<u32> {
        self.slots.iter().find_map(|slot| slot.usable_number(&client.subject, now))
    }

    fn without_certificate(
        &self,
        token: Option<BearerToken<'_>>,
        last: &LastToken,
        source: Source,
    ) -> SelectedCredential {
        let Some(token) = token else {
            return SelectedCredential { class: CredentialClass::Anonymous, token: None };
        };
        let BearerToken::One(token) = token else {
            return SelectedCredential { class: CredentialClass::UnprovenToken, token: None };
        };
        let (proven, key) = last.check(&token, source, &self.tokens);
        let class = if proven { CredentialClass::Token } else { CredentialClass::UnprovenToken };
        SelectedCredential { class, token: Some(key) }
    }

    fn identity_class(
        &self,
        client: &CertInfo,
        now: SystemTime,
    ) -> Result<CredentialClass, StatusError> {
        if let Some(number) = self.identity_number(client, now) {
            return Ok(CredentialClass::Identity(number));
        }
        for slot in &self.slots {
            let own = slot.certificate().filter(|own| own.subject == client.subject);
            if let Some(reason) = own.and_then(|own| own.invalidity(now)) {
                return Err(StatusError::unauthorized(format_args!(
                    "the client certificate of {} is valid, but that of jackstay for this subject cannot \
                     be used: {reason}; renew {}",
                    client.subject, slot.source
                )));
            }
        }
        let missing = self.slots.iter().filter(|slot| slot.certificate().is_none());
        let missing: Vec<_> = missing.map(|slot| slot.source.to_string()).collect();
        let hint = match &*missing {
            [] => String::new(),
            missing => format!(" (still waiting for {})", missing.join(", ")),
        };
        Err(StatusError::unauthorized(format_args!(
            "the client certificate of {} is valid, but jackstay has no credential for that \
             subject: add its cert_file and key_file to `identities` of listener `{}`{hint}, or {}",
            client.subject,
            self.listener,
            self.passed_through_instead()
        )))
    }

    /// How a client with a certificate of its own reaches the apiservers, which see the certificate then.
    fn passed_through_instead(&self) -> String {
        if self.passthrough_names.is_empty() {
            return "set passthrough_server_names of the listener to a name in the apiservers' certificates, and \
                    tls-server-name of the client's kubeconfig to the same name"
                .to_owned();
        }
        format!(
            "set tls-server-name of the client's kubeconfig to {}, and its certificate-authority to that of the \
             apiservers",
            self.passthrough_names.join(" or ")
        )
    }

    /// Learns from the response to a request of a client at `source` whether the apiserver accepts its token.
    pub fn learn(
        &self,
        sent: SelectedCredential,
        source: Source,
        status: StatusCode,
    ) -> TokenProof {
        let Some(token) = sent.token else { return TokenProof::Missing };
        if status == StatusCode::UNAUTHORIZED {
            self.tokens.remove(token);
        } else if sent.class.is_unproven_token()
            && (status.is_success()
                || status == StatusCode::FORBIDDEN
                || status == StatusCode::SWITCHING_PROTOCOLS)
        {
            // The apiserver sends a 403 after authentication; a 400 or 404 may precede it.
            let is_new = self.tokens.insert(token, source);
            return if is_new { TokenProof::First } else { TokenProof::Repeated };
        }
        TokenProof::Missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderValue, header};

    const SOURCE: Source = Source::User(1);

    fn selector() -> CredentialSelector {
        CredentialSelector {
            slots: Vec::new(),
            listener: "l".to_owned(),
            passthrough_names: Vec::new(),
            tokens: Rc::default(),
        }
    }

    fn select(selector: &CredentialSelector, authorization: &str) -> SelectedCredential {
        let value = HeaderValue::from_str(authorization).unwrap();
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value)]);
        selector.select(None, (&LastToken::default(), SOURCE), &headers, false).unwrap()
    }

    #[test]
    fn learn_accepts_tokens_by_responses_sent_after_authentication() {
        let selector = selector();
        for (status, proven) in [
            (101, true), // exec, attach, port-forward
            (200, true),
            (201, true),
            (403, true),
            (400, false),
            (401, false),
            (404, false),
            (503, false),
        ] {
            let token = format!("Bearer {status}");
            let sent = select(&selector, &token);
            assert_eq!(sent.class, CredentialClass::UnprovenToken);
            let proof = selector.learn(sent, SOURCE, StatusCode::from_u16(status).unwrap());
            assert_eq!(proof, if proven { TokenProof::First } else { TokenProof::Missing });
            let repeated = selector.learn(sent, SOURCE, StatusCode::OK);
            assert_eq!(repeated == TokenProof::Repeated, proven, "{status}");
            if !proven {
                selector.learn(sent, SOURCE, StatusCode::UNAUTHORIZED);
            }
            let now = select(&selector, &token);
            assert_eq!(now.class == CredentialClass::Token, proven, "{status}");
            assert_eq!(now.token, sent.token);
        }
        selector.learn(select(&selector, "Bearer 101"), SOURCE, StatusCode::UNAUTHORIZED);
        assert_eq!(select(&selector, "Bearer 101").class, CredentialClass::UnprovenToken);
    }

    #[test]
    fn what_follows_the_token_does_not_change_its_key() {
        let selector = selector();
        selector.learn(select(&selector, "Bearer good"), SOURCE, StatusCode::OK);
        for n in 0..5000 {
            let sent = select(&selector, &format!("bearer good {n}"));
            assert_eq!(sent.class, CredentialClass::Token, "{n}");
            selector.learn(sent, SOURCE, StatusCode::OK);
        }
        assert_eq!(select(&selector, "Bearer good").class, CredentialClass::Token);
        assert_eq!(select(&selector, "Bearer other").class, CredentialClass::UnprovenToken);
        assert_eq!(select(&selector, "Bearer  good").class, CredentialClass::Anonymous);
    }

    #[test]
    fn a_request_with_two_tokens_proves_neither() {
        let selector = selector();
        let headers = HeaderMap::from_iter(
            [
                (header::UPGRADE, "websocket"),
                (header::AUTHORIZATION, "Bearer random"),
                (header::SEC_WEBSOCKET_PROTOCOL, "base64url.bearer.authorization.k8s.io.Z29vZA"),
            ]
            .map(|(name, value)| (name, HeaderValue::from_static(value))),
        );
        let last = LastToken::default();
        let sent = selector.select(None, (&last, SOURCE), &headers, true).unwrap();
        assert_eq!(sent.class, CredentialClass::UnprovenToken);
        selector.learn(sent, SOURCE, StatusCode::SWITCHING_PROTOCOLS);
        for token in ["Bearer random", "Bearer good"] {
            assert_eq!(select(&selector, token).class, CredentialClass::UnprovenToken, "{token}");
        }
    }
}
