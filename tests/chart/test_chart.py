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
                if daemon_set:
                    daemon_set["template"]["metadata"].pop("annotations", None)  # the checksum, in place of a generated name
                    volume, = (v for v in daemon_set["template"]["spec"]["volumes"] if v["name"] == "config")
                    volume["configMap"]["name"] = one["metadata"]["name"]
                else:
                    one["data"] = {key: yaml.safe_load(value) for key, value in one["data"].items()}
                    one["metadata"] = {"name": re.sub("-[a-z0-9]{10}$", "", one["metadata"]["name"]), "namespace": one["metadata"]["namespace"]}
            return {(kind, one["metadata"]["name"]): one for (kind, _), one in found.items()}
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
                    self.assertFalse(pod["automountServiceAccountToken"])
                    may_be_root = name.endswith("-transparent")
                    self.assertEqual(pod["securityContext"].get("runAsNonRoot", False), not may_be_root)
                    for container in pod["containers"] + pod.get("initContainers", []):
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
            ({}, lambda r: sorted(r), [("ConfigMap", lb), key]),
            ({"loadBalancer": {"enabled": False}}, lambda r: list(r), []),
            ({"image": {"tag": "2"}}, lambda r: container(r)["image"], "localhost/jackstay:2"),
            ({"image": {"tag": "2", "digest": "sha256:" + "a" * 64}}, lambda r: container(r)["image"], "localhost/jackstay@sha256:" + "a" * 64),
            ({"image": {"pullPolicy": "Never"}}, lambda r: container(r)["imagePullPolicy"], "Never"),
            ({"imagePullSecrets": ["a"]}, lambda r: pod(r)["imagePullSecrets"], [{"name": "a"}]),
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
                if kind == "ConfigMap" and "jackstay.yaml" in one["data"]:
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
                self.assertEqual(set(node["properties"]) - {"global"}, set(value), path)
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

    def test_notes_say_where_l7_runs(self):
        done = with_values(MINIMAL, "--dry-run=client", command="install")
        self.assertEqual(done.returncode, 0, done.stderr)
        notes = done.stdout.partition("NOTES:")[2]
        self.assertIn("10.0.0.5:8443", notes)
        self.assertIn("needs kubelet's key", notes)


if __name__ == "__main__":
    unittest.main()
