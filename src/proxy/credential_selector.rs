//! Selects the credential with which a request is sent upstream.
//!
//! jackstay terminates TLS, so the apiserver does not see the client's certificate. A request is sent
//! upstream only with the identity that its client has proven:
//!
//! | client certificate | bearer token | request |
//! |---|---|---|
//! | valid, with the subject of a configured identity | any | sent on connections with that identity's certificate; the apiserver, too, tries x509 before tokens |
//! | valid, with any other subject | any | refused with 401 |
//! | expired or unverifiable | yes | sent on connections without a certificate; the apiserver, too, tries the token after x509 fails |
//! | expired or unverifiable | no | refused with 401 |
//! | none | yes | sent on connections without a certificate |
//! | none | no | sent on connections without a certificate that carry no tokens |
//! | not verified yet, because too many others wait for verification | any | refused with 429 |

use std::cell::{Cell, RefCell};
use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::Arc;

use http::{HeaderMap, StatusCode, header};

use super::client_certificate::ClientCertificate;
use super::hygiene::list_items;
use super::status_error::StatusError;
use crate::net::tls::certificate::CertInfo;
use crate::observe::utc::wall_clock;
use crate::upstream::credentials::{CredentialClass, IdentitySlot};

/// Maximum number of accepted tokens that are remembered. A node has some hundred pods.
const MAX_PROVEN_TOKENS: usize = 4096;

/// Selects the credentials for the requests of one listener.
pub struct CredentialSelector {
    /// The identities that this listener may use.
    pub slots: Vec<Arc<IdentitySlot>>,
    /// Name of the listener, for error messages.
    pub listener: String,
    /// Tokens that the apiserver has accepted.
    pub tokens: Rc<ProvenTokens>,
}

impl CredentialSelector {
    /// The class of the connections that a request with these headers may use. `upgrade` says whether the
    /// request asks for an upgrade.
    ///
    /// # Errors
    /// 401 if the client has proven no usable identity; 429 if its certificate is not verified yet.
    pub fn select(
        &self,
        certificate: Option<&ClientCertificate>,
        last: &LastToken,
        headers: &HeaderMap,
        upgrade: bool,
    ) -> Result<CredentialClass, StatusError> {
        let token = bearer(headers, upgrade);
        let Some(certificate) = certificate else {
            return Ok(self.without_certificate(token, last));
        };
        match certificate.validity(wall_clock()) {
            Some(Ok(info)) => self.identity_class(info),
            Some(Err(_)) if token.is_some() => Ok(self.without_certificate(token, last)),
            Some(Err(reason)) => Err(StatusError::unauthorized(format_args!(
                "the client certificate {}cannot be verified: {reason}",
                certificate.info().map_or(String::new(), |info| format!("of {} ", info.subject)),
            ))),
            None => Err(StatusError::too_many_requests(
                "the client certificate chain is not verified yet: too many others wait for that",
            )),
        }
    }

    /// Whether the certificate is valid now and has the subject of a configured identity.
    pub fn is_identity(&self, certificate: &ClientCertificate) -> bool {
        let validity = certificate.validity(wall_clock());
        validity.is_some_and(|validity| {
            validity.is_ok_and(|info| {
                self.slots.iter().any(|slot| slot.number_of(&info.subject).is_some())
            })
        })
    }

    fn without_certificate(&self, token: Option<&[u8]>, last: &LastToken) -> CredentialClass {
        match token {
            None => CredentialClass::Anonymous,
            Some(token) if last.is_proven(token, &self.tokens) => CredentialClass::Token,
            Some(_) => CredentialClass::UnprovenToken,
        }
    }

    fn identity_class(&self, client: &CertInfo) -> Result<CredentialClass, StatusError> {
        if let Some(number) = self.slots.iter().find_map(|slot| slot.number_of(&client.subject)) {
            return Ok(CredentialClass::Identity(number));
        }
        let missing = self.slots.iter().filter(|slot| slot.certificate().is_none());
        let missing: Vec<_> =
            missing.map(|slot| slot.paths.cert_file.display().to_string()).collect();
        let hint = match &*missing {
            [] => String::new(),
            missing => format!(" (still waiting for {})", missing.join(", ")),
        };
        Err(StatusError::unauthorized(format_args!(
            "the client certificate of {} is valid, but jackstay has no credential for that \
             subject: add its cert_file and key_file to `identities` of listener `{}`{hint}",
            client.subject, self.listener
        )))
    }

    /// Learns from the response to a request whether the apiserver accepts its token.
    pub fn learn(&self, token: &[u8], class: CredentialClass, status: StatusCode) {
        let token = token.trim_ascii();
        if status == StatusCode::UNAUTHORIZED {
            self.tokens.remove(token);
        } else if class == CredentialClass::UnprovenToken
            && (status.is_success()
                || status == StatusCode::FORBIDDEN
                || status == StatusCode::SWITCHING_PROTOCOLS)
        {
            // The apiserver sends a 403 after authentication; a 400 or 404 may precede it.
            self.tokens.insert(token);
        }
    }
}

/// The bearer token in a request's headers: the value of `Authorization`, or the subprotocol in which
/// WebSocket clients send a token (`base64url.bearer.authorization.k8s.io.<token>`).
///
/// The apiserver ignores any other scheme in `Authorization` (`bearertoken.go`), and the subprotocol of a
/// request without an upgrade (`websocket/protocol.go`). It treats such a request as anonymous, and sends
/// a GOAWAY.
pub fn bearer(headers: &HeaderMap, upgrade: bool) -> Option<&[u8]> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let value = value.as_bytes().trim_ascii();
        let (scheme, token) = value.split_at_checked(b"bearer ".len())?;
        let is_bearer = scheme.eq_ignore_ascii_case(b"bearer ") && !token.trim_ascii().is_empty();
        return is_bearer.then_some(value);
    }
    if !upgrade {
        return None;
    }
    list_items(headers.get_all(header::SEC_WEBSOCKET_PROTOCOL))
        .find(|protocol| protocol.starts_with(b"base64url.bearer.authorization.k8s.io."))
}

/// Keyed hashes of the latest [`MAX_PROVEN_TOKENS`] tokens that the apiserver has accepted.
#[derive(Debug, Default)]
pub struct ProvenTokens {
    keys: [RandomState; 2],
    known: RefCell<HashSet<[u64; 2]>>,
    /// The known hashes in the order in which they were added.
    order: RefCell<VecDeque<[u64; 2]>>,
    /// How many tokens have been forgotten.
    forgotten: Cell<u64>,
}

/// The last accepted token of one client connection. Nearly every client has only one, and a comparison
/// is cheaper than two keyed hashes.
#[derive(Debug, Default)]
pub struct LastToken {
    token: RefCell<Vec<u8>>,
    /// [`ProvenTokens::forgotten`] plus 1 when `token` was stored; 0 if there is no token.
    stored_at: Cell<u64>,
}

impl LastToken {
    fn is_proven(&self, token: &[u8], tokens: &ProvenTokens) -> bool {
        let now = tokens.forgotten.get() + 1;
        if self.stored_at.get() == now && *self.token.borrow() == token {
            return true;
        }
        let proven = tokens.contains(token);
        if proven {
            let mut last = self.token.borrow_mut();
            last.clear();
            last.extend_from_slice(token);
            self.stored_at.set(now);
        }
        proven
    }
}

impl ProvenTokens {
    /// Two independent keyed 64-bit hashes. The keys are random for each process, so a client cannot
    /// search for a token with the same hashes.
    fn hash(&self, token: &[u8]) -> [u64; 2] {
        [self.keys[0].hash_one(token), self.keys[1].hash_one(token)]
    }

    fn contains(&self, token: &[u8]) -> bool {
        self.known.borrow().contains(&self.hash(token))
    }

    fn insert(&self, token: &[u8]) {
        let hash = self.hash(token);
        let (mut known, mut order) = (self.known.borrow_mut(), self.order.borrow_mut());
        if !known.insert(hash) {
            return;
        }
        order.push_back(hash);
        if order.len() > MAX_PROVEN_TOKENS
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
            self.forgotten.set(self.forgotten.get() + 1);
        }
    }

    fn remove(&self, token: &[u8]) {
        let hash = self.hash(token);
        if self.known.borrow_mut().remove(&hash) {
            self.order.borrow_mut().retain(|known| *known != hash);
            self.forgotten.set(self.forgotten.get() + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn learn_accepts_tokens_by_responses_sent_after_authentication() {
        let tokens = Rc::<ProvenTokens>::default();
        let selector = CredentialSelector {
            slots: Vec::new(),
            listener: "l".to_owned(),
            tokens: Rc::clone(&tokens),
        };
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
            let token = format!("bearer {status}");
            let status = StatusCode::from_u16(status).unwrap();
            selector.learn(token.as_bytes(), CredentialClass::UnprovenToken, status);
            assert_eq!(tokens.contains(token.as_bytes()), proven, "{status}");
        }
        selector.learn(b"bearer 101", CredentialClass::Token, StatusCode::UNAUTHORIZED);
        assert!(!tokens.contains(b"bearer 101"));
    }

    #[test]
    fn select_uses_subprotocol_token_only_for_upgrades() {
        let tokens = Rc::<ProvenTokens>::default();
        let selector = CredentialSelector {
            slots: Vec::new(),
            listener: "l".to_owned(),
            tokens: Rc::clone(&tokens),
        };
        let token = "base64url.bearer.authorization.k8s.io.QUJD";
        let headers = |name: header::HeaderName, value: &'static str| {
            HeaderMap::from_iter([(name, http::HeaderValue::from_static(value))])
        };
        let subprotocol = headers(header::SEC_WEBSOCKET_PROTOCOL, token);
        let authorization = headers(header::AUTHORIZATION, "Bearer QUJD");
        let last = LastToken::default();
        let class = |headers, upgrade| selector.select(None, &last, headers, upgrade).ok();
        assert_eq!(class(&subprotocol, true), Some(CredentialClass::UnprovenToken));
        tokens.insert(token.as_bytes());
        assert_eq!(class(&subprotocol, true), Some(CredentialClass::Token));
        assert_eq!(class(&subprotocol, false), Some(CredentialClass::Anonymous));
        for upgrade in [true, false] {
            assert_eq!(class(&authorization, upgrade), Some(CredentialClass::UnprovenToken));
        }
    }

    #[test]
    fn last_token_is_proven_only_while_proven_tokens_contain_it() {
        let (tokens, last) = (ProvenTokens::default(), LastToken::default());
        assert!(!last.is_proven(b"bearer a", &tokens));
        tokens.insert(b"bearer a");
        assert!(last.is_proven(b"bearer a", &tokens));
        assert!(last.is_proven(b"bearer a", &tokens), "it is stored as the last token");
        assert!(!last.is_proven(b"bearer b", &tokens));
        assert!(last.is_proven(b"bearer a", &tokens));
        tokens.remove(b"bearer a");
        assert!(!last.is_proven(b"bearer a", &tokens), "another connection may have got the 401");
        tokens.insert(b"bearer a");
        assert!(last.is_proven(b"bearer a", &tokens));
        for n in 0..MAX_PROVEN_TOKENS {
            tokens.insert(format!("bearer {n}").as_bytes());
        }
        assert!(!last.is_proven(b"bearer a", &tokens), "newer tokens have replaced it");
    }
}
