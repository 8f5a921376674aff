//! Upstreams that send frames as fast as they can. jackstay closes the connection with a named reason, its memory stays
//! bounded, and other requests of the identity are answered meanwhile.
//!
//! jackstay is a process of its own, whose memory the test measures.

use crate::hostile_upstream::head;
use crate::scripted_peer::{Action, Peers};
use crate::support::child::{Process, free_address};
use crate::support::figures::check_figure;
use crate::support::http2::{
    CANCEL, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, NO_ERROR,
    PING, WINDOW_UPDATE, field_block, frame, goaway, reset, settings,
};
use crate::support::{CONFIGMAPS, PATIENCE, pages, soon, until, wait};
use http::Method;
use jackstay_apiserver::client::Client;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How often each flood is repeated.
const ROUNDS: usize = 2;
/// Reads beside each flood, at least.
const READS: usize = 20;
/// The memory that the floods may cost together.
const MEMORY: u64 = 48 << 20;
/// The promise for a read beside a flood. jackstay is a debug build here, which is five to ten times slower.
const SLOWEST_READ: Duration = Duration::from_millis(250);

/// h2's texts for the error codes `ENHANCE_YOUR_CALM` and `PROTOCOL_ERROR`.
const ENHANCE_YOUR_CALM: &str = "detected excessive load generating behavior";
const PROTOCOL_ERROR: &str = "unspecific protocol error detected";

/// How a flood ends.
enum Ending {
    /// jackstay closes the connection because of too many frames of this kind.
    Frames(&'static str),
    /// h2 closes the connection with this reason.
    Reason(&'static str),
    /// The flood is finite, and the response after it arrives.
    Response,
}
use Ending::{Frames, Reason, Response};

fn floods() -> Vec<(&'static str, Ending, Action)> {
    let flood = |name, ending, bytes: fn(u32) -> Vec<u8>| (name, ending, Action::flood(bytes));
    let once = |name, ending, bytes: fn(u32) -> Vec<u8>| (name, ending, Action::raw(bytes));
    vec![
        flood("interim responses", Frames("headers"), |id| {
            frame(HEADERS, END_HEADERS, id, &field_block(&[(":status", "103")])).repeat(4_000)
        }),
        flood("interim responses of 15 KiB", Frames("headers"), |id| {
            let value = "x".repeat(15 << 10);
            frame(HEADERS, END_HEADERS, id, &field_block(&[(":status", "103"), ("x", &value)]))
                .repeat(8)
        }),
        flood("interim responses of 60 KiB in 4 KiB", Frames("headers"), |id| {
            // A literal that is added to the dynamic table as entry 62, and then 15 references to it (RFC 7541,
            // 6.1).
            let mut block = field_block(&[(":status", "103")]);
            let entry = field_block(&[("x", &"y".repeat(3_900))]);
            block.push(0x40);
            block.extend(&entry[1..]);
            block.extend([0xbe; 15]);
            frame(HEADERS, END_HEADERS, id, &block).repeat(16)
        }),
        flood("trailers again and again", Frames("headers"), |id| {
            let trailers =
                frame(HEADERS, END_HEADERS | END_STREAM, id, &field_block(&[("a", "b")]));
            [frame(HEADERS, END_HEADERS, id, &head(&[])), trailers.repeat(4_000)].concat()
        }),
        flood("empty DATA", Frames("empty_data"), |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            [head, frame(DATA, 0, id, &[]).repeat(4_000)].concat()
        }),
        flood("DATA of padding", Reason(ENHANCE_YOUR_CALM), |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            [head, frame(DATA, 8, id, &[3, 0, 0, 0]).repeat(4_000)].concat()
        }),
        flood("PING", Frames("ping"), |_| frame(PING, 0, 0, &[7; 8]).repeat(4_000)),
        flood("SETTINGS", Frames("settings"), |_| {
            settings(&[(INITIAL_WINDOW_SIZE, 65_535)]).repeat(4_000)
        }),
        flood("WINDOW_UPDATE", Frames("window_update"), |_| {
            frame(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]).repeat(4_000)
        }),
        flood("RST_STREAM", Frames("rst_stream"), |id| reset(id, CANCEL).repeat(4_000)),
        flood("GOAWAY", Frames("other"), |_| goaway(0x7fff_ffff, NO_ERROR).repeat(4_000)),
        flood("PRIORITY", Frames("other"), |id| frame(2, 0, id, &[0, 0, 0, 0, 1]).repeat(4_000)),
        flood("unknown frames", Frames("other"), |_| frame(0x42, 0, 0, b"hello").repeat(4_000)),
        // Either the limit of frames ends the connection, or h2, which refuses them too.
        flood("PUSH_PROMISE", Reason(""), |id| {
            // Without `:path` it is malformed, which costs the stream only.
            let promised = [&[0, 0, 0, 2][..], &field_block(&[(":method", "GET")])].concat();
            frame(5, END_HEADERS, id, &promised).repeat(1_000)
        }),
        once("a header block without an end", Reason(ENHANCE_YOUR_CALM), |id| {
            let more = frame(CONTINUATION, 0, id, &field_block(&[("x", &"y".repeat(200))]));
            [frame(HEADERS, 0, id, &head(&[])), more.repeat(100_000)].concat()
        }),
        // The PONG that jackstay wants next arrives inside the header block (RFC 9113, 6.10).
        once("a header block left open", Reason(PROTOCOL_ERROR), |id| {
            frame(HEADERS, 0, id, &head(&[]))
        }),
        once("a head of 1 MiB", Reason(""), |id| {
            let more = frame(CONTINUATION, 0, id, &field_block(&[("x", &"y".repeat(15 << 10))]));
            let end = frame(CONTINUATION, END_HEADERS, id, &[]);
            [frame(HEADERS, 0, id, &head(&[])), more.repeat(68), end].concat()
        }),
        once("trailers of 1 MiB", Reason(""), |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            let more = frame(CONTINUATION, 0, id, &field_block(&[("x", &"y".repeat(15 << 10))]));
            let end = frame(CONTINUATION, END_HEADERS, id, &[]);
            let start = frame(HEADERS, END_STREAM, id, &field_block(&[("a", "b")]));
            [head, start, more.repeat(68), end].concat()
        }),
        once("DATA of one byte", Response, |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            let data = frame(DATA, 0, id, b"x").repeat(50_000);
            [head, data, frame(DATA, END_STREAM, id, &[])].concat()
        }),
        once("DATA on closed streams", Response, |id| {
            let late = frame(DATA, 0, 1, b"late").repeat(30_000);
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            [late, head, frame(DATA, END_STREAM, id, b"{}")].concat()
        }),
    ]
}

/// jackstay with the shipped settings of connections and health.
struct Jackstay {
    address: SocketAddr,
    admin: SocketAddr,
    process: Process,
}

impl Jackstay {
    async fn start(peers: &Peers) -> Self {
        let certs = &peers.certs;
        let (address, admin, dir) = (free_address(), free_address(), certs.path().display());
        certs.probe.write_to(certs.path(), "prober").unwrap();
        let config = format!(
            r#"
admin: {{ bind: "{admin}" }}
state_dir: ""
upstreams:
  - name: control-plane
    endpoints: {endpoints:?}
    tls: {{ ca_file: {dir}/ca.crt }}
    health: {{ readyz: {{ cert_file: {dir}/prober.crt, key_file: {dir}/prober.key }} }}
listeners:
  - name: apiserver
    bind: ["{address}"]
    mode: terminate
    upstream: control-plane
    tls: {{ cert_file: {dir}/serving.crt, key_file: {dir}/serving.key }}
    client_ca_file: {dir}/ca.crt
    identities: [{{ cert_file: {dir}/admin.crt, key_file: {dir}/admin.key }}]
"#,
            endpoints = peers.addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        );
        let file = certs.path().join("jackstay.yaml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_jackstay"));
        command.args(["run", "--config"]).arg(&file);
        let process = Process::spawn(command);
        let jackstay = Self { address, admin, process };
        wait::until_ok(Duration::from_secs(30), "jackstay is ready", async || {
            let page = jackstay.page("/readyz").await.unwrap_or_default();
            let ready = page.starts_with("HTTP/1.1 200");
            ready.then_some(()).ok_or_else(|| jackstay.process.output())
        })
        .await;
        jackstay
    }

    async fn client(&self, peers: &Peers) -> Client {
        Client::connect(self.address, &peers.certs.credentials()).await.unwrap()
    }

    async fn page(&self, path: &str) -> std::io::Result<String> {
        pages::get(self.admin, path).await
    }

    /// The number of connections that were closed because of too many of these frames.
    async fn closed_for(&self, frames: &str) -> f64 {
        let page = self.page("/metrics").await.unwrap();
        let label = format!("frame=\"{frames}\"");
        let is_counter = |line: &&str| {
            line.starts_with("jackstay_upstream_frame_limit_total") && line.contains(&label)
        };
        let values = page.lines().filter(is_counter).filter_map(|line| line.rsplit_once(' '));
        values.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }

    /// Resident memory in bytes.
    fn resident(&self) -> u64 {
        let file = format!("/proc/{}/status", self.process.pid());
        let status = std::fs::read_to_string(file).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
        kib.expect("VmRSS in kB") << 10
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_an_upstream_ends_its_connection_and_no_other_request() {
    slowest_read_beside_floods().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an idle machine: measures latencies"]
async fn flood_of_an_upstream_delays_no_other_request() {
    let slowest = slowest_read_beside_floods().await;
    check_figure("slowest read beside a flood of an upstream", slowest, SLOWEST_READ);
}

/// Runs [`floods`], and checks how they end and what they hold. Returns the time of the slowest read of another client.
async fn slowest_read_beside_floods() -> Duration {
    let peers = Peers::start(2);
    let jackstay = Jackstay::start(&peers).await;
    let (flooded, other) = (jackstay.client(&peers).await, jackstay.client(&peers).await);
    for _ in 0..50 {
        assert_eq!(soon("a read", other.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    let before = jackstay.resident();
    let mut slowest_of_all = Duration::ZERO;
    for (name, ending, action) in floods() {
        let (mut peak, mut slowest) = (0, Duration::ZERO);
        let mut ends = Vec::new();
        for _ in 0..ROUNDS {
            let closed = match ending {
                Frames(frames) => jackstay.closed_for(frames).await,
                Reason(_) | Response => 0.0,
            };
            let connections_ended = peers.ended.load(Relaxed);
            peers.set_actions([action.clone()]);
            let flood = async {
                let reply = soon(name, flooded.get(CONFIGMAPS)).await;
                reply.map_or(502, |reply| reply.status.as_u16())
            };
            let mut flood = std::pin::pin!(flood);
            let (mut end, mut reads) = (None, 0);
            while end.is_none() || reads < READS {
                let start = Instant::now();
                let read = async {
                    until("the flood has begun", async || !peers.requests().is_empty()).await;
                    let (start, sent) = (Instant::now(), peers.requests().len());
                    let reply = soon(name, other.get(CONFIGMAPS)).await;
                    // A peer sends no response on a connection before its flood on it has ended.
                    let requests = peers.requests();
                    let (flood, read) = (requests[0].connection, requests.get(sent..));
                    let waited = read.is_some_and(|all| all.iter().any(|r| r.connection == flood));
                    let took = if waited { Duration::ZERO } else { start.elapsed() };
                    (reply, took)
                };
                let mut read = std::pin::pin!(read);
                let (reply, took) = loop {
                    tokio::select! {
                        done = &mut read => break done,
                        status = &mut flood, if end.is_none() => end = Some(status),
                    }
                };
                assert_eq!(reply.unwrap().status, 200, "{name}");
                assert!(start.elapsed() < PATIENCE, "{name}");
                (reads, slowest) = (reads + 1, slowest.max(took));
                peak = peak.max(jackstay.resident());
            }
            match ending {
                Frames(frames) => {
                    until(name, async || jackstay.closed_for(frames).await > closed).await;
                }
                Reason(reason) => {
                    until(name, async || peers.ended.load(Relaxed) > connections_ended).await;
                    // The log bundles the losses of a few seconds.
                    until(name, async || jackstay.page("/events").await.unwrap().contains(reason))
                        .await;
                }
                Response => assert_eq!(end, Some(200), "{name}"),
            }
            ends.extend(end);
        }
        let grown = peak.saturating_sub(before);
        println!(
            "{name}: flooded reads {ends:?}, slowest other {slowest:.1?}, {} KiB",
            grown >> 10
        );
        assert!(ends.iter().all(|status| matches!(status, 200 | 502)), "{name}: {ends:?}");
        assert!(grown < MEMORY, "{name}: {} MiB", grown >> 20);
        slowest_of_all = slowest_of_all.max(slowest);
    }
    slowest_of_all
}

/// The response to an upgrade: what the peer sends first, and then without an end. jackstay answers 502, or ends the
/// response that has begun.
const UPGRADE_FLOODS: &[(&str, &str, &str)] = &[
    ("interim responses", "", "HTTP/1.1 103 Early Hints\r\n\r\n"),
    (
        "a head without an end",
        "HTTP/1.1 200 OK\r\n",
        "x-filler: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n",
    ),
    ("a field without an end", "HTTP/1.1 200 OK\r\nx: ", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"),
    (
        "a chunk extension without an end",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
    ),
    (
        "trailers without an end",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        "x-filler: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n",
    ),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_an_upstream_in_response_to_an_upgrade_ends_the_upgrade() {
    let peers = Peers::start(2);
    let jackstay = Jackstay::start(&peers).await;
    let other = jackstay.client(&peers).await;
    assert_eq!(soon("a read", other.get(CONFIGMAPS)).await.unwrap().status, 200);
    let before = jackstay.resident();
    for (name, first, rest) in UPGRADE_FLOODS {
        let rest = rest.repeat(1_000);
        *peers.http1.lock().unwrap() = Some((first.as_bytes().to_vec(), rest.into_bytes()));
        let credentials = peers.certs.credentials();
        let client = Client::connect_http1(jackstay.address, &credentials).await.unwrap();
        let upgrade = [("connection", "upgrade"), ("upgrade", "SPDY/3.1")];
        let path = "/api/v1/namespaces/default/pods/p/exec?command=a";
        let mut upgrading =
            std::pin::pin!(soon(name, client.request(Method::POST, path, &upgrade, "")));
        let start = Instant::now();
        let mut slowest = Duration::ZERO;
        let reply = loop {
            let read = Instant::now();
            tokio::select! {
                biased;
                reply = &mut upgrading => break reply,
                reply = soon(name, other.get(CONFIGMAPS)) => {
                    assert_eq!(reply.unwrap().status, 200, "{name}");
                    slowest = slowest.max(read.elapsed());
                }
            }
        };
        // An error means that the response failed after its head.
        let status = reply.map(|reply| reply.status.as_u16());
        println!("{name}: {status:?}, after {:.1?}, slowest read {slowest:.1?}", start.elapsed());
        assert!(matches!(status, Err(_) | Ok(502)), "{name}: {status:?}");
    }
    assert!(jackstay.closed_for("interim_responses").await > 0.0);
    let grown = jackstay.resident().saturating_sub(before);
    assert!(grown < MEMORY, "{} MiB", grown >> 20);
    let reply = soon("a read", other.request(Method::GET, CONFIGMAPS, &[], "")).await.unwrap();
    assert_eq!(reply.status, 200);
}
