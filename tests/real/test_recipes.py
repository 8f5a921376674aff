"""The recipes of the documentation, run by their text alone (tests/recipes)."""

import base64
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import time
import unittest
import urllib.request
import uuid
from pathlib import Path

from cases import RigCase, long_form
from deployed import DEPLOY, KUBELET_CONF, KUBELET_PEM, MANIFESTS, SERVER, Systemd, dist_file, pids_of, stop_everything
from figures import record, within
from recipe_runner import REPLACEMENTS, JoinedNode, Runner, TlsServer, documents, recipes
from rig import ADDRESSES, ADMIN_TOKENS, LOAD_BALANCER, PORT, REPOSITORY, Pki, Process, log, sh, wait_for, yaml
from rig_l4 import LoadBalancer

DISTRIBUTIONS = "deploy/distributions"
KUBEADM = os.environ.get("JACKSTAY_KUBEADM")


def admin(port, path):
    """The body of a response of the admin endpoint; raises unless its status is 200."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read()


def status(port=9643):
    return json.loads(admin(port, "/status"))


def clean_machine(rig):
    """Stops the node and the jackstay of other tests, and removes its configuration."""
    stop_everything(rig)
    shutil.rmtree("/etc/jackstay", ignore_errors=True)


def create_objects_of_kubeadm(rig):
    """What `kubeadm init` stores in the cluster, as far as `kubeadm join` and `kubeadm upgrade node` of a worker read it."""
    control, rbac = rig.control, "/apis/rbac.authorization.k8s.io/v1/namespaces"
    version = sh(KUBEADM, "version", "-o", "short").stdout.strip()
    ca = base64.b64encode(rig.pki.ca.read_bytes()).decode()
    maps = {
        ("kube-system", "kubeadm-config"): {
            "ClusterConfiguration": f"apiVersion: kubeadm.k8s.io/v1beta2\nkind: ClusterConfiguration\nkubernetesVersion: {version}\n"
                                    f"controlPlaneEndpoint: {LOAD_BALANCER}:6443\n",
            "ClusterStatus": "apiVersion: kubeadm.k8s.io/v1beta2\nkind: ClusterStatus\napiEndpoints: {}\n"},
        ("kube-system", f"kubelet-config-{version[1:].rpartition('.')[0]}"): {
            "kubelet": "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nrotateCertificates: true\n"},
        ("kube-public", "cluster-info"): {
            "kubeconfig": "apiVersion: v1\nkind: Config\nclusters:\n- name: ''\n  cluster:\n"
                          f"    certificate-authority-data: {ca}\n    server: https://{LOAD_BALANCER}:6443\n"}}
    for (namespace, name), data in maps.items():
        control.must("POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": name}, "data": data})
    control.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", {
        "metadata": {"name": "kubeadm:get-nodes"}, "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["nodes"]}]})
    control.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
        "metadata": {"name": "kubeadm:get-nodes"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kubeadm:get-nodes"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:bootstrappers:kubeadm:default-node-token"}]})
    for namespace, groups in (("kube-system", ("system:nodes", "system:bootstrappers:kubeadm:default-node-token")), ("kube-public", ("system:unauthenticated",))):
        control.must("POST", f"{rbac}/{namespace}/rolebindings", {
            "metadata": {"name": "kubeadm"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group} for group in groups]})


class Unit:
    """jackstay's unit under a real systemd, for recipes that install and enable it."""

    FILE = DEPLOY / "systemd/jackstay.service"

    ADDRESS = DEPLOY / "systemd/jackstay-address@.service"

    def __init__(self, rig):
        shutil.rmtree(rig.dir / "booted", ignore_errors=True)
        Path("/etc/systemd/system/jackstay.service").unlink(missing_ok=True)
        self.systemd = Systemd(rig, self.FILE, templates=[self.ADDRESS]).start()

    def handlers(self):
        def enable(unit):
            self.systemd.ctl("start", unit, check=True)
        return {"daemon-reload": self.reload, **{f"enable --now {name}": functools.partial(enable, name) for name in (
            "jackstay", f"jackstay-address@{LOAD_BALANCER}")}}

    def stop(self):
        self.systemd.stop()
        shutil.rmtree(self.systemd.dir)  # for the next one

    def reload(self):
        installed = [(file, Path("/etc/systemd/system") / file.name) for file in (self.FILE, self.ADDRESS)]
        if not any(path.exists() for _, path in installed):
            raise AssertionError("the recipe has installed no unit")
        for file, path in installed:
            if path.exists() and path.read_text() != file.read_text():
                raise AssertionError(f"the recipe has installed another {path.name}")
        self.systemd.ctl("daemon-reload", check=True)


class Worker(RigCase, unittest.TestCase):
    """Workers that have joined: kubeadm, Cluster API, Talos."""

    PAGE = f"{DISTRIBUTIONS}/kubeadm.md"

    @classmethod
    def prepare(cls):
        clean_machine(cls.rig)
        cls.load_balancer = LoadBalancer(cls.rig).start()
        cls.node = cls.rig.node = JoinedNode(cls.rig, f"https://{cls.load_balancer.address}:6443")
        for name, role in (("node-renewal", "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient"),):
            cls.rig.control.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
                "metadata": {"name": f"rig-{name}"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}]})
        cls.unit = Unit(cls.rig)
        cls.runner = Runner(cls.rig, "worker", {"restart kubelet": cls.node.restart_kubelet, **cls.unit.handlers()})
        begun = time.time()
        if KUBEADM:
            create_objects_of_kubeadm(cls.rig)
            cls.node.join(cls.runner)
        else:
            cls.node.start()
        wait_for("the node to be Ready without jackstay", lambda: cls.node.ready_since(begun), 90)

    @classmethod
    def tearDownClass(cls):
        cls.unit.stop()
        cls.runner.stop()
        stop_everything(cls.rig)
        cls.load_balancer.stop()

    def run_worker(self, name):
        files = [dist_file("jackstay"), dist_file("jackstay-image.tar"), DEPLOY / "static-pod/jackstay.yaml"]
        self.runner.run(self.PAGE, name, files)
        restarted = time.time()
        wait_for("the node to be Ready through jackstay", lambda: self.node.ready_since(restarted), 60)
        within(self, f"recipe kubeadm {name}: kubelet restarted to Ready", time.time() - restarted, "s", 30)
        self.require_kubelet_behind_jackstay()

    def require_kubelet_behind_jackstay(self):
        self.assertIn(f"server: {SERVER}", KUBELET_CONF.read_text())
        self.assertEqual(self.rig.faults.flows(self.node.kubelet.pid), {}, "kubelet has a connection that bypasses jackstay")

    def test_1_recipe_makes_the_node_ready_through_jackstay(self):
        self.run_worker("worker")
        identity, = status()["listeners"][0]["identities"]
        self.assertEqual((identity["state"], identity["error"]), ("loaded", None))

    @unittest.skipUnless(KUBEADM, "JACKSTAY_KUBEADM names no kubeadm")
    def test_2_kubeadm_upgrades_the_node_through_jackstay(self):
        """kubeadm uses `kubelet.conf` of a worker, so its requests go through jackstay, and leaves the file as it is."""
        before, begun = KUBELET_CONF.read_bytes(), time.time()
        output = self.node.kubeadm(self.runner, "upgrade", "node")
        self.assertIn("successfully updated", output)
        self.assertEqual(KUBELET_CONF.read_bytes(), before)
        self.assertGreater(Path("/var/lib/kubelet/config.yaml").stat().st_mtime, begun - 1)
        seen = self.rig.audit(lambda e: e.get("userAgent", "").startswith("kubeadm/") and e["user"]["username"] == f"system:node:{self.node.NAME}")
        self.assertTrue(seen, "no request of kubeadm with the node's identity")

    def test_3_kubelet_renews_its_certificate_through_jackstay(self):
        self.node.install_certificate(self.node.old_certificate())
        before = Pki.serial_of(KUBELET_PEM)
        begun = time.time()
        self.node.restart_kubelet()
        wait_for("another certificate", lambda: Pki.serial_of(KUBELET_PEM) != before, 60)
        serial = Pki.serial_of(KUBELET_PEM)
        wait_for("jackstay to use it", lambda: serial in json.dumps(status()).upper().replace(":", ""), 20)
        wait_for("the node to be Ready", lambda: self.node.ready_since(begun), 60)
        log(f"certificate {before} replaced by {serial} after {time.time() - begun:.1f} s")

    def test_3_local_ca_is_renewed(self):
        def serving_certificate():
            return ssl.get_server_certificate(("127.0.0.1", 7443))
        before = serving_certificate()
        self.runner.run(self.PAGE, "worker-renew", [dist_file("jackstay")])
        restarted = time.time()
        wait_for("another serving certificate", lambda: serving_certificate() != before, 20)
        wait_for("the node to be Ready through jackstay", lambda: self.node.ready_since(restarted), 60)
        self.require_kubelet_behind_jackstay()

    def test_4_regenerated_kubeconfig_needs_the_recipe_again(self):
        """As after `kubeadm reset` and `kubeadm join`: kubelet goes past jackstay until the recipe is repeated."""
        self.node.reset()
        self.node.write_kubeconfig(f"https://{self.load_balancer.address}:6443")
        self.node.kubelet.start()
        wait_for("kubelet to go past jackstay", lambda: "10.99.2.5:6443" in sh("ss", "-Htnp").stdout, 30)
        self.run_worker("worker-again")

    def test_5_revert_restores_the_kubeconfig(self):
        self.runner.run(self.PAGE, "worker-revert", [dist_file("jackstay")])
        restarted = time.time()
        self.assertIn(f"server: https://{self.load_balancer.address}:6443", KUBELET_CONF.read_text())
        wait_for("the node to be Ready without jackstay", lambda: self.node.ready_since(restarted), 60)
        wait_for("the pod to end", lambda: not pids_of(), 60)


    def test_6_talos_pod_runs_and_serves(self):
        patch, = documents(recipes.replace(recipes.text(DEPLOY / "distributions/talos.md", "machine"), REPLACEMENTS))
        file, = patch["machine"]["files"]
        self.assertTrue(file["path"].startswith("/var/"), "Talos refuses other paths")
        Path(file["path"]).parent.mkdir(parents=True, exist_ok=True)
        Path(file["path"]).write_text(file["content"])
        pod, = patch["machine"]["pods"]
        image = pod["spec"]["containers"][0]["image"]
        self.node.ctr("images", "tag", "--force", "localhost/jackstay:0.1.0", image)
        (MANIFESTS / "talos.yaml").write_text(json.dumps(pod))
        client = self.rig.api(SERVER, cert=self.rig.admin_cert, timeout=5)
        wait_for("an apiserver through the pod", lambda: client.get("/readyz").code == 200, 40)
        self.assertEqual(status()["listeners"][0]["mode"], "passthrough")
        (MANIFESTS / "talos.yaml").unlink()
        wait_for("the pod to end", lambda: not pids_of(), 60)

    def test_7_cluster_api_script_makes_the_node_ready(self):
        page = f"{DISTRIBUTIONS}/cluster-api.md"
        shutil.rmtree("/etc/jackstay")
        self.runner.run(page, "workload-cluster", [DEPLOY / "rbac/discovery.yaml"],
                        KUBECONFIG=str(self.rig.kubeconfig("workload", self.rig.server("c"), cert=self.rig.admin_cert)))
        template, = documents(recipes.text(DEPLOY / "distributions/cluster-api.md", "workers"))
        spec = template["spec"]["template"]["spec"]
        for file in spec["files"]:
            Path(file["path"]).parent.mkdir(parents=True, exist_ok=True)
            Path(file["path"]).write_text(file["content"])
        self.runner.run_script("the commands after kubeadm", "\n".join(spec["postKubeadmCommands"]), self.runner.directory("after-kubeadm"))
        restarted = time.time()
        wait_for("the node to be Ready through jackstay", lambda: self.node.ready_since(restarted), 60)
        self.require_kubelet_behind_jackstay()

        def endpoints():
            return {endpoint["address"] for endpoint in status()["upstreams"][0]["endpoints"] if not endpoint["fallback"]}
        wait_for("the discovered apiservers", lambda: endpoints() == {f"{address}:{PORT}" for address in ADDRESSES.values()}, 20)
        documents(recipes.text(DEPLOY / "distributions/cluster-api.md", "control-plane"))


# All apiservers of the rig are on one host: another host forwards to `c`, and a third does not answer.
OTHER_HOSTS = {"10.0.0.12": LOAD_BALANCER, "10.0.0.13": LOAD_BALANCER.replace(".5", ".6")}


def answering(rig, port, cert, count=20):
    """The apiservers that answer requests through a port of the loopback, each on a connection of its own."""
    agent = f"probe-{uuid.uuid4().hex[:8]}"
    api = rig.api(f"https://127.0.0.1:{port}", cert=cert, timeout=10)
    codes = {api.get("/api?timeout=5s", headers={"User-Agent": agent}).code for _ in range(count)}
    if codes != {200}:
        raise AssertionError(f"responses: {codes}")

    def audited():
        events = rig.audit(lambda e: e.get("userAgent") == agent and e["stage"] == "ResponseComplete")
        return events if len(events) == count else None
    return {event["server"] for event in wait_for("the audit logs", audited, 10)}


class ControlPlane(RigCase, unittest.TestCase):
    """A control-plane node: jackstay beside the apiserver `a`, as a unit of systemd, with kubelet behind it."""

    PAGE = f"{DISTRIBUTIONS}/control-plane-nodes.md"

    @classmethod
    def prepare(cls):
        clean_machine(cls.rig)
        cls.other_host = LoadBalancer(cls.rig).start()
        cls.node = cls.rig.node = JoinedNode(cls.rig, cls.rig.server("a"))
        shutil.copy(cls.rig.pki.ca_key, cls.node.pki_ca.with_name("ca.key"))
        cls.unit = Unit(cls.rig)
        cls.runner = Runner(cls.rig, "control-plane", {"restart kubelet": cls.node.restart_kubelet, **cls.unit.handlers()})
        begun = time.time()
        cls.node.start()
        wait_for("the node to be Ready without jackstay", lambda: cls.node.ready_since(begun), 90)

    @classmethod
    def tearDownClass(cls):
        cls.unit.stop()
        cls.runner.stop()
        stop_everything(cls.rig)
        cls.other_host.stop()

    def setUp(self):
        self.rig.recover()

    def servers(self):
        return answering(self.rig, 7443, self.rig.node_cert(self.node.NAME))

    def test_1_recipe_makes_the_node_ready_through_the_local_apiserver(self):
        files = [dist_file("jackstay"), Unit.FILE]
        self.runner.run(self.PAGE, "beside-apiserver", files, replacements=OTHER_HOSTS)
        self.runner.run(self.PAGE, "kubelet")
        restarted = time.time()
        wait_for("the node to be Ready", lambda: self.node.ready_since(restarted), 60)
        self.assertEqual(self.rig.faults.flows(self.node.kubelet.pid), {}, "kubelet has a connection that bypasses jackstay")
        self.assertEqual(self.servers(), {"a"})

    def test_2_local_apiserver_is_left_and_taken_again(self):
        self.rig.apiservers["a"].kill()
        killed = time.time()
        self.assertEqual(self.servers(), {"c"})
        wait_for("a heartbeat through another apiserver", lambda: self.node.lease_renewed_at() > killed + 1, 40)
        within(self, "control-plane node: local apiserver killed, lease renewed", time.time() - killed, "s", 5)
        self.assertTrue(self.rig.ready(self.node.NAME))
        self.rig.apiservers["a"].start()
        ready = time.time()
        wait_for("requests at the local apiserver alone", lambda: self.servers() == {"a"}, 60)
        within(self, "control-plane node: local apiserver ready, requests return", time.time() - ready, "s", 30)


    @unittest.skipUnless(KUBEADM, "JACKSTAY_KUBEADM names no kubeadm")
    def test_3_kubeadm_leaves_the_files_of_the_recipe(self):
        """Renewed certificates, and kubelet's kubeconfig, which kubeadm accepts because its CA is the cluster's."""
        config = self.rig.dir / "kubeadm.yaml"
        version = sh(KUBEADM, "version", "-o", "short").stdout.strip()
        config.write_text(
            "apiVersion: kubeadm.k8s.io/v1beta2\nkind: InitConfiguration\n"
            f"localAPIEndpoint: {{advertiseAddress: {ADDRESSES['a']}}}\nnodeRegistration: {{name: {self.node.NAME}, criSocket: /none}}\n---\n"
            f"apiVersion: kubeadm.k8s.io/v1beta2\nkind: ClusterConfiguration\nkubernetesVersion: {version}\ncontrolPlaneEndpoint: {LOAD_BALANCER}:6443\n")

        def kubeadm(*words):
            return sh(KUBEADM, *words, "--config", config).stdout
        kubeadm("init", "phase", "certs", "all")
        for name in ("admin", "controller-manager", "scheduler"):
            kubeadm("init", "phase", "kubeconfig", name)
        kept = [KUBELET_CONF, *sorted(path for path in Path("/etc/jackstay").iterdir())]
        renewed = [Path("/etc/kubernetes") / name for name in ("admin.conf", "controller-manager.conf", "scheduler.conf", "pki/apiserver.crt")]
        before = {path: path.read_bytes() for path in [*kept, *renewed]}
        kubeadm("certs", "renew", "all")
        self.assertIn("Using existing kubeconfig file", kubeadm("init", "phase", "kubeconfig", "kubelet"))
        self.assertEqual([path for path in kept if path.read_bytes() != before[path]], [])
        self.assertEqual([path for path in renewed if path.read_bytes() == before[path]], [])


class Kubespray(RigCase, unittest.TestCase):
    """The role for Kubespray, in a checkout that has only what the role meets there."""

    PAGE = "deploy/kubespray/README.md"
    CONFIG = Path("/etc/jackstay/jackstay.yaml")

    @classmethod
    def prepare(cls):
        clean_machine(cls.rig)
        # Kubespray's kubeconfigs name the local proxy from the start.
        cls.node = cls.rig.node = JoinedNode(cls.rig, "https://localhost:6443")
        cls.runner = Runner(cls.rig, "kubespray")
        cls.checkout = cls.runner.directory("checkout")
        for path in ("inventory/mycluster/group_vars/all", "roles/kubernetes/node/tasks"):
            (cls.checkout / path).mkdir(parents=True)
        (cls.checkout / "roles/kubernetes/node/tasks/main.yml").write_text("---\n- name: Install haproxy\n  debug:\n    msg: not here\n")
        (cls.checkout / "cluster.yml").write_text("---\n- hosts: kube_node\n  gather_facts: false\n  roles:\n    - kubernetes/node\n")
        (cls.checkout / "inventory/mycluster/hosts").write_text(
            "[all:vars]\nansible_connection=local\nansible_python_interpreter=/usr/bin/python3\nkube_manifest_dir=/etc/kubernetes/manifests\n"
            f"kube_apiserver_port={PORT}\nkube_apiserver_bind_address='::'\nbin_dir={cls.runner.bin}\n[kube_control_plane]\n"
            + "".join(f"{name} main_access_ip={address}\n" for name, address in ADDRESSES.items()) + "[kube_node]\nworker\na\n")
        repository = cls.runner.directory("repository")
        (repository / "target").mkdir()
        (repository / "deploy").symlink_to(DEPLOY)
        (repository / "target/dist").symlink_to(dist_file("jackstay").parent)
        cls.runner.run(cls.PAGE, "kubespray", directory=cls.checkout, JACKSTAY=str(repository))
        # Kubespray starts kubelet after it has written the static pods.
        cls.node.start()
        cls.node.kubelet.stop()

    @classmethod
    def tearDownClass(cls):
        cls.runner.stop()
        stop_everything(cls.rig)

    def play(self, *argv):
        """Runs ansible-playbook, and returns the numbers of its last line."""
        command = shlex.join([f"{os.environ['JACKSTAY_ANSIBLE']}/bin/ansible-playbook", "-i", "inventory/mycluster/hosts", "cluster.yml", *argv])
        output = self.runner.run_script(command, command, self.checkout, ANSIBLE_NOCOLOR="1", ANSIBLE_LOCAL_TEMP=str(self.runner.home), LC_ALL="C.UTF-8")
        return {key: int(number) for key, number in re.findall(r"(ok|changed|failed)=(\d+)", output.splitlines()[-2])} if "ok=" in output else output

    def test_1_syntax(self):
        self.play("--syntax-check")

    def test_2_control_plane_node_is_left_alone(self):
        self.assertEqual(self.play("--limit", "a")["changed"], 0)
        self.assertFalse(self.CONFIG.exists())

    def test_3_worker_is_ready_through_the_pod(self):
        begun = time.time()
        self.assertGreaterEqual(self.play("--limit", "worker")["changed"], 4)
        sh(dist_file("jackstay"), "check", "--config", self.CONFIG)
        self.node.kubelet.start()
        wait_for("the node to be Ready", lambda: self.node.ready_since(begun), 90)
        log(f"role applied and node Ready after {time.time() - begun:.1f} s")
        self.assertLessEqual(set(self.rig.faults.flows(self.node.kubelet.pid)), {"127.0.0.1"}, "kubelet has a connection that bypasses jackstay")
        listener, = status(8081)["listeners"]
        self.assertEqual((listener["mode"], [endpoint["address"] for endpoint in status(8081)["upstreams"][0]["endpoints"]]),
                         ("passthrough", [f"{address}:{PORT}" for address in ADDRESSES.values()]))

    def test_4_second_run_changes_nothing(self):
        self.assertEqual(self.play("--limit", "worker")["changed"], 0)

    @long_form("test_3: the port is free when the pod starts")
    def test_6_port_in_use_is_taken_when_it_is_free(self):
        """The proxy that had the port before may end after jackstay has started."""
        self.node.reset()
        with wait_for("the port", lambda: socket.create_server(("127.0.0.1", PORT)), 10):
            self.node.kubelet.start()
            self.play("--limit", "worker")
            time.sleep(10)
            self.assertFalse(self.rig.faults.flows(self.node.kubelet.pid).keys() - {"127.0.0.1"})
        freed = time.time()
        wait_for("the node to be Ready", lambda: self.node.ready_since(freed), 120)
        record("role for Kubespray: port free to Ready", time.time() - freed, "s")

    def test_5_lint(self):
        command = f"{os.environ['JACKSTAY_ANSIBLE']}/bin/ansible-lint --offline --nocolor roles/jackstay"
        self.runner.run_script(command, command, self.checkout, PATH=f"{os.environ['JACKSTAY_ANSIBLE']}/bin:{os.environ['PATH']}")


class Listeners(RigCase, unittest.TestCase):
    """Configurations without a kubelet: each is written by its recipe, and jackstay runs with it."""

    CONFIG = Path("/etc/jackstay/jackstay.yaml")

    @classmethod
    def prepare(cls):
        clean_machine(cls.rig)
        cls.runner = Runner(cls.rig, "listeners")
        cls.admin = cls.rig.kubeconfig("recipes-admin", cls.rig.server("a"), cert=cls.rig.admin_cert)
        ca = Path("/etc/kubernetes/pki/ca.crt")
        ca.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cls.rig.pki.ca, ca)

    @classmethod
    def tearDownClass(cls):
        cls.runner.stop()

    def setUp(self):
        self.rig.recover()

    def start(self, config=None, admin_port=9643):
        """Runs jackstay with a configuration, until the end of the test."""
        config = config or self.CONFIG
        number = len(list(self.rig.dir.glob("recipe-*.log")))
        process = Process(f"recipe-{number}", [dist_file("jackstay"), "run", "--config", config, "--admin", f"127.0.0.1:{admin_port}"],
                          self.rig.dir / f"recipe-{number}.log").start()
        self.addCleanup(process.stop, signal.SIGKILL)
        wait_for("jackstay to be ready", lambda: process.require_running() or admin(admin_port, "/readyz"), 20)

    def get(self, port, path="/readyz", **options):
        return self.rig.api(f"https://127.0.0.1:{port}", timeout=5, **{"cert": self.rig.admin_cert, **options}).get(path)

    def servers_of_held_connections(self, port):
        """The servers that take twelve connections, none of which is closed before all are open.

        The less loaded of two random servers takes each: one is left out in 1 of 50,000 runs. Of connections that are
        closed at once, any server may take all.
        """
        held = [self.rig.api(f"https://127.0.0.1:{port}", timeout=5) for _ in range(12)]
        try:
            return {client.get("/", keep=True).body.decode() for client in held}
        finally:
            for client in held:
                if client.kept:
                    client.kept.close()

    def second_port(self, page, recipe, port):
        """A recipe with another port beside the apiservers': all machines are used, and one of them may be down."""
        servers = {name: TlsServer(self.rig, name, port) for name in ADDRESSES}
        try:
            self.runner.run(page, recipe)
            self.start()
            self.assertEqual(self.get(7443).code, 200)
            self.assertEqual(self.servers_of_held_connections(port), set(ADDRESSES))
            servers.pop("b").stop()
            self.rig.apiservers["b"].kill()
            self.assertEqual(self.servers_of_held_connections(port), {"a", "c"})
            self.assertEqual([self.get(7443).code for _ in range(6)], [200] * 6)
        finally:
            for server in servers.values():
                server.stop()

    def test_k3s_and_rke2_agent(self):
        self.second_port(f"{DISTRIBUTIONS}/k3s-rke2.md", "agent", 9345)

    def test_konnectivity(self):
        self.second_port(f"{DISTRIBUTIONS}/konnectivity.md", "konnectivity", 8132)

    def test_pod_reads_through_the_loopback(self):
        """A client with what a pod has: a token, and the cluster's CA, with which it verifies 127.0.0.1."""
        self.runner.run(f"{DISTRIBUTIONS}/cilium-calico.md", "agents")
        self.start()
        token = self.rig.control.must("POST", "/api/v1/namespaces/default/serviceaccounts/default/token", {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})["status"]["token"]
        answer = self.get(7443, "/api/v1/namespaces/default/pods", cert=None, token=token)
        # RBAC refuses it by its name: it was authenticated.
        self.assertIn("system:serviceaccount:default:default", answer.json["message"])

    def test_loopback_port_of_the_apiserver(self):
        other_host = LoadBalancer(self.rig).start()
        self.addCleanup(other_host.stop)
        self.runner.run(f"{DISTRIBUTIONS}/control-plane-nodes.md", "loopback-6443", [dist_file("jackstay")], replacements=OTHER_HOSTS)
        self.start()
        self.assertEqual(answering(self.rig, PORT, self.rig.admin_cert), {"a"})
        self.rig.apiservers["a"].kill()
        self.assertEqual(answering(self.rig, PORT, self.rig.admin_cert), {"c"})
        self.rig.apiservers["a"].start()
        wait_for("the local apiserver alone", lambda: answering(self.rig, PORT, self.rig.admin_cert) == {"a"}, 30)

    def test_gateway_by_server_name(self):
        sh("ip", "addr", "add", f"{LOAD_BALANCER}/32", "dev", "rig0")
        self.addCleanup(sh, "ip", "addr", "del", f"{LOAD_BALANCER}/32", "dev", "rig0")
        name = "kubernetes.default.svc.cluster.local"
        gateway = self.rig.dir / "gateway.yaml"
        gateway.write_text(yaml({
            "state_dir": "", "upstreams": [{"name": "known", "endpoints": [f"{address}:{PORT}" for address in ADDRESSES.values()]},
                                           {"name": "unknown", "endpoints": ["127.0.0.1:9"]}],
            "listeners": [{"name": "gateway", "bind": [f"{LOAD_BALANCER}:443"], "mode": "passthrough", "upstream": "unknown",
                           "routes": [{"server_names": [name], "upstream": "known"}]}]}).lstrip("\n") + "\n")
        process = Process("gateway", [dist_file("jackstay"), "run", "--config", gateway, "--admin", "127.0.0.1:9744"], self.rig.dir / "gateway.log").start()
        self.addCleanup(process.stop, signal.SIGKILL)
        wait_for("the gateway", lambda: socket.create_connection((LOAD_BALANCER, 443), 1).close() or True, 10)
        self.CONFIG.parent.mkdir(exist_ok=True)
        for source, target in zip(self.rig.serving_cert, ("tls.crt", "tls.key")):
            shutil.copy(source, self.CONFIG.with_name(target))
        self.runner.run(f"{DISTRIBUTIONS}/cloud-load-balancers.md", "server-name")
        self.start()
        self.assertEqual(self.get(7443, "/api/v1/namespaces", cert=None, token=ADMIN_TOKENS["admin-0"]).code, 200)
        client = self.rig.kubeconfig("behind-gateway", "https://127.0.0.1:7444", cert=self.rig.admin_cert)
        self.assertEqual(self.rig.kubectl(client, f"--tls-server-name={name}", "get", "--raw", "/readyz").stdout, "ok")
        self.assertNotEqual(self.rig.kubectl(client, "--request-timeout=5s", "get", "--raw", "/readyz").returncode, 0)

    def test_load_balancer_address_on_the_node(self):
        unit = Unit(self.rig)
        self.addCleanup(unit.stop)
        self.runner.units = unit.handlers()
        self.runner.run(f"{DISTRIBUTIONS}/cloud-load-balancers.md", "address", [Unit.ADDRESS, DEPLOY / "systemd/jackstay-address"])
        client = self.rig.api(f"https://{LOAD_BALANCER}:{PORT}", cert=self.rig.admin_cert, timeout=3)
        self.rig.apiservers["a"].kill()
        self.assertEqual([client.get("/readyz").code for _ in range(4)], [200] * 4)
        unit.systemd.ctl("stop", f"jackstay-address@{LOAD_BALANCER}", check=True)
        with self.assertRaises(OSError):
            client.get("/readyz")

    def test_five_minutes(self):
        """The README's four lines, in a home directory that has only a kubeconfig."""
        (self.runner.home / ".kube").mkdir(exist_ok=True)
        shutil.copy(self.admin, self.runner.home / ".kube/config")
        script = recipes.script(REPOSITORY / "README.md", "five-minutes") + "kill $!\nwait $! || true\n"
        output = self.runner.run_script("README.md", script, self.runner.directory("five-minutes"))
        # Lines of jackstay's log may be in between.
        self.assertRegex(output, r"(?ms)^\+ kubectl --kubeconfig .*^(NAME|No resources found)")

    def test_beside_kubelet(self):
        directory = self.runner.directory("beside-kubelet")
        for source, name in ((self.rig.pki.ca, "ca.crt"), (self.rig.pki.ca_key, "ca.key")):
            shutil.copy(source, directory / name)
        KUBELET_PEM.parent.mkdir(parents=True, exist_ok=True)
        KUBELET_PEM.unlink(missing_ok=True)
        crt, key = self.rig.node_cert("beside")
        KUBELET_PEM.write_text(Path(crt).read_text() + Path(key).read_text())
        self.addCleanup(KUBELET_PEM.unlink)
        self.runner.run("deploy/README.md", "beside-kubelet", directory=directory)
        for name in ("tls.crt", "tls.key"):
            shutil.copy(directory / name, self.CONFIG.with_name(name))
        self.start()
        self.assertEqual(self.get(7443, cert=(crt, key)).code, 200)

    def test_interception_is_installed_and_removed(self):
        sh("ip", "route", "replace", f"{LOAD_BALANCER}/32", "dev", "rig0")
        self.addCleanup(sh, "ip", "route", "del", f"{LOAD_BALANCER}/32", "dev", "rig0", check=False)
        for name in ("install.sh", "remove.sh"):
            self.runner.program(name, f'exec {DEPLOY}/nftables/{name} "$@"')
        config = self.rig.dir / "intercepted.yaml"
        config.write_text(yaml({"state_dir": "", "upstreams": [{"name": "a", "endpoints": [f"{address}:{PORT}" for address in ADDRESSES.values()]}],
                                "listeners": [{"name": "i", "bind": ["127.0.0.1:7443", "[::1]:7443"], "mode": "passthrough", "transparent": True,
                                               "upstream": "a"}]}).lstrip("\n") + "\n")
        self.start(config)
        # The page's two commands, one after the other.
        commands = [line for line in recipes.script(DEPLOY / "nftables/README.md", "intercept", REPLACEMENTS).splitlines() if not line.startswith("#")]
        install, remove = commands
        api = self.rig.api(f"https://{LOAD_BALANCER}:{PORT}", cert=self.rig.admin_cert, timeout=3)
        directory = self.runner.directory("intercept")
        self.runner.run_script(install, install, directory)
        try:
            self.assertEqual(api.get("/readyz").code, 200)
        finally:
            self.runner.run_script(remove, remove, directory)
        self.assertNotIn("jackstay_lb", sh("nft", "list", "tables").stdout)


class Reader(unittest.TestCase):
    """tests/recipes/recipes.py."""

    PAGE = """# A page

<!-- recipe: one -->
```sh
echo 10.0.0.1 10.0.0.11 10.0.0.1:6443 x10.0.0.1
```

1. In a list:

   <!-- recipe: one, file: /etc/a/b.yaml -->
   ```yaml
   key:
     - value
   ```

<!-- not run: no such program -->
```sh
unknown
```

<!-- recipe: two, text -->
```yaml
a: b
```
"""

    def page(self, text):
        path = Path(os.environ["TMPDIR"]) / f"page-{uuid.uuid4().hex}.md"
        path.write_text(text)
        self.addCleanup(path.unlink)
        return path

    def test_script_has_the_blocks_of_one_recipe_in_order(self):
        page = self.page(self.PAGE)
        self.assertEqual(list(recipes.recipes(page)), ["one", "two"])
        lines = [line for line in recipes.script(page, "one", {"10.0.0.1": "A"}).splitlines() if not line.startswith("#")]
        self.assertEqual(lines, ["echo A 10.0.0.11 A:6443 x10.0.0.1", "mkdir -p /etc/a", "cat >/etc/a/b.yaml <<'RECIPE_END'", "key:", "  - value", "RECIPE_END"])
        self.assertEqual(recipes.text(page, "two"), "a: b\n")
        self.assertEqual(recipes.check(page), [])

    def test_check_finds_commands_without_a_mark_and_marks_without_a_block(self):
        self.assertEqual(len(recipes.check(self.page("```sh\ntrue\n```\n"))), 1)
        self.assertEqual(len(recipes.check(self.page("<!-- recipe: one -->\n\ntext\n"))), 1)

    def test_faulty_pages_are_refused(self):
        for text in ("```sh\ntrue\n", "<!-- recipe: one -->\n```yaml\na: b\n```\n", "<!-- recipe: one, run -->\n```sh\ntrue\n```\n"):
            with self.assertRaises(recipes.RecipeError):
                recipes.recipes(self.page(text))
        for name in ("two", "three"):
            with self.assertRaises(recipes.RecipeError):
                recipes.script(self.page(self.PAGE), name)


class Pages(unittest.TestCase):
    def test_every_command_has_a_mark(self):
        pages = [*sorted((DEPLOY / "distributions").glob("*.md")), *sorted((DEPLOY / "kubespray").glob("*.md")), DEPLOY / "README.md",
                 DEPLOY / "nftables/README.md", DEPLOY.parent / "README.md"]
        self.assertEqual([fault for page in pages for fault in recipes.check(page)], [])


def load_tests(loader, _tests, _pattern):
    suite = unittest.TestSuite()
    for case in (Reader, Pages, Listeners, Worker, ControlPlane, Kubespray):
        suite.addTests(loader.loadTestsFromTestCase(case))
    return suite
