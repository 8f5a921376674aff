//! The settings and shared state of one L7 listener on one worker, which a reload replaces.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use jackstay_config::{AccessLog, HeartbeatResource, Limits, RequestLimits};

use super::credential_selector::CredentialSelector;
use super::drain::DrainWatcher;
use super::tunnels::Tunnels;
use super::upstream_client::UpstreamClient;
use crate::observe::ListenerMetrics;

/// The settings and shared state with which one worker serves the requests of one listener. A reload
/// replaces the whole service, and a request keeps the service with which it began.
pub struct ListenerService {
    /// The client of the upstream to which requests are sent.
    pub upstream: Rc<UpstreamClient>,
    /// Selects the credential with which a request is sent upstream.
    pub credentials: CredentialSelector,
    /// Counts connections and requests.
    pub metrics: Arc<ListenerMetrics>,
    /// Selects the requests that are logged.
    pub access_log: AccessLog,
    /// API groups whose watches are not resumed.
    pub never_resume_groups: Vec<String>,
    /// Resources besides leases and the status of nodes whose updates and patches are heartbeats.
    pub heartbeats: Vec<HeartbeatResource>,
    /// Limits of connections.
    pub limits: Limits,
    /// Limits of requests. A connection keeps the limits of the service that accepted it.
    pub request_limits: RequestLimits,
    /// The open tunnels. They count as connections, and a drain waits for them.
    pub tunnels: Tunnels,
    /// The drain that the listener's watches follow.
    pub drain: DrainWatcher,
}

/// The service of a listener, which a reload may replace.
#[derive(Clone)]
pub struct CurrentService(Rc<RefCell<Rc<ListenerService>>>);

impl CurrentService {
    /// Starts with `service`.
    pub fn new(service: Rc<ListenerService>) -> Self {
        Self(Rc::new(RefCell::new(service)))
    }

    /// The service for a request that begins now.
    pub fn now(&self) -> Rc<ListenerService> {
        Rc::clone(&self.0.borrow())
    }

    /// Serves all later requests with `service`.
    pub fn replace(&self, service: Rc<ListenerService>) {
        self.0.replace(service);
    }
}
