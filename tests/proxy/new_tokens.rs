//! Clients whose tokens no response has proven yet, as all are after a restart.

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use jackstay::demo::apiserver::identity::User;

use crate::support::figures::{bound, check_figure};
use crate::support::{CONFIGMAPS, Proxy, TestCluster, join_all, soon, until, without_suspicion};

/// Clients with a token of their own: twice as many as two connections have streams for watches.
const CLIENTS: usize = 400;
/// The promised time until each of [`CLIENTS`] has its watch.
const ALL_SERVED: Duration = Duration::from_secs(5);

fn add_tokens(cluster: &TestCluster, count: usize) {
    for n in 0..count {
        cluster.state.add_token(&format!("token-{n}"), User::new(&format!("user-{n}"), &[]));
    }
}

/// Number of live connections of a class.
async fn connections(proxy: &Proxy, class: &str) -> usize {
    proxy.connections(class).await.len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_of_four_hundred_new_tokens_are_all_served() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, CLIENTS);
    let proxy = cluster.start_with(without_suspicion).await;
    let path = cluster.watch_path();
    let start = Instant::now();
    let watches = join_all((0..CLIENTS).map(|n| {
        let (proxy, path) = (&proxy, &path);
        let credentials = cluster.certs.anonymous().token(&format!("token-{n}"));
        async move {
            let client = proxy.client_with(&credentials).await;
            loop {
                let response = client.send(Method::GET, path, &[], "").await.unwrap();
                match response.status() {
                    StatusCode::OK => return (client, response),
                    // client-go repeats the request.
                    StatusCode::TOO_MANY_REQUESTS if start.elapsed() < bound(ALL_SERVED) => {}
                    status => panic!("{n}: {status} after {:?}", start.elapsed()),
                }
            }
        }
    }))
    .await;
    check_figure("400 watches of new tokens are served", start.elapsed(), ALL_SERVED);
    assert_eq!(cluster.watches(0), CLIENTS as u64);
    until("most watches are on connections for proven tokens", async || {
        connections(&proxy, "token").await >= 6 && connections(&proxy, "unproven-token").await <= 2
    })
    .await;
    // They were not moved.
    assert_eq!(proxy.metric("jackstay_watch_resumes_total").await, 0.0);
    assert_eq!(proxy.lost_connections().await, [""; 0]);
    drop(watches);
}

/// Each connection that joins those for proven tokens counts to their limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_of_new_tokens_open_connections_up_to_the_limits() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, 30);
    let limit = |config: &mut jackstay::config::Config| {
        without_suspicion(config);
        config.upstreams[0].connections.max = 2;
        config.upstreams[0].connections.max_streams = 5;
    };
    let proxy = cluster.start_with(limit).await;
    let path = cluster.watch_path();
    let client = proxy.client_with(&cluster.certs.anonymous()).await;
    let tokens: Vec<_> = (0..30).map(|n| format!("Bearer token-{n}")).collect();
    let watches = tokens.iter().map(|token| {
        let (client, path) = (&client, &path);
        async move {
            client.send(Method::GET, path, &[("authorization", token)], "").await.unwrap()
        }
    });
    let watches = soon("all are answered", join_all(watches)).await;
    let served = watches.iter().filter(|watch| watch.status() == StatusCode::OK).count();
    // Watches may take 9 of the 10 streams of the class for unproven tokens. One or two connections have left it, each
    // with 3 to 5 watches.
    assert!((3 + 9..=10 + 9).contains(&served), "{served} are served");
    assert_eq!(cluster.watches(0), served as u64);
    let both = (connections(&proxy, "token").await, connections(&proxy, "unproven-token").await);
    assert_eq!(both, (2, 2));
    drop(watches);
}

/// An invalid token makes the apiserver send GOAWAY. Four connections that drain are the limit of the class for
/// unproven tokens, so the watches on them move.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_of_proven_tokens_move_away_from_invalid_ones_once() {
    const WATCHES: usize = 4;
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, WATCHES);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client_with(&cluster.certs.anonymous()).await;
    let path = cluster.watch_path();
    let reject = async |n: usize| {
        let token = format!("Bearer invalid-{n}");
        let headers = [("authorization", token.as_str())];
        let reply = client.request(Method::GET, CONFIGMAPS, &headers, "");
        soon("a response", reply).await.unwrap().status
    };
    let mut watches = Vec::new();
    for n in 0..WATCHES {
        let token =
            proxy.client_with(&cluster.certs.anonymous().token(&format!("token-{n}"))).await;
        watches.push((token.watch(&path).await.unwrap(), token));
        assert_eq!(reject(n).await, 401);
    }
    assert_eq!(reject(WATCHES).await, 401);
    until("the watches are on connections for proven tokens", async || {
        let endpoint = &proxy.endpoints().await[0];
        let connections = endpoint["connections"].as_array().unwrap();
        let of_tokens = connections.iter().filter(|connection| connection["class"] == "token");
        of_tokens.map(|connection| connection["watches"].as_u64().unwrap()).sum::<u64>() == 4
    })
    .await;
    for n in 0..3 {
        assert_eq!(reject(10 + n).await, 401);
    }
    cluster.create_config_map("last");
    for (watch, _) in &mut watches {
        let event = soon("an event", watch.next()).await.unwrap().expect("the watch continues");
        assert_eq!(event["object"]["metadata"]["name"], "last");
    }
    assert_eq!(
        proxy.metric("jackstay_watch_resumes_total").await,
        4.0,
        "each watch has moved once"
    );
}
