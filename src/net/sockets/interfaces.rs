//! The addresses of this host, to tell whether an endpoint is ourselves.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The addresses of every interface that is there now.
///
/// # Errors
/// What the kernel says.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: getifaddrs writes one pointer, to a list that it owns until freeifaddrs.
    #[allow(unsafe_code)]
    let result = unsafe { libc::getifaddrs(&raw mut list) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which is not freed yet.
        #[allow(unsafe_code)]
        let entry = unsafe { &*next };
        found.extend(address(entry.ifa_addr));
        next = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs and nothing of it is used any more.
    #[allow(unsafe_code)]
    unsafe {
        libc::freeifaddrs(list);
    }
    Ok(found)
}

/// The IP address in a socket address, if it is one.
fn address(sockaddr: *const libc::sockaddr) -> Option<IpAddr> {
    if sockaddr.is_null() {
        return None;
    }
    // SAFETY: every socket address starts with its family, which says how large it is; the
    // unaligned reads copy exactly that much.
    #[allow(unsafe_code)]
    unsafe {
        match libc::c_int::from((*sockaddr).sa_family) {
            libc::AF_INET => {
                let v4 = ptr::read_unaligned(sockaddr.cast::<libc::sockaddr_in>());
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = ptr::read_unaligned(sockaddr.cast::<libc::sockaddr_in6>());
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_an_address_of_this_host() {
        let all = addresses().unwrap();
        assert!(all.iter().any(IpAddr::is_loopback), "{all:?}");
    }
}
