//! The detection of a watch that gets no bookmarks. It takes minutes, so this test calls the rebalancer with
//! times of its own.

use crate::scripted_peer::{Action, BOOKMARK, FIRST, Peers, Reply, lines};
use crate::support::{CONFIGMAPS, soon, terminate_mode, without_suspicion};
use http::{HeaderMap, Request};
use jackstay::config::AccessLog;
use jackstay::net::loaded_files::LoadedFiles;
use jackstay::observe::{Metrics, Outcome};
use jackstay::proxy::client_certificate::IdentityProof;
use jackstay::proxy::drain;
use jackstay::proxy::forward::ForwardedRequest;
use jackstay::proxy::request_body;
use jackstay::proxy::upstream_client::UpstreamClient;
use jackstay::upstream::Upstream;
use jackstay::upstream::credentials::{CredentialClass, Credentials};
use jackstay::upstream::endpoint::Endpoint;
use jackstay::upstream::pool::{Pool, StreamRequirements, WarmClasses};
use jackstay::upstream::rebalance::Rebalancer;
use jackstay::upstream::version_preference::PreferredVersions;
use jackstay_core::admission::{ByteAccount, DEFAULT_LIMIT, MemoryBudget};
use jackstay_core::request::info::RequestInfo;
use jackstay_core::watch::request::WatchRequest;
use jackstay_sys::clock;
use std::future::poll_fn;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::task::LocalSet;

/// Each tick of the rebalancer makes the watches check, once a minute, whether a bookmark has arrived since the
/// last check. The third check without a bookmark increments the metric of the endpoint; later ones do not.
#[tokio::test]
async fn watch_without_bookmarks_is_counted_as_stale_once() {
    LocalSet::new().run_until(count_stale_watches()).await;
}

async fn count_stale_watches() {
    let peers = Peers::start(1);
    peers.set_actions([Action::partial(Reply::ok(&lines(&[FIRST, BOOKMARK])), |_| Vec::new())]);
    let mut config = peers.certs.config(&peers.addresses);
    without_suspicion(&mut config);
    let identities = terminate_mode(&mut config).identities.clone();
    let mut config = config.upstreams.remove(0);
    config.rebalance = false;
    let metrics = Metrics::new();
    let credentials = Credentials::load(&config, &identities, &mut LoadedFiles::default()).unwrap();
    let shared =
        Upstream::new(config.clone(), credentials, &metrics, &MemoryBudget::new(DEFAULT_LIMIT));
    let address = &config.endpoints[0];
    let endpoint_metrics = metrics.endpoint(&shared.name, &address.to_string());
    let endpoint = Endpoint::new(&shared.name, address, None, endpoint_metrics).unwrap();
    shared.set_endpoints(vec![endpoint]);
    let pool = Pool::new(Arc::new(shared), WarmClasses::Identities);
    let class = pool.class(CredentialClass::Token);
    let upstream = Rc::new(UpstreamClient::new(
        Rc::clone(&pool),
        Arc::clone(&metrics),
        request_body::budget(),
    ));

    let uri = format!("https://kubernetes.default.svc{CONFIGMAPS}?watch=1&resourceVersion=5");
    let (parts, ()) = Request::get(uri).body(()).unwrap().into_parts();
    let headers = HeaderMap::new();
    let info = RequestInfo::new(&parts);
    let watch =
        WatchRequest::new("watch", info.path(), info.query(), &headers, &[], |_| false).unwrap();
    let listener_metrics = metrics.listener("apiserver");
    let outcome =
        Outcome::begin(&listener_metrics, AccessLog::Off, Ipv4Addr::LOCALHOST.into(), &parts);
    let (_trigger, drain) = drain::channel();
    let request = Box::new(ForwardedRequest {
        upstream,
        class: Rc::clone(&class),
        proof: IdentityProof::new(CredentialClass::Token, None),
        head: Request::from_parts(parts, ()),
        body: None,
        is_heartbeat: false,
        info,
        watch: Some(watch),
        frames: Some(ByteAccount::unmetered(usize::MAX)),
        drain: Some(drain),
        unproven: None,
        resource_versions: None,
        versions: PreferredVersions::default(),
    });
    // The pool runs until it has a connection for the watch. Afterwards only this test runs the checks.
    let run = tokio::task::spawn_local(Pool::run(Rc::clone(&pool)));
    let forward = request.forward(Box::new(outcome));
    // Each request in progress costs this much memory.
    assert!(size_of_val(&forward) <= 960, "{}", size_of_val(&forward));
    let response = soon("a response", forward).await;
    run.abort();
    let Ok(response) = response else { panic!("no response") };
    let mut body = response.into_body();
    let permit = pool.acquire(&class, StreamRequirements::for_client(None)).await.unwrap();
    let connections = [Rc::clone(permit.connection())];

    // The bookmark follows the event in the same DATA frame, so jackstay has seen it too. It is not forwarded.
    let next = poll_fn(|cx| http_body::Body::poll_frame(Pin::new(&mut body), cx));
    let event = soon("the event", next).await.unwrap().unwrap().into_data().unwrap();
    assert!(
        event.starts_with(br#"{"type":"ADDED""#) && !event.windows(8).any(|w| w == b"BOOKMARK")
    );

    let mut now = clock::now();
    let mut rebalancer = Rebalancer::new(now);
    let mut counted = Vec::new();
    for _minute in 0..8 {
        now += Duration::from_secs(70);
        rebalancer.tick(&connections, &config, now);
        poll_fn(|cx| {
            let more = http_body::Body::poll_frame(Pin::new(&mut body), cx);
            assert!(more.is_pending(), "{more:?}");
            Poll::Ready(())
        })
        .await;
        let page = metrics.render();
        let line = page.lines().find(|line| line.starts_with("jackstay_stale_watches_total{"));
        counted.push(line.map_or(0, |line| line.rsplit(' ').next().unwrap().parse().unwrap()));
    }
    assert_eq!(counted, [0, 0, 0, 1, 1, 1, 1, 1], "before the first check a bookmark arrived");
}
