//! Reads `/status` of a running jackstay.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;

use crate::cli::admin_client::{self, AdminAddress};

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

/// Reads `/status` within `limit`.
///
/// # Errors
/// Those of [`admin_client::get_json`].
pub(super) async fn fetch_within(admin: SocketAddr, limit: Duration) -> io::Result<Value> {
    admin_client::get_json(&AdminAddress::Tcp(admin), "/status", limit).await
}

/// Reads `/status`, for callers without a tokio runtime.
///
/// # Errors
/// Those of [`admin_client::get_json`].
pub(in crate::cli) fn fetch(admin: SocketAddr) -> io::Result<Value> {
    admin_client::block_on(fetch_within(admin, TIMEOUT))
}
