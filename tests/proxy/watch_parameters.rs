//! A watch of a shard continues only on an apiserver that is known to serve shards as the first one does, one without
//! `metadata.managedFields` only on one that is known to leave them out as the first one does, and one with an unknown
//! parameter only on an equal apiserver.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::{ApiServerHandle, Faults, ScriptedResponse};
use jackstay_config::Config;

use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, config_map, soon, until, wait, without_suspicion,
};

/// All objects, so that a test knows the events.
const ALL: &str =
    "shardSelector=shardRange(object.metadata.uid,'0x0000000000000000','0x10000000000000000')";
const UNKNOWN: &str = "inHaste=true";
/// The paths that the prober asks about capabilities.
const BOTH: [&str; 2] = ["/api/v1/services", "/metrics"];
/// The lists of services that ask about parameters. Those that ask for the revision of etcd have no selector.
const LISTS: &str = "/api/v1/services?fieldSelector";

/// Sets the gate of shards of a server.
fn shards(enabled: bool) -> impl FnOnce(&mut Faults) {
    move |faults| faults.sharding_disabled = !enabled
}

/// Answers requests of the prober with this.
fn refuse(paths: &'static [&'static str], response: ScriptedResponse) -> impl FnOnce(&mut Faults) {
    move |faults| {
        faults.on_request = Some(Arc::new(move |request| {
            let is_prober = request.headers.get("user-agent")?.as_bytes() == b"jackstay-readyz";
            let is_named = paths.contains(&request.uri.path());
            (is_prober && is_named).then(|| response.clone())
        }));
    }
}

/// Answers the list of the prober about managed fields, and refuses it the metrics.
fn answer_about_managed_fields(honours: bool) -> impl FnOnce(&mut Faults) {
    move |faults| {
        faults.on_request = Some(Arc::new(move |request| {
            let is_prober = request.headers.get("user-agent")?.as_bytes() == b"jackstay-readyz";
            if !is_prober || !BOTH.contains(&request.uri.path()) {
                return None;
            }
            if request.uri.path() == "/metrics" {
                return Some(forbidden());
            }
            let drops = request
                .headers
                .get("accept")?
                .as_bytes()
                .ends_with(b";drop=metadata.managedFields");
            let fields =
                if drops && honours { "" } else { r#","managedFields":[{"manager":"a"}]"# };
            let mut response = ScriptedResponse::status(200, "", "");
            response.body = format!(
                r#"{{"kind":"ServiceList","metadata":{{}},"items":[{{"metadata":{{"name":"kubernetes"{fields}}}}}]}}"#
            )
            .into();
            Some(response)
        }));
    }
}

fn forbidden() -> ScriptedResponse {
    ScriptedResponse::status(403, "Forbidden", "forbidden: User \"u\" cannot get path")
}

/// Servers behind jackstay, and a watch on the first one.
struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
    from: u64,
    watch: WatchRecorder,
}

impl Setup {
    /// The watch begins on server 0, and then the others are started as `change` sets them.
    async fn new(query: &str, servers: usize, change: impl Fn(&TestCluster)) -> Self {
        Self::with(query, servers, change, |_| {}).await
    }

    async fn with(
        query: &str,
        servers: usize,
        change: impl Fn(&TestCluster),
        configure: impl Fn(&mut Config),
    ) -> Self {
        Self::accepting("application/json", query, servers, change, configure).await
    }

    async fn accepting(
        accept: &str,
        query: &str,
        servers: usize,
        change: impl Fn(&TestCluster),
        configure: impl Fn(&mut Config),
    ) -> Self {
        let cluster = TestCluster::new(servers);
        change(&cluster);
        cluster.servers[1..].iter().for_each(ApiServerHandle::kill);
        let mut config = cluster.config();
        without_suspicion(&mut config);
        config.upstreams[0].rebalance = false;
        configure(&mut config);
        let proxy = cluster.certs.start(config);
        proxy.wait_connected(1).await;
        let client = proxy.client().await;
        let from = cluster.state.version();
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={from}&{query}");
        let watch = WatchRecorder::accepting(&client, &path, accept).await;
        let setup = Self { cluster, proxy, client, from, watch };
        setup.write();
        setup.expect_all_events().await;
        setup.wait_read(1).await;
        for server in &setup.cluster.servers[1..] {
            server.restart().unwrap();
        }
        setup.proxy.wait_connected(servers).await;
        setup.wait_read(servers).await;
        setup
    }

    /// Waits until something was read about so many endpoints.
    async fn wait_read(&self, count: usize) {
        until("the capabilities are read", async || {
            let endpoints = self.proxy.endpoints().await;
            endpoints.iter().filter(|one| one["capabilities"].is_object()).count() == count
        })
        .await;
    }

    fn write(&self) {
        self.cluster.create_config_map(&format!("m{}", self.cluster.state.version()));
    }

    async fn expect_all_events(&self) {
        let expected: Vec<_> = (self.from + 1..=self.cluster.state.version()).collect();
        self.watch.expect_versions(&expected).await;
    }

    /// The names of the servers that were asked for a watch.
    fn asked(&self) -> BTreeSet<String> {
        let records = self.cluster.state.audit().records();
        records.into_iter().filter(|one| one.verb == "watch").map(|one| one.server).collect()
    }

    fn watch_requests(&self) -> usize {
        let records = self.cluster.state.audit().records();
        records.iter().filter(|one| one.verb == "watch").count()
    }

    fn name(&self, server: usize) -> String {
        self.cluster.servers[server].name().to_owned()
    }

    /// Returns the server when its watch is held.
    async fn kill_only_server(&self) -> &ApiServerHandle {
        let [server] = &self.cluster.servers[..] else { panic!("more than one server") };
        server.kill();
        self.proxy.wait_metrics("jackstay_held_watches 1").await;
        server
    }

    /// The watch continues on this server and no other one is asked, after its own is killed.
    async fn expect_continues_on(&self, server: usize) {
        let others = self.cluster.watches(server);
        self.cluster.servers[0].kill();
        self.write();
        self.expect_all_events().await;
        assert_eq!(self.cluster.watches(server), others + 1);
        assert_eq!(self.asked(), [self.name(0), self.name(server)].into());
        assert_eq!(self.watch.end(), None);
    }

    /// The watch ends cleanly and no other server is asked, after its own is killed.
    async fn expect_end(&self) {
        let began = Stopwatch::start();
        self.cluster.servers[0].kill();
        assert_eq!(self.watch.wait_end().await, Ok(()));
        // The jitter of a quiet watch is up to 200 ms, and 2 s are waited for a capability.
        check_figure("a watch with a parameter ends", began.elapsed(), Duration::from_secs(3));
        assert_eq!(self.asked(), [self.name(0)].into());
        for (outcome, count) in [("parameter", 1.0), ("gave_up", 0.0), ("resumed", 0.0)] {
            let counted = self.proxy.resumes(outcome).await;
            assert!((counted - count).abs() < f64::EPSILON, "{outcome}: {counted}");
        }
        let again = self.client.send(Method::GET, CONFIGMAPS, &[], "");
        assert_eq!(soon("a read", again).await.unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_continues_only_on_a_server_that_serves_shards_as_the_first_one() {
    for (gates, next) in [
        ([true, false, true], Some(2)),
        ([true, true, false], Some(1)),
        ([true, false, false], None),
        // It has received the events of all objects until now.
        ([false, true, false], Some(2)),
        ([false, true, true], None),
    ] {
        let set = |cluster: &TestCluster| {
            for (server, enabled) in cluster.servers.iter().zip(gates) {
                server.set_faults(shards(enabled));
            }
        };
        let setup = Setup::new(ALL, 3, set).await;
        match next {
            Some(server) => setup.expect_continues_on(server).await,
            None => setup.expect_end().await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_is_moved_only_to_a_server_that_serves_shards() {
    let setup = Setup::new(ALL, 3, |cluster| cluster.servers[1].set_faults(shards(false))).await;
    setup.cluster.servers[0].set_faults(|faults| faults.unready = true);
    let has_moved = async || {
        if setup.cluster.watches(2) == 1 { Ok(()) } else { Err(format!("{:?}", setup.asked())) }
    };
    wait::until_ok(Duration::from_secs(60), "the watch has moved", has_moved).await;
    // The only other server that works does not serve shards: the watch stays where it is.
    setup.cluster.servers[2].set_faults(|faults| faults.unready = true);
    let address = setup.cluster.addresses()[2];
    setup.proxy.wait_state(address, "degraded").await;
    setup.cluster.servers[2].goaway();
    until("it has another stream there", async || setup.watch_requests() > 2).await;
    setup.write();
    setup.expect_all_events().await;
    assert_eq!(setup.asked(), [setup.name(0), setup.name(2)].into());
    assert_eq!(setup.watch.end(), None);
}

/// The only apiserver is restarted, with the gate or without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_is_held_until_it_is_known_what_the_restarted_server_serves() {
    for (enabled, continues) in [(true, true), (false, false)] {
        let setup = Setup::new(ALL, 1, |_| {}).await;
        let server = setup.kill_only_server().await;
        server.set_faults(shards(enabled));
        server.restart().unwrap();
        if continues {
            setup.write();
            setup.expect_all_events().await;
            assert_eq!(setup.watch.end(), None);
        } else {
            assert_eq!(setup.watch.wait_end().await, Ok(()));
            assert!((setup.proxy.resumes("parameter").await - 1.0).abs() < f64::EPSILON);
            assert_eq!(setup.cluster.watches(0), 0);
        }
    }
}

/// Without the right to list services, `/metrics` show the gate.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_a_server_serves_is_read_from_its_metrics_or_unknown_with_a_reason() {
    let by_metrics = |cluster: &TestCluster| {
        for (server, enabled) in cluster.servers.iter().zip([true, false, true]) {
            server.set_faults(refuse(&BOTH[..1], forbidden()));
            server.set_faults(shards(enabled));
        }
    };
    Setup::new(ALL, 3, by_metrics).await.expect_continues_on(2).await;

    let nothing = ScriptedResponse::status(200, "", "");
    let no_gates =
        "list of services: no list; /metrics: no feature gates (kubernetes_feature_enabled)";
    for (response, reason) in [
        (forbidden(), "list of services: 403 Forbidden; /metrics: 403 Forbidden"),
        (nothing, no_gates),
    ] {
        let refused = |cluster: &TestCluster| {
            cluster.servers[1].set_faults(refuse(&BOTH, response.clone()));
        };
        let setup = Setup::new(ALL, 2, refused).await;
        let endpoint = setup.proxy.endpoint(setup.cluster.addresses()[1]).await;
        assert_eq!(endpoint["capabilities"]["error"], reason);
        assert_eq!(endpoint["state"], "ready");
        setup.expect_end().await;
    }
}

/// An apiserver that starts, or is overloaded, answers later.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn error_that_passes_does_not_end_a_watch() {
    let setup = Setup::new(ALL, 1, |_| {}).await;
    let server = setup.kill_only_server().await;
    let busy = ScriptedResponse::status(429, "TooManyRequests", "the cache is not initialised");
    server.set_faults(refuse(&BOTH, busy));
    server.restart().unwrap();
    let address = setup.cluster.addresses()[0];
    until("it was asked", async || {
        setup.proxy.endpoint(address).await["capabilities"]["error"].is_string()
    })
    .await;
    server.set_faults(|faults| faults.on_request = None);
    setup.write();
    setup.expect_all_events().await;
    assert_eq!(setup.watch.end(), None);
}

/// A watch with an unknown parameter, about which nothing can be read, changes nothing for the watches of shards.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_continues_beside_one_with_an_unknown_parameter() {
    let no_metrics = |cluster: &TestCluster| {
        let all = cluster.servers.iter();
        all.for_each(|server| server.set_faults(refuse(&["/metrics"], forbidden())));
    };
    let setup = Setup::new(ALL, 2, no_metrics).await;
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={}&{UNKNOWN}", setup.from);
    let other = WatchRecorder::start(&setup.client, &path).await;
    until("the metrics were asked for", async || {
        let errors = setup.proxy.endpoints().await;
        errors.iter().all(|one| one["capabilities"]["error"] == "/metrics: 403 Forbidden")
    })
    .await;
    setup.expect_continues_on(1).await;
    drop(other);
}

/// The only equal server answers 429: the watch waits as long as it asks for, and does not go to the other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_waits_for_the_only_equal_server() {
    let gates = |cluster: &TestCluster| cluster.servers[2].set_faults(shards(false));
    let setup = Setup::new(ALL, 3, gates).await;
    let busy = ScriptedResponse::status(429, "TooManyRequests", "later").header("retry-after", "1");
    setup.cluster.servers[1].set_faults(|faults| faults.fail_next = Some((1, busy)));
    setup.expect_continues_on(1).await;
}

/// A GOAWAY on the connection of the prober, as with `--goaway-chance`.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn capabilities_are_read_at_once_on_a_new_connection_of_the_prober() {
    let setup = Setup::with(
        ALL,
        2,
        |_| {},
        |config| {
            config.upstreams[0].health.readyz.interval = Duration::from_secs(30);
        },
    )
    .await;
    setup.cluster.servers[1].goaway();
    setup.expect_continues_on(1).await;
}

/// A server that hangs does not delay its own probes, and no watch waits for it for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn server_that_does_not_answer_about_shards_is_not_asked() {
    let setup = Setup::new(ALL, 2, |_| {}).await;
    let (server, address) = (&setup.cluster.servers[1], setup.cluster.addresses()[1]);
    server.kill();
    setup.proxy.wait_state(address, "ejected").await;
    server.set_faults(|faults| faults.hang_paths = &BOTH);
    server.restart().unwrap();
    setup.proxy.wait_ready(2).await;
    let before = setup.proxy.endpoint(address).await["last_check"]["at"].clone();
    until("another probe", async || {
        setup.proxy.endpoint(address).await["last_check"]["at"] != before
    })
    .await;
    assert_eq!(setup.proxy.endpoint(address).await["state"], "ready");
    setup.expect_end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_with_an_unknown_parameter_continues_only_on_an_equal_server() {
    let other_build = |cluster: &TestCluster| cluster.servers[1].set_version("v1.36.1-other");
    Setup::new(UNKNOWN, 3, other_build).await.expect_continues_on(2).await;

    let other_gates = |cluster: &TestCluster| {
        cluster.servers[1].set_faults(|faults| faults.cbor_disabled = true);
    };
    Setup::new(UNKNOWN, 2, other_gates).await.expect_end().await;

    let no_metrics = |cluster: &TestCluster| {
        let all = cluster.servers.iter();
        all.for_each(|server| server.set_faults(refuse(&["/metrics"], forbidden())));
    };
    Setup::new(UNKNOWN, 2, no_metrics).await.expect_end().await;
}

/// An apiserver that refuses the prober and ends each of its connections is not asked more and more.
/// A server that does not know `drop`, or whose gate is off, sends whole objects, and nothing shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_without_managed_fields_continues_only_on_a_server_that_leaves_them_out_as_the_first_one()
 {
    const DROP: &str = "application/json;drop=metadata.managedFields";
    let setup = async |accept: &str, gates: &[Option<bool>]| {
        let change = |cluster: &TestCluster| {
            for (server, gate) in cluster.servers.iter().zip(gates) {
                server.set_faults(|faults| faults.managed_fields_opt_out = *gate);
            }
        };
        Setup::accepting(accept, "", gates.len(), change, |_| {}).await
    };
    setup(DROP, &[Some(true), Some(false), Some(true)]).await.expect_continues_on(2).await;
    setup(DROP, &[Some(true), Some(false)]).await.expect_end().await;
    setup(DROP, &[None, Some(true)]).await.expect_end().await;
    setup(DROP, &[None, None]).await.expect_continues_on(1).await;
    // A list of a Service shows it to a user who may not read the metrics, such as a kubelet.
    let by_list = async |honours: &[bool]| {
        let change = |cluster: &TestCluster| {
            for (server, honours) in cluster.servers.iter().zip(honours) {
                server.set_faults(answer_about_managed_fields(*honours));
            }
        };
        Setup::accepting(DROP, "", honours.len(), change, |_| {}).await
    };
    by_list(&[true, false, true]).await.expect_continues_on(2).await;
    by_list(&[false, true]).await.expect_end().await;
    // An unknown parameter needs an equal server.
    let unknown = "application/json;keep=metadata.name";
    setup(unknown, &[Some(true), None, Some(true)]).await.expect_continues_on(2).await;
    setup(unknown, &[None, Some(false)]).await.expect_end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_questions_are_repeated_at_longer_and_longer_pauses() {
    let setup = Setup::new(ALL, 2, |_| {}).await;
    let (server, name) = (&setup.cluster.servers[1], setup.name(1));
    server.set_faults(refuse(&BOTH, forbidden()));
    server.set_faults(|faults| faults.goaway_chance = 1.0);
    let questions = || {
        let records = setup.cluster.state.audit().records();
        let is_question = |one: &&Record| one.server == name && one.path.starts_with(LISTS);
        records.iter().filter(is_question).count()
    };
    let before = questions();
    let began = Instant::now();
    server.goaway();
    until("it was asked five times", async || questions() >= before + 5).await;
    // At least half of 0.2, 0.4, 0.8 and 1.6 s.
    assert!(began.elapsed() >= Duration::from_millis(1_500), "{:?}", began.elapsed());
    assert_eq!(setup.proxy.endpoint(server.addr).await["state"], "ready");
}

/// An endpoint whose `/readyz` fails is asked, too, and watches continue there if there is no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn sharded_watch_continues_on_an_equal_server_that_is_not_ready() {
    let setup = Setup::new(ALL, 1, |_| {}).await;
    let server = setup.kill_only_server().await;
    server.set_faults(|faults| faults.unready = true);
    server.restart().unwrap();
    setup.proxy.wait_state(server.addr, "degraded").await;
    setup.write();
    wait::until_ok(Duration::from_secs(30), "the watch continues", async || {
        if setup.cluster.watches(0) == 1 { Ok(()) } else { Err(setup.proxy.page("/status").await) }
    })
    .await;
    setup.expect_all_events().await;
    assert_eq!(setup.watch.end(), None);
}

/// Nothing is read for watches whose parameters every apiserver honours.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nothing_is_read_for_usual_watches() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client().await;
    let watches = cluster.start_watches(&client, 2).await;
    cluster.create_config_map("a");
    cluster.kill_all();
    cluster.servers.iter().for_each(|server| server.restart().unwrap());
    proxy.wait_connected(2).await;
    let body = config_map("b", "").to_string();
    let headers = [("content-type", "application/json")];
    let sent = client.send(Method::POST, CONFIGMAPS, &headers, body);
    assert_eq!(soon("a write", sent).await.unwrap().status(), 201);
    until("the watches continue", async || watches.iter().all(|watch| watch.has_seen("b"))).await;
    let records = cluster.state.audit().records();
    let by_prober = ["/metrics", LISTS];
    assert!(records.iter().all(|one| by_prober.iter().all(|path| !one.path.starts_with(path))));
    assert!(proxy.endpoints().await.iter().all(|one| one["capabilities"].is_null()));
}
