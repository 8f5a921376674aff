"""jackstay at L7 in front of an apiserver behind a line that delays every byte: another region, an edge site."""

import base64
import random
import statistics
import subprocess
import sys
import time
import unittest
from pathlib import Path

from cases import RigCase, StoppedOnExit, long_form
from figures import LONG, STRICT, within
from rig import ADDRESSES, PORT, TOKEN, Jackstay, wait_for

RELAY = 7470
LISTENER = 7471
# Objects of 512 KiB: a LIST of 20 MB.
OBJECTS = 40
ROUNDS = 5 if LONG or STRICT else 3


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
