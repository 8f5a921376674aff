//! What clients can do to a passthrough listener that is not meant well: each takes only what is
//! its own, and for a while.

use crate::peer::Peer;
use crate::support::{Certs, passing, passthrough, soon, until};
use jackstay::config::Route;
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// There and back again.
async fn echo((client, server): &mut (TcpStream, TcpStream)) {
    client.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte up", server.read_u8()).await.unwrap(), b'x');
    server.write_all(b"y").await.unwrap();
    assert_eq!(soon("a byte down", client.read_u8()).await.unwrap(), b'y');
}

/// They hold what sockets hold and no more, and the others go on. What they did not read is there
/// when they read at last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_do_not_read_stop_their_own_writer_alone() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passing(certs.config(&[peer.address])));
    let mut other = peer.join(&proxy).await;
    let mut slow = Vec::new();
    for _ in 0..4 {
        let (client, mut server) = peer.join(&proxy).await;
        let writer = tokio::spawn(async move {
            let (much, mut written) = (vec![7; 64 << 10], 0_usize);
            // A writer that gets nowhere for a second is stopped.
            while let Ok(done) = timeout(Duration::from_secs(1), server.write_all(&much)).await {
                done.unwrap();
                written += much.len();
                assert!(written < 256 << 20, "nobody stops it");
            }
            (server, written)
        });
        slow.push((client, writer));
    }
    while slow.iter().any(|(_, writer)| !writer.is_finished()) {
        echo(&mut other).await;
        sleep(Duration::from_millis(20)).await;
    }
    for (mut client, writer) in slow {
        let (server, written) = writer.await.unwrap();
        drop(server);
        let mut rest = Vec::new();
        soon("the rest", client.read_to_end(&mut rest)).await.unwrap();
        // The last write was cut short by the test's own timeout.
        assert!(rest.len() >= written && rest.iter().all(|byte| *byte == 7), "{written}");
    }
    echo(&mut other).await;
}

/// A `ClientHello` that never ends costs a connection for `handshake_timeout`, garbage nothing; both
/// within the cap, and who is there already does not notice.
#[tokio::test]
async fn a_flood_of_halves_and_garbage_is_bounded_and_ends() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passing(certs.config(&[peer.address]));
    let upstream = config.upstreams[0].name.clone();
    passthrough(&mut config).routes =
        vec![Route { server_names: vec!["elsewhere.example".into()], upstream }];
    config.listeners[0].limits.max_connections = 40;
    config.listeners[0].limits.handshake_timeout = Duration::from_secs(2);
    let proxy = certs.start(config);
    let mut other = peer.join(&proxy).await;
    echo(&mut other).await;
    let begun = Instant::now();
    let mut flood = Vec::new();
    for index in 0..200 {
        let Ok(mut stream) = TcpStream::connect(proxy.addr).await else { continue };
        // A record that promises 256 bytes and brings three, byte after byte or at once; or noise.
        let bytes: &[u8] =
            if index % 4 == 3 { b"\x00\xff\x13\x37" } else { &[22, 3, 1, 1, 0, 1, 0, 0] };
        let _ = stream.write_all(bytes).await;
        flood.push(stream);
    }
    echo(&mut other).await;
    for mut stream in flood {
        let mut rest = Vec::new();
        // A reset, or the word of the server for what it did not understand.
        let end = soon("an end", stream.read_to_end(&mut rest)).await;
        assert!(end.is_ok() || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset));
    }
    echo(&mut other).await;
    println!("a flood of 200 was over after {:?}", begun.elapsed());
    until("only the other is open", async || proxy.status().await["listeners"][0]["flows"] == 1)
        .await;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"reason="handshake_timeout"}"#), "{metrics}");
    assert!(metrics.contains(r#"refused_total{listener="apiserver",reason="cap"}"#), "{metrics}");
}
