"""An apiserver that is cut off from etcd answers PINGs and serves an old cache. Its watches move, its reads are answered
elsewhere, and no leader election loses its lease, with the default configuration."""

import base64
import json
import time
import unittest

from figures import LONG, record, within
from leases import LEADERS, LEASES, Leader
from rig import ADDRESSES, log, wait_for
from test_jackstay import JackstayCase
from workers import Client, WatchWorker, Worker

# Longer than the time after which an apiserver's etcd client gives up (10 s).
CUT = 13
NAMESPACE = "/api/v1/namespaces/default"
WATCHES = 4
EVENT_INTERVAL = 0.1
RESOURCES = ("configmaps", "secrets")


class Writer(Worker):
    """Writes objects with the time of the write, to an apiserver that has etcd."""

    def __init__(self, case):
        super().__init__(case)
        self.clients = {name: Client(case.rig, case.rig.server(name), case.rig.admin_cert) for name in ADDRESSES}
        self.server, self.written = "c", 0
        for resource in RESOURCES:
            self.put("POST", f"{NAMESPACE}/{resource}", {"metadata": {"name": "clock"}})

    def put(self, method, path, body):
        code, answer = self.clients[self.server].call(method, path, body)
        assert code < 300 or (method, code) == ("POST", 409), f"{method} {path}: {code} {answer}"

    def work(self):
        for resource in RESOURCES:
            now = repr(time.monotonic())
            data = {"at": base64.b64encode(now.encode()).decode() if resource == "secrets" else now}
            self.put("PATCH", f"{NAMESPACE}/{resource}/clock", {"data": data})
            self.written += 1
        self.stopping.wait(EVENT_INTERVAL)


class Watcher(WatchWorker):
    """A watch; `delays` are the times from writes to their events, with the times of the writes."""

    def __init__(self, case, resource):
        super().__init__(case)
        self.client = Client(case.rig, case.server, case.rig.admin_cert)
        self.resource, self.delays, self.ends, self.response = resource, [], [], None

    def work(self):
        path = f"{NAMESPACE}/{self.resource}?fieldSelector=metadata.name=clock"
        code, start = self.client.call("GET", path)
        assert code == 200, f"{code} {start}"
        version = start["metadata"]["resourceVersion"]
        self.response = self.client.send("GET", f"{path}&watch=1&resourceVersion={version}", timeout=None)
        if self.response.status != 200:
            raise AssertionError(f"watch of {self.resource}: {self.response.status} {self.response.read()!r}")
        for line in self.response:
            event = json.loads(line)
            source = event["object"]["metadata"].get("annotations") if self.resource == "services" else event["object"].get("data")
            at = (source or {}).get("at")
            if at:
                written = float(base64.b64decode(at) if self.resource == "secrets" else at)
                self.delays.append((written, time.monotonic() - written))
        if not self.stopping.is_set():
            self.ends.append(time.monotonic())
        self.client.close()


class Reader(Worker):
    """Reads that any cache may answer, and reads of the most recent state."""

    def __init__(self, case, query, resource="configmaps"):
        super().__init__(case)
        self.client = Client(case.rig, case.server, case.rig.admin_cert)
        self.path, self.reads, self.slowest, self.newest, self.backwards, self.failed = f"{NAMESPACE}/{resource}{query}", 0, 0.0, 0, 0, []

    def work(self):
        sent = time.monotonic()
        code, answer = self.client.call("GET", self.path)
        self.slowest = max(self.slowest, time.monotonic() - sent)
        self.reads += 1
        if code != 200:
            self.failed.append(f"{code} {answer}")
            return
        version = int(answer["metadata"]["resourceVersion"])
        self.backwards += version < self.newest
        self.newest = max(self.newest, version)
        self.stopping.wait(0.02)


class Lag(JackstayCase, unittest.TestCase):
    def degraded(self):
        endpoints = self.jackstay.status()["upstreams"][0]["endpoints"]
        return {e["address"]: e["reason"] for e in endpoints if e["state"] == "degraded"}

    def settled(self):
        states = [e["state"] for e in self.jackstay.status()["upstreams"][0]["endpoints"]]
        return states == ["ready"] * len(ADDRESSES)

    def test_apiserver_cut_off_from_etcd_keeps_no_client_waiting(self):
        wait_for("every endpoint to be ready", self.settled, 60)
        writer = Writer(self)
        watchers = [Watcher(self, resource) for resource in RESOURCES for _ in range(WATCHES)]
        leaders = [Leader(self, index) for index in range(LEADERS)]
        cached, recent = Reader(self, "?resourceVersion=0"), Reader(self, "")
        workers = [writer, *watchers, *leaders, cached, recent]
        for worker in workers:
            worker.start()
            time.sleep(0.05)

        def watching():
            for worker in workers:
                self.assertIsNone(worker.failure, worker)
            return all(len(w.delays) > 20 for w in watchers)
        wait_for("events on every watch", watching, 30)
        log_size, cuts = self.log_size(), []
        for name in ADDRESSES if LONG else "ab":  # The apiservers differ only in their other clients.
            writer.server = "a" if name == "c" else "c"
            time.sleep(1)
            begun, reasons, first = time.monotonic(), set(), None
            self.rig.faults.drop_etcd(name)
            while time.monotonic() < begun + CUT:
                for address, reason in self.degraded().items():
                    self.assertTrue(address.startswith(ADDRESSES[name]), f"{address} is degraded: {reason}")
                    first = first or time.monotonic() - begun
                    reasons.add(reason)
                time.sleep(0.1)
            cuts.append((name, begun, time.monotonic(), first, reasons))
            self.rig.faults.clear()
            wait_for("every endpoint to be ready", self.settled, 60)
            time.sleep(2)
        time.sleep(2)
        # Without events, a cache does not reach the versions of recent reads on an etcd without progress requests.
        for worker in [cached, recent, *leaders, *watchers, writer]:
            worker.finish()
        for name, begun, ended, first, reasons in cuts:
            late = max(delay for w in watchers for written, delay in w.delays if begun - 1 <= written <= ended)
            log(f"    {name}: events at most {late:.2f} s late; degraded after {first and round(first, 2)} s: {sorted(reasons)}")
        for leader in leaders:
            log(f"    {leader.name}: {len(leader.lost)} times lost, slowest renewal {leader.slowest:.1f} s; {leader.answers}")
        self.assertEqual([leader.answers for leader in leaders if leader.answers], [], "requests of leader elections failed")
        lost = sum(len(leader.lost) for leader in leaders)
        record("an apiserver cut off from etcd: leases lost", lost, "leases")
        record("an apiserver cut off from etcd: cached reads that went back", 10_000 * cached.backwards / cached.reads, "of 10,000")
        self.assertEqual(lost, 0)
        self.assertEqual([w.ends for w in watchers if w.ends], [], "watches ended")
        self.assertEqual(cached.failed + recent.failed, [])
        self.assertEqual(recent.backwards, 0)
        for name, *_, reasons in cuts:
            self.assertTrue(reasons, f"{name} was not degraded")
        late = max(delay for w in watchers for _, delay in w.delays)
        within(self, "an apiserver cut off from etcd: latest event", late, "s", 4)
        within(self, "an apiserver cut off from etcd: slowest cached read", cached.slowest, "s", 2.5)
        within(self, "an apiserver cut off from etcd: slowest recent read", recent.slowest, "s", 2.5)
        within(self, "an apiserver cut off from etcd: slowest renewal", max(leader.slowest for leader in leaders), "s", 4.5)
        self.check_story("an apiserver cut off from etcd", log_size)
