//! Serves the admin endpoint on its TCP and Unix sockets.

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jackstay_config::SOURCE_PREFIX_V6;
use jackstay_sys::clock;
use jackstay_sys::sockets::listening;
use jackstay_sys::sockets::source::{Source, SourceLookup};
use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::connections::Connections;
use super::status_provider::StatusProvider;
use crate::observe::RepeatFilter;

/// Pause after a failed accept, so that the loop does not spin while the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Failed accepts are logged at most once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Mode of the Unix socket: its group, which an operator can set, may read the status as well.
pub const SOCKET_MODE: u32 = 0o660;

/// Why the admin endpoint stops accepting on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The endpoint has moved to another address. Connections in the accept queue are still served, since the
    /// close would reset them.
    Moved,
    /// Another process serves the same socket and its accept queue.
    TakenOver,
}

/// A bound admin endpoint.
#[derive(Debug)]
pub struct Admin {
    listener: TcpListener,
}

impl Admin {
    /// An endpoint on a bound socket. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub fn from_std(listener: std::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener: TcpListener::from_std(listener)? })
    }

    /// The bound address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Accepts connections until `stop` resolves, and returns when the accepted ones have ended. If the future
    /// is dropped, they are closed.
    pub async fn serve(
        self,
        provider: Arc<dyn StatusProvider>,
        stop: impl Future<Output = StopReason>,
    ) {
        let mut stop = pin!(stop);
        let mut connections = Connections::new(&provider);
        let sources = SourceLookup::default();
        let mut warnings = RepeatFilter::new(LOG_INTERVAL);
        let reason = loop {
            let accepted = tokio::select! {
                biased;
                reason = &mut stop => break reason,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, from)) => {
                    let Some(source) = source_of(&sources, &stream, from) else {
                        continue;
                    };
                    let on_loopback = is_on_loopback(&stream);
                    connections.add(stream, source, on_loopback).await;
                }
                Err(error) => log_and_pause(&error, &mut warnings).await,
            }
        };
        if reason == StopReason::Moved {
            for (stream, from) in listening::close_and_accept_queued(self.listener) {
                let Some(source) = source_of(&sources, &stream, from) else {
                    continue;
                };
                let on_loopback = is_on_loopback(&stream);
                connections.add(stream, source, on_loopback).await;
            }
        } else {
            drop(self.listener);
        }
        connections.finish().await;
    }
}

/// Serves connections of a Unix socket until the future is dropped.
pub async fn serve_unix(listener: UnixListener, provider: Arc<dyn StatusProvider>) {
    let mut connections = Connections::new(&provider);
    let mut warnings = RepeatFilter::new(LOG_INTERVAL);
    loop {
        match listener.accept().await {
            // Browsers cannot connect to Unix sockets.
            Ok((stream, _)) => {
                let Ok(credentials) = stream.peer_cred() else { continue };
                connections.add(stream, Source::User(credentials.uid()), false).await;
            }
            Err(error) => log_and_pause(&error, &mut warnings).await,
        }
    }
}

/// The source of an accepted connection; `None` if its client on this host has closed it.
pub(super) fn source_of(
    sources: &SourceLookup,
    stream: &TcpStream,
    from: SocketAddr,
) -> Option<Source> {
    sources.source_by_addresses(from, stream.local_addr().ok()?, SOURCE_PREFIX_V6)
}

fn is_on_loopback(stream: &TcpStream) -> bool {
    stream.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback())
}

/// Logs a failed accept, and delays the next one.
pub(super) async fn log_and_pause(error: &io::Error, warnings: &mut RepeatFilter) {
    if warnings.admit("accept", clock::now()).is_some() {
        tracing::warn!(%error, "admin endpoint cannot accept a connection");
    }
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

#[cfg(test)]
mod tests;
