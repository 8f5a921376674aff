//! Restarts of a process that knows its endpoints only from the state file.

use super::setup::Setup;
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::wait::{PATIENCE, pause, until};
use crate::support::{CONFIGMAPS, HangingEndpoint, long_form, to_strings, write_lines};
use jackstay_apiserver::client::Client;
use jackstay_core::discovery::address::EndpointAddress;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;

/// The time from the start of the process to the first response. It is 0.1 s on an idle machine.
const FIRST_RESPONSE: Duration = Duration::from_secs(1);

/// How a process ends before the next one starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// It has drained.
    Drained,
    /// It drains still.
    Draining,
    /// It was killed.
    Killed,
}

async fn first_response(setup: &Setup) {
    let credentials = setup.cluster.certs.credentials();
    let request = async || {
        let client = Client::connect(setup.address, &credentials).await?;
        client.get(CONFIGMAPS).await
    };
    loop {
        let result = timeout(PATIENCE, request()).await.expect("an answer");
        if result.is_ok_and(|reply| reply.status.is_success()) {
            return;
        }
        pause(Duration::from_millis(5)).await;
    }
}

async fn restart_from_saved_endpoints(alive: usize, dead: &[SocketAddr]) {
    let mut setup = Setup::with(alive, |config| {
        let dir = config.upstreams[0].tls.ca_file.clone().unwrap();
        let endpoints = dir.with_file_name("endpoints");
        let upstream = &mut config.upstreams[0];
        let alive = upstream.endpoints.iter().map(ToString::to_string);
        let all: Vec<_> = alive.chain(to_strings(dead)).collect();
        write_lines(&endpoints, &all);
        upstream.endpoints_file = Some(endpoints);
        // Not resolvable (RFC 6761 section 6.4).
        upstream.endpoints = vec![EndpointAddress { host: "apiserver.invalid".into(), port: 6443 }];
    })
    .await;
    let saved = setup.state_dir().join("control-plane.json");
    let count = alive + dead.len();
    until("the endpoints are saved", async || {
        let text = std::fs::read_to_string(&saved).unwrap_or_default();
        text.matches("\"address\"").count() == count
    })
    .await;
    std::fs::remove_file(setup.cluster.certs.path().join("endpoints")).unwrap();
    let rounds = if long_form() { 20 } else { 2 };
    for end in [End::Drained, End::Draining, End::Killed] {
        let mut times = Vec::new();
        for _ in 0..rounds {
            setup.process.signal(if end == End::Killed { "KILL" } else { "TERM" });
            if end != End::Draining {
                setup.process.wait_exit().await;
            }
            let start = Stopwatch::start();
            let new = setup.start(&[]);
            let mut old = setup.replace(new);
            first_response(&setup).await;
            times.push(start.elapsed());
            if end == End::Draining {
                old.wait_exit().await;
            }
        }
        times.sort();
        let longest = *times.last().unwrap();
        println!(
            "{end:?}, {alive} alive, {} dead: median {:?}, longest {longest:?}",
            dead.len(),
            times[times.len() / 2]
        );
        check_figure(
            "first response from saved endpoints after a restart",
            longest,
            FIRST_RESPONSE,
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_with_saved_endpoints_only_serves_within_a_second() {
    restart_from_saved_endpoints(2, &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_with_a_saved_endpoint_that_hangs_serves_within_a_second() {
    let (first, second) = (HangingEndpoint::start(), HangingEndpoint::start());
    restart_from_saved_endpoints(1, &[first.address(), second.address()]).await;
}
