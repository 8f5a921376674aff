//! The bearer token for jackstay's own `/readyz` requests, from a file that is rotated.
//!
//! If the file becomes invalid, the error is reported once and the last valid token stays in use.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use http::HeaderValue;
use jackstay_sys::files::{self, TokenFileError};

/// A token file and its last valid token.
#[derive(Debug)]
pub struct ProbeToken {
    file: PathBuf,
    valid: ArcSwapOption<HeaderValue>,
    /// The text of the last error.
    error: Mutex<Option<String>>,
}

impl ProbeToken {
    /// The token of `file`. `valid` is the header for its present content, if that is a token; the first
    /// [`Self::refresh`] reports why it is none.
    pub fn new(file: &Path, valid: Option<HeaderValue>) -> Self {
        Self {
            file: file.to_owned(),
            valid: ArcSwapOption::from_pointee(valid),
            error: Mutex::default(),
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The value of the `authorization` header.
    pub fn header(&self) -> Option<HeaderValue> {
        self.valid.load().as_deref().cloned()
    }

    /// Why the content of the file is not in use.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again.
    ///
    /// # Errors
    /// The file cannot be used, and the error differs from that of the previous read.
    pub fn refresh(&self) -> Result<(), TokenFileError> {
        let read = files::authorization_from_file(&self.file).map(|token| {
            self.valid.store(Some(token.into()));
        });
        let text = read.as_ref().err().map(ToString::to_string);
        let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *known != text;
        *known = text;
        if is_new { read } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refresh_keeps_the_last_valid_token_and_reports_an_error_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let token = ProbeToken::new(&file, None);
        assert_eq!((token.header(), token.error()), (None, None), "reported by the first refresh");
        assert!(token.refresh().unwrap_err().to_string().contains("No such file"));
        assert!(token.refresh().is_ok() && token.error().is_some());
        let shown = || token.header().unwrap().to_str().unwrap().to_owned();
        std::fs::write(&file, "one\n").unwrap();
        assert_eq!((token.refresh().is_ok(), token.error()), (true, None));
        assert_eq!(shown(), "Bearer one");
        std::fs::write(&file, "").unwrap();
        assert!(token.refresh().unwrap_err().to_string().ends_with("token: it is empty"));
        assert_eq!(shown(), "Bearer one");
        std::fs::write(&file, "two").unwrap();
        assert_eq!((token.refresh().is_ok(), shown()), (true, "Bearer two".to_owned()));
        assert!(!format!("{token:?}").contains("two"));
    }
}
