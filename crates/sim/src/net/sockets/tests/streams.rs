//! Bytes, windows, wake-ups and the end of streams.

use std::pin::Pin;
use std::task::Context;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::*;

fn pattern(bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(9);
    (0..bytes).map(|_| rng.u8(..)).collect()
}

/// Echoes 1 MiB over links with loss and jitter. Returns the hash of the run.
async fn echo(seed: u64) -> u64 {
    let hosts = Hosts::new(seed);
    hosts.network.change_all_links(|link| {
        link.loss = 0.02;
        (link.latency, link.jitter) = (Duration::from_millis(2), Duration::from_millis(3));
    });
    let data = pattern(1 << 20);
    drive(&hosts.network, async {
        let (client, mut server) = hosts.pair().await;
        let (mut reader, mut writer) = tokio::io::split(client);
        let echo = async {
            let mut buf = vec![0; 10_000];
            loop {
                let count = server.read(&mut buf).await.unwrap();
                if count == 0 {
                    return server.shutdown().await.unwrap();
                }
                server.write_all(&buf[..count]).await.unwrap();
            }
        };
        let write = async {
            for part in data.chunks(7_777) {
                writer.write_all(part).await.unwrap();
            }
            writer.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let read = reader.read_to_end(&mut received);
        let ((), (), result) = tokio::join!(echo, write, read);
        result.unwrap();
        assert!(received == data);
    })
    .await;
    hosts.network.hash()
}

#[test]
fn echo_with_loss_is_equal_and_a_function_of_the_seed() {
    let run = |seed| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(echo(seed))
    };
    let first = run(1);
    assert_eq!(first, run(1));
    assert_ne!(first, run(2));
}

#[tokio::test(start_paused = true)]
async fn window_closes_while_the_reader_waits_and_opens_again() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (client, mut server) = hosts.pair().await;
        let (mut client_reader, mut writer) = tokio::io::split(client);
        let socket = server.socket();
        let data = pattern(2 << 20);
        let write = async {
            writer.write_all(&data).await.unwrap();
            writer.shutdown().await.unwrap();
        };
        let read = async {
            sleep_ms(30_000).await;
            assert_eq!(socket.queue_memory().unwrap().received, 256 << 10);
            let mut received = Vec::new();
            server.read_to_end(&mut received).await.unwrap();
            assert!(received == data);
            let began = now();
            server.write_all(b"end").await.unwrap();
            began
        };
        let mut end = [0; 3];
        let ((), _, _) = tokio::join!(write, read, client_reader.read_exact(&mut end));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn closed_window_is_probed_and_shows_in_tcp_info() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        let data = vec![1; 600 << 10];
        let written = tokio::time::timeout(Duration::from_secs(20), client.write_all(&data)).await;
        assert!(written.is_err(), "the send queue and the receive buffer are full");
        let info = client.socket().tcp_info().unwrap();
        assert_eq!(info.send_window, Some(0));
        assert_eq!(info.is_window_closed(), Some(true));
        assert_eq!((info.unacked, info.retransmits, info.probes), (0, 0, 0), "{info:?}");
        assert_eq!(info.notsent_bytes, 256 << 10);
        assert!(info.rto < Duration::from_secs(1), "only the probes are further apart: {info:?}");
        let packets = hosts.network.packets();
        sleep_ms(60_000).await;
        let probes = hosts.network.packets() - packets;
        assert!((2..=40).contains(&probes), "{probes} packets in a minute");
        // No probe arrives; the update of the window does.
        let mut received = vec![0; 512 << 10];
        let began = now();
        server.read_exact(&mut received).await.unwrap();
        assert!((now() - began).as_millis() < 10, "{:?}", now() - began);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn writer_is_woken_once_when_a_third_of_the_queue_is_free() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        let data = vec![1; 1 << 20];
        let full = tokio::time::timeout(Duration::from_secs(1), client.write_all(&data)).await;
        assert!(full.is_err());
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut write =
            || Pin::new(&mut client).poll_write(&mut Context::from_waker(&waker), &data);
        assert!(write().is_pending());
        let mut buf = vec![0; 64 << 10];
        server.read_exact(&mut buf).await.unwrap();
        sleep_ms(5).await;
        assert_eq!(wakes.count(), 0);
        server.read_exact(&mut buf).await.unwrap();
        server.read_exact(&mut buf).await.unwrap();
        sleep_ms(5).await;
        assert_eq!(wakes.count(), 1);
        assert!(matches!(write(), Poll::Ready(Ok(count)) if count > 128 << 10));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn reader_is_woken_only_by_bytes_the_end_and_errors() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        let (old, new) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
        let mut buf = [0; 8];
        for wakes in [&old, &new] {
            let waker = Waker::from(Arc::clone(wakes));
            let mut buf = ReadBuf::new(&mut buf);
            let poll = Pin::new(&mut server).poll_read(&mut Context::from_waker(&waker), &mut buf);
            assert!(poll.is_pending());
        }
        server.write_all(b"acknowledged").await.unwrap();
        sleep_ms(3_000).await;
        assert_eq!(new.count(), 0, "acknowledgements and probes wake no reader");
        client.write_all(b"a").await.unwrap();
        client.write_all(b"b").await.unwrap();
        sleep_ms(5).await;
        assert_eq!((old.count(), new.count()), (0, 1));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn bound_unsent_stops_a_writer_before_the_queue_is_full() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        client.socket().bound_unsent(16 << 10).unwrap();
        let data = vec![1; 1 << 20];
        let mut written = 0;
        while let Ok(count) =
            tokio::time::timeout(Duration::from_secs(1), client.write(&data)).await
        {
            written += count.unwrap();
        }
        assert_eq!(written, (256 + 16) << 10, "the window and the bound");
        assert_eq!(client.socket().tcp_info().unwrap().notsent_bytes, 16 << 10);
        server.read_exact(&mut vec![0; 200 << 10]).await.unwrap();
        assert!(client.write(&data).await.unwrap() > 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn bound_received_drops_what_was_sent_before_and_loses_nothing() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        hosts.network.change_all_links(|link| link.latency = Duration::from_millis(20));
        let data = pattern(300 << 10);
        let bound = async {
            sleep_ms(5).await;
            server.socket().bound_received(Some(20_000)).unwrap();
            sleep_ms(5_000).await;
            let held = server.socket().queue_memory().unwrap().received;
            assert!((20_000..40_000).contains(&held), "{held}");
            server.socket().bound_received(None).unwrap();
            let mut received = vec![0; data.len()];
            server.read_exact(&mut received).await.unwrap();
            assert!(received == data);
        };
        let (written, ()) = tokio::join!(client.write_all(&data), bound);
        written.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn half_closed_connection_carries_bytes_in_the_other_direction() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        client.write_all(b"question").await.unwrap();
        client.shutdown_write().unwrap();
        let error = client.write(b"more").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        let mut buf = Vec::new();
        server.read_to_end(&mut buf).await.unwrap();
        assert_eq!(buf, b"question");
        let info = server.socket().tcp_info().unwrap();
        assert_eq!((info.ended, info.closed), (true, false));
        assert_eq!(client.socket().tcp_info().unwrap().data_segments_sent, 1, "FIN is not data");
        let answer = pattern(100_000);
        server.write_all(&answer).await.unwrap();
        let socket = client.socket();
        drop(server);
        buf.clear();
        client.read_to_end(&mut buf).await.unwrap();
        assert!(buf == answer, "bytes arrive that were written before the close");
        assert!(socket.tcp_info().unwrap().closed);
        drop(client);
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connections(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn close_with_unread_bytes_resets() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        server.write_all(b"last").await.unwrap();
        client.write_all(b"unread").await.unwrap();
        sleep_ms(5).await;
        drop(server);
        sleep_ms(5).await;
        assert!(client.socket().tcp_info().unwrap().closed);
        let mut buf = [0; 16];
        assert_eq!(client.read(&mut buf).await.unwrap(), 4, "what arrived before can be read");
        let kind = client.read(&mut buf).await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
        assert_eq!(client.read(&mut buf).await.unwrap(), 0, "the error is returned once");
        assert_eq!(client.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        let kind = client.shutdown_write().unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::NotConnected);
        client.shutdown().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn reset_when_closed_and_data_for_a_closed_socket_reset() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, server) = hosts.pair().await;
        server.reset_when_closed();
        drop(server);
        let kind = client.read(&mut [0]).await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
        drop(client);

        let (mut client, server) = hosts.pair().await;
        drop(server);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "FIN");
        client.write_all(b"nobody reads it").await.unwrap();
        sleep_ms(5).await;
        assert_eq!(client.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        drop(client);
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connections(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn peek_and_try_read_return_what_has_arrived() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, server) = hosts.pair().await;
        let mut buf = [0; 4];
        let kind = server.try_read(&mut buf).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::WouldBlock);
        let bufs = [io::IoSlice::new(b"ab"), io::IoSlice::new(b""), io::IoSlice::new(b"cdef")];
        assert_eq!(client.write_vectored(&bufs).await.unwrap(), 6);
        let mut peeked = tokio::io::ReadBuf::new(&mut buf);
        assert_eq!(poll_fn(|cx| server.poll_peek(cx, &mut peeked)).await.unwrap(), 4);
        assert_eq!(client.socket().tcp_info().unwrap().data_segments_sent, 1, "one segment");
        assert_eq!(server.try_read(&mut buf).unwrap(), 4);
        assert_eq!(&buf, b"abcd");
        assert_eq!(server.try_read(&mut buf).unwrap(), 2);
        drop(client);
        sleep_ms(5).await;
        assert_eq!(server.try_read(&mut buf).unwrap(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn reset_wakes_reader_and_writer() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, server) = hosts.pair().await;
        let data = vec![1; 1 << 20];
        let full = tokio::time::timeout(Duration::from_secs(1), client.write_all(&data)).await;
        assert!(full.is_err());
        let (reads, writes) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
        let waker = Waker::from(Arc::clone(&reads));
        let mut buf = [0; 8];
        let mut buf = ReadBuf::new(&mut buf);
        let read = Pin::new(&mut client).poll_read(&mut Context::from_waker(&waker), &mut buf);
        let waker = Waker::from(Arc::clone(&writes));
        let write = Pin::new(&mut client).poll_write(&mut Context::from_waker(&waker), &data);
        assert!(read.is_pending() && write.is_pending());
        server.reset_when_closed();
        drop(server);
        sleep_ms(5).await;
        assert_eq!((reads.count(), writes.count()), (1, 1));
        let kind = client.write(&data).await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn local_peer_that_does_not_read_holds_no_more_than_its_buffer() {
    let network = SocketNetwork::new(1, now(), 2, 1);
    let (proxy, kubelet) = (network.add_process(1), network.add_process(1));
    let listener = network.listen(proxy, PORT).unwrap();
    drive(&network, async {
        let to = SocketAddr::new("127.0.0.1".parse().unwrap(), PORT);
        let mut client = network.of_process(kubelet).connect(to).await.unwrap();
        let (server, _) = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
        let data = vec![1; 2 << 20];
        let full = tokio::time::timeout(Duration::from_secs(1), client.write_all(&data)).await;
        assert!(full.is_err());
        assert_eq!(server.socket().queue_memory().unwrap().received, 256 << 10);
        assert_eq!(client.socket().queue_memory().unwrap().sent, 256 << 10);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn acknowledgement_is_delayed_once_responses_follow_requests() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        let socket = client.socket();
        let mut unacknowledged = Vec::new();
        for _ in 0..2 {
            client.write_all(&[1; 100]).await.unwrap();
            server.read_exact(&mut [0; 100]).await.unwrap();
            for pause in [20, 40] {
                sleep_ms(pause).await;
                unacknowledged.push(socket.tcp_info().unwrap().unacked);
            }
            // A response that follows its request.
            client.write_all(&[1; 100]).await.unwrap();
            server.read_exact(&mut [0; 100]).await.unwrap();
            server.write_all(&[1; 100]).await.unwrap();
            client.read_exact(&mut [0; 100]).await.unwrap();
            sleep_ms(1).await;
            unacknowledged.push(socket.tcp_info().unwrap().unacked);
            sleep_ms(100).await;
        }
        assert_eq!(unacknowledged, [0, 0, 0, 1, 0, 0]);
        // Two requests without a response: the second one is acknowledged at once.
        unacknowledged.clear();
        for _ in 0..2 {
            client.write_all(&[1; 100]).await.unwrap();
            server.read_exact(&mut [0; 100]).await.unwrap();
            sleep_ms(20).await;
            unacknowledged.push(socket.tcp_info().unwrap().unacked);
            sleep_ms(100).await;
        }
        assert_eq!(unacknowledged, [1, 0]);
        // A second segment is acknowledged at once, and the first one with it.
        client.write_all(&[1; 100]).await.unwrap();
        server.read_exact(&mut [0; 100]).await.unwrap();
        server.write_all(&[1; 100]).await.unwrap();
        client.read_exact(&mut [0; 100]).await.unwrap();
        sleep_ms(100).await;
        unacknowledged.clear();
        for _ in 0..2 {
            client.write_all(&[1; 100]).await.unwrap();
            server.read_exact(&mut [0; 100]).await.unwrap();
            sleep_ms(10).await;
            unacknowledged.push(socket.tcp_info().unwrap().unacked);
        }
        assert_eq!(unacknowledged, [1, 0]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn more_than_a_segment_is_acknowledged_at_once() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        client.write_all(&[1; 100]).await.unwrap();
        server.read_exact(&mut [0; 100]).await.unwrap();
        server.write_all(&[1; 100]).await.unwrap();
        client.read_exact(&mut [0; 100]).await.unwrap();
        client.write_all(&[1; 2_000]).await.unwrap();
        sleep_ms(5).await;
        assert_eq!(client.socket().tcp_info().unwrap().unacked, 0);
    })
    .await;
}
