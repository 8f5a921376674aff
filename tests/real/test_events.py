"""Events that expire together: etcd deletes the objects of a lease in one transaction, and every DELETED of it has one version."""

import http.client
import json
import random
import socket
import subprocess
import threading
import time
import unittest

from cases import RigCase
from extra import ExtraCase
from kubernetes import CACHE
from matrix import covers
from rig import log, sh, wait_for
from settings import Settings
from test_consistency import MEMBERS, Etcd

TTL = 50  # seconds; kube-apiserver attaches Events to one lease for 5 % of it
NAMESPACE = "expiring"  # in which nothing else has Events
PATHS = {"v1": f"/api/v1/namespaces/{NAMESPACE}/events", "events.k8s.io": f"/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


class Watch(threading.Thread):
    """A watch that is not begun again: the type, the name and the version of each of its events."""

    def __init__(self, api, path, version, accept="application/json", slow=False):
        super().__init__(daemon=True)
        self.events, self.end, self.reading = [], None, threading.Event()
        self.reading.set()
        self.connection = api.connect()
        self.connection.connect()
        if slow:
            self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        query = ("&" if "?" in path else "?") + f"watch=1&resourceVersion={version}&timeoutSeconds=600"
        self.connection.request("GET", path + query, headers={"Accept": accept, "User-Agent": "jackstay-rig"})
        self.response = self.connection.getresponse()
        assert self.response.status == 200, self.response.status
        # A slow client stops after the first event of this type.
        self.pause_at = "DELETED" if slow else None

    def run(self):
        try:
            while line := self.response.readline():
                self.receive(json.loads(line))
                self.reading.wait()
            self.end = "clean"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.end = repr(error)

    def receive(self, event):
        item = event["object"]
        if event["type"] == "ERROR":
            self.events.append(("ERROR", item.get("message"), item.get("code")))
            return
        if item.get("kind") == "Table":
            item = {"metadata": {"name": item["rows"][0]["object"]["metadata"]["name"], "resourceVersion": item["metadata"]["resourceVersion"]}}
        self.events.append((event["type"], item["metadata"].get("name"), item["metadata"]["resourceVersion"]))
        if event["type"] == self.pause_at:
            self.pause_at = None
            self.reading.clear()

    def deleted(self):
        return [event for event in self.events if event[0] == "DELETED"]


@covers("`--event-ttl`")
class Events(ExtraCase, unittest.TestCase):
    SETTINGS = {"d": Settings(event_ttl=TTL), "e": Settings(event_ttl=TTL)}

    @classmethod
    def prepare(cls):
        super().prepare()
        cls.rig.control.must("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        cls.addClassCleanup(cls.rig.control.request, "DELETE", f"/api/v1/namespaces/{NAMESPACE}")

    def create(self, name, count, size=0):
        """Events within the time in which they share a lease."""
        api, begun = self.rig.api("d", cert=self.rig.admin_cert), time.monotonic()
        for number in range(count):
            event = f"{name}-{number}"
            api.must("POST", PATHS["v1"], {
                "metadata": {"name": event, "annotations": {"padding": "x" * size}}, "reason": "Test", "type": "Normal", "message": name,
                "involvedObject": {"kind": "ConfigMap", "namespace": NAMESPACE, "name": name}}, keep=True)
        log(f"    {count} Events in {time.monotonic() - begun:.1f} s")
        return {f"{name}-{number}" for number in range(count)}

    def version(self):
        return self.rig.control.must("GET", PATHS["v1"])["metadata"]["resourceVersion"]

    def replace_stream_of(self, watches):
        """Kills each of the two apiservers in turn, so that every watch has another stream. One is left."""
        before = self.resumed()
        for name in self.SETTINGS:
            self.rig.extra[name].kill()
            left = next(other for other in self.SETTINGS if other != name)
            wait_for("the watches to continue", lambda: self.endpoints()[left]["watches"] >= len(watches), 30)
            if name != list(self.SETTINGS)[-1]:
                self.rig.extra[name].start()
                wait_for("the endpoint to be ready", lambda: self.endpoints()[name]["state"] == "ready", 30)
        self.assertGreaterEqual(self.resumed() - before, len(watches))

    def expire(self, watches, reference, names):
        """Waits until the Events have expired, and compares what the watches have received."""
        for watch in (*watches.values(), reference):
            watch.reading.set()
        wait_for("the Events to expire", lambda: {name for _, name, _ in reference.deleted()} >= names, TTL * 3)
        versions = {}
        for _, name, version in reference.deleted():
            versions.setdefault(version, []).append(name)
        log(f"    directly: {len(reference.deleted())} DELETED at {len(versions)} versions, {max(map(len, versions.values()))} at one")
        self.assertGreater(max(map(len, versions.values())), len(names) // 3, "the Events had no common lease")
        for name, watch in watches.items():
            with self.subTest(name):
                try:
                    wait_for("the events", lambda: len(watch.events) >= len(reference.events) or watch.end, 20)
                except AssertionError:
                    pass  # The comparison says what is missing.
                log(f"    {name}: {len(watch.deleted())} DELETED, end {watch.end}")
                self.assertIsNone(watch.end)
                self.assertEqual(watch.events, reference.events)

    def test_events_that_expire_together_reach_watches_that_have_moved(self):
        version = self.version()
        api = self.rig.api(self.server, cert=self.rig.admin_cert, timeout=TTL * 4)
        forms = {"v1": (PATHS["v1"], {}), "events.k8s.io": (PATHS["events.k8s.io"], {}), "a Table": (PATHS["v1"], {"accept": TABLE}),
                 "a selector": (PATHS["v1"] + "?fieldSelector=involvedObject.name%3Dtogether", {})}
        watches = {name: Watch(api, path, version, **options) for name, (path, options) in forms.items()}
        reference = Watch(self.rig.api("c", cert=self.rig.admin_cert, timeout=TTL * 4), PATHS["v1"] + "?fieldSelector=involvedObject.name%3Dtogether", version)
        for watch in (*watches.values(), reference):
            watch.start()
        names = self.create("together", 10)
        wait_for("the ADDED", lambda: all(len(watch.events) == 10 for watch in (*watches.values(), reference)), 10)
        self.replace_stream_of(watches)
        self.expire(watches, reference, names)

    def test_watch_that_loses_its_apiserver_within_such_events_receives_each_once(self):
        """The client reads one of 60 large DELETED, and then nothing: the others do not fit into the windows and buffers of
        the connections. Its apiserver is killed, and the client reads on."""
        version = self.version()
        api = self.rig.api(self.server, cert=self.rig.admin_cert, timeout=TTL * 4)
        watches = {name: Watch(api, path, version, slow=True) for name, path in PATHS.items()}
        reference = Watch(self.rig.api("c", cert=self.rig.admin_cert, timeout=TTL * 4), PATHS["v1"], version)
        for watch in (*watches.values(), reference):
            watch.start()
        names = self.create("large", 60, size=60_000)
        wait_for("the ADDED", lambda: all(len(watch.events) == 60 for watch in (*watches.values(), reference)), 30)
        wait_for("the first DELETED", lambda: all(not watch.reading.is_set() for watch in watches.values()), TTL * 3)
        self.assertEqual([len(watch.deleted()) for watch in watches.values()], [1] * len(watches))
        before = self.resumed()
        wait_for("the Events to expire", lambda: {name for _, name, _ in reference.deleted()} >= names, TTL)
        victim = self.most_watched()
        lost = self.endpoints()[victim.name]["watches"]
        victim.kill()
        self.expire(watches, reference, names)
        resumed = self.resumed() - before
        log(f"    {victim.name} killed, with {lost} watches, some of them within the events; {resumed:.0f} resumed")
        # Its watches may include those of the test before, whose clients are gone.
        self.assertGreater(resumed, 0)


class Order(RigCase, unittest.TestCase):
    """Each member of etcd sends the deletions of a lease in one order, to running watches and to those from before it."""

    KEYS = 200
    PREFIX = "/test-of-leases/"

    def watch(self, address, *argv):
        return subprocess.Popen([CACHE / "bin/etcdctl", f"--endpoints=http://{address}:2379", "watch", "--prefix", self.PREFIX, *argv],
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def test_members_of_etcd_delete_the_keys_of_a_lease_in_one_order(self):
        etcd = Etcd(self.rig).start()
        self.addCleanup(etcd.remove)
        addresses = ["127.0.0.1", *MEMBERS.values()]
        lease = self.rig.etcdctl("lease", "grant", "600").split()[1]
        keys = [f"{self.PREFIX}{number:03}" for number in range(self.KEYS)]
        random.Random(4).shuffle(keys)
        # In transactions of ten: one client after another would take a minute.
        for at in range(0, self.KEYS, 10):
            puts = "".join(f"put {key} x --lease={lease}\n" for key in keys[at:at + 10])
            sh(CACHE / "bin/etcdctl", "--endpoints=http://127.0.0.1:2379", "txn", input=f"\n{puts}\n\n")
        before = self.rig.revision()
        running = {address: self.watch(address, f"--rev={before + 1}") for address in addresses}
        self.rig.etcdctl("lease", "revoke", lease)
        later = {address: self.watch(address, f"--rev={before + 1}") for address in addresses}
        for which in (running, later):
            for address, watch in which.items():
                lines = []
                while len(lines) < 3 * self.KEYS:
                    lines.append(watch.stdout.readline().rstrip("\n"))
                watch.kill()
                watch.communicate()
                self.assertEqual(set(lines[0::3]), {"DELETE"}, address)
                self.assertEqual(lines[1::3], sorted(keys), address)
        log(f"    {self.KEYS} keys of one lease: one order at {len(addresses)} members, in running and in later watches")
