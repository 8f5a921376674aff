"""The Helm chart: objects for values, errors for wrong values. Run by `tests/chart/run`, which provides helm and kubectl."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/jackstay"
CASES = sorted((CHART / "ci").glob("*-values.yaml"))
MINIMAL = {"apiservers": ["10.0.0.11:6443"], "loadBalancer": {"bind": ["10.0.0.5:8443"]}}
TRANSPARENT = {"transparent": {"enabled": True, "image": {"repository": "nft"}}}
APP_VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
# Labels of Helm and of the release, which the manifests of deploy/ do not have.
HELM_LABELS = ("helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "app.kubernetes.io/instance")


def helm(*argv):
    return subprocess.run(["helm", *map(str, argv)], capture_output=True, text=True, timeout=60)


def with_values(values, *argv, command="template", namespace="kube-system"):
    """Runs helm with values: a file, or a dict."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        if isinstance(values, dict):
            json.dump(values, file)
            file.flush()
            values = file.name
        name = [] if command == "lint" else ["jackstay"]
        return helm(command, *name, CHART, "--namespace", namespace, "--values", values, *argv)


def merged(*trees):
    """A dict with the keys of all; later ones replace earlier ones."""
    result = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def objects(text):
    """The objects of a YAML stream by (kind, name)."""
    found = {}
    for one in filter(None, yaml.safe_load_all(text)):
        key = one["kind"], one["metadata"]["name"]
        assert key not in found, f"two objects {key}"
        found[key] = one
    return found


def render(*values, **options):
    done = with_values(merged(*values) if isinstance(values[0], dict) else values[0], **options)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def pods(rendered):
    return {name: one["spec"]["template"]["spec"] for (kind, name), one in rendered.items() if kind == "DaemonSet"}


def config(rendered, name="jackstay-load-balancer"):
    return yaml.safe_load(rendered["ConfigMap", name]["data"]["jackstay.yaml"])


class Objects(unittest.TestCase):
    maxDiff = None

    def test_lint_finds_nothing(self):
        for values in CASES:
            with self.subTest(values.name):
                done = with_values(values, "--strict", command="lint")
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(helm("lint", "--strict", CHART).returncode, 0, "default values")

    def test_default_objects_equal_kustomize(self):
        """The load balancer with the addresses of deploy/load-balancer equals its manifests, apart from Helm's labels."""
        def comparable(text):
            found = objects(text)
            for one in found.values():
                daemon_set = one["spec"] if one["kind"] == "DaemonSet" else {}
                for labels in (one["metadata"].get("labels", {}), daemon_set.get("selector", {}).get("matchLabels", {}),
                               daemon_set.get("template", {}).get("metadata", {}).get("labels", {})):
                    for label in HELM_LABELS:
                        labels.pop(label, None)
                if one["kind"] in ("Pod", "ServiceAccount"):  # of `helm test`; the manifests use the account `default`
                    continue
                if daemon_set:
                    daemon_set["template"]["spec"].pop("serviceAccountName", None)
                    daemon_set["template"]["metadata"].pop("annotations", None)  # the checksum, in place of a generated name
                    volume, = (v for v in daemon_set["template"]["spec"]["volumes"] if v["name"] == "config")
                    volume["configMap"]["name"] = one["metadata"]["name"]
                else:
                    one["data"] = {key: yaml.safe_load(value) for key, value in one["data"].items()}
                    one["metadata"] = {"name": re.sub("-[a-z0-9]{10}$", "", one["metadata"]["name"]), "namespace": one["metadata"]["namespace"]}
            return {(kind, one["metadata"]["name"]): one for (kind, _), one in found.items() if kind in ("ConfigMap", "DaemonSet")}
        kustomized = subprocess.run(["kubectl", "kustomize", ROOT / "deploy/load-balancer"], capture_output=True, text=True, check=True)
        rendered = with_values(CHART / "ci/load-balancer-values.yaml")
        self.assertEqual(comparable(rendered.stdout), comparable(kustomized.stdout))

    def test_role_equals_the_manifest(self):
        rendered = render(MINIMAL, {"discovery": {"enabled": True}})
        manifest = objects((ROOT / "deploy/rbac/discovery.yaml").read_text())
        self.assertEqual(rendered["Role", "jackstay-discovery"]["rules"], manifest["Role", "jackstay-discovery"]["rules"])
        for kind in ("Role", "RoleBinding"):
            self.assertEqual(rendered[kind, "jackstay-discovery"]["metadata"]["namespace"], "default")
        self.assertEqual(rendered["RoleBinding", "jackstay-discovery"]["subjects"],
                         [{"kind": "ServiceAccount", "name": "jackstay-discovery", "namespace": "kube-system"}])

    def test_every_pod_is_confined(self):
        for values in CASES:
            rendered = render(values)
            self.assertTrue(pods(rendered))
            for name, pod in pods(rendered).items():
                with self.subTest(values=values.name, pod=name):
                    self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
                    self.assertEqual(pod["automountServiceAccountToken"], "everything" in values.name)
                    may_be_root = name.endswith("-transparent")
                    self.assertEqual(pod["securityContext"].get("runAsNonRoot", False), not may_be_root)
                    own = [c for c in pod["containers"] + pod.get("initContainers", []) if c["name"] in ("jackstay", "interception")]
                    self.assertEqual(len(own), 2 if may_be_root else 1)
                    for container in own:
                        security = container["securityContext"]
                        self.assertEqual((security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]), (False, True))
                        self.assertEqual(security["capabilities"], {"drop": ["ALL"], **({"add": ["NET_ADMIN"]} if may_be_root else {})})
                        self.assertIn("memory", container["resources"]["limits"])
                        self.assertNotIn("cpu", container["resources"]["limits"])
                        self.assertIn("readinessProbe", container)
                        if container["name"] == "jackstay":
                            for probe in ("startupProbe", "livenessProbe"):
                                self.assertEqual(container[probe]["exec"]["command"][:3], ["/jackstay", "probe", "livez"])

    def test_every_object_has_labels_and_namespace(self):
        for values in CASES:
            for key, one in render(values, namespace="elsewhere").items():
                with self.subTest(values=values.name, object=key):
                    self.assertEqual(one["metadata"]["labels"]["app.kubernetes.io/managed-by"], "Helm")
                    # Discovery reads the namespace of the Service `kubernetes`.
                    self.assertEqual(one["metadata"]["namespace"], "default" if key[0].startswith("Role") else "elsewhere")

    def test_changed_configuration_rolls_the_pods(self):
        def checksum(*more):
            template = render(MINIMAL, *more)["DaemonSet", "jackstay-load-balancer"]["spec"]["template"]
            return template["metadata"]["annotations"]["checksum/config"]
        self.assertEqual(checksum(), checksum({"loadBalancer": {"minReadySeconds": 9}}))
        self.assertNotEqual(checksum(), checksum({"loadBalancer": {"config": {"log": {"level": "warn"}}}}))
        self.assertNotEqual(checksum(), checksum({"apiservers": ["10.0.0.12:6443"]}))

    def test_names_follow_the_release(self):
        self.assertIn(("DaemonSet", "mine-load-balancer"), render(MINIMAL, {"fullnameOverride": "mine"}))
        other = helm("template", "edge", CHART, "--set", "apiservers={a:1},loadBalancer.bind={10.0.0.5:8443}")
        self.assertIn(("DaemonSet", "edge-jackstay-load-balancer"), objects(other.stdout))

    def test_values_reach_their_fields(self):
        """Values, and a function of the rendered objects with its expected result."""
        lb, key = "jackstay-load-balancer", ("DaemonSet", "jackstay-load-balancer")

        def pod(rendered):
            return pods(rendered)[lb]

        def container(rendered):
            return pod(rendered)["containers"][0]
        cases = [
            ({}, lambda r: sorted(r), [("ConfigMap", lb), key, ("Pod", "jackstay-test-load-balancer"), ("ServiceAccount", "jackstay")]),
            ({"loadBalancer": {"enabled": False}}, lambda r: list(r), []),
            ({"enabled": False, "metrics": {"podMonitor": {"enabled": True}}, "prometheusRule": {"enabled": True}, "dashboards": {"enabled": True},
              "extraObjects": ["a"], "discovery": {"enabled": True}, "loadBalancer": {"service": {"enabled": True}}}, lambda r: list(r), []),
            ({"image": {"tag": "2"}}, lambda r: container(r)["image"], "localhost/jackstay:2"),
            ({"image": {"tag": "2", "digest": "sha256:" + "a" * 64}}, lambda r: container(r)["image"], "localhost/jackstay@sha256:" + "a" * 64),
            ({"image": {"pullPolicy": "Never"}}, lambda r: container(r)["imagePullPolicy"], "Never"),
            ({"imagePullSecrets": ["a"]}, lambda r: pod(r)["imagePullSecrets"], [{"name": "a"}]),
            ({"imagePullSecrets": [{"name": "a"}, "b"], "global": {"imagePullSecrets": [{"name": "c"}, "d"]}},
             lambda r: pod(r)["imagePullSecrets"], [{"name": "c"}, {"name": "d"}, {"name": "a"}, {"name": "b"}]),
            ({"image": {"registry": "r.example.com"}}, lambda r: container(r)["image"], f"r.example.com/jackstay:{APP_VERSION}"),
            ({"image": {"registry": "r:5000/mirror/", "repository": "quay.io/a/b", "tag": "2"}}, lambda r: container(r)["image"], "r:5000/mirror/a/b:2"),
            ({"image": {"registry": "r:5000", "repository": "a/b", "tag": "2"}}, lambda r: container(r)["image"], "r:5000/a/b:2"),
            ({"image": {"registry": "r:5000", "digest": "sha256:" + "a" * 64}}, lambda r: container(r)["image"], "r:5000/jackstay@sha256:" + "a" * 64),
            ({"image": {"registry": "r:5000", "tag": "2"}, "global": {"imageRegistry": "all.example.com"}}, lambda r: container(r)["image"], "all.example.com/jackstay:2"),
            ({"global": {"imageRegistry": "all.example.com", "storageClass": {"of": "other charts"}}}, lambda r: container(r)["image"], f"all.example.com/jackstay:{APP_VERSION}"),
            ({"global": None, "image": {"repository": "quay.io/a/b", "tag": "2"}}, lambda r: container(r)["image"], "quay.io/a/b:2"),
            ({"image": {"tag": "2"}}, lambda r: r["Pod", "jackstay-test-load-balancer"]["spec"]["containers"][0]["image"], "localhost/jackstay:2"),
            ({"commonLabels": {"team": "a"}}, lambda r: [one["metadata"]["labels"]["team"] for one in r.values()], ["a"] * 4),
            ({"ca": {"hostPath": "/ca.pem"}}, lambda r: pod(r)["volumes"][2]["hostPath"], {"path": "/ca.pem", "type": "File"}),
            ({"ca": {"configMap": "kube-root-ca.crt"}}, lambda r: pod(r)["volumes"][2].get("hostPath"), None),
            ({"loadBalancer": {"config": {"log": {"level": "warn"}}}}, lambda r: config(r)["log"], {"level": "warn"}),
            ({"loadBalancer": {"config": {"listeners": [{"name": "x"}]}}}, lambda r: config(r)["listeners"], [{"name": "x"}]),
            ({"loadBalancer": {"admin": {"port": 9700}}}, lambda r: (config(r)["admin"]["bind"], container(r)["readinessProbe"]["httpGet"]["port"]),
             ("127.0.0.1:9700", 9700)),
            ({"loadBalancer": {"admin": {"address": "[::1]"}}}, lambda r: (config(r)["admin"]["bind"], container(r)["readinessProbe"]["httpGet"]["host"]),
             ("[::1]:9644", "::1")),
            ({"loadBalancer": {"admin": {"address": "hostIP"}}}, lambda r: (container(r)["env"][-1], container(r)["readinessProbe"]["exec"]["command"][2]),
             ({"name": "JACKSTAY__ADMIN__BIND", "value": "$(HOST_IP):9644"}, "readyz")),
            ({"loadBalancer": {"hostNetwork": False}}, lambda r: ("hostNetwork" in pod(r), "exec" in container(r)["readinessProbe"]), (False, True)),
            ({"loadBalancer": {"service": {"enabled": True, "targetPort": 9443}}}, lambda r: container(r)["ports"], [{"name": "apiserver", "containerPort": 9443, "protocol": "TCP"}]),
            ({"loadBalancer": {"service": {"enabled": True}}}, lambda r: "internalTrafficPolicy" in r["Service", lb]["spec"], False),
            ({"loadBalancer": {"service": {"enabled": True, "internalTrafficPolicy": "Local"}}}, lambda r: r["Service", lb]["spec"]["internalTrafficPolicy"], "Local"),
            ({"loadBalancer": {"service": {"enabled": True, "type": "LoadBalancer", "externalTrafficPolicy": "Local", "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"],
                                           "loadBalancerClass": "a/b", "loadBalancerSourceRanges": ["10.0.0.0/8"]}}},
             lambda r: {k: v for k, v in r["Service", lb]["spec"].items() if k not in ("selector", "ports")},
             {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6", "IPv4"], "loadBalancerClass": "a/b",
              "loadBalancerSourceRanges": ["10.0.0.0/8"]}),
            ({"loadBalancer": {"service": {"enabled": True, "labels": {"a": "b"}}}}, lambda r: r["Service", lb]["metadata"]["labels"]["a"], "b"),
            ({"loadBalancer": {"podSecurityContext": {"runAsUser": 7, "seLinuxOptions": {"type": "spc_t"}}}}, lambda r: (pod(r)["securityContext"]),
             {"runAsNonRoot": True, "runAsUser": 7, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"type": "spc_t"}}),
            ({"loadBalancer": {"podSecurityContext": {"runAsUser": None}}}, lambda r: "runAsUser" in pod(r)["securityContext"], False),
            ({"loadBalancer": {"securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}}}}, lambda r: container(r)["securityContext"],
             {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}),
            ({"loadBalancer": {"annotations": {"a": "b"}}}, lambda r: (r[key]["metadata"]["annotations"], "a" in r[key]["spec"]["template"]["metadata"]["annotations"]), ({"a": "b"}, False)),
            ({"loadBalancer": {"extraArgs": ["--log-level", "debug"]}}, lambda r: container(r)["args"], ["run", "--config", "/etc/jackstay/jackstay.yaml", "--log-level", "debug"]),
            ({"loadBalancer": {"extraContainers": [{"name": "x"}], "extraInitContainers": [{"name": "y"}]}},
             lambda r: ([c["name"] for c in pod(r)["containers"]], [c["name"] for c in pod(r)["initContainers"]]), (["jackstay", "x"], ["y"])),
            ({"loadBalancer": {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.2"]}}}, lambda r: (pod(r)["dnsPolicy"], pod(r)["dnsConfig"]), ("None", {"nameservers": ["10.0.0.2"]})),
            ({"loadBalancer": {"hostAliases": [{"ip": "10.0.0.2", "hostnames": ["a"]}]}}, lambda r: pod(r)["hostAliases"], [{"ip": "10.0.0.2", "hostnames": ["a"]}]),
            ({}, lambda r: (pod(r)["serviceAccountName"], r["ServiceAccount", "jackstay"]["automountServiceAccountToken"]), ("jackstay", False)),
            ({"serviceAccount": {"name": "a", "annotations": {"b": "c"}, "labels": {"d": "e"}, "automountServiceAccountToken": True}},
             lambda r: (pod(r)["serviceAccountName"], pod(r)["automountServiceAccountToken"], r["ServiceAccount", "a"]["automountServiceAccountToken"],
                        r["ServiceAccount", "a"]["metadata"]["annotations"], r["ServiceAccount", "a"]["metadata"]["labels"]["d"]), ("a", True, True, {"b": "c"}, "e")),
            ({"serviceAccount": {"create": False}}, lambda r: ("serviceAccountName" in pod(r), [one for one in r if one[0] == "ServiceAccount"]), (False, [])),
            ({"serviceAccount": {"create": False, "name": "a"}, "discovery": {"enabled": True}},
             lambda r: (pod(r)["serviceAccountName"], [one for one in r if one[0] == "ServiceAccount"], r["RoleBinding", "jackstay-discovery"]["subjects"][0]["name"]), ("a", [], "a")),
            ({"discovery": {"enabled": True}, "rbac": {"create": False}}, lambda r: [one for one in r if one[0].startswith("Role")], []),
            ({"test": {"enabled": False}}, lambda r: sorted(r), [("ConfigMap", lb), key, ("ServiceAccount", "jackstay")]),
            ({"extraObjects": ['kind: A\nmetadata: { name: "{{ .Release.Name }}-a" }', {"kind": "B", "metadata": {"name": '{{ include "jackstay.fullname" . }}-b'}}]},
             lambda r: sorted(one for one in r if one[0] in "AB"), [("A", "jackstay-a"), ("B", "jackstay-b")]),
            ({"loadBalancer": {"priorityClassName": ""}}, lambda r: pod(r)["priorityClassName"], ""),
            ({"loadBalancer": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}}, lambda r: r[key]["spec"]["updateStrategy"], {"type": "OnDelete"}),
            ({"discovery": {"enabled": True}}, lambda r: (pod(r)["serviceAccountName"], config(r)["upstreams"][0]["discovery"], config(r)["upstreams"][0]["health"]),
             ("jackstay-discovery", {"kubeconfig": "/etc/jackstay/discovery.kubeconfig"}, {"readyz": {"token_file": "/run/secrets/jackstay/token"}})),
        ]
        for values, get, expected in cases:
            with self.subTest(values):
                self.assertEqual(get(render(MINIMAL, values)), expected)

    def test_transparent_listens_as_its_rules_need(self):
        def transparent(**values):
            rendered = render(MINIMAL, TRANSPARENT, {"transparent": values})
            pod = pods(rendered)["jackstay-transparent"]
            rules, = pod["containers"]
            return config(rendered, "jackstay-transparent")["listeners"][0], rules["command"][2:] + rules.get("args", []), pod
        listener, argv, pod = transparent(port=7500)
        self.assertEqual((listener["bind"], listener["transparent"], argv), (["127.0.0.1:7500", "[::1]:7500"], True, ["service-tproxy", "7500"]))
        sidecar, = pod["initContainers"]
        self.assertEqual((sidecar["restartPolicy"], "startupProbe" in sidecar), ("Always", True))
        listener, argv, _ = transparent(variant="service-redirect", service4="10.0.0.1", service6="fd00::1")
        self.assertEqual((listener["bind"], argv), (["0.0.0.0:7453", "[::]:7453"], ["service-redirect", "7453", "service4=10.0.0.1", "service6=fd00::1"]))

    def test_transparent_values_reach_their_fields(self):
        def pod(**values):
            rendered = render(MINIMAL, TRANSPARENT, {"transparent": values})
            return pods(rendered)["jackstay-transparent"], rendered["DaemonSet", "jackstay-transparent"]
        found, daemon_set = pod(
            image={"registry": "r:5000", "repository": "quay.io/a/nft", "tag": "1"}, securityContext={"runAsUser": 0}, podSecurityContext={"seLinuxOptions": {"type": "spc_t"}},
            annotations={"a": "b"}, extraArgs=["--log-level=debug"], extraContainers=[{"name": "x"}], extraInitContainers=[{"name": "y"}])
        security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]}}
        self.assertEqual([c["name"] for c in found["containers"]], ["interception", "x"])
        self.assertEqual([c["name"] for c in found["initContainers"]], ["y", "jackstay"])
        interception, sidecar = found["containers"][0], found["initContainers"][1]
        self.assertEqual((interception["securityContext"], sidecar["securityContext"]), (security, security))
        self.assertEqual((interception["image"], sidecar["args"][-1]), ("r:5000/a/nft:1", "--log-level=debug"))
        self.assertEqual(found["securityContext"], {"runAsUser": 0, "runAsGroup": 0, "seccompProfile": {"type": "RuntimeDefault"}, "seLinuxOptions": {"type": "spc_t"}})
        self.assertEqual(daemon_set["metadata"]["annotations"], {"a": "b"})

    def test_helm_test_asks_each_component_and_connects_through_the_load_balancer(self):
        def test_pods(*values):
            return {name.removeprefix("jackstay-test-"): one for (kind, name), one in render(MINIMAL, *values).items() if kind == "Pod"}

        def steps(one):
            return {c["name"]: (c["args"], {e["name"]: e.get("value") for e in c.get("env", [])}) for c in one["spec"].get("initContainers", []) + one["spec"]["containers"]}

        def endpoints(argv):
            return [after for option, after in zip(argv, argv[1:]) if option == "--endpoint"]
        found = test_pods(TRANSPARENT, {"loadBalancer": {"admin": {"address": "hostIP"}, "bind": ["10.0.0.5:8443", "0.0.0.0:1", "[::]:2"]}})
        self.assertEqual(set(found), {"load-balancer", "transparent"})
        balancer, transparent = (steps(found[name]) for name in ("load-balancer", "transparent"))
        self.assertEqual((list(balancer), list(transparent)), (["ready", "connects"], ["ready"]))
        self.assertEqual((balancer["ready"][1]["ADMIN"], transparent["ready"][1]["ADMIN"]), ("$(HOST_IP):9644", "127.0.0.1:9645"))
        self.assertEqual(endpoints(balancer["connects"][0]), ["10.0.0.5:8443", "127.0.0.1:1", "[::1]:2"])
        self.assertEqual(found["load-balancer"]["spec"]["nodeSelector"], {"node-role.kubernetes.io/control-plane": ""})
        for one in found.values():
            self.assertEqual((one["spec"]["hostNetwork"], one["spec"]["restartPolicy"], one["metadata"]["annotations"]["helm.sh/hook"]), (True, "Never", "test"))
            self.assertEqual((one["spec"]["securityContext"]["runAsNonRoot"], one["spec"]["automountServiceAccountToken"]), (True, False))
            # Neither a Service nor a monitor selects it.
            self.assertEqual(one["metadata"]["labels"]["app.kubernetes.io/name"], "jackstay-test")
        for address, expected in (("0.0.0.0", "127.0.0.1:9644"), ("[::]", "[::1]:9644"), ("[::1]", "[::1]:9644")):
            found = test_pods({"loadBalancer": {"admin": {"address": address}}})
            self.assertEqual(steps(found["load-balancer"])["ready"][1]["ADMIN"], expected)
        # Off the host network the Service is the only known address.
        inside = {"loadBalancer": {"hostNetwork": False, "networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]}}}
        self.assertEqual(test_pods(inside), {})
        found, = test_pods(inside, {"loadBalancer": {"service": {"enabled": True, "port": 6443}}, "test": {"serverName": "api"}, "ca": {"configMap": "kube-root-ca.crt"}}).values()
        (connects, _), = steps(found).values()
        self.assertEqual((endpoints(connects), connects[connects.index("--server-name") + 1]), (["jackstay-load-balancer.kube-system:6443"], "api"))
        self.assertEqual((found["spec"]["dnsPolicy"], "hostNetwork" in found["spec"]), ("ClusterFirst", False))
        policy = render(MINIMAL, inside)["NetworkPolicy", "jackstay-load-balancer"]["spec"]["ingress"][0]["from"]
        selector = policy[1]["podSelector"]["matchLabels"].items()
        self.assertLessEqual(selector, found["metadata"]["labels"].items())

    def test_rendered_configurations_are_valid(self):
        binary = os.environ.get("JACKSTAY_BIN")
        if not binary:
            self.skipTest("JACKSTAY_BIN is not set")
        ca = Path(tempfile.mkdtemp(dir="/tmp", prefix="jackstay-chart."))
        self.addCleanup(shutil.rmtree, ca)
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=ca",
                        "-keyout", ca / "key", "-out", ca / "ca.crt"], check=True, capture_output=True)
        for values in CASES:
            for (kind, name), one in render(values).items():
                if kind == "ConfigMap" and "jackstay.yaml" in one.get("data", {}):
                    with self.subTest(values=values.name, config=name):
                        for key, text in one["data"].items():
                            text = text.replace("/etc/kubernetes/pki", str(ca)).replace("/etc/jackstay", str(ca)).replace("/run/secrets/jackstay", str(ca))
                            (ca / key).write_text(text)
                        (ca / "token").write_text("token")
                        done = subprocess.run([binary, "check", "--config", ca / "jackstay.yaml"], capture_output=True, text=True)
                        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Monitoring(unittest.TestCase):
    def test_rules_are_valid_and_complete(self):
        spec = render(MINIMAL, {"prometheusRule": {"enabled": True}})["PrometheusRule", "jackstay"]["spec"]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(spec, file)
            file.flush()
            done = subprocess.run(["promtool", "check", "rules", file.name], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        files = (yaml.safe_load((ROOT / "deploy/monitoring" / name).read_text()) for name in ("alerts.yaml", "recording.yaml", "alerts-fleet.yaml"))
        self.assertEqual(spec["groups"], [group for file in files for group in file["groups"]])

    def test_values_change_the_rules(self):
        base = "https://docs.example.com/"
        rule = {"enabled": True, "fleet": False, "runbookBaseUrl": base, "disabledAlerts": ["JackstayDown"], "alertLabels": {"team": "a"}}
        group, = render(MINIMAL, {"prometheusRule": rule})["PrometheusRule", "jackstay"]["spec"]["groups"]
        names = [one["alert"] for one in group["rules"]]
        self.assertNotIn("JackstayDown", names)
        self.assertIn("JackstayNoEndpoint", names)
        for one in group["rules"]:
            self.assertEqual(one["annotations"]["runbook_url"], f"{base}troubleshooting.md#{one['alert'].lower()}")
            self.assertEqual((one["labels"]["team"], "severity" in one["labels"]), ("a", True))

    def test_dashboards_are_those_of_the_folder(self):
        data = render(MINIMAL, {"dashboards": {"enabled": True}})["ConfigMap", "jackstay-dashboards"]
        self.assertEqual(data["metadata"]["labels"]["grafana_dashboard"], "1")
        for key, file in (("jackstay.json", "dashboard.json"), ("jackstay-fleet.json", "fleet.json")):
            self.assertEqual(json.loads(data["data"][key]), json.loads((ROOT / "deploy/monitoring" / file).read_text()))

    def test_monitors_find_the_pods(self):
        """The selectors match, the named port exists, and targets have the job on which the alerts depend."""
        for kind, values in (("ServiceMonitor", "serviceMonitor"), ("PodMonitor", "podMonitor")):
            rendered = render(MINIMAL, TRANSPARENT, {"metrics": {values: {"enabled": True}}}, *(
                {component: {"admin": {"address": "hostIP"}}} for component in ("loadBalancer", "transparent")))
            spec = rendered[kind, "jackstay-metrics"]["spec"]
            selector = spec["selector"]["matchLabels"].items()
            endpoint, = spec.get("endpoints") or spec["podMetricsEndpoints"]
            self.assertIn({"targetLabel": "job", "replacement": "jackstay"}, endpoint["relabelings"])
            found = {}
            for (object_kind, name), one in rendered.items():
                if object_kind == "DaemonSet":
                    template = one["spec"]["template"]
                    container, = (c for c in template["spec"]["containers"] + template["spec"].get("initContainers", []) if c["name"] == "jackstay")
                    port, = (port for port in container["ports"] if port["name"] == endpoint["port"])
                    found[name] = port["containerPort"]
                    labels = template["metadata"]["labels"].items()
                    if kind == "PodMonitor":
                        self.assertLessEqual(selector, labels)
                        continue
                    # One Service selects the pod. It has the number of the port: by the name, EndpointSlices lack a sidecar's before 1.33.
                    service, = (service for (kind_of, _), service in rendered.items() if kind_of == "Service" and service["spec"]["selector"].items() <= labels)
                    self.assertLessEqual(selector, service["metadata"]["labels"].items())
                    self.assertEqual((service["spec"]["clusterIP"], service["spec"]["ports"][0]["name"]), ("None", endpoint["port"]))
                    self.assertEqual(service["spec"]["ports"][0]["targetPort"], port["containerPort"])
            self.assertEqual(found, {"jackstay-load-balancer": 9644, "jackstay-transparent": 9645})

    def test_instance_has_node_and_port(self):
        """Prometheus knows the port of a container for some kinds of targets only, so the relabeling reads the address."""
        spec = render(MINIMAL, TRANSPARENT, {"metrics": {"serviceMonitor": {"enabled": True}}}, *(
            {component: {"admin": {"address": "hostIP"}}} for component in ("loadBalancer", "transparent")))["ServiceMonitor", "jackstay-metrics"]["spec"]
        rule, = (one for one in spec["endpoints"][0]["relabelings"] if one.get("targetLabel") == "instance")
        for address in ("10.0.0.5:9644", "[fd00::5]:9644"):
            self.assertEqual(re.sub(f"^{rule['regex']}$", rule["replacement"].replace("$", "\\"), f"worker-1;{address}"), "worker-1:9644")


class Errors(unittest.TestCase):
    """Each mistake is one message, before helm contacts a cluster."""

    SCHEMA = [  # values, message of the schema
        ({"apiservers": "10.0.0.11:6443"}, "at '/apiservers': got string, want array"),
        ({"apiservers": ["10.0.0.11"]}, "at '/apiservers/0': '10.0.0.11' does not match pattern"),
        ({"apiserver": []}, "at '': additional properties 'apiserver' not allowed"),
        ({"loadBalancer": {"enabled": "yes"}}, "at '/loadBalancer/enabled': got string, want boolean"),
        ({"loadBalancer": {"bind": "10.0.0.5:8443"}}, "at '/loadBalancer/bind': got string, want array"),
        ({"loadBalancer": {"bind": ["lb:8443"]}}, "at '/loadBalancer/bind/0': 'lb:8443' does not match pattern"),
        ({"loadBalancer": {"admin": {"port": 0}}}, "at '/loadBalancer/admin/port': minimum: got 0, want 1"),
        ({"loadBalancer": {"admin": {"address": "10.0.0.1"}}}, "at '/loadBalancer/admin/address': value must be one of '127.0.0.1', '[::1]', '0.0.0.0', '[::]', 'hostIP'"),
        ({"loadBalancer": {"tolerations": {}}}, "at '/loadBalancer/tolerations': got object, want array"),
        ({"loadBalancer": {"podAnnotations": {"a": 1}}}, "at '/loadBalancer/podAnnotations/a': got number, want string"),
        ({"loadBalancer": {"config": {"listener": []}}}, "at '/loadBalancer/config': additional properties 'listener' not allowed"),
        ({"loadBalancer": {"config": {"sandbox": {"seccomp": True}}}}, "at '/loadBalancer/config/sandbox/seccomp': got boolean, want string"),
        ({"loadBalancer": {"config": {"upstreams": [{"tls": {"ca": "x"}}]}}}, "at '/loadBalancer/config/upstreams/0/tls': additional properties 'ca' not allowed"),
        ({"enabled": "yes"}, "at '/enabled': got string, want boolean"),
        ({"global": {"imageRegistry": 5}}, "at '/global/imageRegistry': got number, want string"),
        ({"imagePullSecrets": "registry"}, "at '/imagePullSecrets': got string, want array"),
        ({"imagePullSecrets": [{"secret": "a", "name": "b"}]}, "at '/imagePullSecrets/0': additional properties 'secret' not allowed"),
        ({"imagePullSecrets": [{}]}, "at '/imagePullSecrets/0': missing property 'name'"),
        ({"image": {"registry": "https://registry.example.com"}}, "at '/image/registry': 'https://registry.example.com' does not match pattern"),
        ({"serviceAccount": {"automount": True}}, "at '/serviceAccount': additional properties 'automount' not allowed"),
        ({"serviceAccount": {"name": "A_b"}}, "at '/serviceAccount/name': 'A_b' does not match pattern"),
        ({"extraObjects": {"a": {}}}, "at '/extraObjects': got object, want array"),
        ({"loadBalancer": {"podSecurityContext": []}}, "at '/loadBalancer/podSecurityContext': got array, want object"),
        ({"loadBalancer": {"extraArgs": "--log-level=debug"}}, "at '/loadBalancer/extraArgs': got string, want array"),
        ({"loadBalancer": {"service": {"ipFamilies": ["ipv4"]}}}, "at '/loadBalancer/service/ipFamilies/0': value must be one of 'IPv4', 'IPv6'"),
        ({"transparent": {"image": {"registry": "a b"}}}, "at '/transparent/image/registry': 'a b' does not match pattern"),
        ({"test": {"serverName": ""}}, "at '/test/serverName': minLength: got 0, want 1"),
        ({"image": {"digest": "sha256:1"}}, "at '/image/digest': 'sha256:1' does not match pattern"),
        ({"transparent": {"variant": "redirect"}}, "at '/transparent/variant': value must be one of 'service-tproxy', 'service-redirect'"),
        ({"metrics": {"podMonitor": {"interval": 15}}}, "at '/metrics/podMonitor/interval': got number, want string"),
        ({"prometheusRule": {"runbookBaseUrl": "docs"}}, "at '/prometheusRule/runbookBaseUrl': 'docs' does not match pattern"),
    ]
    TEMPLATES = [  # values, message of the templates
        ({"apiservers": []}, "apiservers: at least one address of an apiserver is required, such as 10.0.0.11:6443"),
        ({"loadBalancer": {"bind": []}}, "loadBalancer.bind: at least one address to listen on is required, such as 10.0.0.5:8443"),
        ({"apiservers": ["10.0.0.5:8443"]}, "apiservers: 10.0.0.5:8443 is the address of the load balancer itself (loadBalancer.bind); the apiservers' own addresses are required"),
        ({"loadBalancer": {"config": {"admin": {"bind": "[::]:1"}}}}, "loadBalancer.config.admin.bind: set loadBalancer.admin.address and loadBalancer.admin.port, which the probes and monitors use, too"),
        ({"loadBalancer": {"networkPolicy": {"enabled": True}}}, "loadBalancer.networkPolicy.enabled: a NetworkPolicy has no effect on pods of the host network (loadBalancer.hostNetwork); use a firewall on the nodes"),
        ({"metrics": {"podMonitor": {"enabled": True}}}, "loadBalancer.admin.address: metrics: Prometheus cannot reach 127.0.0.1; set hostIP or an address of the node, and restrict the port with a firewall"),
        ({"metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}, "loadBalancer": {"admin": {"address": "hostIP"}}},
         "metrics: serviceMonitor and podMonitor would scrape every pod twice; enable one of them"),
        ({"discovery": {"enabled": True}, "serviceAccount": {"create": False}},
         "serviceAccount.name: discovery needs a ServiceAccount of its own; set the name of the existing one, or serviceAccount.create"),
        ({"loadBalancer": {"dnsPolicy": "None"}}, "loadBalancer.dnsConfig: dnsPolicy None requires name servers"),
        (merged(TRANSPARENT, {"transparent": {"securityContext": {"capabilities": {"add": []}}}}), "transparent.securityContext.capabilities.add: interception needs NET_ADMIN"),
        # As with --reuse-values, which lacks the values that are new in this version.
        ({"enabled": None, "test": None, "serviceAccount": None, "global": None},
         "the values are those of an earlier version of this chart (--reuse-values); use --reset-then-reuse-values, which adds the new defaults"),
        ({"transparent": {"enabled": True}}, "transparent.image.repository: an image with nft, ip (iproute2) and a shell is required"),
    ]

    def test_schema_rejects_mistakes(self):
        for values, message in self.SCHEMA:
            with self.subTest(values):
                done = with_values(merged(MINIMAL, values))
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertIn(message, done.stderr)
                self.assertEqual(done.stderr.count("\n- at "), 1, done.stderr)

    def test_templates_reject_contradictions(self):
        for values, message in self.TEMPLATES:
            with self.subTest(values):
                done = with_values(merged(MINIMAL, values))
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertRegex(done.stderr.splitlines()[0], re.escape(message) + "$")

    def test_kubernetes_version_is_checked(self):
        for version, values, message in (
                ("1.19.0", MINIMAL, "chart requires kubeVersion: >=1.20.0-0 which is incompatible with Kubernetes v1.19.0"),
                ("1.28.4", merged(MINIMAL, TRANSPARENT), "transparent.enabled: Kubernetes 1.29 or later is required (sidecar containers), this is v1.28.4")):
            done = with_values(values, "--kube-version", version)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(message, done.stderr)
        for version, values in (("1.20.0", MINIMAL), ("1.28.4", MINIMAL), ("1.29.0", merged(MINIMAL, TRANSPARENT)), ("1.37.1-gke.2", merged(MINIMAL, TRANSPARENT))):
            self.assertEqual(with_values(values, "--kube-version", version).returncode, 0, version)


class Package(unittest.TestCase):
    def test_every_key_of_the_schema_is_a_value(self):
        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())

        def compare(node, value, path):
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            if "properties" in node and path[-1:] not in (["config"], ["resources"], ["interceptionResources"]):
                self.assertEqual(node.get("additionalProperties"), None if path == ["global"] else False, path)
                self.assertEqual(set(node["properties"]), set(value), path)
                for key in value:
                    compare(node["properties"][key], value[key], [*path, key])
        compare(schema, values, [])

    def test_version_and_images_follow_the_program(self):
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
        self.assertEqual((chart["apiVersion"], chart["version"], chart["appVersion"]), ("v2", version, version))
        annotations = chart["annotations"]
        self.assertEqual(yaml.safe_load(annotations["artifacthub.io/images"]), [{"name": "jackstay", "image": f"localhost/jackstay:{version}"}])
        self.assertEqual({change["kind"] for change in yaml.safe_load(annotations["artifacthub.io/changes"])}, {"added"})

    def test_package_renders_the_same(self):
        """The archive contains all that the templates read, and no values of tests."""
        with tempfile.TemporaryDirectory() as folder:
            done = helm("package", CHART, "--destination", folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            archive, = Path(folder).glob("*.tgz")
            names = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout
            self.assertIn("jackstay/files/nftables/intercept.sh", names)
            self.assertNotIn("ci/", names)
            values = CHART / "ci/everything-values.yaml"
            packed = helm("template", "jackstay", archive, "--namespace", "kube-system", "--values", values)
            self.assertEqual(packed.stdout, with_values(values).stdout)

    def test_parent_chart_passes_enabled_and_global(self):
        """A chart that has this one as a dependency with a condition, and values for all of its charts in `global`."""
        with tempfile.TemporaryDirectory() as folder:
            parent = Path(folder) / "platform"
            shutil.copytree(CHART, parent / "charts/jackstay")
            (parent / "templates").mkdir()
            (parent / "Chart.yaml").write_text(yaml.safe_dump({
                "apiVersion": "v2", "name": "platform", "version": "1.0.0",
                "dependencies": [{"name": "jackstay", "version": ">=0.0.0", "condition": "jackstay.enabled"}]}))
            parents = {"imageRegistry": "mirror.example.com", "imagePullSecrets": ["mirror"], "domain": "example.com", "nodeSelector": {}}

            def rendered(enabled):
                (parent / "values.yaml").write_text(json.dumps({"global": parents, "jackstay": {"enabled": enabled, **MINIMAL}}))
                self.assertEqual(helm("lint", "--strict", parent).returncode, 0)
                done = helm("template", "platform", parent)
                self.assertEqual(done.returncode, 0, done.stderr)
                return objects(done.stdout)
            spec = pods(rendered(True))["platform-jackstay-load-balancer"]
            self.assertEqual(spec["containers"][0]["image"], f"mirror.example.com/jackstay:{APP_VERSION}")
            self.assertEqual(spec["imagePullSecrets"], [{"name": "mirror"}])
            self.assertEqual(rendered(False), {})

    def test_upgrade_changes_no_immutable_field(self):
        """Selectors of the DaemonSets and references of the RoleBinding as in 0.1.0, for values that 0.1.0 had."""
        labels = {"app.kubernetes.io/name": "jackstay", "app.kubernetes.io/instance": "jackstay"}
        rendered = render(MINIMAL, TRANSPARENT, {"discovery": {"enabled": True}})
        for component in ("load-balancer", "transparent"):
            spec = rendered["DaemonSet", f"jackstay-{component}"]["spec"]
            self.assertEqual(spec["selector"], {"matchLabels": labels | {"app.kubernetes.io/component": component}})
            self.assertEqual(spec["template"]["spec"]["serviceAccountName"], "jackstay-discovery")
        self.assertEqual(rendered["RoleBinding", "jackstay-discovery"]["roleRef"]["name"], "jackstay-discovery")

    def test_every_value_has_a_description_in_the_schema(self):
        schema = json.loads((CHART / "values.schema.json").read_text())

        def described(node, path):
            if "description" in node:
                return
            while "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
            self.assertTrue("description" in node or "properties" in node, path)
            for key, child in node.get("properties", {}).items():
                described(child, [*path, key])
        described(schema, [])

    def test_notes_say_where_l7_runs(self):
        done = with_values(MINIMAL, "--dry-run=client", command="install")
        self.assertEqual(done.returncode, 0, done.stderr)
        notes = done.stdout.partition("NOTES:")[2]
        self.assertIn("10.0.0.5:8443", notes)
        self.assertIn("needs kubelet's key", notes)
        self.assertIn("`helm test jackstay --namespace kube-system` waits until jackstay is ready", notes)
        done = with_values({"enabled": False}, "--dry-run=client", command="install")
        self.assertEqual(done.stdout.partition("NOTES:")[2].strip(), "`enabled` is false: nothing is installed.")


if __name__ == "__main__":
    unittest.main()
