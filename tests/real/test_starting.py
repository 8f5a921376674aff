"""An apiserver that has just started refuses every user until its RBAC is filled: 403, `/readyz` included. With 3,000
RoleBindings that takes a few seconds. Authenticators whose informers are not filled answer 401 before. Clients of jackstay
do not see it while another apiserver is ready: those of a jackstay that probes with the certificate of a node, nor those of
one that has only clients with tokens, which probes without a credential every 30 s."""

import collections
import concurrent.futures
import datetime
import http.client
import json
import threading
import time
import unittest

from figures import LONG, record
from rig import ADDRESSES, TOKEN, Jackstay, log, log_lines, wait_for
from test_jackstay import JackstayCase
from workers import Client, Worker

BINDINGS = 3000
RESTARTS = 6 if LONG else 3
READERS = 6
# Longest pause between two probes without a credential (`anonymous_pause` in crates/core/src/probe/schedule.rs).
ANONYMOUS_PAUSE = 42
# A user by the token file, whose rights come by RBAC, and a bootstrap token, which an authenticator looks for in Secrets.
BOOTSTRAP_TOKEN = "abcdef.0123456789abcdef"
TOKENS = {"a user's token": TOKEN, "a bootstrap token": BOOTSTRAP_TOKEN}
WATCHES = 6
NAMESPACE = "/api/v1/namespaces/starting"
ROLE_BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/starting/rolebindings"


class Reader(Worker):
    """Reads of a user whose rights come by RBAC. `refused` has the answers 401 and 403."""

    def __init__(self, case, server, path, **credential):
        super().__init__(case)
        self.client, self.path = Client(case.rig, server, **credential), path
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


class StartingCase(JackstayCase):
    """Base of the tests, which name the endpoints of jackstay."""

    ENDPOINTS = None  # by default all apiservers
    LEAST = len(ADDRESSES)  # endpoints of each jackstay
    LISTENER = 7541
    adapt = None  # changes the configuration

    @classmethod
    def prepare(cls):
        cls.jackstay = Jackstay(cls.rig, [cls.rig.node_cert("restricted"), cls.rig.load_cert], cls.ENDPOINTS, cls.adapt,
                                log_name=f"jackstay-{cls.__name__.lower()}", port=cls.LISTENER, admin=cls.LISTENER + 2200).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server
        cls.tokens_only = Jackstay(cls.rig, [], cls.ENDPOINTS, cls.adapt, log_name=f"jackstay-{cls.__name__.lower()}-tokens",
                                   port=cls.LISTENER + 1, admin=cls.LISTENER + 2201).start()
        cls.addClassCleanup(cls.tokens_only.stop)
        cls.create_bootstrap_token()
        # The namespace of an earlier test may still be in deletion.
        wait_for("the namespace", lambda: cls.rig.control.request("POST", "/api/v1/namespaces", {"metadata": {"name": "starting"}}).code == 201, 60)
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

    @classmethod
    def create_bootstrap_token(cls):
        identifier, secret = BOOTSTRAP_TOKEN.split(".")
        group = "system:bootstrappers:readers"
        for path, body in (
                ("/api/v1/namespaces/kube-system/secrets", {
                    "metadata": {"name": f"bootstrap-token-{identifier}"}, "type": "bootstrap.kubernetes.io/token",
                    "stringData": {"token-id": identifier, "token-secret": secret, "usage-bootstrap-authentication": "true", "auth-extra-groups": group}}),
                ("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
                    "metadata": {"name": "bootstrap-readers"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
                    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}]})):
            cls.rig.control.must("POST", path, body)
            cls.addClassCleanup(cls.rig.control.must, "DELETE", f"{path}/{body['metadata']['name']}")

    def write(self, number):
        answer = self.rig.api("c" if self.victim != "c" else "a", cert=self.rig.admin_cert).must(
            "POST", f"{NAMESPACE}/configmaps", {"metadata": {"name": f"event-{number}"}})
        self.written.append(("ADDED", int(answer["metadata"]["resourceVersion"])))

    def all_ready(self):
        states = [[endpoint["state"] for endpoint in jackstay.status()["upstreams"][0]["endpoints"]] for jackstay in (self.jackstay, self.tokens_only)]
        return all(len(each) >= self.LEAST and set(each) == {"ready"} for each in states)

    def anonymous_probes(self, name):
        """Time and code of each `/readyz` that an apiserver was asked without a credential."""
        events = self.rig.audit(lambda e: e.get("userAgent") == "jackstay-readyz" and e["user"]["username"] == "system:anonymous"
                                and e["requestURI"] == "/readyz", [name])
        return [(datetime.datetime.fromisoformat(e["requestReceivedTimestamp"]).timestamp(), e["responseStatus"]["code"]) for e in events]

    def restart(self, victim, graceful, down_until=0.0):
        """Restarts the apiserver. Returns how it refuses the users before it accepts them, as {(user, code): times}."""
        apiserver = self.rig.apiservers[victim]
        if graceful:
            apiserver.process.stop(timeout=70)
        else:
            apiserver.kill()
        self.write(len(self.written))
        time.sleep(max(0, down_until - time.time()))
        apiserver.start(wait=False)
        refused = collections.Counter()
        direct = {"a certificate": Client(self.rig, apiserver.server, self.rig.load_cert),
                  **{user: Client(self.rig, apiserver.server, token=token) for user, token in TOKENS.items()}}

        def accepts():
            apiserver.process.require_running()
            codes = {}
            for user, client in direct.items():
                try:
                    codes[user], _ = client.call("GET", f"{NAMESPACE}/configmaps?limit=1", timeout=2)
                except (OSError, http.client.HTTPException):
                    return False
            refused.update((user, code) for user, code in codes.items() if code in (401, 403))
            return set(codes.values()) == {200}
        wait_for(f"apiserver {victim} to accept the users", accepts, 120, pause=0.02)
        apiserver.wait_ready()
        began = time.monotonic()
        self.write(len(self.written))
        wait_for("every endpoint to be ready", self.all_ready, 60)
        return refused, time.monotonic() - began

    def check_restarts(self, what=""):
        wait_for("every endpoint to be ready", self.all_ready, 60)
        self.written, self.victim = [], "a"
        watchers = [Watcher(self) for _ in range(WATCHES)]
        paths = [f"{NAMESPACE}/configmaps?limit=5", f"{NAMESPACE}/pods?resourceVersion=0"]
        readers = [Reader(self, self.server, paths[number % 2], cert=self.rig.load_cert) for number in range(READERS)]
        token_readers = [Reader(self, self.tokens_only.server, paths[0], token=token) for token in TOKENS.values()]
        for thread in watchers + readers + token_readers:
            thread.start()
        refused_directly, slowest = collections.Counter(), 0
        for number in range(RESTARTS):
            self.victim, down_until = sorted(ADDRESSES)[number % len(ADDRESSES)], 0
            if LONG and number == RESTARTS - 2:
                # A probe without a credential is due when this one listens again.
                probes = {name: self.anonymous_probes(name) for name in ADDRESSES}  # none of an apiserver that was no endpoint
                latest = {name: max(at for at, _ in some) for name, some in probes.items() if some}
                self.victim = min(latest, key=latest.get)
                down_until = latest[self.victim] + ANONYMOUS_PAUSE
            graceful, ends = number % 2 == 1, [watcher.ends for watcher in watchers]
            refused, until_ready = self.restart(self.victim, graceful, down_until)
            if not graceful:
                self.assertEqual([watcher.ends for watcher in watchers], ends, "watches have ended")
            log(f"restart {number} of {self.victim}: direct reads refused {dict(refused)}, ready for jackstay {until_ready:.1f} s later")
            refused_directly += refused
            slowest = max(slowest, until_ready)
        for reader in readers + token_readers:
            reader.finish()
        wait_for("the last event", lambda: all(w.failure or w.events[-1:] == self.written[-1:] for w in watchers), 15)
        title = f"{what}{RESTARTS} restarts of an apiserver with {BINDINGS} RoleBindings"
        for what, some in (("reads of a user", readers), ("reads with tokens, without a credential for the probe", token_readers)):
            refused = [text for reader in some for text in reader.refused]
            failed = [text for reader in some for text in reader.failed]
            record(f"{title}: {what}, and 401 or 403 among them", len(refused), f"of {sum(reader.reads for reader in some)}")
            self.assertEqual((refused, failed), ([], []), what)
        record("the same: 401 and 403 of the apiservers that start", refused_directly.total(), "reads")
        record("the same: time from an apiserver's readiness until jackstay uses it", slowest, "s", 30)
        # Otherwise the test has shown nothing.
        self.assertGreater(refused_directly["a certificate", 403], 0)
        self.assertTrue({user for user, _ in refused_directly} & TOKENS.keys(), refused_directly)
        probes = [code for name in ADDRESSES for _, code in self.anonymous_probes(name)]
        starting = log_lines(self.tokens_only.process, "/readyz answers 40[13], after 200 for the same credential")
        record("the same: probes without a credential, and 403 among them", probes.count(403), f"of {len(probes)}")
        self.assertEqual(len(starting) > 0, 403 in probes, starting)
        self.assertEqual([watcher.failure for watcher in watchers], [None] * WATCHES)
        for watcher in watchers:
            self.assertEqual(watcher.events, self.written)
        self.assertLessEqual(slowest, 30)


class Starting(StartingCase, unittest.TestCase):
    def test_restarts_refuse_no_read_and_lose_no_watch(self):
        self.check_restarts()
