//! Plans the identities of a listener in mode `terminate`: where jackstay reads the user's client certificate.
//!
//! A certificate ends, and something renews it: kubelet writes a new file, `kubeadm certs renew` writes into the
//! kubeconfig. The identity names what is renewed. A copy is made only of a kubeconfig that jackstay cannot be expected
//! to read later, with a warning that names its last day.

use std::path::{Path, PathBuf};

use jackstay_config::{COPIED_CERTIFICATE, COPIED_KEY, CertPaths, IdentitySource, KubeconfigUser};
use jackstay_kubeconfig::ResolvedContext;
use jackstay_kubeconfig::{Credential, PemSource};
use jackstay_net::tls::certificate::cert_info;
use jackstay_net::tls::pem_files::{ca_from_pem, valid_certificates};
use jackstay_sys::files::{PRIVATE, PUBLIC};
use jackstay_sys::utc::Utc;

use super::error::{ClientCertificateError, SetupError};
use super::plan::{SetupPlan, SetupRequest};

/// The CA that verifies client certificates, and the identities for requests of the user, if the credential of
/// the user is a certificate.
pub(super) fn plan(
    context: &ResolvedContext,
    request: &SetupRequest,
    directory: &Path,
    ca_file: Option<&Path>,
    plan: &mut SetupPlan,
) -> Result<(Option<PathBuf>, Vec<IdentitySource>), SetupError> {
    let (certificate, key) = match &context.credential {
        Credential::Certificate(certificate, key) => (certificate, key),
        Credential::Exec(_) => return Ok((request.client_ca_file.clone(), Vec::new())),
        _ => return Ok((None, Vec::new())),
    };
    let client_ca = match &request.client_ca_file {
        Some(file) => file.clone(),
        None => verify_with_cluster_ca(context, certificate, ca_file)?,
    };
    let mut identities = vec![match (certificate, key, &request.user_file) {
        (PemSource::File(cert_file), PemSource::File(key_file), _) => {
            CertPaths { cert_file: cert_file.clone(), key_file: key_file.clone() }.into()
        }
        (.., Some(kubeconfig)) => follow(context, certificate, kubeconfig, plan),
        (.., None) => copy(context, (certificate, key), directory, plan),
    }];
    if let Some(file) = &request.awaited {
        plan.notes.push(format!(
            "kubelet has not rotated the certificate of user {:?} yet: {} is used once it exists",
            context.user,
            file.display()
        ));
        identities.push(CertPaths { cert_file: file.clone(), key_file: file.clone() }.into());
    }
    let unused = directory.join(COPIED_KEY);
    if unused.exists() && !identities.iter().any(|identity| identity.is_copy(&request.config)) {
        plan.notes.push(format!(
            "{} and {COPIED_CERTIFICATE} beside it are not used any more: remove them",
            unused.display()
        ));
    }
    Ok((Some(client_ca), identities))
}

/// An identity that follows the certificate in the kubeconfig.
fn follow(
    context: &ResolvedContext,
    certificate: &PemSource,
    kubeconfig: &Path,
    plan: &mut SetupPlan,
) -> IdentitySource {
    let (user, file) = (&context.user, kubeconfig.display());
    plan.notes.push(format!(
        "the identity follows user {user:?} of {file}{}: keep that file, and renew the client certificate in it",
        until(certificate)
    ));
    let (kubeconfig, user) = (kubeconfig.to_owned(), Some(user.clone()));
    IdentitySource::Kubeconfig(KubeconfigUser { kubeconfig, user })
}

/// An identity with a copy of the certificate.
fn copy(
    context: &ResolvedContext,
    (certificate, key): (&PemSource, &PemSource),
    directory: &Path,
    plan: &mut SetupPlan,
) -> IdentitySource {
    let cert_file = directory.join(COPIED_CERTIFICATE);
    plan.warnings.push(format!(
        "the client certificate of user {:?} is copied to {}, and nothing renews the copy{}: run this command again \
         when the certificate in the kubeconfig has been renewed",
        context.user,
        cert_file.display(),
        until(certificate)
    ));
    let cert_file = plan.file_of(certificate, cert_file, PUBLIC, "the user's client certificate");
    let key_file = plan.file_of(key, directory.join(COPIED_KEY), PRIVATE, "its key");
    CertPaths { cert_file, key_file }.into()
}

/// The end of the validity in parentheses; empty if the certificate cannot be read.
fn until(certificate: &PemSource) -> String {
    let pem = certificate.read().ok();
    let leaf = pem.and_then(|pem| valid_certificates(&pem).into_iter().next());
    let info = leaf.and_then(|leaf| cert_info(&leaf).ok());
    info.map_or(String::new(), |info| format!(" (valid until {})", Utc(info.not_after).seconds()))
}

/// Returns the file with the cluster's CA.
///
/// # Errors
/// The user's certificate cannot be verified with that CA.
fn verify_with_cluster_ca(
    context: &ResolvedContext,
    certificate: &PemSource,
    ca_file: Option<&Path>,
) -> Result<PathBuf, SetupError> {
    // In mode `terminate` there is a file, or no plan (`cluster_ca`).
    let ca_file = ca_file.ok_or_else(|| SetupError::NoCa(context.cluster.clone()))?;
    let ca = match &context.ca {
        Some(ca) => ca.read(),
        None => PemSource::File(ca_file.to_owned()).read(),
    };
    let ca = ca.map_err(SetupError::Pem)?;
    let chain = valid_certificates(&certificate.read().map_err(SetupError::Pem)?);
    let verified = match (ca_from_pem(ca_file, &ca), chain.split_first()) {
        (Ok(ca), Some((leaf, rest))) => {
            let now = rustls::pki_types::UnixTime::now();
            let verified = ca.roots.verify_client(leaf, rest, now);
            verified.map(|()| ca_file.to_owned()).map_err(ClientCertificateError::Refused)
        }
        (Err(error), _) => Err(ClientCertificateError::Ca(error)),
        (_, None) => Err(ClientCertificateError::None),
    };
    let user = || context.user.clone();
    verified.map_err(|error| SetupError::ClientCertificate { user: user(), error })
}
