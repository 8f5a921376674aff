//! The `log` section: severities, formats and the choice of logged requests.

use serde::Serialize;

/// Logging.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Log {
    /// The least severe level that is written.
    pub level: Level,
    /// Format of a line.
    pub format: LogFormat,
    /// Which requests get a line.
    pub access: AccessLog,
}

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Errors only.
    Error,
    /// Errors and warnings.
    Warn,
    /// The above and state changes.
    Info,
    /// The above and details for developers.
    Debug,
    /// Everything, in a debug build only. Release builds omit these lines (feature
    /// `release_max_level_debug` of tracing), because the span around every HTTP/2 frame costs time
    /// even if no line is written.
    Trace,
}

impl Level {
    /// Each level with its name in the configuration.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];
}

/// Format of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text with `key=value` fields.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// Each format with its name in the configuration.
    pub const NAMES: [(&'static str, Self); 2] = [("text", Self::Text), ("json", Self::Json)];
}

/// Which requests are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessLog {
    /// None.
    Off,
    /// Requests with status 500 or above, and requests that were cut off.
    Errors,
    /// All.
    All,
}

impl AccessLog {
    /// Each choice with its name in the configuration.
    pub const NAMES: [(&'static str, Self); 3] =
        [("off", Self::Off), ("errors", Self::Errors), ("all", Self::All)];
}
