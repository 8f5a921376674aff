"""jackstay at L7 in front of an apiserver behind a line that delays every byte: another region, an edge site."""

import base64
import http.client
import random
import socket
import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path

from cases import RigCase, StoppedOnExit, long_form
from figures import LONG, STRICT, record, within
from leases import Holder
from rig import ADDRESSES, PORT, TOKEN, Jackstay, Process, log, sh, wait_for
from rig_l4 import Host, passthrough
from workers import Client, Worker

RELAY = 7470
LISTENER = 7471
# Objects of 512 KiB: a LIST of 20 MB.
OBJECTS = 40
ROUNDS = 5 if LONG or STRICT else 3
# A slow line: its rate, and how much its queue holds.
RATE, QUEUE = "1mbit", "5s"
# Objects of 512 KiB: more than the line carries while leases are renewed.
SLOW_OBJECTS = 30
SETTLED, SECONDS = (10, 90) if LONG or STRICT else (6, 20)


class LongLine(RigCase, unittest.TestCase):
    """A LIST of 20 MB by kubectl, through jackstay and with the same line without it."""

    @classmethod
    def prepare(cls):
        cls.namespace = cls.rig.load_namespace()
        cls.list = f"/api/v1/namespaces/{cls.namespace}/configmaps"
        data = random.Random(1).randbytes(384 << 10)
        for i in range(OBJECTS):
            body = {"metadata": {"name": f"big-{i}"}, "data": {"x": base64.b64encode(data).decode()}}
            cls.rig.control.must("POST", cls.list, body, keep=True)

    def test_large_list_at_20_ms(self):
        self.check_large_list(20)

    @long_form("test_large_list_at_20_ms")
    def test_large_list_at_80_ms(self):
        self.check_large_list(80)

    def check_large_list(self, round_trip):
        argv = [sys.executable, Path(__file__).with_name("delay.py"), str(RELAY), f"{ADDRESSES['a']}:{PORT}", str(round_trip)]
        with StoppedOnExit(subprocess.Popen(argv)):
            jackstay = Jackstay(self.rig, [self.rig.admin_cert], endpoints=[f"127.0.0.1:{RELAY}"], log_name=f"jackstay-{round_trip}-ms",
                                port=LISTENER, admin=LISTENER + 2000)
            wait_for("the relay", lambda: self.rig.api(f"https://127.0.0.1:{RELAY}", cert=self.rig.admin_cert).get("/readyz").code == 200, 20)
            jackstay.start()
            try:
                self.compare(jackstay, round_trip)
            finally:
                jackstay.stop()

    def compare(self, jackstay, round_trip):
        for credential, options in (("certificate", {"cert": self.rig.admin_cert}), ("token", {"token": TOKEN})):
            direct = self.rig.kubeconfig(f"line-direct-{credential}", f"https://127.0.0.1:{RELAY}", **options)
            through = self.rig.kubeconfig(f"line-{credential}", jackstay.server, **options)
            times = {direct: [], through: []}
            for _ in range(ROUNDS):
                for config, seconds in times.items():
                    begun = time.monotonic()
                    done = self.rig.kubectl(config, "get", "--raw", self.list, "--disable-compression")
                    seconds.append(time.monotonic() - begun)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertGreater(len(done.stdout), 20_000_000)
                # The windows of the upstream connections become small again.
                time.sleep(1.5)
            direct, through = (statistics.median(seconds) for seconds in times.values())
            within(self, f"LIST of 20 MB at {round_trip} ms, {credential}, through jackstay ({through:.2f} s)", through / direct, "× direct", 1.2)
        changes = jackstay.total("jackstay_upstream_window_changes_total")
        self.assertGreaterEqual(changes, 2 * ROUNDS, "the windows grew and shrank")


class SlowNode(Host):
    """A host with jackstay. The line of its router carries 1 Mbit/s in each direction, and the router queues bytes. Clients of
    the host reach it by another link."""

    ROUTER, LINE, FAST = ("10.99.5.1", "10.99.5.2"), ("10.99.7.1", "10.99.7.2"), ("10.99.6.1", "10.99.6.2")

    def __init__(self, rig):
        super().__init__(rig, self.LINE[1], self.LINE[0], "slow-node")
        self.router = Host(rig, self.ROUTER[1], self.ROUTER[0], "slow-router")

    def start(self):
        self.router.start()
        super().start()
        # The kernel of a sender does not fill a queue of its own host (TCP small queues).
        sh("ip", "link", "set", self.link, "netns", self.router.namespace_process.pid)
        for command in (f"addr add {self.gateway}/24 dev {self.link}", f"link set {self.link} up"):
            sh(*self.router.inside(), "ip", *command.split())
        sh(*self.router.inside(), "sysctl", "-qw", "net.ipv4.ip_forward=1")
        sh("ip", "route", "add", f"{self.address}/32", "via", self.router.address)
        self.fast = self.link + "f"
        sh("ip", "link", "add", self.fast, "type", "veth", "peer", "name", "eth1", "netns", self.namespace_process.pid)
        sh("ip", "addr", "add", f"{self.FAST[0]}/24", "dev", self.fast)
        sh("ip", "link", "set", self.fast, "up")
        for command in (f"addr add {self.FAST[1]}/24 dev eth1", "link set eth1 up"):
            sh(*self.inside(), "ip", *command.split())
        self.limit("add", QUEUE)
        return self

    def limit(self, act, queue):
        for link in ("eth0", self.link):
            sh(*self.router.inside(), "tc", "qdisc", act, "dev", link, "root", "tbf", "rate", RATE, "burst", "5kb", "latency", queue)

    def stop(self):
        if self.namespace_process is not None:
            sh("ip", "link", "del", self.fast, check=False)
        super().stop()
        self.router.stop()

    def run(self, jackstay, port):
        """Starts jackstay in the namespace."""
        jackstay.process = Process("slow-jackstay", [*self.inside(), jackstay.binary, "run", "--config", jackstay.config], jackstay.process.logfile)
        jackstay.server = f"https://{self.FAST[1]}:{port}"
        return jackstay.start(60)


class Others:
    """Programs of the node whose connections fill the queue of the line in both directions, as pulls of images do."""

    CONNECTIONS = 12

    def __init__(self, case, node):
        self.case, self.node = case, node

    def start(self):
        directions = (("up", (), self.node.inside(), self.node.ROUTER[0]), ("down", self.node.inside(), (), self.node.address))
        for name, sink, source, address in directions:
            self.run(f"others-{name}-sink", *sink, "socat", "-u", f"TCP-LISTEN:7490,bind={address},fork,reuseaddr", "OPEN:/dev/null")
        for i in range(self.CONNECTIONS):
            for name, sink, source, address in directions:
                self.run(f"others-{name}-{i}", *source, "socat", "-u", "OPEN:/dev/zero", f"TCP:{address}:7490,retry=50,interval=0.1")
            # A queue that is full at once cannot be told from a lost line.
            time.sleep(0.4)

    def run(self, name, *argv):
        process = Process(name, argv, self.case.rig.dir / f"{name}.log").start()
        self.case.addCleanup(process.stop)


class Transfer(Worker):
    """Transfers one object after another. On this line, an apiserver cuts a large list after its `--request-timeout`."""

    def __init__(self, case, server, path):
        super().__init__(case)
        self.client, self.path, self.bytes = Client(case.rig, server, case.rig.admin_cert), path, 0

    def work(self):
        try:
            self.transfer()
        except (OSError, ValueError, http.client.HTTPException):
            self.client.close()
            self.stopping.wait(0.2)


class Puller(Transfer):
    """Reads large lists."""

    def transfer(self):
        response = self.client.send("GET", self.path)
        while not self.stopping.is_set() and (part := response.read1(1 << 16)):
            self.bytes += len(part)
        self.client.close()


class Pusher(Transfer):
    """Writes large objects. The response has only their metadata."""

    def __init__(self, case, server, path):
        super().__init__(case, server, path)
        data = base64.b64encode(random.Random(2).randbytes(256 << 10)).decode()
        self.body = {"metadata": {"name": f"pushed-{id(self)}"}, "data": {"x": data}}
        case.rig.control.must("POST", path, self.body)

    def transfer(self):
        accept = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
        code, _ = self.client.call("PUT", f"{self.path}/{self.body['metadata']['name']}", self.body, headers={"Accept": accept})
        self.bytes += len(self.body["data"]["x"]) if code == 200 else 0


class SlowLine(RigCase, unittest.TestCase):
    """Leases on a line that is busy with a large list and large writes."""

    @classmethod
    def prepare(cls):
        cls.namespace = cls.rig.load_namespace()
        cls.list = f"/api/v1/namespaces/{cls.namespace}/configmaps"
        data = base64.b64encode(random.Random(1).randbytes(384 << 10)).decode()
        for i in range(SLOW_OBJECTS):
            cls.rig.control.must("POST", cls.list, {"metadata": {"name": f"big-{i}"}, "data": {"x": data}}, keep=True)
        cls.node = SlowNode(cls.rig)
        cls.addClassCleanup(cls.node.stop)
        cls.node.start()
        cls.serving = cls.rig.pki.issue("slow-node", "/CN=jackstay", [cls.node.FAST[1], "localhost"])

    def on_node(self, port, mode):
        """Makes jackstay listen on the fast link."""
        def adapt(config):
            config["admin"]["bind"] = f"{self.node.FAST[1]}:{port + 2000}"
            config["listeners"][0]["bind"] = [f"{self.node.FAST[1]}:{port}"]
            if mode == "terminate":
                config["listeners"][0]["tls"] = dict(zip(("cert_file", "key_file"), self.serving))
        return adapt

    def load(self, what, server, jackstay, others=None):
        """Renews leases beside transfers in both directions."""
        holders = [Holder(self, server, index) for index in range(2)]
        workers = [] if others else [Puller(self, server, self.list), Pusher(self, server, self.list)]
        for holder in holders:
            holder.times, call = [], holder.client.call

            def timed(*args, holder=holder, call=call, **kwargs):
                begun = time.monotonic()
                try:
                    return call(*args, **kwargs)
                finally:
                    holder.times.append(time.monotonic() - begun)
            holder.client.call = timed
        for worker in (*holders, *workers):
            worker.start()
        if others:
            others.start()
        time.sleep(SETTLED)
        for holder in holders:
            holder.times.clear()
        before = [worker.bytes for worker in workers]
        time.sleep(SECONDS)
        times = sorted(took for holder in holders for took in holder.times)
        rates = [(worker.bytes - bytes) * 8 / 1e6 / SECONDS for worker, bytes in zip(workers, before)]
        for worker in (*holders, *workers):
            worker.stopping.set()
        for worker in (*holders, *workers):
            worker.finish()
        for holder in holders:
            self.assertEqual(holder.failed, [])
        self.assertGreater(len(times), SECONDS / 10 if others else SECONDS / 2)
        for direction, rate in zip(("received", "sent"), rates):
            record(f"{what}: {direction} beside the leases", rate, "Mbit/s")
        record(f"{what}: longest renewal", times[-1], "s")
        if not others:
            within(self, f"{what}: 99 % of {len(times)} renewals", times[int(len(times) * 0.99)], "s", 1)
        log(f"    median {times[len(times) // 2]:.2f} s; paced {jackstay.total('jackstay_upstream_paced_transfers_total'):.0f} transfers")

    @long_form("connection::tests::health::suspicion_and_verdicts_wait_for_the_delay_of_the_line")
    def test_leases_beside_transfers_of_others(self):
        """The line has a queue of 2 s in each direction, and programs of the node fill it."""
        self.node.limit("change", "2s")
        self.addCleanup(self.node.limit, "change", QUEUE)
        self.load("1 Mbit/s, terminate, transfers of others", *self.start_terminating(7482), others=Others(self, self.node))

    @long_form("connection::tests::health::suspicion_and_verdicts_wait_for_the_delay_of_the_line")
    def test_flows_beside_transfers_of_others(self):
        """The same at L4."""
        self.node.limit("change", "2s")
        self.addCleanup(self.node.limit, "change", QUEUE)
        self.load("1 Mbit/s, passthrough, transfers of others", *self.start_passing(7483), others=Others(self, self.node))

    def test_leases_beside_a_large_list_and_large_writes(self):
        """At L7, all requests have one identity."""
        self.load("1 Mbit/s, terminate", *self.start_terminating(7480))

    def test_leases_beside_flows_with_a_large_list_and_large_writes(self):
        """At L4, each client has a connection of its own."""
        self.load("1 Mbit/s, passthrough", *self.start_passing(7481))

    def start_terminating(self, port):
        """Starts jackstay in mode `terminate`. Returns its address."""
        jackstay = Jackstay(self.rig, [self.rig.admin_cert], adapt=self.on_node(port, "terminate"), log_name=f"jackstay-slow-{port}",
                            port=port, admin=port + 2000)
        jackstay.admin_address = f"{self.node.FAST[1]}:{port + 2000}"
        self.addCleanup(jackstay.stop)
        self.node.run(jackstay, port)
        return jackstay.server, jackstay

    def start_passing(self, port):
        """Starts jackstay in mode `passthrough`. Returns its address."""
        jackstay = passthrough(self.rig, port=port, admin=port + 2000, log_name=f"jackstay-slow-{port}", adapt=self.on_node(port, "passthrough"))
        jackstay.admin_address = f"{self.node.FAST[1]}:{port + 2000}"
        self.addCleanup(jackstay.stop)
        self.node.run(jackstay, port)
        # The certificates of the apiservers name the address of this host, not that of the node.
        relay = Process(f"slow-relay-{port}", ["socat", f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr,nodelay", f"TCP:{self.node.FAST[1]}:{port},nodelay"],
                        self.rig.dir / f"slow-relay-{port}.log").start()
        self.addCleanup(relay.stop)
        wait_for("the relay", lambda: socket.create_connection(("127.0.0.1", port), 1).close() or True, 10)
        return f"https://127.0.0.1:{port}", jackstay
