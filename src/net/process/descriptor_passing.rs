//! Passes open descriptors between processes over a Unix socket: `SCM_RIGHTS` (unix(7)).
//!
//! One descriptor travels with one byte, so that the stream shows how many there are and a reader
//! cannot take two for one. Both ends may be non-blocking: `WouldBlock` means that nothing was moved.

use std::io::{self, IoSliceMut};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The byte that a descriptor travels with.
const CARRIER: u8 = b'D';

/// Room for the ancillary data of one descriptor, aligned as a `cmsghdr` has to be.
#[repr(C)]
union Control {
    _align: libc::cmsghdr,
    bytes: [u8; 64],
}

impl Control {
    const fn new() -> Self {
        Self { bytes: [0; 64] }
    }
}

/// Bytes of ancillary data that one descriptor takes, and those that stand in its length.
fn sizes() -> (usize, usize) {
    let payload = size_of::<RawFd>() as libc::c_uint;
    // SAFETY: both only calculate.
    #[allow(unsafe_code)]
    let (space, length) = unsafe { (libc::CMSG_SPACE(payload), libc::CMSG_LEN(payload)) };
    (space as usize, length as usize)
}

/// A message of one buffer with room for one descriptor beside it. It points into what it was made
/// of, and borrows that for as long as it lives.
struct Message<'a> {
    header: libc::msghdr,
    _buffers: PhantomData<&'a mut Control>,
}

impl<'a> Message<'a> {
    fn new(carrier: &'a mut IoSliceMut<'_>, control: &'a mut Control) -> Self {
        let (space, _) = sizes();
        // SAFETY: `msghdr` is a C struct for which zeroes are a value: no name, no buffers.
        #[allow(unsafe_code)]
        let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        // An `IoSliceMut` is an `iovec` by its documentation.
        header.msg_iov = (&raw mut *carrier).cast();
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut *control).cast();
        header.msg_controllen = space as _;
        Self { header, _buffers: PhantomData }
    }
}

/// Sends a copy of one descriptor.
///
/// # Errors
/// What the kernel says.
pub fn send(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let (_, length) = sizes();
    let mut byte = [CARRIER];
    let (mut carrier, mut control) = (IoSliceMut::new(&mut byte), Control::new());
    let message = Message::new(&mut carrier, &mut control);
    // SAFETY: the message points to live buffers; of the 64 aligned bytes for ancillary data it
    // declares those that one descriptor takes (24 on 64-bit Linux), so that the first header is not
    // null and has room for one. sendmsg(2) reads them and keeps nothing.
    #[allow(unsafe_code)]
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message.header);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = length as _;
        libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
        libc::sendmsg(socket.as_raw_fd(), &raw const message.header, libc::MSG_NOSIGNAL)
    };
    if sent == 1 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Receives one descriptor, which is closed on exec.
///
/// # Errors
/// What the kernel says; `UnexpectedEof` if the other side is gone; `InvalidData` if what came has
/// no descriptor, or more than one.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let (_, length) = sizes();
    let mut byte = [0];
    let (mut carrier, mut control) = (IoSliceMut::new(&mut byte), Control::new());
    let mut message = Message::new(&mut carrier, &mut control);
    // SAFETY: the kernel writes at most as much as the message declares into the live buffers that
    // it points to, and keeps nothing.
    #[allow(unsafe_code)]
    let read = unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message.header, libc::MSG_CMSG_CLOEXEC)
    };
    match read {
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        1 => {}
        _ => return Err(io::Error::last_os_error()),
    }
    // SAFETY: the kernel has filled in as much ancillary data as `msg_controllen` says now;
    // CMSG_FIRSTHDR is null if that is less than a header. A header of this level, type and length
    // is followed by one descriptor, which is new and nobody's but ours.
    #[allow(unsafe_code)]
    let received = unsafe {
        let header = libc::CMSG_FIRSTHDR(&raw const message.header);
        if header.is_null()
            || (*header).cmsg_level != libc::SOL_SOCKET
            || (*header).cmsg_type != libc::SCM_RIGHTS
            || (*header).cmsg_len as usize != length
        {
            None
        } else {
            let number = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
            Some(OwnedFd::from_raw_fd(number))
        }
    };
    // Those that did not fit were closed by the kernel.
    let whole = message.header.msg_flags & libc::MSG_CTRUNC == 0 && byte == [CARRIER];
    received
        .filter(|_| whole)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "not one descriptor"))
}

/// Who is at the other end of a Unix socket, as the kernel knows it (`SO_PEERCRED`, unix(7)): who
/// connected, or who listened.
///
/// # Errors
/// What the kernel says.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes at a pointer to a live ucred.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(peer) } else { Err(io::Error::last_os_error()) }
}

/// The user that this process acts as.
pub fn effective_user() -> u32 {
    // SAFETY: geteuid(2) has no arguments and cannot fail.
    #[allow(unsafe_code)]
    unsafe {
        libc::geteuid()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_arrives_is_the_same_socket() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sockets: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        for socket in &sockets {
            send(ours.as_fd(), socket.as_fd()).unwrap();
        }
        drop(ours);
        for socket in &sockets {
            let received = TcpListener::from(receive(theirs.as_fd()).unwrap());
            assert_eq!(received.local_addr().unwrap(), socket.local_addr().unwrap());
            // Closed on exec: the flag is in /proc.
            let info = format!("/proc/self/fdinfo/{}", received.as_raw_fd());
            let info = std::fs::read_to_string(info).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
            assert_ne!(flags & libc::O_CLOEXEC as u32, 0);
        }
        let gone = receive(theirs.as_fd()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn text_beside_them_stays_text() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        ours.write_all(b"one\n").unwrap();
        send(ours.as_fd(), socket.as_fd()).unwrap();
        ours.write_all(b"end\n").unwrap();
        let mut line = [0; 4];
        theirs.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"one\n");
        receive(theirs.as_fd()).unwrap();
        // Where a descriptor was expected and a byte came.
        let text = receive(theirs.as_fd()).unwrap_err();
        assert_eq!(text.kind(), io::ErrorKind::InvalidData);
        let mut line = [0; 3];
        theirs.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"nd\n");
    }

    #[test]
    fn nobody_waits_on_a_socket_that_does_not_block() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(receive(theirs.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(theirs);
        let broken = send(ours.as_fd(), ours.as_fd()).unwrap_err();
        assert_eq!(broken.kind(), io::ErrorKind::BrokenPipe);
    }
}
