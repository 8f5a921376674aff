//! Listening sockets that were opened by another process: by the service manager, or by the jackstay that
//! this process replaces.
//!
//! Sockets are found by their addresses, so the sender need not know the names of listeners. A socket keeps
//! its accept queue when it changes its process, so no waiting connection is lost.

use std::collections::BTreeSet;
use std::env;
use std::error::Error;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{Domain, SockRef, Type};

/// The first descriptor that a service manager passes (`SD_LISTEN_FDS_START`, `sd_listen_fds(3)`).
const FIRST_PASSED_FD: RawFd = 3;
/// Maximum of `LISTEN_FDS`; systemd's own limit is in the hundreds.
const MAX_LISTEN_FDS: RawFd = 1024;

/// Why a descriptor is not used as an inherited socket.
#[derive(Debug)]
pub enum InheritError {
    /// It is not a listening TCP socket.
    NotListening,
    /// The kernel refuses an operation on it.
    Io(io::Error),
}

impl fmt::Display for InheritError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotListening => f.write_str("not a listening TCP socket"),
            Self::Io(error) => error.fmt(f),
        }
    }
}

impl Error for InheritError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotListening => None,
            Self::Io(error) => Some(error),
        }
    }
}

/// Why the descriptor that the command line names is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DescriptorError {
    /// It is a standard stream.
    StandardStream,
    /// The service manager has passed it as a socket.
    ServiceManager,
    /// It is not open.
    NotOpen,
}

impl fmt::Display for DescriptorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StandardStream => {
                write!(f, "descriptors below {FIRST_PASSED_FD} are the standard streams")
            }
            Self::ServiceManager => {
                f.write_str("it is a socket of the service manager (LISTEN_FDS)")
            }
            Self::NotOpen => f.write_str("no such descriptor is open"),
        }
    }
}

impl Error for DescriptorError {}

/// Inherited sockets that no listener has taken yet.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<(SocketAddr, TcpListener)>,
}

impl InheritedSockets {
    /// Adds a descriptor and makes it non-blocking.
    ///
    /// # Errors
    /// The descriptor is not a listening TCP socket. It is closed.
    pub fn add(&mut self, descriptor: OwnedFd) -> Result<(), InheritError> {
        let socket = SockRef::from(&descriptor);
        let is_tcp = socket.domain().is_ok_and(|d| [Domain::IPV4, Domain::IPV6].contains(&d))
            && socket.r#type().is_ok_and(|kind| kind == Type::STREAM);
        if !is_tcp || !socket.is_listener().unwrap_or(false) {
            return Err(InheritError::NotListening);
        }
        // The service manager passes blocking sockets.
        let added = socket.set_nonblocking(true).and_then(|()| {
            let listener = TcpListener::from(descriptor);
            Ok((listener.local_addr()?, listener))
        });
        self.sockets.push(added.map_err(InheritError::Io)?);
        Ok(())
    }

    /// Moves the sockets of another set into this one.
    pub fn append(&mut self, mut other: Self) {
        self.sockets.append(&mut other.sockets);
    }

    /// Duplicates of the sockets, for a start that may fail and is tried again.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        let sockets = self.sockets.iter();
        let duplicates = sockets.map(|(address, socket)| Ok((*address, socket.try_clone()?)));
        Ok(Self { sockets: duplicates.collect::<io::Result<_>>()? })
    }

    /// Takes the sockets on an address, in the order in which they were added. There are several if they
    /// share the address by `SO_REUSEPORT`. Port 0 matches none: it requests a new port.
    ///
    /// `transparent` selects the sockets with `IP_TRANSPARENT`, or those without.
    pub fn take(&mut self, wanted: SocketAddr, transparent: bool) -> Vec<TcpListener> {
        let taken = self.sockets.extract_if(.., |(address, socket)| {
            *address == wanted && is_transparent(socket, wanted) == transparent
        });
        taken.map(|(_, socket)| socket).collect()
    }

    /// Whether a socket on the address is left, transparent or not.
    pub fn contains(&self, wanted: SocketAddr) -> bool {
        self.sockets.iter().any(|(address, _)| *address == wanted)
    }

    /// Number of sockets left.
    pub fn len(&self) -> usize {
        self.sockets.len()
    }

    /// Whether no socket is left.
    pub fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// Addresses of the sockets left, sorted, each once.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let addresses: BTreeSet<_> = self.sockets.iter().map(|(address, _)| *address).collect();
        addresses.into_iter().collect()
    }
}

fn is_transparent(socket: &TcpListener, address: SocketAddr) -> bool {
    let socket = SockRef::from(socket);
    let option =
        if address.is_ipv4() { socket.ip_transparent_v4() } else { socket.ip_transparent_v6() };
    option.unwrap_or(false)
}

/// Takes the descriptors that the service manager has passed to this process (`LISTEN_FDS`,
/// `LISTEN_PID`). `LISTEN_FDNAMES` is not read, since addresses identify sockets. Only the first call
/// returns descriptors.
///
/// Must be called before the process opens a descriptor itself: the environment gives only numbers, and one
/// of them could otherwise name that descriptor. The crate sd-notify returns the numbers too, but does not
/// own the descriptors, so this code would remain.
pub fn from_service_manager() -> Vec<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let read = |name| env::var(name).ok();
    let count = passed_count(read("LISTEN_PID"), read("LISTEN_FDS"), std::process::id());
    (FIRST_PASSED_FD..FIRST_PASSED_FD + count).filter_map(own_descriptor).collect()
}

/// Takes the descriptor that the command line names by its number.
///
/// Must be called before the process opens a descriptor itself. `passed` holds the result of
/// [`from_service_manager`].
///
/// # Errors
/// No such descriptor is open, or it is one of `passed` or of the standard streams.
pub fn take_descriptor(number: RawFd, passed: &[OwnedFd]) -> Result<OwnedFd, DescriptorError> {
    if number < FIRST_PASSED_FD {
        return Err(DescriptorError::StandardStream);
    }
    if passed.iter().any(|other| other.as_raw_fd() == number) {
        return Err(DescriptorError::ServiceManager);
    }
    own_descriptor(number).ok_or(DescriptorError::NotOpen)
}

/// How many descriptors the environment passes to the process with PID `own_pid`.
fn passed_count(pid: Option<String>, count: Option<String>, own_pid: u32) -> RawFd {
    // The variables may be meant for a parent process.
    if pid.and_then(|pid| pid.parse().ok()) != Some(own_pid) {
        return 0;
    }
    count.and_then(|count| count.parse().ok()).unwrap_or(0).clamp(0, MAX_LISTEN_FDS)
}

/// Takes ownership of a descriptor and closes it on exec; `None` if none with this number is open.
fn own_descriptor(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call only sets a flag, and fails if no such descriptor is open.
    #[allow(unsafe_code)]
    let result = unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: the descriptor is open and has no other owner: the parent passed it to this process, as the
    // environment or the command line says, and this process has not opened one itself yet.
    #[allow(unsafe_code)]
    (result == 0).then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::listening;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    #[test]
    fn passed_count_is_0_for_another_process_or_malformed_variables() {
        let some = |text: &str| Some(text.to_owned());
        for (pid, count, expected) in [
            (some("7"), some("2"), 2),
            (some("8"), some("2"), 0),
            (None, some("2"), 0),
            (some("7"), None, 0),
            (some("7"), some("-1"), 0),
            (some("7"), some("many"), 0),
            (some("7"), some("2000000000"), MAX_LISTEN_FDS),
            (some(""), some(""), 0),
        ] {
            assert_eq!(passed_count(pid.clone(), count.clone(), 7), expected, "{pid:?} {count:?}");
        }
    }

    #[test]
    fn take_descriptor_refuses_standard_streams_passed_sockets_and_closed_numbers() {
        let (_, pipe) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        let number = pipe.as_raw_fd();
        let error = |number, passed| take_descriptor(number, passed).unwrap_err();
        assert_eq!(error(2, &[]), DescriptorError::StandardStream);
        let passed = std::slice::from_ref(&pipe);
        assert_eq!(error(number, passed), DescriptorError::ServiceManager);
        assert_eq!(error(RawFd::MAX, &[]), DescriptorError::NotOpen);
        let taken = take_descriptor(std::os::fd::IntoRawFd::into_raw_fd(pipe), &[]).unwrap();
        assert_eq!(taken.as_raw_fd(), number);
    }

    #[test]
    fn take_returns_the_sockets_of_an_address_and_leaves_the_others() {
        let any = "127.0.0.1:0".parse().unwrap();
        let single = listening::listen(any, false).unwrap();
        let first = listening::listen(any, true).unwrap();
        let shared = first.local_addr().unwrap();
        let second = listening::listen(shared, true).unwrap();
        let wanted = single.local_addr().unwrap();
        let mut inherited = InheritedSockets::default();
        for socket in [&first, &single, &second] {
            inherited.add(socket.as_fd().try_clone_to_owned().unwrap()).unwrap();
        }
        assert_eq!(inherited.take(any, false).len(), 0, "port 0");
        assert_eq!(inherited.take(wanted, true).len(), 0, "the socket is not transparent");
        assert!(inherited.contains(wanted) && !inherited.contains(any));
        assert_eq!(
            inherited.addresses(),
            BTreeSet::from([wanted, shared]).into_iter().collect::<Vec<_>>()
        );
        assert_eq!(inherited.take(shared, false).len(), 2);
        assert_eq!(inherited.take(shared, false).len(), 0);
        assert_eq!((inherited.len(), inherited.addresses()), (1, vec![wanted]));
        assert_eq!(inherited.take(wanted, false).len(), 1);
        assert!(inherited.is_empty());
    }

    #[test]
    fn add_refuses_descriptors_that_do_not_listen_on_tcp() {
        let mut inherited = InheritedSockets::default();
        let listener = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let connected = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        inherited.add(connected.into()).unwrap_err();
        inherited.add(UdpSocket::bind("127.0.0.1:0").unwrap().into()).unwrap_err();
        inherited.add(std::fs::File::open("/dev/null").unwrap().into()).unwrap_err();
        let dir = tempfile::tempdir().unwrap();
        let unix = std::os::unix::net::UnixListener::bind(dir.path().join("u")).unwrap();
        inherited.add(unix.into()).unwrap_err();
        assert!(inherited.is_empty());
    }
}
