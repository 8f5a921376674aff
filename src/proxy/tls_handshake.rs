//! The TLS handshake of a client, in its turn and within its memory.
//!
//! If the listener passes connections through by server name, the `ClientHello` is read first, in the same turn and
//! within the same limits. A connection with another name, or without one, goes on with the handshake, which gets the
//! bytes that were read.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use jackstay_core::admission::{MemoryCharge, Refusal};
use jackstay_net::tls::serving::{self, ServingTls};
use jackstay_net::tls::tls_error::describe_handshake_error;
use jackstay_sys::clock;
use jackstay_sys::sockets::read_ahead::{ReadAhead, Turn};
use jackstay_sys::sockets::stream::TcpStream;
use tokio::time::timeout;

use super::admission::connection_slots::ConnectionSlot;
use super::admission::handshake_memory;
use super::admission::handshake_queue::{HandshakeQueue, HandshakeTurn};
use super::admission::listener_admission::ListenerAdmission;
use super::client_socket::ClientSocket;
use super::client_stream::{ClientStream, StallTimeout, accept_tls};
use super::listener_service::ListenerService;
use super::passthrough::routing::{RoutedTo, Routing};

/// What a listener needs for a handshake.
pub struct TlsHandshake<'a> {
    /// The admission of the listener.
    pub admission: &'a ListenerAdmission,
    /// The service of the listener when it accepted the connection.
    pub service: &'a ListenerService,
    /// Its certificate.
    pub tls: &'a ServingTls,
    /// The turns of all handshakes of the worker.
    pub queue: &'a Rc<HandshakeQueue>,
    /// The server names of connections that are passed through, if there are any.
    pub passed_through: Option<Rc<Routing>>,
}

/// How far a connection has got.
pub enum Established {
    /// The handshake is made.
    Terminated(ClientStream),
    /// The connection is to be passed through, without a handshake.
    PassedThrough(tokio::net::TcpStream, RoutedTo),
}

/// A handshake that counts as in progress, and its memory. It includes the verification of the certificate: until
/// then the connection holds a chain, and is charged to no class of clients.
pub struct HandshakeInProgress {
    /// The turn of the handshake.
    pub turn: HandshakeTurn,
    _charge: MemoryCharge,
}

impl TlsHandshake<'_> {
    /// Makes the handshake. A failure is counted and logged.
    pub async fn make(
        self,
        stream: TcpStream,
        from: SocketAddr,
        slot: &ConnectionSlot,
    ) -> Option<(Established, HandshakeInProgress)> {
        let Self { admission, service, .. } = self;
        let listener = admission.listener();
        let limit = service.limits.handshake_timeout;
        match timeout(limit, self.in_turn(stream, slot)).await {
            Ok(Ok(established)) => Some(established),
            Ok(Err(error)) => {
                admission.count(Refusal::Handshake);
                if let Some(reason) = serving::chain_limit_error(&error) {
                    let line = format!("listener {listener} refused a TLS handshake");
                    admission.warnings.warn(&line, format_args!("{reason}, from {from}"));
                }
                let error = describe_handshake_error(&error);
                tracing::debug!(listener, client = %from, error, "{}", Refusal::Handshake.reason());
                None
            }
            Err(_) => {
                admission.count(Refusal::HandshakeTimeout);
                tracing::debug!(listener, client = %from, "{}", Refusal::HandshakeTimeout.reason());
                None
            }
        }
    }

    async fn in_turn(
        self,
        stream: TcpStream,
        slot: &ConnectionSlot,
    ) -> io::Result<(Established, HandshakeInProgress)> {
        let source = slot.source();
        let memory = self.admission.memory(source);
        let socket = ClientSocket::new(stream, Arc::clone(&memory));
        // A connection that sends nothing takes no turn. Its bytes stay in the socket, because thousands of
        // connections may wait.
        if !socket.has_bytes().await? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        slot.handshake_begun(clock::now());
        let turn = self.queue.turn(source).await;
        let Some(charge) = handshake_memory::charge(&memory) else {
            self.admission.report_no_memory(source);
            return Err(io::ErrorKind::OutOfMemory.into());
        };
        let limit = self.service.request_limits.stall_timeout;
        let mut socket = StallTimeout::new(socket, limit);
        let handshake = async {
            let mut read = Vec::new();
            if let Some(routing) = self.passed_through {
                // Boxed, because few connections wait here.
                let upstream = Box::pin(routing.by_server_name(&mut socket, &mut read)).await;
                let upstream = upstream.map_err(|_| io::ErrorKind::UnexpectedEof)?;
                if let Some(upstream) = upstream {
                    let client = socket.into_inner().into_flow_socket()?;
                    return Ok(Established::PassedThrough(client, (Arc::clone(upstream), read)));
                }
            }
            let stream = ReadAhead::with_unread(socket, read, Turn::CLIENT);
            accept_tls(stream, self.tls).await.map(Established::Terminated)
        };
        let established = tokio::select! {
            established = handshake => established?,
            () = turn.stalled() => {
                return Err(io::Error::other("stalled, ended for another one"));
            }
        };
        Ok((established, HandshakeInProgress { turn, _charge: charge }))
    }
}
