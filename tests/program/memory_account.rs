//! The memory of the process beside what its account says: request bodies in small pieces, and header tables of idle
//! connections.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use bytes::Bytes;
use h2::SendStream;
use http::Request;
use jackstay_config::Seccomp;
use jackstay_testkit::recorder::{Recorded, Recorder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::child::{Process, first_address};
use crate::support::http2::{self, HEADERS, PREFACE, RST_STREAM};
use crate::support::wire::Wire;
use crate::support::{CONFIGMAPS, Certs, long_form, pages, soon, until, wire, write_config};

/// What the process may take beside what the account says: buffers of the connections, and pages of the allocator that
/// are not full.
const BESIDE_ACCOUNT: f64 = (6 << 20) as f64;

/// jackstay as a process, in front of a server that records requests.
struct Setup {
    certs: Certs,
    recorder: Recorder,
    process: Process,
    admin: SocketAddr,
    address: SocketAddr,
}

impl Setup {
    async fn new() -> Self {
        let certs = Certs::new();
        let recorder = Recorder::start(&certs.pki).await;
        let file = certs.path().join("jackstay.yaml");
        let mut config = certs.config(&[recorder.tls]);
        // glibc reads the auxiliary vector by `prctl` for the metrics of the process, which musl does not.
        config.sandbox.seccomp = Seccomp::Off;
        write_config(&file, &config);
        let binary = std::env::var_os("JACKSTAY_BIN")
            .map_or_else(|| env!("CARGO_BIN_EXE_jackstay").into(), std::path::PathBuf::from);
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(&file);
        let mut process = Process::spawn(command);
        let admin = first_address(&process.wait_output("the admin endpoint listens").await);
        let address = first_address(&process.wait_output("\"apiserver\"").await);
        let setup = Self { certs, recorder, process, admin, address };
        until("an upstream connection", async || setup.page("/readyz").await.contains(" 200 "))
            .await;
        setup
    }

    async fn page(&self, path: &str) -> String {
        pages::get(self.admin, path).await.unwrap()
    }

    /// All bytes of the account.
    async fn account(&self) -> f64 {
        let page = self.page("/metrics").await;
        let series = page.lines().filter(|line| line.starts_with("jackstay_memory_budget_bytes{"));
        series.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// Begins a measurement, and returns the resident memory and the account.
    async fn begin(&self) -> (f64, f64) {
        // `VmHWM` then begins anew (proc_pid_clear_refs(5)).
        fs::write(format!("/proc/{}/clear_refs", self.process.pid()), "5").unwrap();
        (self.peak(), self.account().await)
    }

    /// The largest resident memory since [`Self::begin`], in bytes.
    fn peak(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let kib: f64 = line.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        kib * 1024.0
    }

    /// Expects that the process has grown by what the account says, and by at most [`BESIDE_ACCOUNT`] more.
    fn expect_growth(&self, (peak, account): (f64, f64), account_now: f64) {
        let (grown, charged) = (self.peak() - peak, account_now - account);
        println!("grown by {grown:.0} bytes for a charge of {charged:.0}");
        assert!(grown <= charged + BESIDE_ACCOUNT, "{grown:.0} bytes for a charge of {charged:.0}");
    }

    /// The bytes of the body of the request with this target that have arrived, and whether it is complete.
    fn arrived(&self, target: &str) -> (usize, bool) {
        let requests = self.recorder.record.of(None);
        let request: Option<&Recorded> = requests.iter().find(|request| request.target == target);
        request.map_or((0, false), |request| (request.body.len(), request.complete))
    }

    async fn until_arrived(&self, target: &str, bytes: usize) {
        until("the body arrives", async || self.arrived(target).0 >= bytes).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_body_that_arrives_byte_by_byte_takes_what_is_charged() {
    let length = if long_form() { 30_000 } else { 3_000 };
    let setup = Setup::new().await;
    let before = setup.begin().await;
    let mut charged = 0_f64;
    for n in 0..3 {
        let tls = wire::connector(&setup.certs, None, "http/1.1");
        let mut wire = wire::handshake(&tls, setup.address).await.unwrap();
        wire.get_ref().0.set_nodelay(true).unwrap();
        let target = format!("{CONFIGMAPS}?n={n}");
        let head = format!(
            "POST {target} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer valid\r\n\
             Transfer-Encoding: chunked\r\n\r\n"
        );
        wire.write_all(head.as_bytes()).await.unwrap();
        for sent in 1..=length {
            wire.write_all(b"1\r\nx\r\n").await.unwrap();
            // Without it a write that finds no budget of the scheduler leaves the byte in the TLS session.
            wire.flush().await.unwrap();
            // So few that each byte is read alone.
            let arrives = async {
                while setup.arrived(&target).0 + 2 < sent {
                    tokio::task::yield_now().await;
                }
            };
            let mut answer = [0; 1 << 10];
            tokio::select! {
                biased;
                () = soon("the byte arrives", arrives) => {}
                read = wire.read(&mut answer) => {
                    let answer = String::from_utf8_lossy(&answer[..read.unwrap()]);
                    panic!("after {sent} bytes of {length}: {answer}");
                }
            }
        }
        setup.until_arrived(&target, length).await;
        charged = charged.max(setup.account().await);
        wire.write_all(b"0\r\n\r\n").await.unwrap();
        let mut response = [0; 12];
        soon("a response", wire.read_exact(&mut response)).await.unwrap();
        assert_eq!(&response, b"HTTP/1.1 200");
    }
    setup.expect_growth(before, charged);
}

/// Sends data once the stream has window for it.
async fn send(stream: &mut SendStream<Bytes>, data: &Bytes) {
    stream.reserve_capacity(data.len());
    while stream.capacity() < data.len() {
        soon("window", std::future::poll_fn(|cx| stream.poll_capacity(cx))).await.unwrap().unwrap();
    }
    stream.send_data(data.clone(), false).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http2_pieces_of_one_byte_between_large_ones_take_what_is_charged() {
    const PIECES: usize = 2_000;
    let setup = Setup::new().await;
    let before = setup.begin().await;
    let tls = wire::connector(&setup.certs, None, "h2");
    let wire = wire::handshake(&tls, setup.address).await.unwrap();
    let (mut client, connection) = h2::client::handshake(wire).await.unwrap();
    tokio::spawn(connection);
    let mut post = |path: &str| {
        let request = Request::post(format!("https://a{path}"));
        let request = request.header("authorization", "Bearer valid").body(()).unwrap();
        client.send_request(request, false).unwrap()
    };
    // A body of 32 MiB is not held, because it is above the limit of one.
    let (_other, mut large) = post("/large");
    let (response, mut small) = post(CONFIGMAPS);
    let large_piece = Bytes::from_static(&[b'x'; 16 << 10]);
    for _ in 0..PIECES {
        send(&mut small, &Bytes::from_static(b"x")).await;
        send(&mut large, &large_piece).await;
    }
    setup.until_arrived(CONFIGMAPS, PIECES).await;
    let charged = setup.account().await;
    small.send_data(Bytes::new(), true).unwrap();
    assert_eq!(soon("a response", response).await.unwrap().status(), 200);
    setup.expect_growth(before, charged);
}

/// `GET https`, as entries of the static table of HPACK (RFC 7541, appendix A).
const GET_HTTPS: [u8; 2] = [0x82, 0x87];
/// `:path: /ab` as a literal that the decoder puts into its table of 4 KiB, where an entry has 32 bytes besides its
/// name and value (RFC 7541, 4.1).
const PATH: [u8; 5] = [0x44, 3, b'/', b'a', b'b'];
/// The same as a Huffman code.
const CODED_PATH: [u8; 5] = [0x44, 0x83, 0x60, 0x71, 0xff];
const TABLE_ENTRIES: usize = 4_096 / (32 + 5 + 3);

/// A field `x` without indexing, whose value has so many bytes in Huffman code: 7 for 8 letters `x`.
fn coded_field(length: usize) -> Vec<u8> {
    let mut field = http2::field_block(&[("x", "x".repeat(length))]);
    // After the representation and the name, the first bit of the length says so.
    field[3] |= 0x80;
    let at = field.len() - length;
    let code = [0xf3, 0xe7, 0xcf, 0x9f, 0x3e, 0x7c, 0xf9];
    field[at..].iter_mut().zip(code.iter().cycle()).for_each(|(byte, code)| *byte = *code);
    field
}

/// Sends this block on so many streams of a new connection, and returns the connection, which is idle then.
async fn send_blocks(setup: &Setup, block: &[u8], streams: usize) -> Wire {
    let tls = wire::connector(&setup.certs, None, "h2");
    let mut wire = wire::handshake(&tls, setup.address).await.unwrap();
    wire.write_all(&[PREFACE, &http2::settings(&[])].concat()).await.unwrap();
    for stream in (1..).step_by(2).take(streams) {
        wire.write_all(&http2::block(stream, true, block)).await.unwrap();
        wire.flush().await.unwrap();
        let ends = |kind, id, _: &[u8]| matches!(kind, HEADERS | RST_STREAM) && id == stream;
        soon("a response", http2::read_until(&mut wire, ends)).await.unwrap();
    }
    wire
}

/// Expects that `connections` idle connections, which have sent this block on so many streams, take what is charged.
async fn expect_charge_of_idle(connections: usize, block: &[u8], streams: usize) {
    let setup = Setup::new().await;
    let before = setup.begin().await;
    let mut idle = Vec::new();
    for _ in 0..connections {
        idle.push(send_blocks(&setup, block, streams).await);
    }
    setup.expect_growth(before, setup.account().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn header_table_keeps_read_buffers_that_are_charged() {
    // A stream with such a field is reset (RFC 9113, 8.2.2), but the decoder keeps the entry.
    let more = http2::field_block(&[("connection", "x".repeat(16_000))]);
    expect_charge_of_idle(20, &[&PATH[..], &more].concat(), TABLE_ENTRIES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn header_table_keeps_buffers_of_decoded_strings_that_are_charged() {
    let block = [&GET_HTTPS[..], &CODED_PATH, &coded_field(70_000)].concat();
    expect_charge_of_idle(2, &block, TABLE_ENTRIES).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn header_table_keeps_buffers_of_long_blocks_that_are_charged() {
    let long = http2::field_block(&[(":authority", "a".repeat(120_000))]);
    expect_charge_of_idle(2, &[&GET_HTTPS[..], &long, &PATH].concat(), TABLE_ENTRIES / 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn decoder_keeps_a_buffer_for_the_largest_string_that_is_charged() {
    expect_charge_of_idle(100, &[&GET_HTTPS[..], &coded_field(140_000)].concat(), 1).await;
}
