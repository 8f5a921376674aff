//! Watches whose resource version is too old for an apiserver (410 Gone). Each apiserver has its own history,
//! and one that has just started has none. jackstay therefore asks each other endpoint once, and the client
//! gets the 410 only if all endpoints return it.

use crate::scripted_peer::{Action, FIRST, Reply, SECOND, setup};
use crate::support::{CONFIGMAPS, read_body, soon};
use http::Method;
use jackstay_apiserver::client::Client;

const GONE: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 5 (9)","reason":"Expired","code":410}"#;
const FAILED: &str = r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"etcd","reason":"InternalError","code":500}"#;

/// An ERROR event with this Status.
fn error_event(status: &str) -> String {
    format!("{{\"type\":\"ERROR\",\"object\":{status}}}\n")
}

/// A watch that sends these events and ends.
fn events(lines: &[&str]) -> Action {
    Action::Answer(Reply::ok(&lines.concat()))
}

struct Row {
    name: &'static str,
    query: &'static str,
    /// The actions for the first requests. Later requests get `SECOND` and a clean end.
    actions: Vec<Action>,
    /// The status and the body that the client gets.
    expected: (u16, String),
    /// The number of upstream requests.
    requests: std::ops::RangeInclusive<usize>,
    /// No server gets two requests.
    once_each: bool,
}

fn rows() -> Vec<Row> {
    let gone = || events(&[&error_event(GONE)]);
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
    let interrupted = || Action::PartialThenClose(Reply::ok(&format!("{FIRST}\n")));
    // A server sends the 410 as an ERROR event or as the status of its response head.
    vec![
        row("ERROR event of 1 server", vec![gone()], 200, &[&second], 2..=2),
        row("ERROR events of 2 servers", vec![gone(), gone()], 200, &[&second], 3..=3),
        row(
            "ERROR events of 3 servers",
            vec![gone(), gone(), gone()],
            200,
            &[&error_event(GONE)],
            3..=3,
        ),
        row("head of 1 server", vec![gone_head()], 200, &[&second], 2..=2),
        row("heads of 2 servers", vec![gone_head(), gone_head()], 200, &[&second], 3..=3),
        row("heads of 3 servers", vec![gone_head(), gone_head(), gone_head()], 410, &[GONE], 3..=3),
        row("ERROR event, then head", vec![gone(), gone_head()], 200, &[&second], 3..=3),
        row(
            "ERROR event, then heads of 2 servers",
            vec![gone(), gone_head(), gone_head()],
            200,
            &[&error_event(GONE)],
            3..=3,
        ),
        Row {
            // The retry after a head is made before the watch session starts. The session does not know which
            // server sent that head and may ask it again.
            once_each: false,
            ..row("head, then ERROR event", vec![gone_head(), gone()], 200, &[&second], 3..=3)
        },
        Row {
            once_each: false,
            ..row(
                "ERROR event, then a closed connection",
                vec![gone(), Action::Close],
                200,
                &[&second],
                3..=3,
            )
        },
        row(
            "ERROR event, then a 403 of one server",
            vec![gone(), Action::Answer(Reply::status("403", "{}"))],
            200,
            &[&second],
            3..=3,
        ),
        row(
            "ERROR event, then a 403 of every other server",
            vec![
                gone(),
                Action::Answer(Reply::status("403", "{}")),
                Action::Answer(Reply::status("403", "{}")),
            ],
            200,
            &[&error_event(GONE)],
            3..=3,
        ),
        row(
            "ERROR event, then a 500",
            vec![gone(), Action::Answer(Reply::status("500", "{}"))],
            200,
            &[&second],
            3..=3,
        ),
        row(
            "ERROR event after an ADDED event",
            vec![events(&[&first, &error_event(GONE)])],
            200,
            &[&first, &second],
            2..=2,
        ),
        row(
            "ERROR event after an ADDED event, then of 2 servers",
            vec![events(&[&first, &error_event(GONE)]), gone(), gone()],
            200,
            &[&first, &error_event(GONE)],
            3..=3,
        ),
        Row {
            once_each: false,
            ..row(
                "ERROR event of 1 server after a lost stream",
                vec![interrupted(), gone()],
                200,
                &[&first, &second],
                3..=3,
            )
        },
        Row {
            // The watch ends cleanly, so that the client watches again from its last version.
            once_each: false,
            ..row(
                "ERROR events of 3 servers after a lost stream",
                vec![interrupted(), gone(), gone(), gone()],
                200,
                &[&first],
                3..=4,
            )
        },
        row(
            "ERROR event with code 500",
            vec![events(&[&error_event(FAILED)])],
            200,
            &[&error_event(FAILED)],
            1..=1,
        ),
        Row {
            query: "limit=500&continue=abc",
            ..row("head for a list", vec![gone_head()], 410, &[GONE], 1..=1)
        },
    ]
}

/// The status and the complete body of a response.
async fn get(client: &Client, path: &str, name: &str) -> (u16, String) {
    let request = async {
        let sent = client.send(Method::GET, path, &[("accept", "application/json")], "").await;
        let (head, body) = sent.unwrap_or_else(|e| panic!("{name}: {e}")).into_parts();
        let (body, end) = read_body(body).await;
        end.unwrap_or_else(|e| panic!("{name}: {e}"));
        (head.status.as_u16(), String::from_utf8(body).unwrap())
    };
    soon(name, request).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_with_a_too_old_version_is_tried_on_every_endpoint() {
    let (peers, proxy, client) = setup(3).await;
    peers.set_default(Reply::ok(&format!("{SECOND}\n")));
    for row in rows() {
        // The previous row may have closed a connection, which jackstay replaces.
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

/// A client that repeats an old version uses up the budget for further requests. Afterwards jackstay asks
/// one endpoint and forwards its response.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn retries_of_too_old_versions_are_limited_by_a_budget() {
    const BURST: usize = 512;
    const WATCHES: usize = 300;
    let (peers, proxy, client) = setup(3).await;
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let over_budget = async || proxy.resumes("over_budget").await as usize;

    // 410 as a head: each watch makes two further requests until the burst is used up. The budget also grows by
    // a tenth of a request with each watch.
    peers.set_default(Reply::status("410", GONE));
    peers.set_actions([]);
    for _ in 0..WATCHES {
        assert_eq!(get(&client, &path, "410 as a head").await, (410, GONE.to_owned()));
    }
    let further = peers.requests().len() - WATCHES;
    println!("{WATCHES} watches, {further} further requests");
    assert!((BURST..=BURST + WATCHES / 10).contains(&further), "{further}");
    let refused = over_budget().await;
    assert!(refused > 0);

    // 410 as an ERROR event uses the same budget.
    peers.set_default(Reply::ok(&error_event(GONE)));
    peers.set_actions([]);
    for _ in 0..20 {
        assert_eq!(get(&client, &path, "410 as an event").await, (200, error_event(GONE)));
    }
    let seen = peers.requests().len();
    assert!((20..=23).contains(&seen), "{seen}");
    assert!(over_budget().await >= refused + 17);

    // Other requests refill the budget.
    peers.set_default(Reply::ok("{}"));
    for _ in 0..25 {
        assert_eq!(get(&client, CONFIGMAPS, "a list").await.0, 200);
    }
    let gone = || events(&[&error_event(GONE)]);
    peers.set_actions([gone(), gone(), events(&[FIRST, "\n"])]);
    assert_eq!(get(&client, &path, "refilled budget").await, (200, format!("{FIRST}\n")));
}
