//! Servers that select the back end by the host of a request: an ingress, the DNS endpoint of a cloud, a gateway.

use std::fs;

use http::Method;
use jackstay_apiserver::Gateway;
use jackstay_testkit::wait::{PATIENCE, soon, until_within};
use jackstay_testkit::watch_recorder::WatchRecorder;

use super::gateway::{CONFIGMAPS, Site};

/// Both servers serve the host of the first one only.
fn by_host(status: u16) -> Site {
    let site = Site::start(|host| Gateway { host: host.to_owned(), status, ..Gateway::default() });
    site.write_kubeconfig("");
    site
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_carry_the_host_that_kubectl_sends() {
    let site = by_host(404);
    let (code, output) = site.set_up("terminate", &[]);
    assert!(code == 0 && !output.contains("warning: "), "{output}");
    assert_eq!(site.upstream()["authority"], site.servers[0].addr.to_string());
    let _jackstay = site.start_jackstay().await;
    let client = site.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let over_http1 = site.client_over_http1().await;
    assert_eq!(over_http1.get(CONFIGMAPS).await.unwrap().status, 200);
    let object = serde_json::json!({ "metadata": { "name": "new" } });
    assert_eq!(client.post(CONFIGMAPS, &object).await.unwrap().status, 201);

    let exec = "/api/v1/namespaces/default/pods/web-0/exec?command=date&stdout=1";
    let headers = [
        ("connection", "Upgrade"),
        ("upgrade", "SPDY/3.1"),
        ("x-stream-protocol-version", "v4.channel.k8s.io"),
    ];
    let response = soon("a response", over_http1.send(Method::POST, exec, &headers, "")).await;
    assert_eq!(response.unwrap().status(), 101);

    let watch = format!("{CONFIGMAPS}?watch=1&resourceVersion={}", site.cluster.version());
    let recorder = soon("a watch begins", WatchRecorder::start(&client, &watch)).await;
    let before = site.create_config_map("before");
    recorder.expect_versions(&[before]).await;
    site.kill_the_one_with_the_watch().await;
    let after = site.create_config_map("after");
    recorder.expect_versions(&[before, after]).await;
    // Probes, the version, the trial of the certificate, hedges and the resumed watch as well.
    assert_eq!(site.refused(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn changed_authority_applies_to_probes_and_requests_without_a_restart() {
    let site = by_host(421);
    site.set_up("terminate", &[]);
    let file = site.path("js/jackstay.yaml");
    let right = fs::read_to_string(&file).unwrap();
    let authority = format!("authority: {}", site.servers[0].addr);
    fs::write(&file, right.replace(&authority, "authority: other.example.com")).unwrap();
    let jackstay = site.start_alone().await;
    let reason = "/readyz answers 421: the server does not serve the host other.example.com on a connection with this \
                  TLS server name: check authority and tls.server_name of the upstream";
    until_within(PATIENCE * 3, "the status has the reason", async || {
        let endpoints = site.endpoints().await;
        endpoints.len() == 2 && endpoints.iter().all(|endpoint| endpoint["reason"] == reason)
    })
    .await;
    let client = site.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 421, "it is passed on");
    fs::write(&file, right).unwrap();
    jackstay.signal("HUP");
    until_within(PATIENCE * 4, "the endpoints are ready", async || {
        let endpoints = site.endpoints().await;
        endpoints.len() == 2 && endpoints.iter().all(|endpoint| endpoint["state"] == "ready")
    })
    .await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}

#[test]
fn mode_passthrough_says_that_the_server_routes_by_host() {
    for status in [404, 421] {
        let site = by_host(status);
        let (code, output) = site.set_up("passthrough", &[]);
        let (served, refused) = (site.servers[0].addr, site.listen);
        let note = format!(
            "note: {served} routes by the host of a request: it answers {status} to {refused}, which clients send in \
             mode passthrough, and as an apiserver to {served}: use --mode terminate"
        );
        assert!(code == 0 && output.contains(&note), "{output}");
        let (code, output) = site.run(&["check", "--config", "js/jackstay.yaml"]);
        let warning = "upstreams[0].authority: clients in mode passthrough send the host that they connect to";
        assert!(code == 0 && output.contains(warning), "{output}");
        let doctor = ["doctor", "--config", "js/jackstay.yaml", "--duration", "1s"];
        let (code, output) = site.run(&doctor);
        let seen = format!(
            "it answers /version with {status} to the host {refused}, and as an apiserver to {served}"
        );
        assert!(
            code == 1 && output.contains(&seen) && output.contains("routes by host"),
            "{output}"
        );
    }
}

#[test]
fn authority_is_not_written_for_passthrough_to_an_apiserver() {
    let site = Site::start(|_| Gateway::default());
    site.write_kubeconfig("");
    let (code, output) = site.set_up("passthrough", &[]);
    assert!(code == 0 && !output.contains("routes by"), "{output}");
    assert_eq!(site.upstream().get("authority"), None, "{output}");
    let (code, output) = site.run(&["doctor", "--config", "js/jackstay.yaml", "--duration", "1s"]);
    assert!(code == 0 && !output.contains("host"), "{output}");
}

#[test]
fn doctor_finds_the_authority_that_a_configuration_lacks() {
    let site = by_host(404);
    site.set_up("terminate", &[]);
    let doctor = ["doctor", "--config", "js/jackstay.yaml", "--duration", "1s"];
    let (code, output) = site.run(&doctor);
    let authority = format!("requests with :authority {}", site.servers[0].addr);
    assert!(code == 0 && output.contains(&authority), "{output}");
    let file = site.path("js/jackstay.yaml");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace(&format!("  authority: {}\n", site.servers[0].addr), ""))
        .unwrap();
    let (code, output) = site.run(&doctor);
    let advice = format!("Set upstreams[].authority to {}", site.servers[0].addr);
    assert!(code == 1 && output.contains(&advice), "{output}");
    assert!(output.contains("routes by host"), "{output}");
}

#[test]
fn check_names_the_key_of_a_wrong_authority() {
    let site = by_host(404);
    site.set_up("terminate", &[]);
    let file = site.path("js/jackstay.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let old = format!("authority: {}", site.servers[0].addr);
    for (authority, is_valid) in [
        ("rancher.example.com", true),
        ("Rancher.example.com:443", true),
        ("'[fd00::1]:6443'", true),
        ("''", true),
        ("https://rancher.example.com", false),
        ("rancher.example.com/k8s", false),
        ("user@rancher.example.com", false),
        ("rancher.example.com:0", false),
        ("rancher.example.com:99999", false),
        ("'rancher.example.com:'", false),
        ("'a b'", false),
    ] {
        fs::write(&file, text.replace(&old, &format!("authority: {authority}"))).unwrap();
        let (code, output) = site.run(&["check", "--config", file.to_str().unwrap()]);
        assert_eq!(code, if is_valid { 0 } else { 2 }, "{authority}: {output}");
        let names = output.contains("upstreams[0].authority: ")
            && output.contains("is not a host with an optional port");
        assert_eq!(names, !is_valid, "{authority}: {output}");
    }
}
