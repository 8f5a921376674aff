"""Apiservers that reject requests by API Priority and Fairness: reads are asked of one other, within a budget of 10 %."""

import unittest
import uuid

from cases import RigCase
from figures import record
from kubernetes import RELEASE
from matrix import covers
from rig import ADDRESSES, Jackstay, log, wait_for
from test_lag import NAMESPACE
from workers import Client, Worker

NAME, USER = "overloaded", "load"  # the user of the rig's certificate for load
READS, WRITES = 1500, 200
BURST = 128  # of the budget
HOGS = 12  # for each apiserver; more than the seats of a level with one share
FLOW_CONTROL = f"/apis/{RELEASE.flow_control_api}"
# The cache waits 3 s for this version, and so long the request has a seat.
FUTURE = 1 << 40
READ = f"{NAMESPACE}/configmaps/{NAME}"
FAIRNESS = ("X-Kubernetes-Pf-Flowschema-Uid", "X-Kubernetes-Pf-Prioritylevel-Uid")


class Hog(Worker):
    """Holds a seat of the priority level at one apiserver."""

    def __init__(self, case, server):
        super().__init__(case)
        self.client, self.held = Client(case.rig, server, case.rig.load_cert), 0

    def work(self):
        response = self.client.send("GET", f"{NAMESPACE}/configmaps/none?resourceVersion={FUTURE}")
        response.read()
        if response.status == 429:
            self.stopping.wait(0.02)
        else:
            assert response.status == 504, response.status
            self.held += 1


@covers("API Priority and Fairness: saturated levels")
class Overload(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        rig = cls.rig
        level = {"metadata": {"name": NAME}, "spec": {"type": "Limited", "limited": {RELEASE.concurrency_shares: 1, "limitResponse": {"type": "Reject"}}}}
        if RELEASE.concurrency_shares == "nominalConcurrencyShares":
            level["spec"]["limited"]["borrowingLimitPercent"] = 0
        schema = {"metadata": {"name": NAME}, "spec": {
            "matchingPrecedence": 100, "priorityLevelConfiguration": {"name": NAME}, "rules": [{
                "subjects": [{"kind": "User", "user": {"name": USER}}],
                "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}]}]}}
        cls.uids = [rig.control.must("POST", f"{FLOW_CONTROL}/{path}", body)["metadata"]["uid"]
                    for path, body in (("prioritylevelconfigurations", level), ("flowschemas", schema))][::-1]
        for path in ("flowschemas", "prioritylevelconfigurations"):
            cls.addClassCleanup(rig.control.request, "DELETE", f"{FLOW_CONTROL}/{path}/{NAME}")
        rig.control.must("POST", f"{NAMESPACE}/configmaps", {"metadata": {"name": NAME}})
        cls.addClassCleanup(rig.control.request, "DELETE", f"{NAMESPACE}/configmaps/{NAME}")
        for name in ADDRESSES:
            api = rig.api(name, cert=rig.load_cert)
            wait_for(f"the priority level on {name}", lambda: cls.fairness(api.get(f"{READ}?resourceVersion=0")) == (200, cls.uids), 30)
        cls.jackstay = Jackstay(rig, [rig.admin_cert, rig.load_cert], log_name="jackstay-overload", port=7497, admin=9697).start()
        cls.addClassCleanup(cls.jackstay.stop)

    @staticmethod
    def fairness(answer):
        return answer.code, [answer.headers.get(name) for name in FAIRNESS]

    def overload(self, names):
        hogs = [Hog(self, self.rig.server(name)) for name in names for _ in range(HOGS)]
        for hog in hogs:
            hog.start()

        def stop():
            for hog in hogs:
                hog.stopping.set()
            for hog in hogs:
                hog.finish()
        self.addCleanup(stop)
        for name in names:
            api = self.rig.api(name, cert=self.rig.load_cert)
            rejection = wait_for(f"{name} to reject requests", lambda: (answer := api.get(READ)).code == 429 and answer, 20)
        self.rejection = self.fairness(rejection), rejection.body  # 1.20 rejects without these headers

    def send(self, api, method, path, body=None):
        """Sends a request through jackstay, and returns its identifier and the answer. All requests have one connection: an
        apiserver may reject a write before its body has arrived, which must not close it."""
        ident = str(uuid.uuid4())
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        return ident, api.request(method, path, body, headers={"Audit-ID": ident}, content_type=kind, keep=True)

    def received(self, idents):
        """For each request the apiservers that received it with their answers, by the audit logs."""
        found = {ident: [] for ident in idents}
        for event in self.rig.audit(lambda e: e["stage"] == "ResponseComplete" and e["auditID"] in found):
            found[event["auditID"]].append((event["requestReceivedTimestamp"], event["server"], event["responseStatus"]["code"]))
        return [[entry[1:] for entry in sorted(found[ident])] for ident in idents]

    def retried(self):
        """Requests that jackstay has repeated after a 429, and hedges, with which it asks another apiserver when one is
        slow, as under load."""
        metrics = self.jackstay.metrics()
        hedges = sum(value for name, value in metrics.items() if name.startswith("jackstay_hedges_total{"))
        return metrics.get('jackstay_retries_total{reason="rejected"}', 0), hedges

    def check(self, sent, rejecting):
        """Checks each answer against what the apiservers received. Returns the numbers of requests that a second apiserver
        answered, and of those that were rejected."""
        asked_two = rejected = 0
        for (ident, answer), received in zip(sent, self.received([ident for ident, _ in sent])):
            servers = [server for server, _ in received]
            what = f"{ident}: {answer!r} after {received}"
            self.assertEqual(len(set(servers)), len(servers), f"sent to one apiserver twice: {what}")
            self.assertIn(len(servers), (1, 2), what)
            self.assertTrue(all(server in rejecting for server, code in received if code == 429), what)
            # The one that has not rejected it. If one was slow, another one was asked meanwhile, and the attempt that was
            # given up is logged with 500.
            codes = [code for _, code in received if code not in (429, 500)]
            self.assertLessEqual(len(codes), 1, what)
            self.assertEqual(answer.code, (codes or [429])[0], what)
            if answer.code == 429:
                rejected += 1
                self.assertEqual((self.fairness(answer), answer.body), self.rejection, what)
                self.assertRegex(answer.headers.get("Retry-After", ""), r"^[0-9]+$", what)  # it grows while 1.36 rejects
            else:
                self.assertEqual(self.fairness(answer), (200, self.uids), what)
            asked_two += len(servers) == 2
        return asked_two, rejected

    def reads(self, count):
        """Reads through jackstay, one after another. Returns them and the least and the largest number that a second
        apiserver may have answered, by the retries and hedges that jackstay reports: a hedge may be cancelled."""
        api, (retries, hedges) = self.rig.api(self.jackstay.server, cert=self.rig.load_cert), self.retried()
        sent = [self.send(api, "GET", READ + ("?resourceVersion=0" if i % 2 else "")) for i in range(count)]
        retries, hedges = (after - before for after, before in zip(self.retried(), (retries, hedges)))
        return sent, (retries, retries + hedges)

    def assert_between(self, count, bounds):
        self.assertTrue(bounds[0] <= count <= bounds[1], f"{count} is not in {bounds}")

    def test_one_apiserver_rejects(self):
        self.overload("a")
        count = asked_two = rejected = 0
        # An apiserver that was slow for a moment gets few reads for some seconds, and few do not use up the budget. The
        # others count as rejecting for as long as their Retry-After of the test before says, and are not asked.
        while (not rejected or asked_two < BURST) and count < 4 * READS:
            sent, retried = self.reads(READS)
            asked_two_now, rejected = self.check(sent, "a")
            self.assert_between(asked_two_now, retried)
            count, asked_two = count + READS, asked_two + asked_two_now
        log(f"    one apiserver rejects: {asked_two} of {count} reads asked of another one, {rejected} rejected when the budget was empty")
        record(f"reads asked of another apiserver after a 429, of {count:,}", asked_two, "reads")
        self.assertGreater(rejected, 0, "the budget was not used up")
        # The burst, and a tenth of the requests.
        self.assertGreaterEqual(asked_two, BURST)
        self.assertLessEqual(asked_two, BURST + count / 10)
        api, before = self.rig.api(self.jackstay.server, cert=self.rig.load_cert), self.retried()
        writes = [self.send(api, "PATCH", READ, {"data": {"turn": str(i)}}) for i in range(WRITES)]
        asked_two, rejected = self.check(writes, "a")
        self.assertEqual((asked_two, self.retried()), (0, before))
        self.assertGreater(rejected, 0, "no write was rejected")

    def test_all_apiservers_reject(self):
        self.overload("abc")
        sent, retried = self.reads(READS // 5)
        asked_two, rejected = self.check(sent, "abc")
        log(f"    all apiservers reject: {asked_two} of {len(sent)} reads asked of another one, {rejected} rejected")
        self.assert_between(asked_two, retried)
        # Few find an apiserver that has not just rejected another one.
        self.assertLessEqual(asked_two, len(sent) // 10)
        self.assertGreater(rejected, len(sent) // 2)
