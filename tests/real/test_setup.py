"""First use: with a kubeconfig, the binary and two commands, kubectl works through jackstay.

With a client certificate, a token and an exec plugin, at L4 and L7, and reverted afterwards; and the findings of
`jackstay doctor` with healthy and faulty apiservers.
"""

import base64
import json
import os
import socket
import stat
import unittest
from pathlib import Path

from cases import RigCase
from kubernetes import RELEASE
from rig import ADDRESSES, PORT, REPOSITORY, TOKEN, Api, Process, log, sh, wait_for

SERVER = "127.0.0.1:8443"
ADMIN = "127.0.0.1:9743"
BINARY = Path(os.environ.get("JACKSTAY_BIN") or REPOSITORY / "target/release/jackstay")


class NewUser(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        cls.home = cls.rig.dir / "new-user"
        cls.home.mkdir()
        cls.process = None
        wait_for("alice to be allowed to list nodes", cls.can_list_nodes, 20)

    @classmethod
    def can_list_nodes(cls):
        cls.rig.control.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
            "metadata": {"name": "new-user"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-proxier"},
            "subjects": [{"kind": "Group", "name": "developers", "apiGroup": "rbac.authorization.k8s.io"}]})
        return Api(cls.rig.server("a"), cls.rig.pki.ca, token=TOKEN).get("/api/v1/nodes").code == 200

    @classmethod
    def tearDownClass(cls):
        cls.rig.control.request("DELETE", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/new-user")

    def setUp(self):
        self.rig.recover()
        self.number = getattr(type(self), "number", 0) + 1
        type(self).number = self.number
        self.dir = self.home / f"{self.number}"
        self.dir.mkdir()

    def tearDown(self):
        if self.process:
            self.assertNotIn("panicked", self.process.logfile.read_text(errors="replace"))
            self.process.stop()
            type(self).process = self.process = None

    def kubeconfig(self, user, inline=True):
        """Writes the kubeconfig that the user starts with."""
        def file(key, path):
            return {f"{key}-data": base64.b64encode(Path(path).read_bytes()).decode()} if inline else {key: str(path)}
        path = self.dir / "config"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "mine",
            "clusters": [{"name": "prod", "cluster": {"server": self.rig.server("a"),
                                                      **file("certificate-authority", self.rig.pki.ca)}},
                         {"name": "other", "cluster": {"server": "https://other.example"}}],
            "users": [{"name": "me", "user": user}],
            "contexts": [{"name": "mine", "context": {"cluster": "prod", "user": "me", "namespace": "default"}}]}))
        return path

    def plugin(self, status):
        """A kubeconfig user with an exec plugin that returns this status."""
        script = self.dir / "plugin"
        answer = {"apiVersion": "client.authentication.k8s.io/v1beta1", "kind": "ExecCredential", "status": status}
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
        script.chmod(0o700)
        return {"exec": {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "./plugin",
                         "interactiveMode": "Never"}}

    def certificate_user(self):
        crt, key = self.rig.admin_cert
        return {"client-certificate-data": base64.b64encode(Path(crt).read_bytes()).decode(),
                "client-key-data": base64.b64encode(Path(key).read_bytes()).decode()}

    def jackstay(self, *argv, code=0):
        done = sh(BINARY, *argv, check=False, timeout=90)
        self.assertEqual(done.returncode, code, f"{argv}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_jackstay(self):
        """Runs the second command, `jackstay run`, and waits until it is ready."""
        config = self.dir / "jackstay/jackstay.yaml"
        process = Process(f"new-user-{self.number}", [BINARY, "run", "--config", config, "--admin", ADMIN],
                          self.dir / "jackstay.log")
        type(self).process = self.process = process.start()
        host, port = ADMIN.split(":")

        def ready():
            process.require_running()
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.makefile("rb").readline()
        wait_for("jackstay to be ready", ready, 20)

    def set_up_and_revert(self, mode, user, *options):
        """Runs the two commands and kubectl, then reverts the kubeconfig and runs kubectl again."""
        kubeconfig_in = self.kubeconfig(user)
        before = kubeconfig_in.read_bytes()
        output = self.jackstay("kubeconfig", "--kubeconfig", kubeconfig_in, "--listen", SERVER, "--mode", mode, *options)
        self.assertEqual(kubeconfig_in.read_bytes(), before)
        local_kubeconfig = self.dir / "jackstay.kubeconfig"
        self.assertEqual(stat.S_IMODE(local_kubeconfig.stat().st_mode), 0o600)
        self.assertIn(f"https://{SERVER}", local_kubeconfig.read_text())
        self.start_jackstay()
        nodes = self.rig.kubectl(local_kubeconfig, "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())
        # The responses come from jackstay: without it, kubectl fails.
        config = self.rig.kubectl(local_kubeconfig, "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
        self.assertEqual(config.stdout, f"https://{SERVER}")
        for variant in RELEASE.kubectls:
            again = self.rig.kubectl(local_kubeconfig, "get", "nodes", variant=variant)
            self.assertEqual(again.returncode, 0, f"kubectl {variant.label}: {again.stderr}")
        self.process.stop()
        failed = self.rig.kubectl(local_kubeconfig, "get", "nodes", "--request-timeout=2s")
        self.assertNotEqual(failed.returncode, 0, failed.stdout)
        self.jackstay("kubeconfig", "--revert", "--kubeconfig", local_kubeconfig)
        direct = self.rig.kubectl(local_kubeconfig, "get", "nodes")
        self.assertEqual(direct.returncode, 0, direct.stderr)
        self.assertIn(self.rig.server("a"), local_kubeconfig.read_text())
        self.assertNotIn(SERVER, local_kubeconfig.read_text())
        return output

    def test_certificate_user_passthrough(self):
        self.set_up_and_revert("passthrough", self.certificate_user())

    def test_certificate_user_terminate(self):
        self.set_up_and_revert("terminate", self.certificate_user(), "--endpoint", f"{ADDRESSES['b']}:{PORT}")

    def test_token_user_passthrough(self):
        self.set_up_and_revert("passthrough", {"token": TOKEN})

    def test_token_user_terminate(self):
        self.set_up_and_revert("terminate", {"token": TOKEN})

    def test_plugin_with_token(self):
        for mode in ("passthrough", "terminate"):
            with self.subTest(mode=mode):
                self.setUp()
                output = self.set_up_and_revert(mode, self.plugin({"token": TOKEN}))
                self.assertIn("an exec plugin", output)

    def test_plugin_with_certificate(self):
        crt, key = self.rig.developer_cert
        self.set_up_and_revert("passthrough", self.plugin({
            "clientCertificateData": Path(crt).read_text(), "clientKeyData": Path(key).read_text()}))

    def check_discovery(self, mode):
        kubeconfig_in = self.kubeconfig(self.certificate_user())
        self.wait_for_endpoints(kubeconfig_in)
        output = self.jackstay("kubeconfig", "--kubeconfig", kubeconfig_in, "--listen", SERVER, "--mode", mode, "--discover")
        self.assertNotIn("only one endpoint", output)
        self.start_jackstay()
        self.jackstay("status", "--wait", "--timeout", "20s", "--admin", ADMIN)

        def all_ready():
            status = json.loads(self.jackstay("status", "--output", "json", "--admin", ADMIN))
            endpoints = status["upstreams"][0]["endpoints"]
            self.assertEqual({e["address"] for e in endpoints}, {f"{a}:{PORT}" for a in ADDRESSES.values()})
            return all(e["state"] == "ready" for e in endpoints)
        wait_for("every apiserver to be ready", all_ready, 20)
        nodes = self.rig.kubectl(self.dir / "jackstay.kubeconfig", "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())

    def test_discover_passthrough_finds_all(self):
        """Each apiserver's certificate contains only its own address, and every one is verified."""
        self.check_discovery("passthrough")

    def test_discover_terminate_finds_all(self):
        self.check_discovery("terminate")

    def test_in_place_is_reverted(self):
        kubeconfig_in = self.kubeconfig(self.certificate_user())
        before = json.loads(kubeconfig_in.read_text())
        self.jackstay("kubeconfig", "--kubeconfig", kubeconfig_in, "--listen", SERVER, "--mode", "terminate", "--in-place")
        self.start_jackstay()
        nodes = self.rig.kubectl(kubeconfig_in, "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())
        self.jackstay("kubeconfig", "--revert", "--kubeconfig", kubeconfig_in)
        after = self.rig.kubectl(kubeconfig_in, "config", "view", "--raw", "-o", "json")
        after = json.loads(after.stdout)
        for cluster in before["clusters"]:
            self.assertIn(cluster, after["clusters"])
        self.assertEqual(before["users"], after["users"])

    def test_renewed_serving_certificate_is_used(self):
        """`--renew` replaces the local CA, whose key is stored nowhere, in two steps, and jackstay loads the new certificate."""
        kubeconfig_in = self.kubeconfig({"token": TOKEN})
        self.jackstay("kubeconfig", "--kubeconfig", kubeconfig_in, "--listen", SERVER, "--mode", "terminate")
        self.assertFalse((self.dir / "jackstay/local-ca.key").exists())
        self.start_jackstay()

        def served():
            nodes = self.rig.kubectl(self.dir / "jackstay.kubeconfig", "get", "nodes")
            return nodes.returncode == 0
        wait_for("the certificate of the local CA to be accepted", served, 20)
        renew = ["kubeconfig", "--renew", "--force", "--kubeconfig", self.dir / "jackstay.kubeconfig"]
        self.assertIn("published the next local CA", self.jackstay(*renew))
        self.assertTrue(served(), self.process.tail())
        self.assertIn("the next certificate is served", self.jackstay(*renew))
        wait_for("the renewed certificate to be loaded", lambda: "serving certificate" in self.process.logfile.read_text(), 20)
        self.assertTrue(served(), self.process.tail())

    def doctor(self, *argv, code):
        return json.loads(self.jackstay("doctor", "--output", "json", *argv, code=code))

    def wait_for_endpoints(self, kubeconfig_in):
        """Waits until the Service lists every apiserver, because doctor reads them there; an apiserver that has just
        started or was without etcd is missing for a while."""
        def listed():
            found = self.rig.kubectl(kubeconfig_in, "get", "endpoints", "kubernetes", "-o", "jsonpath={.subsets[*].addresses[*].ip}")
            return set(found.stdout.split()) == set(ADDRESSES.values())
        wait_for("every apiserver to be an endpoint of the cluster", listed, 60)

    def check_doctor_without_etcd(self):
        """doctor requests /readyz, which fails without etcd only in some releases."""
        kubeconfig_in = self.kubeconfig(self.certificate_user())
        self.rig.faults.drop_etcd("b")
        try:
            report = self.doctor("--kubeconfig", kubeconfig_in, "--duration", "10s", code=0)
        finally:
            self.rig.faults.clear()
        first = report["findings"][0]
        self.assertEqual((first["cause"], first["level"]), ("sick_endpoint", "note"), report["findings"])
        self.assertIn(ADDRESSES["b"], first["what"])
        self.wait_for_endpoints(kubeconfig_in)

    def test_doctor_names_the_faulty_apiserver(self):
        kubeconfig_in = self.kubeconfig(self.certificate_user())
        self.wait_for_endpoints(kubeconfig_in)
        report = self.doctor("--kubeconfig", kubeconfig_in, "--duration", "5s", code=0)
        endpoints = {e["address"]: e for e in report["observations"]["endpoints"]}
        # The kubeconfig contains one apiserver, the cluster lists the others.
        self.assertEqual(set(endpoints), {f"{a}:{PORT}" for a in ADDRESSES.values()}, report)
        for row in report["summary"]:
            log(f"doctor: {row['address']} " + ", ".join(f"{s['step']} {s['p50_ms']:.1f}" for s in row["steps"]))
        plugin = self.doctor("--kubeconfig", self.kubeconfig(self.plugin({"token": TOKEN})), "--duration", "2s", code=0)
        self.assertTrue(all(e["authenticated"] for e in plugin["observations"]["endpoints"]), plugin)
        self.assertNotIn(TOKEN, json.dumps(plugin))
        if RELEASE.etcd_check == "/readyz":
            self.check_doctor_without_etcd()
        kubeconfig_in = self.kubeconfig(self.certificate_user())
        apiserver = self.rig.apiservers["b"]
        apiserver.pause()
        try:
            named = self.doctor("--kubeconfig", kubeconfig_in, "--duration", "5s", code=0)
            given = self.doctor("--endpoint", f"{ADDRESSES['b']}:{PORT}", "--ca-file", self.rig.pki.ca, "--duration", "5s", code=1)
        finally:
            apiserver.resume()
        # Only the cluster names its address in the first report, so the clients of the kubeconfig do not use it.
        for report, level in ((named, "note"), (given, "problem")):
            first = report["findings"][0]
            self.assertEqual((first["cause"], first["level"]), ("dead_endpoint", level), report["findings"])
            self.assertIn(ADDRESSES["b"], first["what"])
        self.rig.recover()
