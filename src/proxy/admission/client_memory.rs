//! What one client connection holds of the [memory budget](jackstay_core::admission).
//!
//! | charged | bytes |
//! |---|---|
//! | connection | [`CONNECTION_COST`]; on HTTP/1.1 also the buffer of a large head while it is read ([`super::head_memory`]) |
//! | request | [`STREAM_COST`], and its head as decoded, until the last byte of the response is sent |
//! | head over HTTP/2 that continues in other frames | what its bytes may hold, at most the largest one ([`open_head`]), until it is complete |
//! | header table of HTTP/2 | what its entries keep ([`jackstay_core::header_table`]) |
//! | request body | its receive window, up to the window of the connection |
//! | response | its [`ResponseReserve`] from the begin of the request, or when one that waits to prove its token is sent, that of a watch for a watch, and the waiting bytes beyond it |
//! | kernel memory of the socket | see [`super::socket_memory`] |
//! | held body, watch frames | see [`jackstay_core::admission::ByteBudget`] |
//!
//! The costs are estimates, above what a connection and a stream hold. Headers are charged once they are decoded; what
//! was read before that is limited by [`jackstay_net::frame_limiter`], which reads at most 32 KiB before the connection
//! is polled again, and by `max_header_bytes` for each head.
//!
//! The connection takes from the budget in steps of [`STEP`], and its first [`FREE`] bytes of each kind are part
//! of the cost of the connection. A client that sends one request after the other thus changes no counter that
//! other threads use, and is not refused when others have used up the budget.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use http::{Request, header};
use jackstay_core::admission::{
    ByteAccount, ByteBudget, Level, MemoryCharge, MemoryKind, Refusal, SourceMemory,
};
use jackstay_core::credential_class::ClientRank;
use jackstay_core::request::hygiene;
use jackstay_core::request::info::RequestInfo;
use jackstay_core::request::path_prefix::PathPrefix;

use super::head_memory::HeadMemory;
use super::request_windows::Windows;
use super::response_reserve::ResponseReserve;
use super::socket_memory::SocketMemory;
use super::tunnel_memory::TunnelMemory;

/// Bytes of a connection: TLS, HTTP/2, their buffers, and the first [`FREE`] bytes of each kind. An idle one has 20 KiB
/// (measured with a thousand).
const CONNECTION_COST: usize = 64 << 10;
/// Bytes of a request besides its head: futures, the record of the outcome, the state of both HTTP/2 streams.
const STREAM_COST: usize = 8 << 10;
/// Bytes of a header field besides name and value: an entry of `http::HeaderMap`, and its share of the index.
const FIELD_COST: usize = 112;
/// Fields of a usual head. The tables of a `HeaderMap` double when they are full, so that one with more fields may have
/// room for twice as many.
const USUAL_FIELDS: usize = 32;
/// Bytes of each kind that a connection holds without a charge of their own: one request with a usual head.
const FREE: usize = 12 << 10;
/// A connection takes a multiple of these bytes from the budget.
const STEP: usize = 16 << 10;
/// Waiting bytes of all streams of a connection above which a client that reads slowly is stalled.
const MAX_WAITING: usize = 256 << 10;

/// Streams of a connection whose client has no configured identity, at most. Go's HTTP/2 server announces as
/// many.
pub const UNPROVEN_STREAMS: u32 = 250;

/// What a connection holds of one kind.
#[derive(Debug)]
struct Allotment {
    kind: MemoryKind,
    used: Cell<usize>,
    /// Taken from the budget.
    granted: Cell<usize>,
}

impl Allotment {
    fn new(kind: MemoryKind) -> Self {
        Self { kind, used: Cell::new(0), granted: Cell::new(0) }
    }

    /// Bytes to take from the budget for `used` bytes.
    fn needed(used: usize) -> usize {
        used.saturating_sub(FREE).next_multiple_of(STEP)
    }

    /// Adds bytes; `take` takes more from the budget. False, and nothing added, if it does not.
    fn add(&self, bytes: usize, take: impl FnOnce(MemoryKind, usize) -> bool) -> bool {
        let used = self.used.get() + bytes;
        let needed = Self::needed(used);
        let granted = self.granted.get();
        if needed > granted {
            if !take(self.kind, needed - granted) {
                return false;
            }
            self.granted.set(needed);
        }
        self.used.set(used);
        true
    }

    /// Removes bytes; `give` returns bytes to the budget. One step is kept until nothing is used.
    fn remove(&self, bytes: usize, give: impl FnOnce(MemoryKind, usize)) {
        let used = self.used.get() - bytes;
        self.used.set(used);
        let kept = if used == 0 { 0 } else { Self::needed(used) + STEP };
        let granted = self.granted.get();
        if granted > kept {
            self.granted.set(kept);
            give(self.kind, granted - kept);
        }
    }
}

/// The memory of one client connection.
#[derive(Debug)]
pub struct ClientMemory {
    source: Arc<SourceMemory>,
    rank: Rc<Cell<ClientRank>>,
    streams: Allotment,
    windows: Allotment,
    responses: Allotment,
    /// The windows that the connection has announced.
    announced: Windows,
    open_streams: Cell<usize>,
    /// Bytes that the bodies of open requests may fill, without the limit of the connection.
    bodies: Cell<usize>,
    /// Bytes of responses that wait for the client.
    waiting: Cell<usize>,
    last_shed: Rc<Cell<Option<Refusal>>>,
    _connection: MemoryCharge,
}

impl ClientMemory {
    /// Charges a connection of this source with these windows and `extra` bytes of buffers. If it does not fit, `evict`
    /// is asked to close an idle connection of the source, whose memory is then used twice until it is closed. `None`
    /// if there is none.
    pub fn new(
        source: Arc<SourceMemory>,
        rank: ClientRank,
        announced: Windows,
        extra: usize,
        evict: impl FnOnce() -> bool,
    ) -> Option<Rc<Self>> {
        let (kind, bytes) = (MemoryKind::Connections, CONNECTION_COST + extra);
        let connection = source
            .try_charge(kind, bytes, rank)
            .or_else(|| evict().then(|| source.charge(kind, bytes)));
        let Some(connection) = connection else {
            source.budget().count(Refusal::ConnectionMemory);
            return None;
        };
        Some(Rc::new(Self {
            source,
            rank: Rc::new(Cell::new(rank)),
            streams: Allotment::new(MemoryKind::Streams),
            windows: Allotment::new(MemoryKind::RequestWindows),
            responses: Allotment::new(MemoryKind::Responses),
            announced,
            open_streams: Cell::new(0),
            bodies: Cell::new(0),
            waiting: Cell::new(0),
            last_shed: Rc::default(),
            _connection: connection,
        }))
    }

    /// The memory of a client on this node without buffers.
    #[cfg(test)]
    pub fn of_local_client(source: Arc<SourceMemory>, rank: ClientRank) -> Option<Rc<Self>> {
        Self::new(source, rank, Windows::of(rank, std::net::Ipv4Addr::LOCALHOST.into()), 0, || {
            false
        })
    }

    /// The windows to announce.
    pub fn windows(&self) -> Windows {
        self.announced
    }

    /// What the client has proven up to now.
    pub fn rank(&self) -> ClientRank {
        self.rank.get()
    }

    /// What the client has proven, for the sockets that are charged to it.
    pub fn shared_rank(&self) -> Rc<Cell<ClientRank>> {
        Rc::clone(&self.rank)
    }

    /// The memory of its heads, if it uses HTTP/1.1.
    pub fn heads(&self) -> HeadMemory {
        HeadMemory::new(Arc::clone(&self.source), self.rank())
    }

    /// Follows what the client has proven in the memory of its socket, and learns there that the connection is shed.
    pub fn attach_to(&self, socket: &SocketMemory) {
        socket.follow_rank(self.shared_rank());
        socket.report_shed(Rc::clone(&self.last_shed));
    }

    /// The client has proven this.
    pub fn raise_rank(&self, rank: ClientRank) {
        self.rank.set(self.rank.get().max(rank));
    }

    /// Number of requests whose responses are not complete.
    pub fn open_streams(&self) -> usize {
        self.open_streams.get()
    }

    /// How short memory is for this client.
    pub fn level(&self) -> Level {
        self.source.level(self.rank())
    }

    /// Whether so much waits for the client that it must read at a rate.
    pub fn has_much_unread(&self) -> bool {
        self.waiting.get() > MAX_WAITING
    }

    /// Counts a refusal of this client because memory is short.
    pub fn count(&self, refusal: Refusal) {
        self.last_shed.set(Some(refusal));
        self.source.budget().count(refusal);
    }

    /// The last refusal because memory was short, if there was one since the last call.
    pub fn take_last_shed(&self) -> Option<Refusal> {
        self.last_shed.take()
    }

    /// Charges a request to a server with the API below `prefix`; `None` if it does not fit. Of a client without a
    /// configured identity, that includes the reserve of the response: once the request is sent upstream, its response
    /// can no longer be refused. One with a token may wait until it is sent ([`super::unproven_requests`]), and nothing
    /// of its response is held before ([`StreamMemory::charge_response`]).
    pub fn begin<B: http_body::Body>(
        self: &Rc<Self>,
        request: &Request<B>,
        prefix: &PathPrefix,
    ) -> Option<StreamMemory> {
        let mut stream = self.begin_uncharged();
        let reserve = match self.rank() {
            ClientRank::Identity => ResponseReserve::default(),
            _ if RequestInfo::is_watch(request, prefix) => ResponseReserve::WATCH,
            ClientRank::Token | ClientRank::Unproven => ResponseReserve::STREAM,
        };
        let fits = stream.try_add_head(STREAM_COST + head_size(request))
            && (request.body().is_end_stream()
                || stream.try_add_body(self.announced.of_body(request.body().size_hint().upper())))
            && if self.rank() == ClientRank::Unproven && has_token(request) {
                stream.deferred.set(Some(reserve));
                true
            } else {
                stream.try_add_reserve(reserve)
            };
        if !fits {
            self.count(Refusal::RequestMemory);
        }
        fits.then_some(stream)
    }

    /// The memory of a request that was refused, whose response is small.
    pub fn begin_uncharged(self: &Rc<Self>) -> StreamMemory {
        self.open_streams.set(self.open_streams.get() + 1);
        StreamMemory {
            connection: Rc::clone(self),
            bytes: 0,
            body: 0,
            reserve: Cell::default(),
            deferred: Cell::default(),
            waiting: Cell::new(0),
        }
    }

    /// Charges what header blocks of HTTP/2 hold beside the heads of requests. `None` if it does not fit.
    pub fn charge_headers(&self, kind: MemoryKind, bytes: usize) -> Option<MemoryCharge> {
        let charge = self.source.try_charge(kind, bytes, self.rank());
        if charge.is_none() {
            self.count(Refusal::RequestMemory);
        }
        charge
    }

    /// Charges a tunnel to this client, which outlives the connection.
    ///
    /// # Errors
    /// It does not fit.
    pub fn charge_tunnel(&self) -> Result<TunnelMemory, Refusal> {
        TunnelMemory::new(&self.source, self.shared_rank()).ok_or_else(|| {
            self.count(Refusal::RequestMemory);
            Refusal::RequestMemory
        })
    }

    /// The account of this client in a budget for one kind of bytes.
    pub fn account(&self, budget: &Arc<ByteBudget>) -> ByteAccount {
        budget.account(&self.source, self.rank())
    }

    fn try_add(&self, allotment: &Allotment, bytes: usize) -> bool {
        let rank = self.rank();
        allotment.add(bytes, |kind, bytes| self.source.try_add(kind, bytes, rank))
    }

    /// Charges one more request body, which may fill `bytes`.
    fn add_body(&self, bytes: usize) -> bool {
        let bodies = self.bodies.get();
        let more = self.within_window(bodies + bytes) - self.within_window(bodies);
        let fits = self.try_add(&self.windows, more);
        if fits {
            self.bodies.set(bodies + bytes);
        }
        fits
    }

    fn remove_body(&self, bytes: usize) {
        let bodies = self.bodies.get();
        let less = self.within_window(bodies) - self.within_window(bodies - bytes);
        self.bodies.set(bodies - bytes);
        self.windows.remove(less, |kind, bytes| self.source.subtract(kind, bytes));
    }

    /// What bodies that may fill `bytes` can fill together.
    fn within_window(&self, bytes: usize) -> usize {
        bytes.min(self.announced.connection as usize)
    }

    fn add_response(&self, bytes: usize) {
        self.responses.add(bytes, |kind, bytes| {
            self.source.add(kind, bytes);
            true
        });
    }

    fn remove_response(&self, bytes: usize) {
        self.responses.remove(bytes, |kind, bytes| self.source.subtract(kind, bytes));
    }
}

impl Drop for ClientMemory {
    fn drop(&mut self) {
        for allotment in [&self.streams, &self.windows, &self.responses] {
            debug_assert_eq!(allotment.used.get(), 0, "{:?}", allotment.kind);
            self.source.subtract(allotment.kind, allotment.granted.get());
        }
    }
}

/// The memory of one request and its response, charged until this is dropped.
#[derive(Debug)]
pub struct StreamMemory {
    connection: Rc<ClientMemory>,
    bytes: usize,
    /// Bytes that its body may fill.
    body: usize,
    /// What is charged for the response, besides the waiting bytes beyond its piece.
    reserve: Cell<ResponseReserve>,
    /// What is to be charged before the request is sent.
    deferred: Cell<Option<ResponseReserve>>,
    /// Bytes that wait for the client.
    waiting: Cell<usize>,
}

impl StreamMemory {
    /// The memory of the connection.
    pub fn connection(&self) -> &ClientMemory {
        &self.connection
    }

    fn try_add_head(&mut self, bytes: usize) -> bool {
        let fits = self.connection.try_add(&self.connection.streams, bytes);
        if fits {
            self.bytes = bytes;
        }
        fits
    }

    fn try_add_body(&mut self, bytes: usize) -> bool {
        let fits = self.connection.add_body(bytes);
        if fits {
            self.body = bytes;
        }
        fits
    }

    fn try_add_reserve(&self, reserve: ResponseReserve) -> bool {
        let fits = self.connection.try_add(&self.connection.responses, reserve.sum());
        if fits {
            self.reserve.set(reserve);
        }
        fits
    }

    /// Charges the reserve of the response before the request is sent, unless that was done when it began.
    ///
    /// # Errors
    /// It does not fit.
    pub fn charge_response(&self) -> Result<(), Refusal> {
        if self.deferred.take().is_none_or(|reserve| self.try_add_reserve(reserve)) {
            return Ok(());
        }
        self.connection.count(Refusal::RequestMemory);
        Err(Refusal::RequestMemory)
    }

    /// Charges what the response may hold, now that its head has arrived. An identity has no reserve for a piece. What
    /// is charged for another client does not grow beyond its share: the request was charged for a watch, and the
    /// response is none.
    pub fn set_reserve(&self, mut reserve: ResponseReserve) {
        let connection = &self.connection;
        let is_identity = connection.rank() == ClientRank::Identity;
        if is_identity {
            reserve.piece = 0;
        }
        let (before, previous) = (self.charged(), self.reserve.replace(reserve));
        let after = self.charged();
        if after <= before {
            connection.remove_response(before - after);
        } else if is_identity {
            connection.add_response(after - before);
        } else if !connection.try_add(&connection.responses, after - before) {
            self.reserve.set(previous);
        }
    }

    /// Adds bytes that wait for the client, and charges those beyond the reserve.
    pub fn add_waiting(&self, bytes: usize) {
        let waiting = &self.connection.waiting;
        waiting.set(waiting.get() + bytes);
        let before = self.charged();
        self.waiting.set(self.waiting.get() + bytes);
        self.connection.add_response(self.charged() - before);
    }

    /// Bytes no longer wait.
    pub fn remove_waiting(&self, bytes: usize) {
        let waiting = &self.connection.waiting;
        waiting.set(waiting.get() - bytes);
        let before = self.charged();
        self.waiting.set(self.waiting.get() - bytes);
        self.connection.remove_response(before - self.charged());
    }

    /// Bytes that are charged for the response.
    fn charged(&self) -> usize {
        let ResponseReserve { window, piece } = self.reserve.get();
        window + self.waiting.get().max(piece)
    }
}

impl Drop for StreamMemory {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.open_streams.set(connection.open_streams.get() - 1);
        connection.remove_body(self.body);
        connection.remove_response(self.charged());
        connection
            .streams
            .remove(self.bytes, |kind, bytes| connection.source.subtract(kind, bytes));
    }
}

fn has_token<B>(request: &Request<B>) -> bool {
    request.headers().contains_key(header::AUTHORIZATION)
}

/// Bytes that a header block may hold whose list may have `list` bytes (RFC 9113, 6.5.2), while it is not complete.
/// Each field counts 32 bytes and more, and costs more if the table has room for others.
pub const fn open_head(list: usize) -> usize {
    list / hygiene::FIELD_OVERHEAD * 2 * FIELD_COST
}

/// Bytes that a decoded head occupies, approximately.
fn head_size<B>(request: &Request<B>) -> usize {
    let uri = request.uri();
    let target = uri.path_and_query().map_or(0, |target| target.as_str().len());
    let authority = uri.authority().map_or(0, |authority| authority.as_str().len());
    let fields = request.headers().iter();
    let fields: usize = fields.map(|(name, value)| name.as_str().len() + value.len()).sum();
    let count = request.headers().len();
    let tables = FIELD_COST * (count + count.saturating_sub(USUAL_FIELDS));
    request.method().as_str().len() + target + authority + fields + tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::admission::response_reserve::MAX_PIECE;
    use jackstay_core::admission::{MemoryBudget, Shed};

    const MIB: usize = 1 << 20;

    /// Of a server with the API at the root.
    static ROOT: std::sync::LazyLock<PathPrefix> = std::sync::LazyLock::new(PathPrefix::default);

    /// What the tables of a head with different names hold: entries of 104 bytes, and an index of 4 bytes for each of a
    /// power of two of places, of which three quarters can be used (`http::HeaderMap`). The room for some more is part
    /// of [`STREAM_COST`].
    #[test]
    fn head_with_many_fields_is_charged_for_the_tables_that_hold_it() {
        for count in [0, 1, 20, 32, 33, 49, 97, 200, 385, 1_000, 1_537, 1_985] {
            let mut request = Request::get("/").body(()).unwrap();
            for number in 0..count {
                let name = http::HeaderName::try_from(format!("a{number}")).unwrap();
                request.headers_mut().append(name, http::HeaderValue::from_static(""));
            }
            let capacity = request.headers().capacity();
            let tables = capacity * 104 + (capacity * 4 / 3).next_power_of_two() * 4;
            let charged = head_size(&request);
            let room = USUAL_FIELDS * FIELD_COST;
            assert!(
                room < STREAM_COST && charged + room >= tables,
                "{count}: {charged} for {tables}"
            );
            assert!(charged <= 256 + count * 240, "{count}: {charged}");
        }
    }

    fn head() -> Request<String> {
        Request::get("https://api/version").body(String::new()).unwrap()
    }

    fn upload() -> Request<String> {
        Request::post("https://api/x").body("x".repeat(MIB)).unwrap()
    }

    fn connection(budget: &Arc<MemoryBudget>, rank: ClientRank) -> Rc<ClientMemory> {
        ClientMemory::of_local_client(budget.source(1), rank).unwrap()
    }

    /// A request that waits to prove its token holds nothing of a response: four hundred connections with such requests
    /// fit into the share of a source. Each is charged when it is sent.
    #[test]
    fn response_of_a_request_with_an_unproven_token_is_charged_when_it_is_sent() {
        let budget = MemoryBudget::new(160 * MIB);
        let connect = || connection(&budget, ClientRank::Unproven);
        let with_token =
            || Request::get("https://api/version").header(header::AUTHORIZATION, "Bearer x");
        let waiting: Vec<_> = (0..400)
            .map(|n| {
                let stream = connect().begin(&with_token().body(String::new()).unwrap(), &ROOT);
                stream.unwrap_or_else(|| panic!("{n} is refused"))
            })
            .collect();
        let last = connect();
        let before = budget.used();
        waiting[0].charge_response().unwrap();
        assert!(budget.used() - before >= ResponseReserve::STREAM.sum() - FREE);
        waiting[0].charge_response().unwrap();
        let sent = waiting.iter().take_while(|stream| stream.charge_response().is_ok()).count();
        assert!(sent < 400, "{sent}");
        assert_eq!(budget.shed(Shed::StreamRefused), 1);
        // Without a token, it does not wait.
        assert!(last.begin(&head(), &ROOT).is_none());
        drop((waiting, last));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn requests_one_after_the_other_take_nothing_from_the_budget() {
        let budget = MemoryBudget::new(MIB);
        let connection = connection(&budget, ClientRank::Unproven);
        let idle = budget.used();
        assert_eq!(idle, CONNECTION_COST);
        // One that would not fit: others have used up the budget.
        let _other = budget.source(2).charge(MemoryKind::Flows, 10 * MIB);
        let allotment = &connection.responses;
        allotment.add(FREE, |_, _| unreachable!("within what is free"));
        allotment.remove(FREE, |_, _| unreachable!("nothing was taken"));
    }

    #[test]
    fn requests_are_refused_when_the_share_is_used_up() {
        let budget = MemoryBudget::new(4 * MIB);
        let unproven = connection(&budget, ClientRank::Unproven);
        let identity =
            ClientMemory::of_local_client(budget.source(2), ClientRank::Identity).unwrap();
        let mut streams = Vec::new();
        while let Some(stream) = unproven.begin(&head(), &ROOT) {
            streams.push(stream);
        }
        // Half of 5/8 of 4 MiB is 1,280 KiB, and a request has 136 KiB with the reserve of its response.
        assert_eq!(streams.len(), 8);
        assert_eq!(unproven.level(), Level::Critical);
        assert_eq!(budget.shed(Shed::StreamRefused), 1);
        assert_eq!(identity.level(), Level::Free);
        assert!(identity.begin(&upload(), &ROOT).is_some());
        streams.truncate(streams.len() - 2);
        assert!(unproven.begin(&head(), &ROOT).is_some(), "what is released can be used again");
        drop(streams);
        drop((unproven, identity));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn windows_of_bodies_are_charged_up_to_that_of_the_connection() {
        let budget = MemoryBudget::new(100 * MIB);
        let connection = connection(&budget, ClientRank::Unproven);
        let streams: Vec<_> =
            (0..16).map(|_| connection.begin(&upload(), &ROOT).unwrap()).collect();
        let windows = budget.used_for(MemoryKind::RequestWindows);
        assert!(((256 << 10) - STEP..=256 << 10).contains(&windows), "{windows}");
        drop((streams, connection));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn body_of_a_remote_client_is_charged_up_to_its_length() {
        let budget = MemoryBudget::new(100 * MIB);
        let remote = Windows::of(ClientRank::Token, [192, 0, 2, 1].into());
        assert_eq!(remote.stream, 256 << 10, "as large as that of kube-apiserver");
        let connection =
            ClientMemory::new(budget.source(1), ClientRank::Token, remote, 0, || false).unwrap();
        let post = |length: usize| {
            connection
                .begin(&Request::post("https://api/x").body("x".repeat(length)).unwrap(), &ROOT)
        };
        let charged = || budget.used_for(MemoryKind::RequestWindows);
        let small: Vec<_> = (0..50).map(|_| post(1_000).unwrap()).collect();
        assert!(charged() <= 50_000 + STEP, "{}", charged());
        let large: Vec<_> = (0..5).map(|_| post(1 << 20).unwrap()).collect();
        assert!(((512 << 10) - STEP..=512 << 10).contains(&charged()), "{}", charged());
        drop((small, large, connection));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn responses_are_charged_until_they_are_taken() {
        let budget = MemoryBudget::new(100 * MIB);
        let connection = connection(&budget, ClientRank::Unproven);
        let stream = connection.begin(&head(), &ROOT).unwrap();
        stream.set_reserve(ResponseReserve::STREAM);
        stream.add_waiting(300 << 10);
        assert!(connection.has_much_unread());
        assert!(budget.used_for(MemoryKind::Responses) >= 350 << 10);
        stream.remove_waiting(299 << 10);
        assert!(!connection.has_much_unread());
        stream.set_reserve(ResponseReserve::default());
        assert!(budget.used_for(MemoryKind::Responses) <= STEP);
        stream.remove_waiting(1 << 10);
        drop((stream, connection));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn responses_of_many_sources_leave_room_for_an_identity() {
        for rank in [ClientRank::Unproven, ClientRank::Token] {
            let limit = 64 * MIB;
            let budget = MemoryBudget::new(limit);
            let mut clients = Vec::new();
            for uid in 1..=5 {
                let mut streams = Vec::new();
                'connections: while let Some(client) =
                    ClientMemory::of_local_client(budget.source(uid), rank)
                {
                    for _ in 0..UNPROVEN_STREAMS {
                        let Some(stream) = client.begin(&head(), &ROOT) else { break 'connections };
                        streams.push(stream);
                    }
                }
                clients.push(streams);
            }
            // The clients take nothing of their responses.
            for stream in clients.iter().flatten() {
                stream.set_reserve(ResponseReserve::STREAM);
                stream.add_waiting(MAX_PIECE);
            }
            let (used, share) = (budget.used(), if rank == ClientRank::Token { 6 } else { 5 });
            assert!(used <= limit / 8 * share, "{rank:?}: {used}");
            let identity =
                ClientMemory::of_local_client(budget.source(1), ClientRank::Identity).unwrap();
            let request = identity.begin(&upload(), &ROOT).expect("an identity's request fits");
            for stream in clients.iter().flatten() {
                stream.remove_waiting(MAX_PIECE);
            }
            drop((clients, request, identity));
            assert_eq!(budget.used(), 0);
        }
    }

    #[test]
    fn a_piece_within_the_reserve_is_not_charged_again() {
        let budget = MemoryBudget::new(100 * MIB);
        let responses = || budget.used_for(MemoryKind::Responses);
        let client = connection(&budget, ClientRank::Token);
        let stream = client.begin(&head(), &ROOT).unwrap();
        let charged = responses();
        stream.add_waiting(MAX_PIECE);
        assert_eq!(responses(), charged);
        stream.add_waiting(MAX_PIECE);
        assert_eq!(responses(), charged + MAX_PIECE);
        // The head of a watch arrives.
        stream.set_reserve(ResponseReserve { window: 0, piece: 16 << 10 });
        stream.remove_waiting(MAX_PIECE);
        assert!(responses() <= MAX_PIECE + STEP, "{}", responses());
        let identity = connection(&budget, ClientRank::Identity);
        let other = identity.begin(&head(), &ROOT).unwrap();
        let charged = responses();
        other.set_reserve(ResponseReserve { window: FREE, piece: MAX_PIECE });
        assert_eq!(responses(), charged, "an identity has no reserve for a piece");
        stream.remove_waiting(MAX_PIECE);
    }

    #[test]
    fn a_watch_is_charged_as_one_before_its_head_arrives() {
        let (budget, mut watches) = (MemoryBudget::new(256 * MIB / 10 * 7), Vec::new());
        let watch =
            || Request::get("https://api/api/v1/pods?watch=true").body(String::new()).unwrap();
        // Each of a container of one user, whose first request has a token that nothing has proven yet.
        for n in 0..400 {
            let client = connection(&budget, ClientRank::Unproven);
            watches.push(client.begin(&watch(), &ROOT).unwrap_or_else(|| panic!("{n} is refused")));
        }
        let responses = budget.used_for(MemoryKind::Responses);
        assert!(responses <= 400 * (ResponseReserve::WATCH.sum() + STEP), "{responses}");
        assert_eq!(budget.level(ClientRank::Unproven), Level::Free);
        for watch in &watches {
            watch.set_reserve(ResponseReserve::WATCH);
        }
        assert_eq!(budget.used_for(MemoryKind::Responses), responses);
        drop(watches);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn response_that_is_no_watch_after_all_is_charged_within_the_share() {
        let budget = MemoryBudget::new(4 * MIB);
        let client = connection(&budget, ClientRank::Unproven);
        let watch = Request::get("https://api/api/v1/pods?watch=1").body(String::new()).unwrap();
        let streams: Vec<_> = std::iter::from_fn(|| client.begin(&watch, &ROOT)).collect();
        assert!(streams.len() > 30, "{}", streams.len());
        let full = budget.used();
        streams[0].set_reserve(ResponseReserve::STREAM);
        assert_eq!(budget.used(), full, "no room for more");
        streams[0].set_reserve(ResponseReserve::default());
        drop(streams);
        let stream = client.begin(&watch, &ROOT).unwrap();
        let before = budget.used();
        stream.set_reserve(ResponseReserve::STREAM);
        assert!(budget.used() >= before + 90_000);
        drop((stream, client));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn connection_beyond_the_share_takes_the_memory_of_one_that_is_evicted() {
        let budget = MemoryBudget::new(4 * MIB);
        let new = |evict: bool| {
            let windows = Windows::of(ClientRank::Unproven, [127, 0, 0, 1].into());
            ClientMemory::new(budget.source(1), ClientRank::Unproven, windows, 0, || evict)
        };
        let mut connections: Vec<_> = std::iter::from_fn(|| new(false)).collect();
        assert_eq!(budget.shed(Shed::ConnectionRefused), 1);
        connections.extend(new(true));
        assert_eq!(connections.len(), 21);
        assert_eq!(budget.shed(Shed::ConnectionRefused), 1);
        drop(connections);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn large_heads_are_charged_by_their_size() {
        let value = "x".repeat(60_000);
        let request = Request::get("/version").header("x-filler", &value).body(()).unwrap();
        assert!(head_size(&request) > 60_000);
    }

    #[test]
    fn connections_are_refused_when_the_share_is_used_up() {
        let budget = MemoryBudget::new(4 * MIB);
        let new = |rank| ClientMemory::of_local_client(budget.source(1), rank);
        let connections: Vec<_> = std::iter::from_fn(|| new(ClientRank::Unproven)).collect();
        assert_eq!(connections.len(), 20, "1,280 KiB");
        assert!(new(ClientRank::Identity).is_some());
        drop(connections);
        assert_eq!(budget.used(), 0);
    }
}
