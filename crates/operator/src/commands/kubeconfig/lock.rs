//! The lock that kubectl takes while it changes a kubeconfig: the file `<kubeconfig>.lock`, which must not exist
//! (client-go, `clientcmd.lockFile`).

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use jackstay_kubeconfig::KubeconfigFile;

use super::output::Failure;
use crate::kubeconfig::setup::OutputFile;

/// A lock, which is released when this is dropped.
pub(super) struct KubeconfigLock(PathBuf);

/// Locks the kubeconfigs that exist and are about to change, and checks that they are as they were read.
///
/// # Errors
/// Another process changes one, or has changed it.
pub(super) fn acquire<'a>(
    outputs: impl IntoIterator<Item = &'a OutputFile>,
    files: &[&KubeconfigFile],
) -> Result<Vec<KubeconfigLock>, Failure> {
    let mut locks = Vec::new();
    for output in outputs.into_iter().filter(|output| output.path.exists()) {
        let mut path = output.path.clone().into_os_string();
        path.push(".lock");
        let path = PathBuf::from(path);
        match OpenOptions::new().write(true).create_new(true).mode(0o000).open(&path) {
            Ok(_) => locks.push(KubeconfigLock(path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                return Err(Failure::Write(format!(
                    "nothing written: {} is locked by kubectl or another program: run this again, or remove {} if \
                     that program was killed",
                    output.path.display(),
                    path.display()
                )));
            }
            // In a directory that cannot be written kubectl takes no lock either.
            Err(_) => {}
        }
        if files.iter().any(|file| file.path() == output.path && !file.is_unchanged()) {
            return Err(Failure::Write(format!(
                "nothing written: another program has changed {} since it was read: run this again",
                output.path.display()
            )));
        }
    }
    Ok(locks)
}

impl Drop for KubeconfigLock {
    fn drop(&mut self) {
        // A lock that cannot be removed is reported by the next program that takes it.
        let _ = std::fs::remove_file(&self.0);
    }
}
