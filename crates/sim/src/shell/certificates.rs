//! The certificates of a run. Their keys are those of Ed25519, whose signatures have one length, so that the sizes of
//! handshakes do not depend on random numbers.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity};
use rustls::client::WantsClientCert;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore};

/// A certificate authority, and the files that jackstay reads. They are removed when it is dropped.
pub struct Certificates {
    pki: Pki,
    node: Issued,
    directory: PathBuf,
}

impl Certificates {
    /// Issues the certificates and writes them to a new directory for temporary files.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn new() -> io::Result<Self> {
        let pki = Pki::new_ed25519("simulation", Validity::usual())?;
        let directory = std::env::temp_dir().join(format!("jackstay-sim-{}", std::process::id()));
        fs::create_dir_all(&directory)?;
        let node = pki.client(&Subject::node("node"))?;
        let this = Self { pki, node, directory };
        fs::write(this.directory.join("ca.crt"), this.pki.ca_pem())?;
        let serving = this.pki.server()?;
        fs::write(this.directory.join("serving.pem"), serving.pair_pem())?;
        fs::write(this.directory.join("node.pem"), this.node.pair_pem())?;
        Ok(this)
    }

    /// The directory of the files `ca.crt`, `serving.pem` and `node.pem`.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The authority.
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// A serving certificate for these names and addresses.
    ///
    /// # Errors
    /// It cannot be issued.
    pub fn serving(&self, hosts: &[&str]) -> io::Result<Issued> {
        self.pki.server_for(hosts, Validity::usual())
    }

    /// TLS of a client, with the certificate of the node or without one.
    ///
    /// # Errors
    /// rustls does not accept the certificate.
    pub fn client(&self) -> io::Result<ClientConfig> {
        self.trust()?
            .with_client_auth_cert(vec![self.node.cert_der()], self.node.key_der())
            .map_err(io::Error::other)
    }

    /// TLS of a client without a certificate.
    ///
    /// # Errors
    /// rustls does not accept the authority.
    pub fn anonymous(&self) -> io::Result<ClientConfig> {
        Ok(self.trust()?.with_no_client_auth())
    }

    fn trust(&self) -> io::Result<ConfigBuilder<ClientConfig, WantsClientCert>> {
        let mut roots = RootCertStore::empty();
        roots.add(self.pki.ca_der()).map_err(io::Error::other)?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        Ok(ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots))
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        // What is left is in a directory for temporary files.
        let _ = fs::remove_dir_all(&self.directory);
    }
}
