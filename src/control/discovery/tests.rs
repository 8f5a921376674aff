//! The loop as a whole, on a paused clock; and what the tests of this module share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep};

use super::merge::{Candidate, SavedEndpoints};
use super::{SharedContext, TICK, dns, run, state_file};
use crate::config::{Discovery, EndpointAddress, Upstream, validate_text};
use crate::control::endpoint_set;
use crate::observe::{LivenessMonitor, Metrics};
use crate::upstream;
use crate::upstream::credentials::{CredentialClass, Credentials};
use crate::upstream::endpoint_sources::EndpointSource;
use crate::upstream::stats::ConnectionStats;

/// A hundred connections that never end, and as many passed flows, hang on an endpoint that has
/// left.
#[tokio::test(start_paused = true)]
async fn a_thousand_updates_are_made_in_time_while_a_drain_is_stuck() {
    /// What is promised.
    const UPDATE: Duration = Duration::from_millis(1500);
    let nobody = |host: String| EndpointAddress { host, port: 9 };
    let (leaves, stays) = (nobody("127.2.1.1".into()), nobody("127.2.1.2".into()));
    let mut config = Upstream { endpoints: vec![leaves.clone(), stays.clone()], ..config() };
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(upstream::Upstream::new(config.clone(), credentials, &Metrics::new()));
    endpoint_set::replace_endpoints(&upstream, &endpoint_set::static_endpoints(&config));
    let around = around(None);
    // Both serve, and nothing on them ever ends.
    let live = || ConnectionStats::new(CredentialClass::Anonymous, None, None, Instant::now());
    let mut stuck = Vec::new();
    let endpoints = Arc::clone(&upstream.endpoints());
    for endpoint in endpoints.iter() {
        for _ in 0..100 {
            let connection = live();
            endpoint.connection_opened(&connection);
            stuck.push((connection, endpoint.track_flow()));
        }
    }
    let made = async || {
        let wanted = upstream.config().endpoints.clone();
        let told = Instant::now();
        loop {
            let set = Arc::clone(&upstream.endpoints());
            let has =
                |address: &EndpointAddress| set.iter().any(|endpoint| endpoint.address == *address);
            if set.len() == wanted.len() && wanted.iter().all(has) {
                return told.elapsed();
            }
            assert!(told.elapsed() <= UPDATE, "{wanted:?} is not made");
            sleep(Duration::from_millis(20)).await;
        }
    };
    let test = async {
        // It has not run yet when the first update comes: what it finds is not what is configured.
        let keeper = spawn_local(run(Arc::clone(&upstream), Arc::clone(&around)));
        let mut slowest = Duration::ZERO;
        for update in 0..1000 {
            config.endpoints = vec![stays.clone(), nobody(format!("127.2.0.{}", update % 200 + 1))];
            upstream.reconfigure(config.clone());
            slowest = slowest.max(made().await);
        }
        println!("1,000 updates, the slowest after {slowest:?} of paused time");
        // The clock is paused and the updates took more than the loop's interval of one second.
        let idle = around.liveness.idle_times();
        assert!(
            matches!(&idle[..], [(name, idle)] if name == "discovery of u" && *idle <= TICK),
            "each turn is recorded: {idle:?}"
        );
        keeper.abort();
    };
    LocalSet::new().run_until(test).await;
    let left = endpoints.iter().find(|endpoint| endpoint.address == leaves).unwrap();
    assert_eq!(left.flows(), 100, "the drain is still stuck");
    drop(stuck);
}

/// What an earlier run left counts until its source has answered, and no longer than there is such
/// a source: nobody else could ever correct it. Until then it is not lost from the disk either.
#[tokio::test(start_paused = true)]
async fn what_is_remembered_lives_and_dies_with_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let address = |last: u8| EndpointAddress { host: format!("127.2.1.{last}"), port: 9 };
    let said = |source, last| (source, Candidate { address: address(last), server_name: None });
    let old = SystemTime::now() - Duration::from_secs(3600);
    let remembered = vec![said(EndpointSource::Slices, 3), said(EndpointSource::Dns, 4)];
    state_file::write(dir.path(), "u", &remembered, old).unwrap();
    let file = dir.path().join("endpoints");
    std::fs::write(&file, address(2).to_string()).unwrap();
    // No name is configured; the slices cannot be asked.
    let mut config = Upstream {
        endpoints: vec![address(1)],
        endpoints_file: Some(file),
        discovery: Discovery { kubeconfig: Some(dir.path().join("none")) },
        ..config()
    };
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Arc::new(upstream::Upstream::new(config.clone(), credentials, &Metrics::new()));
    let around = around(Some(dir.path().to_owned()));
    let becomes = async |lasts: &[u8]| {
        let patience = Instant::now() + Duration::from_secs(60);
        let is_there = |last| upstream.endpoints().iter().any(|e| e.address == address(last));
        while upstream.endpoints().len() != lasts.len() || !lasts.iter().all(|l| is_there(*l)) {
            assert!(!is_there(4), "it belongs to no source");
            assert!(Instant::now() < patience, "{lasts:?}: {:?}", upstream.endpoints());
            sleep(Duration::from_millis(20)).await;
        }
    };
    let on_disk = || state_file::read(dir.path(), "u", SystemTime::now()).unwrap();
    let is_saved = async |expected: &SavedEndpoints| {
        let patience = Instant::now() + Duration::from_secs(60);
        while on_disk().entries != *expected {
            assert!(Instant::now() < patience, "{expected:?}: {:?}", on_disk());
            sleep(Duration::from_millis(20)).await;
        }
    };
    let test = async {
        let keeper = spawn_local(run(Arc::clone(&upstream), Arc::clone(&around)));
        becomes(&[1, 2, 3]).await;
        // One serves: what is good is saved, with what still counts.
        let set = Arc::clone(&upstream.endpoints());
        let serving = set.iter().find(|e| e.address == address(2)).unwrap();
        let connection =
            ConnectionStats::new(CredentialClass::Anonymous, None, None, Instant::now());
        serving.connection_opened(&connection);
        is_saved(&vec![said(EndpointSource::File, 2), said(EndpointSource::Slices, 3)]).await;
        assert!(on_disk().age >= Duration::from_secs(3599), "as old as the oldest in it");
        config.discovery.kubeconfig = None;
        upstream.reconfigure(config.clone());
        becomes(&[1, 2]).await;
        is_saved(&vec![said(EndpointSource::File, 2)]).await;
        assert!(on_disk().age < Duration::from_secs(3599));
        // Another directory gets it too.
        let other = dir.path().join("other");
        around.state_dir.store(Arc::new(Some(other.clone())));
        let patience = Instant::now() + Duration::from_secs(60);
        while state_file::read(&other, "u", SystemTime::now()).is_err() {
            assert!(Instant::now() < patience);
            sleep(Duration::from_millis(20)).await;
        }
        keeper.abort();
    };
    LocalSet::new().run_until(test).await;
}

fn around(state_dir: Option<PathBuf>) -> Arc<SharedContext> {
    Arc::new(SharedContext {
        bound: ArcSwap::default(),
        state_dir: ArcSwap::from_pointee(state_dir),
        liveness: LivenessMonitor::start().unwrap(),
        system: dns::ResolverFiles::default(),
    })
}

/// An upstream that verifies nobody, so that it needs no files, and has the defaults otherwise.
pub(super) fn config() -> Upstream {
    let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}]\n";
    validate_text(Path::new("test.yaml"), text).unwrap().config.upstreams.remove(0)
}
