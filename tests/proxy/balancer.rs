//! Several apiservers behind one address: each that connections have reached is an endpoint of its own.

use crate::support::balancer::Balancer;
use crate::support::wait::until_within;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, PATIENCE, Proxy, TestCluster, pause, soon, until};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use jackstay_apiserver::{ApiServerHandle, RequestHook, ScriptedResponse};
use jackstay_config::{Config, EndpointKind};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a sick backend does with the requests of a test.
type Answer = fn(&str) -> ScriptedResponse;

struct Rig {
    cluster: TestCluster,
    balancer: Balancer,
    proxy: Proxy,
    client: Client,
}

impl Rig {
    /// jackstay with a balancer as its only endpoint, in front of this number of servers.
    async fn start(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(servers);
        let balancer = Balancer::start(&cluster.addresses());
        Self::in_front_of(cluster, balancer, change).await
    }

    async fn in_front_of(
        cluster: TestCluster,
        balancer: Balancer,
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let proxy = cluster.start_behind(balancer.address, change).await;
        let client = proxy.client().await;
        Self { cluster, balancer, proxy, client }
    }

    /// Behind the balancer are three servers that cannot be told apart, as those of a hosted control plane.
    async fn indistinct(change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::with_one_certificate(3, |options, _| options);
        for server in &cluster.servers {
            server.set_faults(|faults| faults.advertised_address = Some("172.20.0.1:6443"));
        }
        let balancer = Balancer::start(&cluster.addresses());
        let rig = Self::in_front_of(cluster, balancer, |config| {
            config.upstreams[0].kind = EndpointKind::Balancer;
            change(config);
        })
        .await;
        until("two sets of connections are ready", async || {
            let endpoints = rig.proxy.endpoints().await;
            endpoints.len() == 2 && endpoints.iter().all(|one| one["state"] == "ready")
        })
        .await;
        rig
    }

    /// Opens watches, and returns them and the server that has most of them.
    async fn watches(&self, count: usize) -> (Vec<WatchRecorder>, usize) {
        let path = self.cluster.watch_path();
        let mut watches = Vec::new();
        for _ in 0..count {
            watches.push(WatchRecorder::start(&self.client, &path).await);
        }
        let most = (0..3).max_by_key(|server| self.cluster.watches(*server)).unwrap();
        assert_ne!(self.cluster.watches(most), 0);
        (watches, most)
    }

    async fn behind(&self) -> Value {
        self.proxy.status().await["upstreams"][0]["balancers"][0].clone()
    }

    /// Waits until two of the servers are endpoints, and returns their numbers.
    async fn two_members(&self) -> [usize; 2] {
        until("two backends are ready", async || {
            let endpoints = self.proxy.endpoints().await;
            endpoints.len() == 2 && endpoints.iter().all(|one| one["state"] == "ready")
        })
        .await;
        let endpoints = self.proxy.endpoints().await;
        let servers = self.cluster.servers.iter().enumerate();
        let is_member = |name: &str| {
            let label = format!("{}/{name}", self.balancer.address);
            endpoints.iter().any(|one| one["address"] == label)
        };
        let members: Vec<_> = servers.filter(|(_, one)| is_member(one.name())).collect();
        let members: Vec<_> = members.into_iter().map(|(number, _)| number).collect();
        members.try_into().unwrap_or_else(|members| panic!("{members:?} {endpoints:?}"))
    }

    /// The number of the server that gets this write.
    async fn server_of(&self, target: &str, body: &Value) -> usize {
        let path = format!("{target}?probe={}", fastrand::u64(..));
        assert_eq!(self.client.put(&path, body).await.unwrap().status, 200);
        let records = self.cluster.state.audit().records();
        let record = records.iter().find(|record| record.path == path).unwrap();
        self.cluster.servers.iter().position(|server| server.name() == record.server).unwrap()
    }

    /// Sends lists, and returns how many each server got. None fails.
    async fn spread(&self, requests: usize) -> Vec<usize> {
        let path = format!("{CONFIGMAPS}?probe={}", fastrand::u64(..));
        for _ in 0..requests {
            let reply = self.client.request(Method::GET, &path, &[], "");
            assert_eq!(soon("a list", reply).await.unwrap().status, 200);
        }
        let records = self.cluster.state.audit().records();
        let of = |name: &str| records.iter().filter(|r| r.server == name && r.path == path).count();
        self.cluster.servers.iter().map(|server| of(server.name())).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn apiservers_behind_a_balancer_are_endpoints() {
    let rig = Rig::start(3, |_| {}).await;
    let members = rig.two_members().await;
    let behind = rig.behind().await;
    assert_eq!(behind["kind"], "balancer", "{behind}");
    assert_eq!(behind["backends"].as_array().unwrap().len(), 3, "{behind}");
    for endpoint in rig.proxy.endpoints().await {
        let address = endpoint["address"].as_str().unwrap();
        assert!(address.starts_with(&format!("{}/", rig.balancer.address)), "{address}");
    }
    assert_ne!(members[0], members[1]);
    // At most three more connections than with one endpoint: one for requests and one for probes.
    let open = |server: &ApiServerHandle| server.counters().open.load(Relaxed);
    until("no more connections are open", async || {
        rig.cluster.servers.iter().map(open).sum::<u64>() <= 2 + 3
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sick_backend_is_left_and_replaced_by_another() {
    let rig = Rig::start(3, |_| {}).await;
    let [sick, healthy] = rig.two_members().await;
    let path = rig.cluster.watch_path();
    let mut watches = Vec::new();
    for _ in 0..6 {
        watches.push(WatchRecorder::start(&rig.client, &path).await);
    }
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = true);
    let name = rig.cluster.servers[sick].name().to_owned();
    until("it is degraded", async || {
        rig.spread(5).await;
        let endpoints = rig.proxy.endpoints().await;
        let is_sick = |one: &&Value| one["address"].as_str().unwrap().ends_with(&name);
        endpoints.iter().find(is_sick).is_some_and(|one| one["state"] == "degraded")
    })
    .await;
    until("another backend is an endpoint", async || {
        let endpoints = rig.proxy.endpoints().await;
        endpoints.iter().filter(|one| one["state"] == "ready").count() == 2
    })
    .await;
    let used = rig.spread(60).await;
    assert_eq!(used[sick], 0, "{used:?}");
    assert!(rig.cluster.watches(healthy) > 0 || used[healthy] > 0, "{used:?}");
    until("its watches have left", async || rig.cluster.watches(sick) == 0).await;
    let version = rig.cluster.create_config_map("late");
    for watch in &watches {
        until("the event arrives", async || watch.versions().contains(&version)).await;
    }
    // After ten seconds.
    until_within(6 * PATIENCE, "the sick one is no endpoint any more", async || {
        rig.proxy.endpoints().await.len() == 2
    })
    .await;
}

/// Each connection that has reached another backend is the one that the balancer would choose again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn each_backend_is_reached_through_a_balancer_that_prefers_the_fewest_connections() {
    let cluster = TestCluster::new(3);
    let others = cluster.addresses().into_iter().zip([4, 4, 0]);
    let balancer = Balancer::least_connections(&others.collect::<Vec<_>>());
    let rig = Rig::in_front_of(cluster, balancer, |_| {}).await;
    let [sick, _] = rig.two_members().await;
    until("both are used", async || {
        rig.spread(20).await.iter().filter(|requests| **requests > 0).count() == 2
    })
    .await;
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = true);
    until("it is not used", async || rig.spread(20).await[sick] == 0).await;
    until("both others are used", async || {
        rig.spread(20).await.iter().filter(|requests| **requests > 0).count() == 2
    })
    .await;
}

/// Two addresses are examined, and stay so when a third one joins, which is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn addresses_of_several_apiservers_stay_examined_when_others_join() {
    let cluster = TestCluster::new(4);
    let addresses = cluster.addresses();
    let balancer = Balancer::start(&addresses[..2]);
    let other = Balancer::start(&addresses[2..]);
    let file = cluster.certs.path().join("endpoints");
    let write = |addresses: &[SocketAddr]| {
        let lines: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        std::fs::write(&file, lines.join("\n")).unwrap();
    };
    write(&[balancer.address, other.address]);
    let from_file = |config: &mut Config| {
        config.upstreams[0].endpoints.clear();
        config.upstreams[0].endpoints_file = Some(file.clone());
    };
    let rig = Rig::in_front_of(cluster, balancer, from_file).await;
    let labels = async || -> Vec<String> {
        let endpoints = rig.proxy.endpoints().await;
        let mut labels: Vec<_> =
            endpoints.iter().map(|one| one["address"].as_str().unwrap().to_owned()).collect();
        labels.sort_unstable();
        labels
    };
    let behind = |address: SocketAddr, servers: [usize; 2]| {
        servers.map(|server| format!("{address}/{}", rig.cluster.servers[server].name()))
    };
    let mut expected =
        [behind(rig.balancer.address, [0, 1]), behind(other.address, [2, 3])].concat();
    expected.sort_unstable();
    until("each server is an endpoint", async || labels().await == expected).await;
    let third = Balancer::start(&addresses);
    write(&[rig.balancer.address, other.address, third.address]);
    expected.push(third.address.to_string());
    expected.sort_unstable();
    until("the third address is one endpoint", async || labels().await == expected).await;
    // Longer than the interval in which addresses are looked at.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        rig.spread(10).await;
        assert_eq!(labels().await, expected);
    }
    write(&[other.address]);
    until("the others leave", async || labels().await == behind(other.address, [2, 3])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn killed_backend_is_replaced() {
    let rig = Rig::start(3, |_| {}).await;
    let [killed, _] = rig.two_members().await;
    rig.cluster.servers[killed].kill();
    let alive: Vec<_> = (0..3)
        .filter(|server| *server != killed)
        .map(|server| rig.cluster.servers[server].addr)
        .collect();
    rig.balancer.set_backends(&alive);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        rig.spread(10).await;
    }
    until("two backends are ready", async || {
        let endpoints = rig.proxy.endpoints().await;
        endpoints.iter().filter(|one| one["state"] == "ready").count() == 2
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn address_of_one_apiserver_is_one_endpoint() {
    let rig = Rig::start(1, |_| {}).await;
    until("it was examined", async || rig.behind().await["kind"] == "apiserver").await;
    let accepted = rig.balancer.accepted();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        rig.spread(20).await;
    }
    let endpoints = rig.proxy.endpoints().await;
    assert_eq!(endpoints.len(), 1);
    assert_eq!(endpoints[0]["address"], rig.balancer.address.to_string());
    assert_eq!(rig.balancer.accepted(), accepted, "it is not examined again soon");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connections_are_judged_each_if_backends_cannot_be_told_apart() {
    let rig = Rig::indistinct(|_| {}).await;
    assert_eq!(rig.behind().await["kind"], "indistinct");
    let (watches, sick) = rig.watches(12).await;
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = true);
    until("its watches have left", async || rig.cluster.watches(sick) == 0).await;
    until("no request reaches it", async || rig.spread(20).await[sick] == 0).await;
    let version = rig.cluster.create_config_map("late");
    for watch in &watches {
        until("the event arrives", async || watch.versions().contains(&version)).await;
    }
    let endpoints = rig.proxy.endpoints().await;
    assert!(endpoints.iter().all(|one| one["state"] == "ready"), "{endpoints:?}");
    // While none is ready, what is left is used.
    for server in &rig.cluster.servers {
        server.set_faults(|faults| faults.unready = true);
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        rig.spread(10).await;
    }
    assert_eq!(watches.iter().filter(|watch| watch.end().is_some()).count(), 0);
}

/// A process that stands still for three seconds answers neither a PING nor the probe in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connection_whose_probe_had_no_answer_is_judged_again() {
    let rig = Rig::indistinct(|config| {
        let health = &mut config.upstreams[0].health;
        health.suspect_after = None;
        let readyz = &mut health.readyz;
        (readyz.interval, readyz.timeout) = (Duration::from_millis(200), Duration::from_secs(1));
    })
    .await;
    let (watches, sick) = rig.watches(12).await;
    rig.cluster.servers[sick].stop();
    pause(Duration::from_secs(3)).await;
    rig.cluster.servers[sick].cont();
    assert_ne!(rig.cluster.watches(sick), 0, "its watches have not left");
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = true);
    until("its watches have left", async || rig.cluster.watches(sick) == 0).await;
    assert_eq!(watches.iter().filter(|watch| watch.end().is_some()).count(), 0);
}

/// Its `/readyz` is ok, as that of Kubernetes 1.36 without etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_connection_to_an_apiserver_without_etcd_is_left() {
    let rig = Rig::indistinct(|_| {}).await;
    let (watches, sick) = rig.watches(12).await;
    rig.cluster.servers[sick].set_faults(|faults| (faults.dead, faults.unready) = (true, true));
    until("its watches have left", async || rig.cluster.watches(sick) == 0).await;
    until("no request reaches it", async || rig.spread(20).await[sick] == 0).await;
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = false);
    for turn in 0..8 {
        let opened = rig.balancer.accepted();
        rig.cluster.servers[(sick + 1 + turn % 2) % 3].reset_connections();
        until("connections are opened", async || rig.balancer.accepted() >= opened + 2).await;
        until("no request reaches it", async || rig.spread(20).await[sick] == 0).await;
        until("no watch stays there", async || rig.cluster.watches(sick) == 0).await;
    }
    assert_eq!(watches.iter().filter(|watch| watch.end().is_some()).count(), 0);
}

/// All backends are replaced at once by others, which no endpoint is.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn whole_address_serves_while_no_backend_does() {
    let cluster = TestCluster::new(4);
    let addresses = cluster.addresses();
    let balancer = Balancer::start(&addresses[..2]);
    let rig = Rig::in_front_of(cluster, balancer, |_| {}).await;
    let mut members = rig.two_members().await;
    members.sort_unstable();
    assert_eq!(members, [0, 1]);
    rig.balancer.set_backends(&addresses[2..3]);
    for server in &rig.cluster.servers[..2] {
        server.kill();
    }
    // Only one is left, which is no endpoint of its own.
    until("the address serves", async || {
        let reply = rig.client.request(Method::GET, CONFIGMAPS, &[], "");
        soon("a list", reply).await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
    assert_ne!(rig.spread(10).await[2], 0);
    rig.balancer.set_backends(&addresses[2..]);
    until("the new backends are the endpoints", async || {
        rig.cluster.servers[3].counters().open.load(Relaxed) > 0
    })
    .await;
    let mut members = rig.two_members().await;
    members.sort_unstable();
    assert_eq!(members, [2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn invalid_token_gets_its_401_behind_a_balancer() {
    check_invalid_token(&Rig::start(3, |_| {}).await).await;
}

async fn check_invalid_token(rig: &Rig) {
    rig.two_members().await;
    let client = rig.proxy.client_with(&rig.cluster.certs.anonymous().token("invalid")).await;
    for _ in 0..5 {
        let start = Instant::now();
        let reply = client.request(Method::GET, CONFIGMAPS, &[], "");
        assert_eq!(soon("the answer", reply).await.unwrap().status, 401);
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_of_kind_apiserver_is_not_examined() {
    let rig = Rig::start(3, |config| config.upstreams[0].kind = EndpointKind::Apiserver).await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        rig.spread(20).await;
    }
    assert_eq!(rig.proxy.endpoints().await.len(), 1);
    assert!(rig.behind().await.is_null());
    assert!(rig.balancer.accepted() <= 3);
}

/// One backend after another is killed and started again, each second. The balancer does not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn backends_that_come_and_go_cost_a_bounded_number_of_connects() {
    const SECONDS: usize = 9;
    let rig = Rig::start(3, |_| {}).await;
    rig.two_members().await;
    let before = rig.balancer.accepted();
    for turn in 0..SECONDS {
        let server = &rig.cluster.servers[turn % 3];
        server.kill();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            // Two of three are gone for a moment, and the third one may not be known yet.
            let read = rig.client.request(Method::GET, CONFIGMAPS, &[], "");
            let status = soon("a list", read).await.unwrap().status.as_u16();
            assert!(matches!(status, 200 | 503), "{status}");
        }
        server.restart().unwrap();
    }
    let opened = rig.balancer.accepted() - before;
    println!("{opened} connects in {SECONDS} s");
    until("two backends are ready", async || {
        let endpoints = rig.proxy.endpoints().await;
        endpoints.iter().filter(|one| one["state"] == "ready").count() >= 2
    })
    .await;
    rig.spread(20).await;
    assert!(opened <= 40 * SECONDS, "{opened}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_with_a_token_reach_the_backends_of_their_endpoints() {
    check_requests_with_a_token(Rig::start(3, |_| {}).await).await;
}

/// No token is configured, so `/api` is asked for with that of the client.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_with_a_token_reach_backends_that_share_a_certificate() {
    let cluster = TestCluster::with_one_certificate(3, |options, _| options);
    let balancer = Balancer::start(&cluster.addresses());
    let auto = |config: &mut Config| config.upstreams[0].kind = EndpointKind::Auto;
    let rig = Rig::in_front_of(cluster, balancer, auto).await;
    check_invalid_token(&rig).await;
    check_requests_with_a_token(rig).await;
}

async fn check_requests_with_a_token(rig: Rig) {
    let [sick, _] = rig.two_members().await;
    rig.cluster.state.add_token("agent", User::new("agent", &[]));
    let token = rig.proxy.client_with(&rig.cluster.certs.anonymous().token("agent")).await;
    let name = rig.cluster.servers[sick].name().to_owned();
    rig.cluster.servers[sick].set_faults(|faults| faults.unready = true);
    until("it is degraded", async || {
        rig.spread(5).await;
        let endpoints = rig.proxy.endpoints().await;
        let is_sick = |one: &&Value| one["address"].as_str().unwrap().ends_with(&name);
        endpoints.iter().find(is_sick).is_some_and(|one| one["state"] == "degraded")
    })
    .await;
    let path = format!("{CONFIGMAPS}?probe=token");
    for _ in 0..40 {
        let reply = token.request(Method::GET, &path, &[], "");
        assert_eq!(soon("a list", reply).await.unwrap().status, 200);
    }
    let records = rig.cluster.state.audit().records();
    let at_sick = records.iter().filter(|r| r.server == name && r.path == path).count();
    assert_eq!(at_sick, 0);
    // Each connection of an endpoint has reached its server.
    for _ in 0..20 {
        let recorder = WatchRecorder::start(&token, &rig.cluster.watch_path()).await;
        assert_eq!(recorder.end(), None);
    }
    assert_eq!(rig.cluster.watches(sick), 0);
}

/// One backend ends the stream of each request, or rejects it. A request that it has failed gets its answer from the other
/// backend, and not on another connection to the same one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn attempt_after_a_failure_prefers_another_backend() {
    const REQUESTS: usize = 24;
    const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
    let rig = Rig::start(2, |config| config.upstreams[0].connections.min = 4).await;
    let [sick, _] = rig.two_members().await;
    until("eight connections are open", async || {
        rig.proxy.live_connections("identity").await.len() >= 8
    })
    .await;
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": "n", "namespace": "default" }, "spec": { "holderIdentity": "n" },
    });
    rig.client.post(LEASES, &lease).await.unwrap();
    let ends: Answer = |_| {
        let mut response = ScriptedResponse::status(200, "", "");
        response.body.clear();
        response.cut()
    };
    let rejects: Answer = |_| {
        ScriptedResponse::text(429, "Too many requests, please try again later.\n")
            .header("retry-after", "1")
    };
    let shuts_down: Answer = |_| {
        ScriptedResponse::text(429, "The apiserver is shutting down, please try again later.\n")
            .header("retry-after", "5")
    };
    let version = rig.cluster.state.version();
    for (what, answer, target) in [
        ("retry", ends, CONFIGMAPS.to_owned()),
        ("429", rejects, CONFIGMAPS.to_owned()),
        (
            "resume",
            ends,
            format!("{CONFIGMAPS}?watch=1&resourceVersion={version}&allowWatchBookmarks=true"),
        ),
        ("heartbeat", shuts_down, format!("{LEASES}/n")),
    ] {
        // Heartbeats have a connection of their own, to one of them.
        let sick = if what == "heartbeat" { rig.server_of(&target, &lease).await } else { sick };
        let at_sick = Arc::<Mutex<HashMap<String, usize>>>::default();
        let counted = Arc::clone(&at_sick);
        let hook: RequestHook = Arc::new(move |request| {
            // The version of a watch changes when it is resumed.
            let query = request.uri.query().unwrap_or_default();
            let probe = query.split('&').find_map(|pair| pair.strip_prefix("probe="))?;
            *counted.lock().unwrap().entry(probe.to_owned()).or_default() += 1;
            Some(answer(probe))
        });
        rig.cluster.servers[sick].set_faults(|faults| faults.on_request = Some(hook));
        let separator = if target.contains('?') { '&' } else { '?' };
        let mut watches = Vec::new();
        for number in 0..REQUESTS {
            let target = format!("{target}{separator}probe={number}");
            match what {
                "resume" => watches.push(WatchRecorder::start(&rig.client, &target).await),
                "heartbeat" => {
                    let reply = rig.client.put(&target, &lease).await.unwrap();
                    assert_eq!(reply.status, 200, "{what}: {:?}", reply.body);
                }
                _ => {
                    let reply = rig.client.get(&target).await.unwrap();
                    assert_eq!(reply.status, 200, "{what}: {:?}", reply.body);
                }
            }
        }
        if what == "resume" {
            let created = rig.cluster.create_config_map("late");
            for watch in &watches {
                until("the watch is resumed", async || watch.versions().contains(&created)).await;
            }
        }
        let at_sick = at_sick.lock().unwrap();
        assert!(!at_sick.is_empty(), "{what}: no request reached the sick backend");
        let again: Vec<_> = at_sick.iter().filter(|(_, count)| **count > 1).collect();
        assert!(again.is_empty(), "{what}: {again:?} of {} requests there", at_sick.len());
        rig.cluster.servers[sick].set_faults(|faults| faults.on_request = None);
    }
}
