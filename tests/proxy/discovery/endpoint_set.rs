//! Tests of `replace_endpoints`: unchanged endpoints keep their object, new ones join, removed ones drain.

use crate::support::{Certs, TestCluster, new_upstream, until};
use jackstay::control::endpoint_set::{replace_endpoints, static_endpoints};
use jackstay::upstream::Upstream;
use jackstay::upstream::endpoint::EndpointState;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::source::EndpointSpec;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn spec(host: &str) -> EndpointSpec {
    EndpointSpec {
        address: EndpointAddress { host: host.into(), port: 6443 },
        server_name: None,
        fallback: false,
    }
}

fn upstream(certs: &Certs) -> Arc<Upstream> {
    new_upstream(certs.config(&[]).upstreams.remove(0), &[])
}

fn labels(upstream: &Upstream) -> Vec<String> {
    upstream.endpoints().iter().map(|e| e.label.to_string()).collect()
}

#[test]
fn replace_endpoints_unchanged_endpoint_keeps_its_object() {
    let certs = Certs::new();
    let upstream = upstream(&certs);
    let change = replace_endpoints(&upstream, &[spec("10.0.0.1"), spec("10.0.0.2")]);
    assert_eq!((change.joined.len(), change.left.len()), (2, 0));
    let before = Arc::clone(&upstream.endpoints());

    let fallback = EndpointSpec { fallback: true, ..spec("10.0.0.2") };
    let change = replace_endpoints(&upstream, &[spec("fd00::3"), fallback]);
    assert_eq!(labels(&upstream), ["[fd00::3]:6443", "10.0.0.2:6443"]);
    assert_eq!((change.joined.len(), change.left.len()), (1, 1));
    let after = Arc::clone(&upstream.endpoints());
    assert!(Arc::ptr_eq(&before[1], &after[1]), "the same endpoint");
    assert!(after[1].is_fallback() && !after[0].is_fallback());
    assert_eq!(before[0].state(), EndpointState::Leaving);

    let change = replace_endpoints(&upstream, &[spec("fd00::3"), spec("10.0.0.2")]);
    assert!(change.is_empty());
    assert!(Arc::ptr_eq(&after, &Arc::clone(&upstream.endpoints())), "the set is not replaced");
    assert!(!after[1].is_fallback());
}

#[test]
fn replace_endpoints_other_server_name_is_another_endpoint() {
    let certs = Certs::new();
    let upstream = upstream(&certs);
    replace_endpoints(&upstream, &[spec("10.0.0.1")]);
    let named =
        EndpointSpec { server_name: Some("kubernetes.default.svc".into()), ..spec("10.0.0.1") };
    let change = replace_endpoints(&upstream, &[named.clone(), named]);
    assert_eq!((change.joined.len(), change.left.len()), (1, 1), "duplicates are one endpoint");
    assert_eq!(upstream.endpoints()[0].server_name.to_str(), "kubernetes.default.svc");
    let invalid = EndpointSpec { server_name: Some("no name".into()), ..spec("10.0.0.2") };
    let change = replace_endpoints(&upstream, &[spec("10.0.0.1"), invalid]);
    assert_eq!(change.refused.len(), 1, "{:?}", change.refused);
    assert_eq!(labels(&upstream), ["10.0.0.1:6443"]);
}

#[test]
fn static_endpoints_have_the_configured_server_name() {
    let certs = Certs::new();
    let mut config = certs.config(&["10.0.0.1:6443".parse().unwrap()]);
    config.upstreams[0].tls.server_name = Some("api.example.com".into());
    let specs = static_endpoints(&config.upstreams[0]);
    assert_eq!(specs.len(), 1);
    assert_eq!(specs[0].server_name.as_deref(), Some("api.example.com"));
}

#[tokio::test(flavor = "current_thread")]
async fn prober_ends_when_its_endpoint_is_removed() {
    let cluster = TestCluster::new(1);
    let mut config = cluster.config();
    // The prober must end although its next probe is due in an hour.
    config.upstreams[0].health.readyz.interval = Duration::from_secs(3600);
    let config = config.upstreams.remove(0);
    let upstream = new_upstream(config.clone(), config.health.readyz.cert.as_slice());
    let change = replace_endpoints(&upstream, &static_endpoints(&config));
    let endpoint = Arc::clone(&change.joined[0]);
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            let prober = jackstay::control::readyz::probe(upstream.clone(), endpoint.clone());
            let prober = tokio::task::spawn_local(prober);
            until("the endpoint is probed", async || endpoint.state() == EndpointState::Ready)
                .await;
            let start = Instant::now();
            replace_endpoints(&upstream, &[]);
            crate::support::soon("the prober ends", prober).await.unwrap();
            assert!(start.elapsed() < Duration::from_secs(5));
            until("the connection is closed", async || endpoint.status().connections.is_empty())
                .await;
        })
        .await;
}
