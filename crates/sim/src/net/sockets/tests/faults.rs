//! Losses, timeouts, processes that stop and devices that forget.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

#[tokio::test(start_paused = true)]
async fn packets_dropped_in_one_direction_show_as_retransmissions() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        hosts.network.change_links_to(0, |link| link.blocked = true);
        client.write_all(b"ping").await.unwrap();
        sleep_ms(1_000).await;
        let info = client.socket().tcp_info().unwrap();
        // The tail loss probe comes first. Thin streams do not double the timeout of 0.2 s.
        assert_eq!((info.retransmits, info.retransmitted, info.unacked), (3, 4, 1), "{info:?}");
        assert_eq!(info.data_segments_sent, 5);
        assert!(info.last_ack_recv >= Duration::from_secs(1), "{info:?}");
        server.write_all(b"the other direction works").await.unwrap();
        sleep_ms(5).await;
        assert_eq!(client.read(&mut [0; 64]).await.unwrap(), 25);
        hosts.network.change_links_to(0, |link| link.blocked = false);
        server.read_exact(&mut [0; 4]).await.unwrap();
        sleep_ms(5).await;
        let info = client.socket().tcp_info().unwrap();
        assert_eq!((info.retransmits, info.unacked, info.bytes_acked), (0, 0, 1 + 4), "{info:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn tail_loss_probe_shows_earlier_losses_before_the_retransmission_timeout() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        hosts.network.change_links_to(0, |link| link.blocked = true);
        let began = now();
        // Two packets, so that no acknowledgement is delayed.
        for _ in 0..2 {
            client.write_all(b"ping").await.unwrap();
            sleep_ms(1).await;
        }
        hosts.network.change_links_to(0, |link| link.blocked = false);
        server.read_exact(&mut [0; 8]).await.unwrap();
        assert!((now() - began).as_millis() < 20, "{:?}", now() - began);
        sleep_ms(5).await;
        let info = client.socket().tcp_info().unwrap();
        assert_eq!((info.retransmits, info.retransmitted, info.unacked), (0, 2, 0), "{info:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connection_without_acknowledgements_times_out() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, _server) = hosts.pair().await;
        hosts.network.change_links(0, |link| link.blocked = true);
        client.write_all(b"lost").await.unwrap();
        let began = now();
        let kind = client.read(&mut [0]).await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::TimedOut);
        let took = (now() - began).as_secs();
        assert!((924..1_050).contains(&took), "{took} s");
        assert_eq!(client.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn keepalive_probes_are_counted_and_end_a_dead_connection() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut client, mut server) = hosts.pair().await;
        sleep_ms(10_500).await;
        let info = client.socket().tcp_info().unwrap();
        assert_eq!(info.probes, 0);
        assert!(info.last_ack_recv < Duration::from_millis(1_100), "{info:?}");
        assert!(info.fresh_segments() >= 9, "{info:?}");
        assert_eq!(info.data_segments_sent, 0);
        hosts.network.change_links(0, |link| link.blocked = true);
        sleep_ms(5_000).await;
        let probes = client.socket().tcp_info().unwrap().probes;
        assert_eq!(probes, 5);
        client.socket().send_keepalive_probe().unwrap();
        assert_eq!(client.socket().tcp_info().unwrap().probes, 6);
        let (of_client, of_server) = tokio::join!(
            async { (client.read(&mut [0]).await.unwrap_err().kind(), now()) },
            async { (server.read(&mut [0]).await.unwrap_err().kind(), now()) }
        );
        assert_eq!((of_client.0, of_server.0), (io::ErrorKind::TimedOut, io::ErrorKind::TimedOut));
        assert!(of_server.1 < of_client.1, "30 s + 9 × 10 s, and 127 s");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn disabled_keepalives_send_nothing() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (client, server) = hosts.pair().await;
        for stream in [&client, &server] {
            stream.socket().disable_keepalives().unwrap();
        }
        sleep_ms(5).await;
        let packets = hosts.network.packets();
        sleep_ms(100_000).await;
        assert_eq!(hosts.network.packets(), packets);
        let idle = Duration::from_secs(7);
        let options = SocketOptions {
            keepalive: Some(Keepalive { idle, interval: idle, probes: 1 }),
            ..SocketOptions::go()
        };
        let network = hosts.network.of_process_with(hosts.client, options);
        let _client = network.connect(Hosts::address()).await.unwrap();
        let packets = hosts.network.packets();
        sleep_ms(29_000).await;
        assert_eq!(hosts.network.packets() - packets, 4 * 2, "4 probes and their answers");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn stopped_process_accepts_and_acknowledges_until_its_buffer_is_full() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        // Nothing polls the server.
        hosts.network.set_process(hosts.server, ProcessState::Stopped);
        let mut client = hosts.connect().await.unwrap();
        client.write_all(&vec![0; 100 << 10]).await.unwrap();
        sleep_ms(1_000).await;
        let info = client.socket().tcp_info().unwrap();
        assert_eq!((info.unacked, info.bytes_acked), (0, 1 + (100 << 10)));
        let more = vec![0; 1 << 20];
        let full = tokio::time::timeout(Duration::from_secs(2), client.write_all(&more)).await;
        assert!(full.is_err());
        let acked = client.socket().tcp_info().unwrap().bytes_acked;
        // A window of less than a packet is announced as 0.
        assert!((255 << 10..=256 << 10).contains(&acked), "{acked}");
        hosts.network.set_process(hosts.server, ProcessState::Running);
        let mut server = hosts.accept().await;
        server.read_exact(&mut vec![0; 500 << 10]).await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn killed_process_closes_its_sockets_and_may_restart() {
    let mut hosts = Hosts::new(1);
    let network = hosts.network.clone();
    drive(&network, async {
        let (mut quiet, old) = hosts.pair().await;
        let (mut busy, old_busy) = hosts.pair().await;
        busy.write_all(b"unread").await.unwrap();
        let mut queued = hosts.connect().await.unwrap();
        sleep_ms(5).await;
        hosts.network.set_process(hosts.server, ProcessState::Dead);
        assert_eq!(quiet.read(&mut [0]).await.unwrap(), 0, "FIN");
        let reset = io::ErrorKind::ConnectionReset;
        assert_eq!(busy.read(&mut [0]).await.unwrap_err().kind(), reset, "bytes were unread");
        assert_eq!(queued.read(&mut [0]).await.unwrap_err().kind(), reset, "not accepted");
        assert_eq!(hosts.connect().await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        quiet.write_all(b"to a closed socket").await.unwrap();
        sleep_ms(5).await;
        assert_eq!(quiet.write(b"x").await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);

        hosts.network.set_process(hosts.server, ProcessState::Running);
        let listener = hosts.network.listen(hosts.server, PORT).unwrap();
        let old_listener = std::mem::replace(&mut hosts.listener, listener);
        let (mut client, mut server) = hosts.pair().await;
        let (hash, packets) = (hosts.network.hash(), hosts.network.packets());
        drop((old_listener, old, old_busy));
        assert_eq!((hosts.network.hash(), hosts.network.packets()), (hash, packets));
        client.write_all(b"new").await.unwrap();
        server.read_exact(&mut [0; 3]).await.unwrap();
        drop((client, server, quiet, busy, queued));
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connections(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn forgotten_flows_are_silent_or_reset_and_new_ones_work() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let (mut dropped, _old) = hosts.pair().await;
        hosts.network.forget_flows(0, [true, true]);
        dropped.write_all(b"x").await.unwrap();
        sleep_ms(1_000).await;
        assert!(dropped.socket().tcp_info().unwrap().retransmits >= 3);

        let (mut client, mut server) = hosts.pair().await;
        client.write_all(b"x").await.unwrap();
        server.read_exact(&mut [0]).await.unwrap();
        sleep_ms(5).await;
        hosts.network.forget_flows(0, [false, false]);
        client.write_all(b"y").await.unwrap();
        let kind = client.read(&mut [0]).await.unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::ConnectionReset);
        let (mut client, mut server) = hosts.pair().await;
        client.write_all(b"z").await.unwrap();
        server.read_exact(&mut [0]).await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn log_has_a_line_for_each_entry() {
    let hosts = Hosts::new(1);
    hosts.network.set_tracing(true);
    drive(&hosts.network, async {
        let (client, _server) = hosts.pair().await;
        drop(client);
        sleep_ms(5).await;
    })
    .await;
    let log = hosts.network.log();
    assert_eq!(log.lines().count(), 4, "{log}");
    assert!(log.contains("connection 0: process 1 connects to host 0"), "{log}");
}
