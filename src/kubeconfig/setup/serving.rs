//! The local CA and the serving certificate of a listener in mode `terminate`. Existing ones stay
//! as long as they are valid.

use std::path::Path;
use std::time::SystemTime;

use super::config_file::ListenerTlsSection;
use super::plan::{OutputFile, SetupPlan, SetupRequest};
use crate::config::CertPaths;
use crate::kubeconfig::credential::PemSource;
use crate::net::files::{PRIVATE, PUBLIC};
use crate::net::tls::local_ca::{self, LocalCa};
use crate::net::tls::pem_files;

/// Plans a local CA and a serving certificate, unless valid ones exist. Returns the `tls` section
/// of the listener.
pub(super) fn plan(
    request: &SetupRequest,
    directory: &Path,
    plan: &mut SetupPlan,
) -> Result<ListenerTlsSection, String> {
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
    let (authority, certificate) = if issuer.cert_file.exists() || issuer.key_file.exists() {
        let authority = LocalCa::load(&issuer).map_err(|error| {
            format!("{error}; remove {} to have a new local CA", issuer.cert_file.display())
        })?;
        (authority, PemSource::File(issuer.cert_file.clone()).read()?)
    } else {
        let name = format!("jackstay on {}", request.node_name);
        let (authority, created) = LocalCa::create(&name, request.now)?;
        let certificate = created.certificate.into_bytes();
        plan.files.push(OutputFile {
            path: issuer.cert_file.clone(),
            bytes: certificate.clone(),
            mode: PUBLIC,
            what: "the local CA, which clients trust",
        });
        plan.files.push(OutputFile {
            path: issuer.key_file.clone(),
            bytes: created.key.into_bytes(),
            mode: PRIVATE,
            what: "its key, which never leaves this machine",
        });
        (authority, certificate)
    };
    plan.local_ca = Some(certificate);
    // No existing certificate is signed by a new CA.
    if !is_valid(&serving, &authority, &names, request.now) {
        plan.files.push(OutputFile {
            path: serving.clone(),
            bytes: authority.issue(&names, request.now)?.pair().into_bytes(),
            mode: PRIVATE,
            what: "the serving certificate and its key, renewed by jackstay",
        });
    }
    let serving = CertPaths { cert_file: serving.clone(), key_file: serving };
    Ok(ListenerTlsSection { serving, issuer })
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
