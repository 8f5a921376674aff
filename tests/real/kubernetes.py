"""The release of Kubernetes under test, and kubectl: what differs between 1.20 and today is here."""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

CACHE = Path(os.environ.get("JACKSTAY_REAL_CACHE") or "/nonexistent")
PROGRAMS = Path(os.environ.get("JACKSTAY_RIG_KUBERNETES") or "/nonexistent")
CONTAINERD_SOCKET = "/run/containerd-rig.sock"
CONTAINER_RUNTIME = f"unix://{CONTAINERD_SOCKET}"


@dataclass(frozen=True)
class Kubectl:
    """One way to run kubectl."""

    label: str
    binary: Path
    env: dict = field(default_factory=dict)


TODAY = Kubectl("today", CACHE / "bin/kubectl")
# exec, attach, port-forward and cp use WebSocket first; without it they fall back to SPDY.
SPDY = Kubectl("today by SPDY", CACHE / "bin/kubectl", {
    "KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false", "KUBECTL_PORT_FORWARD_WEBSOCKETS": "false"})
OLD_KUBECTL = Kubectl("1.20", PROGRAMS / "kubectl")


@dataclass(frozen=True)
class Release:
    """The flags and API versions that one release has and another has not."""

    version: str
    apiserver: tuple
    controller_manager: tuple
    kubelet: tuple
    kubelet_config: dict
    kubemark: tuple
    discovery_api: str
    etcd_check: str  # the path that fails in an apiserver without its etcd
    kubectls: tuple  # that differ in what they ask for
    transports: tuple  # that differ in how they reach into a pod

    def program(self, name):
        return PROGRAMS / name


def old(version):
    """1.20, and others before 1.22."""
    return Release(
        version,
        apiserver=("--insecure-port=0",),
        # Its CronJob controller has no watch: it lists jobs and cron jobs every 10 s, and a test that counts
        # lists could not tell them from those of a cache.
        controller_manager=("--port=0", "--controllers=*,-cronjob"),
        kubelet=("--container-runtime=remote", f"--container-runtime-endpoint={CONTAINER_RUNTIME}"),
        kubelet_config={"evictionHard": {"memory.available": "1Mi", "nodefs.available": "0.1%", "imagefs.available": "0.1%"}},
        kubemark=("--logtostderr=true",),
        discovery_api="discovery.k8s.io/v1beta1",
        etcd_check="/readyz",
        kubectls=(TODAY, OLD_KUBECTL),
        transports=(TODAY, OLD_KUBECTL))


def current(version):
    return Release(
        version,
        apiserver=(),
        controller_manager=(),
        kubelet=(),
        kubelet_config={
            "containerRuntimeEndpoint": CONTAINER_RUNTIME, "failCgroupV1": False,
            # The file system below a container has no device that cAdvisor could measure.
            "localStorageCapacityIsolation": False, "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"}},
        kubemark=("--use-host-image-service=false",),
        discovery_api="discovery.k8s.io/v1",
        # Measured with 1.36.2: without etcd /livez fails at once, and /readyz still answers 200 after a minute.
        etcd_check="/livez",
        kubectls=(TODAY,),
        transports=(TODAY, SPDY))


def release_of(programs):
    """Reads the version from kube-apiserver itself."""
    said = subprocess.run([programs / "kube-apiserver", "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"v(\d+)\.(\d+)\.\d+", said)
    if not match:
        raise SystemExit(f"{programs}/kube-apiserver --version: no version in {said!r}")
    return (old if (int(match[1]), int(match[2])) < (1, 22) else current)(match[0][1:])


RELEASE = release_of(PROGRAMS) if PROGRAMS.is_dir() else None
