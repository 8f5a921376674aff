//! Checks this machine: whether the listen addresses can be bound, which process listens on them
//! otherwise, whether IPv6 is available, and the limit of open files.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};

use jackstay_sys::sockets::listening;
use jackstay_sys::sockets::listening::ListenOptions;
use rustix::process::{Resource, getrlimit};

use super::observations::{Host, ListenAddress, ListenState};
use super::target::PlannedListener;

/// Checks the addresses where jackstay is to listen and the limits that it needs.
///
/// `running` holds the listen addresses of a running jackstay, from its `/status`. They are needed because
/// only root and the user of a process can see which sockets the process has.
pub fn check(
    listeners: &[PlannedListener],
    running: &[SocketAddr],
    wanted_connections: u64,
) -> Host {
    let listen = listeners
        .iter()
        .map(|listener| ListenAddress {
            address: listener.bind,
            what: listener.name.clone(),
            state: try_bind(listener, running),
        })
        .collect();
    Host {
        listen,
        ipv6: is_local(Ipv6Addr::LOCALHOST.into()),
        open_files: getrlimit(Resource::Nofile).current,
        wanted_connections,
        images: Vec::new(),
    }
}

/// Whether this machine has an address. Otherwise no socket can be bound to it.
pub fn is_local(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

/// Binds the address and closes the socket again.
fn try_bind(listener: &PlannedListener, running: &[SocketAddr]) -> ListenState {
    let address = listener.bind;
    let options = ListenOptions { freebind: listener.freebind, ..ListenOptions::default() };
    match listening::listen_with(address, &options) {
        Ok(_) => ListenState::Free,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if running.iter().any(|used| conflict(*used, address)) {
                return ListenState::Jackstay;
            }
            match owner_of(address) {
                Some(owner) if owner.starts_with("jackstay ") => ListenState::Jackstay,
                owner => ListenState::Taken(owner),
            }
        }
        Err(error)
            if error.kind() == io::ErrorKind::AddrNotAvailable
                || listening::is_address_family_missing(address, &error) =>
        {
            ListenState::NotLocal
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => ListenState::Denied,
        Err(error) => ListenState::Failed(error.to_string()),
    }
}

/// Whether only one socket can listen on both addresses. `[::]` is IPv6 only (`IPV6_V6ONLY`).
fn conflict(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port()
        && one.is_ipv4() == other.is_ipv4()
        && (one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified())
}

/// Name and id of the process that listens on the port of an address, if this user may see them.
fn owner_of(address: SocketAddr) -> Option<String> {
    let sockets: Vec<OsString> = ["/proc/net/tcp", "/proc/net/tcp6"]
        .into_iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .flat_map(|table| listening_inodes(&table, address.port()))
        .map(|inode| format!("socket:[{inode}]").into())
        .collect();
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid: u32 = process.file_name().to_str()?.parse().ok()?;
        let mut descriptors = fs::read_dir(process.path().join("fd")).ok()?.flatten();
        let is_listener = |descriptor: fs::DirEntry| {
            fs::read_link(descriptor.path()).is_ok_and(|link| sockets.contains(&link.into()))
        };
        descriptors.any(is_listener).then(|| {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            format!("{} (pid {pid})", name.trim())
        })
    })
}

/// Inodes of the sockets that listen on a port, from `/proc/net/tcp` or `tcp6` (proc(5)).
fn listening_inodes(table: &str, port: u16) -> Vec<u64> {
    /// `TCP_LISTEN` of `net/tcp_states.h`.
    const LISTEN: &str = "0A";
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let local = words.get(1)?.rsplit_once(':')?.1;
        let matches = u16::from_str_radix(local, 16).ok()? == port && *words.get(3)? == LISTEN;
        matches.then(|| words.get(9)?.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_taken_port_names_its_owner() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let listener =
            |bind, freebind| PlannedListener { name: "listener x".into(), bind, freebind };
        let host = check(&[listener(address, false)], &[], 100);
        let pid = format!("(pid {})", std::process::id());
        match &host.listen[0].state {
            ListenState::Taken(Some(owner)) => assert!(owner.ends_with(&pid), "{owner}"),
            // The process of the tests may be named `jackstay`.
            ListenState::Jackstay => {}
            other => panic!("{other:?}"),
        }
        // A running jackstay that reports the address owns it, even if its process has another name.
        let state = |running: &str| {
            let running = SocketAddr::new(running.parse().unwrap(), address.port());
            check(&[listener(address, false)], &[running], 100).listen[0].state.clone()
        };
        assert_eq!(state("127.0.0.1"), ListenState::Jackstay);
        assert_eq!(state("0.0.0.0"), ListenState::Jackstay);
        assert_eq!(state("127.0.0.2"), host.listen[0].state);
        assert_eq!(state("::"), host.listen[0].state);
        drop(taken);
        assert!(host.open_files.is_some_and(|limit| limit > 0));
        assert!(is_local([127, 0, 0, 1].into()));
        assert!(!is_local([192, 0, 2, 1].into()));
        // TEST-NET-1 (RFC 5737).
        let elsewhere = "192.0.2.1:7443".parse().unwrap();
        let host = check(&[listener(elsewhere, false), listener(elsewhere, true)], &[], 1);
        assert_eq!(host.listen[0].state, ListenState::NotLocal);
        assert_eq!(host.listen[1].state, ListenState::Free, "IP_FREEBIND allows it");
    }

    #[test]
    fn listening_inodes_are_those_of_the_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:1D13 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0\n   \
                     1: 0100007F:1D13 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100 0 0 10 0\n";
        assert_eq!(listening_inodes(table, 7443), [4711]);
        assert_eq!(listening_inodes(table, 7444), [] as [u64; 0]);
    }
}
