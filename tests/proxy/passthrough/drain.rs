//! Flows that are still open in the last fifth of a drain, or in the second half of `leave_timeout`, are ended
//! gradually. If all of them ended at once, all clients would reconnect at once.

use crate::passthrough::peer::ProbedServer;
use crate::passthrough::rebalance::{FIRST, set_endpoints, upstream};
use crate::support::{Certs, passthrough_config, passthrough_mode, pause};
use jackstay::proxy::passthrough::flow_entry::Progress;
use jackstay::proxy::passthrough::flow_table::{FlowHandle, FlowTable};
use jackstay::proxy::passthrough::routing::{ListenerRouting, Routing};
use jackstay::upstream::endpoint::Observation;
use jackstay_config::{Config, FlowSettings, Passthrough};
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::task::{JoinSet, LocalSet, spawn_local};
use tokio::time::timeout;

const FLOWS: usize = 200;
/// The drain timeout; its last fifth is 20 s, and its second half 50 s.
const TIMEOUT: Duration = Duration::from_secs(100);

/// The routing of a listener whose flows the test inserts into the table.
fn routing(mut config: Config) -> Rc<ListenerRouting> {
    let upstream = upstream(&Certs::new(), &[FIRST]);
    let Passthrough { flows, limits, .. } = passthrough_mode(&mut config).clone();
    let flows = FlowSettings { leave_timeout: TIMEOUT, ..flows };
    let routing = Routing { upstream, routes: Vec::new(), transparent: None, flows, limits };
    Rc::new(ListenerRouting::new("quiet".into(), routing))
}

/// Removes the flows that have been ended, asserts that `reason` is the reason, and returns their number.
fn remove_ended(flows: &mut Vec<FlowHandle>, reason: &str) -> usize {
    let before = flows.len();
    flows.retain(|flow| {
        let end = flow.poll_end(&Context::from_waker(Waker::noop()));
        end.inspect(|end| assert_eq!(end.label, reason)).is_none()
    });
    before - flows.len()
}

#[tokio::test(start_paused = true)]
async fn remaining_flows_are_ended_gradually_in_the_last_part() {
    LocalSet::new()
        .run_until(async {
            fastrand::seed(7);
            let certs = Certs::new();
            let table = FlowTable::new();
            spawn_local(Rc::clone(&table).run());
            let routing = routing(passthrough_config(certs.config(&[])));
            for (reason, last_part) in [("shutdown", 20), ("endpoint_left", 50)] {
                let upstream = upstream(&certs, &[FIRST, "10.0.0.2", "10.0.0.3"]);
                let endpoint = Arc::clone(&upstream.endpoints()[1]);
                let insert = |_| {
                    let flow = table.insert(&routing, &upstream, &endpoint, (-1, -1));
                    // The server has responded, so the handshake timeout does not apply.
                    flow.record(Progress { to_endpoint: 0, to_client: 1 });
                    flow
                };
                let mut open: Vec<_> = (0..FLOWS).map(insert).collect();
                pause(Duration::from_secs(1)).await;
                if reason == "endpoint_left" {
                    set_endpoints(&upstream, &[FIRST]);
                }
                let start = tokio::time::Instant::now();
                let mut each_second = vec![0; 102];
                while !open.is_empty() && start.elapsed() < TIMEOUT + Duration::from_secs(1) {
                    pause(Duration::from_millis(250)).await;
                    if reason == "shutdown" {
                        table.end_due(&routing, start.elapsed(), TIMEOUT);
                    }
                    each_second[start.elapsed().as_secs() as usize] +=
                        remove_ended(&mut open, reason);
                }
                assert!(open.is_empty(), "{reason}: {} flows remain", open.len());
                let (early, late) = each_second.split_at(100 - last_part);
                assert!(early.iter().all(|n| *n == 0), "{reason}: {early:?}");
                // Four or ten flows on average in each of the seconds of the last part.
                assert!(late[..last_part].iter().all(|n| *n <= 30), "{reason}: {late:?}");
                let with_end = late[..last_part].iter().filter(|n| **n > 0).count();
                assert!(with_end > last_part * 4 / 5, "{reason}: {late:?}");
            }
        })
        .await;
}

/// An endpoint that leaves the set and returns, as while a member rejoins or when an answer of a source lacks it.
#[tokio::test(start_paused = true)]
async fn flows_to_an_endpoint_that_returns_continue_and_follow_it() {
    LocalSet::new()
        .run_until(async {
            let certs = Certs::new();
            let table = FlowTable::new();
            spawn_local(Rc::clone(&table).run());
            let routing = routing(passthrough_config(certs.config(&[])));
            let upstream = upstream(&certs, &[FIRST, "10.0.0.2", "10.0.0.3"]);
            let insert = || {
                let endpoint = Arc::clone(&upstream.endpoints()[1]);
                let flow = table.insert(&routing, &upstream, &endpoint, (-1, -1));
                flow.record(Progress { to_endpoint: 0, to_client: 1 });
                flow
            };
            let mut open: Vec<_> = (0..20).map(|_| insert()).collect();
            pause(Duration::from_secs(1)).await;
            let both = [FIRST, "10.0.0.2"];
            set_endpoints(&upstream, &both[..1]);
            pause(TIMEOUT / 4).await;
            set_endpoints(&upstream, &both);
            // Flows of the old and of the new endpoint are one endpoint's.
            open.push(insert());
            pause(TIMEOUT * 2).await;
            assert_eq!(remove_ended(&mut open, "none may end"), 0);
            assert_eq!(upstream.endpoints()[1].flows(), 21);
            drop(open.pop());
            // A second removal begins a new time limit.
            set_endpoints(&upstream, &both[..1]);
            pause(TIMEOUT / 4).await;
            assert_eq!(remove_ended(&mut open, "none may end yet"), 0);
            set_endpoints(&upstream, &both);
            pause(Duration::from_secs(1)).await;
            // The death of the returned endpoint is that of the flows' endpoint.
            upstream.endpoints()[1].observe(Observation::Connected);
            upstream.endpoints()[1].observe(Observation::Unresponsive("no PONG"));
            pause(Duration::from_secs(1)).await;
            assert_eq!(remove_ended(&mut open, "endpoint_dead"), 20);
        })
        .await;
}

/// With real sockets.
#[tokio::test(flavor = "multi_thread")]
async fn drain_resets_remaining_clients_gradually() {
    const DRAIN: Duration = Duration::from_secs(10);
    let (_certs, mut server, proxy) =
        ProbedServer::setup_with(&["h2"], |config| config.shutdown.drain_timeout = DRAIN).await;
    let mut servers = Vec::new();
    let mut clients = JoinSet::new();
    let mut flows = Vec::new();
    for _ in 0..60 {
        let (client, server) = server.flow(&proxy).await;
        flows.push(client);
        servers.push(server);
    }
    let start = Instant::now();
    for mut client in flows {
        clients.spawn(async move {
            let error = client.read_u8().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            start.elapsed()
        });
    }
    proxy.running.drain();
    let ends =
        timeout(Duration::from_secs(60), clients.join_all()).await.expect("all clients are reset");
    let (first, last) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
    println!("reset after {first:?} to {last:?}");
    assert!(*first >= DRAIN * 4 / 5, "a client was reset before the last fifth: {first:?}");
    let spread = last.saturating_sub(*first);
    assert!(spread > Duration::from_millis(100), "all clients were reset at once: {ends:?}");
}
