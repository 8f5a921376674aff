"""jackstay between real clients and three real apiservers.

Times are figures (figures.py), counts are exact. JACKSTAY_REAL_LONG=1 adds the long forms and the
variants; README.md says which.
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

from cases import Ended, Kubectl, Pods, WithRig, alive, each_transport, lines_of, long_form
from figures import LONG, bound, record, within
from kubernetes import RELEASE
from rig import (ADDRESSES, TOKEN, TOKEN_USER, WATCHES, Jackstay, Load, NodeWatch, Pki, Process, RealNode, complaints, log, summary,
                 swap_symlink, wait_for)


class Jackstayed(WithRig):
    @classmethod
    def prepare(cls):
        cls.jackstay = cls.rig.start_jackstay()
        cls.server = cls.jackstay.server

    def setUp(self):
        self.rig.heal()
        self.pid = self.jackstay.pid
        wait_for("jackstay to be ready", lambda: self.jackstay.admin("/readyz").code == 200, 20)

    def tearDown(self):
        self.rig.heal()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())
        self.assertEqual(self.jackstay.pid, self.pid)
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))


class Through(Jackstayed, Pods, Kubectl, unittest.TestCase):
    """kubectl and kubelet, everything that works directly."""

    BLACKOUT = 10 if LONG else 4  # seconds; tunnel_dead_after is 20 s

    @each_transport
    def test_exec_waits_for_its_path(self, by):
        """Nothing can take its place: it goes on when packets pass again, with TCP's next retransmission."""
        echo = ["exec", "-i", "tool", "-c", "web", "--", "sh", "-c", "while read line; do echo $line; done"]
        with Ended(self.rig.kubectl_start(self.admin, *echo, by=by, stdin=subprocess.PIPE)) as child:
            def say(word):
                child.stdin.write(f"{word}\n")
                child.stdin.flush()
            lines = []
            lines_of(child, lines)
            say("before")
            wait_for("the first answer", lambda: alive(child) or len(lines) == 1, 15)
            self.rig.faults.drop_flows(self.jackstay.pid)
            struck = time.monotonic()
            say("in the dark")
            wait_for("the end of the blackout", lambda: alive(child) or time.monotonic() > struck + self.BLACKOUT, self.BLACKOUT + 5)
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault hit nothing")
            self.rig.heal()
            wait_for("the second answer", lambda: alive(child) or len(lines) == 2, 2 * self.BLACKOUT)
            within(self, f"kubectl exec, dark for {self.BLACKOUT} s: it goes on", lines[1][0] - struck, "s", 2.5 * self.BLACKOUT)
            say("after")
            wait_for("the third answer", lambda: alive(child) or len(lines) == 3, 15)
            self.assertEqual([line for _, line in lines], ["before", "in the dark", "after"])


class Identity(Jackstayed, unittest.TestCase):
    def refused(self, cert):
        answer = self.rig.api(self.server, cert=cert).get("/api/v1/nodes")
        self.assertEqual(answer.code, 401, answer)
        self.assertEqual(answer.json["kind"], "Status")
        return answer.json["message"]

    def test_another_subject(self):
        message = self.refused(self.rig.developer_cert)
        self.assertIn("identities", message)
        self.assertIn("bob", message)

    def test_another_authority(self):
        pki = self.rig.pki
        stranger = pki.issue("stranger", "/O=system:masters/CN=rig-admin", ca=(pki.stranger_ca, pki.stranger_ca_key))
        log(f"another authority: {self.refused(stranger)}")

    def test_expired(self):
        expired = self.rig.pki.issue("expired", "/O=system:masters/CN=rig-admin", days=0)
        time.sleep(1.5)
        log(f"expired: {self.refused(expired)}")

    def test_certificate_wins_over_token(self):
        ident = str(uuid.uuid4())
        answer = self.rig.api(self.server, cert=self.rig.admin_cert, token=TOKEN).get("/api/v1/nodes?limit=1", headers={"Audit-ID": ident})
        self.assertEqual(answer.code, 200, answer)
        self.assertEqual(self.rig.who(ident)[0], "rig-admin")

    def test_bad_token(self):
        answer = self.rig.api(self.server, token="wrong").get("/api/v1/nodes")
        self.assertEqual((answer.code, answer.json["kind"]), (401, "Status"))

    def test_service_account_token(self):
        made = self.rig.control.must("POST", "/api/v1/namespaces/default/serviceaccounts/default/token",
                                     {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        ident = str(uuid.uuid4())
        self.rig.api(self.server, token=made["status"]["token"]).get("/api", headers={"Audit-ID": ident})
        name, groups, _ = self.rig.who(ident)
        self.assertEqual(name, "system:serviceaccount:default:default")
        self.assertIn("system:serviceaccounts", groups)

    def test_nobody_is_somebody_else(self):
        """Everyone at once, over and over: each request is its own caller's."""
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


class Loaded(Jackstayed):
    """With the Go client in front: what it may see."""

    def load(self, seconds, server=None, **flags):
        flags.setdefault("quiet_every", "2s")
        load = Load(self.rig, server or self.server, seconds, **flags)
        self.addCleanup(load.kill)
        self.running = load
        self.struck = []  # when faults began, from and to
        return load

    def inject(self, fault):
        begun = time.time()
        fault()
        self.struck.append((begun, time.time()))
        if time.time() - begun > 0.5:  # Of a process to end, for one.
            log(f"    the fault itself took {time.time() - begun:.1f} s")

    def in_flight(self, failure, grace):
        """Under way when a fault struck, or sent before its connection can have been suspected."""
        end = failure["unix"]
        return any(end - failure["latency_ms"] / 1000 <= after + grace and end >= before for before, after in self.struck)

    def judge(self, what, load, report, writes_may_fail=True, slowest_read=None, grace=None, busy=2.5, quiet=None):
        """What clients may notice: reads and watches nothing, and of writes only those that were in
        flight fail. Seconds are those promised; `grace` is until a connection is suspected."""
        log(f"{what}: {summary(report)}")
        failures = [f for f in report["failures"] if f["kind"] != "direct"]
        requests = [f for f in failures if f["kind"] != "watch"]
        with self.subTest(f"{what}: each failure is a Status"):
            # Once the head of an answer has passed, an end in its midst is a reset; and the apiserver's
            # own 504 is a Status that does not say so.
            self.assertEqual([f for f in requests if not f["is_status"] and not 200 <= f.get("code", 0) < 300
                              and not (f.get("code") == 504 and '"status":"Failure"' in f.get("message", ""))], [])
        with self.subTest(f"{what}: nothing asks client-go to send a write again"):
            self.assertEqual([f for f in requests if f["kind"] == "write" and f.get("code") == 502 and f.get("retry_after")], [])
        with self.subTest(f"{what}: at most once"):
            self.assertEqual((report["applied_twice"], load.sent_twice()), ([], []))
        with self.subTest(f"{what}: no read fails"):
            self.assertEqual([f for f in requests if f["kind"] == "read"], [])
        with self.subTest(f"{what}: no write fails but those in flight"):
            grace = (slowest_read or 0) if grace is None else grace
            writes = [f for f in requests if f["kind"] == "write"]
            self.assertEqual([f for f in writes if not writes_may_fail or not self.in_flight(f, grace)], [], f"faults at {self.struck}")
        if slowest_read:
            with self.subTest(f"{what}: no read waits"):
                slowest = report["requests"]["read"]
                if slowest["slowest_ms"] > slowest_read * 1000:
                    log(f"    {slowest['slowest']} after {slowest['slowest_at']:.1f} s; the apiservers: {self.rig.trail(slowest['slowest_audit_id'])}")
                within(self, f"{what}: slowest read", slowest["slowest_ms"], "ms", slowest_read * 1000)
        watches = report["watches"]
        with self.subTest(f"{what}: events"):
            self.assertEqual((watches["lost"], watches["duplicated"], watches["backwards"], watches["relists"]), (0, 0, 0, 0),
                             [w for w in report["each_watch"] if w["lost"] or w["duplicated"] or w["backwards"] or w["relists"]])
        with self.subTest(f"{what}: no watch breaks"):
            self.assertEqual((watches["broken"], watches["refused"]), (0, 0), [f for f in failures if f["kind"] == "watch"])
        if busy:
            with self.subTest(f"{what}: no watch falls silent"):
                within(self, f"{what}: silence of a delivering watch", watches["busy_silence_ms"], "ms", busy * 1000)
            with self.subTest(f"{what}: no quiet watch is late"):
                within(self, f"{what}: delay of a quiet watch", watches["quiet_delay_ms"], "ms", (quiet or busy + 1) * 1000)


class Faults(Loaded, unittest.TestCase):
    """One fault after the other, with hollow nodes and the real node that must not notice."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.server)
        cls.rig.start_hollow(cls.server)
        cls.names = [n.name for n in cls.rig.hollow] + [RealNode.NAME]
        for name in cls.names:
            wait_for(f"{name} to be Ready", lambda: cls.rig.ready(name), 60)
        cls.watch = NodeWatch(cls.rig, cls.names)
        cls.watch.start()
        cls.since = time.monotonic()
        cls.kubelets = [node.process for node in cls.rig.hollow] + [cls.rig.node.kubelet]
        cls.told = cls.logged()

    @classmethod
    def logged(cls):
        return {process.name: process.logfile.stat().st_size for process in cls.kubelets}

    def complaints(self, since, what=None):
        """What kubelets have complained of since `logged`."""
        options = {"what": what} if what else {}
        return [line for process in self.kubelets for line in complaints(process, since=since[process.name], **options)]

    @classmethod
    def tearDownClass(cls):
        cls.watch.stop()
        cls.rig.stop_hollow()

    def tearDown(self):
        super().tearDown()
        if self.watch.is_alive():
            self.assertEqual(self.watch.not_ready, [])

    def victim(self):
        """Of a and b the one that answers more of the load's requests now; c is for the rig."""
        shares = {name: self.rig.answered(name, self.running.agent) for name in ADDRESSES}
        name = max("ab", key=lambda n: shares[n])
        log(f"    the fault hits {name}; requests answered in the last two seconds: {shares}")
        return self.rig.apiservers[name]

    def strike(self, what, fault, seconds=8, counted=True, server=None, meanwhile=None, **limits):
        load = self.load(seconds + 7, server)
        load.until(3)
        self.inject(fault)
        load.until(3 + seconds)
        if counted:
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault hit nothing")
        if meanwhile:
            meanwhile()
        self.rig.heal()
        self.judge(what, load, load.finish(), **limits)

    def test_established_flows_dropped(self):
        """New connections work; the old ones are silent for ever."""
        for hook in ("input", "output") if LONG else ("input",):  # test_many_faults has the other.
            self.strike(f"flows dropped in {hook}", lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,)), slowest_read=0.6)

    @long_form("test_many_faults has both directions")
    def test_one_direction(self):
        for direction, hook in [("from", "input"), ("to", "input"), ("from", "output"), ("to", "output")]:
            self.strike(f"flows dropped in {hook}, {direction} the apiservers",
                        lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,), directions=(direction,)), slowest_read=0.6)

    def test_apiserver_dark(self):
        self.strike("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(self.victim().address), slowest_read=0.6)

    def test_apiserver_killed(self):
        self.strike("SIGKILL of one", lambda: self.victim().kill(), counted=False, slowest_read=0.3, busy=1)

    def test_apiserver_stopped(self):
        self.strike("SIGSTOP of one", lambda: self.victim().pause(), seconds=12, counted=False, slowest_read=0.6, busy=6, quiet=6)

    def test_packet_loss(self):
        """Five percent, both ways: nobody is ejected, nothing is noticed."""
        seconds = 600 if LONG else 25
        before = self.ejections()
        self.strike("5 % loss", lambda: self.rig.faults.lose(5), seconds=seconds, writes_may_fail=False, slowest_read=1)
        self.assertEqual(self.ejections(), before)

    def test_readyz_fails(self):
        """An apiserver without its etcd lives, and answers nothing. Its watches hear of nothing either:
        they move away, and nobody notices."""
        def quick(config):
            config["upstreams"][0]["health"] = {"readyz": {"path": RELEASE.etcd_check, "interval": "1s", "fall": 2}}
        jackstay = Jackstay(self.rig, [self.rig.admin_cert, self.rig.load_cert], adapt=quick, log_name="jackstay-readyz", port=7444, admin=9644)
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        victim = []

        def lose_etcd():
            watches = {e["address"].rsplit(":", 1)[0]: e["watches"] for u in jackstay.status()["upstreams"] for e in u["endpoints"]}
            name = max("ab", key=lambda n: watches[ADDRESSES[n]])
            log(f"    the fault hits {name}; watches: {watches}")
            self.assertGreater(watches[ADDRESSES[name]], 0)
            victim.append(self.rig.apiservers[name])
            self.rig.faults.drop_etcd(name)

        def degraded():
            states = [k for k, v in jackstay.metrics().items() if k.startswith("jackstay_endpoint_state") and v and "degraded" in k]
            self.assertEqual([victim[0].address in k for k in states], [True], states)
        self.strike("the readiness check fails and writes hang on one", lose_etcd, server=jackstay.server, meanwhile=degraded, slowest_read=3.5)
        self.assertNotIn("panicked", jackstay.process.logfile.read_text(errors="replace"))

    def ejections(self):
        return sum(v for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_ejections_total"))

    def test_restarts(self):
        """Every apiserver is restarted in turn, gracefully, and then once more by SIGKILL. The short form
        has one of each kind: what differs between the apiservers is only who else uses them."""
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
        self.judge("rolling restarts", load, report, slowest_read=1, grace=0.3, busy=3)
        if LONG:
            self.assertGreaterEqual(report["requests"]["read"]["total"] + report["requests"]["write"]["total"], 20000)
            # The controller manager hangs on `c` alone: after its restarts it may be blind for longer
            # than its own patience, and then calls nodes Unknown that renew their leases all along.
            # So here the leases are the judge.
            within(self, "rolling restarts: between two heartbeats", max(self.watch.longest.values()), "s", 25)
            self.watch.not_ready.clear()

    def numbered(self, stop):
        """Changes three objects through the control apiserver, numbering what it does."""
        path = f"/api/v1/namespaces/{self.namespace}"
        self.rig.control.must("POST", f"{path}/configmaps", {"metadata": {"name": "numbered", "labels": {"number": "0"}}})
        self.rig.control.must("POST", f"{path}/pods", {  # There is no scheduler, so nobody else changes it.
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
        if form == "json":  # The node's own kubelet changes it too: the same number in another version.
            pairs = re.findall(r'"number": "(\d+)".*?"resourceVersion": "(\d+)"', text, re.S)
            return [int(n) for i, (n, version) in enumerate(pairs) if not i or n != pairs[i - 1][0] or version == pairs[i - 1][1]]
        return [int(n) for n in re.findall(r"^numbered .*?(\d+)$", text, re.M)]

    def test_many_faults(self):
        """kubectl and kubelets watch on through ten kinds of faults, in the long form twice."""
        self.namespace = self.rig.load_namespace()
        stop = threading.Event()
        work = self.numbered(stop)
        config = self.rig.kubeconfig("many-faults", self.server, cert=self.rig.admin_cert)
        jackstay, faults, rig = self.jackstay, self.rig.faults, self.rig
        kinds = [
            ("flows dropped in input", lambda: faults.drop_flows(jackstay.pid, hooks=("input",))),
            ("SIGKILL", lambda: self.victim().kill()),
            ("flows dropped in output", lambda: faults.drop_flows(jackstay.pid, hooks=("output",))),
            ("SIGSTOP", lambda: self.victim().pause()),
            ("dark", lambda: faults.drop_address(self.victim().address)),
            ("flows dropped from the apiservers", lambda: faults.drop_flows(jackstay.pid, hooks=("input",), directions=("from",))),
            ("SIGKILL of a", lambda: rig.apiservers["a"].kill()),
            ("flows dropped to the apiservers", lambda: faults.drop_flows(jackstay.pid, hooks=("output",), directions=("to",))),
            ("SIGSTOP of b", lambda: rig.apiservers["b"].pause()),
            ("dark, one way", lambda: faults.drop_address(self.victim().address, hooks=("input",), directions=("from",))),
        ]
        children = []
        with contextlib.ExitStack() as stack:
            for by in RELEASE.kubectls:
                for form, argv in (("table", ["configmaps", "-n", self.namespace, "-L", "number"]),
                                   ("table", ["pods", "-n", self.namespace, "-L", "number"]), ("json", ["nodes", "-o", "json"])):
                    child = stack.enter_context(Ended(rig.kubectl_start(config, "get", *argv, "--watch", by=by)))
                    lines = []
                    children.append((f"kubectl {by.label} get {argv[0]}", form, child, lines, lines_of(child, lines)))

            def seen(form, lines):
                return self.numbers("\n".join(line for _, line in list(lines)) + "\n", form)
            wait_for("every kubectl to list", lambda: all(seen(form, lines) for _, form, _, lines, _ in children), 30)
            load = self.load(600, watches=8)
            told = self.logged()
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
            stack.callback(stop.set)
            worker = pool.submit(work)
            for name, fault in kinds * (2 if LONG else 1):
                log(f"    {name}")
                self.inject(fault)
                time.sleep(3)
                rig.heal()
                time.sleep(1.5)
            stop.set()
            last = worker.result(30)
            report = load.finish(early=True)
            self.judge("many faults", load, report, slowest_read=0.6, busy=6, quiet=6)
            for name, form, child, lines, pump in children:
                with self.subTest(name):
                    deadline = time.monotonic() + 15
                    while last not in seen(form, lines) and child.poll() is None and time.monotonic() < deadline:
                        time.sleep(0.2)
                    ended = child.poll()
                    child.send_signal(signal.SIGINT)
                    pump.join(10)
                    got, said = seen(form, lines), child.stderr.read()
                    (rig.dir / f"{name.replace(' ', '-')}.txt").write_text("\n".join(f"{at:.2f} {line}" for at, line in lines))
                    self.assertEqual((ended, said), (None, ""), f"after {len(got)} events of {last}")
                    self.assertEqual(got, list(range(got[0], last + 1)))
                    log(f"    {name}: {len(got)} events in order")
        wrong, writes = self.complaints(told, WATCHES), self.complaints(told)
        log(f"    {len(wrong)} complaints of kubelets about watches, {len(writes) - len(wrong)} about writes" + "".join(f"\n    {line}" for line in writes[:5]))
        self.assertEqual(wrong, [])

    def test_zz_two_minutes(self):
        """Through all of that the nodes were Ready, heartbeats went through, as the nodes themselves."""
        time.sleep(max(0, 120 - (time.monotonic() - self.since)))
        self.watch.stop()
        log(f"longest time between two heartbeats: {', '.join(f'{n} {t:.1f} s' for n, t in sorted(self.watch.longest.items()))}")
        self.assertGreater(self.watch.polls, 60)
        self.assertEqual(set(self.watch.renewed), set(self.names))
        self.assertEqual(self.watch.not_ready, [])
        # Ten seconds between renewals, and a renewal that is under way to a stopped process ends
        # with kubelet's own timeout of ten: a write whose fate is unknown is never sent again. The
        # node controller's patience is 40 s.
        within(self, "all faults: between two heartbeats", max(self.watch.longest.values()), "s", 25)
        nodes = self.rig.audit(lambda e: e["verb"] == "update" and "/leases/" in e["requestURI"] and e["objectRef"]["name"] in self.names)
        self.assertEqual({e["user"]["username"] for e in nodes}, {f"system:node:{n}" for n in self.names})
        self.assertTrue(all("system:nodes" in e["user"]["groups"] for e in nodes))
        # Writes in flight may fail, and an end that the server sends is passed on; nothing else.
        wrong = self.complaints(self.told)
        log(f"{len(wrong)} complaints in the logs of the kubelets" + "".join(f"\n    {line}" for line in wrong[:5]))
        self.assertEqual(self.complaints(self.told, WATCHES), [])

    def test_zzz_all_down(self):
        """The last one, since nodes may rightly notice this."""
        self.watch.stop()

        def down():
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()
        load = self.load(25, direct=None)
        load.until(3)
        down()
        load.until(13)
        self.rig.heal()
        report = load.finish()
        log(f"all down for 10 s: {summary(report)}")
        for kind in ("read", "write"):
            within(self, f"all down: slowest {kind}", report["requests"][kind]["slowest_ms"], "ms", 1500)
            self.assertEqual(report["requests"][kind]["failed_without_status"], 0)
        # An apiserver that starts has no history, so a watch may end: cleanly, and the client lists anew.
        watches = report["watches"]
        self.assertEqual((watches["broken"], watches["lost"], watches["duplicated"], watches["backwards"]), (0, 0, 0, 0), [f for f in report["failures"] if f["op"] == "broken"])


class Rotation(Loaded, unittest.TestCase):
    def serials(self):
        """Every serial that /status shows, wherever it shows it, as upper-case hex."""
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

    def test_certificate_rotation(self):
        load = self.load(15)
        for second in (3, 7):
            load.until(second)
            fresh = self.rig.pki.issue(f"load-at-{second}", "/O=jackstay:load/CN=load")
            self.rig.rotate(fresh)
            serial = Pki.serial_of(fresh[0])
            wait_for(f"connections with serial {serial}", lambda: serial in self.serials(), bound(10))
        report = load.finish()
        self.judge("rotation", load, report, writes_may_fail=False)
        self.assertEqual([f for f in report["failures"] if f["kind"] != "direct"], [])
        self.assertEqual((report["watches"]["broken"], report["watches"]["refused"]), (0, 0))
        # Those who come now are still themselves.
        ident = str(uuid.uuid4())
        self.rig.api(self.server, cert=fresh).get("/api", headers={"Audit-ID": ident})
        self.assertEqual(self.rig.who(ident)[:2], ("load", ["jackstay:load", "system:authenticated"]))

    def test_unreadable_identity_keeps_the_last(self):
        load = self.load(8)
        load.until(2)
        broken = self.rig.dir / "broken.pem"
        broken.write_text("not a certificate\n")
        good = os.readlink(self.rig.rotating)
        swap_symlink(self.rig.rotating, broken)
        load.until(5)
        told = "rotating.pem" in json.dumps(self.jackstay.status())
        swap_symlink(self.rig.rotating, Path(good))
        report = load.finish()
        self.judge("unreadable identity", load, report, writes_may_fail=False)
        self.assertTrue(told, "/status names the file")


class Replaced(Loaded, unittest.TestCase):
    """New processes take the place of old ones (`--take-over`): client-go's stack sees nothing of it."""

    @classmethod
    def prepare(cls):
        def adapt(config):
            config["state_dir"] = str(cls.rig.dir / "replaced")
            config["shutdown"] = {"drain_timeout": "8s"}  # Watches end within a quarter of it.
        cls.jackstay = Jackstay(cls.rig, [cls.rig.load_cert], adapt=adapt, log_name="jackstay-replaced", port=7444, admin=9644).start()
        cls.server = cls.jackstay.server

    @classmethod
    def tearDownClass(cls):
        cls.jackstay.stop()

    def tearDown(self):
        self.pid = self.jackstay.pid
        super().tearDown()

    def test_replaced_under_load(self):
        load = self.load(900, settle="2s")
        load.until(2)
        times = 20 if LONG else 2  # The second is replaced by one that it has not started itself.
        for turn in range(times):
            old = self.jackstay.process
            new = Process(f"jackstay-replaced-{turn}", [*old.argv[:4], "--take-over"], old.logfile)
            self.jackstay.process = new.start()
            self.assertEqual(old.child.wait(40), 0, old.tail())
            new.must_run()
        report = load.finish(early=True)
        self.judge(f"replaced {times} times", load, report, writes_may_fail=False, busy=None)
        self.assertGreaterEqual(report["watches"]["ended_cleanly"], 20)


class Shutdown(Jackstayed, unittest.TestCase):
    """The last one: SIGTERM ends it, watches or not."""

    def tearDown(self):
        pass

    def test_sigterm(self):
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
        # Every watch ended cleanly, and no request was cut off: those that came later were refused.
        self.assertEqual(report["watches"]["broken"], 0)
        self.assertGreaterEqual(report["watches"]["ended_cleanly"], 20)
        self.assertEqual([f for f in report["failures"] if f["kind"] in ("read", "write") and "connection refused" not in f.get("error", "")], [])
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite()
    for case in (Through, Identity, Rotation, Faults, Replaced, Shutdown):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
