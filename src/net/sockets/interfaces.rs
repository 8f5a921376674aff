//! The IP addresses of this host, which tell whether an endpoint is the host itself.

use std::io;
use std::net::IpAddr;

/// The addresses of every interface that exists now.
///
/// # Errors
/// What `getifaddrs(3)` returns.
pub fn addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = if_addrs::get_if_addrs()?;
    Ok(interfaces.iter().map(if_addrs::Interface::ip).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_include_loopback() {
        let all = addresses().unwrap();
        assert!(all.iter().any(IpAddr::is_loopback), "{all:?}");
    }
}
