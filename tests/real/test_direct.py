"""The rig without jackstay: a failure here is not caused by jackstay."""

import time
import unittest

from cases import KubectlCases, PodCases, RigCase, long_form
from figures import within
from rig import Load, NodeMonitor, log, summary, wait_for


@long_form("the same cases run through jackstay; here they show whether the rig causes a failure")
class Reference(PodCases, KubectlCases, unittest.TestCase):
    reference_apiserver = "b"

    @classmethod
    def prepare(cls):
        cls.server = cls.rig.server("a")

    def test_hollow_nodes_become_and_stay_ready(self):
        nodes = self.rig.start_hollow(self.server)
        try:
            for node in nodes:
                wait_for(f"{node.name} to be Ready", lambda: self.rig.ready(node.name), 60)
            with NodeMonitor(self.rig, [n.name for n in nodes]) as watch:
                time.sleep(25)
            self.assertEqual(watch.not_ready, [])
            self.assertEqual(set(watch.renewed), {n.name for n in nodes})
            within(self, "without jackstay: longest time between two heartbeats", max(watch.longest.values()), "s", 15)
            users = {e["user"]["username"] for e in self.rig.audit(lambda e: e["user"]["username"].startswith("system:node:hollow"))}
            self.assertEqual(users, {f"system:node:{n.name}" for n in nodes})
        finally:
            self.rig.stop_hollow()

    def test_apiserver_restarts_and_resumes(self):
        for graceful in (True, False):
            self.rig.apiservers["b"].restart(graceful)
        self.rig.apiservers["b"].pause()
        time.sleep(1)
        self.rig.recover()


class Direct(RigCase, unittest.TestCase):
    """The load generator's accounting, without and with a fault."""

    @classmethod
    def prepare(cls):
        cls.server = cls.rig.server("a")

    def test_load_without_fault_reports_none(self):
        """Without a fault the report has no failure."""
        load = Load(self.rig, self.server, 8, quiet_every="2s")
        self.addCleanup(load.kill)
        report = load.finish()
        log(summary(report))
        self.assertEqual(report["failures"], [])
        watches = report["watches"]
        self.assertEqual({k: watches[k] for k in ("broken", "refused", "ended_cleanly", "relists", "lost", "duplicated", "backwards")},
                         dict.fromkeys(("broken", "refused", "ended_cleanly", "relists", "lost", "duplicated", "backwards"), 0))
        self.assertEqual(watches["count"], 20)
        self.assertGreater(watches["events"], 1000)
        self.assertEqual(report["requests"]["read"].get("http1", 0), 0)
        self.assertEqual((report["applied_twice"], load.sent_twice()), ([], []))

    def test_load_with_dropped_flows_reports_them(self):
        """Dropped flows break every watch, because no proxy hides them."""
        load = Load(self.rig, self.server, 12, read_idle="2s", ping_timeout="2s", quiet_every="2s")
        self.addCleanup(load.kill)
        load.until(3)
        try:
            self.rig.faults.drop_flows(load.child.pid, self.rig.apiservers["a"].address)
            load.until(8)
            self.assertGreater(self.rig.faults.dropped(), 0)
        finally:
            self.rig.recover()
        report = load.finish()
        log(summary(report))
        self.assertGreater(report["requests"]["read"]["slowest_ms"], 2000)
        self.assertEqual(report["watches"]["broken"], 20)
        self.assertEqual(report["watches"]["lost"], 0)
