//! Accepts connections until the drain begins: the same for both modes.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

/// Pause after `accept` failed for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// Accepts on one socket until the drain begins and gives each connection to `admit`.
pub async fn until_drain(
    socket: &TcpListener,
    mut drain: watch::Receiver<bool>,
    listener: &str,
    admit: impl Fn(TcpStream, SocketAddr),
) {
    loop {
        let accepted = tokio::select! {
            biased;
            _ = drain.wait_for(|draining| *draining) => return,
            accepted = socket.accept() => accepted,
        };
        match accepted {
            Ok((stream, from)) => admit(stream, from),
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::warn!(listener, %error, "cannot accept connections");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Errors of `accept` that concern the one connection (accept(2)): the next one is fine.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::Interrupted
            | io::ErrorKind::WouldBlock
    )
}
