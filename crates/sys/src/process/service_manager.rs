//! Reports readiness and liveness to the service manager: systemd's notification protocol.
//!
//! Each message is one datagram to the socket that `NOTIFY_SOCKET` names (`sd_notify(3)`). Without that
//! variable, as in a container or a terminal, messages are discarded. The socket is non-blocking, so a
//! message is lost when the manager's receive queue is full. `WATCHDOG=1` is sent periodically, so losing one
//! is harmless. The crate sd-notify sends on a blocking socket, which would stall the control loop while the
//! manager does not read.
//!
//! The manager can also keep open descriptors (`FDSTORE=1`), and passes them to the next process of the service: after a
//! crash, clients wait in the accept queue instead of being refused. It compares the files, so a descriptor that it has
//! already is not stored twice (`service_add_fd_store` of systemd 239 to 257).
//!
//! Other supervisors (s6, a shell script) pass a descriptor instead. When the process is ready, a newline is
//! written to it and it is closed. If the process ends before, the reader gets the end of the file.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::descriptor_passing;

/// The connection to the service manager, if there is one.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
    /// The descriptor of `--ready-fd`, until the newline is written.
    ready: Mutex<Option<OwnedFd>>,
    /// The descriptors that the manager keeps for this process.
    stored: Mutex<StoredNames>,
}

/// What this process has stored.
#[derive(Debug, Default)]
struct StoredNames {
    names: BTreeSet<String>,
    /// A message was lost, so that the manager may lack a descriptor.
    incomplete: bool,
}

impl ServiceManager {
    /// Connects to the manager that the environment names: `NOTIFY_SOCKET`, `WATCHDOG_USEC`,
    /// `WATCHDOG_PID`.
    ///
    /// # Errors
    /// The socket does not exist or refuses the connection.
    pub fn from_environment() -> io::Result<Self> {
        let address = std::env::var_os("NOTIFY_SOCKET").unwrap_or_default();
        let watchdog = std::env::var("WATCHDOG_USEC").unwrap_or_default();
        let pid = std::env::var("WATCHDOG_PID").unwrap_or_default();
        // `WATCHDOG_USEC` may be meant for a parent process.
        let is_ours = pid.is_empty() || pid.parse() == Ok(std::process::id());
        Self::at(&address, if is_ours { watchdog.parse().ok() } else { None })
    }

    /// Connects to the manager at `address`: a path, or an abstract name after `@`; empty if there is no
    /// manager. The manager expects `WATCHDOG=1` at least every `watchdog` microseconds.
    ///
    /// # Errors
    /// The socket does not exist or refuses the connection.
    pub fn at(address: &OsStr, watchdog: Option<u64>) -> io::Result<Self> {
        let address = match address.as_bytes() {
            [] => return Ok(Self::default()),
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(address)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        let watchdog = watchdog.filter(|&usec| usec > 0).map(Duration::from_micros);
        Ok(Self { socket: Some(socket), watchdog, ..Self::default() })
    }

    /// Also reports the first readiness by a newline on `ready`.
    #[must_use]
    pub fn with_ready_descriptor(self, ready: Option<OwnedFd>) -> Self {
        Self { ready: Mutex::new(ready), ..self }
    }

    /// Reports readiness (`READY=1`): at the start, and at the end of each reload.
    pub fn notify_ready(&self) {
        self.notify("READY=1");
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ready) = ready
            && let Err(error) = File::from(ready).write_all(b"\n")
        {
            tracing::warn!(%error, "cannot write to the descriptor of --ready-fd");
        }
    }

    /// Sends a message of assignments, one per line, such as `STOPPING=1`.
    pub fn notify(&self, message: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(message.as_bytes())
        {
            tracing::warn!(%error, message, "service manager did not accept a notification");
        }
    }

    /// Has the manager keep these descriptors, several for each name, and none of another name that this process has
    /// stored. A name has no colon (`sd_pid_notify_with_fds(3)`).
    pub fn keep(&self, descriptors: &[(String, Vec<BorrowedFd<'_>>)]) {
        let Some(socket) = &self.socket else { return };
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        stored.names.retain(|name| {
            let is_kept = descriptors.iter().any(|(kept, _)| kept == name);
            if !is_kept {
                self.discard(name);
            }
            is_kept
        });
        for (name, files) in descriptors {
            if !stored.names.insert(name.clone()) {
                continue;
            }
            let message = format!("FDSTORE=1\nFDNAME={name}");
            for file in files {
                let sent = descriptor_passing::send_with(socket.as_fd(), message.as_bytes(), *file);
                if let Err(error) = sent {
                    tracing::warn!(%error, name, "service manager did not accept a descriptor");
                    stored.incomplete = true;
                }
            }
        }
    }

    /// Has the manager close the descriptors with this name, whichever process has stored them.
    pub fn discard(&self, name: &str) {
        self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}"));
    }

    /// Has the manager close every descriptor that this process has stored.
    pub fn discard_all(&self) {
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        for name in std::mem::take(&mut stored.names) {
            self.discard(&name);
        }
    }

    /// Leaves what this process has stored to the process that has taken over, and stores nothing any more.
    pub fn leave_descriptors(&self) {
        *self.stored.lock().unwrap_or_else(PoisonError::into_inner) = StoredNames::default();
    }

    /// Whether the next process of the service gets every descriptor of the last [`Self::keep`].
    pub fn keeps_descriptors(&self) -> bool {
        let stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        !stored.names.is_empty() && !stored.incomplete
    }

    /// Reports the start of a reload; [`Self::notify_ready`] reports its end.
    pub fn notify_reloading(&self) {
        if self.socket.is_some() {
            // systemd identifies a reload by this time (`Type=notify-reload`).
            self.notify(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_usec()));
        }
    }

    /// Time without `WATCHDOG=1` after which the manager restarts the process; `None` if it does not.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }
}

/// `CLOCK_MONOTONIC` in microseconds, which [`std::time::Instant`] does not expose.
fn monotonic_usec() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    #[test]
    fn notify_with_a_path_sends_one_datagram_per_message() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).expect("a socket");
        let service = ServiceManager::at(path.as_os_str(), Some(3_000_000)).expect("connected");
        assert_eq!(service.watchdog(), Some(Duration::from_secs(3)));
        service.notify("READY=1\nSTATUS=serving");
        assert_eq!(received(&manager), "READY=1\nSTATUS=serving");
        service.notify_reloading();
        let reloading = received(&manager);
        let usec = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("a time");
        assert!(usec.parse::<u64>().expect("a number") > 0);
    }

    #[test]
    fn notify_with_an_abstract_name_sends_a_datagram() {
        let name = format!("jackstay-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let manager = UnixDatagram::bind_addr(&address).expect("a socket");
        let service = ServiceManager::at(OsStr::new(&format!("@{name}")), None).expect("connected");
        assert_eq!(service.watchdog(), None);
        service.notify("STOPPING=1");
        assert_eq!(received(&manager), "STOPPING=1");
    }

    #[test]
    fn at_empty_address_discards_messages_and_missing_socket_fails() {
        let none = ServiceManager::at(OsStr::new(""), Some(1)).expect("none");
        assert_eq!(none.watchdog(), None);
        none.notify("READY=1");
        ServiceManager::at(OsStr::new("/nonexistent/notify"), None).expect_err("no such socket");
    }

    #[test]
    fn keep_sends_new_descriptors_and_removes_those_that_are_not_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).expect("a socket");
        manager.set_nonblocking(true).expect("non-blocking");
        let service = ServiceManager::at(path.as_os_str(), None).expect("connected");
        let file = || File::open("/dev/null").expect("a file");
        let (first, second) = (file(), file());
        assert!(!service.keeps_descriptors());
        let keep = |names: &[&str]| {
            let both = || vec![first.as_fd(), second.as_fd()];
            let named: Vec<_> = names.iter().map(|name| ((*name).to_owned(), both())).collect();
            service.keep(&named);
        };
        let messages = || {
            let mut buffer = [0; 64];
            let all =
                std::iter::from_fn(|| manager.recv(&mut buffer).ok().map(|n| buffer[..n].to_vec()));
            all.map(|one| String::from_utf8(one).expect("text").replace('\n', " "))
                .collect::<Vec<_>>()
        };
        keep(&["a", "b"]);
        let stored = |name| format!("FDSTORE=1 FDNAME={name}");
        assert_eq!(messages(), [stored("a"), stored("a"), stored("b"), stored("b")]);
        assert!(service.keeps_descriptors());
        keep(&["b", "c"]);
        assert_eq!(messages(), ["FDSTOREREMOVE=1 FDNAME=a".to_owned(), stored("c"), stored("c")]);
        service.discard_all();
        assert_eq!(messages(), ["FDSTOREREMOVE=1 FDNAME=b", "FDSTOREREMOVE=1 FDNAME=c"]);
        keep(&["c"]);
        messages();
        service.leave_descriptors();
        service.discard_all();
        assert_eq!(messages(), Vec::<String>::new());
        assert!(!service.keeps_descriptors());
    }

    #[test]
    fn notify_with_full_queue_does_not_block() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let _never_read = UnixDatagram::bind(&path).expect("a socket");
        let service = ServiceManager::at(path.as_os_str(), None).expect("connected");
        for _ in 0..10_000 {
            service.notify("WATCHDOG=1");
        }
    }
}
