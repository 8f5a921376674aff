"""All apiservers gone at once: real clients neither fail a watch nor list again when they return."""

import re
import time
import unittest

from figures import LONG
from rig import PORT, WATCHES, complaints, log, wait_for
from test_jackstay import Jackstayed

# A new watch is held for 30 s, and so was every watch once: it must be longer than that.
OUTAGE = 60 if LONG else 36


class Outage(Jackstayed, unittest.TestCase):
    def setUp(self):
        super().setUp()
        self.node, = self.rig.start_hollow(self.server, 1)
        self.addCleanup(self.rig.stop_hollow)
        # The rig's own controller manager asks an apiserver directly; this one asks jackstay.
        argv = [a for a in self.rig.controller.argv if not str(a).startswith("--kubeconfig=")]
        config = self.rig.kubeconfig("controller-manager-2", self.server, cert=self.rig.admin_cert)
        self.controller = self.rig.run("controller-manager-2", [*argv, f"--kubeconfig={config}", "--secure-port=10357"])
        self.addCleanup(self.controller.stop)
        wait_for(f"{self.node.name} to be Ready", lambda: self.rig.ready(self.node.name), 90)
        self.watches = self.settled()

    def metric(self, name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.jackstay.admin("/metrics").body.decode().splitlines()
                   if re.match(name + r"[ {]", line))

    def settled(self):
        """The watches through jackstay, once no more have come for 5 s: every cache of the clients is filled."""
        count, since = 0, time.monotonic()

        def steady():
            nonlocal count, since
            now = int(self.metric("jackstay_watches"))
            if now != count:
                count, since = now, time.monotonic()
            return count > 30 and time.monotonic() > since + 5 and count
        return wait_for("the clients' watches", steady, 120)

    def lists(self, user, agent, since):
        """Lists of a client since then: also the watches that begin with all objects."""
        def is_list(event):
            return (event["user"].get("username") == user and event.get("userAgent", "").startswith(agent)
                    and event["requestReceivedTimestamp"] >= since
                    and (event["verb"] == "list" or "sendInitialEvents=true" in event["requestURI"]))
        return {e["auditID"]: e["requestURI"] for e in self.rig.audit(is_list)}

    def go_through(self, gone, back):
        """An outage; what each client listed after it, and of which broken watches it told."""
        marks = {p.name: p.logfile.stat().st_size for p in (self.controller, self.node.process)}
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
        began = time.monotonic()
        gone()
        wait_for("every watch to be held", lambda: self.metric("jackstay_held_watches") >= self.watches, 15)
        # Its length is what is tried.
        time.sleep(max(0, began + OUTAGE - time.monotonic()))
        self.assertEqual(self.metric("jackstay_held_watches"), self.watches, "a watch ended")
        back()
        wait_for("no watch to be held", lambda: self.metric("jackstay_held_watches") == 0, 60)
        wait_for("the apiservers", lambda: all(e["state"] == "ready" for e in self.jackstay.admin("/status").json["upstreams"][0]["endpoints"]), 60)
        wait_for(f"{self.node.name} to be Ready", lambda: self.rig.ready(self.node.name), 90)
        self.assertEqual(self.settled(), self.watches)
        lists = {"controller manager": self.lists("rig-admin", "kube-controller-manager", since),
                 "kubelet": self.lists(f"system:node:{self.node.name}", "", since)}
        told = [line for p in (self.controller, self.node.process) for line in complaints(p, WATCHES, marks[p.name])
                if "too old resource version" not in line]
        log(f"{OUTAGE} s without an apiserver, {self.watches} watches: " + ", ".join(f"{len(found)} lists by the {who}" for who, found in lists.items())
            + f", {len(told)} broken watches in their logs")
        return lists, told

    def test_refused(self):
        """Every connection is refused, and the apiservers go on behind that: their history is whole."""
        def gone():
            addresses = ", ".join(a.address for a in self.rig.apiservers.values())
            self.rig.faults.nft(f"add rule inet jackstay_rig output ip daddr {{ {addresses} }} tcp dport {PORT} counter reject with tcp reset\n")
        lists, told = self.go_through(gone, self.rig.faults.clear)
        self.assertEqual({who: list(found.values()) for who, found in lists.items()}, {"controller manager": [], "kubelet": []})
        self.assertEqual(told, [])

    def test_killed(self):
        """All are killed. One that starts knows no history, so what has seen no event lately must list, as
        it must directly: once, when the apiservers are ready, and not before."""
        def gone():
            for apiserver in self.rig.apiservers.values():
                apiserver.kill()

        def back():
            for apiserver in self.rig.apiservers.values():
                apiserver.start(wait=False)
        lists, told = self.go_through(gone, back)
        for who, found in lists.items():
            kinds = [re.sub(r"\?.*", "", uri) for uri in found.values() if "sendInitialEvents" not in uri]
            self.assertEqual(len(kinds), len(set(kinds)), f"{who} listed twice: {sorted(kinds)}")
        self.assertEqual(told, [])
