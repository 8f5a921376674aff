use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::discovery::address::EndpointAddress;
use jackstay_sys::clock;
use tokio::net::TcpListener;
use tokio::task::{LocalSet, spawn_local};

use super::{Pool, StreamRequirements, Unavailable, WarmClasses};
use crate::config;
use crate::observe::Metrics;
use crate::upstream::credentials::{CredentialClass, Credentials};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::shared::Upstream;

/// A pool with one endpoint that accepts connections and does not answer.
async fn silent_pool() -> (Rc<Pool>, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = "upstreams: [{name: u, endpoints: ['10.0.0.1:6443']}]\n\
                listeners: [{name: l, bind: ['127.0.0.1:0'], mode: passthrough, upstream: u}]\n";
    let loaded = config::validate_text(Path::new("test.yaml"), text).unwrap();
    let config = loaded.config.upstreams.into_iter().next().unwrap();
    let metrics = Metrics::new();
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Upstream::new(config, credentials, &metrics);
    let address = EndpointAddress { host: "127.0.0.1".to_owned(), port };
    let endpoint = Endpoint::new(&"u".into(), &address, None, metrics.endpoint("u", "e")).unwrap();
    upstream.set_endpoints(vec![endpoint]);
    (Pool::new(Arc::new(upstream), WarmClasses::Identities), listener)
}

async fn maintenance_runs_for(waiters: usize) -> usize {
    let (pool, _listener) = silent_pool().await;
    let class = pool.class(CredentialClass::Token);
    let run = spawn_local(Pool::run(Rc::clone(&pool)));
    let waiting: Vec<_> = (0..waiters)
        .map(|_| {
            let (pool, class) = (Rc::clone(&pool), Rc::clone(&class));
            spawn_local(async move {
                pool.acquire(&class, StreamRequirements::for_client(None)).await.err()
            })
        })
        .collect();
    for waiting in waiting {
        let error = waiting.await.unwrap();
        assert!(matches!(error, Some(Unavailable::Unreachable(_))), "{error:?}");
    }
    assert_eq!(class.waiters.len(), 0);
    run.abort();
    pool.maintenance_runs.get()
}

#[tokio::test]
async fn waiting_requests_do_not_maintain_the_pool_each() {
    LocalSet::new()
        .run_until(async {
            let runs = maintenance_runs_for(900).await;
            assert!(runs < 60, "{runs} runs for 900 requests in 1.2 s");
        })
        .await;
}

#[tokio::test]
async fn requests_above_the_limit_of_waiting_ones_fail_at_once() {
    LocalSet::new()
        .run_until(async {
            let (pool, _listener) = silent_pool().await;
            let class = pool.class(CredentialClass::Token);
            let required = StreamRequirements::for_client(None);
            let now = clock::now();
            let waiting: Vec<_> =
                (0..1000).map(|_| class.waiters.register(required, now)).collect();
            let refused =
                tokio::time::timeout(Duration::from_millis(500), pool.acquire(&class, required));
            assert!(matches!(refused.await, Ok(Err(Unavailable::Unreachable(_)))));
            drop(waiting);
            assert!(!class.has_too_many_waiters());
        })
        .await;
}
