//! The mistakes and warnings that one pass over a configuration collects.

use std::cell::RefCell;
use std::fmt::{Display, Write as _};

use jackstay_core::discovery::address::quote;

use super::errors::{ConfigError, KeyLines, join, nearest};

/// Origin of values from environment variables, and the `file` of errors about them.
pub(super) const ENVIRONMENT: &str = "environment";
/// Origin of values from flags, and the `file` of errors about them.
pub(super) const COMMAND_LINE: &str = "command line";
/// Origin of built-in defaults.
pub(super) const DEFAULT: &str = "default";
/// Prefix of the environment variables that set configuration keys.
pub(super) const ENV_PREFIX: &str = "JACKSTAY__";

/// A valid value with its key path.
pub(super) type Located<T> = (String, T);

/// The errors and warnings of one pass over a configuration, shared by all readers.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// The configuration file.
    pub(super) file: String,
    /// The lines of its keys, once it is parsed.
    pub(super) lines: RefCell<KeyLines>,
    errors: RefCell<Vec<ConfigError>>,
    warnings: RefCell<Vec<String>>,
    /// Paths of the keys that the configuration leaves to their defaults.
    pub(super) defaulted: RefCell<Vec<String>>,
}

impl Report {
    /// An empty report about `file`.
    pub(super) fn about(file: impl Into<String>) -> Self {
        Self { file: file.into(), ..Self::default() }
    }

    /// Adds an error.
    pub(super) fn add(&self, mut error: ConfigError) {
        if error.file == self.file && error.line.is_none() {
            error.line = self.lines.borrow().line_of(&error.path);
        }
        self.errors.borrow_mut().push(error);
    }

    /// Adds an error about a key path of the file.
    pub(super) fn error(&self, path: &str, message: impl Into<String>) {
        self.add(ConfigError::new(&*self.file, path, message));
    }

    /// Adds a warning about a key path of the file.
    pub(super) fn warn(&self, path: &str, message: impl Display) {
        self.add_warning(ConfigError::new(&*self.file, path, message.to_string()));
    }

    /// Adds a warning.
    pub(super) fn add_warning(&self, mut warning: ConfigError) {
        if warning.file == self.file {
            warning.line = self.lines.borrow().line_of(&warning.path);
        }
        self.warnings.borrow_mut().push(warning.to_string());
    }

    /// Adds an error about a key that is not in the schema.
    pub(super) fn unknown(&self, path: &str, key: &str, known: &[&str]) {
        let mut message = format!("unknown key {}", quote(key));
        if let Some(near) = nearest(key, known) {
            let _ = write!(message, "; did you mean {near}?");
        }
        self.error(&join(path, key), message);
    }

    /// The number of errors so far.
    pub(super) fn error_count(&self) -> usize {
        self.errors.borrow().len()
    }

    /// The errors, the warnings, and the lines of the keys.
    pub(super) fn finish(self) -> (Vec<ConfigError>, Vec<String>, KeyLines) {
        (self.errors.into_inner(), self.warnings.into_inner(), self.lines.into_inner())
    }
}
