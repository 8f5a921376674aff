//! What a server said before it was gone: our kernel has told it that it arrived, so the client gets
//! it, however late it reads.

use crate::prober::{Order, Probed, is};
use crate::support::{Certs, PATIENCE, Proxy, passthrough_config, pause, soon, until};
use jackstay::net::sockets::{tcp_info, tcp_options};
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What must be under way for a test to show anything.
const FULL: u64 = 200_000;

/// A server, a proxy, and a flow between them whose client takes little at a time.
async fn slow() -> (Probed, Proxy, TcpStream, TcpStream) {
    let certs = Certs::new();
    let mut server = Probed::start(&certs, &["h2"]).await;
    let proxy = certs.start(passthrough_config(certs.config(&[server.address])));
    proxy.wait_ready(1).await;
    let (client, end) = server.flow(&proxy).await;
    socket2::SockRef::from(&client).set_recv_buffer_size(32 << 10).unwrap();
    (server, proxy, client, end)
}

/// Writes as much as the way to the client takes, `most` at most, and waits until something of it has
/// arrived. How much that was, and how much of it was acknowledged.
async fn fill(end: &TcpStream, most: usize) -> (usize, usize) {
    let acked = || tcp_info::read(end).unwrap().bytes_acked;
    let (much, before) = (vec![7; 64 << 10], acked());
    let (mut written, mut stuck) = (0, 0);
    let start = Instant::now();
    while stuck < 30 || acked() - before <= FULL {
        assert!(start.elapsed() < PATIENCE, "{} of {written}", acked() - before);
        let progress = acked();
        while written < most
            && let Ok(n) = end.try_write(&much[..much.len().min(most - written)])
        {
            written += n;
        }
        pause(Duration::from_millis(10)).await;
        stuck = if acked() == progress { stuck + 1 } else { 0 };
    }
    (written, (acked() - before) as usize)
}

/// All that a client reads, and how it ended.
async fn rest(client: &mut TcpStream) -> (usize, io::Result<usize>) {
    let mut got = Vec::new();
    let end = soon("the rest", client.read_to_end(&mut got)).await;
    assert!(got.iter().all(|byte| *byte == 7));
    (got.len(), end)
}

#[tokio::test]
async fn a_reset_does_not_overtake_them() {
    for most in [1 << 20, 32 << 20] {
        let (_server, proxy, mut client, end) = slow().await;
        let (written, acked) = fill(&end, most).await;
        tcp_options::close_with_reset(end);
        let (got, end) = rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
        until("it is counted", async || {
            proxy.page("/metrics").await.contains(r#"reason="server_reset"} 1"#)
        })
        .await;
    }
}

/// As after the last frame of an exec: the apiserver is gone, and kubectl, which does not know it
/// yet, goes on with its pings. They are answered with a reset.
#[tokio::test]
async fn a_client_that_goes_on_talking_reads_them() {
    for most in [1 << 20, 32 << 20] {
        let (_server, _proxy, mut client, end) = slow().await;
        let (written, acked) = fill(&end, most).await;
        drop(end);
        for _ in 0..20 {
            // The reset may be there already, where all was read.
            let _ = client.write_all(b"x").await;
            pause(Duration::from_millis(5)).await;
        }
        let (got, end) = rest(&mut client).await;
        assert!(got >= acked, "{got} of {acked}, {written} written");
        // What was cut off does not look complete.
        assert!(got == written || end.is_err(), "{got} of {written}: {end:?}");
    }
}

#[tokio::test]
async fn the_death_of_its_endpoint_does_not_take_them_away() {
    let (server, proxy, mut client, mut end) = slow().await;
    let (written, _) = fill(&end, 1 << 20).await;
    end.shutdown().await.unwrap();
    until("all has arrived", async || !tcp_info::read(&end).unwrap().has_pending()).await;
    server.order(Order::Vanish);
    is(&proxy, "ejected").await;
    // Longer than the table takes to end the flows of a dead endpoint.
    pause(Duration::from_millis(500)).await;
    let (got, end) = rest(&mut client).await;
    assert_eq!((got, end.unwrap()), (written, written));
    drop(client);
    until("it is over", async || proxy.status().await["listeners"][0]["flows"] == 0).await;
}
