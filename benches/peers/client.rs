//! An HTTP/2 client for what h2load cannot do: present a certificate, keep watches open, and time single requests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use h2::{
    RecvStream,
    client::{ResponseFuture, SendRequest},
};
use http::{Request, Response, StatusCode, Uri};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    net::TcpStream,
    time::{Instant, sleep},
};
use tokio_rustls::TlsConnector;

use crate::{Result, origin};

/// Windows of Go's HTTP/2 transport, and so of kubelet and kubectl: 4 MiB for a stream, 1 GiB for a connection.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 1 << 30;

/// Timeout of a response, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Delay before a request is repeated after a 429: the `Retry-After` of jackstay.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// One connection.
pub struct Client {
    send: SendRequest<Bytes>,
    base: String,
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
        // The task ends with the last `SendRequest`; requests return its errors.
        tokio::spawn(connection);
        Ok(Self { send, base: format!("https://{address}") })
    }

    async fn request(&mut self, path: &str) -> Result<ResponseFuture> {
        let uri: Uri = format!("{}{path}", self.base).parse()?;
        self.send = self.send.clone().ready().await?;
        Ok(self.send.send_request(Request::get(uri).body(())?, true)?.0)
    }

    async fn head(&mut self, path: &str) -> Result<RecvStream> {
        let response = self.request(path).await?.await?;
        body_of(path, response)
    }

    /// Sends a GET, reads the whole body and returns its length.
    pub async fn get(&mut self, path: &str) -> Result<u64> {
        let whole = async {
            let mut body = self.head(path).await?;
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

    /// Sends requests one after another for `time`; returns the duration of each.
    pub async fn sequential_requests(&mut self, time: Duration) -> Result<Vec<Duration>> {
        let mut took = Vec::with_capacity(1 << 16);
        let end = Instant::now() + time;
        loop {
            let start = Instant::now();
            if start >= end {
                return Ok(took);
            }
            let len = self.get(origin::OBJECT).await?;
            took.push(start.elapsed());
            if len != origin::OBJECT_BYTES as u64 {
                return Err(format!("{}: {len} bytes", origin::OBJECT).into());
            }
        }
    }

    /// Opens `count` watches, one after another, and reads the first event of each. They stay open until the returned
    /// streams are dropped.
    pub async fn watch(&mut self, count: usize) -> Result<Vec<RecvStream>> {
        let open = async {
            let mut streams = Vec::with_capacity(count);
            for _ in 0..count {
                let body = self.head(origin::WATCH).await?;
                streams.push(first_event(body).await?);
            }
            Ok(streams)
        };
        tokio::time::timeout(TIMEOUT, open).await.map_err(|_| "watches did not open")?
    }

    /// Like [`Self::watch`], but sends all requests before it reads the first response. Requests with response 429 are
    /// repeated, as client-go does, because a proxy may need time to open connections.
    pub async fn watch_at_once(&mut self, count: usize) -> Result<Vec<RecvStream>> {
        let open = async {
            let mut streams = Vec::with_capacity(count);
            loop {
                let mut heads = Vec::new();
                for _ in streams.len()..count {
                    heads.push(self.request(origin::WATCH).await?);
                }
                for head in heads {
                    let response = head.await?;
                    if response.status() != StatusCode::TOO_MANY_REQUESTS {
                        streams.push(first_event(body_of(origin::WATCH, response)?).await?);
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

fn body_of(path: &str, response: Response<RecvStream>) -> Result<RecvStream> {
    if response.status() != StatusCode::OK {
        return Err(format!("{path}: {}", response.status()).into());
    }
    Ok(response.into_body())
}

/// Reads the first event of a watch.
async fn first_event(mut body: RecvStream) -> Result<RecvStream> {
    let event = body.data().await.ok_or("a watch ended without an event")??;
    if event.last() != Some(&b'\n') {
        return Err("the first frame of a watch is not a complete event".into());
    }
    body.flow_control().release_capacity(event.len())?;
    Ok(body)
}
