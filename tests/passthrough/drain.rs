//! The flows that are still open near the end of a drain or of `leave_timeout`. If they all ended
//! at once, all clients would reconnect at once.

use crate::peer::ProbedServer;
use crate::rebalance::{FIRST, place_all, upstream};
use crate::support::{Certs, passthrough_config, passthrough_mode, pause};
use jackstay::config::{Config, Mode};
use jackstay::observe::Metrics;
use jackstay::proxy::passthrough::flow_entry::Progress;
use jackstay::proxy::passthrough::flow_table::{FlowHandle, FlowTable};
use jackstay::proxy::passthrough::forwarder::TcpForwarder;
use jackstay::proxy::passthrough::routing::Routing;
use std::io::ErrorKind;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::task::{JoinSet, LocalSet, spawn_local};
use tokio::time::timeout;

const FLOWS: usize = 200;
/// The drain timeout; its last fifth is 20 s.
const TIMEOUT: Duration = Duration::from_secs(100);

/// A listener without clients.
fn listener(mut config: Config, table: &Rc<FlowTable>, metrics: &Arc<Metrics>) -> Rc<TcpForwarder> {
    let upstream = Arc::new(upstream(&Certs::new(), &[FIRST]));
    passthrough_mode(&mut config).leave_timeout = TIMEOUT;
    let listener = config.listeners.remove(0);
    let Mode::Passthrough(config) = listener.mode else { unreachable!() };
    let (routes, limits) = (Vec::new(), config.limits.clone());
    let routing = Routing { upstream, routes, transparent: None, config, limits };
    let metrics = (metrics.listener("quiet"), metrics.passthrough("quiet"));
    Rc::new(TcpForwarder::new("quiet".into(), routing, metrics, Rc::clone(table)))
}

/// Drops the flows that have been ended, and returns their number.
fn drop_ended(flows: &mut Vec<FlowHandle>, reason: &str) -> usize {
    let before = flows.len();
    flows.retain(|flow| {
        let reason_given = flow.poll_end(&Context::from_waker(Waker::noop()));
        reason_given.inspect(|given| assert_eq!(given.label, reason)).is_none()
    });
    before - flows.len()
}

/// A few each second in the last fifth of the time.
#[tokio::test(start_paused = true)]
async fn remaining_flows_are_ended_gradually_in_the_last_fifth() {
    LocalSet::new()
        .run_until(async {
            fastrand::seed(7);
            let certs = Certs::new();
            let (table, metrics) = (FlowTable::new(), Metrics::new());
            spawn_local(Rc::clone(&table).run());
            let listener = listener(passthrough_config(certs.config(&[])), &table, &metrics);
            for reason in ["shutdown", "endpoint_left"] {
                let upstream = Arc::new(upstream(&certs, &[FIRST, "10.0.0.2", "10.0.0.3"]));
                let endpoint = Arc::clone(&upstream.endpoints()[1]);
                let insert = |_| {
                    let flow = table.insert(listener.routing(), &upstream, &endpoint, (-1, -1));
                    // The server has responded, so the handshake timeout does not apply.
                    flow.record(Progress { to_endpoint: 0, to_client: 1 });
                    flow
                };
                let mut left: Vec<_> = (0..FLOWS).map(insert).collect();
                pause(Duration::from_secs(1)).await;
                if reason == "endpoint_left" {
                    place_all(&upstream, &[FIRST]);
                }
                let start = tokio::time::Instant::now();
                let mut each_second = vec![0; 102];
                while !left.is_empty() && start.elapsed() < TIMEOUT + Duration::from_secs(1) {
                    pause(Duration::from_millis(250)).await;
                    if reason == "shutdown" {
                        table.end_due(listener.routing(), start.elapsed(), TIMEOUT);
                    }
                    each_second[start.elapsed().as_secs() as usize] +=
                        drop_ended(&mut left, reason);
                }
                assert!(left.is_empty(), "{reason}: {} flows remain", left.len());
                let (early, late) = each_second.split_at(80);
                assert!(early.iter().all(|n| *n == 0), "{reason}: {early:?}");
                // Ten of two hundred in each of 20 seconds.
                assert!(late[..20].iter().all(|n| (1..=30).contains(n)), "{reason}: {late:?}");
            }
        })
        .await;
}

/// With real sockets: all clients are reset, none before the last fifth, and not all at once.
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
    assert!(*first >= DRAIN * 4 / 5, "{first:?}");
    assert!(last.saturating_sub(*first) > Duration::from_millis(100), "all at once: {ends:?}");
}
