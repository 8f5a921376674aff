//! A client reads its own writes and deletes, although the watch caches of the apiservers do not have them yet.

use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::{Method, StatusCode};
use jackstay_apiserver::ScriptedResponse;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use serde_json::{Value, json};

use crate::support::{CONFIGMAPS, Proxy, TestCluster, config_map, without_suspicion};

const PODS: &str = "/api/v1/namespaces/default/pods";
const POD: &str = "/api/v1/namespaces/default/pods/p";
const POD_STATUS: &str = "/api/v1/namespaces/default/pods/p/status";
const RESIZE: &str = "/api/v1/namespaces/default/pods/p/resize";
const BINDING: &str = "/api/v1/namespaces/default/pods/p/binding";
const EVICTION: &str = "/api/v1/namespaces/default/pods/p/eviction";
const MAP: &str = "/api/v1/namespaces/default/configmaps/m";
const SCALE: &str = "/apis/apps/v1/namespaces/default/deployments/d/scale";
const DEPLOYMENTS: &str = "/apis/apps/v1/namespaces/default/deployments";
const THINGS: &str = "/apis/example.com/v1/namespaces/default/things";
const THING: &str = "/apis/example.com/v1/namespaces/default/things/t";
const TOKEN: &str = "/api/v1/namespaces/default/serviceaccounts/a/token";
const ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
const BINDINGS: &str = "/api/v1/namespaces/default/bindings";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const JSON: &str = "application/json";
const CBOR: &str = "application/cbor";

/// The version in the responses of [`writes`].
const VERSION: &str = "71";

/// A write and its response.
struct WriteCase {
    method: Method,
    path: &'static str,
    status: u16,
    content_type: &'static str,
    body: Vec<u8>,
    is_gzip: bool,
}

impl WriteCase {
    fn json(method: Method, path: &'static str, status: u16, body: &Value) -> Self {
        Self::encoded(method, path, (status, JSON), body.to_string().as_bytes())
    }

    fn encoded(
        method: Method,
        path: &'static str,
        (status, content_type): (u16, &'static str),
        body: &[u8],
    ) -> Self {
        Self { method, path, status, content_type, body: body.into(), is_gzip: false }
    }

    fn gzip(mut self) -> Self {
        self.is_gzip = true;
        self
    }

    /// The response, with this version in place of [`VERSION`].
    fn response(&self, version: u64) -> ScriptedResponse {
        assert!((10..100).contains(&version), "the encodings contain the length");
        let mut body = self.body.clone();
        if let Some(at) = body.windows(2).position(|window| window == VERSION.as_bytes()) {
            body[at..at + 2].copy_from_slice(version.to_string().as_bytes());
        }
        let mut response = ScriptedResponse::status(self.status, "", "");
        response = response.header("content-type", self.content_type);
        if self.is_gzip {
            let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
            gzip.write_all(&body).unwrap();
            body = gzip.finish().unwrap();
            response = response.header("content-encoding", "gzip");
        }
        response.body = body.into();
        response
    }
}

/// How a LIST of any version of a resource is sent after a write of the same client.
#[derive(Debug, Clone, Copy)]
enum ReadAfterWrite {
    /// As the client sent it.
    Unchanged,
    /// With the version of the object.
    NotOlderThan,
    /// Without a version. No cache is sure to reach that of a Status.
    MostRecent,
}

impl ReadAfterWrite {
    fn target(self, path: &str, version: u64) -> String {
        match self {
            Self::Unchanged => format!("{path}?resourceVersion=0"),
            Self::NotOlderThan => {
                format!("{path}?resourceVersion={version}&resourceVersionMatch=NotOlderThan")
            }
            Self::MostRecent => path.to_owned(),
        }
    }
}

fn status(version: Option<&str>) -> Value {
    let metadata = version.map_or(json!({}), |version| json!({ "resourceVersion": version }));
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": metadata, "status": "Success" })
}

fn object(kind: &str) -> Value {
    json!({ "kind": kind, "apiVersion": "v1", "metadata": { "name": "a", "resourceVersion": VERSION } })
}

/// `TypeMeta` of a Status and its `ListMeta` with [`VERSION`].
const PROTOBUF_STATUS: &[u8] =
    b"k8s\0\x0a\x0c\x0a\x02v1\x12\x06Status\x12\x0f\x0a\x04\x12\x0271\x12\x07Success\x1a\0\x22\0";
const CBOR_STATUS: &[u8] =
    b"\xd9\xd9\xf7\xa2\x44kind\x46Status\x48metadata\xa1\x4fresourceVersion\x4271";

/// An apiserver that answers one write and records the lists of one resource.
struct Rig {
    cluster: TestCluster,
    proxy: Proxy,
    lists: Arc<Mutex<Vec<String>>>,
}

impl Rig {
    async fn start() -> Self {
        let cluster = TestCluster::new(1);
        let proxy = cluster.start_with(without_suspicion).await;
        Self { cluster, proxy, lists: Arc::default() }
    }

    /// A list of the resource at `path` has `version`. It shows no later one of the cache.
    fn script(&self, write: &WriteCase, path: &'static str, version: u64) {
        let (method, target, response) =
            (write.method.clone(), write.path, write.response(version));
        let mut list = ScriptedResponse::status(200, "", "");
        let meta = json!({ "resourceVersion": version.to_string() });
        list.body = json!({ "kind": "List", "metadata": meta, "items": [] }).to_string().into();
        let lists = Arc::clone(&self.lists);
        self.cluster.servers[0].set_faults(|faults| {
            faults.on_request = Some(Arc::new(move |request| {
                if request.method == method && request.uri.path() == target {
                    return Some(response.clone());
                }
                // Not a question of the prober about a version.
                let agent = request.headers.get("user-agent");
                let is_prober = agent.is_some_and(|agent| agent == "jackstay-readyz");
                if request.method != Method::GET || request.uri.path() != path || is_prober {
                    return None;
                }
                lists.lock().unwrap().push(request.uri.path_and_query()?.to_string());
                Some(list.clone())
            }));
        });
    }

    /// The LIST that the apiserver gets after the write of a new client.
    async fn list_after(&self, write: &WriteCase, path: &'static str, version: u64) -> String {
        self.script(write, path, version);
        let user = format!("client-{version}");
        self.cluster.state.add_token(&user, User::new(&user, &["system:masters"]));
        let credentials = self.cluster.certs.anonymous().token(&user);
        let client = self.proxy.client_with(&credentials).await;
        let headers = [("accept-encoding", "gzip")];
        let reply = client.request(write.method.clone(), write.path, &headers, "{}").await.unwrap();
        assert_eq!(reply.status.as_u16(), write.status);
        let reply = client.get(&format!("{path}?resourceVersion=0")).await.unwrap();
        assert_eq!(reply.status, StatusCode::OK);
        let mut lists = std::mem::take(&mut *self.lists.lock().unwrap());
        assert_eq!(lists.len(), 1, "{lists:?}");
        lists.remove(0)
    }
}

fn writes() -> Vec<(WriteCase, &'static str, ReadAfterWrite)> {
    use ReadAfterWrite::{MostRecent, NotOlderThan, Unchanged};
    let new = status(Some(VERSION));
    let old = status(None);
    // The version follows in a later DATA frame, of at most 16 KiB (RFC 9113, section 4.2).
    let mut long = new.clone();
    long["details"] = "a".repeat(40_000).into();
    let failure = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "metadata": { "resourceVersion": VERSION }, "code": 409 });
    let list = json!({ "kind": "ConfigMapList", "apiVersion": "v1", "items": [],
        "metadata": { "resourceVersion": VERSION } });
    let json = WriteCase::json;
    let encoded =
        |content_type, body| WriteCase::encoded(Method::DELETE, MAP, (200, content_type), body);
    let protobuf_eviction =
        WriteCase::encoded(Method::POST, EVICTION, (201, PROTOBUF), PROTOBUF_STATUS);
    vec![
        (json(Method::POST, CONFIGMAPS, 201, &object("ConfigMap")), CONFIGMAPS, NotOlderThan),
        (json(Method::PUT, MAP, 200, &object("ConfigMap")), CONFIGMAPS, NotOlderThan),
        (json(Method::PATCH, MAP, 200, &object("ConfigMap")), CONFIGMAPS, NotOlderThan),
        (json(Method::DELETE, POD, 200, &object("Pod")), PODS, NotOlderThan),
        (json(Method::DELETE, POD, 202, &object("Pod")), PODS, NotOlderThan),
        (json(Method::PATCH, POD_STATUS, 200, &object("Pod")), PODS, NotOlderThan),
        (json(Method::PATCH, RESIZE, 200, &object("Pod")), PODS, NotOlderThan),
        (json(Method::PUT, SCALE, 200, &object("Scale")), DEPLOYMENTS, NotOlderThan),
        (json(Method::POST, TOKEN, 201, &object("TokenRequest")), ACCOUNTS, Unchanged),
        (json(Method::DELETE, MAP, 200, &new), CONFIGMAPS, MostRecent),
        (json(Method::DELETE, MAP, 200, &long), CONFIGMAPS, MostRecent),
        (json(Method::DELETE, MAP, 200, &new).gzip(), CONFIGMAPS, MostRecent),
        (json(Method::DELETE, THING, 200, &new), THINGS, MostRecent),
        (encoded(PROTOBUF, PROTOBUF_STATUS), CONFIGMAPS, MostRecent),
        (encoded(PROTOBUF, PROTOBUF_STATUS).gzip(), CONFIGMAPS, MostRecent),
        (encoded(CBOR, CBOR_STATUS), CONFIGMAPS, MostRecent),
        (json(Method::DELETE, MAP, 200, &old), CONFIGMAPS, Unchanged),
        (json(Method::DELETE, MAP, 409, &failure), CONFIGMAPS, Unchanged),
        (json(Method::DELETE, CONFIGMAPS, 200, &list), CONFIGMAPS, MostRecent),
        (json(Method::DELETE, CONFIGMAPS, 200, &old), CONFIGMAPS, Unchanged),
        (json(Method::POST, BINDING, 201, &new), PODS, MostRecent),
        (json(Method::POST, BINDING, 201, &old), PODS, Unchanged),
        (json(Method::POST, BINDING, 409, &failure), PODS, Unchanged),
        (json(Method::POST, EVICTION, 201, &new), PODS, MostRecent),
        (protobuf_eviction, PODS, MostRecent),
        (json(Method::POST, BINDINGS, 201, &new), PODS, MostRecent),
    ]
}

#[tokio::test]
async fn list_after_a_write_has_the_version_of_the_response() {
    let rig = Rig::start().await;
    let mut wrong = Vec::new();
    // Each version is above what the lists before have shown of the cache.
    for ((write, path, expected), version) in writes().into_iter().zip(71..) {
        let WriteCase { method, path: target, status, content_type, is_gzip, .. } = &write;
        let list = rig.list_after(&write, path, version).await;
        if list != expected.target(path, version) {
            wrong.push(format!(
                "{method} {target}: {status} {content_type}, gzip: {is_gzip}: {expected:?}, not {list}"
            ));
        }
    }
    assert_eq!(wrong, [""; 0]);
}

/// The time until each watch cache has a change. It is less than the time that a most-recent list waits for it.
const LAG: Duration = Duration::from_secs(2);

struct LaggingCaches {
    _cluster: TestCluster,
    _proxy: Proxy,
    client: Client,
}

impl LaggingCaches {
    /// The caches have the pod `p` and the `ConfigMap` `m`, and get each later change after [`LAG`].
    async fn start(status_versions: bool) -> Self {
        let cluster = TestCluster::new(2);
        for server in &cluster.servers {
            server.set_faults(|faults| {
                (faults.status_versions, faults.cache_lag) =
                    (status_versions, Some(Duration::ZERO));
            });
        }
        let proxy = cluster.start_with(without_suspicion).await;
        let client = proxy.client().await;
        let pod = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "name": "p" },
            "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        for (path, value) in [(CONFIGMAPS, &config_map("m", "1")), (PODS, &pod)] {
            assert_eq!(client.post(path, value).await.unwrap().status, StatusCode::CREATED);
        }
        for server in &cluster.servers {
            assert_eq!(server.cached_version(), cluster.state.version());
            server.set_faults(|faults| faults.cache_lag = Some(LAG));
        }
        Self { _cluster: cluster, _proxy: proxy, client }
    }

    /// The status and the body of a GET of any version.
    async fn get(&self, path: &str) -> (StatusCode, Value) {
        let reply = self.client.get(&format!("{path}?resourceVersion=0")).await.unwrap();
        (reply.status, serde_json::from_slice(&reply.body).unwrap())
    }

    /// Number of items in a LIST of any version.
    async fn count(&self, path: &str) -> usize {
        self.get(path).await.1["items"].as_array().unwrap().len()
    }

    async fn write(&self, method: Method, path: &str, body: &Value) {
        let headers = [("content-type", JSON)];
        let reply = self.client.request(method, path, &headers, body.to_string()).await.unwrap();
        assert!(reply.status.is_success(), "{path}: {reply:?}");
    }
}

#[tokio::test]
async fn deleted_bound_and_evicted_objects_are_read_as_such() {
    let caches = LaggingCaches::start(true).await;
    caches.write(Method::DELETE, MAP, &json!({})).await;
    assert_eq!(caches.get(MAP).await.0, StatusCode::NOT_FOUND);
    assert_eq!(caches.count(CONFIGMAPS).await, 0);
    let binding = json!({ "target": { "kind": "Node", "name": "n" } });
    caches.write(Method::POST, BINDING, &binding).await;
    assert_eq!(caches.get(POD).await.1["spec"]["nodeName"], "n");
    caches.write(Method::POST, EVICTION, &json!({})).await;
    assert_eq!(caches.get(POD).await.0, StatusCode::NOT_FOUND);
    assert_eq!(caches.count(PODS).await, 0);
}

/// An older apiserver does not say at which version it has deleted the object.
#[tokio::test]
async fn status_without_a_version_changes_no_read() {
    let caches = LaggingCaches::start(false).await;
    caches.write(Method::DELETE, MAP, &json!({})).await;
    assert_eq!(caches.get(MAP).await.0, StatusCode::OK);
    assert_eq!(caches.count(CONFIGMAPS).await, 1);
}
