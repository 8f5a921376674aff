"""Apiservers that join, leave and move, with one seed configured: kubectl and a hollow kubelet see nothing."""

import json
import threading
import time
import unittest
import uuid

from cases import Ended, WithRig, lines_of
from rig import ADDRESSES, PORT, REPOSITORY, Apiserver, Jackstay, complaints, log, sh, wait_for

FOURTH, MOVED = "10.99.0.14", "10.99.0.15"


class Discovery(WithRig, unittest.TestCase):
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
        # Its server is nowhere: of a kubeconfig only the user counts.
        kubeconfig = rig.kubeconfig("jackstay-discovery", "https://192.0.2.1:6443", cert=cert)
        cls.state = rig.dir / "discovery-state"

        def adapt(config):
            config["state_dir"] = cls.state
            config["upstreams"][0]["discovery"] = {"kubeconfig": kubeconfig}

        cls.jackstay = Jackstay(rig, [rig.admin_cert, rig.node_cert("hollow-1")], [f"{ADDRESSES['a']}:{PORT}"], adapt,
                                log_name="jackstay-discovery", port=7450, admin=9650)
        cls.addClassCleanup(cls.jackstay.stop)
        cls.jackstay.start()
        cls.server = cls.jackstay.server

    def members(self):
        endpoints = self.jackstay.status()["upstreams"][0]["endpoints"]
        return {e["address"].rpartition(":")[0] for e in endpoints if not e["fallback"]}

    def becomes(self, what, *addresses):
        begun = time.monotonic()
        wait_for(f"{what}: {sorted(addresses)}, not {sorted(self.members())}", lambda: self.members() == set(addresses), 90)
        log(f"{what}: the set is {sorted(addresses)} after {time.monotonic() - begun:.1f} s")

    def test_they_come_and_go(self):
        rig, a, b, c = self.rig, *ADDRESSES.values()
        self.becomes("one seed finds them all", a, b, c)
        hollow = rig.start_hollow(self.server, 1)[0]
        self.addCleanup(rig.stop_hollow)
        wait_for("the hollow node to be Ready", lambda: rig.ready(hollow.name), 90)
        admin = rig.kubeconfig("through-discovery", self.server, cert=rig.admin_cert)
        began = hollow.process.logfile.stat().st_size
        api, over, failed, asked = rig.api(self.server, cert=rig.admin_cert), threading.Event(), [], 0

        def read():
            nonlocal asked
            while not over.is_set():
                answer = api.get("/api/v1/namespaces/default/configmaps?limit=1")
                asked += 1
                if answer.code != 200:
                    failed.append(answer)
                time.sleep(0.05)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        made, seen = [], []

        def make():
            name = f"discovery-{uuid.uuid4().hex[:8]}"
            rig.control.must("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"name": name}})
            made.append(name)
            wait_for(f"the watch to show {name}", lambda: any(name in line for _, line in list(seen)), 20)

        with Ended(rig.kubectl_start(admin, "get", "configmaps", "--watch-only", "--no-headers")) as kubectl:
            lines_of(kubectl, seen)

            def runs():
                # kubectl does not say when its watch begins: it shows what is made from then on.
                rig.control.must("POST", "/api/v1/namespaces/default/configmaps", {"metadata": {"generateName": "first-"}})
                return bool(seen)
            wait_for("kubectl's watch to run", runs, 60)
            make()
            fourth = Apiserver(rig, "d", FOURTH)
            self.addCleanup(lambda: fourth.process.stop(timeout=70))
            fourth.start()
            self.becomes("a fourth joins", a, b, c, FOURTH)
            make()
            rig.apiservers["b"].process.stop(timeout=70)
            self.addCleanup(rig.apiservers["b"].ensure_well)
            self.becomes("one leaves", a, c, FOURTH)
            make()
            fourth.process.stop(timeout=70)
            moved = Apiserver(rig, "d", MOVED)
            self.addCleanup(lambda: moved.process.stop(timeout=70))
            moved.start()
            self.becomes("one moves", a, c, MOVED)
            make()
            self.assertIsNone(kubectl.poll(), "kubectl has ended")
            time.sleep(1)
        over.set()
        reader.join(20)
        log(f"{asked} reads, {len(failed)} failed; kubectl saw {len(seen)} lines for {len(made)} config maps")
        self.assertEqual(failed, [])
        self.assertEqual([sum(name in line for _, line in seen) for name in made], [1] * len(made))
        self.assertEqual(complaints(hollow.process, since=began), [])
        state = json.loads((self.state / "control-plane.json").read_text())
        self.assertIn(f"{MOVED}:{PORT}", [endpoint["address"] for endpoint in state["endpoints"]])
        sources = {s["source"]: s for s in self.jackstay.status()["upstreams"][0]["sources"]}
        self.assertIsNone(sources["slices"]["error"])

    def slice(self, name, addresses, kind="IPv4", ready=True):
        """Somebody's EndpointSlice of the service, beside those of the apiservers themselves."""
        path = "/apis/discovery.k8s.io/v1beta1/namespaces/default/endpointslices"
        self.rig.control.must("POST", path, {
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": kind, "ports": [{"name": "https", "protocol": "TCP", "port": PORT}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses]})
        self.addCleanup(self.rig.control.request, "DELETE", f"{path}/{name}")
        return lambda: self.rig.control.must("DELETE", f"{path}/{name}")

    def test_they_lie(self):
        """Slices that are empty, not ready, full of names, flapping, too long: nothing that serves is lost."""
        rig, servers = self.rig, set(ADDRESSES.values())
        wait_for("the three alone", lambda: self.members() == servers, 90)
        api, over, failed, asked = rig.api(self.server, cert=rig.admin_cert), threading.Event(), [], 0

        def read():
            nonlocal asked
            while not over.is_set():
                answer = api.get("/api/v1/namespaces/default/configmaps?limit=1")
                asked += 1
                if answer.code != 200:
                    failed.append(answer)
                time.sleep(0.05)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self.slice("lie-empty", [])
        self.slice("lie-not-ready", ["198.51.100.1"], ready=False)
        self.slice("lie-names", ["apiserver.example.com"], kind="FQDN")
        for turn in range(10):
            gone = self.slice(f"lie-flaps-{turn}", ["198.51.100.2"])
            time.sleep(0.2)
            gone()
            time.sleep(0.2)
        self.assertLessEqual(servers, self.members())
        wait_for("the three alone again", lambda: self.members() == servers, 30)
        begun = time.monotonic()
        gone = self.slice("lie-long", [f"198.18.{n // 250}.{n % 250 + 1}" for n in range(1000)])
        wait_for("as many as there is room for", lambda: len(self.members()) == 64, 30)
        log(f"of 1,003 endpoints, 64 are in the set after {time.monotonic() - begun:.1f} s")
        time.sleep(3)
        self.assertLessEqual(servers, self.members())
        gone()
        wait_for("the three alone at last", lambda: self.members() == servers, 30)
        over.set()
        reader.join(20)
        log(f"{asked} reads beside slices that lie, {len(failed)} failed")
        self.assertEqual(failed, [])
        said = self.jackstay.process.logfile.read_text(errors="replace")
        self.assertIn("more than 64 endpoints", said)
