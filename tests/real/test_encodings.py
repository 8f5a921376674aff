"""The faults of the README's table, with 20 watches in each of JSON, protobuf and CBOR on one connection."""

import time
import unittest

from cases import long_form
from extra import ExtraCase
from figures import LONG, within
from kubernetes import RELEASE
from matrix import covers
from readme import write_rows
from rig import EXTRA_ADDRESSES, PORT, Jackstay, log, summary, wait_for
from settings import Settings
from test_cbor import CBOR, needs_cbor

ENCODINGS = {"json": "JSON", "protobuf": "protobuf", "cbor": "CBOR"}
HEAD = f"| fault | {' | '.join(ENCODINGS.values())} |\n|---|{'---|' * len(ENCODINGS)}\n"
WATCHES = {"formats": ",".join(ENCODINGS), "watches": 20 * len(ENCODINGS)}
COUNTS = ("broken", "lost", "duplicated", "relists")


def by_encoding(report):
    """The counts and times of the watches of a report of the load generator, by their encoding."""
    found = {}
    for encoding in ENCODINGS:
        watches = [w for w in report["each_watch"] if w["format"] == encoding and not w.get("reference")]
        found[encoding] = {
            "watches": len(watches), "broken": sum(w["broken"] + w["refused"] for w in watches), "lost": sum(w["lost"] for w in watches),
            "duplicated": sum(w["duplicated"] + w["backwards"] for w in watches), "relists": sum(w["relists"] for w in watches),
            "events": sum(w["events"] for w in watches),
            "silence": max(w["max_gap_ms"] for w in watches if w["set"] == "busy") / 1000,
            "delay": max(w["max_delay_ms"] for w in watches if w["set"] != "busy") / 1000}
    return found


@needs_cbor
@covers("`CBORServingAndStorage`: each fault beside JSON and protobuf")
class Encodings(ExtraCase, unittest.TestCase):
    SETTINGS = {name: Settings(features=(CBOR,)) for name in "def"}
    FAULTY = "def"
    LISTENER = 7530

    def run_fault(self, what, fault, **options):
        """Also checks that each affected watch has continued elsewhere: the silence of a watch that waits for the end of
        the fault may be shorter than four times the promise."""
        before, self.affected = self.resumed(), 0
        super().run_fault(what, fault, flags=WATCHES, **options)
        with self.subTest(f"{what}: the watches moved"):
            self.assertGreater(self.affected, 0)
            self.assertGreaterEqual(self.resumed() - before, self.affected)

    def victim(self):
        """The apiserver with most watches, which the fault affects."""
        victim = self.most_watched()
        self.affected = self.endpoints()[victim.name]["watches"]
        return victim

    def drop_flows(self, hook, **options):
        self.affected = sum(endpoint["watches"] for endpoint in self.endpoints().values())
        self.rig.faults.drop_flows(self.jackstay.pid, hooks=(hook,), **options)

    def check_report(self, what, load, report, busy=2.5, delay=None, **limits):
        super().check_report(what, load, report, busy=None, **limits)
        self.check_encodings(what, report, busy, delay)

    def check_encodings(self, what, report, busy=None, delay=None):
        """Checks and writes the counts and times of each encoding."""
        cells = [what]
        for encoding, found in by_encoding(report).items():
            name = ENCODINGS[encoding]
            log(f"    {what}, {name}: {found}")
            with self.subTest(f"{what}: {name}"):
                self.assertEqual(found["watches"], 20)
                self.assertGreater(found["events"], 0)
                self.assertEqual([found[count] for count in COUNTS], [0] * len(COUNTS))
                if busy:
                    within(self, f"{what}: longest silence of a busy watch in {name}", found["silence"], "s", busy)
                    within(self, f"{what}: delay of a quiet watch in {name}", found["delay"], "s", delay or busy + 1)
            cells.append(f"{', '.join(str(found[count]) for count in COUNTS)}; {found['silence']:.2g} s, {found['delay']:.2g} s")
        write_rows("encodings", HEAD, [cells])

    def test_sigkill_of_one(self):
        self.run_fault("SIGKILL of one apiserver", lambda: self.victim().kill(), counted=False, slowest_read=0.3)

    @long_form("test_sigkill_of_one")
    def test_sigstop_of_one(self):
        self.run_fault("SIGSTOP of one apiserver", lambda: self.victim().pause(), seconds=12, counted=False, slowest_read=0.25, delay=1.5)

    @long_form("test_sigkill_of_one")
    def test_all_packets_of_one_dropped(self):
        self.run_fault("all packets of one apiserver dropped", lambda: self.rig.faults.drop_address(self.victim().address), slowest_read=0.25)

    def test_flows_dropped(self):
        for hook in ("input", "output") if LONG else ("input",):
            self.run_fault(f"packets of every flow dropped in {hook}", lambda: self.drop_flows(hook), slowest_read=0.25)

    @long_form("test_flows_dropped")
    def test_flows_dropped_in_one_direction(self):
        for direction, hook in (("from", "input"), ("to", "input"), ("from", "output"), ("to", "output")):
            self.run_fault(f"the same in {hook}, only {direction} the apiservers", lambda: self.drop_flows(hook, directions=(direction,)), slowest_read=0.25)

    @long_form("test_sigkill_of_one")
    def test_without_etcd(self):
        """The readiness check of one apiserver fails, and its requests and watches make no progress."""
        def quick(config):
            config["upstreams"][0]["health"] = {"readyz": {"path": RELEASE.etcd_check, "interval": "1s", "fall": 2}}
        usual = self.jackstay
        self.jackstay = Jackstay(self.rig, self.identities(), [f"{EXTRA_ADDRESSES[name]}:{PORT}" for name in self.SETTINGS],
                                 adapt=quick, log_name="jackstay-encodings-readyz", port=7531, admin=9731).start()
        try:
            wait_for("the endpoints to be ready", lambda: all(e["state"] == "ready" for e in self.endpoints().values()), 30)
            self.run_fault("`/readyz` of one apiserver fails, and its requests hang", lambda: self.rig.faults.drop_etcd(self.victim().name),
                           lasting=True, renewal=4.5, slowest_read=0.25, busy=4, delay=4)
        finally:
            self.jackstay.stop()
            self.jackstay = usual

    @long_form("test_jackstay has losses")
    def test_packet_loss(self):
        load = self.load(70, **WATCHES)
        load.until(3)
        self.rig.faults.drop_randomly(5, addresses=[EXTRA_ADDRESSES[name] for name in self.SETTINGS])
        load.until(63)
        self.assertGreater(self.rig.faults.dropped(), 0, "the fault dropped no packet")
        self.rig.recover()
        self.check_report("a minute of 5 % packet loss, both directions", load, load.finish(), writes_may_fail=False, slowest_read=1,
                          busy=1, delay=1.5)

    @long_form("test_sigkill_of_one")
    def test_rolling_restarts(self):
        load = self.load(180, **WATCHES)
        load.until(2)
        for name, graceful in (("d", True), ("e", False), ("f", True), ("d", False), ("e", True), ("f", False)):
            if not graceful:
                self.inject(self.rig.extra[name].kill)
            self.rig.extra[name].restart(graceful=graceful, down=1)
            time.sleep(4)
        self.check_report("two restarts of each apiserver", load, load.finish(early=True), slowest_read=1, grace=0.3, busy=3)

    @long_form("the other tests have each of these faults")
    def test_many_faults(self):
        kinds = [
            lambda: self.victim().kill(), lambda: self.drop_flows("input"), lambda: self.victim().pause(),
            lambda: self.rig.faults.drop_address(self.victim().address), lambda: self.drop_flows("output"),
            lambda: self.drop_flows("input", directions=("from",)), lambda: self.victim().restart(graceful=False, down=1),
            lambda: self.drop_flows("output", directions=("to",)),
            lambda: self.rig.faults.drop_address(self.victim().address, hooks=("input",), directions=("from",)),
            lambda: self.rig.faults.drop_randomly(5, addresses=[EXTRA_ADDRESSES[name] for name in self.SETTINGS]),
        ] * 2
        load = self.load(240, **WATCHES)
        load.until(2)
        for fault in kinds:
            self.inject(fault)
            time.sleep(3)
            self.rig.recover()
            time.sleep(1.5)
        self.check_report(f"{len(kinds)} faults in a row", load, load.finish(early=True), slowest_read=0.6, busy=2.5, delay=2.5)

    def run_outage(self, what, take_down, slowest_write):
        """Ten seconds without an apiserver, while c is written directly: requests get 503, and watches are held."""
        load = self.load(25, **WATCHES)
        load.until(3)
        take_down()
        load.until(13)
        self.rig.recover()
        report = load.finish()
        log(f"{what}: {summary(report)}")
        for kind, promise in (("read", 1500), ("write", slowest_write)):
            within(self, f"{what}: slowest {kind}", report["requests"][kind]["slowest_ms"], "ms", promise)
            self.assertEqual(report["requests"][kind]["failed_without_status"], 0)
        self.assertGreater(report["requests"]["read"]["failed"], 0, "an apiserver has answered")
        self.check_encodings(what, report)

    @long_form("test_jackstay and test_outage have outages")
    def test_zy_all_stopped(self):
        self.run_outage("SIGSTOP of every apiserver for 10 s", lambda: [apiserver.pause() for apiserver in self.rig.extra.values()], 8000)

    @long_form("test_jackstay and test_outage have outages")
    def test_zz_all_refuse(self):
        addresses = ", ".join(EXTRA_ADDRESSES[name] for name in self.SETTINGS)
        self.run_outage("every apiserver refuses connections for 10 s", lambda: self.rig.faults.nft(
            f"add rule inet jackstay_rig output ip daddr {{ {addresses} }} tcp dport {PORT} counter reject with tcp reset\n"), 1500)
