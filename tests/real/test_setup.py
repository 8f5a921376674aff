"""A new user: a kubeconfig, the binary, two commands, and kubectl works through jackstay.

With a client certificate, a token and an exec plugin; L4 and L7; moved back afterwards; and what
`jackstay doctor` says of the same cluster, well and not.
"""

import base64
import json
import os
import socket
import stat
import unittest
from pathlib import Path

from cases import WithRig
from kubernetes import RELEASE
from rig import ADDRESSES, PORT, REPOSITORY, TOKEN, Api, Process, log, sh, wait_for

SERVER = "127.0.0.1:8443"
ADMIN = "127.0.0.1:9743"
BINARY = Path(os.environ.get("JACKSTAY_BIN") or REPOSITORY / "target/release/jackstay")


class NewUser(WithRig, unittest.TestCase):
    @classmethod
    def prepare(cls):
        cls.home = cls.rig.dir / "new-user"
        cls.home.mkdir()
        cls.process = None
        wait_for("alice may look at nodes", cls.may_look, 20)

    @classmethod
    def may_look(cls):
        cls.rig.control.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
            "metadata": {"name": "new-user"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:node-proxier"},
            "subjects": [{"kind": "Group", "name": "developers", "apiGroup": "rbac.authorization.k8s.io"}]})
        return Api(cls.rig.server("a"), cls.rig.pki.ca, token=TOKEN).get("/api/v1/nodes").code == 200

    @classmethod
    def tearDownClass(cls):
        cls.rig.control.request("DELETE", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/new-user")

    def setUp(self):
        self.rig.heal()
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
        """The kubeconfig that the user was given."""
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
        """An exec plugin that yields this."""
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

    def run_it(self):
        """The second command."""
        config = self.dir / "jackstay/jackstay.yaml"
        process = Process(f"new-user-{self.number}", [BINARY, "run", "--config", config, "--admin", ADMIN],
                          self.dir / "jackstay.log")
        type(self).process = self.process = process.start()
        host, port = ADMIN.split(":")

        def ready():
            process.must_run()
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.makefile("rb").readline()
        wait_for("jackstay to be ready", ready, 20)

    def through(self, mode, user, *options):
        """Two commands, then kubectl; afterwards the way back."""
        given = self.kubeconfig(user)
        before = given.read_bytes()
        said = self.jackstay("kubeconfig", "--in", given, "--server", SERVER, "--mode", mode, *options)
        self.assertEqual(given.read_bytes(), before)
        moved = self.dir / "jackstay.kubeconfig"
        self.assertEqual(stat.S_IMODE(moved.stat().st_mode), 0o600)
        self.assertIn(f"https://{SERVER}", moved.read_text())
        self.run_it()
        nodes = self.rig.kubectl(moved, "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())
        # It was jackstay that answered: with it stopped, nobody does.
        config = self.rig.kubectl(moved, "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
        self.assertEqual(config.stdout, f"https://{SERVER}")
        for by in RELEASE.kubectls:
            again = self.rig.kubectl(moved, "get", "nodes", by=by)
            self.assertEqual(again.returncode, 0, f"kubectl {by.label}: {again.stderr}")
        self.process.stop()
        dead = self.rig.kubectl(moved, "get", "nodes", "--request-timeout=2s")
        self.assertNotEqual(dead.returncode, 0, dead.stdout)
        self.jackstay("kubeconfig", "--revert", "--in", moved)
        direct = self.rig.kubectl(moved, "get", "nodes")
        self.assertEqual(direct.returncode, 0, direct.stderr)
        self.assertIn(self.rig.server("a"), moved.read_text())
        self.assertNotIn(SERVER, moved.read_text())
        return said

    def test_certificate_passthrough(self):
        self.through("passthrough", self.certificate_user())

    def test_certificate_terminate(self):
        self.through("terminate", self.certificate_user(), "--upstream", f"{ADDRESSES['b']}:{PORT}")

    def test_token_passthrough(self):
        self.through("passthrough", {"token": TOKEN})

    def test_token_terminate(self):
        self.through("terminate", {"token": TOKEN})

    def test_plugin_with_token(self):
        for mode in ("passthrough", "terminate"):
            with self.subTest(mode=mode):
                self.setUp()
                said = self.through(mode, self.plugin({"token": TOKEN}))
                self.assertIn("an exec plugin", said)

    def test_plugin_with_certificate(self):
        crt, key = self.rig.developer_cert
        self.through("passthrough", self.plugin({
            "clientCertificateData": Path(crt).read_text(), "clientKeyData": Path(key).read_text()}))

    def discover(self, mode):
        given = self.kubeconfig(self.certificate_user())
        self.all_listed(given)
        said = self.jackstay("kubeconfig", "--in", given, "--server", SERVER, "--mode", mode, "--discover")
        self.assertNotIn("only one endpoint", said)
        self.run_it()
        self.jackstay("status", "--wait", "--timeout", "20s", "--admin", ADMIN)

        def all_ready():
            status = json.loads(self.jackstay("status", "--output", "json", "--admin", ADMIN))
            endpoints = status["upstreams"][0]["endpoints"]
            self.assertEqual({e["address"] for e in endpoints}, {f"{a}:{PORT}" for a in ADDRESSES.values()})
            return all(e["state"] == "ready" for e in endpoints)
        wait_for("every apiserver to be ready", all_ready, 20)
        nodes = self.rig.kubectl(self.dir / "jackstay.kubeconfig", "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())

    def test_discover_passthrough(self):
        """Each apiserver is verified by a certificate that does not name the address of another."""
        self.discover("passthrough")

    def test_discover_terminate(self):
        self.discover("terminate")

    def test_in_place_and_back(self):
        given = self.kubeconfig(self.certificate_user())
        before = json.loads(given.read_text())
        self.jackstay("kubeconfig", "--in", given, "--server", SERVER, "--mode", "terminate", "--in-place")
        self.run_it()
        nodes = self.rig.kubectl(given, "get", "nodes")
        self.assertEqual(nodes.returncode, 0, nodes.stderr + self.process.tail())
        self.jackstay("kubeconfig", "--revert", "--in", given)
        after = self.rig.kubectl(given, "config", "view", "--raw", "-o", "json")
        after = json.loads(after.stdout)
        for cluster in before["clusters"]:
            self.assertIn(cluster, after["clusters"])
        self.assertEqual(before["users"], after["users"])

    def test_certificate_is_renewed(self):
        """A serving certificate that has expired is renewed at the start, before anyone is served."""
        given = self.kubeconfig({"token": TOKEN})
        self.jackstay("kubeconfig", "--in", given, "--server", SERVER, "--mode", "terminate")
        serving, ca = self.dir / "jackstay/serving.pem", self.dir / "jackstay/local-ca"
        sh("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=old",
           "-keyout", self.dir / "old.key", "-out", self.dir / "old.csr")
        (self.dir / "old.ext").write_text("subjectAltName=IP:127.0.0.1\n")
        sh("openssl", "x509", "-req", "-in", self.dir / "old.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key",
           "-set_serial", "7", "-days", "0", "-extfile", self.dir / "old.ext", "-out", self.dir / "old.crt")
        serving.write_text((self.dir / "old.crt").read_text() + (self.dir / "old.key").read_text())
        self.run_it()

        def served():
            nodes = self.rig.kubectl(self.dir / "jackstay.kubeconfig", "get", "nodes")
            return nodes.returncode == 0
        wait_for("the renewed certificate to be served", served, 20)
        self.assertIn("renewed", self.process.logfile.read_text())

    def doctor(self, *argv, code):
        return json.loads(self.jackstay("doctor", "--output", "json", *argv, code=code))

    def all_listed(self, given):
        """Waits until the cluster names every apiserver: doctor asks it for them, and one that has just
        started or had no etcd for a while is not an endpoint of it."""
        def listed():
            found = self.rig.kubectl(given, "get", "endpoints", "kubernetes", "-o", "jsonpath={.subsets[*].addresses[*].ip}")
            return set(found.stdout.split()) == set(ADDRESSES.values())
        wait_for("every apiserver to be an endpoint of the cluster", listed, 60)

    def without_etcd(self):
        """Doctor asks /readyz, which not every release lets fail then."""
        given = self.kubeconfig(self.certificate_user())
        self.rig.faults.drop_etcd("b")
        try:
            report = self.doctor("--kubeconfig", given, "--duration", "10s", code=1)
        finally:
            self.rig.faults.clear()
        first = report["findings"][0]
        self.assertEqual(first["cause"], "sick_endpoint", report["findings"])
        self.assertIn(ADDRESSES["b"], first["what"])
        self.all_listed(given)

    def test_doctor(self):
        given = self.kubeconfig(self.certificate_user())
        self.all_listed(given)
        report = self.doctor("--kubeconfig", given, "--duration", "5s", code=0)
        endpoints = {e["address"]: e for e in report["observations"]["endpoints"]}
        # The kubeconfig names one apiserver, the cluster the others.
        self.assertEqual(set(endpoints), {f"{a}:{PORT}" for a in ADDRESSES.values()}, report)
        for row in report["summary"]:
            log(f"doctor: {row['address']} " + ", ".join(f"{s['step']} {s['p50_ms']:.1f}" for s in row["steps"]))
        plugin = self.doctor("--kubeconfig", self.kubeconfig(self.plugin({"token": TOKEN})), "--duration", "2s", code=0)
        self.assertTrue(all(e["authenticated"] for e in plugin["observations"]["endpoints"]), plugin)
        self.assertNotIn(TOKEN, json.dumps(plugin))
        if RELEASE.etcd_check == "/readyz":
            self.without_etcd()
        given = self.kubeconfig(self.certificate_user())
        apiserver = self.rig.apiservers["b"]
        apiserver.pause()
        try:
            report = self.doctor("--kubeconfig", given, "--duration", "5s", code=1)
        finally:
            apiserver.resume()
        first = report["findings"][0]
        self.assertEqual(first["cause"], "dead_endpoint", report["findings"])
        self.assertIn(ADDRESSES["b"], first["what"])
        self.rig.heal()
