//! An HTTP/2 client that presents a certificate, keeps watches open and measures the latency of each request. h2load
//! can do none of these.

use std::{future::poll_fn, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use h2::{
    RecvStream,
    client::{ResponseFuture, SendRequest},
};
use http::{Method, Request, Response, StatusCode, header};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    task::JoinSet,
    time::{Instant, sleep},
};
use tokio_rustls::TlsConnector;

use crate::{Result, origin};

/// Flow-control windows of Go's HTTP/2 transport (`golang.org/x/net/http2`), which kubelet and kubectl use.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// The bearer token of clients without a certificate. The origin accepts any.
pub const TOKEN: &str = "t0ken";

/// Timeout for a whole GET, and for the opening of all watches of one call.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes of an upload that are given to the connection at once.
const UPLOAD_CHUNK: usize = 32 * 1024;

/// Delay before a request is repeated after a 429, equal to the `Retry-After` that jackstay sends.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A client with one HTTP/2 connection.
pub struct Client {
    send: SendRequest<Bytes>,
    base_url: String,
    token: Option<&'static str>,
}

impl Client {
    /// Connects with TCP, TLS and HTTP/2.
    pub async fn connect(address: SocketAddr, tls: &Arc<ClientConfig>) -> Result<Self> {
        let tcp = TcpStream::connect(address).await?;
        tcp.set_nodelay(true)?;
        let name = ServerName::from(address.ip());
        let stream = TlsConnector::from(tls.clone()).connect(name, tcp).await?;
        let (send, connection) = h2::client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .enable_push(false)
            .handshake(stream)
            .await?;
        // This task drives the connection until the last `SendRequest` is dropped. Requests report its errors.
        tokio::spawn(connection);
        Ok(Self { send, base_url: format!("https://{address}"), token: None })
    }

    /// The client, with this bearer token in each request.
    pub fn with_token(self, token: Option<&'static str>) -> Self {
        Self { token, ..self }
    }

    /// Sends a GET without waiting for the response.
    async fn send_get(&mut self, path: &str) -> Result<ResponseFuture> {
        let request = self.request(Method::GET, path)?;
        self.send = self.send.clone().ready().await?;
        Ok(self.send.send_request(request, true)?.0)
    }

    /// A request head.
    fn request(&self, method: Method, path: &str) -> Result<Request<()>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base_url));
        if let Some(token) = self.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        Ok(request.body(())?)
    }

    /// Sends a GET, waits for the response head and returns the body.
    async fn get_body(&mut self, path: &str) -> Result<RecvStream> {
        let response = self.send_get(path).await?.await?;
        body_if_ok(path, response)
    }

    /// Sends a GET, reads the whole body and returns its length.
    pub async fn get(&mut self, path: &str) -> Result<u64> {
        let whole = async {
            let mut body = self.get_body(path).await?;
            let mut len = 0;
            while let Some(data) = body.data().await {
                let data = data?;
                len += data.len() as u64;
                body.flow_control().release_capacity(data.len())?;
            }
            Ok(len)
        };
        tokio::time::timeout(TIMEOUT, whole)
            .await
            .map_err(|_| format!("{path}: not complete within {TIMEOUT:?}"))?
    }

    /// Sends a PUT with a body of `bytes` and waits for the whole response.
    pub async fn put(&mut self, path: &str, bytes: u64) -> Result<()> {
        let whole = async {
            let mut request = self.request(Method::PUT, path)?;
            let headers = request.headers_mut();
            headers.insert(header::CONTENT_LENGTH, bytes.into());
            let json = header::HeaderValue::from_static("application/json");
            headers.insert(header::CONTENT_TYPE, json);
            self.send = self.send.clone().ready().await?;
            let (response, mut body) = self.send.send_request(request, false)?;
            let chunk = Bytes::from(vec![b'x'; UPLOAD_CHUNK]);
            let mut left = bytes as usize;
            while left > 0 {
                body.reserve_capacity(left.min(chunk.len()));
                let capacity = poll_fn(|cx| body.poll_capacity(cx)).await;
                let capacity = capacity.ok_or("the upload was cancelled")??;
                let capacity = capacity.min(chunk.len()).min(left);
                left -= capacity;
                body.send_data(chunk.slice(..capacity), left == 0)?;
            }
            let mut body = body_if_ok(path, response.await?)?;
            while let Some(data) = body.data().await {
                body.flow_control().release_capacity(data?.len())?;
            }
            Ok(())
        };
        tokio::time::timeout(TIMEOUT, whole)
            .await
            .map_err(|_| format!("{path}: upload not complete within {TIMEOUT:?}"))?
    }

    /// Opens [`origin::EVENTS`] and returns the delays of its first `count` events, sorted.
    pub async fn event_delays(&mut self, count: usize) -> Result<Vec<Duration>> {
        let mut delays = Vec::with_capacity(count);
        let read = tokio::time::timeout(TIMEOUT, self.read_events(count, &mut delays)).await;
        read.map_err(|_| format!("{} of {count} events within {TIMEOUT:?}", delays.len()))??;
        delays.sort_unstable();
        Ok(delays)
    }

    async fn read_events(&mut self, count: usize, delays: &mut Vec<Duration>) -> Result<()> {
        let mut body = self.get_body(origin::EVENTS).await?;
        let mut received = BytesMut::new();
        while delays.len() < count {
            let data = body.data().await.ok_or("the watch ended")??;
            body.flow_control().release_capacity(data.len())?;
            received.extend_from_slice(&data);
            while received.len() >= origin::EVENT_BYTES && delays.len() < count {
                let event = received.split_to(origin::EVENT_BYTES);
                let delay = origin::delay(&event).filter(|_| event.last() == Some(&b'\n'));
                delays.push(delay.ok_or("not an event of the origin")?);
            }
        }
        Ok(())
    }

    /// Sends requests one after another for `time` and returns the duration of each.
    pub async fn sequential_requests(&mut self, time: Duration) -> Result<Vec<Duration>> {
        let mut durations = Vec::with_capacity(1 << 16);
        let end = Instant::now() + time;
        loop {
            let start = Instant::now();
            if start >= end {
                return Ok(durations);
            }
            let len = self.get(origin::OBJECT).await?;
            durations.push(start.elapsed());
            if len != origin::OBJECT_BYTES as u64 {
                return Err(format!("{}: {len} bytes", origin::OBJECT).into());
            }
        }
    }

    /// Opens `count` watches, one after another, and reads the first event of each. They stay open until the returned
    /// streams are dropped.
    pub async fn open_watches(&mut self, path: &str, count: usize) -> Result<Vec<RecvStream>> {
        let open = async {
            let mut streams = Vec::with_capacity(count);
            for _ in 0..count {
                let body = self.get_body(path).await?;
                streams.push(read_first_event(body).await?);
            }
            Ok(streams)
        };
        tokio::time::timeout(TIMEOUT, open).await.map_err(|_| "watches did not open")?
    }

    /// Like [`Self::open_watches`] for any watch, but sends all requests before it reads the first response. A 429 is
    /// followed by another request, as in client-go, because a proxy may need time to open connections.
    pub async fn open_watches_concurrently(
        &mut self,
        path: &str,
        count: usize,
    ) -> Result<Vec<RecvStream>> {
        let open = async {
            let mut streams = Vec::with_capacity(count);
            loop {
                let mut responses = Vec::new();
                for _ in streams.len()..count {
                    responses.push(self.send_get(path).await?);
                }
                for response in responses {
                    let response = response.await?;
                    if response.status() != StatusCode::TOO_MANY_REQUESTS {
                        streams.push(read_first_event(body_if_ok(path, response)?).await?);
                    }
                }
                if streams.len() == count {
                    return Ok(streams);
                }
                sleep(RETRY_AFTER).await;
            }
        };
        tokio::time::timeout(TIMEOUT, open).await.map_err(|_| "watches did not open")?
    }
}

/// Opens `each` watches on each of `connections` new connections, all at the same time.
pub async fn open_watches_at_once(
    address: SocketAddr,
    tls: &Arc<ClientConfig>,
    path: &'static str,
    connections: usize,
    each: usize,
) -> Result<Vec<RecvStream>> {
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(Client::connect(address, tls).await?);
    }
    let mut opening = JoinSet::new();
    for mut client in clients {
        opening.spawn(async move { client.open_watches_concurrently(path, each).await });
    }
    let mut watches = Vec::new();
    while let Some(opened) = opening.join_next().await {
        watches.extend(opened??);
    }
    Ok(watches)
}

/// The body of a response with status 200; an error for any other status.
fn body_if_ok(path: &str, response: Response<RecvStream>) -> Result<RecvStream> {
    if response.status() != StatusCode::OK {
        return Err(format!("{path}: {}", response.status()).into());
    }
    Ok(response.into_body())
}

/// Reads the first frame of a watch, of which a proxy may make more or less than an event, and returns the rest of the stream.
async fn read_first_event(mut body: RecvStream) -> Result<RecvStream> {
    let event = body.data().await.ok_or("a watch ended without an event")??;
    if event.first() != Some(&b'{') {
        return Err("the first frame of a watch is not the beginning of an event".into());
    }
    body.flow_control().release_capacity(event.len())?;
    Ok(body)
}
