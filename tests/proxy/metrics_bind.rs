//! `admin.metrics_bind`: the metrics alone, over TLS, for clients with a credential that an apiserver or the
//! configuration allows.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use jackstay_apiserver::client::{Client, Credentials, Reply};
use jackstay_apiserver::identity::User;
use jackstay_apiserver::pki::{Pki, Subject};
use jackstay_config::Config;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::support::{CONFIGMAPS, Proxy, TestCluster, until};

/// The group that the demo apiserver permits to get `/metrics`.
const READERS: &[&str] = &["metrics-readers"];
/// The name of the client certificate that needs no review.
const CLIENT_NAME: &str = "prometheus";

/// Serves the metrics on a free port, with reviews by the upstream and one permitted certificate.
fn bind_metrics(config: &mut Config) -> SocketAddr {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = free.local_addr().unwrap();
    let listener = crate::support::terminate_mode(config);
    let (paths, ca) = (listener.tls.paths.clone(), listener.client_ca_file.clone());
    config.admin.metrics_bind = Some(address);
    config.admin.metrics_cert_file = Some(paths.cert_file);
    config.admin.metrics_key_file = Some(paths.key_file);
    config.admin.metrics_client_ca_file = ca;
    config.admin.metrics_client_name = Some(CLIENT_NAME.into());
    config.admin.metrics_review_upstream = Some("control-plane".into());
    address
}

/// jackstay with the tokens of the tests, when it serves the metrics.
async fn start(cluster: &TestCluster) -> (Proxy, SocketAddr) {
    tokens(cluster);
    let mut config = cluster.config();
    let address = bind_metrics(&mut config);
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    until("the address is bound", async || TcpStream::connect(address).await.is_ok()).await;
    (proxy, address)
}

async fn scrape(address: SocketAddr, credentials: &Credentials, path: &str) -> Reply {
    let client = Client::connect_http1(address, credentials).await.unwrap();
    client.get(path).await.unwrap()
}

async fn status(address: SocketAddr, credentials: &Credentials) -> u16 {
    scrape(address, credentials, "/metrics").await.status.as_u16()
}

fn reviews(cluster: &TestCluster, kind: &str) -> usize {
    cluster.state.audit().select(|record| record.path.ends_with(kind)).len()
}

fn tokens(cluster: &TestCluster) {
    cluster.state.add_token("reader", User::new("system:serviceaccount:m:prometheus", READERS));
    cluster.state.add_token("other", User::new("system:serviceaccount:default:other", &[]));
    cluster.state.add_token("late", User::new("system:serviceaccount:m:late", READERS));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn metrics_are_served_to_reviewed_users_and_nothing_else_is() {
    let cluster = TestCluster::new(2);
    let (proxy, address) = start(&cluster).await;
    let anonymous = cluster.certs.anonymous();
    let with = |name: &str, groups: &[&str]| {
        let issued = cluster.certs.pki.client(&Subject::new(name, groups)).unwrap();
        anonymous.clone().certificate(&issued)
    };

    let reader = anonymous.clone().token("reader");
    let reply = scrape(address, &reader, "/metrics").await;
    assert_eq!(reply.status, 200);
    let page = String::from_utf8(reply.body.to_vec()).unwrap();
    assert!(page.contains("jackstay_build_info"), "{page}");
    assert!(!page.contains("serviceaccount"), "a user in {page}");
    for path in ["/status", "/config", "/events", "/history", "/livez", "/", "/metrics/../status"] {
        assert_eq!(scrape(address, &reader, path).await.status, 404, "{path}");
    }
    assert_eq!(status(address, &reader).await, 200);
    assert_eq!(
        (reviews(&cluster, "/tokenreviews"), reviews(&cluster, "/subjectaccessreviews")),
        (1, 1)
    );
    let by = cluster.state.audit().select(|record| record.path.ends_with("reviews"));
    assert!(by.iter().all(|record| record.user == "probe"), "{by:?}");

    assert_eq!(status(address, &anonymous).await, 401);
    assert_eq!(status(address, &anonymous.clone().token("invented")).await, 401);
    assert_eq!(status(address, &anonymous.clone().token("other")).await, 403);
    let before = reviews(&cluster, "/subjectaccessreviews");
    assert_eq!(status(address, &with(CLIENT_NAME, &[])).await, 200);
    assert_eq!(reviews(&cluster, "/subjectaccessreviews"), before, "it needs no review");
    assert_eq!(status(address, &with("other", READERS)).await, 200);
    assert_eq!(status(address, &with("other", &[])).await, 403);
    // A certificate with the permitted name, of another CA.
    let issued = Pki::new("other").unwrap().client(&Subject::new(CLIENT_NAME, &[])).unwrap();
    assert_eq!(status(address, &anonymous.clone().certificate(&issued)).await, 401);
    let line = r#"jackstay_metrics_responses_total{outcome="forbidden"} 2"#;
    proxy.wait_metrics(line).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn known_clients_read_the_metrics_of_an_outage() {
    let cluster = TestCluster::new(2);
    let (proxy, address) = start(&cluster).await;
    let anonymous = cluster.certs.anonymous();
    let issued = cluster.certs.pki.client(&Subject::new(CLIENT_NAME, &[])).unwrap();
    assert_eq!(status(address, &anonymous.clone().token("reader")).await, 200);
    cluster.kill_all();
    proxy.wait_all("ejected").await;
    assert_eq!(status(address, &anonymous.clone().token("reader")).await, 200, "reviewed before");
    assert_eq!(status(address, &anonymous.clone().certificate(&issued)).await, 200);
    let reply = scrape(address, &anonymous.clone().token("late"), "/metrics").await;
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    assert_eq!(reply.status, 503, "{text}");
    assert!(text.starts_with("no review: no apiserver"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn connections_of_one_source_are_limited_and_harm_no_request() {
    let cluster = TestCluster::new(2);
    let (proxy, address) = start(&cluster).await;
    let mut open = Vec::new();
    for _ in 0..200 {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    proxy.wait_metrics(r#"jackstay_metrics_responses_total{outcome="too_many_connections"}"#).await;
    let mut closed = 0;
    for stream in &mut open {
        let end = tokio::time::timeout(Duration::from_millis(5), stream.read(&mut [0])).await;
        closed += usize::from(end.is_ok());
    }
    assert!(closed > 150, "{closed} of 200 were closed at once");
    assert_eq!(proxy.client().await.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(proxy.page("/livez").await.starts_with("HTTP/1.1 200"));
    let reader = cluster.certs.anonymous().token("reader");
    until("a scrape is served again", async || {
        let Ok(client) = Client::connect_http1(address, &reader).await else { return false };
        client.get("/metrics").await.is_ok_and(|reply| reply.status == 200)
    })
    .await;
}
