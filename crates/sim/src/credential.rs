//! What a client proves to an apiserver, and the clients whose reads may not go back together.
//!
//! jackstay identifies a client by the subject of its certificate, by issuer and subject of a JSON Web Token, or by any other
//! token as a whole (`src/proxy/consistent_reads/client.rs`). [`Credential::group`] is the same relation.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jackstay_apiserver::identity::User;

/// What a client proves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credential {
    /// The certificate of its node.
    Certificate,
    /// The token of a service account. Each client has a token of its own, as each pod has.
    ServiceAccount(u8),
    /// A token without claims. Several tokens may be those of one user.
    Opaque {
        /// The user.
        user: u8,
        /// The number of the token.
        token: u8,
    },
}

impl Credential {
    /// The bearer token of a client; `None` without one. `generation`: how often it was renewed, which only that of a
    /// service account is.
    pub fn token(self, client: u16, generation: u8) -> Option<String> {
        match self {
            Self::Certificate => None,
            Self::ServiceAccount(_) => {
                let name = self.user_name()?;
                let claims = format!(
                    r#"{{"iss":"https://kubernetes.default.svc","sub":"{name}","jti":"{client}-{generation}"}}"#
                );
                let part = |text: &str| URL_SAFE_NO_PAD.encode(text);
                Some(format!("{}.{}.{}", part(r#"{"alg":"RS256"}"#), part(&claims), part("-")))
            }
            Self::Opaque { user, token } => Some(format!("opaque-{user}-{token}")),
        }
    }

    /// The user that the apiservers know by the token; `None` for that of the certificate.
    pub fn user(self) -> Option<User> {
        let groups: &[&str] = match self {
            Self::Certificate | Self::Opaque { .. } => &[],
            Self::ServiceAccount(_) => &["system:serviceaccounts"],
        };
        self.user_name().map(|name| User::new(&name, groups))
    }

    fn user_name(self) -> Option<String> {
        match self {
            Self::Certificate => None,
            Self::ServiceAccount(account) => {
                Some(format!("system:serviceaccount:default:account-{account}"))
            }
            Self::Opaque { user, .. } => Some(format!("user-{user}")),
        }
    }

    /// The number of the clients on a node whose reads may not go back together: those that jackstay knows as one.
    pub fn group(self, node: usize) -> u32 {
        let number = match self {
            Self::Certificate => 0,
            Self::ServiceAccount(account) => 1 + u32::from(account),
            Self::Opaque { user, token } => 0x1_0000 + (u32::from(user) << 8) + u32::from(token),
        };
        ((node as u32) << 20) + number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_that_of_the_node_and_of_what_jackstay_knows_a_client_by() {
        let credentials = [
            Credential::Certificate,
            Credential::ServiceAccount(0),
            Credential::ServiceAccount(1),
            Credential::Opaque { user: 0, token: 0 },
            Credential::Opaque { user: 0, token: 1 },
            Credential::Opaque { user: 1, token: 0 },
        ];
        let groups = credentials.iter().flat_map(|one| [one.group(0), one.group(1)]);
        let different: std::collections::BTreeSet<_> = groups.collect();
        assert_eq!(different.len(), 2 * credentials.len());
    }

    #[test]
    fn each_client_of_a_service_account_has_a_token_which_is_renewed() {
        let token = |client, generation| Credential::ServiceAccount(3).token(client, generation);
        assert_ne!(token(5, 0), token(5, 1));
        assert_ne!(token(5, 0), token(6, 0));
        assert_eq!(Credential::Certificate.token(5, 0), None);
    }
}
