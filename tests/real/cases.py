"""Test cases that run against any server: an apiserver, or jackstay. Each test module sets the server."""

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
from kubernetes import RELEASE, CURRENT_KUBECTL
from rig import ADDRESSES, EXTRA_ADDRESSES, NeverFulfilled, RealNode, TOKEN, TOKEN_USER, log, log_lines, shared, wait_for


def collect_lines(child, lines):
    """Starts a thread that appends each line of the child's output to `lines`, with its time."""
    def read():
        for line in child.stdout:
            lines.append((time.monotonic(), line.rstrip("\n")))
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def require_running(child):
    """Fails with the error output of a child that has exited, since its output cannot appear any more."""
    if child.poll() is not None:
        raise NeverFulfilled(f"kubectl exited with {child.returncode}: {child.stderr.read()}")


class StoppedOnExit:
    """Context manager that interrupts a child process when the block is left."""

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
                pass  # The child exited before it read all its input; the test reports that.


def for_each_kubectl(variants):
    """Runs a test once for each kubectl variant."""
    def decorate(test):
        @functools.wraps(test)
        def run_each(self):
            for variant in variants:
                with self.subTest(kubectl=variant.label):
                    test(self, variant)
        return run_each
    return decorate


each_kubectl = for_each_kubectl(RELEASE.kubectls)
each_transport = for_each_kubectl(RELEASE.transports)


def long_form(reason):
    """Skips a test or class outside the long forms; the reason names what covers it in CI."""
    def mark(test):
        test.long_form = reason
        return unittest.skipUnless(LONG, f"long form: {reason}")(test)
    return mark


class StoryCase:
    """The log of jackstay tells the story of a fault in a few lines: those that `grep -E 'WARN|ERROR'` finds."""

    MAX_LINES = 5

    def log_size(self, jackstay=None):
        """The size of jackstay's log, before a fault."""
        return (jackstay or self.jackstay).process.logfile.stat().st_size

    def check_story(self, what, since, jackstay=None, quiet=False, also=()):
        """Checks the warnings and errors of one fault, after byte `since`. One of them names an endpoint, or one of the
        addresses in `also`. With `quiet` there may be none, since not every such fault affects jackstay."""
        # The lines of a burst are written within 3 s, and those about an endpoint that is uncertain within 10 s.
        process = (jackstay or self.jackstay).process
        addresses = [*ADDRESSES.values(), *EXTRA_ADDRESSES.values(), *also]

        def story():
            return log_lines(process, r" (WARN|ERROR) ", since)

        def names_endpoint():
            return any(address in line for line in story() for address in addresses)
        with self.subTest(f"{what}: the log tells its story"):
            if not quiet:
                wait_for("a warning that names an endpoint", names_endpoint, 15)
            lines = story()
            log(f"{what}: {len(lines)} warnings and errors" + "".join(f"\n    {line}" for line in lines[:10]))
            self.assertLessEqual(len(lines), self.MAX_LINES, lines)


class RigCase:
    """Base of test cases: the shared rig, and the server under test."""

    server = None  # a URL

    @classmethod
    def setUpClass(cls):
        cls.rig = shared()
        cls.prepare()

    @classmethod
    def prepare(cls):
        """Starts what runs between the clients and the apiservers, and sets `server`."""


class KubectlCases(RigCase):
    """kubectl commands with the current kubectl (WebSocket) and the one of the server's release (SPDY)."""

    reference_apiserver = "c"  # the apiserver whose output is expected

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        slug = re.sub(r"\W+", "-", cls.__name__.lower())
        cls.admin = cls.rig.kubeconfig(f"{slug}-admin", cls.server, cert=cls.rig.admin_cert)
        cls.token = cls.rig.kubeconfig(f"{slug}-token", cls.server, token=TOKEN)
        cls.anonymous = cls.rig.kubeconfig(f"{slug}-nobody", cls.server)
        cls.direct = cls.rig.kubeconfig(f"{slug}-direct", cls.rig.server(cls.reference_apiserver), cert=cls.rig.admin_cert)

    def ok(self, *argv, config=None, **options):
        done = self.rig.kubectl(config or self.admin, *argv, **options)
        self.assertEqual(done.returncode, 0, f"kubectl {' '.join(argv)}: {done.stdout}{done.stderr}")
        return done.stdout

    # ---- verbs ----

    @each_kubectl
    def test_configmap_create_patch_get_delete(self, variant):
        name = f"cm-{uuid.uuid4().hex[:8]}"
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": "one", "text": "ä\n" * 2000}}
        self.assertIn("created", self.ok("apply", "-f", "-", input=json.dumps(manifest), variant=variant))
        manifest["data"]["key"] = "two"
        self.assertIn("configured", self.ok("apply", "-f", "-", input=json.dumps(manifest), variant=variant))
        self.ok("patch", "configmap", name, "--type=merge", "-p", '{"data":{"more":"three"}}', variant=variant)
        self.ok("label", "configmap", name, "colour=green", variant=variant)
        here = json.loads(self.ok("get", "configmap", name, "-o", "json", variant=variant))
        there = json.loads(self.ok("get", "configmap", name, "-o", "json", config=self.direct, variant=variant))
        self.assertEqual(here, there)
        self.assertEqual((here["data"]["key"], here["data"]["more"]), ("two", "three"))
        self.assertEqual(self.ok("get", "configmap", name, "--no-headers", "-o", "custom-columns=N:.metadata.name", variant=variant).strip(), name)
        self.assertIn(name, self.ok("get", "configmaps", variant=variant))  # A Table.
        self.ok("delete", "configmap", name, variant=variant)
        gone = self.rig.kubectl(self.admin, "get", "configmap", name, variant=variant)
        self.assertEqual(gone.returncode, 1)
        self.assertIn("NotFound", gone.stderr)

    def test_output_equals_direct_output(self):
        """Discovery, lists in every format and errors are equal byte for byte."""
        for argv in (["api-resources"], ["api-versions"], ["get", "--raw", "/version"], ["get", "namespaces", "-o", "yaml"],
                     ["get", "clusterroles", "-o", "json"], ["get", "clusterroles"], ["get", "--raw", "/openapi/v2"],
                     ["get", "--raw", "/apis"], ["get", "nonsense"], ["get", "pods", "-n", "nowhere", "nobody"],
                     ["get", "--raw", "/api/v1/namespaces/default/services/https:kubernetes:https/proxy/%2e%2e/x//y"]):
            with self.subTest(" ".join(argv)):
                here, there = self.rig.kubectl(self.admin, *argv), self.rig.kubectl(self.direct, *argv)
                self.assertEqual((here.returncode, here.stdout), (there.returncode, there.stdout))

                def messages(text):  # without klog's timestamps and the server's address
                    return [re.sub(r"^[EIW]\d{4} .*?\] |https://[0-9.:]+", "", line) for line in text.splitlines()]
                self.assertEqual(messages(here.stderr), messages(there.stderr))

    @each_kubectl
    def test_watch_shows_events_in_order(self, variant):
        namespace = self.rig.load_namespace()
        lines = []
        child = self.rig.kubectl_start(self.admin, "get", "configmaps", "-n", namespace, "--watch", "-o", "name", variant=variant)
        reader = collect_lines(child, lines)
        with StoppedOnExit(child):
            time.sleep(1)
            sent = []
            for i in range(5):
                sent.append((time.monotonic(), f"configmap/w{i}"))
                self.rig.control.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": f"w{i}"}})
            wait_for("all events", lambda: require_running(child) or sum("/w" in line for _, line in lines) >= 5, 15)
        reader.join(5)
        self.assertEqual([line for _, line in lines if "/w" in line], [name for _, name in sent])

    def test_large_list_equals_direct_list(self):
        namespace = self.rig.load_namespace()
        api = self.rig.control
        for i in range(40):
            api.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": f"big-{i}"}, "data": {"x": "0123456789abcdef" * 8192}}, keep=True)
        here = self.rig.api(self.server, cert=self.rig.admin_cert).get(f"/api/v1/namespaces/{namespace}/configmaps")
        self.assertEqual(here.code, 200)
        self.assertGreater(len(here.body), 5_000_000)
        # The same resourceVersion: concurrent writes change the version of the list.
        version = here.json["metadata"]["resourceVersion"]
        there = api.get(f"/api/v1/namespaces/{namespace}/configmaps?resourceVersion={version}&resourceVersionMatch=Exact")
        self.assertEqual(there.code, 200, there)
        self.assertTrue(here.body == there.body, f"{len(here.body)} and {len(there.body)} bytes differ")
        listed = self.ok("get", "configmaps", "-n", namespace, "--chunk-size=7", "-o", "name")
        self.assertEqual(sum("big-" in line for line in listed.splitlines()), 40)

    # ---- identity ----

    def identity_of(self, config, variant=CURRENT_KUBECTL):
        needle = uuid.uuid4().hex
        self.rig.kubectl(config, "get", "--raw", f"/api?who={needle}", variant=variant)
        return self.rig.audited_user(needle)

    @each_kubectl
    def test_apiserver_sees_the_client_identity(self, variant):
        name, groups, _ = self.identity_of(self.admin, variant)
        self.assertEqual((name, groups), ("rig-admin", ["system:authenticated", "system:masters"]))
        name, groups, event = self.identity_of(self.token, variant)
        self.assertEqual((name, groups), (TOKEN_USER[0], sorted(TOKEN_USER[1] + ["system:authenticated"])))
        self.assertEqual(event["user"].get("uid"), "4711")
        needle = uuid.uuid4().hex
        self.rig.api(self.server).get(f"/api?who={needle}")
        name, groups, _ = self.rig.audited_user(needle)
        self.assertEqual((name, groups), ("system:anonymous", ["system:unauthenticated"]))

    def test_authorization_follows_the_client(self):
        for config, verb, what, answer in ((self.admin, "delete", "nodes", "yes"), (self.token, "list", "pods", "yes"),
                                           (self.token, "delete", "pods", "no"), (self.anonymous, "list", "pods", None)):
            with self.subTest(config=config.name, verb=verb):
                done = self.rig.kubectl(config, "auth", "can-i", verb, what)
                if answer:
                    self.assertEqual(done.stdout.strip(), answer, done.stderr)
                else:
                    self.assertNotEqual(done.returncode, 0)

    def test_impersonation_is_authorized_as_the_client(self):
        needle = uuid.uuid4().hex
        self.ok("get", "--raw", f"/api?who={needle}", "--as=carol", "--as-group=ops")
        _, _, event = self.rig.audited_user(needle)
        self.assertEqual(event["user"]["username"], "rig-admin")
        self.assertEqual((event["impersonatedUser"]["username"], event["impersonatedUser"]["groups"]), ("carol", ["ops", "system:authenticated"]))
        refused = self.rig.kubectl(self.token, "get", "--raw", "/api", "--as=carol")
        self.assertIn("cannot impersonate", refused.stderr)

    def test_node_may_label_only_itself(self):
        """NodeRestriction: a node may label itself but no other node."""
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

    def test_audit_id_and_user_agent_are_forwarded(self):
        ident = str(uuid.uuid4())
        answer = self.rig.api(self.server, cert=self.rig.admin_cert).get(
            "/api/v1/nodes?limit=1", headers={"Audit-ID": ident, "User-Agent": "client/1.0", "X-Remote-User": "root", "X-Remote-Group": "system:masters"})
        self.assertEqual(answer.code, 200)
        name, _, event = self.rig.audited_user(ident)
        self.assertEqual((name, event["userAgent"], event["verb"]), ("rig-admin", "client/1.0", "list"))


class PodCases:
    """Requests that reach a real pod: logs, exec, attach, cp, port-forward."""

    node_server = None  # the server that its kubelet uses; default: the server under test

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.node_server or cls.server)
        cls.rig.start_pod()

    @each_kubectl
    def test_logs_limit_bytes(self, variant):
        limited = ["logs", "tool", "-c", "ticker", "--tail=-1", "--limit-bytes=14"]
        wait_for("two lines", lambda: self.ok(*limited, config=self.direct) == "line 1\nline 2\n", 15)
        self.assertEqual(self.ok(*limited, variant=variant), "line 1\nline 2\n")

    @each_kubectl
    def test_logs_follow_streams_line_by_line(self, variant):
        lines = []
        child = self.rig.kubectl_start(self.admin, "logs", "-f", "tool", "-c", "ticker", "--tail=1", variant=variant)
        reader = collect_lines(child, lines)
        with StoppedOnExit(child):
            wait_for("four lines", lambda: require_running(child) or len(lines) >= 4, 15)
        reader.join(5)
        numbers = [int(line.split()[1]) for _, line in lines]
        self.assertEqual(numbers, list(range(numbers[0], numbers[0] + len(numbers))))
        # The lines arrive one by one, not together at the end.
        self.assertGreater(lines[3][0] - lines[1][0], 0.5)

    @each_transport
    def test_exec_streams_and_exit_code(self, variant):
        data = "".join(f"{i} {uuid.uuid4().hex}\n" for i in range(20000))
        self.assertEqual(self.ok("exec", "tool", "-c", "web", "--", "echo", "hello", variant=variant), "hello\n")
        self.assertEqual(self.ok("exec", "-i", "tool", "-c", "web", "--", "cat", input=data, variant=variant), data)
        done = self.rig.kubectl(self.admin, "exec", "tool", "-c", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7", variant=variant)
        self.assertEqual((done.returncode, done.stdout), (7, "out\n"), done.stderr)
        self.assertTrue(done.stderr.startswith("err\n"), done.stderr)
        denied = self.rig.kubectl(self.token, "exec", "tool", "-c", "web", "--", "true", variant=variant)
        self.assertIn("forbidden", denied.stderr.lower())

    @each_transport
    def test_attach_echoes_input(self, variant):
        child = self.rig.kubectl_start(self.admin, "attach", "-i", "tool", "-c", "echo", variant=variant, stdin=subprocess.PIPE)
        lines, word = [], uuid.uuid4().hex
        reader = collect_lines(child, lines)
        with StoppedOnExit(child):
            time.sleep(1.5)
            require_running(child)
            child.stdin.write(word + "\n")
            child.stdin.flush()
            wait_for("the container's answer", lambda: require_running(child) or any(line == f"got {word}" for _, line in lines), 15)
        reader.join(5)

    @each_transport
    def test_cp_both_ways_keeps_digest(self, variant):
        local = self.rig.dir / "cp-up"
        local.write_bytes(os.urandom(6 << 20))
        digest = hashlib.sha256(local.read_bytes()).hexdigest()
        back = self.rig.dir / "cp-down"
        self.ok("cp", str(local), "tool:/tmp/up", "-c", "web", variant=variant)
        self.assertIn(digest, self.ok("exec", "tool", "-c", "web", "--", "sha256sum", "/tmp/up", variant=variant))
        self.ok("cp", "tool:/tmp/up", str(back), "-c", "web", variant=variant)
        self.assertEqual(hashlib.sha256(back.read_bytes()).hexdigest(), digest)

    @each_transport
    def test_port_forward_transfers_bodies(self, variant):
        expected = bytes(range(256)) * 32768
        child = self.rig.kubectl_start(self.admin, "port-forward", "pod/tool", ":8099", variant=variant)
        lines = []
        reader = collect_lines(child, lines)
        with StoppedOnExit(child):
            wait_for("a local port", lambda: lines or require_running(child), 15)
            port = int(re.search(r"127\.0\.0\.1:(\d+)", lines[0][1])[1])
            for path, body in (("/", b"a page from the pod\n"), ("/big", expected), ("/big", expected)):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                connection.request("GET", path)
                self.assertEqual(connection.getresponse().read(), body)
                connection.close()
        reader.join(5)

    def test_new_pod_runs_and_is_removed(self):
        """kubelet's watch delivers a new pod: it runs, and is removed."""
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
