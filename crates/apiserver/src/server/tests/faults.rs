//! Faults that depend on the clock.

use super::*;
use crate::aggregated::{self, AggregatedPath};
use crate::kinds::WIDGETS as WIDGET;
use http::{Method, StatusCode};

const LAG: Duration = Duration::from_millis(200);

/// The `data.k` of the only map in a LIST, or its absence.
fn listed(reply: &Reply) -> (StatusCode, Option<String>) {
    let value = reply.json()["items"][0]["data"]["k"].as_str().map(str::to_owned);
    (reply.status, value)
}

#[tokio::test(start_paused = true)]
async fn service_time_is_drawn_for_each_request_from_its_range() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    let range = Duration::from_millis(10)..=Duration::from_millis(40);
    simulation.server.set_faults(|faults| faults.service_time = Some(range.clone()));
    let times = async |seed: u64| {
        fastrand::seed(seed);
        let mut times = Vec::new();
        for _ in 0..20 {
            let started = Instant::now();
            simulation.get(&client, "/version").await;
            times.push(started.elapsed());
        }
        times
    };
    let first = times(7).await;
    assert!(first.iter().all(|time| *time >= *range.start()), "{first:?}");
    // The timer of tokio has a resolution of 1 ms.
    let longest = *range.end() + Duration::from_millis(1);
    assert!(first.iter().all(|time| *time <= longest), "{first:?}");
    assert!(first.iter().min() < first.iter().max(), "{first:?}");
    assert_eq!(times(7).await, first, "a function of the seed");
}

#[tokio::test(start_paused = true)]
async fn requests_above_the_limit_are_rejected_and_watches_and_probes_are_not() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    simulation.server.set_faults(|faults| {
        faults.max_in_flight = Some(2);
        faults.delay = Duration::from_millis(50);
    });
    let watch = format!("{MAPS}?watch=1");
    let (first, second, third, watch, probe) = simulation
        .run(async {
            tokio::join!(
                client.get(MAPS),
                client.get(MAPS),
                client.get(MAPS),
                client.watch(&watch),
                client.get("/readyz"),
            )
        })
        .await;
    let statuses = [first.unwrap(), second.unwrap(), probe.unwrap()].map(|r| r.status.as_u16());
    assert_eq!(statuses, [200; 3]);
    assert!(watch.is_ok());
    let third = third.unwrap();
    assert_eq!(
        (third.status.as_u16(), &third.headers["retry-after"]),
        (429, &"1".parse().unwrap())
    );
    assert_eq!(simulation.get(&client, MAPS).await.status, 200, "the load has gone");
}

#[tokio::test(start_paused = true)]
async fn reads_see_the_lagging_cache_or_wait_for_it() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    simulation.create_map();
    simulation.server.set_faults(|faults| faults.cache_lag = Some(LAG));
    let version = simulation.set_map("1");
    let ok = |value: &str| (StatusCode::OK, Some(value.to_owned()));

    let stale = simulation.get(&client, &format!("{MAPS}?resourceVersion=0")).await;
    assert_eq!(listed(&stale), ok("0"), "the lag began before this write, after the first");
    assert_eq!(stale.json()["metadata"]["resourceVersion"], (version - 1).to_string());
    let object = format!("{MAPS}/a");
    let any = simulation.get(&client, &format!("{object}?resourceVersion=0")).await;
    assert_eq!(any.json()["data"]["k"], "0");
    let stored = simulation.get(&client, &object).await;
    assert_eq!(stored.json()["data"]["k"], "1", "a GET without a version reads the store");

    let started = Instant::now();
    let consistent = simulation.get(&client, MAPS).await;
    assert_eq!((listed(&consistent), started.elapsed()), (ok("1"), LAG));
    let version = simulation.set_map("2");
    let started = Instant::now();
    let at_least = simulation.get(&client, &format!("{MAPS}?resourceVersion={version}")).await;
    assert_eq!((listed(&at_least), started.elapsed()), (ok("2"), LAG));
    let version = simulation.set_map("3");
    let started = Instant::now();
    let got = simulation.get(&client, &format!("{object}?resourceVersion={version}")).await;
    assert_eq!((got.json()["data"]["k"].as_str(), started.elapsed()), (Some("3"), LAG));
}

#[tokio::test(start_paused = true)]
async fn read_of_a_version_that_the_cache_does_not_reach_gets_504_after_3_s() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    simulation.create_map();
    simulation.server.set_faults(|faults| faults.cache_lag = Some(Duration::from_secs(10)));
    let version = simulation.set_map("1");
    for path in [MAPS.to_owned(), format!("{MAPS}/a")] {
        let started = Instant::now();
        let path = format!("{path}?resourceVersion={version}&resourceVersionMatch=NotOlderThan");
        let late = simulation.get(&client, &path).await;
        assert_eq!((late.status.as_u16(), started.elapsed()), (504, Duration::from_secs(3)));
        let expected =
            format!("Timeout: Too large resource version: {version}, current: {}", version - 1);
        assert_eq!(late.json()["message"], expected);
        let cause = &late.json()["details"]["causes"][0]["reason"];
        assert_eq!(
            (cause, late.headers["retry-after"].as_bytes()),
            (&json!("ResourceVersionTooLarge"), &b"1"[..])
        );
    }
    let started = Instant::now();
    let stored = simulation.get(&client, MAPS).await;
    assert_eq!(listed(&stored).1.as_deref(), Some("1"), "read from the store");
    assert_eq!(started.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn cache_does_not_go_back_and_is_complete_after_a_restart() {
    let mut simulation = Simulation::new();
    let version = simulation.create_map();
    simulation.server.set_faults(|faults| faults.cache_lag = Some(Duration::ZERO));
    assert_eq!(simulation.server.cached_version(), version);
    simulation.server.set_faults(|faults| faults.cache_lag = Some(LAG));
    assert_eq!(simulation.server.cached_version(), version);
    let newer = simulation.set_map("1");
    assert_eq!(simulation.server.cached_version(), version);
    simulation.kill();
    simulation.restart();
    assert_eq!(simulation.server.cached_version(), newer);
}

#[tokio::test(start_paused = true)]
async fn watches_see_changes_when_the_cache_does() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    let version = simulation.create_map();
    simulation.server.set_faults(|faults| faults.cache_lag = Some(LAG));
    let path = format!("{MAPS}?watch=1&resourceVersion={version}");
    let mut watch = simulation.run(client.watch(&path)).await.unwrap();
    for value in ["1", "2"] {
        let started = Instant::now();
        simulation.set_map(value);
        let event = simulation.run(watch.next()).await.unwrap().unwrap();
        let seen = (&event["type"], &event["object"]["data"]["k"]);
        assert_eq!((seen, started.elapsed()), ((&json!("MODIFIED"), &json!(value)), LAG));
    }

    // A watch list begins when the cache has reached the version that the store had then.
    simulation.set_map("3");
    let started = Instant::now();
    let path = format!(
        "{MAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1"
    );
    let mut watch = simulation.run(client.watch(&path)).await.unwrap();
    let event = simulation.run(watch.next()).await.unwrap().unwrap();
    assert_eq!((&event["object"]["data"]["k"], started.elapsed()), (&json!("3"), LAG));
    let path = format!("{MAPS}?watch=1&resourceVersion=0");
    simulation.set_map("4");
    let mut watch = simulation.run(client.watch(&path)).await.unwrap();
    let event = simulation.run(watch.next()).await.unwrap().unwrap();
    assert_eq!(event["object"]["data"]["k"], "3", "the state of the cache");
}

#[tokio::test(start_paused = true)]
async fn watch_of_a_slow_client_sees_what_the_cache_got_meanwhile() {
    // More than the windows of HTTP/2 and all buffers hold.
    const CHANGES: usize = 150;
    let large = "x".repeat(64 << 10);
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    let version = simulation.create_map();
    simulation.server.set_faults(|faults| faults.cache_lag = Some(LAG));
    let path = format!("{MAPS}?watch=1&resourceVersion={version}");
    let mut watch = simulation.run(client.watch(&path)).await.unwrap();
    for number in 0..CHANGES {
        simulation.set_map(&format!("{number}{large}"));
    }
    simulation.run(tokio::time::sleep(LAG / 2)).await;
    simulation.set_map("last");
    simulation.run(tokio::time::sleep(3 * LAG)).await;
    let started = Instant::now();
    let mut last = Value::Null;
    for _ in 0..=CHANGES {
        last = simulation.run(watch.next()).await.unwrap().unwrap();
    }
    assert_eq!(last["object"]["data"]["k"], "last");
    assert!(started.elapsed() < LAG, "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn starting_server_rejects_all_until_the_rbac_informers_are_filled() {
    let simulation = Simulation::new();
    let node = simulation.pki.client(&Subject::node("n1")).unwrap();
    let node = Credentials::anonymous(&simulation.pki.ca_pem()).certificate(&node);
    let stream = simulation.network.connect().unwrap();
    let client = simulation.run(Client::over(stream, ADDR, &node, true)).await.unwrap();
    simulation.server.set_faults(|faults| faults.rbac_empty = true);
    assert_eq!(simulation.get(&client, "/readyz").await.status, 403);
    simulation.server.set_faults(|faults| faults.rbac_empty = false);
    assert_eq!(simulation.get(&client, "/readyz").await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn new_connections_have_the_limit_of_streams() {
    let simulation = Simulation::new();
    simulation.server.set_faults(|faults| {
        faults.max_streams = Some(1);
        faults.delay = Duration::from_millis(50);
    });
    let client = simulation.connect().await;
    // The client knows the limit after the first response.
    simulation.get(&client, "/version").await;
    let started = Instant::now();
    let (first, second) = simulation
        .run(async { tokio::join!(client.get("/version"), client.get("/version")) })
        .await;
    assert_eq!([first.unwrap().status, second.unwrap().status], [200; 2]);
    assert!(started.elapsed() >= Duration::from_millis(100), "one after the other");
}

#[tokio::test(start_paused = true)]
async fn writes_are_recorded_with_the_audit_id_of_their_request() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    simulation.cluster.record_commits(100);
    let body = json!({ "metadata": { "name": "a" } }).to_string();
    for (method, path, id, body) in [
        (Method::POST, MAPS.to_owned(), "w1", body.clone()),
        (Method::POST, MAPS.to_owned(), "w2", body),
        (Method::PATCH, format!("{MAPS}/a"), "w3", json!({ "data": { "k": "1" } }).to_string()),
        (Method::DELETE, format!("{MAPS}/a"), "w4", String::new()),
    ] {
        let content_type = if method == Method::PATCH {
            "application/merge-patch+json"
        } else {
            "application/json"
        };
        let headers = [("audit-id", id), ("content-type", content_type)];
        simulation.run(client.request(method, &path, &headers, body)).await.unwrap();
    }
    let counts = ["w1", "w2", "w3", "w4"].map(|id| simulation.cluster.commits().count(id));
    assert_eq!(counts, [1, 0, 1, 1], "the second create is a conflict");
}

const WIDGETS: &str = "/apis/aggregated.jackstay.test/v1/namespaces/default/widgets";

#[tokio::test(start_paused = true)]
async fn path_that_is_refused_fails_the_requests_of_its_group_alone() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    assert_eq!(simulation.get(&client, WIDGETS).await.status, 200);
    simulation.server.set_faults(|faults| faults.aggregated_path = AggregatedPath::Refused);
    let refused = simulation.get(&client, WIDGETS).await;
    assert_eq!((refused.status.as_u16(), &refused.body[..]), (503, aggregated::REFUSED.as_bytes()));
    assert_eq!(refused.headers["content-type"], "text/plain; charset=utf-8");
    assert_eq!(refused.headers["x-content-type-options"], "nosniff");
    for path in [MAPS, "/readyz", "/apis", "/apis/aggregated.jackstay.test"] {
        assert_eq!(simulation.get(&client, path).await.status, 200, "{path}");
    }
    simulation.server.set_faults(|faults| faults.aggregated_unavailable = true);
    let unavailable = simulation.get(&client, WIDGETS).await;
    assert_eq!(&unavailable.body[..], aggregated::UNAVAILABLE.as_bytes());
    simulation.server.set_faults(|faults| {
        (faults.aggregated_unavailable, faults.aggregated_path) = (false, AggregatedPath::Open);
    });
    assert_eq!(simulation.get(&client, WIDGETS).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn path_that_is_dark_holds_requests_and_streams_until_it_is_open_or_lost() {
    let simulation = Simulation::new();
    let client = simulation.connect().await;
    let watched = format!("{WIDGETS}?watch=1&resourceVersion={}", simulation.cluster.version());
    let mut watch = simulation.run(client.watch(&watched)).await.unwrap();
    let dark = |path| simulation.server.set_faults(|faults| faults.aggregated_path = path);
    let create = |name: &str| {
        let widget = json!({ "metadata": { "name": name } });
        simulation.cluster.create(&WIDGET, "default", widget, false).unwrap();
    };
    dark(AggregatedPath::Dark);
    create("a");
    let opened = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        dark(AggregatedPath::Open);
    };
    let started = Instant::now();
    let (late, ()) = simulation.run(async { tokio::join!(client.get(WIDGETS), opened) }).await;
    assert_eq!((late.unwrap().status.as_u16(), started.elapsed()), (200, Duration::from_secs(10)));
    let event = simulation.run(watch.next()).await.unwrap().expect("an event");
    assert_eq!((&event["type"], started.elapsed()), (&json!("ADDED"), Duration::from_secs(10)));

    dark(AggregatedPath::Dark);
    create("b");
    let (lost, end) =
        simulation.run(async { tokio::join!(client.get(WIDGETS), watch.next()) }).await;
    let lost = lost.unwrap();
    assert_eq!((lost.status.as_u16(), &lost.body[..]), (503, aggregated::LOST.as_bytes()));
    assert_eq!(started.elapsed(), Duration::from_secs(10) + aggregated::LOST_AFTER);
    assert!(end.is_err(), "the stream was reset");
}
