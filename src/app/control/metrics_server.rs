//! The tasks of `admin.metrics_bind`: its connections, its certificates, and the reviews of credentials.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::sockets::listening::{self, ListenOptions};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use crate::admin::StatusProvider;
use crate::admin::authorised_metrics::reviews::Reviewer;
use crate::admin::authorised_metrics::{AuthorisedMetrics, review_task};
use crate::app::active::ActiveConfig;
use crate::control::certificates;
use crate::observe::Metrics;
use crate::upstream::Upstream;

/// The name of the address where metrics and events name a listener. No listener can have it.
const NAME: &str = "admin.metrics_bind";

/// How often an address that cannot be bound is tried again: another process may have it for a time.
const RETRY: Duration = Duration::from_secs(1);

/// What a server needs. A change of any part starts a new one.
pub struct Wanted {
    bind: SocketAddr,
    tls: Arc<ServingTls>,
    client_name: Option<String>,
    reviews: Option<Arc<Upstream>>,
    metrics: Arc<Metrics>,
}

impl PartialEq for Wanted {
    fn eq(&self, other: &Self) -> bool {
        let reviews =
            (self.reviews.as_ref().map(Arc::as_ptr), other.reviews.as_ref().map(Arc::as_ptr));
        self.bind == other.bind
            && Arc::ptr_eq(&self.tls, &other.tls)
            && self.client_name == other.client_name
            && reviews.0 == reviews.1
    }
}

/// The running tasks. They end when this is dropped, and their connections close.
pub struct MetricsServer {
    /// What they serve.
    pub wanted: Wanted,
    tasks: Vec<AbortHandle>,
}

impl MetricsServer {
    /// What the configuration wants; `None` without `admin.metrics_bind`.
    pub fn wanted(active: &ActiveConfig) -> Option<Wanted> {
        let admin = &active.config.admin;
        let name = admin.metrics_review_upstream.as_ref();
        let mut upstreams = active.upstreams.iter();
        let reviews = name.and_then(|name| upstreams.find(|upstream| *upstream.name == **name));
        Some(Wanted {
            bind: admin.metrics_bind?,
            tls: Arc::clone(active.metrics_tls.as_ref()?),
            client_name: admin.metrics_client_name.clone(),
            reviews: reviews.cloned(),
            metrics: Arc::clone(&active.upstreams.first()?.metrics),
        })
    }

    /// Starts the tasks.
    pub fn start(wanted: Wanted, provider: Arc<dyn StatusProvider>) -> Self {
        let (tls, metrics) = (Arc::clone(&wanted.tls), Arc::clone(&wanted.metrics));
        let watch = certificates::watch_serving(
            Arc::clone(&tls),
            metrics.listener(NAME),
            Arc::clone(&metrics),
        );
        let mut tasks = vec![spawn_local(watch).abort_handle()];
        let reviewer = wanted.reviews.as_ref().map(|upstream| {
            let (questions, run) = review_task::start(upstream);
            tasks.push(spawn_local(run).abort_handle());
            Reviewer::new(questions)
        });
        let client_name = wanted.client_name.clone();
        let server = AuthorisedMetrics { tls, client_name, reviewer, provider, metrics };
        let bind = wanted.bind;
        let serve = async move { server.serve(listen(bind).await).await };
        tasks.push(spawn_local(serve).abort_handle());
        Self { wanted, tasks }
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// Binds the address, which may take until another process has closed it.
async fn listen(address: SocketAddr) -> TcpListener {
    let mut is_logged = false;
    loop {
        let bound = listening::listen_with(address, &ListenOptions::default()).and_then(|socket| {
            socket.set_nonblocking(true)?;
            TcpListener::from_std(socket)
        });
        match bound {
            Ok(listener) => {
                let address = listener.local_addr().unwrap_or(address);
                tracing::info!(%address, "admin.metrics_bind listens");
                return listener;
            }
            Err(error) if !is_logged => {
                is_logged = true;
                tracing::warn!(%address, %error, "admin.metrics_bind cannot be bound; it is tried each second");
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}
