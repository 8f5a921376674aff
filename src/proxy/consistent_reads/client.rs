//! The client of a request, for which versions are remembered.
//!
//! | proven by | the client is |
//! |---|---|
//! | certificate of a configured identity | its subject |
//! | JSON Web Token with issuer and subject, such as that of a service account | these two: the token changes with each restart of a pod, and every hour |
//! | any other token | the token |
//!
//! The claims are read before the apiserver has verified the token. That does no harm: a floor is created or raised
//! only by an accepted request, and to apply that of another client makes answers newer, not older.

use std::cell::Cell;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderMap;
use jackstay_net::tls::certificate::Subject;
use serde::Deserialize;

use crate::proxy::bearer_token::BearerToken;
use crate::proxy::credential_selector::SelectedCredential;
use crate::upstream::client_key::{ClientHasher, ClientKey};
use crate::upstream::credentials::CredentialClass;

/// Maximum length of the payload of a token that is parsed, in bytes of base64.
const MAX_PAYLOAD: usize = 8 * 1024;

/// The last client of one connection. Nearly every connection has only one.
#[derive(Debug, Default)]
pub struct LastClient(Cell<Option<(SelectedCredential, ClientKey)>>);

impl LastClient {
    /// The client that sends a request with this credential; `None` if nothing identifies it. `subject` is that of its
    /// certificate.
    pub fn key(
        &self,
        credential: SelectedCredential,
        subject: Option<&Subject>,
        headers: &HeaderMap,
        hasher: &ClientHasher,
    ) -> Option<ClientKey> {
        let is_same = |last: SelectedCredential| match credential.class {
            CredentialClass::Identity(_) => last.class == credential.class,
            _ => credential.token.is_some() && last.token == credential.token,
        };
        if let Some((last, key)) = self.0.get()
            && is_same(last)
        {
            return Some(key);
        }
        let key = match credential.class {
            CredentialClass::Identity(_) => hasher.subject(subject?),
            CredentialClass::Token
            | CredentialClass::UnprovenToken
            | CredentialClass::SlowedToken => {
                credential.token?;
                let BearerToken::One(token) = BearerToken::find(headers, false)? else {
                    return None;
                };
                of_token(&token, hasher)
            }
            _ => return None,
        };
        self.0.set(Some((credential, key)));
        Some(key)
    }
}

fn of_token(token: &[u8], hasher: &ClientHasher) -> ClientKey {
    match claims(token) {
        Some(Claims { iss, sub }) => hasher.issuer_and_subject(&iss, &sub),
        None => hasher.token(token),
    }
}

/// The registered claims that identify a client (RFC 7519, section 4.1).
#[derive(Deserialize)]
struct Claims {
    iss: String,
    sub: String,
}

/// The claims of a JSON Web Token in compact form (RFC 7515, section 7.1).
fn claims(token: &[u8]) -> Option<Claims> {
    let mut parts = token.split(|&byte| byte == b'.');
    let (_header, payload, _signature) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || payload.len() > MAX_PAYLOAD {
        return None;
    }
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jwt(payload: &str) -> Vec<u8> {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(payload)).into_bytes()
    }

    #[test]
    fn tokens_of_one_issuer_and_subject_are_one_client() {
        let hasher = ClientHasher::default();
        let key = |token: &[u8]| of_token(token, &hasher);
        let first = key(&jwt(r#"{"iss":"i","sub":"system:serviceaccount:a:b","exp":1}"#));
        assert_eq!(key(&jwt(r#"{"exp":2,"sub":"system:serviceaccount:a:b","iss":"i"}"#)), first);
        for other in [
            jwt(r#"{"iss":"i","sub":"system:serviceaccount:a:c"}"#),
            jwt(r#"{"iss":"j","sub":"system:serviceaccount:a:b"}"#),
            jwt(r#"{"sub":"system:serviceaccount:a:b"}"#),
            jwt("no json"),
            jwt(&format!(
                r#"{{"iss":"i","sub":"system:serviceaccount:a:b","x":"{}"}}"#,
                "x".repeat(MAX_PAYLOAD)
            )),
            b"opaque".to_vec(),
            b"..".to_vec(),
            b"".to_vec(),
        ] {
            assert_ne!(key(&other), first, "{}", other.escape_ascii());
        }
        assert_ne!(key(b"a"), key(b"b"));
    }
}
