"""The renewal of the local CA under a real kubelet, with certificates whose dates are shifted.

Promise: kubelet stays Ready although jackstay is restarted at each stage, so that kubelet connects anew with the CAs that
it has read at its start. Its unit restarts kubelet once, between the two steps.
"""

import base64
import json
import re
import unittest
from pathlib import Path

from cases import RigCase, long_form
from deployed import pids_of, stop_everything
from figures import within
from installed import KUBELET_CONF, NodeWithSystemd
from rig import sh, wait_for

READY = 60
DIRECTORY = Path("/etc/jackstay")
SERVING, CA, STATE = (DIRECTORY / name for name in ("serving.pem", "local-ca.crt", "renewal.json"))
UNIT = "jackstay-renew.service"
DROP_IN = Path("/etc/systemd/system") / f"{UNIT}.d/operator.conf"
DAY = 24 * 3600


class RotatingNode(NodeWithSystemd):
    """A kubelet as kubeadm configures it. It builds its own transport from the CAs that it reads at its start."""

    def kubelet_config(self):
        return {**super().kubelet_config(), "rotateCertificates": True}


class ShiftedCa:
    """A local CA, like one that jackstay creates, whose certificates have chosen dates. Its key is kept, so that one CA
    signs a certificate for each stage."""

    def __init__(self, directory, node):
        self.dir, self.node = directory, node
        directory.mkdir()
        (directory / "index").touch()
        (directory / "serial").write_text("0ABC\n")
        (directory / "ca.cnf").write_text(f"""[ca]
default_ca = rig
[rig]
new_certs_dir = {directory}
database = {directory}/index
serial = {directory}/serial
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[of_ca]
basicConstraints = critical,CA:TRUE,pathlen:0
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
nameConstraints = critical,permitted;DNS:localhost,permitted;DNS:{node},permitted;IP:127.0.0.0/255.0.0.0,permitted;IP:0:0:0:0:0:0:0:1/ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff
[of_leaf]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = IP:127.0.0.1,IP:::1,DNS:localhost,DNS:{node}
[req]
distinguished_name = name
[name]
""")
        self.key, self.crt = directory / "ca.key", directory / "ca.crt"
        request = self.request("ca", f"/CN=jackstay on {node}")
        self.sign(request, self.crt, "of_ca", -300, 120, "-selfsign", "-keyfile", self.key)

    def request(self, name, subject):
        csr = self.dir / f"{name}.csr"
        sh("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", subject,
           "-keyout", self.dir / f"{name}.key", "-out", csr)
        return csr

    def sign(self, csr, crt, extensions, first, last, *options):
        moments = [sh("date", "-u", "-d", f"{days} days", "+%y%m%d%H%M%SZ").stdout.strip() for days in (first, last)]
        sh("openssl", "ca", "-batch", "-notext", "-config", self.dir / "ca.cnf", "-extensions", extensions, *options,
           "-startdate", moments[0], "-enddate", moments[1], "-in", csr, "-out", crt)

    def issue(self, first, last):
        """Certificate and key, valid from one day to another, relative to today."""
        crt = self.dir / f"leaf-{last}.crt"
        self.sign(self.request("leaf", "/CN=127.0.0.1"), crt, "of_leaf", first, last, "-cert", self.crt, "-keyfile", self.key)
        return crt.read_text() + (self.dir / "leaf.key").read_text()


DATA = re.compile(r"^(\s*)certificate-authority-data: *(\S+)$", re.MULTILINE)


def cas_of_kubeconfig():
    """The number of CAs in kubelet's kubeconfig, in which jackstay also records the cluster as it was."""
    _, data = min(DATA.findall(KUBELET_CONF.read_text()), key=lambda found: len(found[0]))
    return base64.b64decode(data).count(b"BEGIN CERTIFICATE")


def write_ca_of_kubeconfig(pem):
    text = KUBELET_CONF.read_text()
    indent, data = min(DATA.findall(text), key=lambda found: len(found[0]))
    KUBELET_CONF.write_text(text.replace(f"\n{indent}certificate-authority-data: {data}", f"\n{indent}certificate-authority-data: {base64.b64encode(pem).decode()}"))


@long_form("the renewal on a virtual clock, with the verification of X.509, is in cargo test (setup::renewal)")
class Renewal(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        cls.node = cls.rig.node = RotatingNode(cls.rig).start()
        wait_for("the node to be Ready", lambda: cls.rig.ready(cls.node.NAME), 120)

    @classmethod
    def tearDownClass(cls):
        cls.node.jackstay("uninstall")
        stop_everything(cls.rig)

    def setUp(self):
        self.rig.recover()

    def serve(self, pem):
        """Replaces the served certificate as the command does; jackstay loads it."""
        new = SERVING.with_name(".serving.pem")
        new.write_text(pem)
        new.chmod(0o600)
        new.rename(SERVING)

    def renew(self, is_ok=True):
        """Runs the unit; returns what its journal has of the run."""
        result = self.node.inside("systemctl", "start", UNIT)
        output = self.output()
        self.assertEqual(result.returncode == 0, is_ok, result.stderr + output)
        self.node.ctl("reset-failed", UNIT)
        return output

    def output(self):
        path = Path("/var/log/jackstay-renew.log")
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text

    def may_restart(self, allowed):
        DROP_IN.parent.mkdir(exist_ok=True)
        turned_off = "" if allowed else "Environment=JACKSTAY_RESTART=\n"
        DROP_IN.write_text(f"[Service]\n{turned_off}StandardOutput=append:/var/log/jackstay-renew.log\nStandardError=inherit\n")
        self.node.ctl("daemon-reload", check=True)

    def pass_days(self, days):
        """What the runs remember happened so much earlier."""
        state = json.loads(STATE.read_text())
        for seen in [*state["kubeconfigs"].values(), *(reader["lacks"] for reader in state["readers"].values() if reader["lacks"])]:
            seen["since"] -= days * DAY
        STATE.write_text(json.dumps(state))

    def assert_ready_after_restart_of_jackstay(self, stage):
        """kubelet has to connect anew, and is the same process."""
        before = self.node.kubelet_pid()
        self.node.ctl("restart", "jackstay.service", check=True)
        within(self, f"renewal, {stage}: jackstay restarted, kubelet not: Ready", self.node.wait_ready(4 * READY), "s", READY)
        self.assertEqual(self.node.kubelet_pid(), before)

    def test_kubelet_is_ready_at_each_stage(self):
        done = self.node.inside(*self.node.install_argv())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr + self.node.logs())
        self.node.ctl("stop", "jackstay-renew.timer", check=True)
        self.may_restart(False)
        shifted = ShiftedCa(self.rig.dir / "shifted-ca", self.node.NAME)
        # The first day of the last third.
        CA.write_text(shifted.crt.read_text())
        write_ca_of_kubeconfig(shifted.crt.read_bytes())
        self.serve(shifted.issue(-245, 119))
        self.node.ctl("restart", "jackstay.service", "kubelet.service", check=True)
        self.node.wait_ready(4 * READY)

        # Nothing is restarted by the renewal at first: kubelet trusts the first CA alone.
        self.assertIn("published the next local CA", self.renew())
        self.assertEqual(cas_of_kubeconfig(), 2)
        self.assert_ready_after_restart_of_jackstay("published")
        self.assertIn("the running kubelet.service", self.renew())
        self.pass_days(16)
        # Three weeks before the end: an alarm, and the old certificate.
        self.serve(shifted.issue(-345, 20))
        served = SERVING.read_text()
        output = self.renew(is_ok=False)
        self.assertIn("the running kubelet.service does not trust its CA", output)
        self.assertEqual(SERVING.read_text(), served)
        self.assert_ready_after_restart_of_jackstay("time to switch")
        # The unit restarts kubelet. While jackstay does not serve, it does not.
        self.may_restart(True)
        before = self.node.kubelet_pid()
        self.node.ctl("stop", "jackstay.service", check=True)
        self.assertIn("is not restarted, because jackstay does not serve", self.renew(is_ok=False))
        self.assertEqual(self.node.kubelet_pid(), before)
        self.node.ctl("start", "jackstay.service", check=True)
        self.node.jackstay("status", "--wait", check=True)
        self.assertIn("restarted kubelet.service", self.renew(is_ok=False))
        wait_for("kubelet to be another process", lambda: pids_of("kubelet", None) and before not in pids_of("kubelet", None), 30)
        self.node.wait_ready(4 * READY)
        self.assert_ready_after_restart_of_jackstay("kubelet restarted")
        # The next certificate is served.
        self.assertIn("the next certificate is served", self.renew())
        self.assertNotEqual(SERVING.read_text(), served)
        self.assert_ready_after_restart_of_jackstay("switched")
        self.assertIn("published after", self.renew())
        self.assert_ready_after_restart_of_jackstay("the day after")
        # A kubelet that starts now trusts both, too.
        self.node.ctl("restart", "kubelet.service", check=True)
        within(self, "renewal, switched: kubelet restarted: Ready", self.node.wait_ready(4 * READY), "s", READY)
        # What a renewal without the first step did: the next connection fails.
        before = self.node.kubelet_pid()
        foreign = ShiftedCa(self.rig.dir / "foreign-ca", self.node.NAME)
        self.serve(foreign.issue(-1, 100))
        logfile = Path("/var/log/kubelet.log")
        begun = logfile.stat().st_size
        self.node.ctl("restart", "jackstay.service", check=True)
        wait_for("kubelet to refuse the certificate", lambda: b"unknown authority" in logfile.read_bytes()[begun:], 60)
        self.assertEqual(self.node.kubelet_pid(), before)
