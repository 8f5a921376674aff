"""Base of tests of apiservers with other settings than the rig's: d, e and f, behind a jackstay of their own."""

import time

from rig import EXTRA_ADDRESSES, PORT, Jackstay, probe_as_admin, wait_for
from test_jackstay import LoadCase


class ExtraCase(LoadCase):
    SETTINGS = {}  # of the apiservers d, e and f
    FAULTY = "de"
    LISTENER = 7510
    READS_METRICS = False  # whether the prober has the right to read /metrics, which a node has not

    @classmethod
    def prepare(cls):
        cls.addClassCleanup(cls.rig.stop_extra)
        cls.rig.start_extra(**cls.SETTINGS)
        cls.jackstay = Jackstay(
            cls.rig, cls.identities(), [f"{EXTRA_ADDRESSES[name]}:{PORT}" for name in cls.SETTINGS],
            adapt=cls.adapt, log_name=f"jackstay-{cls.__name__.lower()}", port=cls.LISTENER, admin=cls.LISTENER + 2000).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server

    @classmethod
    def adapt(cls, config):
        if cls.READS_METRICS:
            probe_as_admin(cls.rig, config)

    @classmethod
    def identities(cls):
        """The certificates of the clients."""
        return [cls.rig.admin_cert, cls.rig.load_cert]

    def setUp(self):
        super().setUp()
        wait_for("the endpoints to be ready", lambda: all(e["state"] == "ready" for e in self.endpoints().values()), 30)

    def endpoints(self):
        """The endpoints of jackstay's status, by the names of their apiservers."""
        names = {address: name for name, address in EXTRA_ADDRESSES.items()}
        return {names[e["address"].rpartition(":")[0]]: e for e in self.jackstay.status()["upstreams"][0]["endpoints"]}

    def dials(self):
        """Connections that jackstay has opened to each apiserver."""
        samples = self.jackstay.metrics().items()
        return {name: sum(int(value) for sample, value in samples
                          if sample.startswith("jackstay_dials_total{") and f'"{EXTRA_ADDRESSES[name]}:' in sample) for name in self.SETTINGS}

    def resumed(self):
        """Watches that have continued at another apiserver, after the loss of their stream or before it."""
        metrics = self.jackstay.metrics()
        return sum(metrics.get(f'jackstay_watch_resumes_total{{outcome="{outcome}"}}', 0) for outcome in ("resumed", "moved", "shadow"))

    def most_watched(self):
        """The apiserver with most watches through jackstay."""
        watches = {name: endpoint["watches"] for name, endpoint in self.endpoints().items()}
        name = max(watches, key=watches.get)
        self.assertGreater(watches[name], 0)
        return self.rig.extra[name]

    def kill_most_watched(self, down=1.0):
        """SIGKILL of the apiserver with most watches, which starts again."""
        victim = self.most_watched()
        victim.kill()
        time.sleep(down)
        victim.start()
