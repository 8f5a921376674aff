//! Tells the service manager that started us how it goes: systemd's notification protocol.
//!
//! One datagram for each message, to the socket that `NOTIFY_SOCKET` names (`sd_notify(3)`). Without
//! one, as in a container or a terminal, every message goes nowhere. Nothing waits for the manager: a
//! message that its queue has no room for is lost, and the next one says the same.
//!
//! Other parents (a shell, s6) hand down a descriptor: a newline is written to it when the process
//! serves, and then it is closed. If the process ends before, the reader sees the end of the file.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The service manager, if there is one.
#[derive(Debug, Default)]
pub struct ServiceManager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
    /// Taken when it is written to.
    ready: Mutex<Option<OwnedFd>>,
}

impl ServiceManager {
    /// The one that the environment names: `NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID`.
    ///
    /// # Errors
    /// It names one that cannot be reached.
    pub fn from_environment() -> io::Result<Self> {
        let address = std::env::var_os("NOTIFY_SOCKET").unwrap_or_default();
        let watchdog = std::env::var("WATCHDOG_USEC").unwrap_or_default();
        let pid = std::env::var("WATCHDOG_PID").unwrap_or_default();
        // The variables may be meant for a parent of ours.
        let is_ours = pid.is_empty() || pid.parse() == Ok(std::process::id());
        Self::at(&address, if is_ours { watchdog.parse().ok() } else { None })
    }

    /// The one at this socket: a path, or an abstract name after `@`; none if it is empty. It wants a
    /// sign of life at least every `watchdog` microseconds.
    ///
    /// # Errors
    /// It cannot be reached.
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
        Ok(Self { socket: Some(socket), watchdog, ready: Mutex::default() })
    }

    /// Also writes to `ready`, once, when the process serves.
    #[must_use]
    pub fn with_ready_descriptor(self, ready: Option<OwnedFd>) -> Self {
        Self { ready: Mutex::new(ready), ..self }
    }

    /// Says that the process serves (`READY=1`), at the start and after each reload.
    pub fn notify_ready(&self) {
        self.notify("READY=1");
        let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ready) = ready
            && let Err(error) = File::from(ready).write_all(b"\n")
        {
            tracing::warn!(%error, "cannot write to the descriptor of --ready-fd");
        }
    }

    /// Sends assignments, one a line, as `READY=1` or `STOPPING=1`.
    pub fn notify(&self, message: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(message.as_bytes())
        {
            tracing::warn!(%error, message, "the service manager does not take a message");
        }
    }

    /// Says that the configuration is being read again; `READY=1` says that it was.
    pub fn notify_reloading(&self) {
        if self.socket.is_some() {
            // systemd tells this reload from an earlier one by the time (`Type=notify-reload`).
            self.notify(&format!("RELOADING=1\nMONOTONIC_USEC={}", monotonic_usec()));
        }
    }

    /// How long it waits for `WATCHDOG=1` before it takes us for dead; `None` if it does not watch.
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }
}

/// `CLOCK_MONOTONIC` in microseconds, which [`std::time::Instant`] does not show.
fn monotonic_usec() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec at a pointer to a live one.
    #[allow(unsafe_code)]
    let result = unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    if result == 0 { now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 64];
        let length = socket.recv(&mut buffer).expect("a message");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }

    #[test]
    fn by_path() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).expect("a socket");
        let service = ServiceManager::at(path.as_os_str(), Some(3_000_000)).expect("connected");
        assert_eq!(service.watchdog(), Some(Duration::from_secs(3)));
        service.notify("READY=1\nSTATUS=serving");
        assert_eq!(heard(&manager), "READY=1\nSTATUS=serving");
        service.notify_reloading();
        let reloading = heard(&manager);
        let usec = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect("a time");
        assert!(usec.parse::<u64>().expect("a number") > 0);
    }

    #[test]
    fn by_abstract_name() {
        let name = format!("jackstay-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a name");
        let manager = UnixDatagram::bind_addr(&address).expect("a socket");
        let service = ServiceManager::at(OsStr::new(&format!("@{name}")), None).expect("connected");
        assert_eq!(service.watchdog(), None);
        service.notify("STOPPING=1");
        assert_eq!(heard(&manager), "STOPPING=1");
    }

    #[test]
    fn none_and_gone() {
        let none = ServiceManager::at(OsStr::new(""), Some(1)).expect("none");
        assert_eq!(none.watchdog(), None);
        none.notify("READY=1");
        ServiceManager::at(OsStr::new("/nonexistent/notify"), None).expect_err("nobody there");
    }

    #[test]
    fn a_full_queue_does_not_block() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let _deaf = UnixDatagram::bind(&path).expect("a socket");
        let service = ServiceManager::at(path.as_os_str(), None).expect("connected");
        for _ in 0..10_000 {
            service.notify("WATCHDOG=1");
        }
    }
}
