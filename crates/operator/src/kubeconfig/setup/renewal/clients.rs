//! The clients of a local CA: the kubeconfigs that trust it, and the running programs that have read one.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_kubeconfig::model::Cluster;
use jackstay_kubeconfig::recorded_original;
use jackstay_kubeconfig::{KubeconfigFile, find_cluster_mut, kubeconfig_yaml};
use jackstay_net::tls::local_ca;
use jackstay_net::tls::pem_files::valid_certificates;
use jackstay_sys::files::{self, PRIVATE};
use jackstay_sys::utc::Utc;
use rustls::pki_types::CertificateDer;

use super::super::plan::OutputFile;
use super::super::serving::MAX_CA_FILE;
use super::pairs::{Pairs, pem_of};
use super::stage::{Trust, restart_time};
use super::state::{ReaderState, RenewalState, Seen, fingerprint};

type Cas = Vec<CertificateDer<'static>>;

/// What a run of the renewal is about.
pub struct RenewalRequest<'a> {
    /// The file of the served certificate.
    pub serving: &'a Path,
    /// The kubeconfigs that are to trust the local CA.
    pub kubeconfigs: &'a [Listed],
    /// The units that read one of them at their start and run.
    pub readers: &'a [Reader],
    /// The time by the clock of this machine.
    pub now: SystemTime,
    /// Take the next step now.
    pub force: bool,
}

/// A listed kubeconfig.
pub struct Listed {
    /// Its path.
    pub path: PathBuf,
    /// Its content; `None` if it does not exist, or why it cannot be read.
    pub content: Result<Option<KubeconfigFile>, String>,
}

/// A unit whose program runs and reads kubeconfigs at its start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reader {
    /// The name of the unit.
    pub unit: String,
    /// `InvocationID` of systemd, another one after each start.
    pub invocation: String,
    /// The kubeconfigs that it reads; all if this is empty.
    pub kubeconfigs: Vec<PathBuf>,
}

/// What is to be done about a running client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// It trusts all CAs that it needs.
    NotNeeded,
    /// It needs a restart, which is due at this time.
    At(SystemTime),
    /// It does not trust the served certificate.
    Now,
}

/// A cluster whose CAs are replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdatedCluster {
    /// The kubeconfig.
    pub path: PathBuf,
    /// The name of the cluster.
    pub name: String,
}

/// Where a cluster that trusts the local CA has its CAs.
enum Source {
    /// In `certificate-authority-data`.
    Data,
    /// In the file of the CAs, which the renewal replaces.
    Published,
    /// In another file.
    Other(PathBuf),
}

/// A cluster that trusts a CA of this listener.
struct TrustingCluster {
    path: PathBuf,
    name: String,
    source: Source,
    cas: Cas,
}

/// What is known about the clients before anything is written.
pub(super) struct Clients {
    clusters: Vec<TrustingCluster>,
    /// What the next run is to remember.
    pub(super) state: RenewalState,
    /// Whether all trust the next CA.
    pub(super) trust: Trust,
    /// Those that do not.
    pub(super) lacking: Vec<String>,
    pub(super) warnings: Vec<String>,
}

/// The changed kubeconfigs.
pub(super) struct Updates {
    pub(super) files: Vec<OutputFile>,
    pub(super) clusters: Vec<UpdatedCluster>,
    pub(super) warnings: Vec<String>,
}

/// All CAs in the data of kubeconfigs.
pub(super) fn of_kubeconfigs(kubeconfigs: &[Listed]) -> Cas {
    let files = kubeconfigs.iter().filter_map(|listed| listed.content.as_ref().ok()?.as_ref());
    let clusters = files.flat_map(|file| &file.config().clusters);
    clusters.filter_map(|named| named.cluster.as_ref()).flat_map(in_data).collect()
}

fn in_data(cluster: &Cluster) -> Cas {
    let data = cluster.certificate_authority_data.as_deref().unwrap_or_default();
    STANDARD.decode(data).map(|pem| valid_certificates(&pem)).unwrap_or_default()
}

impl Clients {
    /// Reads which CAs the kubeconfigs and the running clients have.
    pub(super) fn read(
        request: &RenewalRequest<'_>,
        pairs: &Pairs,
        published: &Path,
        before: &RenewalState,
    ) -> Self {
        let mut clients = Self {
            clusters: Vec::new(),
            // A run for other kubeconfigs or units keeps what it does not see.
            state: before.clone(),
            trust: Trust::Unknown,
            lacking: Vec::new(),
            warnings: Vec::new(),
        };
        for listed in request.kubeconfigs {
            let path = listed.path.display();
            match &listed.content {
                Ok(Some(file)) => clients.add(file, pairs, published),
                Ok(None) => clients.warnings.push(format!("{path} does not exist")),
                Err(error) => clients.warnings.push(error.clone()),
            }
        }
        for reader in request.readers {
            if clients.read_by(reader).next().is_none() {
                continue;
            }
            let state = clients.reader_state(reader, pairs, request.now, before);
            clients.state.readers.insert(reader.unit.clone(), state);
        }
        clients.trust = clients.trust_in_next(request, pairs, before);
        clients
    }

    /// Adds the clusters of a kubeconfig.
    fn add(&mut self, file: &KubeconfigFile, pairs: &Pairs, published: &Path) {
        let path = file.path();
        let before = self.clusters.len();
        for named in &file.config().clusters {
            let Some(cluster) = &named.cluster else { continue };
            let (source, cas) = cas_of(cluster, path, published);
            if cas.iter().any(|ca| is_local(ca, pairs)) {
                let (path, name) = (path.to_owned(), named.name.clone());
                self.clusters.push(TrustingCluster { path, name, source, cas });
            } else if recorded_original(cluster).is_some() {
                let (path, name) = (path.display(), &named.name);
                self.warnings.push(format!("{path}: cluster {name:?} does not trust the local CA"));
            }
        }
        if self.clusters.len() == before {
            let text = format!("{}: no cluster trusts the local CA", path.display());
            self.warnings.push(text);
        }
    }

    /// The CAs that a running client has: those that were in its kubeconfigs when its start was first seen.
    fn reader_state(
        &self,
        reader: &Reader,
        pairs: &Pairs,
        now: SystemTime,
        before: &RenewalState,
    ) -> ReaderState {
        let next = next_fingerprint(pairs);
        let recorded = before.readers.get(&reader.unit);
        let known = recorded.filter(|known| known.is_of(reader));
        let trusts = if let Some(known) = known {
            known.trusts.clone()
        } else {
            let mut trusts = self.trusted_by(reader);
            if recorded.is_none() {
                // It may have started before the publication.
                trusts.retain(|ca| Some(ca) != next.as_ref());
            }
            trusts
        };
        let lacks = next
            .filter(|next| !trusts.contains(next))
            .map(|next| Seen::first(known.and_then(|known| known.lacks.as_ref()), &next, now));
        ReaderState { invocation: reader.invocation.clone(), trusts, lacks }
    }

    /// The fingerprints of the CAs that all kubeconfigs of a client have now.
    fn trusted_by(&self, reader: &Reader) -> Vec<String> {
        let mut clusters = self.read_by(reader);
        let first = clusters.next().map(|cluster| cluster.cas.clone()).unwrap_or_default();
        let others: Vec<&Cas> = clusters.map(|cluster| &cluster.cas).collect();
        let common = first.iter().filter(|ca| others.iter().all(|cas| cas.contains(ca)));
        common.map(|ca| fingerprint(ca)).collect()
    }

    /// Whether all clients trust the next CA, and notes since when each kubeconfig does.
    fn trust_in_next(
        &mut self,
        request: &RenewalRequest<'_>,
        pairs: &Pairs,
        before: &RenewalState,
    ) -> Trust {
        let Some(next) = pairs.next.as_ref().and_then(|pair| pair.ca.as_ref()) else {
            return if self.clusters.is_empty() { Trust::Unknown } else { Trust::Incomplete };
        };
        let wanted = fingerprint(next);
        self.state.kubeconfigs.retain(|_, seen| seen.is_of(&wanted));
        let mut since: Option<SystemTime> = None;
        for cluster in &self.clusters {
            if !cluster.cas.contains(next) {
                self.lacking.push(cluster.path.display().to_string());
                self.state.kubeconfigs.remove(&cluster.path);
                continue;
            }
            let earlier = before.kubeconfigs.get(&cluster.path);
            let seen = Seen::first(earlier, &wanted, request.now);
            since = since.max(Some(seen.since()));
            self.state.kubeconfigs.insert(cluster.path.clone(), seen);
        }
        let lacks = |reader: &&Reader| {
            let state = self.state.readers.get(&reader.unit);
            state.is_some_and(|state| state.is_of(reader) && state.lacks.is_some())
        };
        let readers = request.readers.iter().filter(lacks);
        self.lacking.extend(readers.map(|reader| format!("the running {}", reader.unit)));
        match since {
            _ if self.clusters.is_empty() => Trust::Unknown,
            Some(since) if self.lacking.is_empty() => Trust::Since(since),
            _ => Trust::Incomplete,
        }
    }

    /// The kubeconfigs with these CAs in place of those that they have. CAs that are not of this listener stay.
    pub(super) fn updates(
        &self,
        kubeconfigs: &[Listed],
        bundle: &[CertificateDer<'static>],
        pairs: &Pairs,
    ) -> Updates {
        let mut updates = Updates { files: Vec::new(), clusters: Vec::new(), warnings: Vec::new() };
        for listed in kubeconfigs {
            let Ok(Some(file)) = &listed.content else { continue };
            let mut config = file.config().clone();
            let before = updates.clusters.len();
            for known in self.clusters.iter().filter(|known| known.path == file.path()) {
                let Some(pem) = known.update(bundle, pairs, &mut updates.warnings) else {
                    continue;
                };
                let cluster = find_cluster_mut(&mut config, &known.name);
                if let Some(cluster) = cluster {
                    cluster.certificate_authority_data = Some(STANDARD.encode(pem));
                    let (path, name) = (known.path.clone(), known.name.clone());
                    updates.clusters.push(UpdatedCluster { path, name });
                }
            }
            if updates.clusters.len() == before {
                continue;
            }
            match kubeconfig_yaml(&config) {
                Ok(text) => updates.files.push(OutputFile {
                    path: file.path().to_owned(),
                    bytes: text.into_bytes(),
                    mode: PRIVATE,
                    description: "the kubeconfig",
                }),
                Err(error) => updates.warnings.push(error.to_string()),
            }
        }
        updates
    }

    /// What is to be done about each running client, with the pairs after the run. A restart helps only if the
    /// kubeconfigs of the client have the CA after the run.
    pub(super) fn restarts(
        &self,
        readers: &[Reader],
        pairs: &Pairs,
        now: SystemTime,
    ) -> Vec<(String, Restart)> {
        let served = pairs.current.ca.as_ref();
        let next = pairs.next.as_ref().and_then(|next| next.ca.as_ref());
        let restart = |reader: &Reader| {
            let state = self.state.readers.get(&reader.unit);
            let state = state.filter(|state| state.is_of(reader))?;
            let is_missing = |ca: &CertificateDer<'static>| {
                let has = |cluster: &TrustingCluster| {
                    !matches!(cluster.source, Source::Other(_)) || cluster.cas.contains(ca)
                };
                !state.trusts.contains(&fingerprint(ca)) && self.read_by(reader).all(has)
            };
            let restart = if served.is_some_and(is_missing) {
                Restart::Now
            } else if let Some(next) = next.filter(|next| is_missing(next)) {
                let since = state.lacks.as_ref().map_or(now, Seen::since);
                let place = place_in_fleet(&fingerprint(next));
                Restart::At(restart_time(since, place, pairs.current.window))
            } else {
                Restart::NotNeeded
            };
            Some((reader.unit.clone(), restart))
        };
        readers.iter().filter_map(restart).collect()
    }

    /// The clusters in the kubeconfigs of a client.
    fn read_by<'a>(&'a self, reader: &'a Reader) -> impl Iterator<Item = &'a TrustingCluster> {
        self.clusters.iter().filter(|cluster| {
            reader.kubeconfigs.is_empty() || reader.kubeconfigs.contains(&cluster.path)
        })
    }
}

impl TrustingCluster {
    /// The CAs as PEM if the cluster is to have others than it has.
    fn update(
        &self,
        bundle: &[CertificateDer<'static>],
        pairs: &Pairs,
        warnings: &mut Vec<String>,
    ) -> Option<String> {
        let has = |ca: &CertificateDer<'static>| self.cas.contains(ca);
        match &self.source {
            Source::Published => return None,
            Source::Other(file) => {
                if !bundle.iter().all(has) {
                    let (path, file, name) = (self.path.display(), file.display(), &self.name);
                    warnings.push(format!(
                        "{path}: cluster {name:?} has its CA in {file}, which lacks one: copy local-ca.crt there"
                    ));
                }
                return None;
            }
            Source::Data => {}
        }
        let others = self.cas.iter().filter(|ca| !is_local(ca, pairs));
        let wanted: Cas = bundle.iter().chain(others).cloned().collect();
        let is_same = wanted.len() == self.cas.len() && wanted.iter().all(has);
        (!is_same).then(|| wanted.iter().map(pem_of).collect())
    }
}

impl Restart {
    /// Whether the restart is due at `now`.
    pub fn is_due(self, now: SystemTime) -> bool {
        match self {
            Self::NotNeeded => false,
            Self::At(time) => time <= now,
            Self::Now => true,
        }
    }

    /// What will happen, in words; `None` if nothing.
    pub fn describe(self, unit: &str) -> Option<String> {
        match self {
            Self::NotNeeded => None,
            Self::At(time) => Some(format!(
                "{unit} does not trust the next local CA and is restarted after {}",
                Utc(time).seconds()
            )),
            Self::Now => {
                Some(format!("{unit} does not trust the served certificate and is restarted now"))
            }
        }
    }
}

impl ReaderState {
    fn is_of(&self, reader: &Reader) -> bool {
        self.invocation == reader.invocation
    }
}

fn next_fingerprint(pairs: &Pairs) -> Option<String> {
    pairs.next.as_ref().and_then(|next| next.ca.as_ref()).map(|ca| fingerprint(ca))
}

/// The place of this machine in its fleet, from 0 to 1. Each machine has its own CA, whose fingerprint is random.
fn place_in_fleet(fingerprint: &str) -> f64 {
    let digits = fingerprint.get(..8).and_then(|text| u32::from_str_radix(text, 16).ok());
    f64::from(digits.unwrap_or_default()) / f64::from(u32::MAX)
}

/// The CAs of a cluster. Data has precedence over a file, as in client-go (`tools/clientcmd`).
fn cas_of(cluster: &Cluster, kubeconfig: &Path, published: &Path) -> (Source, Cas) {
    let data = in_data(cluster);
    let file = cluster.certificate_authority.as_deref().filter(|path| !path.is_empty());
    let (Some(file), true) = (file, data.is_empty()) else { return (Source::Data, data) };
    let file = kubeconfig.parent().unwrap_or(Path::new("/")).join(file);
    let cas = files::read(&file, MAX_CA_FILE).map(|pem| valid_certificates(&pem));
    let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let is_published = real(&file) == real(published);
    let source = if is_published { Source::Published } else { Source::Other(file) };
    (source, cas.unwrap_or_default())
}

/// Whether a CA is one of this listener, or an earlier one of it, which no file has any more.
fn is_local(ca: &CertificateDer<'static>, pairs: &Pairs) -> bool {
    let has_same_name = |of_pair| local_ca::are_constrained_with_one_name(ca, of_pair);
    pairs.published.contains(ca)
        || pairs.cas().any(|of_pair| of_pair == ca || has_same_name(of_pair))
}
