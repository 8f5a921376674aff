//! The client with a configured identity: a kubelet in small.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use jackstay_apiserver::client::{Client, Credentials, Reply};
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::identity::User;
use rustls::ClientConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::hostile::raw::connect_h2;
use crate::support::http2::{PING, frame, parse};
use crate::support::{CONFIGMAPS, config_map, pages, pause};

/// A request that takes longer has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// kubelet's default for probes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The results of one kind of request.
#[derive(Debug, Default)]
pub struct Results {
    latencies: Vec<Duration>,
    failures: Vec<String>,
}

impl Results {
    pub fn count(&self) -> usize {
        self.latencies.len() + self.failures.len()
    }

    pub fn failures(&self) -> &[String] {
        &self.failures
    }

    /// The latency that this share of the successful requests does not exceed; zero without any.
    pub fn quantile(&self, share: f64) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort();
        let at = (sorted.len() as f64 * share).ceil() as usize;
        sorted.get(at.saturating_sub(1)).copied().unwrap_or_default()
    }

    fn add(&mut self, result: Result<Duration, String>) {
        match result {
            Ok(latency) => self.latencies.push(latency),
            Err(error) => self.failures.push(error),
        }
    }
}

/// The results of all requests.
#[derive(Debug, Default)]
pub struct Report {
    /// Reads and writes on one connection.
    pub requests: Results,
    /// A new connection and one request.
    pub connections: Results,
    /// A new connection until its first PING is answered, which no apiserver delays.
    pub handshakes: Results,
    /// `/livez` of the admin endpoint, each on a connection of its own.
    pub probes: Results,
    /// A new connection and one request with a token that the proxy has not seen before.
    pub tokens: Results,
}

/// The addresses and credentials of the client.
#[derive(Clone)]
pub struct Settings {
    pub server: SocketAddr,
    /// The admin endpoint; other proxies have none.
    pub admin: Option<SocketAddr>,
    pub credentials: Credentials,
    /// The TLS settings of the same client.
    pub tls: Arc<ClientConfig>,
    /// The cluster in which a new token is created for each request with one, and the CA of the proxy.
    pub new_tokens: Option<(Cluster, Credentials)>,
}

/// A running client, on a thread of its own.
pub struct IdentityClient {
    over: Arc<AtomicBool>,
    thread: JoinHandle<Report>,
}

impl IdentityClient {
    /// Starts the client.
    pub fn start(settings: Settings) -> Self {
        let over = Arc::<AtomicBool>::default();
        let until = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            tokio::task::LocalSet::new().block_on(&runtime, send_requests(settings, &until))
        });
        Self { over, thread }
    }

    /// Stops sending requests, and waits for the responses.
    pub fn stop(self) -> Report {
        self.over.store(true, Relaxed);
        self.thread.join().expect("the client does not panic")
    }
}

/// The kinds of requests; each is a field of [`Report`].
#[derive(Debug, Clone, Copy)]
enum Kind {
    Request,
    Connection,
    Handshake,
    Probe,
    Token,
}

async fn send_requests(settings: Settings, over: &AtomicBool) -> Report {
    let admin = settings.admin;
    let connection = Reconnecting { settings: settings.clone(), client: Mutex::default() };
    let connection = Arc::new(connection);
    let mut running = JoinSet::new();
    for round in 0.. {
        if over.load(Relaxed) {
            break;
        }
        let here = Arc::clone(&connection);
        running.spawn_local(async move {
            let get =
                async { ok(here.client().await?.get(&format!("{CONFIGMAPS}?limit=1")).await) };
            (Kind::Request, timed(REQUEST_TIMEOUT, get).await)
        });
        let here = Arc::clone(&connection);
        running.spawn_local(async move {
            let object = config_map("lease", &round.to_string());
            let put = async {
                ok(here.client().await?.put(&format!("{CONFIGMAPS}/lease"), &object).await)
            };
            (Kind::Request, timed(REQUEST_TIMEOUT, put).await)
        });
        if round % 2 == 0
            && let Some((cluster, credentials)) = settings.new_tokens.clone()
        {
            let server = settings.server;
            running.spawn_local(async move {
                let token = format!("new-{:016x}", fastrand::u64(..));
                cluster.add_token(&token, User::new("workload", &["devs"]));
                let fresh = async {
                    let credentials = credentials.token(&token);
                    let client = Client::connect(server, &credentials).await;
                    let client = client.map_err(|error| format!("connect: {error}"))?;
                    ok(client.get(&format!("{CONFIGMAPS}?limit=1")).await)
                };
                (Kind::Token, timed(REQUEST_TIMEOUT, fresh).await)
            });
        }
        if round % 10 == 5 {
            let here = settings.clone();
            running.spawn_local(async move {
                let fresh = async {
                    let client = connect(&here).await?;
                    ok(client.get(&format!("{CONFIGMAPS}?limit=1")).await)
                };
                (Kind::Connection, timed(REQUEST_TIMEOUT, fresh).await)
            });
            let settings = settings.clone();
            running.spawn_local(async move {
                (Kind::Handshake, timed(REQUEST_TIMEOUT, first_ping(&settings)).await)
            });
            if let Some(admin) = admin {
                running.spawn_local(async move {
                    (Kind::Probe, timed(PROBE_TIMEOUT, probe(admin)).await)
                });
            }
        }
        pause(Duration::from_millis(100)).await;
    }
    let mut report = Report::default();
    while let Some(done) = running.join_next().await {
        let (kind, result) = done.expect("no request panics");
        match kind {
            Kind::Request => report.requests.add(result),
            Kind::Connection => report.connections.add(result),
            Kind::Handshake => report.handshakes.add(result),
            Kind::Probe => report.probes.add(result),
            Kind::Token => report.tokens.add(result),
        }
    }
    report
}

/// One connection, opened again after it was closed.
struct Reconnecting {
    settings: Settings,
    client: Mutex<Option<Arc<Client>>>,
}

impl Reconnecting {
    async fn client(&self) -> Result<Arc<Client>, String> {
        if let Some(client) =
            self.client.lock().unwrap().clone().filter(|client| !client.is_closed())
        {
            return Ok(client);
        }
        let client = Arc::new(connect(&self.settings).await?);
        *self.client.lock().unwrap() = Some(Arc::clone(&client));
        Ok(client)
    }
}

async fn connect(settings: &Settings) -> Result<Client, String> {
    let connected = Client::connect(settings.server, &settings.credentials).await;
    connected.map_err(|error| format!("connect: {error}"))
}

/// Connects, sends a PING, and waits for its acknowledgement.
async fn first_ping(settings: &Settings) -> Result<(), String> {
    let attempt = async {
        let mut stream = connect_h2(settings.server, &settings.tls, &[]).await?;
        stream.write_all(&frame(PING, 0, 0, &[0; 8])).await?;
        stream.flush().await?;
        let mut received = Vec::new();
        while !parse(&received).0.iter().any(|frame| frame.kind == PING) {
            if stream.read_buf(&mut received).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    };
    attempt.await.map_err(|error: io::Error| error.to_string())
}

fn ok(reply: io::Result<Reply>) -> Result<(), String> {
    let reply = reply.map_err(|error| error.to_string())?;
    if reply.status.is_success() {
        return Ok(());
    }
    Err(format!("{}: {}", reply.status, String::from_utf8_lossy(&reply.body)))
}

/// Asks `/livez` over HTTP/1.1.
async fn probe(admin: SocketAddr) -> Result<(), String> {
    let page = pages::get(admin, "/livez").await.map_err(|error| error.to_string())?;
    if page.starts_with("HTTP/1.1 200 ") { Ok(()) } else { Err(page) }
}

async fn timed(
    limit: Duration,
    request: impl Future<Output = Result<(), String>>,
) -> Result<Duration, String> {
    let begun = Instant::now();
    match tokio::time::timeout(limit, request).await {
        Ok(Ok(())) => Ok(begun.elapsed()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(format!("no response within {limit:?}")),
    }
}
