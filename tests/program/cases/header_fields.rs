//! Heads with many fields or large ones: the result does not depend on the version of HTTP, and a limit is named by a `Status`.

use crate::cases::peer::{Part, Rig, Script, addresses, start_peers};
use crate::support::wire;
use crate::support::{CONFIGMAPS, Certs, soon, until};
use http::Method;
use serde_json::Value;
use std::fmt::Write as _;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const EXEC: &str = "/api/v1/namespaces/default/pods/p/exec?command=sh";

/// jackstay in front of a peer, whose response to a list has `fields`.
async fn start(fields: Vec<(&'static str, String)>) -> Rig {
    let (script, certs) = (Script::default(), Certs::new());
    let response = [Part::Head(200, "application/json", fields), Part::data("{}"), Part::End];
    script.set(CONFIGMAPS, &[&response]);
    let peers = start_peers(&certs, 1, &script).await;
    Rig::start(certs, &addresses(&peers), |_| {}).await
}

/// The headers of a user whom a front end impersonates with this many groups.
fn groups(count: usize) -> Vec<(&'static str, String)> {
    let group = |number| ("impersonate-group", format!("cn=team-{number},ou=groups"));
    let user = [("impersonate-user", "jane".to_owned())];
    user.into_iter().chain((0..count).map(group)).collect()
}

/// Status and body of a list over HTTP/2 or HTTP/1.1.
async fn list(rig: &Rig, http2: bool, headers: &[(&'static str, String)]) -> (u16, Vec<u8>) {
    let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let client = rig.client(http2).await;
    let reply = client.request(Method::GET, CONFIGMAPS, &headers, "");
    let reply = soon("a response", reply).await.unwrap();
    (reply.status.as_u16(), reply.body.to_vec())
}

/// Status and body of the response to an upgrade.
async fn upgrade(rig: &Rig, headers: &[(&'static str, String)]) -> (u16, Vec<u8>) {
    let mut stream =
        wire::connect_with(rig.address, &rig.certs, Some(&rig.certs.admin), "http/1.1").await;
    let mut fields = String::new();
    for (name, value) in headers {
        write!(fields, "{name}: {value}\r\n").unwrap();
    }
    let head = format!(
        "GET {EXEC} HTTP/1.1\r\nhost: a\r\nconnection: Upgrade\r\nupgrade: websocket\r\n{fields}\r\n"
    );
    // A refused head may not be read to its end.
    let _ = stream.write_all(head.as_bytes()).await;
    let mut response = Vec::new();
    while !response.ends_with(b"\r\n\r\n") {
        response.push(soon("a head", stream.read_u8()).await.unwrap());
    }
    let status = String::from_utf8_lossy(&response[9..12]).parse().unwrap();
    let head = String::from_utf8(response).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    soon("a body", stream.read_exact(&mut body)).await.unwrap();
    (status, body)
}

/// The message of a `Status` with this code.
fn message(code: u16, body: &[u8]) -> String {
    let status: Value = serde_json::from_slice(body)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(body)));
    assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &code.into()), "{status}");
    status["message"].as_str().expect("a message").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_with_many_fields_has_one_result_over_each_version() {
    let rig = start(vec![]).await;
    let large = |size| vec![("x-large", "x".repeat(size))];
    for (what, headers, is_served) in [
        ("120 groups", groups(120), true),
        ("500 groups", groups(500), true),
        ("2,000 groups", groups(2_000), false),
        ("10,000 groups", groups(10_000), false),
        ("a field of 60 KiB", large(60 << 10), true),
        ("a field of 100 KiB", large(100 << 10), false),
        ("a field of 300 KiB", large(300 << 10), false),
        ("a field of 900 KiB", large(900 << 10), false),
    ] {
        let results = [
            ("HTTP/2", list(&rig, true, &headers).await),
            ("HTTP/1.1", list(&rig, false, &headers).await),
            ("an upgrade", upgrade(&rig, &headers).await),
        ];
        for (how, (code, body)) in results {
            if is_served {
                assert!(matches!(code, 200 | 101), "{what} over {how}: {code}");
                continue;
            }
            assert_eq!(code, 431, "{what} over {how}");
            let message = message(431, &body);
            assert!(message.contains("larger than 65536 bytes"), "{what} over {how}: {message}");
            assert!(message.contains("limits.max_header_bytes"), "{what} over {how}: {message}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_with_too_large_a_head_gets_a_status_that_says_so() {
    let many = |count| (0..count).map(|at| ("x-field", format!("value-{at:05}"))).collect();
    for (what, fields, is_served) in [
        // The client of the test accepts 100 fields.
        ("80 fields", many(80), true),
        ("2,000 fields", many(2_000), false),
        ("a field of 80 KiB", vec![("x-large", "x".repeat(80 << 10))], false),
        ("a field of 300 KiB", vec![("x-large", "x".repeat(300 << 10))], false),
    ] {
        let rig = start(fields).await;
        for http2 in [true, false] {
            // A head far above 64 KiB has ended the upstream connection, and the next one may not be open yet.
            let (mut code, mut body) = (503, Vec::new());
            until("an apiserver is reachable", async || {
                (code, body) = list(&rig, http2, &[]).await;
                code != 503
            })
            .await;
            if is_served {
                assert_eq!(code, 200, "{what}, http2: {http2}");
                continue;
            }
            let message = message(502, &body);
            assert!(message.contains("larger than 64 KiB"), "{what}, http2: {http2}: {message}");
        }
    }
}
