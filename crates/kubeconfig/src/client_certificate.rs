//! Reads the client certificate of an identity: from PEM files, or from the user of a kubeconfig, which holds it as
//! data or names its files. `kubeadm certs renew` writes a renewed certificate into the kubeconfig.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use jackstay_config::{IdentitySource, KubeconfigUser};
use jackstay_net::tls::file_error::TlsFileError;
use jackstay_net::tls::pem_files::{self, LoadedCert, cert_from_pem};
use jackstay_sys::files;
use zeroize::Zeroizing;

use super::credential::{PemSource, UserCredentials};
use super::file::{KubeconfigFile, MAX_KUBECONFIG};
use crate::model::{AuthInfo, Cluster, Kubeconfig};

/// Reads the certificate of an identity and its key.
///
/// # Errors
/// A file cannot be used, or the kubeconfig has no such user or no client certificate of it.
pub fn load(source: &IdentitySource) -> Result<LoadedCert, TlsFileError> {
    match source {
        IdentitySource::Files(paths) => pem_files::load_cert(paths),
        IdentitySource::Kubeconfig(user) => of_user(user),
    }
}

fn of_user(source: &KubeconfigUser) -> Result<LoadedCert, TlsFileError> {
    let path = source.kubeconfig.as_path();
    let invalid = |message: String| TlsFileError::invalid(path, message);
    let bytes = files::read(path, MAX_KUBECONFIG).map(Zeroizing::new);
    let bytes = bytes.map_err(|error| TlsFileError::io(path, &error))?;
    let file = KubeconfigFile::parse(path, &bytes).map_err(|error| match error {
        super::KubeconfigError::Invalid(_, content) => invalid(content.to_string()),
        error => invalid(error.to_string()),
    })?;
    let config = file.with_absolute_paths();
    let name = match &source.user {
        Some(name) => name.as_str(),
        None => current_user(&config).ok_or_else(|| {
            invalid("its current context names no user: set `user` of the identity".to_owned())
        })?,
    };
    let user = user_of(&config, name).ok_or_else(|| match file.mistake("users", name) {
        Some(mistake) => invalid(mistake.to_string()),
        None => invalid(format!("has no user {name:?}")),
    })?;
    let credentials = UserCredentials::new(user, &Cluster::default())
        .map_err(|error| invalid(format!("user {name:?}: {error}")))?;
    let (certificate, key) = credentials
        .certificate
        .ok_or_else(|| invalid(format!("user {name:?} has no client certificate")))?;
    let read = |pem: &PemSource, key: &str| -> Result<_, TlsFileError> {
        let origin = format!("{}: user {name:?}: {key}-data", path.display());
        let pem_bytes = match pem {
            PemSource::Inline(bytes) => bytes.clone(),
            PemSource::File(file) => pem_files::read(file)?,
        };
        Ok((pem.origin(origin), pem_bytes))
    };
    let (cert_at, cert_pem) = read(&certificate, "client-certificate")?;
    // A file with both is read once, so that a replacement cannot mix two versions.
    let (key_at, key_pem) = match (&certificate, &key) {
        (PemSource::File(certificate), PemSource::File(key)) if certificate == key => {
            (cert_at.clone(), cert_pem.clone())
        }
        _ => read(&key, "client-key")?,
    };
    let mut loaded = cert_from_pem((&cert_at, &cert_pem), (&key_at, &key_pem))?;
    loaded.more_files = [certificate, key].iter().filter_map(file_of).collect();
    Ok(loaded)
}

fn file_of(pem: &PemSource) -> Option<PathBuf> {
    match pem {
        PemSource::Inline(_) => None,
        PemSource::File(file) => Some(file.clone()),
    }
}

fn user_of<'a>(config: &'a Kubeconfig, name: &str) -> Option<&'a AuthInfo> {
    config.auth_infos.iter().find(|named| named.name == name)?.auth_info.as_ref()
}

fn current_user(config: &Kubeconfig) -> Option<&str> {
    let current = config.current_context.as_deref()?;
    let context = config.contexts.iter().find(|named| named.name == current)?;
    context.context.as_ref()?.user.as_deref().filter(|user| !user.is_empty())
}

/// Directories whose files are private to a user or a session: a unit with `ProtectHome=` and `PrivateTmp=` does not
/// see them, and temporary files are deleted.
const PRIVATE: [&str; 5] = ["/home", "/root", "/run/user", "/tmp", "/var/tmp"];

/// Whether a process that reads the configuration `config` can be expected to read `kubeconfig` for years: it is a
/// regular file with a name of its own, its owner owns the files of the process, and it is not in a private directory
/// while these are elsewhere.
pub fn can_be_followed(kubeconfig: &Path, config: &Path) -> bool {
    let is_private = |path: &Path| PRIVATE.iter().any(|directory| path.starts_with(directory));
    let uid = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.uid());
    let is_descriptor = ["/dev", "/proc"].iter().any(|directory| kubeconfig.starts_with(directory));
    kubeconfig.is_file()
        && !is_descriptor
        && uid(kubeconfig) == uid(Path::new("/proc/self"))
        && (!is_private(kubeconfig) || is_private(config))
}

#[cfg(test)]
mod tests {
    use jackstay_apiserver::pki::{Pki, Subject, kubeconfig};

    use super::*;

    fn admin() -> (Pki, jackstay_apiserver::pki::Issued) {
        let pki = Pki::new("kubernetes").unwrap();
        let issued = pki.client(&Subject::admin()).unwrap();
        (pki, issued)
    }

    #[test]
    fn load_reads_data_and_files_of_a_user() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.conf");
        let (pki, issued) = admin();
        let text = kubeconfig("https://10.0.0.1:6443", &pki.ca_pem(), Some(&issued), None);
        std::fs::write(&path, text).unwrap();
        let source = |user: Option<&str>| {
            let user = user.map(ToOwned::to_owned);
            IdentitySource::Kubeconfig(KubeconfigUser { kubeconfig: path.clone(), user })
        };
        for user in [None, Some("demo")] {
            let loaded = load(&source(user)).unwrap();
            assert_eq!(loaded.info.subject.common_name(), Some("kubernetes-admin"));
            assert!(loaded.more_files.is_empty(), "{:?}", loaded.more_files);
        }
        // The user names the file that kubelet rotates, relative to the kubeconfig.
        std::fs::write(dir.path().join("c.pem"), issued.cert_pem + &issued.key_pem).unwrap();
        let names = "users: [{name: demo, user: {client-certificate: c.pem, client-key: c.pem}}]\n";
        std::fs::write(&path, names).unwrap();
        let loaded = load(&source(Some("demo"))).unwrap();
        assert_eq!(loaded.more_files, [dir.path().join("c.pem"), dir.path().join("c.pem")]);
        let error = load(&source(None)).unwrap_err();
        assert!(error.to_string().contains("names no user"), "{error}");
        std::fs::remove_file(dir.path().join("c.pem")).unwrap();
        assert!(load(&source(Some("demo"))).unwrap_err().is_missing());
        std::fs::remove_file(&path).unwrap();
        assert!(load(&source(Some("demo"))).unwrap_err().is_missing());
    }

    #[test]
    fn can_be_followed_refuses_pipes_descriptors_and_private_directories_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("config");
        std::fs::write(&kubeconfig, "").unwrap();
        let beside = dir.path().join("jackstay.yaml");
        let etc = Path::new("/etc/jackstay/jackstay.yaml");
        for (kubeconfig, config, expected) in [
            (kubeconfig.as_path(), beside.as_path(), true),
            (&kubeconfig, etc, !dir.path().starts_with("/tmp")),
            (&dir.path().join("missing"), &beside, false),
            (dir.path(), &beside, false),
            (Path::new("/dev/null"), &beside, false),
            (Path::new("/proc/self/status"), &beside, false),
        ] {
            assert_eq!(can_be_followed(kubeconfig, config), expected, "{kubeconfig:?} {config:?}");
        }
    }
}
