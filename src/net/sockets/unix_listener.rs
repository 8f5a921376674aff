//! Listening Unix sockets on the file system.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

/// Listens at `path`, for this user (and root) only, in the place of whatever listened there. The
/// directory is made if it is missing.
///
/// Whole or not at all: a client that connects meanwhile finds the old socket or this one.
///
/// # Errors
/// The directory cannot be written.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&new);
    let open = || {
        let listener = UnixListener::bind(&new)?;
        std::fs::set_permissions(&new, PermissionsExt::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        std::fs::rename(&new, path)?;
        Ok(listener)
    };
    open().inspect_err(|_| drop(std::fs::remove_file(&new)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn listen_replaces_a_socket_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run").join("admin.sock");
        let first = listen(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let second = listen(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert!(second.accept().is_ok());
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
