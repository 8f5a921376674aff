use std::future::poll_fn;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::task::Poll;

use jackstay_core::discovery::address::EndpointAddress;
use jackstay_sys::clock;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{advance, timeout};

use super::super::routing::Routing;
use super::*;
use crate::observe::{Metrics, PassthroughMetrics};
use jackstay_config as config;

const DAY: Duration = Duration::from_secs(24 * 3600);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// A table with the routing and the endpoint of its flows.
pub(in super::super) struct Setup {
    table: Rc<FlowTable>,
    routing: Rc<ListenerRouting>,
    upstream: Arc<Upstream>,
    endpoint: Arc<Endpoint>,
    metrics: Arc<Metrics>,
    /// A connection whose peer is alive and silent.
    sockets: (TcpStream, TcpStream),
}

impl Setup {
    pub(in super::super) fn new() -> Self {
        let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                    listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u,\n\
                    idle_timeout: 1m, limits: {handshake_timeout: 10s}}]\n";
        let config = config::validate_text(Path::new("test.yaml"), text).unwrap().config;
        let passthrough = config.listeners[0].passthrough().unwrap().clone();
        let upstream = config.upstreams.into_iter().next().unwrap();
        let metrics = Metrics::new();
        let upstream = Upstream::load(upstream, &[], &metrics);
        let routing = Routing {
            upstream: Arc::clone(&upstream),
            routes: Vec::new(),
            transparent: None,
            limits: passthrough.limits.clone(),
            flows: passthrough.flows,
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Self {
            table: FlowTable::new(),
            routing: Rc::new(ListenerRouting::new("l".to_owned(), routing)),
            upstream,
            endpoint: new_endpoint(&metrics),
            metrics,
            sockets: (client, listener.accept().unwrap().0),
        }
    }

    pub(in super::super) fn insert(&self) -> FlowHandle {
        let sockets = (self.sockets.0.as_raw_fd(), self.sockets.1.as_raw_fd());
        self.table.insert(&self.routing, &self.upstream, &self.endpoint, sockets)
    }

    /// Checks the flows now.
    pub(in super::super) fn check_flows(&self) {
        self.table.check_flows(clock::now());
    }

    pub(in super::super) fn metrics(&self) -> Arc<PassthroughMetrics> {
        self.metrics.passthrough("l")
    }
}

/// The endpoint of the configuration, as each change of the set makes it.
fn new_endpoint(metrics: &Arc<Metrics>) -> Arc<Endpoint> {
    let address = EndpointAddress { host: "10.0.0.1".to_owned(), port: 6443 };
    Endpoint::new(&"u".into(), &address, None, metrics.endpoint("u", "e")).unwrap()
}

/// Waits for the end of a flow. Returns the label of its reason.
async fn end_of(flow: &FlowHandle) -> &'static str {
    let end = poll_fn(|cx| flow.poll_end(cx).map_or(Poll::Pending, Poll::Ready));
    timeout(10 * IDLE_TIMEOUT, end).await.expect("the flow ends").label
}

#[tokio::test(start_paused = true)]
async fn table_that_is_months_old_ends_idle_and_unanswered_flows() {
    // The first age is half a minute before a u32 of milliseconds overflows.
    let before_overflow = Duration::from_millis((1 << 32) - 30_000);
    for age in [before_overflow, 50 * DAY, 500 * DAY] {
        let check = async {
            let setup = Setup::new();
            let run = spawn_local(Rc::clone(&setup.table).run());
            advance(age).await;
            let inserted = clock::now();
            let (unanswered, idle) = (setup.insert(), setup.insert());
            idle.record(Progress { to_client: 1, ..Progress::default() });
            for (flow, reason, limit) in [
                (unanswered, "handshake_timeout", HANDSHAKE_TIMEOUT),
                (idle, "idle_timeout", IDLE_TIMEOUT),
            ] {
                assert_eq!(end_of(&flow).await, reason, "{age:?}");
                let after = clock::elapsed(inserted);
                let latest = limit + flow_health::MAX_CHECK_INTERVAL + 2 * SCAN_INTERVAL;
                assert!((limit..latest).contains(&after), "{reason} after {after:?}");
            }
            run.abort();
        };
        LocalSet::new().run_until(check).await;
    }
}

/// An endpoint leaves the set and returns, and the first new flow comes before or after the table notices that.
#[test]
fn path_of_a_returned_endpoint_stays_lossy() {
    for has_new_flow in [false, true] {
        let setup = Setup::new();
        let old = setup.insert();
        let lossy_path = |change: &mut dyn FnMut(&mut LossyPath)| {
            let endpoints = &mut setup.table.slots.borrow_mut().endpoints;
            for entry in endpoints.iter_mut() {
                change(&mut entry.lossy_path);
            }
            endpoints.len()
        };
        for _ in 0..flow_health::LOSSY_AFTER {
            lossy_path(&mut LossyPath::record_refuted);
        }
        let returned = new_endpoint(&setup.metrics);
        setup.endpoint.remove();
        setup.upstream.set_endpoints(vec![Arc::clone(&returned)]);
        let sockets = (setup.sockets.0.as_raw_fd(), setup.sockets.1.as_raw_fd());
        let insert = || setup.table.insert(&setup.routing, &setup.upstream, &returned, sockets);
        let new = has_new_flow.then(insert);
        let now = clock::now();
        setup.table.adopt_returned_endpoints(now);
        let mut is_lossy = Vec::new();
        assert_eq!(lossy_path(&mut |path| is_lossy.push(path.is_lossy(now))), 1);
        assert_eq!(is_lossy, [true], "a new flow: {has_new_flow}");
        drop((old, new));
        // Nothing stays of an endpoint without flows.
        assert_eq!(lossy_path(&mut |_| ()), 0);
    }
}
