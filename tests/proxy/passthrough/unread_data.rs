//! Data that a server has sent before its connection ended. jackstay has acknowledged the data, so the client must
//! get it, however late the client reads.

use crate::passthrough::peer::{Mode, ProbedServer, wait_flows};
use crate::support::{PATIENCE, Proxy, pause, soon, until};
use jackstay_sys::sockets::{tcp_info, tcp_options};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The least number of bytes that the client has not read when the connection of the server ends.
const MIN_UNREAD: u64 = 200_000;

/// A server, a proxy, and both ends of a flow whose client has a small receive buffer.
async fn setup() -> (ProbedServer, Proxy, TcpStream, TcpStream) {
    let (_certs, mut server, proxy) = ProbedServer::setup().await;
    let (client, server_end) = server.flow(&proxy).await;
    socket2::SockRef::from(&client).set_recv_buffer_size(32 << 10).unwrap();
    (server, proxy, client, server_end)
}

/// Writes up to `most` bytes, until the path to the client is full and jackstay acknowledges no more data.
/// Returns the number of bytes written and of those acknowledged.
async fn fill(server_end: &TcpStream, most: usize) -> (usize, usize) {
    let acked = || tcp_info::read(server_end).unwrap().bytes_acked;
    let (data, before) = (vec![7; 64 << 10], acked());
    let (mut written, mut idle) = (0, 0);
    let start = Instant::now();
    while idle < 30 || acked() - before <= MIN_UNREAD {
        let acked_before = acked();
        assert!(start.elapsed() < PATIENCE, "{} of {written} acked", acked_before - before);
        while written < most
            && let Ok(n) = server_end.try_write(&data[..data.len().min(most - written)])
        {
            written += n;
        }
        pause(Duration::from_millis(10)).await;
        idle = if acked() == acked_before { idle + 1 } else { 0 };
    }
    (written, (acked() - before) as usize)
}

/// Reads to the end of a connection. Returns the number of bytes and the result of the last read.
async fn read_rest(client: &mut TcpStream) -> (usize, io::Result<usize>) {
    let mut got = Vec::new();
    let end = soon("the rest", client.read_to_end(&mut got)).await;
    assert!(got.iter().all(|byte| *byte == 7));
    (got.len(), end)
}

#[tokio::test]
async fn reset_of_the_server_does_not_discard_unread_data() {
    for most in [1 << 20, 32 << 20] {
        let (_server, proxy, mut client, server_end) = setup().await;
        let (written, acked) = fill(&server_end, most).await;
        tcp_options::close_with_reset(server_end);
        let (got, end) = read_rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
        proxy.wait_metrics(r#"reason="server_reset"} 1"#).await;
    }
}

/// As at the end of an exec: the apiserver has closed its connection, and kubectl, which has not read the end yet,
/// sends pings. The kernel of the apiserver answers those with a reset.
#[tokio::test]
async fn client_that_keeps_sending_after_the_end_gets_all_data() {
    for most in [1 << 20, 32 << 20] {
        let (_server, _proxy, mut client, server_end) = setup().await;
        let (written, acked) = fill(&server_end, most).await;
        drop(server_end);
        for _ in 0..20 {
            // The write fails if the client has already been reset.
            let _ = client.write_all(b"x").await;
            pause(Duration::from_millis(5)).await;
        }
        let (got, end) = read_rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        // A truncated response must not look complete.
        assert!(got == written || end.is_err(), "{got} of {written}: {end:?}");
    }
}

#[tokio::test]
async fn ejection_of_the_endpoint_does_not_discard_unread_data() {
    let (server, proxy, mut client, mut server_end) = setup().await;
    let (written, _) = fill(&server_end, 1 << 20).await;
    server_end.shutdown().await.unwrap();
    until("all data is acknowledged", async || !tcp_info::read(&server_end).unwrap().has_pending())
        .await;
    server.set_mode(Mode::Die);
    proxy.wait_all("ejected").await;
    // jackstay needs less time than this to end the flows of a dead endpoint.
    pause(Duration::from_millis(500)).await;
    let (got, end) = read_rest(&mut client).await;
    assert_eq!((got, end.unwrap()), (written, written));
    drop(client);
    wait_flows(&proxy, 0).await;
}
