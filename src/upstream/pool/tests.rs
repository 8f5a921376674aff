use std::path::Path;
use std::rc::Rc;

use jackstay_config as config;
use jackstay_core::discovery::address::EndpointAddress;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, LocalSet, spawn_local, yield_now};
use tokio::time::timeout;

use super::{ClassPool, Pool, StreamRequest, UNAVAILABLE_AFTER, Unavailable, WarmClasses};
use crate::observe::Metrics;
use crate::upstream::credentials::CredentialClass;
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
    let upstream = Upstream::load(config, &[], &metrics);
    let address = EndpointAddress { host: "127.0.0.1".to_owned(), port };
    let endpoint = Endpoint::new(&"u".into(), &address, None, metrics.endpoint("u", "e")).unwrap();
    upstream.set_endpoints(vec![endpoint]);
    (Pool::new(upstream, WarmClasses::Identities), listener)
}

async fn maintenance_runs_for(waiters: usize) -> usize {
    let (pool, _listener) = silent_pool().await;
    let class = pool.class(CredentialClass::Token);
    let run = spawn_local(Pool::run(Rc::clone(&pool)));
    let waiting: Vec<_> = (0..waiters)
        .map(|_| {
            let (pool, class) = (Rc::clone(&pool), Rc::clone(&class));
            spawn_local(
                async move { pool.acquire(&class, StreamRequest::for_client(None)).await.err() },
            )
        })
        .collect();
    for waiting in waiting {
        let error = waiting.await.unwrap();
        assert!(matches!(error, Some(Unavailable::Unreachable(_))), "{error:?}");
    }
    assert_eq!(class.machine.borrow().waiting(), 0);
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

/// A request that waits for a stream, registered in the queue of the class.
async fn waiting_request(
    pool: &Rc<Pool>,
    class: &Rc<ClassPool>,
) -> JoinHandle<Option<Unavailable>> {
    let (pool, of) = (Rc::clone(pool), Rc::clone(class));
    let request =
        spawn_local(async move { pool.acquire(&of, StreamRequest::for_client(None)).await.err() });
    while class.machine.borrow().waiting() == 0 {
        yield_now().await;
    }
    request
}

/// The reason for which a request was refused before its deadline.
async fn refused_at_once(request: impl Future<Output = Option<Unavailable>>) -> String {
    let refused = timeout(UNAVAILABLE_AFTER / 2, request).await;
    match refused.expect("an answer before the deadline") {
        Some(Unavailable::Unreachable(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn end_of_the_task_answers_the_waiting_requests_and_those_that_follow() {
    LocalSet::new()
        .run_until(async {
            let (pool, _listener) = silent_pool().await;
            let class = pool.class(CredentialClass::Token);
            let run = spawn_local(Pool::run(Rc::clone(&pool)));
            let request = waiting_request(&pool, &class).await;
            run.abort();
            let reason = refused_at_once(async { request.await.unwrap() }).await;
            assert_eq!(reason, "the task of the connection pool has ended");
            let required = StreamRequest::for_client(None);
            let next = async { pool.acquire(&class, required).await.err() };
            assert_eq!(refused_at_once(next).await, "the task of the connection pool has ended");
        })
        .await;
}

#[tokio::test]
async fn close_answers_the_waiting_requests_also_without_a_task() {
    LocalSet::new()
        .run_until(async {
            let (pool, _listener) = silent_pool().await;
            let class = pool.class(CredentialClass::Token);
            let request = waiting_request(&pool, &class).await;
            pool.close();
            let reason = refused_at_once(async { request.await.unwrap() }).await;
            assert_eq!(reason, "the upstream was removed from the configuration");
        })
        .await;
}

#[tokio::test]
async fn held_watches_are_counted_once_for_class_upstream_and_metric() {
    LocalSet::new()
        .run_until(async {
            let (pool, _listener) = silent_pool().await;
            let class = pool.class(CredentialClass::Token);
            let held = [pool.hold_watch(&class), pool.hold_watch(&class)];
            let counts =
                || (class.machine.borrow().held_watches(), pool.upstream.waiting_watches());
            let metric = || {
                let text = pool.upstream.metrics.render();
                text.lines().find_map(|l| l.strip_prefix("jackstay_held_watches ")?.parse().ok())
            };
            assert_eq!((counts(), metric()), ((2, 2), Some(2.0)));
            drop(held);
            assert_eq!((counts(), metric()), ((0, 0), Some(0.0)));
        })
        .await;
}

#[tokio::test]
async fn requests_above_the_limit_of_waiting_ones_fail_at_once() {
    LocalSet::new()
        .run_until(async {
            let (pool, _listener) = silent_pool().await;
            let class = pool.class(CredentialClass::Token);
            let requests: Vec<_> = (0..1000)
                .map(|_| {
                    let (pool, class) = (Rc::clone(&pool), Rc::clone(&class));
                    spawn_local(async move {
                        let required = StreamRequest::for_client(None);
                        pool.acquire(&class, required).await.err()
                    })
                })
                .collect();
            while class.machine.borrow().waiting() < 1000 {
                yield_now().await;
            }
            let required = StreamRequest::for_client(None);
            refused_at_once(async { pool.acquire(&class, required).await.err() }).await;
            requests.iter().for_each(JoinHandle::abort);
            while class.machine.borrow().waiting() > 0 {
                yield_now().await;
            }
        })
        .await;
}
