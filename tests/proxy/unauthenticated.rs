//! Requests that kube-apiserver cannot authenticate. It sends GOAWAY after each of them
//! (`UnauthenticatedHTTP2DOSMitigation`), and the connection ends with its last stream.

use crate::scripted_peer::{Action, Peers};
use crate::support::figures::check_figure;
use crate::support::http2::{
    DATA, END_HEADERS, END_STREAM, HEADERS, NO_ERROR, field_block, frame, goaway,
};
use crate::support::stopwatch::Stopwatch;
use crate::support::{CONFIGMAPS, Proxy, join_all, soon, until, without_suspicion};
use http::Method;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// As many connections to one endpoint may be opened at once.
const REQUESTS: usize = 8;

fn head(id: u32) -> Vec<u8> {
    let fields = [(":status", "403"), ("content-type", "application/json")];
    frame(HEADERS, END_HEADERS, id, &field_block(&fields))
}

/// The response, and the GOAWAY that Go sends with it.
fn rejected(id: u32) -> Vec<u8> {
    [head(id), frame(DATA, END_STREAM, id, b"{}"), goaway(id, NO_ERROR)].concat()
}

/// A part of the response, and the GOAWAY.
fn cut(id: u32) -> Vec<u8> {
    [head(id), frame(DATA, 0, id, b"{"), goaway(id, NO_ERROR)].concat()
}

/// The numbers of connections whose end was reported as a fault, and of their open requests.
async fn lost(proxy: &Proxy) -> (u64, u64) {
    let events = proxy.events().await.into_iter();
    let dead: Vec<_> = events.filter(|e| e["kind"] == "connection" && e["to"] == "dead").collect();
    let sum = |count: &dyn Fn(&serde_json::Value) -> Option<u64>| {
        dead.iter().map(|event| count(event).unwrap_or_default()).sum()
    };
    (sum(&|event| event["times"].as_u64()), sum(&|event| event["open"]["requests"].as_u64()))
}

/// h2 reports the end in the poll in which the response arrives, before its request has read it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_that_ends_after_its_last_response_is_not_lost() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    let client = proxy.client_with(&peers.certs.anonymous()).await;
    for action in [Action::raw(rejected), Action::raw_then_end(rejected)] {
        peers.set_actions(vec![action; REQUESTS]);
        for n in 0..REQUESTS {
            let reply = soon("a response", client.get(CONFIGMAPS)).await.unwrap();
            assert_eq!(reply.status, 403, "{n}");
        }
        assert_eq!(peers.requests().len(), REQUESTS);
        assert_eq!(lost(&proxy).await, (0, 0));
    }
    let all = peers.accepted.load(Relaxed);
    assert!(all > 2 * REQUESTS, "a connection for each request: {all}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_without_a_connection_waits_only_until_one_is_open() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    let client = proxy.client_with(&peers.certs.anonymous()).await;
    peers.set_actions(vec![Action::raw(rejected); REQUESTS]);
    let watch = Stopwatch::start();
    for _ in 0..REQUESTS {
        assert_eq!(soon("a response", client.get(CONFIGMAPS)).await.unwrap().status, 403);
    }
    check_figure("8 anonymous requests in a row", watch.elapsed(), Duration::from_millis(200));
}

/// Go ignores requests above the last stream of its GOAWAY. They are sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_whose_goaway_excludes_requests_is_not_lost() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    let client = proxy.client_with(&peers.certs.anonymous()).await;
    peers.set_actions(
        vec![Action::Hang; REQUESTS - 1].into_iter().chain([Action::raw(|_| rejected(1))]),
    );
    let requests = (0..REQUESTS).map(|_| client.get(CONFIGMAPS));
    let replies = soon("all responses", join_all(requests)).await;
    let statuses: Vec<_> = replies.into_iter().map(|reply| reply.unwrap().status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 403).count(), 1, "{statuses:?}");
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), REQUESTS - 1);
    assert_eq!(peers.requests().len(), 2 * REQUESTS - 1);
    assert_eq!(lost(&proxy).await, (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_that_is_closed_after_a_goaway_with_unfinished_responses_is_lost() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    let client = proxy.client_with(&peers.certs.anonymous()).await;
    peers.set_actions([Action::Hang, Action::Hang, Action::raw_then_end(cut)]);
    let requests = (0..3).map(|_| client.request(Method::POST, CONFIGMAPS, &[], "{}"));
    for reply in soon("all responses", join_all(requests)).await {
        assert!(reply.map_or(true, |reply| reply.status == 502));
    }
    assert_eq!(peers.requests().len(), 3, "no write is sent again");
    until("the loss is reported", async || lost(&proxy).await.0 > 0).await;
    assert_eq!(lost(&proxy).await, (1, 3));
}
