//! Every metric we export, once: name, type, labels, unit and help.
//!
//! Nothing can be registered that is not in this table (`Metrics` takes a [`MetricSpec`]), so the
//! README and the tests can rely on [`ALL`]. Label values are bounded: verbs, codes, states and
//! reasons are fixed lists, listeners and upstreams come from the configuration, and endpoints are
//! capped. Never a path, a user or the name of an object.

/// The Prometheus type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution over fixed buckets.
    Histogram,
}

impl Kind {
    /// The word of the exposition format.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricSpec {
    /// Full name as scraped.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Unit of the value: `seconds`, `bytes`, or what is counted.
    pub unit: &'static str,
    /// Label keys, in the order in which values are given.
    pub labels: &'static [&'static str],
    /// One sentence for people.
    pub help: &'static str,
}

macro_rules! table {
    ($($konst:ident = $kind:ident $name:literal [$($label:literal),*] $unit:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $konst: MetricSpec = MetricSpec {
                name: $name,
                kind: Kind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// The whole table, in the order of the README.
        pub const ALL: &[MetricSpec] = &[$($konst),*];
    };
}

table! {
    BUILD_INFO = Gauge "jackstay_build_info" ["version", "commit"] "info",
        "Always 1; the labels say which build runs.";

    CONFIG_RELOADS = Counter "jackstay_config_reloads_total" ["outcome"] "reloads",
        "Times the configuration was read again: ok, or failed, after which the old one stays.";
    CONFIG_RELOAD_OK = Gauge "jackstay_config_last_reload_successful" [] "bool",
        "Whether what runs is what the configuration file said when it was last read.";

    REQUESTS = Counter "jackstay_requests_total" ["listener", "verb", "code"] "requests",
        "Requests that ended, by Kubernetes verb and status code; 499: the client left before an answer.";
    REQUEST_DURATION = Histogram "jackstay_request_duration_seconds" ["listener", "verb"] "seconds",
        "From the request head to the end of the answer; long-running requests are left out.";
    REQUESTS_IN_FLIGHT = Gauge "jackstay_requests_in_flight" ["listener"] "requests",
        "Requests that run now, watches and tunnels included.";
    OWN_ERRORS = Counter "jackstay_own_errors_total" ["listener", "code", "reason"] "errors",
        "Errors that jackstay itself answered, by status code and reason; an empty code: a passed connection that was reset because no endpoint could be reached.";
    RESPONSES_CUT = Counter "jackstay_responses_cut_total" ["listener", "side"] "responses",
        "Answers that ended after their head and before their end, by who cut them: client, upstream or jackstay.";
    WATCHES = Gauge "jackstay_watches" ["listener"] "watches",
        "Watches that run now.";
    TUNNELS = Gauge "jackstay_tunnels" ["listener"] "tunnels",
        "Upgraded connections (exec, attach, port-forward) that run now.";
    DOWNSTREAM_CONNECTIONS = Gauge "jackstay_downstream_connections" ["listener"] "connections",
        "Client connections that are open now.";
    DOWNSTREAM_REFUSED = Counter "jackstay_downstream_refused_total" ["listener", "reason"] "connections",
        "Client connections that never got to a request: cap, descriptors, handshake, timeout, protocol.";
    CERTIFICATE_RELOADS = Counter "jackstay_certificate_reloads_total" ["listener", "outcome"] "reloads",
        "Certificate, key and CA files that were read again because they changed.";
    CLIENT_VERIFICATIONS = Counter "jackstay_client_verifications_total" ["listener", "outcome"] "chains",
        "Certificate chains of clients: verified (ok, failed), known to be good from another connection (known), or refused with 429 because too many waited to be verified (busy).";

    RETRIES = Counter "jackstay_retries_total" ["reason"] "requests",
        "Requests that were sent again.";
    RETRIES_REFUSED = Counter "jackstay_retries_refused_total" ["reason"] "requests",
        "Requests that failed and were not sent again: they may have been carried out, their body was too large to be held, or enough attempts had failed.";
    HEDGES = Counter "jackstay_hedges_total" ["outcome"] "requests",
        "Second attempts beside one that waits, by who answered: original, hedge, or neither (failed); over the budget none is made, and where there is nobody to ask it is tried again.";
    WATCH_RESUMES = Counter "jackstay_watch_resumes_total" ["outcome"] "watches",
        "Watches that lost their apiserver or were refused by it with 410 (withheld, or passed on for want of a budget), and whether they went on; barred and oversized: not lost, but what came stands in the way of resuming them; unproven: ended, because the proof of their client did.";
    STALE_WATCHES = Counter "jackstay_stale_watches_total" ["upstream", "endpoint"] "watches",
        "Watches whose bookmarks stayed away for three minutes: the apiserver's watch cache may be stale.";
    STREAM_WAITS = Counter "jackstay_stream_waits_total" ["upstream"] "requests",
        "Requests that had to wait for a free upstream stream.";
    STREAMS_EXHAUSTED = Counter "jackstay_streams_exhausted_total" ["upstream"] "requests",
        "Requests (answered with 429), second attempts and lost watches for which no upstream stream came free.";
    HELD_WATCHES = Gauge "jackstay_held_watches" [] "watches",
        "Watches that are held because no apiserver can be reached: running ones until their own deadline, new ones for up to 30 s.";
    HELD_BODY_BYTES = Gauge "jackstay_held_body_bytes" [] "bytes",
        "Bytes of request bodies held so that they can be sent again.";
    HELD_FRAME_BYTES = Gauge "jackstay_held_frame_bytes" [] "bytes",
        "Bytes held of watch events that have not arrived whole, or that wait whole for their client.";

    ENDPOINT_STATE = Gauge "jackstay_endpoint_state" ["upstream", "endpoint", "state"] "endpoints",
        "1 for the state that the endpoint is in, 0 for those that it has left.";
    EJECTIONS = Counter "jackstay_ejections_total" ["upstream", "endpoint", "reason"] "ejections",
        "How often the endpoint was taken out, and why.";
    CONNECTIONS = Gauge "jackstay_connections" ["upstream", "endpoint", "state"] "connections",
        "Connections to the endpoint.";
    DIALS = Counter "jackstay_dials_total" ["upstream", "endpoint", "outcome"] "connections",
        "Attempts to connect: ok, failed, timeout, tls, local (for want of something of ours), and so on.";
    ANSWERS = Counter "jackstay_endpoint_answers_total" ["upstream", "endpoint", "outcome"] "answers",
        "Answers by the endpoint that gave them: ok, or error for 500 and above.";
    PASSTHROUGH_CONNECTIONS = Gauge "jackstay_passthrough_connections" ["listener"] "connections",
        "Client connections that are passed through now.";
    PASSTHROUGH_BYTES = Counter "jackstay_passthrough_bytes_total" ["listener", "direction"] "bytes",
        "Bytes passed through, by direction: to the server or to the client.";
    PASSTHROUGH_CLOSED = Counter "jackstay_passthrough_closed_total" ["listener", "reason"] "connections",
        "Passed connections that ended: both sides were done, a side broke, or why we ended them.";
    PASSTHROUGH_FLOWS = Gauge "jackstay_passthrough_flows" ["upstream", "endpoint"] "connections",
        "Passed connections that lead to the endpoint now.";
    PING_RTT = Histogram "jackstay_ping_rtt_seconds" ["upstream", "endpoint"] "seconds",
        "Round trips of HTTP/2 PING.";

    DISCOVERY_LAST_SUCCESS = Gauge "jackstay_discovery_last_success_timestamp_seconds" ["upstream", "source"] "seconds",
        "When a source of endpoints last gave an answer that could be used, in seconds since 1970; 0: never.";
    DISCOVERY_ERRORS = Counter "jackstay_discovery_errors_total" ["upstream", "source"] "errors",
        "Questions to a source of endpoints that failed; what it said before stays.";
    DISCOVERY_REFUSED = Counter "jackstay_discovery_refused_total" ["upstream", "source", "reason"] "entries",
        "What a source said and was not taken: invalid, own-address, too-many, or a whole answer that is empty.";
    DISCOVERY_CHANGES = Counter "jackstay_discovery_changes_total" ["upstream", "change"] "endpoints",
        "Endpoints that joined or left.";
}

/// The values of label `verb`. What is not among them counts as the last.
pub const VERBS: [&str; 16] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "connect",
    "proxy",
    "post",
    "put",
    "head",
    "options",
    "log",
    "other",
];

/// The values of label `reason` in [`PASSTHROUGH_CLOSED`]. What is not among them counts as the
/// last.
pub const CLOSE_REASONS: [&str; 16] = [
    // Both directions have ended.
    "done",
    // A side reset the connection.
    "client_reset",
    "server_reset",
    // The flow is dead: what we sent is not acknowledged, or our probes are not answered.
    "unacknowledged",
    "unanswered",
    "client_dead",
    // Its endpoint is dead, or was removed and its time is over.
    "endpoint_dead",
    "endpoint_left",
    // No endpoint could be reached.
    "unreachable",
    // The bounds of the configuration.
    "handshake_timeout",
    "idle_timeout",
    // A transparent listener takes only what was redirected, and nothing of our own.
    "not_redirected",
    "loop",
    // Ours.
    "rebalance",
    "shutdown",
    "other",
];

/// The values of label `reason` in [`OWN_ERRORS`]. What is not among them counts as the last.
pub const OWN_ERROR_REASONS: [&str; 12] = [
    // No apiserver could be reached (503; a passed connection: reset).
    "no_upstream",
    "unreachable",
    // The connection was lost after a write was sent (502).
    "unknown_fate",
    // The apiserver did not process a write whose body is no longer held (502).
    "unprocessed",
    // The apiserver broke off or answered nonsense, or did not answer in time (502, 504).
    "bad_gateway",
    "timeout",
    // The request was refused: its credential, its form, its size, or a limit.
    "unauthorized",
    "bad_request",
    "header_too_large",
    "limit",
    // A fault of jackstay.
    "internal",
    "other",
];

/// The states of an endpoint in [`ENDPOINT_STATE`].
pub const ENDPOINT_STATES: [&str; 7] =
    ["connecting", "ready", "degraded", "suspect", "ejected", "no-h2", "leaving"];

/// The states of a connection in [`CONNECTIONS`]; a dead one is closed and no longer there.
pub const CONNECTION_STATES: [&str; 5] =
    ["connecting", "live", "suspect", "draining", "unresponsive"];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_table_keeps_prometheus_conventions() {
        let mut seen = HashSet::new();
        for spec in ALL {
            assert!(seen.insert(spec.name), "{} is listed twice", spec.name);
            assert!(spec.name.starts_with("jackstay_"), "{}", spec.name);
            assert_eq!(spec.kind == Kind::Counter, spec.name.ends_with("_total"), "{}", spec.name);
            assert!(spec.help.ends_with('.'), "{}: help is a sentence", spec.name);
            if spec.kind == Kind::Histogram {
                assert_eq!(spec.unit, "seconds", "{}", spec.name);
                assert!(spec.name.ends_with("_seconds"), "{}", spec.name);
            }
            for label in spec.labels {
                assert!(!["path", "user", "name", "namespace"].contains(label), "{}", spec.name);
            }
        }
    }

    #[test]
    fn label_values_are_distinct() {
        for list in
            [&VERBS[..], &ENDPOINT_STATES, &CONNECTION_STATES, &CLOSE_REASONS, &OWN_ERROR_REASONS]
        {
            assert_eq!(list.iter().collect::<HashSet<_>>().len(), list.len());
        }
    }
}
