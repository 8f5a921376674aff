//! Listening sockets that were opened by another process: by the service manager, by the jackstay that this process
//! replaces, or by an earlier one that has stored them in the service manager.
//!
//! Sockets are found by their addresses, so the sender need not know the names of listeners. A socket keeps
//! its accept queue when it changes its process, so no waiting connection is lost.

use std::collections::BTreeSet;
use std::env;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{Domain, SockRef, Type};

use crate::sockets::listening;

/// The first descriptor that a service manager passes (`SD_LISTEN_FDS_START`, `sd_listen_fds(3)`).
const FIRST_PASSED_FD: RawFd = 3;
/// Maximum of `LISTEN_FDS`; systemd's own limit is in the hundreds.
const MAX_LISTEN_FDS: RawFd = 1024;
/// The names of stored sockets begin with it. Sockets of a `.socket` unit have its name, which ends with `.socket`, or
/// another one that its author chose (`FileDescriptorName=`).
const STORED_PREFIX: &str = "jackstay-listener-";

/// The name of the sockets on this address in the service manager, which permits no colon (`fdname_is_valid` of
/// systemd).
pub fn stored_name(address: SocketAddr) -> String {
    format!("{STORED_PREFIX}{address}").replace(':', "_")
}

/// A descriptor that the service manager has passed to this process.
#[derive(Debug)]
pub struct PassedDescriptor {
    /// The descriptor.
    pub descriptor: OwnedFd,
    /// Its name (`LISTEN_FDNAMES`).
    pub name: String,
}

impl PassedDescriptor {
    /// Whether an earlier process has stored it ([`stored_name`]).
    pub fn is_stored(&self) -> bool {
        self.name.starts_with(STORED_PREFIX)
    }
}

#[derive(Debug)]
struct InheritedSocket {
    address: SocketAddr,
    socket: TcpListener,
    is_stored: bool,
}

/// Why a descriptor is not used as an inherited socket.
#[derive(Debug, thiserror::Error)]
pub enum InheritError {
    /// It is not a listening TCP socket.
    #[error("not a listening TCP socket")]
    NotListening,
    /// The kernel refuses an operation on it.
    #[error("{0}")]
    Io(#[source] io::Error),
}

/// Why the descriptor that the command line names is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DescriptorError {
    /// It is a standard stream.
    #[error("descriptors below {FIRST_PASSED_FD} are the standard streams")]
    StandardStream,
    /// The service manager has passed it as a socket.
    #[error("it is a socket of the service manager (LISTEN_FDS)")]
    ServiceManager,
    /// It is not open.
    #[error("no such descriptor is open")]
    NotOpen,
}

/// Inherited sockets that no listener has taken yet.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<InheritedSocket>,
}

impl InheritedSockets {
    /// Adds a descriptor and makes it non-blocking.
    ///
    /// # Errors
    /// The descriptor is not a listening TCP socket. It is closed.
    pub fn add(&mut self, descriptor: OwnedFd) -> Result<(), InheritError> {
        self.add_passed(PassedDescriptor { descriptor, name: String::new() })
    }

    /// [`Self::add`] for a descriptor of the service manager.
    ///
    /// # Errors
    /// The descriptor is not a listening TCP socket. It is closed.
    pub fn add_passed(&mut self, passed: PassedDescriptor) -> Result<(), InheritError> {
        let is_stored = passed.is_stored();
        let descriptor = passed.descriptor;
        let socket = SockRef::from(&descriptor);
        let is_tcp = socket.domain().is_ok_and(|d| [Domain::IPV4, Domain::IPV6].contains(&d))
            && socket.r#type().is_ok_and(|kind| kind == Type::STREAM);
        if !is_tcp || !socket.is_listener().unwrap_or(false) {
            return Err(InheritError::NotListening);
        }
        // The service manager passes blocking sockets.
        let added = socket.set_nonblocking(true).and_then(|()| {
            let socket = TcpListener::from(descriptor);
            Ok(InheritedSocket { address: socket.local_addr()?, socket, is_stored })
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
        let duplicates = sockets.map(|InheritedSocket { address, socket, is_stored }| {
            let socket = socket.try_clone()?;
            Ok(InheritedSocket { address: *address, socket, is_stored: *is_stored })
        });
        Ok(Self { sockets: duplicates.collect::<io::Result<_>>()? })
    }

    /// Takes the sockets on an address, in the order in which they were added. There are several if they
    /// share the address by `SO_REUSEPORT`. Port 0 matches none: it requests a new port.
    ///
    /// `transparent` selects the sockets with `IP_TRANSPARENT`, or those without.
    pub fn take(&mut self, wanted: SocketAddr, transparent: bool) -> Vec<TcpListener> {
        let taken = self.sockets.extract_if(.., |inherited| {
            inherited.address == wanted && is_transparent(&inherited.socket, wanted) == transparent
        });
        taken.map(|inherited| inherited.socket).collect()
    }

    /// Takes the stored sockets on an address, transparent or not. No process accepts on them.
    pub fn take_stored(&mut self, wanted: SocketAddr) -> Vec<TcpListener> {
        let is_wanted =
            |inherited: &mut InheritedSocket| inherited.is_stored && inherited.address == wanted;
        self.sockets.extract_if(.., is_wanted).map(|inherited| inherited.socket).collect()
    }

    /// Closes the stored sockets whose address is not wanted, or that an earlier process has excluded from new
    /// connections. Returns their names.
    pub fn close_unwanted_stored(
        &mut self,
        wanted: impl Fn(SocketAddr) -> bool,
    ) -> BTreeSet<String> {
        let is_unwanted = |inherited: &mut InheritedSocket| {
            let usable = || !listening::is_diverted(&inherited.socket);
            inherited.is_stored && !(wanted(inherited.address) && usable())
        };
        self.sockets.extract_if(.., is_unwanted).map(|one| stored_name(one.address)).collect()
    }

    /// Whether a socket is left that no earlier process has stored.
    pub fn has_sockets_of_manager(&self) -> bool {
        self.sockets.iter().any(|inherited| !inherited.is_stored)
    }

    /// Whether a socket on the address is left, transparent or not.
    pub fn contains(&self, wanted: SocketAddr) -> bool {
        self.sockets.iter().any(|inherited| inherited.address == wanted)
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
        let addresses: BTreeSet<_> =
            self.sockets.iter().map(|inherited| inherited.address).collect();
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
/// `LISTEN_PID`, `LISTEN_FDNAMES`). Addresses identify sockets; the name only tells whether an earlier process has
/// stored one. Only the first call returns descriptors.
///
/// Must be called before the process opens a descriptor itself: the environment gives only numbers, and one
/// of them could otherwise name that descriptor. The crate sd-notify returns the numbers too, but does not
/// own the descriptors, so this code would remain.
pub fn from_service_manager() -> Vec<PassedDescriptor> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let read = |name| env::var(name).ok();
    let count = passed_count(read("LISTEN_PID"), read("LISTEN_FDS"), std::process::id());
    let names = read("LISTEN_FDNAMES").unwrap_or_default();
    let names = names.split(':').chain(std::iter::repeat(""));
    let numbers = (FIRST_PASSED_FD..FIRST_PASSED_FD + count).zip(names);
    let passed = numbers.filter_map(|(number, name)| {
        let name = name.to_owned();
        own_descriptor(number).map(|descriptor| PassedDescriptor { descriptor, name })
    });
    passed.collect()
}

/// Takes the descriptor that the command line names by its number.
///
/// Must be called before the process opens a descriptor itself. `passed` holds the result of
/// [`from_service_manager`].
///
/// # Errors
/// No such descriptor is open, or it is one of `passed` or of the standard streams.
pub fn take_descriptor(
    number: RawFd,
    passed: &[PassedDescriptor],
) -> Result<OwnedFd, DescriptorError> {
    if number < FIRST_PASSED_FD {
        return Err(DescriptorError::StandardStream);
    }
    if passed.iter().any(|other| other.descriptor.as_raw_fd() == number) {
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
        let passed = [PassedDescriptor { descriptor: pipe, name: String::new() }];
        assert_eq!(error(number, &passed), DescriptorError::ServiceManager);
        assert_eq!(error(RawFd::MAX, &[]), DescriptorError::NotOpen);
        let [PassedDescriptor { descriptor, .. }] = passed;
        let taken = take_descriptor(std::os::fd::IntoRawFd::into_raw_fd(descriptor), &[]).unwrap();
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
    fn close_unwanted_stored_keeps_wanted_sockets_and_those_of_a_socket_unit() {
        let open = || listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let (wanted, unwanted, diverted, of_manager) = (open(), open(), open(), open());
        listening::divert_new_connections(&diverted).unwrap();
        let at = |socket: &TcpListener| socket.local_addr().unwrap();
        let addresses = [&wanted, &unwanted, &diverted, &of_manager].map(at);
        let mut inherited = InheritedSockets::default();
        for (socket, is_stored) in
            [(wanted, true), (unwanted, true), (diverted, true), (of_manager, false)]
        {
            let name = if is_stored { stored_name(at(&socket)) } else { "jackstay.socket".into() };
            let passed = PassedDescriptor { descriptor: socket.into(), name };
            inherited.add_passed(passed).unwrap();
        }
        let closed = inherited.close_unwanted_stored(|address| address != addresses[1]);
        assert_eq!(closed, [1, 2].map(|index| stored_name(addresses[index])).into());
        assert_eq!(inherited.take_stored(addresses[3]).len(), 0, "of a socket unit");
        assert!(inherited.has_sockets_of_manager());
        assert_eq!(inherited.take_stored(addresses[0]).len(), 1);
        assert_eq!(inherited.addresses(), [addresses[3]]);
    }

    #[test]
    fn stored_name_of_every_address_is_unique_and_without_colon() {
        let names = ["127.0.0.1:7443", "[::1]:7443", "[::]:17443"];
        let names = names.map(|address| stored_name(address.parse().unwrap()));
        assert_eq!(
            names,
            [
                "jackstay-listener-127.0.0.1_7443",
                "jackstay-listener-[__1]_7443",
                "jackstay-listener-[__]_17443"
            ]
        );
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
