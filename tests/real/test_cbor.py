"""Apiservers with CBOR (CBORServingAndStorage) and clients that ask for it; and sharded lists and watches."""

import subprocess
import time
import unittest
import uuid
from urllib.parse import quote

import cbor
from cases import StoppedOnExit, collect_lines, long_form
from extra import ExtraCase
from kubernetes import RELEASE, Kubectl, CURRENT_KUBECTL
from matrix import covers
from rig import log, wait_for
from settings import Settings, client_features
from test_custom import Watcher

CBOR, SHARDED = "CBORServingAndStorage", "ShardedListAndWatch"
CBOR_KUBECTL = Kubectl("current, CBOR", CURRENT_KUBECTL.binary, client_features("ClientsAllowCBOR", "ClientsPreferCBOR"))
HALVES = [("0x0000000000000000", "0x8000000000000000"), ("0x8000000000000000", "0x10000000000000000")]
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
needs_cbor = unittest.skipUnless(RELEASE and RELEASE.structured_authentication, "Kubernetes 1.20 has no CBOR")


def sharded(jackstay):
    """Whether each apiserver serves shards, as jackstay has found out."""
    return [(endpoint.get("capabilities") or {}).get("sharded") for endpoint in jackstay.status()["upstreams"][0]["endpoints"]]


@needs_cbor
@covers("`CBORServingAndStorage`")
class Cbor(ExtraCase, unittest.TestCase):
    """Both apiservers serve CBOR."""

    SETTINGS = {"d": Settings(features=(CBOR, SHARDED)), "e": Settings(features=(CBOR, SHARDED))}
    READS_METRICS = True

    def test_bodies_equal_direct_bodies(self):
        here, there = (self.rig.api(server, cert=self.rig.admin_cert) for server in (self.server, "d"))
        kind = {"headers": {"Accept": "application/cbor"}}
        # The version of a list is that of the newest write anywhere, except of an exact one.
        exact = f"?resourceVersionMatch=Exact&resourceVersion={here.must('GET', CONFIGMAPS)['metadata']['resourceVersion']}"
        for path in ("/api/v1/namespaces/default", CONFIGMAPS + exact, f"{CONFIGMAPS}{exact}&limit=1", "/api/v1/namespaces/none"):
            with self.subTest(path):
                answers = [api.get(path, **kind) for api in (here, there)]
                self.assertEqual([a.headers["Content-Type"] for a in answers], ["application/cbor"] * 2)
                self.assertEqual(answers[0].code, answers[1].code)
                self.assertEqual(*(cbor.decode(answer.body) for answer in answers))
        name = f"cbor-{uuid.uuid4().hex[:6]}"
        body = b"\xd9\xd9\xf7\xa3\x4aapiVersion\x42v1\x44kind\x49ConfigMap\x48metadata\xa1\x44name" + bytes([0x40 + len(name)]) + name.encode()
        made = here.request("POST", CONFIGMAPS, body, content_type="application/cbor", **kind)
        self.assertEqual(made.code, 201, made)
        self.assertEqual(here.request("DELETE", f"{CONFIGMAPS}/{name}").code, 200)

    @long_form("test_encodings has a killed apiserver")
    @covers("`ClientsAllowCBOR`, `ClientsPreferCBOR`: kubectl")
    def test_kubectl_waits_through_a_kill(self):
        """`kubectl wait` lists and watches with client-go's dynamic client, the one that asks for CBOR."""
        config, name = self.rig.kubeconfig("cbor", self.server, cert=self.rig.admin_cert), f"cbor-{uuid.uuid4().hex[:6]}"
        argv = ["wait", f"configmap/{name}", "--for=jsonpath={.data.key}=two", "--timeout=40s", "-v=9"]
        self.rig.control.must("POST", CONFIGMAPS, {"metadata": {"name": name}, "data": {"key": "one"}})
        with StoppedOnExit(self.rig.kubectl_start(config, *argv, variant=CBOR_KUBECTL, stdin=subprocess.DEVNULL)) as child:
            errors = []
            child.stdout, child.stderr = child.stderr, child.stdout
            reader = collect_lines(child, errors)
            def watches():  # without the first one, with initial events, which an etcd without progress requests refuses
                return sum("-XGET" in line and "watch=true" in line and "sendInitialEvents" not in line for _, line in errors)
            wait_for("kubectl to watch", watches, 15)
            wait_for("jackstay to watch", lambda: sum(e["watches"] for e in self.endpoints().values()) == 1, 15)
            self.most_watched().kill()
            time.sleep(3)
            self.rig.control.must("PATCH", f"{CONFIGMAPS}/{name}", {"data": {"key": "two"}}, content_type="application/merge-patch+json")
            code = child.wait(40)
            reader.join(5)
        text = "\n".join(line for _, line in errors)
        self.assertIn("application/cbor", text)
        self.assertEqual((code, watches()), (0, 1), text[-2000:])

    @covers("`ShardedListAndWatch`")
    def test_shards_of_lists_and_watches(self):
        """Both halves of a sharded list make the whole one, and watches of the halves continue through SIGKILL."""
        namespace = self.rig.load_namespace()
        path, api = f"/api/v1/namespaces/{namespace}/configmaps", self.rig.api(self.server, cert=self.rig.admin_cert, timeout=60)
        for i in range(24):
            self.rig.control.must("POST", path, {"metadata": {"name": f"item-{i}"}}, keep=True)
        shards = [f"{path}?shardSelector=" + quote(f"shardRange(object.metadata.uid, '{start}', '{end}')") for start, end in HALVES]

        def names(listed):
            found = {item["metadata"]["name"] for item in listed["items"]}
            return {name for name in found if name.startswith("item-")}  # without those of the controller manager
        lists = [api.must("GET", shard) for shard in shards]
        for shard, listed in zip(shards, lists):
            # The version of a list is that of the newest write anywhere.
            self.assertEqual(names(listed), names(self.rig.api("d", cert=self.rig.admin_cert).must("GET", shard)))
        whole = names(api.must("GET", path))
        log(f"    shards of {len(names(lists[0]))} and {len(names(lists[1]))} objects; metadata {lists[0]['metadata']}")
        self.assertEqual((names(lists[0]) | names(lists[1]), names(lists[0]) & names(lists[1])), (whole, set()))
        self.assertTrue(0 < len(names(lists[0])) < len(whole), "all objects are in one shard")
        watchers = [Watcher(api, shard, listed["metadata"]["resourceVersion"]) for shard, listed in zip(shards, lists) for _ in range(4)]
        for watcher in watchers:
            self.addCleanup(watcher.stop)
        wait_for("the watches", lambda: all(watcher.responses for watcher in watchers), 30)
        wait_for("both apiservers to serve shards", lambda: sharded(self.jackstay) == [True, True], 15)
        self.most_watched().kill()
        for i in range(24):
            self.rig.control.must("PATCH", f"{path}/item-{i}", {"data": {"turn": "1"}}, content_type="application/merge-patch+json", keep=True)
        for i, watcher in enumerate(watchers):
            expected = names(lists[i // 4])
            wait_for(f"the events of watch {i}", lambda: len(watcher.events()) >= len(expected), 20)
        time.sleep(0.5)
        for i, watcher in enumerate(watchers):
            self.assertEqual((sorted(name for _, name, _ in watcher.events() if name.startswith("item-")), watcher.ends, watcher.broken, watcher.too_old),
                             (sorted(names(lists[i // 4])), 0, 0, 0))

    def test_watches_with_an_unknown_parameter(self):
        """They continue through SIGKILL, because both apiservers are of one build with the same gates, as their metrics show."""
        api = self.rig.api(self.server, cert=self.rig.admin_cert, timeout=60)
        version = api.must("GET", CONFIGMAPS)["metadata"]["resourceVersion"]
        watchers = [Watcher(api, f"{CONFIGMAPS}?example.com/hint=1", version) for _ in range(4)]
        for watcher in watchers:
            self.addCleanup(watcher.stop)

        def features():
            return {endpoint["capabilities"]["features"] for endpoint in self.jackstay.status()["upstreams"][0]["endpoints"]}
        wait_for("equal features", lambda: len(features()) == 1 and None not in features(), 15)
        wait_for("the watches", lambda: all(watcher.responses for watcher in watchers), 30)
        self.most_watched().kill()
        name = f"hint-{uuid.uuid4().hex[:6]}"
        self.rig.control.must("POST", CONFIGMAPS, {"metadata": {"name": name}})
        for watcher in watchers:
            wait_for("the event", lambda: name in [seen for _, seen, _ in watcher.events()], 20)
        self.assertEqual([(w.ends, w.broken, w.too_old, len(w.responses)) for w in watchers], [(0, 0, 0, 1)] * 4)


@needs_cbor
@long_form("test_encodings has apiservers with the same features")
@covers("apiservers with different features", "`CBORServingAndStorage`", "`ShardedListAndWatch`")
class Mixed(ExtraCase, unittest.TestCase):
    """One of two apiservers serves CBOR and shards, as during their introduction: a watch keeps both from its beginning to its end."""

    SETTINGS = {"d": Settings(features=(CBOR, SHARDED)), "e": Settings()}

    def test_shard_is_not_watched_where_shards_are_not_served(self):
        """All watches of a shard end cleanly when their apiserver is killed, whether it serves shards or not: none may continue at the other one."""
        api = self.rig.api(self.server, cert=self.rig.admin_cert, timeout=60)
        shard = f"{CONFIGMAPS}?shardSelector=" + quote("shardRange(object.metadata.uid, '{}', '{}')".format(*HALVES[0]))
        version = api.must("GET", CONFIGMAPS)["metadata"]["resourceVersion"]
        for name in "de":
            with self.subTest(name):
                watchers = [Watcher(api, shard, version) for _ in range(8)]
                for watcher in watchers:
                    self.addCleanup(watcher.stop)
                wait_for("the watches", lambda: all(watcher.responses for watcher in watchers), 30)
                wait_for("what both serve", lambda: sorted(sharded(self.jackstay), key=str) == [False, True], 15)
                before, on_it = self.ended_by_parameter(), self.endpoints()[name]["watches"]
                self.rig.extra[name].kill()
                wait_for("their ends", lambda: self.ended_by_parameter() - before == on_it, 10)
                log(f"    {name} killed: {on_it} of 8 watches of a shard ended cleanly")
                self.assertEqual(sum(watcher.broken + watcher.too_old for watcher in watchers), 0)
                for watcher in watchers:
                    watcher.stop()
                self.rig.extra[name].restart(graceful=False, down=0)

    def ended_by_parameter(self):
        return self.jackstay.metrics().get('jackstay_watch_resumes_total{outcome="parameter"}', 0)

    def test_watches_keep_their_format(self):
        """The client takes CBOR or JSON. A watch in CBOR cannot continue at an apiserver without it: it ends cleanly, and
        the client watches again from its last version."""
        for name in "de":
            with self.subTest(name):
                self.run_fault(f"SIGKILL of {name}, one of them with CBOR", self.rig.extra[name].kill, counted=False,
                               flags={"formats": "cbor-or-json"}, slowest_read=0.3, busy=2)
