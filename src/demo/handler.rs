//! The path of a request through a demo apiserver: record, obstruct, authenticate, authorise, do.

use crate::demo::apiserver::{Answer, Server};
use crate::demo::audit::Record;
use crate::demo::body::{self, Abort, Payload};
use crate::demo::cluster::{Object, Place};
use crate::demo::connection::Connection;
use crate::demo::failure::Failure;
use crate::demo::identity::{self, User};
use crate::demo::kinds;
use crate::demo::route::{Query, Target};
use crate::demo::selector::Selector;
use crate::demo::{discovery, patch, protobuf, resource, table, tunnel, watch};
use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Version};
use hyper::body::Incoming;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

const JSON: &str = "application/json";

/// Answers one request, whatever happens.
pub(super) async fn handle(
    server: Arc<Server>,
    connection: Arc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<Payload>, Infallible> {
    let (parts, body) = request.into_parts();
    let call = Call::new(server, connection, parts);
    let number = call.record();
    let in_flight = InFlight::new(&call.server);
    call.obstruct().await;
    let scripted = if call.is_health() { None } else { call.server.scripted(&call.parts) };
    let mut response = match scripted {
        Some(answer) => scripted_response(answer).await,
        None => match call.answer(number, body).await {
            Ok(response) => response,
            Err(failure) => refuse(&failure),
        },
    };
    if !call.is_health() && call.server.loses_answer() {
        std::future::pending::<()>().await;
    }
    drop(in_flight);
    if let Some(number) = number {
        let status = response.status().as_u16();
        call.server.cluster.audit().amend(number, |r| r.status = Some(status));
    }
    let audit_id = call.header("audit-id").unwrap_or("none").to_owned();
    call.decorate(&mut response, &audit_id);
    Ok(response)
}

/// A request on its way.
pub(super) struct Call {
    pub server: Arc<Server>,
    connection: Arc<Connection>,
    pub parts: Parts,
    pub query: Query,
    target: Option<Target>,
}

impl Call {
    fn new(server: Arc<Server>, connection: Arc<Connection>, parts: Parts) -> Self {
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        let target = Target::parse(parts.uri.path());
        Self { server, connection, parts, query, target }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.parts.headers.get(name).and_then(|v| v.to_str().ok())
    }

    fn is_health(&self) -> bool {
        matches!(self.parts.uri.path(), "/healthz" | "/livez" | "/readyz")
    }

    fn verb(&self) -> &'static str {
        match &self.target {
            Some(target) => target.verb(&self.parts.method, &self.query),
            None => match self.parts.method {
                Method::GET | Method::HEAD => "get",
                Method::POST => "post",
                _ => "other",
            },
        }
    }

    /// Writes the request down before anything happens to it.
    fn record(&self) -> Option<u64> {
        let audit = self.server.cluster.audit();
        self.server.counters.requests.fetch_add(1, Relaxed);
        if !audit.enabled() {
            return None;
        }
        let forwarded: Vec<_> = self
            .parts
            .headers
            .get_all("x-forwarded-for")
            .iter()
            .map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned())
            .collect();
        Some(audit.push(Record {
            time: SystemTime::now(),
            server: self.server.name.clone(),
            connection: self.connection.id,
            remote: self.connection.remote,
            version: self.parts.version,
            verb: self.verb(),
            path: self.parts.uri.path_and_query().map_or_else(String::new, ToString::to_string),
            user: String::new(),
            groups: Vec::new(),
            certificate_serial: self.connection.certificate.serial(),
            audit_id: self.header("audit-id").map(str::to_owned),
            header_names: self.parts.headers.iter().map(|(n, _)| n.to_string()).collect(),
            forwarded_for: (!forwarded.is_empty()).then(|| forwarded.join(", ")),
            status: None,
        }))
    }

    /// What the test wants to be slow is slow here.
    async fn obstruct(&self) {
        if *self.server.hang.borrow() {
            let mut hang = self.server.hang.subscribe();
            // The sender lives as long as the server.
            let _ = hang.wait_for(|hang| !hang).await;
        }
        let delay = self.server.delay_ms.load(Relaxed);
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
    }

    async fn answer(
        &self,
        number: Option<u64>,
        body: Incoming,
    ) -> Result<Response<Payload>, Failure> {
        let user = self.authenticate()?;
        let user = identity::impersonate(user, &self.parts.headers)
            .map_err(|message| Failure::new(403, "Forbidden", message))?;
        if let Some(number) = number {
            self.server.cluster.audit().amend(number, |r| {
                r.user.clone_from(&user.name);
                r.groups.clone_from(&user.groups);
            });
        }
        let path = self.parts.uri.path();
        if self.is_health() {
            return Ok(self.health());
        }
        if path != "/version" {
            self.authorise(&user)?;
        }
        if let Some(document) = discovery::answer(path) {
            return self.negotiate(200, &document);
        }
        match path {
            "/bytes" => {
                let size = self.query.get("size").parse().unwrap_or(0);
                return Ok(respond(200, "application/octet-stream", Payload::Filler(size)));
            }
            "/echo" => {
                let echo = Payload::Echo(Box::new(body));
                return Ok(respond(200, "application/octet-stream", echo));
            }
            "/apis/authentication.k8s.io/v1/selfsubjectreviews" => {
                let mut review = self.json_body(body).await?;
                review["status"]["userInfo"] = user.info();
                return self.negotiate(201, &review);
            }
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" => {
                let mut review = self.json_body(body).await?;
                review["status"] = json!({ "allowed": true, "reason": "the demo allows it" });
                return self.negotiate(201, &review);
            }
            _ => {}
        }
        match &self.target {
            Some(target) => self.resource(target, body).await,
            None => Err(Failure::no_such_path()),
        }
    }

    /// 401, or who it is. Nobodies are sent away from their HTTP/2 connection after this answer.
    fn authenticate(&self) -> Result<User, Failure> {
        let found = self.server.cluster.with_tokens(|tokens| {
            identity::authenticate(&self.connection.certificate, &self.parts.headers, tokens)
        });
        let unproven = found.as_ref().map_or(true, User::is_anonymous);
        if unproven && self.parts.version == Version::HTTP_2 && self.server.mitigation.load(Relaxed)
        {
            self.connection.goaway.notify_one();
        }
        found.map_err(|_| Failure::new(401, "Unauthorized", "Unauthorized"))
    }

    fn authorise(&self, user: &User) -> Result<(), Failure> {
        if !user.is_anonymous() || self.server.anonymous.load(Relaxed) {
            return Ok(());
        }
        let message = match &self.target {
            Some(target) => format!(
                "{} is forbidden: User \"{}\" cannot {} resource \"{}\" in API group \"{}\"",
                target.kind.qualified(),
                user.name,
                self.verb(),
                target.kind.plural,
                target.kind.group
            ),
            None => format!(
                "forbidden: User \"{}\" cannot {} path \"{}\"",
                user.name,
                self.verb(),
                self.parts.uri.path()
            ),
        };
        Err(Failure::new(403, "Forbidden", message))
    }

    fn health(&self) -> Response<Payload> {
        let path = self.parts.uri.path();
        if path == "/readyz" && !self.server.ready.load(Relaxed) {
            let text = "[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed\n";
            return respond(500, "text/plain; charset=utf-8", Payload::full(text));
        }
        respond(200, "text/plain; charset=utf-8", Payload::full("ok"))
    }

    async fn resource(
        &self,
        target: &Target,
        body: Incoming,
    ) -> Result<Response<Payload>, Failure> {
        let place = Place { kind: target.kind, namespace: &target.namespace, name: &target.name };
        let cluster = &self.server.cluster;
        let dry_run = self.query.all("dryRun").any(|v| v == "All");
        match target.subresource.as_str() {
            "" => {}
            "status" if target.kind.status => {}
            name if *target.kind == kinds::PODS => {
                cluster.get(place)?;
                return self.pod_subresource(place, name, body).await;
            }
            "finalize" => {}
            _ => return Err(Failure::no_such_path()),
        }
        match self.verb() {
            "watch" => self.watch(target),
            "get" => self.object(200, place, &*cluster.get(place)?),
            "list" => self.list(target),
            "create" if target.name.is_empty() => {
                let value = self.json_body(body).await?;
                let namespace = home(target, &value);
                let object = cluster.create(target.kind, &namespace, value, dry_run)?;
                self.object(201, place, &object)
            }
            "update" => {
                let value = self.json_body(body).await?;
                let object = cluster.modify(place, dry_run, |now| {
                    Ok(resource::limit(target.kind, &target.subresource, now, value))
                })?;
                self.object(200, place, &object)
            }
            "patch" => self.patch(target, place, body, dry_run).await,
            "delete" => {
                let options = self.json_body(body).await?;
                let object = cluster.delete(place, &options["preconditions"], dry_run)?;
                let uid = &object.value["metadata"]["uid"];
                let details = json!({ "name": place.name, "kind": place.kind.plural, "group": place.kind.group, "uid": uid });
                self.negotiate(200, &success(&details))
            }
            "deletecollection" => {
                let (objects, _) =
                    cluster.list(target.kind, &target.namespace, &self.selector(target)?);
                for object in &objects {
                    let meta = &object.value["metadata"];
                    let name = meta["name"].as_str().unwrap_or_default();
                    let namespace = meta["namespace"].as_str().unwrap_or_default();
                    // Someone else may have deleted it meanwhile, which is as good.
                    let _ = cluster.delete(
                        Place { kind: target.kind, namespace, name },
                        &Value::Null,
                        dry_run,
                    );
                }
                self.negotiate(200, &success(&json!({ "kind": target.kind.plural })))
            }
            _ => Err(Failure::method_not_allowed()),
        }
    }

    async fn patch(
        &self,
        target: &Target,
        place: Place<'_>,
        body: Incoming,
        dry_run: bool,
    ) -> Result<Response<Payload>, Failure> {
        let content_type = self.header(CONTENT_TYPE.as_str()).unwrap_or_default().to_owned();
        let changes = self.json_body(body).await?;
        let cluster = &self.server.cluster;
        let apply = content_type.starts_with("application/apply-patch");
        let patched = cluster.modify(place, dry_run, |now| {
            let next = patch::apply(now, &content_type, &changes)?;
            Ok(resource::limit(target.kind, &target.subresource, now, next))
        });
        match patched {
            Err(failure) if apply && failure.code == 404 && target.subresource.is_empty() => {
                let object = cluster.create(target.kind, &target.namespace, changes, dry_run)?;
                self.object(201, place, &object)
            }
            other => self.object(200, place, &*other?),
        }
    }

    async fn pod_subresource(
        &self,
        place: Place<'_>,
        name: &str,
        body: Incoming,
    ) -> Result<Response<Payload>, Failure> {
        match name {
            "log" => Ok(tunnel::log(self, place)),
            "exec" | "attach" | "portforward" => tunnel::upgrade(self, place, name, body),
            "eviction" => {
                self.json_body(body).await?;
                self.server.cluster.delete(place, &Value::Null, false)?;
                self.negotiate(201, &success(&Value::Null))
            }
            "binding" => {
                let binding = self.json_body(body).await?;
                self.server.cluster.modify(place, false, |now| {
                    let mut next = now.clone();
                    next["spec"]["nodeName"] = binding["target"]["name"].clone();
                    Ok(next)
                })?;
                self.negotiate(201, &success(&Value::Null))
            }
            _ => Err(Failure::no_such_path()),
        }
    }

    fn watch(&self, target: &Target) -> Result<Response<Payload>, Failure> {
        let accept = self.accept();
        let format = if accept.table {
            watch::Format::Table
        } else if accept.protobuf {
            watch::Format::Protobuf
        } else if accept.json {
            watch::Format::Json
        } else {
            return Err(not_acceptable());
        };
        let selector = self.selector(target)?;
        watch::start(&self.server, target, &self.query, selector, format)
    }

    fn selector(&self, target: &Target) -> Result<Selector, Failure> {
        let selector =
            Selector::parse(self.query.get("labelSelector"), self.query.get("fieldSelector"))?;
        Ok(if target.name.is_empty() { selector } else { selector.named(&target.name) })
    }

    fn list(&self, target: &Target) -> Result<Response<Payload>, Failure> {
        let cluster = &self.server.cluster;
        let (mut objects, mut version) =
            cluster.list(target.kind, &target.namespace, &self.selector(target)?);
        let asked = self.query.get("resourceVersion").parse().unwrap_or(0);
        if asked > version {
            return Err(Failure::new(
                504,
                "Timeout",
                format!("Too large resource version: {asked}, current: {version}"),
            ));
        }
        let after = self.query.get("continue");
        if !after.is_empty() {
            let token = after.split_once(':').and_then(|(v, key)| Some((v.parse().ok()?, key)));
            let Some((of, key)) = token else {
                return Err(Failure::bad_request("continue key is not valid"));
            };
            cluster.reaches(of)?;
            version = of;
            objects.retain(|o| object_key(o).as_str() > key);
        }
        let limit = self.query.get("limit").parse().unwrap_or(0);
        let mut meta = json!({ "resourceVersion": version.to_string() });
        if limit > 0 && objects.len() > limit {
            meta["remainingItemCount"] = (objects.len() - limit).into();
            objects.truncate(limit);
            let last = objects.last().map(|o| object_key(o)).unwrap_or_default();
            meta["continue"] = format!("{version}:{last}").into();
        }
        let accept = self.accept();
        if accept.table {
            let objects: Vec<_> = objects.iter().map(AsRef::as_ref).collect();
            let columns = table::definitions(target.kind);
            let include = self.query.get("includeObject");
            let table = table::table(target.kind, &objects, &columns, include, &meta);
            return Ok(respond(200, JSON, Payload::full(table.to_string())));
        }
        if !accept.json {
            return Err(not_acceptable());
        }
        let head = format!(
            "{{\"kind\":\"{}List\",\"apiVersion\":\"{}\",\"metadata\":{meta},\"items\":[",
            target.kind.kind,
            target.kind.api_version()
        );
        let size: usize = objects.iter().map(|o| o.json.len() + 1).sum();
        let mut list = BytesMut::with_capacity(head.len() + size + 2);
        list.extend_from_slice(head.as_bytes());
        for (at, object) in objects.iter().enumerate() {
            if at > 0 {
                list.extend_from_slice(b",");
            }
            list.extend_from_slice(&object.json);
        }
        list.extend_from_slice(b"]}");
        Ok(respond(200, JSON, Payload::full(list.freeze())))
    }

    /// An object, as JSON or as a table of one row.
    fn object(
        &self,
        code: u16,
        place: Place<'_>,
        object: &Object,
    ) -> Result<Response<Payload>, Failure> {
        let accept = self.accept();
        if accept.table {
            let columns = table::definitions(place.kind);
            let meta = json!({ "resourceVersion": object.version.to_string() });
            let include = self.query.get("includeObject");
            let table = table::table(place.kind, &[object], &columns, include, &meta);
            return Ok(respond(code, JSON, Payload::full(table.to_string())));
        }
        if !accept.json {
            return Err(not_acceptable());
        }
        Ok(respond(code, JSON, Payload::full(object.json.clone())))
    }

    fn negotiate(&self, code: u16, value: &Value) -> Result<Response<Payload>, Failure> {
        if !self.accept().json {
            return Err(not_acceptable());
        }
        Ok(respond(code, JSON, Payload::full(value.to_string())))
    }

    fn accept(&self) -> Accept {
        Accept::parse(&self.parts.headers)
    }

    /// The body as JSON; an empty one is null.
    async fn json_body(&self, body: Incoming) -> Result<Value, Failure> {
        let bytes = body::read(body).await?;
        if bytes.is_empty() {
            return Ok(json!({}));
        }
        if self.header(CONTENT_TYPE.as_str()).is_some_and(|t| t.contains("protobuf")) {
            return protobuf::decode(&bytes).ok_or_else(|| {
                let why = "the demo does not read this kind in protobuf; send JSON";
                Failure::new(415, "UnsupportedMediaType", why)
            });
        }
        serde_json::from_slice(&bytes)
            .map_err(|error| Failure::bad_request(format!("cannot parse the body: {error}")))
    }

    /// The headers that kube-apiserver adds to every answer.
    fn decorate(&self, response: &mut Response<Payload>, audit_id: &str) {
        let headers = response.headers_mut();
        if let Ok(value) = HeaderValue::from_str(audit_id) {
            headers.insert("audit-id", value);
        }
        headers.insert("cache-control", HeaderValue::from_static("no-cache, private"));
        if self.parts.method == Method::HEAD
            && let Payload::Full(Some(bytes)) = response.body()
        {
            let size = bytes.len();
            response.headers_mut().insert(CONTENT_LENGTH, size.into());
            *response.body_mut() = Payload::Full(None);
        }
    }
}

/// What the client can read.
struct Accept {
    json: bool,
    table: bool,
    protobuf: bool,
}

impl Accept {
    /// `table` and `protobuf` are set only where the client prefers them to plain JSON.
    fn parse(headers: &HeaderMap) -> Self {
        let mut found = Self { json: false, table: false, protobuf: false };
        let values = headers.get_all(ACCEPT);
        let values: Vec<_> = values.iter().filter_map(|v| v.to_str().ok()).collect();
        for item in values.iter().flat_map(|v| v.split(',')).map(str::trim) {
            let kind = item.split(';').next().unwrap_or_default();
            match kind {
                "application/json" if item.contains("as=Table") => found.table |= !found.json,
                "application/json" if item.contains("as=") => {}
                "application/json" | "application/*" | "*/*" => found.json = true,
                "application/vnd.kubernetes.protobuf" => found.protobuf |= !found.json,
                _ => {}
            }
        }
        found.json |= values.is_empty();
        found
    }
}

struct InFlight(Arc<Server>);

impl InFlight {
    fn new(server: &Arc<Server>) -> Self {
        server.counters.in_flight.fetch_add(1, Relaxed);
        Self(server.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.counters.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Events may be posted to the whole cluster and say themselves where they belong.
fn home(target: &Target, value: &Value) -> String {
    let named = value["metadata"]["namespace"].as_str().unwrap_or_default();
    let home = if target.namespace.is_empty() { named } else { &target.namespace };
    if target.kind.namespaced { home.to_owned() } else { String::new() }
}

fn object_key(object: &Object) -> String {
    let meta = &object.value["metadata"];
    let part = |field: &str| meta[field].as_str().unwrap_or_default();
    format!("{}/{}", part("namespace"), part("name"))
}

fn success(details: &Value) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": details,
    })
}

fn not_acceptable() -> Failure {
    Failure::new(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json",
    )
}

pub(super) fn respond(
    code: u16,
    content_type: &'static str,
    payload: Payload,
) -> Response<Payload> {
    let mut response = Response::new(payload);
    *response.status_mut() =
        http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn refuse(failure: &Failure) -> Response<Payload> {
    respond(failure.code, JSON, Payload::full(failure.status().to_string()))
}

async fn scripted_response(answer: Answer) -> Response<Payload> {
    let payload = if answer.cut {
        let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, Abort>>(2);
        // There is room for both, so neither waits nor fails.
        let _ = sender.send(Ok(answer.body)).await;
        let _ = sender.send(Err(Abort)).await;
        Payload::Stream(receiver)
    } else {
        Payload::full(answer.body)
    };
    let mut response = respond(answer.status, JSON, payload);
    for (name, value) in &answer.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
