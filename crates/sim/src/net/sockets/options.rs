//! The options that programs set on their sockets.

use std::time::Duration;

use crate::net::{Keepalive, SocketOptions};

impl SocketOptions {
    /// Those of an upstream connection of jackstay: `new_upstream_socket` in `jackstay_sys::sockets::tcp_options`.
    pub fn upstream() -> Self {
        let second = Duration::from_secs(1);
        let keepalive = Some(Keepalive { idle: second, interval: second, probes: 127 });
        Self { thin: true, keepalive, max_unsent: 1 << 20 }
    }

    /// Those of a connection that jackstay has accepted: `configure_accepted_by` in
    /// `jackstay_sys::sockets::tcp_options`.
    pub fn accepted() -> Self {
        let keepalive = Keepalive {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            probes: 9,
        };
        let max_unsent = jackstay_sys::sockets::tcp_options::MAX_UNSENT;
        Self { thin: false, keepalive: Some(keepalive), max_unsent }
    }

    /// Those of a connection of a Go program, on either end (`defaultTCPKeepAliveIdle` of its package `net`).
    pub fn go() -> Self {
        let pause = Duration::from_secs(15);
        let keepalive = Some(Keepalive { idle: pause, interval: pause, probes: 9 });
        Self { thin: false, keepalive, max_unsent: u32::MAX }
    }
}
