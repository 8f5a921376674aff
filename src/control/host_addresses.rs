//! The addresses of this host's interfaces.

use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

/// Reads the addresses of the interfaces each time. If they cannot be read, as in a sandbox without netlink, those
/// of the last time count, so that no preference and no own address changes. That is logged once.
#[derive(Debug)]
pub struct HostAddresses {
    read: fn() -> io::Result<Vec<IpAddr>>,
    last: Mutex<Last>,
}

#[derive(Debug)]
struct Last {
    addresses: Option<Vec<IpAddr>>,
    is_failing: bool,
}

static OF_PROCESS: HostAddresses = HostAddresses::reading(|| {
    let interfaces = if_addrs::get_if_addrs()?;
    Ok(interfaces.iter().map(if_addrs::Interface::ip).collect())
});

impl HostAddresses {
    /// Those that all upstreams share, so that a failure is logged once.
    pub fn of_process() -> &'static Self {
        &OF_PROCESS
    }

    const fn reading(read: fn() -> io::Result<Vec<IpAddr>>) -> Self {
        Self { read, last: Mutex::new(Last { addresses: None, is_failing: false }) }
    }

    /// The addresses; `None` if they have never been read.
    pub fn get(&self) -> Option<Vec<IpAddr>> {
        let read = (self.read)();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match read {
            Ok(addresses) => {
                *last = Last { addresses: Some(addresses), is_failing: false };
            }
            Err(error) if !std::mem::replace(&mut last.is_failing, true) => {
                let effect = if last.addresses.is_some() {
                    "the last known ones count"
                } else {
                    "no endpoint is preferred as one of this host, and an endpoint that is jackstay itself is recognised \
                     only by a loopback address"
                };
                tracing::warn!(%error, effect, "addresses of this host's interfaces cannot be read");
            }
            Err(_) => {}
        }
        last.addresses.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::observe::log::tests::Captured;
    use jackstay_config::LogFormat;

    #[test]
    fn get_after_a_failure_returns_the_last_addresses_and_logs_once() {
        static READS: AtomicUsize = AtomicUsize::new(0);
        let host = HostAddresses::reading(|| match READS.fetch_add(1, Ordering::Relaxed) {
            2 => Ok(vec!["10.0.0.1".parse().unwrap()]),
            5 => Ok(vec!["10.0.0.2".parse().unwrap()]),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        });
        let first = |host: &HostAddresses| host.get().map(|all| all[0].to_string());
        let (captured, mut read) = (Captured::default(), Vec::new());
        captured.during(LogFormat::Text, || read.extend((0..7).map(|_| first(&host))));
        let [one, two] = ["10.0.0.1", "10.0.0.2"].map(|text| Some(text.to_owned()));
        assert_eq!(read, [None, None, one.clone(), one.clone(), one, two.clone(), two]);
        // Once for each time that the list became unreadable, with the effect.
        let lines = captured.lines();
        let effects = ["no endpoint is preferred", "last known ones", "last known ones"];
        assert_eq!(lines.len(), effects.len(), "{lines:?}");
        for (line, effect) in lines.iter().zip(effects) {
            assert!(line.contains("interfaces cannot be read") && line.contains(effect), "{line}");
            assert!(line.contains("permission denied"), "{line}");
        }
    }

    #[test]
    fn of_process_reads_the_loopback_address() {
        let all = HostAddresses::of_process().get().unwrap();
        assert!(all.iter().any(IpAddr::is_loopback), "{all:?}");
    }
}
