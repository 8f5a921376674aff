//! Rejections of one overloaded apiserver: a request that changes nothing is sent to one other endpoint, within a
//! budget, and the client gets the first rejection unchanged if that endpoint rejects the request as well.

use crate::scripted_peer::{Action, Reply, setup};
use crate::support::{CONFIGMAPS, TestCluster, soon, without_suspicion};
use http::Method;
use jackstay_apiserver::client::Reply as ClientReply;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use std::sync::Arc;
use std::time::Duration;

const TOO_MANY: &str = "Too many requests, please try again later.\n";
const INITIALIZING: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"storage is (re)initializing","reason":"TooManyRequests","details":{"retryAfterSeconds":1},"code":429}"#;
const PEER_UNKNOWN: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"Error getting ip and port info of the remote server while proxying","reason":"ServiceUnavailable","code":503}"#;

/// The client has got a rejection by API Priority and Fairness unchanged.
fn expect_rejection(reply: &ClientReply, retry_after: &str, flow_schema: &str) {
    assert_eq!((reply.status.as_u16(), &*reply.body), (429, TOO_MANY.as_bytes()));
    for (name, value) in [
        ("retry-after", retry_after),
        ("x-kubernetes-pf-flowschema-uid", flow_schema),
        ("x-kubernetes-pf-prioritylevel-uid", "level"),
    ] {
        assert_eq!(reply.headers[name], value, "{name}");
    }
}

/// A rejection by API Priority and Fairness.
fn fairness(flow_schema: &'static str) -> Reply {
    Reply::status("429", TOO_MANY)
        .header("retry-after", "5")
        .header("x-kubernetes-pf-flowschema-uid", flow_schema)
        .header("x-kubernetes-pf-prioritylevel-uid", "level")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_read_is_sent_to_one_other_endpoint_and_a_write_is_not() {
    let watch = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let initializing = || Reply::status("429", INITIALIZING).header("retry-after", "1");
    let peer_unknown = || Reply::status("503", PEER_UNKNOWN);
    for (name, method, path, reply, status, requests) in [
        ("list", Method::GET, CONFIGMAPS, fairness("a"), 200, 2),
        ("watch", Method::GET, &*watch, fairness("a"), 200, 2),
        ("list, watch cache", Method::GET, CONFIGMAPS, initializing(), 200, 2),
        ("list, mixed version proxy", Method::GET, CONFIGMAPS, peer_unknown(), 200, 2),
        ("create", Method::POST, CONFIGMAPS, fairness("a"), 429, 1),
        ("create, mixed version proxy", Method::POST, CONFIGMAPS, peer_unknown(), 503, 1),
    ] {
        let (peers, proxy, client) = setup(2).await;
        peers.set_default(Reply::ok("{}"));
        peers.set_actions([Action::Answer(reply)]);
        let body = if method == Method::POST { "{}" } else { "" };
        let received = soon(name, client.request(method, path, &[], body)).await.unwrap();
        let sent = peers.requests();
        assert_eq!((received.status.as_u16(), sent.len()), (status, requests), "{name}");
        if requests == 2 {
            assert_ne!(sent[0].peer, sent[1].peer, "{name}");
            let retried = proxy.metric("jackstay_retries_total{reason=\"rejected\"}").await;
            assert!((retried - 1.0).abs() < 0.5, "{name}: {retried}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_that_two_endpoints_reject_gets_the_first_rejection_unchanged() {
    let (peers, _proxy, client) = setup(3).await;
    peers.set_default(Reply::ok("{}"));
    peers.set_actions(["first", "second"].map(|name| Action::Answer(fairness(name))));
    let received = soon("a list", client.request(Method::GET, CONFIGMAPS, &[], "")).await.unwrap();
    assert_eq!(peers.requests().len(), 2, "the third endpoint is not asked");
    expect_rejection(&received, "5", "first");
}

/// While every endpoint rejects, each request is sent once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejected_read_is_not_sent_to_an_endpoint_that_rejected_another_recently() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(fairness("a"));
    peers.set_actions([]);
    for _ in 0..20 {
        let request = client.request(Method::GET, CONFIGMAPS, &[], "");
        assert_eq!(soon("a list", request).await.unwrap().status.as_u16(), 429);
    }
    assert_eq!(peers.requests().len(), 21, "only the first request is sent twice");
}

/// The budget allows a burst of 128 requests and a tenth of all requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn rejection_passes_unchanged_when_the_budget_is_used_up() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start_with(without_suspicion).await;
    let reject: RequestHook = Arc::new(|request| {
        let mut rejection = ScriptedResponse::status(429, "TooManyRequests", "")
            .header("retry-after", "7")
            .header("x-kubernetes-pf-flowschema-uid", "schema")
            .header("x-kubernetes-pf-prioritylevel-uid", "level");
        rejection.body = TOO_MANY.into();
        (request.uri.path() == CONFIGMAPS).then_some(rejection)
    });
    cluster.servers[0].set_faults(|faults| faults.on_request = Some(reject));
    // The faster server gets most requests, so that more than a tenth of them are rejected.
    cluster.servers[1].set_faults(|faults| faults.delay = Duration::from_millis(2));
    let client = proxy.client().await;
    let path = |number: usize| format!("{CONFIGMAPS}?probe={number}");
    let mut sent = 0;
    let rejection = loop {
        assert!(sent < 5_000, "no client gets a rejection");
        let path = path(sent);
        let reply = soon("a list", client.request(Method::GET, &path, &[], "")).await.unwrap();
        sent += 1;
        if reply.status != 200 {
            break reply;
        }
    };
    expect_rejection(&rejection, "7", "schema");
    let is_list = |path: &str| path.starts_with(&format!("{CONFIGMAPS}?"));
    let records = cluster.state.audit().select(|record| is_list(&record.path));
    let last: Vec<_> = records.iter().filter(|record| record.path == path(sent - 1)).collect();
    assert_eq!(last.len(), 1, "the other endpoint is not asked");
    let repeated = records.len() - sent;
    println!("{sent} requests, of which {repeated} were sent to the other endpoint");
    assert!((128..=129 + sent / 10).contains(&repeated), "{repeated} of {sent}");
}
