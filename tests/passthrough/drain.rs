//! What is left when a drain or a `leave_timeout` ends: flows that live, and whose clients would all
//! connect elsewhere in the same moment if they were ended in one.

use crate::prober::Probed;
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
/// What all have; the last fifth is 20 s.
const TIME: Duration = Duration::from_secs(100);

/// A listener that nobody connects to.
fn listener(mut config: Config, table: &Rc<FlowTable>, metrics: &Arc<Metrics>) -> Rc<TcpForwarder> {
    let upstream = Arc::new(upstream(&Certs::new(), &[FIRST]));
    passthrough_mode(&mut config).leave_timeout = TIME;
    let listener = config.listeners.remove(0);
    let Mode::Passthrough(config) = listener.mode else { unreachable!() };
    let (routes, limits) = (Vec::new(), listener.limits);
    let routing = Routing { upstream, routes, transparent: None, config, limits };
    let metrics = (metrics.listener("quiet"), metrics.passthrough("quiet"));
    Rc::new(TcpForwarder::new("quiet".into(), routing, metrics, Rc::clone(table)))
}

/// Lets go of the flows that were told to end, and says how many.
fn told(tickets: &mut Vec<FlowHandle>, reason: &str) -> usize {
    let before = tickets.len();
    tickets.retain(|ticket| {
        let reason_given = ticket.poll_end(&Context::from_waker(Waker::noop()));
        reason_given.inspect(|given| assert_eq!(given.label, reason)).is_none()
    });
    before - tickets.len()
}

/// In the last fifth of the time, a few each second, none before and none after.
#[tokio::test(start_paused = true)]
async fn flows_that_are_left_are_ended_a_few_at_a_time() {
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
                let enter = |_| {
                    let ticket = table.insert(listener.routing(), &upstream, &endpoint, (-1, -1));
                    // The server has answered: it is not the handshake that takes long.
                    ticket.record(Progress { to_server: false, to_client: true });
                    ticket
                };
                let mut left: Vec<_> = (0..FLOWS).map(enter).collect();
                pause(Duration::from_secs(1)).await;
                if reason == "endpoint_left" {
                    place_all(&upstream, &[FIRST]);
                }
                let start = tokio::time::Instant::now();
                let mut each_second = vec![0; 102];
                while !left.is_empty() && start.elapsed() < TIME + Duration::from_secs(1) {
                    pause(Duration::from_millis(250)).await;
                    if reason == "shutdown" {
                        table.end_due(listener.routing(), start.elapsed(), TIME);
                    }
                    each_second[start.elapsed().as_secs() as usize] += told(&mut left, reason);
                }
                assert!(left.is_empty(), "{reason}: {} are left", left.len());
                let (early, late) = each_second.split_at(80);
                assert!(early.iter().all(|n| *n == 0), "{reason}: {early:?}");
                // Ten of two hundred in each of 20 seconds.
                assert!(late[..20].iter().all(|n| (1..=30).contains(n)), "{reason}: {late:?}");
            }
        })
        .await;
}

/// A drain through real sockets: everybody is reset, nobody before the last fifth, and not all of
/// them in one moment.
#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_drain_that_ends_are_reset_one_after_the_other() {
    const DRAIN: Duration = Duration::from_secs(10);
    let certs = Certs::new();
    let mut server = Probed::start(&certs, &["h2"]).await;
    let mut config = passthrough_config(certs.config(&[server.address]));
    config.shutdown.drain_timeout = DRAIN;
    let proxy = certs.start(config);
    proxy.wait_ready(1).await;
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
    let ends = timeout(Duration::from_secs(60), clients.join_all()).await.expect("all are reset");
    let (first, last) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
    println!("reset after {first:?} to {last:?}");
    assert!(*first >= DRAIN * 4 / 5, "{first:?}");
    assert!(last.saturating_sub(*first) > Duration::from_millis(100), "in one moment: {ends:?}");
}
