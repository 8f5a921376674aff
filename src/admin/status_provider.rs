//! What the admin endpoint shows: the interface between it and the process that it describes.

/// The content of the admin endpoint. Called for each request, on the admin runtime.
pub trait StatusProvider: Send + Sync + 'static {
    /// Whether the event loop of every worker runs.
    ///
    /// # Errors
    /// Which worker's event loop is stalled.
    fn liveness(&self) -> Result<(), String>;
    /// Whether requests can be served, with its checks.
    fn readiness(&self) -> Readiness;
    /// The body of `/status`, which the page at `/` renders.
    fn status(&self) -> serde_json::Value;
    /// The latest state changes, for `/events`.
    fn events(&self) -> serde_json::Value;
    /// Round trips and responses of the endpoints in the last minutes, for `/history`.
    fn history(&self) -> serde_json::Value;
    /// The effective configuration, without secrets.
    fn config(&self) -> serde_json::Value;
    /// The metrics in the Prometheus text format.
    fn metrics(&self) -> String;
}

/// The content of `/readyz`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Whether requests can be served. Some checks may fail: one usable endpoint is enough.
    pub ready: bool,
    /// The checks, in the order of the response.
    pub checks: Vec<ReadinessCheck>,
}

/// One check of [`Readiness`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadinessCheck {
    /// `listener apiserver`, `upstream control-plane`, ….
    pub name: String,
    /// Whether the check passed.
    pub ok: bool,
    /// Details for the operator; may be empty.
    pub detail: String,
}
