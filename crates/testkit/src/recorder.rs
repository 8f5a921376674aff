//! An upstream that records every request as it reads it: a server of HTTP/2 over TLS for jackstay, and of HTTP/1.1
//! over TLS (upgrades) and without TLS (other proxies).
//!
//! Requests are assigned to clients of the test by the address in `X-Forwarded-For`. A test gives each client an address
//! of its own in 127.1.0.0/16.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Response};
use jackstay_apiserver::pki::Pki;
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;

use crate::tls;

/// A request at the recorder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    pub method: String,
    pub target: String,
    pub host: String,
    /// Fields without `Host`, `Content-Length` and `X-Forwarded-For`, sorted by name. Several fields of one name keep
    /// their order.
    pub fields: Vec<(String, String)>,
    pub forwarded_for: Vec<String>,
    pub content_length: Option<String>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// The body has ended as HTTP provides for.
    pub complete: bool,
    /// What a strict server would refuse.
    pub anomaly: Option<String>,
}

impl Recorded {
    /// The client, which is the last address of `X-Forwarded-For` in 127.1.0.0/16.
    fn client(&self) -> Option<Ipv4Addr> {
        let list = self.forwarded_for.iter().flat_map(|value| value.split(','));
        let mut addresses = list.rev().filter_map(|item| item.trim().parse::<Ipv4Addr>().ok());
        addresses.find(|address| address.octets()[..2] == [127, 1])
    }

    /// Method, target, host, fields and body in one line.
    pub fn describe(&self) -> String {
        let mut text = format!("{} {}", shorten(&self.method), shorten(&self.target));
        if self.host != "api" {
            let _ = write!(text, " host={}", shorten(&self.host));
        }
        if self.forwarded_for.join(",").contains(',') {
            let _ = write!(text, " x-forwarded-for={}", self.forwarded_for.join(" + "));
        }
        for (name, value) in &self.fields {
            let _ = write!(text, " {}={}", shorten(name), shorten(value));
        }
        if !self.body.is_empty() {
            let _ =
                write!(text, " {}", shorten(&format!("{:?}", String::from_utf8_lossy(&self.body))));
        }
        for (name, value) in &self.trailers {
            let _ = write!(text, " trailer {name}={}", shorten(value));
        }
        if !self.complete {
            text.push_str(" (incomplete)");
        }
        if let Some(anomaly) = &self.anomaly {
            let _ = write!(text, " ({anomaly})");
        }
        text
    }
}

/// The text with its control characters escaped, and at most 80 characters of it.
pub fn shorten(text: &str) -> String {
    let escaped: String = text
        .chars()
        .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
        .collect();
    match escaped.char_indices().nth(80) {
        Some((at, _)) => format!("{}… ({} bytes)", &escaped[..at], text.len()),
        None => escaped,
    }
}

/// The requests of each client, in their order. `None` stands for requests of no client.
#[derive(Default)]
pub struct Record(Mutex<HashMap<Option<Ipv4Addr>, Vec<SharedRecorded>>>);

/// A request that its connection still completes.
type SharedRecorded = Arc<Mutex<Recorded>>;

impl Record {
    fn add(&self, request: Recorded) -> Arc<Mutex<Recorded>> {
        let client = request.client();
        let request = Arc::new(Mutex::new(request));
        self.0.lock().unwrap().entry(client).or_default().push(Arc::clone(&request));
        request
    }

    /// The requests of a client so far.
    pub fn of(&self, client: Option<Ipv4Addr>) -> Vec<Recorded> {
        let record = self.0.lock().unwrap();
        let requests = record.get(&client).map_or(&[][..], Vec::as_slice);
        requests.iter().map(|request| request.lock().unwrap().clone()).collect()
    }

    /// Forgets all requests.
    pub fn clear(&self) {
        self.0.lock().unwrap().clear();
    }
}

/// A running recorder. Its tasks run on the runtime that has started it.
pub struct Recorder {
    /// The address of HTTP/2 and HTTP/1.1 over TLS.
    pub tls: SocketAddr,
    /// The address of HTTP/1.1 without TLS.
    pub plain: SocketAddr,
    /// What it has received.
    pub record: Arc<Record>,
}

impl Recorder {
    /// Starts a recorder with a server certificate of this CA, on free ports of 127.0.0.1.
    pub async fn start(pki: &Pki) -> Self {
        let record = Arc::<Record>::default();
        let clients = WebPkiClientVerifier::no_client_auth();
        let config = tls::server(&pki.server().unwrap(), clients, &["h2", "http/1.1"]);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let plain = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addresses = (listener.local_addr().unwrap(), plain.local_addr().unwrap());
        let shared = Arc::clone(&record);
        let serve = move |stream: TlsStream<TcpStream>| async move {
            // The peer may close its connection at any time.
            if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                let _ = serve_http2(stream, &shared).await;
            } else {
                let _ = serve_http1(stream, &shared).await;
            }
        };
        tokio::spawn(tls::accept_each(listener, config, serve));
        let shared = Arc::clone(&record);
        tokio::spawn(async move {
            while let Ok((stream, _)) = plain.accept().await {
                let record = Arc::clone(&shared);
                tokio::spawn(async move {
                    let _ = serve_http1(stream, &record).await;
                });
            }
        });
        Self { tls: addresses.0, plain: addresses.1, record }
    }
}

/// The body of a response. The clients of `tests/program/smuggling` recognise the one to the sentinel.
fn answer(request: &Recorded) -> &'static str {
    if request.target.ends_with("/sentinel") { "reached the sentinel\n" } else { "recorded\n" }
}

fn is_probe(request: &Recorded) -> bool {
    matches!(&*request.target, "/readyz" | "/livez" | "/version")
        && request.forwarded_for.is_empty()
}

/// Sorts fields into a request.
fn set_fields(request: &mut Recorded, fields: impl Iterator<Item = (String, String)>) {
    for (name, value) in fields {
        match name.to_ascii_lowercase().as_str() {
            "host" => request.host = value,
            "content-length" => request.content_length = Some(value),
            "x-forwarded-for" => request.forwarded_for.push(value),
            lower => request.fields.push((lower.to_owned(), value)),
        }
    }
    request.fields.sort_by(|(one, _), (two, _)| one.cmp(two));
}

fn text_fields(headers: &HeaderMap) -> Vec<(String, String)> {
    let text = |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}

async fn serve_http2(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    record: &Arc<Record>,
) -> Result<(), h2::Error> {
    let mut builder = h2::server::Builder::new();
    builder.max_header_list_size(1 << 20).initial_window_size(1 << 20);
    // With h2's default a hundred frames of one byte that are not read yet end the connection; an apiserver, which is
    // written in Go, has no such limit.
    builder.data_frame_budget(16 << 20);
    let mut connection = builder.handshake::<_, Bytes>(stream).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        let record = Arc::clone(record);
        tokio::spawn(async move {
            let (head, mut body) = request.into_parts();
            let mut request = Recorded {
                method: head.method.to_string(),
                target: head.uri.path_and_query().map_or_else(String::new, ToString::to_string),
                host: head.uri.authority().map_or_else(String::new, ToString::to_string),
                ..Recorded::default()
            };
            let hosts = head.headers.contains_key("host");
            set_fields(&mut request, text_fields(&head.headers).into_iter());
            request.anomaly = hosts.then(|| "a Host field beside :authority".to_owned());
            let (text, is_head) = (answer(&request), request.method == "HEAD");
            if !is_probe(&request) {
                let entry = record.add(request);
                while let Some(data) = body.data().await {
                    let Ok(data) = data else { return };
                    let _ = body.flow_control().release_capacity(data.len());
                    entry.lock().unwrap().body.extend_from_slice(&data);
                }
                let Ok(trailers) = body.trailers().await else { return };
                let mut entry = entry.lock().unwrap();
                entry.trailers = trailers.as_ref().map_or_else(Vec::new, text_fields);
                entry.complete = true;
            }
            let head = Response::builder().header("content-length", text.len()).body(()).unwrap();
            if let Ok(mut send) = respond.send_response(head, is_head)
                && !is_head
            {
                let _ = send.send_data(text.into(), true);
            }
        });
    }
    Ok(())
}

/// Reads requests strictly: CR LF ends a line, and a length is a number. What a strict server refuses is recorded as an
/// anomaly, after which the connection is closed.
async fn serve_http1(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    record: &Arc<Record>,
) -> io::Result<()> {
    let mut reader = Reader { stream: &mut stream, buffer: Vec::new() };
    while let Some(head) = reader.until(b"\r\n\r\n").await? {
        let mut request = parse_head(&head);
        let chunked = request.fields.iter().any(|(name, _)| name == "transfer-encoding");
        let upgrades = request.target.starts_with("/switch")
            && request.fields.iter().any(|(name, _)| name == "upgrade");
        if is_probe(&request) {
            reader.stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await?;
            reader.stream.flush().await?;
            continue;
        }
        let length = request.content_length.as_deref().unwrap_or("0").parse::<usize>();
        if chunked && request.content_length.is_some() {
            request.anomaly = Some("Content-Length and Transfer-Encoding".to_owned());
        } else if length.is_err() {
            request.anomaly = Some("malformed Content-Length".to_owned());
        }
        let (text, is_head) = (answer(&request), request.method == "HEAD");
        let refused = request.anomaly.is_some();
        let entry = record.add(request);
        if refused {
            break;
        }
        if chunked {
            if !read_chunks(&mut reader, &entry).await? {
                return Ok(());
            }
        } else {
            let Some(data) = reader.exactly(length.unwrap_or(0)).await? else { return Ok(()) };
            entry.lock().unwrap().body = data;
        }
        entry.lock().unwrap().complete = true;
        if upgrades {
            let head = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
            reader.stream.write_all(head.as_bytes()).await?;
            reader.stream.flush().await?;
            // The bytes of a tunnel are not requests.
            reader.until(b"no such bytes").await?;
            break;
        }
        let text_of_get = if is_head { "" } else { text };
        let response =
            format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text_of_get}", text.len());
        reader.stream.write_all(response.as_bytes()).await?;
        reader.stream.flush().await?;
    }
    let _ = stream.shutdown().await;
    Ok(())
}

/// Reads a body in chunks, and its trailers. Returns whether it ends as HTTP provides for.
async fn read_chunks(
    reader: &mut Reader<'_, impl AsyncRead + Unpin>,
    entry: &SharedRecorded,
) -> io::Result<bool> {
    loop {
        let Some(line) = reader.until(b"\r\n").await? else { return Ok(false) };
        let line = String::from_utf8_lossy(&line);
        let digits = line.trim_end().split(';').next().unwrap_or_default();
        let Ok(size) = usize::from_str_radix(digits, 16) else {
            entry.lock().unwrap().anomaly = Some("malformed chunk".to_owned());
            return Ok(false);
        };
        if size == 0 {
            break;
        }
        let Some(data) = reader.exactly(size + 2).await? else { return Ok(false) };
        entry.lock().unwrap().body.extend(&data[..size]);
    }
    loop {
        let Some(line) = reader.until(b"\r\n").await? else { return Ok(false) };
        if line == b"\r\n" {
            return Ok(true);
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_ascii_lowercase();
        let (name, value) = line.split_once(':').unwrap_or((&line, ""));
        let trailer = (name.to_owned(), value.trim().to_owned());
        entry.lock().unwrap().trailers.push(trailer);
    }
}

fn parse_head(head: &[u8]) -> Recorded {
    let mut request = Recorded::default();
    let odd = |byte: &u8| *byte == 0 || *byte == b'\r' || *byte == b'\n';
    let lines: Vec<_> = head[..head.len() - 4].split(|&byte| byte == b'\n').collect();
    let mut fields = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        let line = match line.strip_suffix(b"\r") {
            Some(line) => line,
            None if number + 1 == lines.len() => line,
            None => {
                request.anomaly = Some("bare LF".to_owned());
                line
            }
        };
        if line.iter().any(odd) {
            request.anomaly = Some("NUL or CR in a line".to_owned());
        }
        let text = String::from_utf8_lossy(line);
        if number == 0 {
            let mut words = text.splitn(2, ' ');
            words.next().unwrap_or_default().clone_into(&mut request.method);
            let rest = words.next().unwrap_or_default();
            rest.rsplit_once(' ')
                .map_or(rest, |(target, _)| target)
                .clone_into(&mut request.target);
            continue;
        }
        let (name, value) = text.split_once(':').unwrap_or((&text, ""));
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            request.anomaly = Some(format!("malformed field name {name:?}"));
        }
        fields.push((name.to_owned(), value.trim().to_owned()));
    }
    set_fields(&mut request, fields.into_iter());
    request
}

/// Reads lines and blocks of bytes. `None` is the end of the connection.
struct Reader<'a, S> {
    stream: &'a mut S,
    buffer: Vec<u8>,
}

impl<S: AsyncRead + Unpin> Reader<'_, S> {
    async fn until(&mut self, end: &[u8]) -> io::Result<Option<Vec<u8>>> {
        loop {
            let found = self.buffer.windows(end.len()).position(|window| window == end);
            if let Some(at) = found {
                return Ok(Some(self.buffer.drain(..at + end.len()).collect()));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn exactly(&mut self, size: usize) -> io::Result<Option<Vec<u8>>> {
        while self.buffer.len() < size {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
        Ok(Some(self.buffer.drain(..size).collect()))
    }
}
