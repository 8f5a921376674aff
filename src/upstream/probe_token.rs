//! The bearer token that our own question for `/readyz` shows, from a file that rotates.
//!
//! What is good is put into use; what is not leaves the last good one in place, and is told.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use http::HeaderValue;

use crate::net::files::bearer_token;

/// A configured token file, and what was last good in it.
#[derive(Debug)]
pub struct ProbeToken {
    file: PathBuf,
    good: ArcSwapOption<HeaderValue>,
    error: Mutex<Option<String>>,
}

impl ProbeToken {
    /// Reads the file. One that cannot be used is told by the first [`Self::refresh`].
    pub fn load(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            good: ArcSwapOption::from_pointee(bearer_token::authorization_from_file(file).ok()),
            error: Mutex::default(),
        }
    }

    /// The file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The value of the `authorization` header.
    pub fn header(&self) -> Option<HeaderValue> {
        self.good.load().as_deref().cloned()
    }

    /// Why what is in the file is not (or no longer) what is in use.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the file again; an error is one that was not told before.
    ///
    /// # Errors
    /// Why it cannot be used, with its path.
    pub fn refresh(&self) -> Result<(), String> {
        let read = bearer_token::authorization_from_file(&self.file);
        let error = read.as_ref().err().cloned();
        if let Ok(good) = read {
            self.good.store(Some(good.into()));
        }
        let mut known = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        let news = *known != error;
        known.clone_from(&error);
        match error {
            Some(error) if news => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_good_token_stays_and_an_error_is_told_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let token = ProbeToken::load(&file);
        assert_eq!((token.header(), token.error()), (None, None), "told by whoever looks again");
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
