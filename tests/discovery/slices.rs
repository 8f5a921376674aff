//! `EndpointSlices` of `default/kubernetes`, watched over the connections that they are about.

use crate::support::{Proxy, World, pass, strings, until};
use crate::traffic::{Traffic, set, set_is, source, told};
use jackstay::config::Config;
use jackstay::demo::apiserver::identity::User;
use jackstay::demo::apiserver::kinds::ObjectRef;
use jackstay::demo::apiserver::kinds::{ENDPOINT_SLICES, ENDPOINTS};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A slice that names these addresses, all with the port of the first.
fn slice(name: &str, addresses: &[&str], port: u16, ready: Option<bool>) -> Value {
    let endpoints: Vec<_> = addresses
        .iter()
        .map(|address| json!({ "addresses": [address], "conditions": { "ready": ready } }))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "name": name, "namespace": "default",
            "labels": { "kubernetes.io/service-name": "kubernetes" } },
        "addressType": "IPv4",
        "ports": [{ "name": "https", "protocol": "TCP", "port": port }],
        "endpoints": endpoints,
    })
}

/// Makes a slice what it should be, whether it was there or not.
fn put(world: &World, name: &str, mut value: Value) {
    let place = ObjectRef { kind: &ENDPOINT_SLICES, namespace: "default", name };
    if world.cluster.get(place).is_ok() {
        let changed = world.cluster.modify(place, false, |now| {
            value["metadata"] = now["metadata"].clone();
            Ok(value)
        });
        changed.unwrap();
    } else {
        world.cluster.create(&ENDPOINT_SLICES, "default", value, false).unwrap();
    }
}

fn join(world: &World, index: usize, address: SocketAddr) {
    let name = format!("kubernetes-{index}");
    put(world, &name, slice(&name, &["127.0.0.1"], address.port(), None));
}

fn leave(world: &World, index: usize) {
    let name = format!("kubernetes-{index}");
    let place = ObjectRef { kind: &ENDPOINT_SLICES, namespace: "default", name: &name };
    world.cluster.delete(place, &Value::Null, false).unwrap();
}

/// A kubeconfig whose user has a token file.
fn with_discovery(world: &World, config: &mut Config) {
    let dir = world.certs.path();
    std::fs::write(dir.join("discovery-token"), "watcher-1").unwrap();
    world.cluster.add_token("watcher-1", User::new("jackstay-discovery", &[]));
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- name: c\n  context: \
                {cluster: k, user: u}\nclusters:\n- name: k\n  cluster: {server: 'https://nowhere'}\n\
                users:\n- name: u\n  user: {tokenFile: discovery-token}\n";
    let path = dir.join("discovery.kubeconfig");
    std::fs::write(&path, text).unwrap();
    config.upstreams[0].discovery.kubeconfig = Some(path);
}

/// jackstay with one seed, in front of `servers` of which the slices name the first `named`.
async fn start(servers: usize, named: usize) -> (World, Proxy) {
    let world = World::new(servers);
    for (index, address) in world.addresses().into_iter().enumerate().take(named) {
        join(&world, index, address);
    }
    let mut config = world.config();
    config.upstreams[0].endpoints.truncate(1);
    with_discovery(&world, &mut config);
    let proxy = world.certs.start(config);
    set_is(&proxy, &strings(&world.addresses()[..named])).await;
    proxy.ready(named).await;
    (world, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_seed_finds_them_all_and_follows_them() {
    let (world, proxy) = start(4, 3).await;
    let addresses = world.addresses();
    let traffic = Traffic::start(&world, &proxy).await;
    for endpoint in proxy.endpoints().await {
        let seed = endpoint["address"] == addresses[0].to_string();
        let name = if seed { "127.0.0.1" } else { "kubernetes.default.svc" };
        assert_eq!(endpoint["server_name"], name, "the seed keeps what the operator wrote");
    }
    join(&world, 3, addresses[3]);
    set_is(&proxy, &strings(&addresses)).await;
    leave(&world, 1);
    let left = [addresses[0], addresses[2], addresses[3]];
    set_is(&proxy, &strings(&left)).await;
    // The seed is no longer discovered: it stays, for when nothing else will do.
    leave(&world, 0);
    let standby = async || {
        proxy
            .endpoints()
            .await
            .iter()
            .any(|e| e["address"] == addresses[0].to_string() && e["fallback"] == true)
    };
    until("the seed is a fallback", standby).await;
    traffic.goes_on().await;
    let before = world.servers[0].counters().requests.load(Relaxed);
    traffic.goes_on().await;
    let after = world.servers[0].counters().requests.load(Relaxed);
    assert!(after - before < 10, "only probes: {before} to {after}");
    traffic.end(&world).await;
    assert_eq!(source(&proxy, "slices").await["endpoints"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_says_nothing_changes_nothing() {
    let (world, proxy) = start(3, 3).await;
    let addresses = strings(&world.addresses());
    let traffic = Traffic::start(&world, &proxy).await;
    for index in 0..3 {
        let name = format!("kubernetes-{index}");
        let port = world.addresses()[index].port();
        put(&world, &name, slice(&name, &["127.0.0.1"], port, Some(false)));
    }
    until("not ready is told", async || told(&proxy, "slices", "none of its 3").await).await;
    assert_eq!(set(&proxy).await.len(), 3);
    for index in 0..3 {
        leave(&world, index);
    }
    until("empty is told", async || told(&proxy, "slices", "names no endpoint").await).await;
    assert_eq!(set(&proxy).await.len(), 3);

    let own = proxy.addr.port();
    put(&world, "own", slice("own", &["127.0.0.1"], own, Some(true)));
    until("own is told", async || told(&proxy, "slices", "would loop").await).await;
    put(&world, "names", slice("names", &["node-1", "0.0.0.0"], 6443, Some(true)));
    until("names are told", async || told(&proxy, "slices", "not an IP address").await).await;
    assert_eq!(set(&proxy).await.len(), 3);
    traffic.goes_on().await;
    for (index, address) in world.addresses().into_iter().enumerate() {
        join(&world, index, address);
    }
    until("good again", async || source(&proxy, "slices").await["endpoints"] == 3).await;
    set_is(&proxy, &addresses).await;
    traffic.end(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_member_that_flaps_every_200_ms_stays() {
    let (world, proxy) = start(3, 3).await;
    let traffic = Traffic::start(&world, &proxy).await;
    let joined = proxy.metric("jackstay_discovery_changes_total").await;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) {
        leave(&world, 2);
        pass(Duration::from_millis(200)).await;
        join(&world, 2, world.addresses()[2]);
        pass(Duration::from_millis(200)).await;
    }
    traffic.goes_on().await;
    let after = proxy.metric("jackstay_discovery_changes_total").await;
    println!("{} changes in 4 s of flapping", after - joined);
    set_is(&proxy, &strings(&world.addresses())).await;
    traffic.end(&world).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn it_survives_what_it_is_carried_by() {
    let (world, proxy) = start(3, 2).await;
    let addresses = world.addresses();
    // Whichever carries the watch, and then the other one.
    for (dead, alive) in [(0, 1), (1, 0)] {
        world.servers[dead].kill();
        let traffic = proxy.client(&world.certs.credentials()).await;
        until("traffic flows", async || {
            traffic.get(crate::support::MAPS).await.unwrap().status == 200
        })
        .await;
        join(&world, 2, addresses[2]);
        set_is(&proxy, &strings(&addresses)).await;
        leave(&world, 2);
        set_is(&proxy, &strings(&addresses[..2])).await;
        world.servers[dead].restart().unwrap();
        until("it is back", async || proxy.endpoints().await.iter().all(|e| e["state"] == "ready"))
            .await;
        assert!(world.servers[alive].is_running());
    }
    // A graceful end of the connection, and one of all watches.
    for server in &world.servers {
        server.goaway();
        server.end_watches();
    }
    world.cluster.compact();
    join(&world, 2, addresses[2]);
    set_is(&proxy, &strings(&addresses)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_token_rotates() {
    let (world, proxy) = start(2, 1).await;
    let by = |name: &'static str| {
        let of = move |r: &jackstay::demo::apiserver::audit::Record| r.user == name;
        world.cluster.audit().select(of).len()
    };
    // The seed is all that there is to find: the set says nothing of who asked. And what ends below is
    // a watch that runs, not one that is on its way.
    let watches = || world.servers.iter().map(|s| s.counters().watches.load(Relaxed)).sum::<u64>();
    until("it watches", async || watches() > 0).await;
    assert!(by("jackstay-discovery") > 0, "it is who it says");
    world.cluster.add_token("watcher-2", User::new("jackstay-discovery-2", &[]));
    std::fs::write(world.certs.path().join("discovery-token"), "watcher-2\n").unwrap();
    for server in &world.servers {
        server.end_watches();
    }
    until("the new token is shown", async || by("jackstay-discovery-2") > 0).await;
    join(&world, 1, world.addresses()[1]);
    set_is(&proxy, &strings(&world.addresses())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_credential_that_is_refused_or_missing_takes_nothing_away() {
    let world = World::new(2);
    let mut config = world.config();
    with_discovery(&world, &mut config);
    let token = world.certs.path().join("discovery-token");
    std::fs::remove_file(&token).unwrap();
    let proxy = world.certs.start(config);
    proxy.ready(2).await;
    until("the file is missed", async || told(&proxy, "slices", "discovery-token").await).await;
    std::fs::write(&token, "nobody").unwrap();
    until("it is refused", async || told(&proxy, "slices", "401").await).await;
    assert_eq!(set(&proxy).await.len(), 2);
    let ready = proxy.page("/readyz").await;
    assert!(ready.starts_with("HTTP/1.1 200") && ready.contains("[-]source"), "{ready}");
    // The kubeconfig itself breaks, and is mended.
    let kubeconfig = world.certs.path().join("discovery.kubeconfig");
    let good = std::fs::read_to_string(&kubeconfig).unwrap();
    let exec = good.replace("tokenFile: discovery-token", "exec: {command: aws}");
    std::fs::write(&kubeconfig, exec).unwrap();
    until("exec is refused", async || told(&proxy, "slices", "exec plugin").await).await;
    std::fs::write(&kubeconfig, good).unwrap();
    std::fs::write(&token, "watcher-1").unwrap();
    join(&world, 0, world.addresses()[0]);
    until("all is well", async || source(&proxy, "slices").await["endpoints"] == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_old_apiserver_has_endpoints_alone() {
    let world = World::new(2);
    // No discovery.k8s.io there: its paths are not found.
    for server in &world.servers {
        server.on_request(Some(std::sync::Arc::new(|request: &http::request::Parts| {
            request.uri.path().starts_with("/apis/discovery.k8s.io/").then(|| {
                let words = "the server could not find the requested resource";
                jackstay::demo::apiserver::ScriptedResponse::status(404, "NotFound", words)
            })
        })));
    }
    let ports: Vec<_> = world.addresses().iter().map(SocketAddr::port).collect();
    let subset = |port: &u16| json!({ "addresses": [{ "ip": "127.0.0.1" }], "ports": [{ "name": "https", "port": port }] });
    let endpoints = json!({
        "apiVersion": "v1", "kind": "Endpoints",
        "metadata": { "name": "kubernetes", "namespace": "default" },
        "subsets": ports.iter().map(subset).collect::<Vec<_>>(),
    });
    world.cluster.create(&ENDPOINTS, "default", endpoints, false).unwrap();
    let mut config = world.config();
    config.upstreams[0].endpoints.truncate(1);
    with_discovery(&world, &mut config);
    let proxy = world.certs.start(config);
    set_is(&proxy, &strings(&world.addresses())).await;
}
