"""Cached reads that went back in time: one apiserver after another is cut off from etcd and serves an old cache.

The same run for a direct line to one apiserver, for HAProxy at L4, and for jackstay with and without version floors.
"""

import json
import signal
import subprocess
import threading
import time
import unittest

from cases import RigCase
from figures import LONG, record
from rig import ADDRESSES, ADMIN_TOKENS, CACHE, Jackstay, log, sh, wait_for
from rig_l4 import start_peer

CUT = 13  # seconds; longer than etcd's client waits
CLIENTS = 4
OBJECT = "stale"


class Readers:
    """Clients of one server, each with its own identity and connection."""

    def __init__(self, rig, server, namespace, seconds):
        clients = ",".join(f"{name}={ADMIN_TOKENS[name]}" for name in list(ADMIN_TOKENS)[:CLIENTS])
        # 10,000 reads of each server in the long form
        interval = seconds * CLIENTS / 10_000 if LONG else 0.05
        self.child = subprocess.Popen(list(map(str, [
            CACHE / "load", f"-server={server}", f"-ca={rig.pki.ca}", f"-namespace={namespace}", f"-cached-reads={OBJECT}", f"-clients={clients}",
            f"-duration={seconds}s", f"-interval={1000 * interval:.0f}ms", "-user-agent=stale-reads"])),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self):
        output, error = self.child.communicate(timeout=90)
        if self.child.returncode:
            raise AssertionError(f"exit {self.child.returncode}: {error}")
        return json.loads(output.splitlines()[-1])

    def kill(self):
        self.child.kill()
        self.child.communicate()


class StaleReads(RigCase, unittest.TestCase):
    def start_jackstay(self, name, number, value):
        """jackstay with this value of `consistent_reads`; None if the binary does not know the key."""
        def adapt(config):
            if value:
                config["upstreams"][0]["consistent_reads"] = value
        jackstay = Jackstay(self.rig, [self.rig.admin_cert], adapt=adapt, log_name=name, port=7460 + number, admin=9660 + number)
        checked = sh(jackstay.binary, "check", "--config", jackstay.config, check=False)
        if checked.returncode and "consistent_reads" in checked.stdout + checked.stderr:
            return None
        self.addCleanup(jackstay.process.stop, signal.SIGKILL)
        return jackstay.start()

    def write(self, namespace, stopped):
        """Changes the object through an apiserver that is not cut off."""
        body = {"metadata": {"name": OBJECT}, "data": {}}
        while not stopped.wait(0.05):
            server = self.writable
            body["data"]["number"] = str(time.monotonic_ns())
            try:
                self.apis[server].request("PUT", f"/api/v1/namespaces/{namespace}/configmaps/{OBJECT}", body, keep=True)
            except OSError:
                pass  # It was in flight when etcd was cut off.

    def test_one_apiserver_after_another_lags(self):
        rig, cuts = self.rig, "abc" if LONG else "a"
        servers = {"a direct line": rig.server("a")}
        haproxy = start_peer(rig, "haproxy", 7465)
        if haproxy:
            self.addCleanup(haproxy.stop, signal.SIGKILL)
            servers["HAProxy"] = "https://127.0.0.1:7465"
        floor = self.start_jackstay("jackstay-floor", 1, "floor")
        off = self.start_jackstay("jackstay-off", 2, "off") or self.start_jackstay("jackstay-off", 2, None)
        servers["jackstay, consistent_reads: off"] = off.server
        if floor:
            servers["jackstay, consistent_reads: floor"] = floor.server
        namespace = rig.load_namespace()
        rig.control.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": OBJECT}})
        self.apis = {name: rig.api(name, cert=rig.admin_cert, timeout=3) for name in ADDRESSES}
        for api in self.apis.values():  # a read from any cache must find the object
            wait_for("the object in every cache", lambda: api.get(f"/api/v1/namespaces/{namespace}/configmaps/{OBJECT}?resourceVersion=0").code == 200, 10)
        self.writable, stopped = "b", threading.Event()
        writer = threading.Thread(target=self.write, args=(namespace, stopped), daemon=True)
        writer.start()
        self.addCleanup(rig.recover)
        self.addCleanup(stopped.set)
        seconds = 4 + len(cuts) * (CUT + 7)
        readers = {name: Readers(rig, server, namespace, seconds) for name, server in servers.items()}
        for one in readers.values():
            self.addCleanup(one.kill)
        time.sleep(3)
        for name in cuts:
            self.writable = "b" if name == "a" else "a"
            log(f"    {name} is cut off from etcd")
            rig.faults.drop_etcd(name)
            time.sleep(CUT)
            rig.faults.clear()
            time.sleep(6)
        reports = {name: one.finish() for name, one in readers.items()}
        stopped.set()
        writer.join(10)
        for name, report in reports.items():
            log(f"    {name}: {report}")
            record(f"reads that went back, of 10,000: {name}", 10_000 * report["back"] / report["reads"], "")
        for name, report in reports.items():
            with self.subTest(name):
                self.assertGreater(report["reads"], 500)
                if "off" not in name:
                    self.assertEqual((report["back"], report["failed"]), (0, 0), report)
        if not floor:
            self.skipTest("this binary does not know consistent_reads")
