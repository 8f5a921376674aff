//! Handles a request: records it in the audit, applies the injected faults, authenticates the user,
//! authorizes the request and responds. Requests for resources are in `verbs`.

mod verbs;

use crate::aggregated;
use crate::audit::Record;
use crate::body::ResponseBody;
use crate::compression;
use crate::discovery;
use crate::identity::{self, User};
use crate::lock;
use crate::route::{Query, Target};
use crate::state::{ConnectionInfo, Counted, ScriptedResponse, ServerState};
use crate::status_error::StatusError;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, RETRY_AFTER};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request, Response, Version};
use hyper::body::Incoming;
use serde_json::json;
use std::convert::Infallible;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

pub(super) const JSON: &str = "application/json";

/// The group whose users may get `/metrics`, for reviews.
const METRICS_READERS: &str = "metrics-readers";

/// The paths of objects that ask a question.
const REVIEWS: [&str; 4] = [
    "/apis/authentication.k8s.io/v1/selfsubjectreviews",
    "/apis/authentication.k8s.io/v1/tokenreviews",
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
    "/apis/authorization.k8s.io/v1/subjectaccessreviews",
];

/// Encoding of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Json,
    /// A `Table` object in JSON, which kubectl prints.
    Table,
    Protobuf,
    Cbor,
    /// A `Table` object in CBOR.
    CborTable,
}

/// Responds to one request.
pub(super) async fn handle(
    server: Arc<ServerState>,
    connection: Arc<ConnectionInfo>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let clock = server.cluster.clock();
    let mut response = response_to(server, connection, request).await;
    if let Ok(date) = HeaderValue::from_str(&httpdate::fmt_http_date(clock.now())) {
        response.headers_mut().entry(DATE).or_insert(date);
    }
    Ok(response)
}

async fn response_to(
    server: Arc<ServerState>,
    connection: Arc<ConnectionInfo>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let (mut parts, body) = request.into_parts();
    if let Some(status) = server.gateway.forward(&mut parts, &server.refused) {
        let body = ResponseBody::full(format!("{status} page not found\n"));
        return respond(status, "text/plain; charset=utf-8", body);
    }
    let context = RequestContext::new(server, connection, parts);
    let audit_number = context.record();
    let in_flight = Counted::new(&context.server, |counters| &counters.in_flight);
    let own_request = context
        .is_of_prober()
        .then(|| Counted::new(&context.server, |counters| &counters.own_requests_of_jackstay));
    let is_probe = context.is_probe();
    let scripted = if is_probe {
        context.apply_delays().await;
        None
    } else if context.is_too_many() {
        Some(ScriptedResponse::too_many_requests())
    } else {
        context.apply_delays().await;
        context.server.scripted(&context.parts)
    };
    let mut response = match scripted {
        Some(scripted) => scripted_response(scripted).await,
        None => context.serve(audit_number, body).await.unwrap_or_else(|e| error_response(&e)),
    };
    if context.server.compresses_responses && context.accepts_gzip() {
        compression::compress(&mut response);
    }
    if !is_probe && context.server.loses_response() {
        // The request remains in flight until the client gives up.
        std::future::pending::<()>().await;
    }
    drop((in_flight, own_request));
    if !is_probe && fastrand::f64() < context.server.faults.borrow().goaway_chance {
        context.connection.goaway.notify_one();
    }
    if let Some(number) = audit_number {
        let status = response.status().as_u16();
        context.server.cluster.audit().amend(number, |r| r.status = Some(status));
    }
    context.add_common_headers(&mut response);
    response
}

/// A request with its server and its connection.
pub(super) struct RequestContext {
    pub server: Arc<ServerState>,
    connection: Arc<ConnectionInfo>,
    pub parts: Parts,
    pub query: Query,
    target: Option<Target>,
}

impl RequestContext {
    fn new(server: Arc<ServerState>, connection: Arc<ConnectionInfo>, parts: Parts) -> Self {
        let query = Query::parse(parts.uri.query().unwrap_or_default());
        let target = Target::parse(parts.uri.path());
        Self { server, connection, parts, query, target }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.parts.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// Whether the client accepts compressed responses.
    pub fn accepts_gzip(&self) -> bool {
        self.header("accept-encoding")
            .is_some_and(|codings| codings.split(',').any(|coding| coding.trim() == "gzip"))
    }

    fn is_health(&self) -> bool {
        matches!(self.parts.uri.path(), "/healthz" | "/livez" | "/readyz")
    }

    /// Whether jackstay asks for itself.
    fn is_of_prober(&self) -> bool {
        self.header("user-agent") == Some("jackstay-readyz")
    }

    /// Whether it is a health check, or a prober reads the version with one.
    fn is_probe(&self) -> bool {
        self.is_health() || self.is_of_prober() && self.parts.uri.path() == "/version"
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

    /// Adds the request to the audit; returns its number there.
    fn record(&self) -> Option<u64> {
        let audit = self.server.cluster.audit();
        self.server.counters.requests.fetch_add(1, Relaxed);
        if !audit.enabled() {
            return None;
        }
        let forwarded = self.parts.headers.get_all("x-forwarded-for").iter();
        let forwarded: Vec<_> =
            forwarded.map(|value| String::from_utf8_lossy(value.as_bytes())).collect();
        Some(audit.push(Record {
            time: self.server.cluster.clock().now(),
            server: self.server.name.clone(),
            connection: self.connection.id,
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

    /// Whether the limit of requests in flight rejects this one.
    fn is_too_many(&self) -> bool {
        let limit = self.server.faults.borrow().max_in_flight;
        let is_above = |limit| self.server.counters.in_flight.load(Relaxed) > limit;
        limit.is_some_and(is_above) && self.verb() != "watch"
    }

    /// Waits as long as the faults `hang`, `delay` and `service_time` demand.
    async fn apply_delays(&self) {
        let mut faults = self.server.faults.subscribe();
        // The sender is dropped only with the server.
        let _ = faults.wait_for(|faults| !faults.hang).await;
        if faults.borrow().hang_paths.contains(&self.parts.uri.path()) {
            // Until the client gives up.
            std::future::pending::<()>().await;
        }
        let service_time = faults.borrow().service_time.as_ref().map_or(Duration::ZERO, draw);
        let delay = faults.borrow().delay + service_time;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
    }

    async fn serve(
        &self,
        audit_number: Option<u64>,
        body: Incoming,
    ) -> Result<Response<ResponseBody>, StatusError> {
        let user = self.authenticate()?;
        let user = identity::impersonate(user, &self.parts.headers)
            .map_err(|message| StatusError::new(403, "Forbidden", message))?;
        if let Some(number) = audit_number {
            self.server.cluster.audit().amend(number, |r| {
                r.user.clone_from(&user.name);
                r.groups.clone_from(&user.groups);
            });
        }
        let path = self.parts.uri.path();
        if self.server.faults.borrow().rbac_empty && !user.is_master() {
            return Err(self.forbidden(&user));
        }
        if self.is_health() {
            return Ok(self.health());
        }
        if path == "/version" {
            let version = lock(&self.server.version).clone();
            return self.negotiate(200, &discovery::version(&version));
        }
        self.authorize(&user)?;
        if aggregated::is_forwarded(path)
            && let Some(failure) = self.server.forward_to_aggregated().await
        {
            return Ok(scripted_response(failure).await);
        }
        if path.trim_end_matches('/') == "/api" {
            // Its name, because clients may connect to the address of a relay.
            let advertised = self.server.faults.borrow().advertised_address;
            let address = advertised.unwrap_or(&self.server.name);
            return self.negotiate(200, &discovery::api_versions(address));
        }
        if let Some(document) = discovery::document(path) {
            return self.negotiate(200, &document);
        }
        match path {
            "/metrics" => return Ok(self.metrics()),
            "/bytes" => {
                let size = self.query.get("size").parse().unwrap_or(0);
                return Ok(respond(200, "application/octet-stream", ResponseBody::Filler(size)));
            }
            "/echo" => {
                let echo = ResponseBody::Echo(Box::new(body));
                return Ok(respond(200, "application/octet-stream", echo));
            }
            path if REVIEWS.contains(&path) => return self.review(path, body, &user).await,
            _ => {}
        }
        match &self.target {
            Some(target) => self.resource(target, body).await,
            None => Err(StatusError::no_such_path()),
        }
    }

    /// The answer to an object that asks a question, and is not stored.
    async fn review(
        &self,
        path: &str,
        body: Incoming,
        user: &User,
    ) -> Result<Response<ResponseBody>, StatusError> {
        let mut review = self.json_body(body).await?;
        match path.rsplit('/').next() {
            Some("selfsubjectreviews") => review["status"]["userInfo"] = user.user_info(),
            Some("tokenreviews") => {
                let token = review["spec"]["token"].as_str().unwrap_or_default();
                review["status"] = match self.server.cluster.user_of(token) {
                    Some(user) => json!({ "authenticated": true, "user": user.user_info() }),
                    None => json!({ "error": "invalid bearer token" }),
                };
            }
            Some("subjectaccessreviews") => {
                let attributes = json!({ "path": "/metrics", "verb": "get" });
                let groups = review["spec"]["groups"].as_array();
                let is_reader =
                    groups.is_some_and(|groups| groups.contains(&json!(METRICS_READERS)));
                let allowed = is_reader && review["spec"]["nonResourceAttributes"] == attributes;
                review["status"] = json!({ "allowed": allowed });
            }
            _ => review["status"] = json!({ "allowed": true, "reason": "the demo allows it" }),
        }
        self.negotiate(201, &review)
    }

    /// The user of the request, or a 401. An unauthenticated request on HTTP/2 also triggers GOAWAY
    /// (`UnauthenticatedHTTP2DOSMitigation`).
    fn authenticate(&self) -> Result<User, StatusError> {
        let user_of = |token: &str| self.server.cluster.user_of(token);
        let certificate = &self.connection.certificate;
        let user = identity::authenticate(certificate, &self.parts.headers, user_of);
        if user.as_ref().is_none_or(User::is_anonymous) && self.parts.version == Version::HTTP_2 {
            self.connection.goaway.notify_one();
        }
        user.ok_or_else(|| StatusError::new(401, "Unauthorized", "Unauthorized"))
    }

    /// Permits every authenticated user.
    fn authorize(&self, user: &User) -> Result<(), StatusError> {
        if user.is_anonymous() { Err(self.forbidden(user)) } else { Ok(()) }
    }

    /// The 403 for a user without the right to do this.
    fn forbidden(&self, user: &User) -> StatusError {
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
        StatusError::new(403, "Forbidden", message)
    }

    fn health(&self) -> Response<ResponseBody> {
        let path = self.parts.uri.path();
        if path == "/livez" && self.server.faults.borrow().dead {
            let text = "[+]ping ok\n[-]etcd failed: reason withheld\nlivez check failed\n";
            return respond(500, "text/plain; charset=utf-8", ResponseBody::full(text));
        }
        if path == "/readyz" && (self.server.faults.borrow().unready || self.server.is_draining()) {
            let text = "[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed\n";
            return respond(500, "text/plain; charset=utf-8", ResponseBody::full(text));
        }
        respond(200, "text/plain; charset=utf-8", ResponseBody::full("ok"))
    }

    /// The metrics of a few requests, and of the build and the feature gates.
    fn metrics(&self) -> Response<ResponseBody> {
        let faults = self.server.faults.borrow();
        let (shards, cbor) = (!faults.sharding_disabled, !faults.cbor_disabled);
        let text = format!(
            "# TYPE apiserver_request_total counter\n\
             apiserver_request_total{{code=\"200\",verb=\"GET\"}} {}\n\
             # TYPE kubernetes_build_info gauge\n\
             kubernetes_build_info{{git_version=\"{}\"}} 1\n\
             # TYPE kubernetes_feature_enabled gauge\n\
             kubernetes_feature_enabled{{name=\"CBORServingAndStorage\",stage=\"ALPHA\"}} {}\n{}\
             kubernetes_feature_enabled{{name=\"ShardedListAndWatch\",stage=\"ALPHA\"}} {}\n\
             # TYPE process_open_fds gauge\n\
             process_open_fds 12\n",
            self.server.counters.requests.load(Relaxed),
            lock(&self.server.version),
            u8::from(cbor),
            faults.managed_fields_opt_out.map_or_else(String::new, |on| {
                let on = u8::from(on);
                format!("kubernetes_feature_enabled{{name=\"ManagedFieldsOptOut\"}} {on}\n")
            }),
            u8::from(shards),
        );
        respond(200, "text/plain; version=0.0.4; charset=utf-8", ResponseBody::full(text))
    }

    /// Adds the headers that every kube-apiserver response has, and removes the body of a HEAD response.
    fn add_common_headers(&self, response: &mut Response<ResponseBody>) {
        let none = HeaderValue::from_static("none");
        let audit_id = self.parts.headers.get("audit-id").cloned().unwrap_or(none);
        let headers = response.headers_mut();
        headers.insert("audit-id", audit_id);
        headers.insert("cache-control", HeaderValue::from_static("no-cache, private"));
        if self.parts.method == Method::HEAD
            && let ResponseBody::Full(Some(bytes)) = response.body()
        {
            let size = bytes.len();
            response.headers_mut().insert(CONTENT_LENGTH, size.into());
            *response.body_mut() = ResponseBody::Full(None);
        }
    }
}

/// A time in a range.
fn draw(range: &RangeInclusive<Duration>) -> Duration {
    let nanos = |time: &Duration| time.as_nanos() as u64;
    let (start, end) = (nanos(range.start()), nanos(range.end()));
    Duration::from_nanos(fastrand::u64(start..=end.max(start)))
}

fn error_response(error: &StatusError) -> Response<ResponseBody> {
    let body = ResponseBody::full(error.status().to_string());
    let mut response = respond(error.code, JSON, body);
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

pub(super) fn respond(
    code: u16,
    content_type: &'static str,
    body: ResponseBody,
) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() =
        http::StatusCode::from_u16(code).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

async fn scripted_response(scripted: ScriptedResponse) -> Response<ResponseBody> {
    let body = if scripted.cut {
        let (sender, receiver) = tokio::sync::mpsc::channel(2);
        // The channel has capacity for both messages.
        let _ = sender.send(Ok(scripted.body)).await;
        let _ = sender.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
        ResponseBody::Stream(receiver)
    } else {
        ResponseBody::full(scripted.body)
    };
    let mut response = respond(scripted.status, JSON, body);
    for (name, value) in &scripted.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}
