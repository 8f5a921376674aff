//! Every cell of the retry table (kind of request × fault) with real frames: the response that the client gets,
//! and the number of upstream requests.

use crate::scripted_peer::{Action, FIRST, Reply, SECOND, setup, setup_with};
use crate::support::http2::{
    CANCEL, END_HEADERS, HEADERS, INTERNAL_ERROR, NO_ERROR, REFUSED_STREAM, field_block, frame,
    goaway, reset,
};
use crate::support::{CONFIGMAPS, h2_error, read_body, soon};

use http::Method;
use jackstay_apiserver::client::{Client, next_data};
use serde_json::Value;
use std::io;
use std::time::Duration;

/// A request in the table.
struct Row {
    name: &'static str,
    kind: Kind,
    method: Method,
    path: String,
    body: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Read,
    Watch,
    Log,
    Write,
    /// A POST without side effects: a review or a dry run.
    SafePost,
}

const REVIEW: &str = r#"{"kind":"SubjectAccessReview","spec":{"user":"a"}}"#;

fn rows() -> Vec<Row> {
    let row = |name, kind, method, path: &str, body| Row {
        name,
        kind,
        method,
        path: path.to_owned(),
        body,
    };
    let pod = "/api/v1/namespaces/default/pods/p";
    vec![
        row("get", Kind::Read, Method::GET, &format!("{CONFIGMAPS}/a"), ""),
        row("list", Kind::Read, Method::GET, CONFIGMAPS, ""),
        row(
            "watch",
            Kind::Watch,
            Method::GET,
            &format!("{CONFIGMAPS}?watch=1&resourceVersion=5"),
            "",
        ),
        row("log", Kind::Log, Method::GET, &format!("{pod}/log"), ""),
        row("create", Kind::Write, Method::POST, CONFIGMAPS, "{}"),
        row("update", Kind::Write, Method::PUT, &format!("{CONFIGMAPS}/a"), "{}"),
        row("patch", Kind::Write, Method::PATCH, &format!("{CONFIGMAPS}/a"), "{}"),
        row("delete", Kind::Write, Method::DELETE, &format!("{CONFIGMAPS}/a"), ""),
        row("eviction", Kind::Write, Method::POST, &format!("{pod}/eviction"), "{}"),
        row(
            "review",
            Kind::SafePost,
            Method::POST,
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            REVIEW,
        ),
        row("dry run", Kind::SafePost, Method::POST, &format!("{CONFIGMAPS}?dryRun=All"), "{}"),
    ]
}

/// The progress of a request when a fault occurs.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    /// The server has declared that it has not processed the request.
    Unprocessed,
    /// No response head has arrived.
    Sent,
    /// The response head has arrived.
    Head,
    /// Less than 64 KiB of the body have arrived. jackstay holds them for a read or a safe POST, but has begun
    /// to forward the response to any other request.
    ShortBody,
    /// At least 64 KiB of the body have arrived.
    Body,
    /// The response is complete and has this status.
    Answer(u16),
}

fn faults() -> Vec<(&'static str, Stage, Action)> {
    let short_body = || Reply::ok(&format!("{FIRST}\n{}", &SECOND[..20]));
    // 64 KiB, from which size jackstay forwards a response before its end.
    let long_body = || {
        let mut reply = short_body();
        reply.body.resize(64 * 1024, b' ');
        reply
    };
    let empty = || Reply::ok("");
    let status = |code: &str, reason: &str, message: &str| {
        format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"{message}","reason":"{reason}","code":{code}}}"#
        )
    };
    let closing_429 = Reply {
        status: "429",
        headers: vec![("content-type", "text/plain; charset=utf-8"), ("retry-after", "5")],
        body: b"The apiserver is shutting down, please try again later.\n".to_vec(),
    };
    let closing_503 =
        Reply::status("503", &status("503", "ServiceUnavailable", "apiserver is shutting down"))
            .header("retry-after", "1");
    let fairness = Reply::status("429", &status("429", "TooManyRequests", "too many requests"))
        .header("retry-after", "1")
        .header("x-kubernetes-pf-flowschema-uid", "0");
    let eviction = Reply::status(
        "429",
        &status("429", "TooManyRequests", "Cannot evict pod as it would violate the budget."),
    )
    .header("retry-after", "10");
    let timeout = Reply::status("504", &status("504", "Timeout", "request did not complete"));
    let aggregator = Reply {
        status: "503",
        headers: vec![("content-type", "text/plain; charset=utf-8")],
        body: b"service unavailable\n".to_vec(),
    };
    let mut faults = vec![
        ("REFUSED_STREAM", Stage::Unprocessed, Action::raw(|id| reset(id, REFUSED_STREAM))),
        (
            "REFUSED_STREAM after the request body",
            Stage::Unprocessed,
            Action::after_body(Action::raw(|id| reset(id, REFUSED_STREAM))),
        ),
        (
            "GOAWAY that excludes the request",
            Stage::Unprocessed,
            Action::raw(|id| goaway(id.saturating_sub(2), NO_ERROR)),
        ),
        (
            "GOAWAY with an error that excludes the request",
            Stage::Unprocessed,
            Action::raw(|id| goaway(id.saturating_sub(2), INTERNAL_ERROR)),
        ),
        ("429 of a shutdown", Stage::Unprocessed, Action::Answer(closing_429)),
        ("503 of a shutdown", Stage::Unprocessed, Action::Answer(closing_503)),
        ("GOAWAY that includes the request, then closed", Stage::Sent, Action::GoAwayThenClose),
        ("closed", Stage::Sent, Action::Close),
        ("closed after the request body", Stage::Sent, Action::after_body(Action::Close)),
        ("head, then closed", Stage::Head, Action::PartialThenClose(empty())),
        ("short body, then closed", Stage::ShortBody, Action::PartialThenClose(short_body())),
        ("mid-body, then closed", Stage::Body, Action::PartialThenClose(long_body())),
        (
            "mid-body, then GOAWAY that excludes the request",
            Stage::Body,
            Action::partial(long_body(), |id| {
                [goaway(id.saturating_sub(2), NO_ERROR), reset(id, CANCEL)].concat()
            }),
        ),
        ("429 of Priority and Fairness", Stage::Answer(429), Action::Answer(fairness)),
        ("429 of an eviction", Stage::Answer(429), Action::Answer(eviction)),
        ("504", Stage::Answer(504), Action::Answer(timeout)),
        ("503 of an aggregator", Stage::Answer(503), Action::Answer(aggregator)),
    ];
    for (name, code) in [("NO_ERROR", NO_ERROR), ("CANCEL", CANCEL), ("INTERNAL", INTERNAL_ERROR)] {
        let name = |at: &str| -> &'static str { format!("RST {name} {at}").leak() };
        let rst = Action::raw(move |id| reset(id, code));
        faults.push((name("before the head"), Stage::Sent, rst.clone()));
        faults.push((name("after the request body"), Stage::Sent, Action::after_body(rst)));
        faults.push((
            name("after the head"),
            Stage::Head,
            Action::partial(empty(), move |id| reset(id, code)),
        ));
        faults.push((
            name("in a short body"),
            Stage::ShortBody,
            Action::partial(short_body(), move |id| reset(id, code)),
        ));
        faults.push((
            name("mid-body"),
            Stage::Body,
            Action::partial(long_body(), move |id| reset(id, code)),
        ));
    }
    faults
}

/// The response that a client has received.
struct Received {
    /// `None` if the request failed before.
    head: Option<http::response::Parts>,
    body: Vec<u8>,
    error: Option<io::Error>,
}

impl Received {
    /// Sends a request and reads its response.
    async fn send(client: &Client, row: &Row) -> Self {
        let headers = [("content-type", "application/json")];
        match client.send(row.method.clone(), &row.path, &headers, row.body).await {
            Err(error) => Self { head: None, body: Vec::new(), error: Some(error) },
            Ok(response) => {
                let (head, body) = response.into_parts();
                let (body, end) = read_body(body).await;
                Self { head: Some(head), body, error: end.err() }
            }
        }
    }

    fn status(&self) -> u16 {
        self.head.as_ref().map_or(0, |head| head.status.as_u16())
    }
}

#[derive(Debug, PartialEq)]
enum Expected {
    /// The request is sent twice, and the client gets 200.
    Retried,
    /// The request is sent once, and the client gets 502.
    Failed,
    /// The client gets the response of the server.
    Forwarded(u16),
    /// The client gets an incomplete response.
    Reset,
    /// The watch continues on another stream.
    Resumed,
}

fn expected(kind: Kind, stage: Stage) -> Expected {
    match (kind, stage) {
        (_, Stage::Answer(code)) => Expected::Forwarded(code),
        (Kind::Watch, Stage::ShortBody | Stage::Body) => Expected::Resumed,
        (_, Stage::Unprocessed)
        | (Kind::Read | Kind::Watch | Kind::Log | Kind::SafePost, Stage::Sent | Stage::Head)
        | (Kind::Read | Kind::SafePost, Stage::ShortBody) => Expected::Retried,
        (Kind::Write, Stage::Sent | Stage::Head | Stage::ShortBody) => Expected::Failed,
        (Kind::Log, Stage::ShortBody) | (_, Stage::Body) => Expected::Reset,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn retry_table_holds_over_http2() {
    let (peers, _proxy, client) = setup(2).await;
    let mut cells = 0;
    for (name, stage, action) in faults() {
        for row in rows() {
            let cell = format!("{} × {name} (HTTP/2)", row.name);
            let reply = if row.kind == Kind::Watch {
                Reply::ok(&format!("{SECOND}\n"))
            } else {
                Reply::ok(r#"{"kind":"ConfigMap"}"#)
            };
            peers.set_default(reply);
            peers.set_actions([action.clone()]);
            let got = soon(&cell, Received::send(&client, &row)).await;
            let sent = peers.requests().len();
            if let Some(error) = got.error.as_ref().and_then(h2_error) {
                assert!(!error.is_go_away(), "{cell}: GOAWAY");
                assert_ne!(error.reason(), Some(h2::Reason::REFUSED_STREAM), "{cell}");
                assert_ne!(error.reason(), Some(h2::Reason::NO_ERROR), "{cell}");
            }
            let clean = got.error.is_none();
            let body = String::from_utf8_lossy(&got.body).into_owned();
            let details = format!("{cell}: {} {body:?} {:?}", got.status(), got.error);
            match expected(row.kind, stage) {
                Expected::Retried => {
                    assert_eq!((got.status(), clean, sent), (200, true, 2), "{details}");
                }
                Expected::Failed => {
                    assert_eq!((got.status(), clean, sent), (502, true, 1), "{details}");
                    let head = got.head.unwrap();
                    assert!(!head.headers.contains_key("retry-after"), "{details}");
                    let status: Value = serde_json::from_str(&body).unwrap();
                    assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &502.into()));
                }
                Expected::Forwarded(code) => {
                    assert_eq!((got.status(), clean, sent), (code, true, 1), "{details}");
                }
                Expected::Reset => {
                    // A reset that immediately follows the response head may discard the head.
                    assert!(matches!(got.status(), 0 | 200), "{details}");
                    assert_eq!((clean, sent), (false, 1), "{details}");
                }
                Expected::Resumed => {
                    assert_eq!((got.status(), clean, sent), (200, true, 2), "{details}");
                    assert_eq!(body, format!("{FIRST}\n{SECOND}\n"), "{details}");
                }
            }
            cells += 1;
        }
    }
    println!("{cells} cells over HTTP/2, one client connection");
    assert!(!client.is_closed());
}

/// Over HTTP/1.1 a truncated response ends the connection, so each request has its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn retry_table_holds_over_http1() {
    let (peers, proxy, _) = setup(2).await;
    peers.set_default(Reply::ok("{}"));
    for (name, stage, action) in faults() {
        for row in rows().iter().filter(|row| row.kind != Kind::Watch) {
            let cell = format!("{} × {name} (HTTP/1.1)", row.name);
            peers.set_actions([action.clone()]);
            let client = proxy.client_over(false).await;
            let got = soon(&cell, Received::send(&client, row)).await;
            let clean = got.error.is_none();
            let details = format!("{cell}: {} {:?} {:?}", got.status(), got.body, got.error);
            match expected(row.kind, stage) {
                Expected::Retried => assert_eq!((got.status(), clean), (200, true), "{details}"),
                Expected::Failed => assert_eq!((got.status(), clean), (502, true), "{details}"),
                Expected::Forwarded(code) => {
                    assert_eq!((got.status(), clean), (code, true), "{details}");
                }
                Expected::Reset | Expected::Resumed => {
                    assert!(matches!(got.status(), 0 | 200) && !clean, "{details}");
                }
            }
        }
    }
}

/// An incomplete response head counts as no response, so only a write must not be retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn safe_request_is_retried_when_the_response_head_is_incomplete() {
    let (peers, _proxy, client) = setup(2).await;
    for row in rows() {
        let half = Action::raw(|id| {
            let head = field_block(&[(":status", "200"), ("content-type", "application/json")]);
            // A CONTINUATION with the rest of the header block would have to follow.
            [frame(HEADERS, 0, id, &head[..9]), frame(HEADERS, END_HEADERS, id, &head)].concat()
        });
        peers.set_actions([half]);
        let got = soon(row.name, Received::send(&client, &row)).await;
        let sent = peers.requests().len();
        match row.kind {
            Kind::Write => assert_eq!((got.status(), sent), (502, 1), "{}", row.name),
            _ => assert_eq!((got.status(), sent), (200, 2), "{}", row.name),
        }
    }
}

/// A write must not be sent again, and a read is sent five times at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_retry_is_counted_with_its_reason() {
    let (peers, proxy, client) = setup(2).await;
    for (reason, method, body, attempts) in
        [("unsafe", Method::POST, "{}", 1), ("attempts", Method::GET, "", 5)]
    {
        let lost = Action::raw(|id| reset(id, INTERNAL_ERROR));
        peers.set_actions(std::iter::repeat_n(lost, 9));
        let reply = soon(reason, client.request(method, CONFIGMAPS, &[], body)).await.unwrap();
        assert_eq!((reply.status.as_u16(), peers.requests().len()), (502, attempts), "{reason}");
        let series = format!("jackstay_retries_refused_total{{reason=\"{reason}\"}}");
        let counted = proxy.metric(&series).await;
        assert!((counted - 1.0).abs() < 0.5, "{reason}: {counted}");
    }
}

/// Even a GET may have a body. Bodies of up to 3 MiB are buffered.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_is_not_retried_when_its_body_is_not_buffered() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::ok("{}"));
    for (size, status, sent) in [(1 << 20, 200, 2), (4 << 20, 502, 1)] {
        let refusal = Action::after_body(Action::raw(|id| reset(id, REFUSED_STREAM)));
        peers.set_actions([refusal]);
        let request = client.request(Method::GET, CONFIGMAPS, &[], "x".repeat(size));
        let reply = soon("a response", request).await.unwrap();
        let requests = peers.requests().len();
        assert_eq!((reply.status.as_u16(), requests), (status, sent), "{size}: {:?}", reply.body);
    }
}

/// The connection falls silent in mid-body. jackstay has forwarded nothing of the short body, so the client gets
/// a complete response from the other endpoint. jackstay usually forwards a short body after 1 s, but not from a
/// silent connection, even if that becomes suspect only after 1.5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_is_hedged_when_its_connection_falls_silent_in_the_body() {
    tokio::join!(
        read_stalled_response(None),
        read_stalled_response(Some(Duration::from_millis(1_500)))
    );
}

async fn read_stalled_response(suspect_after: Option<Duration>) {
    let (peers, proxy, client) =
        setup_with(2, |config| config.upstreams[0].health.suspect_after = suspect_after).await;
    let complete = r#"{"kind":"ConfigMap"}"#;
    peers.set_default(Reply::ok(complete));
    peers.set_actions([Action::PartialThenUnresponsive(Reply::ok(&complete[..9]))]);
    let sent = client.request(Method::GET, CONFIGMAPS, &[], "");
    let reply = soon("a response", sent).await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, complete.as_bytes()));
    assert!(proxy.hedges("hedge").await >= 1.0);
}

/// After the response head the peer answers one PING and no more. jackstay sends further PINGs until the response
/// is complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_is_hedged_when_pings_stop_during_the_response() {
    // No regular PING is due during the test.
    let (peers, _proxy, client) = setup_with(2, |config| {
        config.upstreams[0].health.ping_interval = Duration::from_secs(3_600);
    })
    .await;
    let complete = r#"{"kind":"ConfigMap"}"#;
    peers.set_default(Reply::ok(complete));
    peers.set_actions([Action::PartialThenOnePong(Reply::ok(""))]);
    let sent = client.request(Method::GET, CONFIGMAPS, &[], "");
    let reply = soon("a response", sent).await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, complete.as_bytes()));
}

/// The response does not end, and its connection answers PINGs.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn incomplete_response_is_forwarded_while_its_connection_lives() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_actions([Action::partial(Reply::ok("first"), |_| Vec::new())]);
    let sent = client.send(Method::GET, CONFIGMAPS, &[], "");
    let (head, mut body) = soon("a head", sent).await.unwrap().into_parts();
    let first = soon("the first data", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!((head.status.as_u16(), &first[..]), (200, &b"first"[..]));
    assert_eq!(peers.requests().len(), 1);
}
