//! Records the outcome of each request exactly once: when its [`Outcome`] is dropped.
//!
//! The guard is created when the request head arrives and is owned by whatever handles the request, in the
//! end by the response body. A client that leaves, a cancelled task and a panic are therefore recorded like
//! any other end.
//!
//! It costs a few atomic additions and two clock readings. The head is kept for the access log as shared
//! handles, not copies, and only if that log is on. Nothing is formatted unless the line is written.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use http::uri::PathAndQuery;
use http::{HeaderValue, Method, header, request};
use jackstay_config::AccessLog;
use jackstay_core::credential_class::{ClientRank, CredentialClass};
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;

use super::listener_metrics::{CLIENT_GONE, ListenerMetrics};
use super::redact::{redact_path, shorten};

/// Maximum length of a user agent in a log line, in bytes.
const MAX_USER_AGENT: usize = 256;
/// Maximum length of a method in a log line, in bytes: HTTP/2 allows one as long as a header.
const MAX_METHOD: usize = 32;
/// Maximum length of a reason in a log line, in bytes: it may quote a request header.
const MAX_REASON: usize = 512;

/// The side that ended a response early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client left or stopped reading.
    Client,
    /// The apiserver or the connection to it.
    Upstream,
    /// jackstay: shutdown, a limit.
    Jackstay,
}

impl Side {
    /// Its name in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Upstream => "upstream",
            Self::Jackstay => "jackstay",
        }
    }
}

/// The parts of a request head that the access log shows.
#[derive(Debug)]
struct Head {
    method: Method,
    path: Option<PathAndQuery>,
    user_agent: Option<HeaderValue>,
}

/// The outcome of one request, recorded when it is dropped.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts of one request, not a state
pub struct Outcome {
    listener: Arc<ListenerMetrics>,
    access: AccessLog,
    /// When the request arrived.
    pub started: Instant,
    client: IpAddr,
    /// The source of the client, by which its log lines are limited.
    pub source: Source,
    head: Option<Head>,
    verb: &'static str,
    /// Status code of the response head that was handed to the client's connection.
    pub code: Option<u16>,
    long_running: bool,
    is_watch: bool,
    is_tunnel: bool,
    /// The class of its credential; `None` until it is selected, and if none is.
    pub class: Option<CredentialClass>,
    endpoint: Option<Arc<str>>,
    attempts: u16,
    reused: bool,
    /// jackstay itself answers with 401.
    refused: bool,
    /// The request was hedged.
    pub hedged: bool,
    /// How often the watch was resumed on another stream.
    pub resumes: u32,
    /// Bytes of the response body that were handed over.
    pub bytes: u64,
    complete: bool,
    cut_by: Option<Side>,
    reason: Option<Cow<'static, str>>,
}

impl Outcome {
    /// Starts the record of a request from `client`.
    pub fn begin(
        listener: &Arc<ListenerMetrics>,
        access: AccessLog,
        client: IpAddr,
        request: &request::Parts,
    ) -> Self {
        listener.in_flight.increment(1);
        Self {
            listener: Arc::clone(listener),
            access,
            started: clock::now(),
            client,
            source: Source::Address(client),
            head: (access != AccessLog::Off).then(|| Head {
                method: request.method.clone(),
                path: request.uri.path_and_query().cloned(),
                user_agent: request.headers.get(header::USER_AGENT).cloned(),
            }),
            verb: "other",
            code: None,
            long_running: false,
            is_watch: false,
            is_tunnel: false,
            class: None,
            endpoint: None,
            attempts: 0,
            reused: false,
            refused: false,
            hedged: false,
            resumes: 0,
            bytes: 0,
            complete: false,
            cut_by: None,
            reason: None,
        }
    }

    /// Sets the Kubernetes verb, one of [`super::names::VERBS`]. The duration of a long-running request is
    /// not recorded, and it is no error if the client leaves one.
    pub fn classified(&mut self, verb: &'static str, long_running: bool) {
        self.verb = verb;
        self.long_running = long_running;
        if verb == "watch" && !std::mem::replace(&mut self.is_watch, true) {
            self.listener.watches.increment(1);
        }
    }

    /// The response 101 was sent: the request is a tunnel from now on.
    pub fn upgraded(&mut self) {
        self.long_running = true;
        if !std::mem::replace(&mut self.is_tunnel, true) {
            self.listener.tunnels.increment(1);
        }
    }

    /// Counts an attempt to `endpoint`; `reused` if its connection was already open.
    pub fn sent_to(&mut self, endpoint: &Arc<str>, reused: bool) {
        self.attempts = self.attempts.saturating_add(1);
        self.answered_by(endpoint, reused);
    }

    /// Sets the endpoint whose response is used, after parallel attempts.
    pub fn answered_by(&mut self, endpoint: &Arc<str>, reused: bool) {
        self.reused = reused;
        self.endpoint = Some(Arc::clone(endpoint));
    }

    /// The last frame of the response was handed over. Call it with that frame: hyper does not poll a body
    /// again once `is_end_stream` is true.
    pub fn complete(&mut self) {
        self.complete = true;
    }

    /// The response ends early. Only the first call counts; later ones report consequences.
    pub fn cut(&mut self, by: Side, reason: impl Into<Cow<'static, str>>) {
        if self.cut_by.is_none() && !self.complete {
            self.cut_by = Some(by);
            self.reason = Some(reason.into());
        }
    }

    /// Records that jackstay itself answers with an error: status code, reason in metrics, and the message
    /// for the client.
    pub fn own_error(
        &mut self,
        code: u16,
        reason: &'static str,
        message: impl Into<Cow<'static, str>>,
    ) {
        self.code = Some(code);
        self.refused = code == 401;
        self.reason = Some(message.into());
        self.listener.own_errors.count(Some(code), reason);
    }

    /// The status code that was sent, or else one that shows which side prevented a response.
    fn final_code(&self) -> u16 {
        match (self.code, self.cut_by) {
            (Some(code), _) => code,
            _ if std::thread::panicking() => 500,
            (None, Some(Side::Upstream)) => 502,
            (None, Some(Side::Jackstay)) => 503,
            (None, Some(Side::Client) | None) => CLIENT_GONE,
        }
    }

    /// The side that ended a response early after its head. Without a call of [`Self::cut`] it is the
    /// client: hyper drops the body when the client resets its stream or its connection ends.
    fn cut_side(&self) -> Option<Side> {
        match (self.complete, self.code) {
            (true, _) | (false, None) => None,
            (false, Some(_)) => Some(self.cut_by.unwrap_or(Side::Client)),
        }
    }

    fn is_error(&self, code: u16, cut_by: Option<Side>) -> bool {
        code >= CLIENT_GONE
            // jackstay itself has refused the client's certificate; the apiserver knows nothing of it.
            || self.refused
            || match cut_by {
                None => false,
                // A client ends a watch by leaving.
                Some(Side::Client) => !self.long_running,
                Some(Side::Upstream | Side::Jackstay) => true,
            }
    }

    fn is_of_identity(&self) -> bool {
        self.class.is_some_and(|class| class.rank() == ClientRank::Identity)
    }

    /// Whether a line about the end of the watch may be logged: the number of such lines that were suppressed before
    /// it, or `None`. A client can end its watches as often as it likes.
    pub fn admit_watch_line(&self) -> Option<u64> {
        if self.is_of_identity() {
            return Some(0);
        }
        self.listener.watch_lines.admit(self.source, clock::now())
    }

    /// Writes the access log line; `suppressed` lines before it were not written.
    fn write_line(&self, code: u16, cut_by: Option<Side>, suppressed: u64) {
        let Some(head) = &self.head else { return };
        let path = redact_path(head.path.as_ref().map_or("/", PathAndQuery::as_str));
        // The client chooses the user agent, so it is shortened here and quoted by the formatter.
        let user_agent = head
            .user_agent
            .as_ref()
            .map(|value| String::from_utf8_lossy(value.as_bytes()))
            .map(|value| shorten(&value, MAX_USER_AGENT).into_owned());
        let reason = self.reason.as_deref().map(|reason| shorten(reason, MAX_REASON));
        tracing::info!(
            target: super::log::ACCESS_TARGET,
            listener = self.listener.name(),
            client = %self.client,
            uid = self.source.uid(),
            method = &*shorten(head.method.as_str(), MAX_METHOD),
            path = &*path,
            verb = self.verb,
            code,
            ms = %format_args!("{:.1}", clock::elapsed(self.started).as_secs_f64() * 1e3),
            bytes = self.bytes,
            endpoint = self.endpoint.as_deref(),
            attempts = self.attempts,
            reused = self.reused,
            hedged = self.hedged.then_some(true),
            resumes = (self.resumes > 0).then_some(self.resumes),
            user = self.class.map_or("unknown", CredentialClass::user),
            user_agent = user_agent.as_deref(),
            cut_by = cut_by.map(Side::as_str),
            reason = reason.as_deref(),
            suppressed = (suppressed > 0).then_some(suppressed),
            "request"
        );
    }
}

impl Drop for Outcome {
    fn drop(&mut self) {
        let listener = &self.listener;
        listener.in_flight.decrement(1);
        if self.is_watch {
            listener.watches.decrement(1);
        }
        if self.is_tunnel {
            listener.tunnels.decrement(1);
        }
        let (code, cut_by) = (self.final_code(), self.cut_side());
        let took = (!self.long_running).then(|| clock::elapsed(self.started));
        listener.finished(self.verb, code, took);
        if let Some(side) = cut_by {
            listener.cut(side.as_str());
        }
        // A client can cause errors as fast as it can write, so their lines are limited.
        let is_identity = self.is_of_identity();
        let quota = match self.access {
            AccessLog::Off => return,
            AccessLog::Errors if !self.is_error(code, cut_by) => return,
            AccessLog::Errors if code == CLIENT_GONE || cut_by == Some(Side::Client) => {
                Some(&listener.client_gone_lines)
            }
            AccessLog::Errors if !is_identity => Some(&listener.error_lines),
            AccessLog::All if !is_identity => Some(&listener.all_lines),
            AccessLog::Errors | AccessLog::All => None,
        };
        let suppressed = quota.map_or(Some(0), |quota| quota.admit(self.source, clock::now()));
        if let Some(suppressed) = suppressed {
            self.write_line(code, cut_by, suppressed);
        }
    }
}

#[cfg(test)]
mod tests;
