//! The certificates of one run: a CA, a server certificate for the origin and the proxies, and a client certificate with
//! a kubelet's subject.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use jackstay_apiserver::pki::Subject;
use rustls::{
    ClientConfig, ConfigBuilder, RootCertStore, ServerConfig,
    client::WantsClientCert,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};

use crate::Result;

/// The DNS name in the server certificate that proxies expect of the origin.
pub const SERVER_NAME: &str = "kubernetes.default.svc";

/// Paths of the PEM files of one run.
pub struct Pki {
    /// The CA's certificate.
    pub ca: PathBuf,
    /// The server certificate and its key.
    pub server_cert: PathBuf,
    pub server_key: PathBuf,
    /// The client certificate and its key.
    pub client_cert: PathBuf,
    pub client_key: PathBuf,
}

impl Pki {
    /// The paths of the files in `dir`.
    pub fn in_dir(dir: &Path) -> Self {
        Self {
            ca: dir.join("ca.crt"),
            server_cert: dir.join("server.crt"),
            server_key: dir.join("server.key"),
            client_cert: dir.join("client.crt"),
            client_key: dir.join("client.key"),
        }
    }

    /// Creates the certificates and writes the files.
    pub fn create(dir: &Path) -> Result<Self> {
        let issuer = jackstay_apiserver::pki::Pki::new("bench")?;
        issuer.write_ca(dir)?;
        issuer.server()?.write_to(dir, "server")?;
        issuer.client(&Subject::node("bench"))?.write_to(dir, "client")?;
        Ok(Self::in_dir(dir))
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.ca)?)?;
        Ok(roots)
    }

    /// TLS configuration of [`crate::client`], with the kubelet's certificate.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let certificate = CertificateDer::from_pem_file(&self.client_cert)?;
        let key = PrivateKeyDer::from_pem_file(&self.client_key)?;
        Ok(with_alpn(self.client()?.with_client_auth_cert(vec![certificate], key)?))
    }

    /// The same without a certificate.
    pub fn client_config_without_certificate(&self) -> Result<Arc<ClientConfig>> {
        Ok(with_alpn(self.client()?.with_no_client_auth()))
    }

    fn client(&self) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>> {
        Ok(ClientConfig::builder_with_provider(single_cipher_suite())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(self.roots()?))
    }

    /// TLS configuration of the origin: as in an apiserver, the client certificate is optional.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>> {
        let verifier = WebPkiClientVerifier::builder_with_provider(
            Arc::new(self.roots()?),
            single_cipher_suite(),
        )
        .allow_unauthenticated()
        .build()?;
        let mut config = ServerConfig::builder_with_provider(single_cipher_suite())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(
                vec![CertificateDer::from_pem_file(&self.server_cert)?],
                PrivateKeyDer::from_pem_file(&self.server_key)?,
            )?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }
}

fn with_alpn(mut config: ClientConfig) -> Arc<ClientConfig> {
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// Origin and clients offer only AES-128-GCM, which Go chooses on machines with AES instructions. Otherwise the proxies
/// would choose different ciphers, and the bulk figures would compare ciphers.
fn single_cipher_suite() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(provider)
}
