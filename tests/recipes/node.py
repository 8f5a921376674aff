#!/usr/bin/python3
"""A node for recipes, in the namespaces that `run` makes: a disk, the programs that recipes call, and a boot.

    node.py systemctl WORD...   takes the place of systemctl: enables and starts units as processes
    node.py ctr WORD...         takes the place of ctr: notes the imported image
    node.py moment COMMAND      copies the disk, and asks an apiserver with kubelet's kubeconfig

It has what decides whether a node comes back after a reboot: the files of a node, units that are enabled or not, static
pods, images, and the kubeconfig of kubelet. It has no systemd, container runtime or kubelet: `tests/real` has these.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

# What a reboot keeps.
DISK = [Path(path) for path in ("/etc/kubernetes", "/etc/jackstay", "/etc/systemd/system", "/var/lib/jackstay", "/var/lib/kubelet", "/var/lib/k0s",
                                "/usr/local/bin", "/usr/local/lib")]
UNITS, MANIFESTS = Path("/etc/systemd/system"), Path("/etc/kubernetes/manifests")
KUBELET_CONF, IMAGES = Path("/etc/kubernetes/kubelet.conf"), Path("/var/lib/kubelet/images")
WANTS = UNITS / "multi-user.target.wants"
# What a reboot ends, and what the tests keep of a recipe.
RUNNING, MOMENTS, LOGS = Path("/run/node/units"), Path("/run/node/moments"), Path("/run/node/logs")
JACKSTAY, KUBECTL = os.environ.get("JACKSTAY_BIN", ""), os.environ.get("KUBECTL", "kubectl")


class NodeError(Exception):
    """Something that a real node would refuse, or that this one does not know."""


def copy_tree(source, target):
    subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True)


def empty(directory):
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def save(directory):
    """Copies the disk to a directory."""
    for path in DISK:
        target = directory / path.relative_to("/")
        target.mkdir(parents=True)
        copy_tree(path, target)


def load(directory):
    """Replaces the disk by a copy."""
    for path in DISK:
        empty(path)
        copy_tree(directory / path.relative_to("/"), path)


def ask_apiserver(timeout):
    """What is wrong with kubelet's kubeconfig; empty if an apiserver answers a request with kubelet's identity."""
    done = subprocess.run([KUBECTL, f"--kubeconfig={KUBELET_CONF}", f"--request-timeout={timeout}s", "get", "--raw", "/whoami"],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=timeout + 20)
    if done.returncode == 0 and "CN=system:node:node-1" in done.stdout:
        return ""
    return done.stdout.strip() or f"exit code {done.returncode}"


# ---- units ------------------------------------------------------------------------------------------------------------------------


def unit_file(unit):
    """The file of a unit, also of an instance of a template."""
    name = unit if unit.endswith(".service") else f"{unit}.service"
    for path in (UNITS / name, UNITS / re.sub(r"@.*\.service$", "@.service", name)):
        if path.exists():
            return name, path
    raise NodeError(f"Unit {name} not found.")


def start_unit(unit):
    name, path = unit_file(unit)
    instance = name.partition("@")[2].removesuffix(".service")
    text = path.read_text()
    command, = re.findall(r"(?m)^ExecStart=(.*)$", text)
    argv = command.replace("%i", instance).split()
    log = open(LOGS / f"{name}.log", "ab")
    if re.search(r"(?m)^Type=oneshot$", text):
        subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        return
    pidfile = RUNNING / name
    if pidfile.exists():
        return
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    pidfile.write_text(str(child.pid))


def enable_unit(unit):
    name, path = unit_file(unit)
    WANTS.mkdir(exist_ok=True)
    (WANTS / name).unlink(missing_ok=True)
    (WANTS / name).symlink_to(path)


def start_kubelet():
    """Runs what drop-ins have kubelet's unit run before it. kubelet has no process here: `moment` and `wait_for_apiserver` ask
    with its kubeconfig."""
    for path in sorted((UNITS / "kubelet.service.d").glob("*.conf")):
        for is_optional, command in re.findall(r"(?m)^ExecStartPre=(-?)(.*)$", path.read_text()):
            with open(LOGS / "kubelet.service.log", "ab") as log:
                subprocess.run(command.split(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=not is_optional)


def systemctl(words):
    match words:
        case ["daemon-reload"]:
            pass
        case ["restart", "kubelet" | "k0sworker"]:
            start_kubelet()
        case ["enable", "--now", *units] if units:
            for unit in units:
                enable_unit(unit)
                start_unit(unit)
        case _:
            raise NodeError(f"systemctl {' '.join(words)}: this node does not know it")


def ctr(words):
    """Imports an archive, lists the names of images, or labels one."""
    images = IMAGES.read_text().splitlines() if IMAGES.exists() else []
    match words:
        case ["-n", "k8s.io", "images", "import", _]:
            IMAGES.write_text("".join(f"{image}\n" for image in {*images, "localhost/jackstay:0.1.0"}))
        case ["-n", "k8s.io", "images", "ls", "-q"]:
            print(*images, sep="\n")
        case ["-n", "k8s.io", "images", "label", image, _] if image in images:
            pass
        case _:
            raise NodeError(f"ctr {' '.join(words)}: this node does not know it, or the image")


# ---- static pods ------------------------------------------------------------------------------------------------------------------


class StaticPods(threading.Thread):
    """Runs the static pods as processes, and restarts those that end."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stopping, self.running = threading.Event(), {}
        self.start()

    def run(self):
        while not self.stopping.wait(0.05):
            files = {path for path in MANIFESTS.glob("[!.]*") if path.is_file()} if MANIFESTS.exists() else set()
            for path in set(self.running) - files:
                kill(self.running.pop(path))
            for path in files:
                if path not in self.running or self.running[path].poll() is not None:
                    argv = self.command(path.read_text())
                    if argv:
                        self.running[path] = subprocess.Popen(
                            argv, stdin=subprocess.DEVNULL, stdout=open(LOGS / f"{path.name}.log", "ab"), stderr=subprocess.STDOUT, start_new_session=True,
                            env={**os.environ, "JACKSTAY__ADMIN__SOCKET": "/run/jackstay/admin.sock"})

    @staticmethod
    def command(manifest):
        """The process of a manifest; `None` while its image is missing."""
        image, = re.findall(r"(?m)^ +image: (\S+)$", manifest)
        args, = re.findall(r"(?m)^ +args: (\[.*\])$", manifest)
        if image == "nginx":  # the proxy that Kubespray has without jackstay
            return ["socat", *json.loads(args)]
        is_present = IMAGES.exists() and image in IMAGES.read_text().split()
        return [JACKSTAY, *json.loads(args)] if is_present else None

    def stop(self):
        self.stopping.set()
        self.join()
        for process in self.running.values():
            kill(process)


def kill(process):
    process.kill()
    process.wait()


# ---- moments and reboots ----------------------------------------------------------------------------------------------------------


def moment(command):
    """The state before a command of a recipe: a copy of the disk, and whether kubelet's kubeconfig works now."""
    directory = MOMENTS / f"{len(list(MOMENTS.iterdir())):03}"
    directory.mkdir()
    (directory / "command").write_text(command)
    (directory / "now").write_text(ask_apiserver(5))
    save(directory / "disk")


class Node:
    """The node of the tests."""

    def __init__(self):
        self.pods = None
        # What something else does at each boot before kubelet starts.
        self.before_kubelet = lambda: None

    def power_off(self):
        """Ends everything at once."""
        if self.pods:
            self.pods.stop()
            self.pods = None
        for pidfile in RUNNING.iterdir() if RUNNING.exists() else []:
            pid = int(pidfile.read_text())
            try:
                os.kill(pid, signal.SIGKILL)
                while Path(f"/proc/{pid}").exists():
                    reap()
                    time.sleep(0.01)
            except ProcessLookupError:
                pass
        subprocess.run(["ip", "link", "del", "jackstay0"], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        for directory in (RUNNING, LOGS, Path("/run/jackstay")):
            empty(directory)

    def boot(self):
        """Starts what starts at boot: enabled units, then kubelet with its static pods."""
        for path in sorted(WANTS.iterdir()) if WANTS.exists() else []:
            start_unit(path.name)
        self.before_kubelet()
        start_kubelet()
        self.pods = StaticPods()

    def wait_for_apiserver(self, seconds):
        """What kubelet's error is after this time; empty as soon as an apiserver answers."""
        deadline = time.monotonic() + seconds
        while True:
            error = ask_apiserver(2)
            if not error or time.monotonic() > deadline:
                return error
            time.sleep(0.1)


def reap():
    """Reaps processes that were started by other processes, if this is the first process of its namespace."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    _, program, *arguments = sys.argv
    try:
        {"systemctl": systemctl, "ctr": ctr, "moment": lambda words: moment(" ".join(words))}[program](arguments)
    except NodeError as failure:
        print(failure, file=sys.stderr)
        sys.exit(1)
