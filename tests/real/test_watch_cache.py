"""Watch caches that lag although all checks of their apiserver pass: jackstay compares the versions. Its prober has the
certificate of a node, as beside kubelet, which may read services."""

import re
import signal
import time
import unittest

from cases import RigCase
from figures import LONG, within
from rig import ADDRESSES, ADMIN_TOKENS, CACHE, PORT, Apiserver, Jackstay, Process, log, log_lines, sh, wait_for
from test_jackstay import JackstayCase
from test_lag import EVENT_INTERVAL, NAMESPACE, Reader, Watcher
from workers import Client, Worker

CUT = 10  # seconds; gRPC's keepalive replaces the connection to etcd after 40 s
WATCHES = 8
LAGS = r"watch cache lags: version (\d+) of services, (\S+) had (\d+) \d+ s ago"
OTHER_ETCD = r"these endpoints do not share an etcd: version (\d+) of services here, and (\d+) at (\S+) \d+ s ago"


def endpoints(jackstay):
    return {endpoint["address"]: endpoint for endpoint in jackstay.status()["upstreams"][0]["endpoints"]}


def states(jackstay):
    return [endpoint["state"] for endpoint in endpoints(jackstay).values()]


def own_watches(jackstay, address):
    """The watches of the first identity at an endpoint, which are those of this test. After a restart of all apiservers, a
    kubelet may have a watch for which the history of no other apiserver is long enough."""
    return sum(c["watches"] for c in endpoints(jackstay)[address]["connections"] if c["class"] == "identity-0")


class ServiceWriter(Worker):
    """Writes a service with the time of the write, to an apiserver that has etcd."""

    PATH = f"{NAMESPACE}/services"

    def __init__(self, case):
        super().__init__(case)
        self.client = Client(case.rig, case.rig.server("c"), case.rig.admin_cert)
        code, answer = self.client.call("POST", self.PATH, {"metadata": {"name": "clock"}, "spec": {"clusterIP": "None"}})
        assert code in (201, 409), f"{code} {answer}"

    def work(self):
        code, answer = self.client.call("PATCH", f"{self.PATH}/clock", {"metadata": {"annotations": {"at": repr(time.monotonic())}}})
        assert code == 200, f"{code} {answer}"
        self.stopping.wait(EVENT_INTERVAL)


class OneResource(JackstayCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        cls.jackstay = Jackstay(
            cls.rig, [cls.rig.admin_cert], log_name="jackstay-one-resource", port=7500, admin=9700).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server

    def test_watch_cache_of_one_resource_lags(self):
        rig = self.rig
        wait_for("every endpoint to be ready", lambda: states(self.jackstay) == ["ready"] * len(ADDRESSES), 60)
        writer, watchers = ServiceWriter(self), [Watcher(self, "services") for _ in range(WATCHES)]
        cached, recent = (Reader(self, query, "services") for query in ("?resourceVersion=0", ""))
        for worker in (writer, *watchers, cached, recent):
            worker.start()

        def watching():
            for worker in (writer, *watchers):
                self.assertIsNone(worker.failure, worker)
            return all(len(watcher.delays) > 20 for watcher in watchers)
        wait_for("events on every watch", watching, 30)

        def most_watched():
            watches = {name: own_watches(self.jackstay, f"{ADDRESSES[name]}:{PORT}") for name in "ab"}  # the writer uses c
            return any(watches.values()) and max(watches, key=watches.get)
        # If a and b were slow for a moment, all watches are at c until load is balanced.
        name = wait_for("a watch at a or b", most_watched, 60)
        address = f"{ADDRESSES[name]}:{PORT}"
        log_size, checks = self.log_size(), rig.api(name, cert=rig.admin_cert)
        rig.faults.drop_etcd_of_services(name)
        begun, first, reason = time.monotonic(), None, None
        while time.monotonic() < begun + CUT:
            for path in ("/livez", "/readyz"):
                self.assertEqual(checks.get(path).code, 200, path)
            for other, endpoint in endpoints(self.jackstay).items():
                if endpoint["state"] != "degraded":
                    continue
                self.assertEqual(other, address, endpoint["reason"])
                first = first or time.monotonic() - begun
                reason = endpoint["reason"]
            time.sleep(0.1)
        degraded = self.jackstay.metrics()[f'jackstay_endpoint_state{{upstream="control-plane",endpoint="{address}",state="degraded"}}']
        left = own_watches(self.jackstay, address)
        self.assertGreater(rig.faults.dropped(), 0, "the fault dropped no packet")
        rig.faults.clear()
        cleared = time.monotonic()
        wait_for("every endpoint to be ready", lambda: states(self.jackstay) == ["ready"] * len(ADDRESSES), 60)
        log(f"    degraded after {first and round(first, 2)} s: {reason}; ready again {time.monotonic() - cleared:.1f} s after the fault")
        for worker in (cached, recent, *watchers, writer):
            worker.finish()
        self.assertRegex(reason or "not degraded", LAGS)
        self.assertEqual((degraded, left), (1, 0))
        self.assertEqual([watcher.ends for watcher in watchers], [[]] * WATCHES)
        self.assertEqual((cached.backwards, recent.backwards), (0, 0))
        self.assertEqual(cached.failed + recent.failed, [])
        late = max(delay for watcher in watchers for _, delay in watcher.delays)
        # The proof alone takes 3 s, for which the apiserver waits for its cache.
        within(self, "a watch cache lags, all checks pass: latest event", late, "s", 5)
        within(self, "a watch cache lags, all checks pass: slowest cached read", cached.slowest, "s", 5)
        self.check_story("a watch cache that lags", log_size)


class OtherEtcd(RigCase, unittest.TestCase):
    """Two apiservers of different clusters behind one upstream."""

    ADDRESS, ETCD, PEER = "10.99.0.21", "http://127.0.0.1:2479", "http://127.0.0.1:2480"
    INTERVALS = 0.1, 1  # seconds between the writes of the two clusters
    AHEAD = 300  # so many versions the second cluster must not catch up while the test runs

    def setUp(self):
        rig = self.rig
        sh("ip", "addr", "add", f"{self.ADDRESS}/32", "dev", "rig0")
        self.addCleanup(sh, "ip", "addr", "del", f"{self.ADDRESS}/32", "dev", "rig0")
        etcd = Process("etcd-other", [
            CACHE / "bin/etcd", "--data-dir", rig.dir / "memory/etcd-other", f"--listen-client-urls={self.ETCD}", f"--advertise-client-urls={self.ETCD}",
            f"--listen-peer-urls={self.PEER}"], rig.dir / "etcd-other.log").start()
        self.addCleanup(etcd.stop, signal.SIGKILL)
        self.other = Apiserver(rig, "other", self.ADDRESS, etcd=self.ETCD)
        self.addCleanup(self.other.process.stop, signal.SIGKILL)
        self.other.start()

    def test_apiservers_of_two_clusters(self):
        """The reason says after a few seconds that a cache lags, and after 60 s, in the long form, that it has another etcd."""
        rig = self.rig
        own, other = f"{ADDRESSES['a']}:{PORT}", f"{self.ADDRESS}:{PORT}"
        writers = [Clock(self, server, interval) for server, interval in zip((rig.server("a"), self.other.server), self.INTERVALS)]
        while writers[0].version < writers[1].version + self.AHEAD:
            writers[0].write()
        jackstay = Jackstay(
            rig, [rig.admin_cert], [own, other], log_name="jackstay-two-clusters", port=7499, admin=9699).start()
        self.addCleanup(jackstay.stop)
        self.server = jackstay.server
        wait_for("both endpoints to be ready", lambda: states(jackstay) == ["ready"] * 2, 20)
        watchers = [AnyWatch(self, token) for token in ADMIN_TOKENS.values()]
        # One after the other: the first connection would take all watches that wait for one.
        for number, watcher in enumerate(watchers, 1):
            watcher.start()
            wait_for("its watch", lambda: sum(endpoint["watches"] for endpoint in endpoints(jackstay).values()) >= number, 10)
            wait_for("connections to both", lambda: all(
                any("token" in connection["class"] for connection in endpoint["connections"]) for endpoint in endpoints(jackstay).values()), 10)
        least_watches = min(endpoint["watches"] for endpoint in endpoints(jackstay).values())
        self.assertGreater(least_watches, 0, endpoints(jackstay))
        for writer in writers:
            writer.start()
        begun = time.monotonic()

        def reason(text):
            lagging, endpoint = endpoints(jackstay)[other], endpoints(jackstay)[own]
            self.assertEqual(endpoint["state"], "ready", endpoint["reason"])
            return lagging["state"] == "degraded" and re.match(text, lagging["reason"])
        match = wait_for("the lag", lambda: reason(LAGS), 30)
        log(f"    after {time.monotonic() - begun:.1f} s: {match[0]}")
        self.assertLess(int(match[1]), int(match[3]))
        within(self, "two clusters behind one upstream: degraded", time.monotonic() - begun, "s", 6)
        if LONG:
            match = wait_for("the reason", lambda: reason(OTHER_ETCD), 90)
            log(f"    after {time.monotonic() - begun:.1f} s: {match[0]}")
            self.assertLess(int(match[1]), int(match[2]))
            self.assertEqual(match[3], own)
            within(self, "two clusters behind one upstream: the reason", time.monotonic() - begun, "s", 80)
            wait_for("the log line", lambda: log_lines(jackstay.process, "do not share an etcd"), 5)
        for worker in (*watchers, *writers):
            worker.finish()


class Clock(Worker):
    """Changes an object of one cluster; `version` is its version."""

    def __init__(self, case, server, interval):
        super().__init__(case)
        self.client, self.interval = Client(case.rig, server, case.rig.admin_cert), interval
        self.client.call("POST", f"{NAMESPACE}/services", {"metadata": {"name": "two-clusters"}, "spec": {"clusterIP": "None"}})
        self.write()

    def write(self):
        code, answer = self.client.call(
            "PATCH", f"{NAMESPACE}/services/two-clusters", {"metadata": {"annotations": {"at": repr(time.monotonic())}}})
        assert code == 200, f"{code} {answer}"
        self.version = int(answer["metadata"]["resourceVersion"])

    def work(self):
        self.write()
        self.stopping.wait(self.interval)


class AnyWatch(Watcher):
    """A watch from any version, which begins again when it ends. Each is of another client: one that had seen both
    clusters would only watch the one whose versions are higher."""

    def __init__(self, case, token):
        super().__init__(case, "services")
        self.client = Client(case.rig, case.server, token=token)

    def work(self):
        for _ in self.client.send("GET", f"{NAMESPACE}/services?watch=1", timeout=None):
            pass
        self.client.close()
        self.stopping.wait(0.2)
