//! Serves the connections of one L7 listener on one worker: accept and TLS handshake ([`super::tls_handshake`]). Then
//! [`super::http_connection`] drives the connection, and [`super::client_connection`] serves each request.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use jackstay_core::admission::Refusal;
use jackstay_core::credential_class::ClientRank;
use jackstay_core::request::hygiene::ForwardedFor;
use jackstay_net::tls::certificate::VERSION_1;
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;
use jackstay_sys::sockets::stream::{TcpListener, TcpStream};
use jackstay_sys::sockets::tcp_options;
use jackstay_sys::sockets::tcp_options::MAX_UNSENT;
use tokio::time::timeout;

use super::accept;
use super::admission::client_memory::ClientMemory;
use super::admission::connection_slots::{ConnectionSlot, SlotLimit};
use super::admission::handshake_queue::HandshakeQueue;
use super::admission::listener_admission::ListenerAdmission;
use super::admission::proven_tokens::LastToken;
use super::admission::request_windows::Windows;
use super::client_certificate::ClientCertificate;
use super::client_connection::ClientConnection;
use super::client_stream::ClientStream;
use super::consistent_reads::client::LastClient;
use super::drain::DrainWatcher;
use super::http_connection::HttpConnection;
use super::identity_lane::{HandedOver, IdentityLane, LaneClient, LaneConnections};
use super::listener_service::{CurrentService, ListenerService};
use super::passthrough::flow::ListenerFlows;
use super::passthrough::routing::RoutedTo;
use super::task_queues::TaskQueues;
use super::tls_handshake::{Established, TlsHandshake};

/// Serves the connections of one L7 listener on one worker.
pub struct HttpsServer {
    admission: Rc<ListenerAdmission>,
    service: CurrentService,
    /// Present once the listener passes connections through.
    flows: RefCell<Option<Rc<ListenerFlows>>>,
    tls: Arc<ServingTls>,
    handshakes: Rc<HandshakeQueue>,
    drain: DrainWatcher,
    served: ServedClients,
    tasks: TaskQueues,
}

/// The connections of a listener that a thread serves.
pub enum ServedClients {
    /// All.
    All,
    /// Those of clients without a configured identity. The others are handed over to the identity lane.
    Others {
        /// The way to the identity lane.
        identity_lane: IdentityLane,
        /// The listener's connections on the identity lane.
        handed_over: LaneConnections,
        /// The number of workers.
        workers: usize,
    },
    /// Those that were handed over to this thread, which is the identity lane.
    Identities,
}

/// An accepted connection.
enum Accepted {
    /// With TLS, and the certificate that the client has sent.
    Terminated(ClientStream, Option<Rc<ClientCertificate>>),
    /// To be passed through.
    PassedThrough(tokio::net::TcpStream, RoutedTo),
}

impl HttpsServer {
    /// The server of a listener. `drain` ends its connections. All listeners of the worker share
    /// `handshakes`.
    pub fn new(
        admission: Rc<ListenerAdmission>,
        service: Rc<ListenerService>,
        tls: Arc<ServingTls>,
        handshakes: Rc<HandshakeQueue>,
        drain: DrainWatcher,
        served: ServedClients,
        tasks: TaskQueues,
    ) -> Self {
        Self {
            admission,
            service: CurrentService::new(service),
            flows: RefCell::default(),
            tls,
            handshakes,
            drain,
            served,
            tasks,
        }
    }

    /// The service for a request that begins now.
    pub fn service(&self) -> Rc<ListenerService> {
        self.service.now()
    }

    /// Serves all later requests with `service`.
    pub fn replace_service(&self, service: Rc<ListenerService>) {
        self.service.replace(service);
    }

    /// The drain of its connections.
    pub fn drain(&self) -> &DrainWatcher {
        &self.drain
    }

    /// The connections of the listener.
    pub fn admission(&self) -> &Rc<ListenerAdmission> {
        &self.admission
    }

    /// The connections that are passed through, if the listener does so or has done so.
    pub fn flows(&self) -> Option<Rc<ListenerFlows>> {
        self.flows.borrow().clone()
    }

    /// Passes connections through to `flows` whose server name has a route there.
    pub fn set_flows(&self, flows: Rc<ListenerFlows>) {
        self.flows.replace(Some(flows));
    }

    /// The number of open connections, flows and tunnels included.
    pub fn connections(&self) -> usize {
        self.admission.open()
    }

    /// Starts to accept on one socket, until `drain` starts.
    pub fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let tasks = self.tasks.clone();
        tasks.spawn_handshake(async move {
            let admit = |stream, from| self.admit(stream, from);
            accept::until_drain(socket, MAX_UNSENT, drain, &self.admission, admit).await;
        });
    }

    fn slot_limit(&self, service: &ListenerService) -> SlotLimit {
        let handed_over = match &self.served {
            ServedClients::Others { handed_over, workers, .. } => {
                handed_over.get().div_ceil(*workers)
            }
            ServedClients::All | ServedClients::Identities => 0,
        };
        SlotLimit {
            slots: service.limits.max_connections,
            has_identities: !service.credentials.slots.is_empty(),
            handed_over,
        }
    }

    fn admit(self: &Rc<Self>, stream: TcpStream, from: SocketAddr) {
        let service = self.service.now();
        let limit = self.slot_limit(&service);
        let prefix = service.limits.source_prefix_v6;
        let Some(slot) = self.admission.admit((&stream, from), prefix, limit) else { return };
        let (this, guard) = (Rc::clone(self), service.metrics.count_connection());
        self.tasks.spawn_handshake(self.unless_forced(async move {
            let accepted = this.accepted(stream, from, &slot, &service).await;
            let (stream, certificate) = match accepted {
                None => return,
                Some(Accepted::PassedThrough(client, routed)) => {
                    return this.pass_through(client, from, slot, routed);
                }
                Some(Accepted::Terminated(stream, certificate)) => (stream, certificate),
            };
            let server = Rc::clone(&this);
            this.tasks.spawn_other(this.unless_forced(async move {
                server.serve(stream, certificate, from, slot, &service).await;
                drop(guard);
            }));
        }));
    }

    /// Runs the flow of a connection, which the drain of flows ends.
    fn pass_through(
        &self,
        client: tokio::net::TcpStream,
        from: SocketAddr,
        slot: ConnectionSlot,
        routed: RoutedTo,
    ) {
        slot.handshake_complete(clock::now());
        let flow = self.flows().and_then(|flows| flows.run(client, from, slot, Some(routed)));
        if let Some(flow) = flow {
            self.tasks.spawn_other(flow);
        }
    }

    /// Serves a connection that a worker has handed over.
    pub fn serve_handed_over(self: &Rc<Self>, connection: HandedOver) {
        let (this, service) = (Rc::clone(self), self.service.now());
        let guard = service.metrics.count_connection();
        self.tasks.spawn_other(self.unless_forced(async move {
            let (stream, client) = match connection.attach() {
                Ok(attached) => attached,
                Err(error) => return this.warn_of_move(&error),
            };
            let LaneClient { from, source, verdict, counted: _counted, .. } = client;
            let slot = this.admission.admit_proven(source);
            let certificate = this.certificate(&stream, source, &service);
            let certificate = certificate.map(|certificate| certificate.with_verdict(verdict));
            this.serve(stream, certificate, from, slot, &service).await;
            drop(guard);
        }));
    }

    fn warn_of_move(&self, error: &io::Error) {
        let line = "connection closed, not served";
        self.admission.warn(line, format_args!("its socket cannot change its thread: {error}"));
    }

    /// A part of a connection, which the drain ends when it is forced.
    fn unless_forced(
        &self,
        connection: impl Future<Output = ()> + 'static,
    ) -> impl Future<Output = ()> + 'static {
        let mut drain = self.drain.clone();
        // Boxed, because an async block that moves a captured future stores it twice.
        let connection = Box::pin(connection);
        async move {
            tokio::select! {
                () = connection => {}
                () = drain.forced() => {}
            }
        }
    }

    /// Makes the handshake of an accepted connection that is not passed through. `None` if the connection was handed
    /// over or must be closed. `service` is that of the listener when it accepted the connection.
    async fn accepted(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        slot: &ConnectionSlot,
        service: &ListenerService,
    ) -> Option<Accepted> {
        let accepted = tokio::select! {
            accepted = self.establish(stream, from, slot, service) => accepted?,
            () = slot.evicted() => {
                self.admission.count(Refusal::Evicted);
                return None;
            }
        };
        // An idle connection may have ended its request since this one was accepted.
        if slot.must_prove_identity() && !slot.leave_reserve(self.slot_limit(service), clock::now())
        {
            self.admission.count(Refusal::NotProven);
            if let Accepted::PassedThrough(client, _) = accepted {
                tcp_options::close_with_reset(client);
            }
            return None;
        }
        Some(accepted)
    }

    /// Makes the handshake, and waits for the verification of the certificate if that decides who serves the
    /// connection. `None` if the connection was handed over or must be closed.
    async fn establish(
        &self,
        stream: TcpStream,
        from: SocketAddr,
        slot: &ConnectionSlot,
        service: &ListenerService,
    ) -> Option<Accepted> {
        let flows = self.flows();
        let routing = flows.map(|flows| flows.routing.current());
        let handshake = TlsHandshake {
            admission: &self.admission,
            service,
            tls: &self.tls,
            queue: &self.handshakes,
            passed_through: routing.filter(|routing| !routing.routes.is_empty()),
        };
        let (stream, handshake) = match handshake.make(stream, from, slot).await? {
            (Established::Terminated(stream), handshake) => (stream, handshake),
            (Established::PassedThrough(client, routed), _) => {
                return Some(Accepted::PassedThrough(client, routed));
            }
        };
        let Some(certificate) = self.certificate(&stream, slot.source(), service) else {
            slot.handshake_complete(clock::now());
            return Some(Accepted::Terminated(stream, None));
        };
        if slot.must_prove_identity() || matches!(self.served, ServedClients::Others { .. }) {
            let verified = timeout(service.limits.handshake_timeout, certificate.until_verified());
            tokio::select! {
                _ = verified => {}
                () = handshake.turn.stalled() => {
                    self.admission.count(Refusal::Handshake);
                    return None;
                }
            }
            slot.handshake_complete(clock::now());
        }
        drop(handshake);
        if !service.credentials.is_identity(&certificate) {
            return Some(Accepted::Terminated(stream, Some(certificate)));
        }
        let stream = match self.hand_over(stream, &certificate, from, slot) {
            Ok(stream) => stream?,
            Err(error) => {
                self.warn_of_move(&error);
                return None;
            }
        };
        slot.set_proven();
        Some(Accepted::Terminated(stream, Some(certificate)))
    }

    /// Hands the connection of a proven identity over to the identity lane. Without one, the stream is returned.
    fn hand_over(
        &self,
        stream: ClientStream,
        certificate: &ClientCertificate,
        from: SocketAddr,
        slot: &ConnectionSlot,
    ) -> io::Result<Option<ClientStream>> {
        let ServedClients::Others { identity_lane, handed_over, .. } = &self.served else {
            return Ok(Some(stream));
        };
        let (listener, source) = (self.admission.listener().to_owned(), slot.source());
        let (verdict, counted) = (certificate.verdict(), handed_over.count());
        identity_lane.hand_over(stream, LaneClient { listener, from, source, verdict, counted })
    }

    /// The certificate that the client sent in its handshake.
    fn certificate(
        &self,
        stream: &ClientStream,
        source: Source,
        service: &ListenerService,
    ) -> Option<Rc<ClientCertificate>> {
        let session = stream.get_ref().1;
        let chain = session.peer_certificates();
        let certificate = ClientCertificate::new(source, chain, &self.tls, &service.metrics)?;
        if let Some(info) = certificate.info().filter(|info| info.is_version_1) {
            let why = format_args!("{}, from {source}: {VERSION_1}", info.subject);
            self.admission.warn("client certificate refused", why);
        }
        Some(certificate)
    }

    /// Serves the requests of one connection. Its limits are those of `service`, also after a reload.
    async fn serve(
        &self,
        stream: ClientStream,
        certificate: Option<Rc<ClientCertificate>>,
        from: SocketAddr,
        slot: ConnectionSlot,
        service: &ListenerService,
    ) {
        let is_identity = certificate
            .as_ref()
            .is_some_and(|certificate| service.credentials.is_identity(certificate));
        let rank = if is_identity { ClientRank::Identity } else { ClientRank::Unproven };
        let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let chain: usize = chain.iter().map(|certificate| certificate.len()).sum();
        let account = self.admission.memory(slot.source());
        let windows = Windows::of(rank, from.ip());
        let evict = || slot.evict_idle_of_source(clock::now());
        let Some(memory) = ClientMemory::new(account, rank, windows, 2 * chain, evict) else {
            return self.admission.report_no_memory(slot.source());
        };
        let socket = stream.get_ref().0.get_ref().get_ref();
        memory.attach_to(socket.memory());
        let own_address = socket.local_addr().ok().map(|address| address.ip());
        let slot = Rc::new(slot);
        let client = Rc::new(ClientConnection {
            memory,
            service: self.service.clone(),
            certificate: certificate.clone(),
            address: from.ip().to_canonical(),
            is_local: from.ip().to_canonical().is_loopback() || own_address == Some(from.ip()),
            slot: Rc::clone(&slot),
            forwarded_for: ForwardedFor::new(from.ip()),
            token: LastToken::default(),
            client: LastClient::default(),
            unproven: Rc::default(),
        });
        let connection =
            HttpConnection { admission: &self.admission, service, drain: self.drain.clone() };
        // Pinned here, because moving the large future would store it twice.
        let mut served = std::pin::pin!(connection.serve(stream, client, &slot));
        let result = match &certificate {
            None => served.await,
            Some(certificate) => tokio::select! {
                result = &mut served => result,
                never = self.follow(certificate, &slot) => match never {},
            },
        };
        if let Err(error) = result {
            tracing::debug!(listener = self.admission.listener(), client = %from, %error, "connection ended");
        }
    }

    /// Follows the certificate as long as the connection is open.
    async fn follow(
        &self,
        certificate: &Rc<ClientCertificate>,
        slot: &ConnectionSlot,
    ) -> Infallible {
        certificate.until_verified().await;
        if self.service.now().credentials.is_identity(certificate) {
            slot.set_proven();
        } else {
            slot.handshake_complete(clock::now());
        }
        certificate.follow().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<'a, F>(
        _: fn(&'a HttpsServer, TcpStream, SocketAddr, &'a ConnectionSlot, &'a ListenerService) -> F,
    ) -> usize {
        size_of::<F>()
    }

    /// Thousands of idle connections may wait.
    #[test]
    fn future_of_a_connection_is_small() {
        let size = size_of_future(HttpsServer::accepted);
        assert!(size <= 4 << 10, "{size}");
    }
}
