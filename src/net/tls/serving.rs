//! The TLS side of a listener: the serving certificate, the client CA, and how both are re-read.
//!
//! An invalid client certificate does not fail the handshake. The handshake proves possession of the key;
//! validity is checked for each request, as in kube-apiserver, so that an expired certificate gets a 401
//! with a reason. Only a chain above the limits of [`client_chain`] fails the handshake, with the alert
//! `certificate_unknown`.

use std::error;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
};
use tokio::sync::watch;

use super::certificate::CertInfo;
use super::file_error::TlsFileError;
use super::pem_files::{self, LoadedCa, LoadedCert};
use crate::config::Terminate;
use crate::net::tls::client_chain::{self, ClientCa};
use crate::net::tls::local_ca;

/// TLS of one listener. Readers never block; [`Self::refresh`] and [`Self::install`] must be called on one
/// thread.
#[derive(Debug)]
pub struct ServingTls {
    files: ArcSwap<Terminate>,
    config: ArcSwap<ServerConfig>,
    client_ca: ArcSwapOption<ClientCa>,
    /// Notified after each change of the client CA.
    ca_changed: watch::Sender<()>,
    certificate: ArcSwap<LoadedCert>,
    ca_fingerprint: AtomicU64,
}

/// The loaded files of a listener, not yet in use.
#[derive(Debug)]
pub struct LoadedServingTls {
    files: Terminate,
    certificate: Arc<LoadedCert>,
    ca: Option<LoadedCa>,
}

impl LoadedServingTls {
    /// Loads the files.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub fn load(config: &Terminate) -> Result<Self, TlsFileError> {
        let files = config.clone();
        Ok(Self {
            certificate: Arc::new(pem_files::load_cert(&files.tls)?),
            ca: files.client_ca_file.as_deref().map(pem_files::load_ca).transpose()?,
            files,
        })
    }
}

impl ServingTls {
    /// TLS with the loaded files.
    pub fn new(prepared: LoadedServingTls) -> Self {
        let LoadedServingTls { files, certificate, ca } = prepared;
        Self {
            files: ArcSwap::from_pointee(files),
            config: ArcSwap::from_pointee(server_config(&certificate, ca.as_ref())),
            client_ca: ArcSwapOption::from_pointee(ca.as_ref().map(client_ca)),
            ca_changed: watch::Sender::new(()),
            certificate: ArcSwap::from(certificate),
            ca_fingerprint: AtomicU64::new(fingerprint(ca.as_ref())),
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

    /// Notifies of changes of the client CA.
    pub fn client_ca_changes(&self) -> watch::Receiver<()> {
        self.ca_changed.subscribe()
    }

    /// The serving certificate in use.
    pub fn certificate(&self) -> Arc<LoadedCert> {
        self.certificate.load_full()
    }

    /// Paths of the files.
    pub fn paths(&self) -> Vec<PathBuf> {
        let files = self.files.load();
        let pair = [&files.tls.cert_file, &files.tls.key_file].into_iter();
        pair.chain(&files.client_ca_file).cloned().collect()
    }

    /// Renews the serving certificate if it has an issuer and is due; [`Self::refresh`] then puts it into use.
    /// Accesses the disk only if it is due.
    ///
    /// # Errors
    /// Why it could not be renewed, naming the file.
    pub fn renew_if_due(&self, now: SystemTime) -> Result<Option<CertInfo>, String> {
        let files = self.files.load();
        match &files.issuer {
            Some(issuer) if now >= local_ca::renewal_time(&self.certificate.load().info) => {
                local_ca::renew_if_due(&files.tls, issuer, now)
            }
            _ => Ok(None),
        }
    }

    /// Reads the files again and puts changes into use; established connections stay. Accesses the disk: must
    /// not be called on a worker.
    ///
    /// # Errors
    /// Which file cannot be used. Its last good version stays in use.
    pub fn refresh(&self) -> Result<bool, TlsFileError> {
        // An unusable serving pair does not delay the CA: a withdrawn CA must not stay trusted meanwhile.
        let files = self.files.load();
        let loaded = pem_files::load_cert(&files.tls);
        let (certificate, broken) = match loaded {
            Ok(certificate) => (Arc::new(certificate), None),
            Err(error) => (self.certificate.load_full(), Some(error)),
        };
        let ca = files.client_ca_file.as_deref().map(pem_files::load_ca).transpose()?;
        let changed = self.apply(certificate, ca.as_ref());
        broken.map_or(Ok(changed), Err)
    }

    /// Puts the files of another configuration into use. Established connections stay; their client
    /// certificates are verified against the new client CA.
    pub fn install(&self, prepared: LoadedServingTls) {
        let LoadedServingTls { files, certificate, ca } = prepared;
        self.files.store(Arc::new(files));
        self.apply(certificate, ca.as_ref());
    }

    fn apply(&self, certificate: Arc<LoadedCert>, ca: Option<&LoadedCa>) -> bool {
        let now = fingerprint(ca);
        let ca_changed = self.ca_fingerprint.swap(now, Ordering::Relaxed) != now;
        if !ca_changed && certificate.fingerprint == self.certificate.load().fingerprint {
            return false;
        }
        self.config.store(Arc::new(server_config(&certificate, ca)));
        self.certificate.store(certificate);
        if ca_changed {
            self.client_ca.store(ca.map(client_ca).map(Arc::new));
            self.ca_changed.send_replace(());
        }
        true
    }
}

fn fingerprint(ca: Option<&LoadedCa>) -> u64 {
    ca.map_or(0, |ca| ca.fingerprint)
}

fn client_ca(ca: &LoadedCa) -> ClientCa {
    ClientCa::new(web_pki(&ca.roots))
}

fn web_pki(roots: &Arc<RootCertStore>) -> Arc<dyn ClientCertVerifier> {
    WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider())
        .build()
        .expect("a loaded CA bundle has at least one root")
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn server_config(certificate: &LoadedCert, ca: Option<&LoadedCa>) -> ServerConfig {
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .expect("aws-lc-rs has cipher suites for TLS 1.2 and 1.3");
    let builder = match ca {
        Some(ca) => builder
            .with_client_cert_verifier(Arc::new(DeferredClientVerification(web_pki(&ca.roots)))),
        None => builder.with_no_client_auth(),
    };
    let resolver = rustls::sign::SingleCertAndKey::from(Arc::clone(&certificate.certified));
    let mut config = builder.with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

/// A client's chain exceeds a limit of [`client_chain`].
#[derive(Debug)]
struct ChainOutOfBounds(String);

impl fmt::Display for ChainOutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for ChainOutOfBounds {}

/// The limit that a chain exceeded, if `error` is the handshake's refusal of such a chain.
pub fn chain_limit_error(error: &std::io::Error) -> Option<String> {
    match error.get_ref()?.downcast_ref::<Error>()? {
        Error::InvalidCertificate(CertificateError::Other(OtherError(why))) => {
            why.downcast_ref::<ChainOutOfBounds>().map(ToString::to_string)
        }
        _ => None,
    }
}

/// Accepts any client certificate whose key is proven. The inner verifier verifies the signatures and
/// supplies the CA names of the certificate request.
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
                // rustls sends `certificate_unknown`, "some other (unspecified) issue" (RFC 8446,
                // section 6.2), for this kind alone; others would blame the CA, the dates or the
                // encoding.
                let why = OtherError(Arc::new(ChainOutOfBounds(why)));
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
        self.0.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
