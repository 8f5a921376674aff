//! The error with which a response body ends before it is complete.

use std::fmt;

/// Why a body ends before it is complete.
///
/// It contains no h2 error. hyper would reset the client's stream with the reason of that error, and
/// Go repeats a POST whose stream was reset with `REFUSED_STREAM`.
#[derive(Debug)]
pub struct BodyError(pub String);

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BodyError {}
