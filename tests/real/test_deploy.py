"""deploy/ for real: a node that has never been one, its static pods, the unit, and the controllers.

Promised is that a node is Ready again within 30 s, whatever was killed; CI asserts twice that.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import time
import unittest
import uuid
from pathlib import Path

from cases import WithRig
from deployed import (DEPLOY, KUBELET_CONF, KUBELET_PEM, SERVER, FreshNode, admin, built, place, process_of, quiet, status, write_config)
from rig import ADDRESSES, IMAGE, complaints, log, sh, wait_for

LONG = bool(os.environ.get("JACKSTAY_REAL_LONG"))
NOISE = 2  # CI asserts so many times the promised time.


class Manifests(WithRig, unittest.TestCase):
    def test_server_side_dry_run(self):
        """A real apiserver admits every object of deploy/."""
        config = self.rig.kubeconfig("manifests", self.rig.server("a"), cert=self.rig.admin_cert)
        wait_for("kube-system's service account",
                 lambda: self.rig.control.get("/api/v1/namespaces/kube-system/serviceaccounts/default").code == 200, 60)
        kustomized = {path.parent for path in DEPLOY.rglob("kustomization.yaml")}
        objects = [path for path in sorted(DEPLOY.rglob("*.yaml")) if not kustomized & set(path.parents)
                   and re.search(r"^apiVersion:", path.read_text(), re.M) and re.search(r"^kind:", path.read_text(), re.M)]
        self.assertGreaterEqual(len(objects), 2)
        for argv in [("-f", path) for path in objects] + [("-k", path) for path in sorted(kustomized)]:
            with self.subTest(argv[1].relative_to(DEPLOY)):
                done = self.rig.kubectl(config, "apply", "--dry-run=server", "--validate=true", *argv)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("(server dry run)", done.stdout)


class StaticPod(WithRig, unittest.TestCase):
    """The real node: kubelet reaches its apiserver through a static pod and in no other way."""

    @classmethod
    def prepare(cls):
        quiet(cls.rig)
        write_config(cls.rig, "terminate", [(KUBELET_PEM, KUBELET_PEM)])
        cls.node = cls.rig.node = FreshNode(cls.rig)
        place("jackstay.yaml")
        cls.token_user = cls.node.bootstrap()
        cls.begun = time.time()
        cls.node.start()

    @classmethod
    def tearDownClass(cls):
        quiet(cls.rig)

    def setUp(self):
        self.rig.heal()

    def tearDown(self):
        self.rig.heal()
        self.assertEqual(self.rig.faults.flows(self.node.kubelet.pid), {}, "kubelet goes past jackstay")
        self.assertNotIn("panicked", self.logs())

    def logs(self):
        """Of every container of the pod that has been."""
        return "\n".join(path.read_text(errors="replace") for path in Path("/var/log/pods").glob("kube-system_jackstay-*/jackstay/*.log"))

    def ready_since(self, moment):
        """The node is Ready, and has said so after this moment."""
        return self.rig.ready(self.node.NAME) and self.node.renewed() > moment

    def mirror(self):
        return self.rig.control.get(f"/api/v1/namespaces/kube-system/pods/jackstay-{self.node.NAME}").json

    def test_1_from_bootstrap_to_ready(self):
        wait_for("the node to be Ready", lambda: self.ready_since(self.begun), 120)
        log(f"from nothing to Ready in {time.time() - self.begun:.1f} s")
        requests = self.rig.control.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").json["items"]
        mine = [r for r in requests if r["spec"]["username"] == self.token_user]
        self.assertEqual(len(mine), 1, requests)
        self.assertEqual([c["type"] for c in mine[0]["status"]["conditions"]], ["Approved"])
        self.assertIn(f"server: {SERVER}", KUBELET_CONF.read_text())
        # The identity was awaited, and then it came alive.
        self.assertRegex(self.logs(), rf"{KUBELET_PEM} does not exist yet; it is awaited(.|\n)*identity is in use")
        identity, = status()["listeners"][0]["identities"]
        self.assertEqual((identity["state"], identity["error"]), ("loaded", None))
        self.assertIn(f"system:node:{self.node.NAME}", identity["subject"])
        nodes = self.rig.audit(lambda e: e["verb"] == "update" and e["requestURI"].endswith(f"/leases/{self.node.NAME}?timeout=10s"))
        self.assertEqual({e["user"]["username"] for e in nodes}, {f"system:node:{self.node.NAME}"})

        def running():
            return any(c["type"] == "Ready" and c["status"] == "True" for c in self.mirror()["status"].get("conditions", []))
        wait_for("the mirror pod to be Ready", running, 60)
        self.assertEqual(self.mirror()["spec"]["priorityClassName"], "system-node-critical")

    def test_2_confined(self):
        """What the manifest asks for is what the process has."""
        pid, = process_of()
        said = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        self.assertEqual({k: said[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
                         {k: "0" * 16 for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")})
        self.assertEqual((said["NoNewPrivs"], said["Seccomp"], said["Uid"].split()), ("1", "2", ["0"] * 4))
        mounts = {fields[4]: fields[5].split(",")[0] for fields in map(str.split, Path(f"/proc/{pid}/mountinfo").read_text().splitlines())}
        self.assertEqual({path: mounts[path] for path in ("/", "/etc/jackstay", "/var/lib/kubelet/pki", "/etc/kubernetes/pki/ca.crt", "/var/lib/jackstay")},
                         {"/": "ro", "/etc/jackstay": "ro", "/var/lib/kubelet/pki": "ro", "/etc/kubernetes/pki/ca.crt": "ro", "/var/lib/jackstay": "rw"})
        self.assertNotIn("/var/run/secrets/kubernetes.io/serviceaccount", mounts)
        listeners = sh("ss", "-Htlnp").stdout
        for line in listeners.splitlines():
            if f"pid={pid}," in line:
                self.assertRegex(line, r"127\.0\.0\.1:|\[::1\]:")

    def test_3_pods_run(self):
        """A pod is created, runs, says its words and is gone: all of it through jackstay."""
        name = f"fresh-{uuid.uuid4().hex[:6]}"
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.rig.control.must("POST", "/api/v1/namespaces/default/pods", {
            "metadata": {"name": name}, "spec": {
                "nodeName": self.node.NAME, "hostNetwork": True, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
                "restartPolicy": "Never", "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["echo", "done"]}]}})
        wait_for("the pod's end", lambda: self.rig.control.get(path).json["status"]["phase"] == "Succeeded", 60)
        self.rig.control.must("DELETE", path)
        wait_for("the pod's removal", lambda: self.rig.control.get(path).code == 404, 60)

    def kill(self, what):
        if what == "kubelet":
            self.node.kubelet.send(signal.SIGKILL)
            self.node.kubelet.child.wait(10)
        elif what == "jackstay":
            for pid in process_of():
                os.kill(pid, signal.SIGKILL)
        else:
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()

    def test_4_killed_in_any_order(self):
        """kubelet is started again as systemd would, the apiservers as their own kubelet would, jackstay
        by the kubelet of its node."""
        self.ready_since(0) or wait_for("the node to be Ready", lambda: self.ready_since(0), 60)
        took = {}
        for order in itertools.permutations(("kubelet", "jackstay", "apiservers")):
            for what in order:
                self.kill(what)
                killed = time.time()
                time.sleep(0.5)  # It is an order only if what follows finds it done.
            self.node.kubelet.start()
            for apiserver in self.rig.apiservers.values():
                apiserver.start(wait=False)
            wait_for(f"the node to be Ready after {order}", lambda: self.ready_since(killed), 30 * NOISE)
            took[" ".join(order)] = time.time() - killed
            log(f"    {', then '.join(order)}: Ready again after {took[' '.join(order)]:.1f} s")
            self.assertEqual(len(process_of()), 1)
        # One at a time, which leaves the others to notice.
        for what in ("kubelet", "jackstay", "apiservers") if LONG else ():
            self.kill(what)
            killed = time.time()
            if what == "kubelet":
                self.node.kubelet.start()
            if what == "apiservers":
                self.rig.heal()
            wait_for(f"the node to be Ready after {what}", lambda: self.ready_since(killed) and len(process_of()) == 1, 30 * NOISE)
            log(f"    {what} alone: Ready again after {time.time() - killed:.1f} s")


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite()
    for case in (Manifests, StaticPod):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
