//! What became of a request, recorded exactly once: when its [`Outcome`] is dropped.
//!
//! The guard is made when the head arrives and then lives wherever the request lives, in the end
//! inside the body of the response. So a client that goes away, a cancelled task or a panic are
//! recorded like everything else: there is no path on which somebody has to remember.
//!
//! It costs a few atomic additions and one clock reading at each end. The head is kept for the
//! access log as shared handles, not copies, and not at all when that log is off; nothing is
//! formatted unless the line is written.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Method, Uri, header, request};
use tokio::time::Instant;

use super::handles::{CLIENT_GONE, ListenerMetrics};
use super::redact::{redact_path, shorten};
use crate::config::AccessLog;

/// Longest user agent in a log line, bytes.
const MAX_USER_AGENT: usize = 256;
/// Longest method in a log line, bytes: HTTP allows any token, and HTTP/2 one as long as a header.
const MAX_METHOD: usize = 32;
/// Longest reason in a log line, bytes: it may quote a header of the client.
const MAX_REASON: usize = 512;

/// Who ended an answer early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The client left or stopped reading.
    Client,
    /// The apiserver or the line to it.
    Upstream,
    /// We did: shutdown, a limit.
    Jackstay,
}

impl Side {
    /// Label value and log word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Upstream => "upstream",
            Self::Jackstay => "jackstay",
        }
    }
}

/// What kind of credential a request came with; never whose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UserClass {
    /// Not decided yet, or refused.
    #[default]
    Unknown,
    /// A proven client certificate that equals a configured identity.
    Identity,
    /// A bearer token, passed on.
    Token,
    /// None.
    Anonymous,
}

impl UserClass {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Identity => "identity",
            Self::Token => "token",
            Self::Anonymous => "anonymous",
        }
    }
}

/// What the access log shows of a request's head.
#[derive(Debug)]
struct Head {
    method: Method,
    uri: Uri,
    user_agent: Option<HeaderValue>,
}

/// The outcome of one request; see the module.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts of one request, not a state
pub struct Outcome {
    listener: Arc<ListenerMetrics>,
    access: AccessLog,
    started: Instant,
    client: IpAddr,
    head: Option<Head>,
    verb: &'static str,
    code: Option<u16>,
    long_running: bool,
    is_watch: bool,
    is_tunnel: bool,
    user: UserClass,
    endpoint: Option<Arc<str>>,
    attempts: u16,
    reused: bool,
    hedged: bool,
    resumes: u16,
    bytes: u64,
    complete: bool,
    cut_by: Option<Side>,
    reason: Option<Cow<'static, str>>,
}

impl Outcome {
    /// A request's head has arrived from `client`.
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
            started: Instant::now(),
            client,
            head: (access != AccessLog::Off).then(|| Head {
                method: request.method.clone(),
                uri: request.uri.clone(),
                user_agent: request.headers.get(header::USER_AGENT).cloned(),
            }),
            verb: "other",
            code: None,
            long_running: false,
            is_watch: false,
            is_tunnel: false,
            user: UserClass::Unknown,
            endpoint: None,
            attempts: 0,
            reused: false,
            hedged: false,
            resumes: 0,
            bytes: 0,
            complete: false,
            cut_by: None,
            reason: None,
        }
    }

    /// When it arrived.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// What the request is in Kubernetes terms; `verb` is one of [`super::names::VERBS`].
    /// Long-running requests stay out of the durations, and a client that leaves one is normal.
    pub fn classified(&mut self, verb: &'static str, long_running: bool) {
        self.verb = verb;
        self.long_running = long_running;
        if verb == "watch" && !std::mem::replace(&mut self.is_watch, true) {
            self.listener.watches.increment(1);
        }
    }

    /// The 101 went out: from now on this is a tunnel.
    pub fn upgraded(&mut self) {
        self.long_running = true;
        if !std::mem::replace(&mut self.is_tunnel, true) {
            self.listener.tunnels.increment(1);
        }
    }

    /// Which kind of credential it came with.
    pub fn user(&mut self, class: UserClass) {
        self.user = class;
    }

    /// It was sent to `endpoint`, for the first time or again; `reused`: on a connection that was
    /// open already.
    pub fn sent_to(&mut self, endpoint: &Arc<str>, reused: bool) {
        self.attempts = self.attempts.saturating_add(1);
        self.reused = reused;
        self.endpoint = Some(Arc::clone(endpoint));
    }

    /// The answer came from there: of attempts side by side, the one that won.
    pub fn answered_by(&mut self, endpoint: &Arc<str>, reused: bool) {
        self.reused = reused;
        self.endpoint = Some(Arc::clone(endpoint));
    }

    /// A second attempt ran beside the first.
    pub fn hedged(&mut self) {
        self.hedged = true;
    }

    /// A watch went on on another stream.
    pub fn resumed(&mut self) {
        self.resumes = self.resumes.saturating_add(1);
    }

    /// The head of the answer, an apiserver's or ours, was handed to the client's connection.
    pub fn answered(&mut self, code: u16) {
        self.code = Some(code);
    }

    /// Bytes of the answer's body handed over.
    pub fn add_bytes(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// The last frame of the answer was handed over. Call it with that frame: hyper does not poll
    /// a body again once it says `is_end_stream`.
    pub fn complete(&mut self) {
        self.complete = true;
    }

    /// The answer ends before its end. The first caller is right; later ones see the consequences.
    pub fn cut(&mut self, by: Side, reason: impl Into<Cow<'static, str>>) {
        if self.cut_by.is_none() && !self.complete {
            self.cut_by = Some(by);
            self.reason = Some(reason.into());
        }
    }

    /// jackstay itself answers with an error: its code, its reason as metrics name it, and the
    /// message that the client reads.
    pub fn own_error(
        &mut self,
        code: u16,
        reason: &'static str,
        message: impl Into<Cow<'static, str>>,
    ) {
        self.answered(code);
        self.reason = Some(message.into());
        self.listener.own_errors.count(Some(code), reason);
    }

    /// Code of the head if there was one, and otherwise who is to blame for its absence.
    fn final_code(&self) -> u16 {
        match (self.code, self.cut_by) {
            (Some(code), _) => code,
            _ if std::thread::panicking() => 500,
            (None, Some(Side::Upstream)) => 502,
            (None, Some(Side::Jackstay)) => 503,
            (None, Some(Side::Client) | None) => CLIENT_GONE,
        }
    }

    /// Who cut an answer whose head was sent. Nobody said so: the body was dropped by hyper, which
    /// happens when the client resets its stream or its connection ends.
    fn cutter(&self) -> Option<Side> {
        match (self.complete, self.code) {
            (true, _) | (false, None) => None,
            (false, Some(_)) => Some(self.cut_by.unwrap_or(Side::Client)),
        }
    }

    fn is_error(&self, code: u16, cutter: Option<Side>) -> bool {
        code >= CLIENT_GONE
            || match cutter {
                None => false,
                // How every watch ends whose client has seen enough.
                Some(Side::Client) => !self.long_running,
                Some(Side::Upstream | Side::Jackstay) => true,
            }
    }

    /// Writes the line of the access log; `suppressed` lines before it were not written.
    fn write_line(&self, code: u16, cutter: Option<Side>, suppressed: u64) {
        let Some(head) = &self.head else { return };
        let path = redact_path(head.uri.path_and_query().map_or("/", |path| path.as_str()));
        // A user agent is the client's to choose, so it is cut, and quoted by the formatter.
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
            method = &*shorten(head.method.as_str(), MAX_METHOD),
            path = &*path,
            verb = self.verb,
            code,
            ms = %format_args!("{:.1}", self.started.elapsed().as_secs_f64() * 1e3),
            bytes = self.bytes,
            endpoint = self.endpoint.as_deref(),
            attempts = self.attempts,
            reused = self.reused,
            hedged = self.hedged.then_some(true),
            resumes = (self.resumes > 0).then_some(self.resumes),
            user = self.user.as_str(),
            user_agent = user_agent.as_deref(),
            cut_by = cutter.map(Side::as_str),
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
        let (code, cutter) = (self.final_code(), self.cutter());
        let took = (!self.long_running).then(|| self.started.elapsed());
        listener.finished(self.verb, code, took);
        if let Some(side) = cutter {
            listener.cut(side.as_str());
        }
        match self.access {
            AccessLog::Off => {}
            AccessLog::Errors if !self.is_error(code, cutter) => {}
            // A client can open and leave requests as fast as it can write.
            AccessLog::Errors if code == CLIENT_GONE || cutter == Some(Side::Client) => {
                if let Some(suppressed) = listener.client_gone_lines.admit(Instant::now()) {
                    self.write_line(code, cutter, suppressed);
                }
            }
            AccessLog::Errors | AccessLog::All => self.write_line(code, cutter, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::log::tests::Captured;
    use super::super::{ConnectionGauge, EndpointMetrics, Metrics};
    use super::*;
    use crate::config::{Level, Log, LogFormat};
    use std::time::Duration;

    fn parts(path: &str) -> request::Parts {
        let request = http::Request::get(path).header("user-agent", "kubelet/v1.30").body(());
        request.expect("a valid request").into_parts().0
    }

    fn begin(metrics: &Arc<Metrics>, access: AccessLog) -> Outcome {
        let client = IpAddr::from([127, 0, 0, 1]);
        let path = parts("/api/v1/pods?limit=5&token=hunter2");
        Outcome::begin(&metrics.listener("a"), access, client, &path)
    }

    fn requests(metrics: &Metrics) -> Vec<String> {
        let text = metrics.render();
        let lines = text.lines().filter(|line| line.starts_with("jackstay_requests_total"));
        lines.map(|line| line.rsplit_once("verb=").expect("a verb").1.to_owned()).collect()
    }

    fn value(metrics: &Metrics, name: &str) -> String {
        let text = metrics.render();
        let line = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
        line.map_or("absent", |line| line.rsplit_once(' ').expect("a value").1).to_owned()
    }

    #[test]
    fn one_request_one_record() {
        let metrics = Metrics::new();
        let mut outcome = begin(&metrics, AccessLog::Off);
        assert_eq!(value(&metrics, "jackstay_requests_in_flight"), "1");
        outcome.classified("list", false);
        outcome.answered(200);
        outcome.complete();
        drop(outcome);
        assert_eq!(requests(&metrics), [r#""list",code="200"} 1"#]);
        assert_eq!(value(&metrics, "jackstay_requests_in_flight"), "0");
        assert_eq!(value(&metrics, "jackstay_request_duration_seconds_count"), "1");
        assert_eq!(value(&metrics, "jackstay_responses_cut_total"), "absent");
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_task_is_recorded_as_a_client_that_left() {
        let metrics = Metrics::new();
        let outcome = begin(&metrics, AccessLog::Off);
        let task = tokio::spawn(async move {
            let _outcome = outcome;
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        task.abort();
        assert!(task.await.expect_err("it was aborted").is_cancelled());
        assert_eq!(requests(&metrics), [r#""other",code="499"} 1"#]);
        assert_eq!(value(&metrics, "jackstay_requests_in_flight"), "0");
    }

    #[test]
    fn a_panic_is_recorded_as_ours() {
        let metrics = Metrics::new();
        let mut outcome = begin(&metrics, AccessLog::Off);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            outcome.classified("get", false);
            panic!("a bug, on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(requests(&metrics), [r#""get",code="500"} 1"#]);
    }

    #[test]
    fn gauges_follow_watches_and_tunnels_and_long_running_has_no_duration() {
        let metrics = Metrics::new();
        let mut watch = begin(&metrics, AccessLog::Off);
        watch.classified("watch", true);
        watch.classified("watch", true);
        let mut tunnel = begin(&metrics, AccessLog::Off);
        tunnel.upgraded();
        tunnel.upgraded();
        assert_eq!(value(&metrics, "jackstay_watches"), "1");
        assert_eq!(value(&metrics, "jackstay_tunnels"), "1");
        assert_eq!(value(&metrics, "jackstay_requests_in_flight"), "2");
        drop((watch, tunnel));
        assert_eq!(value(&metrics, "jackstay_watches"), "0");
        assert_eq!(value(&metrics, "jackstay_tunnels"), "0");
        assert_eq!(value(&metrics, "jackstay_request_duration_seconds_count"), "absent");
    }

    /// (code, complete, cut by, long-running) -> (code, counted as cut by, a line with `errors`).
    #[test]
    fn every_way_to_end() {
        use Side::{Client, Jackstay, Upstream};
        let table = [
            (Some(200), true, None, false, 200, None, false),
            (Some(404), true, None, false, 404, None, false),
            (Some(503), true, None, false, 503, None, true),
            (Some(200), true, Some(Upstream), false, 200, None, false),
            (Some(200), false, None, false, 200, Some(Client), true),
            (Some(200), false, None, true, 200, Some(Client), false),
            (Some(200), false, Some(Upstream), true, 200, Some(Upstream), true),
            (Some(200), false, Some(Jackstay), true, 200, Some(Jackstay), true),
            (None, false, None, false, 499, None, true),
            (None, false, Some(Client), true, 499, None, true),
            (None, false, Some(Upstream), false, 502, None, true),
            (None, false, Some(Jackstay), false, 503, None, true),
        ];
        for row in table {
            let (head, complete, cut_by, long_running, code, counted, logged) = row;
            let metrics = Metrics::new();
            let captured = Captured::default();
            captured.during(LogFormat::Text, || {
                let mut outcome = begin(&metrics, AccessLog::Errors);
                outcome.classified("get", long_running);
                if let Some(head) = head {
                    outcome.answered(head);
                }
                if complete {
                    outcome.complete();
                }
                if let Some(side) = cut_by {
                    outcome.cut(side, "why");
                    outcome.cut(Client, "later");
                }
            });
            assert_eq!(requests(&metrics), [format!("\"get\",code=\"{code}\"}} 1")], "{row:?}");
            let cuts = metrics.render().lines().any(|line| {
                counted.is_some_and(|side: Side| {
                    line.starts_with("jackstay_responses_cut_total")
                        && line.contains(&format!("side=\"{}\"", side.as_str()))
                })
            });
            assert_eq!(cuts, counted.is_some(), "{row:?}");
            assert_eq!(captured.lines().len(), usize::from(logged), "{row:?}");
        }
    }

    #[test]
    fn the_access_line_says_what_happened_and_no_secret() {
        let metrics = Metrics::new();
        let captured = Captured::default();
        let endpoint: Arc<EndpointMetrics> = metrics.endpoint("u", "10.0.0.11:6443");
        let other = metrics.endpoint("u", "10.0.0.12:6443");
        let _gauge: ConnectionGauge = endpoint.connection_gauge();
        captured.during(LogFormat::Json, || {
            let mut outcome = begin(&metrics, AccessLog::All);
            outcome.classified("list", false);
            outcome.user(UserClass::Token);
            outcome.sent_to(other.label(), false);
            outcome.sent_to(other.label(), false);
            outcome.hedged();
            outcome.answered_by(endpoint.label(), true);
            outcome.answered(200);
            outcome.add_bytes(1234);
            outcome.complete();
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1);
        assert!(!lines[0].contains("hunter2"), "{}", lines[0]);
        let line: serde_json::Value = serde_json::from_str(&lines[0]).expect("JSON");
        for (key, expected) in [
            ("listener", serde_json::json!("a")),
            ("client", serde_json::json!("127.0.0.1")),
            ("method", serde_json::json!("GET")),
            ("path", serde_json::json!("/api/v1/pods?limit=5&token=***")),
            ("verb", serde_json::json!("list")),
            ("code", serde_json::json!(200)),
            ("bytes", serde_json::json!(1234)),
            ("endpoint", serde_json::json!("10.0.0.11:6443")),
            ("attempts", serde_json::json!(2)),
            ("reused", serde_json::json!(true)),
            ("hedged", serde_json::json!(true)),
            ("user", serde_json::json!("token")),
            ("user_agent", serde_json::json!("kubelet/v1.30")),
            ("message", serde_json::json!("request")),
        ] {
            assert_eq!(line[key], expected, "{key} in {line}");
        }
        assert!(line.get("cut_by").is_none() && line.get("resumes").is_none(), "{line}");
    }

    #[test]
    fn access_line_bounds_every_string_of_the_client() {
        let metrics = Metrics::new();
        let captured = Captured::default();
        let long = "M".repeat(60_000);
        let head = http::Request::builder()
            .method(long.as_str())
            .uri(format!("/{0}?{0}={0}", &long[..20_000]))
            .header("user-agent", &long)
            .body(())
            .expect("a valid request")
            .into_parts()
            .0;
        captured.during(LogFormat::Text, || {
            let client = IpAddr::from([127, 0, 0, 1]);
            let listener = metrics.listener("a");
            let mut outcome = Outcome::begin(&listener, AccessLog::Errors, client, &head);
            outcome.cut(Side::Client, format!("Connection names {long}"));
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].len() < 2_500, "{} bytes: {:.500}", lines[0].len(), lines[0]);
        let method = format!("method=\"{}…\"", &long[..32]);
        assert!(lines[0].contains(&method), "{}", lines[0]);
    }

    #[tokio::test(start_paused = true)]
    async fn access_lines_of_clients_that_leave_are_limited_and_counted() {
        let metrics = Metrics::new();
        let captured = Captured::default();
        let leave = |access, times| {
            for _ in 0..times {
                drop(begin(&metrics, access));
                let mut cut = begin(&metrics, access);
                cut.answered(200);
            }
        };
        let numbers = |captured: &Captured| -> (usize, u64) {
            let lines = captured.lines();
            let count = |line: &String| line.split_once("suppressed=")?.1.parse::<u64>().ok();
            let written = lines.iter().filter(|line| line.contains(" request ")).count();
            (written, lines.iter().filter_map(count).sum())
        };
        captured.during(LogFormat::Text, || leave(AccessLog::Errors, 500));
        assert_eq!(numbers(&captured), (20, 0));
        tokio::time::advance(Duration::from_secs(6)).await;
        captured.during(LogFormat::Text, || leave(AccessLog::Errors, 500));
        assert_eq!(numbers(&captured), (40, 980), "the first line of a window has the count");
        tokio::time::advance(Duration::from_secs(6)).await;
        captured.during(LogFormat::Text, || metrics.upkeep());
        assert_eq!(numbers(&captured), (40, 1_960), "and the end of the burst");
        let last = captured.lines().pop().expect("a line");
        assert!(last.contains(r#"repeated requests suppressed listener="a""#), "{last}");

        let all = Captured::default();
        all.during(LogFormat::Text, || leave(AccessLog::All, 500));
        assert_eq!(numbers(&all), (1_000, 0), "`all` means every request");
    }

    #[test]
    fn access_lines_do_not_depend_on_the_level() {
        let metrics = Metrics::new();
        let captured = Captured::default();
        let log = Log { level: Level::Error, format: LogFormat::Text, access: AccessLog::All };
        captured.with(&log, || {
            tracing::info!("not this");
            begin(&metrics, AccessLog::All).answered(200);
        });
        let lines = captured.lines();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains(r#"request listener="a" client=127.0.0.1"#), "{lines:?}");
    }

    /// It lives in the body of every response, idle watches included.
    #[test]
    fn it_is_small() {
        assert!(size_of::<Outcome>() <= 360, "{}", size_of::<Outcome>());
    }

    #[test]
    #[ignore = "a measurement: cargo test --release -- --ignored --nocapture healthy_path"]
    fn cost_of_the_healthy_path() {
        let started = std::time::Instant::now();
        let metrics = Metrics::new();
        println!("Metrics::new took {:?}", started.elapsed());
        let head = parts("/api/v1/pods?limit=5");
        let listener = metrics.listener("a");
        let endpoint = metrics.endpoint("u", "e");
        for access in [AccessLog::Off, AccessLog::Errors] {
            let (rounds, mut spent) = (2_000_000_u32, Duration::ZERO);
            for _ in 0..20 {
                let round = std::time::Instant::now();
                for _ in 0..rounds / 20 {
                    let client = IpAddr::from([127, 0, 0, 1]);
                    let mut outcome = Outcome::begin(&listener, access, client, &head);
                    outcome.classified("get", false);
                    outcome.sent_to(endpoint.label(), true);
                    outcome.answered(200);
                    outcome.complete();
                }
                spent += round.elapsed();
                metrics.upkeep();
            }
            println!("{access:?}: {:?} a request", spent / rounds);
        }
    }
}
