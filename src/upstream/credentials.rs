//! The credentials that jackstay shows an apiserver: one TLS configuration for each credential class,
//! reloaded when files change and replaced when the configuration does.
//!
//! Requests share a connection only if the apiserver sees the same client certificate for them, or
//! none. It tries x509 before tokens, so a token on a connection with a certificate would be
//! authenticated as the subject of the certificate.
//!
//! A slot is a configured pair of files. The credential in it has a number that belongs to one
//! subject and is never reused. When the files change to another subject, the credential gets a new
//! number and connections of the old number drain; so a request in progress can never reach another
//! identity under its number.

mod client_tls;
mod slot;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};

use self::client_tls::plain_tls;
pub use self::client_tls::{ClientTls, client_tls, unverified_tls};
use self::slot::Identity;
pub use self::slot::IdentitySlot;
use crate::config::{CertPaths, Upstream};
use crate::net::tls::certificate::Subject;
use crate::net::tls::file_error::TlsFileError;
use crate::net::tls::pem_files::{self, LoadedCa, LoadedCert};
use crate::observe::utc::wall_clock;
use crate::upstream::probe_token::ProbeToken;

/// The class of a request and of a connection: requests of one class share connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CredentialClass {
    /// The certificate of one configured subject, by the number of its credential
    /// ([`IdentitySlot::number_of`]).
    Identity(usize),
    /// Bearer tokens that have had an authenticated response; no certificate.
    Token,
    /// Bearer tokens that have had none yet. The apiserver sends GOAWAY on a connection with an
    /// invalid token, so these have connections of their own.
    UnprovenToken,
    /// No credential.
    Anonymous,
    /// jackstay's own `/readyz` requests.
    Probe,
    /// jackstay's own watch of `EndpointSlices`, with a credential of its own.
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

/// All credentials for one upstream. Readers never wait; [`Self::refresh`], [`Self::install`] and
/// [`Self::retire`] are called on one thread.
#[derive(Debug)]
pub struct Credentials {
    setup: ArcSwap<Setup>,
    /// The CA bundle that servers are verified with; `None` verifies no server.
    ca: ArcSwapOption<LoadedCa>,
    without_certificate: ArcSwap<ClientTls>,
    /// For [`CredentialClass::Discovery`], once it is loaded.
    discovery: ArcSwapOption<DiscoveryTls>,
    /// The number of the next subject in a slot.
    next_number: AtomicUsize,
}

/// The configured files.
#[derive(Debug, Clone, Default)]
struct Setup {
    ca_file: Option<PathBuf>,
    slots: Vec<Arc<IdentitySlot>>,
    /// The slot of the certificate for probes, if one is configured.
    probe: Option<Arc<IdentitySlot>>,
    /// The token for probes; a probe with a token shows no certificate.
    token: Option<Arc<ProbeToken>>,
}

/// The configuration for discovery, with the fingerprints of its CA bundle and certificate.
#[derive(Debug)]
struct DiscoveryTls {
    tls: Arc<ClientTls>,
    fingerprints: (u64, Option<u64>),
}

/// Credentials that are loaded and not yet in use, for [`Credentials::install`].
#[derive(Debug)]
pub struct PreparedCredentials {
    setup: Setup,
    ca: Option<LoadedCa>,
    /// The certificate in each slot's files; `None` where the files do not exist yet.
    loaded: Vec<Option<LoadedCert>>,
}

impl PreparedCredentials {
    /// The slots, in the order of the identities they were prepared for.
    pub fn slots(&self) -> &[Arc<IdentitySlot>] {
        &self.setup.slots
    }
}

/// A change found by [`Credentials::refresh`], for the log.
#[derive(Debug)]
pub enum CredentialChange {
    /// A certificate is in use now.
    Identity(Arc<IdentitySlot>),
    /// A certificate is in use that replaces one of this other subject.
    Replaced(Arc<IdentitySlot>, Subject),
    /// The files of an identity cannot be used; the last valid certificate stays in use.
    IdentityFailed(String),
    /// The CA bundle has changed.
    Ca,
    /// The CA bundle cannot be used; the last valid one stays in use.
    CaFailed(String),
    /// The token for probes cannot be used; the last valid one stays in use.
    TokenFailed(String),
}

impl Credentials {
    /// Loads the CA bundle and the existing files of `identities`, which include the certificate for
    /// probes if one is configured.
    ///
    /// # Errors
    /// The CA bundle cannot be used, or the files of an identity exist but cannot be used.
    pub fn load(upstream: &Upstream, identities: &[CertPaths]) -> Result<Self, TlsFileError> {
        let prepared = prepare(upstream, identities, &[])?;
        let ca = prepared.ca.clone();
        let credentials = Self {
            without_certificate: ArcSwap::from_pointee(plain_tls(ca.as_ref())),
            ca: ArcSwapOption::from_pointee(ca),
            discovery: ArcSwapOption::empty(),
            setup: ArcSwap::default(),
            next_number: AtomicUsize::new(0),
        };
        credentials.install(prepared);
        Ok(credentials)
    }

    /// Loads the files of another configuration of the same upstream, without using them yet. Slots
    /// whose file paths are unchanged are kept.
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

    /// Puts prepared credentials into use. Slots that are no longer configured stay until
    /// [`Self::retire`], for requests that still arrive under the old configuration.
    pub fn install(&self, prepared: PreparedCredentials) {
        let PreparedCredentials { mut setup, ca, loaded } = prepared;
        let slots = setup.slots.clone();
        let known = self.slots();
        let is_retired =
            |old: &&Arc<IdentitySlot>| !slots.iter().any(|slot| Arc::ptr_eq(slot, old));
        setup.slots.extend(known.iter().filter(is_retired).cloned());
        self.setup.store(Arc::new(setup));
        self.set_ca(ca);
        for (slot, certificate) in slots.iter().zip(loaded) {
            if let Some(certificate) = certificate {
                self.set_certificate(slot, certificate);
            }
        }
    }

    /// Removes every slot but those of these identities. Connections with removed certificates
    /// drain.
    pub fn retire(&self, keep: &[CertPaths]) {
        let setup = self.setup.load();
        let mut kept = Setup::clone(&setup);
        kept.slots.retain(|slot| keep.contains(&slot.paths));
        self.setup.store(Arc::new(kept));
    }

    /// When the last certificate of the CA bundle expires; `None` without a bundle.
    pub fn ca_not_after(&self) -> Option<SystemTime> {
        let ca = self.ca.load();
        ca.as_ref()?.certificates.iter().map(|certificate| certificate.not_after).max()
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

    /// Every file of these credentials.
    pub fn paths(&self) -> Vec<PathBuf> {
        let setup = self.setup.load();
        let pairs = setup.slots.iter().flat_map(|s| [&s.paths.cert_file, &s.paths.key_file]);
        let token = setup.token.as_deref().map(ProbeToken::file);
        let all = setup.ca_file.iter().chain(pairs).map(PathBuf::as_path).chain(token);
        all.map(Path::to_owned).collect()
    }

    /// The token for probes, if one is configured.
    pub fn probe_token(&self) -> Option<Arc<ProbeToken>> {
        self.setup.load().token.clone()
    }

    /// The TLS configuration of a class; `None` if the files of its identity do not exist yet, hold
    /// another subject now, or are no longer configured.
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
                // By default the first loaded identity.
                None => setup.slots.iter().find_map(|slot| slot.current.load_full()),
            },
        };
        Some(shown.map_or_else(
            || self.without_certificate.load_full(),
            |identity| Arc::clone(&identity.tls),
        ))
    }

    /// Sets the certificate that discovery shows, or none beside a token. Connections with another
    /// one drain. To be called again when the CA bundle may have changed; an unchanged result is
    /// kept.
    pub fn set_discovery_certificate(&self, certificate: Option<&LoadedCert>) {
        // No credential is shown to a server that is not verified.
        let Some(ca) = self.ca.load_full() else { return };
        let fingerprints = (ca.fingerprint, certificate.map(|loaded| loaded.fingerprint));
        if self.discovery.load().as_ref().is_none_or(|shown| shown.fingerprints != fingerprints) {
            let tls = Arc::new(client_tls(&ca, certificate));
            self.discovery.store(Some(Arc::new(DiscoveryTls { tls, fingerprints })));
        }
    }

    /// Reads all files again and puts valid changes into use. Blocks on the disk: not to be called on
    /// the data plane.
    pub fn refresh(&self) -> Vec<CredentialChange> {
        let mut events = Vec::new();
        let setup = self.setup.load();
        match setup.ca_file.as_deref().map(pem_files::load_ca).transpose() {
            Ok(ca) => events.extend(self.set_ca(ca).then_some(CredentialChange::Ca)),
            Err(error) => events.push(CredentialChange::CaFailed(error.to_string())),
        }
        for slot in &setup.slots {
            match load_valid(&slot.paths) {
                Ok(certificate) => {
                    let before = slot.certificate().map(|info| info.subject);
                    let before = before.filter(|before| *before != certificate.info.subject);
                    if self.set_certificate(slot, certificate) {
                        let slot = Arc::clone(slot);
                        events.push(match before {
                            Some(before) => CredentialChange::Replaced(slot, before),
                            None => CredentialChange::Identity(slot),
                        });
                    }
                }
                Err(error) => {
                    events.extend(slot.failed(&error).map(CredentialChange::IdentityFailed));
                }
            }
        }
        let token = setup.token.as_ref().map(|token| token.refresh());
        events.extend(token.and_then(Result::err).map(CredentialChange::TokenFailed));
        events
    }

    /// Puts a CA bundle into use; returns whether it has changed.
    fn set_ca(&self, ca: Option<LoadedCa>) -> bool {
        let known = self.ca.load().as_ref().map(|ca| ca.fingerprint);
        if ca.as_ref().map(|ca| ca.fingerprint) == known {
            return false;
        }
        self.without_certificate.store(Arc::new(plain_tls(ca.as_ref())));
        self.ca.store(ca.map(Arc::new));
        for slot in &self.setup.load().slots {
            if let Some(identity) = slot.current.load_full() {
                self.put(slot, Arc::clone(&identity.certificate));
            }
        }
        true
    }

    /// Puts a certificate into use; returns whether it has changed.
    fn set_certificate(&self, slot: &IdentitySlot, certificate: LoadedCert) -> bool {
        slot.clear_error();
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
        // No certificate is shown to servers that are not verified; the configuration rules refuse
        // identities there.
        slot.current.store(self.ca.load().as_ref().map(|ca| {
            let tls = Arc::new(client_tls(ca, Some(&certificate)));
            Arc::new(Identity { number, certificate, tls })
        }));
    }
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

/// Loads a certificate; an expired one is an error, so that it does not replace a valid one.
fn load_valid(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let certificate = pem_files::load_cert(paths)?;
    certificate.info.check_time(&paths.cert_file, wall_clock())?;
    Ok(certificate)
}
