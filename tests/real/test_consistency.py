"""Clients write, read and watch through jackstay during random faults; afterwards a checker compares all that they saw
with the history in etcd (consistency/checker.py lists its rules).

    tests/real/run test_consistency                            one seed, 40 s of requests
    tests/real/run --seed 7 --minutes 8 test_consistency       another seed, and longer

The recording of a failed run is in target/consistency-SEED; `python3 -m consistency DIR` in tests/real checks it again.
"""

import base64
import json
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
import unittest
from pathlib import Path

from cases import RigCase
from consistency import checker
from consistency.history import load
from consistency.recorder import GROUP, Recorder, collection, manifest
from figures import record
from kubernetes import RELEASE
from rig import ADDRESSES, ADMIN_TOKENS, CACHE, HERE, REPOSITORY, Jackstay, Process, log, sh, swap_symlink, wait_for

SEED = int(os.environ.get("JACKSTAY_SEED") or 1)
SECONDS = float(os.environ.get("JACKSTAY_MINUTES") or 40 / 60) * 60
RESOURCES = {"configmaps": "configmaps", "leases": "leases", "things": f"{GROUP}/things"}
MEMBERS = {"second": "127.0.0.22", "third": "127.0.0.23"}  # of etcd, besides the rig's


class Kubectl(threading.Thread):
    """A client that runs kubectl, each time with a new connection, and a `kubectl get --watch`."""

    def __init__(self, rig, server, namespace, file, seed):
        super().__init__(daemon=True)
        self.rig, self.namespace, self.choose, self.stopped = rig, namespace, random.Random(seed), threading.Event()
        self.config = rig.kubeconfig("history-kubectl", server, token=ADMIN_TOKENS["admin-9"])
        self.out = Recorder(file, "kubectl")

    def call(self, verb, resource, key, form, value, *argv, **options):
        op, _ = self.out.invoke(verb, resource, key, form, value)
        done = self.rig.kubectl(self.config, *argv, **options)
        if done.returncode == 0:
            return self.out.reply(op, 200, json.loads(done.stdout))
        # kubectl prints a reason instead of the code; without one, the request's result is unknown.
        reason = re.search(r"Error from server \((\w+)\)", done.stderr)
        code = {"NotFound": 404, "AlreadyExists": 409, "Conflict": 409}.get(reason[1] if reason else "", 500)
        self.out.reply(op, code, {"message": done.stderr.strip()[:300]})

    def run(self):
        watcher = threading.Thread(target=self.watch, daemon=True)
        watcher.start()
        while not self.stopped.wait(self.choose.uniform(0.3, 1)):
            resource, key, turn = self.choose.choice(list(RESOURCES)), f"k{self.choose.randrange(6)}", self.choose.randrange(8)
            path = collection(resource, self.namespace)
            if turn < 2:
                self.call("list", resource, "", {"resourceVersion": "0"}, "", "get", "--raw", f"{path}?resourceVersion=0")
            elif turn == 2:
                self.call("list", resource, "", {}, "", "get", "--raw", path)
            elif turn == 3:
                self.call("get", resource, key, {"resourceVersion": "0"}, "", "get", "--raw", f"{path}/{key}?resourceVersion=0")
            elif turn == 4:
                self.call("get", resource, key, {}, "", "get", "--raw", f"{path}/{key}")
            elif turn == 5:
                value = self.out.value()
                self.call("create", resource, key, {}, value, "create", "--raw", path, "-f", "-", input=json.dumps(manifest(resource, key, value, "b")))
            elif turn == 6:
                value = self.out.value()
                self.call("patch", resource, key, {}, value, "patch", resource, key, "-n", self.namespace, "--type=merge", "-o", "json", "--show-managed-fields",
                          "-p", json.dumps(manifest(resource, key, value, "a")))
            else:
                self.call("delete", resource, key, {}, "", "delete", "--raw", f"{path}/{key}")
        watcher.join(10)

    def watch(self):
        """kubectl lists and prints the objects as ADDED, and then watches from the list's version."""
        while not self.stopped.is_set():
            op, _ = self.out.invoke("watch", "configmaps", "", {})
            child = self.rig.kubectl_start(self.config, "get", "configmaps", "-n", self.namespace, "--watch", "--output-watch-events", "-o", "json", "--show-managed-fields")
            killer = threading.Thread(target=lambda: (self.stopped.wait(), child.terminate()), daemon=True)
            killer.start()
            opened = False
            for line in child.stdout:
                event = json.loads(line)
                if not opened:
                    opened = True
                    self.out.reply(op, 200)
                self.out.event(op, event["type"], event["object"])
            child.wait(10)
            error = child.stderr.read().strip()[:300]
            child.stdout.close(), child.stderr.close()
            if not opened:
                self.out.reply(op, 500, {"message": error})
            else:
                self.out.end(op, "cancelled" if self.stopped.is_set() else "broken" if error else "clean", error)
            self.stopped.wait(0.2)


class Etcd:
    """Two more members of etcd. The apiservers use the rig's member, which needs one of these."""

    def __init__(self, rig):
        self.rig, self.members = rig, {}

    def start(self):
        rig = self.rig
        cluster = [f"default={self.status(0)}"]
        for name, address in MEMBERS.items():
            peer = f"http://{address}:2380"
            # The member that is not started yet must not be needed for a majority for long.
            wait_for("etcd to accept a member", lambda: rig.etcdctl("member", "add", name, f"--peer-urls={peer}"), 20)
            cluster.append(f"{name}={peer}")
            self.members[name] = rig.run(f"etcd-{name}", [
                CACHE / "bin/etcd", f"--name={name}", "--data-dir", rig.dir / f"memory/etcd-{name}", f"--listen-client-urls=http://{address}:2379",
                f"--advertise-client-urls=http://{address}:2379", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster={','.join(cluster)}", "--initial-cluster-state=existing"])
            wait_for(f"etcd's member {name}", lambda: self.members[name].require_running() or sh(
                CACHE / "bin/etcdctl", f"--endpoints=http://{address}:2379", "endpoint", "health"), 30)
        return self

    def status(self, index):
        return json.loads(self.rig.etcdctl("member", "list", "--write-out=json"))["members"][index]["peerURLs"][0]

    def identity(self, name):
        return next(m["ID"] for m in json.loads(self.rig.etcdctl("member", "list", "--write-out=json"))["members"] if m.get("name") == name)

    def lead(self, name):
        """Makes this member the leader."""
        leader = json.loads(self.rig.etcdctl("endpoint", "status", "--write-out=json"))[0]["Status"]["leader"]
        if leader != self.identity(name):
            sh(CACHE / "bin/etcdctl", f"--endpoints={','.join(f'http://{a}:2379' for a in ('127.0.0.1', *MEMBERS.values()))}", "move-leader", f"{self.identity(name):x}")
        return True

    def stop_leader(self):
        """Makes another member the leader and stops it: writes wait for an election."""
        wait_for("another member to lead", lambda: self.lead("second"), 10)
        self.members["second"].send(signal.SIGSTOP)

    def resume(self):
        self.members["second"].send(signal.SIGCONT)

    def remove(self):
        """Makes the rig's etcd a single member again."""
        self.resume()
        # A leader that is removed takes the requests in flight with it: they fail after 7 s.
        wait_for("the rig's etcd to lead", lambda: self.lead("default"), 30)
        for name, process in self.members.items():
            wait_for("etcd to remove a member", lambda: self.rig.etcdctl("member", "remove", f"{self.identity(name):x}"), 30)
            process.stop(signal.SIGKILL)
        wait_for("etcd to be healthy", lambda: self.rig.etcdctl("endpoint", "health"), 30)


class Consistency(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        rig = cls.rig
        cls.cert = rig.pki.issue("history", "/O=system:masters/CN=history")
        cls.current = rig.dir / "history.pem"
        cls.rotate(cls.cert)

        def adapt(config):
            config["state_dir"] = str(rig.dir / "history-state")
            config["shutdown"] = {"drain_timeout": "8s"}
        cls.jackstay = Jackstay(rig, [(cls.current, cls.current)], adapt=adapt, log_name="jackstay-history", port=7446, admin=9646).start()
        cls.server = cls.jackstay.server
        cls.etcd = Etcd(rig).start()
        rig.control.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", {
            "metadata": {"name": f"things.{GROUP}"}, "spec": {
                "group": GROUP, "scope": "Namespaced", "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
                "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
                    "type": "object", "properties": {"spec": {"type": "object", "properties": {"value": {"type": "string"}}}}}}}]}})
        for name in ADDRESSES:
            wait_for(f"the custom resource on {name}", lambda: rig.api(name, cert=rig.admin_cert).get(f"/apis/{GROUP}/v1/things").code == 200, 30)

    @classmethod
    def tearDownClass(cls):
        cls.rig.recover()
        cls.jackstay.process.stop(signal.SIGKILL)
        cls.etcd.remove()

    @classmethod
    def rotate(cls, cert):
        pem = cls.rig.dir / f"history-{time.monotonic_ns()}.pem"
        pem.write_text(Path(cert[0]).read_text() + Path(cert[1]).read_text())
        pem.chmod(0o600)
        swap_symlink(cls.current, pem)

    # ---- faults: each returns what its record has besides its name and times ----

    def victim(self):
        return self.rig.apiservers[self.choose.choice("ab")]

    def flows_dropped(self):
        hooks = self.choose.choice([("input",), ("output",), ("input", "output")])
        self.rig.faults.drop_flows(self.jackstay.pid, hooks=hooks)
        time.sleep(self.choose.uniform(2, 4))

    def dark(self):
        self.rig.faults.drop_address(self.victim().address)
        time.sleep(self.choose.uniform(2, 5))

    def stopped(self):
        self.victim().pause()
        time.sleep(self.choose.uniform(1, 5))

    def killed(self):
        """The new process has no watch history, so older versions expire on it."""
        self.victim().kill()
        time.sleep(self.choose.uniform(0, 2))
        self.rig.recover()
        return {"expires": True}

    def without_etcd(self):
        self.rig.faults.drop_etcd(self.choose.choice("ab"))
        time.sleep(self.choose.choice([4, 13]))

    def loss(self):
        self.rig.faults.drop_randomly(5)
        time.sleep(self.choose.uniform(2, 5))

    def compaction(self):
        self.rig.etcdctl("compact", self.rig.revision() - self.choose.randrange(20))
        return {"expires": True}

    def member_stopped(self):
        self.etcd.stop_leader()
        time.sleep(self.choose.uniform(1, 3))
        self.etcd.resume()

    def takeover(self):
        old = self.jackstay.process
        new = Process(f"jackstay-history-{time.monotonic_ns()}", [*old.argv[:4], "--take-over"], old.logfile)
        self.jackstay.process = new.start()
        self.assertEqual(old.child.wait(40), 0, old.tail())
        new.require_running()

    def reload(self):
        text = self.jackstay.config.read_text()
        levels = ["info", "debug"]
        fresh = self.jackstay.config.with_suffix(".new")
        fresh.write_text(re.sub(r'level: "(\w+)"', lambda m: f'level: "{levels[m[1] == "info"]}"', text, count=1))
        os.replace(fresh, self.jackstay.config)
        time.sleep(2)

    def rotation(self):
        self.rotate(self.rig.pki.issue(f"history-{time.monotonic_ns()}", "/O=system:masters/CN=history"))
        time.sleep(2)

    FAULTS = ("without_etcd", "flows_dropped", "killed", "takeover", "stopped", "compaction", "dark", "rotation", "member_stopped", "reload", "loss")

    def run_faults(self, until, out):
        """One fault after another in random order; each kind comes once before any comes again."""
        pending = []
        while time.monotonic() < until - 6:
            pending = pending or self.choose.sample(self.FAULTS, len(self.FAULTS))
            name = pending.pop()
            began = time.monotonic_ns()
            more = getattr(self, name)() or {}
            self.rig.recover()
            out.write({"kind": "fault", "name": name, "at": began, "until": time.monotonic_ns() + 500_000_000, "version": self.rig.revision(), **more})
            log(f"    {name}: {(time.monotonic_ns() - began) / 1e9:.1f} s")
            time.sleep(self.choose.uniform(0.5, 2))

    # ---- the run ----

    def watch_list(self):
        """Whether watches with initial events and bookmarks work, for which the apiserver needs a current etcd."""
        if not RELEASE.watch_list:
            return False
        answer = self.rig.control.get("/api/v1/namespaces/default/configmaps?watch=true&resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds=1")
        return b'"type":"ERROR"' not in answer.body

    def test_random_faults(self):
        self.choose = random.Random(SEED)
        log(f"    seed {SEED}, {SECONDS:.0f} s")
        directory = self.rig.dir / f"consistency-{SEED}"
        directory.mkdir()
        start = self.rig.revision()
        namespace = self.rig.load_namespace()
        configmaps = f"/api/v1/namespaces/{namespace}/configmaps"
        wait_for("the namespace's first object", lambda: self.rig.control.get(f"{configmaps}/kube-root-ca.crt").code == 200, 30)
        (directory / "namespace").write_text(namespace)
        with open(directory / "etcd", "w") as output:
            etcd = subprocess.Popen([CACHE / "bin/etcdctl", "--endpoints=http://127.0.0.1:2379", "watch", "--prefix", "/registry/", f"--rev={start}", "--write-out=json"],
                                    stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.addCleanup(lambda: (etcd.kill(), etcd.wait(5)))
        self.record(directory, namespace)
        wait_for("etcd's history", lambda: f'"{self.last_key(namespace)}"' in (directory / "etcd").read_text(), 20)
        etcd.terminate()
        ids = {json.loads(line).get("audit_id") for file in directory.glob("records*") for line in open(file)}
        answers = self.rig.audit(lambda e: e["stage"] in ("ResponseComplete", "Panic") and e["auditID"] in ids)
        (directory / "audit").write_text(json.dumps([(e["auditID"], e["server"], e.get("responseStatus", {}).get("code", 0)) for e in answers]))
        self.judge(directory)

    @staticmethod
    def last_key(namespace):
        """The key that the recording writes last, as etcdctl prints it."""
        return base64.b64encode(f"/registry/{GROUP}/things/{namespace}/final".encode()).decode()

    def record(self, directory, namespace):
        """Runs all clients and the faults; returns when every client has stopped."""
        crt, key = self.cert
        clients = [f"go-{i}={ADMIN_TOKENS[f'admin-{i}']}" for i in range(1, 5)] + ["go-cert="]
        go = subprocess.Popen(list(map(str, [
            CACHE / "load", f"-server={self.server}", f"-ca={self.rig.pki.ca}", f"-namespace={namespace}", f"-duration={SECONDS + 60}s", "-interval=100ms",
            "-settle=20s", "-user-agent=history-go", f"-history={directory / 'records-go'}", f"-clients={','.join(clients)}", f"-cert={crt}", f"-key={key}",
            f"-seed={SEED}", f"-direct={self.rig.server('c')}", f"-reference-token={ADMIN_TOKENS['admin-0']}", f"-custom-group={GROUP}", f"-watch-list={self.watch_list()}"])),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(lambda: (go.kill(), go.wait(5), go.stdout.close(), go.stderr.close()))
        self.assertEqual(go.stdout.readline(), "ready\n", go.poll())
        python = Process("history-python", [
            CACHE / "python/bin/python", HERE / "consistency/python_client.py",
            self.rig.kubeconfig("history-python", self.server, token=ADMIN_TOKENS["admin-8"]), namespace, directory / "records-python", SEED],
            self.rig.dir / "history-python.log").start()
        self.addCleanup(python.stop, signal.SIGKILL)
        kube = self.kube_client(directory, namespace)
        kubectl = Kubectl(self.rig, self.server, namespace, directory / "records-kubectl", SEED)
        kubectl.start()
        self.addCleanup(kubectl.stopped.set)
        self.run_faults(time.monotonic() + SECONDS, Recorder(directory / "records-faults", "faults"))
        python.require_running()
        kubectl.stopped.set()
        python.stop(timeout=70)
        if kube:
            self.assertEqual(kube.child.wait(70), 0, kube.tail())
        kubectl.join(70)
        self.assertFalse(kubectl.is_alive(), "kubectl did not stop")
        go.send_signal(signal.SIGTERM)
        _, error = go.communicate(timeout=120)
        self.assertEqual((go.returncode, error), (0, ""))
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))

    def kube_client(self, directory, namespace):
        """The client on kube-rs (tests/kube_client.rs), which ends by itself."""
        binary = os.environ.get("JACKSTAY_KUBE_CLIENT")
        if not binary:
            log("    without a client on kube-rs: JACKSTAY_KUBE_CLIENT is not set")
            return None
        process = Process("kube-client", [binary, "--ignored", "--exact", "history", "--nocapture"], self.rig.dir / "kube-client.log", env={
            "HISTORY_SERVER": self.server, "HISTORY_CA": str(self.rig.pki.ca), "HISTORY_TOKEN": ADMIN_TOKENS["admin-7"], "HISTORY_NAMESPACE": namespace,
            "HISTORY_FILE": str(directory / "records-kube"), "HISTORY_SEED": str(SEED), "HISTORY_SECONDS": str(SECONDS)}).start()
        self.addCleanup(process.stop, signal.SIGKILL)
        return process

    def judge(self, directory):
        began = time.monotonic()
        operations, others, histories, audits = load(directory, RESOURCES)
        violations = checker.check(operations, others, histories, audits)
        text = checker.summary(operations, violations)
        log(f"    seed {SEED}: {text}; checked in {time.monotonic() - began:.1f} s")
        record(f"consistency, seed {SEED}: operations", len(operations), "")
        record(f"consistency, seed {SEED}: violations", len(violations), "")
        if violations:
            kept = REPOSITORY / f"target/consistency-{SEED}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(directory, kept)
            log(f"    the recording: {kept}")
        self.assertGreater(len(operations), 10 * SECONDS)
        self.assertTrue(all(len(h.changes) > SECONDS for h in histories.values()), "too few writes")
        if violations:
            self.fail(f"seed {SEED}: {text}\n" + "\n".join(map(str, checker.smallest(violations))))
