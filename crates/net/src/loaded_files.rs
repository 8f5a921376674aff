//! The files of one configuration, each read at most once.
//!
//! The check of a configuration and the start, or the reload, with it use the same content. The tasks that follow the
//! files (`control::certificates`) find a change after that.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::HeaderValue;
use jackstay_config::{CertPaths, IdentitySource};
use jackstay_sys::files::{self, TokenFileError};

use super::tls::file_error::TlsFileError;
use super::tls::pem_files::{self, LoadedCa, LoadedCert};

/// Reads files, and keeps what it has read until it is dropped, also the reason why a file cannot be used.
#[derive(Debug, Default)]
pub struct LoadedFiles {
    certificates: HashMap<IdentitySource, Result<Arc<LoadedCert>, TlsFileError>>,
    bundles: HashMap<PathBuf, Result<LoadedCa, TlsFileError>>,
    tokens: HashMap<PathBuf, Result<HeaderValue, TokenFileError>>,
}

impl LoadedFiles {
    /// A certificate chain and its key.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn certificate(&mut self, paths: &CertPaths) -> Result<Arc<LoadedCert>, TlsFileError> {
        let load = || pem_files::load_cert(paths).map(Arc::new);
        self.certificates.entry(paths.clone().into()).or_insert_with(load).clone()
    }

    /// The certificate chain of an identity and its key, which `load` reads.
    ///
    /// # Errors
    /// A file cannot be used.
    pub fn identity(
        &mut self,
        source: &IdentitySource,
        load: fn(&IdentitySource) -> Result<LoadedCert, TlsFileError>,
    ) -> Result<Arc<LoadedCert>, TlsFileError> {
        let load = || load(source).map(Arc::new);
        self.certificates.entry(source.clone()).or_insert_with(load).clone()
    }

    /// The certificate chain of a server and its key.
    ///
    /// # Errors
    /// A file cannot be used, or the certificate is X.509 version 1.
    pub fn serving_certificate(
        &mut self,
        paths: &CertPaths,
    ) -> Result<Arc<LoadedCert>, TlsFileError> {
        let loaded = self.certificate(paths)?;
        pem_files::check_serving_cert(&loaded, &paths.cert_file)?;
        Ok(loaded)
    }

    /// A CA bundle.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn ca(&mut self, path: &Path) -> Result<LoadedCa, TlsFileError> {
        let load = || pem_files::load_ca(path);
        self.bundles.entry(path.to_owned()).or_insert_with(load).clone()
    }

    /// The value of the `authorization` header for the bearer token in a file.
    ///
    /// # Errors
    /// The file cannot be read or holds no token.
    pub fn token(&mut self, path: &Path) -> Result<&HeaderValue, &TokenFileError> {
        let load = || files::authorization_from_file(path);
        self.tokens.entry(path.to_owned()).or_insert_with(load).as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};

    #[test]
    fn loaded_files_keep_what_they_have_read_and_why_they_could_not() {
        let dir = tempfile::tempdir().unwrap();
        let pair = dir.path().join("pair.pem");
        let paths = CertPaths { cert_file: pair.clone(), key_file: pair.clone() };
        let mut loaded = LoadedFiles::default();
        assert!(loaded.certificate(&paths).unwrap_err().is_missing());
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap().pem();
        std::fs::write(&pair, certificate + &key.serialize_pem()).unwrap();
        assert!(loaded.serving_certificate(&paths).unwrap_err().is_missing(), "it was read before");
        assert!(LoadedFiles::default().serving_certificate(&paths).is_ok());

        assert!(loaded.ca(&pair).is_ok());
        let token = dir.path().join("token");
        std::fs::write(&token, "one").unwrap();
        assert_eq!(loaded.token(&token).unwrap(), "Bearer one");
        std::fs::write(&token, "two").unwrap();
        std::fs::remove_file(&pair).unwrap();
        assert_eq!(loaded.token(&token).unwrap(), "Bearer one");
        assert!(loaded.ca(&pair).is_ok());
    }
}
