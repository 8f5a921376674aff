//! The loop as a whole, on a paused clock; and what the tests of this module share.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, sleep};

use super::{Surroundings, dns, keep};
use crate::config::{EndpointAddress, Upstream, validate_text};
use crate::control::heartbeat::Heartbeats;
use crate::control::members;
use crate::observe::Metrics;
use crate::upstream::credentials::{Class, Credentials};
use crate::upstream::pool;
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
    let upstream = Arc::new(pool::Upstream::new(config.clone(), credentials, &Metrics::new()));
    members::place(&upstream, &members::seeds(&config));
    let around = Arc::new(Surroundings {
        bound: ArcSwap::default(),
        state_dir: ArcSwap::default(),
        heartbeats: Heartbeats::start().unwrap(),
        system: dns::System::default(),
    });
    // Both serve, and nothing on them ever ends.
    let live = || ConnectionStats::new(Class::Anonymous, None, None, Instant::now());
    let mut stuck = Vec::new();
    let endpoints = upstream.endpoints.load_full();
    for endpoint in endpoints.iter() {
        for _ in 0..100 {
            let connection = live();
            endpoint.connection_opened(&connection);
            stuck.push((connection, endpoint.flow()));
        }
    }
    let made = async || {
        let wanted = upstream.config().endpoints.clone();
        let told = Instant::now();
        loop {
            let set = upstream.endpoints.load_full();
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
        let keeper = spawn_local(keep(Arc::clone(&upstream), Arc::clone(&around)));
        let mut slowest = Duration::ZERO;
        for update in 0..1000 {
            config.endpoints = vec![stays.clone(), nobody(format!("127.2.0.{}", update % 200 + 1))];
            upstream.reconfigure(config.clone());
            slowest = slowest.max(made().await);
        }
        println!("1,000 updates, the slowest after {slowest:?} of paused time");
        let beats = around.heartbeats.beats();
        assert!(
            matches!(&beats[..], [(name, beats)] if name == "discovery of u" && *beats >= 1000),
            "what turns is felt to turn: {beats:?}"
        );
        keeper.abort();
    };
    LocalSet::new().run_until(test).await;
    let left = endpoints.iter().find(|endpoint| endpoint.address == leaves).unwrap();
    assert_eq!(left.flows(), 100, "the drain is still stuck");
    drop(stuck);
}

/// An upstream that verifies nobody, so that it needs no files, and has the defaults otherwise.
pub(super) fn config() -> Upstream {
    let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}]\n";
    validate_text(Path::new("test.yaml"), text).unwrap().config.upstreams.remove(0)
}
