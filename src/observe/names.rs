//! The table of all metrics, and the lists of label values.
//!
//! Only metrics of this table can be registered, so [`ALL`] is complete. The reference in
//! `deploy/monitoring/README.md` is generated from it.
//!
//! A series that begins with its first event has no increase then, so an alert would miss it. Counters that an
//! alert queries are therefore registered with 0 for the known values of their labels.
//!
//! The number of label values is bounded. Verbs, codes, states and reasons are fixed lists in snake case.
//! Names of listeners, upstreams and certificates come from the configuration, and the number of endpoints
//! is limited. No label value is a request path, a user or an object name.

/// The Prometheus type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution over fixed buckets.
    Histogram,
}

impl MetricKind {
    /// Its name in the exposition format.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The definition of one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MetricSpec {
    /// Name in the exposition format.
    pub name: &'static str,
    /// Prometheus type.
    pub kind: MetricKind,
    /// `seconds`, `bytes`, or what is counted.
    pub unit: &'static str,
    /// Label keys, in the order in which values are passed to the registry.
    pub labels: &'static [&'static str],
    /// Help text for Prometheus, which is also the documentation.
    pub help: &'static str,
}

macro_rules! table {
    ($($konst:ident = $kind:ident $name:literal [$($label:literal),*] $unit:literal, $help:literal;)*) => {
        $(
            #[doc = $help]
            // Help texts are plain text for Prometheus.
            #[allow(clippy::doc_markdown)]
            pub const $konst: MetricSpec = MetricSpec {
                name: $name,
                kind: MetricKind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// All metrics, in the order of the documentation.
        pub const ALL: &[MetricSpec] = &[$($konst),*];
    };
}

table! {
    BUILD_INFO = Gauge "jackstay_build_info" ["version", "commit"] "info",
        "Always 1; the labels say which build runs.";
    LISTENER_INFO = Gauge "jackstay_listener_info" ["listener", "mode", "upstream"] "info",
        "Always 1; the labels say which upstream a listener uses by default.";
    USABLE_ENDPOINTS = Gauge "jackstay_upstream_usable_endpoints" ["upstream"] "endpoints",
        "Endpoints of a configured upstream that can be used; 0 also while none is known.";

    CONFIG_RELOADS = Counter "jackstay_config_reloads_total" ["outcome"] "reloads",
        "Reloads of the configuration by outcome: ok or failed. After a failure the old configuration stays in force.";
    CONFIG_RELOAD_OK = Gauge "jackstay_config_last_reload_successful" [] "bool",
        "1 if the last reload of the configuration succeeded, else 0.";

    REQUESTS = Counter "jackstay_requests_total" ["listener", "verb", "code"] "requests",
        "Finished requests by Kubernetes verb and status code. Code 499 means that the client left before a response.";
    REQUEST_DURATION = Histogram "jackstay_request_duration_seconds" ["listener", "verb"] "seconds",
        "Time from the request head to the end of the response, without long-running requests.";
    REQUESTS_IN_FLIGHT = Gauge "jackstay_requests_in_flight" ["listener"] "requests",
        "Requests in flight, watches and tunnels included.";
    OWN_ERRORS = Counter "jackstay_own_errors_total" ["listener", "code", "reason"] "errors",
        "Error responses that jackstay itself generated, by status code and reason. An empty code is a passthrough connection that was reset because no endpoint was reachable.";
    RESPONSES_CUT = Counter "jackstay_responses_cut_total" ["listener", "side"] "responses",
        "Responses that ended early after their head, by the side that ended them: client, upstream or jackstay.";
    WATCHES = Gauge "jackstay_watches" ["listener"] "watches",
        "Open watches.";
    TUNNELS = Gauge "jackstay_tunnels" ["listener"] "tunnels",
        "Open upgraded connections (exec, attach, port-forward).";
    DOWNSTREAM_CONNECTIONS = Gauge "jackstay_downstream_connections" ["listener"] "connections",
        "Open client connections.";
    DOWNSTREAM_REFUSED = Counter "jackstay_downstream_refused_total" ["listener", "reason"] "connections",
        "Client connections refused or closed by jackstay: before their first request (cap, descriptors, handshake, timeout, protocol; source: the source of the connection uses its share of the slots), or while idle (evicted: for a new connection).";
    CLOSED_FOR_FRAMES = Counter "jackstay_downstream_frame_limit_total" ["listener", "frame"] "connections",
        "Client connections closed with ENHANCE_YOUR_CALM because the client sent too many frames of a kind: ping, settings, priority, window_update, rst_stream, empty_data, empty_headers, trailers, other; or left a header block open for too long, or when there was no memory for it or for its fields in the header table: header_block.";
    CERTIFICATE_RELOADS = Counter "jackstay_certificate_reloads_total" ["listener", "outcome"] "reloads",
        "Re-reads of certificate, key and CA files that changed: ok or failed.";
    CERTIFICATE_EXPIRY = Gauge "jackstay_certificate_expiry_timestamp_seconds" ["kind", "name"] "seconds",
        "When a certificate in use expires, in seconds since 1970: serving and client_ca (by listener), identity (by file), upstream_ca (by upstream). Of a CA bundle, the last certificate to expire.";
    CERTIFICATE_NOT_BEFORE = Gauge "jackstay_certificate_not_before_timestamp_seconds" ["kind", "name"] "seconds",
        "When the validity of the same certificate began, in seconds since 1970.";
    CERTIFICATE_RELOAD_OK = Gauge "jackstay_certificate_last_reload_successful" ["kind", "name"] "bool",
        "1 if the present content of the files is in use, else 0: the last valid content is used, if there was any. Kinds as above, and probe_token (by upstream).";
    CLIENT_VERIFICATIONS = Counter "jackstay_client_verifications_total" ["listener", "outcome"] "chains",
        "Client certificate chains: verified (ok, failed), already verified on another connection (known), or refused with 429 because too many chains waited for verification (busy).";

    RETRIES = Counter "jackstay_retries_total" ["reason"] "requests",
        "Requests that were retried, by reason. not_sent, unprocessed, lost: the attempt failed before a response. too_old, not_reached: the watch cache lacked the version. rejected: an overloaded apiserver. starting: a 401 or 403 of one that may have just started. group_failed, group_unavailable: it cannot reach the server of the API group, or says that this is unavailable.";
    GROUP_FAILURES = Counter "jackstay_group_failures_total" ["upstream", "endpoint", "group"] "requests",
        "Requests that a healthy endpoint could not serve because it has lost its path to the aggregated apiserver or the conversion webhook of their API group. Groups after the 32nd are counted as other.";
    GROUP_FAILING = Gauge "jackstay_group_failing" ["upstream", "endpoint", "group"] "groups",
        "1 while the API group fails at the endpoint, so that its requests prefer other endpoints, else 0. In the group other, the number of such groups.";
    RETRIES_REFUSED = Counter "jackstay_retries_refused_total" ["reason"] "requests",
        "Failed requests that were not retried: they may have been executed (unsafe), their body was too large to hold (not_held), or the attempts were used up (attempts).";
    SETTLED = Counter "jackstay_settled_writes_total" ["outcome"] "requests",
        "Heartbeats whose object was read because their outcome was unknown. written: it shows that the heartbeat was carried out, and is the answer. sent_again: the response of a second request is the answer. responded: the response has arrived nevertheless. unknown: their clients got an error.";
    HEDGES = Counter "jackstay_hedges_total" ["outcome"] "requests",
        "Hedges by outcome. original, hedge: this attempt answered first. failed: both attempts failed. over_budget: the hedge budget was used up, so no hedge was sent. no_connection: the pool had no other connection, so no hedge was sent. cancelled: the request ended before its hedge had a stream, so no hedge was sent.";
    VERSION_FLOORS = Counter "jackstay_version_floors_total" ["outcome"] "requests",
        "Reads of any version (resourceVersion=0) whose client has a version floor, by outcome. applied: sent with the floor, because the endpoint is not known to have reached it. redirected: asked of another endpoint or connection, because one had not reached the version. most_recent: no apiserver that was asked had reached it, and another one may be behind an address, so the most recent state was asked. fallen_back: none had reached it, so the original request was sent. reset: the floor was lowered then. cut: a list was older, and was reset because its head had been forwarded.";
    WATCH_RESUMES = Counter "jackstay_watch_resumes_total" ["outcome"] "watches",
        "Watches that lost their stream or were answered with 410, by outcome. withheld: the 410 was not forwarded. unordered_group: a contradiction of its versions ended the resumes of an API group. not_resumable, oversized: still open, but an event that they received prevents a resume. unproven: ended because the proof of the client's identity ended. parameter: ended because no endpoint was known to honour the same parameters of its query. history_lost: ended with a 410 of jackstay, because etcd was restored from a backup. internal_error: ended by a defect of jackstay.";
    SHADOW_DURATION = Histogram "jackstay_watch_shadow_duration_seconds" ["outcome"] "seconds",
        "How long shadows ran: second streams of watches whose connection is suspect, from the request, by outcome. promoted: continues the watch, whose first stream was lost. recovered: the first stream answers again. no_stream, limited: not requested, because there was no free stream or place. refused: not accepted. lost: no response head, or the stream has ended. unusable: a frame could not be used. too_far_behind, over_budget: it held back too much. first_not_resumable: an event of the first stream prevents a resume. contradicted: the streams contradict each other, and the watch is reset. watch_ended: the watch has ended, or is resumed.";
    WATCH_GZIP_BYTES = Counter "jackstay_watch_gzip_bytes_total" ["upstream", "form"] "bytes",
        "Bytes of compressed watches: as an apiserver has sent them (received), and without compression (inflated).";
    WATCH_GZIP_ERRORS = Counter "jackstay_watch_gzip_errors_total" ["upstream", "reason"] "watches",
        "Streams of compressed watches that were left because they could not be decoded: invalid, ratio (of a decompression bomb), memory. No watch of the upstream asks for gzip for ten minutes then, or for 30 s after a lack of memory.";
    STREAM_WAITS = Counter "jackstay_stream_waits_total" ["upstream"] "requests",
        "Requests that waited for a free upstream stream.";
    STREAMS_EXHAUSTED = Counter "jackstay_streams_exhausted_total" ["upstream"] "requests",
        "Requests (answered with 429), hedges and lost watches for which no upstream stream became free.";
    HELD_WATCHES = Gauge "jackstay_held_watches" [] "watches",
        "Watches held while no apiserver is reachable: open ones until their own timeout, new ones for up to 30 s.";
    HELD_BODY_BYTES = Gauge "jackstay_held_body_bytes" [] "bytes",
        "Bytes of request bodies held for retries.";
    HELD_FRAME_BYTES = Gauge "jackstay_held_frame_bytes" [] "bytes",
        "Bytes of watch events that are incomplete or wait for their client.";

    MEMORY_BUDGET = Gauge "jackstay_memory_budget_bytes" ["kind"] "bytes",
        "Memory that clients make the process hold, as charged to the budget, by kind: connections, handshakes, streams, request_windows, responses, upstream_windows (what apiservers may send because of larger windows), held_bodies, watch_frames, tunnels, flows, sockets (what the kernel holds for them).";
    MEMORY_LIMIT = Gauge "jackstay_memory_budget_limit_bytes" [] "bytes",
        "Limit of the memory budget (memory_limit).";
    SHED = Counter "jackstay_shed_total" ["reason"] "events",
        "What was given up because memory or a queue ran short, unproven clients first: idle_connection, stalled_reader, long_running, stream_refused, connection_refused, queue_full, lingering.";

    ENDPOINT_STATE = Gauge "jackstay_endpoint_state" ["upstream", "endpoint", "state"] "endpoints",
        "1 for the current state of the endpoint, 0 for earlier states.";
    EJECTIONS = Counter "jackstay_ejections_total" ["upstream", "endpoint", "reason"] "ejections",
        "Ejections of the endpoint by reason.";
    CONNECTIONS = Gauge "jackstay_connections" ["upstream", "endpoint", "state"] "connections",
        "Open connections to the endpoint by state.";
    DIALS = Counter "jackstay_dials_total" ["upstream", "endpoint", "outcome"] "connections",
        "Attempts to connect by outcome: ok, failed, timeout, tls, local (a local resource was used up), and others.";
    UPSTREAM_FRAME_LIMIT = Counter "jackstay_upstream_frame_limit_total" ["upstream", "endpoint", "frame"] "connections",
        "Connections to the endpoint closed with ENHANCE_YOUR_CALM because it sent too many frames of a kind: headers (interim responses), ping, settings, window_update, rst_stream, empty_data, empty_headers, other; or interim_responses on a connection of HTTP/1.1.";
    WINDOW_CHANGES = Counter "jackstay_upstream_window_changes_total" ["upstream", "endpoint", "change"] "changes",
        "Changes of the receive windows of connections to the endpoint, which follow the line: grown, shrunk.";
    PACED = Counter "jackstay_upstream_paced_transfers_total" ["upstream", "endpoint", "direction"] "transfers",
        "Transfers whose bytes in flight were bounded because they made the queue of a slow line long, by direction: send (to the endpoint), receive.";
    ANSWERS = Counter "jackstay_endpoint_answers_total" ["upstream", "endpoint", "outcome"] "answers",
        "Responses of the endpoint: ok, or error for status 500 and above.";
    KUBERNETES_MINOR = Gauge "jackstay_endpoint_kubernetes_minor" ["upstream", "endpoint"] "versions",
        "Minor version of Kubernetes that the endpoint reports at /version, such as 36; 0 while it is unknown.";
    PING_LIMIT = Gauge "jackstay_endpoint_ping_limit_seconds" ["upstream", "endpoint"] "seconds",
        "Interval of PINGs to the endpoint after it has closed connections because of them (GOAWAY too_many_pings); 0 while it accepts health.ping_interval.";
    LINE_DELAY = Gauge "jackstay_endpoint_line_delay_seconds" ["upstream", "endpoint"] "seconds",
        "By how much the deadlines of PINGs, flows, probes and handshakes are longer, because round trips show that the queue of a slow line is long; else 0.";
    CANARY_WITHDRAWN = Gauge "jackstay_canary_withdrawn" ["upstream"] "bool",
        "1 while the canary share of requests is withdrawn from the newest version because of its errors, else 0.";
    PASSTHROUGH_CONNECTIONS = Gauge "jackstay_passthrough_connections" ["listener"] "connections",
        "Open passthrough connections.";
    PASSTHROUGH_BYTES = Counter "jackstay_passthrough_bytes_total" ["listener", "direction"] "bytes",
        "Bytes of passthrough connections by direction: to_server or to_client.";
    PASSTHROUGH_CLOSED = Counter "jackstay_passthrough_closed_total" ["listener", "reason"] "connections",
        "Closed passthrough connections by reason.";
    PASSTHROUGH_FLOWS = Gauge "jackstay_passthrough_flows" ["upstream", "endpoint"] "connections",
        "Open passthrough connections to the endpoint.";
    PING_RTT = Histogram "jackstay_ping_rtt_seconds" ["upstream", "endpoint"] "seconds",
        "Round trip times of HTTP/2 PING.";

    DISCOVERY_LAST_SUCCESS = Gauge "jackstay_discovery_last_success_timestamp_seconds" ["upstream", "source"] "seconds",
        "When an endpoint source last gave a usable answer, in seconds since 1970. 0 means never.";
    DISCOVERY_ERRORS = Counter "jackstay_discovery_errors_total" ["upstream", "source"] "errors",
        "Failed queries of an endpoint source. Its last usable answer stays in use.";
    DISCOVERY_REFUSED = Counter "jackstay_discovery_refused_total" ["upstream", "source", "reason"] "entries",
        "Refused entries of an endpoint source (invalid, own_address, too_many), and answers without endpoints (empty).";
    DISCOVERY_CHANGES = Counter "jackstay_discovery_changes_total" ["upstream", "change"] "endpoints",
        "Endpoints that joined or left.";

    METRICS_RESPONSES = Counter "jackstay_metrics_responses_total" ["outcome"] "responses",
        "Responses on admin.metrics_bind: served, unauthenticated (401), forbidden (403), busy (429: too many reviews), unavailable (503: no apiserver has reviewed the credential); and connections closed at once, too_many_connections.";

    PROCESS_CPU = Counter "process_cpu_seconds_total" [] "seconds",
        "User and system CPU time of the process.";
    PROCESS_OPEN_FDS = Gauge "process_open_fds" [] "descriptors",
        "Open file descriptors.";
    PROCESS_MAX_FDS = Gauge "process_max_fds" [] "descriptors",
        "Limit on open file descriptors.";
    PROCESS_RESIDENT_MEMORY = Gauge "process_resident_memory_bytes" [] "bytes",
        "Resident memory.";
    PROCESS_VIRTUAL_MEMORY = Gauge "process_virtual_memory_bytes" [] "bytes",
        "Virtual memory.";
    PROCESS_START_TIME = Gauge "process_start_time_seconds" [] "seconds",
        "When the process started, in seconds since 1970.";
    PROCESS_THREADS = Gauge "process_threads" [] "threads",
        "Threads of the process.";
}

/// Values of the label `verb`. Any other verb counts as `other`.
pub const VERBS: [&str; 14] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "proxy",
    "post",
    "put",
    "head",
    "options",
    "other",
];

/// Values of the label `reason` of [`PASSTHROUGH_CLOSED`]. Any other reason counts as `other`.
pub const CLOSE_REASONS: [&str; 18] = [
    // Both directions have ended.
    "done",
    // A side reset the connection.
    "client_reset",
    "server_reset",
    // The endpoint or the client no longer acknowledges data or answers probes.
    "unacknowledged",
    "unanswered",
    "client_dead",
    // The endpoint is dead, or was removed and the drain time has passed.
    "endpoint_dead",
    "endpoint_left",
    // No endpoint could be reached.
    "unreachable",
    // The client had sent nothing, and another connection needed the slot.
    "evicted",
    // A side took no bytes, and memory was short.
    "memory",
    // Limits of the configuration.
    "handshake_timeout",
    "idle_timeout",
    // A transparent listener refuses connections that were not redirected, and those of jackstay itself.
    "not_redirected",
    "loop",
    // jackstay closed the connection to rebalance load or to shut down.
    "rebalance",
    "shutdown",
    "other",
];

/// Values of the label `reason` of [`OWN_ERRORS`]. Any other reason counts as `other`.
pub const OWN_ERROR_REASONS: [&str; 12] = [
    // No apiserver was reachable: 503 for a request, 429 for a new watch.
    "no_upstream",
    // No endpoint was reachable for a passthrough connection, which was reset (no code).
    "unreachable",
    // The connection was lost after a write was sent, so the outcome of the write is unknown (502).
    "unknown_outcome",
    // A heartbeat was ended after 4 s because its apiserver is not healthy; its outcome is unknown (504).
    "heartbeat_ended",
    // The apiserver did not process a write whose body is no longer held (502).
    "unprocessed",
    // The apiserver sent no complete or no valid response to a request that changes nothing (502).
    "bad_gateway",
    // jackstay has no credential for the client (401).
    "unauthorized",
    // The request must not be forwarded (400).
    "bad_request",
    // The request head is too large (431), or its target too long (414).
    "header_too_large",
    // A limit of jackstay was exceeded before the request was sent (429).
    "limit",
    // A defect of jackstay, to be reported (500).
    "internal_error",
    "other",
];

/// Values of the label `reason` of [`EJECTIONS`].
pub const EJECTION_REASONS: [&str; 4] = ["no_h2", "silent", "connect_timeout", "connect_failed"];

/// Values of the label `frame` of [`UPSTREAM_FRAME_LIMIT`].
pub const UPSTREAM_FRAMES: [&str; 10] = [
    "headers",
    "ping",
    "settings",
    "window_update",
    "rst_stream",
    "empty_data",
    "empty_headers",
    "header_block",
    "other",
    // On a connection of HTTP/1.1.
    "interim_responses",
];

/// The outcome of [`WATCH_RESUMES`] that an alert counts: no endpoint has accepted the resume in time.
pub const WATCH_GAVE_UP: &str = "gave_up";

/// Values of the label `state` of [`ENDPOINT_STATE`].
pub const ENDPOINT_STATES: [&str; 8] =
    ["connecting", "ready", "degraded", "suspect", "unverified", "ejected", "no_h2", "leaving"];

/// Values of the label `state` of [`CONNECTIONS`]. A dead connection is closed and not counted.
pub const CONNECTION_STATES: [&str; 4] = ["live", "suspect", "draining", "unresponsive"];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn metrics_table_keeps_prometheus_conventions() {
        let mut seen = HashSet::new();
        for spec in ALL {
            assert!(seen.insert(spec.name), "{} is listed twice", spec.name);
            let prefixes = ["jackstay_", "process_"];
            assert!(prefixes.iter().any(|prefix| spec.name.starts_with(prefix)), "{}", spec.name);
            assert_eq!(
                spec.kind == MetricKind::Counter,
                spec.name.ends_with("_total"),
                "{}",
                spec.name
            );
            assert!(spec.help.ends_with('.'), "{}: help is a sentence", spec.name);
            if spec.kind == MetricKind::Histogram {
                assert_eq!(spec.unit, "seconds", "{}", spec.name);
                assert!(spec.name.ends_with("_seconds"), "{}", spec.name);
            }
            for label in spec.labels {
                // The names of certificates come from the configuration, so they are bounded.
                let is_bounded = spec.name.starts_with("jackstay_certificate_") && *label == "name";
                let is_unbounded = ["path", "user", "name", "namespace"].contains(label);
                assert!(is_bounded || !is_unbounded, "{}", spec.name);
            }
        }
    }

    #[test]
    fn label_values_are_distinct_and_in_snake_case() {
        for list in [
            &VERBS[..],
            &ENDPOINT_STATES,
            &CONNECTION_STATES,
            &CLOSE_REASONS,
            &OWN_ERROR_REASONS,
            &EJECTION_REASONS,
            &UPSTREAM_FRAMES,
        ] {
            assert_eq!(list.iter().collect::<HashSet<_>>().len(), list.len());
            for value in list {
                let is_snake_case =
                    |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                assert!(value.chars().all(is_snake_case), "{value}");
            }
        }
    }
}
