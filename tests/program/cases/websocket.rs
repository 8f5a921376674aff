//! A watch over WebSocket is not resumed. It ends as soon as an ordinary watch would leave its apiserver, so that its
//! client continues it.

use crate::cases::peer::{EVENT_FRAME, Life, Peer, Rig, Script, addresses, start_peers};
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::wire::{self, Wire};
use crate::support::{CONFIGMAPS, Certs, soon, until};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// Time until a watch on a stopped apiserver has ended: as for a flow.
const STOPPED_WATCH_ENDS: Duration = Duration::from_secs(3);
/// The same on a killed one.
const KILLED_WATCH_ENDS: Duration = Duration::from_millis(250);
/// Time in which the watches on a removed apiserver end.
const LEAVES: Duration = Duration::from_secs(6);

/// jackstay in front of two peers.
async fn start() -> (Vec<Peer>, Rig) {
    let certs = Certs::new();
    let peers = start_peers(&certs, 2, &Script::default()).await;
    // An exec would wait for a minute.
    let wait = |config: &mut jackstay_config::Config| {
        config.upstreams[0].health.tunnel_dead_after = Duration::from_secs(60);
    };
    let rig = Rig::start(certs, &addresses(&peers), wait).await;
    (peers, rig)
}

/// Asks for an upgrade to WebSocket, and reads the first frame.
async fn upgrade(rig: &Rig, target: &str) -> Wire {
    let mut stream =
        wire::connect_with(rig.address, &rig.certs, Some(&rig.certs.admin), "http/1.1").await;
    let head = format!(
        "GET {target} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
         sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    while !response.ends_with(EVENT_FRAME) {
        response.push(soon("a frame", stream.read_u8()).await.unwrap());
    }
    assert!(response.starts_with(b"HTTP/1.1 101 "), "{:?}", String::from_utf8_lossy(&response));
    stream
}

async fn watch(rig: &Rig) -> Wire {
    upgrade(rig, &format!("{CONFIGMAPS}?watch=true&resourceVersion=5")).await
}

/// The peer with a watch, and the other one.
fn of_watch(peers: &[Peer]) -> (&Peer, &Peer) {
    let has_watch = |peer: &Peer| peer.watches.load(Relaxed) > 0;
    let [a, b] = peers else { panic!("two peers") };
    if has_watch(a) { (a, b) } else { (b, a) }
}

/// Waits for the end of the connection. Returns the bytes before it.
async fn end(stream: &mut Wire) -> Vec<u8> {
    let mut rest = Vec::new();
    // A client sees an end without close_notify or a reset, which are both abnormal for a WebSocket.
    let _ = soon("the end of the watch", stream.read_to_end(&mut rest)).await;
    rest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_watch_ends_with_its_apiserver() {
    for (life, limit) in [(Life::Stopped, STOPPED_WATCH_ENDS), (Life::Killed, KILLED_WATCH_ENDS)] {
        let (peers, rig) = start().await;
        let mut stream = watch(&rig).await;
        let (peer, other) = of_watch(&peers);
        let time = Stopwatch::start();
        peer.set_life(life);
        let rest = end(&mut stream).await;
        check_figure(&format!("end of a watch over WebSocket, {life:?}"), time.elapsed(), limit);
        assert_eq!(rest, b"", "nothing is sent into the frames");
        // The client asks again, and is served by the other one.
        let _stream = watch(&rig).await;
        assert_eq!(other.watches.load(Relaxed), 1);
    }
}

/// An exec waits for `tunnel_dead_after`, because its command cannot be continued.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_exec_waits_for_a_stopped_apiserver() {
    let (peers, rig) = start().await;
    let mut stream = upgrade(&rig, "/api/v1/namespaces/d/pods/p/exec?command=sh").await;
    let (peer, _) = of_watch(&peers);
    peer.set_life(Life::Stopped);
    let ended = timeout(2 * STOPPED_WATCH_ENDS, stream.read_u8()).await;
    assert!(ended.is_err(), "{ended:?}");
    peer.set_life(Life::Runs);
    stream.write_all(b"more").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_watch_leaves_an_apiserver_that_is_removed() {
    let (peers, rig) = start().await;
    let mut stream = watch(&rig).await;
    let (peer, other) = of_watch(&peers);
    let time = Stopwatch::start();
    rig.reconfigure(&[other.address], |_| {});
    end(&mut stream).await;
    check_figure("end of a watch over WebSocket, apiserver removed", time.elapsed(), LEAVES);
    assert_eq!(peer.watches.load(Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_watch_is_shown_in_the_status_with_the_reason() {
    let (peers, rig) = start().await;
    let stream = watch(&rig).await;
    let text = rig.status().await;
    let line = "1 watch over WebSocket: not resumed";
    assert_eq!(text.matches(line).count(), 1, "{text}");
    drop(stream);
    let is_gone = async || !rig.status().await.contains("over WebSocket");
    until("the watch has ended", is_gone).await;
    drop(peers);
}
