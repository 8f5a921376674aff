//! Passes open descriptors between processes over a Unix socket: `SCM_RIGHTS` (unix(7)).
//!
//! Each message carries one byte and one descriptor, so the receiver reads one byte for each descriptor.
//! Either socket may be non-blocking; `WouldBlock` then means that nothing was transferred.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The byte that accompanies a descriptor.
const CARRIER: u8 = b'D';

/// Sends a copy of one descriptor.
///
/// # Errors
/// What `sendmsg(2)` returns.
pub fn send(socket: BorrowedFd<'_>, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    send_with(socket, &[CARRIER], descriptor)
}

/// Sends a message with a copy of one descriptor.
///
/// # Errors
/// What `sendmsg(2)` returns; `WriteZero` if the socket took only a part of the message.
pub fn send_with(
    socket: BorrowedFd<'_>,
    message: &[u8],
    descriptor: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(socket, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives one descriptor, which is closed on exec.
///
/// # Errors
/// What `recvmsg(2)` returns; `UnexpectedEof` if the peer has closed its socket; `InvalidData` if the
/// message carries no descriptor or several. Descriptors that are not returned are closed.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffers = [IoSliceMut::new(&mut byte)];
    let message = recvmsg(socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut received: Vec<OwnedFd> = control
        .drain()
        .filter_map(|ancillary| match ancillary {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    let is_complete = !message.flags.contains(ReturnFlags::CTRUNC) && byte == [CARRIER];
    match (received.pop(), is_complete && received.is_empty()) {
        (Some(descriptor), true) => Ok(descriptor),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not one descriptor")),
    }
}

/// The credentials that the peer of a Unix socket had when it connected or listened (`SO_PEERCRED`,
/// unix(7)). The PID is 0 for a peer in a PID namespace that this process cannot see.
///
/// rustix cannot represent that PID (its `Pid` is never 0), and std's `peer_cred` is not stable.
///
/// # Errors
/// What `getsockopt(2)` returns.
pub fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` is valid for writes of `length` bytes, and the kernel writes no more.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::fd::{AsFd, AsRawFd};
    use std::os::unix::net::UnixStream;

    #[test]
    fn receive_returns_the_sent_socket_closed_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sockets: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        for socket in &sockets {
            send(ours.as_fd(), socket.as_fd()).unwrap();
        }
        drop(ours);
        for socket in &sockets {
            let received = TcpListener::from(receive(theirs.as_fd()).unwrap());
            assert_eq!(received.local_addr().unwrap(), socket.local_addr().unwrap());
            // /proc shows the close-on-exec flag.
            let info = format!("/proc/self/fdinfo/{}", received.as_raw_fd());
            let info = std::fs::read_to_string(info).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
            assert_ne!(flags & libc::O_CLOEXEC as u32, 0);
        }
        let closed = receive(theirs.as_fd()).unwrap_err();
        assert_eq!(closed.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn receive_refuses_bytes_without_a_descriptor() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        ours.write_all(b"one\n").unwrap();
        send(ours.as_fd(), socket.as_fd()).unwrap();
        ours.write_all(b"end\n").unwrap();
        let mut line = [0; 4];
        theirs.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"one\n");
        receive(theirs.as_fd()).unwrap();
        // `receive` consumes the first byte of "end\n", which carries no descriptor.
        let refused = receive(theirs.as_fd()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        let mut line = [0; 3];
        theirs.read_exact(&mut line).unwrap();
        assert_eq!(&line, b"nd\n");
    }

    #[test]
    fn receive_on_empty_nonblocking_socket_returns_would_block_and_send_to_closed_peer_fails() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        assert_eq!(receive(theirs.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(theirs);
        let broken = send(ours.as_fd(), ours.as_fd()).unwrap_err();
        assert_eq!(broken.kind(), io::ErrorKind::BrokenPipe);
    }
}
