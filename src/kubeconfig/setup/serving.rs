//! Plans the local CA and the serving certificate of a listener in mode `terminate`. An existing CA is
//! kept. An existing serving certificate is kept while it is current.

use std::path::Path;
use std::time::SystemTime;

use super::config_file::ListenerTlsSection;
use super::plan::{OutputFile, SetupPlan, SetupRequest};
use crate::config::CertPaths;
use crate::kubeconfig::credential::PemSource;
use crate::net::files::{PRIVATE, PUBLIC};
use crate::net::tls::local_ca::{self, LocalCa};
use crate::net::tls::pem_files;

/// Plans a local CA unless one exists, and a serving certificate unless a current one exists. Returns the
/// `tls` section of the listener.
///
/// # Errors
/// The existing CA cannot be used, or a certificate cannot be issued.
pub(super) fn plan(
    request: &SetupRequest,
    directory: &Path,
    plan: &mut SetupPlan,
) -> Result<ListenerTlsSection, String> {
    let ca_paths = CertPaths {
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
    let (local_ca, ca_certificate) = if ca_paths.cert_file.exists() || ca_paths.key_file.exists() {
        let local_ca = LocalCa::load(&ca_paths).map_err(|error| {
            format!(
                "{error}; to create a new local CA, remove {} and {}",
                ca_paths.cert_file.display(),
                ca_paths.key_file.display()
            )
        })?;
        (local_ca, PemSource::File(ca_paths.cert_file.clone()).read()?)
    } else {
        let name = format!("jackstay on {}", request.node_name);
        let (local_ca, created) = LocalCa::create(&name, request.now)?;
        let ca_certificate = created.certificate.into_bytes();
        plan.files.push(OutputFile {
            path: ca_paths.cert_file.clone(),
            bytes: ca_certificate.clone(),
            mode: PUBLIC,
            description: "the certificate of the local CA, which clients trust",
        });
        plan.files.push(OutputFile {
            path: ca_paths.key_file.clone(),
            bytes: created.key.into_bytes(),
            mode: PRIVATE,
            description: "the key of the local CA; keep it on this machine",
        });
        (local_ca, ca_certificate)
    };
    plan.local_ca = Some(ca_certificate);
    // After a new CA was created, an existing certificate is not current: another CA signed it.
    if !is_current(&serving, &local_ca, &names, request.now) {
        plan.files.push(OutputFile {
            path: serving.clone(),
            bytes: local_ca.issue(&names, request.now)?.pair().into_bytes(),
            mode: PRIVATE,
            description: "the serving certificate and its key, renewed by jackstay",
        });
    }
    let serving = CertPaths { cert_file: serving.clone(), key_file: serving };
    Ok(ListenerTlsSection { serving, issuer: ca_paths })
}

/// Whether `file` holds a serving certificate that `local_ca` has signed, that contains all `names`, and
/// that is not due for renewal.
fn is_current(file: &Path, local_ca: &LocalCa, names: &[String], now: SystemTime) -> bool {
    let paths = CertPaths { cert_file: file.to_owned(), key_file: file.to_owned() };
    let Ok(loaded) = pem_files::load_cert(&paths) else { return false };
    let certified = local_ca::subject_alt_names(&loaded.chain[0]).unwrap_or_default();
    now < local_ca::renewal_time(&loaded.info)
        && names.iter().all(|name| certified.contains(name))
        && local_ca.has_signed(&loaded.chain[0])
}

#[cfg(test)]
mod tests {
    use super::super::plan::SetupMode;
    use super::*;
    use crate::observe::utc::wall_clock;

    #[test]
    fn plan_unusable_local_ca_error_names_both_files_to_remove() {
        let dir = tempfile::tempdir().unwrap();
        let request = SetupRequest {
            mode: SetupMode::Terminate,
            host: "127.0.0.1".into(),
            port: 7443,
            config: dir.path().join("jackstay.yaml"),
            upstreams: Vec::new(),
            server_name: None,
            ca_file: None,
            client_ca_file: None,
            node_name: "node-1".into(),
            now: wall_clock(),
        };
        let files = ["local-ca.crt", "local-ca.key"].map(|name| dir.path().join(name));
        // Only one of the two files exists, and it holds no certificate or key.
        for existing in &files {
            std::fs::write(existing, "not PEM").unwrap();
            let mut planned = SetupPlan { files: Vec::new(), local_ca: None, notes: Vec::new() };
            let error = plan(&request, dir.path(), &mut planned).err().unwrap();
            let advice = format!(
                "to create a new local CA, remove {} and {}",
                files[0].display(),
                files[1].display()
            );
            assert!(error.ends_with(&advice), "{error}");
            assert!(planned.files.is_empty(), "no file is replaced");
            std::fs::remove_file(existing).unwrap();
        }
    }
}
