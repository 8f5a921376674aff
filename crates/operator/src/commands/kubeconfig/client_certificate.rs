//! Finds what renews the client certificate of a user whose kubeconfig holds it as data: kubelet, or a later change of
//! the kubeconfig.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_kubeconfig::client_certificate::can_be_followed;
use jackstay_kubeconfig::{Credential, KubeconfigFiles, PemSource, ResolvedContext};
use jackstay_net::tls::certificate::cert_info;
use jackstay_net::tls::pem_files::valid_certificates;
use jackstay_sys::utc::Utc;

use super::args::KubeconfigArgs;
#[cfg(feature = "doctor")]
use crate::install::kubelet;
use crate::kubeconfig::setup::SetupMode;
use crate::kubeconfig::setup::rotated::{self, CERTIFICATE_DIRECTORY, CertificateDirectories};

/// Where the identity gets its certificate, besides the credential of the context.
#[derive(Debug, Default)]
pub(super) struct CertificateSource {
    /// The kubeconfig that the identity follows.
    pub(super) followed: Option<PathBuf>,
    /// The file that kubelet is yet to write.
    pub(super) awaited: Option<PathBuf>,
    /// Messages to the user.
    pub(super) notes: Vec<String>,
}

/// Finds what renews the certificate of the context's user. A file that kubelet rotates becomes the credential of the
/// context.
pub(super) fn find(
    args: &KubeconfigArgs,
    files: &KubeconfigFiles,
    context: &mut ResolvedContext,
    config: Option<&Path>,
) -> CertificateSource {
    let Credential::Certificate(certificate, key) = &context.credential else {
        return CertificateSource::default();
    };
    let is_data = |pem: &PemSource| matches!(pem, PemSource::Inline(_));
    let Some(config) = config.filter(|_| is_data(certificate) || is_data(key)) else {
        return CertificateSource::default();
    };
    let user_file = files.file_of_user(&context.user).map(|file| file.path().to_owned());
    let kubeconfig = user_file.clone().unwrap_or_default();
    let client_ca = args.client_ca_file.as_deref().or(args.ca_file.as_deref());
    let found = rotated::find(context, &directories(&kubeconfig), client_ca, SystemTime::now());
    let mut source = CertificateSource { notes: found.notes, ..CertificateSource::default() };
    if let Some(file) = found.file {
        let pem = || PemSource::File(file.clone());
        context.credential = Credential::Certificate(pem(), pem());
        return source;
    }
    if args.mode != Some(SetupMode::Terminate) {
        return source;
    }
    let can_follow = !args.kubeconfig_is_hidden;
    source.followed = user_file.filter(|file| can_follow && can_be_followed(file, config));
    source.awaited = found.awaited;
    if !args.in_place {
        source.notes.extend(copy_note(context));
    }
    source
}

/// What follows from the copy of the certificate in the new kubeconfig.
fn copy_note(context: &ResolvedContext) -> Option<String> {
    let Credential::Certificate(certificate, _) = &context.credential else { return None };
    let pem = certificate.read().ok()?;
    let info = cert_info(valid_certificates(&pem).first()?).ok()?;
    Some(format!(
        "the new kubeconfig has a copy of the client certificate of user {:?}, with which its clients authenticate to \
         jackstay until {}: run this command again with --force when the certificate has been renewed, or use --in-place",
        context.user,
        Utc(info.not_after).seconds()
    ))
}

/// The directories in which the kubelet with this kubeconfig may have rotated certificates.
fn directories(kubeconfig: &Path) -> CertificateDirectories {
    #[cfg(feature = "doctor")]
    let of_kubelet = kubelet::certificate_directory(Path::new("/proc"), kubeconfig);
    #[cfg(not(feature = "doctor"))]
    let of_kubelet: Option<PathBuf> = None;
    let beside = kubeconfig.parent().unwrap_or(Path::new("/"));
    let mut others = vec![beside.join("pki"), beside.to_owned(), CERTIFICATE_DIRECTORY.into()];
    others.retain(|directory| of_kubelet.as_ref() != Some(directory));
    CertificateDirectories { of_kubelet, others }
}
