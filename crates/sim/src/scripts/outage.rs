//! No apiserver can be reached: requests get 503 in time, and succeed soon after the outage.

use std::rc::Rc;
use std::time::Duration;

use jackstay_sys::clock;
use jackstay_sys::sockets::virtual_network::VirtualListener;
use tokio::io::AsyncReadExt;
use tokio::time::sleep;

use super::objects::CONFIG_MAPS;
use super::requests::{create, expect_503, get, until_read};
use super::testbed::{Testbed, all, until};
use crate::faults::FaultKind;
use crate::net::{ProcessState, SocketOptions};
use crate::shell::program::APISERVER_PORT;

/// Every apiserver is dead, stopped or behind a lost path before jackstay starts.
pub async fn answers(testbed: Rc<Testbed>) {
    let faults = [FaultKind::Kill, FaultKind::Stop, FaultKind::Blackhole];
    let fault = faults[testbed.choose(faults.len())];
    testbed.begin_all(fault);
    let proxy = testbed.start(|_| {});
    let client = testbed.client(&proxy);
    for _ in 0..3 {
        expect_503(&testbed, &client).await;
    }
    assert!(!proxy.is_serving(), "/readyz must fail");
    testbed.end_all(fault);
    until("an endpoint serves clients", || proxy.is_serving()).await;
    assert_eq!(get(&client, CONFIG_MAPS).await.status, 200);
}

/// Reads succeed within a second after one of the killed apiservers has returned, although the pauses between connects
/// have grown.
pub async fn returns(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let clients = [testbed.client(&proxy), testbed.token_client(&proxy, "alice")];
    for client in &clients {
        assert_eq!(get(client, CONFIG_MAPS).await.status, 200);
    }
    testbed.begin_all(FaultKind::Kill);
    until("no endpoint serves clients", || !proxy.is_serving()).await;
    for _ in 0..4 {
        expect_503(&testbed, &clients[0]).await;
    }
    sleep(Duration::from_secs(10)).await;
    testbed.end(testbed.choose(testbed.servers()), FaultKind::Kill);
    for took in all(clients.each_ref().map(until_read)).await {
        testbed.check("a read after the return of an apiserver", took, Duration::from_secs(1));
    }
    for server in 0..testbed.servers() {
        if proxy.state(server) != "ready" {
            testbed.end(server, FaultKind::Kill);
        }
    }
}

/// All packets of the only apiserver are dropped, while a read and a write are in flight. The write fails with its
/// connection. The read waits for another connection from the moment that its own is suspect, so it fails soon after.
pub async fn silent_flows(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    testbed.set_faults(0, |faults| faults.hang_paths = &[CONFIG_MAPS]);
    let lost = async {
        let received = || testbed.received(|request| request.path == CONFIG_MAPS).len();
        until("both requests are in flight", || received() == 2).await;
        testbed.begin(0, FaultKind::Blackhole);
        clock::now()
    };
    let read = async { (get(&client, CONFIG_MAPS).await, clock::now()) };
    let write = async { (create(&client, "a").await, clock::now()) };
    let ((read, read_end), (write, write_end), lost) = tokio::join!(read, write, lost);
    write.own_error(502);
    read.own_error(503);
    let promise = Duration::from_millis(2_500);
    testbed.check("a write in flight fails", write_end.saturating_duration_since(lost), promise);
    let later = read_end.saturating_duration_since(write_end);
    testbed.check("the read fails after the write", later, Duration::from_secs(1));
    expect_503(&testbed, &client).await;
    testbed.set_faults(0, |faults| faults.hang_paths = &[]);
    testbed.end(0, FaultKind::Blackhole);
}

/// The only connection does not respond, and is not yet closed. New writes get 503: if one were sent, its outcome would
/// be unknown when the connection ends. By turns the path is lost, and the process is stopped.
pub async fn silent_write(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|config| {
        config.upstreams[0].health.dead_after = Duration::from_millis(4_500);
    });
    let proxy = proxy.await;
    let client = testbed.client(&proxy);
    testbed.set_faults(0, |faults| faults.hang_paths = &[CONFIG_MAPS]);
    let fault = [FaultKind::Blackhole, FaultKind::Stop][testbed.choose(2)];
    let received = || testbed.received(|request| request.path == CONFIG_MAPS).len();
    let later = async {
        until("the first write is in flight", || received() == 1).await;
        testbed.begin(0, fault);
        proxy.until_state(0, "suspect").await;
        let message = create(&client, "second").await.own_error(503);
        assert!(message.contains("does not answer: PING unanswered"), "{message}");
        create(&client, "third").await.own_error(503);
        clock::now()
    };
    let first = async { (create(&client, "first").await, clock::now()) };
    let ((first, first_end), later_end) = tokio::join!(first, later);
    first.own_error(502);
    assert!(later_end < first_end, "the later writes waited until the connection ended");
    testbed.check("the first write fails", first.took, Duration::from_secs(8));
    testbed.set_faults(0, |faults| faults.hang_paths = &[]);
    testbed.end(0, fault);
    // What was sent on the connection arrives before this read.
    until_read(&client).await;
    let writes = testbed.received(|request| request.verb == "create").len();
    assert_eq!(writes, 1, "the later writes were sent");
}

/// A server of plain HTTP, such as etcd's, may close a connection that begins with TLS.
pub async fn closed_handshake(testbed: Rc<Testbed>) {
    testbed.begin(0, FaultKind::Kill);
    let (network, other) = (testbed.network(), testbed.process_beside(0));
    let listener = network.listen_with(other, APISERVER_PORT, SocketOptions::go());
    let closing = tokio::task::spawn_local(close_each(listener.expect("a free port")));
    let proxy = testbed.start(|_| {});
    proxy.until_state(0, "ejected").await;
    let reason = proxy.reason(0);
    let expected = "the server closed the connection in the TLS handshake: it may not speak TLS";
    assert!(reason.contains(expected), "{reason}");
    closing.abort();
    network.set_process(other, ProcessState::Dead);
    // The task closes the listener before an apiserver binds the port.
    assert!(closing.await.is_err(), "the server has ended");
    testbed.end(0, FaultKind::Kill);
    let client = testbed.client(&proxy);
    until_read(&client).await;
}

/// Reads the first bytes of each connection, so that the close does not reset it, and closes it.
async fn close_each(listener: Box<dyn VirtualListener>) {
    loop {
        let accepted = std::future::poll_fn(|cx| listener.poll_accept(cx)).await;
        let Ok((mut stream, _)) = accepted else { return };
        // What the client has sent does not matter.
        let _ = stream.read(&mut [0; 4096]).await;
    }
}
