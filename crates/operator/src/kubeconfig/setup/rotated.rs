//! Finds the certificate that kubelet rotates, for a kubeconfig that holds the first one as data.
//!
//! With `rotateCertificates`, kubelet writes each new certificate to its `--cert-dir` and never changes the kubeconfig
//! (kubernetes/kubeadm#1317): the certificate in it ends while kubelet works on.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use jackstay_config::CertPaths;
use jackstay_kubeconfig::ResolvedContext;
use jackstay_kubeconfig::{Credential, PemSource};
use jackstay_net::tls::certificate::{CertInfo, Validity, cert_info};
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files::{self, LoadedCert, valid_certificates};
use jackstay_sys::utc::Utc;
use rustls::pki_types::UnixTime;

/// The default of kubelet's `--cert-dir` (`NewKubeletFlags` in `cmd/kubelet/app/options/options.go`).
pub const CERTIFICATE_DIRECTORY: &str = "/var/lib/kubelet/pki";
/// The link to the present certificate and key of kubelet (client-go `util/certificate/certificate_store.go`).
const CURRENT: &str = "kubelet-client-current.pem";
/// The prefix of a node's user name (Node authorizer).
const NODE: &str = "system:node:";

/// The directories in which a rotated certificate may be.
#[derive(Debug, Clone, Default)]
pub struct CertificateDirectories {
    /// `--cert-dir` of the kubelet that runs with the kubeconfig. It may write its first rotated certificate later.
    pub of_kubelet: Option<PathBuf>,
    /// Further directories.
    pub others: Vec<PathBuf>,
}

/// The outcome of the search.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Rotated {
    /// The file that kubelet rotates, with certificate and key.
    pub file: Option<PathBuf>,
    /// The file that kubelet is yet to write.
    pub awaited: Option<PathBuf>,
    /// Messages to the user.
    pub notes: Vec<String>,
}

/// Finds the rotated certificate of a user of a node whose certificate is data in the kubeconfig. It must have the same
/// subject, be valid at `now`, belong to its key, and be verified by `client_ca`, which is the cluster's CA by default.
/// One that is not in the directory of the running kubelet must not end before the one in the kubeconfig.
pub fn find(
    context: &ResolvedContext,
    directories: &CertificateDirectories,
    client_ca: Option<&Path>,
    now: SystemTime,
) -> Rotated {
    let mut found = Rotated::default();
    let Some(embedded) = embedded(context) else { return found };
    let ca = client_ca.map(ToOwned::to_owned).map(PemSource::File).or_else(|| context.ca.clone());
    for directory in directories.of_kubelet.iter().chain(&directories.others) {
        let is_of_kubelet = directories.of_kubelet.as_ref() == Some(directory);
        let file = directory.join(CURRENT);
        let paths = CertPaths { cert_file: file.clone(), key_file: file.clone() };
        let problem = match pem_files::load_cert(&paths) {
            Ok(loaded) => match unusable(&loaded, (&embedded, is_of_kubelet), ca.as_ref(), now) {
                None => {
                    found.notes.push(format!(
                        "the certificate in the kubeconfig is not renewed there (valid until {}): the identity is {}, \
                         which kubelet rotates",
                        Utc(embedded.not_after).seconds(),
                        file.display()
                    ));
                    return Rotated { file: Some(file), awaited: None, ..found };
                }
                Some(problem) => format!("{}: {problem}", file.display()),
            },
            Err(error) if error.is_missing() => {
                if is_of_kubelet {
                    found.awaited = Some(file);
                }
                continue;
            }
            Err(error) => error.to_string(),
        };
        found.notes.push(format!("not used as the rotated certificate of kubelet: {problem}"));
    }
    found
}

/// The certificate of a node that the kubeconfig holds as data.
fn embedded(context: &ResolvedContext) -> Option<CertInfo> {
    let Credential::Certificate(PemSource::Inline(pem), _) = &context.credential else {
        return None;
    };
    let info = cert_info(valid_certificates(pem).first()?).ok()?;
    let is_node = info.subject.common_name().is_some_and(|name| name.starts_with(NODE));
    is_node.then_some(info)
}

/// Why a certificate, which may be that of the running kubelet, does not replace the one in the kubeconfig.
fn unusable(
    loaded: &LoadedCert,
    (embedded, is_of_kubelet): (&CertInfo, bool),
    ca: Option<&PemSource>,
    now: SystemTime,
) -> Option<String> {
    let info = &loaded.info;
    if info.subject != embedded.subject {
        return Some(format!("its subject is {}, not {}", info.subject, embedded.subject));
    }
    if let Some(invalidity) = info.invalidity(now) {
        return Some(invalidity);
    }
    let is_valid = embedded.validity(now) == Validity::Valid;
    if !is_of_kubelet && is_valid && info.not_after < embedded.not_after {
        return Some("it ends before the certificate in the kubeconfig".to_owned());
    }
    // Without a CA that can be read, the plan reports why.
    let pem = ca.and_then(|ca| Some((ca.origin("the cluster's CA".to_owned()), ca.read().ok()?)));
    let ca: Option<Result<_, TlsFileError>> =
        pem.map(|(origin, pem)| pem_files::ca_from_pem(&origin, &pem));
    let (Some(Ok(ca)), Some((leaf, rest))) = (ca, loaded.chain.split_first()) else { return None };
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let verified = ca.roots.verify_client(leaf, rest, UnixTime::since_unix_epoch(since));
    verified.err().map(|refusal| refusal.to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jackstay_apiserver::pki::{Issued, Pki, Subject, Validity as Period, kubeconfig};
    use jackstay_kubeconfig::KubeconfigFile;
    use jackstay_sys::utc::wall_clock;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    fn node(name: &str) -> Subject {
        Subject { user: format!("{NODE}{name}"), groups: vec!["system:nodes".into()] }
    }

    fn context(pki: &Pki, embedded: &Issued) -> ResolvedContext {
        let text = kubeconfig("https://10.0.0.1:6443", &pki.ca_pem(), Some(embedded), None);
        let file = KubeconfigFile::parse(Path::new("/kubelet.conf"), text.as_bytes()).unwrap();
        ResolvedContext::resolve(file.config(), None).unwrap()
    }

    #[test]
    fn find_takes_a_valid_certificate_of_the_same_node_and_ca() {
        let dir = tempfile::tempdir().unwrap();
        let now = wall_clock();
        let days = |from: u32, to: u32| Period {
            not_before: now - DAY * 100 + DAY * from,
            not_after: now - DAY * 100 + DAY * to,
        };
        let (pki, other) = (Pki::new("kubernetes").unwrap(), Pki::new("other").unwrap());
        let issue = |pki: &Pki, name: &str, days| pki.client_valid(&node(name), days).unwrap();
        let context = context(&pki, &issue(&pki, "n1", days(0, 110)));
        let expired = self::context(&pki, &issue(&pki, "n1", days(0, 90)));
        let (here, of_kubelet) = (
            CertificateDirectories { of_kubelet: None, others: vec![dir.path().to_owned()] },
            CertificateDirectories { of_kubelet: Some(dir.path().to_owned()), others: vec![] },
        );
        let file = dir.path().join(CURRENT);
        let find = |context, directories| find(context, directories, None, now);

        assert_eq!(find(&context, &here), Rotated::default());
        let awaited = find(&context, &of_kubelet);
        assert_eq!((awaited.file, awaited.awaited), (None, Some(file.clone())));

        let pem = |issued: Issued| issued.cert_pem + &issued.key_pem;
        let of_node = |from, to| pem(issue(&pki, "n1", days(from, to)));
        let (good, early) = (of_node(60, 160), of_node(60, 101));
        let mixed =
            issue(&pki, "n1", days(60, 160)).cert_pem + &issue(&pki, "n1", days(1, 2)).key_pem;
        for (content, context, directories, expected) in [
            (&good, &context, &here, None),
            (&good, &expired, &here, None),
            (&early, &expired, &here, None),
            // kubelet itself uses it.
            (&early, &context, &of_kubelet, None),
            (&early, &context, &here, Some("it ends before the certificate in the kubeconfig")),
            (&mixed, &context, &here, Some("the private key does not belong")),
            (
                &pem(issue(&pki, "n2", days(60, 160))),
                &context,
                &here,
                Some("its subject is CN=system:node:n2"),
            ),
            (&of_node(60, 95), &expired, &of_kubelet, Some("expired")),
            (&of_node(105, 160), &context, &here, Some("not valid for another")),
            (&pem(issue(&other, "n1", days(60, 160))), &context, &here, Some("other")),
        ] {
            std::fs::write(&file, content).unwrap();
            let found = find(context, directories);
            let notes = found.notes.join("\n");
            match expected {
                None => assert_eq!(found.file.as_deref(), Some(file.as_path()), "{notes}"),
                Some(why) => assert!(found.file.is_none() && notes.contains(why), "{why}: {notes}"),
            }
        }
        // An administrator is no node.
        let admin = pki.client(&Subject::admin()).unwrap();
        let found = find(&self::context(&pki, &admin), &of_kubelet);
        assert_eq!(found, Rotated::default());
    }
}
