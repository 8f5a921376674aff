//! Connect, accept and listeners.

use std::task::Context;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

#[tokio::test(start_paused = true)]
async fn connect_has_addresses_and_takes_a_round_trip() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let began = now();
        let client = hosts.connect().await.unwrap();
        let took = now() - began;
        assert!(
            (Duration::from_micros(500)..Duration::from_micros(750)).contains(&took),
            "{took:?}"
        );
        assert_eq!(client.peer_addr(), "10.0.0.1:6443".parse().unwrap());
        assert_eq!(client.local_addr(), "10.0.0.2:32768".parse().unwrap());
        let server = hosts.accept().await;
        assert_eq!(server.peer_addr(), client.local_addr());
        assert_eq!(server.local_addr(), client.peer_addr());
        let info = client.socket().tcp_info().unwrap();
        assert_eq!((info.rtt, info.min_rtt), (took, took));
        assert_eq!((info.closed, info.data_segments_sent), (false, 0));
        assert_eq!(hosts.network.connects(0), 1);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connect_on_the_own_host_uses_loopback() {
    let network = SocketNetwork::new(1, now(), 2, 1);
    let (proxy, kubelet) = (network.add_process(1), network.add_process(1));
    network.change_all_links(|link| link.blocked = true);
    let listener = network.listen(proxy, 0).unwrap();
    let port = listener.local_addr().port();
    drive(&network, async {
        let to = SocketAddr::new("127.0.0.1".parse().unwrap(), port);
        let mut client = network.of_process(kubelet).connect(to).await.unwrap();
        let (mut server, from) = poll_fn(|cx| listener.poll_accept(cx)).await.unwrap();
        assert!(from.ip().is_loopback());
        assert_eq!(server.local_addr(), to);
        let data = vec![7; 3 << 20];
        let (sent, received) = tokio::join!(
            async {
                client.write_all(&data).await.unwrap();
                client.shutdown().await
            },
            async {
                let mut received = Vec::new();
                server.read_to_end(&mut received).await.unwrap();
                received
            }
        );
        sent.unwrap();
        assert!(received == data);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connect_without_a_listener_is_refused() {
    let hosts = Hosts::new(1);
    let error = hosts.network.listen(hosts.server, PORT).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    drive(&hosts.network, async {
        let network = hosts.network.of_process(hosts.client);
        let to = |text: &str| network.connect(text.parse().unwrap());
        let kind = |result: io::Result<Boxed>| result.unwrap_err().kind();
        assert_eq!(kind(to("10.0.0.1:1").await), io::ErrorKind::ConnectionRefused);
        assert_eq!(kind(to("192.0.2.1:1").await), io::ErrorKind::NetworkUnreachable);
        assert_eq!(kind(to("[::1]:1").await), io::ErrorKind::NetworkUnreachable);
        assert_eq!(kind(to("10.0.0.3:1").await), io::ErrorKind::NetworkUnreachable, "no link");
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connections(), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connect_that_has_no_answer_times_out() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        for to in ["10.0.0.1:6443", "10.0.9.9:1"] {
            hosts.network.change_links_to(0, |link| link.blocked = true);
            let began = now();
            let network = hosts.network.of_process(hosts.client);
            let error = network.connect(to.parse().unwrap()).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            assert_eq!((now() - began).as_secs(), 131, "SYNs at 0, 1, … 5, 7, 11, … 67 s");
        }
        assert_eq!(hosts.network.connects(0), 0);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connect_succeeds_with_a_repeated_syn() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        hosts.network.change_links(0, |link| link.blocked = true);
        let began = now();
        let (client, ()) = tokio::join!(hosts.connect(), async {
            sleep_ms(1_500).await;
            hosts.network.change_links(0, |link| link.blocked = false);
        });
        let took = now() - began;
        assert_eq!(took.as_secs(), 2, "{took:?}");
        let min_rtt = client.unwrap().socket().tcp_info().unwrap().min_rtt;
        assert!(
            min_rtt < Duration::from_millis(1),
            "the time stamp is that of the copy: {min_rtt:?}"
        );
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn lost_last_packet_of_the_handshake_is_repeated() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        let connecting = async {
            let network = hosts.network.clone();
            // The SYN and its answer pass.
            sleep_ms(15).await;
            network.change_links_to(0, |link| link.blocked = true);
            sleep_ms(500).await;
            network.change_links_to(0, |link| link.blocked = false);
        };
        hosts.network.change_all_links(|link| {
            link.latency = Duration::from_millis(10);
        });
        let began = now();
        // Without keepalive probes, which complete the handshake, too.
        let options = SocketOptions { keepalive: None, ..SocketOptions::go() };
        let network = hosts.network.of_process_with(hosts.client, options);
        let (client, ()) = tokio::join!(network.connect(Hosts::address()), connecting);
        let server = hosts.accept().await;
        assert!((now() - began).as_millis() >= 1_000, "{:?}", now() - began);
        assert_eq!(server.peer_addr(), client.unwrap().local_addr());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn connect_that_is_given_up_leaves_nothing() {
    let hosts = Hosts::new(1);
    drive(&hosts.network, async {
        hosts.network.change_all_links(|link| link.latency = Duration::from_millis(20));
        for ms in [10, 30, 45] {
            let network = hosts.network.of_process(hosts.client);
            let connect = network.connect(Hosts::address());
            let given_up = tokio::time::timeout(Duration::from_millis(ms), connect).await.is_err();
            assert_eq!(given_up, ms < 40);
        }
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connects(0), 3);
        // The third one was established, and the client has closed it.
        let mut server = hosts.accept().await;
        assert_eq!(server.read(&mut [0]).await.unwrap(), 0);
        drop(server);
        sleep_ms(2_000).await;
        assert_eq!(hosts.network.connections(), 0, "{}", hosts.network.log());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn listener_that_closes_returns_or_resets_the_backlog() {
    let mut hosts = Hosts::new(1);
    let network = hosts.network.clone();
    drive(&network, async {
        let mut client = hosts.connect().await.unwrap();
        sleep_ms(5).await;
        let next = hosts.network.listen(hosts.server, PORT + 1).unwrap();
        let queued = std::mem::replace(&mut hosts.listener, next).close_and_accept_queued();
        assert_eq!(queued.len(), 1);
        client.write_all(b"to it").await.unwrap();
        let (mut server, mut buf) = (queued.into_iter().next().unwrap().0, [0; 5]);
        server.read_exact(&mut buf).await.unwrap();
        assert_eq!(hosts.connect().await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);

        let listener = hosts.network.listen(hosts.server, PORT).unwrap();
        let mut client = hosts.connect().await.unwrap();
        sleep_ms(5).await;
        drop(listener);
        let error = client.read(&mut buf).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn driver_is_woken_for_an_event_before_all_others() {
    let hosts = Hosts::new(1);
    let wakes = Arc::new(Wakes::default());
    hosts.network.set_driver(Waker::from(Arc::clone(&wakes)));
    assert_eq!(hosts.network.next_event_at(), None);
    let network = hosts.network.of_process(hosts.client);
    let mut first = network.connect(Hosts::address());
    let mut second = network.connect(Hosts::address());
    let mut cx = Context::from_waker(Waker::noop());
    assert!(first.as_mut().poll(&mut cx).is_pending());
    assert_eq!(wakes.count(), 1);
    let next = hosts.network.next_event_at().unwrap();
    assert!(next > now());
    advance(Duration::from_micros(200)).await;
    assert!(second.as_mut().poll(&mut cx).is_pending());
    assert_eq!(wakes.count(), 1, "the packet of the first one is earlier");
    assert_eq!(hosts.network.next_event_at(), Some(next));
    advance(Duration::from_secs(1)).await;
    assert_eq!(hosts.network.next_event_at(), Some(now()), "never earlier than the present");
    hosts.network.run_until(now());
    assert_eq!(wakes.count(), 1, "the driver knows what it has queued itself");
    assert!(first.as_mut().poll(&mut cx).is_ready());
}
