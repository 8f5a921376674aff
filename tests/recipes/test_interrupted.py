"""Recipes that are interrupted: before each of their commands, and after the last one, an apiserver answers kubelet's
kubeconfig at once, and it does after a reboot with what is then on the disk.

`run` starts this in its own namespaces, with a machine on the other side of a link that takes the place of three apiservers
and a load balancer (nginx).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import unittest
from pathlib import Path

import node
import recipes
from node import DISK, IMAGES, KUBELET_CONF, LOGS, MANIFESTS, MOMENTS, Node

REPOSITORY = Path(__file__).resolve().parents[2]
# Another checkout, whose pages and role are tested.
PAGES = Path(os.environ.get("JACKSTAY_PAGES") or REPOSITORY)
DISTRIBUTIONS = "deploy/distributions"
SCRATCH = Path(os.environ.get("TMPDIR", "/tmp"))
PKI, PEM = SCRATCH / "pki", Path("/var/lib/kubelet/pki/kubelet-client-current.pem")
LOAD_BALANCER, APISERVERS = "10.0.0.5", ["10.0.0.11", "10.0.0.12", "10.0.0.13"]
PROGRAMS = SCRATCH / "bin"
# A recipe may call these; jackstay itself is found after the one that a recipe installs.
PATH = f"{PROGRAMS}:/usr/local/bin:{os.environ['PATH']}:/usr/sbin:/sbin:{SCRATCH}/jackstay"


# Recipes of the shape of others.
long_form = unittest.skipUnless(os.environ.get("JACKSTAY_LONG"), "JACKSTAY_LONG is not set")


def sh(*argv, **options):
    return subprocess.run(list(map(str, argv)), stdin=subprocess.DEVNULL, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options).stdout


def setUpModule():
    PKI.mkdir()
    os.chdir(PKI)
    for name, subject, extensions in (
            ("ca", "/CN=cluster", ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign"]),
            ("apiserver", "/CN=kube-apiserver", ["extendedKeyUsage=serverAuth", "subjectAltName=" + ",".join(
                [f"IP:{address}" for address in (LOAD_BALANCER, *APISERVERS, "127.0.0.1")] + ["DNS:kubernetes", "DNS:localhost"])]),
            ("node", "/O=system:nodes/CN=system:node:node-1", ["extendedKeyUsage=clientAuth", "keyUsage=digitalSignature"])):
        issuer = [] if name == "ca" else ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
        sh("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30", "-subj", subject, *issuer,
           *(word for extension in extensions for word in ("-addext", extension)), "-keyout", f"{name}.key", "-out", f"{name}.crt")
    start_cluster()
    for directory in (PROGRAMS, SCRATCH / "jackstay", MOMENTS, LOGS, node.RUNNING, Path("/run/jackstay")):
        directory.mkdir(parents=True, exist_ok=True)
    (SCRATCH / "jackstay/jackstay").symlink_to(node.JACKSTAY)
    for name in ("systemctl", "ctr", "moment"):
        (PROGRAMS / name).write_text(f'#!/bin/sh\nexec /usr/bin/python3 {REPOSITORY}/tests/recipes/node.py {name} "$@"\n')
        (PROGRAMS / name).chmod(0o755)


def start_cluster():
    """The apiservers and the load balancer, on a machine of their own."""
    keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    while os.readlink(f"/proc/{keeper.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    there = ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"]
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", keeper.pid)
    sh("ip", "addr", "add", "10.0.0.100/24", "dev", "eth0")
    sh("ip", "link", "set", "eth0", "up")
    for command in ("link set lo up", "link set eth0 up", *(f"addr add {address}/24 dev eth0" for address in (LOAD_BALANCER, *APISERVERS))):
        sh(*there, "ip", *command.split())
    listen = "".join(f"listen {address}:6443 ssl http2;\n" for address in (LOAD_BALANCER, *APISERVERS))
    (SCRATCH / "nginx.conf").write_text(f"""user root; daemon off; pid {SCRATCH}/nginx.pid; events {{}}
http {{
    access_log off;
    server {{
        {listen}
        ssl_certificate {PKI}/apiserver.crt; ssl_certificate_key {PKI}/apiserver.key;
        ssl_client_certificate {PKI}/ca.crt; ssl_verify_client optional;
        location = /whoami {{ return 200 $ssl_client_s_dn; }}
        location / {{ return 200 ok; }}
    }}
}}
""")
    subprocess.Popen([*there, "nginx", "-e", "stderr", "-c", SCRATCH / "nginx.conf"], stdin=subprocess.DEVNULL, stderr=open(SCRATCH / "nginx.log", "wb"))
    while subprocess.run(["curl", "-sk", "-o", "/dev/null", f"https://{APISERVERS[2]}:6443/"], check=False).returncode:
        time.sleep(0.05)


def write_kubeconfig(server):
    """`kubelet.conf` as kubelet writes it after its bootstrap."""
    KUBELET_CONF.write_text(f"""apiVersion: v1
clusters:
- cluster:
    certificate-authority: /etc/kubernetes/pki/ca.crt
    server: {server}
  name: default-cluster
contexts:
- context:
    cluster: default-cluster
    user: default-auth
  name: default-context
current-context: default-context
kind: Config
users:
- name: default-auth
  user:
    client-certificate: {PEM}
    client-key: {PEM}
""")


class Interrupted(unittest.TestCase):
    def setUp(self):
        self.node = Node()
        self.node.power_off()
        self.addCleanup(self.node.power_off)
        for directory in (*DISK, MOMENTS):
            node.empty(directory)
        for directory in (MANIFESTS, Path("/etc/kubernetes/pki"), PEM.parent):
            directory.mkdir(exist_ok=True)
        for name in ("ca.crt", "ca.key"):
            shutil.copy(PKI / name, "/etc/kubernetes/pki")
        pem = PEM.with_name("kubelet-client-1.pem")
        pem.write_text((PKI / "node.crt").read_text() + (PKI / "node.key").read_text())
        PEM.symlink_to(pem)
        write_kubeconfig(f"https://{LOAD_BALANCER}:6443")
        self.node.boot()
        self.directory = SCRATCH / f"node-{time.monotonic_ns()}"
        self.directory.mkdir()
        for path in (node.JACKSTAY, "deploy/static-pod/jackstay.yaml", *(f"deploy/systemd/{name}" for name in (
                "jackstay.service", "jackstay-address", "jackstay-address@.service"))):
            shutil.copy(REPOSITORY / path, self.directory)
        shutil.move(self.directory / Path(node.JACKSTAY).name, self.directory / "jackstay")
        (self.directory / "jackstay-image.tar").touch()

    def install_jackstay(self):
        """As a package or the image of a machine does."""
        shutil.copy(self.directory / "jackstay", "/usr/local/bin/jackstay")
        shutil.copy(self.directory / "jackstay.service", node.UNITS)

    def run_script(self, text, *argv):
        done = subprocess.run(argv or ["bash", "-euo", "pipefail", "-c", text], cwd=self.directory, env={**os.environ, "PATH": PATH}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 0, f"{text}\n{done.stdout}{self.logs()}")

    def run_recipe(self, page, name):
        self.run_script(recipes.script(PAGES / page, name))

    def logs(self):
        return "".join(f"-- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in LOGS.iterdir())

    def interrupt_recipe(self, page, name):
        self.interrupt(recipes.script(PAGES / page, name))

    def interrupt(self, script):
        """Runs a script with a moment before each command and one at its end, and reboots from each."""
        self.run_script(f"trap 'moment \"$BASH_COMMAND\"' DEBUG\n{script}\ntrap - DEBUG\nmoment the end")
        self.require_moments(at_least=2)

    def require_moments(self, at_least):
        moments = sorted(MOMENTS.iterdir())
        self.assertGreaterEqual(len(moments), at_least)
        failures, previous, reboots = [], None, 0
        for directory in moments:
            before = f"interrupted before `{(directory / 'command').read_text().splitlines()[0]}`: "
            now = (directory / "now").read_text()
            if now:
                failures.append(f"{before}kubelet's kubeconfig fails: {now}")
            disk = directory / "disk"
            if previous and subprocess.run(["diff", "-r", "--no-dereference", "-q", previous, disk], stdout=subprocess.DEVNULL, check=False).returncode == 0:
                continue
            previous, reboots = disk, reboots + 1
            self.node.power_off()
            node.load(disk)
            self.node.boot()
            error = self.node.wait_for_apiserver(8)
            if error:
                failures.append(f"{before}after a reboot kubelet's kubeconfig fails: {error}\n{self.logs()}")
        print(f"{len(moments)} moments, {reboots} reboots ... ", end="", file=sys.stderr, flush=True)
        self.assertEqual(failures, [], "\n".join(failures))

    # ---- kubeadm.md ----

    PAGE = f"{DISTRIBUTIONS}/kubeadm.md"

    def require_server(self, server):
        self.assertIn(f"server: {server}", KUBELET_CONF.read_text().replace('"', ""))

    def test_worker(self):
        self.interrupt_recipe(self.PAGE, "worker")
        self.require_server("https://127.0.0.1:7443")

    @long_form
    def test_worker_renew(self):
        self.run_recipe(self.PAGE, "worker")
        self.interrupt_recipe(self.PAGE, "worker-renew")

    def test_worker_revert(self):
        self.run_recipe(self.PAGE, "worker")
        self.interrupt_recipe(self.PAGE, "worker-revert")
        self.require_server(f"https://{LOAD_BALANCER}:6443")

    @long_form
    def test_worker_again(self):
        self.run_recipe(self.PAGE, "worker")
        self.node.power_off()
        node.empty(MANIFESTS)
        write_kubeconfig(f"https://{LOAD_BALANCER}:6443")
        self.node.boot()
        self.interrupt_recipe(self.PAGE, "worker-again")
        self.require_server("https://127.0.0.1:7443")

    # ---- other pages ----

    def test_control_plane_node(self):
        page = f"{DISTRIBUTIONS}/control-plane-nodes.md"
        self.interrupt(recipes.script(PAGES / page, "beside-apiserver") + recipes.script(PAGES / page, "kubelet"))
        self.require_server("https://127.0.0.1:7443")

    def test_cluster_api(self):
        self.install_jackstay()
        template = recipes.text(PAGES / f"{DISTRIBUTIONS}/cluster-api.md", "workers")
        body, = re.findall(r"(?ms)^ +content: \|\n(.*?)^ +joinConfiguration:", template)
        lines = [line[12:] for line in body.splitlines()]
        self.assertEqual(lines[:2], ["#!/bin/sh", "set -eu"])
        Path("/etc/jackstay").mkdir(exist_ok=True)
        self.interrupt("\n".join(lines[2:]))
        self.require_server("https://127.0.0.1:7443")

    def move_kubeconfig(self, path):
        """Gives kubelet's kubeconfig another path."""
        path = Path(path)
        path.parent.mkdir(exist_ok=True)
        shutil.move(KUBELET_CONF, path)
        KUBELET_CONF.symlink_to(path)

    @long_form
    def test_k0s(self):
        self.move_kubeconfig("/var/lib/k0s/kubelet.conf")
        self.interrupt_recipe(f"{DISTRIBUTIONS}/k0s.md", "k0s")
        self.require_server("https://127.0.0.1:7443")

    def test_eks(self):
        """nodeadm writes the kubeconfig at each boot, and kubelet's drop-in points it at jackstay again."""
        self.move_kubeconfig("/var/lib/kubelet/kubeconfig")
        self.node.before_kubelet = lambda: write_kubeconfig(f"https://{LOAD_BALANCER}:6443")
        self.interrupt_recipe(f"{DISTRIBUTIONS}/eks.md", "eks")
        self.require_server("https://127.0.0.1:7443")
        node.systemctl(["restart", "kubelet"])
        self.assertEqual(self.node.wait_for_apiserver(5), "")
        # Without jackstay kubelet starts with what nodeadm has written.
        self.node.power_off()
        (node.WANTS / "jackstay.service").unlink()
        self.node.boot()
        self.require_server(f"https://{LOAD_BALANCER}:6443")
        self.assertEqual(self.node.wait_for_apiserver(5), "")

    def test_load_balancer_address(self):
        self.install_jackstay()
        self.interrupt_recipe(f"{DISTRIBUTIONS}/cloud-load-balancers.md", "address")
        self.assertIn(LOAD_BALANCER, sh("ip", "addr", "show", "dev", "jackstay0"))

    @long_form
    def test_pages_that_write_a_configuration(self):
        self.install_jackstay()
        for page, name in (("k3s-rke2", "agent"), ("cilium-calico", "agents"), ("konnectivity", "konnectivity"), ("control-plane-nodes", "loopback-6443")):
            node.empty(MOMENTS)
            node.empty(Path("/etc/jackstay"))
            self.interrupt_recipe(f"{DISTRIBUTIONS}/{page}.md", name)

    def test_every_recipe_that_changes_a_node_is_interrupted(self):
        """A new recipe that points something at jackstay is added above."""
        tested = Path(__file__).read_text()
        pages = [*(PAGES / DISTRIBUTIONS).glob("*.md"), PAGES / "README.md", *(PAGES / "deploy").glob("*.md"), *(PAGES / "deploy/kubespray").glob("*.md")]
        for page in pages:
            for name, found in recipes.recipes(page).items():
                text = "".join(block.text for block in found)
                if re.search(r"--in-place|--renew|--revert|systemctl (restart|enable)|kubelet\.conf", text):
                    self.assertIn(f'"{name}"', tested, f"{page}: recipe {name}")


class Kubespray(Interrupted):
    """The role, from a node with Kubespray's nginx to one with jackstay, and a moment after each task."""

    def test_role(self):
        write_kubeconfig("https://localhost:6443")
        # In the form that `StaticPods` reads.
        proxy = f'["TCP-LISTEN:6443,bind=127.0.0.1,fork,reuseaddr", "TCP:{APISERVERS[0]}:6443"]'
        (MANIFESTS / "nginx-proxy.yml").write_text(f"spec:\n  containers:\n    - name: nginx-proxy\n      image: nginx\n      args: {proxy}\n")
        self.assertEqual(self.node.wait_for_apiserver(10), "")
        role = self.directory / "roles/jackstay"
        shutil.copytree(PAGES / "deploy/kubespray", role)
        tasks = role / "tasks/loadbalancer/jackstay.yml"
        parts = re.split(r"(?m)^(?=- name: )", tasks.read_text().removeprefix("---\n"))
        moments = [f"- name: Moment\n  ansible.builtin.command: moment after {re.findall('name: (.*)', part)[0]!r}\n\n" for part in parts if part.startswith("- ")]
        tasks.write_text("---\n" + "".join(part + (moments.pop(0) if part.startswith("- ") else "") for part in parts))
        (self.directory / "play.yml").write_text("- hosts: kube_node\n  gather_facts: false\n  roles: [jackstay]\n")
        (self.directory / "hosts").write_text(
            "[all:vars]\nansible_connection=local\nansible_python_interpreter=/usr/bin/python3\nkube_manifest_dir=/etc/kubernetes/manifests\n"
            f"kube_apiserver_port=6443\nkube_apiserver_bind_address='::'\nbin_dir={PROGRAMS}\nloadbalancer_apiserver_localhost=true\n"
            f"loadbalancer_apiserver_type=jackstay\njackstay_image_archive={self.directory}/jackstay-image.tar\n[kube_control_plane]\n"
            + "".join(f"a{number} ip={address}\n" for number, address in enumerate(APISERVERS)) + "[kube_node]\nworker\n")
        os.environ |= {"LC_ALL": "C.UTF-8", "ANSIBLE_LOCAL_TEMP": str(SCRATCH), "ANSIBLE_NOCOLOR": "1"}
        command = [f"{os.environ['JACKSTAY_ANSIBLE']}/bin/ansible-playbook", "-i", "hosts", "play.yml", "--limit", "worker"]
        self.run_script(shlex.join(command), *command)
        self.assertFalse((MANIFESTS / "nginx-proxy.yml").exists())
        self.require_moments(at_least=6)


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite([loader.loadTestsFromTestCase(Interrupted)])
    if os.environ.get("JACKSTAY_ANSIBLE"):
        suite.addTest(Kubespray("test_role"))
    return suite


if __name__ == "__main__":
    unittest.main(verbosity=2)
