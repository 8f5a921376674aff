"""A node whose kubelet is a service of systemd, for `jackstay install`: containerd and kubelet are units of a systemd in its
own namespaces. The node can be rebooted."""

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from deployed import NewNode, dist_file, pids_of
from kubernetes import CONTAINERD_SOCKET, RELEASE
from rig import ADDRESSES, DETECTORS, HERE, NODE_IP, PORT, Process, RealNode, sh, wait_for

KUBELET_CONF = Path("/etc/kubernetes/kubelet.conf")
KUBELET_PEM = Path("/var/lib/kubelet/pki/kubelet-client-current.pem")
MANIFESTS = Path("/etc/kubernetes/manifests")
JOURNAL = Path("/var/lib/jackstay-install")
# The apiservers' addresses are on this machine, so their names stand for other machines.
NAMES = {name: f"apiserver-{name}.test" for name in ADDRESSES}
# Directories in which an installation writes.
WRITTEN = ("/etc/jackstay", "/etc/kubernetes", "/etc/systemd/system", "/var/lib/jackstay", str(JOURNAL))


def unit(description, command, more=""):
    return (f"[Unit]\nDescription={description}\n\n[Service]\nExecStart={command}\nRestart=always\nRestartSec=1\nKillMode=process\n"
            f"StandardOutput=append:/var/log/{description}.log\nStandardError=inherit\n{more}\n[Install]\nWantedBy=multi-user.target\n")


def parent_of(pid):
    """The pid of the process's parent; `None` if the process has ended."""
    try:
        # The name, in parentheses, may contain spaces.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


class NodeWithSystemd(RealNode):
    """containerd and the real kubelet as units; the paths are those of kubeadm."""

    NAME = "installed-1"

    def __init__(self, rig):
        super().__init__(rig, f"https://{NAMES['a']}:{PORT}")
        self.home = rig.dir / "installed"
        self.bin = self.home / "bin"
        self.bin.mkdir(parents=True)
        shutil.copy(dist_file("jackstay"), self.home / "jackstay")
        with open("/etc/hosts", "a") as hosts:
            for name, address in ADDRESSES.items():
                hosts.write(f"{address} {NAMES[name]}\n")
        for directory in ("/etc/systemd/system", "/etc/jackstay", "/var/lib/jackstay", "/etc/kubernetes", "/var/lib/kubelet/pki"):
            shutil.rmtree(directory, ignore_errors=True)
        units = Path("/etc/systemd/system")
        units.mkdir()
        self.targets = self.home / "units"
        self.targets.mkdir()
        for name in ("sysinit", "basic", "shutdown", "network-pre", "network", "timers"):
            (self.targets / f"{name}.target").write_text(f"[Unit]\nDescription={name}\nDefaultDependencies=no\n")
        (self.targets / "multi-user.target").write_text("[Unit]\nDescription=multi-user\nWants=timers.target\n")
        (self.targets / "rig.target").write_text(
            "[Unit]\nDescription=rig\nDefaultDependencies=no\nAllowIsolate=yes\nWants=multi-user.target\nAfter=multi-user.target\n")
        (units / "containerd.service").write_text(unit("containerd", f"/usr/bin/containerd --config {self.dir}/containerd.toml"))
        flags = " ".join(map(str, [RELEASE.program("kubelet"), *RELEASE.kubelet, f"--config={self.dir}/kubelet.json", f"--node-ip={NODE_IP}",
                                   f"--hostname-override={self.NAME}", "--v=2", f"--kubeconfig={KUBELET_CONF}"]))
        (units / "kubelet.service").write_text(unit("kubelet", flags, "".join(f"Environment={k}={v}\n" for k, v in DETECTORS.items())).replace(
            "[Service]", "After=containerd.service\n\n[Service]", 1))
        self.write_credentials()
        self.process = None

    def kubelet_flags(self):
        return []

    def kubelet_config(self):
        # The root of cgroups is that of systemd's namespace.
        return {**super().kubelet_config(), "cgroupRoot": "/", "staticPodPath": str(MANIFESTS), "fileCheckFrequency": "2s", "syncFrequency": "10s",
                "nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 8}

    def write_credentials(self):
        """kubelet.conf as kubeadm writes it: the CA as data, the credential as a file behind a symlink."""
        crt, key = self.cert
        for directory in (KUBELET_PEM.parent, MANIFESTS, Path("/etc/kubernetes/pki")):
            directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.rig.pki.ca, "/etc/kubernetes/pki/ca.crt")
        pem = KUBELET_PEM.with_name("kubelet-client-1.pem")
        pem.write_text(Path(crt).read_text() + Path(key).read_text())
        pem.chmod(0o600)
        KUBELET_PEM.unlink(missing_ok=True)
        KUBELET_PEM.symlink_to(pem)
        KUBELET_CONF.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "default",
            "clusters": [{"name": "rig", "cluster": {
                "server": self.server, "tls-server-name": "kubernetes.default.svc",
                "certificate-authority-data": base64.b64encode(Path(self.rig.pki.ca).read_bytes()).decode()}}],
            "users": [{"name": "default", "user": {"client-certificate": str(KUBELET_PEM), "client-key": str(KUBELET_PEM)}}],
            "contexts": [{"name": "default", "context": {"cluster": "rig", "user": "default"}}]}, indent=1))
        KUBELET_CONF.chmod(0o640)

    # ---- systemd ----

    def boot(self):
        """Starts systemd; every enabled unit starts."""
        self.process = Process("systemd", [
            HERE / "boot", os.environ.get("JACKSTAY_RIG_CGROUP", "jackstay-rig"), self.targets, dist_file("jackstay"), HERE.parent.parent / "deploy"],
            self.rig.dir / "systemd-node.log", env={"JACKSTAY_BOOT_NODE": str(self.bin)}).start()
        wait_for("systemd", lambda: self.process.require_running() or self.ctl("is-active", "rig.target").stdout.strip() == "active", 60)
        return self

    def start(self):
        self.boot()
        for name in ("containerd", "kubelet"):
            self.ctl("enable", "--now", f"{name}.service", check=True)
        wait_for("containerd", lambda: self.ctr("version").returncode == 0, 20)
        self.ctr("images", "import", self.image(), check=True)
        return self

    def power_off(self):
        """Ends everything of the node at once."""
        self.process.stop(signal.SIGKILL)

    def stop(self):
        self.power_off()

    @property
    def init(self):
        child, = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    def argv(self, *argv):
        return ["nsenter", "--target", str(self.init), "--all", "env", f"CONTAINERD_ADDRESS={CONTAINERD_SOCKET}", f"SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/systemd/system:/usr/lib/systemd/system:{self.targets}",
                *map(str, argv)]

    def inside(self, *argv, **options):
        return sh(*self.argv(*argv), **{"check": False, "timeout": 180, **options})

    def ctl(self, *argv, **options):
        return self.inside("systemctl", "--no-pager", *argv, **options)

    def ctr(self, *argv, **options):
        return self.inside("ctr", "--address", CONTAINERD_SOCKET, "-n", "k8s.io", *argv, **options)

    # ---- the node ----

    def program(self):
        """The binary that an operator has: the downloaded one, which is not at a path that stays."""
        return self.home / "jackstay"

    def jackstay(self, *argv, **options):
        return self.inside(self.program(), *argv, **options)

    def endpoints(self):
        return [flag for name in ("b", "c") for flag in ("--endpoint", f"{NAMES[name]}:{PORT}")]

    def install_argv(self, *more):
        return [self.program(), "install", *self.endpoints(), *more]

    def start_background(self, logfile, *argv):
        """Starts a command on the node; its output goes to the file."""
        with open(logfile, "wb") as out:
            return subprocess.Popen(self.argv(*argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def lease_renewed_at(self):
        return NewNode.lease_renewed_at(self)

    def ready_since(self, moment):
        return self.rig.ready(self.NAME) and self.lease_renewed_at() > moment

    def wait_ready(self, seconds=60):
        """Waits until the node is Ready with a lease of after this moment; returns the seconds."""
        moment, begun = time.time(), time.monotonic()
        wait_for("the node to be Ready", lambda: self.ready_since(moment), seconds)
        return time.monotonic() - begun

    def files(self):
        """Content, permissions and type of every file that an installation may write."""
        found = {}
        for root in (*map(Path, WRITTEN), self.bin):
            for path in [root, *root.rglob("*")] if root.exists() else []:
                if path.is_symlink():
                    found[str(path)] = ("link", os.readlink(path))
                elif path.is_dir():
                    found[str(path)] = ("directory",)
                else:
                    found[str(path)] = (oct(path.stat().st_mode), path.stat().st_uid, path.stat().st_gid, path.read_bytes())
        return found

    def has_working_kubeconfig(self):
        """Whether kubelet's kubeconfig works as it is now: the server that it names answers with the CA that it contains."""
        done = self.rig.kubectl(KUBELET_CONF, "get", "node", self.NAME, "-o", "name", "--request-timeout=5s")
        return done.returncode == 0, done.stderr

    def logs(self):
        kubelet = Path("/var/log/kubelet.log")
        tail = kubelet.read_text(errors="replace").splitlines()[-10:] if kubelet.exists() else []
        return self.process.tail() + "\n".join(tail)

    def kubelet_pid(self):
        """The pid of kubelet, without its children: each has its name until it executes a program."""
        found = {pid: parent_of(pid) for pid in pids_of("kubelet", None)}
        pid, = (pid for pid, parent in found.items() if parent is not None and parent not in found)
        return pid
