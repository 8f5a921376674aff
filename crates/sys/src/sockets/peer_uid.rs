//! The user of the process at the other end of a loopback connection, by `sock_diag(7)`.
//!
//! A loopback connection has two sockets in this kernel. A query for the other one returns its owner's uid
//! without a capability. Processes in other network namespaces are not found.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, sendto,
    socket_with,
};

/// Lengths of `struct nlmsghdr`, `inet_diag_req_v2` and `inet_diag_msg` (`linux/netlink.h`,
/// `linux/inet_diag.h`).
const HEADER: usize = 16;
const REQUEST: usize = HEADER + 56;
const RESPONSE: usize = HEADER + 72;
/// Offsets of `idiag_uid` and `idiag_inode` in a response.
const UID: usize = HEADER + 64;
const INODE: usize = UID + 4;
/// The message type of a query and of its response.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;

/// A socket for queries.
#[derive(Debug)]
pub struct PeerUids(OwnedFd);

impl PeerUids {
    /// Opens the socket.
    ///
    /// # Errors
    /// The kernel has no `sock_diag`, or the process may not use it.
    pub fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let protocol = Some(netlink::SOCK_DIAG);
        Ok(Self(socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, protocol)?))
    }

    /// The uid of the process that connected from `peer` to `local`.
    ///
    /// # Errors
    /// `NotFound` if the other socket is not in this network namespace; `NotConnected` if its process has closed it.
    pub fn get(&self, peer: SocketAddr, local: SocketAddr) -> io::Result<u32> {
        let kernel = netlink::SocketAddrNetlink::new(0, 0);
        sendto(&self.0, &request(peer, local), SendFlags::empty(), &kernel)?;
        // The kernel has queued its response before `sendto` returns.
        let mut response = [0; 512];
        let (length, _) = recv(&self.0, &mut response, RecvFlags::empty())?;
        uid(&response[..length])
    }
}

/// A query for the socket that is bound to `peer` and connected to `local`.
fn request(peer: SocketAddr, local: SocketAddr) -> [u8; REQUEST] {
    let (peer_ip, local_ip) = (peer.ip().to_canonical(), local.ip().to_canonical());
    let family = if peer_ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut message = [0; REQUEST];
    message[..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    let query = &mut message[HEADER..];
    query[0] = family as u8;
    query[1] = libc::IPPROTO_TCP as u8;
    query[4..8].fill(0xff); // every TCP state
    query[8..10].copy_from_slice(&peer.port().to_be_bytes());
    query[10..12].copy_from_slice(&local.port().to_be_bytes());
    for (at, ip) in [(12, peer_ip), (28, local_ip)] {
        match ip {
            IpAddr::V4(ip) => query[at..at + 4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => query[at..at + 16].copy_from_slice(&ip.octets()),
        }
    }
    query[48..56].fill(0xff); // INET_DIAG_NOCOOKIE
    message
}

/// The uid in a response. A socket that its process has closed has neither a user nor an inode: the kernel reports 0 for
/// both (`sock_i_uid`, `inet_twsk_diag_fill`), so that it looks like one of root.
fn uid(response: &[u8]) -> io::Result<u32> {
    let kind = response.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    if kind != Some(SOCK_DIAG_BY_FAMILY) || response.len() < RESPONSE {
        // NLMSG_ERROR: ENOENT, as no such socket exists.
        return Err(io::ErrorKind::NotFound.into());
    }
    let number = |offset| u32::from_ne_bytes([0, 1, 2, 3].map(|at| response[offset + at]));
    if number(INODE) == 0 {
        return Err(io::ErrorKind::NotConnected.into());
    }
    Ok(number(UID))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn uid_of_a_loopback_client_is_that_of_its_process() {
        let uids = PeerUids::open().unwrap();
        for bind in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(bind) else { continue };
            let mut target = listener.local_addr().unwrap();
            if bind == "[::]:0" {
                target.set_ip([127, 0, 0, 1].into());
            }
            let client = TcpStream::connect(target).unwrap();
            let (server, peer) = listener.accept().unwrap();
            let local = server.local_addr().unwrap();
            let own = rustix::process::getuid().as_raw();
            assert_eq!(uids.get(peer, local).unwrap(), own, "{bind}");
            // The kernel keeps the closed socket, as one of root, until the other end is closed.
            drop(client);
            let error = uids.get(peer, local).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::NotConnected, "{bind}");
        }
    }

    #[test]
    fn unknown_connection_is_not_found() {
        let uids = PeerUids::open().unwrap();
        let error = uids.get("192.0.2.1:1".parse().unwrap(), "192.0.2.2:2".parse().unwrap());
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
