"""jackstay (mode: terminate) between real clients and three real apiservers.

Times are figures (see figures.py), counts are exact. JACKSTAY_REAL_LONG=1 adds the long forms, which README.md lists.
"""

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import unittest
import uuid
from pathlib import Path

from cases import StoppedOnExit, StoryCase, KubectlCases, PodCases, RigCase, require_running, each_transport, collect_lines, long_form
from figures import LONG, bound, record, within
from kubernetes import RELEASE
from leases import ClientGoLeaders, Renewals
from rig import (ADDRESSES, PORT, TOKEN, TOKEN_USER, WATCH_ERRORS, Jackstay, Load, NodeMonitor, Pki, Process, RealNode, client_errors, log, log_lines, summary,
                 swap_symlink, wait_for)


class JackstayCase(StoryCase, RigCase):
    @classmethod
    def prepare(cls):
        cls.jackstay = cls.rig.start_jackstay()
        cls.server = cls.jackstay.server

    def setUp(self):
        self.rig.recover()
        self.pid = self.jackstay.pid
        wait_for("jackstay to be ready", lambda: self.jackstay.admin("/readyz").code == 200, 20)

    def tearDown(self):
        self.rig.recover()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())
        self.assertEqual(self.jackstay.pid, self.pid)
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))


class Clients(JackstayCase, PodCases, KubectlCases, unittest.TestCase):
    """Everything that works directly works through jackstay: kubectl and kubelet."""

    BLACKOUT = 10 if LONG else 4  # seconds; tunnel_dead_after is 20 s

    @each_transport
    def test_exec_continues_after_a_blackout(self, variant):
        """A tunnel cannot move to another connection: it continues with TCP's next retransmission after the fault."""
        echo = ["exec", "-i", "tool", "-c", "web", "--", "sh", "-c", "while read line; do echo $line; done"]
        with StoppedOnExit(self.rig.kubectl_start(self.admin, *echo, variant=variant, stdin=subprocess.PIPE)) as child:
            def send(word):
                child.stdin.write(f"{word}\n")
                child.stdin.flush()
            lines = []
            collect_lines(child, lines)
            send("before")
            wait_for("the first answer", lambda: require_running(child) or len(lines) == 1, 15)
            self.rig.faults.drop_flows(self.jackstay.pid)
            began = time.monotonic()
            send("during the blackout")
            wait_for("the end of the blackout", lambda: require_running(child) or time.monotonic() > began + self.BLACKOUT, self.BLACKOUT + 5)
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault dropped no packet")
            self.rig.recover()
            wait_for("the second answer", lambda: require_running(child) or len(lines) == 2, 2 * self.BLACKOUT)
            within(self, f"kubectl exec, all packets dropped for {self.BLACKOUT} s: answer", lines[1][0] - began, "s", 2.5 * self.BLACKOUT)
            send("after")
            wait_for("the third answer", lambda: require_running(child) or len(lines) == 3, 15)
            self.assertEqual([line for _, line in lines], ["before", "during the blackout", "after"])


class Identity(JackstayCase, unittest.TestCase):
    def refusal(self, cert):
        answer = self.rig.api(self.server, cert=cert).get("/api/v1/nodes")
        self.assertEqual(answer.code, 401, answer)
        self.assertEqual(answer.json["kind"], "Status")
        return answer.json["message"]

    def test_unknown_subject_is_refused(self):
        message = self.refusal(self.rig.developer_cert)
        self.assertIn("identities", message)
        self.assertIn("bob", message)

    def test_unknown_ca_is_refused(self):
        pki = self.rig.pki
        untrusted = pki.issue("untrusted", "/O=system:masters/CN=rig-admin", ca=(pki.untrusted_ca, pki.untrusted_ca_key))
        log(f"unknown CA: {self.refusal(untrusted)}")

    def test_expired_certificate_is_refused(self):
        expired = self.rig.pki.issue("expired", "/O=system:masters/CN=rig-admin", days=0)
        time.sleep(1.5)
        log(f"expired: {self.refusal(expired)}")

    def test_certificate_wins_over_token(self):
        ident = str(uuid.uuid4())
        answer = self.rig.api(self.server, cert=self.rig.admin_cert, token=TOKEN).get("/api/v1/nodes?limit=1", headers={"Audit-ID": ident})
        self.assertEqual(answer.code, 200, answer)
        self.assertEqual(self.rig.audited_user(ident)[0], "rig-admin")

    def test_invalid_token_gets_401(self):
        answer = self.rig.api(self.server, token="wrong").get("/api/v1/nodes")
        self.assertEqual((answer.code, answer.json["kind"]), (401, "Status"))

    def test_service_account_token_keeps_its_user(self):
        made = self.rig.control.must("POST", "/api/v1/namespaces/default/serviceaccounts/default/token",
                                     {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        ident = str(uuid.uuid4())
        self.rig.api(self.server, token=made["status"]["token"]).get("/api", headers={"Audit-ID": ident})
        name, groups, _ = self.rig.audited_user(ident)
        self.assertEqual(name, "system:serviceaccount:default:default")
        self.assertIn("system:serviceaccounts", groups)

    def test_concurrent_clients_keep_their_identities(self):
        """Clients with different credentials send requests concurrently; each request has its client's user."""
        nodes = [f"hollow-{i}" for i in (1, 2, 3)]
        callers = {
            "rig-admin": {"cert": self.rig.admin_cert}, TOKEN_USER[0]: {"token": TOKEN}, "system:anonymous": {},
            "load": {"cert": self.rig.load_cert}, **{f"system:node:{n}": {"cert": self.rig.node_cert(n)} for n in nodes}}
        expected = {}

        def call(name):
            api = self.rig.api(self.server, **callers[name])
            for _ in range(15):
                ident = str(uuid.uuid4())
                expected[ident] = name
                api.get("/api", headers={"Audit-ID": ident}, keep=True)
        with concurrent.futures.ThreadPoolExecutor(2 * len(callers)) as pool:
            list(pool.map(call, list(callers) * 2))

        def seen():
            return {e["auditID"]: e["user"]["username"] for e in self.rig.audit(lambda e: e["auditID"] in expected)}
        wait_for("all requests in the audit logs", lambda: len(seen()) == len(expected), 10)
        self.assertEqual(seen(), expected)


class LoadCase(JackstayCase):
    """Base of tests with the load generator: what its clients may notice."""

    FAULTY = "ab"  # the apiservers that faults affect; c is the rig's
    LOAD_WATCHES = 20  # of the load generator

    def load(self, seconds, server=None, **flags):
        flags.setdefault("quiet_every", "2s")
        load = Load(self.rig, server or self.server, seconds, **flags)
        self.addCleanup(load.kill)
        self.running = load
        self.faults_at = []  # (time before, time after) of each injected fault
        return load

    def inject(self, fault):
        begun = time.time()
        fault()
        self.faults_at.append((begun, time.time()))
        if time.time() - begun > 0.5:  # for example until a process has exited
            log(f"    injecting the fault took {time.time() - begun:.1f} s")

    def busiest_apiserver(self):
        """The one of the apiservers with faults that currently completes more of the load's requests."""
        shares = {name: self.rig.requests_answered(name, self.running.agent) for name in self.FAULTY}
        name = max(self.FAULTY, key=lambda n: shares[n])
        log(f"    the fault affects {name}; requests answered in the last two seconds: {shares}")
        return {**self.rig.apiservers, **self.rig.extra}[name]

    def run_fault(self, what, fault, seconds=8, counted=True, jackstay=None, meanwhile=None, quiet=False, lasting=False,
                  flags=None, renewal=1, busy=0.6, delay=None, **limits):
        """Injects a fault beside load and renewals of leases, and checks the report of the load. The fault ends after
        `seconds`; a `lasting` one ends after the load. `flags` are those of the load generator; `renewal` is the promised
        time of a renewal in seconds; `delay` that of an event of a quiet watch (default: twice `busy`)."""
        jackstay = jackstay or self.jackstay
        load = self.load(seconds + 7, jackstay.server, **(flags or {}))
        renewals = Renewals(self, jackstay.server, "c")
        load.until(3)
        since = self.log_size(jackstay)
        self.inject(fault)
        load.until(3 + seconds)
        if counted:
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault dropped no packet")
        if meanwhile:
            meanwhile()
        if not lasting:
            self.rig.recover()
        report = load.finish()
        slowest = renewals.finish(what)
        self.rig.recover()
        within(self, f"{what}: slowest renewal of a lease", slowest, "s", renewal)
        self.check_story(what, since, jackstay, quiet=quiet)
        self.check_report(what, load, report, busy=busy, delay=delay or 2 * busy, **limits)

    def may_have_been_in_flight(self, failure, grace):
        """Whether the request was in flight during a fault, or sent before jackstay can have suspected its connection."""
        end = failure["unix"]
        return any(end - failure["latency_ms"] / 1000 <= after + grace and end >= before for before, after in self.faults_at)

    def check_report(self, what, load, report, writes_may_fail=True, slowest_read=None, grace=None, busy=2.5, delay=None):
        """Checks that reads and watches notice nothing, and that only writes in flight fail. Times are promises in
        seconds; `grace` is the time until jackstay suspects a connection, `busy` the silence of a busy watch, `delay` that
        of an event of a quiet one (default: one second more)."""
        log(f"{what}: {summary(report)}")
        failures = [f for f in report["failures"] if f["kind"] != "direct"]
        requests = [f for f in failures if f["kind"] != "watch"]
        with self.subTest(f"{what}: each failure is a Status"):
            # After the response head was forwarded, a loss resets the stream. The apiserver's own 504 has a body
            # with status "Failure" but without kind "Status".
            self.assertEqual([f for f in requests if not f["is_status"] and not 200 <= f.get("code", 0) < 300
                              and not (f.get("code") == 504 and '"status":"Failure"' in f.get("message", ""))], [])
        with self.subTest(f"{what}: no failed write asks client-go to retry"):
            self.assertEqual([f for f in requests if f["kind"] == "write" and f.get("code") == 502 and f.get("retry_after")], [])
        with self.subTest(f"{what}: each write is applied at most once"):
            self.assertEqual((report["applied_twice"], load.sent_twice()), ([], []))
        with self.subTest(f"{what}: no read fails"):
            self.assertEqual([f for f in requests if f["kind"] == "read"], [])
        with self.subTest(f"{what}: only writes in flight fail"):
            if grace is None:
                # A read waits until jackstay leaves the apiserver, so a write may have been sent there as late. The time
                # itself is checked below.
                grace = max(slowest_read or 0, report["requests"]["read"]["slowest_ms"] / 1000 if slowest_read else 0)
            writes = [f for f in requests if f["kind"] == "write"]
            self.assertEqual([f for f in writes if not writes_may_fail or not self.may_have_been_in_flight(f, grace)], [], f"faults at {self.faults_at}")
        if slowest_read:
            with self.subTest(f"{what}: no read is slow"):
                reads = report["requests"]["read"]
                for slow in (one for one in reads["slowest"] if one["latency_ms"] > slowest_read * 1000):
                    log(f"    {slow['op']} {slow['path']} ended at {slow['unix']:.3f} after {slow['latency_ms']:.0f} ms; the apiservers: {self.rig.audit_summary(slow['audit_id'])}")
                within(self, f"{what}: slowest read", reads["slowest_ms"], "ms", slowest_read * 1000)
        watches = report["watches"]
        with self.subTest(f"{what}: events"):
            self.assertEqual((watches["lost"], watches["duplicated"], watches["backwards"], watches["relists"]), (0, 0, 0, 0),
                             [w for w in report["each_watch"] if w["lost"] or w["duplicated"] or w["backwards"] or w["relists"]])
        with self.subTest(f"{what}: no watch breaks"):
            self.assertEqual((watches["broken"], watches["refused"]), (0, 0), [f for f in failures if f["kind"] == "watch"])
        if busy:
            with self.subTest(f"{what}: no busy watch stalls"):
                within(self, f"{what}: longest silence of a busy watch", watches["busy_silence_ms"], "ms", busy * 1000)
            with self.subTest(f"{what}: no quiet watch is delayed"):
                within(self, f"{what}: delay of a quiet watch", watches["quiet_delay_ms"], "ms", (delay or busy + 1) * 1000)


class Faults(LoadCase, unittest.TestCase):
    """One fault after another; neither the load generator nor the hollow and real nodes may notice."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.server)
        cls.rig.start_hollow(cls.server)
        cls.names = [n.name for n in cls.rig.hollow] + [RealNode.NAME]
        for name in cls.names:
            wait_for(f"{name} to be Ready", lambda: cls.rig.ready(name), 60)
        cls.watch = NodeMonitor(cls.rig, cls.names)
        cls.watch.start()
        cls.since = time.monotonic()
        cls.kubelets = [node.process for node in cls.rig.hollow] + [cls.rig.node.kubelet]
        cls.log_offsets = cls.log_sizes()

    @classmethod
    def log_sizes(cls):
        return {process.name: process.logfile.stat().st_size for process in cls.kubelets}

    def kubelet_errors(self, since, what=None):
        """client-go errors in kubelets' logs after the offsets that `log_sizes` returned."""
        options = {"what": what} if what else {}
        return [line for process in self.kubelets for line in client_errors(process, since=since[process.name], **options)]

    @classmethod
    def tearDownClass(cls):
        cls.watch.stop()
        cls.rig.stop_hollow()

    def tearDown(self):
        super().tearDown()
        if self.watch.is_alive():
            self.assertEqual(self.watch.not_ready, [])

    @long_form("test_many_faults covers both hooks")
    def test_established_flows_dropped(self):
        """New connections work; the existing ones never receive a packet again."""
        for hook in ("input", "output"):
            self.run_fault(f"flows dropped in {hook}", lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,)), slowest_read=0.25)

    @long_form("test_many_faults covers both directions")
    def test_established_flows_dropped_in_one_direction(self):
        for direction, hook in [("from", "input"), ("to", "input"), ("from", "output"), ("to", "output")]:
            self.run_fault(f"flows dropped in {hook}, {direction} the apiservers",
                        lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,), directions=(direction,)), slowest_read=0.25)

    def test_apiserver_unreachable(self):
        self.run_fault("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(self.busiest_apiserver().address), slowest_read=0.25)

    def test_apiserver_killed(self):
        self.run_fault("SIGKILL of one", lambda: self.busiest_apiserver().kill(), counted=False, slowest_read=0.1, busy=0.15)

    def test_apiserver_stopped(self):
        self.run_fault("SIGSTOP of one", lambda: self.busiest_apiserver().pause(), seconds=12, counted=False, renewal=4.5, slowest_read=0.25, delay=1.5)

    @long_form("test_many_faults has the same loss, and the simulator's scenario `loss` its ejections")
    def test_packet_loss(self):
        """5 % packet loss in both directions ejects no endpoint, fails no request, and hardly opens a shadow."""
        seconds = 600
        ejections = self.jackstay.total("jackstay_ejections_total")
        before = self.jackstay.total("jackstay_watch_shadow_duration_seconds_sum")
        self.run_fault("5 % loss", lambda: self.rig.faults.drop_randomly(5), seconds=seconds, writes_may_fail=False, quiet=True, slowest_read=0.5, busy=0.7)
        self.assertEqual(self.jackstay.total("jackstay_ejections_total"), ejections)
        shadows = self.jackstay.total("jackstay_watch_shadow_duration_seconds_sum") - before
        within(self, "5 % loss: shadows, of the time of the load's watches", 100 * shadows / (self.LOAD_WATCHES * seconds), "%", 1)

    def test_apiserver_without_etcd_loses_its_watches(self):
        """An apiserver without etcd answers PINGs, but neither requests nor watches make progress: jackstay moves
        the watches, and clients notice nothing."""
        def quick(config):
            config["upstreams"][0]["health"] = {"readyz": {"path": RELEASE.etcd_check, "interval": "1s", "fall": 2}}
        # Without c: clients that begin together may all watch at one apiserver, and this one must be a or b.
        jackstay = Jackstay(self.rig, [self.rig.admin_cert, self.rig.load_cert], [f"{ADDRESSES[name]}:{PORT}" for name in self.FAULTY],
                            adapt=quick, log_name="jackstay-readyz", port=7444, admin=9644)
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        victims = []

        def lose_etcd():
            watches = {e["address"].rsplit(":", 1)[0]: e["watches"] for u in jackstay.status()["upstreams"] for e in u["endpoints"]}
            name = max(self.FAULTY, key=lambda n: watches[ADDRESSES[n]])
            log(f"    the fault affects {name}; watches: {watches}")
            self.assertGreater(watches[ADDRESSES[name]], 0)
            victims.append(self.rig.apiservers[name])
            self.rig.faults.drop_etcd(name)

        def degraded():
            states = [k for k, v in jackstay.metrics().items() if k.startswith("jackstay_endpoint_state") and v and "degraded" in k]
            self.assertEqual([victims[0].address in k for k in states], [True], states)
        # When etcd returns, the apiserver is ready at once by a new connection, and a write on one of its old ones gets
        # 500 `connection timed out` 10 s after the cut. So etcd stays away.
        self.run_fault("the readiness check fails and writes hang on one", lose_etcd, jackstay=jackstay, meanwhile=degraded, lasting=True, renewal=4.5, slowest_read=0.25, busy=4, delay=4)
        self.assertNotIn("panicked", jackstay.process.logfile.read_text(errors="replace"))

    def test_rolling_restarts(self):
        """Every apiserver is restarted in turn, gracefully and then by SIGKILL. The short form has one restart of each
        kind, because the apiservers differ only in their other clients."""
        turns = [(name, graceful) for graceful in (True, False) for name in ADDRESSES]
        turns = turns * 100 if LONG else [("a", True), ("b", False)]
        load = self.load(600 if LONG else 180)
        load.until(2)
        for name, graceful in turns:
            if LONG and time.monotonic() > load.begun + 560:
                break
            log(f"restart of {name}, {'graceful' if graceful else 'killed'}")
            if graceful:
                self.rig.apiservers[name].restart(down=1)
            else:
                self.inject(self.rig.apiservers[name].kill)
                self.rig.apiservers[name].restart(graceful=False, down=1)
            time.sleep(15 if LONG else 3)
        report = load.finish(early=not LONG)
        self.check_report("rolling restarts", load, report, slowest_read=1, grace=0.3, busy=3, delay=4)
        if LONG:
            self.assertGreaterEqual(report["requests"]["read"]["total"] + report["requests"]["write"]["total"], 20000)
            # The controller manager uses only `c`. After restarts of `c` its view can be older than its grace
            # period, and it marks nodes Unknown although they renew their leases. So the leases are checked here.
            within(self, "rolling restarts: longest time between two heartbeats", max(self.watch.longest.values()), "s", 25)
            self.watch.not_ready.clear()

    def change_numbered_objects(self, stop):
        """Creates three objects and returns a function that labels them with increasing numbers until `stop` is set."""
        path = f"/api/v1/namespaces/{self.namespace}"
        self.rig.control.must("POST", f"{path}/configmaps", {"metadata": {"name": "numbered", "labels": {"number": "0"}}})
        self.rig.control.must("POST", f"{path}/pods", {  # The rig has no scheduler, so nothing else changes the pod.
            "metadata": {"name": "numbered", "labels": {"number": "0"}},
            "spec": {"containers": [{"name": "c", "image": "jackstay.test/none"}]}})
        paths = [f"{path}/configmaps/numbered", f"{path}/pods/numbered", f"/api/v1/nodes/{RealNode.NAME}"]

        def change(number):
            for p in paths:
                self.rig.control.must("PATCH", p, {"metadata": {"labels": {"number": str(number)}}}, keep=True,
                                      content_type="application/merge-patch+json")
        change(1)

        def work():
            number = 1
            while not stop.wait(0.3):
                change(number + 1)
                number += 1
            return number
        return work

    @staticmethod
    def numbers(text, form):
        if form == "json":  # kubelet changes the node too: the same number with another version.
            pairs = re.findall(r'"number": "(\d+)".*?"resourceVersion": "(\d+)"', text, re.S)
            return [int(n) for i, (n, version) in enumerate(pairs) if not i or n != pairs[i - 1][0] or version == pairs[i - 1][1]]
        return [int(n) for n in re.findall(r"^numbered .*?(\d+)$", text, re.M)]

    def test_many_faults(self):
        """Watches of kubectl and kubelets continue through twelve kinds of faults (in the long form, twice, and beside leader
        elections). Earlier faults must not delay the detection of the next one."""
        self.namespace = self.rig.load_namespace()
        stop = threading.Event()
        work = self.change_numbered_objects(stop)
        config = self.rig.kubeconfig("many-faults", self.server, cert=self.rig.admin_cert)
        jackstay, faults, rig = self.jackstay, self.rig.faults, self.rig
        kinds = [
            ("flows dropped in input", lambda: faults.drop_flows(jackstay.pid, hooks=("input",))),
            ("SIGKILL", lambda: self.busiest_apiserver().kill()),
            ("5 % loss", lambda: faults.drop_randomly(5)),
            ("flows dropped in output", lambda: faults.drop_flows(jackstay.pid, hooks=("output",))),
            ("SIGSTOP", lambda: self.busiest_apiserver().pause()),
            ("all packets dropped", lambda: faults.drop_address(self.busiest_apiserver().address)),
            ("flows dropped from the apiservers", lambda: faults.drop_flows(jackstay.pid, hooks=("input",), directions=("from",))),
            ("SIGKILL of a", lambda: rig.apiservers["a"].kill()),
            ("SIGKILL and restart of b", lambda: rig.apiservers["b"].restart(graceful=False, down=1)),
            ("flows dropped to the apiservers", lambda: faults.drop_flows(jackstay.pid, hooks=("output",), directions=("to",))),
            ("SIGSTOP of b", lambda: rig.apiservers["b"].pause()),
            ("packets dropped in one direction", lambda: faults.drop_address(self.busiest_apiserver().address, hooks=("input",), directions=("from",))),
        ]
        children = []
        with contextlib.ExitStack() as stack:
            for variant in RELEASE.kubectls:
                for form, argv in (("table", ["configmaps", "-n", self.namespace, "-L", "number"]),
                                   ("table", ["pods", "-n", self.namespace, "-L", "number"]), ("json", ["nodes", "-o", "json"])):
                    child = stack.enter_context(StoppedOnExit(rig.kubectl_start(config, "get", *argv, "--watch", variant=variant)))
                    lines = []
                    children.append((f"kubectl {variant.label} get {argv[0]}", form, child, lines, collect_lines(child, lines)))

            def seen(form, lines):
                return self.numbers("\n".join(line for _, line in list(lines)) + "\n", form)
            wait_for("every kubectl to list", lambda: all(seen(form, lines) for _, form, _, lines, _ in children), 30)
            load = self.load(600, watches=8)
            renewals = Renewals(self, self.server, "c")
            leaders = ClientGoLeaders(self, self.server) if LONG else None
            log_offsets, since, injected = self.log_sizes(), self.log_size(), kinds * (2 if LONG else 1)
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
            stack.callback(stop.set)
            worker = pool.submit(work)
            for name, fault in injected:
                log(f"    {name}")
                self.inject(fault)
                time.sleep(3)
                rig.recover()
                time.sleep(1.5)
            stop.set()
            if leaders:
                leaders.finish("many faults")
            last = worker.result(30)
            report = load.finish(early=True)
            within(self, "many faults: slowest renewal of a lease", renewals.finish("many faults"), "s", 4.5)
            # Some lines are written during the next fault, so only their total is checked.
            self.assertLessEqual(len(log_lines(jackstay.process, r" (WARN|ERROR) ", since)), self.MAX_LINES * len(injected))
            self.check_report("many faults", load, report, slowest_read=0.6, busy=2.5, delay=2.5)
            for name, form, child, lines, pump in children:
                with self.subTest(name):
                    deadline = time.monotonic() + 15
                    while last not in seen(form, lines) and child.poll() is None and time.monotonic() < deadline:
                        time.sleep(0.2)
                    ended = child.poll()
                    child.send_signal(signal.SIGINT)
                    pump.join(10)
                    got, errors = seen(form, lines), child.stderr.read()
                    (rig.dir / f"{name.replace(' ', '-')}.txt").write_text("\n".join(f"{at:.2f} {line}" for at, line in lines))
                    self.assertEqual((ended, errors), (None, ""), f"after {len(got)} events of {last}")
                    self.assertEqual(got, list(range(got[0], last + 1)))
                    log(f"    {name}: {len(got)} events in order")
        watch_errors, all_errors = self.kubelet_errors(log_offsets, WATCH_ERRORS), self.kubelet_errors(log_offsets)
        log(f"    kubelets logged {len(watch_errors)} watch errors, {len(all_errors) - len(watch_errors)} write errors" + "".join(f"\n    {line}" for line in all_errors[:5]))
        self.assertEqual(watch_errors, [])

    def test_zz_nodes_stayed_ready(self):
        """During all faults the nodes stayed Ready, and their heartbeats arrived under their own identities."""
        time.sleep(max(0, 120 - (time.monotonic() - self.since)))
        self.watch.stop()
        log(f"longest time between two heartbeats: {', '.join(f'{n} {t:.1f} s' for n, t in sorted(self.watch.longest.items()))}")
        self.assertGreater(self.watch.polls, 60)
        self.assertEqual(set(self.watch.renewed), set(self.names))
        self.assertEqual(self.watch.not_ready, [])
        # kubelet renews every 10 s, with a jitter of 4 %, and a renewal in flight is settled. The node controller waits 40 s.
        within(self, "all faults: longest time between two heartbeats", max(self.watch.longest.values()), "s", 13)
        nodes = self.rig.audit(lambda e: e["verb"] == "update" and "/leases/" in e["requestURI"] and e["objectRef"]["name"] in self.names)
        self.assertEqual({e["user"]["username"] for e in nodes}, {f"system:node:{n}" for n in self.names})
        self.assertTrue(all("system:nodes" in e["user"]["groups"] for e in nodes))
        # Only writes in flight may fail, and watches that the server itself ended.
        errors = self.kubelet_errors(self.log_offsets)
        log(f"kubelets logged {len(errors)} errors" + "".join(f"\n    {line}" for line in errors[:5]))
        self.assertEqual(self.kubelet_errors(self.log_offsets, WATCH_ERRORS), [])

    def own_503(self):
        """The number of requests to which jackstay itself has answered 503."""
        return sum(v for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_own_errors_total") and 'code="503"' in k)

    def check_outage_in_log(self, since, before):
        """One error about the outage, and one warning about its end, which counts the requests that got 503 since
        there were `before`. Requests of nodes may end a moment later."""
        process = self.jackstay.process
        self.assertEqual(len(log_lines(process, r" ERROR .*no usable endpoint", since)), 1)
        ended = wait_for("the end of the outage in the log", lambda: log_lines(process, r" WARN .*usable again after", since), 15)
        reported = int(re.search(r"meanwhile (\d+) requests? got 503", ended[0])[1])
        self.assertEqual(reported, self.own_503() - before)

    @long_form("test_outage has an outage, and the simulator's scenario `outage` this one")
    def test_zzy_all_apiservers_stopped(self):
        """All apiservers are stopped for 10 s: their kernels answer. Nodes may notice this."""
        self.watch.stop()
        load = self.load(25, direct=None)
        load.until(3)
        since, before = self.log_size(), self.own_503()
        for apiserver in self.rig.apiservers.values():
            apiserver.pause()
        load.until(13)
        self.rig.recover()
        report = load.finish()
        self.check_story("all apiservers stopped for 10 s", since)
        self.check_outage_in_log(since, before)
        log(f"all apiservers stopped for 10 s: {summary(report)}")
        # A write in flight may have been executed, so it waits for the apiserver.
        for kind, promise in (("read", 1500), ("write", 8000)):
            within(self, f"all apiservers stopped: slowest {kind}", report["requests"][kind]["slowest_ms"], "ms", promise)
            self.assertEqual(report["requests"][kind]["failed_without_status"], 0)
        watches = report["watches"]
        self.assertEqual((watches["broken"], watches["lost"], watches["duplicated"], watches["backwards"], watches["relists"]), (0, 0, 0, 0, 0),
                         [f for f in report["failures"] if f["op"] == "broken"])

    @long_form("test_outage has an outage, and the simulator's scenario `outage-killed` this one")
    def test_zzz_all_apiservers_killed(self):
        """All apiservers are down for 10 s. The last test, because nodes may notice this."""
        self.watch.stop()

        def down():
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()
        load = self.load(25, direct=None)
        load.until(3)
        since, before = self.log_size(), self.own_503()
        down()
        load.until(13)
        self.rig.recover()
        report = load.finish()
        self.check_story("all apiservers down for 10 s", since)
        self.check_outage_in_log(since, before)
        log(f"all apiservers down for 10 s: {summary(report)}")
        for kind in ("read", "write"):
            within(self, f"all apiservers down: slowest {kind}", report["requests"][kind]["slowest_ms"], "ms", 1500)
            self.assertEqual(report["requests"][kind]["failed_without_status"], 0)
        # A new apiserver has no watch history, so a watch may end cleanly, and its client lists again.
        watches = report["watches"]
        self.assertEqual((watches["broken"], watches["lost"], watches["duplicated"], watches["backwards"]), (0, 0, 0, 0), [f for f in report["failures"] if f["op"] == "broken"])


class Rotation(LoadCase, unittest.TestCase):
    def serials(self):
        """Every serial number in /status, as upper-case hex."""
        found = set()

        def walk(value):
            if isinstance(value, dict):
                for key, item in value.items():
                    if "serial" in key.lower() and isinstance(item, (str, int)):
                        text = f"{item:X}" if isinstance(item, int) else item.replace(":", "")
                        found.add(text.lstrip("0").upper())
                    walk(item)
            elif isinstance(value, list):
                for item in value:
                    walk(item)
        walk(self.jackstay.status())
        return found

    def test_rotated_certificate_is_used_without_failures(self):
        load = self.load(15)
        for second in (3, 7):
            load.until(second)
            fresh = self.rig.pki.issue(f"load-at-{second}", "/O=jackstay:load/CN=load")
            self.rig.rotate(fresh)
            serial = Pki.serial_of(fresh[0])
            wait_for(f"connections with serial {serial}", lambda: serial in self.serials(), bound(10))
        report = load.finish()
        self.check_report("rotation", load, report, writes_may_fail=False)
        self.assertEqual([f for f in report["failures"] if f["kind"] != "direct"], [])
        self.assertEqual((report["watches"]["broken"], report["watches"]["refused"]), (0, 0))
        # Later requests still have the same identity.
        ident = str(uuid.uuid4())
        self.rig.api(self.server, cert=fresh).get("/api", headers={"Audit-ID": ident})
        self.assertEqual(self.rig.audited_user(ident)[:2], ("load", ["jackstay:load", "system:authenticated"]))

    def test_unreadable_identity_keeps_last_certificate(self):
        load = self.load(8)
        load.until(2)
        broken = self.rig.dir / "broken.pem"
        broken.write_text("not a certificate\n")
        good = os.readlink(self.rig.rotating)
        swap_symlink(self.rig.rotating, broken)
        load.until(5)
        reported = "rotating.pem" in json.dumps(self.jackstay.status())
        swap_symlink(self.rig.rotating, Path(good))
        report = load.finish()
        self.check_report("unreadable identity", load, report, writes_may_fail=False)
        self.assertTrue(reported, "/status must name the unreadable file")


class Successors(LoadCase, unittest.TestCase):
    """What works stays in use until a new server name, CA bundle or certificate is accepted."""

    def test_wrong_name_ca_and_certificate_fail_no_request(self):
        """Each is wrong for longer than any grace, and right again."""
        self.make_wrong_under_load("terminate", 7461)

    @long_form("tests/proxy/reload has the same at L4")
    def test_wrong_name_ca_and_certificate_fail_no_flow(self):
        self.make_wrong_under_load("passthrough", 7462)

    def make_wrong_under_load(self, mode, port):
        pki, directory = self.rig.pki, self.rig.dir / "wrong"
        directory.mkdir(exist_ok=True)
        ca, crt, key = (directory / name for name in ("ca.crt", "load.crt", "load.key"))
        right = {ca: pki.ca, crt: self.rig.load_cert[0], key: self.rig.load_cert[1]}
        # The same subject, of a CA that the apiservers do not trust.
        foreign = pki.issue("foreign-load", "/O=jackstay:load/CN=load", ca=(pki.untrusted_ca, pki.untrusted_ca_key))

        def write(files):
            for target, source in files.items():
                fresh = target.with_suffix(".new")
                fresh.write_bytes(source.resolve().read_bytes())
                os.replace(fresh, target)
        write(right)
        identity = (crt, key)

        def adapt(config):
            upstream, listener = config["upstreams"][0], config["listeners"][0]
            upstream["tls"]["ca_file"] = ca
            upstream["health"] = {"readyz": {"cert_file": identity[0], "key_file": identity[1]}}
            if mode == "passthrough":
                config["listeners"] = [{key: listener[key] for key in ("name", "bind", "upstream")} | {"mode": mode}]
        jackstay = Jackstay(self.rig, [identity] if mode == "terminate" else [], adapt=adapt, log_name=f"jackstay-wrong-{mode}", port=port, admin=port + 2000)
        self.addCleanup(jackstay.stop)
        jackstay.start()

        def said(what, state):
            def is_said():
                return any(event["to"] == state and event["reason"] and what in event["reason"] for event in jackstay.admin("/events").json["events"])
            wait_for(f"{state}: {what}", is_said, bound(10))
        name = jackstay.config.read_text()
        wrong_name = name.replace("ca_file:", "server_name: wrong.example\n      ca_file:", 1)

        def reload(text):
            jackstay.config.write_text(text)
            jackstay.process.send(signal.SIGHUP)
        wrong_for, load = 7, self.load(36, jackstay.server)
        reasons = ["wrong.example"] if mode == "terminate" else [None]
        for what, spoil, repair, reason in (
                ("server name", lambda: reload(wrong_name), lambda: reload(name), *reasons),
                ("CA bundle", lambda: write({ca: self.rig.pki.untrusted_ca}), lambda: write(right), "not signed by a trusted CA"),
                ("certificate", lambda: write(dict(zip(identity, foreign))), lambda: write(right), "answers 401 to the new certificate")):
            begun = time.monotonic()
            spoil()
            if reason:
                said(reason, "not usable" if what == "server name" else "not accepted")
                log(f"{mode}, wrong {what}: said after {time.monotonic() - begun:.1f} s")
            time.sleep(max(0, begun + wrong_for - time.monotonic()))
            repair()
            time.sleep(3)
        endpoints = jackstay.status()["upstreams"][0]["endpoints"]
        self.assertEqual({endpoint["state"] for endpoint in endpoints}, {"ready"})
        report = load.finish()
        self.check_report(f"wrong name, CA and certificate, {mode}", load, report, writes_may_fail=False)
        self.assertEqual([f for f in report["failures"] if f["kind"] != "direct"], [])


class Takeover(LoadCase, unittest.TestCase):
    """New processes take over from running ones (`--take-over`): clients on client-go's HTTP stack notice nothing."""

    @classmethod
    def prepare(cls):
        def adapt(config):
            config["state_dir"] = str(cls.rig.dir / "replaced")
            config["shutdown"] = {"drain_timeout": "8s"}  # Watches end within a quarter of this time.
        cls.jackstay = Jackstay(cls.rig, [cls.rig.load_cert], adapt=adapt, log_name="jackstay-replaced", port=7444, admin=9644).start()
        cls.server = cls.jackstay.server

    @classmethod
    def tearDownClass(cls):
        cls.jackstay.stop()

    def tearDown(self):
        self.pid = self.jackstay.pid
        super().tearDown()

    def test_takeover_under_load_breaks_nothing(self):
        load = self.load(900, settle="2s")
        load.until(2)
        times = 20 if LONG else 2
        for turn in range(times):
            old = self.jackstay.process
            new = Process(f"jackstay-replaced-{turn}", [*old.argv[:4], "--take-over"], old.logfile)
            self.jackstay.process = new.start()
            self.assertEqual(old.child.wait(40), 0, old.tail())
            new.require_running()
        report = load.finish(early=True)
        self.check_report(f"{times} takeovers", load, report, writes_may_fail=False, busy=None)
        self.assertGreaterEqual(report["watches"]["ended_cleanly"], 20)


class Shutdown(JackstayCase, unittest.TestCase):
    """SIGTERM ends jackstay although watches are open. The last tests."""

    def tearDown(self):
        pass

    def test_sigterm_ends_watches_cleanly(self):
        load = Load(self.rig, self.server, 60, settle="1s")
        self.addCleanup(load.kill)
        load.until(2)
        begun = time.monotonic()
        self.jackstay.process.send(signal.SIGTERM)
        code = self.jackstay.process.child.wait(40)
        record("shutdown with watches", time.monotonic() - begun, "s")
        self.rig.jackstay = None
        report = load.finish(early=True)
        self.assertEqual(code, 0)
        # Every watch ended cleanly. No request was interrupted; later ones were refused.
        self.assertEqual(report["watches"]["broken"], 0)
        self.assertGreaterEqual(report["watches"]["ended_cleanly"], 20)
        self.assertEqual([f for f in report["failures"] if f["kind"] in ("read", "write") and "connection refused" not in f.get("error", "")], [])
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite()
    for case in (Clients, Identity, Rotation, Faults, Takeover, Shutdown):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
