"""What must be the same through jackstay as directly; each test module gives it a server."""

import functools
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import unittest
import uuid

from figures import LONG
from kubernetes import RELEASE, TODAY
from rig import Gone, RealNode, TOKEN, TOKEN_USER, shared, wait_for


def lines_of(child, into):
    def pump():
        for line in child.stdout:
            into.append((time.monotonic(), line.rstrip("\n")))
    thread = threading.Thread(target=pump, daemon=True)
    thread.start()
    return thread


def alive(child):
    """A child that has ended cannot show what we wait for: say what it said instead."""
    if child.poll() is not None:
        raise Gone(f"kubectl ended with {child.returncode}: {child.stderr.read()}")


class Ended:
    """Ends a child at the end of a block."""

    def __init__(self, child):
        self.child = child

    def __enter__(self):
        return self.child

    def __exit__(self, *_):
        self.child.send_signal(signal.SIGINT)
        try:
            self.child.wait(10)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait(10)
        for stream in (self.child.stdout, self.child.stderr, self.child.stdin):
            try:
                if stream:
                    stream.close()
            except BrokenPipeError:
                pass  # It ended before it read all its input; the test says so.


def each(ways):
    """Runs a test once for each of some ways to run kubectl."""
    def decorate(test):
        @functools.wraps(test)
        def all_of_them(self):
            for by in ways:
                with self.subTest(kubectl=by.label):
                    test(self, by)
        return all_of_them
    return decorate


each_kubectl = each(RELEASE.kubectls)
each_transport = each(RELEASE.transports)


def long_form(reason):
    """A test or a class that only the long forms run; the reason says what covers it in CI."""
    return unittest.skipUnless(LONG, f"long form: {reason}")


class WithRig:
    """A test case that has the rig and a server."""

    server = None  # a URL

    @classmethod
    def setUpClass(cls):
        cls.rig = shared()
        cls.prepare()

    @classmethod
    def prepare(cls):
        """Puts what it needs in front of the apiservers, and sets `server`."""


class Kubectl(WithRig):
    """kubectl of today (WebSocket first) and of the server's own age (SPDY)."""

    reference = "c"  # an apiserver to compare with

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        slug = re.sub(r"\W+", "-", cls.__name__.lower())
        cls.admin = cls.rig.kubeconfig(f"{slug}-admin", cls.server, cert=cls.rig.admin_cert)
        cls.token = cls.rig.kubeconfig(f"{slug}-token", cls.server, token=TOKEN)
        cls.nobody = cls.rig.kubeconfig(f"{slug}-nobody", cls.server)
        cls.plain = cls.rig.kubeconfig(f"{slug}-direct", cls.rig.server(cls.reference), cert=cls.rig.admin_cert)

    def ok(self, *argv, config=None, **options):
        done = self.rig.kubectl(config or self.admin, *argv, **options)
        self.assertEqual(done.returncode, 0, f"kubectl {' '.join(argv)}: {done.stdout}{done.stderr}")
        return done.stdout

    # ---- verbs ----

    @each_kubectl
    def test_create_read_change_delete(self, by):
        name = f"cm-{uuid.uuid4().hex[:8]}"
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": "one", "text": "ä\n" * 2000}}
        self.assertIn("created", self.ok("apply", "-f", "-", input=json.dumps(manifest), by=by))
        manifest["data"]["key"] = "two"
        self.assertIn("configured", self.ok("apply", "-f", "-", input=json.dumps(manifest), by=by))
        self.ok("patch", "configmap", name, "--type=merge", "-p", '{"data":{"more":"three"}}', by=by)
        self.ok("label", "configmap", name, "colour=green", by=by)
        here = json.loads(self.ok("get", "configmap", name, "-o", "json", by=by))
        there = json.loads(self.ok("get", "configmap", name, "-o", "json", config=self.plain, by=by))
        self.assertEqual(here, there)
        self.assertEqual((here["data"]["key"], here["data"]["more"]), ("two", "three"))
        self.assertEqual(self.ok("get", "configmap", name, "--no-headers", "-o", "custom-columns=N:.metadata.name", by=by).strip(), name)
        self.assertIn(name, self.ok("get", "configmaps", by=by))  # A Table.
        self.ok("delete", "configmap", name, by=by)
        gone = self.rig.kubectl(self.admin, "get", "configmap", name, by=by)
        self.assertEqual(gone.returncode, 1)
        self.assertIn("NotFound", gone.stderr)

    def test_same_words_as_directly(self):
        """Discovery, lists in every format, errors: byte for byte."""
        for argv in (["api-resources"], ["api-versions"], ["get", "--raw", "/version"], ["get", "namespaces", "-o", "yaml"],
                     ["get", "clusterroles", "-o", "json"], ["get", "clusterroles"], ["get", "--raw", "/openapi/v2"],
                     ["get", "--raw", "/apis"], ["get", "nonsense"], ["get", "pods", "-n", "nowhere", "nobody"],
                     ["get", "--raw", "/api/v1/namespaces/default/services/https:kubernetes:https/proxy/%2e%2e/x//y"]):
            with self.subTest(" ".join(argv)):
                here, there = self.rig.kubectl(self.admin, *argv), self.rig.kubectl(self.plain, *argv)
                self.assertEqual((here.returncode, here.stdout), (there.returncode, there.stdout))

                def words(text):  # Without klog's clock and our addresses.
                    return [re.sub(r"^[EIW]\d{4} .*?\] |https://[0-9.:]+", "", line) for line in text.splitlines()]
                self.assertEqual(words(here.stderr), words(there.stderr))

    @each_kubectl
    def test_watch(self, by):
        namespace = self.rig.load_namespace()
        lines = []
        child = self.rig.kubectl_start(self.admin, "get", "configmaps", "-n", namespace, "--watch", "-o", "name", by=by)
        pump = lines_of(child, lines)
        with Ended(child):
            time.sleep(1)
            sent = []
            for i in range(5):
                sent.append((time.monotonic(), f"configmap/w{i}"))
                self.rig.control.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": f"w{i}"}})
            wait_for("the watch to show all", lambda: alive(child) or sum("/w" in line for _, line in lines) >= 5, 15)
        pump.join(5)
        self.assertEqual([line for _, line in lines if "/w" in line], [name for _, name in sent])

    def test_large_list(self):
        namespace = self.rig.load_namespace()
        api = self.rig.control
        for i in range(40):
            api.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": f"big-{i}"}, "data": {"x": "0123456789abcdef" * 8192}}, keep=True)
        here = self.rig.api(self.server, cert=self.rig.admin_cert).get(f"/api/v1/namespaces/{namespace}/configmaps")
        self.assertEqual(here.code, 200)
        self.assertGreater(len(here.body), 5_000_000)
        # The same moment: others write meanwhile, and each write is a new version of the whole list.
        version = here.json["metadata"]["resourceVersion"]
        there = api.get(f"/api/v1/namespaces/{namespace}/configmaps?resourceVersion={version}&resourceVersionMatch=Exact")
        self.assertEqual(there.code, 200, there)
        self.assertTrue(here.body == there.body, f"{len(here.body)} and {len(there.body)} bytes differ")
        listed = self.ok("get", "configmaps", "-n", namespace, "--chunk-size=7", "-o", "name")
        self.assertEqual(sum("big-" in line for line in listed.splitlines()), 40)

    # ---- who one is ----

    def whoami(self, config, by=TODAY):
        needle = uuid.uuid4().hex
        self.rig.kubectl(config, "get", "--raw", f"/api?who={needle}", by=by)
        return self.rig.who(needle)

    @each_kubectl
    def test_who_one_is(self, by):
        name, groups, _ = self.whoami(self.admin, by)
        self.assertEqual((name, groups), ("rig-admin", ["system:authenticated", "system:masters"]))
        name, groups, event = self.whoami(self.token, by)
        self.assertEqual((name, groups), (TOKEN_USER[0], sorted(TOKEN_USER[1] + ["system:authenticated"])))
        self.assertEqual(event["user"].get("uid"), "4711")
        needle = uuid.uuid4().hex
        self.rig.api(self.server).get(f"/api?who={needle}")
        name, groups, _ = self.rig.who(needle)
        self.assertEqual((name, groups), ("system:anonymous", ["system:unauthenticated"]))

    def test_rights(self):
        for config, verb, what, answer in ((self.admin, "delete", "nodes", "yes"), (self.token, "list", "pods", "yes"),
                                           (self.token, "delete", "pods", "no"), (self.nobody, "list", "pods", None)):
            with self.subTest(config=config.name, verb=verb):
                done = self.rig.kubectl(config, "auth", "can-i", verb, what)
                if answer:
                    self.assertEqual(done.stdout.strip(), answer, done.stderr)
                else:
                    self.assertNotEqual(done.returncode, 0)

    def test_impersonation(self):
        needle = uuid.uuid4().hex
        self.ok("get", "--raw", f"/api?who={needle}", "--as=carol", "--as-group=ops")
        _, _, event = self.rig.who(needle)
        self.assertEqual(event["user"]["username"], "rig-admin")
        self.assertEqual((event["impersonatedUser"]["username"], event["impersonatedUser"]["groups"]), ("carol", ["ops", "system:authenticated"]))
        refused = self.rig.kubectl(self.token, "get", "--raw", "/api", "--as=carol")
        self.assertIn("cannot impersonate", refused.stderr)

    def test_node_restriction(self):
        """A node may label itself and nobody else."""
        cert = self.rig.node_cert("restricted")
        api = self.rig.api(self.server, cert=self.node_credential(cert))
        patch = {"metadata": {"labels": {"rig/colour": "green"}}}
        for name in ("restricted", "other"):
            self.rig.control.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        kind = {"content_type": "application/merge-patch+json"}
        mine = api.request("PATCH", "/api/v1/nodes/restricted", patch, **kind)
        other = api.request("PATCH", "/api/v1/nodes/other", patch, **kind)
        for name in ("restricted", "other"):
            self.rig.control.request("DELETE", f"/api/v1/nodes/{name}")
        self.assertEqual(mine.code, 200, mine)
        self.assertEqual(other.code, 403, other)
        self.assertIn("is not allowed to modify node", other.json["message"])

    def node_credential(self, cert):
        return cert

    def test_audit_id_and_agent(self):
        ident = str(uuid.uuid4())
        answer = self.rig.api(self.server, cert=self.rig.admin_cert).get(
            "/api/v1/nodes?limit=1", headers={"Audit-ID": ident, "User-Agent": "someone/1.0", "X-Remote-User": "root", "X-Remote-Group": "system:masters"})
        self.assertEqual(answer.code, 200)
        name, _, event = self.rig.who(ident)
        self.assertEqual((name, event["userAgent"], event["verb"]), ("rig-admin", "someone/1.0", "list"))


class Pods:
    """Into a real pod: logs, exec, attach, cp, port-forward."""

    node_server = None  # where its kubelet connects; default the server under test

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.node_server or cls.server)
        cls.rig.start_pod()

    @each_kubectl
    def test_logs(self, by):
        limited = ["logs", "tool", "-c", "ticker", "--tail=-1", "--limit-bytes=14"]
        wait_for("two lines", lambda: self.ok(*limited, config=self.plain) == "line 1\nline 2\n", 15)
        self.assertEqual(self.ok(*limited, by=by), "line 1\nline 2\n")

    @each_kubectl
    def test_logs_follow(self, by):
        lines = []
        child = self.rig.kubectl_start(self.admin, "logs", "-f", "tool", "-c", "ticker", "--tail=1", by=by)
        pump = lines_of(child, lines)
        with Ended(child):
            wait_for("four lines", lambda: alive(child) or len(lines) >= 4, 15)
        pump.join(5)
        numbers = [int(line.split()[1]) for _, line in lines]
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        # Line by line, not all at the end.
        self.assertGreater(lines[3][0] - lines[1][0], 0.5)

    @each_transport
    def test_exec(self, by):
        data = "".join(f"{i} {uuid.uuid4().hex}\n" for i in range(20000))
        self.assertEqual(self.ok("exec", "tool", "-c", "web", "--", "echo", "hello", by=by), "hello\n")
        self.assertEqual(self.ok("exec", "-i", "tool", "-c", "web", "--", "cat", input=data, by=by), data)
        done = self.rig.kubectl(self.admin, "exec", "tool", "-c", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7", by=by)
        self.assertEqual((done.returncode, done.stdout), (7, "out\n"), done.stderr)
        self.assertTrue(done.stderr.startswith("err\n"), done.stderr)
        denied = self.rig.kubectl(self.token, "exec", "tool", "-c", "web", "--", "true", by=by)
        self.assertIn("forbidden", denied.stderr.lower())

    @each_transport
    def test_attach(self, by):
        child = self.rig.kubectl_start(self.admin, "attach", "-i", "tool", "-c", "echo", by=by, stdin=subprocess.PIPE)
        lines, word = [], uuid.uuid4().hex
        pump = lines_of(child, lines)
        with Ended(child):
            time.sleep(1.5)
            alive(child)
            child.stdin.write(word + "\n")
            child.stdin.flush()
            wait_for("the container's answer", lambda: alive(child) or any(line == f"got {word}" for _, line in lines), 15)
        pump.join(5)

    @each_transport
    def test_cp(self, by):
        local = self.rig.dir / "cp-up"
        local.write_bytes(os.urandom(6 << 20))
        digest = hashlib.sha256(local.read_bytes()).hexdigest()
        back = self.rig.dir / "cp-down"
        self.ok("cp", str(local), "tool:/tmp/up", "-c", "web", by=by)
        self.assertIn(digest, self.ok("exec", "tool", "-c", "web", "--", "sha256sum", "/tmp/up", by=by))
        self.ok("cp", "tool:/tmp/up", str(back), "-c", "web", by=by)
        self.assertEqual(hashlib.sha256(back.read_bytes()).hexdigest(), digest)

    @each_transport
    def test_port_forward(self, by):
        expected = bytes(range(256)) * 32768
        child = self.rig.kubectl_start(self.admin, "port-forward", "pod/tool", ":8099", by=by)
        lines = []
        pump = lines_of(child, lines)
        with Ended(child):
            wait_for("a local port", lambda: lines or alive(child), 15)
            port = int(re.search(r"127\.0\.0\.1:(\d+)", lines[0][1])[1])
            for path, body in (("/", b"a page from the pod\n"), ("/big", expected), ("/big", expected)):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("GET", path)
                self.assertEqual(connection.getresponse().read(), body)
                connection.close()
        pump.join(5)

    def test_pod_through_its_node(self):
        """A pod that is created now comes up: the real kubelet's watch works."""
        name = f"fresh-{uuid.uuid4().hex[:6]}"
        self.rig.control.must("POST", "/api/v1/namespaces/default/pods", {
            "metadata": {"name": name}, "spec": {"nodeName": RealNode.NAME, "hostNetwork": True, "automountServiceAccountToken": False,
                                                 "terminationGracePeriodSeconds": 1, "tolerations": [{"operator": "Exists"}],
                                                 "restartPolicy": "Never",
                                                 "containers": [{"name": "c", "image": "jackstay.test/busybox:1", "imagePullPolicy": "Never",
                                                                 "command": ["echo", "done"]}]}})
        path = f"/api/v1/namespaces/default/pods/{name}"
        wait_for("the pod's end", lambda: self.rig.control.get(path).json["status"]["phase"] == "Succeeded", 60)
        self.assertEqual(self.ok("logs", name), "done\n")
        self.rig.control.must("DELETE", path)
        wait_for("the pod's removal", lambda: self.rig.control.get(path).code == 404, 60)
