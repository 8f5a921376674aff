//! The TLS configuration of a listener: its serving certificate and its client CA, which can be replaced while
//! it serves.
//!
//! The handshake proves only that the client has the key of its certificate. The certificate itself is
//! verified for each request, as in kube-apiserver, so that a client with an expired one gets a 401 with the
//! reason; so does one of X.509 version 1, which webpki does not read. Only a chain above the limits of
//! [`client_chain`] fails the handshake, with the alert `certificate_unknown`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use jackstay_config::ServingFiles;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, ServerConfig,
    SignatureScheme,
};
use tokio::sync::watch;

use super::certificate::CertInfo;
use super::client_chain::{self, ClientCa};
use super::file_error::TlsFileError;
use super::key_log;
use super::local_ca::{self, LocalCaError};
use super::pem_files::{self, LoadedCa, LoadedCert};
use super::{session_cache, version_1};
use crate::loaded_files::LoadedFiles;

/// TLS of one listener. Readers never block. [`Self::refresh`] and [`Self::install`] must not run at the same
/// time.
#[derive(Debug)]
pub struct ServingTls {
    files: ArcSwap<ServingFiles>,
    config: ArcSwap<ServerConfig>,
    certificate: ArcSwap<LoadedCert>,
    client_ca: ArcSwapOption<ClientCa>,
    /// Why the present content of the files is not in use.
    errors: ArcSwap<ServingErrors>,
    /// Fingerprint of the client CA; 0 without one.
    ca_fingerprint: AtomicU64,
    /// Sent after each change of the client CA.
    ca_changed: watch::Sender<()>,
}

/// The files of a listener that cannot be used, with reasons. Their previous versions stay in use.
#[derive(Debug, Default)]
pub struct ServingErrors {
    /// Of the serving certificate or its key.
    pub certificate: Option<String>,
    /// Of the client CA.
    pub client_ca: Option<String>,
}

/// Result of [`ServingTls::refresh`].
#[derive(Debug)]
pub struct ServingRefresh {
    /// Whether a changed file was put into use.
    pub changed: bool,
    /// The files that cannot be used, with reasons. Their previous versions stay in use.
    pub error: Option<String>,
}

/// The loaded files of a listener, before they are put into use.
#[derive(Debug)]
pub struct LoadedServingTls {
    files: ServingFiles,
    certificate: Arc<LoadedCert>,
    ca: Option<LoadedCa>,
}

impl LoadedServingTls {
    /// Loads the files that the configuration names.
    ///
    /// # Errors
    /// The first file that cannot be used, with the reason.
    pub fn load(config: &ServingFiles, loaded: &mut LoadedFiles) -> Result<Self, TlsFileError> {
        let ca_file = config.client_ca_file.as_deref();
        Ok(Self {
            certificate: loaded.serving_certificate(&config.tls.paths)?,
            ca: ca_file.map(|file| loaded.ca(file)).transpose()?,
            files: config.clone(),
        })
    }
}

impl ServingTls {
    /// TLS with the loaded files.
    pub fn new(loaded: LoadedServingTls) -> Self {
        let LoadedServingTls { files, certificate, ca } = loaded;
        let client_ca = ca.as_ref().map(ClientCa::from_bundle);
        Self {
            files: ArcSwap::from_pointee(files),
            config: ArcSwap::from_pointee(server_config(&certificate, client_ca.as_ref())),
            certificate: ArcSwap::from(certificate),
            client_ca: ArcSwapOption::from_pointee(client_ca),
            errors: ArcSwap::default(),
            ca_fingerprint: AtomicU64::new(ca.map_or(0, |ca| ca.fingerprint)),
            ca_changed: watch::Sender::new(()),
        }
    }

    /// The rustls configuration for the next handshake.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// The client CA, if client certificates are requested.
    pub fn client_ca(&self) -> arc_swap::Guard<Option<Arc<ClientCa>>> {
        self.client_ca.load()
    }

    /// A receiver of the changes of the client CA.
    pub fn client_ca_changes(&self) -> watch::Receiver<()> {
        self.ca_changed.subscribe()
    }

    /// The serving certificate in use.
    pub fn certificate(&self) -> Arc<LoadedCert> {
        self.certificate.load_full()
    }

    /// The file of the serving certificate.
    pub fn cert_file(&self) -> PathBuf {
        self.files.load().tls.paths.cert_file.clone()
    }

    /// Why the present content of the files is not in use.
    pub fn errors(&self) -> Arc<ServingErrors> {
        self.errors.load_full()
    }

    /// Paths of the files.
    pub fn paths(&self) -> Vec<PathBuf> {
        let files = self.files.load();
        let pair = [&files.tls.paths.cert_file, &files.tls.paths.key_file].into_iter();
        pair.chain(&files.client_ca_file).cloned().collect()
    }

    /// Whether this process can read the key of a CA, with which it renews the serving certificate.
    pub fn has_issuer(&self) -> bool {
        self.files.load().tls.issuer.is_some()
    }

    /// Renews the serving certificate in its file if an issuer is configured and the renewal is due. Accesses
    /// the disk only then. [`Self::refresh`] puts the renewed certificate into use.
    ///
    /// # Errors
    /// Why the certificate could not be renewed.
    pub fn renew_if_due(&self, now: SystemTime) -> Result<Option<CertInfo>, LocalCaError> {
        let files = self.files.load();
        match &files.tls.issuer {
            Some(issuer) if now >= local_ca::renewal_time(&self.certificate.load().info) => {
                local_ca::renew_if_due(&files.tls.paths, issuer, now)
            }
            _ => Ok(None),
        }
    }

    /// Reads the files again and puts changes into use. Established connections stay. Must not be called on a
    /// worker, since it accesses the disk.
    pub fn refresh(&self) -> ServingRefresh {
        let files = self.files.load();
        let certificate = pem_files::load_serving_cert(&files.tls.paths).map(Arc::new);
        let ca = files.client_ca_file.as_deref().map(pem_files::load_ca).transpose();
        self.apply(certificate, ca)
    }

    /// Puts the files of another configuration into use. Established connections stay; their client
    /// certificates are verified against the new client CA.
    pub fn install(&self, loaded: LoadedServingTls) {
        let LoadedServingTls { files, certificate, ca } = loaded;
        self.files.store(Arc::new(files));
        self.apply(Ok(certificate), Ok(ca));
    }

    /// Puts a certificate and a client CA into use, each even if the other is an error: a withdrawn CA must
    /// not stay trusted because the serving pair is unusable, and a renewed certificate must not wait until
    /// the CA file is usable.
    fn apply(
        &self,
        certificate: Result<Arc<LoadedCert>, TlsFileError>,
        ca: Result<Option<LoadedCa>, TlsFileError>,
    ) -> ServingRefresh {
        let errors = ServingErrors {
            certificate: certificate.as_ref().err().map(ToString::to_string),
            client_ca: ca.as_ref().err().map(ToString::to_string),
        };
        let error = [&errors.certificate, &errors.client_ca].into_iter().flatten().cloned();
        let error = error.reduce(|first, second| format!("{first}; {second}"));
        self.errors.store(Arc::new(errors));
        let current = self.certificate.load().fingerprint;
        let certificate = certificate.ok().filter(|certificate| certificate.fingerprint != current);
        let ca = ca.ok().filter(|ca| {
            let fingerprint = ca.as_ref().map_or(0, |ca| ca.fingerprint);
            self.ca_fingerprint.swap(fingerprint, Ordering::Relaxed) != fingerprint
        });
        let (certificate_changed, ca_changed) = (certificate.is_some(), ca.is_some());
        if let Some(certificate) = certificate {
            self.certificate.store(certificate);
        }
        if let Some(ca) = ca {
            self.client_ca.store(ca.as_ref().map(ClientCa::from_bundle).map(Arc::new));
        }
        if certificate_changed || ca_changed {
            let config = server_config(&self.certificate.load(), self.client_ca.load().as_deref());
            self.config.store(Arc::new(config));
        }
        if ca_changed {
            self.ca_changed.send_replace(());
        }
        ServingRefresh { changed: certificate_changed || ca_changed, error }
    }
}

pub(super) fn server_config(certificate: &LoadedCert, ca: Option<&ClientCa>) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("aws-lc-rs has cipher suites for TLS 1.2 and 1.3");
    let builder = match ca {
        Some(ca) => {
            builder.with_client_cert_verifier(Arc::new(DeferredClientVerification(ca.verifier())))
        }
        None => builder.with_no_client_auth(),
    };
    let resolver = rustls::sign::SingleCertAndKey::from(Arc::clone(&certificate.certified));
    let mut config = builder.with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.key_log = key_log::key_log();
    config.session_storage = session_cache::new();
    config
}

/// The error of a handshake with a client chain above a limit of [`client_chain`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ChainLimitError(String);

/// The text of a [`ChainLimitError`], if `error` is a handshake that failed with it.
pub fn chain_limit_error(error: &std::io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::InvalidCertificate(CertificateError::Other(OtherError(why))) => {
            why.downcast_ref::<ChainLimitError>().map(ToString::to_string)
        }
        _ => None,
    }
}

/// Accepts every client certificate whose key the client proves to have. The inner verifier verifies that
/// proof and provides the CA names of the certificate request.
#[derive(Debug)]
pub struct DeferredClientVerification(pub Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for DeferredClientVerification {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match client_chain::exceeded_limit(leaf, others) {
            None => Ok(ClientCertVerified::assertion()),
            Some(why) => {
                // For this error rustls sends the alert `certificate_unknown`, "some other (unspecified)
                // issue" (RFC 8446 section 6.2). The alerts of other errors name a wrong cause, such
                // as the CA, the validity or the encoding.
                let why = OtherError(Arc::new(ChainLimitError(why)));
                Err(Error::InvalidCertificate(CertificateError::Other(why)))
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = self.0.verify_tls12_signature(message, certificate, signature);
        verified
            .or_else(|error| version_1::verify_tls12(message, certificate, signature).ok_or(error))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = self.0.verify_tls13_signature(message, certificate, signature);
        verified
            .or_else(|error| version_1::verify_tls13(message, certificate, signature).ok_or(error))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use jackstay_config::{CertPaths, ServingCert};
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// Writes a self-signed certificate with its key; returns its serial number.
    fn write_pair(path: &Path) -> String {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap();
        std::fs::write(path, certificate.pem() + &key.serialize_pem()).unwrap();
        super::super::certificate::cert_info(certificate.der()).unwrap().serial
    }

    #[test]
    fn refresh_applies_certificate_and_client_ca_independently() {
        let dir = tempfile::tempdir().unwrap();
        let (pair, ca) = (dir.path().join("pair.pem"), dir.path().join("ca.pem"));
        write_pair(&pair);
        write_pair(&ca);
        let tls = ServingTls::new(
            LoadedServingTls::load(
                &ServingFiles {
                    tls: ServingCert {
                        paths: CertPaths { cert_file: pair.clone(), key_file: pair.clone() },
                        issuer: None,
                    },
                    client_ca_file: Some(ca.clone()),
                },
                &mut LoadedFiles::default(),
            )
            .unwrap(),
        );
        // A session of a client with a chain of 16 KiB.
        assert!(!tls.config().session_storage.put(vec![1], vec![0; 16 << 10]));
        let mut ca_changes = tls.client_ca_changes();
        ca_changes.mark_unchanged();
        let refresh = tls.refresh();
        assert!(!refresh.changed && refresh.error.is_none(), "{refresh:?}");

        std::fs::write(&ca, "").unwrap();
        let serial = write_pair(&pair);
        let refresh = tls.refresh();
        assert!(refresh.changed && refresh.error.unwrap().contains("ca.pem: is empty"));
        assert_eq!(tls.certificate().info.serial, serial);
        assert!(tls.client_ca().is_some() && !ca_changes.has_changed().unwrap());

        std::fs::write(&pair, "").unwrap();
        write_pair(&ca);
        let refresh = tls.refresh();
        assert!(refresh.changed && refresh.error.unwrap().contains("pair.pem: is empty"));
        assert_eq!(tls.certificate().info.serial, serial);
        assert!(ca_changes.has_changed().unwrap());

        std::fs::write(&ca, "").unwrap();
        let refresh = tls.refresh();
        let error = refresh.error.unwrap();
        assert!(!refresh.changed && error.contains("pair.pem") && error.contains("ca.pem"));
    }
}
