"""deploy/ on a real node: static pods, systemd units, and the Kubernetes controllers through jackstay.

Promise: whatever was killed, the node is Ready again within 30 s (see figures.py).
"""

import itertools
import json
import os
import re
import signal
import socket
import time
import unittest
import uuid
from pathlib import Path

from cases import RigCase
from deployed import DEPLOY, KUBELET_CONF, KUBELET_PEM, SERVER, UPSTREAM, Systemd, NewNode, admin, install_manifest, pids_of, stop_everything, status, write_config
from figures import LONG, bound, record, within
from kubernetes import RELEASE
from matrix import covers
from rig import DETECTORS, ADDRESSES, IMAGE, LOAD_BALANCER, LOAD_BALANCER6, NODE_IP, PORT, WATCH_ERRORS, Jackstay, client_errors, log, log_lines, sh, wait_for, yaml
from rig_l4 import install, remove

# Seconds. The program feeds the watchdog in half of it, and not while a loop has stalled for 5 s: a process that gets no
# processor time for so long, beside other tests, must not be restarted.
WATCHDOG = 15


class Manifests(RigCase, unittest.TestCase):
    def test_apiserver_accepts_every_object(self):
        """A real apiserver accepts every object of deploy/ (server-side dry run). `test_chart` applies those of the Helm chart."""
        config = self.rig.kubeconfig("manifests", self.rig.server("a"), cert=self.rig.admin_cert)
        wait_for("kube-system's service account",
                 lambda: self.rig.control.get("/api/v1/namespaces/kube-system/serviceaccounts/default").code == 200, 60)
        kustomized = {path.parent for path in DEPLOY.rglob("kustomization.yaml")}
        other = {*kustomized, DEPLOY / "helm", DEPLOY / "krew"}  # with templates of their own
        objects = [path for path in sorted(DEPLOY.rglob("*.yaml")) if not other & set(path.parents)
                   and re.search(r"^apiVersion:", path.read_text(), re.M) and re.search(r"^kind:", path.read_text(), re.M)]
        self.assertGreaterEqual(len(objects), 2)
        for argv in [("-f", path) for path in objects] + [("-k", path) for path in sorted(kustomized)]:
            with self.subTest(argv[1].relative_to(DEPLOY)):
                done = self.rig.kubectl(config, "apply", "--dry-run=server", "--validate=true", *argv)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("(server dry run)", done.stdout)


class StaticPod(RigCase, unittest.TestCase):
    """A real node whose kubelet reaches the apiservers only through the static pod."""

    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        write_config(cls.rig, "terminate", [(KUBELET_PEM, KUBELET_PEM)])
        cls.node = cls.rig.node = NewNode(cls.rig)
        install_manifest("jackstay.yaml")
        cls.token_user = cls.node.bootstrap()
        cls.started_at = time.time()
        cls.node.start()

    @classmethod
    def tearDownClass(cls):
        stop_everything(cls.rig)

    def setUp(self):
        self.rig.recover()

    def tearDown(self):
        self.rig.recover()
        self.assertEqual(self.rig.faults.flows(self.node.kubelet.pid), {}, "kubelet has a connection that bypasses jackstay")
        self.assertNotIn("panicked", self.logs())

    def logs(self):
        """The logs of all containers of the pod, including earlier ones."""
        return "\n".join(path.read_text(errors="replace") for path in Path("/var/log/pods").glob("kube-system_jackstay-*/jackstay/*.log"))

    def ready_since(self, moment):
        """Whether the node is Ready and has renewed its lease after this time."""
        return self.rig.ready(self.node.NAME) and self.node.lease_renewed_at() > moment

    def test_1_new_node_bootstraps_to_ready(self):
        wait_for("the node to be Ready", lambda: self.ready_since(self.started_at), 120)
        record("new node: from the start to Ready", time.time() - self.started_at, "s")
        requests = self.rig.control.get("/apis/certificates.k8s.io/v1/certificatesigningrequests").json["items"]
        mine = [r for r in requests if r["spec"]["username"] == self.token_user]
        self.assertEqual(len(mine), 1, requests)
        self.assertEqual([c["type"] for c in mine[0]["status"]["conditions"]], ["Approved"])
        self.assertIn(f"server: {SERVER}", KUBELET_CONF.read_text())
        # jackstay waited for the identity's file and then used it.
        self.assertRegex(self.logs(), rf"{KUBELET_PEM} does not exist yet; it is awaited(.|\n)*identity is in use")
        identity, = status()["listeners"][0]["identities"]
        self.assertEqual((identity["state"], identity["error"]), ("loaded", None))
        self.assertIn(f"system:node:{self.node.NAME}", identity["subject"])
        patches = self.rig.audit(lambda e: e["verb"] == "patch" and f"/nodes/{self.node.NAME}/status" in e["requestURI"])
        self.assertEqual({e["user"]["username"] for e in patches}, {f"system:node:{self.node.NAME}"})

    def test_2_process_is_confined_as_the_manifest_says(self):
        """The process has the manifest's capabilities, user, mounts and listeners."""
        pid, = pids_of()
        process_status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
        self.assertEqual({k: process_status[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
                         {k: "0" * 16 for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")})
        self.assertEqual((process_status["NoNewPrivs"], process_status["Seccomp"], process_status["Uid"].split()), ("1", "2", ["0"] * 4))
        mounts = {fields[4]: fields[5].split(",")[0] for fields in map(str.split, Path(f"/proc/{pid}/mountinfo").read_text().splitlines())}
        self.assertEqual({path: mounts[path] for path in ("/", "/etc/jackstay", "/var/lib/kubelet/pki", "/etc/kubernetes/pki/ca.crt", "/var/lib/jackstay")},
                         {"/": "ro", "/etc/jackstay": "ro", "/var/lib/kubelet/pki": "ro", "/etc/kubernetes/pki/ca.crt": "ro", "/var/lib/jackstay": "rw"})
        self.assertNotIn("/var/run/secrets/kubernetes.io/serviceaccount", mounts)
        self.assertEqual(status()["node"], self.node.NAME, "NODE_NAME of the manifest")
        listeners = sh("ss", "-Htlnp").stdout
        for line in listeners.splitlines():
            if f"pid={pid}," in line:
                self.assertRegex(line, r"127\.0\.0\.1:|\[::1\]:")

    def test_3_pods_run_and_are_removed(self):
        """A pod is created, runs and is removed through jackstay. One of its containers uses jackstay's image with
        runAsNonRoot and no user: kubelet refuses to start it if the image runs as root."""
        own = re.search(r"image: (\S+)", (DEPLOY / "static-pod/jackstay.yaml").read_text())[1]
        name = f"fresh-{uuid.uuid4().hex[:6]}"
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.rig.control.must("POST", "/api/v1/namespaces/default/pods", {
            "metadata": {"name": name}, "spec": {
                "nodeName": self.node.NAME, "hostNetwork": True, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
                "restartPolicy": "Never", "containers": [
                    {"name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["echo", "done"]},
                    {"name": "own", "image": own, "imagePullPolicy": "Never", "args": ["--version"], "securityContext": {"runAsNonRoot": True}}]}})
        wait_for("the pod to succeed", lambda: self.rig.control.get(path).json["status"]["phase"] == "Succeeded", 60)
        self.rig.control.must("DELETE", path)
        wait_for("the pod's removal", lambda: self.rig.control.get(path).code == 404, 60)

    def test_4_daemonset_serves_the_load_balancer_address(self):
        """The DaemonSet on a control-plane node serves the load balancer's address."""
        rig, address, port = self.rig, "10.99.0.100", 8443
        sh("ip", "addr", "replace", f"{address}/32", "dev", "lo")
        self.addCleanup(sh, "ip", "addr", "del", f"{address}/32", "dev", "lo")
        overlay = rig.dir / "overlay"
        overlay.mkdir()
        config = {"admin": {"bind": "127.0.0.1:9644"}, "upstreams": [UPSTREAM], "listeners": [
            {"name": "load-balancer", "bind": [f"{address}:{port}"], "mode": "passthrough", "upstream": "control-plane"}]}
        (overlay / "jackstay.yaml").write_text(yaml(config).lstrip("\n") + "\n")
        (overlay / "kustomization.yaml").write_text(json.dumps({
            "namespace": "kube-system", "resources": [os.path.relpath(DEPLOY / "load-balancer", overlay)],
            "configMapGenerator": [{"name": "jackstay-load-balancer", "behavior": "replace", "files": ["jackstay.yaml"]}]}))
        rig.control.must("PATCH", f"/api/v1/nodes/{self.node.NAME}", {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
                         content_type="application/merge-patch+json")
        admin_config = rig.kubeconfig("load-balancer-admin", rig.server("c"), cert=rig.admin_cert)
        applied = rig.kubectl(admin_config, "apply", "-k", overlay)
        self.assertEqual(applied.returncode, 0, applied.stderr)
        self.addCleanup(wait_for, "its pod to exit", lambda: len(pids_of()) == 1, 60)
        self.addCleanup(rig.kubectl, admin_config, "delete", "-k", overlay, "--wait=false")
        pods = "/api/v1/namespaces/kube-system/pods?labelSelector=app.kubernetes.io%2Fcomponent%3Dload-balancer"

        def pod():
            return next(iter(rig.control.get(pods).json["items"]), None)
        name = wait_for("the controller's pod", pod, 30)["metadata"]["name"]
        # The rig has no scheduler.
        rig.control.must("POST", f"/api/v1/namespaces/kube-system/pods/{name}/binding", {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": self.node.NAME}})
        wait_for("the pod to be Ready", lambda: any(c["type"] == "Ready" and c["status"] == "True" for c in pod()["status"].get("conditions", [])), 60)
        # The apiservers' certificates do not contain this address.
        client = rig.kubeconfig("load-balancer-client", f"https://{address}:{port}", cert=rig.admin_cert)

        def nodes():
            return self.node.NAME in rig.kubectl(client, "--tls-server-name=kubernetes", "--request-timeout=5s", "get", "nodes").stdout
        self.assertTrue(nodes())
        for apiserver in "ab":
            rig.apiservers[apiserver].kill()
        wait_for("a response of the last apiserver", nodes, 10)

    def test_5_pod_is_ready_within_its_requests(self):
        """The mirror pod is Ready, and the process used no more memory than the manifest requests."""
        def ready():  # kubelet updates mirror pods periodically.
            pod = self.rig.control.get(f"/api/v1/namespaces/kube-system/pods/jackstay-{self.node.NAME}").json
            return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", [])) and pod
        pod = wait_for("the mirror pod to be Ready", ready, 120)
        self.assertEqual((pod["spec"]["priorityClassName"], pod["status"]["containerStatuses"][0]["restartCount"]), ("system-node-critical", 0))
        pid, = pids_of()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])
        used = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        log(f"peak of memory {peak / 1024:.1f} MiB, {used:.2f} s of CPU in {time.time() - Path(f'/proc/{pid}').stat().st_ctime:.0f} s")
        manifest = (DEPLOY / "static-pod/jackstay.yaml").read_text()
        request, limit = (int(m) for m in re.findall(r"memory: (\d+)Mi", manifest))
        self.assertLess(peak, request * 1024)
        self.assertLessEqual(8 * request, limit)

    def kill(self, what):
        if what == "kubelet":
            self.node.kubelet.send(signal.SIGKILL)
            self.node.kubelet.child.wait(10)
        elif what == "jackstay":
            for pid in pids_of():
                os.kill(pid, signal.SIGKILL)
        else:
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()

    def kill_in_order(self, order):
        """Kills the components in this order. The test restarts kubelet and the apiservers, as systemd and their kubelets
        would; this node's kubelet restarts jackstay."""
        wait_for("the node to be Ready", lambda: self.ready_since(0), 60)
        for what in order:
            self.kill(what)
            killed = time.time()
            time.sleep(0.5)  # The next component sees this one dead.
        if "kubelet" in order:
            self.node.kubelet.start()
        if "apiservers" in order:
            for apiserver in self.rig.apiservers.values():
                apiserver.start(wait=False)
        wait_for(f"the node to be Ready after {order}", lambda: self.ready_since(killed), bound(30))
        within(self, f"killed {', then '.join(order)}: node Ready again", time.time() - killed, "s", 30)
        self.assertEqual(len(pids_of()), 1)

    def test_6_killed_in_any_order_recovers(self):
        """The short form has two of the six orders: each other component once before and once after jackstay."""
        orders = list(itertools.permutations(("kubelet", "jackstay", "apiservers")))
        for order in orders if LONG else [orders[0], orders[5]]:
            self.kill_in_order(order)
        for one in ("kubelet", "jackstay", "apiservers") if LONG else ():
            self.kill_in_order((one,))

    def test_7_passthrough_manifest_replaces_the_first(self):
        """The L4 manifest replaces the L7 one: no root, no key, and kubelet verifies the apiserver's certificate."""
        before = pids_of()
        sh("install", "-d", "-m", "0755", "-o", "65532", "-g", "65532", "/var/lib/jackstay")
        write_config(self.rig, "passthrough")
        install_manifest("jackstay-l4.yaml")
        began = time.time()
        # One look at a time: the old process may end between two of them.
        wait_for("the other pod", lambda: (now := pids_of()) != before and len(now) == 1, 60)
        wait_for("the node to be Ready", lambda: self.ready_since(began), 60)
        log(f"static pod replaced: next lease renewal after {time.time() - began:.1f} s")
        pid, = pids_of()
        process_status = Path(f"/proc/{pid}/status").read_text()
        self.assertRegex(process_status, r"Uid:\t65532\t65532\t65532\t65532\nGid:\t65532")
        self.assertRegex(process_status, r"CapPrm:\t0{16}\n(.*\n)*CapBnd:\t0{16}\n")
        # The lease may have been renewed through the old pod while it was ending.
        wait_for("it to serve", lambda: status()["listeners"][0]["mode"] == "passthrough", 20)
        for order in itertools.permutations(("kubelet", "jackstay", "apiservers")) if LONG else [("apiservers", "jackstay", "kubelet")]:
            self.kill_in_order(order)


class Service(RigCase, unittest.TestCase):
    """The systemd units under a real systemd."""

    UNIT = DEPLOY / "systemd/jackstay.service"
    TEMPLATES = sorted((DEPLOY / "systemd").glob("*@.service"))

    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        write_config(cls.rig, "terminate", [cls.rig.admin_cert])
        # Shorter than in the unit, to shorten the tests.
        cls.systemd = Systemd(cls.rig, cls.UNIT, f"WatchdogSec={WATCHDOG}", templates=cls.TEMPLATES).start()

    @classmethod
    def tearDownClass(cls):
        cls.systemd.stop()

    def setUp(self):
        self.rig.recover()
        self.api = self.rig.api(SERVER, cert=self.rig.admin_cert, timeout=5)

    def tearDown(self):
        self.rig.recover()
        self.assertNotIn("panicked", self.systemd.log.read_text())

    def start(self):
        """Starts the unit; when systemd reports it as started, its listeners must accept connections at once."""
        begun = time.monotonic()
        done = self.systemd.ctl("restart", self.UNIT.name)
        took = time.monotonic() - begun
        self.assertEqual(done.returncode, 0, f"{done.stderr}{self.systemd.logs()}")
        try:
            self.assertEqual(admin("/livez"), "ok\n")
            socket.create_connection(("127.0.0.1", 7443), 5).close()
        except OSError as error:
            self.fail(f"{error}\n{self.systemd.logs()}")
        return took

    def served(self):
        return self.api.get("/api/v1/nodes?limit=1").code == 200

    def test_1_unit_files_are_valid_and_confined(self):
        """systemd-analyze accepts every setting and rates the exposure as low."""
        for unit in (self.UNIT, *self.TEMPLATES):
            verified = self.systemd.inside("systemd-analyze", "verify", "--man=no", self.systemd.units / unit.name)
            self.assertEqual((verified.returncode, verified.stderr), (0, ""), unit.name)
        analysis = self.systemd.inside("systemd-analyze", "--no-pager", "security", self.UNIT.name)
        log(analysis.stdout.strip().splitlines()[-1])
        exposure = float(re.search(r"Overall exposure level for \S+: ([0-9.]+)", analysis.stdout)[1])
        self.assertLess(exposure, 2.0)

    def test_2_unit_is_active_when_it_serves(self):
        log(f"started in {self.start():.1f} s")
        wait_for("a request through it", self.served, 10)
        process_status = Path(f"/proc/{self.systemd.main_pid()}/status").read_text()
        self.assertRegex(process_status, r"CapPrm:\t0{16}\n(.*\n)*CapBnd:\t0{16}\n")
        self.assertRegex(process_status, r"NoNewPrivs:\t1\nSeccomp:\t2\n")

    def test_3_unit_starts_without_apiservers(self):
        """Units that are ordered after jackstay, such as kubelet, start although no apiserver is reachable."""
        for address in ADDRESSES.values():
            self.rig.faults.drop_address(address)
        log(f"started in {self.start():.1f} s without an apiserver")
        self.rig.recover()
        wait_for("a request through it", self.served, 20)

    def test_4_killed_process_is_restarted(self):
        self.start()
        before = self.systemd.main_pid()
        os.kill(before, signal.SIGKILL)
        begun = time.monotonic()
        wait_for("another process", lambda: self.systemd.main_pid() != before and self.served(), 20)
        record("unit killed: served again", time.monotonic() - begun, "s")

    def test_5_watchdog_restarts_a_stopped_process(self):
        """The watchdog kills a process whose event loops stopped."""
        self.start()
        before = self.systemd.main_pid()
        os.kill(before, signal.SIGSTOP)
        begun = time.monotonic()
        wait_for("another process", lambda: self.systemd.main_pid() != before and self.served(), 40)
        self.assertEqual(self.systemd.show("NRestarts"), "1")
        log(f"stopped process: served again after {time.monotonic() - begun:.1f} s, including the watchdog timeout of {WATCHDOG} s")

    def test_6_stop_exits_successfully(self):
        self.start()
        done = self.systemd.ctl("stop", self.UNIT.name)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((self.systemd.show("Result"), self.systemd.show("ExecMainStatus"), pids_of()), ("success", "0", []))

    def test_7_reload_and_takeover_without_restart(self):
        """The two commands in the unit's comment: neither restarts the unit, and every request is served."""
        self.start()
        wait_for("a request through it", self.served, 10)
        before = self.systemd.main_pid()
        done = self.systemd.ctl("reload", self.UNIT.name)
        self.assertEqual((done.returncode, self.systemd.main_pid()), (0, before), done.stderr)
        os.kill(self.systemd.main_pid(), signal.SIGUSR2)
        requests = 0

        def replaced():
            nonlocal requests
            self.assertTrue(self.served())
            requests += 1
            now = pids_of()
            return len(now) == 1 and now != [before]

        wait_for("the new process alone", replaced, 40)
        log(f"takeover: {requests} requests during it")
        after = self.systemd.main_pid()
        # The new process feeds the watchdog.
        fed = self.systemd.show("WatchdogTimestampMonotonic")
        wait_for("a watchdog notification", lambda: self.systemd.show("WatchdogTimestampMonotonic") != fed, WATCHDOG)
        self.assertEqual((self.systemd.show("ActiveState"), self.systemd.show("NRestarts")), ("active", "0"))
        self.assertEqual(self.systemd.main_pid(), after)
        self.assertTrue(self.served())

    def test_8_passthrough_runs_with_dynamic_user(self):
        """DynamicUser=yes, as the unit's comment says for a configuration without identities."""
        write_config(self.rig, "passthrough")
        self.systemd.drop_in("user", "DynamicUser=yes")
        self.addCleanup(self.systemd.drop_in, "user", "")
        self.start()
        wait_for("a request through it", self.served, 10)
        process_status = Path(f"/proc/{self.systemd.main_pid()}/status").read_text()
        self.assertNotRegex(process_status, r"Uid:.*\t0\b")

    def test_9_address_unit_adds_and_removes_addresses(self):
        """The address unit adds an address to the node and removes it."""
        units = [f"jackstay-address@{address}.service" for address in (LOAD_BALANCER, LOAD_BALANCER6)]
        self.addCleanup(self.systemd.ctl, "stop", *units)

        def here():
            return [address for address in (LOAD_BALANCER, LOAD_BALANCER6) if f" {address}/" in sh("ip", "-o", "addr", "show", "dev", "jackstay0", check=False).stdout]
        for _ in range(4):  # Both at the same time, as at boot: they share an interface.
            self.systemd.ctl("start", *units, check=True)
            self.assertEqual(here(), [LOAD_BALANCER, LOAD_BALANCER6])
            self.systemd.ctl("stop", *units, check=True)
            self.assertEqual(here(), [])
        self.systemd.ctl("start", *units, check=True)
        self.systemd.ctl("stop", units[0], check=True)
        self.assertEqual(here(), [LOAD_BALANCER6])
        self.systemd.ctl("stop", units[1], check=True)
        self.assertNotEqual(sh("ip", "link", "show", "jackstay0", check=False).returncode, 0, "the interface was not removed")

    def test_9_intercept_unit_follows_jackstay(self):
        """The interception starts and stops with jackstay, and a takeover does not interrupt it."""
        unit, divert_mark, table = "jackstay-intercept@lb-tproxy.service", "0x3070", 777
        write_config(self.rig, "passthrough", listener={"transparent": True})
        Path("/etc/jackstay/intercept-lb-tproxy").write_text(
            f"VALUES=lb4={LOAD_BALANCER} lb6={LOAD_BALANCER6} lb_port={PORT} listener_port=7443 divert_mark={divert_mark} table={table}\n")
        # Routes to the addresses, as on any node; no host has them.
        for family, kind, what in (("-4", "route", f"{LOAD_BALANCER}/32"), ("-6", "addr", "fd00:98::1/64"), ("-6", "route", f"{LOAD_BALANCER6}/128")):
            sh("ip", family, kind, "replace", what, "dev", "rig0", *["nodad"] * (kind == "addr"))
            self.addCleanup(sh, "ip", family, kind, "del", what, "dev", "rig0")
        # `systemctl enable`, and the drop-in from the unit's comment.
        wants = self.systemd.units / f"{self.UNIT.name}.wants"
        wants.mkdir()
        (wants / unit).symlink_to("../jackstay-intercept@.service")
        self.addCleanup(self.systemd.ctl, "stop", self.UNIT.name)
        self.addCleanup((wants / unit).unlink)
        self.systemd.drop_in("capability", "CapabilityBoundingSet=CAP_NET_ADMIN\nAmbientCapabilities=CAP_NET_ADMIN")

        def answered(address):
            return self.rig.api(f"https://{address}:{PORT}", cert=self.rig.admin_cert, timeout=3).get("/readyz").code == 200

        def is_intercepted():
            return self.systemd.show("ActiveState", unit) == "active" and answered(LOAD_BALANCER) and answered(f"[{LOAD_BALANCER6}]")

        def leftovers():
            rules = [line for family in ("-4", "-6") for line in sh("ip", family, "rule").stdout.splitlines() if divert_mark in line]
            routes = [sh("ip", family, "route", "show", "table", table, check=False).stdout for family in ("-4", "-6")]
            return rules, "".join(routes), "jackstay_lb" in sh("nft", "list", "tables").stdout

        self.systemd.ctl("restart", self.UNIT.name, check=True)
        wait_for("the interception", is_intercepted, 20)
        # A takeover does not restart the unit.
        before, since = self.systemd.main_pid(), self.systemd.show("ActiveEnterTimestampMonotonic", unit)
        os.kill(self.systemd.main_pid(), signal.SIGUSR2)
        wait_for("the new process alone", lambda: len(now := pids_of()) == 1 and now != [before], 40)
        self.assertTrue(is_intercepted())
        self.assertEqual(self.systemd.show("ActiveEnterTimestampMonotonic", unit), since)
        # When jackstay is killed, the unit stops, and starts again with jackstay.
        before = self.systemd.main_pid()
        os.kill(before, signal.SIGKILL)
        wait_for("another process", lambda: len(now := pids_of()) == 1 and now != [before], 20)
        wait_for("the interception again", is_intercepted, 20)
        self.assertNotEqual(self.systemd.show("ActiveEnterTimestampMonotonic", unit), since, "the unit was not restarted with jackstay")
        # When jackstay is stopped, no rule and no route remains, whatever values it was installed with.
        self.assertEqual([len(part) > 0 for part in leftovers()[:2]], [True, True])
        self.systemd.ctl("stop", self.UNIT.name, check=True)
        self.assertEqual((self.systemd.show("ActiveState", unit), self.systemd.show("Result", unit)), ("inactive", "success"))
        self.assertEqual(leftovers(), ([], "", False))
        # Installing the other variant for an address replaces this one completely.
        install("lb-tproxy", lb4=LOAD_BALANCER, divert_mark=divert_mark, table=table)
        install("lb-redirect", lb4=LOAD_BALANCER)
        rules, routes, rest = leftovers()
        remove("lb-redirect")
        self.assertEqual((rules, routes, rest), ([], "", True))


@covers("kube-proxy: iptables", "kube-controller-manager: leader election, a ServiceAccount for each controller")
class Controllers(RigCase, unittest.TestCase):
    """kube-controller-manager and kube-proxy, whose caches depend on watches, notice none of the faults."""

    SECONDS = 600 if LONG else 30  # The short form has at least four faults: one of each kind.

    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        rig = cls.rig
        kcm = rig.pki.issue("controllers-kcm", "/CN=system:kube-controller-manager")
        proxy = rig.pki.issue("controllers-proxy", "/CN=system:kube-proxy")
        cls.jackstay = Jackstay(rig, [kcm, proxy], log_name="jackstay-controllers").start()
        rig.controller.stop(signal.SIGKILL)
        rig.control.request("POST", "/api/v1/nodes", {"metadata": {"name": "proxied"}, "status": {
            "addresses": [{"type": "InternalIP", "address": NODE_IP}]}})
        cls.kcm = rig.run("kube-controller-manager", [
            RELEASE.program("kube-controller-manager"), *RELEASE.controller_manager, f"--kubeconfig={rig.kubeconfig('controllers-kcm', cls.jackstay.server, cert=kcm)}",
            f"--service-account-private-key-file={rig.sa_key}", f"--root-ca-file={rig.pki.ca}",
            # As with kubeadm: every controller has its own token, and the manager must not lose its lease. Its
            # renewal is a write: in flight to a stopped apiserver, it waits.
            "--use-service-account-credentials", "--leader-elect=true", "--leader-elect-lease-duration=40s",
            "--leader-elect-renew-deadline=30s", "--bind-address=127.0.0.1",
            "--v=2", "--vmodule=reflector=4"], env=DETECTORS)
        cls.proxy = rig.run("kube-proxy", [
            RELEASE.program("kube-proxy"), f"--kubeconfig={rig.kubeconfig('controllers-proxy', cls.jackstay.server, cert=proxy)}",
            "--hostname-override=proxied", "--proxy-mode=iptables", "--cluster-cidr=10.97.0.0/16", "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
            "--healthz-bind-address=127.0.0.1:10256", "--metrics-bind-address=127.0.0.1:10249", "--v=2", "--vmodule=reflector=4"])
        cls.namespace = rig.load_namespace()

    @classmethod
    def tearDownClass(cls):
        cls.kcm.stop(signal.SIGKILL)
        cls.proxy.stop(signal.SIGKILL)
        cls.jackstay.process.stop(signal.SIGKILL)
        cls.rig.recover()
        cls.rig.controller.start()

    def create_objects(self, number):
        """Creates a service, for which kube-proxy writes rules, and a deployment, for which controllers create pods."""
        control, namespace, labels = self.rig.control, self.namespace, {"app": f"app-{number}"}
        control.must("POST", f"/api/v1/namespaces/{namespace}/services", {
            "metadata": {"name": f"service-{number}"},
            "spec": {"clusterIP": f"10.96.0.{10 + number}", "selector": labels, "ports": [{"port": 80}]}})
        control.must("POST", f"/apis/apps/v1/namespaces/{namespace}/deployments", {
            "metadata": {"name": f"app-{number}"}, "spec": {
                "replicas": 2, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
                    "containers": [{"name": "c", "image": "jackstay.test/none"}]}}}})

    def wait_for_objects(self, number):
        pods = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app%3Dapp-{number}"
        wait_for(f"the pods of deployment {number}", lambda: len(self.rig.control.get(pods).json["items"]) == 2, 60)
        wait_for(f"the rules of service {number}", lambda: f" 10.96.0.{10 + number}/32 " in sh("iptables-save").stdout, 60)

    @staticmethod
    def lists(process):
        return re.findall(r'reflector\.go:\d+\] "?Listing and watching"? (?:type=)?(\S+)', process.logfile.read_text(errors="replace"))

    def test_faults_break_no_watch_and_cause_no_list(self):
        both = (self.kcm, self.proxy)
        wait_for("the controller manager to lead", lambda: self.kcm.require_running() or "uccessfully acquired lease" in self.kcm.logfile.read_text(), 60)
        self.create_objects(0)
        self.wait_for_objects(0)
        # When all caches are filled, no further list is expected.
        last = {}

        def settled():
            now = {p.name: len(self.lists(p)) for p in both}
            same = now == last
            last.update(now)
            return same
        wait_for("the caches to fill", settled, 60, pause=3)
        self.assertGreater(min(last.values()), 1, last)
        offsets = {p.name: p.logfile.stat().st_size for p in both}
        rig, jackstay, faults = self.rig, self.jackstay, self.rig.faults
        kinds = itertools.cycle([
            ("flows dropped in input", lambda: faults.drop_flows(jackstay.pid, hooks=("input",))),
            ("SIGKILL of a", lambda: rig.apiservers["a"].kill()),
            ("b unreachable", lambda: faults.drop_address(ADDRESSES["b"])),
            ("SIGSTOP of b", lambda: rig.apiservers["b"].pause()),
            ("flows dropped in output", lambda: faults.drop_flows(jackstay.pid, hooks=("output",))),
            ("SIGKILL of b", lambda: rig.apiservers["b"].kill()),
            ("a unreachable", lambda: faults.drop_address(ADDRESSES["a"])),
            ("SIGSTOP of a", lambda: rig.apiservers["a"].pause()),
        ])
        begun, number = time.monotonic(), 0
        while number < 4 or time.monotonic() < begun + self.SECONDS:
            name, fault = next(kinds)
            log(f"    {name}")
            fault()
            number += 1
            self.create_objects(number)
            time.sleep(7 if "SIGSTOP" in name else 3)  # A stopped process is detected after 5 s.
            rig.recover()
            self.wait_for_objects(number)
        errors = [line for p in both for line in client_errors(p, WATCH_ERRORS, since=offsets[p.name])]
        log(f"{number} faults in {time.monotonic() - begun:.0f} s: {len(errors)} watch errors; "
            + ", ".join(f"{p.name}: {last[p.name]} caches, {len(self.lists(p)) - last[p.name]} lists after that" for p in both))
        # A kube-apiserver that has just started refuses the first watch of a new cache until it knows what its etcd
        # supports (RequestWatchProgress). The client then lists: a cache that starts late, after a fault, is no defect.
        late = [line for line in errors if "RequestWatchProgress is disabled" in line]
        if errors != late:
            for line in log_lines(jackstay.process, "WARN|ERROR|watch ended"):
                log(f"    {line}")
            for name, apiserver in rig.apiservers.items():  # a cache that etcd has closed begins anew
                for line in log_lines(apiserver.process, "watch chan error|unexpected watch close|forcing .*resync|[Tt]erminating all watchers")[-10:]:
                    log(f"    {name}: {line}")
        self.assertEqual([line for line in errors if line not in late], [])
        lists = {p.name: self.lists(p)[last[p.name]:] for p in both}
        expected = {p.name: sum(line.startswith(f"{p.name}: ") for line in late) for p in both}
        self.assertEqual({name: len(kinds) for name, kinds in lists.items()}, expected, lists)
        self.assertEqual([p.running for p in both], [True, True])
        self.assertNotIn("panicked", jackstay.process.logfile.read_text(errors="replace"))


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite()
    for case in (Manifests, StaticPod, Service, Controllers):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
