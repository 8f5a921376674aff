//! What the outside sees of the inside: metric names, the outcome of each request, log lines.
//!
//! [`names`] is the one table of metrics, [`metrics`] the registry over it, [`handles`] what the
//! data plane holds on to so that counting costs an atomic addition. [`outcome`] records each
//! request exactly once, and [`log`] writes lines without ever waiting for whoever reads them.
//! [`events`] tells and remembers what changed, [`history`] what endpoints were like a while ago.

pub mod build;
pub mod byte_budget;
pub mod counted;
pub mod events;
pub mod handles;
pub mod history;
pub mod level;
pub mod liveness;
pub mod log;
pub mod metrics;
pub mod names;
pub mod outcome;
pub mod own_errors;
pub mod passthrough;
pub mod quota;
pub mod rate_limited_warnings;
pub mod redact;
pub mod repeat_filter;
pub mod utc;

pub use byte_budget::ByteBudget;
pub use counted::counted;
pub use events::{Change, Events};
pub use handles::{ConnectionGauge, EndpointMetrics, EndpointStateGauge, ListenerMetrics};
pub use liveness::{Liveness, LivenessMonitor};
pub use metrics::Metrics;
pub use outcome::{Outcome, Side, UserClass};
pub use passthrough::PassthroughMetrics;
pub use rate_limited_warnings::RateLimitedWarnings;
pub use redact::redact_path;
pub use repeat_filter::RepeatFilter;
