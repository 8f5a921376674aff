//! What the runs of the renewal remember: since when a kubeconfig has the next CA, and which CAs a running client has
//! read.
//!
//! A lost or damaged file delays a renewal and restarts a client once more than needed. Nothing else depends on it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest;
use jackstay_sys::files;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

/// The name of the file, beside the serving certificate.
pub const STATE_FILE: &str = "renewal.json";
/// Maximum size of the file.
const MAX_STATE: u64 = 1 << 20;

/// The SHA-256 of a certificate in hexadecimal.
pub(super) fn fingerprint(der: &CertificateDer<'_>) -> String {
    let digest = digest::digest(&digest::SHA256, der);
    digest.as_ref().iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What the runs remember.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RenewalState {
    /// By the path of a kubeconfig, which CA it was first seen with, and when.
    pub(super) kubeconfigs: BTreeMap<PathBuf, Seen>,
    /// By the name of a unit, the client that runs.
    pub(super) readers: BTreeMap<String, ReaderState>,
}

/// Since when a kubeconfig has the next CA.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Seen {
    /// The fingerprint of the CA.
    ca: String,
    /// Seconds since 1970.
    since: u64,
}

/// A running client, which has read its kubeconfig at its start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReaderState {
    /// The invocation of its unit (`InvocationID`), another one after each start.
    pub(super) invocation: String,
    /// The fingerprints of the CAs that it trusts.
    pub(super) trusts: Vec<String>,
    /// Since when it lacks the next CA: the fingerprint, and when.
    pub(super) lacks: Option<Seen>,
}

impl Seen {
    /// `before` if it is of this CA and not in the future, from which a clock has jumped back; else now.
    pub(super) fn first(before: Option<&Self>, ca: &str, now: SystemTime) -> Self {
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let before = before.filter(|seen| seen.ca == ca && seen.since <= now);
        Self { ca: ca.to_owned(), since: before.map_or(now, |seen| seen.since) }
    }

    /// Whether it is about this CA.
    pub(super) fn is_of(&self, ca: &str) -> bool {
        self.ca == ca
    }

    pub(super) fn since(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(self.since)
    }
}

impl RenewalState {
    /// Reads the file; without a usable one the state is empty.
    pub fn read(path: &Path) -> Self {
        let text = files::read_text(path, MAX_STATE).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// The content of the file.
    pub fn to_json(&self) -> Vec<u8> {
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        (text + "\n").into_bytes()
    }

    /// Records that a unit runs with another invocation than the one that `self` has. It may have read its kubeconfig
    /// before the last change, so it has the CAs that the earlier invocation was recorded with. Returns whether that is
    /// news.
    pub fn restarted(&mut self, unit: &str, invocation: &str) -> bool {
        let reader = self.readers.get_mut(unit).filter(|known| known.invocation != invocation);
        reader.is_some_and(|known| {
            invocation.clone_into(&mut known.invocation);
            true
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seen_begins_again_with_another_ca_and_after_a_jump_of_the_clock() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let first = Seen::first(None, "a", at(100));
        assert_eq!(first.since(), at(100));
        assert_eq!(Seen::first(Some(&first), "a", at(200)).since(), at(100));
        assert_eq!(Seen::first(Some(&first), "b", at(200)).since(), at(200));
        assert_eq!(Seen::first(Some(&first), "a", at(50)).since(), at(50));
    }

    #[test]
    fn state_without_a_usable_file_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(STATE_FILE);
        assert_eq!(RenewalState::read(&path), RenewalState::default());
        for text in ["", "[]", "{\"readers\": 1}"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(RenewalState::read(&path), RenewalState::default(), "{text}");
        }
        let mut state = RenewalState::default();
        let reader = ReaderState { invocation: "1".into(), trusts: vec!["a".into()], lacks: None };
        state.readers.insert("kubelet.service".into(), reader);
        std::fs::write(&path, state.to_json()).unwrap();
        assert_eq!(RenewalState::read(&path), state);
        assert!(!state.restarted("kubelet.service", "1") && !state.restarted("other", "2"));
        assert!(state.restarted("kubelet.service", "2"));
        assert_eq!(state.readers["kubelet.service"].trusts, ["a"]);
    }
}
