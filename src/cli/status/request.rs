//! Limits and errors of requests to the admin endpoint.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Limit of one request to a local process.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// What failed and what to do, in one line.
pub(super) fn explain(admin: SocketAddr, error: &io::Error) -> String {
    let what = match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "nothing listens on {admin}: jackstay does not run there, or its admin.bind is another \
             address (--admin ADDR; `ss -ltnp` lists the listening sockets)"
        ),
        io::ErrorKind::TimedOut => format!(
            "{admin} does not answer in time: the process is stopped or overloaded, or a firewall \
             drops packets"
        ),
        io::ErrorKind::InvalidData => {
            format!("{admin} is not the admin endpoint of jackstay: {error}")
        }
        _ => format!("cannot ask {admin}: {error}"),
    };
    format!("no status: {what}")
}
