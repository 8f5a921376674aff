"""An etcd that is restored from a backup: every apiserver is ready again at once, and no watch stays silent."""

import contextlib
import json
import signal
import socket
import threading
import time
import unittest

from cases import RigCase
from figures import within
from rig import CACHE, PORT, Apiserver, Jackstay, Process, log, sh, wait_for
from test_lag import NAMESPACE
from workers import Client, Worker

ADDRESSES = {"x": "10.99.0.21", "y": "10.99.0.22", "z": "10.99.0.23"}
ETCD, PEER = "http://127.0.0.1:2479", "http://127.0.0.1:2480"
WRITES, WRITERS, GROUPS = 5000, 8, 8
SETTLED = 20  # seconds in which no endpoint may be degraded again


class Reflector(Worker):
    """Lists and watches as client-go's reflector: a watch that ends is continued at its last version, and after a 410 it
    lists again. A list of a version that the apiserver has not reached is repeated at the most recent one."""

    def __init__(self, case, group):
        super().__init__(case)
        self.client, self.group = Client(case.rig, case.server, case.rig.admin_cert), group
        self.selector = f"labelSelector=group={group}"
        self.version, self.names, self.lists, self.expired = None, set(), 0, 0

    def work(self):
        try:
            if self.version is None:
                self.list()
            self.watch()
        except OSError:
            self.client.close()
        self.stopping.wait(0.3)

    def finish(self):
        self.stopping.set()
        # The watch is silent now.
        connection = self.client.connection
        with contextlib.suppress(OSError):
            if connection and connection.sock:
                connection.sock.shutdown(socket.SHUT_RDWR)
        super().finish()

    def list(self):
        code, answer = self.client.call("GET", f"{NAMESPACE}/configmaps?{self.selector}")
        if code == 200:
            self.lists += 1
            self.names = {item["metadata"]["name"] for item in answer["items"]}
            self.version = answer["metadata"]["resourceVersion"]

    def watch(self):
        if self.version is None:
            return
        response = self.client.send(
            "GET", f"{NAMESPACE}/configmaps?watch=1&allowWatchBookmarks=true&resourceVersion={self.version}&{self.selector}", timeout=None)
        if response.status != 200:
            if response.status == 410:
                self.version = None
                self.expired += 1
            response.read()
            return
        for line in response:
            event = json.loads(line)
            if event["type"] == "ERROR":
                if event["object"].get("code") == 410:
                    self.version = None
                    self.expired += 1
                break
            self.version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] == "ADDED":
                self.names.add(event["object"]["metadata"]["name"])
        self.client.close()


class RestoredEtcd(RigCase, unittest.TestCase):
    def setUp(self):
        rig = self.rig
        for address in ADDRESSES.values():
            sh("ip", "addr", "add", f"{address}/32", "dev", "rig0")
            self.addCleanup(sh, "ip", "addr", "del", f"{address}/32", "dev", "rig0")
        self.etcd = self.start_etcd(rig.dir / "memory/etcd-restored-1")
        self.apiservers = {name: Apiserver(rig, name, address, etcd=ETCD) for name, address in ADDRESSES.items()}
        for apiserver in self.apiservers.values():
            self.addCleanup(apiserver.process.stop, signal.SIGKILL)
            apiserver.start()
        self.jackstay = Jackstay(
            rig, [rig.admin_cert], [f"{address}:{PORT}" for address in ADDRESSES.values()],
            log_name="jackstay-restored", port=7501, admin=9701).start()
        self.addCleanup(self.jackstay.stop)
        self.server = self.jackstay.server
        wait_for("every endpoint to be ready", lambda: set(self.states().values()) == {"ready"}, 30)

    def start_etcd(self, data):
        etcd = Process("etcd-restored", [
            CACHE / "bin/etcd", "--data-dir", data, f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}", f"--listen-peer-urls={PEER}"],
            self.rig.dir / f"{data.name}.log").start()
        self.addCleanup(etcd.stop, signal.SIGKILL)
        wait_for("etcd", lambda: sh(CACHE / "bin/etcdctl", f"--endpoints={ETCD}", "endpoint", "health", check=False).returncode == 0, 30)
        return etcd

    def states(self):
        names = {address: name for name, address in ADDRESSES.items()}
        return {names[e["address"].rpartition(":")[0]]: e["state"] for e in self.jackstay.status()["upstreams"][0]["endpoints"]}

    def write(self, prefix, count):
        """Creates ConfigMaps of each group in turn, so that the last versions of the groups differ by hundreds."""
        failures = []

        def work(number):
            client = Client(self.rig, self.apiservers["x"].server, self.rig.admin_cert)
            for at in range(number, count, WRITERS):
                body = {"metadata": {"name": f"{prefix}-{at}", "labels": {"group": str(at * GROUPS // count)}}}
                code, answer = client.call("POST", f"{NAMESPACE}/configmaps", body)
                if code != 201:
                    failures.append(f"{code} {answer}")
            client.close()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_snapshot_writes_restore(self):
        rig = self.rig
        snapshot, restored = rig.dir / "memory/etcd.snapshot", rig.dir / "memory/etcd-restored-2"
        reflectors = [Reflector(self, group) for group in range(GROUPS)]
        for reflector in reflectors:
            reflector.start()
        wait_for("every list", lambda: all(reflector.version for reflector in reflectors), 20)
        sh(CACHE / "bin/etcdctl", f"--endpoints={ETCD}", "snapshot", "save", snapshot)
        begun = time.monotonic()
        self.write("lost", WRITES)
        log(f"    {WRITES} writes after the snapshot in {time.monotonic() - begun:.0f} s")
        wait_for("every event", lambda: all(f"lost-{WRITES // GROUPS * (r.group + 1) - 1}" in r.names for r in reflectors), 30)

        for apiserver in self.apiservers.values():
            apiserver.kill()
        self.etcd.stop(signal.SIGKILL)
        sh(CACHE / "bin/etcdctl", "snapshot", "restore", snapshot, "--data-dir", restored)
        self.start_etcd(restored)
        for apiserver in self.apiservers.values():
            apiserver.start(wait=False)
        own = {}
        for name, apiserver in self.apiservers.items():
            apiserver.wait_ready()
            own[name] = time.monotonic()
        ready, degraded = {}, []
        end = time.monotonic() + 30
        while time.monotonic() < end and len(ready) < len(own):
            for name, state in self.states().items():
                if state == "ready":
                    ready.setdefault(name, time.monotonic() - own[name])
            time.sleep(0.1)
        self.assertEqual(set(ready), set(own), self.jackstay.status()["upstreams"][0])

        # Each reflector must see what is written now, and nothing of the lost history.
        self.write("new", GROUPS * 10)
        silent = []
        end = time.monotonic() + 30
        while time.monotonic() < end:
            silent = [r.group for r in reflectors if f"new-{10 * (r.group + 1) - 1}" not in r.names]
            if not silent:
                break
            time.sleep(0.1)
        seen = time.monotonic() - max(own.values())
        lost = [name for r in reflectors for name in r.names if name.startswith("lost-")]
        end = time.monotonic() + SETTLED
        while time.monotonic() < end:
            degraded += [name for name, state in self.states().items() if state != "ready"]
            time.sleep(0.2)
        log(f"    ready {max(ready.values()):.1f} s after the apiservers; silent watches {silent}; {len(lost)} objects of the lost history; "
            f"410 on {[r.expired for r in reflectors]}, lists {[r.lists for r in reflectors]}; not ready later {sorted(set(degraded))}")
        restore = self.jackstay.status()["upstreams"][0].get("restore")
        log(f"    restore: {restore}")
        for reflector in reflectors:
            reflector.finish()
        self.assertEqual(silent, [], "watches that see no event")
        self.assertEqual(lost, [])
        self.assertEqual(degraded, [])
        self.assertIsNotNone(restore)
        within(self, "a restored etcd: endpoints ready after their apiservers", max(ready.values()), "s", 30)
        within(self, "a restored etcd: events on every watch", seen, "s", 30)
