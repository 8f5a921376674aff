"""jackstay as a passthrough between real clients and three real apiservers.

Each flow is a client with a connection of its own (go/flows.go); it must be told of a death by a
reset within 3 s, and work again within 4 s. Times are figures (figures.py), counts are exact.
JACKSTAY_REAL_LONG=1 adds the long forms and the variants, and HAProxy, nginx and Envoy beside it;
README.md says which.
"""

import hashlib
import http.client
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import unittest
import uuid

import rig_l4
from cases import Ended, WithRig, long_form
from figures import LONG, bound, within
from kubernetes import RELEASE
from rig import ADDRESSES, LB, LB6, PORT, Jackstay, Load, complaints, log, sh, wait_for
from rig_l4 import AWAY, Away, Forwarder, Host, client_ports, install, passthrough, remove, start_peer

RESET, ON_AGAIN = 3, 4  # seconds, as promised
SERVICE = "10.96.0.1"  # default/kubernetes
# What kube-proxy makes of it, with apiserver c alone.
KUBE_PROXY = f"""table ip kube_proxy {{
    chain services {{ ip daddr {SERVICE} tcp dport 443 dnat to {ADDRESSES["c"]}:{PORT}; }}
    chain prerouting {{ type nat hook prerouting priority -100; jump services; }}
    chain output {{ type nat hook output priority -100; jump services; }}
}}
"""
FLOWS = "idle-watch=6,busy-watch=4,read=4,write=4,fresh=1"


class Passed(WithRig):
    """With jackstay at L4, the three apiservers and one more address behind a cable."""

    @classmethod
    def prepare(cls):
        cls.away = Away(cls.rig).start()
        cls.addClassCleanup(cls.away.stop)
        cls.jackstay = passthrough(cls.rig, endpoints=[f"{address}:{PORT}" for address in (*ADDRESSES.values(), AWAY)])
        cls.addClassCleanup(cls.jackstay.process.stop, signal.SIGKILL)
        cls.server = cls.jackstay.server

    def setUp(self):
        # A new one for each test: an endpoint that has just recovered gets its share of flows slowly,
        # and a fault that hits no flow shows nothing.
        self.jackstay.process.stop(signal.SIGKILL)
        self.jackstay.start()
        self.heal()

    def heal(self):
        self.rig.heal()
        if self.away.keeper is None:
            self.away.start()

        def all_ready():
            ready = [k for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_endpoint_state") and v and 'state="ready"' in k]
            return len(ready) == len(ADDRESSES) + 1
        wait_for("every endpoint to be ready", all_ready, 30)

    def tearDown(self):
        self.rig.heal()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())
        self.assertNotIn("panicked", self.jackstay.process.logfile.read_text(errors="replace"))

    def flows(self, seconds, spec=FLOWS, server=None):
        load = Load(self.rig, server or self.server, seconds, flows=spec)
        self.addCleanup(load.kill)
        return load

    def ejections(self):
        return sum(v for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_ejections_total"))

    def by_load(self):
        """The apiservers in the root namespace, those with the fewest flows first."""
        ports = client_ports(self.jackstay.pid, PORT)
        return sorted(ADDRESSES, key=lambda name: len(ports.get(ADDRESSES[name], ())))

    def judge(self, what, report, struck, broken=None, told=("reset by peer",)):
        """`broken` says which flows must have had an outage: by default some, but not all. `told` is
        what clients may read then."""
        flows = report["flows"]
        out = [f for f in flows if f["outages"]]
        first = [(o["from"] - struck) for f in out for o in f["outages"]]
        again = [(o["to"] - struck) for f in out for o in f["outages"]]
        fresh = [f["slowest_ms"] for f in flows if f["kind"] == "fresh"]
        kinds = {kind: sum(1 for f in out if f["kind"] == kind) for kind in sorted({f["kind"] for f in flows})}
        log(f"{what}: {len(out)} of {len(flows)} flows broke {kinds}; told after {max(first, default=0):.2f} s, all on again after {max(again, default=0):.2f} s; "
            f"slowest fresh connection and request {max(fresh, default=0):.0f} ms; {sum(len(o['errors']) for f in out for o in f['outages'])} errors")
        with self.subTest(f"{what}: told by a reset in time"):
            within(self, f"L4, {what}: last flow is reset", max(first, default=0), "s", RESET)
            self.assertEqual([o for f in out for o in f["outages"] if not 0 <= o["from"] - struck <= bound(RESET)], [])
            self.assertEqual([e for f in out for o in f["outages"] for e in o["errors"] if "client connection lost" in e or "imeout" in e], [])
        with self.subTest(f"{what}: on again in time"):
            self.assertEqual([o for f in out for o in f["outages"] if not o["to"]], [])
            within(self, f"L4, {what}: every flow works again", max(again, default=0), "s", ON_AGAIN)
            within(self, f"L4, {what}: longest gap of a flow", max((f["max_gap_ms"] for f in flows if f["kind"] != "idle-watch"), default=0), "ms", ON_AGAIN * 1000)
        with self.subTest(f"{what}: an idle watch is told by a reset, not by a silent end"):
            self.assertEqual([f["ends"] for f in flows if f["ends"]], [])
            errors = [f["outages"][0]["errors"][0] for f in out if f["kind"] == "idle-watch"]
            self.assertEqual([e for e in errors if not any(words in e for words in told)], [])
        with self.subTest(f"{what}: which flows"):
            if broken is not None:
                # A fresh connection may be open just when the fault strikes; the next one must work.
                self.assertEqual([f for f in flows if f["kind"] == "fresh" and len(f["outages"]) > 1], [])
                kinds.pop("fresh", None)
                self.assertEqual(kinds, {**{kind: 0 for kind in kinds}, **broken})
            else:
                self.assertTrue(0 < len(out) < len(flows), kinds)
        return out

    def strike(self, what, fault, seconds=8, spec=FLOWS, **limits):
        load = self.flows(seconds + 2, spec)
        load.until(2)
        struck = time.time()
        fault()
        return self.judge(what, load.finish(), struck, **limits)


class Faults(Passed, unittest.TestCase):
    """One fault after the other."""

    def test_established_flows_dropped(self):
        """New connections work; the old ones are silent for ever."""
        every = {"idle-watch": 6, "busy-watch": 4, "read": 4, "write": 4}
        for hook in ("output", "input") if LONG else ("input",):  # tests/passthrough/faults.rs has every combination.
            self.strike(f"flows dropped in {hook}", lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,)), broken=every)
            self.assertGreater(self.rig.faults.dropped(), 0, "the fault hit nothing")
            self.heal()

    @long_form("tests/passthrough/faults.rs has every direction and hook")
    def test_one_direction(self):
        every = {"idle-watch": 6, "busy-watch": 4, "read": 4, "write": 4}
        # The last two never see a packet of the flows to the apiserver behind the cable.
        variants = [("from", "input", every), ("to", "output", every), ("to", "input", None), ("from", "output", None)]
        for direction, hook, broken in variants:
            self.strike(f"flows dropped in {hook}, {direction} the apiservers",
                        lambda: self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,), directions=(direction,)), broken=broken)
            self.heal()

    def test_apiserver_dark(self):
        self.strike("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(ADDRESSES[self.by_load()[-1]]))

    def test_apiserver_killed(self):
        """Its kernel ends its connections: a FIN where nothing was unread, which is passed on (and no
        end of TLS: an error to the client), else RST."""
        self.strike("SIGKILL of one", lambda: self.rig.apiservers[self.by_load()[-1]].kill(), seconds=6, told=("reset by peer", "unexpected EOF"))

    def test_apiserver_stopped(self):
        self.strike("SIGSTOP of one", lambda: self.rig.apiservers[self.by_load()[-1]].pause())

    def test_power_loss(self):
        self.strike("power loss of one", self.away.power_off)

    def test_half_open(self):
        """It comes back at once and knows nothing of its old connections."""
        def restart():
            self.away.power_off()
            self.away.start()
        self.strike("power loss and return of one", restart)

    def test_readyz_fails(self):
        """No new flow goes there; the old ones stay."""
        load = self.flows(14, "idle-watch=16")
        load.until(2)
        victim = ADDRESSES["b"]
        self.rig.faults.drop_etcd("b")
        wait_for("the endpoint to be degraded", lambda: any(
            v and victim in k and 'state="degraded"' in k for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_endpoint_state")), 10)
        before = client_ports(self.jackstay.pid, PORT)
        kept = [self.connection() for _ in range(12)]
        after = client_ports(self.jackstay.pid, PORT)
        report = load.finish()
        old = before.get(victim, set())
        new = {address: len(after.get(address, set()) - before.get(address, set())) for address in (*ADDRESSES.values(), AWAY)}
        log(f"/readyz fails on one: {len(old)} connections there stay, new ones: {new}")
        self.assertGreaterEqual(len(old), 2)
        self.assertEqual(new[victim], 0)
        self.assertGreaterEqual(sum(new.values()), 12)
        self.assertLessEqual(len(old - after[victim]), 0, "an old connection is gone")
        self.assertEqual([f for f in report["flows"] if f["outages"] or f["ends"]], [])
        for one in kept:
            one.close()

    def connection(self):
        """A TLS session that has had an answer."""
        context = ssl.create_default_context(cafile=str(self.rig.pki.ca))
        context.load_cert_chain(*map(str, self.rig.load_cert))
        host, _, port = self.server.removeprefix("https://").rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=10)
        connection.request("GET", "/api")
        answer = connection.getresponse()
        self.assertEqual(answer.status, 200, answer.read())
        answer.read()
        return connection

    def test_syn_black_hole(self):
        """One swallows what begins, and what exists goes on: a connect moves on within 1 s."""
        before = self.ejections()
        load = self.flows(8, "read=8,fresh=4")
        load.until(2)
        # The one that the next flows are led to.
        hole = ADDRESSES[self.by_load()[0]]
        self.rig.faults.nft(f"add rule inet jackstay_rig input ip daddr {hole} tcp dport {PORT} tcp flags & (syn | ack) == syn counter drop\n")
        report = load.finish()
        slowest = max(f["slowest_ms"] for f in report["flows"] if f["kind"] == "fresh")
        log(f"SYN black hole: slowest fresh connection with request {slowest:.0f} ms, {self.rig.faults.dropped()} SYNs dropped, ejections {self.ejections() - before:.0f}")
        self.assertGreater(self.rig.faults.dropped(), 0)
        self.assertEqual([f for f in report["flows"] if f["outages"]], [])
        within(self, "L4, SYN black hole: slowest new connection with its request", slowest, "ms", 1000)

    def test_packet_loss(self):
        """Five percent, both ways: nobody is ejected, no flow is reset."""
        before, seconds = self.ejections(), 600 if LONG else 25
        load = self.flows(seconds)
        load.until(1)
        self.rig.faults.lose(5)
        report = load.finish(timeout=seconds + 60)
        flows = report["flows"]
        log(f"5 % loss for {seconds} s: {self.rig.faults.dropped()} packets dropped, {sum(bool(f['outages']) for f in flows)} of {len(flows)} flows broke, "
            f"longest gap {max(f['max_gap_ms'] for f in flows if f['kind'] != 'idle-watch'):.0f} ms, ejections {self.ejections() - before:.0f}")
        self.assertGreater(self.rig.faults.dropped(), 0)
        self.assertEqual([f for f in flows if f["outages"]], [])
        self.assertEqual(self.ejections(), before)


class Peers(Passed, unittest.TestCase):
    """What a user would pick instead, beside jackstay, with the same clients and the same fault."""

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
        struck = time.time()
        for process in (self.jackstay.process, *running.values()):
            self.rig.faults.drop_flows(process.pid)
        self.judge("jackstay", loads.pop("jackstay").finish(), struck, broken=every)
        for name, load in loads.items():
            out = [f for f in load.finish()["flows"] if f["outages"]]
            told = [o["from"] - struck for f in out for o in f["outages"]]
            with self.subTest(f"{name}: nobody but the client itself notices, 30 s after it last heard something and 15 s more"):
                self.assertEqual(len(out), sum(every.values()))
                self.assertGreater(min(told, default=0), 10 * RESET)
            log(f"{name}: {len(out)} flows broke, first told after {min(told, default=0):.1f} s, last {max(told, default=0):.1f} s")


class Tunnels(Passed, unittest.TestCase):
    """kubectl into a real pod: who only reads, who only writes, and who does neither for a while."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.rig.start_node(cls.rig.server("c"))
        cls.rig.start_pod()
        cls.config = cls.rig.kubeconfig("l4", cls.server, cert=cls.rig.admin_cert)

    def exec(self, script, **options):
        return self.rig.kubectl_start(self.config, "exec", "-i", "tool", "-c", "web", "--", "sh", "-c", script, **options)

    def test_one_way(self):
        """A client that only reads and one that only writes are both told."""
        reader = self.exec("while :; do echo tick; sleep 0.1 || sleep 1; done", stdin=subprocess.DEVNULL)
        writer = self.exec("echo go; cat >/dev/null", stdin=subprocess.PIPE)
        with Ended(reader), Ended(writer):
            self.assertEqual(reader.stdout.readline(), "tick\n")
            self.assertEqual(writer.stdout.readline(), "go\n")
            halt = threading.Event()

            def write():
                try:
                    while not halt.wait(0.1):
                        writer.stdin.write("x" * 100)
                        writer.stdin.flush()
                except OSError:
                    pass  # It has ended, and that is what we wait for.
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
            halt.set()
            pump.join(5)

    def test_zero_window(self):
        """A copy that pauses, at either end and in either direction, is not dead.

        It must be larger than all that lies between takes in: once the tar in the pod has ended, its
        tail is lost behind the apiserver if kubectl is still paused, whatever is between (kubernetes
        issue 60140; directly 6 of 6). By SPDY, since kubectl gives a WebSocket up that it has not read from
        for a minute."""
        spdy = RELEASE.transports[-1]
        def cut():
            ends = [(k, v) for k, v in self.jackstay.metrics().items() if k.startswith("jackstay_passthrough_closed_total")]
            return sum(v for k, v in ends if not any(f'reason="{own}"' in k for own in ("done", "client_reset", "server_reset")))
        before = cut()
        pause = 300 if LONG else 20
        size = 96 << 20
        local = self.rig.dir / "zero-window-up"
        local.write_bytes(os.urandom(size))
        up_digest = hashlib.sha256(local.read_bytes()).hexdigest()
        # Upwards the pod stops reading; downwards kubectl is stopped.
        up = self.exec(f"head -c 100000 | sha256sum >/dev/null; echo pause; sleep {pause}; wc -c", stdin=open(local, "rb"), by=spdy)
        copy = self.rig.dir / "zero-window-down"
        self.rig.kubectl(self.config, "cp", str(local), "tool:/tmp/zero", "-c", "web", timeout=120, check=True)
        down = self.rig.kubectl_start(self.config, "cp", "tool:/tmp/zero", str(copy), "-c", "web", by=spdy)
        with Ended(up), Ended(down):
            wait_for("the copy to begin", lambda: copy.exists() and copy.stat().st_size > 0, 20, pause=0.01)
            down.send_signal(signal.SIGSTOP)
            stuck = copy.stat().st_size
            self.assertEqual(up.stdout.readline(), "pause\n")
            log(f"zero windows for {pause} s; downwards stopped at {stuck} of {size} bytes")
            time.sleep(pause)
            down.send_signal(signal.SIGCONT)
            out, err = down.communicate(timeout=120)
            self.assertEqual(down.returncode, 0, err)
            self.assertEqual(hashlib.sha256(copy.read_bytes()).hexdigest(), up_digest)
            out, err = up.communicate(timeout=120)
            self.assertEqual(up.returncode, 0, err)
            self.assertGreater(int(out.split()[-1]), size - 200_000)
        self.assertEqual(cut(), before, self.jackstay.process.tail())


class Changes(WithRig, unittest.TestCase):
    """An exec and long bodies in both directions, while the configuration is read again and endpoints
    that they do not use are drained and come back. The same through either mode."""

    SIZE = 1_000_000_000 if LONG else 50_000_000  # bytes, each way; more than all buffers between
    LETTERS = b"x" * (1 << 20)

    @classmethod
    def prepare(cls):
        cls.rig.start_node(cls.rig.server("c"))
        cls.rig.start_pod()

    def exec(self, script, **options):
        return self.rig.kubectl_start(self.config, "exec", "-i", "tool", "-c", "web", "--", "sh", "-c", script, stdin=subprocess.PIPE, **options)

    def through(self, jackstay, endpoints):
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        self.config = self.rig.kubeconfig(f"changes-{jackstay.admin_address.rpartition(':')[2]}", jackstay.server, cert=self.rig.admin_cert)
        self.jackstay = jackstay
        talk = self.exec("while read line; do echo $line; done")
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
        with Ended(talk), Ended(down), Ended(up):
            self.talk(talk)
            used = {address for address, ports in client_ports(jackstay.pid, PORT).items() if len(ports) > 1}
            for mover in movers:
                mover.start()
            others = [address for address in endpoints if address not in used] or endpoints[:1]
            rounds, deadline = 0, time.monotonic() + self.SIZE / 2_000_000 + 60
            while rounds < 3 or any(mover.is_alive() for mover in movers):
                for address in others:
                    self.reload(lambda text: text.replace(f'"{address}:{PORT}", ', "").replace(f', "{address}:{PORT}"', ""))
                    wait_for(f"{address} to be gone", lambda: address not in {e["address"].rpartition(":")[0] for e in jackstay.status()["upstreams"][0]["endpoints"]}, 20)
                    self.talk(talk)
                    self.reload(lambda text: self.original)
                    self.talk(talk)
                rounds += 1
                self.assertLess(time.monotonic(), deadline, f"the bodies do not end: {got}")
            for mover in movers:
                mover.join(10)
            self.assertEqual(got, [(self.SIZE, True)])
            self.assertEqual(up.stdout.readline(), f"{self.SIZE}\n")
            self.assertEqual(up.stdout.readline(), "done\n")
            self.talk(talk)
        log(f"{self.SIZE} bytes each way and an exec through {2 * rounds * len(others)} reloads, {rounds * len(others)} of them with a drain")

    def talk(self, child):
        word = uuid.uuid4().hex
        child.stdin.write(word + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if answer != word + "\n":
            child.kill()
            self.fail(f"the exec has ended: {answer}{child.communicate()[1]}")

    def reload(self, change):
        jackstay = self.jackstay
        self.original = getattr(self, "original", None) or jackstay.config.read_text()
        before = self.reloads("ok")
        text = change(self.original)
        new = jackstay.config.with_suffix(".new")
        # Something else changes too, or nothing would.
        new.write_text(text.replace("level: \"info\"", f"level: \"{'debug' if before % 2 else 'info'}\""))
        new.rename(jackstay.config)
        jackstay.process.child.send_signal(signal.SIGHUP)
        wait_for("a reload", lambda: self.reloads("ok") > before, 20)
        self.assertEqual(self.reloads("failed"), 0)

    def reloads(self, outcome):
        return self.jackstay.metrics().get(f'jackstay_config_reloads_total{{outcome="{outcome}"}}', 0)

    def test_passthrough(self):
        self.through(passthrough(self.rig, port=7456, admin=9656, log_name="jackstay-l4-changes"), list(ADDRESSES.values()))

    def test_terminate(self):
        self.through(Jackstay(self.rig, [self.rig.admin_cert], port=7457, admin=9657, log_name="jackstay-l7-changes"), list(ADDRESSES.values()))


class Transparent(WithRig, unittest.TestCase):
    """kubectl names the load balancer's address and knows nothing of jackstay."""

    @classmethod
    def prepare(cls):
        cls.lb = Forwarder(cls.rig).start()
        cls.addClassCleanup(cls.lb.stop)
        # A way out, in both families, as on any node: it is there when the load balancer is not.
        sh("ip", "route", "replace", "10.99.2.0/24", "dev", "rig0", "metric", "900")
        sh("ip", "-6", "addr", "replace", "fd00:98::1/64", "dev", "rig0", "nodad")
        sh("ip", "-6", "route", "replace", "default", "dev", "rig0")
        cls.server = f"https://{LB}:{PORT}"
        cls.config = cls.rig.kubeconfig("lb", cls.server, cert=cls.rig.admin_cert)
        cls.jackstay = passthrough(cls.rig, port=7451, admin=9651, log_name="jackstay-transparent", transparent=True,
                                   adapt=lambda config: config["listeners"][0]["bind"].append("[::1]:7451"))
        cls.addClassCleanup(cls.jackstay.process.stop, signal.SIGKILL)
        cls.jackstay.start()

    def tearDown(self):
        for variant in ("lb-redirect", "lb-tproxy", "service-redirect", "service-tproxy"):
            remove(variant)
        if self.lb.keeper is None:
            self.lb.start()
        self.assertTrue(self.jackstay.process.running, self.jackstay.process.tail())

    def passed(self, jackstay=None):
        """Connections that have passed so far. A page that is written while one ends may have it twice, or not at all."""
        def now():
            metrics = (jackstay or self.jackstay).metrics()
            return {k: v for k, v in metrics.items() if k.startswith(("jackstay_passthrough_closed_total", "jackstay_passthrough_connections"))}

        def twice():
            first = now()
            return [first] if first == now() else None
        return sum(wait_for("two pages that agree", twice, 10)[0].values())

    def kubectl(self, config=None, within=()):
        argv = self.rig.kubectl_argv(config or self.config, "get", "namespaces", "-o", "name")
        done = sh(*within, *argv, env={**os.environ, "HOME": str(self.rig.dir / "home")}, timeout=30, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("namespace/default", done.stdout)

    def logged(self):
        return self.jackstay.process.logfile.read_text(errors="replace")

    def both_ways(self, variant):
        self.kubectl()
        before = self.passed()
        install(variant, lb4=LB, lb6=LB6, lb_port=PORT, listener_port=7451)
        self.kubectl()
        self.assertGreater(self.passed(), before, "kubectl went past jackstay")
        # The load balancer dies, and nobody who names it notices.
        self.lb.power_off()
        self.kubectl()
        answer = self.rig.api(f"https://[{LB6}]:{PORT}", cert=self.rig.admin_cert).get("/readyz")
        self.assertEqual(answer.code, 200, "IPv6")
        self.lb.start()
        remove(variant)
        after = self.passed()
        self.kubectl()
        self.assertEqual(self.passed(), after, "kubectl still passes through jackstay")

    def service(self, variant):
        """The Service's address beside kube-proxy, for a pod and for the node. What was meant for it
        goes to an upstream of its own."""
        pod = Host(self.rig, "10.99.3.5", "10.99.3.1", "pod").start()
        self.addCleanup(pod.stop)
        sh("ip", "route", "replace", "10.96.0.0/24", "dev", "rig0")
        sh("nft", "-f", "-", input=KUBE_PROXY)
        self.addCleanup(sh, "nft", "delete", "table", "ip", "kube_proxy")

        bind = ["0.0.0.0:7453", "[::]:7453"] if "redirect" in variant else ["127.0.0.1:7453", "[::1]:7453"]

        def adapt(config):
            config["upstreams"].append({**config["upstreams"][0], "name": "elsewhere", "endpoints": [f"{ADDRESSES['a']}:{PORT}"]})
            config["listeners"][0].update(bind=bind, upstream="elsewhere")
        meant = [{"to": [f"{SERVICE}:443", f"[{LB6}]:443"], "upstream": "control-plane"}]
        jackstay = passthrough(self.rig, endpoints=[f"{ADDRESSES['b']}:{PORT}"], port=7453, admin=9653, log_name=f"jackstay-{variant}",
                               transparent=True, destinations=meant, adapt=adapt).start()
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        config = self.rig.kubeconfig(variant, f"https://{SERVICE}:443", cert=self.rig.admin_cert)

        def both(passes):
            for who, within in (("the pod", pod.inside()), ("the node", ())):
                before = self.passed(jackstay)
                self.kubectl(config, within)
                self.assertEqual(self.passed(jackstay) > before, passes, who)
        both(False)
        install(variant, service4=SERVICE, service6=LB6, listener_port=7453)
        both(True)
        for address in (SERVICE, f"[{LB6}]"):
            kept = self.rig.api(f"https://{address}:443", cert=self.rig.admin_cert)
            self.assertEqual(kept.request("GET", "/readyz", keep=True).code, 200, address)
            flows = {upstream["name"]: sum(e["flows"] for e in upstream["endpoints"]) for upstream in jackstay.status()["upstreams"]}
            self.assertEqual(flows, {"control-plane": 1, "elsewhere": 0}, address)
            kept.kept.close()
            wait_for("its end", lambda: jackstay.status()["listeners"][0]["flows"] == 0, 10)
        remove(variant)
        both(False)

    def test_service_redirect(self):
        self.service("service-redirect")

    def test_service_tproxy(self):
        self.service("service-tproxy")

    def test_redirect(self):
        self.both_ways("lb-redirect")

    def test_tproxy(self):
        self.both_ways("lb-tproxy")

    def test_loop(self):
        """Rules that catch our own connections too: the circle is broken, and the log says why."""
        install("lb-redirect", lb4=ADDRESSES["a"], lb6=LB6, lb_port=PORT, listener_port=7451, own_mark="0x1")
        api = self.rig.api(self.rig.server("a"), cert=self.rig.admin_cert, timeout=5)

        def came_back():  # Any number may be passed on to b or c first, which nobody intercepts.
            try:
                api.get("/readyz")
            except OSError:
                pass
            return "our own connection to" in self.logged()

        wait_for("a word about it", came_back, 10)
        self.assertLess(len(os.listdir(f"/proc/{self.jackstay.pid}/fd")), 200)

    def test_direct_connection(self):
        """A direct connection to a transparent listener is refused at once, and the log has the reason."""
        with self.assertRaises(OSError):
            self.rig.api(self.jackstay.server, cert=self.rig.admin_cert, timeout=5).get("/readyz")
        self.assertIn("accepts only connections that nftables redirects", self.logged())

    def test_without_the_capability(self):
        """One clear error, at the start."""
        other = passthrough(self.rig, port=7452, admin=9652, log_name="jackstay-no-capability", transparent=True)
        done = sh("setpriv", "--bounding-set=-net_admin,-net_raw", other.binary, "run", "--config", other.config, check=False)
        errors = [line for line in done.stderr.splitlines() if " ERROR " in line]
        self.assertEqual((done.returncode, len(errors)), (1, 1), done.stderr)
        self.assertIn("CAP_NET_ADMIN", errors[0])


class DropIn(WithRig, unittest.TestCase):
    """The load balancer's address moves onto the node, and nothing is reconfigured."""

    def test_address_moves(self):
        lb = Forwarder(self.rig).start()
        self.addCleanup(lb.stop)
        script = rig_l4.DEPLOY / "systemd/jackstay-address"
        for address in (LB, LB6):
            self.addCleanup(sh, script, "remove", address)
        # It listens before the host has the addresses.
        jackstay = passthrough(self.rig, port=7453, admin=9653, log_name="jackstay-drop-in", bind=[f"{LB}:{PORT}", f"[{LB6}]:{PORT}"], freebind=True)
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        jackstay.start()
        load = Load(self.rig, f"https://{LB}:{PORT}", 90, flows="idle-watch=2,read=2,write=2,fresh=4")
        self.addCleanup(load.kill)
        load.until(3)
        sh(script, "add", LB)
        sh(script, "add", LB6)
        lb.power_off()
        moved = time.time()

        def through():
            return sum(v for k, v in jackstay.metrics().items() if k.startswith("jackstay_passthrough_closed_total"))
        wait_for("connections through jackstay", lambda: through() >= 6, 60)
        report = load.finish(early=True)
        before = through()
        answer = self.rig.api(f"https://[{LB6}]:{PORT}", cert=self.rig.admin_cert).get("/readyz")
        self.assertEqual(answer.code, 200, "IPv6")
        wait_for("a connection by IPv6 through jackstay", lambda: through() > before, 10)
        late = [o for f in report["flows"] for o in f["outages"] if not o["to"] or o["to"] - moved > bound(ON_AGAIN)]
        passing = through()
        log(f"the address moved: {sum(bool(f['outages']) for f in report['flows'])} flows reconnected, {passing:.0f} connections have passed through jackstay")
        # Who says nothing, an idle watch or one that waits for an answer just then, is reset by nobody:
        # its own client finds out (45 s).
        self.assertEqual([o for o in late if o["to"] and not all("client connection lost" in e for e in o["errors"])], [])
        self.assertGreaterEqual(passing, 6)
