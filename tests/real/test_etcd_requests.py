"""What reads through jackstay cost etcd: caches answer cached reads also of clients with version floors."""

import time
import unittest
import urllib.request

from cases import RigCase
from figures import record
from rig import ADDRESSES, ADMIN_TOKENS, Jackstay, log, wait_for

ROUNDS, READS = 25, 4
# Reads of ConfigMaps by other components during one measurement. One was seen on the direct line, and two beside jackstay
# while the disk was slow; their sender is not known. A floor that costs reads would cause one in each round.
FOREIGN = 4
OBJECT = "counted"
# Seconds between the lists of a client that lists again and again.
PAUSE = 0.2
# Seconds after which the caches of all ready apiservers have the events of a list, and those of another list that was
# needed to learn where lists come from.
SETTLED = 9
# The form of a read, and whether it names the object.
FORMS = (("GET", "?resourceVersion=0", True), ("LIST", "?resourceVersion=0", False), ("LIST", "?resourceVersion=0&limit=1", False))


class EtcdRequests(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        cls.jackstay = Jackstay(cls.rig, [cls.rig.admin_cert], log_name="jackstay-etcd", port=7495, admin=9695).start()
        cls.addClassCleanup(cls.jackstay.stop)

    def setUp(self):
        self.path = f"/api/v1/namespaces/{self.rig.load_namespace()}/configmaps"
        self.rig.control.must("POST", self.path, {"metadata": {"name": OBJECT}})
        for name in ADDRESSES:
            wait_for("the object in every cache", lambda: self.rig.api(name, cert=self.rig.admin_cert).get(f"{self.path}/{OBJECT}?resourceVersion=0").code == 200, 10)

    def etcd_requests(self):
        """Reads of ConfigMaps that the apiservers have sent to etcd, and reads of any kind that etcd has received."""
        configmaps = 0
        for name in ADDRESSES:
            for line in self.rig.api(name, cert=self.rig.admin_cert).get("/metrics").body.decode().splitlines():
                if line.startswith("etcd_request_duration_seconds_count{") and ('resource="configmaps"' in line or "core.ConfigMap" in line) and (
                        'operation="get"' in line or 'operation="list' in line):
                    configmaps += float(line.rpartition(" ")[2])
        with urllib.request.urlopen("http://127.0.0.1:2379/metrics", timeout=5) as metrics:
            ranges = sum(float(line.rpartition(" ")[2]) for line in metrics.read().decode().splitlines()
                         if line.startswith("grpc_server_started_total{") and 'grpc_method="Range"' in line)
        return configmaps, ranges

    def floors(self):
        return self.jackstay.total("jackstay_version_floors_total")

    def cost(self, server, token, raise_floor, read):
        """Raises the floor and reads, in turn; returns the requests to etcd."""
        api = self.rig.api(server, token=token)
        before = self.etcd_requests()
        for turn in range(ROUNDS):
            raise_floor(api, turn)
            for _ in range(READS):
                api.must("GET", read, keep=True)
        return [after - earlier for earlier, after in zip(before, self.etcd_requests())]

    def compare(self, source, raise_floor):
        """Yields (form, requests of a direct line, requests through jackstay) for each form of a read."""
        for (form, query, names_object), token in zip(FORMS, ADMIN_TOKENS.values()):
            read = self.path + (f"/{OBJECT}" if names_object else "") + query
            (direct, direct_ranges), (own, ranges) = (self.cost(server, token, raise_floor, read) for server in (self.rig.server("a"), self.jackstay.server))
            name = f"{form} {query} after {source}"
            hedges = self.jackstay.total("jackstay_hedges_total")
            log(f"    {ROUNDS * READS} x {name}: reads of etcd {direct:.0f} ({direct_ranges:.0f} of all resources) directly, {own:.0f} ({ranges:.0f}) through jackstay, {hedges:.0f} hedges so far")
            record(f"reads of etcd for {ROUNDS * READS} x {name}, more than of a direct line", own - direct, "requests")
            yield form, direct, own

    def test_lists_some_seconds_after_a_most_recent_list(self):
        """A client that has seen a most-recent list goes on with lists of any version. Where caches do not have the version of
        a most-recent list, which is before etcd 3.5.13, they cost etcd nothing once every cache has the events of that time."""
        self.rig.control.must("POST", self.path.replace("configmaps", "secrets"), {"metadata": {"name": f"{OBJECT}-later"}})
        for query, token in zip(("?resourceVersion=0", "?resourceVersion=0&limit=1"), ADMIN_TOKENS.values()):
            costs = []
            for server in (self.rig.server("a"), self.jackstay.server):
                api = self.rig.api(server, token=token)
                api.must("GET", self.path, keep=True)
                settled = time.monotonic() + SETTLED
                while time.monotonic() < settled:
                    api.must("GET", self.path + query, keep=True)
                    time.sleep(PAUSE)
                before = self.etcd_requests()[0]
                for _ in range(ROUNDS * READS):
                    api.must("GET", self.path + query, keep=True)
                costs.append(self.etcd_requests()[0] - before)
            direct, own = costs
            log(f"    {ROUNDS * READS} x LIST {query} {SETTLED} s after a most-recent list: reads of etcd {direct:.0f} directly, {own:.0f} through jackstay")
            record(f"reads of etcd for {ROUNDS * READS} x LIST {query} {SETTLED} s after a most-recent list, more than of a direct line", own - direct, "requests")
            self.assertLessEqual(direct, FOREIGN)
            self.assertLessEqual(own, len(ADDRESSES) + FOREIGN, query)

    def test_floors_of_objects_cost_nothing(self):
        """The version of a write is the floor: most endpoints are not known to have reached it, so jackstay sends it."""
        before = self.floors()
        for form, direct, own in self.compare("writes", lambda api, turn: api.must(
                "PATCH", f"{self.path}/{OBJECT}", {"data": {"turn": str(turn)}}, content_type="application/merge-patch+json", keep=True)):
            self.assertLessEqual(max(direct, own), FOREIGN, form)
        self.assertGreaterEqual(self.floors() - before, ROUNDS, "no read had a floor")

    def test_floors_of_cached_lists_cost_next_to_nothing(self):
        """An endpoint that is not known to have reached the floor is asked for the most recent state, but one that is
        known to is preferred."""
        for form, direct, own in self.compare("cached lists", lambda api, _: api.must("GET", f"{self.path}?resourceVersion=0", keep=True)):
            self.assertLessEqual(direct, FOREIGN, form)
            self.assertLessEqual(own, len(ADDRESSES) + FOREIGN, form)

    def test_floors_of_most_recent_lists(self):
        """No cache is sure to reach the version of a most-recent list before the next event: a GET then reads its key from
        etcd, and a LIST comes from a cache that etcd tells its progress."""
        def most_recent_list(api, turn):
            api.must("GET", self.path, keep=True)
        # A version that no ConfigMap has.
        self.rig.control.must("POST", self.path.replace("configmaps", "secrets"), {"metadata": {"name": OBJECT}})
        for form, direct, own in self.compare("most-recent lists", most_recent_list):
            self.assertGreaterEqual(direct, ROUNDS)
            # A few more: a hedge on a busy machine reads a key a second time.
            self.assertLessEqual(own, direct + ROUNDS * READS + len(ADDRESSES) + FOREIGN, form)
            if form == "LIST" and self.caches_follow_etcd():
                self.assertLessEqual(own, direct + len(ADDRESSES) + FOREIGN, form)

    def test_events_are_listed_in_pages(self):
        """Events have no watch cache: without the limit, etcd would read all of them for one response."""
        namespace, count = self.rig.load_namespace(), 60
        path = f"/api/v1/namespaces/{namespace}/events"
        api = self.rig.api(self.jackstay.server, cert=self.rig.admin_cert)
        for number in range(count):
            api.must("POST", path, {"metadata": {"name": f"page-{number}"}, "involvedObject": {"namespace": namespace}, "reason": "page"}, keep=True)
        # The client has a floor of objects now, then of lists.
        for source in ("writes", "a list"):
            items, pages, token = 0, 0, ""
            while True:
                query = f"?limit=25&continue={token}" if token else "?resourceVersion=0&limit=25"
                answer = api.must("GET", path + query, keep=True)
                items, pages, token = items + len(answer["items"]), pages + 1, answer["metadata"].get("continue")
                self.assertLessEqual(len(answer["items"]), 25, f"a page after {source}")
                if not token:
                    break
            log(f"    {items} events in {pages} pages after {source}")
            self.assertGreaterEqual(items, count)
        self.assertGreater(self.floors(), 0)

    def caches_follow_etcd(self):
        """Whether a watch cache reaches versions without events: with etcd 3.5.13 and later from Kubernetes 1.31 on."""
        version = int(self.rig.control.must("GET", self.path)["metadata"]["resourceVersion"])
        answer = self.rig.control.get(f"{self.path}?resourceVersion=0")
        return int(answer.json["metadata"]["resourceVersion"]) >= version

