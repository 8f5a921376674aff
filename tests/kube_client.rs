//! A client on kube-rs that records what it sees, for the checker in `tests/real/consistency`, which starts it with the
//! variables below. It is a test so that it needs no dependencies of its own.
//!
//! `HISTORY_SERVER`, `HISTORY_CA`, `HISTORY_TOKEN`, `HISTORY_NAMESPACE`, `HISTORY_FILE`, `HISTORY_SEED`, `HISTORY_SECONDS`

use std::collections::HashSet;
use std::env::var;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use http::{Request, Response, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GetParams, GroupVersionKind, ListParams, Patch,
    PatchParams, PostParams, WatchParams,
};
use kube::client::Body;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Error as KubeError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, interval, timeout_at};

type AnyError = Box<dyn Error + Send + Sync>;

const VALUE: &str = "jackstay.test/value";

/// One HTTP/2 connection, which is opened again when it is closed.
struct Connection {
    server: Uri,
    token: String,
    tls: tokio_rustls::TlsConnector,
    /// None once the connection is closed: a sender that remained would keep a request that was sent meanwhile
    /// (`Http2Sender` of the tests' own client).
    sender: Arc<AsyncMutex<Option<http2::SendRequest<Body>>>>,
}

impl Connection {
    async fn open(&self) -> Result<http2::SendRequest<Body>, AnyError> {
        let mut sender = self.sender.lock().await;
        if let Some(open) = sender.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(open.clone());
        }
        let authority = self.server.authority().ok_or("the server's URL has no authority")?;
        let stream = TcpStream::connect(authority.as_str()).await?;
        let name = ServerName::try_from(authority.host().to_owned())?;
        let stream = self.tls.connect(name, stream).await?;
        let (fresh, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(Some(Duration::from_secs(30)))
            .handshake(TokioIo::new(stream))
            .await?;
        let closed = Arc::clone(&self.sender);
        tokio::spawn(async move {
            let _ = connection.await;
            closed.lock().await.take_if(|sender| sender.is_closed());
        });
        *sender = Some(fresh.clone());
        Ok(fresh)
    }

    async fn send(&self, request: Request<Body>) -> Result<Response<Incoming>, AnyError> {
        let (mut parts, body) = request.into_parts();
        let mut uri = self.server.clone().into_parts();
        uri.path_and_query = parts.uri.path_and_query().cloned();
        parts.uri = Uri::from_parts(uri)?;
        parts.headers.insert(header::AUTHORIZATION, format!("Bearer {}", self.token).parse()?);
        let mut request = Request::from_parts(parts, body);
        // A request that the closing connection did not send goes to the next one, as with hyper-util's client.
        for _ in 0..3 {
            let mut sender = self.open().await?;
            if sender.ready().await.is_err() {
                continue;
            }
            let response = sender.try_send_request(request);
            drop(sender);
            match response.await {
                Ok(response) => return Ok(response),
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(failed.into_error().into()),
                },
            }
        }
        Err("three connections closed before the request was sent".into())
    }
}

/// Writes records; see `tests/real/consistency/recorder.py`.
struct Recorder {
    file: Mutex<(File, u64)>,
}

impl Recorder {
    fn write(&self, mut record: Value) {
        let mut file = self.file.lock().unwrap();
        record["client"] = "kube-rs".into();
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        record["at"] = (clock.tv_sec * 1_000_000_000 + clock.tv_nsec).into();
        writeln!(file.0, "{record}").unwrap();
    }

    fn invoke(&self, verb: &str, resource: &str, key: &str, form: &Value, value: &str) -> u64 {
        let op = {
            let mut file = self.file.lock().unwrap();
            file.1 += 1;
            file.1
        };
        self.write(
            json!({"kind": "invoke", "op": op, "verb": verb, "resource": resource, "key": key,
            "form": form, "value": value}),
        );
        op
    }

    fn reply(&self, op: u64, result: Result<Value, KubeError>) {
        let reply = match result {
            Ok(shown) => shown,
            Err(KubeError::Api(status)) => {
                json!({"code": status.code, "message": status.message, "reason": status.reason})
            }
            Err(error) => json!({"code": 0, "error": format!("{error:?}")}),
        };
        let mut record = json!({"kind": "return", "op": op, "code": 200});
        record.as_object_mut().unwrap().extend(reply.as_object().unwrap().clone());
        self.write(record);
    }
}

fn item(object: &DynamicObject) -> Value {
    let metadata = &object.metadata;
    let version = metadata.resource_version.as_ref().and_then(|v| v.parse::<u64>().ok());
    let value = metadata.annotations.as_ref().and_then(|a| a.get(VALUE));
    json!({"key": metadata.name, "version": version, "uid": metadata.uid, "value": value.map_or("", String::as_str)})
}

fn one(object: &DynamicObject) -> Value {
    let item = item(object);
    json!({"version": item["version"], "items": [item]})
}

/// Sends a random request.
async fn act(api: &Api<DynamicObject>, types: &ApiResource, out: &Recorder, seq: u64) {
    let resource = types.plural.as_str();
    let (key, value) = (format!("k{}", fastrand::u8(..6)), format!("kube-rs-{seq}"));
    let object = json!({"apiVersion": types.api_version, "kind": types.kind, "metadata": {"name": key,
        "labels": {"set": "a"}, "annotations": {VALUE: value}}});
    let recent = fastrand::bool();
    let form = if recent { json!({}) } else { json!({"resourceVersion": "0"}) };
    let get = if recent { GetParams::default() } else { GetParams::any() };
    let list = if recent { ListParams::default() } else { ListParams::default().match_any() };
    match fastrand::u8(..10) {
        0 => {
            let op = out.invoke("create", resource, &key, &json!({}), &value);
            let object: DynamicObject = serde_json::from_value(object).unwrap();
            let result = api.create(&PostParams::default(), &object).await;
            out.reply(op, result.map(|o| one(&o)));
        }
        1 | 2 => {
            let op = out.invoke("patch", resource, &key, &json!({}), &value);
            let result = api.patch(&key, &PatchParams::default(), &Patch::Merge(object)).await;
            out.reply(op, result.map(|o| one(&o)));
        }
        3 => {
            let op = out.invoke("delete", resource, &key, &json!({}), "");
            let result = api.delete(&key, &DeleteParams::default()).await;
            out.reply(
                op,
                result.map(|deleted| {
                    let uid = deleted.either(
                        |object| object.metadata.uid,
                        |status| status.details.map(|details| details.uid),
                    );
                    json!({"items": [{"key": key, "uid": uid}]})
                }),
            );
        }
        4 | 5 => {
            let op = out.invoke("get", resource, &key, &form, "");
            out.reply(op, api.get_with(&key, &get).await.map(|o| one(&o)));
        }
        _ => {
            let op = out.invoke("list", resource, "", &form, "");
            let result = api.list(&list).await;
            out.reply(
                op,
                result.map(|list| {
                    let version = list.metadata.resource_version.and_then(|v| v.parse::<u64>().ok());
                    json!({"version": version, "items": list.items.iter().map(item).collect::<Vec<_>>()})
                }),
            );
        }
    }
}

/// Follows kube's watcher, which lists and then watches. Each new list is recorded as a new watch, so that the end of
/// the one before it needs a reason.
async fn follow(api: Api<DynamicObject>, resource: String, out: Arc<Recorder>, until: Instant) {
    let (mut op, mut known) = (None, HashSet::new());
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    let end = |op: Option<u64>, how: &str| {
        if let Some(op) = op {
            out.write(json!({"kind": "end", "op": op, "how": how}));
        }
    };
    let begin = || Some(out.invoke("watch", &resource, "", &json!({}), ""));
    op = op.or_else(begin);
    while let Ok(Some(event)) = timeout_at(until, events.next()).await {
        let (kind, object) = match event {
            Ok(Event::Init) => {
                if !known.is_empty() {
                    end(op, "clean");
                    op = begin();
                    known.clear();
                }
                continue;
            }
            Ok(Event::InitDone) => {
                out.reply(op.unwrap(), Ok(json!({})));
                continue;
            }
            Ok(Event::Apply(object)) if known.contains(&object.metadata.name) => {
                ("MODIFIED", object)
            }
            Ok(Event::InitApply(object) | Event::Apply(object)) => ("ADDED", object),
            Ok(Event::Delete(object)) => ("DELETED", object),
            Err(error) => {
                eprintln!("watch of {resource}: {error:?}");
                continue;
            }
        };
        if kind == "DELETED" {
            known.remove(&object.metadata.name);
        } else {
            known.insert(object.metadata.name.clone());
        }
        let mut record = item(&object);
        record["kind"] = "event".into();
        record["op"] = op.into();
        record["type"] = kind.into();
        out.write(record);
    }
    end(op, "cancelled");
}

/// A client with the server and token of the environment, and the namespace for `namespaced_with`.
fn connect() -> Result<(Client, String), AnyError> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(var("HISTORY_CA")?)?)?;
    let mut tls =
        rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    let connection = Arc::new(Connection {
        server: var("HISTORY_SERVER")?.parse()?,
        token: var("HISTORY_TOKEN")?,
        tls: Arc::new(tls).into(),
        sender: Arc::default(),
    });
    let service = tower::service_fn(move |request| {
        let connection = connection.clone();
        async move { connection.send(request).await }
    });
    let namespace = var("HISTORY_NAMESPACE")?;
    Ok((Client::new(service, &namespace), namespace))
}

async fn record() -> Result<(), AnyError> {
    let (client, namespace) = connect()?;
    let out = Arc::new(Recorder { file: Mutex::new((File::create(var("HISTORY_FILE")?)?, 0)) });
    fastrand::seed(var("HISTORY_SEED")?.parse()?);
    let until = Instant::now() + Duration::from_secs_f64(var("HISTORY_SECONDS")?.parse()?);
    let types =
        [("", "ConfigMap"), ("coordination.k8s.io", "Lease"), ("check.jackstay.test", "Thing")]
            .map(|(group, kind)| ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind)));
    let api = |types| Api::<DynamicObject>::namespaced_with(client.clone(), &namespace, types);
    let followers: Vec<_> = types
        .iter()
        .map(|types| tokio::spawn(follow(api(types), types.plural.clone(), out.clone(), until)))
        .collect();
    let mut pause = interval(Duration::from_millis(150));
    for seq in 0.. {
        let types = &types[fastrand::usize(..types.len())];
        act(&api(types), types, &out, seq).await;
        if Instant::now() > until {
            break;
        }
        pause.tick().await;
    }
    for follower in followers {
        follower.await?;
    }
    Ok(())
}

/// The operations of `tests/real/test_clients.py`, once each; their results go to `HISTORY_FILE` as lines of JSON.
async fn operations() -> Result<(), AnyError> {
    let (client, namespace) = connect()?;
    let types = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "ConfigMap"));
    let api = Api::<DynamicObject>::namespaced_with(client, &namespace, &types);
    let mut file = File::create(var("HISTORY_FILE")?)?;
    let mut write = |op: &str, result: Result<Value, KubeError>| {
        let result = result.unwrap_or_else(|error| json!({"error": format!("{error:?}")}));
        writeln!(file, "{}", json!({"op": op, "result": result}))
    };
    let manifest = |value: &str| {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "client", "labels": {"set": "client"}},
            "data": {"key": value, "text": "ä\n".repeat(2000)}})
    };
    let labelled = ListParams::default().labels("set=client");
    let version = api.list(&labelled).await?.metadata.resource_version.unwrap_or_default();
    let object: DynamicObject = serde_json::from_value(manifest("one"))?;
    write("create", api.create(&PostParams::default(), &object).await.map(|o| json!(o)))?;
    write("list", api.list(&labelled).await.map(|list| json!(list)))?;
    let merge = Patch::Merge(json!({"data": {"key": "two"}}));
    write("patch", api.patch("client", &PatchParams::default(), &merge).await.map(|o| json!(o)))?;
    let apply = PatchParams::apply("client").force();
    let object = Patch::Apply(manifest("three"));
    write("apply", api.patch("client", &apply, &object).await.map(|o| json!(o)))?;
    let deleted = api.delete("client", &DeleteParams::default()).await;
    write(
        "delete",
        deleted.map(|deleted| deleted.either(|object| json!(object), |status| json!(status))),
    )?;
    let params = WatchParams::default().labels("set=client").timeout(2);
    let events = match api.watch(&params, &version).await {
        Ok(events) => events.map(|event| event.map(|event| json!(event))).collect::<Vec<_>>().await,
        Err(error) => vec![Err(error)],
    };
    write("watch", events.into_iter().collect::<Result<Vec<_>, _>>().map(Value::from))?;
    Ok(())
}

fn run(work: impl Future<Output = Result<(), AnyError>>) {
    rustls::crypto::aws_lc_rs::default_provider().install_default().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(work).unwrap();
}

#[test]
#[ignore = "tests/real/test_consistency.py starts it"]
fn history() {
    run(record());
}

#[test]
#[ignore = "tests/real/test_clients.py starts it"]
fn all_operations() {
    run(operations());
}
