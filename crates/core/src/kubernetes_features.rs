//! The feature gates of an apiserver, as its `/metrics` names them.
//!
//! kube-apiserver has a line `kubernetes_feature_enabled{name="…",stage="…"} 0` or `1` for each gate, and one line
//! `kubernetes_build_info` (component-base, `metrics/prometheus/feature` and `metrics/version`). Metrics are ordered by
//! their names, and those of requests, which come first, may be many megabytes.

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
/// The gate of responses without `metadata.managedFields` (KEP-5958).
const MANAGED_FIELDS: &[u8] = b"name=\"ManagedFieldsOptOut\"";
/// The minor version in the line of the build.
const MINOR: &[u8] = b"minor=\"";

/// The gates of one process of an apiserver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KubernetesFeatures {
    /// Equal for the same build with the same gates. It has no meaning outside this process.
    pub fingerprint: u64,
    /// It serves shards.
    pub sharded: bool,
    /// Whether it leaves out `metadata.managedFields` on request.
    pub managed_fields: ManagedFieldsOptOut,
}

/// Whether an apiserver leaves out `metadata.managedFields` on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManagedFieldsOptOut {
    /// The gate is off.
    Off,
    /// The gate is on.
    On,
    /// It has no such gate: it is older than the gate, or so new that the gate was removed. The minor version, 0 if it
    /// is unknown.
    NoGate(u32),
}

impl ManagedFieldsOptOut {
    /// A number that is equal for servers that treat the parameter equally: 0 if they ignore it, 1 if they honour it,
    /// and another one if that is unknown.
    pub fn number(self) -> u64 {
        match self {
            Self::Off | Self::NoGate(1..38) => 0,
            Self::On => 1,
            Self::NoGate(minor) => 2 + u64::from(minor),
        }
    }
}

/// The metrics name no feature gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no feature gates (kubernetes_feature_enabled)")]
pub struct NoFeatures;

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
    managed_fields: Option<bool>,
    minor: u32,
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
            self.sharded |= is_on && after(line, SHARDED).is_some();
            if after(line, MANAGED_FIELDS).is_some() {
                self.managed_fields = Some(is_on);
            }
        } else if line.starts_with(BUILD) {
            self.has_build = true;
            let digits = after(line, MINOR).unwrap_or_default().iter();
            let digits = digits.map_while(|byte| char::from(*byte).to_digit(10)).take(6);
            self.minor = digits.fold(0, |minor, digit| minor * 10 + digit);
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
        let managed_fields = match self.managed_fields {
            Some(true) => ManagedFieldsOptOut::On,
            Some(false) => ManagedFieldsOptOut::Off,
            None => ManagedFieldsOptOut::NoGate(self.minor),
        };
        let fingerprint = self.hasher.finish();
        Ok(KubernetesFeatures { fingerprint, sharded: self.sharded, managed_fields })
    }
}

/// What follows `text` in a line that has it.
fn after<'a>(line: &'a [u8], text: &[u8]) -> Option<&'a [u8]> {
    let at = line.windows(text.len()).position(|part| part == text)?;
    Some(&line[at + text.len()..])
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
    fn managed_fields_depend_on_the_gate_or_on_the_version() {
        use ManagedFieldsOptOut::{NoGate, Off, On};
        let with = |build: &str, gate: &str| {
            let text = metrics("v1", 0)
                .replace("git_version=\"v1\"", build)
                .replace("# TYPE process", &format!("{gate}# TYPE process"));
            read(&text, 1000).unwrap().managed_fields
        };
        let gate = |on: u8| {
            format!(
                "kubernetes_feature_enabled{{name=\"ManagedFieldsOptOut\",stage=\"ALPHA\"}} {on}\n"
            )
        };
        let (old, new) = ("major=\"1\",minor=\"37\"", "major=\"1\",minor=\"38+\"");
        for (build, gate, expected) in [
            (new, gate(1), On),
            (new, gate(0), Off),
            (old, String::new(), NoGate(37)),
            (new, String::new(), NoGate(38)),
            ("git_version=\"v1.37.1\"", String::new(), NoGate(0)),
        ] {
            assert_eq!(with(build, &gate), expected, "{build} {gate}");
        }
        let all = [Off, On, NoGate(37), NoGate(0), NoGate(38), NoGate(41)];
        assert_eq!(all.map(ManagedFieldsOptOut::number), [0, 1, 0, 2, 40, 43]);
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
