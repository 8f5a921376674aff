//! State changes and faults, and their log lines.

use serde::Serialize;

use super::repeat_filter::Suppressed;
use jackstay_core::fault_lines::{FaultLine, Loss};

/// The kind of object that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EventKind {
    /// An upstream: whether any of its endpoints is usable.
    Upstream,
    /// An endpoint of an upstream.
    Endpoint,
    /// One connection to an endpoint.
    Connection,
    /// A certificate, a key or a CA bundle.
    Certificate,
    /// A source of endpoints.
    Source,
    /// An API group at an endpoint.
    Group,
    /// An admission webhook at an endpoint.
    Webhook,
    /// The configuration.
    Configuration,
    /// The jackstay process.
    Process,
}

impl EventKind {
    /// Its name in logs and in `/events`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Upstream => "upstream",
            Self::Endpoint => "endpoint",
            Self::Connection => "connection",
            Self::Certificate => "certificate",
            Self::Source => "source",
            Self::Group => "group",
            Self::Webhook => "webhook",
            Self::Configuration => "configuration",
            Self::Process => "process",
        }
    }
}

/// A state change.
#[derive(Debug, Clone, Copy)]
pub struct Change<'a> {
    /// The kind of object.
    pub kind: EventKind,
    /// The upstream it belongs to, if any.
    pub upstream: Option<&'a str>,
    /// The object: an endpoint's address, a file, a source. Never a secret.
    pub name: &'a str,
    /// Details that do not distinguish changes: the local address, a credential class.
    pub detail: &'a str,
    /// The state before.
    pub from: &'a str,
    /// The state now.
    pub to: &'a str,
    /// The cause.
    pub reason: &'a str,
    /// The effect on requests.
    pub effect: &'a str,
    /// Whether an operator should notice the change, which is then logged as a warning.
    pub bad: bool,
}

/// Warning if an operator should notice the change.
pub(super) fn level_of(change: &Change<'_>) -> tracing::Level {
    if change.bad { tracing::Level::WARN } else { tracing::Level::INFO }
}

/// Writes a line about one or several endpoints.
pub(super) fn write_fault(line: &FaultLine) {
    let FaultLine { upstream, state, endpoints, count, reason, loss, reported } = line;
    let (upstream, endpoint, reason) = (upstream.as_str(), endpoints.as_str(), reason.as_str());
    let connections = (loss.connections > 0).then_some(loss.connections);
    let open = (!loss.open.is_empty()).then(|| loss.open.to_string());
    if let Some(to) = state.as_deref() {
        let connections_lost = connections;
        let message = match count {
            1 => "endpoint changed its state",
            _ => "endpoints changed their states",
        };
        if *reported {
            tracing::info!(upstream, endpoint, to, reason, connections_lost, open, "{message}");
        } else {
            tracing::warn!(upstream, endpoint, to, reason, connections_lost, open, "{message}");
        }
        return;
    }
    let (message, effect) = if loss.open.flows > 0 {
        ("flows lost", "their clients are reset")
    } else {
        ("connections lost", "watches are resumed, safe requests retried elsewhere")
    };
    if *reported {
        tracing::info!(upstream, endpoint, reason, connections, open, effect, "{message}");
    } else {
        tracing::warn!(upstream, endpoint, reason, connections, open, effect, "{message}");
    }
}

/// Writes the log line. The object's name is in the field `endpoint`, `source` or `name`, as in other lines.
/// `lost` are connections that were lost with it.
pub(super) fn write(
    change: &Change<'_>,
    level: tracing::Level,
    suppressed: Suppressed,
    lost: Option<Loss>,
) {
    let lost = lost.filter(|lost| lost.connections > 0);
    let open = lost.map(|lost| lost.open).unwrap_or_default();
    let (mut endpoint, mut source, mut name) = (None, None, None);
    match change.kind {
        EventKind::Endpoint | EventKind::Connection => endpoint = Some(change.name),
        EventKind::Source => source = Some(change.name),
        EventKind::Upstream
        | EventKind::Certificate
        | EventKind::Group
        | EventKind::Webhook
        | EventKind::Configuration
        | EventKind::Process => {
            name = Some(change.name);
        }
    }
    macro_rules! line {
        ($level:ident) => {
            tracing::$level!(
                upstream = change.upstream,
                endpoint,
                source,
                name,
                from = change.from,
                to = change.to,
                reason = change.reason,
                effect = change.effect,
                detail = (!change.detail.is_empty()).then_some(change.detail),
                connections_lost = lost.map(|lost| lost.connections),
                open = (!open.is_empty()).then(|| open.to_string()),
                suppressed = (suppressed.times > 0).then_some(suppressed.times),
                suppressed_open =
                    (!suppressed.open.is_empty()).then(|| suppressed.open.to_string()),
                "{} changed its state",
                change.kind.as_str()
            )
        };
    }
    match level {
        tracing::Level::DEBUG => line!(debug),
        tracing::Level::INFO => line!(info),
        _ => line!(warn),
    }
}
