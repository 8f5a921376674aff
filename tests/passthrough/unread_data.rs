//! Data that a server sent before it ended. jackstay has acknowledged it, so the client must get
//! it, however late it reads.

use crate::peer::{Mode, ProbedServer, wait_flows};
use crate::support::{PATIENCE, Proxy, pause, soon, until};
use jackstay::net::sockets::{tcp_info, tcp_options};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The number of unread bytes that a test needs.
const MIN_UNREAD: u64 = 200_000;

/// A server, a proxy, and a flow whose client has a small receive buffer.
async fn setup() -> (ProbedServer, Proxy, TcpStream, TcpStream) {
    let (_certs, mut server, proxy) = ProbedServer::setup().await;
    let (client, end) = server.flow(&proxy).await;
    socket2::SockRef::from(&client).set_recv_buffer_size(32 << 10).unwrap();
    (server, proxy, client, end)
}

/// Writes until the path to the client is full, at most `most` bytes, and waits until the client's
/// side has acknowledged some. Returns the bytes written and those acknowledged.
async fn fill(end: &TcpStream, most: usize) -> (usize, usize) {
    let acked = || tcp_info::read(end).unwrap().bytes_acked;
    let (data, before) = (vec![7; 64 << 10], acked());
    let (mut written, mut idle) = (0, 0);
    let start = Instant::now();
    while idle < 30 || acked() - before <= MIN_UNREAD {
        assert!(start.elapsed() < PATIENCE, "{} of {written}", acked() - before);
        let progress = acked();
        while written < most
            && let Ok(n) = end.try_write(&data[..data.len().min(most - written)])
        {
            written += n;
        }
        pause(Duration::from_millis(10)).await;
        idle = if acked() == progress { idle + 1 } else { 0 };
    }
    (written, (acked() - before) as usize)
}

/// The number of bytes that a client reads, and how its connection ends.
async fn rest(client: &mut TcpStream) -> (usize, io::Result<usize>) {
    let mut got = Vec::new();
    let end = soon("the rest", client.read_to_end(&mut got)).await;
    assert!(got.iter().all(|byte| *byte == 7));
    (got.len(), end)
}

#[tokio::test]
async fn reset_of_the_server_does_not_discard_unread_data() {
    for most in [1 << 20, 32 << 20] {
        let (_server, proxy, mut client, end) = setup().await;
        let (written, acked) = fill(&end, most).await;
        tcp_options::close_with_reset(end);
        let (got, end) = rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
        proxy.wait_metrics(r#"reason="server_reset"} 1"#).await;
    }
}

/// As after the last frame of an exec: the apiserver has closed, kubectl does not know it yet and
/// sends pings, which are answered with a reset.
#[tokio::test]
async fn client_that_keeps_sending_reads_all_data() {
    for most in [1 << 20, 32 << 20] {
        let (_server, _proxy, mut client, end) = setup().await;
        let (written, acked) = fill(&end, most).await;
        drop(end);
        for _ in 0..20 {
            // The reset may have arrived if everything was read.
            let _ = client.write_all(b"x").await;
            pause(Duration::from_millis(5)).await;
        }
        let (got, end) = rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        // A truncated response must not look complete.
        assert!(got == written || end.is_err(), "{got} of {written}: {end:?}");
    }
}

#[tokio::test]
async fn ejection_of_the_endpoint_does_not_discard_unread_data() {
    let (server, proxy, mut client, mut end) = setup().await;
    let (written, _) = fill(&end, 1 << 20).await;
    end.shutdown().await.unwrap();
    until("all data is acknowledged", async || !tcp_info::read(&end).unwrap().has_pending()).await;
    server.set_mode(Mode::Die);
    proxy.wait_all("ejected").await;
    // Longer than jackstay takes to end the flows of a dead endpoint.
    pause(Duration::from_millis(500)).await;
    let (got, end) = rest(&mut client).await;
    assert_eq!((got, end.unwrap()), (written, written));
    drop(client);
    wait_flows(&proxy, 0).await;
}
