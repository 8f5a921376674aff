//! The certificates of one run: a CA, a server certificate for the origin and the proxies, and a client certificate with
//! a kubelet's subject.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
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
    /// Server certificate and key in two files, and in one for `HAProxy`.
    pub server_cert: PathBuf,
    pub server_key: PathBuf,
    pub server_both: PathBuf,
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
            server_both: dir.join("server.pem"),
            client_cert: dir.join("client.crt"),
            client_key: dir.join("client.key"),
        }
    }

    /// Creates the certificates and writes the files.
    pub fn create(dir: &Path) -> Result<Self> {
        let paths = Self::in_dir(dir);

        let mut ca = CertificateParams::default();
        ca.distinguished_name.push(DnType::CommonName, "bench CA");
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let ca_key = KeyPair::generate()?;
        fs::write(&paths.ca, ca.self_signed(&ca_key)?.pem())?;
        let issuer = Issuer::new(ca, ca_key);

        let names = ["127.0.0.1", "localhost", SERVER_NAME].map(String::from).to_vec();
        let mut server = CertificateParams::new(names)?;
        server.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let cert = server.signed_by(&key, &issuer)?.pem();
        fs::write(&paths.server_both, cert.clone() + &key.serialize_pem())?;
        fs::write(&paths.server_cert, cert)?;
        fs::write(&paths.server_key, key.serialize_pem())?;

        let mut client = CertificateParams::default();
        client.distinguished_name.push(DnType::CommonName, "system:node:bench");
        client.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        fs::write(&paths.client_cert, client.signed_by(&key, &issuer)?.pem())?;
        fs::write(&paths.client_key, key.serialize_pem())?;
        Ok(paths)
    }

    fn roots(&self) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(&self.ca)?)?;
        Ok(roots)
    }

    /// TLS configuration of [`crate::client`], with the kubelet's certificate.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>> {
        let mut config = ClientConfig::builder_with_provider(single_cipher_suite())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(
                vec![CertificateDer::from_pem_file(&self.client_cert)?],
                PrivateKeyDer::from_pem_file(&self.client_key)?,
            )?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
    }

    /// The same without a certificate.
    pub fn client_config_without_certificate(&self) -> Result<Arc<ClientConfig>> {
        let mut config = ClientConfig::builder_with_provider(single_cipher_suite())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(self.roots()?)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Arc::new(config))
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

/// Origin and clients offer only AES-128-GCM, which Go chooses on machines with AES instructions. Otherwise the proxies
/// would choose different ciphers, and the bulk figures would compare ciphers.
fn single_cipher_suite() -> Arc<CryptoProvider> {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(provider)
}
