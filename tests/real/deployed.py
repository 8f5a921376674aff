"""A node set up from `deploy/`: its manifests, units and paths are used unchanged."""

import calendar
import json
import os
import shutil
import signal
import time
import urllib.request
from pathlib import Path

from rig import ADDRESSES, HERE, PORT, REPOSITORY, Process, RealNode, sh, wait_for, yaml

DEPLOY = REPOSITORY / "deploy"
DIST = Path(os.environ.get("JACKSTAY_DIST") or REPOSITORY / "target/dist")
MANIFESTS = Path("/etc/kubernetes/manifests")
CONFIG = Path("/etc/jackstay/jackstay.yaml")
KUBELET_CONF, BOOTSTRAP_CONF = Path("/etc/kubernetes/kubelet.conf"), Path("/etc/kubernetes/bootstrap-kubelet.conf")
KUBELET_PEM = Path("/var/lib/kubelet/pki/kubelet-client-current.pem")
SERVER = "https://127.0.0.1:7443"
ADMIN = "http://127.0.0.1:9643"


def dist_file(name):
    """A file that `deploy/release` builds: `jackstay` or `jackstay-image.tar`."""
    path = DIST / name
    if not path.exists():
        raise AssertionError(f"{path} is missing: run deploy/release (JACKSTAY_DIST names another directory)")
    return path


def admin(path, timeout=10):
    """The body of an admin endpoint's response; raises unless the status is 200."""
    with urllib.request.urlopen(ADMIN + path, timeout=timeout) as answer:
        return answer.read().decode()


def status():
    return json.loads(admin("/status"))


UPSTREAM = {"name": "control-plane", "endpoints": [f"{address}:{PORT}" for address in ADDRESSES.values()],
            "tls": {"ca_file": "/etc/kubernetes/pki/ca.crt"}}


def write_config(rig, mode, identities=(), listener=None, **more):
    """Writes /etc/jackstay and the cluster's CA as the manifests' comments say. Identities from the rig's directory are
    copied to /etc/jackstay."""
    Path("/etc/jackstay").mkdir(parents=True, exist_ok=True)
    kept = []
    for crt, key in identities:
        if Path(crt).is_relative_to(rig.dir):
            copies = [Path("/etc/jackstay") / Path(path).name for path in (crt, key)]
            for source, copy in zip((crt, key), copies):
                shutil.copy(source, copy)
                copy.chmod(0o600)
            crt, key = copies
        kept.append({"cert_file": str(crt), "key_file": str(key)})
    for path, source, bits in (("/etc/kubernetes/pki/ca.crt", rig.pki.ca, 0o644), ("/etc/jackstay/tls.crt", rig.serving_cert[0], 0o644),
                               ("/etc/jackstay/tls.key", rig.serving_cert[1], 0o600)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)
        os.chmod(path, bits)
    listener = {"name": "apiserver", "bind": ["127.0.0.1:7443", "[::1]:7443"], "mode": mode, "upstream": "control-plane", **(listener or {})}
    if mode == "terminate":
        listener |= {"tls": {"cert_file": "/etc/jackstay/tls.crt", "key_file": "/etc/jackstay/tls.key"},
                     "client_ca_file": "/etc/kubernetes/pki/ca.crt",
                     "identities": kept}
    text = yaml({"upstreams": [UPSTREAM], "listeners": [listener], **more}).lstrip("\n") + "\n"
    fresh = CONFIG.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(CONFIG)


def install_manifest(manifest):
    """Copies a static pod manifest into kubelet's directory by rename, so that kubelet reads a complete file."""
    MANIFESTS.mkdir(parents=True, exist_ok=True)
    fresh = MANIFESTS / ".jackstay.new"
    shutil.copy(DEPLOY / "static-pod" / manifest, fresh)
    fresh.replace(MANIFESTS / "jackstay.yaml")


def pids_of(executable="jackstay", word=b"run"):
    """Pids of the processes with this name and argument, in any container or unit. Launchers for takeovers, which
    have the arguments of their process too, are not among them."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            is_launcher = b"launcher" in words
            if words[0].rpartition(b"/")[2] == executable.encode() and not is_launcher and (word is None or word in words):
                pids.append(int(entry.name))
    return pids


class NewNode(RealNode):
    """A node that joins the cluster: kubelet has only a bootstrap token and reaches the apiservers through jackstay."""

    NAME = "fresh-1"

    def __init__(self, rig):
        super().__init__(rig, SERVER)
        self.kubelet.name, self.kubelet.logfile = "fresh-kubelet", rig.dir / "fresh-kubelet.log"

    def kubelet_flags(self):
        return [f"--kubeconfig={KUBELET_CONF}", f"--bootstrap-kubeconfig={BOOTSTRAP_CONF}"]

    def kubelet_config(self):
        # kubeadm's settings, with shorter intervals for file changes and for mirror pods.
        return {**super().kubelet_config(), "staticPodPath": str(MANIFESTS), "rotateCertificates": True,
                "fileCheckFrequency": "2s", "syncFrequency": "10s"}

    def bootstrap(self):
        """Creates a bootstrap token with the permissions that kubeadm grants, and the kubeconfig with this token."""
        ident, secret = os.urandom(3).hex(), os.urandom(8).hex()
        control = self.rig.control
        control.must("POST", "/api/v1/namespaces/kube-system/secrets", {
            "metadata": {"name": f"bootstrap-token-{ident}"}, "type": "bootstrap.kubernetes.io/token",
            "stringData": {"token-id": ident, "token-secret": secret, "usage-bootstrap-authentication": "true",
                           "auth-extra-groups": "system:bootstrappers:kubeadm:default-node-token"}})
        for name, role in (("node-bootstrapper", "system:node-bootstrapper"),
                           ("node-autoapprove", "system:certificates.k8s.io:certificatesigningrequests:nodeclient")):
            control.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
                "metadata": {"name": f"rig-{name}"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group",
                              "name": "system:bootstrappers:kubeadm:default-node-token"}]})
        shutil.copy(self.rig.kubeconfig("bootstrap", SERVER, token=f"{ident}.{secret}"), BOOTSTRAP_CONF)
        return f"system:bootstrap:{ident}"

    def start(self):
        for path in (MANIFESTS, KUBELET_PEM.parent):
            path.mkdir(parents=True, exist_ok=True)
        super().start()
        self.ctr("images", "import", dist_file("jackstay-image.tar"))
        return self

    def stop(self):
        super().stop()
        for path in MANIFESTS.iterdir():
            path.unlink()
        for pid in [*pids_of("containerd-shim-runc-v2", None), *pids_of()]:
            os.kill(pid, signal.SIGKILL)
        wait_for("jackstay to exit", lambda: not pids_of(), 10)

    def lease_renewed_at(self):
        """The renewal time of the node's lease, in seconds since the epoch."""
        lease = self.rig.control.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{self.NAME}")
        if lease.code != 200:
            return 0
        moment = lease.json["spec"]["renewTime"]
        whole, _, fraction = moment.rstrip("Z").partition(".")
        return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


class Systemd:
    """systemd as the first process of its own namespaces, with the rig's network and files. It knows only the unit under
    test and the templates, and its cgroups are below the rig's."""

    def __init__(self, rig, unit, drop_in="", templates=()):
        self.rig, self.unit = rig, Path(unit)
        self.dir = rig.dir / "booted"
        units = self.dir / "units"
        (units / f"{self.unit.name}.d").mkdir(parents=True)
        self.units = units
        for name in ("rig", "sysinit", "basic", "shutdown", "network-pre", "network", "multi-user"):
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\nAllowIsolate=yes\n")
        for file in (unit, *templates):
            shutil.copy(file, units)
        self.log = self.dir / "service.log"
        self.log.touch()
        (units / f"{self.unit.name}.d/rig.conf").write_text(f"[Service]\nStandardOutput=append:{self.log}\nStandardError=inherit\n{drop_in}\n")
        self.process = Process("systemd", [
            HERE / "boot", os.environ.get("JACKSTAY_RIG_CGROUP", "jackstay-rig"), units, dist_file("jackstay"), DEPLOY], rig.dir / "systemd.log")

    def start(self):
        self.process.start()
        try:
            wait_for("systemd", lambda: self.process.require_running() or self.ctl("is-active", "rig.target").stdout.strip() == "active", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.process.tail()}") from error
        return self

    @property
    def init(self):
        """Pid of systemd in the rig's namespace."""
        child, = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def inside(self, *argv, **options):
        return sh("nsenter", "--target", self.init, "--all", "env", f"SYSTEMD_UNIT_PATH={self.units}", *argv, **{"check": False, **options})

    def ctl(self, *argv, **options):
        return self.inside("systemctl", "--no-pager", *argv, **options)

    def logs(self):
        """The last lines of systemd and all of the unit's, for the message of a failed test."""
        return self.process.tail() + self.log.read_text()

    def show(self, name, unit=None):
        return self.ctl("show", "--property", name, "--value", unit or self.unit.name).stdout.strip()

    def drop_in(self, name, text):
        """Writes a drop-in of the unit, replacing one of the same name, and reloads systemd."""
        file = self.units / f"{self.unit.name}.d/{name}.conf"
        file.write_text(f"[Service]\n{text}\n")
        self.ctl("daemon-reload", check=True)

    def main_pid(self):
        """The unit's pid in the rig's namespace; fails unless there is exactly one process."""
        pid, = pids_of()
        return pid

    def stop(self):
        self.process.stop(signal.SIGKILL)


def stop_everything(rig):
    """Stops the nodes and the jackstay of other tests, which would occupy the ports of a node."""
    rig.stop_hollow()
    if rig.jackstay:
        rig.jackstay.stop()
        rig.jackstay = None
    if rig.node:
        rig.node.stop()
        rig.node = None
    rig.recover()
