//! Tests of the whole discovery controller on a paused clock, and helpers for the tests of this module.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::sleep;

use super::controller::TICK;
use super::{SharedContext, run, state_file};
use crate::control::endpoint_set;
use crate::observe::{LivenessMonitor, Metrics};
use crate::upstream;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::stats::ConnectionStats;
use jackstay_config::{Discovery, Upstream, validate_text};
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::source::{Candidate, EndpointSource, SavedEndpoints};
use jackstay_testkit::wait::until;

/// 100 connections and 100 passthrough flows that never end keep a removed endpoint draining.
#[tokio::test(start_paused = true)]
async fn run_1000_updates_during_an_endless_drain_applies_each_within_1500_ms() {
    const LIMIT: Duration = Duration::from_millis(1500);
    let address = |host: String| EndpointAddress { host, port: 9 };
    let (removed, kept) = (address("127.2.1.1".into()), address("127.2.1.2".into()));
    let mut config = Upstream { endpoints: vec![removed.clone(), kept.clone()], ..config() };
    let upstream = upstream::Upstream::load(config.clone(), &[], &Metrics::new());
    endpoint_set::replace_endpoints(&upstream, &endpoint_set::static_endpoints(&config));
    let shared = shared(None);
    // Both endpoints have connections and flows that never end.
    let mut endless = Vec::new();
    let endpoints = Arc::clone(&upstream.endpoints());
    for endpoint in endpoints.iter() {
        for _ in 0..100 {
            let connection = new_connection();
            endpoint.connection_opened(&connection);
            endless.push((connection, endpoint.track_flow()));
        }
    }
    let applied = async || {
        let wanted = upstream.config().endpoints.clone();
        let updated = clock::now();
        loop {
            let set = Arc::clone(&upstream.endpoints());
            let has =
                |address: &EndpointAddress| set.iter().any(|endpoint| endpoint.address == *address);
            if set.len() == wanted.len() && wanted.iter().all(has) {
                return clock::elapsed(updated);
            }
            assert!(clock::elapsed(updated) <= LIMIT, "{wanted:?} is not applied");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let test = async {
        // The first update precedes the first step of the controller, so the initial set is outdated then.
        let controller = spawn_local(run(Arc::clone(&upstream), Arc::clone(&shared)));
        let mut slowest = Duration::ZERO;
        for update in 0..1000 {
            config.endpoints = vec![kept.clone(), address(format!("127.2.0.{}", update % 200 + 1))];
            upstream.reconfigure(config.clone());
            slowest = slowest.max(applied().await);
        }
        println!("1,000 updates, the slowest after {slowest:?} of paused time");
        let idle = shared.liveness.idle_times();
        assert!(
            matches!(&idle[..], [(name, idle)] if name == "endpoints of u" && *idle <= TICK),
            "each step is recorded: {idle:?}"
        );
        controller.abort();
    };
    LocalSet::new().run_until(test).await;
    let removed = endpoints.iter().find(|endpoint| endpoint.address == removed).unwrap();
    assert_eq!(removed.flows(), 100, "the endpoint still drains");
    drop(endless);
}

/// Until their source has answered or is removed, saved endpoints are in the set and in the state file.
/// Saved endpoints of a source that is not configured are in neither.
#[tokio::test(start_paused = true)]
async fn run_saved_endpoints_count_until_their_source_answers_or_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let address = |last: u8| EndpointAddress { host: format!("127.2.1.{last}"), port: 9 };
    let saved = |source, last| (source, Candidate { address: address(last), server_name: None });
    let hour_ago = wall_clock() - Duration::from_secs(3600);
    let endpoints = vec![saved(EndpointSource::Slices, 3), saved(EndpointSource::Dns, 4)];
    state_file::write(dir.path(), "u", &endpoints, hour_ago).unwrap();
    let file = dir.path().join("endpoints");
    std::fs::write(&file, address(2).to_string()).unwrap();
    // No DNS name is configured, and the kubeconfig for the slices does not exist.
    let mut config = Upstream {
        endpoints: vec![address(1)],
        endpoints_file: Some(file),
        discovery: Discovery { kubeconfig: Some(dir.path().join("none")) },
        ..config()
    };
    let upstream = upstream::Upstream::load(config.clone(), &[], &Metrics::new());
    let shared = shared(Some(dir.path().to_owned()));
    // Waits until the set has the addresses with these last bytes.
    let set_becomes = async |last_bytes: &[u8]| {
        until(&format!("the set is {last_bytes:?}"), async || {
            let set = upstream.endpoints();
            let contains = |last: &u8| set.iter().any(|e| e.address == address(*last));
            assert!(!contains(&4), "DNS is not configured");
            set.len() == last_bytes.len() && last_bytes.iter().all(contains)
        })
        .await;
    };
    let on_disk = || state_file::read(dir.path(), "u", wall_clock()).unwrap().unwrap();
    let file_becomes = async |expected: &SavedEndpoints| {
        let is_written = async || on_disk().endpoints == *expected;
        until(&format!("the file has {expected:?}"), is_written).await;
    };
    let test = async {
        let controller = spawn_local(run(Arc::clone(&upstream), Arc::clone(&shared)));
        set_becomes(&[1, 2, 3]).await;
        // Once an endpoint is usable, the file gets the answers and the saved endpoints that still count.
        let set = Arc::clone(&upstream.endpoints());
        let usable = set.iter().find(|e| e.address == address(2)).unwrap();
        let connection = new_connection();
        usable.connection_opened(&connection);
        file_becomes(&vec![saved(EndpointSource::File, 2), saved(EndpointSource::Slices, 3)]).await;
        assert!(on_disk().age >= Duration::from_secs(3599), "the age of the saved endpoint");
        config.discovery.kubeconfig = None;
        upstream.reconfigure(config.clone());
        set_becomes(&[1, 2]).await;
        file_becomes(&vec![saved(EndpointSource::File, 2)]).await;
        assert!(on_disk().age < Duration::from_secs(3599));
        // A state file is written to another directory when it is configured.
        let other = dir.path().join("other");
        shared.state_dir.store(Arc::new(Some(other.clone())));
        let is_written = async || state_file::read(&other, "u", wall_clock()).unwrap().is_some();
        until("the file is in the other directory", is_written).await;
        controller.abort();
    };
    LocalSet::new().run_until(test).await;
}

fn new_connection() -> Arc<ConnectionStats> {
    ConnectionStats::new(CredentialClass::Anonymous, None, None, clock::now())
}

fn shared(state_dir: Option<PathBuf>) -> Arc<SharedContext> {
    Arc::new(SharedContext {
        bound: ArcSwap::default(),
        state_dir: Arc::new(ArcSwap::from_pointee(state_dir)),
        liveness: LivenessMonitor::start().unwrap(),
        system: jackstay_net::dns::ResolverFiles::default(),
        host: crate::control::host_addresses::HostAddresses::of_process(),
    })
}

/// An upstream for a passthrough listener, which needs no certificate files; otherwise the defaults.
pub(in crate::control) fn config() -> Upstream {
    let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}]\n";
    validate_text(Path::new("test.yaml"), text).unwrap().config.upstreams.remove(0)
}
