"""The Helm chart on a real apiserver and a real node: accepted, installed, upgraded, refused, removed.

The node's pods have a network of their own (the CNI plug-in `bridge`), so that a pod off the host network is real, too.
"""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import unittest
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cases import RigCase
from deployed import DEPLOY, dist_file, pids_of, stop_everything
from kubernetes import RELEASE
from rig import ADDRESSES, ADMIN_TOKENS, IMAGE, NODE_IP, PORT, REPOSITORY, Jackstay, RealNode, log, sh, wait_for
from test_l4 import KUBE_PROXY, SERVICE

CHART = DEPLOY / "helm/jackstay"
NAMESPACE = "kube-system"
BALANCER, BALANCER_PORT = "10.99.0.100", 8443
LINK_LOCAL = "169.254.20.64"  # of deploy/pods.md
TOOLS = "jackstay.test/nft:1"
CHART_IMAGE = {"repository": "localhost/jackstay", "pullPolicy": "Never"}
# Kubernetes 1.29 and later has sidecar containers, which `transparent` needs.
HAS_SIDECARS = RELEASE is not None and tuple(map(int, RELEASE.version.split(".")[:2])) >= (1, 29)
# Custom resources of the Prometheus Operator, whose fields only the operator checks.
MONITORING = {"servicemonitors": "ServiceMonitor", "podmonitors": "PodMonitor", "prometheusrules": "PrometheusRule"}


def helm_program():
    """The path of helm; tests/real/run has filled the cache while it had the network."""
    return sh(REPOSITORY / "tests/chart/setup").stdout.strip() + "/helm"


class PodNode(RealNode):
    """The real node with a network for pods, and an image with nft."""

    def __init__(self, rig, server):
        super().__init__(rig, server)
        (self.dir / "cni-conf/10-loopback.conflist").write_text(json.dumps({"cniVersion": "0.3.1", "name": "pods", "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": {"type": "host-local", "subnet": "10.98.0.0/24", "dataDir": str(self.dir / "ipam"),
                                    "routes": [{"dst": "0.0.0.0/0"}]}}]}))

    def tools_image(self):
        """An archive of an image with busybox, and dash, nft and ip of this host with the libraries that they need. The shell of
        busybox would run its own `ip`, which knows no table above 255."""
        root = self.dir / "tools"
        shutil.rmtree(root, ignore_errors=True)
        (root / "rootfs/bin").mkdir(parents=True)
        files = {Path(shutil.which(name)): f"bin/{name}" for name in ("busybox", "dash", "nft", "ip")}
        for program in list(files):
            for library in re.findall(r"(/\S+) \(0x", sh("ldd", program, check=False).stdout):
                files[Path(library)] = library.lstrip("/")
        for source, target in files.items():
            (root / "rootfs" / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source.resolve(), root / "rootfs" / target)
        (root / "rootfs/bin/sh").symlink_to("dash")
        for name in ("cat", "sed", "grep", "sleep", "dirname"):
            (root / "rootfs/bin" / name).symlink_to("busybox")
        sh("tar", "-C", root / "rootfs", "--owner=0", "--group=0", "-cf", root / "layer.tar", ".")
        digest = sh("sha256sum", root / "layer.tar").stdout.split()[0]
        (root / "config.json").write_text(json.dumps({
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]}, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}))
        (root / "manifest.json").write_text(json.dumps([{"Config": "config.json", "RepoTags": [TOOLS], "Layers": ["layer.tar"]}]))
        sh("tar", "-C", root, "-cf", root / "image.tar", "config.json", "manifest.json", "layer.tar")
        return root / "image.tar"

    def start(self):
        super().start()
        for image in (dist_file("jackstay-image.tar"), self.tools_image()):
            self.ctr("images", "import", image)
        return self

    def stop(self):
        super().stop()
        for pid in [*pids_of("containerd-shim-runc-v2", None), *pids_of()]:
            os.kill(pid, signal.SIGKILL)
        wait_for("jackstay to exit", lambda: not pids_of(), 10)


class Chart(RigCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        rig = cls.rig
        stop_everything(rig)
        cls.helm_path = helm_program()
        cls.config = rig.kubeconfig("helm", rig.server("c"), cert=rig.admin_cert)
        for plural, kind in MONITORING.items():
            rig.control.must("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", {
                "metadata": {"name": f"{plural}.monitoring.coreos.com"}, "spec": {
                    "group": "monitoring.coreos.com", "scope": "Namespaced", "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                    "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {
                        "type": "object", "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}}}]}})
            wait_for(f"the resource {plural}", lambda: rig.control.get(f"/apis/monitoring.coreos.com/v1/{plural}").code == 200, 30)
        ca = Path("/etc/kubernetes/pki/ca.crt")
        ca.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(rig.pki.ca, ca)
        for address in (BALANCER, LINK_LOCAL):
            sh(DEPLOY / "systemd/jackstay-address", "add", address)
            cls.addClassCleanup(sh, DEPLOY / "systemd/jackstay-address", "remove", address)
        sh("ip", "route", "replace", "10.96.0.0/24", "dev", "rig0")
        sh("nft", "-f", "-", input=KUBE_PROXY)
        cls.addClassCleanup(sh, "nft", "delete", "table", "ip", "kube_proxy")
        cls.bridge_hooks("0")
        cls.node = rig.node = PodNode(rig, rig.server("c")).start()
        wait_for("the node to be Ready", lambda: rig.ready(RealNode.NAME), 90)
        rig.control.must("PATCH", f"/api/v1/nodes/{RealNode.NAME}", {"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}},
                         content_type="application/merge-patch+json")

    @classmethod
    def tearDownClass(cls):
        stop_everything(cls.rig)
        for plural in MONITORING:
            cls.rig.control.request("DELETE", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{plural}.monitoring.coreos.com")

    def helm(self, *argv, code=0, values=None, namespace=NAMESPACE):
        """Runs helm; `values` is a dict, or a file of the chart's folder `ci`."""
        if isinstance(values, dict):
            file = self.rig.dir / "values.json"
            file.write_text(json.dumps(values))
            values = file
        argv = [*argv, "--namespace", namespace, *(("--values", values) if values else ())]
        done = sh(self.helm_path, "--kubeconfig", self.config, *argv, env={**os.environ, "HOME": str(self.rig.dir / "home")}, check=False, timeout=120)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def values(self, **more):
        """Values of the load balancer in front of all apiservers."""
        return {"image": CHART_IMAGE, "apiservers": [f"{address}:{PORT}" for address in ADDRESSES.values()], **more,
                "loadBalancer": {"bind": [f"{BALANCER}:{BALANCER_PORT}", f"{LINK_LOCAL}:7444"], **more.get("loadBalancer", {})}}

    def pods(self, component, namespace=NAMESPACE):
        return self.rig.control.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector=app.kubernetes.io%2Fcomponent%3D{component}").json["items"]

    def daemon_set(self, component, namespace=NAMESPACE):
        return self.rig.control.get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/jackstay-{component}").json

    def bind(self, pods):
        """Binds pods to the node: the rig has no scheduler."""
        for pod in pods:
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            if not pod["spec"].get("nodeName"):
                self.rig.control.request("POST", f"/api/v1/namespaces/{namespace}/pods/{name}/binding", {
                    "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": RealNode.NAME}})

    def helm_test(self, code=0):
        """Runs `helm test` and returns its output."""
        def is_done():
            self.bind(self.rig.control.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io%2Fname%3Djackstay-test").json["items"])
            return running.done()
        with ThreadPoolExecutor() as pool:
            running = pool.submit(self.helm, "test", "jackstay", "--logs", code=code)
            wait_for("the end of helm test", is_done, 120)
        return running.result().stdout

    def rolled_out(self, component, namespace=NAMESPACE):
        """Waits until the current pod of a component is Ready and the only one; returns it."""
        def one_ready():
            # Read before the pods: its status may count a pod that is created after they were read.
            found = self.daemon_set(component, namespace)
            pods = self.pods(component, namespace)
            self.bind(pods)
            state = found["status"]
            current = state.get("observedGeneration") == found["metadata"]["generation"] and state.get("updatedNumberScheduled") == 1
            ready = [pod for pod in pods if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))]
            return len(pods) == len(ready) == 1 and current and "deletionTimestamp" not in ready[0]["metadata"] and ready[0]
        return wait_for(f"the pod of {component}", one_ready, 90)

    def nodes_through(self, port=BALANCER_PORT):
        """Whether kubectl gets the nodes through the load balancer's address, which the apiservers' certificates do not contain."""
        client = self.rig.kubeconfig("balanced", f"https://{BALANCER}:{port}", cert=self.rig.admin_cert)
        return RealNode.NAME in self.rig.kubectl(client, "--tls-server-name=kubernetes", "--request-timeout=5s", "get", "nodes").stdout

    @staticmethod
    def status(port):
        return json.loads(sh("curl", "-sS", "--max-time", "5", f"http://{NODE_IP}:{port}/status").stdout)

    def test_1_apiserver_accepts_every_object(self):
        """Server-side dry run with strict validation of every set of values."""
        for values in sorted((CHART / "ci").glob("*-values.yaml")):
            with self.subTest(values.name):
                reduced = () if HAS_SIDECARS else ("--set", "transparent.enabled=false,loadBalancer.service.internalTrafficPolicy=Cluster")
                # A pod is admitted only if its ServiceAccount exists: those of `helm test` are created by test_3.
                rendered = self.helm("template", "jackstay", CHART, "--skip-tests", "--kube-version", RELEASE.version, *reduced, values=values).stdout
                done = self.rig.kubectl(self.config, "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=rendered)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout.count("(server dry run)"), len(re.findall("^kind: ", rendered, re.M)), done.stdout)
                log(f"{values.name}: {done.stdout.count('(server dry run)')} objects accepted")

    def test_2_installed_load_balancer_survives_two_apiservers(self):
        installed = self.helm("install", "jackstay", CHART, values=self.values())
        self.assertIn("needs kubelet's key", installed.stdout)
        pod = self.rolled_out("load-balancer")
        self.assertTrue(pod["spec"]["hostNetwork"])
        pid, = pids_of()
        confined = Path(f"/proc/{pid}/status").read_text()
        self.assertRegex(confined, r"Uid:\t65532\t65532\t65532\t65532\nGid:\t65532")
        self.assertRegex(confined, r"CapPrm:\t0{16}\n(.*\n)*CapBnd:\t0{16}\n")
        self.assertTrue(self.nodes_through())
        for apiserver in "ab":
            self.rig.apiservers[apiserver].kill()
        wait_for("a response of the last apiserver", self.nodes_through, 10)
        self.rig.recover()

    def test_3_upgrade_with_changed_configuration_rolls(self):
        before = self.rolled_out("load-balancer")
        changed = self.values(loadBalancer={"bind": [f"{BALANCER}:{BALANCER_PORT}", f"{BALANCER}:8444", f"{LINK_LOCAL}:7444"], "config": {"log": {"level": "warn"}}})
        self.helm("upgrade", "jackstay", CHART, values=changed)
        after = self.rolled_out("load-balancer")
        self.assertNotEqual(after["metadata"]["uid"], before["metadata"]["uid"])
        self.assertTrue(self.nodes_through(8444))
        # The same values again change nothing.
        self.helm("upgrade", "jackstay", CHART, values=changed)
        self.assertEqual(self.rolled_out("load-balancer")["metadata"]["uid"], after["metadata"]["uid"])
        # `helm test` connects through the load balancer: it fails for a name that the apiservers' certificates lack.
        self.helm("upgrade", "jackstay", CHART, values={**changed, "test": {"serverName": "other.example.com"}})
        self.assertIn("other.example.com", self.helm_test(code=1))
        self.helm("upgrade", "jackstay", CHART, values=changed)
        self.assertRegex(self.helm_test(), r"Phase:\s+Succeeded")
        self.assertEqual(self.rolled_out("load-balancer")["metadata"]["uid"], after["metadata"]["uid"])

    def test_4_wrong_values_change_nothing(self):
        def state():
            history = json.loads(self.helm("history", "jackstay", "--output", "json").stdout)
            return self.daemon_set("load-balancer")["metadata"]["generation"], self.rolled_out("load-balancer")["metadata"]["uid"], len(history)
        before = state()
        for values, message in (
                (self.values(apiservers="10.99.0.11:6443"), "at '/apiservers': got string, want array"),
                (self.values(loadBalancer={"config": {"upstream": []}}), "at '/loadBalancer/config': additional properties 'upstream' not allowed"),
                (self.values(apiservers=[]), "apiservers: at least one address of an apiserver is required")):
            self.assertIn(message, self.helm("upgrade", "jackstay", CHART, code=1, values=values).stderr)
        self.assertEqual(state(), before)
        self.assertTrue(self.nodes_through())

    def pod_network(self):
        """A pod off the host network; returns the command that runs a program in its network namespace."""
        name = f"client-{uuid.uuid4().hex[:6]}"
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.rig.control.must("POST", "/api/v1/namespaces/default/pods", {"metadata": {"name": name}, "spec": {
            "nodeName": RealNode.NAME, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1, "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "1000000"]}]}})
        self.addCleanup(self.rig.control.request, "DELETE", path)
        address = wait_for("the pod's address", lambda: self.rig.control.get(path).json["status"].get("podIP"), 60)
        self.assertTrue(address.startswith("10.98.0."), address)
        pid = wait_for("the pod's process", lambda: max(pids_of("sleep", b"1000000"), default=None), 30)
        return ["nsenter", f"--net=/proc/{pid}/ns/net"]

    def kubectl_in(self, pod, server, *flags, token=None):
        """Whether kubectl in a pod's network gets the nodes from a server, with a token or a certificate."""
        config = self.rig.kubeconfig("in-pod", server, cert=None if token else self.rig.admin_cert, token=token)
        done = sh(*pod, *self.rig.kubectl_argv(config, "--request-timeout=5s", *flags, "get", "nodes"), env=self.rig.kubectl_env(), check=False)
        return RealNode.NAME in done.stdout

    def intercepting(self, variant):
        """Values with all components; the apiservers other than b are to be discovered."""
        return self.values(
            apiservers=[f"{ADDRESSES['b']}:{PORT}"], discovery={"enabled": True}, loadBalancer={"admin": {"address": "hostIP"}},
            transparent={"enabled": True, "variant": variant, "admin": {"address": "hostIP"},
                         "image": {"repository": TOOLS.partition(":")[0], "tag": "1", "pullPolicy": "Never"}},
            metrics={"podMonitor": {"enabled": True}}, prometheusRule={"enabled": True}, dashboards={"enabled": True})

    @staticmethod
    def bridge_hooks(value):
        """Sets whether packets on bridges pass nftables before they are received; 1 is usual on nodes."""
        Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text(value)

    @staticmethod
    def rules():
        return sh("nft", "list", "table", "inet", "jackstay_service", check=False).stdout

    @unittest.skipUnless(HAS_SIDECARS, "transparent.enabled needs Kubernetes 1.29")
    def test_5_transparent_intercepts_a_pod(self):
        """Connections of a pod to the Service go through jackstay, also with the last apiserver, and past it while it
        does not run. Discovery completes the set of apiservers."""
        self.helm("upgrade", "jackstay", CHART, values=self.intercepting("service-tproxy"))
        self.rolled_out("load-balancer")
        self.rolled_out("transparent")
        for port in (9644, 9645):
            wait_for("the discovered apiservers", lambda: {e["address"] for e in self.status(port)["upstreams"][0]["endpoints"]}
                     == {f"{address}:{PORT}" for address in ADDRESSES.values()}, 30)
        pod = self.pod_network()

        def flows():
            text = sh("curl", "-sS", f"http://{NODE_IP}:9645/metrics").stdout
            return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(("jackstay_passthrough_closed_total", "jackstay_passthrough_connections")))

        def through_jackstay():
            before = flows()
            return self.kubectl_in(pod, f"https://{SERVICE}:443") and flows() > before
        self.assertIn("jackstay_service", self.rules())
        self.assertTrue(through_jackstay())
        # Two apiservers are lost, kube-proxy's among them.
        for apiserver in "ac":
            self.rig.faults.drop_address(ADDRESSES[apiserver])
        wait_for("a response of the last apiserver", lambda: self.kubectl_in(pod, f"https://{SERVICE}:443"), 15)
        self.rig.recover()

        def pid():
            return next((pid for pid in pids_of() if "Uid:\t0\t" in Path(f"/proc/{pid}/status").read_text()), None)
        # kubelet restarts the container at once; after the second kill only after 10 s.
        first = pid()
        os.kill(first, signal.SIGKILL)
        os.kill(wait_for("a new process", lambda: pid() != first and pid(), 30), signal.SIGKILL)
        killed = time.monotonic()
        wait_for("the rules' removal", lambda: not self.rules(), 5, pause=0.02)
        log(f"rules removed {time.monotonic() - killed:.2f} s after SIGKILL of jackstay")
        self.assertTrue(self.kubectl_in(pod, f"https://{SERVICE}:443"), "past jackstay")
        self.assertFalse(self.rules())
        wait_for("the rules' return", self.rules, 60)
        wait_for("interception", through_jackstay, 30)
        self.bridge_hooks("1")
        wait_for("the rules' removal, since TPROXY would fail", lambda: not self.rules(), 5)
        self.assertTrue(self.kubectl_in(pod, f"https://{SERVICE}:443"), "with service-tproxy on a bridge")
        self.helm("upgrade", "jackstay", CHART, values=self.intercepting("service-redirect"))
        self.rolled_out("transparent")
        self.assertIn("redirect to :7453", self.rules())
        self.assertTrue(through_jackstay(), "service-redirect")

    def test_6_pods_reach_the_listener_and_the_service_pods(self):
        """A pod reaches the load balancer's and a link-local address of its node, and jackstay in a pod off the host network."""
        pod = self.pod_network()
        for server in (f"https://{BALANCER}:{BALANCER_PORT}", f"https://{LINK_LOCAL}:7444"):
            self.assertTrue(self.kubectl_in(pod, server, "--tls-server-name=kubernetes"), server)
        # A name of the certificates with the listener's address, as by hostAliases.
        name = "kubernetes.default.svc:7444"
        crt, key = self.rig.admin_cert
        version = sh(*pod, "curl", "-sS", "--max-time", "5", "--cacert", self.rig.pki.ca, "--cert", crt, "--key", key,
                     "--resolve", f"{name}:{LINK_LOCAL}", f"https://{name}/version").stdout
        self.assertEqual(json.loads(version), self.rig.control.get("/version").json)
        # L7 with a certificate of the cluster's CA, for a client with a token.
        serving = self.rig.pki.issue("jackstay-for-pods", "/CN=jackstay", ["kubernetes.default.svc"])

        def listen(config):
            config["listeners"][0].update(bind=[f"{LINK_LOCAL}:7445"], tls={"cert_file": serving[0], "key_file": serving[1]})
        terminating = Jackstay(self.rig, [], adapt=listen, log_name="jackstay-for-pods", admin=9646).start()
        self.addCleanup(terminating.process.stop, signal.SIGKILL)
        self.assertTrue(self.kubectl_in(pod, f"https://{LINK_LOCAL}:7445", "--tls-server-name=kubernetes.default.svc", token=ADMIN_TOKENS["admin-0"]))
        self.assertGreater(terminating.total("jackstay_requests_total"), 0)
        # A namespace that admits only confined pods: no host network, no host path, not root.
        namespace = "confined"
        self.rig.control.must("POST", "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
        self.addCleanup(self.rig.control.request, "DELETE", f"/api/v1/namespaces/{namespace}")
        inside = {
            "image": CHART_IMAGE, "apiservers": [f"{address}:{PORT}" for address in ADDRESSES.values()], "fullnameOverride": "jackstay",
            "ca": {"configMap": "kube-root-ca.crt"}, "loadBalancer": {
                "hostNetwork": False, "bind": ["0.0.0.0:8443"], "service": {"enabled": True}, "networkPolicy": {"enabled": True}}}
        self.helm("install", "inside", CHART, namespace=namespace, values=inside)
        # The pod of `helm test`, which the namespace admits, too.
        rendered = self.helm("template", "inside", CHART, "--show-only", "templates/tests/connection.yaml", namespace=namespace, values=inside).stdout
        admitted = self.rig.kubectl(self.config, "apply", "--dry-run=server", "--validate=strict", "-f", "-", input=rendered)
        self.assertEqual((admitted.returncode, "test-load-balancer" in admitted.stdout), (0, True), admitted.stderr)
        self.addCleanup(self.helm, "uninstall", "inside", namespace=namespace)
        serving = self.rolled_out("load-balancer", namespace)
        self.assertTrue(serving["status"]["podIP"].startswith("10.98.0."))
        self.assertTrue(self.kubectl_in(pod, f"https://{serving['status']['podIP']}:8443", "--tls-server-name=kubernetes.default.svc"))
        slices = f"/apis/{RELEASE.discovery_api}/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Djackstay-load-balancer"

        def endpoints():
            return [(e["addresses"], port["port"]) for one in self.rig.control.get(slices).json["items"] for e in one["endpoints"] or [] for port in one["ports"]]
        self.assertEqual(wait_for("the Service's endpoints", endpoints, 10), [([serving["status"]["podIP"]], 8443)])

    def test_7_uninstall_removes_everything(self):
        """No object, process or rule is left, and no connection to the Service is refused meanwhile: the rules are removed before
        jackstay stops to listen."""
        self.assertEqual(bool(self.rules()), HAS_SIDECARS, "the interception of test_5")
        results, ended = [], threading.Event()

        def connect():
            while not ended.wait(0.005):
                try:
                    socket.create_connection((SERVICE, 443), 5).close()
                    results.append(None)
                except OSError as error:
                    results.append(error)
        client = threading.Thread(target=connect)
        client.start()
        try:
            self.helm("uninstall", "jackstay")
            wait_for("the pods' end", lambda: not self.pods("load-balancer") and not self.pods("transparent"), 60)
        finally:
            ended.set()
            client.join()
        self.assertGreater(len(results), 50)
        self.assertEqual([error for error in results if error], [])
        log(f"{len(results)} connections to the Service during the removal")
        wait_for("the processes' end", lambda: not pids_of(), 10)
        self.assertEqual(self.rules(), "")
        self.assertNotRegex(sh("ip", "rule").stdout, "0x306c")
        for kinds in ("daemonset,configmap,service,serviceaccount,pod,secret", "role,rolebinding", ",".join(MONITORING)):
            left = self.rig.kubectl(self.config, "get", kinds, "--all-namespaces", "--selector=app.kubernetes.io/instance=jackstay", "-o", "name")
            self.assertEqual((left.returncode, left.stdout), (0, ""), left.stderr)
        self.assertEqual(json.loads(self.helm("list", "--all-namespaces", "--output", "json").stdout), [])
