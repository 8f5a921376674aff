"""jackstay (mode: passthrough) between real clients and three real apiservers.

Each flow is a client with its own connection (go/flows.go). A dead connection must be reset within 3 s, and its
client must work again within 4 s. Times are figures (see figures.py), counts are exact. JACKSTAY_REAL_LONG=1 adds the
long forms and a comparison with HAProxy, nginx and Envoy; README.md lists them.
"""

import hashlib
import http.client
import os
import re
import signal
import ssl
import subprocess
import threading
import time
import unittest
import uuid

import rig_l4
from cases import StoppedOnExit, RigCase, StoryCase, long_form
from figures import LONG, bound, within
from kubernetes import RELEASE
from rig import ADDRESSES, LOAD_BALANCER, LOAD_BALANCER6, PORT, Jackstay, Load, log, log_lines, sh, wait_for
from rig_l4 import REMOTE_ADDRESS, RemoteApiserver, LoadBalancer, Host, connection_ports, install, passthrough, remove, start_peer

RESET, RECOVERED = 3, 4  # promised seconds
SERVICE = "10.96.0.1"  # default/kubernetes
# kube-proxy's rules for this Service, with apiserver c as the only endpoint.
KUBE_PROXY = f"""table ip kube_proxy {{
    chain services {{ ip daddr {SERVICE} tcp dport 443 dnat to {ADDRESSES["c"]}:{PORT}; }}
    chain prerouting {{ type nat hook prerouting priority -100; jump services; }}
    chain output {{ type nat hook output priority -100; jump services; }}
}}
"""
FLOWS = "idle-watch=6,busy-watch=4,read=4,write=4,fresh=1"


class x(StoryCase, RigCase):
    """jackstay at L4 with four endpoints: the three apiservers, and a forwarder in another namespace."""

    @classmethod
    def prepare(cls):
        cls.remote = RemoteApiserver(cls.rig).start()
        cls.addClassCleanup(cls.remote.stop)
        cls.jackstay = passthrough(cls.rig, endpoints=[f"{address}:{PORT}" for address in (*ADDRESSES.values(), REMOTE_ADDRESS)])
        cls.addClassCleanup(cls.jackstay.process.stop, signal.SIGKILL)
        cls.server = cls.jackstay.server

    def setUp(self):
        # A new process for each test, started after every endpoint is back: an endpoint that has just recovered
        # receives new flows slowly, and a fault without affected flows proves nothing.
        self.jackstay.process.stop(signal.SIGKILL)
        self.restore_endpoints()
        self.jackstay.start()
        self.wait_until_ready()

    def recover(self):
        self.restore_endpoints()
        self.wait_until_ready()

    def restore_endpoints(self):
        self.rig.recover()
        if self.remote.namespace_process is None:
            self.remote.start()

    def wait_until_ready(self):
        def all_ready():
            ready = [k for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_endpoint_state") and v and 'state="ready"' in k]
            return len(ready) == len(ADDRESSES) + 1
        wait_for("every endpoint to be ready", all_ready, 30)

    def tearDown(self):
        self.rig.recover()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))

    def flows(self, seconds, spec=FLOWS, server=None):
        load = Load(self.rig, server or self.server, seconds, flows=spec)
        self.addCleanup(load.kill)
        return load

    def ejections(self):
        return self.jackstay.total("jackstay_ejections_total")

    def by_load(self):
        """The apiservers a, b and c in ascending order of their flows."""
        ports = connection_ports(self.jackstay.pid, PORT)
        return sorted(ADDRESSES, key=lambda name: len(ports.get(ADDRESSES[name], ())))

    def check_report(self, what, report, fault_at, broken=None, expected_errors=("reset by peer",)):
        """`broken` is the expected number of broken flows by kind; by default some flows, but not all. `expected_errors`
        are the errors that an idle watch may report."""
        flows = report["flows"]
        out = [f for f in flows if f["outages"]]
        first = [(o["from"] - fault_at) for f in out for o in f["outages"]]
        again = [(o["to"] - fault_at) for f in out for o in f["outages"]]
        fresh = [f["slowest_ms"] for f in flows if f["kind"] == "fresh"]
        kinds = {kind: sum(1 for f in out if f["kind"] == kind) for kind in sorted({f["kind"] for f in flows})}
        log(f"{what}: {len(out)} of {len(flows)} flows broke {kinds}; reset after {max(first, default=0):.2f} s, all recovered after {max(again, default=0):.2f} s; "
            f"slowest fresh connection and request {max(fresh, default=0):.0f} ms; {sum(len(o['errors']) for f in out for o in f['outages'])} errors")
        with self.subTest(f"{what}: reset in time"):
            within(self, f"L4, {what}: last flow is reset", max(first, default=0), "s", RESET)
            self.assertEqual([o for f in out for o in f["outages"] if not 0 <= o["from"] - fault_at <= bound(RESET)], [])
            errors = [e for f in out for o in f["outages"] for e in o["errors"]]
            # The quoted URL of a watch contains `timeoutSeconds`.
            unquoted = [re.sub('"[^"]*"', "", e) for e in errors]
            self.assertEqual([e for e in unquoted if "client connection lost" in e or "imeout" in e], [])
        with self.subTest(f"{what}: recovered in time"):
            self.assertEqual([o for f in out for o in f["outages"] if not o["to"]], [])
            within(self, f"L4, {what}: every flow works again", max(again, default=0), "s", RECOVERED)
            within(self, f"L4, {what}: longest gap of a flow", max((f["max_gap_ms"] for f in flows if f["kind"] != "idle-watch"), default=0), "ms", RECOVERED * 1000)
        with self.subTest(f"{what}: an idle watch is reset, not closed cleanly"):
            self.assertEqual([f["ends"] for f in flows if f["ends"]], [])
            errors = [f["outages"][0]["errors"][0] for f in out if f["kind"] == "idle-watch"]
            self.assertEqual([e for e in errors if not any(words in e for words in expected_errors)], [])
        with self.subTest(f"{what}: which flows"):
            if broken is not None:
                # A fresh connection may be open during the fault; the next one must work.
                self.assertEqual([f for f in flows if f["kind"] == "fresh" and len(f["outages"]) > 1], [])
                kinds.pop("fresh", None)
                self.assertEqual(kinds, {**{kind: 0 for kind in kinds}, **broken})
            else:
                self.assertTrue(0 < len(out) < len(flows), kinds)
        return out

    def run_fault(self, what, fault, seconds=8, spec=FLOWS, **limits):
        load = self.flows(seconds + 2, spec)
        load.until(2)
        fault_at, since = time.time(), self.log_size()
        fault()
        report = load.finish()
        self.check_story(what, since, also=(REMOTE_ADDRESS,))
        return self.check_report(what, report, fault_at, **limits)


class Faults(x, unittest.TestCase):
    """One fault in each test."""

    def test_established_flows_dropped(self):
        """New connections work; the existing ones never receive a packet again."""
        every = {"idle-watch": 6, "busy-watch": 4, "read": 4, "write": 4}
        for hook in ("output", "input") if LONG else ("input",):  # tests/proxy/passthrough/faults.rs has all
            self.run_fault(f"flows dropped in {hook}", lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,)), broken=every)
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault dropped no packet")
            self.recover()

    @long_form("tests/proxy/passthrough/faults.rs covers every direction and hook")
    def test_established_flows_dropped_in_one_direction(self):
        every = {"idle-watch": 6, "busy-watch": 4, "read": 4, "write": 4}
        # The last two do not affect the flows to the forwarder.
        variants = [("from", "input", every), ("to", "output", every), ("to", "input", None), ("from", "output", None)]
        for direction, hook, broken in variants:
            self.run_fault(f"flows dropped in {hook}, {direction} the apiservers",
                        lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,), directions=(direction,)), broken=broken)
            self.recover()

    def test_apiserver_unreachable(self):
        self.run_fault("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(ADDRESSES[self.by_load()[-1]]))

    def test_apiserver_killed(self):
        """The kernel closes the apiserver's connections: with RST if data was unread, else with FIN. A forwarded FIN
        without TLS close_notify is an error for the client."""
        since = self.log_size()
        self.run_fault("SIGKILL of one", lambda: self.rig.apiservers[self.by_load()[-1]].kill(), seconds=6, expected_errors=("reset by peer", "unexpected EOF"))
        # Also of flows that end with a FIN.
        wait_for("the number of lost flows in the log", lambda: log_lines(self.jackstay.process, r' WARN .* open="\d+ flows?"', since), 5)

    def test_apiserver_stopped(self):
        self.run_fault("SIGSTOP of one", lambda: self.rig.apiservers[self.by_load()[-1]].pause())

    @long_form("test_apiserver_unreachable drops the same packets")
    def test_power_loss(self):
        self.run_fault("power loss of one", self.remote.power_off)

    def test_power_loss_and_immediate_return(self):
        """The host returns at once, without state of its earlier connections."""
        def restart():
            self.remote.power_off()
            self.remote.start()
        self.run_fault("power loss and return of one", restart)

    @long_form("tests/proxy/passthrough/endpoint_health.rs has such an endpoint")
    def test_failed_readyz_keeps_flows_and_takes_no_new_ones(self):
        """The endpoint keeps its flows and receives no new ones."""
        load = self.flows(14, "idle-watch=16")
        load.until(2)
        victim = ADDRESSES["b"]
        self.rig.faults.drop_etcd("b")
        wait_for("the endpoint to be degraded", lambda: any(
            v and victim in k and 'state="degraded"' in k for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_endpoint_state")), 10)
        before = connection_ports(self.jackstay.pid, PORT)
        kept = [self.connection() for _ in range(12)]
        after = connection_ports(self.jackstay.pid, PORT)
        report = load.finish()
        old = before.get(victim, set())
        new = {address: len(after.get(address, set()) - before.get(address, set())) for address in (*ADDRESSES.values(), REMOTE_ADDRESS)}
        log(f"/readyz fails on one: {len(old)} connections to it stay, new ones: {new}")
        self.assertGreaterEqual(len(old), 2)
        self.assertEqual(new[victim], 0)
        self.assertGreaterEqual(sum(new.values()), 12)
        self.assertLessEqual(len(old - after[victim]), 0, "an old connection is gone")
        self.assertEqual([f for f in report["flows"] if f["outages"] or f["ends"]], [])
        for one in kept:
            one.close()

    def connection(self):
        """An HTTPS connection that has received a response."""
        context = ssl.create_default_context(cafile=str(self.rig.pki.ca))
        context.load_cert_chain(*map(str, self.rig.load_cert))
        host, _, port = self.server.removeprefix("https://").rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
        connection.request("GET", "/api")
        answer = connection.getresponse()
        self.assertEqual(answer.status, 200, answer.read())
        answer.read()
        return connection

    def test_dropped_syns_delay_connections_by_at_most_1_s(self):
        """SYNs to one endpoint are dropped, existing flows work: a connection attempt moves on within 1 s."""
        before = self.ejections()
        load = self.flows(8, "read=8,fresh=4")
        load.until(2)
        # The endpoint that the next flows would use.
        hole = ADDRESSES[self.by_load()[0]]
        self.rig.faults.nft(f"add rule inet jackstay_rig input ip daddr {hole} tcp dport {PORT} tcp flags & (syn | ack) == syn counter drop\n")
        report = load.finish()
        slowest = max(f["slowest_ms"] for f in report["flows"] if f["kind"] == "fresh")
        log(f"SYN black hole: slowest fresh connection with request {slowest:.0f} ms, {self.rig.faults.dropped()} SYNs dropped, ejections {self.ejections() - before:.0f}")
        self.assertGreater(self.rig.faults.dropped(), 0)
        self.assertEqual([f for f in report["flows"] if f["outages"]], [])
        within(self, "L4, SYN black hole: slowest new connection with its request", slowest, "ms", 1000)

    @long_form("tests/proxy/passthrough/faults.rs has lost packets")
    def test_packet_loss(self):
        """5 % packet loss in both directions ejects no endpoint and resets no flow."""
        before, seconds = self.ejections(), 600
        load = self.flows(seconds)
        load.until(1)
        self.rig.faults.drop_randomly(5)
        report = load.finish(timeout=seconds + 60)
        flows = report["flows"]
        log(f"5 % loss for {seconds} s: {self.rig.faults.dropped()} packets dropped, {sum(bool(f['outages']) for f in flows)} of {len(flows)} flows broke, "
            f"longest gap {max(f['max_gap_ms'] for f in flows if f['kind'] != 'idle-watch'):.0f} ms, ejections {self.ejections() - before:.0f}")
        self.assertGreater(self.rig.faults.dropped(), 0)
        self.assertEqual([f for f in flows if f["outages"]], [])
        self.assertEqual(self.ejections(), before)


class Peers(x, unittest.TestCase):
    """HAProxy, nginx and Envoy beside jackstay, with the same clients and the same fault."""

    @unittest.skipUnless(LONG, "45 s of silence: JACKSTAY_REAL_LONG=1")
    def test_established_flows_dropped(self):
        every = {"idle-watch": 6, "busy-watch": 4, "read": 4, "write": 4}
        spec = ",".join(f"{k}={v}" for k, v in every.items())
        peers = {name: start_peer(self.rig, name, 7460 + i) for i, name in enumerate(rig_l4.PEERS)}
        running = {name: process for name, process in peers.items() if process}
        for process in running.values():
            self.addCleanup(process.stop, signal.SIGKILL)
        loads = {"jackstay": self.flows(62, spec)}
        for name in running:
            loads[name] = self.flows(62, spec, server=f"https://127.0.0.1:{7460 + list(rig_l4.PEERS).index(name)}")
        time.sleep(2)
        fault_at = time.time()
        for process in (self.jackstay.process, *running.values()):
            self.rig.faults.drop_flows(process.pid)
        self.check_report("jackstay", loads.pop("jackstay").finish(), fault_at, broken=every)
        for name, load in loads.items():
            out = [f for f in load.finish()["flows"] if f["outages"]]
            first_errors = [o["from"] - fault_at for f in out for o in f["outages"]]
            with self.subTest(f"{name}: only the client detects it, by a PING after 30 s of silence and 15 s without a reply"):
                self.assertEqual(len(out), sum(every.values()))
                self.assertGreater(min(first_errors, default=0), 10 * RESET)
            log(f"{name}: {len(out)} flows broke, first error after {min(first_errors, default=0):.1f} s, last {max(first_errors, default=0):.1f} s")


class Tunnels(x, unittest.TestCase):
    """kubectl exec and cp to a real pod: clients that only read, only write, or pause."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.rig.server("c"))
        cls.rig.start_pod()
        cls.config = cls.rig.kubeconfig("l4", cls.server, cert=cls.rig.admin_cert)

    def exec(self, script, **options):
        return self.rig.kubectl_start(self.config, "exec", "-i", "tool", "-c", "web", "--", "sh", "-c", script, **options)

    def next_line(self, child):
        """Must be used for all lines: `communicate` does not return what `readline` has read ahead."""
        return child.stdout.readline() or self.fail(f"kubectl exited: {child.communicate()[1]}")

    def test_exec_in_one_direction_is_reset(self):
        """A client that only reads and one that only writes are both reset."""
        reader = self.exec("while :; do echo tick; sleep 0.1 || sleep 1; done", stdin=subprocess.DEVNULL)
        writer = self.exec("echo go; cat >/dev/null", stdin=subprocess.PIPE)
        with StoppedOnExit(reader), StoppedOnExit(writer):
            self.assertEqual(self.next_line(reader), "tick\n")
            self.assertEqual(self.next_line(writer), "go\n")
            stopped = threading.Event()

            def write():
                try:
                    while not stopped.wait(0.1):
                        writer.stdin.write("x" * 100)
                        writer.stdin.flush()
                except OSError:
                    pass  # The expected reset.
            pump = threading.Thread(target=write, daemon=True)
            pump.start()
            threading.Thread(target=reader.stdout.read, daemon=True).start()
            time.sleep(1)
            begun = time.monotonic()
            self.rig.faults.drop_flows(self.jackstay.pid)
            for name, child in (("reads", reader), ("writes", writer)):
                child.wait(bound(RESET) + 10)
                took = time.monotonic() - begun
                with self.subTest(name):
                    within(self, f"L4, kubectl exec that only {name} is reset", took, "s", RESET)
            stopped.set()
            pump.join(5)

    def test_zero_window_is_not_a_dead_path(self):
        """A copy that pauses, in either direction, is not ended.

        The processes in the pod exit only after the test has seen the last byte: kubelet closes the connection when
        the process exits, and what is still on its way is lost, with or without jackstay (kubernetes issue 60140:
        `kubectl cp` sometimes ends with "unexpected EOF"). The exec uses SPDY, because kubectl closes a WebSocket that
        it has not read from for a minute."""
        spdy = RELEASE.transports[-1]
        def abnormal_ends():
            ends = [(k, v) for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_passthrough_closed_total")]
            return sum(v for k, v in ends if not any(f'reason="{own}"' in k for own in ("done", "client_reset", "server_reset")))
        before = abnormal_ends()
        pause = 300 if LONG else 20
        size = 96 << 20  # more than all buffers on the path
        local = self.rig.dir / "zero-window-up"
        local.write_bytes(os.urandom(size))
        digest = hashlib.sha256(local.read_bytes()).hexdigest()
        self.rig.kubectl(self.config, "cp", str(local), "tool:/tmp/zero", "-c", "web", timeout=120, check=True)
        # Upwards the pod stops reading; downwards kubectl is stopped with SIGSTOP.
        script = f"rm -f /tmp/seen; head -c 100000 | sha256sum >/dev/null; echo pause; sleep {pause}; wc -c; until [ -e /tmp/seen ]; do sleep 1; done"
        up = self.exec(script, stdin=open(local, "rb"), variant=spdy)
        down = self.exec("cat /tmp/zero; read end", stdin=subprocess.PIPE, variant=spdy, text=False)
        received, copied = hashlib.sha256(), [0]

        def receive():
            while copied[0] < size and (piece := down.stdout.read1(1 << 20)):
                received.update(piece)
                copied[0] += len(piece)
        receiver = threading.Thread(target=receive, daemon=True)
        with StoppedOnExit(up), StoppedOnExit(down):
            receiver.start()
            wait_for("the copy to begin", lambda: copied[0] > 0, 20, pause=0.01)
            down.send_signal(signal.SIGSTOP)
            stuck = copied[0]
            self.assertEqual(self.next_line(up), "pause\n")
            log(f"zero windows for {pause} s; downwards stopped at {stuck} of {size} bytes")
            time.sleep(pause)
            self.assertLess(copied[0], size, "the copy was complete before the pause")
            down.send_signal(signal.SIGCONT)
            receiver.join(120)
            self.assertEqual(copied[0], size, f"kubectl exited: {down.poll()}")
            self.assertEqual(received.hexdigest(), digest)
            _, err = down.communicate(b"\n", timeout=120)
            self.assertEqual(down.returncode, 0, err)
            self.assertGreater(int(self.next_line(up)), size - 200_000)
            self.rig.kubectl(self.config, "exec", "tool", "-c", "web", "--", "sh", "-c", ": > /tmp/seen", timeout=120, check=True)
            _, err = up.communicate(timeout=120)
            self.assertEqual(up.returncode, 0, err)
        self.assertEqual(abnormal_ends(), before, self.jackstay.process.tail())


class Reloads(RigCase, unittest.TestCase):
    """An exec and long bodies in both directions continue while reloads remove and add endpoints that they do not use,
    in both modes."""

    SIZE = 1_000_000_000 if LONG else 50_000_000  # bytes in each direction; more than all buffers on the path
    LETTERS = b"x" * (1 << 20)

    @classmethod
    def prepare(cls):
        cls.rig.start_node(cls.rig.server("c"))
        cls.rig.start_pod()

    def exec(self, script, **options):
        return self.rig.kubectl_start(self.config, "exec", "-i", "tool", "-c", "web", "--", "sh", "-c", script, stdin=subprocess.PIPE, **options)

    def run_through(self, jackstay, endpoints):
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        self.config = self.rig.kubeconfig(f"changes-{jackstay.admin_address.rpartition(':')[2]}", jackstay.server, cert=self.rig.admin_cert)
        self.jackstay = jackstay
        tunnel = self.exec("while read line; do echo $line; done")
        down = self.exec(f"head -c {self.SIZE} /dev/zero | tr '\\0' x")
        up = self.exec("wc -c; echo done")
        got = []

        def read():
            length, same = 0, True
            while piece := down.stdout.buffer.read1(1 << 20):
                length, same = length + len(piece), same and piece == self.LETTERS[:len(piece)]
            got.append((length, same))

        def write():
            for start in range(0, self.SIZE, len(self.LETTERS)):
                up.stdin.buffer.write(self.LETTERS[:self.SIZE - start])
            up.stdin.close()
        movers = [threading.Thread(target=what, daemon=True) for what in (read, write)]
        with StoppedOnExit(tunnel), StoppedOnExit(down), StoppedOnExit(up):
            self.echo(tunnel)
            used = {address for address, ports in connection_ports(jackstay.pid, PORT).items() if len(ports) > 1}
            for mover in movers:
                mover.start()
            others = [address for address in endpoints if address not in used] or endpoints[:1]
            rounds, deadline = 0, time.monotonic() + self.SIZE / 2_000_000 + 60
            while rounds < 3 or any(mover.is_alive() for mover in movers):
                for address in others:
                    self.reload(lambda text: text.replace(f'"{address}:{PORT}", ', "").replace(f', "{address}:{PORT}"', ""))
                    wait_for(f"{address} to be gone", lambda: address not in {e["address"].rpartition(":")[0] for e in jackstay.status()["upstreams"][0]["endpoints"]}, 20)
                    self.echo(tunnel)
                    self.reload(lambda text: self.original)
                    self.echo(tunnel)
                rounds += 1
                self.assertLess(time.monotonic(), deadline, f"the bodies are not complete: {got}")
            for mover in movers:
                mover.join(10)
            self.assertEqual(got, [(self.SIZE, True)])
            self.assertEqual(up.stdout.readline(), f"{self.SIZE}\n")
            self.assertEqual(up.stdout.readline(), "done\n")
            self.echo(tunnel)
        log(f"{self.SIZE} bytes each way and an exec through {2 * rounds * len(others)} reloads, {rounds * len(others)} of them with a drain")

    def echo(self, child):
        word = uuid.uuid4().hex
        child.stdin.write(word + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if answer != word + "\n":
            child.kill()
            self.fail(f"the exec was closed: {answer}{child.communicate()[1]}")

    def reload(self, change):
        jackstay = self.jackstay
        self.original = getattr(self, "original", None) or jackstay.config.read_text()
        before = self.reloads("ok")
        text = change(self.original)
        new = jackstay.config.with_suffix(".new")
        # The log level changes in every reload, so that no reload is without a change.
        new.write_text(text.replace("level: \"info\"", f"level: \"{'debug' if before % 2 else 'info'}\""))
        new.rename(jackstay.config)
        jackstay.process.child.send_signal(signal.SIGHUP)
        wait_for("a reload", lambda: self.reloads("ok") > before, 20)
        self.assertEqual(self.reloads("failed"), 0)

    def reloads(self, outcome):
        return self.jackstay.metrics().get(f'jackstay_config_reloads_total{{outcome="{outcome}"}}', 0)

    def test_passthrough(self):
        self.run_through(passthrough(self.rig, port=7456, admin=9656, log_name="jackstay-l4-changes"), list(ADDRESSES.values()))

    def test_terminate(self):
        self.run_through(Jackstay(self.rig, [self.rig.admin_cert], port=7457, admin=9657, log_name="jackstay-l7-changes"), list(ADDRESSES.values()))


class Transparent(RigCase, unittest.TestCase):
    """kubectl connects to the load balancer's or the Service's address, and nftables redirects it to jackstay."""

    @classmethod
    def prepare(cls):
        cls.lb = LoadBalancer(cls.rig).start()
        cls.addClassCleanup(cls.lb.stop)
        # Routes in both families, as on any node, which remain while the load balancer is down.
        sh("ip", "route", "replace", "10.99.2.0/24", "dev", "rig0", "metric", "900")
        sh("ip", "-6", "addr", "replace", "fd00:98::1/64", "dev", "rig0", "nodad")
        sh("ip", "-6", "route", "replace", "default", "dev", "rig0")
        cls.server = f"https://{LOAD_BALANCER}:{PORT}"
        cls.config = cls.rig.kubeconfig("lb", cls.server, cert=cls.rig.admin_cert)
        cls.jackstay = passthrough(cls.rig, port=7451, admin=9651, log_name="jackstay-transparent", transparent=True,
                                   adapt=lambda config: config["listeners"][0]["bind"].append("[::1]:7451"))
        cls.addClassCleanup(cls.jackstay.process.stop, signal.SIGKILL)
        cls.jackstay.start()

    def tearDown(self):
        for variant in ("lb-redirect", "lb-tproxy", "service-redirect", "service-tproxy"):
            remove(variant)
        if self.lb.namespace_process is None:
            self.lb.start()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())

    def connections_so_far(self, jackstay=None):
        """The number of connections so far. Metrics that are rendered while one ends may count it twice or not at all."""
        def now():
            metrics = (jackstay or self.jackstay).metrics()
            return {k: v for k, v in metrics.items() if k.startswith(("jackstay_passthrough_closed_total", "jackstay_passthrough_connections"))}

        def equal_readings():
            first = now()
            return [first] if first == now() else None
        return sum(wait_for("two equal readings", equal_readings, 10)[0].values())

    def kubectl(self, config=None, prefix=()):
        argv = self.rig.kubectl_argv(config or self.config, "get", "namespaces", "-o", "name")
        done = sh(*prefix, *argv, env={**os.environ, "HOME": str(self.rig.dir / "home")}, timeout=30, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("namespace/default", done.stdout)

    def logged(self):
        return self.jackstay.process.logfile.read_text(errors="replace")

    def check_load_balancer(self, variant):
        self.kubectl()
        before = self.connections_so_far()
        install(variant, lb4=LOAD_BALANCER, lb6=LOAD_BALANCER6, lb_port=PORT, listener_port=7451)
        self.kubectl()
        self.assertGreater(self.connections_so_far(), before, "kubectl bypassed jackstay")
        # Without the load balancer, clients of its address still work.
        self.lb.power_off()
        self.kubectl()
        answer = self.rig.api(f"https://[{LOAD_BALANCER6}]:{PORT}", cert=self.rig.admin_cert).get("/readyz")
        self.assertEqual(answer.code, 200, "IPv6")
        self.lb.start()
        remove(variant)
        after = self.connections_so_far()
        self.kubectl()
        self.assertEqual(self.connections_so_far(), after, "kubectl still uses jackstay")

    def check_service(self, variant):
        """Intercepts the Service's address beside kube-proxy, for a pod and for the node. `destinations` selects the
        upstream of these connections."""
        pod = Host(self.rig, "10.99.3.5", "10.99.3.1", "pod").start()
        self.addCleanup(pod.stop)
        sh("ip", "route", "replace", "10.96.0.0/24", "dev", "rig0")
        sh("nft", "-f", "-", input=KUBE_PROXY)
        self.addCleanup(sh, "nft", "delete", "table", "ip", "kube_proxy")

        bind = ["0.0.0.0:7453", "[::]:7453"] if "redirect" in variant else ["127.0.0.1:7453", "[::1]:7453"]

        def adapt(config):
            config["upstreams"].append({**config["upstreams"][0], "name": "elsewhere", "endpoints": [f"{ADDRESSES['a']}:{PORT}"]})
            config["listeners"][0].update(bind=bind, upstream="elsewhere")
        destinations = [{"to": [f"{SERVICE}:443", f"[{LOAD_BALANCER6}]:443"], "upstream": "control-plane"}]
        jackstay = passthrough(self.rig, endpoints=[f"{ADDRESSES['b']}:{PORT}"], port=7453, admin=9653, log_name=f"jackstay-{variant}",
                               transparent=True, destinations=destinations, adapt=adapt).start()
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        config = self.rig.kubeconfig(variant, f"https://{SERVICE}:443", cert=self.rig.admin_cert)

        def check_both(intercepted):
            for client, prefix in (("the pod", pod.inside()), ("the node", ())):
                before = self.connections_so_far(jackstay)
                self.kubectl(config, prefix)
                self.assertEqual(self.connections_so_far(jackstay) > before, intercepted, client)
        check_both(False)
        install(variant, service4=SERVICE, service6=LOAD_BALANCER6, listener_port=7453)
        check_both(True)
        for address in (SERVICE, f"[{LOAD_BALANCER6}]"):
            kept = self.rig.api(f"https://{address}:443", cert=self.rig.admin_cert)
            self.assertEqual(kept.request("GET", "/readyz", keep=True).code, 200, address)
            flows = {upstream["name"]: sum(e["flows"] for e in upstream["endpoints"]) for upstream in jackstay.status()["upstreams"]}
            self.assertEqual(flows, {"control-plane": 1, "elsewhere": 0}, address)
            kept.kept.close()
            wait_for("the flow to end", lambda: jackstay.status()["listeners"][0]["flows"] == 0, 10)
        remove(variant)
        check_both(False)

    def test_service_redirect(self):
        self.check_service("service-redirect")

    def test_service_tproxy(self):
        self.check_service("service-tproxy")

    def test_redirect(self):
        self.check_load_balancer("lb-redirect")

    def test_tproxy(self):
        self.check_load_balancer("lb-tproxy")

    def test_loop_is_detected_and_logged(self):
        """Rules that also redirect jackstay's own connections: jackstay refuses them, and the log has the reason."""
        install("lb-redirect", lb4=ADDRESSES["a"], lb6=LOAD_BALANCER6, lb_port=PORT, listener_port=7451, own_mark="0x1")
        api = self.rig.api(self.rig.server("a"), cert=self.rig.admin_cert, timeout=5)

        def loop_reported():  # Some requests may first go to b or c, which are not intercepted.
            try:
                api.get("/readyz")
            except OSError:
                pass
            return "would loop: jackstay has opened the connection" in self.logged()

        wait_for("the log message", loop_reported, 10)
        self.assertLess(len(os.listdir(f"/proc/{self.jackstay.pid}/fd")), 200)

    def test_direct_connection_is_refused(self):
        """A direct connection to a transparent listener is refused at once, and the log has the reason."""
        with self.assertRaises(OSError):
            self.rig.api(self.jackstay.server, cert=self.rig.admin_cert, timeout=5).get("/readyz")
        # The log is written by a thread of its own.
        wait_for("the log message", lambda: "accepts only connections that nftables redirects" in self.logged(), 10)

    def test_missing_capability_is_one_error(self):
        """Without CAP_NET_ADMIN the start fails with one error that names it."""
        other = passthrough(self.rig, port=7452, admin=9652, log_name="jackstay-no-capability", transparent=True)
        done = sh("setpriv", "--bounding-set=-net_admin,-net_raw", other.binary, "run", "--config", other.config, check=False)
        errors = [line for line in done.stderr.splitlines() if " ERROR " in line]
        self.assertEqual((done.returncode, len(errors)), (1, 1), done.stderr)
        self.assertIn("CAP_NET_ADMIN", errors[0])


class AddressMove(RigCase, unittest.TestCase):
    """The load balancer's address moves onto the node; clients are not reconfigured."""

    def test_address_moves_onto_the_node(self):
        lb = LoadBalancer(self.rig).start()
        self.addCleanup(lb.stop)
        script = rig_l4.DEPLOY / "systemd/jackstay-address"
        for address in (LOAD_BALANCER, LOAD_BALANCER6):
            self.addCleanup(sh, script, "remove", address)
        # freebind: jackstay listens before the node has the addresses.
        jackstay = passthrough(self.rig, port=7453, admin=9653, log_name="jackstay-drop-in", bind=[f"{LOAD_BALANCER}:{PORT}", f"[{LOAD_BALANCER6}]:{PORT}"], freebind=True)
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        load = Load(self.rig, f"https://{LOAD_BALANCER}:{PORT}", 90, flows="idle-watch=2,read=2,write=2,fresh=4")
        self.addCleanup(load.kill)
        load.until(3)
        sh(script, "add", LOAD_BALANCER)
        sh(script, "add", LOAD_BALANCER6)
        lb.power_off()
        moved = time.time()

        def closed():
            return jackstay.total("jackstay_passthrough_closed_total")
        wait_for("connections through jackstay", lambda: closed() >= 6, 60)
        report = load.finish(early=True)
        before = closed()
        answer = self.rig.api(f"https://[{LOAD_BALANCER6}]:{PORT}", cert=self.rig.admin_cert).get("/readyz")
        self.assertEqual(answer.code, 200, "IPv6")
        wait_for("a connection by IPv6 through jackstay", lambda: closed() > before, 10)
        late = [o for f in report["flows"] for o in f["outages"] if not o["to"] or o["to"] - moved > bound(RECOVERED)]
        passing = closed()
        log(f"the address moved: {sum(bool(f['outages']) for f in report['flows'])} flows reconnected, {passing:.0f} connections through jackstay")
        # A connection on which the client sends nothing is not reset: its client detects the loss itself (45 s).
        self.assertEqual([o for o in late if o["to"] and not all("client connection lost" in e for e in o["errors"])], [])
        self.assertGreaterEqual(passing, 6)
