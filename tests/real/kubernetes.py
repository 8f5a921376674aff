"""The Kubernetes release under test and the kubectl variants: every difference between 1.20 and current releases."""

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
    """A kubectl binary and its environment."""

    label: str
    binary: Path
    env: dict = field(default_factory=dict)


CURRENT_KUBECTL = Kubectl("current", CACHE / "bin/kubectl")
# exec, attach, port-forward and cp use WebSocket, unless it is disabled; then they use SPDY.
SPDY_KUBECTL = Kubectl("current, SPDY", CACHE / "bin/kubectl", {
    "KUBECTL_REMOTE_COMMAND_WEBSOCKETS": "false", "KUBECTL_PORT_FORWARD_WEBSOCKETS": "false"})
OLD_KUBECTL = Kubectl("1.20", PROGRAMS / "kubectl")


@dataclass(frozen=True)
class Release:
    """The flags and API versions of a release."""

    version: str
    programs: Path
    apiserver: tuple
    controller_manager: tuple
    kubelet: tuple
    kubelet_config: dict
    kubemark: tuple
    discovery_api: str
    flow_control_api: str
    concurrency_shares: str  # the field of a priority level
    etcd_check: str  # the path that fails when the apiserver has lost etcd
    watch_list: bool  # whether watches with initial events exist (sendInitialEvents)
    structured_authentication: bool  # whether a file configures authentication
    kubectls: tuple  # variants that differ in their requests
    transports: tuple  # variants that differ in the protocol of exec

    def program(self, name):
        return self.programs / name


def old(version, programs):
    """Releases before 1.22; the tests use 1.20."""
    return Release(
        version,
        programs,
        apiserver=("--insecure-port=0",),
        # Its CronJob controller lists jobs and cron jobs every 10 s. Tests that count lists could not tell
        # these from the lists of a watch cache.
        controller_manager=("--port=0", "--controllers=*,-cronjob"),
        kubelet=("--container-runtime=remote", f"--container-runtime-endpoint={CONTAINER_RUNTIME}"),
        kubelet_config={"evictionHard": {"memory.available": "1Mi", "nodefs.available": "0.1%", "imagefs.available": "0.1%"}},
        kubemark=("--logtostderr=true",),
        discovery_api="discovery.k8s.io/v1beta1",
        flow_control_api="flowcontrol.apiserver.k8s.io/v1beta1",
        concurrency_shares="assuredConcurrencyShares",
        etcd_check="/readyz",
        watch_list=False,
        structured_authentication=False,
        kubectls=(CURRENT_KUBECTL, OLD_KUBECTL),
        transports=(CURRENT_KUBECTL, OLD_KUBECTL))


def current(version, programs):
    return Release(
        version,
        programs,
        apiserver=(),
        controller_manager=(),
        kubelet=(),
        kubelet_config={
            "containerRuntimeEndpoint": CONTAINER_RUNTIME, "failCgroupV1": False,
            # cAdvisor cannot measure the file system below a container.
            "localStorageCapacityIsolation": False, "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"}},
        kubemark=("--use-host-image-service=false",),
        discovery_api="discovery.k8s.io/v1",
        flow_control_api="flowcontrol.apiserver.k8s.io/v1",
        concurrency_shares="nominalConcurrencyShares",
        # Measured with 1.36.2 without etcd: /livez fails at once, /readyz still returns 200 after a minute.
        etcd_check="/livez",
        watch_list=True,
        structured_authentication=True,
        kubectls=(CURRENT_KUBECTL,),
        transports=(CURRENT_KUBECTL, SPDY_KUBECTL))


def release_of(programs):
    """The release, by `kube-apiserver --version`."""
    output = subprocess.run([programs / "kube-apiserver", "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"v(\d+)\.(\d+)\.\d+", output)
    if not match:
        raise SystemExit(f"{programs}/kube-apiserver --version: no version in {output!r}")
    return (old if (int(match[1]), int(match[2])) < (1, 22) else current)(match[0][1:], programs)


def built_old_release():
    """Kubernetes 1.20 as `setup --old` has built it, beside the release under test; None if it has not."""
    built = sorted(CACHE.glob("kubernetes-r*/VERSION"), key=lambda file: int(re.sub(r"\D", "", file.parent.name)))
    return release_of(built[-1].parent) if built else None


RELEASE = release_of(PROGRAMS) if PROGRAMS.is_dir() else None
