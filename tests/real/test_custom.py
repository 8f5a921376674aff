"""Watches of custom resources and of an aggregated API through jackstay."""

import http.client
import json
import threading
import time
import unittest

import aggregated
from cases import RigCase
from rig import ADDRESSES, NODE_IP, Jackstay, log, wait_for

GROUP, RESOURCE = "custom.jackstay.test", "things"
API = f"/apis/{GROUP}/v1"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = {"metadata": {"name": f"{RESOURCE}.{GROUP}"}, "spec": {
    "group": GROUP, "scope": "Cluster", "names": {"plural": RESOURCE, "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
    "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
        "type": "object", "x-kubernetes-preserve-unknown-fields": True}}}]}}
LISTENER = 7480
WATCHERS = 12


class Watcher(threading.Thread):
    """A watch as a reflector's: after its end it watches again from the last version. `responses` holds the events of
    each response; `ends`, `broken` and `too_old` count how responses ended."""

    def __init__(self, api, path, version, bookmarks=True, agent="jackstay-rig"):
        super().__init__(daemon=True)
        self.api, self.path, self.version, self.bookmarks, self.agent = api, path, version, bookmarks, agent
        self.responses, self.ends, self.broken, self.too_old, self.codes = [], 0, 0, 0, []
        self.stopped, self.connection = threading.Event(), None
        self.start()

    def run(self):
        while not self.stopped.is_set():
            try:
                self.watch()
            except (OSError, http.client.HTTPException, ValueError):
                if not self.stopped.is_set():
                    self.broken += 1
            self.stopped.wait(0.2)

    def watch(self):
        connection = self.connection = self.api.connect()
        query = ("&" if "?" in self.path else "?") + f"watch=1&resourceVersion={self.version}&timeoutSeconds=600" + ("&allowWatchBookmarks=true" if self.bookmarks else "")
        connection.request("GET", self.path + query, headers={"Accept": "application/json", "User-Agent": self.agent})
        response = connection.getresponse()
        if response.status != 200:
            self.codes.append(response.status)
            self.stopped.wait(0.5)
            return
        events = []
        self.responses.append(events)
        while line := response.readline():
            event = json.loads(line)
            if event["type"] == "ERROR":
                self.too_old += 1
                return
            metadata = event["object"]["metadata"]
            self.version = metadata["resourceVersion"]
            if event["type"] != "BOOKMARK":
                events.append((event["type"], metadata["name"], int(self.version)))
        if not self.stopped.is_set():
            self.ends += 1

    def events(self):
        return [event for events in self.responses for event in events]

    def stop(self):
        self.stopped.set()
        if self.connection and self.connection.sock:
            try:
                self.connection.sock.shutdown(2)
            except OSError:
                pass
        self.join(5)


class CustomCase(RigCase):
    @classmethod
    def prepare(cls):
        cls.jackstay = Jackstay(cls.rig, [cls.rig.admin_cert], log_name="jackstay-custom", port=LISTENER, admin=LISTENER + 2000).start()
        cls.addClassCleanup(cls.jackstay.stop)

    def setUp(self):
        self.addCleanup(self.rig.recover)

    def served(self, path):
        """Waits until every apiserver serves the path."""
        for name in self.rig.apiservers:
            wait_for(f"{path} on {name}", lambda: self.rig.api(name, cert=self.rig.admin_cert).get(path).code == 200, 60)

    def watchers(self, path, count):
        api = self.rig.api(self.jackstay.server, cert=self.rig.admin_cert, timeout=120)
        version = api.must("GET", path)["metadata"]["resourceVersion"]
        watchers = [Watcher(api, path, version, bookmarks=i % 2 == 0) for i in range(count)]
        for watcher in watchers:
            self.addCleanup(watcher.stop)
        wait_for("the watches", lambda: all(watcher.responses for watcher in watchers), 30)
        return watchers

    def killed(self):
        """An apiserver with watches, without the rig's own."""
        endpoints = self.jackstay.status()["upstreams"][0]["endpoints"]
        watches = {name: next(e["watches"] for e in endpoints if e["address"].startswith(f"{server.address}:"))
                   for name, server in self.rig.apiservers.items() if name != "c"}
        return self.rig.apiservers[max(watches, key=watches.get)]

    def groups(self):
        return {entry["group"]: entry["reason"] for entry in self.jackstay.status()["upstreams"][0]["unordered_groups"]}


class CustomResource(CustomCase, unittest.TestCase):
    def create_crd(self):
        self.rig.control.must("POST", CRDS, CRD)
        self.addCleanup(self.rig.control.request, "DELETE", f"{CRDS}/{CRD['metadata']['name']}")
        self.served(f"{API}/{RESOURCE}")

    def create(self, name):
        return self.rig.control.must("POST", f"{API}/{RESOURCE}", {"apiVersion": f"{GROUP}/v1", "kind": "Thing", "metadata": {"name": name}}, keep=True)

    def test_watch_survives_sigkill_and_dropped_flows(self):
        self.create_crd()
        watchers = self.watchers(f"{API}/{RESOURCE}", WATCHERS)
        written, done = [], threading.Event()

        def write():
            while not done.wait(0.05):
                made = self.create(f"thing-{len(written)}")
                written.append(("ADDED", made["metadata"]["name"], int(made["metadata"]["resourceVersion"])))
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        self.addCleanup(done.set)
        time.sleep(1)
        killed = self.killed()
        log(f"SIGKILL of apiserver {killed.name}")
        killed.kill()
        time.sleep(3)
        killed.start()
        time.sleep(2)
        log("drop of all flows of jackstay")
        self.rig.faults.drop_flows(self.jackstay.pid)
        time.sleep(4)
        self.rig.faults.clear()
        time.sleep(1)
        done.set()
        writer.join(30)
        wait_for("all events", lambda: all(len(watcher.events()) >= len(written) for watcher in watchers), 15)
        for watcher in watchers:
            self.assertEqual(watcher.events(), written)
            self.assertEqual((watcher.ends, watcher.broken, watcher.too_old, watcher.codes), (0, 0, 0, []))
            self.assertEqual(len(watcher.responses), 1)
        metrics = self.jackstay.metrics()
        resumed = sum(metrics.get(f'jackstay_watch_resumes_total{{outcome="{outcome}"}}', 0) for outcome in ("resumed", "shadow"))
        log(f"{len(written)} events for each of {WATCHERS} watches, {resumed:.0f} resumes")
        self.assertGreaterEqual(resumed, WATCHERS)
        self.assertEqual(self.groups(), {})

    def test_crd_that_is_deleted_and_created_again(self):
        self.create_crd()
        watchers = self.watchers(f"{API}/{RESOURCE}", 3)
        self.create("before")
        wait_for("the event", lambda: all(len(watcher.events()) == 1 for watcher in watchers), 10)
        self.rig.control.must("DELETE", f"{CRDS}/{CRD['metadata']['name']}")
        wait_for("the ends", lambda: all(watcher.ends >= 1 for watcher in watchers), 40)
        wait_for("the CRD to be gone", lambda: self.rig.control.get(f"{CRDS}/{CRD['metadata']['name']}").code == 404, 40)
        for watcher in watchers:
            watcher.stop()
            self.assertEqual([event[:2] for event in watcher.events()], [("ADDED", "before"), ("DELETED", "before")])
            self.assertEqual(watcher.broken, 0)
        self.create_crd()
        again = self.watchers(f"{API}/{RESOURCE}", 3)
        self.create("after")
        wait_for("the event of the new CRD", lambda: all([e[:2] for e in w.events()] == [("ADDED", "after")] for w in again), 10)
        self.assertEqual(self.groups(), {})


class Aggregated(CustomCase, unittest.TestCase):
    # The Endpoints of a Service have one port for all addresses.
    HOSTS, ENDPOINT_PORT = (NODE_IP, ADDRESSES["c"]), 7590

    def setUp(self):
        super().setUp()
        cert = self.rig.pki.issue("aggregated", "/CN=aggregated", self.HOSTS)
        # Stores of their own: the versions of the second replica are below those of the first.
        self.replicas = [aggregated.Replica(f"r{i}", host, self.ENDPOINT_PORT, cert, first)
                         for i, (host, first) in enumerate(zip(self.HOSTS, (1_000_000, 1_000)))]
        for replica in self.replicas:
            self.addCleanup(replica.stop)
        control, path = self.rig.control, "/api/v1/namespaces/default"
        control.must("POST", f"{path}/services", {"metadata": {"name": "aggregated"}, "spec": {"ports": [{"name": "https", "port": 443}]}})
        self.addCleanup(control.request, "DELETE", f"{path}/services/aggregated")
        control.must("POST", f"{path}/endpoints", {"metadata": {"name": "aggregated"}, "subsets": [
            {"addresses": [{"ip": host} for host in self.HOSTS], "ports": [{"name": "https", "port": self.ENDPOINT_PORT}]}]})
        service = f"/apis/apiregistration.k8s.io/v1/apiservices/{aggregated.VERSION}.{aggregated.GROUP}"
        control.must("POST", service.rpartition("/")[0], {"metadata": {"name": service.rpartition("/")[2]}, "spec": {
            "group": aggregated.GROUP, "version": aggregated.VERSION, "groupPriorityMinimum": 1000, "versionPriority": 10,
            "insecureSkipTLSVerify": True, "service": {"namespace": "default", "name": "aggregated"}}})
        self.addCleanup(control.request, "DELETE", service)
        self.served(f"{aggregated.API}/{aggregated.RESOURCE}")

    def test_replicas_with_stores_of_their_own(self):
        """Each event follows the one before as it would follow in the answer to a request from that version, which is
        what a client sends after a clean end."""
        watchers = self.watchers(f"{aggregated.API}/{aggregated.RESOURCE}", WATCHERS)
        for _ in range(2):
            time.sleep(1.5)
            self.rig.faults.drop_flows(self.jackstay.pid)
            time.sleep(4)
            self.rig.faults.clear()
        killed = self.killed()
        killed.kill()
        time.sleep(3)
        killed.start()
        for watcher in watchers:
            watcher.stop()
        histories = {replica.name: [version for version, _ in replica.history] for replica in self.replicas}
        shown = 0
        for watcher in watchers:
            for events in watcher.responses:
                for (_, _, before), (_, name, version) in zip(events, events[1:]):
                    expected = next(v for v in histories[name.partition("-")[0]] if v > before)
                    self.assertEqual(version, expected, f"after {before}: {events[-5:]}")
                shown += len(events)
            self.assertEqual(watcher.broken, 0)
        log(f"{shown} events in {sum(len(w.responses) for w in watchers)} responses; unordered groups: {self.groups()}")
        self.assertGreater(shown, 100 * WATCHERS)
        self.assertEqual(set(self.groups()), {aggregated.GROUP})
