"""An apiserver that has just started refuses every user until its RBAC is filled: 403, `/readyz` included. With 3,000
RoleBindings that takes a few seconds. Clients of jackstay do not see it while another apiserver is ready."""

import concurrent.futures
import http.client
import json
import threading
import time
import unittest

from figures import LONG, record
from rig import ADDRESSES, Jackstay, log, wait_for
from test_jackstay import JackstayCase
from test_lag import Client, Worker

BINDINGS = 3000
RESTARTS = 6 if LONG else 3
READERS = 6
WATCHES = 6
NAMESPACE = "/api/v1/namespaces/starting"
ROLE_BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/starting/rolebindings"


class Reader(Worker):
    """Reads of a user whose rights come by RBAC. `refused` has the times of 401 and 403."""

    def __init__(self, case, server, path):
        super().__init__(case)
        self.client, self.path = Client(case.rig, server, case.rig.load_cert), path
        self.reads, self.refused, self.failed = 0, [], []

    def work(self):
        try:
            code, answer = self.client.call("GET", self.path, timeout=10)
        except (OSError, http.client.HTTPException) as error:
            self.failed.append(repr(error))
            self.stopping.wait(0.05)
            return
        self.reads += 1
        if code in (401, 403):
            self.refused.append(f"{code} {answer.get('message')}")
        elif code != 200:
            self.failed.append(f"{code} {answer.get('message')}")


class Watcher(threading.Thread):
    """A watch of that user, which goes on from its last version when an apiserver that shuts down ends it, as client-go does.
    `failure` is any other end."""

    def __init__(self, case):
        super().__init__(daemon=True)
        self.client = Client(case.rig, case.server, case.rig.load_cert)
        _, configmaps = self.client.call("GET", f"{NAMESPACE}/configmaps")
        self.version, self.events, self.ends, self.failure = configmaps["metadata"]["resourceVersion"], [], 0, None

    def run(self):
        try:
            while not self.failure:
                self.watch()
        except (OSError, http.client.HTTPException, KeyError) as error:
            self.failure = repr(error)

    def watch(self):
        response = self.client.send("GET", f"{NAMESPACE}/configmaps?watch=1&timeoutSeconds=3000&resourceVersion={self.version}", timeout=None)
        if response.status != 200:
            self.failure = f"{response.status} {response.read()!r}"
            return
        for line in response:
            event = json.loads(line)
            if event["type"] == "ERROR":
                self.failure = f"{event}"
                return
            self.version = event["object"]["metadata"]["resourceVersion"]
            if event["type"] != "BOOKMARK":
                self.events.append((event["type"], int(self.version)))
        self.ends += 1


class Starting(JackstayCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        cls.jackstay = Jackstay(cls.rig, [cls.rig.node_cert("restricted"), cls.rig.load_cert], log_name="jackstay-starting",
                                port=7541, admin=9741).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server
        cls.rig.control.must("POST", "/api/v1/namespaces", {"metadata": {"name": "starting"}})
        cls.addClassCleanup(cls.rig.control.must, "DELETE", "/api/v1/namespaces/starting")
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            clients = threading.local()

            def bind(number):
                if not hasattr(clients, "own"):
                    clients.own = Client(cls.rig, cls.rig.server("c"), cls.rig.admin_cert)
                code, answer = clients.own.call("POST", ROLE_BINDINGS, {
                    "metadata": {"name": f"binding-{number}"},
                    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
                    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": f"user-{number}"}]})
                assert code == 201, f"{code} {answer}"
            list(pool.map(bind, range(BINDINGS)))
        log(f"{BINDINGS} RoleBindings in {time.monotonic() - began:.0f} s")

    def write(self, number):
        answer = self.rig.api("c" if self.victim != "c" else "a", cert=self.rig.admin_cert).must(
            "POST", f"{NAMESPACE}/configmaps", {"metadata": {"name": f"event-{number}"}})
        self.written.append(("ADDED", int(answer["metadata"]["resourceVersion"])))

    def states(self):
        return [endpoint["state"] for endpoint in self.jackstay.status()["upstreams"][0]["endpoints"]]

    def restart(self, victim, graceful):
        """Restarts the apiserver. Returns how often it refuses the user before it accepts it."""
        apiserver = self.rig.apiservers[victim]
        if graceful:
            apiserver.process.stop(timeout=70)
        else:
            apiserver.kill()
        self.write(len(self.written))
        apiserver.start(wait=False)
        direct, refused = Client(self.rig, apiserver.server, self.rig.load_cert), 0

        def accepts():
            nonlocal refused
            apiserver.process.require_running()
            try:
                code, _ = direct.call("GET", f"{NAMESPACE}/configmaps?limit=1", timeout=2)
            except (OSError, http.client.HTTPException):
                return False
            refused += code in (401, 403)
            return code == 200
        wait_for(f"apiserver {victim} to accept the user", accepts, 120, pause=0.02)
        apiserver.wait_ready()
        began = time.monotonic()
        self.write(len(self.written))
        wait_for("every endpoint to be ready", lambda: self.states() == ["ready"] * len(ADDRESSES), 60)
        return refused, time.monotonic() - began

    def test_restarts_refuse_no_read_and_lose_no_watch(self):
        self.written, self.victim = [], "a"
        watchers = [Watcher(self) for _ in range(WATCHES)]
        paths = [f"{NAMESPACE}/configmaps?limit=5", f"{NAMESPACE}/pods?resourceVersion=0"]
        readers = [Reader(self, self.server, paths[number % 2]) for number in range(READERS)]
        for thread in watchers + readers:
            thread.start()
        refused_directly, slowest = 0, 0
        for number in range(RESTARTS):
            self.victim = sorted(ADDRESSES)[number % len(ADDRESSES)]
            graceful, ends = number % 2 == 1, [watcher.ends for watcher in watchers]
            refused, until_ready = self.restart(self.victim, graceful)
            if not graceful:
                self.assertEqual([watcher.ends for watcher in watchers], ends, "watches have ended")
            log(f"restart {number} of {self.victim}: {refused} direct reads refused, ready for jackstay {until_ready:.1f} s later")
            refused_directly += refused
            slowest = max(slowest, until_ready)
        for reader in readers:
            reader.finish()
        wait_for("the last event", lambda: all(w.failure or w.events[-1:] == self.written[-1:] for w in watchers), 15)
        reads, refused = sum(reader.reads for reader in readers), [text for reader in readers for text in reader.refused]
        failed = [text for reader in readers for text in reader.failed]
        record(f"{RESTARTS} restarts of an apiserver with {BINDINGS} RoleBindings: reads of a user, and 403 among them", len(refused), f"of {reads}")
        record("the same: 403 of the apiservers that start", refused_directly, "reads")
        record("the same: time from an apiserver's readiness until jackstay uses it", slowest, "s", 30)
        self.assertGreater(refused_directly, 0, "the apiservers refused nobody, so the test has shown nothing")
        self.assertEqual(refused, [], f"of {reads} reads")
        self.assertEqual(failed, [])
        self.assertEqual([watcher.failure for watcher in watchers], [None] * WATCHES)
        for watcher in watchers:
            self.assertEqual(watcher.events, self.written)
        self.assertLessEqual(slowest, 30)
