"""A case of each kind for each alert: when it fires, when it does not, and which alerts suppress it.

`run` fails if an alert of deploy/monitoring lacks a kind. A new alert needs one entry of `ALERTS`.

Series that a process has from its start are written as it exports them: a counter begins with 0 before its first event
(`cargo test --test checks reference::` checks that), so `fires` shows that the first event suffices.
"""

from dataclasses import dataclass, field

STEP = 30  # seconds between two samples
NODE = {"instance": "n1"}
UPSTREAM = {"instance": "n1", "upstream": "cp"}
ENDPOINT = {"instance": "n1", "upstream": "cp", "endpoint": "a"}
LISTENER = {"instance": "n1", "listener": "apiserver"}
IDENTITY = {"instance": "n1", "kind": "identity", "name": "/var/lib/kubelet/pki/kubelet-client-current.pem"}
DAY = 86400


@dataclass
class Case:
    """`fires` and `quiet`: series of promtool, as (metric, labels, values), and the minute at which the alert fires
    or does not. `labels`: those of the alert. `suppressed_by`: alerts, each with what differs in an alert of the same
    name that suppresses nothing; or `not_suppressed`: why nothing does."""
    labels: dict
    fires: list
    at: int
    quiet: dict  # what happens: series, or (series, minute)
    suppressed_by: dict = field(default_factory=dict)
    not_suppressed: str = ""


def first_failure(metric, labels, count=1):
    """A counter whose first events are seen after two minutes, all at once."""
    return [(metric, labels, f"0x3 {count}x80")]


def states(node, **values):
    """The states of the endpoint `a` of a node."""
    return [("jackstay_endpoint_state", {**ENDPOINT, "instance": node, "state": state}, value) for state, value in values.items()]


def nodes(count, one):
    """The series that `one` returns for each node."""
    return [series for number in range(count) for series in one(f"n{number}")]


def requests(node, failed, rest="0+100x80"):
    labels = {**LISTENER, "instance": node, "verb": "get"}
    return [("jackstay_requests_total", {**labels, "code": "503"}, failed), ("jackstay_requests_total", {**labels, "code": "200"}, rest),
            ("jackstay_listener_info", {**LISTENER, "instance": node, "mode": "terminate", "upstream": "cp"}, "1x80")]


def round_trips(node, slow, fast="0+30x80"):
    """PINGs of 0.1 s, and of 2 s."""
    labels = {**ENDPOINT, "instance": node}
    buckets = {"0.1": fast, "0.5": fast, "2.0": slow, "+Inf": slow}
    return [("jackstay_ping_rtt_seconds_bucket", {**labels, "le": le}, values) for le, values in buckets.items()]


def certificate(lifetime, left):
    """A certificate of which `left` seconds are left when the test begins."""
    return [("jackstay_certificate_expiry_timestamp_seconds", IDENTITY, f"{left}x600"),
            ("jackstay_certificate_not_before_timestamp_seconds", IDENTITY, f"{left - lifetime}x600")]


OTHER_NODE, OTHER_UPSTREAM, OTHER_ENDPOINT = {"instance": "n2"}, {"upstream": "other"}, {"endpoint": "b"}
ISOLATED = {"JackstayFleetIsolated": OTHER_UPSTREAM, "JackstayNodeIsolated": OTHER_NODE, "JackstayNoEndpoint": OTHER_NODE}

ALERTS = {
    "JackstayDown": Case(
        labels={**NODE, "job": "jackstay"},
        fires=[("up", {**NODE, "job": "jackstay"}, "1x3 0x80")], at=5,
        quiet={"one scrape fails": [("up", {**NODE, "job": "jackstay"}, "1x3 0 1x80")]},
        suppressed_by={"JackstayFleetDown": {"cluster": "other"}}),
    "JackstayNotScraped": Case(
        labels={"job": "jackstay"},
        fires=[("up", {**NODE, "job": "kubelet"}, "1x80")], at=11,
        quiet={"a node is down": [("up", {**NODE, "job": "jackstay"}, "0x80")]},
        not_suppressed="nothing else fires without a scrape"),
    "JackstayNoEndpoint": Case(
        labels=UPSTREAM,
        fires=[("jackstay_upstream_usable_endpoints", UPSTREAM, "3x3 0x80")], at=3,
        quiet={"one of three is left": [("jackstay_upstream_usable_endpoints", UPSTREAM, "3x3 1x80")]},
        suppressed_by={"JackstayFleetIsolated": OTHER_UPSTREAM, "JackstayNodeIsolated": OTHER_NODE}),
    "JackstayEndpointOut": Case(
        labels=ENDPOINT,
        fires=states("n1", ready="1x3 0x80", ejected="0x3 1x80"), at=8,
        quiet={"it returns after four minutes": states("n1", ready="1x3 0x7 1x80", ejected="0x3 1x7 0x80")},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT}),
    "JackstayEndpointUnverified": Case(
        labels=ENDPOINT,
        fires=states("n1", ready="1x3 0x80", unverified="0x3 1x80"), at=13,
        quiet={"for nine minutes": (states("n1", unverified="1x18 0x80"), 11)},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT, "JackstayEndpointUnwellByFleet": OTHER_ENDPOINT}),
    "JackstayEndpointUnwell": Case(
        labels=ENDPOINT,
        fires=states("n1", ready="1x3 0x80", degraded="0x3 1x80"), at=13,
        quiet={"while it starts": (states("n1", degraded="1x8 0x80"), 12)},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT, "JackstayEndpointUnwellByFleet": OTHER_ENDPOINT}),
    "JackstayApiGroupFailing": Case(
        labels={**ENDPOINT, "group": "metrics.k8s.io"},
        fires=[("jackstay_group_failing", {**ENDPOINT, "group": "metrics.k8s.io"}, "_x3 1x80")], at=8,
        quiet={"it works again after four minutes": [("jackstay_group_failing", {**ENDPOINT, "group": "metrics.k8s.io"}, "_x3 1x8 0x80")],
               "requests fail, and the group works": first_failure("jackstay_group_failures_total", {**ENDPOINT, "group": "metrics.k8s.io"}, 9)},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT, "JackstayEndpointOut": OTHER_ENDPOINT}),
    "JackstayEndpointFlaps": Case(
        labels=ENDPOINT,
        fires=first_failure("jackstay_ejections_total", {**ENDPOINT, "reason": "silent"}, 6), at=3,
        quiet={"four ejections": first_failure("jackstay_ejections_total", {**ENDPOINT, "reason": "silent"}, 4),
               "ejections of the past": [("jackstay_ejections_total", {**ENDPOINT, "reason": "silent"}, "90x80")]},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT}),
    "JackstayWatchesBroken": Case(
        labels=NODE,
        fires=first_failure("jackstay_watch_resumes_total", {**NODE, "outcome": "gave_up"}, 30), at=3,
        quiet={"watches are resumed": first_failure("jackstay_watch_resumes_total", {**NODE, "outcome": "resumed"}, 900)},
        suppressed_by={"JackstayFleetIsolated": {"cluster": "other"}, "JackstayNodeIsolated": OTHER_NODE, "JackstayNoEndpoint": OTHER_NODE}),
    "JackstayStreamsExhausted": Case(
        labels=UPSTREAM,
        fires=first_failure("jackstay_streams_exhausted_total", UPSTREAM), at=3,
        quiet={"long ago": [("jackstay_streams_exhausted_total", UPSTREAM, "7x80")]},
        suppressed_by=ISOLATED),
    "JackstayShedsClients": Case(
        labels={**NODE, "reason": "stalled_reader"},
        fires=[("jackstay_shed_total", {**NODE, "reason": "stalled_reader"}, "0x3 1+1x80")], at=8,
        quiet={"one client, once": (first_failure("jackstay_shed_total", {**NODE, "reason": "stalled_reader"}), 8)},
        not_suppressed="the memory of one node; its cause is a client there"),
    "JackstayEndpointFloods": Case(
        labels={**ENDPOINT, "frame": "ping"},
        fires=first_failure("jackstay_upstream_frame_limit_total", {**ENDPOINT, "frame": "ping"}), at=8,
        quiet={"long ago": [("jackstay_upstream_frame_limit_total", {**ENDPOINT, "frame": "ping"}, "3x80")]},
        suppressed_by=ISOLATED),
    "JackstayRoundTripsSlow": Case(
        labels=ENDPOINT,
        fires=round_trips("n1", slow="0+33x80"), at=12,
        quiet={"all are fast": round_trips("n1", slow="0+30x80")},
        suppressed_by={**ISOLATED, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT, "JackstayEndpointSlowForFleet": OTHER_ENDPOINT}),
    "JackstayServerErrors": Case(
        labels={**LISTENER, "upstream": "cp"},
        # The series of a code begins with its first response. Errors that go on are seen at the second scrape.
        fires=requests("n1", failed="_x3 10+10x80"), at=10,
        quiet={"4 % fail": requests("n1", failed="0+4x80"), "a burst": requests("n1", failed="0x3 60x80"),
               "no requests": requests("n1", failed="0x80", rest="0x80")},
        suppressed_by={**ISOLATED, "JackstayFleetServerErrors": OTHER_UPSTREAM}),
    "JackstayDiscoveryFails": Case(
        labels={**UPSTREAM, "source": "dns"},
        fires=first_failure("jackstay_discovery_errors_total", {**UPSTREAM, "source": "dns"}, 4), at=18,
        quiet={"three errors": first_failure("jackstay_discovery_errors_total", {**UPSTREAM, "source": "dns"}, 2)},
        suppressed_by=ISOLATED),
    "JackstayConfigNotReloaded": Case(
        labels=NODE,
        fires=[("jackstay_config_last_reload_successful", NODE, "1x3 0x80")], at=8,
        quiet={"corrected at once": [("jackstay_config_last_reload_successful", NODE, "1x3 0x2 1x80")]},
        not_suppressed="each node has a file of its own; group_by sends one notification"),
    "JackstayConfigReloadsFail": Case(
        labels=NODE,
        fires=first_failure("jackstay_config_reloads_total", {**NODE, "outcome": "failed"}, 5), at=3,
        quiet={"reloads succeed": first_failure("jackstay_config_reloads_total", {**NODE, "outcome": "ok"}, 50)},
        suppressed_by={"JackstayConfigNotReloaded": OTHER_NODE}),
    "JackstayCertificateExpires": Case(
        labels=IDENTITY,
        fires=certificate(365 * DAY, 13 * DAY), at=11,
        quiet={"a year, 15 days left": certificate(365 * DAY, 15 * DAY),
               # A tenth of 24 h is left five minutes later.
               "kubelet's of 24 h, before its latest renewal": (certificate(DAY, DAY // 10 + 75 * 60), 70),
               "renewed while it is pending": ([
                   ("jackstay_certificate_expiry_timestamp_seconds", IDENTITY, f"{8000}x10 {90000}x80"),
                   ("jackstay_certificate_not_before_timestamp_seconds", IDENTITY, f"{8000 - DAY}x10 {600}x80")], 12)},
        suppressed_by={"JackstayCertificateExpired": OTHER_NODE}),
    "JackstayCertificateExpired": Case(
        labels=IDENTITY,
        fires=certificate(365 * DAY, 300), at=7,
        quiet={"not yet": certificate(365 * DAY, 600)},
        not_suppressed="a file of one node that does not work any more"),
    "JackstayCertificateNotReloaded": Case(
        labels=IDENTITY,
        fires=[("jackstay_certificate_last_reload_successful", IDENTITY, "1x3 0x80")], at=8,
        quiet={"read in the middle of a rotation": [("jackstay_certificate_last_reload_successful", IDENTITY, "1x3 0x2 1x80")]},
        not_suppressed="a file of one node"),
    # tests/monitoring/fleet has the limits of the first three.
    "JackstayEndpointSuspectedByFleet": Case(
        labels={"upstream": "cp", "endpoint": "a"},
        fires=nodes(5, lambda node: states(node, suspect="1x80") + [
            ("jackstay_endpoint_state", {**ENDPOINT, "instance": node, "endpoint": "b", "state": "ready"}, "1x80")]), at=4,
        quiet={"every node reaches it": nodes(5, lambda node: states(node, ready="1x80"))},
        suppressed_by={"JackstayFleetIsolated": OTHER_UPSTREAM}),
    "JackstayNodeIsolated": Case(
        labels=UPSTREAM,
        fires=states("n1", ejected="1x80") + states("n2", ready="1x80"), at=4,
        quiet={"every node reaches it": nodes(5, lambda node: states(node, ready="1x80"))},
        not_suppressed="it fires only while most of the nodes reach the apiservers, so no alert about these is its cause"),
    "JackstayFleetIsolated": Case(
        labels={"upstream": "cp"},
        fires=nodes(5, lambda node: states(node, ejected="1x80")), at=4,
        quiet={"one of two nodes": states("n1", ejected="1x80") + states("n2", ready="1x80")},
        not_suppressed="it is the cause"),
    "JackstayEndpointUnwellByFleet": Case(
        labels={"upstream": "cp", "endpoint": "a", "state": "degraded"},
        fires=nodes(5, lambda node: states(node, degraded="1x80")), at=8,
        quiet={"one of twenty nodes": states("n0", degraded="1x80") + nodes(20, lambda node: states(node, ready="1x80")),
               "while it starts": nodes(5, lambda node: states(node, degraded="1x6 0x80", ready="0x6 1x80"))},
        suppressed_by={"JackstayFleetIsolated": OTHER_UPSTREAM, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT}),
    "JackstayEndpointSlowForFleet": Case(
        labels={"upstream": "cp", "endpoint": "a"},
        fires=nodes(5, lambda node: round_trips(node, slow="0+40x80")), at=12,
        quiet={"slow on one of twenty nodes": round_trips("slow", slow="0+60x80", fast="0x80") + nodes(19, lambda node: round_trips(node, slow="0+30x80"))},
        suppressed_by={"JackstayFleetIsolated": OTHER_UPSTREAM, "JackstayEndpointSuspectedByFleet": OTHER_ENDPOINT}),
    "JackstayFleetServerErrors": Case(
        labels={"upstream": "cp"},
        fires=nodes(5, lambda node: requests(node, failed="0x3 10+10x80")), at=8,
        quiet={"on one of twenty nodes": requests("bad", failed="0+50x80") + nodes(19, lambda node: requests(node, failed="0x80")),
               "on a single node": requests("bad", failed="0+50x80")},
        suppressed_by={"JackstayFleetIsolated": OTHER_UPSTREAM}),
    "JackstayFleetDown": Case(
        labels={"job": "jackstay"},
        fires=nodes(5, lambda node: [("up", {"instance": node, "job": "jackstay"}, "1x3 0x80")]), at=6,
        quiet={"one of three": [("up", {"instance": f"n{number}", "job": "jackstay"}, f"{int(number > 0)}x80") for number in range(3)],
               "the only node": [("up", {**NODE, "job": "jackstay"}, "0x80")]},
        not_suppressed="it is the cause"),
}


def notation(name, labels):
    """A series as PromQL writes it."""
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"
