"""Users with a certificate that is no identity of a listener in mode terminate: their connections are passed through by
server name, on the same port."""

import base64
import json
import stat
import time
import unittest
import uuid
from pathlib import Path

from cases import StoppedOnExit, collect_lines
from figures import within
from rig import Jackstay, log, wait_for
from test_custom import Watcher
from test_jackstay import JackstayCase

LISTENER = 7530
NAME = "kubernetes.default.svc"
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"


class PassedThrough(JackstayCase, unittest.TestCase):
    @classmethod
    def prepare(cls):
        def adapt(config):
            config["listeners"][0]["passthrough_server_names"] = [NAME]
        cls.jackstay = Jackstay(cls.rig, [cls.rig.admin_cert], adapt=adapt, log_name="jackstay-passed", port=LISTENER, admin=LISTENER + 2000).start()
        cls.addClassCleanup(cls.jackstay.stop)
        cls.server = cls.jackstay.server

    def kubeconfig(self, name, user=None, server_name=NAME):
        """The kubeconfig of bob, whose certificate no identity has, or of another `user`."""
        path = self.rig.kubeconfig(name, self.server, cert=self.rig.developer_cert)
        config = json.loads(path.read_text())
        if server_name:
            config["clusters"][0]["cluster"]["tls-server-name"] = server_name
        if user:
            config["users"][0]["user"] = user
        path.write_text(json.dumps(config))
        return path

    def exec_plugin(self):
        """A user whose plugin returns bob's certificate."""
        crt, key = map(Path, self.rig.developer_cert)
        plugin = self.rig.dir / "bob-plugin"
        credential = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {
            "clientCertificateData": crt.read_text(), "clientKeyData": key.read_text()}}
        plugin.write_text(f"#!/bin/sh\necho {base64.b64encode(json.dumps(credential).encode()).decode()} | base64 -d\n")
        plugin.chmod(stat.S_IRWXU)
        return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}}

    def test_certificate_of_a_user_reaches_the_apiserver(self):
        closed = self.jackstay.total("jackstay_passthrough_closed_total")
        for kind, user in (("certificate", None), ("exec plugin", self.exec_plugin())):
            with self.subTest(kind):
                refused = self.rig.kubectl(self.kubeconfig("bob-l7", user, None), "get", "--raw", "/api", check=False)
                self.assertNotEqual(refused.returncode, 0)
                if not user:
                    # kubectl shows the message of the 401 of its own certificate only at -v=8.
                    answer = self.rig.api(self.server, cert=self.rig.developer_cert).get("/api")
                    self.assertIn(f"set tls-server-name of the client's kubeconfig to {NAME}", answer.json["message"])
                name = f"bob-{uuid.uuid4().hex[:6]}"
                self.rig.kubectl(self.kubeconfig("bob", user), "get", "--raw", f"/apis?marker={name}")
                users = {e["user"]["username"] for e in self.rig.audit(lambda e: name in e["requestURI"])}
                self.assertEqual(users, {"bob"})
        # The flow of a kubectl ends with it.
        wait_for("the end of the flows", lambda: self.jackstay.total("jackstay_passthrough_closed_total") >= closed + 2, 10)
        self.assertEqual(self.jackstay.status()["listeners"][0]["flows"], 0)

    def test_killed_apiserver_ends_its_flows_and_no_watch_of_others(self):
        api = self.rig.api(self.server, cert=self.rig.admin_cert)
        version = api.must("GET", CONFIGMAPS)["metadata"]["resourceVersion"]
        watchers = [Watcher(api, CONFIGMAPS, version) for _ in range(6)]
        config = self.kubeconfig("bob")
        self.rig.control.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
            "metadata": {"name": "bob-views"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
            "subjects": [{"kind": "User", "name": "bob", "apiGroup": "rbac.authorization.k8s.io"}]})
        self.addCleanup(self.rig.control.request, "DELETE", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/bob-views")
        wait_for("bob's permission", lambda: self.rig.kubectl(config, "get", "configmaps", check=False).returncode == 0, 10)
        with StoppedOnExit(self.rig.kubectl_start(config, "get", "configmaps", "--watch")) as child:
            lines = []
            collect_lines(child, lines)
            wait_for("kubectl's watch", lambda: lines, 15)
            serving = [e["address"].rpartition(":")[0] for e in self.jackstay.status()["upstreams"][0]["endpoints"] if e["flows"]]
            self.assertEqual(len(serving), 1, serving)
            victim, = (a for a in self.rig.apiservers.values() if a.address == serving[0])
            begun = time.monotonic()
            victim.kill()
            wait_for("the end of kubectl's connection", lambda: child.poll() is not None or not self.jackstay.status()["listeners"][0]["flows"], 20)
            within(self, "a flow beside L7, its apiserver killed: end", time.monotonic() - begun, "s", 3)
        self.rig.kubectl(config, "get", "configmaps")
        name = f"after-{uuid.uuid4().hex[:6]}"
        api.must("POST", CONFIGMAPS, {"metadata": {"name": name}})
        self.addCleanup(self.rig.control.request, "DELETE", f"{CONFIGMAPS}/{name}")
        wait_for("the event on every watch", lambda: all(any(event[1] == name for event in w.events()) for w in watchers), 15)
        for watcher in watchers:
            watcher.stop()
        self.assertEqual([(len(w.responses), w.ends, w.broken, w.too_old, w.codes) for w in watchers], [(1, 0, 0, 0, [])] * len(watchers))
        log(f"    {victim.name} killed; {len(watchers)} watches of an identity beside the flow continued")
