//! The sessions that clients of a listener can resume.
//!
//! rustls stores the certificate chain of the client in a session, also one that no CA has signed, because chains are
//! verified after the handshake ([`super::serving`]). With 256 sessions of chains of up to 32 KiB
//! ([`super::client_chain`]) a client without credentials would keep 8 MiB that no account has. Sessions with long
//! chains are therefore not stored: such a client makes a full handshake each time.

use std::sync::Arc;

use rustls::server::{ServerSessionMemoryCache, StoresServerSessions};

/// Sessions of a listener.
const SESSIONS: usize = 256;
/// Bytes of a session, which has the secret, some fields of the handshake, and the chain. A kubelet's certificate has
/// about 1 KiB. All sessions of a listener together have at most 512 KiB.
const MAX_SESSION: usize = 2 << 10;

/// Stores sessions that are not large.
#[derive(Debug)]
struct SmallSessions(Arc<ServerSessionMemoryCache>);

/// The sessions of one listener.
pub fn new() -> Arc<dyn StoresServerSessions> {
    Arc::new(SmallSessions(ServerSessionMemoryCache::new(SESSIONS)))
}

impl StoresServerSessions for SmallSessions {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        // The value may have more capacity than it uses.
        value.len() <= MAX_SESSION && self.0.put(key, value.into_boxed_slice().into_vec())
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.0.get(key)
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.0.take(key)
    }

    fn can_cache(&self) -> bool {
        self.0.can_cache()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_with_a_long_chain_is_not_stored() {
        let sessions = new();
        assert!(sessions.can_cache());
        assert!(sessions.put(vec![1], vec![0; MAX_SESSION]));
        assert!(!sessions.put(vec![2], vec![0; MAX_SESSION + 1]));
        assert_eq!(sessions.get(&[1]).unwrap().len(), MAX_SESSION);
        assert_eq!((sessions.get(&[2]), sessions.take(&[2])), (None, None));
        assert!(sessions.take(&[1]).is_some() && sessions.get(&[1]).is_none());
    }
}
