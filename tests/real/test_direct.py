"""The rig itself, with nothing in between: what fails here is no fault of jackstay."""

import time
import unittest

from cases import Kubectl, Pods, WithRig, long_form
from figures import within
from rig import Load, NodeWatch, log, summary, wait_for


@long_form("the same cases run through jackstay; here they show whether a failure is the rig's")
class Reference(Pods, Kubectl, unittest.TestCase):
    reference = "b"

    @classmethod
    def prepare(cls):
        cls.server = cls.rig.server("a")

    def test_hollow_nodes(self):
        nodes = self.rig.start_hollow(self.server)
        try:
            for node in nodes:
                wait_for(f"{node.name} to be Ready", lambda: self.rig.ready(node.name), 60)
            with NodeWatch(self.rig, [n.name for n in nodes]) as watch:
                time.sleep(25)
            self.assertEqual(watch.not_ready, [])
            self.assertEqual(set(watch.renewed), {n.name for n in nodes})
            within(self, "without jackstay: between two heartbeats", max(watch.longest.values()), "s", 15)
            users = {e["user"]["username"] for e in self.rig.audit(lambda e: e["user"]["username"].startswith("system:node:hollow"))}
            self.assertEqual(users, {f"system:node:{n.name}" for n in nodes})
        finally:
            self.rig.stop_hollow()

    def test_restarts(self):
        for graceful in (True, False):
            self.rig.apiservers["b"].restart(graceful)
        self.rig.apiservers["b"].pause()
        time.sleep(1)
        self.rig.heal()


class Direct(WithRig, unittest.TestCase):
    """The judge: what the load generator reports without and with a fault."""

    @classmethod
    def prepare(cls):
        cls.server = cls.rig.server("a")

    def test_load(self):
        """The accounting is exact where nothing happens."""
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

    def test_load_sees_a_fault(self):
        """... and where something does: established flows dropped, which only a proxy can hide."""
        load = Load(self.rig, self.server, 12, read_idle="2s", ping_timeout="2s", quiet_every="2s")
        self.addCleanup(load.kill)
        load.until(3)
        try:
            self.rig.faults.drop_flows(load.child.pid, self.rig.apiservers["a"].address)
            load.until(8)
            self.assertGreater(self.rig.faults.dropped(), 0)
        finally:
            self.rig.heal()
        report = load.finish()
        log(summary(report))
        self.assertGreater(report["requests"]["read"]["slowest_ms"], 2000)
        self.assertEqual(report["watches"]["broken"], 20)
        self.assertEqual(report["watches"]["lost"], 0)
