"""kubelet, kube-controller-manager, kube-scheduler and kube-proxy with CBOR, behind jackstay, in ten minutes of faults."""

import itertools
import json
import re
import signal
import time
import unittest
from collections import Counter

from cases import long_form
from deployed import stop_everything
from extra import ExtraCase
from figures import within
from kubernetes import RELEASE
from matrix import covers
from readme import write_rows
from rig import DETECTORS, IMAGE, WATCH_ERRORS, NodeMonitor, RealNode, client_errors, log, log_lines, sh, wait_for
from settings import Settings
from test_cbor import CBOR, needs_cbor

CONTENT_TYPE, SCHEDULER = "application/cbor", "scheduler-with-cbor"
# `round_trippers` logs the headers of each request and response.
LOGGING = ["--v=2", "--vmodule=reflector=4,round_trippers=8"]
# The components take the gates of client-go from their own flag, and ignore KUBE_FEATURE_….
GATES = ("ClientsAllowCBOR", "ClientsPreferCBOR")
FLAG, GATED = "--feature-gates=" + ",".join(f"{gate}=true" for gate in GATES), {gate: True for gate in GATES}
# The content types of watches.
ENCODINGS = {"application/cbor-seq": "CBOR", "application/vnd.kubernetes.protobuf;stream=watch": "protobuf", "application/json": "JSON"}
COMPONENTS = ("kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy")
HEAD = f"| begins with | faults | {' | '.join(COMPONENTS)} |\n|---|---|{'---|' * len(COMPONENTS)}\n"
# A renewal in flight to a stopped apiserver waits until that is detected.
LEADER = {"lease-duration": "40s", "renew-deadline": "30s"}


class Node(RealNode):
    """A kubelet that asks for CBOR."""

    def kubelet_config(self):
        return {**super().kubelet_config(), "contentType": CONTENT_TYPE, "featureGates": GATED}

    def kubelet_flags(self):
        return [*super().kubelet_flags(), *LOGGING]


class Components:
    """The components of a cluster with CBOR, which use one server. Without a content type, each has its own default: protobuf."""

    def __init__(self, rig, server, credentials):
        self.rig, self.server = rig, server
        config = {name: rig.kubeconfig(f"cbor-{name}", server, cert=cert) for name, cert in credentials.items()}
        self.node = Node(rig, server)
        self.controllers = self.process("kube-controller-manager", [
            FLAG, f"--kubeconfig={config['kube-controller-manager']}", f"--kube-api-content-type={CONTENT_TYPE}",
            f"--service-account-private-key-file={rig.sa_key}", f"--root-ca-file={rig.pki.ca}", "--use-service-account-credentials",
            "--allocate-node-cidrs", "--cluster-cidr=10.97.0.0/16", "--bind-address=127.0.0.1",
            "--leader-elect=true", *(f"--leader-elect-{key}={value}" for key, value in LEADER.items())])
        self.scheduler = self.process("kube-scheduler", [FLAG, "--bind-address=127.0.0.1", self.config("kube-scheduler", {
            "apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(config["kube-scheduler"]), "contentType": CONTENT_TYPE},
            "profiles": [{"schedulerName": SCHEDULER}],  # not for the pods of other tests, of which no image exists
            "leaderElection": {"leaderElect": True, "leaseDuration": LEADER["lease-duration"], "renewDeadline": LEADER["renew-deadline"]}})])
        self.proxy = self.process("kube-proxy", [self.config("kube-proxy", {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "featureGates": GATED,
            "clientConnection": {"kubeconfig": str(config["kube-proxy"]), "contentType": CONTENT_TYPE},
            "hostnameOverride": RealNode.NAME, "mode": "iptables", "clusterCIDR": "10.97.0.0/16",
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "healthzBindAddress": "127.0.0.1:10256", "metricsBindAddress": "127.0.0.1:10249"})])

    def config(self, name, content):
        file = self.rig.dir / f"cbor-{name}.json"
        file.write_text(json.dumps(content))
        return f"--config={file}"

    def process(self, name, argv):
        return self.rig.run(f"cbor-{name}", [RELEASE.program(name), *argv, *LOGGING], env=DETECTORS)

    def all(self):
        return [self.node.kubelet, self.controllers, self.scheduler, self.proxy]

    def stop(self):
        self.node.stop()
        for process in (self.controllers, self.scheduler, self.proxy):
            process.stop(signal.SIGKILL)


def short(process):
    return process.name.removeprefix("cbor-")


def caches(process):
    """The types of the lists that reflectors have begun."""
    return re.findall(r'reflector\.go:\d+\] "?Listing and watching"? (?:type=)?"?([^\s"]+)', process.logfile.read_text(errors="replace"))


def responses(process):
    """The content type of each response, by its Audit-Id."""
    text = process.logfile.read_text(errors="replace")
    blocks = re.findall(r'round_trippers\.go:\d+\] "Response" status="200 OK" headers=<\n(.*?)\n >', text, re.S)
    headers = [dict(line.strip().split(": ", 1) for line in block.splitlines()) for block in blocks]
    return {header["Audit-Id"]: header.get("Content-Type", "") for header in headers if "Audit-Id" in header}


@needs_cbor
@long_form("test_encodings has the faults; one of five short runs listed 14 resources again after the first SIGKILL, and the cause is not known")
@covers("`CBORServingAndStorage`", "`ClientsAllowCBOR`, `ClientsPreferCBOR`: kubelet, kube-controller-manager, kube-scheduler, kube-proxy")
class CborComponents(ExtraCase, unittest.TestCase):
    """Caches that depend on watches in CBOR notice none of the faults: no watch ends with an error, and nothing is listed again."""

    SETTINGS = {name: Settings(features=(CBOR,)) for name in "def"}
    KILLED = "de"  # f keeps its history, which watches need that have received nothing since the start of d and e
    SECONDS = 195
    LISTENER = 7520

    @classmethod
    def prepare(cls):
        stop_everything(cls.rig)
        cls.rig.controller.stop(signal.SIGKILL)
        cls.addClassCleanup(cls.rig.controller.start)
        super().prepare()
        cls.components = Components(cls.rig, cls.server, cls.credentials)
        cls.addClassCleanup(cls.components.stop)
        cls.components.node.start()
        cls.namespace = cls.rig.load_namespace()

    @classmethod
    def identities(cls):
        users = {"kube-controller-manager", "kube-scheduler", "kube-proxy"}
        cls.credentials = {name: cls.rig.pki.issue(f"cbor-{name}", f"/CN=system:{name}") for name in users}
        return [*super().identities(), *cls.credentials.values(), cls.rig.node_cert(RealNode.NAME)]

    def victim(self, kind, names="def"):
        """The apiserver with most watches."""
        watches = {name: self.endpoints()[name]["watches"] for name in names}
        name = max(watches, key=watches.get)
        self.affected[kind] = self.affected.get(kind, 0) + watches[name]
        log(f"    {kind} of {name} with {watches[name]} watches")
        return self.rig.extra[name]

    def flows(self, kind, **options):
        self.affected[kind] = self.affected.get(kind, 0) + sum(endpoint["watches"] for endpoint in self.endpoints().values())
        log(f"    {kind}")
        self.rig.faults.drop_flows(self.jackstay.pid, **options)

    def kinds(self):
        drop = self.rig.faults.drop_address
        return {
            "SIGKILL": lambda kind: self.victim(kind, self.KILLED).kill(),
            "graceful restart": lambda kind: self.victim(kind, self.KILLED).restart(),
            "flows dropped in input": lambda kind: self.flows(kind, hooks=("input",)),
            "SIGSTOP": lambda kind: self.victim(kind).pause(),
            "all packets dropped": lambda kind: drop(self.victim(kind).address),
            "flows dropped in output": lambda kind: self.flows(kind, hooks=("output",)),
            "packets dropped in one direction": lambda kind: drop(self.victim(kind).address, hooks=("input",), directions=("from",)),
        }

    def create_objects(self, number):
        """A deployment, of which a controller, the scheduler and kubelet make a running pod, and a service, for which
        kube-proxy writes rules when the pod is ready."""
        control, labels = self.rig.control, {"app": f"app-{number}"}
        control.must("POST", f"/apis/apps/v1/namespaces/{self.namespace}/deployments", {
            "metadata": {"name": f"app-{number}"}, "spec": {
                "replicas": 1, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {
                    "schedulerName": SCHEDULER, "hostNetwork": True, "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
                    "containers": [{"name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "1000000"]}]}}}})
        control.must("POST", f"/api/v1/namespaces/{self.namespace}/services", {
            "metadata": {"name": f"service-{number}"}, "spec": {"clusterIP": self.address(number), "selector": labels, "ports": [{"port": 80}]}})

    @staticmethod
    def address(number):
        return f"10.96.0.{100 + number}"

    def pods(self, number):
        return self.rig.control.must("GET", f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=app%3Dapp-{number}")["items"]

    def wait_for_objects(self, number):
        wait_for(f"the pod of deployment {number}", lambda: [pod["status"]["phase"] for pod in self.pods(number)] == ["Running"], 60)
        rule = rf"-A KUBE-SERVICES -d {re.escape(self.address(number))}/32 .*-j KUBE-SVC-"
        wait_for(f"the rules of service {number}", lambda: re.search(rule, sh("iptables-save", "-t", "nat").stdout), 60)

    def delete_objects(self, number):
        """The garbage collector deletes what the deployment has made."""
        for path in (f"/apis/apps/v1/namespaces/{self.namespace}/deployments/app-{number}", f"/api/v1/namespaces/{self.namespace}/services/service-{number}"):
            self.rig.control.must("DELETE", path)
        wait_for(f"the deletion of the pod of deployment {number}", lambda: not self.pods(number), 60)

    def settle(self):
        """Waits until all caches are filled, after which no list is expected."""
        last = {}

        def settled():
            now = {p.name: len(caches(p)) for p in self.components.all()}
            same = now == last
            last.update(now)
            return same
        wait_for("the node to be Ready", lambda: self.rig.ready(RealNode.NAME), 90)
        for process in (self.components.controllers, self.components.scheduler):
            wait_for(f"{process.name} to lead", lambda: process.require_running() or log_lines(process, "uccessfully acquired lease"), 60)
        self.create_objects(0)
        self.wait_for_objects(0)
        wait_for("the caches to fill", settled, 60, pause=3)
        return last

    def audited_lists(self, since):
        """The lists of each component that apiservers received after `since`, by its user agent."""
        names = [short(process) for process in self.components.all()]
        found = {name: [] for name in names}
        def is_list(event):
            return event["verb"] == "list" and event["stage"] == "ResponseComplete" and event["requestReceivedTimestamp"] > since
        for event in self.rig.audit(is_list, self.SETTINGS):
            name = event.get("userAgent", "").partition("/")[0]
            if name in found:
                found[name].append(event["requestURI"])
        return found

    def watched(self):
        """Number of resources that each component has watched in each encoding, by the content types that it has logged."""
        watches = {event["auditID"]: event["requestURI"].partition("?")[0] for event in self.rig.audit(lambda e: e["verb"] == "watch", self.SETTINGS)}
        found = {}
        for process in self.components.all():
            resources = {(watches[ident], kind) for ident, kind in responses(process).items() if ident in watches}
            found[short(process)] = Counter(ENCODINGS.get(kind, kind) for _, kind in resources)
        return found

    def run_faults(self, first):
        self.affected, components = {}, self.components.all()
        filled, resumed = self.settle(), self.resumed()
        offsets = {p.name: p.logfile.stat().st_size for p in components}
        since, begun, number = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic(), 0
        kinds = list(self.kinds().items())
        with NodeMonitor(self.rig, [RealNode.NAME]) as monitor:
            for kind, fault in itertools.cycle(kinds[first:] + kinds[:first]):
                fault(kind)
                number += 1
                self.create_objects(number)
                time.sleep(7 if kind == "SIGSTOP" else 3)  # a stopped process is detected after 5 s
                self.rig.recover()
                self.wait_for_objects(number)
                self.delete_objects(number - 1)
                if number >= len(kinds) and time.monotonic() > begun + self.SECONDS:
                    break
        self.delete_objects(number)
        log(f"{number} faults in {time.monotonic() - begun:.0f} s, {self.resumed() - resumed:.0f} resumes; watches affected: {self.affected}")
        self.assertEqual([kind for kind, watches in self.affected.items() if not watches], [], "a fault has affected no watch")
        self.assertGreaterEqual(self.resumed() - resumed, max(self.affected.values()))
        self.check_node(monitor)
        cells = self.check_caches(filled, offsets, since)
        write_rows("components", HEAD, [[kinds[first][0], f"{number} in {time.monotonic() - begun:.0f} s", *cells]])

    def check_node(self, monitor):
        self.assertEqual(monitor.not_ready, [])
        self.assertGreater(monitor.polls, 30)
        within(self, "CBOR components: longest time between two heartbeats", monitor.longest[RealNode.NAME], "s", 25)

    def check_caches(self, filled, offsets, since):
        """Checks that there is no watch error and no list after the offsets of the logs, and the encodings. Returns a cell for
        each component."""
        cells, audited, watched = [], self.audited_lists(since), self.watched()
        for process in self.components.all():
            name = short(process)
            errors = client_errors(process, WATCH_ERRORS, since=offsets[process.name])
            listed = caches(process)[filled[process.name]:]
            encodings = ", ".join(f"{count} {encoding}" for encoding, count in sorted(watched[name].items()))
            log(f"    {name}: {filled[process.name]} caches, {encodings}; {len(errors)} watch errors, {len(listed)} lists in its log, "
                f"{len(audited[name])} in the audit logs")
            cells.append(f"{encodings}; {len(errors)}, {max(len(listed), len(audited[name]))}")
            with self.subTest(name):
                process.require_running()
                self.assertEqual((errors, listed, audited[name]), ([], [], []))
                # Its client for metadata, of which the garbage collector has watches, asks for protobuf.
                self.assertEqual(set(watched[name]), {"CBOR", "protobuf"} if name == "kube-controller-manager" else {"CBOR"})
                self.assertGreater(watched[name]["CBOR"], watched[name]["protobuf"])
        return cells

    def test_faults_1(self):
        self.run_faults(0)

    def test_faults_2(self):
        self.run_faults(2)

    def test_faults_3(self):
        self.run_faults(4)
