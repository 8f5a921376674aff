"""Runs the recipes of the documentation in the rig: each from an empty directory, by the commands of its page alone."""

import base64
import http.server
import json
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path

from deployed import BOOTSTRAP_CONF, KUBELET_CONF, KUBELET_PEM, MANIFESTS, NewNode, dist_file, pids_of
from kubernetes import CACHE, CONTAINERD_SOCKET
from rig import ADDRESSES, LOAD_BALANCER, LOAD_BALANCER6, REPOSITORY, sh, wait_for

sys.path.insert(0, str(REPOSITORY / "tests/recipes"))
import recipes

# The example addresses of the pages, and those of the rig.
REPLACEMENTS = {"10.0.0.11": ADDRESSES["a"], "10.0.0.12": ADDRESSES["b"], "10.0.0.13": ADDRESSES["c"],
                "10.0.0.5": LOAD_BALANCER, "fd00::5": LOAD_BALANCER6}


class Runner:
    """A machine on which recipes run. Its programs are `jackstay`, `kubectl` and `ctr`, and `systemctl`, with which a
    recipe reaches the units in `units`: functions by `verb unit`."""

    def __init__(self, rig, name, units=None):
        self.rig, self.units = rig, units or {}
        self.dir = rig.dir / f"recipes-{name}"
        self.bin, self.home = self.dir / "bin", self.dir / "home"
        for path in (self.bin, self.home, self.dir / "requests"):
            path.mkdir(parents=True)
        self.program("ctr", f'exec /usr/bin/ctr --address {CONTAINERD_SOCKET} "$@"')
        self.program("kubectl", f'exec {CACHE}/bin/kubectl "$@"')
        self.program("jackstay", f'exec {dist_file("jackstay")} "$@"')
        # The directory of a request is renamed when it is complete; its answer is the exit code.
        self.program("systemctl", f'''cd {self.dir}/requests
request=$(mktemp -d .new.XXXXXX)
echo "$*" >"$request/words"
mv "$request" "$$"
while [ ! -e "$$/code" ]; do sleep 0.05; done
exit "$(cat "$$/code")"''')
        self.stopped = threading.Event()
        self.servant = threading.Thread(target=self.serve, daemon=True)
        self.servant.start()
        self.count = 0

    def program(self, name, text):
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def serve(self):
        """Carries out the requests of `systemctl`. An unknown one fails the recipe."""
        done = set()
        while not self.stopped.wait(0.05):
            for request in (self.dir / "requests").iterdir():
                if request.name in done or request.name.startswith("."):
                    continue
                done.add(request.name)
                words = (request / "words").read_text().strip()
                code = 1
                try:
                    if words in self.units:
                        self.units[words]()
                        code = 0
                finally:
                    (request / "code.new").write_text(f"{code}\n")
                    (request / "code.new").rename(request / "code")

    def stop(self):
        self.stopped.set()
        self.servant.join(10)

    def directory(self, name):
        """A new directory, which is empty."""
        self.count += 1
        directory = self.dir / f"{self.count}-{name}"
        directory.mkdir()
        return directory

    def run(self, page, name, files=(), directory=None, replacements=None, **options):
        """Runs a recipe in an empty directory that has only `files`, or in `directory`, and returns what it printed.
        `replacements` are beside those of all pages."""
        directory = directory or self.directory(name)
        for file in files:
            shutil.copy(file, directory)
        script = recipes.script(REPOSITORY / page, name, {**REPLACEMENTS, **(replacements or {})})
        return self.run_script(f"{page}, recipe {name}", script, directory, **options)

    def run_script(self, what, script, directory, timeout=120, **variables):
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}:/usr/sbin:/sbin", "HOME": str(self.home), "TMPDIR": os.environ["TMPDIR"], **variables}
        # These are the host's: recipes install programs into empty ones of their own.
        script = f"mount -t tmpfs tmpfs /usr/local/bin\nmount -t tmpfs tmpfs /usr/local/lib\n{script}"
        done = subprocess.run(["unshare", "--mount", "--propagation=slave", "bash", "-euxo", "pipefail", "-c", script], cwd=directory, env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False)
        if done.returncode:
            raise AssertionError(f"{what}: exit {done.returncode}:\n{done.stdout}")
        return done.stdout


def documents(text):
    """The documents of YAML, read by the parser of the rig's client in Python."""
    program = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
    return json.loads(sh(CACHE / "python/bin/python", "-c", program, input=text).stdout)


class TlsServer(threading.Thread):
    """A TLS server that answers each request with its name, on an address of an apiserver and with its certificate."""

    def __init__(self, rig, name, port):
        super().__init__(daemon=True)
        answer = name.encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer((ADDRESSES[name], port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(rig.pki.dir / f"apiserver-{name}.crt", rig.pki.dir / f"apiserver-{name}.key")
        # The handshake is made in the thread of the connection.
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.start()

    def run(self):
        self.server.serve_forever(poll_interval=0.05)

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.join(10)


class JoinedNode(NewNode):
    """A worker as `kubeadm join` leaves it: kubelet has its certificate and reaches the load balancer."""

    NAME = "joined-1"

    def __init__(self, rig, server):
        super().__init__(rig)
        self.kubelet.name, self.kubelet.logfile = "joined-kubelet", rig.dir / "joined-kubelet.log"
        for path in (MANIFESTS, KUBELET_PEM.parent):
            path.mkdir(parents=True, exist_ok=True)
        self.install_certificate(rig.node_cert(self.NAME))
        shutil.copy(rig.pki.ca, MANIFESTS.parent / "ca.crt")
        self.pki_ca = Path("/etc/kubernetes/pki/ca.crt")
        self.pki_ca.parent.mkdir(exist_ok=True)
        shutil.copy(rig.pki.ca, self.pki_ca)
        self.write_kubeconfig(server)

    def kubelet_config(self):
        # Frequent heartbeats shorten the tests.
        return {**super().kubelet_config(), "nodeStatusUpdateFrequency": "2s", "nodeLeaseDurationSeconds": 8}

    def write_kubeconfig(self, server):
        """`kubelet.conf` in the form in which kubelet writes it after its bootstrap."""
        ca = base64.b64encode(self.pki_ca.read_bytes()).decode()
        KUBELET_CONF.write_text(f"""apiVersion: v1
clusters:
- cluster:
    certificate-authority-data: {ca}
    server: {server}
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    namespace: default
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
preferences: {{}}
users:
- name: default-auth
  user:
    client-certificate: {KUBELET_PEM}
    client-key: {KUBELET_PEM}
""")
        KUBELET_CONF.chmod(0o600)

    def join(self, runner):
        """Joins by kubeadm instead: the token, kubelet's bootstrap and `kubelet.conf` are real."""
        self.bootstrap()
        token = json.loads(BOOTSTRAP_CONF.read_text())["users"][0]["user"]["token"]
        for path in (BOOTSTRAP_CONF, KUBELET_CONF, KUBELET_PEM, self.pki_ca):
            path.unlink()
        self.start()  # containerd; kubelet ends, because it has no kubeconfig
        units = runner.units
        runner.units = {"daemon-reload": lambda: None, "status kubelet": lambda: None, "stop kubelet": self.kubelet.stop,
                        "start kubelet": self.restart_kubelet, "restart kubelet": self.restart_kubelet}
        discovery = self.rig.kubeconfig("discovery", f"https://{LOAD_BALANCER}:6443", inline=True)
        self.kubeadm(runner, "join", "--discovery-file", discovery, "--tls-bootstrap-token", token, "--node-name", self.NAME, "--cri-socket", CONTAINERD_SOCKET)
        runner.units = units

    @staticmethod
    def kubeadm(runner, *arguments):
        """Runs kubeadm. It takes the interface of the first route, and some routes of the rig have none."""
        networks = ("0.0.0.0/1", "128.0.0.0/1")
        for network in networks:
            sh("ip", "route", "del", "unreachable", network)
        try:
            command = shlex.join(map(str, [os.environ["JACKSTAY_KUBEADM"], *arguments, "--ignore-preflight-errors=all"]))
            return runner.run_script(f"kubeadm {arguments[0]}", command, runner.directory("kubeadm"), timeout=300)
        finally:
            for network in networks:
                sh("ip", "route", "add", "unreachable", network)

    def install_certificate(self, cert):
        """Replaces kubelet's certificate as kubelet does."""
        self.current = KUBELET_PEM
        self.rotate(cert)

    def old_certificate(self):
        """A certificate of this node that is valid for another hour, after ten days: kubelet replaces it at its start."""
        directory = self.rig.dir / "old-certificate"
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
x509_extensions = client
unique_subject = no
[any]
organizationName = supplied
commonName = supplied
[client]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = clientAuth
[req]
distinguished_name = name
[name]
""")
        key, csr, crt = (directory / f"old.{kind}" for kind in ("key", "csr", "crt"))
        sh("openssl", "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
           "-subj", f"/O=system:nodes/CN=system:node:{self.NAME}", "-keyout", key, "-out", csr)
        moments = [sh("date", "-u", "-d", moment, "+%y%m%d%H%M%SZ").stdout.strip() for moment in ("10 days ago", "1 hour")]
        sh("openssl", "ca", "-batch", "-notext", "-config", directory / "ca.cnf", "-cert", self.rig.pki.ca, "-keyfile", self.rig.pki.ca_key,
           "-startdate", moments[0], "-enddate", moments[1], "-in", csr, "-out", crt)
        return crt, key

    def ready_since(self, moment):
        """Whether the node is Ready and has renewed its lease after this time."""
        return self.rig.ready(self.NAME) and self.lease_renewed_at() > moment

    def reset(self):
        """Stops kubelet, kills the pods and empties the directory of manifests, as `kubeadm reset` does."""
        self.kubelet.stop(timeout=10)
        for path in MANIFESTS.iterdir():
            path.unlink()
        for pid in [*pids_of("containerd-shim-runc-v2", None), *pids_of()]:
            os.kill(pid, signal.SIGKILL)
        wait_for("the pods to end", lambda: not pids_of(), 10)

    def restart_kubelet(self):
        self.kubelet.stop(timeout=10)
        self.kubelet.start()
