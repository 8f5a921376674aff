//! Clients whose tokens no response has proven yet, as all are after a restart.

use std::time::{Duration, Instant};

use http::{Method, Response, StatusCode};
use hyper::body::Incoming;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use jackstay_config::{Config, MemoryLimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::scripted_peer::{Action, Peers};
use crate::support::figures::{bound, check_figure};
use crate::support::http2::{END_HEADERS, HEADERS, PREFACE, field_block, frame, settings};
use crate::support::wire::{self, Wire};
use crate::support::{
    CONFIGMAPS, Certs, Proxy, TestCluster, h2_error, join_all, pause, soon, until,
    without_suspicion,
};

/// Clients with a token of their own: twice as many as two connections have streams for watches.
const CLIENTS: usize = 400;
/// The promised time until each of [`CLIENTS`] has its watch.
const ALL_SERVED: Duration = Duration::from_secs(5);

/// The pause of a client before it repeats a request; a tenth of the `Retry-After` of jackstay.
const RETRY_AFTER: Duration = Duration::from_millis(100);

fn add_tokens(cluster: &TestCluster, count: usize) {
    for n in 0..count {
        cluster.state.add_token(&format!("token-{n}"), User::new(&format!("user-{n}"), &[]));
    }
}

/// 400 handshakes of the clients and of the proxy share the processors of the test.
fn for_many_handshakes(config: &mut Config) {
    without_suspicion(config);
    config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(60);
}

/// Number of live connections of a class.
async fn connections(proxy: &Proxy, class: &str) -> usize {
    proxy.connections(class).await.len()
}

/// Number of moves and resumes of watches.
async fn moved(proxy: &Proxy) -> u64 {
    proxy.metric("jackstay_watch_resumes_total").await as u64
}

/// Starts the watches of [`CLIENTS`] clients, each with one of the tokens from `first` on.
async fn watch_all(
    cluster: &TestCluster,
    proxy: &Proxy,
    first: usize,
    figure: &str,
) -> Vec<(Client, Response<Incoming>)> {
    let (path, start) = (cluster.watch_path(), Instant::now());
    let watches = join_all((first..first + CLIENTS).map(|n| {
        let path = &path;
        let credentials = cluster.certs.anonymous().token(&format!("token-{n}"));
        async move {
            let client = proxy.client_with(&credentials).await;
            loop {
                // Clients repeat a request that gets 429 or REFUSED_STREAM.
                match client.send(Method::GET, path, &[], "").await {
                    Ok(response) if response.status() == StatusCode::OK => {
                        return (client, response);
                    }
                    Ok(response) => assert_eq!(response.status(), 429, "{n}"),
                    Err(error) => {
                        let reason = h2_error(&error).and_then(h2::Error::reason);
                        assert_eq!(reason, Some(h2::Reason::REFUSED_STREAM), "{n}: {error}");
                    }
                }
                assert!(start.elapsed() < bound(ALL_SERVED), "{n} is not served");
                pause(RETRY_AFTER).await;
            }
        }
    }))
    .await;
    check_figure(figure, start.elapsed(), ALL_SERVED);
    watches
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs an idle machine: the handshakes of 400 clients at once"]
async fn watches_of_four_hundred_new_tokens_are_all_served() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, CLIENTS);
    let proxy = cluster.start_with(for_many_handshakes).await;
    let watches = watch_all(&cluster, &proxy, 0, "400 watches of new tokens are served").await;
    assert_eq!(cluster.watches(0), CLIENTS as u64);
    until("most watches are on connections for proven tokens", async || {
        connections(&proxy, "token").await >= 6 && connections(&proxy, "unproven-token").await <= 2
    })
    .await;
    // They were not moved.
    assert_eq!(moved(&proxy).await, 0);
    assert_eq!(proxy.lost_connections().await, [""; 0]);
    drop(watches);
}

/// A proxy with the memory of the manifests. Containers that run as root are one source.
async fn start_with_default_memory(cluster: &TestCluster) -> Proxy {
    let change = |config: &mut Config| {
        for_many_handshakes(config);
        config.memory_limit = MemoryLimit::Bytes((256 << 20) / 100 * 70);
    };
    cluster.start_with(change).await
}

/// Fails unless all were served at their first attempt.
async fn check_all_served<T>(proxy: &Proxy, served: Vec<Result<T, String>>) -> Vec<T> {
    let mut failed = std::collections::BTreeMap::new();
    for error in served.iter().filter_map(|served| served.as_ref().err()) {
        *failed.entry(error).or_insert(0) += 1;
    }
    let metrics = proxy.page("/metrics").await;
    let refused = ["jackstay_shed_total", "jackstay_downstream_refused", "jackstay_own_errors"];
    let refused = metrics.lines().filter(|line| refused.iter().any(|name| line.starts_with(name)));
    let refused: Vec<_> = refused.filter(|line| !line.ends_with(" 0")).collect();
    assert!(failed.is_empty(), "{failed:?} {refused:#?}");
    served.into_iter().filter_map(Result::ok).collect()
}

/// No client repeats a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs an idle machine: the handshakes of 400 clients at once, beside the limits of one user"]
async fn watches_of_four_hundred_new_tokens_of_one_user_fit_into_the_default_memory() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, CLIENTS);
    let proxy = start_with_default_memory(&cluster).await;
    let path = cluster.watch_path();
    let watches = (0..CLIENTS).map(|n| {
        let credentials = cluster.certs.anonymous().token(&format!("token-{n}"));
        let (proxy, path) = (&proxy, &path);
        async move {
            let client = Client::connect(proxy.addr, &credentials).await;
            let client = client.map_err(|error| format!("connect: {error}"))?;
            let response = client.send(Method::GET, path, &[], "").await;
            let response = response.map_err(|error| format!("request: {error}"))?;
            match response.status() {
                StatusCode::OK => Ok((client, response)),
                status => Err(status.to_string()),
            }
        }
    });
    let _watches = check_all_served(&proxy, join_all(watches).await).await;
    assert_eq!(cluster.watches(0), CLIENTS as u64);
}

/// The same with HTTP/1.1, whose heads are read into a buffer of the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs an idle machine: the handshakes of 400 clients at once, beside the limits of one user"]
async fn watches_of_four_hundred_new_tokens_over_http1_fit_into_the_default_memory() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, CLIENTS);
    let proxy = start_with_default_memory(&cluster).await;
    let (path, tls) = (cluster.watch_path(), wire::connector(&cluster.certs, None, "http/1.1"));
    let watches = (0..CLIENTS).map(|n| {
        let (proxy, path, tls) = (&proxy, &path, &tls);
        async move {
            let mut wire = wire::handshake(tls, proxy.addr).await.map_err(|e| e.to_string())?;
            let request = format!(
                "GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-{n}\r\n\r\n"
            );
            wire.write_all(request.as_bytes()).await.map_err(|e| e.to_string())?;
            // TLS keeps what the socket does not accept at once.
            wire.flush().await.map_err(|e| e.to_string())?;
            let mut status = [0; 12];
            wire.read_exact(&mut status).await.map_err(|e| e.to_string())?;
            match String::from_utf8_lossy(&status).as_ref() {
                "HTTP/1.1 200" => Ok(wire),
                other => Err(other.to_owned()),
            }
        }
    });
    let _watches = check_all_served(&proxy, join_all(watches).await).await;
    assert_eq!(cluster.watches(0), CLIENTS as u64);
}

/// Each connection that joins those for proven tokens counts to their limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_of_new_tokens_open_connections_up_to_the_limits() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, 30);
    let limit = |config: &mut jackstay_config::Config| {
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
    assert_eq!(moved(&proxy).await, WATCHES as u64, "each watch has moved once");
}

/// Users, and requests of each: as many as may be in progress with unproven tokens.
const USERS: u32 = 4;
const REQUESTS: u32 = 32;

/// Sends requests of several users, each with a token of its own and a body that does not end. `None` without root.
async fn stalled_requests(certs: &Certs, proxy: &Proxy) -> Option<Vec<Wire>> {
    let tls = wire::connector(certs, None, "h2");
    let mut wires = Vec::new();
    for user in 0..USERS {
        let Ok(mut wire) = wire::handshake_as(1001 + user, &tls, proxy.addr).await else {
            println!("skipped: only root can change the user");
            return None;
        };
        wire.write_all(PREFACE).await.unwrap();
        wire.write_all(&settings(&[])).await.unwrap();
        for n in 0..REQUESTS {
            let token = format!("Bearer token-{}", user * REQUESTS + n);
            let head = [
                (":method", "POST"),
                (":scheme", "https"),
                (":authority", "a"),
                (":path", CONFIGMAPS),
                ("authorization", &token),
            ];
            let head = frame(HEADERS, END_HEADERS, 2 * n + 1, &field_block(&head));
            wire.write_all(&head).await.unwrap();
        }
        wires.push(wire);
    }
    until("the requests are upstream", async || {
        proxy.endpoints().await[0]["streams"].as_u64().unwrap() >= u64::from(USERS * REQUESTS)
    })
    .await;
    Some(wires)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_token_is_served_while_four_users_send_bodies_that_do_not_end() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    peers.set_actions(std::iter::repeat_n(Action::Hang, (USERS * REQUESTS) as usize));
    let Some(_wires) = stalled_requests(&peers.certs, &proxy).await else { return };
    let client = proxy.client_with(&peers.certs.anonymous().token("new")).await;
    let start = Instant::now();
    let reply = soon("a response", client.get(CONFIGMAPS)).await.unwrap();
    assert_eq!(reply.status, 200);
    check_figure("new token beside four stalled users", start.elapsed(), Duration::from_secs(2));
}

/// The stalled requests take two thirds of the streams for unproven tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs an idle machine: the handshakes of 400 clients at once"]
async fn watches_of_new_tokens_are_served_while_four_users_send_bodies_that_do_not_end() {
    let cluster = TestCluster::new(1);
    add_tokens(&cluster, (USERS * REQUESTS) as usize + CLIENTS);
    let proxy = cluster
        .start_with(|config| {
            for_many_handshakes(config);
            // For 400 connections and 300 requests that wait for a second, all of one user.
            config.memory_limit = MemoryLimit::Bytes(512 << 20);
        })
        .await;
    let Some(_wires) = stalled_requests(&cluster.certs, &proxy).await else { return };
    let figure = "400 watches beside four stalled users";
    let _watches = watch_all(&cluster, &proxy, (USERS * REQUESTS) as usize, figure).await;
    assert_eq!(cluster.watches(0), CLIENTS as u64);
}
