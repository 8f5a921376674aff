//! The tasks of the control thread for the active configuration. Each starts and ends with the upstream,
//! listener or socket that it serves.

use std::cell::RefCell;
use std::convert::Infallible;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::sockets::listening;
use tokio::net::UnixListener;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Mutex, oneshot, watch};
use tokio::task::{AbortHandle, spawn_blocking, spawn_local};
use tokio::time::{sleep, timeout};

use super::metrics_server::MetricsServer;
use crate::admin::{self, Admin, CONNECTION_TIME, StatusProvider, StopReason};
use crate::app::active::ActiveConfig;
use crate::app::admin_socket::AdminSocket;
use crate::app::fault_reports::FaultReports;
use crate::app::status::ProcessStatus;
use crate::app::takeover::{self, TakeoverRequest, TakeoverServer};
use crate::control::canary;
use crate::control::certificates;
use crate::control::discovery::{self, SharedContext};
use crate::control::{endpoint_set, saved_floors};
use crate::upstream::Upstream;

/// Time for opening the takeover socket, which creates a file. After it, a warning is logged.
const OPEN_TIMEOUT: Duration = Duration::from_secs(2);

/// How often the admin endpoint tries to bind an address that another process has.
const ADMIN_RETRY: Duration = Duration::from_secs(1);

/// The running tasks.
pub struct Tasks {
    status: Arc<ProcessStatus>,
    context: Arc<SharedContext>,
    /// Whether the process drains.
    draining: watch::Receiver<bool>,
    ended: watch::Receiver<bool>,
    /// The tasks of each upstream: certificates, discovery, floors, canary.
    upstreams: Vec<(Arc<Upstream>, [AbortHandle; 4])>,
    /// The certificate task of each L7 listener.
    listeners: Vec<(Arc<ServingTls>, AbortHandle)>,
    faults: Rc<RefCell<FaultReports>>,
    admin: Option<AdminServer>,
    admin_unix: Option<SocketFileTask>,
    metrics: Option<MetricsServer>,
    takeover: Option<SocketFileTask>,
    /// Held by the takeover server that serves a new process.
    takeover_turn: Rc<Mutex<()>>,
}

/// The task that serves a socket file.
struct SocketFileTask {
    path: PathBuf,
    task: AbortHandle,
    /// Dropped so that the task ends when it can; without it the task is aborted.
    stop: Option<oneshot::Sender<Infallible>>,
}

/// The admin endpoint on a TCP socket.
struct AdminServer {
    socket: Arc<AdminSocket>,
    task: AbortHandle,
    /// Sent when the endpoint moves to another socket; dropped when another process serves the socket.
    stop: Option<oneshot::Sender<StopReason>>,
}

impl Tasks {
    /// Without tasks. `status` is the content of the admin endpoint; `context` is for discovery. `ended` becomes true
    /// when the process ends.
    pub fn new(
        status: Arc<ProcessStatus>,
        context: Arc<SharedContext>,
        draining: watch::Receiver<bool>,
        ended: watch::Receiver<bool>,
    ) -> Self {
        Self {
            draining,
            ended,
            status,
            context,
            upstreams: Vec::new(),
            listeners: Vec::new(),
            faults: FaultReports::start(),
            admin: None,
            admin_unix: None,
            metrics: None,
            takeover: None,
            takeover_turn: Rc::default(),
        }
    }

    /// Starts the tasks of new upstreams and listeners, and shows the configuration in the status.
    pub fn start_new(&mut self, active: &ActiveConfig) {
        self.status.show(active);
        self.faults.borrow_mut().show(active);
        self.context.bound.store(Arc::new(active.listen_addresses().to_vec()));
        self.context.state_dir.store(Arc::new(active.config.state_dir.clone()));
        for upstream in &active.upstreams {
            if !self.upstreams.iter().any(|(known, _)| Arc::ptr_eq(known, upstream)) {
                let certificates = certificates::watch_credentials(Arc::clone(upstream));
                let endpoints = discovery::run(Arc::clone(upstream), Arc::clone(&self.context));
                let floors = saved_floors::run(
                    Arc::clone(upstream),
                    Arc::clone(&self.context.state_dir),
                    self.draining.clone(),
                    self.ended.clone(),
                );
                let tasks = [
                    spawn_local(certificates).abort_handle(),
                    spawn_local(endpoints).abort_handle(),
                    spawn_local(floors).abort_handle(),
                    spawn_local(canary::run(Arc::clone(upstream))).abort_handle(),
                ];
                self.upstreams.push((Arc::clone(upstream), tasks));
            }
        }
        for listener in &active.listeners {
            let Some(tls) = listener.mode.tls() else { continue };
            if !self.listeners.iter().any(|(known, _)| Arc::ptr_eq(known, tls)) {
                let (metrics, upstream) = (&listener.metrics, &listener.upstream.metrics);
                let watch = certificates::watch_serving(
                    Arc::clone(tls),
                    Arc::clone(metrics),
                    Arc::clone(upstream),
                );
                self.listeners.push((Arc::clone(tls), spawn_local(watch).abort_handle()));
            }
        }
    }

    /// Ends the tasks of removed upstreams and listeners, and removes the endpoints of these upstreams.
    pub fn end_removed(&mut self, active: &ActiveConfig) {
        self.upstreams.retain(|(known, tasks)| {
            let is_active = active.upstreams.iter().any(|upstream| Arc::ptr_eq(known, upstream));
            if !is_active {
                tasks.iter().for_each(AbortHandle::abort);
                // Their connections drain.
                endpoint_set::replace_endpoints(known, &[]);
            }
            is_active
        });
        self.listeners.retain(|(known, task)| {
            let mut tls = active.listeners.iter().filter_map(|listener| listener.mode.tls());
            let is_active = tls.any(|tls| Arc::ptr_eq(known, tls));
            if !is_active {
                task.abort();
            }
            is_active
        });
    }

    /// Serves the admin endpoint on the configured TCP and Unix sockets.
    pub fn serve_admin(&mut self, active: &ActiveConfig) {
        self.serve_admin_tcp(&active.admin);
        self.serve_admin_unix(active.config.admin.socket.as_ref());
        let wanted = MetricsServer::wanted(active);
        if self.metrics.as_ref().map(|server| &server.wanted) != wanted.as_ref() {
            let status: Arc<dyn StatusProvider> = Arc::clone(&self.status) as _;
            // The previous one closes its socket first.
            drop(self.metrics.take());
            self.metrics = wanted.map(|wanted| MetricsServer::start(wanted, status));
        }
    }

    /// Stops accepting on the TCP socket of the admin endpoint, and closes it, since another process serves it. Open
    /// connections get their responses.
    pub fn release_admin(&mut self) {
        drop(self.metrics.take());
        if let Some(admin) = &mut self.admin {
            admin.stop = None;
            admin.socket.close();
        }
    }

    /// Serves the admin endpoint on this socket. Connections of a previous socket have [`CONNECTION_TIME`] to
    /// end.
    fn serve_admin_tcp(&mut self, socket: &Arc<AdminSocket>) {
        if self.admin.as_ref().is_some_and(|known| Arc::ptr_eq(&known.socket, socket)) {
            return;
        }
        let status: Arc<dyn StatusProvider> = Arc::clone(&self.status) as _;
        let (sender, stop) = oneshot::channel();
        let task = spawn_local(serve_when_free(Arc::clone(socket), status, stop)).abort_handle();
        let server = AdminServer { socket: Arc::clone(socket), task, stop: Some(sender) };
        let Some(AdminServer { socket, task, stop }) = self.admin.replace(server) else { return };
        // The task of the previous socket then has its last duplicate. It accepts the queued connections
        // before it closes the socket.
        drop(socket);
        if let Some(stop) = stop {
            // The task may have ended.
            let _ = stop.send(StopReason::Moved);
        }
        spawn_local(async move {
            sleep(CONNECTION_TIME).await;
            task.abort();
        });
    }

    /// Serves the admin endpoint on a Unix socket. It is opened on a blocking thread, so that a disk that hangs
    /// does not block the control thread.
    fn serve_admin_unix(&mut self, path: Option<&PathBuf>) {
        let Some(path) = path_to_serve(&mut self.admin_unix, path.cloned()) else { return };
        let status: Arc<dyn StatusProvider> = Arc::clone(&self.status) as _;
        let at = path.clone();
        let task = spawn_local(async move {
            let file = at.clone();
            let opened =
                spawn_blocking(move || listening::listen_unix(&file, admin::SOCKET_MODE)).await;
            let listener = opened.unwrap_or_else(|error| Err(error.into()));
            match listener.and_then(UnixListener::from_std) {
                Ok(listener) => {
                    tracing::info!(path = %at.display(), "admin socket listens");
                    admin::serve_unix(listener, status).await;
                }
                Err(error) => tracing::error!(
                    path = %at.display(),
                    %error,
                    "cannot open admin.socket; probes that use it fail; is its directory writable?"
                ),
            }
        });
        self.admin_unix = Some(SocketFileTask { path, task: task.abort_handle(), stop: None });
    }

    /// Serves takeover requests in the configured state directory, unless a task does already. With `replace`,
    /// replaces the socket of the process that this one has taken over from. `replaced` becomes true when
    /// another process has taken over. If a socket cannot be opened, the next call tries again.
    ///
    /// The socket is opened on a blocking thread, so that a disk that hangs, or another process that does not
    /// answer, prevents only takeovers.
    pub async fn serve_takeover(
        &mut self,
        active: &ActiveConfig,
        requests: &UnboundedSender<TakeoverRequest>,
        replaced: &watch::Sender<bool>,
        replace: bool,
    ) {
        let path = active.config.state_dir.as_deref().map(takeover::socket_path);
        let Some(path) = path_to_serve(&mut self.takeover, path) else { return };
        let (requests, replaced, at) = (requests.clone(), replaced.clone(), path.clone());
        let turn = Rc::clone(&self.takeover_turn);
        let (opened, mut is_opened) = oneshot::channel::<()>();
        let (stop, stopped) = oneshot::channel();
        let task = spawn_local(async move {
            let file = at.clone();
            let server = spawn_blocking(move || TakeoverServer::listen(&file, replace)).await;
            drop(opened);
            match server.unwrap_or_else(|error| Err(error.into())) {
                Ok(server) => {
                    if server.serve(requests, stopped, &turn).await {
                        replaced.send_replace(true);
                    }
                }
                Err(error) => tracing::warn!(
                    path = %at.display(),
                    %error,
                    "takeover is not available: a new process cannot replace this one without a gap"
                ),
            }
        });
        let (stop, task) = (Some(stop), task.abort_handle());
        self.takeover = Some(SocketFileTask { path: path.clone(), task, stop });
        if timeout(OPEN_TIMEOUT, &mut is_opened).await.is_err() {
            tracing::warn!(
                path = %path.display(),
                "takeover socket not open after 2 s: the disk or another process does not answer"
            );
        }
    }
}

/// Serves the admin endpoint, first waiting for its address while another process has that.
async fn serve_when_free(
    socket: Arc<AdminSocket>,
    status: Arc<dyn StatusProvider>,
    mut stop: oneshot::Receiver<StopReason>,
) {
    tokio::select! {
        biased;
        () = until_bound(&socket) => {}
        _ = &mut stop => return,
    }
    // `None` if another process has taken it over already.
    let Some(listener) = socket.socket() else { return };
    drop(socket);
    let admin = match listener.try_clone().and_then(Admin::from_std) {
        Ok(admin) => admin,
        Err(error) => {
            tracing::error!(%error, "cannot serve the admin endpoint");
            return;
        }
    };
    drop(listener);
    let stop = async { stop.await.unwrap_or(StopReason::TakenOver) };
    admin.serve(status, stop).await;
}

/// Waits until the admin endpoint has its address.
async fn until_bound(socket: &AdminSocket) {
    if socket.socket().is_some() {
        return;
    }
    let address = socket.address().ok().map(tracing::field::display);
    tracing::warn!(
        address,
        "the admin endpoint waits: another process, which may drain, has its address; requests are served"
    );
    while socket.bind_if_free().is_err() {
        sleep(ADMIN_RETRY).await;
    }
    tracing::info!(address, "the admin endpoint listens: its address is free");
}

/// Returns `path` if the `current` task does not serve it, and then ends that task.
fn path_to_serve(current: &mut Option<SocketFileTask>, path: Option<PathBuf>) -> Option<PathBuf> {
    let running = current.as_ref().filter(|serving| !serving.task.is_finished());
    if running.map(|serving| &serving.path) == path.as_ref() {
        return None;
    }
    if let Some(SocketFileTask { task, stop: None, .. }) = current.take() {
        task.abort();
    }
    path
}
