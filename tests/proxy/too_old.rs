//! 410 is no last word: history is per server, and an apiserver that has just started knows none.
//! What one refuses is asked of the others, once each, and the client sees the refusal only when all
//! of them agree on it.

use crate::hostile::before;
use crate::peer::{Act, Peers, Reply};
use crate::support::{Certs, MAPS, soon};
use http::Method;
use jackstay::demo::client::{Client, next_data};

const FIRST: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"6"}}}"#;
const SECOND: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"b","resourceVersion":"7"}}}"#;
const GONE: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 5 (9)","reason":"Expired","code":410}"#;
const FAILED: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"etcd","reason":"InternalError","code":500}"#;

/// An ERROR event of this status.
fn error(status: &str) -> String {
    format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n")
}

/// A watch that is answered with these events, and then ended by the server.
fn events(lines: &[&str]) -> Act {
    Act::Answer(Reply::ok(&lines.concat()))
}

/// One row: what each server that is asked does in turn (all others send SECOND and end), the status
/// and the body that the client sees, whether the end is clean, and how many were asked.
struct Row {
    name: &'static str,
    query: &'static str,
    acts: Vec<Act>,
    sees: (u16, String),
    asked: std::ops::RangeInclusive<usize>,
    /// No server is asked twice.
    once_each: bool,
}

fn rows() -> Vec<Row> {
    let gone = || events(&[&error(GONE)]);
    let gone_head = || Act::Answer(Reply::status("410", GONE));
    let first = format!("{FIRST}\n");
    let second = format!("{SECOND}\n");
    let row = |name, acts, status, body: &[&str], asked| Row {
        name,
        query: "watch=1&resourceVersion=5",
        acts,
        sees: (status, body.concat()),
        asked,
        once_each: true,
    };
    let begun = || Act::PartlyCut(Reply::ok(&format!("{FIRST}\n")));
    vec![
        row("an event on one", vec![gone()], 200, &[&second], 2..=2),
        row("an event on two", vec![gone(), gone()], 200, &[&second], 3..=3),
        row("an event on all", vec![gone(), gone(), gone()], 200, &[&error(GONE)], 3..=3),
        row("a head on one", vec![gone_head()], 200, &[&second], 2..=2),
        row("a head on two", vec![gone_head(), gone_head()], 200, &[&second], 3..=3),
        row("a head on all", vec![gone_head(), gone_head(), gone_head()], 410, &[GONE], 3..=3),
        row("an event, then a head", vec![gone(), gone_head()], 200, &[&second], 3..=3),
        row(
            "an event, then heads",
            vec![gone(), gone_head(), gone_head()],
            200,
            &[&error(GONE)],
            3..=3,
        ),
        Row {
            // A watch whose head has come knows nothing of the one that refused before that.
            once_each: false,
            ..row("a head, then an event", vec![gone_head(), gone()], 200, &[&second], 3..=3)
        },
        Row {
            once_each: false,
            ..row("an event, then a cut", vec![gone(), Act::Cut], 200, &[&second], 3..=3)
        },
        row(
            "an event, then forbidden",
            vec![gone(), Act::Answer(Reply::status("403", "{}"))],
            200,
            &[&error(GONE)],
            2..=2,
        ),
        row(
            "an event, then a 500",
            vec![gone(), Act::Answer(Reply::status("500", "{}"))],
            200,
            &[&second],
            3..=3,
        ),
        row(
            "an event after others",
            vec![events(&[&first, &error(GONE)])],
            200,
            &[&first, &second],
            2..=2,
        ),
        row(
            "an event after others, on all",
            vec![events(&[&first, &error(GONE)]), gone(), gone()],
            200,
            &[&first, &error(GONE)],
            3..=3,
        ),
        Row {
            once_each: false,
            ..row("after a loss, on one", vec![begun(), gone()], 200, &[&first, &second], 3..=3)
        },
        Row {
            // One clean end: the client asks again with what it knows.
            once_each: false,
            ..row(
                "after a loss, on all",
                vec![begun(), gone(), gone(), gone()],
                200,
                &[&first],
                3..=4,
            )
        },
        row("another error", vec![events(&[&error(FAILED)])], 200, &[&error(FAILED)], 1..=1),
        Row {
            query: "limit=500&continue=abc",
            ..row("a list", vec![gone_head()], 410, &[GONE], 1..=1)
        },
    ]
}

/// The status and the whole body of an answer.
async fn ask(client: &Client, path: &str, name: &str) -> (u16, String) {
    let asking = async {
        let sent = client.send(Method::GET, path, &[("accept", "application/json")], "").await;
        let (head, mut body) = sent.unwrap_or_else(|e| panic!("{name}: {e}")).into_parts();
        let mut bytes = Vec::new();
        while let Some(data) = next_data(&mut body).await.unwrap_or_else(|e| panic!("{name}: {e}"))
        {
            bytes.extend_from_slice(&data);
        }
        (head.status.as_u16(), String::from_utf8(bytes).unwrap())
    };
    soon(name, asking).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn others_are_asked_before_the_client_hears_of_it() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 3);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok(&format!("{SECOND}\n")));
    for row in rows() {
        // A server that was cut off in the row before is connected again.
        proxy.ready(3).await;
        peers.script.play(row.acts);
        let path = format!("{MAPS}?{}", row.query);
        let saw = ask(&client, &path, row.name).await;
        assert_eq!(saw, row.sees, "{}", row.name);
        let seen = peers.script.seen();
        assert!(row.asked.contains(&seen.len()), "{}: {seen:?}", row.name);
        if row.once_each {
            let mut who: Vec<_> = seen.iter().map(|(peer, ..)| peer).collect();
            who.sort_unstable();
            who.dedup();
            assert_eq!(who.len(), seen.len(), "{}: somebody was asked twice: {seen:?}", row.name);
        }
    }
    let outcome = async |outcome: &str| {
        let name = format!("jackstay_watch_resumes_total{{outcome=\"{outcome}\"");
        proxy.metric(&name).await
    };
    assert!(outcome("withheld").await >= 10.0 && outcome("too_old").await >= 4.0);
    assert!(proxy.metric("jackstay_retries_total{reason=\"too_old\"").await >= 5.0);
}

/// A client that asks with an old version again and again asks every server each time, until it has
/// used up what is there for that: from then on it asks one, and gets that one's answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_client_in_a_loop_is_not_multiplied() {
    const BURST: usize = 512;
    const ASKED: usize = 300;
    let certs = Certs::new();
    let peers = Peers::start(&certs, 3);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion=5");
    let over_budget = async || {
        proxy.metric("jackstay_watch_resumes_total{outcome=\"over_budget\"").await as usize
    };

    // As heads: two more for each, as long as it lasts, and a tenth of a request for each request.
    peers.script.usually(Reply::status("410", GONE));
    peers.script.play([]);
    for _ in 0..ASKED {
        assert_eq!(ask(&client, &path, "a head").await, (410, GONE.to_owned()));
    }
    let more = peers.script.seen().len() - ASKED;
    println!("{ASKED} watches, {more} second opinions");
    assert!((BURST..=BURST + ASKED / 10).contains(&more), "{more}");
    let refused = over_budget().await;
    assert!(refused > 0);

    // As events it is the same budget.
    peers.script.usually(Reply::ok(&error(GONE)));
    peers.script.play([]);
    for _ in 0..20 {
        assert_eq!(ask(&client, &path, "an event").await, (200, error(GONE)));
    }
    let seen = peers.script.seen().len();
    assert!((20..=23).contains(&seen), "{seen}");
    assert!(over_budget().await >= refused + 17);

    // What others ask earns it again.
    peers.script.usually(Reply::ok("{}"));
    for _ in 0..25 {
        assert_eq!(ask(&client, MAPS, "a list").await.0, 200);
    }
    peers.script.play([events(&[&error(GONE)]), events(&[&error(GONE)]), events(&[FIRST, "\n"])]);
    assert_eq!(ask(&client, &path, "earned again").await, (200, format!("{FIRST}\n")));
}
