"""An upstream whose only endpoint is an L4 load balancer: its three apiservers are told apart, and the promises for three
addresses hold with at most one second more. Clients are readers, writers, busy and quiet watches, and leader elections."""

import time
import unittest
import uuid

import test_starting
from balancer import ENDPOINT, HAProxy, Nftables
from cases import long_form
from figures import record, within
from leases import LEADERS, LEASES, Leader
from rig import ADDRESSES, ADMIN_TOKENS, EXTRA_ADDRESSES, LOAD_BALANCER, PORT, Jackstay, log, summary, wait_for
from rig_l4 import connection_ports
from settings import Settings
from test_jackstay import LoadCase
from test_lag import CUT, Reader, Watcher
from test_watch_cache import LAGS, ServiceWriter

KIND = "auto"
MORE = 1  # second, beyond the promise for three addresses
MEMBERS = 2  # apiservers that are endpoints
ARRIVED = 1.5  # seconds, the time limit of a request without an apiserver
RUNNING = 4
SETTLED = 90  # the surplus endpoint is given up after a minute
MORE_CONNECTIONS = 3  # than with one endpoint
CONNECTS_HEALTHY = 8  # a minute
CONNECTS_FAULT, FAULT_TIME = 75, 20  # in one fault of this time; one a second beyond it, as the budget of a search allows
HEALTHY, DARK = 120, 60  # seconds
LAG, LAG_WATCHES = 10, 8  # seconds and watches, as in test_watch_cache
NAMES = {f"{address}:{PORT}": name for name, address in {**ADDRESSES, **EXTRA_ADDRESSES}.items()}


def backends(jackstay):
    """The endpoints of jackstay's status, by the names of their apiservers."""
    endpoints = jackstay.status()["upstreams"][0]["endpoints"]
    return {NAMES.get(e["address"].partition("/")[2], e["address"]): e for e in endpoints}


def are_ready(jackstay):
    """Whether at least two apiservers are endpoints, and all of them are ready."""
    found = backends(jackstay)
    return len(found) >= MEMBERS and set(found) <= set(NAMES.values()) and all(e["state"] == "ready" for e in found.values())


def is_settled(jackstay):
    """Whether exactly two apiservers are endpoints."""
    return are_ready(jackstay) and len(backends(jackstay)) == MEMBERS


def open_connections(jackstay):
    return len(connection_ports(jackstay.pid, PORT).get(LOAD_BALANCER, ()))


class BalancerCase(LoadCase):
    """Base of the tests of one balancer."""

    BALANCER = None
    LISTENER = 7551
    KIND = KIND

    @classmethod
    def prepare(cls):
        cls.balancer = cls.BALANCER(cls.rig).start()
        cls.addClassCleanup(cls.balancer.stop)
        cls.jackstay = cls.create_jackstay(f"jackstay-{cls.__name__.lower()}", cls.LISTENER).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server

    @classmethod
    def create_jackstay(cls, name, port, kind=None):
        def adapt(config):
            config["upstreams"][0]["kind"] = kind or cls.KIND
        return Jackstay(cls.rig, [cls.rig.admin_cert, cls.rig.load_cert], [ENDPOINT], adapt=adapt, log_name=name, port=port, admin=port + 2200)

    def setUp(self):
        super().setUp()
        wait_for("apiservers as endpoints", self.is_ready, 60)

    def is_ready(self):
        return are_ready(self.jackstay)

    def victim(self):
        """The apiserver with most watches of those that are endpoints, without the one that the rig uses."""
        watches = {name: e["watches"] for name, e in backends(self.jackstay).items()}
        name = max((name for name in self.FAULTY if name in watches), key=watches.get)
        log(f"    the fault affects {name}; watches: {watches}")
        return {**self.rig.apiservers, **self.rig.extra}[name]

    def workers(self, server):
        """Leader elections, and reads whose versions are compared, through a server."""
        for index in range(LEADERS):
            self.rig.control.request("DELETE", f"{LEASES}/leader-{index}")
        own, self.server = self.server, server
        try:
            leaders = [Leader(self, index) for index in range(LEADERS)]
            readers = [Reader(self, "?resourceVersion=0"), Reader(self, "")]
        finally:
            self.server = own
        for worker in (*leaders, *readers):
            worker.start()
        return leaders, readers

    def finish(self, what, leaders, readers):
        """Ends the workers, and returns the number of leases lost."""
        for worker in (*leaders, *readers):
            worker.finish()
        for leader in leaders:
            if leader.answers:
                log(f"    {leader.name}: {len(leader.lost)} times lost, slowest renewal {leader.slowest:.1f} s; {leader.answers}")
        lost = sum(len(leader.lost) for leader in leaders)
        record(f"{what}: leases lost", lost, "leases")
        return lost

    def fault(self, what, fault, seconds=8, slowest_read=0.6, busy=2.5, delay=None, renewal=4.5, **options):
        """A fault beside all clients. Times are the promises for three addresses."""
        what = f"{self.balancer.NAME}: {what}"
        leaders, readers = self.workers(self.server)
        connects, begun = self.balancer.connects(), time.monotonic()
        limit = slowest_read + MORE
        self.run_fault(what, fault, seconds, slowest_read=limit, busy=busy + MORE, delay=(delay or busy + 1) + MORE, quiet=True, renewal=renewal + MORE, **options)
        connects, took = self.balancer.connects() - connects, time.monotonic() - begun
        lost = self.finish(what, leaders, readers)
        log(f"    {connects} connects in {took:.0f} s; endpoints: { {name: (e['state'], e['watches']) for name, e in backends(self.jackstay).items()} }")
        with self.subTest(f"{what}: leader elections and versions"):
            self.assertEqual((lost, [r.backwards for r in readers], [r.failed for r in readers]), (0, [0, 0], [[], []]))
        for reader, kind in zip(readers, ("cached", "recent")):
            with self.subTest(f"{what}: {kind} read"):
                within(self, f"{what}: slowest {kind} read", reader.slowest, "s", limit)
        with self.subTest(f"{what}: slowest renewal"):
            within(self, f"{what}: slowest renewal of a lease", max(leader.slowest for leader in leaders), "s", renewal + MORE)
        with self.subTest(f"{what}: connects"):
            within(self, f"{what}: connects", connects, f"in {took:.0f} s", CONNECTS_FAULT + max(0, took - FAULT_TIME))
        self.check_endpoints(what)

    def check_endpoints(self, what):
        with self.subTest(f"{what}: endpoints afterwards"):
            wait_for("two apiservers as endpoints", lambda: is_settled(self.jackstay), SETTLED)

    def flows_dropped(self):
        self.fault("flows dropped", lambda: self.rig.faults.drop_flows(self.jackstay.pid))

    def dark(self):
        self.fault("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(self.victim().address), DARK)

    def killed_and_restarted(self):
        def restart():
            self.assertFalse(self.killed.process.running)
            self.killed.start()

        def kill():
            self.killed = self.victim()
            self.killed.kill()
        self.fault("SIGKILL and restart of one", kill, seconds=4, counted=False, meanwhile=restart, slowest_read=0.3, busy=1)

    def stopped(self):
        self.fault("SIGSTOP of one", lambda: self.victim().pause(), seconds=12, counted=False, busy=6, delay=6)

    def cut_off_from_etcd(self, slowest_read=0.25):
        self.fault("one cut off from etcd", lambda: self.rig.faults.drop_etcd(self.victim().name), CUT, slowest_read=slowest_read, busy=3)

    def arriving(self):
        """New connections while one apiserver is dark: running jackstays get their first tokens, and another jackstay starts."""
        running = [self.create_jackstay(f"jackstay-running-{number}", self.LISTENER + 40 + number).start() for number in range(RUNNING)]
        for jackstay in running:
            self.addCleanup(jackstay.stop)
            wait_for("apiservers as endpoints", lambda: are_ready(jackstay), 30)
        self.rig.faults.drop_address(self.victim().address)
        times = {"first read with a token": max(self.read(jackstay.server) for jackstay in running)}
        begun = time.monotonic()
        starting = self.create_jackstay("jackstay-starting-in-fault", self.LISTENER + 50)
        self.addCleanup(starting.stop)
        starting.start()
        times["jackstay starts"] = time.monotonic() - begun
        times["first read of that jackstay"] = self.read(starting.server)
        wait_for("apiservers as endpoints", lambda: are_ready(starting), 30)
        record(f"{self.balancer.NAME}, one apiserver is dark: two apiservers as endpoints of a jackstay that starts", time.monotonic() - begun, "s")
        for what, took in times.items():
            with self.subTest(what):
                within(self, f"{self.balancer.NAME}, one apiserver is dark: {what}", took, "s", ARRIVED + MORE)

    def read(self, server):
        """The time of a read with a token that this jackstay has not seen."""
        begun = time.monotonic()
        answer = self.rig.api(server, token=ADMIN_TOKENS["admin-0"]).get("/api/v1/namespaces/default/configmaps?limit=1")
        with self.subTest("the read"):
            self.assertEqual(answer.code, 200, answer)
        return time.monotonic() - begun

    def lagging(self):
        """As in test_watch_cache: all checks of the apiserver pass."""
        what, rig, since = f"{self.balancer.NAME}: a watch cache lags", self.rig, self.log_size()
        writer, watchers = ServiceWriter(self), [Watcher(self, "services") for _ in range(LAG_WATCHES)]
        readers = [Reader(self, query, "services") for query in ("?resourceVersion=0", "")]
        for worker in (writer, *watchers, *readers):
            worker.start()
        wait_for("events on every watch", lambda: all(len(watcher.delays) > 20 for watcher in watchers), 30)
        wait_for("a watch at a or b", lambda: any(backends(self.jackstay).get(name, {}).get("watches") for name in self.FAULTY), 60)
        victim, reasons, begun, first = self.victim().name, set(), time.monotonic(), None
        connects = self.balancer.connects()
        rig.faults.drop_etcd_of_services(victim)
        while time.monotonic() < begun + LAG:
            for name, endpoint in backends(self.jackstay).items():
                if endpoint["state"] == "degraded":
                    first = first or time.monotonic() - begun
                    self.assertEqual(name, victim, endpoint["reason"])
                    reasons.add(endpoint["reason"])
            time.sleep(0.1)
        left = backends(self.jackstay).get(victim, {"watches": 0})["watches"]
        record(f"{what}: connects", self.balancer.connects() - connects, f"in {LAG} s")
        self.assertGreater(rig.faults.dropped(), 0, "the fault dropped no packet")
        rig.faults.clear()
        for worker in (*readers, *watchers, writer):
            worker.finish()
        log(f"    degraded after {first and round(first, 2)} s: {sorted(reasons)}")
        self.assertTrue(reasons, "not degraded")
        for reason in reasons:
            self.assertRegex(reason, LAGS)
        self.assertEqual(left, 0)
        self.assertEqual([watcher.ends for watcher in watchers], [[]] * LAG_WATCHES)
        self.assertEqual(([r.backwards for r in readers], [r.failed for r in readers]), ([0, 0], [[], []]))
        within(self, f"{what}: latest event", max(delay for watcher in watchers for _, delay in watcher.delays), "s", 5 + MORE)
        within(self, f"{what}: slowest cached read", readers[0].slowest, "s", 5 + MORE)
        self.check_story(what, since)
        self.check_endpoints(what)

    def healthy(self):
        """Connections and connects of a node, beside those of one endpoint."""
        plain = self.create_jackstay("jackstay-one-endpoint", self.LISTENER + 1, "apiserver").start()
        self.addCleanup(plain.stop)
        counts = {}
        for jackstay in (plain, self.jackstay):
            load = self.load(HEALTHY + 5, jackstay.server)
            load.until(5)
            connects, most = self.balancer.connects(), 0
            while time.monotonic() < load.begun + HEALTHY + 5:
                most = max(most, open_connections(jackstay))
                time.sleep(1)
            connects = self.balancer.connects() - connects
            self.check_report(f"{self.balancer.NAME}: healthy", load, load.finish(), writes_may_fail=False)
            counts[jackstay] = most
            log(f"    {most} connections, {connects} connects in {HEALTHY} s")
        record(f"{self.balancer.NAME}, healthy: connections with one endpoint", counts[plain], "")
        record(f"{self.balancer.NAME}, healthy: connections", counts[self.jackstay], "")
        self.assertLessEqual(counts[self.jackstay] - counts[plain], MORE_CONNECTIONS)
        within(self, f"{self.balancer.NAME}, healthy: connects", 60 * connects / HEALTHY, "a minute", CONNECTS_HEALTHY)

    def one_endpoint(self):
        """For comparison: with one endpoint, the clients of an apiserver that is cut off from etcd wait. Only figures."""
        what, rig = f"{self.balancer.NAME}, kind: apiserver, one cut off from etcd", self.rig
        plain = self.create_jackstay("jackstay-one-endpoint", self.LISTENER + 1, "apiserver")
        self.addCleanup(plain.stop)

        def reached():
            """The apiserver that the connection of the clients' identity has reached."""
            plain.stop()
            plain.start()
            ident = str(uuid.uuid4())
            rig.api(plain.server, cert=rig.admin_cert).get("/api", headers={"Audit-ID": ident})
            name = rig.audited_user(ident)[2]["server"]
            return name in self.FAULTY and name
        name = wait_for("a connection to a or b", reached, 60)
        leaders, readers = self.workers(plain.server)
        load = self.load(CUT + 7, plain.server, cert=rig.admin_cert)
        load.until(3)
        rig.faults.drop_etcd(name)
        load.until(3 + CUT)
        self.rig.recover()
        report = load.finish()
        log(f"{what}: {summary(report)}")
        self.finish(what, leaders, readers)
        for title, value, unit in (
                ("slowest read", report["requests"]["read"]["slowest_ms"] / 1000, "s"),
                ("failed reads", report["requests"]["read"]["failed"], ""),
                ("longest silence of a busy watch", report["watches"]["busy_silence_ms"] / 1000, "s"),
                ("slowest renewal", max(leader.slowest for leader in leaders), "s")):
            record(f"{what}: {title}", value, unit)


class LongFormCase(BalancerCase):
    """The faults that are long forms with each balancer."""

    @long_form("test_jackstay has the fault without a balancer")
    def test_apiserver_unreachable(self):
        self.dark()

    @long_form("test_apiserver_killed_and_restarted has connects that fail")
    def test_arrival_while_an_apiserver_is_unreachable(self):
        self.arriving()

    @long_form("test_jackstay has the fault without a balancer")
    def test_apiserver_stopped(self):
        self.stopped()

    @long_form("test_watch_cache has the fault without a balancer")
    def test_watch_cache_lags(self):
        self.lagging()

    @long_form("a measurement of the behaviour with one endpoint")
    def test_one_endpoint_cut_off_from_etcd(self):
        self.one_endpoint()


class ThroughHAProxy(LongFormCase, unittest.TestCase):
    BALANCER = HAProxy

    def test_established_flows_dropped(self):
        self.flows_dropped()

    def test_apiserver_killed_and_restarted(self):
        self.killed_and_restarted()

    @long_form("ThroughNftables.test_apiserver_cut_off_from_etcd has the same apiserver")
    def test_apiserver_cut_off_from_etcd(self):
        self.cut_off_from_etcd()

    @long_form("a measurement of two minutes")
    def test_connections_of_a_node(self):
        self.healthy()


class ThroughNftables(LongFormCase, unittest.TestCase):
    BALANCER, LISTENER = Nftables, 7553

    def test_apiserver_cut_off_from_etcd(self):
        self.cut_off_from_etcd()

    @long_form("ThroughHAProxy.test_established_flows_dropped")
    def test_established_flows_dropped(self):
        self.flows_dropped()

    @long_form("ThroughHAProxy.test_apiserver_killed_and_restarted")
    def test_apiserver_killed_and_restarted(self):
        self.killed_and_restarted()


@long_form("ThroughNftables.test_apiserver_cut_off_from_etcd has apiservers with a certificate each")
class SharedCertificate(BalancerCase, unittest.TestCase):
    """Apiservers that share a certificate are told apart by the addresses that they advertise. The load has tokens, with
    which jackstay asks nothing of its own."""

    FAULTY, LISTENER = "de", 7560

    @classmethod
    def BALANCER(cls, rig):
        certificate = rig.pki.issue("shared", "/CN=kube-apiserver", [*EXTRA_ADDRESSES.values(), LOAD_BALANCER, "127.0.0.1", "kubernetes"])
        cls.addClassCleanup(rig.stop_extra)
        rig.start_extra(**{name: Settings(serving_cert=certificate) for name in EXTRA_ADDRESSES})
        return Nftables(rig, tuple(EXTRA_ADDRESSES.values()))

    def test_apiserver_cut_off_from_etcd(self):
        self.fault("one of a shared certificate cut off from etcd, tokens", lambda: self.rig.faults.drop_etcd(self.busiest_apiserver().name),
                   CUT, slowest_read=3.5, busy=3, flags={"token": ADMIN_TOKENS["admin-1"]})


@long_form("SharedCertificate has apiservers that are told apart")
class Indistinct(BalancerCase, unittest.TestCase):
    """Apiservers that share a certificate and advertise one address, as those of HyperShift. Each connection is judged by
    its own /readyz."""

    FAULTY, LISTENER, KIND = "de", 7570, "balancer"

    @classmethod
    def BALANCER(cls, rig):
        certificate = rig.pki.issue("shared", "/CN=kube-apiserver", [*EXTRA_ADDRESSES.values(), LOAD_BALANCER, "127.0.0.1", "kubernetes"])
        cls.addClassCleanup(rig.stop_extra)
        settings = Settings(serving_cert=certificate, external_hostname="api.example.com")
        rig.start_extra(**{name: settings for name in EXTRA_ADDRESSES})
        return Nftables(rig, tuple(EXTRA_ADDRESSES.values()))

    def is_ready(self):
        """Two sets of connections are ready."""
        endpoints = self.jackstay.status()["upstreams"][0]["endpoints"]
        names = sorted(endpoint["address"].partition("/")[2] for endpoint in endpoints)
        return names == ["any-1", "any-2"] and all(endpoint["state"] == "ready" for endpoint in endpoints)

    def victim(self):
        return self.busiest_apiserver()

    def check_endpoints(self, what):
        with self.subTest(f"{what}: endpoints afterwards"):
            wait_for("two sets of connections", self.is_ready, SETTLED)

    def test_apiserver_cut_off_from_etcd(self):
        self.cut_off_from_etcd(slowest_read=3.5)  # A late read has no other endpoint.

    def test_established_flows_dropped(self):
        self.flows_dropped()

    def test_apiserver_killed_and_restarted(self):
        self.killed_and_restarted()

    def test_apiserver_stopped(self):
        self.stopped()

    def test_apiserver_unreachable(self):
        self.dark()


class StartingBehindBalancer(test_starting.StartingCase):
    """Apiservers that refuse every user while they start. A certificate of a node and a jackstay without a credential for
    its probe, which recognises apiservers only by their certificates."""

    BALANCER = None
    ENDPOINTS, LEAST = [ENDPOINT], MEMBERS

    @staticmethod
    def adapt(config):
        config["upstreams"][0]["kind"] = KIND

    @classmethod
    def prepare(cls):
        cls.balancer = cls.BALANCER(cls.rig).start()
        cls.addClassCleanup(cls.balancer.stop)
        super().prepare()


@long_form("test_starting has the fault without a balancer")
class StartingBehindHAProxy(StartingBehindBalancer, unittest.TestCase):
    BALANCER, LISTENER = HAProxy, 7555

    def test_restarts_refuse_no_read_and_lose_no_watch(self):
        self.check_restarts("HAProxy: ")


@long_form("test_starting has the fault without a balancer")
class StartingBehindNftables(StartingBehindBalancer, unittest.TestCase):
    BALANCER, LISTENER = Nftables, 7557

    def test_restarts_refuse_no_read_and_lose_no_watch(self):
        self.check_restarts("nftables: ")
