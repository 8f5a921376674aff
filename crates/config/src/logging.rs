//! The `log` section: level, format, and the requests that are logged. [`ValueEnum`] reads the names in
//! the file, and serde writes the same names.

use clap::ValueEnum;
use serde::Serialize;

/// Logging.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Log {
    /// The least severe level that is written.
    pub level: Level,
    /// Format of a line.
    pub format: LogFormat,
    /// Which requests are logged.
    pub access: AccessLog,
}

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Errors only.
    Error,
    /// Errors and warnings.
    Warn,
    /// Also state changes.
    Info,
    /// Also details for developers.
    Debug,
    /// Everything, in a debug build only. Release builds omit these lines (feature
    /// `release_max_level_debug` of tracing), because the span around every HTTP/2 frame costs time
    /// even if no line is written.
    Trace,
}

/// Format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text with `key=value` fields.
    Text,
    /// One JSON object a line.
    Json,
}

/// Which requests are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// None.
    Off,
    /// Requests with status 500 or above, those that jackstay itself answers with 401, responses that were cut off,
    /// and requests whose client left before the response.
    Errors,
    /// All.
    All,
}
