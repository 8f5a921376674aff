//! Checks of the files that a configuration names: certificates, keys, CA bundles, tokens and
//! sources of endpoints.
//!
//! `run` makes the same checks before it binds a socket. A broken source of endpoints is an error for
//! `check` and a warning for `run`, which starts without it and reads it again until it is valid.

use std::fmt::Display;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use jackstay_config::endpoints_file;
use jackstay_config::{
    COPIED_IDENTITY, CertPaths, Config, ConfigDraft, ConfigError, EndpointKind, IdentitySource,
    KeyLines, ServingFiles, Terminate, Upstream, describe_io_error, server_name_matches,
};
use jackstay_core::quantity::quantity;
use jackstay_kubeconfig::client_certificate;
use jackstay_kubeconfig::discovery as kubeconfig;
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_net::tls::certificate::{CertInfo, VERSION_1, VERSION_1_EFFECT};
use jackstay_net::tls::file_error::{TlsFileError, TlsFileProblem};
use jackstay_net::tls::local_ca;
use jackstay_net::tls::local_ca::LocalCa;
use jackstay_net::tls::pem_files::LoadedCert;
use jackstay_net::tls::refusal::RefusalKind;
use jackstay_sys::utc::Utc;
use rustls::pki_types::UnixTime;

/// Note about an upstream without a CA bundle.
const UNVERIFIED: &str = "not given: health is probed without verifying the servers and without \
                          a credential; clients verify for themselves";

/// Note about `kind: balancer` of an upstream that serves flows.
const BALANCER_OF_FLOWS: &str = "balancer has no effect: a listener passes flows through to this upstream, and a flow \
                                 cannot see which apiserver it has reached; give that listener an upstream of its own";

/// The result of the checks. Every line names the file of the configuration and the key path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileReport {
    /// Errors with which the configuration cannot run.
    pub errors: Vec<ConfigError>,
    /// Errors in sources of endpoints; `run` starts without them.
    pub sources: Vec<ConfigError>,
    /// Certificates that have expired or are not valid yet, others with which some clients are not served, and
    /// settings that are valid but probably a mistake. The configuration runs.
    pub warnings: Vec<String>,
    /// Files that do not exist yet, and certificates that expire soon.
    pub notes: Vec<String>,
    /// The subject and the expiry of each valid certificate.
    pub passed_checks: Vec<String>,
}

/// Reports the errors of a draft, followed by those of the files that it names. What `run` loads of them, too, is
/// afterwards in `loaded`.
pub fn check_draft(
    file: &Path,
    draft: &ConfigDraft,
    now: SystemTime,
    loaded: &mut LoadedFiles,
) -> FileReport {
    let mut report = match &draft.config {
        Some(config) => check_files_at(file, config, draft.lines.clone(), now, loaded),
        None => FileReport::default(),
    };
    report.errors.splice(..0, draft.errors.iter().cloned());
    report
}

/// Checks every file that `config`, read from `file`, names. An empty path stands for a missing or
/// invalid value, which the validation of the configuration reports; it is skipped.
///
/// The files of an identity may be missing: kubelet writes them after it has joined the cluster.
pub fn check_files(file: &Path, config: &Config, now: SystemTime) -> FileReport {
    check_files_at(file, config, KeyLines::default(), now, &mut LoadedFiles::default())
}

/// [`check_files`] for a file with keys on these `lines`.
fn check_files_at(
    file: &Path,
    config: &Config,
    lines: KeyLines,
    now: SystemTime,
    loaded: &mut LoadedFiles,
) -> FileReport {
    let file = file.display().to_string();
    let mut checker = FileChecker { file, lines, now, loaded, report: FileReport::default() };
    if let Some(path) = &config.state_dir {
        checker.state_dir(path);
    }
    if let Some(files) = config.admin.metrics_files() {
        checker.metrics(&files);
    }
    for (i, upstream) in config.upstreams.iter().enumerate() {
        let at = format!("upstreams[{i}]");
        match &upstream.tls.ca_file {
            Some(path) => checker.ca(&format!("{at}.tls.ca_file"), path),
            None => checker.note(&format!("{at}.tls.ca_file"), UNVERIFIED),
        }
        if let Some(path) = &upstream.endpoints_file {
            checker.endpoints_file(&format!("{at}.endpoints_file"), path);
        }
        if let Some(path) = &upstream.discovery.kubeconfig {
            checker.discovery_kubeconfig(&format!("{at}.discovery.kubeconfig"), path);
        }
        if upstream.kind == EndpointKind::Balancer && upstream.used_by.passthrough {
            checker.note(&format!("{at}.kind"), BALANCER_OF_FLOWS);
        }
        let readyz = &upstream.health.readyz;
        if let Some(paths) = &readyz.cert {
            checker.client_cert(&format!("{at}.health.readyz"), paths);
        }
        if let Some(path) = &readyz.token_file {
            checker.token(&format!("{at}.health.readyz.token_file"), path);
        }
    }
    for (i, listener) in config.listeners.iter().enumerate() {
        let at = format!("listeners[{i}]");
        let Some(terminate) = listener.terminate() else { continue };
        if let Some(serving) = checker.serving_cert(&format!("{at}.tls"), terminate)
            && let Some(passed_through) = &terminate.passed_through
        {
            checker.passthrough_names(&at, &passed_through.server_names, &serving);
        }
        if let Some(path) = &terminate.client_ca_file {
            checker.ca(&format!("{at}.client_ca_file"), path);
        }
        checker.serving_as_client(&at, terminate, &config.upstreams);
        let client_ca = terminate.client_ca_file.as_deref();
        checker.identities(&format!("{at}.identities"), &terminate.identities, client_ca);
    }
    checker.report
}

/// Whether the pair lacks a path, which the validation of the configuration reports.
fn is_incomplete(paths: &CertPaths) -> bool {
    [&paths.cert_file, &paths.key_file].iter().any(|file| file.as_os_str().is_empty())
}

struct FileChecker<'a> {
    file: String,
    lines: KeyLines,
    now: SystemTime,
    loaded: &'a mut LoadedFiles,
    report: FileReport,
}

impl FileChecker<'_> {
    fn error(&mut self, path: &str, message: impl Display) {
        let error = self.config_error(path, message);
        self.report.errors.push(error);
    }

    fn source_error(&mut self, path: &str, message: impl Display) {
        let error = self.config_error(path, message);
        self.report.sources.push(error);
    }

    fn config_error(&self, path: &str, message: impl Display) -> ConfigError {
        let error = ConfigError::new(&*self.file, path, message.to_string());
        ConfigError { line: self.lines.line_of(path), ..error }
    }

    fn warn(&mut self, path: &str, message: impl Display) {
        let warning = self.config_error(path, message);
        self.report.warnings.push(warning.to_string());
    }

    /// Warns of a state directory that cannot be created or used, because a file is at its path or above it.
    fn state_dir(&mut self, path: &Path) {
        let existing = path.ancestors().find(|path| !path.as_os_str().is_empty() && path.exists());
        if let Some(existing) = existing.filter(|existing| !existing.is_dir()) {
            let message = format!(
                "{} is not a directory: endpoints are not saved, and no new process can take over",
                existing.display()
            );
            self.warn("state_dir", message);
        }
    }

    /// Warns of a private key that every user of the node can read.
    fn key_mode(&mut self, at: &str, path: &Path) {
        if is_world_readable(path) {
            let message = "every user of this node can read this private key: chmod o-rwx";
            self.warn(at, format!("{}: {message}", path.display()));
        }
    }

    fn note(&mut self, path: &str, message: impl Display) {
        self.report.notes.push(format!("{}: {path}: {message}", self.file));
    }

    fn warning(&mut self, path: &str, message: impl Display) {
        self.report.warnings.push(format!("{}: {path}: {message}", self.file));
    }

    fn passed(&mut self, path: &str, message: impl Display) {
        self.report.passed_checks.push(format!("{}: {path}: {message}", self.file));
    }

    /// Reports an error of a certificate at the configuration key that names the file. If one file
    /// holds certificate and private key, only a mismatch is reported at `key_file`.
    fn cert_error(&mut self, at: &str, paths: &CertPaths, error: &TlsFileError) {
        let of_key = error.problem == TlsFileProblem::Mismatch
            || (error.path == paths.key_file && paths.key_file != paths.cert_file);
        let key = if of_key { "key_file" } else { "cert_file" };
        self.error(&format!("{at}.{key}"), error);
    }

    /// Checks a serving certificate. With an issuer it is renewed at the start, so its expiry is a note. Without
    /// one an expired certificate is served, and clients decide.
    /// The TLS files of `admin.metrics_bind`.
    fn metrics(&mut self, files: &ServingFiles) {
        let (cert, paths) = ("admin.metrics_cert_file", &files.tls.paths);
        match self.loaded.serving_certificate(paths) {
            Ok(loaded) => {
                self.key_mode("admin.metrics_key_file", &paths.key_file);
                self.validity(cert, &paths.cert_file, &loaded.info);
            }
            Err(error) => {
                let is_key = error.path == paths.key_file && paths.key_file != paths.cert_file;
                self.error(if is_key { "admin.metrics_key_file" } else { cert }, error);
            }
        }
        if let Some(path) = &files.client_ca_file {
            self.ca("admin.metrics_client_ca_file", path);
        }
    }

    fn serving_cert(&mut self, at: &str, terminate: &Terminate) -> Option<Arc<LoadedCert>> {
        let paths = &terminate.tls.paths;
        let Some(issuer) = &terminate.tls.issuer else {
            let loaded = self.load(at, paths, LoadedFiles::serving_certificate)?;
            self.validity(&format!("{at}.cert_file"), &paths.cert_file, &loaded.info);
            return Some(loaded);
        };
        match LocalCa::load(issuer) {
            Err(error) => self.error(&format!("{at}.issuer"), error),
            Ok(ca) => {
                self.key_mode(&format!("{at}.issuer.key_file"), &issuer.key_file);
                self.validity(&format!("{at}.issuer.cert_file"), &issuer.cert_file, ca.info());
                let message = "jackstay can read the key of this CA, so an attacker in the process \
                               can issue certificates; `jackstay kubeconfig --mode terminate` creates \
                               a CA whose key is not stored";
                self.note(&format!("{at}.issuer.key_file"), message);
            }
        }
        let loaded = self.load(at, paths, LoadedFiles::serving_certificate)?;
        let at = format!("{at}.cert_file");
        match loaded.info.check_time(&paths.cert_file, self.now) {
            Ok(()) => self.validity(&at, &paths.cert_file, &loaded.info),
            Err(error) => self.note(&at, format!("{error}; it is renewed at the start")),
        }
        Some(loaded)
    }

    /// Warns of a serving certificate with which its key logs in to the cluster, whose CA is that of the apiservers or
    /// of their clients: kube-apiserver accepts it unless its extended key usages exclude `clientAuth`.
    fn serving_as_client(&mut self, at: &str, terminate: &Terminate, upstreams: &[Upstream]) {
        let Ok(serving) = self.loaded.serving_certificate(&terminate.tls.paths) else { return };
        let Some((leaf, rest)) = serving.chain.split_first() else { return };
        let Some(user) = serving.info.subject.common_name() else { return };
        let authorities = upstreams.iter().filter_map(|upstream| upstream.tls.ca_file.as_ref());
        let now = self.now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(now);
        for file in terminate.client_ca_file.iter().chain(authorities) {
            let Ok(ca) = self.loaded.ca(file) else { continue };
            if ca.roots.verify_client(leaf, rest, now).is_ok() {
                let (path, ca) = (terminate.tls.paths.cert_file.display(), file.display());
                let message = format!(
                    "{path} is a client certificate of {ca}, too: its key logs in to the cluster as {user:?}; issue it \
                     with extendedKeyUsage=serverAuth"
                );
                return self.warning(&format!("{at}.tls.cert_file"), message);
            }
        }
    }

    /// Warns of names of connections that are passed through which are in the serving certificate of the listener, too:
    /// a client that connects by such a name gets the certificate of an apiserver.
    fn passthrough_names(&mut self, at: &str, names: &[String], serving: &LoadedCert) {
        let Some(leaf) = serving.chain.first() else { return };
        let served = local_ca::subject_alt_names(leaf).unwrap_or_default();
        let served: Vec<String> = served.iter().map(|name| name.to_ascii_lowercase()).collect();
        for (i, name) in names.iter().enumerate() {
            let is_both = |served: &&String| {
                server_name_matches(name, served) || server_name_matches(served, name)
            };
            if let Some(served) = served.iter().find(is_both) {
                let message = format!(
                    "{served} is in the serving certificate of this listener: clients that connect by this name \
                     are passed through, get the certificate of an apiserver, and nothing of mode terminate"
                );
                self.warn(&format!("{at}.passthrough_server_names[{i}]"), message);
            }
        }
    }

    /// Reports the files of a certificate that do not exist, except `reported`, which has an error
    /// already.
    fn missing(&mut self, at: &str, paths: &CertPaths, reported: Option<&Path>) {
        for (key, file) in [("cert_file", &paths.cert_file), ("key_file", &paths.key_file)] {
            if file.as_os_str().is_empty() || reported == Some(file) {
                continue;
            }
            if let Err(error) = std::fs::metadata(file) {
                let (file, reason) = (file.display(), describe_io_error(&error));
                self.error(&format!("{at}.{key}"), format!("cannot read {file}: {reason}"));
            }
        }
    }

    /// Loads a certificate and its private key, which must both exist.
    fn load(
        &mut self,
        at: &str,
        paths: &CertPaths,
        load: fn(&mut LoadedFiles, &CertPaths) -> Result<Arc<LoadedCert>, TlsFileError>,
    ) -> Option<Arc<LoadedCert>> {
        if is_incomplete(paths) {
            self.missing(at, paths, None);
            return None;
        }
        self.key_mode(&format!("{at}.key_file"), &paths.key_file);
        match load(self.loaded, paths) {
            Ok(loaded) => {
                self.pem_findings(&format!("{at}.cert_file"), &loaded.skipped, &loaded.notes);
                Some(loaded)
            }
            Err(error) => {
                self.cert_error(at, paths, &error);
                self.missing(at, paths, Some(&error.path));
                None
            }
        }
    }

    /// Checks a client certificate, which needs a common name: an apiserver takes it as the user name.
    fn client_cert(&mut self, at: &str, paths: &CertPaths) -> Option<CertInfo> {
        let info = self.load(at, paths, LoadedFiles::certificate)?.info.clone();
        self.validity(&format!("{at}.cert_file"), &paths.cert_file, &info);
        self.common_name(&format!("{at}.cert_file"), &paths.cert_file, &info);
        Some(info)
    }

    fn identities(&mut self, at: &str, identities: &[IdentitySource], client_ca: Option<&Path>) {
        let mut found: Vec<(String, &IdentitySource, CertInfo)> = Vec::new();
        for (i, source) in identities.iter().enumerate() {
            let at_item = format!("{at}[{i}]");
            if source.is_incomplete() {
                continue;
            }
            if let Err(error) = self.loaded.identity(source, client_certificate::load)
                && error.is_missing()
            {
                let file = error.path.display();
                self.note(&at_item, format!("{file} does not exist yet; it is awaited"));
                continue;
            }
            let Some(info) = self.identity_info(&at_item, source) else { continue };
            found.push((at_item, source, info));
        }
        for (i, (at_item, source, info)) in found.iter().enumerate() {
            let rank = |info: &CertInfo| (info.validity(self.now), info.not_after);
            let others = || found.iter().enumerate().filter(|(other, _)| *other != i);
            let same = || others().filter(|(_, (.., other))| other.subject == info.subject);
            // As `upstream::credentials::in_use`: of two that are equal, the first one.
            let better = same().find(|(j, (.., other))| {
                rank(other) > rank(info) || (rank(other) == rank(info) && *j < i)
            });
            let at_key = format!("{at_item}.{}", source.key());
            if let Some((_, (better, ..))) = better {
                let file = source.file().display();
                let message =
                    format!("{file} is not used: {better} has the same subject and expires later");
                self.passed(&at_key, message);
                continue;
            }
            self.validity(&at_key, source.file(), info);
            if info.is_version_1 {
                let message =
                    format!("{}: {VERSION_1}; {VERSION_1_EFFECT}", source.file().display());
                self.warning(&at_key, message);
            } else {
                self.client_refusal(&at_key, source, client_ca);
            }
            self.copied_identity(&at_key, source, info);
        }
    }

    /// Warns of a certificate that was copied from a kubeconfig. Its expiry has a warning of its own.
    fn copied_identity(&mut self, at: &str, source: &IdentitySource, info: &CertInfo) {
        if source.is_copy(Path::new(&self.file)) {
            let (file, until) = (source.file().display(), Utc(info.not_after).seconds());
            self.warning(at, format!("{file} (valid until {until}) is {COPIED_IDENTITY}"));
        }
    }

    /// Reads the certificate of an identity, which needs a common name, as [`Self::client_cert`].
    fn identity_info(&mut self, at: &str, source: &IdentitySource) -> Option<CertInfo> {
        let at_key = format!("{at}.{}", source.key());
        let loaded = match source {
            IdentitySource::Files(paths) => self.load(at, paths, LoadedFiles::certificate)?,
            IdentitySource::Kubeconfig(user) => {
                self.key_mode(&at_key, &user.kubeconfig);
                match self.loaded.identity(source, client_certificate::load) {
                    Ok(loaded) => {
                        self.pem_findings(&at_key, &loaded.skipped, &loaded.notes);
                        loaded
                    }
                    Err(error) => {
                        self.error(&at_key, error);
                        return None;
                    }
                }
            }
        };
        self.common_name(&at_key, source.file(), &loaded.info);
        Some(loaded.info.clone())
    }

    fn common_name(&mut self, at: &str, file: &Path, info: &CertInfo) {
        if info.subject.common_name().is_none() {
            let message = "the certificate has no common name, which an apiserver takes as the \
                           user name";
            self.error(at, format!("{}: {message}", file.display()));
        }
    }

    /// Warns if clients with the certificate of an identity are refused. One that has expired is reported already.
    fn client_refusal(&mut self, at: &str, source: &IdentitySource, client_ca: Option<&Path>) {
        let ca = client_ca.and_then(|file| self.loaded.ca(file).ok());
        let certificate = self.loaded.identity(source, client_certificate::load);
        let (Some(ca), Ok(certificate)) = (ca, certificate) else { return };
        let Some((leaf, rest)) = certificate.chain.split_first() else { return };
        let now = self.now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(now);
        let Err(refusal) = ca.roots.verify_client(leaf, rest, now) else { return };
        if !matches!(refusal.kind, RefusalKind::Expired | RefusalKind::NotYetValid) {
            let file = source.file().display();
            self.warning(at, format!("{file}: {refusal}; clients that use it get 401"));
        }
    }

    /// Checks a CA bundle. During a rotation a bundle contains the old CA and its successor, so each certificate
    /// that is not valid is a warning.
    fn ca(&mut self, at: &str, path: &Path) {
        let certificates = match self.loaded.ca(path) {
            Ok(loaded) => {
                let bundle = Arc::clone(&loaded.bundle);
                self.pem_findings(at, &bundle.skipped, &bundle.notes);
                bundle.certificates.clone()
            }
            Err(error) => return self.error(at, error),
        };
        let errors = certificates.iter().filter_map(|info| info.check_time(path, self.now).err());
        let errors: Vec<TlsFileError> = errors.collect();
        let valid = certificates.len() - errors.len();
        for error in &errors {
            let counts = format!(
                "{valid} of {} in the bundle valid",
                quantity(certificates.len(), "certificate")
            );
            self.warning(at, format!("{error} ({counts})"));
        }
    }

    /// Warns of the certificates in a file that are not read, and notes the forms that kubectl does not read.
    fn pem_findings(&mut self, at: &str, skipped: &[String], notes: &[String]) {
        for skipped in skipped {
            self.warn(at, skipped);
        }
        for note in notes {
            self.note(at, note);
        }
    }

    /// Returns whether the file does not exist yet, and adds a note if so.
    fn is_awaited(&mut self, at: &str, path: &Path) -> bool {
        let missing = matches!(path.try_exists(), Ok(false));
        if missing {
            self.note(at, format!("{} does not exist yet; it is awaited", path.display()));
        }
        missing
    }

    fn endpoints_file(&mut self, at: &str, path: &Path) {
        if self.is_awaited(at, path) {
            return;
        }
        let file = path.display();
        let parsed = match endpoints_file::read(path) {
            Ok(text) => endpoints_file::parse(&text),
            Err(why) => return self.source_error(at, why),
        };
        for why in &parsed.rejected {
            self.source_error(at, format!("{file}: {why}"));
        }
        if parsed.candidates.is_empty() && parsed.rejected_count == 0 {
            self.source_error(at, format!("{file}: names no endpoint"));
        }
    }

    fn discovery_kubeconfig(&mut self, at: &str, path: &Path) {
        if self.is_awaited(at, path) {
            return;
        }
        let user = match kubeconfig::load(path) {
            Ok(user) => user,
            Err(why) => return self.source_error(at, why),
        };
        if let Err(why) = user.token.header() {
            self.source_error(at, format!("{}: {why}", path.display()));
        }
        let Some(certificate) = user.certificate else { return };
        match certificate.info.check_time(path, self.now) {
            Err(error) if error.problem == TlsFileProblem::Expired => self.source_error(at, error),
            Err(error) => self.note(at, error),
            Ok(()) => {}
        }
    }

    /// Checks the validity of a certificate: expired and not valid yet are warnings, less than a tenth of the lifetime
    /// is a note.
    fn validity(&mut self, at: &str, path: &Path, info: &CertInfo) {
        if let Err(error) = info.check_time(path, self.now) {
            return self.warning(at, error);
        }
        let until = Utc(info.not_after).seconds();
        let text = format!("{}, valid until {until}", info.subject);
        if info.is_renewal_overdue(self.now) {
            self.note(at, format!("{text}: less than a tenth of its lifetime is left"));
        } else {
            self.passed(at, text);
        }
    }

    fn token(&mut self, at: &str, path: &Path) {
        match self.loaded.token(path) {
            Err(error) => {
                let error = error.to_string();
                self.error(at, error);
            }
            // An apiserver takes "Bearer a b" for the token "a".
            Ok(value) if value.as_bytes().splitn(3, |byte| *byte == b' ').nth(2).is_some() => {
                let message =
                    "the token contains a space: an apiserver reads only what precedes it";
                self.note(at, format!("{}: {message}", path.display()));
            }
            Ok(_) => {}
        }
    }
}

/// Whether users other than the owner and the group can read a file: by its mode, and by those of the directories
/// above it.
fn is_world_readable(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    let allows = |path: &Path, bit: u32| {
        path.metadata().is_ok_and(|metadata| metadata.permissions().mode() & bit != 0)
    };
    allows(&path, 0o004) && path.ancestors().skip(1).all(|directory| allows(directory, 0o001))
}
