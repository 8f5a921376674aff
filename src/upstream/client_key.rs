//! Identifies clients by a keyed hash of what they have proven.

use std::hash::{Hash, Hasher};

use aws_lc_rs::hmac;
use jackstay_net::tls::certificate::Subject;
use jackstay_sys::simulation;

/// A client: a keyed hash of its subject or its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClientKey(pub [u64; 2]);

impl Hash for ClientKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0[0]);
    }
}

/// Hashes a [`ClientKey`] to its first word. It is the output of an HMAC, which a client cannot choose.
#[derive(Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Computes [`ClientKey`]s: the first 128 bits of HMAC-SHA-256. The key is kept with saved hashes, so that they can be
/// used after a restart. Nothing can be concluded from a hash about a token, which is random or signed.
pub struct ClientHasher {
    secret: [u8; 32],
    key: hmac::Key,
}

impl ClientHasher {
    /// A hasher with this key.
    pub fn new(secret: [u8; 32]) -> Self {
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, &secret), secret }
    }

    /// The key, to be saved with the hashes.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// The client that has proven this subject.
    pub fn subject(&self, subject: &Subject) -> ClientKey {
        self.hash(&[b"subject", subject.to_string().as_bytes()])
    }

    /// The client that has proven this token.
    pub fn token(&self, token: &[u8]) -> ClientKey {
        self.hash(&[b"token", token])
    }

    /// The client whose tokens have this issuer and subject.
    pub fn issuer_and_subject(&self, issuer: &str, subject: &str) -> ClientKey {
        self.hash(&[b"issuer", issuer.as_bytes(), subject.as_bytes()])
    }

    fn hash(&self, parts: &[&[u8]]) -> ClientKey {
        let mut context = hmac::Context::with_key(&self.key);
        for part in parts {
            context.update(&(part.len() as u64).to_be_bytes());
            context.update(part);
        }
        let tag = context.sign();
        let word = |at: usize| {
            let bytes = tag.as_ref().get(at..).and_then(<[u8]>::first_chunk);
            u64::from_be_bytes(*bytes.unwrap_or(&[0; 8]))
        };
        ClientKey([word(0), word(8)])
    }
}

impl Default for ClientHasher {
    /// A hasher with a random key.
    fn default() -> Self {
        let mut secret = [0; 32];
        for chunk in secret.chunks_exact_mut(8) {
            chunk.copy_from_slice(&fastrand::u64(..).to_ne_bytes());
        }
        // A simulated run is a function of its seed.
        if simulation::is_running() {
            return Self::new(secret);
        }
        // Without random numbers of the system, only the guess of a token would be easier to confirm.
        let _ = aws_lc_rs::rand::fill(&mut secret);
        Self::new(secret)
    }
}

impl std::fmt::Debug for ClientHasher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ClientHasher")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_kind_and_content_and_are_stable_with_the_secret() {
        let hasher = ClientHasher::new([7; 32]);
        let keys = [
            hasher.token(b"a"),
            hasher.token(b"b"),
            hasher.issuer_and_subject("a", "bc"),
            hasher.issuer_and_subject("ab", "c"),
            hasher.subject(&Subject::default()),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(keys[..at].iter().all(|other| other != key), "{at}");
        }
        assert_eq!(ClientHasher::new(*hasher.secret()).token(b"a"), keys[0]);
        assert_ne!(ClientHasher::default().token(b"a"), keys[0]);
    }
}
