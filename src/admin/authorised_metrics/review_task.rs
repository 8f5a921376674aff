//! Asks the apiservers for reviews, over connections of jackstay.
//!
//! The credential is that of the readiness probes: the configured one, or the first loaded identity, which beside kubelet
//! is kubelet's own. The role `system:node` may create both reviews (kubernetes, `bootstrappolicy/policy.go`, `NodeRules`),
//! and so may each account with the role `system:auth-delegator`.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, header};
use jackstay_sys::clock;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::review_cache::Verdict;
use super::reviews::{Credential, Question};
use crate::observe::RepeatFilter;
use crate::upstream::Upstream;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::pool::{Pool, StreamRequest, Unavailable};

/// Maximum time of both reviews together. Prometheus waits for 10 s by default.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum of reviews at once, and of those that wait.
const MAX_REVIEWS: usize = 8;
const MAX_WAITING: usize = 16;
/// Maximum of the answer to a review in bytes.
const MAX_ANSWER: usize = 64 << 10;
/// Failures are logged at most once in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

const TOKEN_REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
const ACCESS_REVIEWS: &str = "/apis/authorization.k8s.io/v1/subjectaccessreviews";

/// Answers the questions of a [`Reviewer`](super::reviews::Reviewer).
struct ReviewTask {
    upstream: Arc<Upstream>,
    pool: Rc<Pool>,
    warnings: RefCell<RepeatFilter>,
}

/// Returns the channel for questions, and the future that answers them until the channel is dropped.
pub fn start(
    upstream: &Arc<Upstream>,
) -> (mpsc::Sender<Question>, impl Future<Output = ()> + use<>) {
    let (questions, mut queue) = mpsc::channel::<Question>(MAX_WAITING);
    let pool = Pool::for_internal_requests(Arc::clone(upstream));
    let upstream = Arc::clone(upstream);
    let run = async move {
        let mut tasks = JoinSet::new();
        let mut reviews = JoinSet::new();
        tasks.spawn_local(Pool::run(Rc::clone(&pool)));
        let close_pool = ClosePoolOnDrop(Rc::clone(&pool));
        let warnings = RefCell::new(RepeatFilter::new(LOG_INTERVAL));
        let task = Rc::new(ReviewTask { upstream, pool, warnings });
        while let Some(question) = queue.recv().await {
            while reviews.len() >= MAX_REVIEWS {
                reviews.join_next().await;
            }
            reviews.spawn_local(Rc::clone(&task).answer(question));
            while reviews.try_join_next().is_some() {}
        }
        drop(close_pool);
    };
    (questions, run)
}

/// Closes the pool's connections when the task ends or is aborted.
struct ClosePoolOnDrop(Rc<Pool>);

impl Drop for ClosePoolOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl ReviewTask {
    async fn answer(self: Rc<Self>, Question { credential, answer }: Question) {
        let verdict = timeout(REVIEW_TIMEOUT, self.verdict(&credential)).await;
        let verdict = verdict
            .unwrap_or_else(|_| Err(format!("not answered within {} s", REVIEW_TIMEOUT.as_secs())));
        if let Err(error) = &verdict
            && self.warnings.borrow_mut().admit("review", clock::now()).is_some()
        {
            tracing::warn!(
                upstream = &*self.upstream.name,
                error,
                "admin.metrics_bind: a credential cannot be reviewed; known ones are served for an hour"
            );
        }
        // The client may have left.
        let _ = answer.send(verdict);
    }

    async fn verdict(&self, credential: &Credential) -> Result<Verdict, String> {
        let user = match credential {
            Credential::Token(token) => {
                let review = json!({
                    "apiVersion": "authentication.k8s.io/v1",
                    "kind": "TokenReview",
                    "spec": { "token": token },
                });
                match user_of(&self.post(TOKEN_REVIEWS, &review).await?)? {
                    Some(user) => user,
                    None => return Ok(Verdict::Unauthenticated),
                }
            }
            Credential::Certificate { name, groups } => {
                let groups = groups.iter().map(String::as_str).chain(["system:authenticated"]);
                json!({ "user": name, "groups": groups.collect::<Vec<_>>() })
            }
        };
        let answer = self.post(ACCESS_REVIEWS, &access_review(user)).await?;
        Ok(if is_allowed(&answer)? { Verdict::Allowed } else { Verdict::Forbidden })
    }

    /// Creates an object that is not stored, and returns the answer.
    async fn post(&self, path: &str, object: &Value) -> Result<Value, String> {
        let class = self.pool.class(CredentialClass::Probe);
        let permit = self.pool.acquire(&class, StreamRequest::for_client(None)).await;
        let mut permit = permit.map_err(|unavailable| match unavailable {
            Unavailable::Unreachable(why) => format!("no apiserver: {why}"),
            Unavailable::Exhausted => "no free stream to an apiserver".to_owned(),
            Unavailable::NoCredential => "the credential of the probes is not loaded".to_owned(),
        })?;
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        *head.uri_mut() = permit.connection().endpoint.api_root().uri(path);
        let headers = head.headers_mut();
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::ACCEPT, json.clone());
        headers.insert(header::CONTENT_TYPE, json);
        let agent = concat!("jackstay-metrics/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        if let Some(token) = self.upstream.credentials.probe_token().and_then(|t| t.header()) {
            headers.insert(header::AUTHORIZATION, token);
        }
        let lost = |error: h2::Error| format!("the connection was lost: {error}");
        let (response, mut body) = permit.open(head, false).map_err(lost)?;
        body.send_data(Bytes::from(object.to_string()), true).map_err(lost)?;
        let response = response.await.map_err(lost)?;
        permit.head_arrived(clock::now());
        let status = response.status();
        let (mut recv, mut answer) = (response.into_body(), Vec::new());
        while let Some(data) = recv.data().await {
            let data = data.map_err(lost)?;
            let _ = recv.flow_control().release_capacity(data.len());
            answer.extend_from_slice(&data);
            if answer.len() > MAX_ANSWER {
                return Err(format!("POST {path}: an answer of more than {MAX_ANSWER} bytes"));
            }
        }
        permit.finished();
        match status {
            StatusCode::OK | StatusCode::CREATED => serde_json::from_slice(&answer)
                .map_err(|error| format!("POST {path}: the answer is not JSON: {error}")),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(format!(
                "POST {path}: {status}: the credential of the probes needs the role system:auth-delegator"
            )),
            status => Err(format!("POST {path}: {status}")),
        }
    }
}

/// The user of a `TokenReview`, in the form of a `SubjectAccessReview`; `None` if the token is not valid.
fn user_of(review: &Value) -> Result<Option<Value>, String> {
    let status = review.get("status").ok_or("a TokenReview without a status")?;
    if status.get("authenticated") != Some(&Value::Bool(true)) {
        return Ok(None);
    }
    let user = &status["user"];
    let name = user["username"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or("a TokenReview without a user name")?;
    let mut spec = json!({ "user": name });
    for key in ["uid", "groups", "extra"] {
        if let Some(value) = user.get(key) {
            spec[key] = value.clone();
        }
    }
    Ok(Some(spec))
}

fn access_review(user: Value) -> Value {
    let mut spec = user;
    spec["nonResourceAttributes"] = json!({ "path": "/metrics", "verb": "get" });
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": spec,
    })
}

fn is_allowed(review: &Value) -> Result<bool, String> {
    let status = review.get("status").ok_or("a SubjectAccessReview without a status")?;
    Ok(status["allowed"] == Value::Bool(true) && status["denied"] != Value::Bool(true))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_of_reads_users_and_refusals() {
        let user = json!({ "username": "system:serviceaccount:m:p", "uid": "1", "groups": ["g"], "extra": { "k": ["v"] } });
        let spec = user_of(&json!({ "status": { "authenticated": true, "user": user } }));
        let expected = json!({ "user": "system:serviceaccount:m:p", "uid": "1", "groups": ["g"], "extra": { "k": ["v"] } });
        assert_eq!(spec, Ok(Some(expected.clone())));
        let review = access_review(expected);
        assert_eq!(
            review["spec"]["nonResourceAttributes"],
            json!({ "path": "/metrics", "verb": "get" })
        );
        assert_eq!(review["spec"]["extra"], json!({ "k": ["v"] }));
        for status in [
            json!({ "authenticated": false, "error": "[invalid bearer token, token lookup failed]" }),
            json!({}),
            // Not the boolean.
            json!({ "authenticated": "true", "user": { "username": "a" } }),
        ] {
            assert_eq!(user_of(&json!({ "status": status })), Ok(None));
        }
        assert!(user_of(&json!({})).is_err());
        let nameless = json!({ "status": { "authenticated": true, "user": { "username": "" } } });
        assert!(user_of(&nameless).is_err());
    }

    #[test]
    fn is_allowed_needs_a_permission_and_no_denial() {
        for (status, allowed) in [
            (json!({ "allowed": true }), true),
            (json!({ "allowed": true, "denied": true }), false),
            (json!({ "allowed": false }), false),
            (json!({ "allowed": "true" }), false),
            (json!({}), false),
        ] {
            assert_eq!(is_allowed(&json!({ "status": status })), Ok(allowed), "{status}");
        }
        assert!(is_allowed(&json!({})).is_err());
    }
}
