//! Servers that have the API below a path: `server: https://rancher.example.com/k8s/clusters/c-1`.

use std::fs;

use http::Method;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::{Gateway, Options, start};
use jackstay_testkit::wait::{PATIENCE, soon, until_within};
use jackstay_testkit::watch_recorder::WatchRecorder;

use super::gateway::{CONFIGMAPS, Site};

const RANCHER: &str = "/k8s/clusters/c-1";

fn below(prefix: &str) -> Site {
    let site = Site::start(|_| Gateway { prefix: prefix.to_owned(), ..Gateway::default() });
    site.write_kubeconfig(prefix);
    site
}

/// The watch, the probes and the version: a request of jackstay for a path outside would be in the list of the gateway.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_below_a_path_continues_on_another_apiserver() {
    for prefix in [RANCHER, "/clusters/root:org:ws", "/a%20b"] {
        let site = below(prefix);
        let (code, output) = site.set_up("terminate", &[]);
        assert!(code == 0 && !output.contains("warning: "), "{prefix}: {output}");
        assert_eq!(site.upstream()["path_prefix"], prefix, "{output}");
        let _jackstay = site.start_jackstay().await;
        let client = site.client().await;
        let list = format!("{prefix}{CONFIGMAPS}");
        assert_eq!(client.get(&list).await.unwrap().status, 200, "{prefix}");

        let first = site.cluster.version();
        let watch = format!("{list}?watch=1&resourceVersion={first}");
        let recorder = soon("a watch begins", WatchRecorder::start(&client, &watch)).await;
        let before = site.create_config_map("before");
        recorder.expect_versions(&[before]).await;
        site.kill_the_one_with_the_watch().await;
        let after = site.create_config_map("after");
        recorder.expect_versions(&[before, after]).await;
        assert!(site.metric("jackstay_watch_resumes_total").await >= 1.0, "{prefix}");
        assert_eq!(site.refused(), Vec::<String>::new(), "{prefix}");
        let endpoints = site.endpoints().await;
        assert!(endpoints.iter().all(|endpoint| endpoint["version"].is_string()), "{endpoints:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn verb_and_floor_are_known_below_the_path_only() {
    let site = below(RANCHER);
    site.set_up("terminate", &[]);
    let _jackstay = site.start_jackstay().await;
    let client = site.client().await;
    // A request that names another cluster, or none, is forwarded unchanged and gets the answer of the gateway.
    let outside = ["/healthz", "/k8s/clusters/c-10/api/v1/pods?watch=1", "/api/v1/pods"];
    for path in outside {
        let reply = soon("a response", client.get(path)).await.unwrap();
        assert_eq!((reply.status.as_u16(), &*reply.body), (404, &b"404 page not found\n"[..]));
    }
    let host = site.listen;
    let forwarded = site.refused();
    for path in outside {
        let authority = site.servers[0].addr;
        let expected = format!("GET {authority} {path}");
        assert!(forwarded.contains(&expected), "{host}: {expected} is not in {forwarded:?}");
    }
    // Verbs are known below the path: a create is a create, and not a POST.
    let object = serde_json::json!({ "metadata": { "name": "new" } });
    let created = client.post(&format!("{RANCHER}{CONFIGMAPS}"), &object).await.unwrap();
    assert_eq!(created.status, 201);
    for verb in ["create", "get"] {
        let name = format!("jackstay_requests_total{{listener=\"apiserver\",verb=\"{verb}\"");
        until_within(PATIENCE, "the request is counted", async || site.metric(&name).await > 0.0)
            .await;
    }
    let watches = "jackstay_requests_total{listener=\"apiserver\",verb=\"watch\"";
    assert!(site.metric(watches).await == 0.0, "a path of another cluster is no watch");
}

/// The versions of one cluster have nothing to do with those of the cluster below another path.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reload_to_another_path_forgets_the_versions_of_the_first_cluster() {
    let site = below(RANCHER);
    site.set_up("terminate", &[]);
    let jackstay = site.start_jackstay().await;
    for n in 0..50 {
        site.create_config_map(&format!("high-{n}"));
    }
    let client = site.client().await;
    let list = format!("{RANCHER}{CONFIGMAPS}?resourceVersion=0");
    let seen = client.get(&list).await.unwrap().json();
    let version = |list: &serde_json::Value| {
        list["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap()
    };
    let other = Cluster::new();
    jackstay_apiserver::seed::fill(&other).unwrap();
    assert!(other.version() + 40 < version(&seen));
    let prefix = "/k8s/clusters/c-2".to_owned();
    let options =
        Options { gateway: Gateway { prefix, ..Gateway::default() }, ..Options::named("second") };
    let second = start(&other, &site.pki, options).unwrap();
    let file = site.path("js/jackstay.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let moved = text
        .replace(RANCHER, "/k8s/clusters/c-2")
        .replace(&site.servers[0].addr.to_string(), &second.addr.to_string());
    fs::write(&file, moved).unwrap();
    jackstay.signal("HUP");
    let list = format!("/k8s/clusters/c-2{CONFIGMAPS}?resourceVersion=0");
    other.audit().set_enabled(true);
    // The other endpoint does not have this path, and is used until its first check says so.
    let mut reply = None;
    until_within(PATIENCE * 3, "the second cluster answers", async || {
        reply = client.get(&list).await.ok().filter(|reply| reply.status == 200);
        reply.is_some()
    })
    .await;
    assert_eq!(version(&reply.unwrap().json()), other.version());
    // A floor would have asked for a version that this cluster has not reached.
    let lists = other.audit().select(|record| record.path.contains("configmaps?"));
    assert!(!lists.is_empty());
    let is_unchanged = |path: &str| path.ends_with("configmaps?resourceVersion=0");
    assert!(lists.iter().all(|record| is_unchanged(&record.path)), "{lists:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn upgrade_below_a_path_reaches_the_apiserver() {
    let site = below(RANCHER);
    site.set_up("terminate", &[]);
    let _jackstay = site.start_jackstay().await;
    let client = site.client_over_http1().await;
    let exec = format!("{RANCHER}/api/v1/namespaces/default/pods/web-0/exec?command=date&stdout=1");
    let headers = [
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("x-stream-protocol-version", "v4.channel.k8s.io"),
    ];
    let response = soon("a response", client.send(Method::POST, &exec, &headers, "")).await;
    assert_eq!(response.unwrap().status(), 101);
    assert_eq!(site.refused(), Vec::<String>::new());
}

#[test]
fn endpoints_that_the_cluster_names_are_not_used_below_a_path() {
    let site = below(RANCHER);
    let (code, output) = site.set_up("terminate", &["--discover"]);
    let expected = "--discover: the server of cluster \"demo\" has the path /k8s/clusters/c-1, which the apiservers \
                    that the cluster names do not serve; --endpoint names other servers with this path";
    assert!(code == 2 && output.contains(expected), "{output}");
    let listen = site.listen.to_string();
    let args = ["kubeconfig", "--mode", "terminate", "--listen", &listen, "--kubeconfig", "config"];
    let (code, output) = site.run(&[&args[..], &["--out", "out"]].concat());
    let expected = "those that it names do not serve the path /k8s/clusters/c-1 of the server, so they are no endpoints";
    assert!(code == 0 && output.contains(expected), "{output}");
    let kubeconfig = fs::read_to_string(site.path("out")).unwrap();
    assert!(kubeconfig.contains(&format!("https://{listen}{RANCHER}")), "{kubeconfig}");
}

#[test]
fn check_names_the_key_of_a_wrong_path() {
    let site = below(RANCHER);
    site.set_up("terminate", &[]);
    let file = site.path("js/jackstay.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let at = "upstreams[0].path_prefix: ";
    for (key, more, expected) in [
        ("k8s/clusters/c-1", "", format!("{at}\"k8s/clusters/c-1\" must begin with a slash")),
        ("/k8s?a=b", "", format!("{at}\"/k8s?a=b\" must be a path without a query")),
        ("/k8s/../c", "", format!("{at}\"/k8s/../c\" has a segment . or ..")),
        ("/k8s/%2", "", format!("{at}\"/k8s/%2\" has an invalid percent-encoding")),
        (
            RANCHER,
            "discovery: {kubeconfig: config}",
            "upstreams[0].discovery.kubeconfig: has no meaning with path_prefix".to_owned(),
        ),
        (RANCHER, "health: {readyz: {path: /livez}}", String::new()),
        (RANCHER, "health: {readyz: {path: /k8s/clusters/c-1/livez}}", String::new()),
        ("/k8s//clusters/c-1/", "", String::new()),
    ] {
        let upstream = format!("  path_prefix: '{key}'\n  {more}\n  endpoints:");
        let old = format!(
            "  path_prefix: {RANCHER}\n  authority: {}\n  endpoints:",
            site.servers[0].addr
        );
        assert!(text.contains(&old), "{text}");
        fs::write(&file, text.replace(&old, &upstream)).unwrap();
        let (code, output) = site.run(&["check", "--config", file.to_str().unwrap()]);
        assert_eq!(code, if expected.is_empty() { 0 } else { 2 }, "{key} {more}: {output}");
        assert!(output.contains(&expected), "{key} {more}: {output}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn wrong_path_is_named_by_status_and_doctor() {
    let site = below(RANCHER);
    site.write_kubeconfig("/k8s/clusters/c-2");
    let (_, output) = site.set_up("terminate", &[]);
    assert!(output.contains("/version responds with 404 and not as Kubernetes does"), "{output}");
    let _jackstay = site.start_alone().await;
    let reason = format!(
        "/k8s/clusters/c-2/readyz answers 404: no apiserver for the host {} at this path: check authority and \
         path_prefix of the upstream",
        site.servers[0].addr
    );
    until_within(PATIENCE * 3, "the status has the reason", async || {
        let endpoints = site.endpoints().await;
        endpoints.len() == 2 && endpoints.iter().all(|endpoint| endpoint["reason"] == *reason)
    })
    .await;
    let (code, output) = site.run(&["doctor", "--config", "js/jackstay.yaml", "--duration", "1s"]);
    assert!(code == 1 && output.contains("API below the path /k8s/clusters/c-2"), "{output}");
    assert!(output.contains("no apiserver at the host and path of the requests"), "{output}");
}

#[test]
fn doctor_examines_below_the_path_of_a_configuration_and_of_a_kubeconfig() {
    let site = below(RANCHER);
    site.set_up("terminate", &[]);
    for from in [["--config", "js/jackstay.yaml"], ["--kubeconfig", "config"]] {
        let (code, output) = site.run(&[&["doctor", "--duration", "1s"], &from[..]].concat());
        assert!(code == 0 && output.contains("API below the path /k8s/clusters/c-1"), "{output}");
    }
    assert_eq!(site.refused(), Vec::<String>::new());
}
