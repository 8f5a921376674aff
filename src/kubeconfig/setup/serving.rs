//! What clients are shown at a local endpoint that terminates TLS: a CA of this machine, and a serving
//! certificate that it has signed. Those that are there stay as long as they serve.

use std::path::Path;
use std::time::SystemTime;

use super::{OutputFile, SetupPlan, SetupRequest, path};
use crate::config::CertPaths;
use crate::kubeconfig::Error;
use crate::kubeconfig::tree::Node;
use crate::net::files::atomic_write::{PRIVATE, PUBLIC};
use crate::net::tls::local_ca::{self, LocalCa};
use crate::net::tls::pem_files;

/// The local CA and the serving certificate: those that are there, if they serve, else new ones.
/// Returns the `tls` of the listener.
pub(super) fn files(
    request: &SetupRequest,
    dir: &Path,
    plan: &mut SetupPlan,
) -> Result<Node, Error> {
    let ca = CertPaths { cert_file: dir.join("local-ca.crt"), key_file: dir.join("local-ca.key") };
    let serving = dir.join("serving.pem");
    let mut names: Vec<String> = ["127.0.0.1", "::1", "localhost"].map(ToOwned::to_owned).to_vec();
    for name in [&request.host, &request.node_name] {
        if !name.is_empty() && !names.contains(name) {
            names.push(name.clone());
        }
    }
    let known = ca.cert_file.exists() || ca.key_file.exists();
    if known {
        let authority = LocalCa::load(&ca).map_err(|error| {
            format!("{error}; remove {} to have a new local CA", ca.cert_file.display())
        })?;
        let bytes =
            std::fs::read(&ca.cert_file).map_err(|error| Error::at(&ca.cert_file, error))?;
        if !is_served(&serving, &authority, &names, request.now) {
            let issued = authority.issue(&names, request.now)?;
            plan.files.push(serving_file(&serving, &issued));
        }
        plan.local_ca = Some(bytes);
    } else {
        let made = local_ca::create_ca(&format!("jackstay on {}", request.node_name), request.now)?;
        let authority = authority_of(&made)?;
        let issued = authority.issue(&names, request.now)?;
        plan.local_ca = Some(made.certificate.clone().into_bytes());
        for (path, bytes, mode, what) in [
            (&ca.cert_file, made.certificate, PUBLIC, "the local CA, which clients trust"),
            (&ca.key_file, made.key, PRIVATE, "its key, which never leaves this machine"),
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
    Ok(Node::Map(vec![
        ("cert_file".into(), path(&serving)),
        ("key_file".into(), path(&serving)),
        (
            "issuer".into(),
            Node::Map(vec![
                ("cert_file".into(), path(&ca.cert_file)),
                ("key_file".into(), path(&ca.key_file)),
            ]),
        ),
    ]))
}

fn serving_file(serving: &Path, issued: &local_ca::IssuedCertificate) -> OutputFile {
    OutputFile {
        path: serving.to_owned(),
        bytes: issued.pair().into_bytes(),
        mode: PRIVATE,
        what: "the serving certificate and its key, renewed by jackstay",
    }
}

fn authority_of(made: &local_ca::IssuedCertificate) -> Result<LocalCa, Error> {
    LocalCa::from_pem(&made.certificate, &made.key).map_err(Error::from)
}

/// Whether the serving certificate that is there is good: of this CA, for all names, not old.
fn is_served(file: &Path, authority: &LocalCa, names: &[String], now: SystemTime) -> bool {
    let paths = CertPaths { cert_file: file.to_owned(), key_file: file.to_owned() };
    let Ok(loaded) = pem_files::load_cert(&paths) else { return false };
    let has = local_ca::subject_alt_names(&loaded.chain[0]).unwrap_or_default();
    now < local_ca::renewal_time(&loaded.info)
        && names.iter().all(|name| has.contains(name))
        && authority.has_signed(&loaded.chain[0])
}
