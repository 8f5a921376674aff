//! The feature gates of an apiserver, as its `/metrics` names them.
//!
//! kube-apiserver has a line `kubernetes_feature_enabled{name="…",stage="…"} 0` or `1` for each gate, and one line
//! `kubernetes_build_info` (component-base, `metrics/prometheus/feature` and `metrics/version`). Metrics are ordered by
//! their names, and those of requests, which come first, may be many megabytes.

use std::error::Error;
use std::fmt;
use std::hash::{DefaultHasher, Hasher as _};
use std::mem;

/// Largest response that is read, in bytes.
const MAX_RESPONSE: usize = 256 << 20;
/// Longest line that is stored, in bytes. Those that are read have about 100; that of the build about 300.
const MAX_LINE: usize = 4096;
/// The lines that are read begin with this.
const FEATURE: &[u8] = b"kubernetes_feature_enabled{";
/// Beginning of the line that names version, commit and compiler.
const BUILD: &[u8] = b"kubernetes_build_info{";
/// The gate of sharded lists and watches (KEP-5866).
const SHARDED: &[u8] = b"name=\"ShardedListAndWatch\"";

/// The gates of one process of an apiserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubernetesFeatures {
    /// Equal for the same build with the same gates. It has no meaning outside this process.
    pub fingerprint: u64,
    /// It serves shards.
    pub sharded: bool,
}

/// The metrics name no feature gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoFeatures;

impl fmt::Display for NoFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no feature gates (kubernetes_feature_enabled)")
    }
}

impl Error for NoFeatures {}

/// Reads the response of `/metrics`, piece by piece.
#[derive(Debug, Default)]
pub struct FeatureReader {
    hasher: DefaultHasher,
    /// The beginning of a line that is not complete.
    line: Vec<u8>,
    read: usize,
    has_build: bool,
    gates: usize,
    sharded: bool,
    is_complete: bool,
}

impl FeatureReader {
    /// Reads the next piece. Returns whether no more is needed: the gates are complete, or the response is too large.
    pub fn push(&mut self, mut piece: &[u8]) -> bool {
        self.read += piece.len();
        while !self.is_complete && !piece.is_empty() {
            let end = piece.iter().position(|byte| *byte == b'\n');
            let (part, rest) =
                end.map_or((piece, &piece[..0]), |at| (&piece[..at], &piece[at + 1..]));
            let room = MAX_LINE.saturating_sub(self.line.len()).min(part.len());
            self.line.extend_from_slice(&part[..room]);
            if end.is_some() {
                let line = mem::take(&mut self.line);
                self.read_line(&line);
                self.line = line;
                self.line.clear();
            }
            piece = rest;
        }
        self.is_complete || self.read > MAX_RESPONSE
    }

    fn read_line(&mut self, line: &[u8]) {
        if line.starts_with(FEATURE) {
            self.gates += 1;
            let is_on = line.trim_ascii_end().ends_with(b" 1");
            self.sharded |= is_on && line.windows(SHARDED.len()).any(|part| part == SHARDED);
        } else if line.starts_with(BUILD) {
            self.has_build = true;
        } else {
            self.is_complete = self.gates > 0 && !line.is_empty() && !line.starts_with(b"#");
            return;
        }
        self.hasher.write(line);
        self.hasher.write_u8(b'\n');
    }

    /// The gates, at the end of the response or when [`Self::push`] needs no more.
    ///
    /// # Errors
    /// The response names no gates or no build, ends with the gates, or is too large.
    pub fn finish(self) -> Result<KubernetesFeatures, NoFeatures> {
        if !self.has_build || !self.is_complete {
            return Err(NoFeatures);
        }
        Ok(KubernetesFeatures { fingerprint: self.hasher.finish(), sharded: self.sharded })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(build: &str, sharded: u8) -> String {
        format!(
            "# HELP apiserver_request_total [STABLE] Counter\n\
             apiserver_request_total{{code=\"200\",resource=\"kubernetes_feature_enabled\"}} 17\n\
             # TYPE kubernetes_build_info gauge\n\
             kubernetes_build_info{{git_version=\"{build}\"}} 1\n\
             # TYPE kubernetes_feature_enabled gauge\n\
             kubernetes_feature_enabled{{name=\"APIServerTracing\",stage=\"\"}} 1\n\
             kubernetes_feature_enabled{{name=\"ShardedListAndWatch\",stage=\"ALPHA\"}} {sharded}\n\
             # TYPE process_cpu_seconds_total counter\n\
             process_cpu_seconds_total 7\n"
        )
    }

    fn read(text: &str, piece: usize) -> Result<KubernetesFeatures, NoFeatures> {
        let mut reader = FeatureReader::default();
        let _ = text.as_bytes().chunks(piece).any(|piece| reader.push(piece));
        reader.finish()
    }

    #[test]
    fn features_are_the_same_in_any_pieces_and_differ_by_gate_and_build() {
        let on = metrics("v1.36.2", 1);
        let whole = read(&on, on.len()).unwrap();
        assert!(whole.sharded);
        for piece in 1..on.len() {
            assert_eq!(read(&on, piece), Ok(whole), "pieces of {piece}");
        }
        let off = read(&metrics("v1.36.2", 0), 1000).unwrap();
        assert!(!off.sharded);
        assert_ne!(off.fingerprint, whole.fingerprint);
        assert_ne!(read(&metrics("v1.36.3", 1), 1000).unwrap().fingerprint, whole.fingerprint);
        let other_counts = on.replace("} 17", "} 18").replace("total 7", "total 8");
        assert_eq!(read(&other_counts, 1000), Ok(whole));
    }

    #[test]
    fn reader_needs_no_more_after_the_gates() {
        let text = metrics("v1.36.2", 1);
        let mut reader = FeatureReader::default();
        let end = text.find("process_cpu_seconds_total 7").unwrap();
        assert!(!reader.push(&text.as_bytes()[..end]));
        assert!(reader.push(&text.as_bytes()[end..]));
    }

    #[test]
    fn other_answers_name_no_features() {
        let on = metrics("v1.36.2", 1);
        let without_build = on.replace("kubernetes_build_info{", "build{");
        let without_gates = on.replace("kubernetes_feature_enabled{", "feature{");
        let cut = on[..on.find("# TYPE process").unwrap()].to_owned();
        let long = "x".repeat(100_000);
        for text in ["", "\n\n", "<html>", "{}", &without_build, &without_gates, &cut, &long] {
            assert_eq!(read(text, 100), Err(NoFeatures), "{}", &text[..text.len().min(40)]);
        }
    }

    #[test]
    fn endless_answer_is_given_up_and_holds_one_line() {
        let mut reader = FeatureReader::default();
        let piece = vec![b'x'; 1 << 20];
        let pieces = (0..1000).take_while(|_| !reader.push(&piece)).count();
        assert_eq!(pieces, MAX_RESPONSE >> 20);
        assert!(reader.line.capacity() <= 2 * MAX_LINE);
        assert_eq!(reader.finish(), Err(NoFeatures));
    }
}
