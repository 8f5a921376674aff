"""An upgrade of the control plane: apiservers of the current release and of Kubernetes 1.20 on one etcd, behind one
jackstay. Which apiserver got a request is counted in the audit logs."""

import base64
import json
import re
import signal
import threading
import time
import unittest
import uuid
from pathlib import Path

from cases import RigCase
from figures import record
from kubernetes import RELEASE, built_old_release
from matrix import covers
from rig import ADDRESSES, PORT, Apiserver, Jackstay, log, sh, wait_for
from test_custom import Watcher

OLD = built_old_release()
OLD_ADDRESS = "10.99.0.16"
# Written by 1.20 with a key that the other apiservers do not have, as after an upgrade that has lost a flag: they
# answer reads of this resource with 500. Nothing else uses it.
ENCRYPTED = "/api/v1/namespaces/default/podtemplates"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
REVIEW = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}}
CONFIGMAPS = "/api/v1/namespaces/default/configmaps?limit=1"
WATCHERS = 24
LISTENER = 7490


def kubelet(version):
    """A User-Agent of kubelet of this version, which no other client has."""
    return f"kubelet/v{version} (linux/amd64) kubernetes/{uuid.uuid4().hex[:12]}"


def other_client():
    """A User-Agent that says nothing of Kubernetes, and which no other client has."""
    return f"inventory-{uuid.uuid4().hex[:12]}/2.1"


@unittest.skipIf(RELEASE and OLD and RELEASE.version == OLD.version, "needs a current Kubernetes besides 1.20: JACKSTAY_REAL_KUBERNETES")
@unittest.skipUnless(OLD, "Kubernetes 1.20 is not built: `tests/real/setup --old` builds it")
@covers("apiservers of different releases (1.20 and current)")
class Versions(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        rig = cls.rig
        sh("ip", "addr", "add", f"{OLD_ADDRESS}/32", "dev", "rig0")
        cls.addClassCleanup(sh, "ip", "addr", "del", f"{OLD_ADDRESS}/32", "dev", "rig0")
        keys = rig.dir / "encryption.json"
        keys.write_text(json.dumps({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration", "resources": [{
            "resources": ["podtemplates"],
            "providers": [{"secretbox": {"keys": [{"name": "rig", "secret": base64.b64encode(bytes(range(32))).decode()}]}}]}]}))
        old = Apiserver(rig, "old", OLD_ADDRESS, release=OLD, flags=[
            f"--encryption-provider-config={keys}",
            # It would write FlowSchemas and EndpointSlices in versions that the current release cannot read.
            "--feature-gates=APIPriorityAndFairness=false", "--endpoint-reconciler-type=none"])
        cls.servers = {**rig.apiservers, "old": old}
        cls.addClassCleanup(cls.restore_apis, cls.apis("c"))
        cls.addClassCleanup(old.process.stop, timeout=70)
        old.start()

    @classmethod
    def apis(cls, name):
        return sorted(v["groupVersion"] for g in cls.rig.api(name, cert=cls.rig.admin_cert).must("GET", "/apis")["groups"] for v in g["versions"])

    @classmethod
    def restore_apis(cls, expected):
        """An apiserver that starts registers its own API versions, for every apiserver of the cluster, and removes the
        others."""
        cls.rig.apiservers["a"].restart()
        for name in ADDRESSES:
            wait_for(f"the API versions of {RELEASE.version} on {name}", lambda: cls.apis(name) == expected, 60)

    def setUp(self):
        self.addCleanup(self.rig.recover)

    def start_jackstay(self, *servers, **upstream):
        """jackstay with these apiservers, which are ready and whose versions are known."""
        # A connection whose PONG is late takes no requests, whatever the version. On a busy machine that is often so.
        patient = {"suspect_after": "2s", "dead_after": "4s"}
        jackstay = Jackstay(self.rig, [self.rig.admin_cert], [f"{self.servers[name].address}:{PORT}" for name in servers],
                            lambda config: config["upstreams"][0].update(upstream, health=patient),
                            log_name=f"jackstay-{self._testMethodName}", port=LISTENER, admin=LISTENER + 2000)
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        self.jackstay = jackstay.start()
        self.api = self.rig.api(jackstay.server, cert=self.rig.admin_cert)
        wait_for("every endpoint to be ready", lambda: all(e["state"] == "ready" and e["version"] for e in self.endpoints().values()), 60)
        return jackstay

    def upstream(self):
        return self.jackstay.status()["upstreams"][0]

    def endpoints(self):
        """The endpoints of jackstay's status, by the names of their apiservers."""
        names = {server.address: name for name, server in self.servers.items()}
        return {names[e["address"].rpartition(":")[0]]: e for e in self.upstream()["endpoints"]}

    def wait_until_ready(self, name):
        wait_for(f"jackstay to report {name} as ready", lambda: self.endpoints()[name]["state"] == "ready", 60)

    def received(self, agent):
        """Audit events of a User-Agent, by apiserver."""
        found = {}
        for name, server in self.servers.items():
            with open(server.audit, "rb") as lines:
                events = [json.loads(line) for line in lines if agent.encode() in line and line.endswith(b"\n")]
            if events:
                found[name] = events
        return found

    def spread(self, agent, requests, path=CONFIGMAPS):
        """Sends requests, reads and writes in turn, and returns how many each apiserver has received. Every response
        is expected to have succeeded."""
        for number in range(requests):
            method, target, body = ("GET", path, None) if number % 2 else ("POST", REVIEWS, REVIEW)
            self.api.must(method, target, body, headers={"User-Agent": agent}, keep=True)

        def counts():
            found = {name: len(events) for name, events in self.received(agent).items()}
            return found if sum(found.values()) >= requests else None
        return wait_for(f"{requests} requests of {agent} in the audit logs", counts, 10)

    def repeated(self):
        """Reads that jackstay has sent twice, because an apiserver did not answer in time."""
        return self.jackstay.total("jackstay_hedges_total") + self.jackstay.total("jackstay_retries_total")

    def test_both_versions_are_shown(self):
        jackstay = self.start_jackstay("a", "old")
        expected = {"a": f"v{RELEASE.version}", "old": f"v{OLD.version}"}
        self.assertEqual({name: e["version"] for name, e in self.endpoints().items()}, expected)
        table = sh(jackstay.binary, "status", "--admin", jackstay.admin_address).stdout
        for name, version in expected.items():
            self.assertRegex(table, rf"(?m)^.*{re.escape(self.servers[name].address)}:{PORT}.*{re.escape(version)}")
        minors = {sample.rpartition("endpoint=")[2]: value for sample, value in jackstay.metrics().items() if "kubernetes_minor" in sample}
        self.assertEqual(minors, {f'"{self.servers[name].address}:{PORT}"}}': int(version.split(".")[1]) for name, version in expected.items()})
        crt, key = self.rig.admin_cert
        for others, code in (("old",), 1), (("b",), 0):
            endpoints = [f"--endpoint={self.servers[name].address}:{PORT}" for name in ("a", *others)]
            done = sh(jackstay.binary, "doctor", "--output=json", "--duration=2s", f"--ca-file={self.rig.pki.ca}",
                      f"--cert-file={crt}", f"--key-file={key}", *endpoints, check=False)
            skew = [f for f in json.loads(done.stdout)["findings"] if f["cause"] == "version_skew"]
            self.assertEqual(len(skew), code, done.stdout)
            if skew:
                log(f"    doctor: {skew[0]}")
                self.assertEqual(done.returncode, 1)
                self.assertEqual(skew[0]["level"], "problem")
                for version in expected.values():
                    self.assertIn(version, json.dumps(skew[0]))

    def test_requests_go_to_an_apiserver_as_new_as_their_client_while_one_is_ready(self):
        self.start_jackstay("a", "b", "old", version_preference="newest")
        new, old = kubelet(RELEASE.version), kubelet(OLD.version)
        counts = self.spread(new, 300)
        log(f"    {new}: {counts}")
        self.assertNotIn("old", counts)
        for agent in (old, other_client()):
            # The load decides, so a few requests may all go to one apiserver.
            wait_for("both versions to get requests", lambda: len({name == "old" for name in self.spread(agent, 20)}) == 2, 30)
            log(f"    {agent}: {self.spread(agent, 20)}")
        for name in "ab":
            self.servers[name].kill()
        without = kubelet(RELEASE.version)
        counts = self.spread(without, 100)
        log(f"    {without}, without {RELEASE.version}: {counts}")
        self.assertEqual(counts, {"old": 100})
        self.servers["b"].start()
        self.wait_until_ready("b")
        again = kubelet(RELEASE.version)
        counts = self.spread(again, 100)
        log(f"    {again}, with {RELEASE.version} again: {counts}")
        self.assertEqual(counts, {"b": 100})

    def test_watch_continues_on_the_older_version_only_if_no_newer_one_is_ready(self):
        """Without `version_preference`. Each watch receives every event once, also from one version to the other."""
        self.start_jackstay("a", "b", "old")
        namespace = self.rig.load_namespace()
        path, written, done = f"/api/v1/namespaces/{namespace}/configmaps", [], threading.Event()
        api = self.rig.api(self.jackstay.server, cert=self.rig.admin_cert, timeout=120)
        version = self.rig.control.must("GET", path)["metadata"]["resourceVersion"]
        watchers = {}
        for _ in range(WATCHERS):
            agent = other_client()
            watchers[agent] = Watcher(api, path, version, agent=agent)
            self.addCleanup(watchers[agent].stop)

        def write():
            while not done.wait(0.05):
                made = self.rig.control.must("POST", path, {"metadata": {"name": f"thing-{len(written)}"}}, keep=True)
                written.append(("ADDED", made["metadata"]["name"], int(made["metadata"]["resourceVersion"])))
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        self.addCleanup(done.set)

        def watches():
            """The number of watches of each apiserver, by jackstay's status, once all run."""
            counts = {name: e["watches"] for name, e in self.endpoints().items() if e["watches"]}
            return counts if sum(counts.values()) == WATCHERS else None

        before = wait_for("the watches", lambda: all(watcher.responses for watcher in watchers.values()) and watches(), 30)
        log(f"    watches began on {before}")
        self.assertEqual(set(before), {"a", "b", "old"})
        # An apiserver of the current release, then the last one.
        for killed, expected in ("a", {"b": before["a"] + before["b"], "old": before["old"]}), ("b", {"old": WATCHERS}):
            time.sleep(1)
            self.servers[killed].kill()
            begun = time.monotonic()
            after = wait_for("the watches to move", lambda: (counts := watches()) and killed not in counts and counts, 30)
            log(f"    without {killed}: {after} after {time.monotonic() - begun:.2f} s")
            self.assertEqual(after, expected)
        time.sleep(1)
        done.set()
        writer.join(30)
        wait_for("all events", lambda: all(len(self.things(watcher)) >= len(written) for watcher in watchers.values()), 15)
        for watcher in watchers.values():
            self.assertEqual(self.things(watcher), written)
            self.assertEqual((watcher.ends, watcher.broken, watcher.too_old, watcher.codes), (0, 0, 0, []))
            watcher.stop()
        # 1.20 writes about a watch when it ends.
        served = wait_for("the ends of the watches in the audit log", lambda: (found := self.served_by(watchers)) and all(f[-1:] == ["old"] for f in found) and found, 15)
        counts = {tuple(servers): served.count(servers) for servers in served}
        log(f"    apiservers of each watch: {counts}")
        self.assertEqual(counts, {("a", "b", "old"): before["a"], ("b", "old"): before["b"], ("old",): before["old"]})
        record(f"watches from {RELEASE.version} to {OLD.version}: events, each once", len(written) * WATCHERS, "")
        self.assertGreater(len(written), 40)

    def served_by(self, agents):
        """The apiservers that have served the watch of each User-Agent, in order."""
        received = {agent: {e["requestReceivedTimestamp"]: name for name, events in self.received(agent).items() for e in events} for agent in agents}
        return [[name for _, name in sorted(servers.items())] for servers in received.values()]

    @staticmethod
    def things(watcher):
        return [event for event in watcher.events() if event[1].startswith("thing-")]

    def canary(self):
        return self.upstream()["canary"]

    def test_canary_gets_its_share_until_its_errors_diverge(self):
        jackstay = self.start_jackstay("a", "old", version_preference="newest", canary="10%")
        wait_for("the canary to be active", lambda: self.canary()["state"] == "active", 30)
        before = self.repeated()
        counts = self.spread(other_client(), 1000)
        repeated = self.repeated() - before
        log(f"    canary of 10 %: {counts}, {repeated:.0f} repeated")
        record(f"canary of 10 %, {OLD.version} to {RELEASE.version}: requests to the newest", counts["a"], "of 1,000")
        self.assertLessEqual(abs(counts["a"] - 100), repeated, counts)
        # A client that needs the newest version gets it, and does not count.
        self.assertEqual(self.spread(kubelet(RELEASE.version), 50), {"a": 50})
        before = self.repeated()
        counts = self.spread(other_client(), 200)
        self.assertLessEqual(abs(counts["a"] - 20), self.repeated() - before, counts)

        template = f"{ENCRYPTED}/unreadable"
        old = self.rig.api(self.servers["old"].server, cert=self.rig.admin_cert)
        old.must("POST", ENCRYPTED, {"metadata": {"name": "unreadable"}, "template": {
            "metadata": {"labels": {"app": "none"}}, "spec": {"containers": [{"name": "none", "image": "none"}]}}})
        self.addCleanup(old.request, "DELETE", template)
        direct = self.rig.api("a", cert=self.rig.admin_cert).get(template)
        self.assertEqual(direct.code, 500, direct)
        log(f"    {RELEASE.version}: {direct.json['message']}")
        agent, begun, codes = other_client(), time.monotonic(), []

        def withdrawn():
            for _ in range(50):
                codes.append(self.api.get(template, headers={"User-Agent": agent}, keep=True).code)
            return self.canary()["state"] == "withdrawn"
        wait_for("the share to be withdrawn", withdrawn, 60)
        errors = codes.count(500)
        log(f"    withdrawn after {time.monotonic() - begun:.1f} s: {len(codes)} requests, {errors} with 500: {self.canary()['reason']}")
        record("canary withdrawn after", time.monotonic() - begun, "s")
        self.assertEqual(set(codes), {200, 500})
        self.assertGreaterEqual(errors, 5)
        self.assertLessEqual(errors, len(codes) / 10 + 1)
        minor = ".".join(RELEASE.version.split(".")[:2])
        self.assertIn(f"answers of {minor} were 5xx", self.canary()["reason"])
        self.assertEqual(self.spread(other_client(), 200, template), {"old": 200})
        self.assertEqual(jackstay.metrics()['jackstay_canary_withdrawn{upstream="control-plane"}'], 1)
        table = sh(jackstay.binary, "status", "--admin", jackstay.admin_address).stdout
        self.assertRegex(table, rf"canary: 10% of new requests to {re.escape(minor)}, withdrawn: \d+ of \d+ answers")
        self.assertTrue([line for line in Path(jackstay.process.logfile).read_text().splitlines() if "WARN" in line and "canary" in line])
