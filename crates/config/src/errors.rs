//! The mistakes of a configuration, one line each: the file, the key path, and the remedy.

use std::collections::BTreeMap;
use std::fmt;

use jackstay_core::discovery::address::quote;
use serde::Serialize;

/// One mistake in a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct ConfigError {
    /// The file, or `environment`, or `command line`.
    #[serde(rename = "source")]
    pub file: String,
    /// The line of the key, or of the nearest key above it that the file has; from 1. `None` for the file as a
    /// whole, and for values that do not come from the file.
    pub line: Option<u64>,
    /// The key path, such as `listeners[0].tls.cert_file`; empty for the file as a whole.
    pub path: String,
    /// The mistake, and a correct example.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

impl ConfigError {
    /// An error without a line.
    pub fn new(file: impl Into<String>, path: &str, message: impl Into<String>) -> Self {
        Self { file: file.into(), line: None, path: path.to_owned(), message: message.into() }
    }
}

/// The lines of the keys of a file, by key path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyLines(BTreeMap<String, u64>);

impl KeyLines {
    /// Adds a key. Of a duplicate key, the first line counts.
    pub(super) fn add(&mut self, path: &str, line: u64) {
        self.0.entry(path.to_owned()).or_insert(line);
    }

    /// The line of the key at `path`, or of the nearest key above it. A scalar in a list has no line of its own, and
    /// a missing key has none.
    pub fn line_of(&self, path: &str) -> Option<u64> {
        let mut path = path;
        loop {
            if let Some(line) = self.0.get(path) {
                return Some(*line);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }
}

/// Every mistake of a configuration, in a stable order; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    /// Writes one line for each mistake.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for ConfigErrors {}

/// The reason of an I/O error, without the number that `std` appends.
pub fn describe_io_error(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// Longest key that is written without quotes, in bytes.
const MAX_KEY: usize = 80;

/// A key as part of a path, quoted if it is not a plain word.
pub(super) fn quote_key(key: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.len() <= MAX_KEY && key.chars().all(plain) {
        key.to_owned()
    } else {
        quote(key)
    }
}

/// `path.key`, or `key` at the top.
pub(super) fn join(path: &str, key: &str) -> String {
    let key = quote_key(key);
    if path.is_empty() { key } else { format!("{path}.{key}") }
}

/// The known key that is most similar to an unknown one, if any is similar enough.
pub(super) fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    // The distance takes quadratic time. No known key has more than 37 characters and 3 mistakes.
    if key.len() > 40 {
        return None;
    }
    let key = key.to_lowercase().replace('-', "_");
    let distance = |k: &&str| strsim::osa_distance(&key, k);
    let best = known.iter().copied().min_by_key(distance)?;
    (strsim::osa_distance(&key, best) <= (best.len() / 3).clamp(1, 3)).then_some(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_a_misspelt_key() {
        let known = ["listeners", "upstreams", "log", "ping_interval"];
        for (key, expected) in [
            ("listner", Some("listeners")),
            ("listener", Some("listeners")),
            ("Upstreams", Some("upstreams")),
            ("ping-interval", Some("ping_interval")),
            ("lgo", Some("log")),
            ("pingintervall", Some("ping_interval")),
            ("color", None),
            ("", None),
        ] {
            assert_eq!(nearest(key, &known), expected, "{key}");
        }
        assert_eq!(nearest(&"listeners".repeat(1000), &known), None);
    }

    #[test]
    fn line_of_is_that_of_the_key_or_of_the_nearest_one_above() {
        let mut lines = KeyLines::default();
        for (path, line) in [("a", 1), ("a[0]", 2), ("a[0].b", 2), ("a[0].c", 3), ("a[0].c", 9)] {
            lines.add(path, line);
        }
        for (path, line) in [
            ("a", Some(1)),
            ("a[0].c", Some(3)),
            ("a[0].c.missing", Some(3)),
            ("a[0].missing", Some(2)),
            ("a[1]", Some(1)),
            ("z", None),
            ("", None),
        ] {
            assert_eq!(lines.line_of(path), line, "{path}");
        }
    }

    #[test]
    fn join_and_quote_return_one_line() {
        assert_eq!(join("", "log"), "log");
        assert_eq!(join("a[0]", "b.c\n"), "a[0].\"b.c\\n\"");
        assert_eq!(quote(&"ä".repeat(81)), format!("\"{}\"…", "ä".repeat(80)));
    }
}
