//! The credentials that jackstay shows an apiserver: one TLS configuration for each credential class. They
//! are reloaded when the files or the configuration change.
//!
//! Requests share a connection only if the apiserver sees the same client certificate for them, or none.
//! The apiserver tries x509 before tokens, so it would authenticate a token on a connection with a
//! certificate as the subject of the certificate.
//!
//! A slot is a configured pair of files, or a user of a kubeconfig. The credential in it has a number that belongs to
//! one subject and is never reused. When the files change to another subject, the credential gets a new number and the
//! connections of the old number drain. So the number of a request never leads to another identity. When only the paths
//! of the files change, the credential keeps its number and its connections.
//!
//! Several slots may have the same subject: a certificate that kubelet rotates, and the one with which it has joined
//! the cluster. They share the number, and [`in_use`] selects the certificate that is shown.

mod change;
mod client_tls;
mod probe_token;
mod slot;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use arc_swap::{ArcSwap, ArcSwapOption};
use jackstay_config::{IdentitySource, Upstream};
pub use jackstay_core::credential_class::CredentialClass;
use jackstay_kubeconfig::client_certificate;
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::ca_bundle::CaBundle;
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files::{self, LoadedCa, LoadedCert};
use jackstay_sys::utc::wall_clock;

pub use self::change::CredentialChange;
use self::client_tls::plain_tls;
pub use self::client_tls::{ClientTls, client_tls, unverified_tls};
use self::probe_token::ProbeToken;
use self::slot::Identity;
pub use self::slot::{IdentitySlot, IdentityState, in_use, is_superseded};

/// All credentials for one upstream. Readers never wait; [`Self::refresh`], [`Self::install`] and
/// [`Self::retire`] are called on one thread.
#[derive(Debug)]
pub struct Credentials {
    setup: ArcSwap<Setup>,
    /// The CA bundle that verifies servers; with `None` no server is verified.
    ca: ArcSwapOption<LoadedCa>,
    /// Why the present content of the CA file is not in use.
    ca_error: ArcSwapOption<String>,
    without_certificate: ArcSwap<ClientTls>,
    /// The configuration for [`CredentialClass::Discovery`], once it is set.
    discovery: ArcSwapOption<DiscoveryTls>,
    /// The next number of a credential.
    next_number: AtomicU32,
}

/// The configured files.
#[derive(Debug, Clone, Default)]
struct Setup {
    ca_file: Option<PathBuf>,
    /// The slots of the identities of clients, then those that are not retired yet.
    identities: Vec<Arc<IdentitySlot>>,
    /// The slot of the certificate for probes, if one is configured. It may be that of an identity.
    probe: Option<Arc<IdentitySlot>>,
    /// The token for probes. A probe with a token shows no certificate.
    token: Option<Arc<ProbeToken>>,
}

impl Setup {
    /// The credential of an identity that is used instead of `identity`, which has the same subject, or itself.
    fn best(&self, identity: Arc<Identity>, now: SystemTime) -> Arc<Identity> {
        let subject = &identity.certificate.info.subject;
        let best = in_use(&self.identities, subject, now).and_then(|slot| slot.usable(now));
        best.unwrap_or(identity)
    }

    /// The credential for probes without a token: that of its own slot, or else of the first loaded identity.
    fn shown_by_probes(&self, now: SystemTime) -> Option<Arc<Identity>> {
        if let Some(slot) = &self.probe {
            return slot.usable(now);
        }
        let first = self.identities.iter().find_map(|slot| slot.usable(now));
        first.map(|identity| self.best(identity, now))
    }

    /// Every slot once.
    fn slots(&self) -> Vec<Arc<IdentitySlot>> {
        let mut slots = self.identities.clone();
        let is_new =
            |probe: &&Arc<IdentitySlot>| !slots.iter().any(|slot| Arc::ptr_eq(slot, probe));
        slots.extend(self.probe.iter().find(is_new).cloned());
        slots
    }
}

/// The TLS configuration for discovery, with the fingerprints of its CA bundle and its certificate.
#[derive(Debug)]
struct DiscoveryTls {
    tls: Arc<ClientTls>,
    fingerprints: (u64, Option<u64>),
}

/// Credentials that are loaded but not in use before [`Credentials::install`].
#[derive(Debug)]
pub struct PreparedCredentials {
    setup: Setup,
    ca: Option<LoadedCa>,
    /// The certificate of each of [`Setup::slots`]; `None` if its files do not exist yet.
    loaded: Vec<Option<Arc<LoadedCert>>>,
}

impl PreparedCredentials {
    /// The slots of the identities for which they were prepared, in their order.
    pub fn identities(&self) -> &[Arc<IdentitySlot>] {
        &self.setup.identities
    }
}

impl Credentials {
    /// Loads the CA bundle, the files of `identities` that exist, which are those of clients, and the certificate for
    /// probes if one is configured.
    ///
    /// # Errors
    /// The CA bundle cannot be used, or the files of an identity exist but cannot be used.
    pub fn load(
        upstream: &Upstream,
        identities: &[IdentitySource],
        files: &mut LoadedFiles,
    ) -> Result<Self, TlsFileError> {
        let prepared = prepare(upstream, identities, &[], files)?;
        let ca = prepared.ca.clone();
        let credentials = Self {
            without_certificate: ArcSwap::from_pointee(plain_tls(ca.as_ref())),
            ca: ArcSwapOption::from_pointee(ca),
            ca_error: ArcSwapOption::empty(),
            discovery: ArcSwapOption::empty(),
            setup: ArcSwap::default(),
            next_number: AtomicU32::new(0),
        };
        credentials.install(prepared);
        Ok(credentials)
    }

    /// Loads the files of another configuration of the same upstream without putting them into use. Slots
    /// whose file paths are unchanged are kept.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn prepare(
        &self,
        upstream: &Upstream,
        identities: &[IdentitySource],
        files: &mut LoadedFiles,
    ) -> Result<PreparedCredentials, TlsFileError> {
        prepare(upstream, identities, &self.slots(), files)
    }

    /// Puts prepared credentials into use. Slots of identities that are no longer configured stay until
    /// [`Self::retire`], for requests that still arrive under the old configuration.
    pub fn install(&self, prepared: PreparedCredentials) {
        let PreparedCredentials { mut setup, ca, loaded } = prepared;
        let slots = setup.slots();
        let mut retired = self.setup.load().identities.clone();
        retired.retain(|old| !setup.identities.iter().any(|slot| Arc::ptr_eq(slot, old)));
        setup.identities.extend(retired.iter().cloned());
        self.setup.store(Arc::new(setup));
        self.set_ca(ca);
        for (slot, certificate) in slots.iter().zip(loaded) {
            if let Some(certificate) = certificate {
                self.set_certificate(slot, certificate, &retired);
            }
        }
    }

    /// Removes every slot of an identity except those in `keep`. Connections with a removed certificate drain.
    pub fn retire(&self, keep: &[IdentitySource]) {
        let mut setup = Setup::clone(&self.setup.load());
        setup.identities.retain(|slot| keep.contains(&slot.source));
        self.setup.store(Arc::new(setup));
    }

    /// The CA bundle, if one is configured, and why the present content of its file is not in use.
    pub fn ca_bundle(&self) -> Option<(Arc<CaBundle>, Option<Arc<String>>)> {
        self.ca.load().as_ref().map(|ca| (Arc::clone(&ca.bundle), self.ca_error.load_full()))
    }

    /// Whether the present content of the CA file is not in use.
    pub fn has_ca_error(&self) -> bool {
        self.ca_error.load().is_some()
    }

    /// The slots: first those of the configured identities, in their order, then those that are not retired yet, and
    /// that of a certificate which only probes show.
    pub fn slots(&self) -> Vec<Arc<IdentitySlot>> {
        self.setup.load().slots()
    }

    /// The slots of the identities of clients, as in [`Self::slots`].
    pub fn identities(&self) -> Vec<Arc<IdentitySlot>> {
        self.setup.load().identities.clone()
    }

    /// The classes of the identities of clients whose certificate is loaded and has not expired.
    pub fn loaded(&self) -> Vec<CredentialClass> {
        let (setup, now) = (self.setup.load(), wall_clock());
        let mut classes = Vec::new();
        for identity in setup.identities.iter().filter_map(|slot| slot.usable(now)) {
            let class = CredentialClass::Identity(identity.number);
            if !classes.contains(&class) {
                classes.push(class);
            }
        }
        classes
    }

    /// The paths of all files.
    pub fn paths(&self) -> Vec<PathBuf> {
        let setup = self.setup.load();
        let slots = setup.slots();
        let of_slots = slots.iter().flat_map(|slot| slot.files());
        let token = setup.token.as_deref().map(|token| token.file().to_owned());
        setup.ca_file.iter().cloned().chain(of_slots).chain(token).collect()
    }

    /// The token for probes, if one is configured.
    pub fn probe_token(&self) -> Option<Arc<ProbeToken>> {
        self.setup.load().token.clone()
    }

    /// The TLS configuration of a class. `None` for an identity whose certificate has expired, whose files
    /// contain another subject now or are no longer configured, and for discovery before its certificate is set.
    pub fn tls(&self, class: CredentialClass) -> Option<Arc<ClientTls>> {
        let (setup, now) = (self.setup.load(), wall_clock());
        let shown = match class {
            CredentialClass::Identity(number) => {
                let mut loaded = setup.identities.iter().filter_map(|slot| slot.usable(now));
                let identity = loaded.find(|identity| identity.number == number)?;
                return Some(Arc::clone(&setup.best(identity, now).tls));
            }
            CredentialClass::Discovery => {
                return self.discovery.load().as_ref().map(|shown| Arc::clone(&shown.tls));
            }
            CredentialClass::Token
            | CredentialClass::UnprovenToken
            | CredentialClass::SlowedToken
            | CredentialClass::Anonymous => None,
            CredentialClass::Probe if setup.token.is_some() => None,
            CredentialClass::Probe => setup.shown_by_probes(now),
        };
        Some(shown.map_or_else(
            || self.without_certificate.load_full(),
            |identity| Arc::clone(&identity.tls),
        ))
    }

    /// Sets the certificate that discovery shows; with a token it shows none. Connections with another
    /// certificate drain. Call this again when the CA bundle may have changed. If neither has changed,
    /// connections stay in use.
    pub fn set_discovery_certificate(&self, certificate: Option<&LoadedCert>) {
        // Discovery shows no credential to a server that is not verified.
        let Some(ca) = self.ca.load_full() else { return };
        let fingerprints = (ca.fingerprint, certificate.map(|loaded| loaded.fingerprint));
        if self.discovery.load().as_ref().is_none_or(|shown| shown.fingerprints != fingerprints) {
            let tls = Arc::new(client_tls(&ca, certificate));
            self.discovery.store(Some(Arc::new(DiscoveryTls { tls, fingerprints })));
        }
    }

    /// Reads all files again and puts valid changes into use. Blocks on the disk, so it must not be called
    /// on the data plane.
    pub fn refresh(&self) -> Vec<CredentialChange> {
        let mut changes = Vec::new();
        let setup = self.setup.load();
        match setup.ca_file.as_deref().map(pem_files::load_ca).transpose() {
            Ok(ca) => changes.extend(self.set_ca(ca).then_some(CredentialChange::Ca)),
            Err(error) => {
                let error = error.to_string();
                let previous = self.ca_error.swap(Some(Arc::new(error.clone())));
                let is_new = previous.as_deref() != Some(&error);
                changes.extend(is_new.then_some(CredentialChange::CaFailed(error)));
            }
        }
        for slot in &setup.slots() {
            match load_better(slot) {
                Ok(certificate) => {
                    let previous = slot.certificate().map(|info| info.subject);
                    let other = previous.filter(|subject| *subject != certificate.info.subject);
                    if self.set_certificate(slot, Arc::new(certificate), &[]) {
                        let slot = Arc::clone(slot);
                        changes.push(match other {
                            Some(other) => CredentialChange::Replaced(slot, other),
                            None => CredentialChange::Identity(slot),
                        });
                    }
                }
                Err(error) => {
                    changes.extend(
                        slot.failed(&error)
                            .map(|why| CredentialChange::IdentityFailed(Arc::clone(slot), why)),
                    );
                }
            }
        }
        let token = setup.token.as_ref().map(|token| token.refresh());
        let error = token.and_then(Result::err).map(|error| error.to_string());
        changes.extend(error.map(CredentialChange::TokenFailed));
        changes
    }

    /// Puts a CA bundle into use. Returns whether it differs from the previous one.
    fn set_ca(&self, ca: Option<LoadedCa>) -> bool {
        self.ca_error.store(None);
        let known = self.ca.load().as_ref().map(|ca| ca.fingerprint);
        if ca.as_ref().map(|ca| ca.fingerprint) == known {
            return false;
        }
        self.without_certificate.store(Arc::new(plain_tls(ca.as_ref())));
        self.ca.store(ca.map(Arc::new));
        for slot in &self.slots() {
            if let Some(identity) = slot.current.load_full() {
                self.put(slot, Arc::clone(&identity.certificate), &[]);
            }
        }
        true
    }

    /// Puts a certificate into use. Returns whether it differs from the previous one. `retired`: the slots that it may
    /// succeed.
    fn set_certificate(
        &self,
        slot: &IdentitySlot,
        certificate: Arc<LoadedCert>,
        retired: &[Arc<IdentitySlot>],
    ) -> bool {
        slot.clear_error();
        let known = slot.current.load().as_ref().map(|i| i.certificate.fingerprint);
        let changed = known != Some(certificate.fingerprint);
        if changed {
            self.put(slot, certificate, retired);
        }
        changed
    }

    /// Puts a certificate into its slot, with TLS configurations for the current CA bundle.
    fn put(
        &self,
        slot: &IdentitySlot,
        certificate: Arc<LoadedCert>,
        retired: &[Arc<IdentitySlot>],
    ) {
        let subject = &certificate.info.subject;
        let of_retired = || retired.iter().find_map(|old| old.number_of(subject));
        let of_slots = || self.slots().iter().find_map(|other| other.number_of(subject));
        let number = slot.number_of(subject).or_else(of_slots).or_else(of_retired);
        let number = number.unwrap_or_else(|| self.next_number.fetch_add(1, Ordering::Relaxed));
        // Without a CA bundle no server is verified, and no certificate is shown. The configuration rules
        // refuse identities in this case.
        slot.current.store(self.ca.load().as_ref().map(|ca| {
            let tls = Arc::new(client_tls(ca, Some(&certificate)));
            Arc::new(Identity { number, certificate, tls })
        }));
    }
}

/// Loads the files of a configuration. Slots of `known` whose file paths are unchanged are kept.
fn prepare(
    upstream: &Upstream,
    identities: &[IdentitySource],
    known: &[Arc<IdentitySlot>],
    files: &mut LoadedFiles,
) -> Result<PreparedCredentials, TlsFileError> {
    let ca = upstream.tls.ca_file.as_deref().map(|file| files.ca(file)).transpose()?;
    let readyz = &upstream.health.readyz;
    let mut slots = Vec::new();
    let mut loaded = Vec::new();
    let probe = readyz.cert.clone().map(IdentitySource::Files);
    let only_for_probes = probe.iter().filter(|source| !identities.contains(source));
    for source in identities.iter().chain(only_for_probes) {
        let (certificate, missing) = match files.identity(source, client_certificate::load) {
            Ok(certificate) => (Some(certificate), None),
            Err(error) if error.is_missing() => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let slot = known.iter().find(|slot| slot.source == *source).cloned();
        slots.push(slot.unwrap_or_else(|| {
            let slot = IdentitySlot::new(source);
            if let Some(error) = &missing {
                slot.failed(error);
            }
            slot
        }));
        loaded.push(certificate);
    }
    let token = |file: &PathBuf| ProbeToken::new(file, files.token(file).ok().cloned());
    let token = readyz.token_file.as_ref().map(token).map(Arc::new);
    let probe = slots.iter().find(|slot| probe.as_ref() == Some(&slot.source)).cloned();
    slots.truncate(identities.len());
    let ca_file = upstream.tls.ca_file.clone();
    Ok(PreparedCredentials {
        ca,
        setup: Setup { ca_file, identities: slots, probe, token },
        loaded,
    })
}

/// The files of an identity besides those that the configuration names; none if it cannot be read.
pub fn files_of_identity(source: &IdentitySource) -> Vec<PathBuf> {
    client_certificate::load(source).map(|loaded| loaded.more_files).unwrap_or_default()
}

/// Loads the certificate of a slot. One that is not valid does not replace a valid one, and an expired one
/// does not replace one that is not valid yet.
fn load_better(slot: &IdentitySlot) -> Result<LoadedCert, TlsFileError> {
    let now = wall_clock();
    let certificate = client_certificate::load(&slot.source)?;
    let current = slot.certificate().map(|info| info.validity(now));
    if current.is_some_and(|current| certificate.info.validity(now) < current) {
        certificate.info.check_time(slot.source.file(), now)?;
    }
    Ok(certificate)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{CertificateParams, DnType, KeyPair};

    use super::*;
    use jackstay_config::{self as config, CertPaths};

    /// Writes a self-signed certificate and its key.
    fn write_certificate(folder: &Path, name: &str, subject: &str) -> CertPaths {
        write_valid(folder, name, subject, (2020, 2090))
    }

    /// Writes a self-signed certificate that is valid from the start of one year to that of another, and its key.
    fn write_valid(folder: &Path, name: &str, subject: &str, years: (i32, i32)) -> CertPaths {
        let file = |extension| folder.join(format!("{name}.{extension}"));
        let paths = CertPaths { cert_file: file("crt"), key_file: file("key") };
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, subject);
        params.not_before = rcgen::date_time_ymd(years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(years.1, 1, 1);
        let certificate = params.self_signed(&key);
        std::fs::write(&paths.cert_file, certificate.unwrap().pem()).unwrap();
        std::fs::write(&paths.key_file, key.serialize_pem()).unwrap();
        paths
    }

    /// An upstream whose servers this certificate verifies.
    fn config(ca: &CertPaths) -> config::Upstream {
        let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                    listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}]\n";
        let loaded = config::validate_text(Path::new("test.yaml"), text).unwrap();
        let mut config = loaded.config.upstreams.into_iter().next().unwrap();
        config.tls.ca_file = Some(ca.cert_file.clone());
        config
    }

    #[test]
    fn identity_under_other_paths_keeps_its_number_and_another_subject_gets_a_new_one() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name, subject| write_certificate(folder.path(), name, subject);
        let ca = write("ca", "ca");
        let config = config(&ca);
        let write = |name, subject| IdentitySource::Files(write(name, subject));
        let (first, moved) = (write("first", "a"), write("moved", "a"));
        let (other, twin) = (write("other", "b"), write("twin", "a"));
        let mut files = LoadedFiles::default();
        let only_first = std::slice::from_ref(&first);
        let credentials = Credentials::load(&config, only_first, &mut files).unwrap();
        for (paths, expected) in [
            (vec![moved.clone()], vec![0]),
            (vec![other.clone(), moved.clone()], vec![1, 0]),
            // Both have the same subject.
            (vec![twin, moved], vec![0]),
            (vec![other], vec![2]),
        ] {
            credentials.install(credentials.prepare(&config, &paths, &mut files).unwrap());
            credentials.retire(&paths);
            let expected: Vec<_> = expected.into_iter().map(CredentialClass::Identity).collect();
            assert_eq!(credentials.loaded(), expected, "{paths:?}");
        }
    }

    #[test]
    fn identities_of_one_subject_share_a_class_and_the_one_that_expires_last_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name, years| write_valid(folder.path(), name, "node", years);
        let config = config(&write("ca", (2020, 2090)));
        let joined = write("joined", (2020, 2080));
        let rotated = CertPaths {
            cert_file: folder.path().join("rotated.crt"),
            key_file: folder.path().join("rotated.key"),
        };
        let both = [IdentitySource::Files(joined), IdentitySource::Files(rotated)];
        let credentials = Credentials::load(&config, &both, &mut LoadedFiles::default()).unwrap();
        let class = CredentialClass::Identity(0);
        let shown = |class| credentials.tls(class).map(|tls| tls.generation);
        // The content of the rotated file over time, and which of the two is shown.
        let slot = |index: usize| Arc::clone(&credentials.identities()[index]);
        let of_slot = |index| slot(index).usable(wall_clock()).unwrap().tls.generation;
        assert_eq!((credentials.loaded(), shown(class)), (vec![class], Some(of_slot(0))));
        for (years, expected) in [((2021, 2081), 1), ((2021, 2079), 0), ((2085, 2089), 0)] {
            write("rotated", years);
            credentials.refresh();
            assert_eq!(credentials.loaded(), [class], "{years:?}");
            for shown in [shown(class), shown(CredentialClass::Probe)] {
                assert_eq!(shown, Some(of_slot(expected)), "{years:?}");
            }
            let superseded =
                is_superseded(&slot(1 - expected), &credentials.identities(), wall_clock());
            assert!(superseded, "{years:?}");
        }
        // The one with which the node has joined has expired.
        let joined = write("joined", (2020, 2021));
        let rotated = write("rotated", (2021, 2079));
        let both = [joined, rotated].map(IdentitySource::Files);
        let credentials = Credentials::load(&config, &both, &mut LoadedFiles::default()).unwrap();
        let slots = credentials.identities();
        assert_eq!(credentials.loaded(), [class]);
        let subject = slots[0].certificate().unwrap().subject;
        assert!(Arc::ptr_eq(&in_use(&slots, &subject, wall_clock()).unwrap(), &slots[1]));
        let expected = slots[1].usable(wall_clock()).unwrap().tls.generation;
        assert_eq!(credentials.tls(class).unwrap().generation, expected);
    }

    #[test]
    fn certificate_that_only_probes_show_is_no_identity_of_clients() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name| write_certificate(folder.path(), name, name);
        let (ca, identity, probe) = (write("ca"), write("identity"), write("probe"));
        let mut config = config(&ca);
        config.health.readyz.cert = Some(probe.clone());
        let (identity, probe) = (IdentitySource::Files(identity), IdentitySource::Files(probe));
        let mut files = LoadedFiles::default();
        let only_identity = std::slice::from_ref(&identity);
        let credentials = Credentials::load(&config, only_identity, &mut files).unwrap();
        let loaded = || credentials.loaded().len();
        let shown = || credentials.tls(CredentialClass::Probe).unwrap();
        assert_eq!((loaded(), credentials.slots().len(), credentials.paths().len()), (1, 2, 5));
        assert_ne!(shown().generation, credentials.without_certificate.load().generation);
        let of_probe = shown();
        // A reloaded configuration has both as identities.
        let both = [identity.clone(), probe];
        credentials.install(credentials.prepare(&config, &both, &mut files).unwrap());
        credentials.retire(&both);
        assert_eq!((loaded(), credentials.slots().len()), (2, 2));
        assert_eq!(shown().generation, of_probe.generation);
        // Another one has the certificate for probes alone again.
        credentials.install(credentials.prepare(&config, only_identity, &mut files).unwrap());
        assert_eq!(loaded(), 2, "for requests that still arrive");
        credentials.retire(only_identity);
        assert_eq!((loaded(), credentials.slots().len()), (1, 2));
        assert_eq!(shown().generation, of_probe.generation);
    }
}
