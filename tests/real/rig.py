"""The rig: etcd, three kube-apiservers, a controller manager, hollow and real kubelets, kubectl, packet faults, and
the audit logs, which show what the apiservers received.

Everything runs inside the network, mount and process namespaces that `tests/real/run` creates, so no process
outlives them and no packet leaves them. Only the standard library is used.

    apiservers   a, b, c on 10.99.0.11 to 13, port 6443, with one etcd; each reaches etcd by an address of its
                 own, so that a fault can cut off one of them
    d, e, f      more apiservers of the same etcd on 10.99.0.24 to 26, with settings that a test chooses
    control      the controller manager and the rig's own requests use c; faults affect a or b
    jackstay     127.0.0.1:7443, admin 127.0.0.1:9643
"""

import atexit
import base64
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

from kubernetes import CACHE, CONTAINERD_SOCKET, RELEASE, CURRENT_KUBECTL

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
NODE_IP = "10.99.0.1"
PORT = 6443
ADDRESSES = {"a": "10.99.0.11", "b": "10.99.0.12", "c": "10.99.0.13"}
EXTRA_ADDRESSES = {"d": "10.99.0.24", "e": "10.99.0.25", "f": "10.99.0.26"}
# A load balancer's addresses, which the apiservers' certificates contain.
LOAD_BALANCER, LOAD_BALANCER6 = "10.99.2.5", "fd00:99::5"
ETCD_ADDRESSES = {name: f"127.0.0.{11 + i}" for i, name in enumerate("abcdef")}
# Numeric groups of the apiserver processes: packet rules match them (`meta skgid`).
GROUPS = {name: 4101 + i for i, name in enumerate("abcdef")}
TOKEN = "a-token-of-the-rig"
TOKEN_USER = ("alice", ["developers", "on-call"])
# Tokens of users with all permissions, each an identity of its own.
ADMIN_TOKENS = {f"admin-{i}": f"a-token-of-admin-{i}" for i in range(10)}
IMAGE = "jackstay.test/busybox:1"


def log(message):
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


class NeverFulfilled(AssertionError):
    """The condition of a wait can no longer become true."""


def wait_for(what, condition, timeout, pause=0.1):
    """Polls until `condition` returns a true value; a failure reports its last value or exception."""
    deadline, last = time.monotonic() + timeout, None
    while True:
        try:
            last = condition()
            if last:
                return last
        except NeverFulfilled:
            raise
        except Exception as error:  # The next attempt may succeed.
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {timeout} s: {what}: {last!r}")
        time.sleep(pause)


def sh(*argv, **options):
    options.setdefault("check", True)
    options.setdefault("capture_output", True)
    options.setdefault("text", True)
    options.setdefault("timeout", 60)
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    try:
        return subprocess.run([str(a) for a in argv], **options)
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"{' '.join(map(str, argv))}: exit {error.returncode}: {error.stderr or error.stdout}") from None


class Process:
    """A child process with a log file. `group` is a numeric group of its own, which packet rules can match."""

    def __init__(self, name, argv, logfile, env=None, cwd=None, group=None):
        self.name, self.argv, self.logfile = name, [str(a) for a in argv], Path(logfile)
        self.env, self.cwd, self.group, self.child = env, cwd, group, None

    def start(self):
        with open(self.logfile, "ab") as out:
            self.child = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**os.environ, **(self.env or {})}, cwd=self.cwd, group=self.group)
        return self

    @property
    def pid(self):
        return self.child.pid

    @property
    def running(self):
        return self.child is not None and self.child.poll() is None

    def send(self, number):
        if self.running:
            self.child.send_signal(number)

    def stop(self, number=signal.SIGTERM, timeout=20):
        """Sends a signal, waits, and returns the exit code; kills the process after the timeout."""
        if self.child is None:
            return None
        if self.running:
            self.child.send_signal(signal.SIGCONT)
            self.child.send_signal(number)
        try:
            return self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait(10)

    def tail(self, lines=15):
        return "\n".join(self.logfile.read_text(errors="replace").splitlines()[-lines:])

    def require_running(self):
        if not self.running:
            raise NeverFulfilled(f"{self.name} exited with {self.child.returncode}:\n{self.tail()}")


class Pki:
    """A CA and its certificates, with EC keys as kubelets use them."""

    def __init__(self, directory):
        self.dir = Path(directory)
        self.dir.mkdir(parents=True)
        self.serial = 1000
        self.ca, self.ca_key = self.create_ca("ca")
        self.untrusted_ca, self.untrusted_ca_key = self.create_ca("untrusted-ca")

    def create_ca(self, name):
        crt, key = self.dir / f"{name}.crt", self.dir / f"{name}.key"
        sh("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
           "-subj", f"/CN={name}", "-days", "30", "-keyout", key, "-out", crt)
        return crt, key

    def issue(self, name, subject, hosts=(), days=30, ca=None):
        """Returns (certificate, key). `subject` has openssl's form: /O=group/O=other/CN=user."""
        ca_crt, ca_key = ca or (self.ca, self.ca_key)
        crt, key, csr, ext = (self.dir / f"{name}.{kind}" for kind in ("crt", "key", "csr", "ext"))
        self.serial += 1
        sh("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
           "-subj", subject, "-keyout", key, "-out", csr)
        names = ",".join(("IP:" if re.fullmatch(r"[0-9.]+|.*:.*", h) else "DNS:") + h for h in hosts)
        ext.write_text("basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
                       "extendedKeyUsage=clientAuth,serverAuth\n" + (f"subjectAltName={names}\n" if names else ""))
        sh("openssl", "x509", "-req", "-in", csr, "-CA", ca_crt, "-CAkey", ca_key, "-set_serial", str(self.serial),
           "-days", str(days), "-extfile", ext, "-out", crt)
        return crt, key

    @staticmethod
    def serial_of(crt):
        """The serial number as upper-case hex without leading zeros."""
        return sh("openssl", "x509", "-in", crt, "-noout", "-serial").stdout.strip().split("=")[1].lstrip("0").upper()


class Response:
    def __init__(self, code, headers, body):
        self.code, self.headers, self.body = code, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"<{self.code} {self.body[:300]!r}>"


class Api:
    """An HTTP/1.1 client of one server. Each request has its own connection, except with `keep`."""

    def __init__(self, server, ca, cert=None, token=None, timeout=30):
        self.server, self.ca, self.cert, self.token, self.timeout = server, ca, cert, token, timeout
        self.context = ssl.create_default_context(cafile=str(ca))
        self.context.check_hostname = True
        if cert:
            self.context.load_cert_chain(*map(str, cert))
        self.kept = None

    def connect(self):
        host, _, port = self.server.removeprefix("https://").rpartition(":")
        return http.client.HTTPSConnection(host.strip("[]"), int(port), context=self.context, timeout=self.timeout)

    def request(self, method, path, body=None, headers=None, content_type="application/json", keep=False):
        connection = self.kept or self.connect()
        all_headers = {"Accept": "application/json", "User-Agent": "jackstay-rig", **(headers or {})}
        if self.token:
            all_headers.setdefault("Authorization", f"Bearer {self.token}")
        if body is not None:
            all_headers.setdefault("Content-Type", content_type)
            body = body if isinstance(body, (str, bytes)) else json.dumps(body)
        try:
            connection.request(method, path, body, all_headers)
            response = connection.getresponse()
            answer = Response(response.status, response.headers, response.read())
        except BaseException:
            connection.close()
            self.kept = None
            raise
        if keep and not response.will_close:
            self.kept = connection
        else:
            connection.close()
            self.kept = None
        return answer

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def must(self, method, path, body=None, **options):
        answer = self.request(method, path, body, **options)
        if answer.code >= 300:
            raise AssertionError(f"{method} {path}: {answer!r}")
        return answer.json


def etcd_of(apiserver):
    """The URL by which an apiserver reaches etcd."""
    return f"http://{ETCD_ADDRESSES.get(apiserver, '127.0.0.1')}:2379"


class Apiserver:
    def __init__(self, rig, name, address=None, etcd=None, release=RELEASE, flags=()):
        """`address` is required for an apiserver other than a to f; `etcd` is the URL of another etcd. `flags` replace
        flags of the rig."""
        self.rig, self.name, self.address = rig, name, address or {**ADDRESSES, **EXTRA_ADDRESSES}[name]
        self.server = f"https://{self.address}:{PORT}"
        self.audit = rig.dir / f"audit-{name}.log"
        pki, d = rig.pki, rig.dir
        crt, key = pki.issue(f"apiserver-{name}", "/CN=kube-apiserver", [
            self.address, LOAD_BALANCER, LOAD_BALANCER6, "10.96.0.1", "127.0.0.1", "::1", "localhost", "kubernetes", "kubernetes.default",
            "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"])
        self.process = Process(f"apiserver-{name}", [
            release.program("kube-apiserver"), *release.apiserver,
            f"--etcd-servers={etcd or etcd_of(name)}", f"--bind-address={self.address}", f"--advertise-address={self.address}",
            f"--secure-port={PORT}", f"--tls-cert-file={crt}", f"--tls-private-key-file={key}",
            f"--cert-dir={d}", f"--client-ca-file={pki.ca}", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction", f"--token-auth-file={rig.token_table}",
            f"--service-account-key-file={rig.sa_key}", f"--service-account-signing-key-file={rig.sa_key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.96.0.0/24",
            "--endpoint-reconciler-type=lease", "--allow-privileged=true",
            f"--kubelet-client-certificate={rig.admin_cert[0]}", f"--kubelet-client-key={rig.admin_cert[1]}",
            "--kubelet-preferred-address-types=InternalIP", "--http2-max-streams-per-connection=100",
            "--enable-bootstrap-token-auth=true",
            # There is no kube-proxy: requests to an aggregated apiserver go to its endpoints.
            "--enable-aggregator-routing=true",
            f"--audit-policy-file={rig.audit_policy}", f"--audit-log-path={self.audit}", "--audit-log-mode=blocking",
            # A graceful shutdown waits so long for watches.
            "--shutdown-delay-duration=1s", "--request-timeout=8s", "--v=1", *flags,
        ], d / f"apiserver-{name}.log", group=GROUPS.get(name))

    def start(self, wait=True):
        self.process.start()
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self, timeout=120):
        def ready():
            self.process.require_running()
            return Api(self.server, self.rig.pki.ca, self.rig.admin_cert, timeout=2).get("/readyz").code == 200
        wait_for(f"apiserver {self.name}", ready, timeout)

    def kill(self):
        self.process.send(signal.SIGKILL)
        self.process.child.wait(10)

    def pause(self):
        self.process.send(signal.SIGSTOP)

    def resume(self):
        self.process.send(signal.SIGCONT)

    def restart(self, graceful=True, down=0.0):
        if graceful:
            self.process.stop(timeout=70)
        else:
            self.kill()
        time.sleep(down)
        self.start()

    def ensure_ready(self):
        """Resumes or starts the apiserver, and waits until it is ready."""
        if self.process.running:
            self.resume()
        else:
            self.start(wait=False)
        self.wait_ready()


class Faults:
    """Packet faults: an nftables table in the rig's network namespace.

    `hook` is where the packet is dropped. In `output` the sender's kernel knows that it was not sent; `input`
    simulates a loss in the network. Both ends of a flow are in this namespace, so each direction passes both
    hooks. Direction `to` is towards the apiserver, `from` is the reverse.
    """

    def __init__(self, rig):
        self.rig = rig
        self.clear()

    def nft(self, script):
        sh("nft", "-f", "-", input=script)

    def clear(self):
        self.nft("""add table inet jackstay_rig
delete table inet jackstay_rig
table inet jackstay_rig {
    chain output { type filter hook output priority -300; }
    chain input { type filter hook input priority -300; }
}
""")

    def flows(self, pid, address=None):
        """Local ports of a process's established connections to the apiservers, by address."""
        ports = {}
        for line in sh("ss", "-Htnp", "state", "established", f"( dport = :{PORT} )").stdout.splitlines():
            match = re.search(r"(\S+):(\d+)\s+\[?(?:::ffff:)?([0-9.]+)\]?:(\d+)\s+users:\(\((.*)\)\)", line)
            if match and f"pid={pid}," in match[5]:
                ports.setdefault(match[3], []).append(int(match[2]))
        return ports.get(address, []) if address else ports

    def drop_flows(self, pid, address=None, hooks=("output", "input"), directions=("to", "from")):
        """Drops all packets of the existing flows; new flows work. Returns the ports."""
        flows = {address: self.flows(pid, address)} if address else self.flows(pid)
        script = ""
        for peer, ports in flows.items():
            if not ports:
                continue
            ports = "{ " + ", ".join(map(str, ports)) + " }"
            for hook in hooks:
                if "to" in directions:
                    script += f"add rule inet jackstay_rig {hook} ip daddr {peer} tcp dport {PORT} tcp sport {ports} counter drop\n"
                if "from" in directions:
                    script += f"add rule inet jackstay_rig {hook} ip saddr {peer} tcp sport {PORT} tcp dport {ports} counter drop\n"
        if not script:
            raise AssertionError(f"process {pid} has no flow to {address or 'any apiserver'}")
        self.nft(script)
        return flows

    def drop_address(self, address, hooks=("output", "input"), directions=("to", "from")):
        """Drops all packets of one apiserver, including those of new connections."""
        self.address_rule(address, hooks, directions, "")

    def drop_etcd(self, name):
        """Cuts one apiserver off from etcd: it answers PINGs, its etcd check fails, and uncached requests hang."""
        self.nft(f"add rule inet jackstay_rig input ip daddr {ETCD_ADDRESSES[name]} tcp dport 2379 counter drop\n"
                 f"add rule inet jackstay_rig input ip saddr {ETCD_ADDRESSES[name]} tcp sport 2379 counter drop\n")

    def etcd_flows(self, name):
        """Bytes that each connection of one apiserver has received from etcd, by local port."""
        output = sh("ss", "-Htnpi", "state", "established", f"( dst {ETCD_ADDRESSES[name]} and dport = :2379 )").stdout
        own = f"pid={self.rig.apiservers[name].process.pid},"
        flows = re.findall(r"\S+:(\d+)\s+\S+:2379\s+users:(\S+)[^\n]*\n.*?bytes_received:(\d+)", output)
        return {int(port): int(received) for port, users, received in flows if own in users}

    def drop_etcd_of_services(self, name):
        """Drops the connection to etcd by which one apiserver reads and watches services. All its checks use other
        connections, and pass. gRPC's keepalive replaces it after 40 s. Returns its local port."""
        path, before = "/api/v1/namespaces/default/services", self.etcd_flows(name)
        self.rig.control.must("POST", path, {
            "metadata": {"name": "burst", "annotations": {"burst": "x" * 200_000}}, "spec": {"clusterIP": "None"}})
        self.rig.control.must("DELETE", f"{path}/burst")

        def used():
            grown = {port: received - before.get(port, 0) for port, received in self.etcd_flows(name).items()}
            return [port for port, bytes in grown.items() if bytes >= 200_000]
        port, = wait_for(f"the connection of {name} that brings services", used, 10)
        self.nft("".join(f"add rule inet jackstay_rig input ip {source} {ETCD_ADDRESSES[name]} tcp {ports} counter drop\n" for source, ports in (
            ("daddr", f"sport {port}"), ("saddr", f"dport {port}"))))
        return port

    def cut_backends(self, name, backends, how):
        """Cuts the path between one apiserver and the servers at `backends`, (address, port) pairs. `how` is "refused": RST
        for every packet of the apiserver; "dark": no packet passes; or "one way": no packet of the servers passes.

        The apiserver's packets are matched by its group, and both directions by the mark of the connection."""
        mark, script = GROUPS[name], "add chain inet jackstay_rig marks { type filter hook output priority -160; }\n"
        verdicts = {"refused": [("daddr", "dport", "reject with tcp reset")], "one way": [("saddr", "sport", "drop")],
                    "dark": [("daddr", "dport", "drop"), ("saddr", "sport", "drop")]}[how]
        for address, port in backends:
            script += f"add rule inet jackstay_rig marks meta skgid {mark} ip daddr {address} tcp dport {port} ct mark set {mark}\n"
            # Not by `ct direction`: in a connection older than the rules, the first packet seen defines it.
            for own, own_port, verdict in verdicts:
                script += f"add rule inet jackstay_rig input ct mark {mark} ip {own} {address} tcp {own_port} {port} counter {verdict}\n"
        self.nft(script)

    def drop_backends(self, backends):
        """Drops all packets of the servers at `backends`, (address, port) pairs, for every client."""
        self.nft("".join(f"add rule inet jackstay_rig input ip daddr {address} tcp dport {port} counter drop\n"
                         f"add rule inet jackstay_rig input ip saddr {address} tcp sport {port} counter drop\n" for address, port in backends))

    def drop_randomly(self, percent, addresses=tuple(ADDRESSES.values()), hooks=("input",), directions=("to", "from")):
        """Drops packets at random."""
        for address in addresses:
            self.address_rule(address, hooks, directions, f"numgen random mod 1000 < {int(percent * 10)} ")

    def address_rule(self, address, hooks, directions, match):
        script = ""
        for hook in hooks:
            if "to" in directions:
                script += f"add rule inet jackstay_rig {hook} ip daddr {address} tcp dport {PORT} {match}counter drop\n"
            if "from" in directions:
                script += f"add rule inet jackstay_rig {hook} ip saddr {address} tcp sport {PORT} {match}counter drop\n"
        self.nft(script)

    def dropped(self):
        """Number of packets dropped so far. Tests check it, because a fault without effect proves nothing."""
        return sum(map(int, re.findall(r"counter packets (\d+)", sh("nft", "list", "table", "inet", "jackstay_rig").stdout)))


# Messages of client-go in 1.20 ("watch of *v1.Pod closed with: …") and in current releases ("watch ended with error",
# "falling back to regular list").
WATCH_ERRORS = (r"client connection lost|watch (of .* )?(ended|closed) with|\"Watch closed\"|Failed to watch|Unable to watch|unable to decode"
           r"|failed to list|falling back to (?!slow path)")  # "slow path" belongs to lease updates
WRITE_ERRORS = r"Error updating node status|failed to (update|ensure).*lease"


# client-go compares what a watch or a cached list has given it with a list from etcd, and panics if they differ.
DETECTORS = {"KUBE_WATCHLIST_INCONSISTENCY_DETECTOR": "true", "KUBE_LIST_FROM_CACHE_INCONSISTENCY_DETECTOR": "true"}
INCONSISTENT = b"data inconsistency detected"
_examined = {}  # bytes of each log that were read


def inconsistencies():
    """What the detectors have reported since the last call, in the logs of all components."""
    found = []
    for file in (_rig.dir.glob("*.log") if _rig else ()):
        with open(file, "rb") as log_file:
            log_file.seek(_examined.get(file, 0))
            text = log_file.read()
        _examined[file] = _examined.get(file, 0) + len(text)
        found += [f"{file.name}: {line[:500].decode(errors='replace')}" for line in text.splitlines() if INCONSISTENT in line]
    return found


def log_lines(process, what, since=0):
    """Lines of a process's log after byte `since` in which `what` is found."""
    with open(process.logfile, "rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if re.search(what, line)]


def client_errors(process, what=f"{WATCH_ERRORS}|{WRITE_ERRORS}", since=0):
    """Log lines after byte `since` in which client-go reports a broken watch or connection."""
    with open(process.logfile, "rb") as file:
        file.seek(since)
        text = file.read().decode(errors="replace")
    return [f"{process.name}: {line}" for line in text.splitlines() if re.search(what, line, re.I)]


class HollowNode:
    """A kubemark node: kubelet's code without containers."""

    def __init__(self, rig, index, server):
        self.name = f"hollow-{index}"
        self.cert = rig.node_cert(self.name)
        # kubemark writes to /tmp, so each node has a private /tmp, which also holds its kubeconfig.
        tmp = rig.dir / self.name
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir()
        rig.kubeconfig(self.name, server, cert=self.cert, inline=True).rename(tmp / "kubeconfig")
        self.process = Process(self.name, [
            "unshare", "--mount", "--propagation=private", "bash", "-c",
            'exec 9<"$1" && mount --bind "$2" /tmp && cd / && shift 2 && exec -a kubemark /proc/self/fd/9 "$@"', "hollow",
            RELEASE.program("kubemark"), tmp, "--morph=kubelet", f"--name={self.name}", "--kubeconfig=/tmp/kubeconfig",
            f"--kubelet-port={10300 + index}", f"--kubelet-read-only-port={10400 + index}", "--v=2", *RELEASE.kubemark,
        ], rig.dir / f"{self.name}.log", env=DETECTORS)


class RealNode:
    """containerd, runc and the real kubelet."""

    NAME = "real-1"

    def __init__(self, rig, server):
        self.rig, self.server = rig, server
        self.cert = rig.node_cert(self.NAME)
        d = self.dir = rig.dir / "node"
        d.mkdir(exist_ok=True)
        for path in ("cni-conf", "kubelet", "manifests", "containerd", "pki"):
            (d / path).mkdir(exist_ok=True)
        # The credential as kubelet stores it: one file, behind a symlink that is replaced by rename.
        self.current = d / "pki" / "kubelet-client-current.pem"
        self.rotate(self.cert)
        (d / "cni-conf" / "10-loopback.conflist").write_text(json.dumps(
            {"cniVersion": "0.3.1", "name": "loopback", "plugins": [{"type": "loopback"}]}))
        (d / "containerd.toml").write_text(f'''version = 2
root = "{d}/containerd/root"
state = "/run/containerd-rig"
[grpc]
address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{d}/cni-conf"
''')
        self.cgroup = os.environ.get("JACKSTAY_RIG_CGROUP", "jackstay-rig")
        (d / "kubelet.json").write_text(json.dumps(self.kubelet_config(), indent=1))
        self.containerd = Process("containerd", ["containerd", "--config", d / "containerd.toml"], rig.dir / "containerd.log")
        self.kubelet = Process("kubelet", [
            RELEASE.program("kubelet"), *RELEASE.kubelet, f"--config={d}/kubelet.json", f"--node-ip={NODE_IP}", f"--hostname-override={self.NAME}",
            "--v=2", *self.kubelet_flags()], rig.dir / "kubelet.log", env=DETECTORS)

    def kubelet_flags(self):
        return [f"--kubeconfig={self.kubeconfig()}", f"--root-dir={self.dir}/kubelet", f"--cert-dir={self.dir}/pki"]

    def kubelet_config(self):
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True},
                               "x509": {"clientCAFile": str(self.rig.pki.ca)}},
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.cgroup}", "enforceNodeAllocatable": [],
            "failSwapOn": False, "staticPodPath": str(self.dir / "manifests"), "resolvConf": "",
            "imageGCHighThresholdPercent": 100, "volumePluginDir": str(self.dir / "plugins"), **RELEASE.kubelet_config,
        }

    def kubeconfig(self):
        return self.rig.kubeconfig("real-node", self.server, cert=(self.current, self.current))

    def rotate(self, cert):
        """Replaces the credential as kubelet does."""
        crt, key = cert
        pem = self.current.parent / f"kubelet-client-{uuid.uuid4().hex[:8]}.pem"
        pem.write_text(Path(crt).read_text() + Path(key).read_text())
        pem.chmod(0o600)
        swap_symlink(self.current, pem)

    def create_cgroups(self):
        for hierarchy in Path("/sys/fs/cgroup").iterdir():
            try:
                (hierarchy / self.cgroup).mkdir(exist_ok=True)
                if hierarchy.name == "cpuset":
                    for knob in ("cpuset.cpus", "cpuset.mems"):
                        (hierarchy / self.cgroup / knob).write_text((hierarchy / knob).read_text())
            except OSError:
                pass

    def start(self):
        self.create_cgroups()
        self.containerd.start()
        wait_for("containerd", lambda: self.ctr("version"), 20)
        self.ctr("images", "import", self.image())
        self.kubelet.start()
        return self

    def ctr(self, *argv):
        self.containerd.require_running()
        return sh("ctr", "--address", CONTAINERD_SOCKET, "-n", "k8s.io", *argv)

    def image(self):
        """An image archive for `ctr images import`: one layer with busybox and its links."""
        root = self.dir / "image"
        shutil.rmtree(root, ignore_errors=True)
        for path in ("bin", "tmp", "www", "etc"):
            (root / "rootfs" / path).mkdir(parents=True)
        binary = root / "rootfs/bin/busybox"
        shutil.copy(shutil.which("busybox") or "/bin/busybox", binary)
        for name in ("sh", "cat", "tar", "sleep", "echo", "ls", "httpd", "sha256sum", "id", "seq", "date", "head", "wc", "nc", "true", "rm"):
            (root / "rootfs/bin" / name).symlink_to("busybox")
        (root / "rootfs/etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        (root / "rootfs/www/index.html").write_text("a page from the pod\n")
        (root / "rootfs/www/big").write_bytes(bytes(range(256)) * 32768)
        sh("tar", "-C", root / "rootfs", "--owner=0", "--group=0", "-cf", root / "layer.tar", ".")
        digest = sh("sha256sum", root / "layer.tar").stdout.split()[0]
        (root / "config.json").write_text(json.dumps({
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "1000000"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}))
        (root / "manifest.json").write_text(json.dumps([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]))
        sh("tar", "-C", root, "-cf", root / "image.tar", "config.json", "manifest.json", "layer.tar")
        return root / "image.tar"

    def stop(self):
        self.kubelet.stop(timeout=10)
        self.containerd.stop(timeout=10)


def swap_symlink(link, target):
    """Replaces a symlink by rename, so that it exists at every moment."""
    fresh = link.with_name(link.name + ".new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    os.replace(fresh, link)


def yaml(value, indent=0):
    """Writes a value as YAML, as far as configuration files need it."""
    pad = "  " * indent
    if isinstance(value, dict):
        if not value:
            return " {}"
        return "".join(f"\n{pad}{key}:{yaml(item, indent + 1)}" for key, item in value.items())
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "".join(f"\n{pad}- " + yaml(item, indent + 1).lstrip() for item in value)
    return " " + json.dumps(value if isinstance(value, (list, bool, int, float)) or value is None else str(value))


def probe_as_admin(rig, config):
    """The prober has the certificate of an administrator, because a node may not read /metrics."""
    cert, key = rig.admin_cert
    config["upstreams"][0]["health"] = {"readyz": {"cert_file": cert, "key_file": key}}


class Jackstay:
    def __init__(self, rig, identities, endpoints=None, adapt=None, log_name="jackstay", port=7443, admin=9643):
        """`adapt` may modify the configuration, a dict, before it is written. The prober has the certificate of a node, as
        beside kubelet, if there are identities and `adapt` names no other: an apiserver that starts refuses it."""
        self.rig, self.dir = rig, rig.dir
        self.server, self.admin_address = f"https://127.0.0.1:{port}", f"127.0.0.1:{admin}"
        self.binary = Path(os.environ.get("JACKSTAY_BIN") or REPOSITORY / "target/release/jackstay")
        crt, key = rig.serving_cert
        config = {
            "admin": {"bind": self.admin_address},
            "state_dir": "",
            "log": {"level": "info", "format": "text", "access": "errors"},
            "upstreams": [{
                "name": "control-plane",
                "endpoints": endpoints or [f"{address}:{PORT}" for address in ADDRESSES.values()],
                "tls": {"ca_file": rig.pki.ca},
            }],
            "listeners": [{
                "name": "apiserver", "bind": [f"127.0.0.1:{port}"], "mode": "terminate", "upstream": "control-plane",
                "tls": {"cert_file": crt, "key_file": key},
                "client_ca_file": rig.pki.ca,
                "identities": [{"cert_file": c, "key_file": k} for c, k in identities],
            }],
        }
        if adapt:
            adapt(config)
        if identities:
            readyz = config["upstreams"][0].setdefault("health", {}).setdefault("readyz", {})
            if not {"cert_file", "token_file"} & readyz.keys():
                readyz["cert_file"], readyz["key_file"] = rig.node_cert("restricted")
        self.config = self.dir / f"{log_name}.yaml"
        self.config.write_text(yaml(config).lstrip("\n") + "\n")
        self.process = Process(log_name, [self.binary, "run", "--config", self.config], self.dir / f"{log_name}.log")

    def start(self, timeout=20):
        self.process.start()

        def ready():
            self.process.require_running()
            return self.admin("/readyz").code == 200
        wait_for("jackstay to be ready", ready, timeout)
        return self

    @property
    def pid(self):
        return self.process.pid

    def admin(self, path):
        host, _, port = self.admin_address.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return Response(response.status, response.headers, response.read())
        finally:
            connection.close()

    def status(self):
        return self.admin("/status").json

    def metrics(self):
        """Every sample as {name{labels}: value}."""
        samples = {}
        for line in self.admin("/metrics").body.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def total(self, name):
        """The sum of all samples of a metric."""
        return sum(value for sample, value in self.metrics().items() if sample.partition("{")[0] == name)

    def stop(self):
        return self.process.stop(timeout=40)


class Rig:
    """The control plane, which all tests of a run share."""

    def __init__(self):
        self.dir = Path(os.environ["JACKSTAY_RIG_DIR"])
        self.processes = []
        self.started = False
        self.node = None
        self.hollow = []
        self.jackstay = None
        self.extra = {}  # running apiservers besides a, b and c
        self.node_certs = {}
        self.namespaces = 0

    # ---- start and stop ----

    def start(self):
        if self.started:
            return self
        self.started = True
        atexit.register(self.stop)
        begun = time.monotonic()
        self.network()
        self.pki = Pki(self.dir / "pki")
        self.admin_cert = self.pki.issue("admin", "/O=system:masters/CN=rig-admin")
        self.developer_cert = self.pki.issue("developer", "/O=developers/O=on-call/CN=bob")
        self.load_cert = self.pki.issue("load", "/O=jackstay:load/CN=load")
        self.serving_cert = self.pki.issue("jackstay", "/CN=jackstay", ["127.0.0.1", "localhost", "::1"])
        self.sa_key = self.pki.ca_key.with_name("sa.key")
        sh("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.sa_key)
        self.token_table = self.dir / "tokens.csv"
        groups = ",".join(TOKEN_USER[1])
        self.token_table.write_text(f'{TOKEN},{TOKEN_USER[0]},4711,"{groups}"\n'
                                    + "".join(f'{token},{name},{name},"system:masters"\n' for name, token in ADMIN_TOKENS.items()))
        self.audit_policy = self.dir / "audit-policy.json"
        self.audit_policy.write_text(json.dumps({
            "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}))
        self.etcd = self.run("etcd", [
            CACHE / "bin/etcd", "--data-dir", self.dir / "memory/etcd", f"--listen-client-urls={','.join(f'http://{ip}:2379' for ip in ('127.0.0.1', *ETCD_ADDRESSES.values()))}",
            "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380"])
        wait_for("etcd", lambda: self.etcd.require_running() or socket.create_connection(("127.0.0.1", 2379), 1).close() or True, 30)
        self.apiservers = {name: Apiserver(self, name) for name in ADDRESSES}
        for apiserver in self.apiservers.values():
            apiserver.start(wait=False)
            self.processes.append(apiserver.process)
        for apiserver in self.apiservers.values():
            apiserver.wait_ready()
        self.control = self.api("c", cert=self.admin_cert)
        self.controller = self.run("controller-manager", [
            RELEASE.program("kube-controller-manager"), *RELEASE.controller_manager,
            f"--kubeconfig={self.kubeconfig('controller-manager', self.server('c'), cert=self.pki.issue('kcm', '/O=system:masters/CN=system:kube-controller-manager'))}",
            f"--service-account-private-key-file={self.sa_key}", f"--root-ca-file={self.pki.ca}",
            f"--cluster-signing-cert-file={self.pki.ca}", f"--cluster-signing-key-file={self.pki.ca_key}",
            "--allocate-node-cidrs", "--cluster-cidr=10.97.0.0/16",  # A kubelet with a CIDR becomes Ready sooner.
            "--leader-elect=false", "--bind-address=127.0.0.1", "--v=1"], env=DETECTORS)
        self.faults = Faults(self)
        for group, role in (("developers", "view"), ("jackstay:load", "edit")):
            self.control.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
                "metadata": {"name": group.replace(":", "-")},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}]})
        # Each apiserver has its own cache of bindings, and the controller manager aggregates the role `edit`.
        for name in ADDRESSES:
            wait_for(f"the load generator's permissions on {name}", lambda: self.api(name, cert=self.load_cert).get("/api/v1/configmaps?limit=1").code == 200, 60)
        wait_for("the default service account", lambda: self.control.get("/api/v1/namespaces/default/serviceaccounts/default").code == 200, 60)
        log(f"control plane of Kubernetes {RELEASE.version} up in {time.monotonic() - begun:.1f} s")
        return self

    def network(self):
        """A veth pair with both ends in this namespace: addresses that are not loopback, and no way out."""
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", "rig0", "type", "veth", "peer", "name", "rig1")
        sh("ip", "addr", "add", f"{NODE_IP}/24", "dev", "rig0")
        for address in ADDRESSES.values():
            sh("ip", "addr", "add", f"{address}/32", "dev", "rig0")
        sh("ip", "link", "set", "rig0", "up")
        sh("ip", "link", "set", "rig1", "up")
        # kubelet requires a default route; its requests to cloud metadata and name servers fail at once.
        sh("ip", "route", "add", "default", "via", "10.99.0.2", "dev", "rig0")
        sh("ip", "route", "add", "unreachable", "0.0.0.0/1")
        sh("ip", "route", "add", "unreachable", "128.0.0.0/1")

    def start_extra(self, **settings):
        """Starts further apiservers of the same etcd, each with its Settings: `start_extra(d=Settings(...))`."""
        for name, chosen in settings.items():
            if EXTRA_ADDRESSES[name] not in sh("ip", "-o", "addr", "show", "dev", "rig0").stdout:
                sh("ip", "addr", "add", f"{EXTRA_ADDRESSES[name]}/32", "dev", "rig0")
            # The rig's clients find them by jackstay's configuration, not by the Service `kubernetes`.
            flags = ["--endpoint-reconciler-type=none", *chosen.flags(self.dir / f"authentication-{name}.json")]
            self.extra[name] = Apiserver(self, name, flags=flags).start(wait=False)
        for name in settings:
            self.extra[name].wait_ready()
        return self.extra

    def stop_extra(self):
        for apiserver in self.extra.values():
            apiserver.process.stop(signal.SIGKILL)
        self.extra = {}

    def run(self, name, argv, **options):
        process = Process(name, argv, self.dir / f"{name}.log", **options).start()
        self.processes.append(process)
        return process

    def stop(self):
        if self.jackstay:
            self.jackstay.process.stop(signal.SIGKILL)
        for node in self.hollow:
            node.process.stop(signal.SIGKILL)
        if self.node:
            self.node.stop()
        self.stop_extra()
        for process in reversed(self.processes):
            process.stop(signal.SIGKILL)

    # ---- credentials and clients ----

    def server(self, name):
        return {**self.apiservers, **self.extra}[name].server

    def api(self, server, **credential):
        return Api(server if "/" in server else self.server(server), self.pki.ca, **credential)

    def node_cert(self, name):
        if name not in self.node_certs:
            self.node_certs[name] = self.pki.issue(f"node-{name}", f"/O=system:nodes/CN=system:node:{name}")
        return self.node_certs[name]

    def kubeconfig(self, name, server, cert=None, token=None, inline=False):
        def file(key, path):
            return {f"{key}-data": base64.b64encode(Path(path).read_bytes()).decode()} if inline else {key: str(path)}
        user = {}
        if cert:
            user = {**file("client-certificate", cert[0]), **file("client-key", cert[1])}
        if token:
            user["token"] = token
        path = self.dir / f"{name}.kubeconfig"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "rig",
            "clusters": [{"name": "rig", "cluster": {"server": server, **file("certificate-authority", self.pki.ca)}}],
            "users": [{"name": "rig", "user": user}],
            "contexts": [{"name": "rig", "context": {"cluster": "rig", "user": "rig"}}]}, indent=1))
        return path

    def kubectl_argv(self, config, *argv, variant=CURRENT_KUBECTL):
        return [str(variant.binary), f"--kubeconfig={config}", *map(str, argv)]

    def kubectl_env(self, variant=CURRENT_KUBECTL):
        return {**os.environ, **variant.env, "HOME": str(self.dir / "home")}

    def kubectl(self, config, *argv, variant=CURRENT_KUBECTL, **options):
        options.setdefault("timeout", 60)
        options.setdefault("check", False)
        return sh(*self.kubectl_argv(config, *argv, variant=variant), env=self.kubectl_env(variant), **options)

    def kubectl_start(self, config, *argv, variant=CURRENT_KUBECTL, **options):
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("text", True)
        return subprocess.Popen(self.kubectl_argv(config, *argv, variant=variant), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env=self.kubectl_env(variant), **options)

    # ---- nodes ----

    def start_hollow(self, server, count=3):
        self.stop_hollow()
        self.hollow = [HollowNode(self, i, server) for i in range(1, count + 1)]
        for node in self.hollow:
            node.process.start()
        return self.hollow

    def stop_hollow(self, delete=True):
        for node in self.hollow:
            node.process.stop(signal.SIGKILL)
            if delete:
                self.control.request("DELETE", f"/api/v1/nodes/{node.name}")
        self.hollow = []

    def start_node(self, server):
        """The real node; a running one is reused, with a new kubeconfig if its server differs."""
        if self.node and self.node.server == server:
            return self.node
        if self.node:
            self.node.server = server
            self.node.kubelet.stop()
            self.node.kubeconfig()
            self.node.kubelet.start()
        else:
            self.node = RealNode(self, server).start()
        # The condition Ready persists while kubelet is down; its port does not.
        wait_for("kubelet to listen", lambda: socket.create_connection((NODE_IP, 10250), 1).close() or True, 60)
        wait_for("the real node to be Ready", lambda: self.ready(RealNode.NAME), 90)
        return self.node

    def start_pod(self, name="tool"):
        """A pod with the containers web (httpd on 8099), ticker (a line every second) and echo (repeats stdin)."""
        path = f"/api/v1/namespaces/default/pods/{name}"
        if self.control.get(path).code == 404:
            def container(cname, *command, **more):
                return {"name": cname, "image": IMAGE, "imagePullPolicy": "Never", "command": list(command), **more}
            self.control.must("POST", "/api/v1/namespaces/default/pods", {
                "metadata": {"name": name}, "spec": {
                    "nodeName": RealNode.NAME, "hostNetwork": True, "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 1, "tolerations": [{"operator": "Exists"}], "containers": [
                        container("web", "httpd", "-f", "-p", "8099", "-h", "/www"),
                        container("ticker", "sh", "-c", "i=0; while :; do i=$((i+1)); echo line $i; sleep 1; done"),
                        container("echo", "sh", "-c", "while read line; do echo got $line; done", stdin=True),
                    ]}})

        def running():
            status = self.control.get(path).json["status"]
            return all("running" in c["state"] for c in status.get("containerStatuses", [{"state": {}}])) and status or None

        def known():
            # A kubelet that was restarted answers `pod does not exist` until it has listed its pods; the status is older.
            pods = self.control.get(f"/api/v1/nodes/{RealNode.NAME}/proxy/pods")
            return pods.code == 200 and any(pod["metadata"]["name"] == name for pod in pods.json["items"])
        status = wait_for(f"pod {name}", running, 90)
        wait_for(f"kubelet to know the pod {name}", known, 30)
        return status

    def ready(self, name):
        node = self.control.get(f"/api/v1/nodes/{name}")
        if node.code != 200:
            return False
        return any(c["type"] == "Ready" and c["status"] == "True" for c in node.json["status"]["conditions"])

    def etcdctl(self, *argv):
        """Output of etcdctl, which bypasses the apiservers."""
        return sh(CACHE / "bin/etcdctl", "--endpoints=http://127.0.0.1:2379", *argv).stdout

    def revision(self):
        """The current revision of etcd, the newest resourceVersion."""
        return json.loads(self.etcdctl("endpoint", "status", "--write-out=json"))[0]["Status"]["header"]["revision"]

    def load_namespace(self):
        self.namespaces += 1
        name = f"load-{self.namespaces}-{uuid.uuid4().hex[:6]}"
        self.control.must("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        return name

    # ---- jackstay ----

    def start_jackstay(self):
        """The jackstay of the whole run; no fault may make a restart necessary."""
        if self.jackstay is None:
            # The identity that tests rotate is behind a symlink, as kubelet's.
            self.rotating = self.dir / "rotating.pem"
            self.rotate(self.load_cert)
            nodes = [self.node_cert(name) for name in ("restricted", RealNode.NAME, "hollow-1", "hollow-2", "hollow-3")]
            self.jackstay = Jackstay(self, [self.admin_cert, (self.rotating, self.rotating), *nodes])
            self.jackstay.start()
        return self.jackstay

    def rotate(self, cert):
        pem = self.dir / f"rotating-{uuid.uuid4().hex[:8]}.pem"
        pem.write_text(Path(cert[0]).read_text() + Path(cert[1]).read_text())
        pem.chmod(0o600)
        swap_symlink(self.rotating, pem)

    # ---- the audit log ----

    def audit(self, match, servers=None):
        """Audit events for which match(event) is true, with `server` added."""
        found = []
        for name in servers or [*ADDRESSES, *self.extra]:
            with open(self.dir / f"audit-{name}.log", errors="replace") as lines:
                for line in lines:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue  # An incomplete last line of a killed process.
                    if match(event):
                        event["server"] = name
                        found.append(event)
        return found

    def audited_user(self, needle, timeout=5):
        """Name, groups and audit event of the request with `needle` in its URI or as its Audit-ID."""
        def seen():
            return self.audit(lambda e: e["auditID"] == needle or needle in e["requestURI"])
        event = wait_for(f"{needle} in an audit log", seen, timeout)[0]
        user = event["user"]
        return user.get("username"), sorted(user.get("groups", [])), event

    def audit_summary(self, ident):
        """One line that says which apiservers received a request, when, and with which result."""
        seen = self.audit(lambda e: e["auditID"] == ident)
        return "; ".join(f"{e['server']} {e['requestReceivedTimestamp'][11:23]} to {e['stageTimestamp'][11:23]} {e['stage']} "
                         f"{e.get('responseStatus', {}).get('code', '')}" for e in seen) or "no audit log contains it"

    def audit_lines(self, server):
        return sum(1 for _ in open(self.apiservers[server].audit, errors="replace"))

    def requests_answered(self, server, agent, seconds=2):
        """Number of requests of a user agent, without watches, that an apiserver completed in the last seconds."""
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() - seconds))
        with open(self.dir / f"audit-{server}.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 20)))
            lines = file.read().split(b"\n")[1:-1]
        events = (json.loads(line) for line in lines if agent.encode() in line)
        return sum(e["stageTimestamp"] >= since and e["stage"] == "ResponseComplete" and e["verb"] != "watch" for e in events)

    # ---- recovery between tests ----

    def recover(self):
        self.faults.clear()
        for apiserver in (*self.apiservers.values(), *self.extra.values()):
            apiserver.ensure_ready()
        # An apiserver has a connection to etcd for each resource, and /readyz uses one of its own. After packet
        # loss, the other connections wait seconds for their next retransmission.
        wait_for("the connections to etcd to recover", lambda: "backoff:" not in sh("ss", "-Htni", "( sport = :2379 or dport = :2379 )").stdout, 60)


class NodeMonitor(threading.Thread):
    """Polls the nodes' leases and conditions: the longest time between two heartbeats, and each time that a node
    was not Ready."""

    def __init__(self, rig, names):
        super().__init__(daemon=True)
        self.rig, self.names, self.stopped = rig, list(names), threading.Event()
        self.renewed, self.changed_at, self.longest, self.not_ready, self.polls = {}, {}, {}, [], 0

    def run(self):
        while not self.stopped.wait(0.5):
            for server in "cab":  # Some tests make one or two of them unreachable.
                try:
                    self.poll(self.rig.api(server, cert=self.rig.admin_cert, timeout=1))
                    break
                except (OSError, ValueError, KeyError, http.client.HTTPException):
                    pass

    def poll(self, api):
        now = time.monotonic()
        for lease in api.get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases").json["items"]:
            name, renewed = lease["metadata"]["name"], lease["spec"].get("renewTime")
            if name not in self.names:
                continue
            if name in self.changed_at:
                self.longest[name] = max(self.longest.get(name, 0), now - self.changed_at[name])
            if self.renewed.get(name) != renewed:
                self.renewed[name], self.changed_at[name] = renewed, now
        for node in api.get("/api/v1/nodes").json["items"]:
            name = node["metadata"]["name"]
            if name in self.names:
                state = next((c["status"] for c in node["status"]["conditions"] if c["type"] == "Ready"), "?")
                if state != "True":
                    self.not_ready.append((name, state, time.time()))
        self.polls += 1

    def stop(self):
        self.stopped.set()
        self.join(10)
        return self

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()


class Load:
    """The load generator (tests/real/go) against a server; `report` holds its results."""

    def __init__(self, rig, server, seconds, cert=None, token=None, direct="c", **flags):
        self.rig = rig
        self.namespace = rig.load_namespace()
        self.agent = f"load-{uuid.uuid4().hex[:8]}"
        self.file = rig.dir / f"{self.agent}.json"
        argv = [CACHE / "load", f"-server={server}", f"-ca={rig.pki.ca}", f"-namespace={self.namespace}",
                f"-duration={seconds}s", f"-user-agent={self.agent}", f"-report={self.file}"]
        self.token_file = rig.dir / f"{self.agent}.token"
        if token:
            self.rotate_token(token)
            argv.append(f"-token-file={self.token_file}")
        else:
            crt, key = cert or rig.load_cert
            argv += [f"-cert={crt}", f"-key={key}"]
        if direct:
            argv.append(f"-direct={rig.server(direct)}")
        argv += [f"-{key.replace('_', '-')}={value}" for key, value in flags.items()]
        self.child = subprocess.Popen(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.child.stdout.readline()
        if line.strip() != "ready":
            self.child.kill()
            raise AssertionError(f"the load generator did not become ready: {line!r} {self.child.communicate()[1]}")
        self.begun = time.monotonic()

    def rotate_token(self, token):
        """Replaces the token by rename; each later request has the new one."""
        fresh = self.token_file.with_suffix(".new")
        fresh.write_text(token)
        os.replace(fresh, self.token_file)

    def until(self, seconds):
        """Sleeps until the given number of seconds after the start."""
        time.sleep(max(0, self.begun + seconds - time.monotonic()))

    def finish(self, timeout=120, early=False):
        if early:
            self.child.send_signal(signal.SIGTERM)
        try:
            _, err = self.child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise AssertionError(f"the load generator did not exit: {self.child.communicate()[1]}")
        if self.child.returncode:
            raise AssertionError(f"load generator: exit {self.child.returncode}: {err}")
        self.report = json.loads(self.file.read_text())
        return self.report

    def kill(self):
        """Stops the load generator, in whatever state it is."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(10)
        self.child.stdout.close()
        self.child.stderr.close()

    def sent_twice(self):
        """Audit IDs of writes that apiservers completed successfully more than once."""
        ids, count = set(self.report["write_ids"]), {}
        for event in self.rig.audit(lambda e: e["stage"] == "ResponseComplete" and e["auditID"] in ids
                                    and e.get("responseStatus", {}).get("code", 0) < 300):
            count[event["auditID"]] = count.get(event["auditID"], 0) + 1
        return [i for i, n in count.items() if n > 1]


class Reader(threading.Thread):
    """Reads a small list every 50 ms, each time on a new connection, and collects unexpected results in
    `failed`."""

    def __init__(self, rig, server):
        super().__init__(daemon=True)
        self.api, self.stopped = rig.api(server, cert=rig.admin_cert), threading.Event()
        self.requests, self.failed = 0, []

    def run(self):
        while not self.stopped.wait(0.05):
            try:
                answer = self.api.get("/api/v1/namespaces/default/configmaps?limit=1")
            except (OSError, http.client.HTTPException) as error:
                answer = error
            self.requests += 1
            if getattr(answer, "code", None) != 200:
                self.failed.append(answer)

    def wait_for_more(self):
        """Waits until five more reads have completed."""
        enough = self.requests + 5
        wait_for("more reads", lambda: self.requests >= enough, 30)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        self.join(40)


def summary(report):
    """The results of the load generator in one line."""
    r, w = report["requests"], report["watches"]
    return (f"reads {r['read']['total']} failed {r['read']['failed']} slowest {r['read']['slowest_ms']:.0f} ms gap {r['read']['max_gap_ms']:.0f} ms | "
            f"writes {r['write']['total']} failed {r['write']['failed']} slowest {r['write']['slowest_ms']:.0f} ms | "
            f"watches {w['count']} events {w['events']} broken {w['broken']} refused {w['refused']} ended {w['ended_cleanly']} relists {w['relists']} "
            f"lost {w['lost']} dup {w['duplicated']} back {w['backwards']} silence {w['busy_silence_ms']:.0f} ms quiet {w['quiet_delay_ms']:.0f} ms | "
            f"applied twice {len(report['applied_twice'])} | direct to an apiserver: writes slowest {r['direct']['slowest_ms']:.0f} ms")


_rig = Rig() if "JACKSTAY_RIG_DIR" in os.environ else None


def shared():
    """The rig of this run."""
    if _rig is None:
        raise SystemExit("run the tests with tests/real/run")
    return _rig.start()
