//! Apiservers that have just started: until their RBAC is filled they refuse every user outside `system:masters`,
//! `/readyz` included.

use crate::scripted_peer::{Action, Reply, setup};
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, TestCluster, join_all, soon, until, without_suspicion};
use http::Method;
use jackstay_apiserver::identity::User;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use std::sync::{Arc, OnceLock};

const FORBIDDEN: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"configmaps is forbidden: User \"bob\" cannot list resource \"configmaps\" in API group \"\" at the cluster scope","reason":"Forbidden","code":403}"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_that_a_starting_endpoint_refuses_is_sent_to_one_other_endpoint_and_a_write_is_not() {
    let watch = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let review = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let eviction = "/api/v1/namespaces/default/pods/p/eviction";
    let long = format!("{}{FORBIDDEN}", " ".repeat(9 << 10));
    let found = |reply: Reply| Action::Answer(reply);
    for (name, method, path, reply, status, requests) in [
        ("list", Method::GET, CONFIGMAPS, Reply::status("403", FORBIDDEN), 200, 2),
        ("list, 401", Method::GET, CONFIGMAPS, Reply::status("401", FORBIDDEN), 200, 2),
        ("watch", Method::GET, &*watch, Reply::status("403", FORBIDDEN), 200, 2),
        ("review", Method::POST, review, Reply::status("403", FORBIDDEN), 200, 2),
        ("list, long body", Method::GET, CONFIGMAPS, Reply::status("403", &long), 403, 1),
        ("list, 404", Method::GET, CONFIGMAPS, Reply::status("404", FORBIDDEN), 404, 1),
        ("create", Method::POST, CONFIGMAPS, Reply::status("403", FORBIDDEN), 403, 1),
        (
            "eviction",
            Method::POST,
            eviction,
            Reply::status("429", "{}").header("retry-after", "10"),
            429,
            1,
        ),
    ] {
        let (peers, proxy, client) = setup(2).await;
        peers.set_default(Reply::ok("{}"));
        peers.set_actions([found(reply)]);
        let body = if method == Method::POST { "{}" } else { "" };
        let received = soon(name, client.request(method, path, &[], body)).await.unwrap();
        let sent = peers.requests();
        assert_eq!((received.status.as_u16(), sent.len()), (status, requests), "{name}");
        if requests == 2 {
            assert_ne!(sent[0].peer, sent[1].peer, "{name}");
            let retried = proxy.metric("jackstay_retries_total{reason=\"starting\"}").await;
            assert!((retried - 1.0).abs() < 0.5, "{name}: {retried}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_that_two_endpoints_refuse_is_not_sent_to_a_third_one() {
    let (peers, _proxy, client) = setup(3).await;
    peers.set_default(Reply::ok("{}"));
    let refuse = |user: &str| Action::Answer(Reply::status("403", &FORBIDDEN.replace("bob", user)));
    peers.set_actions([refuse("first"), refuse("second")]);
    let received = soon("a list", client.request(Method::GET, CONFIGMAPS, &[], "")).await.unwrap();
    assert_eq!(peers.requests().len(), 2);
    assert_eq!(received.status.as_u16(), 403);
    let body = String::from_utf8(received.body.to_vec()).unwrap();
    assert_eq!(body, FORBIDDEN.replace("bob", "second"));
}

/// Refused requests of clients without rights are sent twice only as far as the budget of hedges goes: a burst of 128
/// and a tenth of all requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_requests_are_repeated_within_the_budget_of_hedges() {
    const REQUESTS: usize = 1_000;
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::status("401", FORBIDDEN));
    peers.set_actions([]);
    for _ in 0..REQUESTS {
        let request = client.request(Method::GET, CONFIGMAPS, &[], "");
        assert_eq!(soon("a list", request).await.unwrap().status.as_u16(), 401);
    }
    let repeated = peers.requests().len() - REQUESTS;
    println!("{REQUESTS} requests, of which {repeated} were repeated");
    assert!((128..=129 + REQUESTS / 10).contains(&repeated), "{repeated}");
}

/// Reads of a user without `system:masters` while each server in turn is killed, started, and refuses everybody for a
/// while.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restarted_server_gets_no_request_until_its_rbac_is_filled() {
    let cluster = TestCluster::new(3);
    cluster.state.add_token("bob", User::new("bob", &[]));
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client_with(&cluster.certs.anonymous().token("bob")).await;
    let read = async || {
        let reply = soon("a list", client.request(Method::GET, CONFIGMAPS, &[], "")).await.unwrap();
        assert_eq!(reply.status.as_u16(), 200, "{:?}", reply.body);
    };
    let addresses = cluster.addresses();
    for (server, address) in cluster.servers.iter().zip(addresses) {
        server.set_faults(|faults| faults.rbac_empty = true);
        server.kill();
        proxy.wait_state(address, "ejected").await;
        server.restart().unwrap();
        until("the endpoint is degraded", async || {
            read().await;
            proxy.endpoint(address).await["state"] == "degraded"
        })
        .await;
        let reason = proxy.endpoint(address).await["reason"].as_str().unwrap().to_owned();
        assert!(reason.contains("answers 403") && reason.contains("starting"), "{reason}");
        for _ in 0..100 {
            read().await;
        }
        server.set_faults(|faults| faults.rbac_empty = false);
        until("the endpoint is ready", async || {
            read().await;
            proxy.endpoint(address).await["state"] == "ready"
        })
        .await;
    }
}

/// The watches of a server that is killed are resumed, although another one refuses them: the one that is asked first.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resumed_watch_that_an_endpoint_refuses_continues_at_another() {
    let cluster = TestCluster::new(3);
    let change = |config: &mut jackstay_config::Config| config.upstreams[0].rebalance = false;
    let proxy = cluster.start_with(change).await;
    let client = proxy.client().await;
    let watches: Vec<WatchRecorder> = cluster.start_watches(&client, 12).await;
    let victim = (0..3).max_by_key(|&server| cluster.watches(server)).unwrap();
    let asked_first = Arc::new(OnceLock::new());
    for server in (0..3).filter(|&server| server != victim) {
        let asked_first = asked_first.clone();
        let refuse: RequestHook = Arc::new(move |request| {
            let is_watch = request.uri.query().is_some_and(|query| query.contains("watch="));
            (is_watch && *asked_first.get_or_init(|| server) == server)
                .then(|| ScriptedResponse::status(403, "Forbidden", "configmaps is forbidden"))
        });
        cluster.servers[server].set_faults(|faults| faults.on_request = Some(refuse));
    }
    let before = cluster.watch_counts();
    cluster.servers[victim].kill();
    until("every watch of the victim has moved", async || {
        (0..3).filter(|&server| server != victim).map(|server| cluster.watches(server)).sum::<u64>()
            == 12
    })
    .await;
    let refusing = *asked_first.get().unwrap();
    assert_eq!(cluster.watches(refusing), before[refusing]);
    cluster.create_config_map("after");
    join_all(watches.iter().map(|watch| async move {
        until("the event", async || !watch.events().is_empty()).await;
        assert_eq!(watch.end(), None, "a watch ended");
    }))
    .await;
    let refused = cluster.state.audit().select(|record| record.status == Some(403));
    assert!(!refused.is_empty(), "the server refused no watch");
}
