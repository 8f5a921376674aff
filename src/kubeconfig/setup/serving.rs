//! The local CA and the serving certificate of a listener in mode `terminate`. Existing ones stay
//! as long as they are valid.

use std::path::Path;
use std::time::SystemTime;

use super::config_file::ListenerTlsSection;
use super::plan::{OutputFile, SetupPlan, SetupRequest};
use crate::config::CertPaths;
use crate::kubeconfig::error::KubeconfigError;
use crate::net::files::{PRIVATE, PUBLIC};
use crate::net::tls::local_ca::{self, LocalCa};
use crate::net::tls::pem_files;

/// Plans a local CA and a serving certificate, unless valid ones exist. Returns the `tls` section
/// of the listener.
pub(super) fn plan(
    request: &SetupRequest,
    directory: &Path,
    plan: &mut SetupPlan,
) -> Result<ListenerTlsSection, KubeconfigError> {
    let issuer = CertPaths {
        cert_file: directory.join("local-ca.crt"),
        key_file: directory.join("local-ca.key"),
    };
    let serving = directory.join("serving.pem");
    let mut names: Vec<String> = ["127.0.0.1", "::1", "localhost"].map(ToOwned::to_owned).to_vec();
    for name in [&request.host, &request.node_name] {
        if !name.is_empty() && !names.contains(name) {
            names.push(name.clone());
        }
    }
    if issuer.cert_file.exists() || issuer.key_file.exists() {
        let authority = LocalCa::load(&issuer).map_err(|error| {
            format!("{error}; remove {} to have a new local CA", issuer.cert_file.display())
        })?;
        let certificate = std::fs::read(&issuer.cert_file)
            .map_err(|error| KubeconfigError::at(&issuer.cert_file, error))?;
        if !is_valid(&serving, &authority, &names, request.now) {
            let issued = authority.issue(&names, request.now)?;
            plan.files.push(serving_file(&serving, &issued));
        }
        plan.local_ca = Some(certificate);
    } else {
        let (authority, created) =
            LocalCa::create(&format!("jackstay on {}", request.node_name), request.now)?;
        let issued = authority.issue(&names, request.now)?;
        plan.local_ca = Some(created.certificate.clone().into_bytes());
        for (path, bytes, mode, what) in [
            (&issuer.cert_file, created.certificate, PUBLIC, "the local CA, which clients trust"),
            (&issuer.key_file, created.key, PRIVATE, "its key, which never leaves this machine"),
        ] {
            plan.files.push(OutputFile {
                path: path.clone(),
                bytes: bytes.into_bytes(),
                mode,
                what,
            });
        }
        plan.files.push(serving_file(&serving, &issued));
    }
    let serving = CertPaths { cert_file: serving.clone(), key_file: serving };
    Ok(ListenerTlsSection { serving, issuer })
}

fn serving_file(serving: &Path, issued: &local_ca::IssuedCertificate) -> OutputFile {
    OutputFile {
        path: serving.to_owned(),
        bytes: issued.pair().into_bytes(),
        mode: PRIVATE,
        what: "the serving certificate and its key, renewed by jackstay",
    }
}

/// Whether the existing serving certificate is signed by this CA, holds all names and is not due
/// for renewal.
fn is_valid(file: &Path, authority: &LocalCa, names: &[String], now: SystemTime) -> bool {
    let paths = CertPaths { cert_file: file.to_owned(), key_file: file.to_owned() };
    let Ok(loaded) = pem_files::load_cert(&paths) else { return false };
    let has = local_ca::subject_alt_names(&loaded.chain[0]).unwrap_or_default();
    now < local_ca::renewal_time(&loaded.info)
        && names.iter().all(|name| has.contains(name))
        && authority.has_signed(&loaded.chain[0])
}
