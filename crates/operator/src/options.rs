//! Options that several commands share (`--config`, `-o`), exit codes, and the capabilities of the
//! terminal.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use jackstay_config::{UnitError, parse_duration};
use serde::Serialize;

/// Exit code for bad usage, a bad configuration or an input that cannot be used. 0 is success and 1 a
/// failure at run time.
pub const EXIT_USAGE: u8 = 2;

/// Exit code if what the command asks gives no answer: the admin endpoint of a running jackstay, or an apiserver. So a
/// script can tell a jackstay that does not run from one that is not ready, which is 1.
pub const EXIT_NO_ANSWER: u8 = 3;

/// The configuration file that is read without `--config`.
pub const DEFAULT_CONFIG: &str = "/etc/jackstay/jackstay.yaml";

/// The `--config` option of `run` and `check`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Configuration file (YAML).
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub config: PathBuf,
}

/// A hint for the case that `file` is the default file and does not exist.
pub fn missing_default_hint(file: &Path) -> Option<&'static str> {
    let missing = file == Path::new(DEFAULT_CONFIG) && matches!(file.try_exists(), Ok(false));
    missing.then_some("name the configuration file with --config FILE")
}

/// Reads the duration of a flag: as in the configuration (`250ms`, `1m30s`), or a number of seconds.
///
/// # Errors
/// `text` is neither.
pub fn parse_flag_duration(text: &str) -> Result<Duration, UnitError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { parse_duration(&format!("{text}s")) } else { parse_duration(text) }
}

/// Why the value of a flag is not an accepted duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationFlagError {
    /// It is not a duration.
    #[error("{0}")]
    Unit(UnitError),
    /// It is not within the limits of the flag, which this text names.
    #[error("{0}")]
    OutsideLimits(&'static str),
}

/// The `-o` option of commands that print a result.
#[derive(Debug, Clone, Copy, Args)]
pub struct OutputArgs {
    /// Output format.
    #[arg(long = "output", short = 'o', value_name = "FORMAT", default_value = "text")]
    pub format: OutputFormat,
}

/// How a result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// Text for terminals.
    #[value(alias = "table")]
    Text,
    /// One JSON object.
    Json,
    /// The same object as YAML.
    Yaml,
}

impl OutputFormat {
    /// Formats `value` as indented JSON or as YAML that ends with a newline, or calls `text`.
    pub fn render(self, value: &impl Serialize, text: impl FnOnce() -> String) -> String {
        // Serialization fails only for map keys that are not strings; no command prints such a map.
        let mut out = match self {
            Self::Text => return text(),
            Self::Json => serde_json::to_string_pretty(value).unwrap_or_default(),
            Self::Yaml => serde_saphyr::to_string(value).unwrap_or_default(),
        };
        if !out.ends_with('\n') {
            out.push('\n');
        }
        out
    }

    /// Prints the result of [`OutputFormat::render`]. A write error, such as a closed pipe, is ignored.
    pub fn print(self, value: &impl Serialize, text: impl FnOnce() -> String) {
        let _ = io::stdout().lock().write_all(self.render(value, text).as_bytes());
    }
}

/// Whether stdout is a terminal that understands cursor movement: `TERM` is set and not `dumb`.
pub fn has_cursor() -> bool {
    io::stdout().is_terminal() && is_capable(std::env::var_os("TERM").as_deref())
}

/// Whether stdout shows colours: a capable terminal, and `NO_COLOR` is unset or empty
/// (<https://no-color.org>).
pub fn has_colour() -> bool {
    has_cursor() && is_colour_wanted(std::env::var_os("NO_COLOR").as_deref())
}

fn is_capable(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

fn is_colour_wanted(no_color: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn parse_flag_duration_takes_a_number_as_seconds() {
        for (text, millis) in [("5", 5_000), ("0", 0), ("5s", 5_000), ("250ms", 250)] {
            assert_eq!(parse_flag_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "-5", "1.5", "5 s", "99999999999999999999"] {
            assert!(parse_flag_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn terminal_dumb_or_unknown_is_not_capable() {
        assert!(is_capable(Some(OsStr::new("xterm-256color"))));
        for term in [None, Some(OsStr::new("")), Some(OsStr::new("dumb"))] {
            assert!(!is_capable(term), "{term:?}");
        }
    }

    #[test]
    fn colour_no_color_set_is_not_wanted_unless_empty() {
        assert!(is_colour_wanted(None) && is_colour_wanted(Some(OsStr::new(""))));
        assert!(!is_colour_wanted(Some(OsStr::new("1"))));
    }

    #[test]
    fn render_each_format_ends_with_one_newline() {
        let value = json!({ "names": ["a"], "ok": true });
        let render = |format: OutputFormat| format.render(&value, || "text\n".to_owned());
        assert_eq!(render(OutputFormat::Text), "text\n");
        assert!(render(OutputFormat::Json).starts_with("{\n  \"names\": ["));
        let yaml = render(OutputFormat::Yaml);
        assert!(yaml.contains("names:\n") && yaml.contains("ok: true"), "{yaml}");
        assert!(yaml.ends_with('\n') && !yaml.ends_with("\n\n"), "{yaml}");
    }
}
