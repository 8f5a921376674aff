//! Plans the local CA and the serving certificate of a listener in mode `terminate`. The existing files are
//! kept while they are valid.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_config::CertPaths;
use jackstay_net::tls::certificate::{CertInfo, Validity};
use jackstay_net::tls::local_ca::{self, NewServingCert};
use jackstay_net::tls::pem_files::{self, valid_certificates};
use jackstay_sys::files;
use jackstay_sys::files::{PRIVATE, PUBLIC};

use super::config_file::ListenerTlsSection;
use super::error::SetupError;
use super::plan::{OutputFile, SetupPlan, SetupRequest};

/// The name of the file with the certificate of the local CA, beside the serving certificate.
const CA_FILE: &str = "local-ca.crt";
/// Maximum size of that file and of a pair, which hold a few certificates.
pub(super) const MAX_CA_FILE: u64 = 64 << 10;

/// The files of a local CA: its certificate, and the serving certificate with its key.
#[derive(Debug, Clone)]
pub(super) struct ServingFiles {
    /// The certificate of the CA, beside that of the next or the previous one.
    pub(super) ca: PathBuf,
    /// The serving certificate and its key.
    pub(super) serving: PathBuf,
}

/// A serving certificate and its CA, both from their files.
pub(super) struct ExistingServingCert {
    /// The content of the file with the CAs that clients are to trust.
    ca_pem: Vec<u8>,
    /// The names in the serving certificate.
    names: Vec<String>,
    /// Subject and validity of the serving certificate.
    info: CertInfo,
    /// Whether one of the CAs is constrained to names and has signed the serving certificate.
    is_of_ca: bool,
}

impl ServingFiles {
    /// The files in a directory.
    pub(super) fn in_directory(directory: &Path) -> Self {
        Self { ca: directory.join(CA_FILE), serving: directory.join("serving.pem") }
    }

    /// The files of a configuration whose serving certificate is in this file.
    pub(super) fn of_serving(serving: &Path) -> Self {
        Self { ca: serving.with_file_name(CA_FILE), serving: serving.to_owned() }
    }

    /// Reads both files.
    ///
    /// # Errors
    /// A file cannot be used.
    pub(super) fn read(&self) -> Result<ExistingServingCert, SetupError> {
        let paths = CertPaths { cert_file: self.serving.clone(), key_file: self.serving.clone() };
        let loaded = pem_files::load_cert(&paths).map_err(SetupError::TlsFile)?;
        let ca_pem = files::read(&self.ca, MAX_CA_FILE)
            .map_err(|error| SetupError::LocalCaFile(self.ca.clone(), error))?;
        let ca = valid_certificates(&ca_pem);
        if ca.is_empty() {
            return Err(SetupError::NoLocalCa(self.ca.clone()));
        }
        let names = local_ca::subject_alt_names(&loaded.chain[0])
            .map_err(|error| SetupError::ServingNames(self.serving.clone(), error))?;
        let is_issuer = |ca| local_ca::is_constrained_issuer(ca, &loaded.chain[0]);
        let is_of_ca = ca.iter().any(is_issuer);
        Ok(ExistingServingCert { ca_pem, names, info: loaded.info.clone(), is_of_ca })
    }

    /// The content of both files, that of the CA first, which clients must trust before the certificate is
    /// served.
    pub(super) fn outputs(&self, created: &NewServingCert, ca_pem: &[u8]) -> [OutputFile; 2] {
        [
            OutputFile {
                path: self.ca.clone(),
                bytes: ca_pem.to_vec(),
                mode: PUBLIC,
                description: "the certificate of the local CA, which clients trust; its key is not stored",
            },
            OutputFile {
                path: self.serving.clone(),
                bytes: created.pair.clone().into_bytes(),
                mode: PRIVATE,
                description: "the serving certificate and its key, valid for one year",
            },
        ]
    }
}

impl ExistingServingCert {
    /// Whether the certificate is valid. One that is due for renewal is kept: another CA would cut off the clients that
    /// run, and a renewal tells them of it first.
    fn is_usable(&self, now: SystemTime) -> bool {
        self.is_of_ca && self.info.validity(now) == Validity::Valid
    }
}

/// Plans a local CA and a serving certificate unless valid ones exist. Returns the `tls` section of the
/// listener.
///
/// # Errors
/// A certificate cannot be issued.
pub(super) fn plan(
    request: &SetupRequest,
    directory: &Path,
    plan: &mut SetupPlan,
) -> Result<ListenerTlsSection, SetupError> {
    let mut names: Vec<String> = ["127.0.0.1", "::1", "localhost"].map(ToOwned::to_owned).to_vec();
    for name in [&request.host, &request.node_name] {
        if !name.is_empty() && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let files = ServingFiles::in_directory(directory);
    let current = files.read().ok().filter(|existing| {
        existing.is_usable(request.now) && names.iter().all(|name| existing.names.contains(name))
    });
    let ca_pem = if let Some(existing) = current {
        existing.ca_pem
    } else {
        let ca_name = match request.node_name.as_str() {
            "" => "jackstay".to_owned(),
            name => format!("jackstay on {name}"),
        };
        let created = local_ca::create_serving_cert(&ca_name, &names, request.now)
            .map_err(SetupError::Issue)?;
        let ca_pem = created.ca.clone().into_bytes();
        plan.files.extend(files.outputs(&created, &ca_pem));
        ca_pem
    };
    plan.local_ca = Some(ca_pem);
    let key = directory.join("local-ca.key");
    if key.exists() {
        plan.notes.push(format!(
            "{} is the key of a local CA of an earlier version and is not used any more: remove it",
            key.display()
        ));
    }
    let serving = files.serving;
    Ok(ListenerTlsSection { serving: CertPaths { cert_file: serving.clone(), key_file: serving } })
}

#[cfg(test)]
mod tests {
    use jackstay_sys::utc::wall_clock;

    use super::super::plan::SetupMode;
    use super::*;
    use std::time::Duration;

    fn request(directory: &Path) -> SetupRequest {
        SetupRequest {
            authority: None,
            is_balancer: false,
            mode: SetupMode::Terminate,
            host: "127.0.0.1".into(),
            port: 7443,
            config: directory.join("jackstay.yaml"),
            upstreams: Vec::new(),
            server_name: None,
            shared_name: None,
            ca_file: None,
            client_ca_file: None,
            user_file: None,
            awaited: None,
            node_name: "node-1".into(),
            now: wall_clock(),
            state: None,
        }
    }

    /// The planned files.
    fn planned(request: &SetupRequest, directory: &Path) -> SetupPlan {
        let mut planned = SetupPlan::default();
        plan(request, directory, &mut planned).unwrap();
        planned
    }

    #[test]
    fn plan_existing_files_are_kept_while_they_are_valid() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path());
        let first = planned(&request, dir.path());
        assert_eq!(first.files.len(), 2);
        for file in &first.files {
            std::fs::write(&file.path, &file.bytes).unwrap();
        }
        let again = planned(&request, dir.path());
        assert!(again.files.is_empty());
        assert_eq!(again.local_ca, first.local_ca);
        let days = |days: u64| request.now + Duration::from_secs(days * 24 * 3600);
        let later = |days_later| SetupRequest { now: days(days_later), ..request.clone() };
        assert!(planned(&later(250), dir.path()).files.is_empty(), "two thirds of the lifetime");
        assert_eq!(planned(&later(366), dir.path()).files.len(), 2, "expired");
        let other = SetupRequest { node_name: "node-2".into(), ..request.clone() };
        assert_eq!(planned(&other, dir.path()).files.len(), 2, "the CA is not for this name");
    }

    #[test]
    fn plan_unusable_or_unrelated_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path());
        for name in ["local-ca.crt", "serving.pem"] {
            let file = dir.path().join(name);
            std::fs::write(&file, "not PEM").unwrap();
            assert_eq!(planned(&request, dir.path()).files.len(), 2, "{name}");
            std::fs::remove_file(&file).unwrap();
        }
        // Each of the two files is of another pair.
        for (index, _) in ["ca", "serving"].iter().enumerate() {
            let file = &planned(&request, dir.path()).files[index];
            std::fs::write(&file.path, &file.bytes).unwrap();
        }
        assert_eq!(planned(&request, dir.path()).files.len(), 2);
        std::fs::write(dir.path().join("local-ca.key"), "").unwrap();
        let notes = planned(&request, dir.path()).notes;
        assert!(notes.iter().any(|note| note.contains("not used any more")), "{notes:?}");
    }
}
