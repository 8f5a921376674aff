//! Reads on the connection of the prober whether an apiserver honours the parameters of watches that not every apiserver
//! honours ([`crate::upstream::capabilities`]).
//!
//! | wanted | read |
//! |---|---|
//! | shards | a list of no service with `shardSelector`: an apiserver that serves shards repeats the selector in `metadata.shardInfo`. Without the right to list services: `/metrics` |
//! | responses without `metadata.managedFields` | a list of the Service `kubernetes` of kube-apiserver with `drop=metadata.managedFields`, and if the answer has none, one without it. Without the right to list services, or if that Service has none: `/metrics` |
//! | equal servers | build and feature gates in `/metrics` |
//!
//! The reads run beside the probes and do not delay them. They begin when `/readyz` was answered. The pauses between them do
//! not depend on the connection: one that cannot be used for long costs no more reads, and no more connections.

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use fastrand::Rng;
use http::{HeaderValue, StatusCode};
use jackstay_core::kubernetes_features::{FeatureReader, KubernetesFeatures};
use jackstay_core::probe::question_pace::{QuestionAnswer, QuestionPace};
use jackstay_core::watch::parameters::Capability;
use jackstay_sys::clock;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::sync::Notify;
use tokio::time::{sleep, sleep_until, timeout};

use crate::upstream::Upstream;
use crate::upstream::capabilities::{ApiserverProcess, Capabilities, WantedCapabilities};
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::question::{fetch, fetch_accepting, fetch_pieces};

/// Limit of the list.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of `/metrics`, which may have many megabytes.
const METRICS_TIMEOUT: Duration = Duration::from_secs(30);
/// Shortest pause between two lists, if the connections of the prober end soon.
const LIST_PAUSE: Duration = Duration::from_secs(1);
/// The same for `/metrics`.
const METRICS_PAUSE: Duration = Duration::from_secs(10);
/// Interval of the checks whether the endpoint is ready.
const READY_CHECK: Duration = Duration::from_millis(100);
/// The list. No service can have this name. It is answered from the watch cache.
const SHARD: &str = "/api/v1/services?fieldSelector=metadata.name%3D_&resourceVersion=0&shardSelector=\
                     shardRange(object.metadata.uid,%270x0000000000000000%27,%270x8000000000000000%27)";
const METRICS: &str = "/metrics";
/// A list of the Service that every kube-apiserver has, from the watch cache. Kubelets may list services.
const SERVICE: &str = "/api/v1/services?fieldSelector=metadata.namespace%3Ddefault%2Cmetadata.name%3Dkubernetes&\
                       resourceVersion=0";
const WHOLE: &str = "application/json";
const WITHOUT_MANAGED_FIELDS: &str = "application/json;drop=metadata.managedFields";

/// Reads the capabilities of one endpoint.
#[derive(Debug)]
pub struct CapabilityReader {
    /// `None` while the prober has none.
    connection: RefCell<Option<Weak<Connection>>>,
    connection_changed: Notify,
    lists: RefCell<QuestionPace>,
    services: RefCell<QuestionPace>,
    metrics: RefCell<QuestionPace>,
}

/// The answer to one question.
#[derive(Debug, PartialEq, Eq)]
enum Answer<T> {
    Known(T),
    /// It will not be answered, for this reason.
    Refused(String),
    /// It may be answered later.
    Failed(String),
}

/// The beginning of the list.
#[derive(Deserialize)]
struct List {
    kind: String,
    metadata: ListMeta,
}

#[derive(Deserialize)]
struct ListMeta {
    #[serde(rename = "shardInfo")]
    shard_info: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Services {
    kind: String,
    #[serde(default)]
    items: Vec<Service>,
}

#[derive(Deserialize)]
struct Service {
    metadata: ServiceMeta,
}

#[derive(Deserialize)]
struct ServiceMeta {
    #[serde(rename = "managedFields")]
    managed_fields: Option<IgnoredAny>,
}

impl Default for CapabilityReader {
    fn default() -> Self {
        Self {
            connection: RefCell::default(),
            connection_changed: Notify::new(),
            lists: RefCell::new(QuestionPace::new(LIST_PAUSE)),
            services: RefCell::new(QuestionPace::new(LIST_PAUSE)),
            metrics: RefCell::new(QuestionPace::new(METRICS_PAUSE)),
        }
    }
}

impl CapabilityReader {
    /// Reads on `connection` from now on. One that replaces a connection may lead to another process.
    pub fn set_connection(&self, connection: &Rc<Connection>, endpoint: &Endpoint) {
        let new = Rc::downgrade(connection);
        match self.connection.replace(Some(Weak::clone(&new))) {
            Some(same) if same.ptr_eq(&new) => return,
            Some(_) => endpoint.replace_process(),
            None => {}
        }
        self.connection_changed.notify_one();
    }

    /// Called while the prober has no connection: the process of the apiserver may have ended. Returns when something is
    /// asked on the next one; `None` if nothing is wanted.
    pub fn connection_lost(&self, upstream: &Upstream, endpoint: &Endpoint) -> Option<Instant> {
        if self.connection.take().is_some() {
            endpoint.replace_process();
            self.connection_changed.notify_one();
        }
        self.next_question(&endpoint.process(), upstream.capabilities.wanted(), clock::now())
    }

    /// When something that is wanted and not known is asked; `None` if there is nothing.
    fn next_question(
        &self,
        process: &ApiserverProcess,
        wanted: WantedCapabilities,
        now: Instant,
    ) -> Option<Instant> {
        let known = process.capabilities();
        let shards = asks(wanted.sharded, known.sharded).then(|| self.next_list(&self.lists, now));
        let services = asks(wanted.managed_fields, known.managed_fields)
            .then(|| self.next_list(&self.services, now));
        let features =
            asks(wanted.features, known.features).then(|| self.metrics.borrow().next(now));
        shards.into_iter().chain(services).chain(features).min()
    }

    /// When a list is read again. While it is refused, `/metrics` answer in its place, so both are asked together.
    fn next_list(&self, list: &RefCell<QuestionPace>, now: Instant) -> Instant {
        let list = list.borrow();
        let next = list.next(now);
        if list.is_refused() { next.max(self.metrics.borrow().next(now)) } else { next }
    }

    /// Reads what is wanted and not known, until the future is dropped.
    pub async fn run(&self, upstream: &Upstream, endpoint: &Endpoint) {
        loop {
            let raised = upstream.capabilities.raised();
            let wanted = upstream.capabilities.wanted();
            let connection = self.connection.borrow().as_ref().and_then(Weak::upgrade);
            tokio::select! {
                biased;
                () = self.connection_changed.notified() => {}
                () = raised => {}
                () = self.read_wanted(upstream, endpoint, connection, wanted) => {}
            }
        }
    }

    /// Never completes.
    async fn read_wanted(
        &self,
        upstream: &Upstream,
        endpoint: &Endpoint,
        connection: Option<Rc<Connection>>,
        wanted: WantedCapabilities,
    ) {
        match connection {
            Some(connection) if wanted.any() => {
                self.read_repeatedly(upstream, endpoint, &connection, wanted).await;
            }
            None if wanted.any() && !upstream.has_probe_credential() => {
                let error = Some("jackstay has no credential for its probes".to_owned());
                let [sharded, managed_fields, features] = [Capability::Unavailable; 3];
                let none = Capabilities { sharded, managed_fields, features, error };
                endpoint.process().record(none);
                upstream.capabilities.notify_recorded();
            }
            _ => {}
        }
        std::future::pending::<()>().await;
    }

    /// Reads on one connection, whose other end is one process. Never completes.
    async fn read_repeatedly(
        &self,
        upstream: &Upstream,
        endpoint: &Endpoint,
        connection: &Rc<Connection>,
        wanted: WantedCapabilities,
    ) {
        let process = endpoint.process();
        loop {
            let is_live = connection.state() == ConnectionState::Live;
            process.set_in_doubt(!is_live);
            if !is_live {
                connection.changed().await;
                upstream.capabilities.notify_recorded();
                continue;
            }
            let is_ready = match endpoint.state() {
                EndpointState::Ready => true,
                EndpointState::Degraded => false,
                _ => {
                    sleep(READY_CHECK).await;
                    continue;
                }
            };
            match self.next_question(&process, wanted, clock::now()) {
                None => connection.changed().await,
                Some(at) if at > clock::now() => tokio::select! {
                    () = sleep_until(at.into()) => {}
                    () = connection.changed() => {}
                },
                Some(_) => {
                    let token = upstream.credentials.probe_token().and_then(|token| token.header());
                    let read = self.read(connection, token, &process, wanted, is_ready).await;
                    if let Some(reason) = &read.error {
                        let (upstream, endpoint) = (&*upstream.name, &*endpoint.label);
                        tracing::debug!(upstream, endpoint, reason, "capabilities unknown");
                    }
                    process.record(read);
                    upstream.capabilities.notify_recorded();
                }
            }
        }
    }

    /// Asks what is due. An apiserver that is not ready refuses users whose rights it has not read yet.
    async fn read(
        &self,
        connection: &Rc<Connection>,
        token: Option<HeaderValue>,
        process: &ApiserverProcess,
        wanted: WantedCapabilities,
        is_ready: bool,
    ) -> Capabilities {
        let known = process.capabilities();
        let now = clock::now();
        let mut shards_answer = None;
        if asks(wanted.sharded, known.sharded) && self.next_list(&self.lists, now) <= now {
            let list = shards(connection, token.clone());
            shards_answer = Some(ask(&self.lists, is_ready, list).await);
        }
        let mut fields_answer = None;
        if asks(wanted.managed_fields, known.managed_fields)
            && self.next_list(&self.services, now) <= now
        {
            let list = managed_fields(connection, token.clone());
            fields_answer = Some(ask(&self.services, is_ready, list).await);
        }
        let mut features_answer = None;
        let is_refused = [&shards_answer, &fields_answer]
            .into_iter()
            .any(|answer| matches!(answer, Some(Answer::Refused(_))));
        let now = clock::now();
        let is_due = self.metrics.borrow().next(now) <= now;
        if (is_refused || asks(wanted.features, known.features)) && is_due {
            let metrics = features(connection, token);
            features_answer = Some(ask(&self.metrics, is_ready, metrics).await);
        }
        interpret(shards_answer, fields_answer, features_answer)
    }
}

impl<T> Answer<T> {
    /// The answer of an endpoint that is ready, or of one that is not.
    fn on_endpoint(self, is_ready: bool) -> Self {
        match self {
            Self::Refused(error) if !is_ready => Self::Failed(error),
            other => other,
        }
    }

    fn kind(&self) -> QuestionAnswer {
        match self {
            Self::Known(_) => QuestionAnswer::Known,
            Self::Refused(_) => QuestionAnswer::Refused,
            Self::Failed(_) => QuestionAnswer::Failed,
        }
    }
}

/// Asks a question, and sets when it is asked again.
async fn ask<T>(
    pace: &RefCell<QuestionPace>,
    is_ready: bool,
    question: impl Future<Output = Answer<T>>,
) -> Answer<T> {
    pace.borrow_mut().asked(clock::now(), &mut Rng::new());
    let answer = question.await.on_endpoint(is_ready);
    pace.borrow_mut().answered(answer.kind(), clock::now(), &mut Rng::new());
    answer
}

fn asks(is_wanted: bool, capability: Capability) -> bool {
    is_wanted && !matches!(capability, Capability::Known(_))
}

/// What a list says, or the metrics in its place.
fn from_list_or_metrics(
    list: Option<&Answer<bool>>,
    metrics: Option<&Answer<KubernetesFeatures>>,
    number: impl Fn(&KubernetesFeatures) -> u64,
) -> Capability {
    use Answer::{Known, Refused};
    match (list, metrics) {
        (Some(Known(honoured)), _) => Capability::Known((*honoured).into()),
        (_, Some(Known(features))) => Capability::Known(number(features)),
        (Some(Refused(_)), Some(Refused(_))) => Capability::Unavailable,
        _ => Capability::Unread,
    }
}

/// What the answers to the questions that were asked say.
fn interpret(
    shards: Option<Answer<bool>>,
    fields: Option<Answer<bool>>,
    features: Option<Answer<KubernetesFeatures>>,
) -> Capabilities {
    use Answer::{Failed, Known, Refused};
    let metrics = features.as_ref();
    let sharded =
        from_list_or_metrics(shards.as_ref(), metrics, |features| features.sharded.into());
    let managed_fields =
        from_list_or_metrics(fields.as_ref(), metrics, |features| features.managed_fields.number());
    let fingerprint = match &features {
        Some(Known(features)) => Capability::Known(features.fingerprint),
        Some(Refused(_)) => Capability::Unavailable,
        Some(Failed(_)) | None => Capability::Unread,
    };
    let mut errors = Vec::new();
    if !matches!(features, Some(Known(_)))
        && let Some(Refused(error) | Failed(error)) =
            [shards, fields].into_iter().flatten().find(|list| !matches!(list, Known(_)))
    {
        errors.push(format!("list of services: {error}"));
    }
    if let Some(Refused(error) | Failed(error)) = features {
        errors.push(format!("{METRICS}: {error}"));
    }
    let error = (!errors.is_empty()).then(|| errors.join("; "));
    Capabilities { sharded, managed_fields, features: fingerprint, error }
}

/// Whether the apiserver serves shards. One that does not know the parameter, or whose gate is off, ignores it.
async fn shards(connection: &Rc<Connection>, token: Option<HeaderValue>) -> Answer<bool> {
    match timeout(LIST_TIMEOUT, fetch(connection, SHARD, token)).await {
        Ok(Ok((status, body))) => interpret_list(status, &body),
        Ok(Err(error)) => Answer::Failed(error.to_string()),
        Err(_) => late(LIST_TIMEOUT),
    }
}

fn interpret_list(status: StatusCode, body: &[u8]) -> Answer<bool> {
    if let Some(error) = interpret_status(status) {
        return error;
    }
    match serde_json::from_slice(body) {
        Ok(List { kind, metadata }) if kind == "ServiceList" => {
            Answer::Known(metadata.shard_info.is_some())
        }
        Ok(_) | Err(_) => Answer::Refused("no list".to_owned()),
    }
}

/// Whether the apiserver leaves out `metadata.managedFields` on request. One that does not know the parameter, or whose gate
/// is off, ignores it.
async fn managed_fields(connection: &Rc<Connection>, token: Option<HeaderValue>) -> Answer<bool> {
    let has_fields = async |accept| {
        let list = fetch_accepting(connection, SERVICE, token.clone(), accept);
        match timeout(LIST_TIMEOUT, list).await {
            Ok(Ok((status, body))) => interpret_service(status, &body),
            Ok(Err(error)) => Answer::Failed(error.to_string()),
            Err(_) => late(LIST_TIMEOUT),
        }
    };
    match has_fields(WITHOUT_MANAGED_FIELDS).await {
        Answer::Known(true) => Answer::Known(false),
        Answer::Known(false) => match has_fields(WHOLE).await {
            Answer::Known(false) => Answer::Refused("no managed fields".to_owned()),
            other => other,
        },
        other => other,
    }
}

/// Whether a service of the list has managed fields.
fn interpret_service(status: StatusCode, body: &[u8]) -> Answer<bool> {
    if let Some(error) = interpret_status(status) {
        return error;
    }
    match serde_json::from_slice(body) {
        Ok(Services { kind, items }) if kind == "ServiceList" => {
            Answer::Known(items.iter().any(|one| one.metadata.managed_fields.is_some()))
        }
        Ok(_) | Err(_) => Answer::Refused("no list".to_owned()),
    }
}

async fn features(
    connection: &Rc<Connection>,
    token: Option<HeaderValue>,
) -> Answer<KubernetesFeatures> {
    let mut reader = FeatureReader::default();
    let read = |piece: &[u8]| {
        if reader.push(piece) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    match timeout(METRICS_TIMEOUT, fetch_pieces(connection, METRICS, token, read)).await {
        Ok(Ok(status)) => interpret_status(status).unwrap_or_else(|| match reader.finish() {
            Ok(features) => Answer::Known(features),
            Err(error) => Answer::Refused(error.to_string()),
        }),
        Ok(Err(error)) => Answer::Failed(error.to_string()),
        Err(_) => late(METRICS_TIMEOUT),
    }
}

/// The answer that a status other than 200 is.
fn interpret_status<T>(status: StatusCode) -> Option<Answer<T>> {
    match status {
        StatusCode::OK => None,
        StatusCode::TOO_MANY_REQUESTS => Some(Answer::Failed(status.to_string())),
        _ if status.is_server_error() => Some(Answer::Failed(status.to_string())),
        _ => Some(Answer::Refused(status.to_string())),
    }
}

fn late<T>(limit: Duration) -> Answer<T> {
    Answer::Failed(format!("not answered within {} s", limit.as_secs()))
}

#[cfg(test)]
mod tests {
    use jackstay_core::probe::question_pace;

    use super::*;
    use Answer::{Failed, Known, Refused};
    use jackstay_core::kubernetes_features::ManagedFieldsOptOut;

    #[test]
    fn list_shows_whether_shards_are_served() {
        let interpret = |code: u16, body: &str| {
            interpret_list(StatusCode::from_u16(code).unwrap(), body.as_bytes())
        };
        let echo = r#"{"kind":"ServiceList","metadata":{"resourceVersion":"7","shardInfo":{"selector":"x"}},"items":[]}"#;
        assert_eq!(interpret(200, echo), Known(true));
        assert_eq!(
            interpret(
                200,
                r#"{"kind":"ServiceList","metadata":{"resourceVersion":"7"},"items":[]}"#
            ),
            Known(false)
        );
        assert_eq!(
            interpret(200, r#"{"kind":"ServiceList","metadata":{"shardInfo":null}}"#),
            Known(false)
        );
        for other in ["<html>", r#"{"kind":"Status","metadata":{}}"#] {
            assert_eq!(interpret(200, other), Refused("no list".to_owned()));
        }
        assert_eq!(interpret(403, echo), Refused("403 Forbidden".to_owned()));
        for code in [429, 500, 503, 504] {
            assert!(matches!(interpret(code, echo), Failed(_)), "{code}");
        }
    }

    #[test]
    fn metrics_answer_what_the_list_does_not() {
        let managed_fields = ManagedFieldsOptOut::NoGate(41);
        let features = KubernetesFeatures { fingerprint: 7, sharded: true, managed_fields };
        let on = || Some(Known(features));
        let (refused, failed) = (|| Some(Refused("r".to_owned())), || Some(Failed("f".to_owned())));
        let (unread, unavailable) = (Capability::Unread, Capability::Unavailable);
        let known = Capability::Known;
        // The answers; expected: shards, features, error.
        for (shards, features, expected) in [
            (Some(Known(true)), None, (known(1), unread, None)),
            (Some(Known(false)), on(), (known(0), known(7), None)),
            (None, on(), (known(1), known(7), None)),
            (refused().map(no_answer), on(), (known(1), known(7), None)),
            (Some(Known(true)), refused(), (known(1), unavailable, Some("/metrics: r"))),
            (
                refused().map(no_answer),
                refused(),
                (unavailable, unavailable, Some("list of services: r; /metrics: r")),
            ),
            (
                refused().map(no_answer),
                failed(),
                (unread, unread, Some("list of services: r; /metrics: f")),
            ),
            (failed().map(no_answer), None, (unread, unread, Some("list of services: f"))),
        ] {
            let (sharded, fingerprint, error) = expected;
            let error = error.map(str::to_owned);
            // The metrics say it, too.
            let managed_fields = match fingerprint {
                Capability::Known(_) => known(43),
                _ => unread,
            };
            let expected = Capabilities { sharded, managed_fields, features: fingerprint, error };
            assert_eq!(interpret(shards, None, features), expected);
        }
        // The answers about managed fields; expected: the capability, error.
        for (fields, features, expected) in [
            (Some(Known(true)), None, (known(1), None)),
            (Some(Known(false)), on(), (known(0), None)),
            (refused().map(no_answer), on(), (known(43), None)),
            (
                refused().map(no_answer),
                refused(),
                (unavailable, Some("list of services: r; /metrics: r")),
            ),
            (failed().map(no_answer), None, (unread, Some("list of services: f"))),
        ] {
            let read = interpret(None, fields, features);
            assert_eq!((read.managed_fields, read.error.as_deref()), expected);
        }
    }

    #[test]
    fn list_of_a_service_shows_whether_managed_fields_are_left_out() {
        let list = |metadata: &str| {
            let body = format!(
                r#"{{"kind":"ServiceList","metadata":{{}},"items":[{{"metadata":{metadata}}}]}}"#
            );
            interpret_service(StatusCode::OK, body.as_bytes())
        };
        assert_eq!(list(r#"{"name":"kubernetes","managedFields":[{"manager":"a"}]}"#), Known(true));
        assert_eq!(list(r#"{"name":"kubernetes"}"#), Known(false));
        let none = interpret_service(StatusCode::OK, br#"{"kind":"ServiceList","metadata":{}}"#);
        assert_eq!(none, Known(false));
        assert!(matches!(interpret_service(StatusCode::OK, b"{}"), Refused(_)));
        assert!(matches!(interpret_service(StatusCode::FORBIDDEN, b""), Refused(_)));
        assert!(matches!(interpret_service(StatusCode::BAD_GATEWAY, b""), Failed(_)));
    }

    #[test]
    fn refused_list_is_read_together_with_the_metrics() {
        let now = clock::now();
        let reader = CapabilityReader::default();
        let answer_list = |answer| {
            reader.lists.borrow_mut().asked(now, &mut Rng::new());
            reader.lists.borrow_mut().answered(answer, now, &mut Rng::new());
        };
        reader.metrics.borrow_mut().answered(QuestionAnswer::Known, now, &mut Rng::new());
        answer_list(QuestionAnswer::Failed);
        assert!(reader.next_list(&reader.lists, now) <= now + question_pace::FIRST_PAUSE);
        answer_list(QuestionAnswer::Refused);
        assert_eq!(reader.next_list(&reader.lists, now), now + METRICS_PAUSE);
        answer_list(QuestionAnswer::Known);
        assert_eq!(reader.next_list(&reader.lists, now), now + LIST_PAUSE);
    }

    fn no_answer(answer: Answer<KubernetesFeatures>) -> Answer<bool> {
        match answer {
            Refused(error) => Refused(error),
            Failed(error) => Failed(error),
            Known(_) => unreachable!("only for answers without a value"),
        }
    }
}
