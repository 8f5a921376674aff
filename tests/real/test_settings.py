"""Apiservers with settings that close connections and refuse requests: jackstay's clients notice none of them."""

import http.client
import re
import threading
import time
import unittest
import uuid

from cases import long_form
from extra import ExtraCase
from figures import LONG, record, within
from kubernetes import RELEASE
from matrix import covers
from rig import ADMIN_TOKENS, EXTRA_ADDRESSES, NODE_IP, PORT, WATCH_ERRORS, Jackstay, Process, client_errors, log, sh, wait_for
from settings import HEALTH, Settings

ATTACKERS = 4
FRESH = 20  # tokens
PROBE_INTERVAL = 10  # seconds between two of jackstay's requests for /readyz


CURRENT = RELEASE.structured_authentication


class Refused(threading.Thread):
    """Sends requests that are answered with 401, one after another on a connection that is kept."""

    def __init__(self, rig, server, token):
        super().__init__(daemon=True)
        self.api, self.stopped, self.codes = rig.api(server, token=token), threading.Event(), []

    def run(self):
        while not self.stopped.wait(0.005):
            try:
                self.codes.append(self.api.get("/api/v1/nodes", keep=True).code)
            except (OSError, http.client.HTTPException) as error:
                self.codes.append(repr(error))


class Hardened(ExtraCase, unittest.TestCase):
    """Anonymous requests only to health checks, and graceful shutdown of watches; e also sends GOAWAY at random."""

    # 1.20 has neither of the first two.
    COMMON = {"anonymous_paths": HEALTH, "watch_termination": 3} if CURRENT else {}
    SETTINGS = {"d": Settings(shutdown_delay=3, **COMMON), "e": Settings(shutdown_delay=3, goaway_chance=0.02, **COMMON)}

    @covers("`--goaway-chance`", "apiservers with different flags")
    def test_goaway_breaks_nothing(self):
        before = self.dials()
        load = self.load(7, interval="25ms")
        report = load.finish()
        self.check_report("GOAWAY for 2 % of requests", load, report, writes_may_fail=False)
        opened = {name: count - before[name] for name, count in self.dials().items()}
        log(f"    connections opened in 7 s: {opened}")
        self.assertGreater(opened["e"], opened["d"] + 4, "e has sent no GOAWAY")
        self.assertGreater(sum(report["requests"][kind]["total"] for kind in ("read", "write")), 300)

    @unittest.skipUnless(CURRENT, "Kubernetes 1.20 has no structured authentication")
    @covers("structured authentication: anonymous requests only to health checks")
    def test_anonymous_requests_only_to_health_checks(self):
        for path, expected in [*((path, 200) for path in HEALTH), ("/readyz?verbose", 200), ("/api", 401), ("/version", 401), ("/livez/ping", 401)]:
            with self.subTest(path):
                here, there = self.rig.api(self.server).get(path), self.rig.api("d").get(path)
                self.assertEqual((here.code, there.code), (expected, expected))
                self.assertEqual(here.body, there.body)
        for credential in ({"cert": self.rig.admin_cert}, {"token": ADMIN_TOKENS["admin-1"]}):
            self.assertEqual(self.rig.api(self.server, **credential).get("/api/v1/nodes?limit=1").code, 200)
        # A 401 closes its HTTP/2 connection, so jackstay's own requests must not get it, with and without identities.
        bare = Jackstay(self.rig, [], [f"{EXTRA_ADDRESSES[name]}:{PORT}" for name in self.SETTINGS], log_name="jackstay-bare", port=7511, admin=9711)
        self.addCleanup(bare.stop)
        bare.start()
        wait_for("both endpoints to be ready", lambda: all(e["state"] == "ready" for e in bare.status()["upstreams"][0]["endpoints"]), 30)
        self.assertEqual(self.rig.api(bare.server, token=ADMIN_TOKENS["admin-1"]).get("/api/v1/nodes?limit=1").code, 200)
        time.sleep(2 * PROBE_INTERVAL if LONG else 0)
        own = self.rig.audit(lambda e: e.get("userAgent") == "jackstay-readyz" and e["responseStatus"]["code"] in (200, 401), self.SETTINGS)
        self.assertEqual({event["server"] for event in own}, set(self.SETTINGS))
        # Without an identity it asks each apiserver once for its version.
        refused = [(event["server"], event["requestURI"]) for event in own if event["responseStatus"]["code"] == 401]
        log(f"    jackstay's own requests with 401: {refused}")
        self.assertLessEqual(len(refused), len(set(refused)), "asked again after 401")
        self.assertLessEqual({uri for _, uri in refused}, {"/version"})

    @covers("`UnauthenticatedHTTP2DOSMitigation`: 401 beside watches")
    def test_refused_requests_break_no_watch_of_others(self):
        """The apiserver closes an HTTP/2 connection after a 401 (UnauthenticatedHTTP2DOSMitigation)."""
        before = self.dials()
        load = self.load(12, token=ADMIN_TOKENS["admin-2"])
        brief = self.load(11, token=ADMIN_TOKENS["admin-5"], watches=10, watch_timeout="3s", readers=1, writers=1)
        fresh = [self.fresh_token() for _ in range(FRESH)]
        load.until(2)
        attackers = [Refused(self.rig, self.server, "wrong" if i % 2 else None) for i in range(ATTACKERS)]
        for attacker in attackers:
            attacker.start()
        slowest = max(self.first_requests(token) for token in fresh)
        load.until(10)
        for attacker in attackers:
            attacker.stopped.set()
        for attacker in attackers:
            attacker.join(30)
        report = load.finish()
        codes = [code for attacker in attackers for code in attacker.codes]
        opened = {name: count - before[name] for name, count in self.dials().items()}
        log(f"    401 for {codes.count(401)} of {len(codes)} requests; connections opened: {opened}")
        record("requests with 401 beside 20 watches", codes.count(401), "requests")
        record("connections opened meanwhile", sum(opened.values()), "connections")
        self.check_report("401 in a loop", load, report, writes_may_fail=False, slowest_read=1)
        self.check_report("401 in a loop, watches of 3 s", brief, brief.finish(), writes_may_fail=False, slowest_read=1)
        self.assertGreater(brief.report["watches"]["ended_cleanly"], 20)
        within(self, "401 in a loop: slowest request with a new token", slowest, "s", 1)
        self.assertEqual(set(codes), {401} if CURRENT else {401, 403}, "anonymous requests get 403 without structured authentication")
        self.assertGreater(len(codes), 50)
        if CURRENT:  # 1.20 keeps the connections
            self.assertGreater(sum(opened.values()), 10, "the apiservers have closed no connection")

    @long_form("test_refused_requests_break_no_watch_of_others has 401 for the same requests")
    @covers("`UnauthenticatedHTTP2DOSMitigation`: anonymous 403 beside watches")
    def test_anonymous_403_break_no_watch_of_others(self):
        """With anonymous requests allowed, as by default, an apiserver closes the connection of each of them too."""
        jackstay = self.rig.start_jackstay()
        for what, server in (("directly", self.rig.server("a")), ("through jackstay", jackstay.server)):
            record(f"anonymous requests one after another, {what}: mean", self.anonymous_mean(server), "ms")
        before = jackstay.total("jackstay_dials_total")
        load = self.load(12, jackstay.server, token=ADMIN_TOKENS["admin-6"])
        load.until(2)
        attackers = [Refused(self.rig, jackstay.server, None) for _ in range(ATTACKERS)]
        for attacker in attackers:
            attacker.start()
        load.until(10)
        for attacker in attackers:
            attacker.stopped.set()
            attacker.join(30)
        report, codes = load.finish(), [code for attacker in attackers for code in attacker.codes]
        opened = jackstay.total("jackstay_dials_total") - before
        log(f"    403 for {codes.count(403)} of {len(codes)} requests; connections opened: {opened:.0f}")
        self.check_report("anonymous requests in a loop", load, report, writes_may_fail=False, slowest_read=1)
        self.assertEqual(set(codes), {403})
        if CURRENT:
            self.assertGreater(opened, 10, "the apiservers have closed no connection")

    def anonymous_mean(self, server, count=200):
        """The mean duration of anonymous requests on one connection, in ms. They get 403."""
        api, begun = self.rig.api(server), time.monotonic()
        for _ in range(count):
            self.assertEqual(api.get("/api/v1/nodes", keep=True).code, 403)
        return 1000 * (time.monotonic() - begun) / count

    def fresh_token(self):
        """A token of a ServiceAccount, which no request has had yet."""
        made = self.rig.control.must("POST", "/api/v1/namespaces/default/serviceaccounts/default/token", {
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}})
        return made["status"]["token"]

    def first_requests(self, token):
        """A read and a write with a token that jackstay has not seen, beside requests that are refused. Returns the seconds
        that the slower one took."""
        api, slowest = self.rig.api(self.server, token=token), 0
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {
            "resourceAttributes": {"verb": "list", "resource": "namespaces"}}}
        for method, path, body, expected in (("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review, 201), ("GET", "/api", None, 200)):
            begun = time.monotonic()
            answer = api.request(method, path, body)
            slowest = max(slowest, time.monotonic() - begun)
            self.assertEqual(answer.code, expected, answer)
        return slowest

    @covers("`--shutdown-delay-duration`", "`--shutdown-watch-termination-grace-period`")
    def test_shutdown_of_each_lists_nothing(self):
        """The apiserver ends its watches cleanly, and their clients continue them without a list."""
        load = self.load(180)
        load.until(2)
        for name in self.SETTINGS:
            watches = self.endpoints()[name]["watches"]
            begun = time.monotonic()
            self.rig.extra[name].restart(down=0.5)
            log(f"    {name} with {watches} watches was down and up again after {time.monotonic() - begun:.1f} s")
            time.sleep(3)
        report = load.finish(early=True)
        record("graceful shutdown of two apiservers: watches that ended cleanly", report["watches"]["ended_cleanly"], "watches")
        self.check_report("graceful shutdown", load, report, writes_may_fail=False, slowest_read=1, busy=3)

    @long_form("test_jackstay.Rotation rotates certificates")
    @covers("rotating tokens of a service account")
    def test_rotated_token_continues_watches(self):
        """The client reads its token again for each request. The first token is revoked; then the apiserver with watches
        that were opened with it is killed."""
        control, api = self.rig.control, "/api/v1/namespaces/default"
        account = f"rotating-{uuid.uuid4().hex[:6]}"
        control.must("POST", f"{api}/serviceaccounts", {"metadata": {"name": account}})
        control.must("POST", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", {
            "metadata": {"name": account}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": "default"}]})
        self.addCleanup(control.request, "DELETE", f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{account}")
        self.addCleanup(control.request, "DELETE", f"{api}/serviceaccounts/{account}")

        def token(number):
            """A token that ends when the Secret with this number is deleted. 600 s is the shortest lifetime."""
            secret = control.must("POST", f"{api}/secrets", {"metadata": {"name": f"{account}-{number}"}})["metadata"]
            bound = {"kind": "Secret", "apiVersion": "v1", "name": secret["name"], "uid": secret["uid"]}
            made = control.must("POST", f"{api}/serviceaccounts/{account}/token", {
                "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600, "boundObjectRef": bound}})
            return made["status"]["token"]

        def code(server, held):
            return self.rig.api(server, token=held).get(f"{api}/configmaps?limit=1").code
        first, second = token(1), token(2)
        for name in self.SETTINGS:
            wait_for(f"the token's permissions on {name}", lambda: (code(name, first), code(name, second)) == (200, 200), 30)
        load = self.load(120, token=first)
        load.until(2)
        load.rotate_token(second)
        control.must("DELETE", f"{api}/secrets/{account}-1")
        for name in self.SETTINGS:  # each caches the token for 10 s
            wait_for(f"{name} to refuse the first token", lambda: code(name, first) == 401, 40)
        log(f"    the first token is refused after {time.monotonic() - load.begun - 2:.1f} s")
        victim = self.most_watched()
        self.inject(victim.kill)
        time.sleep(3)
        victim.start()
        load.rotate_token(token(3))
        time.sleep(2)
        report = load.finish(early=True)
        self.check_report("rotating tokens", load, report, slowest_read=1)
        # jackstay may continue a watch only with the credential that its client sent.
        self.assertGreater(report["watches"]["ended_cleanly"], 0)

    def test_old_version_waits_for_an_apiserver_that_does_not_respond(self):
        """d has restarted and has no history of the watch. e has it, and its connections are suspect for a moment."""
        path = f"/api/v1/namespaces/{self.rig.load_namespace()}/secrets"
        first, _ = (self.rig.control.must("POST", path, {"metadata": {"name": name}}) for name in ("first", "second"))
        version = first["metadata"]["resourceVersion"]
        d, e = self.rig.extra["d"], self.rig.extra["e"]
        d.restart(graceful=False)
        wait_for("d to be ready", lambda: self.endpoints()["d"]["state"] == "ready", 30)
        self.assertIn(b"410", self.rig.api("d", cert=self.rig.admin_cert).get(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=1").body)

        def withheld():
            return self.jackstay.metrics().get('jackstay_watch_resumes_total{outcome="withheld"}', 0)
        before, bodies = withheld(), []
        watch = threading.Thread(target=lambda: bodies.append(
            self.rig.api(self.server, token=ADMIN_TOKENS["admin-1"]).get(f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=5").body))
        self.addCleanup(e.resume)
        e.pause()
        wait_for("e to be suspect", lambda: self.endpoints()["e"]["state"] != "ready", 10)
        watch.start()
        wait_for("the 410 of d", lambda: withheld() > before, 10)
        e.resume()
        watch.join(30)
        self.assertEqual([bool(re.search(rb'"ADDED".*"name":"second"', body)) and b"ERROR" not in body for body in bodies], [True], bodies)

    @covers("kube-proxy: nftables", "kube-proxy: iptables")
    def test_proxy_modes_notice_no_fault(self):
        # test_deploy.Controllers has iptables; 1.20 has only that.
        for mode in ["nftables"] * CURRENT + ["iptables"] * (LONG or not CURRENT):
            with self.subTest(mode):
                self.check_proxy(mode, 50 if mode == "nftables" else 60)

    def check_proxy(self, mode, number):
        rig, namespace = self.rig, self.rig.load_namespace()
        rig.control.request("POST", "/api/v1/nodes", {"metadata": {"name": "proxied"}, "status": {
            "addresses": [{"type": "InternalIP", "address": NODE_IP}]}})
        config = rig.kubeconfig(f"proxy-{mode}", self.server, token=ADMIN_TOKENS["admin-3"])
        proxy = Process(f"kube-proxy-{mode}", [
            RELEASE.program("kube-proxy"), f"--kubeconfig={config}", "--hostname-override=proxied", f"--proxy-mode={mode}",
            "--cluster-cidr=10.97.0.0/16", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0", "--healthz-bind-address=127.0.0.1:10266", "--metrics-bind-address=127.0.0.1:10259",
            "--v=2", "--vmodule=reflector=4"], rig.dir / f"kube-proxy-{mode}.log").start()
        self.addCleanup(proxy.stop)

        def service(index):
            address = f"10.96.0.{number + index}"
            rig.control.must("POST", f"/api/v1/namespaces/{namespace}/services", {
                "metadata": {"name": f"service-{index}"}, "spec": {"clusterIP": address, "ports": [{"port": 80}]}})
            rules = ["nft", "list", "table", "ip", "kube-proxy"] if mode == "nftables" else ["iptables-save"]
            wait_for(f"the rules of {address}", lambda: proxy.require_running() or re.search(rf"\b{re.escape(address)}\b", sh(*rules).stdout), 60)

        def lists():
            return len(re.findall("Listing and watching", proxy.logfile.read_text(errors="replace")))
        service(0)
        before, since = lists(), proxy.logfile.stat().st_size
        self.assertGreater(before, 1)
        # An apiserver that has restarted has no history for a quiet watch, whose client then lists; e stays as it is.
        rig.extra["d"].kill()
        service(1)
        rig.extra["d"].start()
        rig.faults.drop_flows(self.jackstay.pid, hooks=("input",))
        service(2)
        rig.recover()
        errors = [line for line in client_errors(proxy, WATCH_ERRORS, since=since) if "nftables objects" not in line]  # of the kernel
        self.assertEqual((errors, lists()), ([], before))
        proxy.stop()
        log(f"    kube-proxy in mode {mode}: {before} caches, no watch error in two faults")
