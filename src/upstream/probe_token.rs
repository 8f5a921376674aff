//! The bearer token of jackstay's own `/readyz` requests, from a file that rotates.
//!
//! A valid token is put into use. An invalid one is reported once, and the last valid one stays in use.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use http::HeaderValue;

use crate::net::files;

/// A configured token file and its last valid token.
#[derive(Debug)]
pub struct ProbeToken {
    file: PathBuf,
    good: ArcSwapOption<HeaderValue>,
    error: Mutex<Option<String>>,
}

impl ProbeToken {
    /// Reads the file. The first [`Self::refresh`] reports an unusable one.
    pub fn load(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            good: ArcSwapOption::from_pointee(files::authorization_from_file(file).ok()),
            error: Mutex::default(),
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The value of the `authorization` header.
    pub fn header(&self) -> Option<HeaderValue> {
        self.good.load().as_deref().cloned()
    }

    /// Why the content of the file is not in use.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again; returns an error only if it is new.
    ///
    /// # Errors
    /// Why it cannot be used, with its path.
    pub fn refresh(&self) -> Result<(), String> {
        let read = files::authorization_from_file(&self.file);
        let error = read.as_ref().err().cloned();
        if let Ok(good) = read {
            self.good.store(Some(good.into()));
        }
        let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *known != error;
        known.clone_from(&error);
        match error {
            Some(error) if is_new => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refresh_keeps_the_last_valid_token_and_reports_an_error_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let token = ProbeToken::load(&file);
        assert_eq!((token.header(), token.error()), (None, None), "reported by the first refresh");
        assert!(token.refresh().unwrap_err().contains("No such file"));
        assert!(token.refresh().is_ok() && token.error().is_some());
        let shown = || token.header().unwrap().to_str().unwrap().to_owned();
        std::fs::write(&file, "one\n").unwrap();
        assert_eq!((token.refresh(), token.error()), (Ok(()), None));
        assert_eq!(shown(), "Bearer one");
        std::fs::write(&file, "").unwrap();
        assert!(token.refresh().unwrap_err().ends_with("token: it is empty"));
        assert_eq!(shown(), "Bearer one");
        std::fs::write(&file, "two").unwrap();
        assert_eq!((token.refresh(), shown()), (Ok(()), "Bearer two".to_owned()));
        assert!(!format!("{token:?}").contains("two"));
    }
}
