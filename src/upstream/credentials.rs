//! What jackstay shows an apiserver: one TLS configuration per identity class, re-read when files
//! change.
//!
//! A class is the unit of trust of a pooled connection. Requests share a connection only if the
//! apiserver would see the same client certificate on it, or none (x509 is tried before tokens
//! there, so a certificate under a token would make everyone that certificate).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

use crate::config::{CertPaths, Upstream};
use crate::net::tls_files::{self, CertInfo, LoadedCa, LoadedCert, TlsFileError};

/// Which connections a request may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Connections with the certificate of this slot of [`Credentials`].
    Identity(usize),
    /// Bearer tokens that have had an authenticated answer; no certificate.
    Token,
    /// Bearer tokens not seen to work: a bad one makes the apiserver GOAWAY the connection it came
    /// on, so these stay among themselves.
    UnprovenToken,
    /// No credential at all.
    Anonymous,
    /// Our own question for `/readyz`.
    Probe,
    /// Our own watch of the endpoints, with a credential that serves nothing else.
    Discovery,
}

impl Class {
    /// Name in logs and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Identity(_) => "identity",
            Self::Token => "token",
            Self::UnprovenToken => "unproven-token",
            Self::Anonymous => "anonymous",
            Self::Probe => "probe",
            Self::Discovery => "discovery",
        }
    }
}

/// TLS configurations for one class, by protocol.
#[derive(Debug)]
pub struct ClientTls {
    /// ALPN `h2`: the pool.
    pub h2: Arc<ClientConfig>,
    /// ALPN `http/1.1`: upgrades.
    pub http1: Arc<ClientConfig>,
    /// Grows with every change; a connection of an older one drains.
    pub generation: u64,
    /// The certificate shown, if one is.
    pub certificate: Option<CertInfo>,
}

/// A configured identity: files that may not exist yet, and what was last good in them.
#[derive(Debug)]
pub struct Slot {
    /// The files.
    pub paths: CertPaths,
    current: ArcSwapOption<Identity>,
    error: Mutex<Option<String>>,
}

#[derive(Debug)]
struct Identity {
    certificate: Arc<LoadedCert>,
    tls: Arc<ClientTls>,
}

impl Slot {
    /// The certificate in use.
    pub fn certificate(&self) -> Option<CertInfo> {
        self.current.load().as_ref().map(|identity| identity.certificate.info.clone())
    }

    /// Runs `check` on the certificate in use, without copying it.
    pub fn with_certificate<R>(&self, check: impl FnOnce(&CertInfo) -> R) -> Option<R> {
        self.current.load().as_ref().map(|identity| check(&identity.certificate.info))
    }

    /// Why the files are not (or no longer) what is in use.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_error(&self, error: Option<String>) -> bool {
        let mut slot = self.error.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *slot != error;
        *slot = error;
        changed
    }
}

/// All credentials towards one upstream.
#[derive(Debug)]
pub struct Credentials {
    ca_file: Option<std::path::PathBuf>,
    /// What servers are verified against; `None` verifies nobody.
    ca: ArcSwapOption<LoadedCa>,
    plain: ArcSwap<ClientTls>,
    slots: Vec<Slot>,
    /// Slot of the probe's own certificate, if it has one.
    probe: Option<usize>,
    /// The probe has a token, so it must not carry a certificate.
    with_token: bool,
    /// For [`Class::Discovery`], once it is loaded.
    discovery: ArcSwapOption<ForDiscovery>,
}

/// What discovery shows, and what it was made of.
#[derive(Debug)]
struct ForDiscovery {
    tls: Arc<ClientTls>,
    made_of: (u64, Option<u64>),
}

/// A change found by [`Credentials::refresh`], for the log.
#[derive(Debug)]
pub enum Refreshed {
    /// A certificate is in use now: its slot.
    Identity(usize),
    /// The files of a slot cannot be used; what was good stays.
    IdentityFailed(usize, String),
    /// The CA bundle has changed.
    Ca,
    /// The CA bundle cannot be used; what was good stays.
    CaFailed(String),
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

impl Credentials {
    /// Loads the CA bundle and whatever of `identities` exists; the probe's own certificate, if
    /// one is configured, is one of them.
    ///
    /// # Errors
    /// The CA bundle cannot be used, or the files of an identity exist but cannot be used.
    pub fn load(upstream: &Upstream, identities: &[CertPaths]) -> Result<Self, TlsFileError> {
        let ca = upstream.tls.ca_file.as_deref().map(tls_files::load_ca).transpose()?;
        let plain = match &ca {
            Some(ca) => client_tls(ca, None),
            None => unverified_tls(),
        };
        let credentials = Self {
            ca_file: upstream.tls.ca_file.clone(),
            ca: ArcSwapOption::from_pointee(ca),
            plain: ArcSwap::from_pointee(plain),
            with_token: upstream.health.readyz.token_file.is_some(),
            discovery: ArcSwapOption::empty(),
            probe: upstream
                .health
                .readyz
                .cert
                .as_ref()
                .and_then(|cert| identities.iter().position(|paths| paths == cert)),
            slots: identities
                .iter()
                .map(|paths| Slot {
                    paths: paths.clone(),
                    current: ArcSwapOption::empty(),
                    error: Mutex::new(None),
                })
                .collect(),
        };
        for slot in &credentials.slots {
            match tls_files::load_cert(&slot.paths) {
                Ok(certificate) => credentials.install(slot, Arc::new(certificate)),
                Err(error) if error.is_missing() => {
                    slot.set_error(Some(format!("awaited: {error}")));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(credentials)
    }

    /// The slots, in the order given to [`Self::load`].
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// The first slot with a certificate: the default credential of probes.
    fn first_identity(&self) -> Option<Class> {
        self.slots.iter().position(|slot| slot.current.load().is_some()).map(Class::Identity)
    }

    /// The TLS configuration of a class; `None` if its identity is still awaited.
    pub fn tls(&self, class: Class) -> Option<Arc<ClientTls>> {
        match class {
            Class::Identity(slot) => {
                self.slots.get(slot)?.current.load().as_ref().map(|identity| identity.tls.clone())
            }
            Class::Token | Class::UnprovenToken | Class::Anonymous => Some(self.plain.load_full()),
            Class::Discovery => self.discovery.load().as_ref().map(|shown| shown.tls.clone()),
            Class::Probe if self.with_token => Some(self.plain.load_full()),
            Class::Probe => match self.probe.map(Class::Identity).or_else(|| self.first_identity())
            {
                Some(class) => self.tls(class).or_else(|| Some(self.plain.load_full())),
                None => Some(self.plain.load_full()),
            },
        }
    }

    /// What discovery shows: a certificate, or none beside a token. Connections with another one
    /// drain. To be said again when the CA bundle may have changed; what is unchanged stays.
    pub fn show_for_discovery(&self, certificate: Option<&LoadedCert>) {
        // A credential is not shown where nobody is verified.
        let Some(ca) = self.ca.load_full() else { return };
        let made_of = (ca.fingerprint, certificate.map(|loaded| loaded.fingerprint));
        if self.discovery.load().as_ref().is_none_or(|shown| shown.made_of != made_of) {
            let tls = Arc::new(client_tls(&ca, certificate));
            self.discovery.store(Some(Arc::new(ForDiscovery { tls, made_of })));
        }
    }

    /// Reads all files again and puts what has changed and is good into use. Touches the disk:
    /// call it off the data plane.
    pub fn refresh(&self) -> Vec<Refreshed> {
        let mut events = Vec::new();
        let known = self.ca.load().as_ref().map(|ca| ca.fingerprint);
        match self.ca_file.as_deref().map(tls_files::load_ca).transpose() {
            Ok(ca) if ca.as_ref().map(|ca| ca.fingerprint) == known => {}
            Ok(None) => {}
            Ok(Some(ca)) => {
                self.plain.store(Arc::new(client_tls(&ca, None)));
                self.ca.store(Some(Arc::new(ca)));
                for slot in &self.slots {
                    if let Some(identity) = slot.current.load_full() {
                        self.install(slot, Arc::clone(&identity.certificate));
                    }
                }
                events.push(Refreshed::Ca);
            }
            Err(error) => events.push(Refreshed::CaFailed(error.to_string())),
        }
        for (index, slot) in self.slots.iter().enumerate() {
            match load_valid(&slot.paths) {
                Ok(certificate) => {
                    let known = slot.current.load().as_ref().map(|i| i.certificate.fingerprint);
                    slot.set_error(None);
                    if known != Some(certificate.fingerprint) {
                        self.install(slot, Arc::new(certificate));
                        events.push(Refreshed::Identity(index));
                    }
                }
                Err(error) => {
                    let text = if error.is_missing() && slot.current.load().is_none() {
                        format!("awaited: {error}")
                    } else {
                        error.to_string()
                    };
                    if slot.set_error(Some(text.clone())) {
                        events.push(Refreshed::IdentityFailed(index, text));
                    }
                }
            }
        }
        events
    }

    fn install(&self, slot: &Slot, certificate: Arc<LoadedCert>) {
        // Where nobody is verified nobody is shown a certificate either; the rules of the
        // configuration keep identities away from there.
        let Some(ca) = self.ca.load_full() else { return };
        let tls = Arc::new(client_tls(&ca, Some(&certificate)));
        slot.current.store(Some(Arc::new(Identity { certificate, tls })));
    }
}

/// A certificate that is expired is not put into use over one that may not be.
fn load_valid(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let certificate = tls_files::load_cert(paths)?;
    certificate.info.check_time(&paths.cert_file, SystemTime::now())?;
    Ok(certificate)
}

/// Builds the configurations that show `certificate`, or none.
pub fn client_tls(ca: &LoadedCa, certificate: Option<&LoadedCert>) -> ClientTls {
    let builder = builder().with_root_certificates(Arc::clone(&ca.roots));
    let config = match certificate {
        None => builder.with_no_client_auth(),
        Some(loaded) => builder.with_client_cert_resolver(Arc::new(
            rustls::sign::SingleCertAndKey::from(Arc::clone(&loaded.certified)),
        )),
    };
    by_protocol(config, certificate)
}

/// Builds configurations that verify nobody and show nothing: good enough to see whether somebody
/// is there.
pub fn unverified_tls() -> ClientTls {
    let builder = builder();
    let anyone = Arc::new(Anyone(Arc::clone(builder.crypto_provider())));
    let config = builder.dangerous().with_custom_certificate_verifier(anyone).with_no_client_auth();
    by_protocol(config, None)
}

fn builder() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("aws-lc-rs has cipher suites for TLS 1.2 and 1.3")
}

fn by_protocol(mut config: ClientConfig, certificate: Option<&LoadedCert>) -> ClientTls {
    config.alpn_protocols = vec![b"h2".to_vec()];
    let mut http1 = config.clone();
    // Tickets of the two are kept apart: a resumed session keeps its ALPN.
    http1.resumption = rustls::client::Resumption::in_memory_sessions(16);
    http1.alpn_protocols = vec![b"http/1.1".to_vec()];
    ClientTls {
        h2: Arc::new(config),
        http1: Arc::new(http1),
        generation: GENERATION.fetch_add(1, Ordering::Relaxed),
        certificate: certificate.map(|loaded| loaded.info.clone()),
    }
}

/// Takes every certificate for a good one.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
