//! The transport against servers that refuse, go away, hang or limit streams.

use std::rc::Rc;

use h2::Reason;
use http::Method;
use serde_json::json;

use super::super::transport::{Client, ClientOptions, Failure, Outgoing};
use super::server::{Order, Rig};
use super::{run, seconds};
use crate::checker::Collection;

const LIMIT: std::time::Duration = std::time::Duration::from_secs(300);

fn get() -> Outgoing {
    Outgoing::get(Collection::CONFIG_MAPS.object("o1"))
}

async fn status(client: &Client, outgoing: &Outgoing) -> Result<u16, Failure> {
    let request = client.next_request();
    client.call(request, outgoing, LIMIT).await.map(|answer| answer.status)
}

#[test]
fn requests_share_one_connection() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        for _ in 0..3 {
            assert_eq!(status(&client, &get()).await, Ok(200));
        }
        assert_eq!(client.dials(), 1);
        client.close_connections();
        tokio::task::yield_now().await;
        assert_eq!(status(&client, &get()).await, Ok(200));
        assert_eq!(client.dials(), 2);
        assert_eq!(Rc::strong_count(&rig.server.open), 2);
        drop(client);
        super::pass(seconds(1)).await;
        assert_eq!(Rc::strong_count(&rig.server.open), 1, "a connection is left over");
    });
}

#[test]
fn unprocessed_request_is_sent_again_whatever_its_method() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        let body = json!({ "metadata": { "annotations": { "a": "b" } } });
        let path = Collection::CONFIG_MAPS.object("o1");
        let patch = Outgoing::json(Method::PATCH, path, &body);
        for (count, reason, expected) in [
            (3, Reason::REFUSED_STREAM, Ok(200)),
            (1, Reason::PROTOCOL_ERROR, Ok(200)),
            (1, Reason::INTERNAL_ERROR, Err(Failure::Reset)),
            (9, Reason::REFUSED_STREAM, Err(Failure::Reset)),
        ] {
            rig.fault(|faults| faults.resets = Some((count, reason)));
            let began = tokio::time::Instant::now();
            assert_eq!(status(&client, &patch).await, expected, "{count} {reason}");
            let took = began.elapsed();
            // At once, then after 1 s and 2 s, with 10 % jitter.
            let is_slow = count == 3;
            assert!(!is_slow || (seconds(3)..seconds(4)).contains(&took), "{took:?}");
        }
        let sent = rig.server.requests.borrow().len();
        assert_eq!(sent, 4 + 2 + 1 + 8);
    });
}

#[test]
fn goaway_ends_no_request_and_the_next_one_has_a_new_connection() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        assert_eq!(status(&client, &get()).await, Ok(200));
        let running = client.clone();
        let slow = tokio::task::spawn_local(async move { status(&running, &get()).await });
        super::pass(std::time::Duration::from_millis(1)).await;
        rig.order(Order::GoAway);
        assert_eq!(slow.await.unwrap(), Ok(200));
        assert_eq!(status(&client, &get()).await, Ok(200));
        assert_eq!(client.dials(), 2);
    });
}

#[test]
fn connection_that_goes_away_takes_no_request_while_its_last_stream_runs() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        rig.fault(|faults| faults.hangs = true);
        let running = client.clone();
        let held = tokio::task::spawn_local(async move { status(&running, &get()).await });
        super::pass(seconds(1)).await;
        rig.fault(|faults| faults.hangs = false);
        rig.order(Order::GoAway);
        super::pass(seconds(1)).await;
        let began = tokio::time::Instant::now();
        assert_eq!(status(&client, &get()).await, Ok(200));
        assert!(began.elapsed() < seconds(1));
        assert_eq!((client.dials(), Rc::strong_count(&rig.server.open)), (2, 3));
        // The connection ends with its last stream.
        held.abort();
        super::pass(seconds(1)).await;
        assert_eq!(Rc::strong_count(&rig.server.open), 2);
    });
}

#[test]
fn connection_that_answers_no_ping_is_lost_after_45_seconds() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        assert_eq!(status(&client, &get()).await, Ok(200));
        rig.order(Order::Freeze);
        tokio::task::yield_now().await;
        let began = tokio::time::Instant::now();
        assert_eq!(status(&client, &get()).await, Err(Failure::Lost));
        let took = began.elapsed();
        assert!((seconds(44)..=seconds(46)).contains(&took), "{took:?}");
        assert_eq!(status(&client, &get()).await, Ok(200));
    });
}

#[test]
fn idle_connection_lives_as_long_as_it_answers_pings() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        rig.fault(|faults| faults.hangs = true);
        let request = client.next_request();
        let answer = client.call(request, &get(), LIMIT).await.map(|answer| answer.status);
        assert_eq!(answer, Err(Failure::Timeout));
        rig.fault(|faults| faults.hangs = false);
        assert_eq!(status(&client, &get()).await, Ok(200));
        assert_eq!(client.dials(), 1);
        assert_eq!(*rig.server.cancelled.borrow(), 1);
    });
}

#[test]
fn connection_that_is_closed_fails_its_requests() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        rig.fault(|faults| faults.hangs = true);
        let running = client.clone();
        let open = tokio::task::spawn_local(async move { status(&running, &get()).await });
        super::pass(seconds(1)).await;
        rig.order(Order::Close);
        assert_eq!(open.await.unwrap(), Err(Failure::Closed));
    });
}

#[test]
fn dial_and_handshake_have_limits() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        let began = tokio::time::Instant::now();
        rig.fault(|faults| faults.refuses = true);
        assert_eq!(status(&client, &get()).await, Err(Failure::Refused));
        assert!(began.elapsed() < seconds(1));
        rig.fault(|faults| (faults.refuses, faults.ignores_connects) = (false, true));
        assert_eq!(status(&client, &get()).await, Err(Failure::Connect));
        assert_eq!(began.elapsed().as_secs(), 30);
        rig.fault(|faults| (faults.ignores_connects, faults.ignores_handshakes) = (false, true));
        assert_eq!(status(&client, &get()).await, Err(Failure::Connect));
        assert_eq!(began.elapsed().as_secs(), 40);
    });
}

#[test]
fn requests_above_the_limit_of_streams_have_another_connection() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        rig.fault(|faults| faults.max_streams = Some(3));
        assert_eq!(status(&client, &get()).await, Ok(200));
        let mut requests = tokio::task::JoinSet::new();
        for _ in 0..5 {
            let client = client.clone();
            requests.spawn_local(async move { status(&client, &get()).await });
        }
        while let Some(result) = requests.join_next().await {
            assert_eq!(result.unwrap(), Ok(200));
        }
        // One dial for each request that found no stream.
        assert_eq!(client.dials(), 3);
    });
}

#[test]
fn retry_after_is_honoured() {
    run(async {
        let rig = Rig::start();
        let client = rig.client(ClientOptions::default());
        rig.fault(|faults| faults.overloaded = Some((2, 3)));
        let began = tokio::time::Instant::now();
        assert_eq!(status(&client, &get()).await, Ok(200));
        assert_eq!(began.elapsed().as_secs(), 6);
        rig.fault(|faults| faults.overloaded = Some((1, 3)));
        let options = ClientOptions { retries_after: false, ..ClientOptions::default() };
        assert_eq!(status(&rig.client(options), &get()).await, Ok(429));
    });
}
