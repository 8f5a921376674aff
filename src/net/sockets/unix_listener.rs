//! Listening Unix sockets in the file system.

use std::fs::{Permissions, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;

/// Listens at `path`, for this user and root only, and replaces a socket that exists there. Creates the
/// directory if it is missing.
///
/// The socket is renamed into place, so a client that connects meanwhile reaches the old socket or the
/// new one.
///
/// # Errors
/// The directory cannot be written, or the path is too long for a Unix socket (108 bytes, unix(7)).
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    // A path that is too long for a socket address could be renamed to, but not be connected to.
    SocketAddr::from_pathname(path)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let new = tempfile::Builder::new().prefix(".jackstay.").make_in(directory, |new| {
        let listener = UnixListener::bind(new)?;
        set_permissions(new, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })?;
    new.persist(path).map_err(|failed| failed.error)
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
