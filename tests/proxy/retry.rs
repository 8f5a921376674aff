//! The retry table, every cell, by real frames: what the client sees, and how often the request
//! was seen by a server.

use crate::hostile::before;
use crate::peer::{
    Act, CANCEL, END_HEADERS, HEADERS, INTERNAL_ERROR, NO_ERROR, Peers, REFUSED_STREAM, Reply,
    fields, frame, goaway, reset,
};
use crate::support::{Certs, MAPS, h2_error, soon};
use bytes::BytesMut;
use http::Method;
use jackstay::demo::client::{Client, next_data};
use serde_json::Value;
use std::io;
use std::time::Duration;

/// A request of the table.
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
    Safe,
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
        row("get", Kind::Read, Method::GET, &format!("{MAPS}/a"), ""),
        row("list", Kind::Read, Method::GET, MAPS, ""),
        row("watch", Kind::Watch, Method::GET, &format!("{MAPS}?watch=1&resourceVersion=5"), ""),
        row("log", Kind::Log, Method::GET, &format!("{pod}/log"), ""),
        row("create", Kind::Write, Method::POST, MAPS, "{}"),
        row("update", Kind::Write, Method::PUT, &format!("{MAPS}/a"), "{}"),
        row("patch", Kind::Write, Method::PATCH, &format!("{MAPS}/a"), "{}"),
        row("delete", Kind::Write, Method::DELETE, &format!("{MAPS}/a"), ""),
        row("eviction", Kind::Write, Method::POST, &format!("{pod}/eviction"), "{}"),
        row(
            "review",
            Kind::Safe,
            Method::POST,
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            REVIEW,
        ),
        row("dry run", Kind::Safe, Method::POST, &format!("{MAPS}?dryRun=All"), "{}"),
    ]
}

/// How far a request got.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Unprocessed,
    Sent,
    Head,
    /// In the midst of a short body: of what may be sent again, nothing is forwarded yet.
    Beginning,
    Body,
    /// An answer like any other, with this status.
    Answer(u16),
}

const FIRST: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"6"}}}"#;
const SECOND: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"b","resourceVersion":"7"}}}"#;

fn faults() -> Vec<(&'static str, Stage, Act)> {
    let beginning = || Reply::ok(&format!("{FIRST}\n{}", &SECOND[..20]));
    // One full frame, which is more than is waited for.
    let partial = || {
        let mut reply = beginning();
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
        ("REFUSED_STREAM", Stage::Unprocessed, Act::raw(|id| reset(id, REFUSED_STREAM))),
        (
            "REFUSED_STREAM after the body",
            Stage::Unprocessed,
            Act::Late(Box::new(Act::raw(|id| reset(id, REFUSED_STREAM)))),
        ),
        ("GOAWAY below", Stage::Unprocessed, Act::raw(|id| goaway(id.saturating_sub(2), NO_ERROR))),
        (
            "GOAWAY below with an error",
            Stage::Unprocessed,
            Act::raw(|id| goaway(id.saturating_sub(2), INTERNAL_ERROR)),
        ),
        ("429 of a shutdown", Stage::Unprocessed, Act::Answer(closing_429)),
        ("503 of a shutdown", Stage::Unprocessed, Act::Answer(closing_503)),
        ("GOAWAY above, then cut", Stage::Sent, Act::GoAwaySeen),
        ("cut", Stage::Sent, Act::Cut),
        ("cut after the body", Stage::Sent, Act::Late(Box::new(Act::Cut))),
        ("head, then cut", Stage::Head, Act::PartlyCut(empty())),
        ("beginning, then cut", Stage::Beginning, Act::PartlyCut(beginning())),
        ("mid-body, then cut", Stage::Body, Act::PartlyCut(partial())),
        (
            "mid-body, then GOAWAY below",
            Stage::Body,
            Act::partly(partial(), |id| {
                [goaway(id.saturating_sub(2), NO_ERROR), reset(id, CANCEL)].concat()
            }),
        ),
        ("429 of Priority and Fairness", Stage::Answer(429), Act::Answer(fairness)),
        ("429 of an eviction", Stage::Answer(429), Act::Answer(eviction)),
        ("504", Stage::Answer(504), Act::Answer(timeout)),
        ("503 of an aggregator", Stage::Answer(503), Act::Answer(aggregator)),
    ];
    for (name, code) in [("NO_ERROR", NO_ERROR), ("CANCEL", CANCEL), ("INTERNAL", INTERNAL_ERROR)] {
        let name = |at: &str| -> &'static str { format!("RST {name} {at}").leak() };
        let rst = Act::raw(move |id| reset(id, code));
        faults.push((name("before the head"), Stage::Sent, rst.clone()));
        faults.push((name("after the body"), Stage::Sent, Act::Late(Box::new(rst))));
        faults.push((
            name("after the head"),
            Stage::Head,
            Act::partly(empty(), move |id| reset(id, code)),
        ));
        faults.push((
            name("after the beginning"),
            Stage::Beginning,
            Act::partly(beginning(), move |id| reset(id, code)),
        ));
        faults.push((
            name("mid-body"),
            Stage::Body,
            Act::partly(partial(), move |id| reset(id, code)),
        ));
    }
    faults
}

/// What a client saw.
struct Saw {
    /// Status, headers and body, as far as they came.
    head: Option<http::response::Parts>,
    body: BytesMut,
    error: Option<io::Error>,
}

impl Saw {
    async fn of(client: &Client, row: &Row) -> Self {
        let headers = [("content-type", "application/json")];
        let mut saw = Self { head: None, body: BytesMut::new(), error: None };
        match client.send(row.method.clone(), &row.path, &headers, row.body).await {
            Err(error) => saw.error = Some(error),
            Ok(response) => {
                let (head, mut body) = response.into_parts();
                saw.head = Some(head);
                loop {
                    match next_data(&mut body).await {
                        Ok(Some(data)) => saw.body.extend_from_slice(&data),
                        Ok(None) => break,
                        Err(error) => {
                            saw.error = Some(error);
                            break;
                        }
                    }
                }
            }
        }
        saw
    }

    fn status(&self) -> u16 {
        self.head.as_ref().map_or(0, |head| head.status.as_u16())
    }
}

/// What is to be seen: the status (with or without an end), and by how many servers.
#[derive(Debug, PartialEq)]
enum Expected {
    Again,
    Fail,
    Forward(u16),
    /// Cut off, never complete.
    Reset,
    Resume,
}

fn expected(kind: Kind, stage: Stage) -> Expected {
    match (kind, stage) {
        (_, Stage::Answer(code)) => Expected::Forward(code),
        (Kind::Watch, Stage::Beginning | Stage::Body) => Expected::Resume,
        (_, Stage::Unprocessed)
        | (Kind::Read | Kind::Watch | Kind::Log | Kind::Safe, Stage::Sent | Stage::Head)
        | (Kind::Read | Kind::Safe, Stage::Beginning) => Expected::Again,
        (Kind::Write, Stage::Sent) => Expected::Fail,
        (_, Stage::Head | Stage::Beginning | Stage::Body) => Expected::Reset,
    }
}

async fn check(client: &Client, peers: &Peers, http2: bool) -> usize {
    let mut cells = 0;
    for (name, stage, act) in faults() {
        for row in rows() {
            let cell = format!("{} × {name} (http2: {http2})", row.name);
            let reply = if row.kind == Kind::Watch {
                Reply::ok(&format!("{SECOND}\n"))
            } else {
                Reply::ok(r#"{"kind":"ConfigMap"}"#)
            };
            peers.script.usually(reply);
            peers.script.play([act.clone()]);
            let saw = soon(&cell, Saw::of(client, &row)).await;
            let seen = peers.script.seen().len();
            if let Some(error) = saw.error.as_ref().and_then(h2_error) {
                assert!(!error.is_go_away(), "{cell}: GOAWAY");
                assert_ne!(error.reason(), Some(h2::Reason::REFUSED_STREAM), "{cell}");
                assert_ne!(error.reason(), Some(h2::Reason::NO_ERROR), "{cell}");
            }
            let clean = saw.error.is_none();
            let body = String::from_utf8_lossy(&saw.body).into_owned();
            let facts = format!("{cell}: {} {body:?} {:?}", saw.status(), saw.error);
            match expected(row.kind, stage) {
                Expected::Again => {
                    assert_eq!((saw.status(), clean, seen), (200, true, 2), "{facts}");
                }
                Expected::Fail => {
                    assert_eq!((saw.status(), clean, seen), (502, true, 1), "{facts}");
                    let head = saw.head.unwrap();
                    assert!(!head.headers.contains_key("retry-after"), "{facts}");
                    let status: Value = serde_json::from_str(&body).unwrap();
                    assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &502.into()));
                }
                Expected::Forward(code) => {
                    assert_eq!((saw.status(), clean, seen), (code, true, 1), "{facts}");
                }
                Expected::Reset => {
                    // A head that is followed by a reset at once may be lost with it.
                    assert!(matches!(saw.status(), 0 | 200), "{facts}");
                    assert_eq!((clean, seen), (false, 1), "{facts}");
                }
                Expected::Resume => {
                    assert_eq!((saw.status(), clean, seen), (200, true, 2), "{facts}");
                    assert_eq!(body, format!("{FIRST}\n{SECOND}\n"), "{facts}");
                }
            }
            cells += 1;
        }
    }
    cells
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn every_cell() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let cells = check(&client, &peers, true).await;
    println!("{cells} cells over HTTP/2, one client connection");
    assert!(!client.is_closed());
}

/// Over HTTP/1.1 a cut answer costs the connection: each request has its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn truncation_over_http1() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    peers.script.usually(Reply::ok("{}"));
    for (name, stage, act) in faults() {
        for row in rows().iter().filter(|row| row.kind != Kind::Watch) {
            let cell = format!("{} × {name} (HTTP/1.1)", row.name);
            peers.script.play([act.clone()]);
            let client = Client::connect_http1(proxy.addr, &certs.credentials()).await.unwrap();
            let saw = soon(&cell, Saw::of(&client, row)).await;
            let clean = saw.error.is_none();
            let facts = format!("{cell}: {} {:?} {:?}", saw.status(), saw.body, saw.error);
            match expected(row.kind, stage) {
                Expected::Again => assert_eq!((saw.status(), clean), (200, true), "{facts}"),
                Expected::Fail => assert_eq!((saw.status(), clean), (502, true), "{facts}"),
                Expected::Forward(code) => {
                    assert_eq!((saw.status(), clean), (code, true), "{facts}");
                }
                Expected::Reset | Expected::Resume => {
                    assert!(matches!(saw.status(), 0 | 200) && !clean, "{facts}");
                }
            }
        }
    }
}

/// An answer whose head never came is no answer, however much came of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn half_a_head() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    for row in rows() {
        let half = Act::raw(|id| {
            let head = fields(&[(":status", "200"), ("content-type", "application/json")]);
            // The head goes on in a CONTINUATION that never comes; another frame does.
            [frame(HEADERS, 0, id, &head[..9]), frame(HEADERS, END_HEADERS, id, &head)].concat()
        });
        peers.script.play([half]);
        let saw = soon(row.name, Saw::of(&client, &row)).await;
        let seen = peers.script.seen().len();
        match row.kind {
            Kind::Write => assert_eq!((saw.status(), seen), (502, 1), "{}", row.name),
            _ => assert_eq!((saw.status(), seen), (200, 2), "{}", row.name),
        }
    }
}

/// A request that fails says why it was not sent again, and so does a metric.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_refused_another_attempt_is_counted() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    for (reason, method, body, attempts) in
        [("unsafe", Method::POST, "{}", 1), ("attempts", Method::GET, "", 5)]
    {
        let lost = Act::raw(|id| reset(id, INTERNAL_ERROR));
        peers.script.play(std::iter::repeat_n(lost, 9));
        let reply = soon(reason, client.request(method, MAPS, &[], body)).await.unwrap();
        assert_eq!((reply.status.as_u16(), peers.script.seen().len()), (502, attempts), "{reason}");
        let series = format!("jackstay_retries_refused_total{{reason=\"{reason}\"}}");
        let counted = proxy.metric(&series).await;
        assert!((counted - 1.0).abs() < 0.5, "{reason}: {counted}");
    }
}

/// A GET may have a body too: one that is not held whole cannot be sent from its beginning again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_body_that_is_not_held_is_not_sent_again() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok("{}"));
    for (size, status, seen) in [(1 << 20, 200, 2), (4 << 20, 502, 1)] {
        let refusal = Act::Late(Box::new(Act::raw(|id| reset(id, REFUSED_STREAM))));
        peers.script.play([refusal]);
        let sent = client.request(Method::GET, MAPS, &[], "x".repeat(size));
        let reply = soon("an answer", sent).await.unwrap();
        let asked = peers.script.seen().len();
        assert_eq!((reply.status.as_u16(), asked), (status, seen), "{size}: {:?}", reply.body);
    }
}

/// Half an answer, and then silence: nobody has seen the half, so the whole comes from elsewhere, also
/// where the silence is suspicious late only: because of the configuration, or of a machine that stood
/// still.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_short_answer_that_falls_silent_comes_from_elsewhere() {
    tokio::join!(half_an_answer(None), half_an_answer(Some(Duration::from_millis(1_500))));
}

async fn half_an_answer(suspect_after: Option<Duration>) {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let mut config = certs.config(&peers.addresses);
    config.upstreams[0].health.suspect_after = suspect_after;
    let proxy = certs.start(config);
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    let whole = r#"{"kind":"ConfigMap"}"#;
    peers.script.usually(Reply::ok(whole));
    peers.script.play([Act::PartlyMute(Reply::ok(&whole[..9]))]);
    let sent = client.request(Method::GET, MAPS, &[], "");
    let reply = soon("an answer", sent).await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, whole.as_bytes()));
    assert!(proxy.metric(r#"jackstay_hedges_total{outcome="hedge""#).await >= 1.0);
}

/// What is missing of an answer is waited for as its head is: whoever sends it is asked again and
/// again whether it lives. That a connection which delivered has fallen silent is asked only once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_rest_of_an_answer_is_awaited_like_its_head() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let mut config = certs.config(&peers.addresses);
    // No other PING is due in this test.
    config.upstreams[0].health.ping_interval = Duration::from_secs(3_600);
    let proxy = certs.start(config);
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    let whole = r#"{"kind":"ConfigMap"}"#;
    peers.script.usually(Reply::ok(whole));
    peers.script.play([Act::PartlyFade(Reply::ok(""))]);
    let sent = client.request(Method::GET, MAPS, &[], "");
    let reply = soon("an answer", sent).await.unwrap();
    assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, whole.as_bytes()));
}

/// One that is slow while its server is well is forwarded as it comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_slow_answer_is_not_withheld() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.play([Act::partly(Reply::ok("first"), |_| Vec::new())]);
    let sent = client.send(Method::GET, MAPS, &[], "");
    let (head, mut body) = soon("a head", sent).await.unwrap().into_parts();
    let first = soon("the first of it", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!((head.status.as_u16(), &first[..]), (200, &b"first"[..]));
    assert_eq!(peers.script.seen().len(), 1);
}
