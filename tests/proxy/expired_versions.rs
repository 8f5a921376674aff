//! A 410 is not final: the history is per server, and an apiserver that has just started has none.
//! jackstay asks each other endpoint once, and the client gets the 410 only if all of them return
//! it.

use crate::scripted_peer::{Action, FIRST, Reply, SECOND, setup};
use crate::support::{CONFIGMAPS, soon};
use http::Method;
use jackstay::demo::client::{Client, next_data};

const GONE: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 5 (9)","reason":"Expired","code":410}"#;
const FAILED: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"etcd","reason":"InternalError","code":500}"#;

/// An ERROR event of this status.
fn error(status: &str) -> String {
    format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n")
}

/// A watch with these events, which the server then ends.
fn events(lines: &[&str]) -> Action {
    Action::Answer(Reply::ok(&lines.concat()))
}

/// Actions of the servers in the order of the requests (all others send SECOND and end), the status
/// and the body that the client gets, and the number of requests.
struct Row {
    name: &'static str,
    query: &'static str,
    actions: Vec<Action>,
    expected: (u16, String),
    requests: std::ops::RangeInclusive<usize>,
    /// No server gets two requests.
    once_each: bool,
}

fn rows() -> Vec<Row> {
    let gone = || events(&[&error(GONE)]);
    let gone_head = || Action::Answer(Reply::status("410", GONE));
    let first = format!("{FIRST}\n");
    let second = format!("{SECOND}\n");
    let row = |name, actions, status, body: &[&str], requests| Row {
        name,
        query: "watch=1&resourceVersion=5",
        actions,
        expected: (status, body.concat()),
        requests,
        once_each: true,
    };
    let started = || Action::PartialThenClose(Reply::ok(&format!("{FIRST}\n")));
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
            // After the head the watch does not know which server refused before.
            once_each: false,
            ..row("a head, then an event", vec![gone_head(), gone()], 200, &[&second], 3..=3)
        },
        Row {
            once_each: false,
            ..row(
                "an event, then a closed connection",
                vec![gone(), Action::Close],
                200,
                &[&second],
                3..=3,
            )
        },
        row(
            "an event, then forbidden",
            vec![gone(), Action::Answer(Reply::status("403", "{}"))],
            200,
            &[&error(GONE)],
            2..=2,
        ),
        row(
            "an event, then a 500",
            vec![gone(), Action::Answer(Reply::status("500", "{}"))],
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
            ..row("after a loss, on one", vec![started(), gone()], 200, &[&first, &second], 3..=3)
        },
        Row {
            // One clean end, after which the client watches again with its version.
            once_each: false,
            ..row(
                "after a loss, on all",
                vec![started(), gone(), gone(), gone()],
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

/// The status and the complete body of a response.
async fn get(client: &Client, path: &str, name: &str) -> (u16, String) {
    let request = async {
        let sent = client.send(Method::GET, path, &[("accept", "application/json")], "").await;
        let (head, mut body) = sent.unwrap_or_else(|e| panic!("{name}: {e}")).into_parts();
        let mut bytes = Vec::new();
        while let Some(data) = next_data(&mut body).await.unwrap_or_else(|e| panic!("{name}: {e}"))
        {
            bytes.extend_from_slice(&data);
        }
        (head.status.as_u16(), String::from_utf8(bytes).unwrap())
    };
    soon(name, request).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn too_old_version_is_tried_on_every_endpoint() {
    let (peers, proxy, client) = setup(3).await;
    peers.set_default(Reply::ok(&format!("{SECOND}\n")));
    for row in rows() {
        // A connection that the previous row closed is replaced.
        proxy.wait_connected(3).await;
        peers.set_actions(row.actions);
        let path = format!("{CONFIGMAPS}?{}", row.query);
        let received = get(&client, &path, row.name).await;
        assert_eq!(received, row.expected, "{}", row.name);
        let seen = peers.requests();
        assert!(row.requests.contains(&seen.len()), "{}: {seen:?}", row.name);
        if row.once_each {
            let mut peers: Vec<_> = seen.iter().map(|request| request.peer).collect();
            peers.sort_unstable();
            peers.dedup();
            assert_eq!(peers.len(), seen.len(), "{}: a peer got two requests: {seen:?}", row.name);
        }
    }
    assert!(proxy.resumes("withheld").await >= 10.0 && proxy.resumes("too_old").await >= 4.0);
    assert!(proxy.metric("jackstay_retries_total{reason=\"too_old\"").await >= 5.0);
}

/// A client that repeats an old version uses up the budget for second requests. Afterwards jackstay
/// asks one endpoint and forwards its response.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn retries_of_too_old_versions_have_a_budget() {
    const BURST: usize = 512;
    const WATCHES: usize = 300;
    let (peers, proxy, client) = setup(3).await;
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let over_budget = async || proxy.resumes("over_budget").await as usize;

    // As heads: two more requests for each, until the burst is used, and a tenth of a request per
    // request.
    peers.set_default(Reply::status("410", GONE));
    peers.set_actions([]);
    for _ in 0..WATCHES {
        assert_eq!(get(&client, &path, "a head").await, (410, GONE.to_owned()));
    }
    let more = peers.requests().len() - WATCHES;
    println!("{WATCHES} watches, {more} second requests");
    assert!((BURST..=BURST + WATCHES / 10).contains(&more), "{more}");
    let refused = over_budget().await;
    assert!(refused > 0);

    // Events use the same budget.
    peers.set_default(Reply::ok(&error(GONE)));
    peers.set_actions([]);
    for _ in 0..20 {
        assert_eq!(get(&client, &path, "an event").await, (200, error(GONE)));
    }
    let seen = peers.requests().len();
    assert!((20..=23).contains(&seen), "{seen}");
    assert!(over_budget().await >= refused + 17);

    // Other requests refill the budget.
    peers.set_default(Reply::ok("{}"));
    for _ in 0..25 {
        assert_eq!(get(&client, CONFIGMAPS, "a list").await.0, 200);
    }
    peers.set_actions([events(&[&error(GONE)]), events(&[&error(GONE)]), events(&[FIRST, "\n"])]);
    assert_eq!(get(&client, &path, "refilled").await, (200, format!("{FIRST}\n")));
}
