//! What is wrong with a configuration, one line for each mistake: where it is and what to do.

use std::fmt;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConfigError {
    /// The file, or `environment`, or `command line`.
    pub file: String,
    /// Where in it, as `listeners[0].tls.cert_file`; empty if it is about the whole.
    pub path: String,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.file)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// Every mistake of a configuration, in a stable order; never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
    /// One line each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// Longest piece of the user's text that a message repeats.
const MAX_QUOTE: usize = 80;

/// The user's text in a message: on one line, escaped, of bounded length.
pub(super) fn quote(text: &str) -> String {
    if text.chars().count() <= MAX_QUOTE {
        return format!("{text:?}");
    }
    let start: String = text.chars().take(MAX_QUOTE).collect();
    format!("{start:?}…")
}

/// A key as part of a path: as it is, or quoted if it is not a plain word.
pub(super) fn quote_key(key: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if !key.is_empty() && key.len() <= MAX_QUOTE && key.chars().all(plain) {
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

/// The known key that an unknown one was probably meant to be.
pub(super) fn nearest<'a>(key: &str, known: &[&'a str]) -> Option<&'a str> {
    // Longer than any key with every mistake we forgive.
    if key.len() > 40 {
        return None;
    }
    let key = key.to_lowercase().replace('-', "_");
    let distance = |k: &&str| edit_distance(&key, k);
    let best = known.iter().copied().min_by_key(distance)?;
    (edit_distance(&key, best) <= (best.len() / 3).clamp(1, 3)).then_some(best)
}

/// Insertions, deletions, replacements and swaps of neighbours between two short texts.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for i in 0..=a.len() {
        for j in 0..=b.len() {
            if i == 0 || j == 0 {
                rows[i][j] = i + j;
                continue;
            }
            let same = usize::from(a[i - 1] != b[j - 1]);
            let step = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + same);
            let swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            rows[i][j] = if swapped { step.min(rows[i - 2][j - 2] + 1) } else { step };
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_recognised() {
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
    fn paths_and_quotes_stay_on_one_line() {
        assert_eq!(join("", "log"), "log");
        assert_eq!(join("a[0]", "b.c\n"), "a[0].\"b.c\\n\"");
        assert_eq!(quote(&"ä".repeat(81)), format!("\"{}\"…", "ä".repeat(80)));
    }
}
