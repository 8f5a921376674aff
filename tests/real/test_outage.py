"""All apiservers are unreachable at once: clients' watches survive, and clients do not list again afterwards."""

import re
import time
import unittest

from figures import LONG
from rig import DETECTORS, PORT, WATCH_ERRORS, client_errors, log, log_lines, wait_for
from test_jackstay import JackstayCase

# Longer than 30 s, the time for which jackstay holds a new watch.
OUTAGE = 60 if LONG else 36


class Outage(JackstayCase, unittest.TestCase):
    def setUp(self):
        super().setUp()
        # A watch of the real node that earlier tests have left may reach its own timeout, 5 to 10 minutes, in the outage.
        if self.rig.node:
            self.rig.node.kubelet.stop()
            self.addCleanup(self.rig.node.kubelet.start)
        self.node, = self.rig.start_hollow(self.server, 1)
        self.addCleanup(self.rig.stop_hollow)
        # The rig's controller manager uses an apiserver directly; this one uses jackstay.
        argv = [a for a in self.rig.controller.argv if not str(a).startswith("--kubeconfig=")]
        config = self.rig.kubeconfig("controller-manager-2", self.server, cert=self.rig.admin_cert)
        self.controller = self.rig.run("controller-manager-2", [*argv, f"--kubeconfig={config}", "--secure-port=10357"], env=DETECTORS)
        self.addCleanup(self.controller.stop)
        wait_for(f"{self.node.name} to be Ready", lambda: self.rig.ready(self.node.name), 90)
        self.watches = self.settled()

    def settled(self):
        """The number of watches through jackstay, once it was constant for 5 s: all clients' caches are filled."""
        count, since = 0, time.monotonic()

        def unchanged():
            nonlocal count, since
            now = int(self.jackstay.total("jackstay_watches"))
            if now != count:
                count, since = now, time.monotonic()
            return count > 30 and time.monotonic() > since + 5 and count
        return wait_for("the clients' watches", unchanged, 120)

    def lists(self, user, agent, since):
        """A client's lists since a time, including watches that begin with all objects."""
        def is_list(event):
            return (event["user"].get("username") == user and event.get("userAgent", "").startswith(agent)
                    and event["requestReceivedTimestamp"] >= since
                    and "resourceVersionMatch=Exact" not in event["requestURI"]  # of client-go's detectors of inconsistencies
                    and (event["verb"] == "list" or "sendInitialEvents=true" in event["requestURI"]))
        return {e["auditID"]: e["requestURI"] for e in self.rig.audit(is_list)}

    def run_outage(self, take_down, bring_back):
        """Runs an outage; returns each client's lists after it and the watch errors in the clients' logs."""
        marks = {p.name: p.logfile.stat().st_size for p in (self.controller, self.node.process)}
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        began, log_size = time.monotonic(), self.log_size()
        take_down()
        wait_for("every watch to be held", lambda: self.jackstay.total("jackstay_held_watches") >= self.watches, 15)
        time.sleep(max(0, began + OUTAGE - time.monotonic()))
        self.assertEqual(self.jackstay.total("jackstay_held_watches"), self.watches, "a watch ended")
        bring_back()
        wait_for("no watch to be held", lambda: self.jackstay.total("jackstay_held_watches") == 0, 60)
        wait_for("the apiservers", lambda: all(e["state"] == "ready" for e in self.jackstay.admin("/status").json["upstreams"][0]["endpoints"]), 60)
        wait_for(f"{self.node.name} to be Ready", lambda: self.rig.ready(self.node.name), 90)
        self.assertEqual(self.settled(), self.watches)
        self.check_story(f"{OUTAGE} s without an apiserver", log_size)
        for line in (r" ERROR .*no usable endpoint", r" WARN .*usable again after"):
            self.assertEqual(len(log_lines(self.jackstay.process, line, log_size)), 1, line)
        lists = {"controller manager": self.lists("rig-admin", "kube-controller-manager", since),
                 "kubelet": self.lists(f"system:node:{self.node.name}", "", since)}
        errors = [line for p in (self.controller, self.node.process) for line in client_errors(p, WATCH_ERRORS, marks[p.name])
                if "too old resource version" not in line]
        log(f"{OUTAGE} s without an apiserver, {self.watches} watches: " + ", ".join(f"{len(found)} lists by the {client}" for client, found in lists.items())
            + f", {len(errors)} watch errors in their logs")
        return lists, errors

    def test_outage_by_refusal_lists_nothing(self):
        """Connections are refused while the apiservers keep running: their watch history is complete."""
        def take_down():
            addresses = ", ".join(a.address for a in self.rig.apiservers.values())
            self.rig.faults.nft(f"add rule inet jackstay_rig output ip daddr {{ {addresses} }} tcp dport {PORT} counter reject with tcp reset\n")
        lists, errors = self.run_outage(take_down, self.rig.faults.clear)
        self.assertEqual({client: list(found.values()) for client, found in lists.items()}, {"controller manager": [], "kubelet": []})
        self.assertEqual(errors, [])

    def test_outage_by_kill_lists_at_most_once(self):
        """All apiservers are killed. A new apiserver has no watch history, so caches without a recent event must list,
        as they must directly: once, and only when the apiservers are ready."""
        def take_down():
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()

        def bring_back():
            for apiserver in self.rig.apiservers.values():
                apiserver.start(wait=False)
        lists, errors = self.run_outage(take_down, bring_back)
        for client, found in lists.items():
            kinds = [re.sub(r"\?.*", "", uri) for uri in found.values() if "sendInitialEvents" not in uri]
            self.assertEqual(len(kinds), len(set(kinds)), f"{client} listed twice: {sorted(kinds)}")
        self.assertEqual(errors, [])
