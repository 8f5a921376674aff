"""Apiservers join, leave and move while one endpoint is configured; kubectl and a hollow kubelet notice nothing."""

import http.client
import json
import ssl
import time
import unittest
import uuid

from cases import StoppedOnExit, RigCase, collect_lines
from kubernetes import RELEASE
from rig import ADDRESSES, NODE_IP, PORT, REPOSITORY, Apiserver, Jackstay, Reader, client_errors, log, sh, wait_for

FOURTH, MOVED = "10.99.0.14", "10.99.0.15"
OWN_ADDRESS = f"{NODE_IP}:7450"
SLICES = f"/apis/{RELEASE.discovery_api}/namespaces/default/endpointslices"
# Second addresses of two apiservers, which no apiserver advertises.
DNAT_RULES = f"""table ip jackstay_elsewhere {{
    chain output {{
        type nat hook output priority -100;
        ip daddr {FOURTH} dnat to {ADDRESSES['a']}
        ip daddr {MOVED} dnat to {ADDRESSES['b']}
    }}
}}
"""


class Discovery(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        rig = cls.rig
        for address in (FOURTH, MOVED):
            sh("ip", "addr", "add", f"{address}/32", "dev", "rig0")
            cls.addClassCleanup(sh, "ip", "addr", "del", f"{address}/32", "dev", "rig0")
        admin = rig.kubeconfig("discovery-admin", rig.server("a"), cert=rig.admin_cert)
        done = rig.kubectl(admin, "apply", "-f", REPOSITORY / "deploy/rbac/discovery.yaml")
        assert done.returncode == 0, done.stderr
        cert = rig.pki.issue("jackstay-discovery", "/CN=jackstay-discovery")
        # The server does not exist: jackstay uses only the user of this kubeconfig.
        kubeconfig = rig.kubeconfig("jackstay-discovery", "https://192.0.2.1:6443", cert=cert)
        cls.state = rig.dir / "discovery-state"

        def adapt(config):
            config["state_dir"] = cls.state
            config["upstreams"][0]["discovery"] = {"kubeconfig": kubeconfig}
            # EndpointSlices cannot contain loopback addresses.
            config["listeners"][0]["bind"].append(OWN_ADDRESS)

        cls.jackstay = Jackstay(rig, [rig.admin_cert, rig.node_cert("hollow-1")], [f"{ADDRESSES['a']}:{PORT}"], adapt,
                                log_name="jackstay-discovery", port=7450, admin=9650)
        cls.addClassCleanup(cls.jackstay.stop)
        cls.jackstay.start()
        cls.server = cls.jackstay.server

    def members(self):
        endpoints = self.jackstay.status()["upstreams"][0]["endpoints"]
        return {e["address"].rpartition(":")[0] for e in endpoints if not e["fallback"]}

    def wait_for_members(self, what, *addresses):
        begun = time.monotonic()
        wait_for(f"{what}: {sorted(addresses)}, not {sorted(self.members())}", lambda: self.members() == set(addresses), 90)
        log(f"{what}: the set is {sorted(addresses)} after {time.monotonic() - begun:.1f} s")

    def test_apiservers_join_leave_and_move(self):
        rig, a, b, c = self.rig, *ADDRESSES.values()
        self.wait_for_members("discovery finds all from one endpoint", a, b, c)
        hollow = rig.start_hollow(self.server, 1)[0]
        self.addCleanup(rig.stop_hollow)
        wait_for("the hollow node to be Ready", lambda: rig.ready(hollow.name), 90)
        admin = rig.kubeconfig("through-discovery", self.server, cert=rig.admin_cert)
        began = hollow.process.logfile.stat().st_size
        made, seen = [], []

        def make():
            name = f"discovery-{uuid.uuid4().hex[:8]}"
            rig.control.must("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": name}})
            made.append(name)
            wait_for(f"the watch to show {name}", lambda: any(name in line for _, line in list(seen)), 20)

        watch = rig.kubectl_start(admin, "get", "configmaps", "--watch-only", "--no-headers")
        with Reader(rig, self.server) as reads, StoppedOnExit(watch) as kubectl:
            collect_lines(kubectl, seen)

            def runs():
                # kubectl does not report when its watch begins, so objects are created until it shows one.
                rig.control.must("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"generateName": "first-"}})
                return bool(seen)
            wait_for("kubectl's watch to run", runs, 60)
            make()
            fourth = Apiserver(rig, "d", FOURTH)
            self.addCleanup(lambda: fourth.process.stop(timeout=70))
            fourth.start()
            self.wait_for_members("a fourth apiserver joins", a, b, c, FOURTH)
            make()
            rig.apiservers["b"].process.stop(timeout=70)
            self.addCleanup(rig.apiservers["b"].ensure_ready)
            self.wait_for_members("one apiserver leaves", a, c, FOURTH)
            make()
            fourth.process.stop(timeout=70)
            moved = Apiserver(rig, "d", MOVED)
            self.addCleanup(lambda: moved.process.stop(timeout=70))
            moved.start()
            self.wait_for_members("one apiserver moves", a, c, MOVED)
            make()
            self.assertIsNone(kubectl.poll(), "kubectl exited")
            time.sleep(1)
            reads.wait_for_more()
        log(f"{reads.requests} reads, {len(reads.failed)} failed; kubectl saw {len(seen)} lines for {len(made)} config maps")
        self.assertEqual(reads.failed, [])
        self.assertEqual([sum(name in line for _, line in seen) for name in made], [1] * len(made))
        self.assertEqual(client_errors(hollow.process, since=began), [])
        state = json.loads((self.state / "control-plane.json").read_text())
        self.assertIn(f"{MOVED}:{PORT}", [endpoint["address"] for endpoint in state["endpoints"]])
        sources = {s["source"]: s for s in self.jackstay.status()["upstreams"][0]["sources"]}
        self.assertIsNone(sources["slices"]["error"])

    def slice(self, name, addresses, kind="IPv4", ready=True, port=PORT):
        """Creates an EndpointSlice of the Service beside that of the apiservers; returns a function that deletes it."""
        self.rig.control.must("POST", SLICES, {
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": kind, "ports": [{"name": "https", "protocol": "TCP", "port": port}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses]})
        self.addCleanup(self.rig.control.request, "DELETE", f"{SLICES}/{name}")
        return lambda: self.rig.control.must("DELETE", f"{SLICES}/{name}")

    def test_all_endpoints_replaced_at_once_fails_no_read(self):
        """All addresses of the slice are replaced; then the apiservers restore it, so that all are replaced again."""
        servers, others = set(ADDRESSES.values()), {FOURTH, MOVED}
        sh("nft", "-f", "-", input=DNAT_RULES)
        self.addCleanup(sh, "nft", "delete", "table", "ip", "jackstay_elsewhere")
        wait_for("only the three apiservers", lambda: self.members() == servers, 90)

        def replaced():
            # An apiserver may restore its address within the second for which jackstay collects changes.
            now = self.rig.control.must("GET", f"{SLICES}/kubernetes")
            if {e["addresses"][0] for e in now["endpoints"]} != others:
                now["endpoints"] = [{"addresses": [address], "conditions": {"ready": True}} for address in sorted(others)]
                self.rig.control.must("PUT", f"{SLICES}/kubernetes", now)
            return self.members() == others
        with Reader(self.rig, self.server) as reads:
            reads.wait_for_more()
            begun = time.monotonic()
            wait_for("all three to be replaced", replaced, 60)
            log(f"all three are replaced after {time.monotonic() - begun:.1f} s")
            reads.wait_for_more()
            self.wait_for_members("the apiservers restore the slice", *servers)
            reads.wait_for_more()
        log(f"{reads.requests} reads while all are replaced at once, {len(reads.failed)} failed")
        self.assertEqual(reads.failed, [])

    def test_misleading_slices_remove_no_serving_endpoint(self):
        """Slices that are empty, not ready, flapping, too long, or contain names or jackstay itself: no serving endpoint is lost."""
        servers = set(ADDRESSES.values())
        wait_for("only the three apiservers", lambda: self.members() == servers, 90)
        with Reader(self.rig, self.server) as reads:
            self.slice("misleading-empty", [])
            self.slice("misleading-not-ready", ["198.51.100.1"], ready=False)
            self.slice("misleading-names", ["apiserver.example.com"], kind="FQDN")
            self.slice("misleading-own-address", [NODE_IP], port=int(OWN_ADDRESS.rpartition(":")[2]))
            for turn in range(10):
                gone = self.slice(f"misleading-flaps-{turn}", ["198.51.100.2"])
                time.sleep(0.2)
                gone()
                time.sleep(0.2)
            self.assertLessEqual(servers, self.members())
            wait_for("only the three apiservers again", lambda: self.members() == servers, 30)
            begun = time.monotonic()
            gone = self.slice("misleading-long", [f"198.18.{n // 250}.{n % 250 + 1}" for n in range(1000)])
            wait_for("the set to be full", lambda: len(self.members()) == 64, 30)
            log(f"of 1,003 endpoints, 64 are in the set after {time.monotonic() - begun:.1f} s")
            time.sleep(3)
            self.assertLessEqual(servers, self.members())
            gone()
            wait_for("only the three apiservers after the long slice", lambda: self.members() == servers, 30)
            reads.wait_for_more()
        log(f"{reads.requests} reads beside misleading slices, {len(reads.failed)} failed")
        self.assertEqual(reads.failed, [])
        log_text = self.jackstay.process.logfile.read_text(errors="replace")
        for words in ("more than 64 endpoints", "of address type FQDN", f"{OWN_ADDRESS}: jackstay's own address, requests would loop"):
            self.assertIn(words, log_text)


class Metrics(RigCase, unittest.TestCase):
    """`admin.metrics_bind`: reviews of tokens by a real apiserver, asked for with the certificate of a node."""

    PORT = 9661

    @classmethod
    def prepare(cls):
        rig = cls.rig
        admin = rig.kubeconfig("metrics-admin", rig.server("a"), cert=rig.admin_cert)
        rig.control.must("POST", "/api/v1/namespaces", {"metadata": {"name": "monitoring"}})
        cls.addClassCleanup(rig.control.must, "DELETE", "/api/v1/namespaces/monitoring")
        done = rig.kubectl(admin, "apply", "-f", REPOSITORY / "deploy/rbac/metrics.yaml")
        assert done.returncode == 0, done.stderr

        def adapt(config):
            cert, key = rig.serving_cert
            config["admin"] |= {"metrics_bind": f"127.0.0.1:{cls.PORT}", "metrics_cert_file": cert, "metrics_key_file": key,
                                "metrics_review_upstream": "control-plane"}

        cls.jackstay = Jackstay(rig, [rig.admin_cert], None, adapt, log_name="jackstay-metrics", port=7460, admin=9660)
        cls.addClassCleanup(cls.jackstay.stop)
        cls.jackstay.start()

    def token(self, name):
        """A token of a new ServiceAccount."""
        path = "/api/v1/namespaces/monitoring/serviceaccounts"
        self.rig.control.must("POST", path, {"metadata": {"name": name}})
        review = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
        return self.rig.control.must("POST", f"{path}/{name}/token", review)["status"]["token"]

    def get(self, token=None, path="/metrics"):
        context = ssl.create_default_context(cafile=self.rig.pki.ca)
        connection = http.client.HTTPSConnection("127.0.0.1", self.PORT, timeout=10, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def test_tokens_are_reviewed(self):
        prometheus, other = self.token("prometheus"), self.token("other")
        self.assertEqual(self.get()[0], 401)
        self.assertEqual(self.get(prometheus[:-8] + "AAAAAAAA")[0], 401)
        self.assertEqual(self.get(other), (403, "this user may not get the non-resource URL /metrics\n"))
        code, page = self.get(prometheus)
        self.assertEqual(code, 200, page)
        self.assertIn("jackstay_build_info", page)
        self.assertEqual(self.get(prometheus, "/status")[0], 404)
