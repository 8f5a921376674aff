//! The bearer tokens that the apiserver has accepted.
//!
//! The number of remembered tokens is limited. When it is exceeded, the source with the most tokens loses its
//! oldest, so that a source with many tokens does not displace those of the others.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};

use jackstay_sys::sockets::source::Source;

/// Maximum number of accepted tokens that are remembered. A node has some hundred pods.
const MAX_PROVEN_TOKENS: usize = 4096;

/// Two independent keyed 64-bit hashes of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenKey([u64; 2]);

/// Keyed hashes of at most [`MAX_PROVEN_TOKENS`] tokens that the apiserver has accepted.
#[derive(Debug, Default)]
pub struct ProvenTokens {
    keys: [RandomState; 2],
    known: RefCell<KnownTokens>,
    /// How many tokens have been forgotten.
    forgotten: Cell<u64>,
}

#[derive(Debug, Default)]
struct KnownTokens {
    /// The source to which each token counts.
    sources: HashMap<TokenKey, Source>,
    /// The tokens in the order in which they were added.
    order: VecDeque<TokenKey>,
    /// The number of tokens that count to each source. A source without tokens has no entry.
    counts: HashMap<Source, usize>,
}

/// The last accepted token of one client connection. Nearly every client has only one, and a comparison
/// is cheaper than two keyed hashes.
#[derive(Debug, Default)]
pub struct LastToken {
    token: RefCell<Vec<u8>>,
    key: Cell<Option<TokenKey>>,
    /// [`ProvenTokens::forgotten`] when `token` was stored.
    stored_at: Cell<u64>,
}

impl LastToken {
    /// Whether a token of a client at `source` is proven, and its key.
    pub fn check(&self, token: &[u8], source: Source, tokens: &ProvenTokens) -> (bool, TokenKey) {
        let now = tokens.forgotten.get();
        if let Some(key) = self.key.get()
            && self.stored_at.get() == now
            && *self.token.borrow() == token
        {
            return (true, key);
        }
        let key = tokens.key(token);
        let proven = tokens.contains(key, source);
        if proven {
            let mut last = self.token.borrow_mut();
            last.clear();
            last.extend_from_slice(token);
            self.key.set(Some(key));
            self.stored_at.set(now);
        }
        (proven, key)
    }
}

impl ProvenTokens {
    /// The keys of the hashes are random for each process, so a client cannot search for a token with the
    /// same hashes.
    pub fn key(&self, token: &[u8]) -> TokenKey {
        TokenKey([self.keys[0].hash_one(token), self.keys[1].hash_one(token)])
    }

    /// Whether a token that `source` uses is proven. A token that several sources use counts to the one with the
    /// fewest tokens.
    pub fn contains(&self, token: TokenKey, source: Source) -> bool {
        self.known.borrow_mut().used(token, source)
    }

    /// Adds a token that the apiserver has accepted from `source`. Returns whether it is new.
    pub fn insert(&self, token: TokenKey, source: Source) -> bool {
        let mut known = self.known.borrow_mut();
        if known.used(token, source) {
            return false;
        }
        known.sources.insert(token, source);
        known.order.push_back(token);
        known.count(source);
        if known.order.len() > MAX_PROVEN_TOKENS {
            known.evict();
            self.forgotten.set(self.forgotten.get() + 1);
        }
        true
    }

    /// Forgets a token that the apiserver has rejected.
    pub fn remove(&self, token: TokenKey) {
        let mut known = self.known.borrow_mut();
        if let Some(source) = known.sources.remove(&token) {
            known.order.retain(|known| *known != token);
            known.uncount(source);
            self.forgotten.set(self.forgotten.get() + 1);
        }
    }
}

impl KnownTokens {
    /// Whether the token is known. It then counts to `source` if that has fewer tokens than its source.
    fn used(&mut self, token: TokenKey, source: Source) -> bool {
        let Some(owner) = self.sources.get_mut(&token) else { return false };
        let count = |source| self.counts.get(&source).copied().unwrap_or(0);
        if *owner != source && count(source) + 1 < count(*owner) {
            let previous = std::mem::replace(owner, source);
            self.uncount(previous);
            self.count(source);
        }
        true
    }

    /// Removes the oldest token of the source with the most tokens.
    fn evict(&mut self) {
        let most = self.counts.iter().max_by_key(|(_, count)| **count).map(|(source, _)| *source);
        let index = self.order.iter().position(|token| self.sources.get(token).copied() == most);
        if let Some(token) = index.and_then(|index| self.order.remove(index))
            && let Some(source) = self.sources.remove(&token)
        {
            self.uncount(source);
        }
    }

    fn count(&mut self, source: Source) {
        *self.counts.entry(source).or_default() += 1;
    }

    fn uncount(&mut self, source: Source) {
        if let Some(count) = self.counts.get_mut(&source) {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCES: [Source; 2] = [Source::User(1), Source::User(2)];

    #[test]
    fn last_token_is_proven_only_while_proven_tokens_contain_it() {
        let (tokens, last) = (ProvenTokens::default(), LastToken::default());
        let source = SOURCES[0];
        let is_proven = |token: &[u8]| last.check(token, source, &tokens).0;
        let a = tokens.key(b"a");
        assert!(!is_proven(b"a"));
        assert!(tokens.insert(a, source));
        assert!(!tokens.insert(a, source), "it is known");
        assert!(is_proven(b"a"));
        assert_eq!(last.check(b"a", source, &tokens), (true, a), "it is stored as the last token");
        assert!(!is_proven(b"b"));
        assert!(is_proven(b"a"));
        tokens.remove(a);
        assert!(!is_proven(b"a"), "another connection may have got the 401");
        tokens.insert(a, source);
        assert!(is_proven(b"a"));
        for n in 0..MAX_PROVEN_TOKENS {
            tokens.insert(tokens.key(&n.to_le_bytes()), source);
        }
        assert!(!is_proven(b"a"), "newer tokens have replaced it");
    }

    #[test]
    fn a_source_with_many_tokens_displaces_only_its_own() {
        let tokens = ProvenTokens::default();
        let [attacker, client] = SOURCES;
        let key = |n: usize| tokens.key(&n.to_le_bytes());
        for n in 0..100 {
            tokens.insert(key(n), client);
        }
        for n in 100..3 * MAX_PROVEN_TOKENS {
            tokens.insert(key(n), attacker);
        }
        assert!((0..100).all(|n| tokens.contains(key(n), client)));
        assert!(!tokens.contains(key(100), attacker));
        let known = tokens.known.borrow();
        assert_eq!(
            (known.order.len(), known.sources.len()),
            (MAX_PROVEN_TOKENS, MAX_PROVEN_TOKENS)
        );
        assert_eq!(known.counts.values().sum::<usize>(), MAX_PROVEN_TOKENS);
    }

    #[test]
    fn a_token_of_two_sources_counts_to_the_one_with_fewer() {
        let tokens = ProvenTokens::default();
        let [attacker, client] = SOURCES;
        let shared = tokens.key(b"shared");
        tokens.insert(shared, attacker);
        for n in 0..10_usize {
            tokens.insert(tokens.key(&n.to_le_bytes()), attacker);
        }
        assert!(tokens.contains(shared, client));
        assert!(tokens.contains(shared, attacker), "it does not count to the first source again");
        for n in 0..2 * MAX_PROVEN_TOKENS {
            tokens.insert(tokens.key(&n.to_le_bytes()), attacker);
        }
        assert!(tokens.contains(shared, client));
    }
}
