//! What jackstay shows an apiserver: one TLS configuration per identity class, re-read when files
//! change and replaced when the configuration does.
//!
//! A class is the unit of trust of a pooled connection. Requests share a connection only if the
//! apiserver would see the same client certificate on it, or none (x509 is tried before tokens
//! there, so a certificate under a token would make everyone that certificate).
//!
//! A slot is a configured pair of files. The credential in it has a number that belongs to one
//! subject and is never used again: a file that is replaced by one with another subject gets a new
//! number, connections of the old number drain, and a request on its way can never find another
//! identity under the number that it was given.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;

use crate::config::{CertPaths, Upstream};
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::net::tls::file_error::TlsFileError;
use crate::net::tls::no_server_verification::NoServerVerification;
use crate::net::tls::pem_files::{self, LoadedCa, LoadedCert};
use crate::upstream::probe_token::ProbeToken;

/// Which connections a request may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialClass {
    /// Connections with the certificate of one configured subject, see [`IdentitySlot::number_of`].
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

impl CredentialClass {
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
    pub certificate: Option<Arc<CertInfo>>,
}

/// A configured identity: files that may not exist yet, and what was last good in them.
#[derive(Debug)]
pub struct IdentitySlot {
    /// The files.
    pub paths: CertPaths,
    current: ArcSwapOption<Identity>,
    error: Mutex<Option<String>>,
}

/// The credential in a slot.
#[derive(Debug)]
struct Identity {
    /// Of its subject, while it is in this slot. No other subject ever has it.
    number: usize,
    certificate: Arc<LoadedCert>,
    tls: Arc<ClientTls>,
}

impl IdentitySlot {
    fn new(paths: &CertPaths) -> Arc<Self> {
        Arc::new(Self {
            paths: paths.clone(),
            current: ArcSwapOption::empty(),
            error: Mutex::new(None),
        })
    }

    /// The certificate in use.
    pub fn certificate(&self) -> Option<CertInfo> {
        self.current.load().as_ref().map(|identity| identity.certificate.info.clone())
    }

    /// The number of the credential in use, if its subject is `subject`.
    pub fn number_of(&self, subject: &Subject) -> Option<usize> {
        let current = self.current.load();
        let identity = current.as_ref()?;
        (identity.certificate.info.subject == *subject).then_some(identity.number)
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

    /// Notes that the files cannot be used; `None` if that is known.
    fn failed(&self, error: &TlsFileError) -> Option<String> {
        let text = if error.is_missing() && self.current.load().is_none() {
            format!("awaited: {error}")
        } else {
            error.to_string()
        };
        self.set_error(Some(text.clone())).then_some(text)
    }
}

/// All credentials towards one upstream. Readers never wait; those who change them
/// ([`Self::refresh`], [`Self::install`], [`Self::retire`]) are on one thread.
#[derive(Debug)]
pub struct Credentials {
    setup: ArcSwap<Setup>,
    /// What servers are verified against; `None` verifies nobody.
    ca: ArcSwapOption<LoadedCa>,
    plain: ArcSwap<ClientTls>,
    /// For [`CredentialClass::Discovery`], once it is loaded.
    discovery: ArcSwapOption<ForDiscovery>,
    /// For the next subject that comes into a slot.
    next_number: AtomicUsize,
}

/// Which files there are, and what for.
#[derive(Debug)]
struct Setup {
    ca_file: Option<PathBuf>,
    slots: Vec<Arc<IdentitySlot>>,
    /// The slot of the probe's own certificate, if it has one.
    probe: Option<Arc<IdentitySlot>>,
    /// The token of the probe, which must then not carry a certificate.
    token: Option<Arc<ProbeToken>>,
}

/// What discovery shows, and what it was made of.
#[derive(Debug)]
struct ForDiscovery {
    tls: Arc<ClientTls>,
    made_of: (u64, Option<u64>),
}

/// Credentials that are loaded and not yet in use, for [`Credentials::install`].
#[derive(Debug)]
pub struct PreparedCredentials {
    setup: Setup,
    ca: Option<LoadedCa>,
    /// What the slots' files hold; `None` where they are awaited.
    loaded: Vec<Option<LoadedCert>>,
}

impl PreparedCredentials {
    /// The slots, in the order of the identities that they were prepared for.
    pub fn slots(&self) -> &[Arc<IdentitySlot>] {
        &self.setup.slots
    }
}

/// A change found by [`Credentials::refresh`], for the log.
#[derive(Debug)]
pub enum CredentialChange {
    /// A certificate is in use now.
    Identity(Arc<IdentitySlot>),
    /// The same, in place of one with this subject, which has no credential any more.
    Replaced(Arc<IdentitySlot>, Subject),
    /// The files of an identity cannot be used; what was good stays.
    IdentityFailed(String),
    /// The CA bundle has changed.
    Ca,
    /// The CA bundle cannot be used; what was good stays.
    CaFailed(String),
    /// The token of the probe cannot be used; what was good stays.
    TokenFailed(String),
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

impl Credentials {
    /// Loads the CA bundle and whatever of `identities` exists; the probe's own certificate, if
    /// one is configured, is one of them.
    ///
    /// # Errors
    /// The CA bundle cannot be used, or the files of an identity exist but cannot be used.
    pub fn load(upstream: &Upstream, identities: &[CertPaths]) -> Result<Self, TlsFileError> {
        let prepared = prepare(upstream, identities, &[])?;
        let ca = prepared.ca.clone();
        let credentials = Self {
            plain: ArcSwap::from_pointee(plain_tls(ca.as_ref())),
            ca: ArcSwapOption::from_pointee(ca),
            discovery: ArcSwapOption::empty(),
            setup: ArcSwap::from_pointee(Setup {
                ca_file: upstream.tls.ca_file.clone(),
                slots: Vec::new(),
                probe: None,
                token: None,
            }),
            next_number: AtomicUsize::new(0),
        };
        credentials.install(prepared);
        Ok(credentials)
    }

    /// Loads what another configuration of the same upstream asks for, and changes nothing. Slots
    /// whose files are named as before stay the same slots.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn prepare(
        &self,
        upstream: &Upstream,
        identities: &[CertPaths],
    ) -> Result<PreparedCredentials, TlsFileError> {
        prepare(upstream, identities, &self.setup.load().slots)
    }

    /// Puts what was prepared into use. Slots that are no longer configured stay until
    /// [`Self::retire`], for requests that still come in by the old configuration.
    pub fn install(&self, prepared: PreparedCredentials) {
        let PreparedCredentials { mut setup, ca, loaded } = prepared;
        let slots = setup.slots.clone();
        let known = self.slots();
        setup.slots.extend(known.iter().filter(|old| !has(&slots, old)).cloned());
        self.setup.store(Arc::new(setup));
        self.trust(ca);
        for (slot, certificate) in slots.iter().zip(loaded) {
            if let Some(certificate) = certificate {
                self.show(slot, certificate);
            }
        }
    }

    /// Forgets every slot but those of these identities. Connections with their certificates
    /// drain.
    pub fn retire(&self, keep: &[CertPaths]) {
        let setup = self.setup.load();
        let (kept, gone): (Vec<_>, Vec<_>) =
            setup.slots.iter().cloned().partition(|slot| keep.contains(&slot.paths));
        if gone.is_empty() {
            return;
        }
        self.setup.store(Arc::new(Setup {
            ca_file: setup.ca_file.clone(),
            slots: kept,
            probe: setup.probe.clone(),
            token: setup.token.clone(),
        }));
    }

    /// The slots, in the order in which they are configured.
    pub fn slots(&self) -> Vec<Arc<IdentitySlot>> {
        self.setup.load().slots.clone()
    }

    /// The classes whose certificate is loaded.
    pub fn loaded(&self) -> Vec<CredentialClass> {
        let setup = self.setup.load();
        let loaded = setup.slots.iter().filter_map(|slot| slot.current.load_full());
        loaded.map(|identity| CredentialClass::Identity(identity.number)).collect()
    }

    /// Every file that these credentials are made of.
    pub fn paths(&self) -> Vec<PathBuf> {
        let setup = self.setup.load();
        let pairs = setup.slots.iter().flat_map(|s| [&s.paths.cert_file, &s.paths.key_file]);
        let token = setup.token.as_deref().map(ProbeToken::file);
        let all = setup.ca_file.iter().chain(pairs).map(PathBuf::as_path).chain(token);
        all.map(Path::to_owned).collect()
    }

    /// The token of the probe, if one is configured.
    pub fn probe_token(&self) -> Option<Arc<ProbeToken>> {
        self.setup.load().token.clone()
    }

    /// The TLS configuration of a class; `None` if its identity is still awaited, has been replaced by
    /// another subject, or is configured no longer.
    pub fn tls(&self, class: CredentialClass) -> Option<Arc<ClientTls>> {
        let setup = self.setup.load();
        let shown = match class {
            CredentialClass::Identity(number) => {
                let mut loaded = setup.slots.iter().filter_map(|slot| slot.current.load_full());
                let identity = loaded.find(|identity| identity.number == number)?;
                return Some(Arc::clone(&identity.tls));
            }
            CredentialClass::Discovery => {
                return self.discovery.load().as_ref().map(|shown| Arc::clone(&shown.tls));
            }
            CredentialClass::Token
            | CredentialClass::UnprovenToken
            | CredentialClass::Anonymous => None,
            CredentialClass::Probe if setup.token.is_some() => None,
            CredentialClass::Probe => match &setup.probe {
                Some(slot) => slot.current.load_full(),
                // By default the first one that is loaded.
                None => setup.slots.iter().find_map(|slot| slot.current.load_full()),
            },
        };
        Some(shown.map_or_else(|| self.plain.load_full(), |identity| Arc::clone(&identity.tls)))
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
    pub fn refresh(&self) -> Vec<CredentialChange> {
        let mut events = Vec::new();
        let setup = self.setup.load();
        match setup.ca_file.as_deref().map(pem_files::load_ca).transpose() {
            Ok(ca) => events.extend(self.trust(ca).then_some(CredentialChange::Ca)),
            Err(error) => events.push(CredentialChange::CaFailed(error.to_string())),
        }
        for slot in &setup.slots {
            match load_valid(&slot.paths) {
                Ok(certificate) => {
                    let before = slot.certificate().map(|info| info.subject);
                    let before = before.filter(|before| *before != certificate.info.subject);
                    if self.show(slot, certificate) {
                        let slot = Arc::clone(slot);
                        events.push(match before {
                            Some(before) => CredentialChange::Replaced(slot, before),
                            None => CredentialChange::Identity(slot),
                        });
                    }
                }
                Err(error) => {
                    events.extend(slot.failed(&error).map(CredentialChange::IdentityFailed))
                }
            }
        }
        let token = setup.token.as_ref().map(|token| token.refresh());
        events.extend(token.and_then(Result::err).map(CredentialChange::TokenFailed));
        events
    }

    /// Puts a CA bundle into use; whether it is another one.
    fn trust(&self, ca: Option<LoadedCa>) -> bool {
        let known = self.ca.load().as_ref().map(|ca| ca.fingerprint);
        if ca.as_ref().map(|ca| ca.fingerprint) == known {
            return false;
        }
        self.plain.store(Arc::new(plain_tls(ca.as_ref())));
        self.ca.store(ca.map(Arc::new));
        for slot in &self.setup.load().slots {
            if let Some(identity) = slot.current.load_full() {
                self.put(slot, Arc::clone(&identity.certificate));
            }
        }
        true
    }

    /// Puts a certificate into use; whether it is another one.
    fn show(&self, slot: &IdentitySlot, certificate: LoadedCert) -> bool {
        slot.set_error(None);
        let known = slot.current.load().as_ref().map(|i| i.certificate.fingerprint);
        let another = known != Some(certificate.fingerprint);
        if another {
            self.put(slot, Arc::new(certificate));
        }
        another
    }

    fn put(&self, slot: &IdentitySlot, certificate: Arc<LoadedCert>) {
        let number = slot.number_of(&certificate.info.subject);
        let number = number.unwrap_or_else(|| self.next_number.fetch_add(1, Ordering::Relaxed));
        // Where nobody is verified nobody is shown a certificate either; the rules of the
        // configuration keep identities away from there.
        slot.current.store(self.ca.load().as_ref().map(|ca| {
            let tls = Arc::new(client_tls(ca, Some(&certificate)));
            Arc::new(Identity { number, certificate, tls })
        }));
    }
}

fn has(slots: &[Arc<IdentitySlot>], slot: &Arc<IdentitySlot>) -> bool {
    slots.iter().any(|known| Arc::ptr_eq(known, slot))
}

fn prepare(
    upstream: &Upstream,
    identities: &[CertPaths],
    known: &[Arc<IdentitySlot>],
) -> Result<PreparedCredentials, TlsFileError> {
    let ca = upstream.tls.ca_file.as_deref().map(pem_files::load_ca).transpose()?;
    let mut slots = Vec::new();
    let mut loaded = Vec::new();
    for paths in identities {
        let (certificate, missing) = match pem_files::load_cert(paths) {
            Ok(certificate) => (Some(certificate), None),
            Err(error) if error.is_missing() => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let slot = known.iter().find(|slot| slot.paths == *paths).cloned();
        slots.push(slot.unwrap_or_else(|| {
            let slot = IdentitySlot::new(paths);
            if let Some(error) = &missing {
                slot.failed(error);
            }
            slot
        }));
        loaded.push(certificate);
    }
    let readyz = &upstream.health.readyz;
    let probe = readyz.cert.as_ref().and_then(|cert| slots.iter().find(|s| s.paths == *cert));
    Ok(PreparedCredentials {
        ca,
        setup: Setup {
            ca_file: upstream.tls.ca_file.clone(),
            probe: probe.cloned(),
            token: readyz.token_file.as_deref().map(|file| Arc::new(ProbeToken::load(file))),
            slots,
        },
        loaded,
    })
}

/// A certificate that is expired is not put into use over one that may not be.
fn load_valid(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let certificate = pem_files::load_cert(paths)?;
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

/// Builds configurations that show nothing.
fn plain_tls(ca: Option<&LoadedCa>) -> ClientTls {
    ca.map_or_else(unverified_tls, |ca| client_tls(ca, None))
}

/// Builds configurations that verify nobody and show nothing: good enough to see whether somebody
/// is there.
pub fn unverified_tls() -> ClientTls {
    let builder = builder();
    let anyone = Arc::new(NoServerVerification::new(builder.crypto_provider()));
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
        certificate: certificate.map(|loaded| Arc::new(loaded.info.clone())),
    }
}
