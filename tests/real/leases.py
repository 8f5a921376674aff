"""Clients that hold leases: leader elections, and holders whose renewals are counted."""

import http.client
import json
import signal
import time
import uuid
from collections import Counter

from kubernetes import RELEASE
from rig import log, wait_for
from workers import Client, WatchWorker, Worker

LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
# The defaults of leader election (k8s.io/component-base/config/v1alpha1/defaults.go).
RETRY_PERIOD, RENEW_DEADLINE = 2, 10
LEADERS = 5
HOLDERS = 8


def micro_time():
    """The time as a MicroTime, as client-go writes it."""
    now = time.time_ns() // 1000
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 1_000_000)) + f".{now % 1_000_000:06}Z"


class Leader(Worker):
    """A leader election as client-go runs it, which loses its lease after 10 s without a renewal."""

    def __init__(self, case, index):
        super().__init__(case)
        self.client = Client(case.rig, case.server, case.rig.admin_cert)
        self.name, self.lost, self.slowest, self.answers = f"leader-{index}", [], 0.0, []
        code, answer = self.client.call("POST", LEASES, {"metadata": {"name": self.name}, "spec": {"holderIdentity": self.name, "leaseDurationSeconds": 15}})
        assert code == 201, f"{code} {answer}"

    def work(self):
        begun = time.monotonic()
        while not self.renew(begun + RENEW_DEADLINE):
            if time.monotonic() > begun + RENEW_DEADLINE:
                self.lost.append(begun)
                break
            self.stopping.wait(min(RETRY_PERIOD, max(0, begun + RENEW_DEADLINE - time.monotonic())))
        self.slowest = max(self.slowest, time.monotonic() - begun)
        self.stopping.wait(RETRY_PERIOD)

    def renew(self, deadline):
        for method in ("GET", "PUT"):
            sent = time.monotonic()
            try:
                code, answer = self.client.call(method, f"{LEASES}/{self.name}", None if method == "GET" else lease, max(0.01, deadline - sent))
            except (OSError, http.client.HTTPException) as error:
                code, answer = None, {"message": repr(error)}
            if code != 200:
                self.answers.append(f"{method} after {time.monotonic() - sent:.1f} s: {code} {answer.get('message', '')}")
                return False
            lease = answer
            lease["spec"]["renewTime"] = micro_time()
        return True


class Holder(Worker):
    """Renews a lease again and again from the response to the last renewal, as client-go and kubelet do."""

    def __init__(self, case, server, index):
        super().__init__(case)
        self.client = Client(case.rig, server, case.rig.admin_cert)
        self.path = f"{LEASES}/holder-{uuid.uuid4()}"
        self.renewed, self.failed, self.slowest = set(), [], 0.0
        metadata, spec = {"name": self.path.rpartition("/")[2]}, {"holderIdentity": f"holder-{index}", "leaseDurationSeconds": 15}
        code, self.lease = self.client.call("POST", LEASES, {"metadata": metadata, "spec": spec})
        assert code == 201, f"{code} {self.lease}"

    def work(self):
        self.lease["spec"]["renewTime"] = sent_time = micro_time()
        sent = time.monotonic()
        try:
            code, answer = self.client.call("PUT", self.path, self.lease)
        except (OSError, http.client.HTTPException) as error:
            code, answer = None, {"message": repr(error)}
        took = time.monotonic() - sent
        self.slowest = max(self.slowest, took)
        if code == 200:
            self.renewed.add(sent_time)
            self.lease = answer
        else:
            self.failed.append(f"{time.time():.3f} after {took:.2f} s: {code} {answer.get('message', '')}")
            code, self.lease = self.client.call("GET", self.path)
            assert code == 200, f"{code} {self.lease}"
        self.stopping.wait(0.05)


class Renewals:
    """Holders of leases, and what an apiserver without faults shows of their leases."""

    def __init__(self, case, server, witness):
        self.case, self.shown = case, Counter()
        self.holders = [Holder(case, server, index) for index in range(HOLDERS)]
        code, leases = Client(case.rig, case.rig.server(witness), case.rig.admin_cert).call("GET", LEASES)
        case.assertEqual(code, 200, leases)
        self.watch = LeaseWatch(case, witness, leases["metadata"]["resourceVersion"], self.shown)
        for worker in (self.watch, *self.holders):
            worker.start()

    def finish(self, what):
        """Ends the renewals. None has failed or was carried out twice. Returns the time that the slowest one took."""
        for holder in self.holders:
            holder.finish()
        sent = {time for holder in self.holders for time in holder.renewed}

        def shown():
            self.case.assertIsNone(self.watch.failure)
            return sent <= self.shown.keys()
        wait_for("all renewals to be shown", shown, 30)
        self.watch.finish()
        failed = [one for holder in self.holders for one in holder.failed]
        log(f"    {what}: {len(sent)} renewals, {len(failed)} failed, slowest {max(h.slowest for h in self.holders):.2f} s")
        with self.case.subTest(f"{what}: renewals of leases"):
            self.case.assertEqual(failed, [])
            self.case.assertEqual([time for time, count in self.shown.items() if count > 1], [], "carried out twice")
        return max(holder.slowest for holder in self.holders)


class ClientGoLeaders:
    """Controller managers that hardly do more than lead, each with a lease of its own and the defaults of leader election. One that loses its
    lease exits."""

    def __init__(self, case, server):
        self.case = case
        config = case.rig.kubeconfig("leaders", server, cert=case.rig.admin_cert)
        self.leaders = []
        for index in range(LEADERS):
            name = f"client-go-leader-{index}"
            process = case.rig.run(name, [
                RELEASE.program("kube-controller-manager"), f"--kubeconfig={config}", "--controllers=bootstrap-signer-controller", "--leader-elect",
                f"--leader-elect-resource-name={name}", "--secure-port=0", "--v=2"])
            case.addCleanup(process.stop, signal.SIGKILL)
            self.leaders.append((name, process))
        for name, process in self.leaders:
            wait_for(f"{name} to lead", lambda p=process: p.require_running() or "successfully acquired lease" in self.text(p), 30)

    @staticmethod
    def text(process):
        return process.logfile.read_text(errors="replace").lower()  # client-go has changed the case

    def finish(self, what):
        """All lead as before, and no renewal has failed."""
        for name, process in self.leaders:
            with self.case.subTest(f"{what}: {name}"):
                process.require_running()
                # `tryAcquireOrRenew` and `renew` in k8s.io/client-go/tools/leaderelection.
                failed = [line for line in self.text(process).splitlines()
                          if any(text in line for text in ("failed to update l", "error retrieving", "failed to renew lease"))]
                self.case.assertEqual(failed, [])
        log(f"    {what}: {len(self.leaders)} leaders of client-go renewed their leases")
        for _, process in self.leaders:
            process.stop(signal.SIGKILL)


class LeaseWatch(WatchWorker):
    """Counts how often each renewal is shown."""

    def __init__(self, case, server, version, shown):
        super().__init__(case)
        self.shown = shown
        self.client = Client(case.rig, case.rig.server(server), case.rig.admin_cert)
        self.response = self.client.send("GET", f"{LEASES}?watch=1&resourceVersion={version}", timeout=None)

    def work(self):
        line = self.response.readline()
        assert line, "the watch ended"
        event = json.loads(line)
        renewed = event["object"]["spec"].get("renewTime")
        if event["type"] == "MODIFIED" and renewed:
            self.shown[renewed] += 1
