"""One apiserver loses its path to the aggregated apiservers of an API group, or to an admission webhook, while its
/readyz and its core resources work. Reads of the group are answered by the other apiservers, and core resources are
not affected.

The apiservers dial the two replicas themselves. Each apiserver has one HTTP/2 connection to each replica. On a dark
one a request waits until the apiserver's PING has no response (45 s), except discovery, which has a deadline of 5 s.
Measured with 1.36: the response is then 503 with the text `error trying to reach service: ...`. With the text
`service unavailable` it says only that the APIService has the condition Available=False, which all apiservers share.
A refused apiserver and the others set that condition to False and to True in turn, about 100 times a second, from the
first check after the cut (30 s at most) until its end; half of the reads at a healthy apiserver then get this text."""

import base64
import collections
import http.client
import itertools
import json
import re
import time
import unittest
import uuid
from pathlib import Path

import aggregated
from cases import long_form
from extra import ExtraCase
from figures import LONG, record, within
from rig import ADMIN_TOKENS, EXTRA_ADDRESSES, PORT, log, sh, wait_for
from settings import Settings
from test_custom import Watcher
from workers import Client, Worker

HOSTS, BACKEND_PORT = ("10.99.0.31", "10.99.0.32"), 7591
SERVICE = {"namespace": "default", "name": "aggregated"}
COLLECTION = f"{aggregated.API}/{aggregated.RESOURCE}"
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
GROUP_PATHS = (f"{COLLECTION}/tick-1", COLLECTION, aggregated.API)
CORE_PATHS = (f"{CONFIGMAPS}?limit=1", f"{CONFIGMAPS}/kube-root-ca.crt?resourceVersion=0")
READ_PAUSE, WRITE_PAUSE, POLL_PAUSE = 0.05, 0.1, 0.1
WATCHES = 4
BEFORE = 2  # seconds of load before a fault
# Seconds of a fault. The availability controller of an apiserver checks the replicas every 30 s, and a dark connection
# is closed after 45 s: the long forms contain both.
REFUSED, DARK, DEAD = (70, 60, 40) if LONG else (6, 8, 6)
# Promises, in seconds.
SLOWEST_REFUSED, SLOWEST_DARK, SLOWEST_CORE, USED_AGAIN = 1, 2.5, 0.5, 31
# Seconds after which the status no longer names a webhook whose path works again.
WEBHOOK_KEPT = 65
# Requests to apiservers for each request of a client, when no apiserver reaches the replicas.
AMPLIFICATION = 1.1
API_SERVICE = f"/apis/apiregistration.k8s.io/v1/apiservices/{aggregated.VERSION}.{aggregated.GROUP}"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
WEBHOOK = "groups.jackstay.test"

Answer = collections.namedtuple("Answer", "ident sent took code kind body")


class Requester(Worker):
    """Sends requests, each with an Audit-ID of its own, and keeps every answer."""

    def __init__(self, case, server, paths, credential, method="GET", pause=READ_PAUSE):
        super().__init__(case)
        self.client, self.method, self.pause = Client(case.rig, server, **credential), method, pause
        self.paths, self.answers = itertools.cycle(paths), []

    def body(self):
        return None

    def work(self):
        ident, sent = str(uuid.uuid4()), time.monotonic()
        self.client.authorization["Audit-ID"] = ident
        try:
            response = self.client.send(self.method, next(self.paths), self.body(), timeout=70)
            code, kind, body = response.status, response.headers.get("Content-Type", ""), response.read()
        except (OSError, http.client.HTTPException) as error:
            self.client.close()
            code, kind, body = None, "", repr(error).encode()
        self.answers.append(Answer(ident, sent, time.monotonic() - sent, code, kind, body if code != 200 else b""))
        self.stopping.wait(self.pause)


class Creator(Requester):
    """Creates objects in the group, each with a name of its own."""

    def __init__(self, case, server, credential):
        super().__init__(case, server, [COLLECTION], credential, "POST", WRITE_PAUSE)
        self.names = []

    def body(self):
        self.names.append(f"write-{uuid.uuid4().hex}")
        return {"apiVersion": self.case.backend.API, "kind": aggregated.KIND, "metadata": {"name": self.names[-1]}}


class Load:
    """Readers of the group and of core resources, writers and watches of the group, through jackstay."""

    def __init__(self, case):
        self.case = case
        credentials = {"cert": case.rig.admin_cert}, {"token": ADMIN_TOKENS["admin-0"]}
        self.readers = [Requester(case, case.server, [path], credential) for path in GROUP_PATHS for credential in credentials]
        self.core = [Requester(case, case.server, CORE_PATHS, credential) for credential in credentials]
        self.creators = [Creator(case, case.server, credential) for credential in credentials]
        api = case.rig.api(case.server, cert=case.rig.admin_cert, timeout=120)
        self.first = int(api.must("GET", COLLECTION)["metadata"]["resourceVersion"])
        self.watchers = [Watcher(api, COLLECTION, str(self.first), bookmarks=i % 2 == 0) for i in range(WATCHES)]
        for watcher in self.watchers:
            case.addCleanup(watcher.stop)
        wait_for("the watches", lambda: all(watcher.events() for watcher in self.watchers), 20)
        self.workers = [*self.readers, *self.core, *self.creators]
        self.silence = [(0, time.monotonic(), 0.0)] * WATCHES  # events so far, time of the last, longest silence
        for worker in self.workers:
            worker.start()

    def note_silence(self):
        """Updates the longest silence of each watch."""
        now = time.monotonic()
        for i, watcher in enumerate(self.watchers):
            count, at, longest = self.silence[i]
            events = sum(map(len, watcher.responses))
            self.silence[i] = (events, now, longest) if events != count else (count, at, max(longest, now - at))

    def finish(self):
        for worker in self.workers:
            worker.stopping.set()
        deadline = time.monotonic() + 75
        for worker in self.workers:
            worker.join(max(0, deadline - time.monotonic()))
            self.case.assertFalse(worker.is_alive(), "a request has no answer")
            self.case.assertIsNone(worker.failure)

    @staticmethod
    def answers(workers):
        return [answer for worker in workers for answer in worker.answers]

    def failed(self, workers):
        return [answer for answer in self.answers(workers) if answer.code not in (200, 201)]

    def check_watches(self, what):
        """Checks that the events have all versions, each once: the server gives each object the next version."""
        for watcher in self.watchers:
            watcher.stop()
        longest = max(longest for _, _, longest in self.silence)
        ends = sum(w.ends + w.broken + w.too_old for w in self.watchers)
        record(f"{what}: longest silence of a watch of the group", longest, "s")
        record(f"{what}: responses of watches of the group that ended", ends, f"responses, and {sum(len(w.codes) for w in self.watchers)} refused watches")
        for watcher in self.watchers:
            versions = [version for _, _, version in watcher.events()]
            self.case.assertEqual(versions, list(range(self.first + 1, self.first + 1 + len(versions))))


def outcomes(answers):
    """Counts of the failed answers by code and text, without ports and addresses."""
    return dict(collections.Counter(f"{a.code} {a.kind} {re.sub('[0-9.]+:[0-9]+', 'ADDRESS', a.body[:200].decode(errors='replace')).strip()}" for a in answers))


class Groups(ExtraCase, unittest.TestCase):
    # The rig's 8 s would hide that an apiserver waits for 45 s on a dark connection.
    SETTINGS = {name: Settings(request_timeout=60) for name in EXTRA_ADDRESSES}
    LISTENER = 7560

    @classmethod
    def prepare(cls):
        rig, control = cls.rig, cls.rig.control
        for host in HOSTS:
            sh("ip", "addr", "add", f"{host}/32", "dev", "rig0")
            cls.addClassCleanup(sh, "ip", "addr", "del", f"{host}/32", "dev", "rig0")
        cert = rig.pki.issue("aggregated-program", "/CN=aggregated", [*HOSTS, f"{SERVICE['name']}.{SERVICE['namespace']}.svc"])
        cls.backend = aggregated.Program(rig, "aggregated-program", HOSTS, BACKEND_PORT, cert).start()
        cls.addClassCleanup(cls.backend.kill)
        super().prepare()
        path = f"/api/v1/namespaces/{SERVICE['namespace']}"
        # The controller manager mirrors the Endpoints to an EndpointSlice, which current apiservers read.
        for collection, name, body in (
                (f"{path}/services", SERVICE["name"], {"spec": {"ports": [{"name": "https", "port": 443}]}}),
                (f"{path}/endpoints", SERVICE["name"], {"subsets": [
                    {"addresses": [{"ip": host} for host in HOSTS], "ports": [{"name": "https", "port": BACKEND_PORT}]}]}),
                (API_SERVICE.rpartition("/")[0], API_SERVICE.rpartition("/")[2], {"spec": {
                    "group": aggregated.GROUP, "version": aggregated.VERSION, "groupPriorityMinimum": 1000, "versionPriority": 10,
                    "insecureSkipTLSVerify": True, "service": SERVICE}})):
            control.must("POST", collection, {"metadata": {"name": name}, **body})
            cls.addClassCleanup(control.request, "DELETE", f"{collection}/{name}")
        cls.wait_served()

    @classmethod
    def wait_served(cls):
        """Waits until every apiserver reaches the replicas: each request goes to one of them at random."""
        for name in cls.SETTINGS:
            api = cls.rig.api(name, cert=cls.rig.admin_cert, timeout=5)
            wait_for(f"{COLLECTION} on {name}", lambda: all(api.get(COLLECTION).code == 200 for _ in range(8)), 60)

    def endpoint(self, name):
        return f"{EXTRA_ADDRESSES[name]}:{PORT}"

    def failing(self, what="failing_groups", key="group"):
        """The failing groups in the status as pairs of endpoint and group; other arguments select webhooks."""
        return {(entry["endpoint"], entry[key]) for entry in self.jackstay.status()["upstreams"][0].get(what, [])}

    def group_metric(self, name, endpoint):
        return sum(value for sample, value in self.jackstay.metrics().items()
                   if sample.startswith(f"{name}{{") and f'"{endpoint}"' in sample and f'"{aggregated.GROUP}"' in sample)

    def group_retries(self):
        """Requests that jackstay has repeated because a group fails at an apiserver, or at all of them for a moment."""
        return sum(value for sample, value in self.jackstay.metrics().items() if sample.startswith('jackstay_retries_total{reason="group'))

    def upstream_requests(self, answers):
        """The requests that the apiservers received for the requests of these answers, by their audit logs: for each request
        of a client the codes with which the apiservers completed them."""
        idents = {answer.ident for answer in answers}

        def received():
            events = self.rig.audit(lambda e: e["auditID"] in idents and e["stage"] in ("ResponseComplete", "Panic"), list(self.SETTINGS))
            return {(e["auditID"], e["server"], e["requestReceivedTimestamp"], e.get("responseStatus", {}).get("code")) for e in events}
        before, now = None, received()
        while before != now:  # An apiserver logs a cancelled request late.
            time.sleep(1)
            before, now = now, received()
        codes = collections.defaultdict(list)
        for ident, _, _, code in now:
            codes[ident].append(code)
        return codes

    def used_again(self, name, offset):
        """Whether the apiserver has completed a request of the group, other than a watch, after this byte of its audit log."""
        with open(self.rig.extra[name].audit, "rb") as file:
            file.seek(offset)
            lines = file.read().split(b"\n")[:-1]
        return any(event["requestURI"].startswith(aggregated.API) and event["verb"] != "watch" and event.get("responseStatus", {}).get("code") == 200
                   for event in map(json.loads, lines) if event["user"]["username"] in ("rig-admin", "admin-0"))

    def observe(self, load, seconds, during):
        """Collects in `during` what the status calls failing, until the time is over."""
        begun, first = time.monotonic(), None
        while time.monotonic() < begun + seconds:
            now = self.failing()
            if now - during and first is None:
                first = time.monotonic() - begun
            during |= now
            load.note_silence()
            time.sleep(POLL_PAUSE)
        return first

    def report(self, what, load):
        """Writes the figures of the load. Returns the group's reads that failed, and those of core resources."""
        failed, core, writes = load.failed(load.readers), load.failed(load.core), load.failed(load.creators)
        reads = load.answers(load.readers)
        record(f"{what}: failed reads of the group", len(failed), f"of {len(reads)}")
        record(f"{what}: failed writes of the group", len(writes), f"of {len(load.answers(load.creators))}")
        record(f"{what}: failed reads of core resources", len(core), f"of {len(load.answers(load.core))}")
        log(f"    reads: {outcomes(failed)}; writes: {outcomes(writes)}; core: {outcomes(core)}")
        return failed, core

    def check_writes(self, what, load):
        """Checks that no write is applied twice, and that each one that succeeded is applied."""
        written = self.backend.written()
        names = [name for creator in load.creators for name in creator.names]
        twice = [name for name in names if written[name] > 1]
        record(f"{what}: writes of the group applied twice", len(twice), f"of {sum(written[name] > 0 for name in names)}")
        with self.subTest(f"{what}: no write is applied twice"):
            self.assertEqual(twice, [])
        with self.subTest(f"{what}: each write with 201 is applied"):
            self.assertEqual([name for creator in load.creators for name, answer in zip(creator.names, creator.answers)
                              if answer.code == 201 and written[name] == 0], [])

    def touch_api_service(self):
        """Makes each apiserver check the replicas at once. One that does not reach them sets the condition Available of the
        APIService to False. Then all apiservers answer 503 `service unavailable`, until one that reaches the replicas
        sets the condition to True."""
        self.rig.control.must("PATCH", API_SERVICE, {"metadata": {"annotations": {"touched": str(time.time())}}}, content_type="application/merge-patch+json")

    def cut(self, how, seconds, slowest, until_used=True, touch=False):
        """Cuts the path to the replicas of the apiserver with most watches, beside load. With `touch`, the shared status of
        the group begins to change between False and True in the middle of the fault."""
        what = f"path of one apiserver to an API group {how}"
        self.wait_served()
        load = Load(self)
        self.observe(load, BEFORE, set())
        # After the test before, only a request can show that the path works again.
        wait_for("no failing group", lambda: not self.failing(), 4 * USED_AGAIN)
        name = self.most_watched().name
        healthy = next(other for other in self.SETTINGS if other != name)
        direct_reader = Requester(self, self.rig.server(healthy), [COLLECTION], {"cert": self.rig.admin_cert}, pause=0.01)
        core_before = max(answer.took for answer in load.answers(load.core))
        used_before, during = self.used_again(name, 0), set()
        retries = self.group_retries()
        failures = self.group_metric("jackstay_group_failures_total", self.endpoint(name))
        self.rig.faults.cut_backends(name, self.backend.backends, how.partition(",")[0])
        direct_reader.start()
        first = self.observe(load, seconds / 2, during)
        if touch:
            self.touch_api_service()
        later = self.observe(load, seconds / 2, during)
        first = seconds / 2 + later if first is None and later is not None else first
        direct_reader.finish()
        self.assertGreater(self.rig.faults.dropped(), 0, "the fault affected no packet")
        gauge = self.group_metric("jackstay_group_failing", self.endpoint(name))
        ready = self.rig.api(name, cert=self.rig.admin_cert).get("/readyz").code
        offset, ended = self.rig.extra[name].audit.stat().st_size, time.monotonic()
        self.rig.faults.clear()
        again = None
        if until_used:
            while again is None and time.monotonic() < ended + 4 * USED_AGAIN:
                self.observe(load, 0.5, set())
                again = time.monotonic() - ended if self.used_again(name, offset) else None
        else:
            self.observe(load, 1, set())
        load.finish()
        failed, core = self.report(what, load)
        reads = load.answers(load.readers)
        received = self.upstream_requests(reads)
        repeated = sum(503 in codes and 200 in codes for codes in received.values())
        record(f"{what}: requests to apiservers for each read of the group", sum(map(len, received.values())) / len(reads), "requests")
        record(f"{what}: reads of the group that one apiserver answered with 503, and one with 200", repeated, "reads")
        record(f"{what}: slowest core read before", core_before, "s")
        if first is not None:
            record(f"{what}: time until the status names it", first, "s")
        unavailable = load.failed([direct_reader])
        record(f"{what}: reads that a healthy apiserver itself answers with 503 service unavailable", len(unavailable), f"of {len(direct_reader.answers)}, one after another")
        if unavailable:
            record(f"{what}: time between the first and the last of them", unavailable[-1].sent - unavailable[0].sent, "s")
        log(f"    {name}; the status during the fault: {sorted(during)}; directly at {healthy}: {outcomes(unavailable)}")
        self.assertTrue(used_before, f"{name} had no request of the group before")
        with self.subTest(f"{what}: /readyz of the apiserver"):
            self.assertEqual(ready, 200)
        with self.subTest(f"{what}: no read of the group fails"):
            self.assertEqual(outcomes(failed), {})
        with self.subTest(f"{what}: no read of core resources fails"):
            self.assertEqual(outcomes(core), {})
        with self.subTest(f"{what}: slowest read of the group"):
            within(self, f"{what}: slowest read of the group", max(answer.took for answer in reads), "s", slowest)
        with self.subTest(f"{what}: slowest core read"):
            within(self, f"{what}: slowest core read", max(answer.took for answer in load.answers(load.core)), "s", SLOWEST_CORE)
        self.check_writes(what, load)
        with self.subTest(f"{what}: events of watches"):
            load.check_watches(what)
        with self.subTest(f"{what}: the status names the endpoint and the group"):
            self.assertEqual(during, {(self.endpoint(name), aggregated.GROUP)})
        with self.subTest(f"{what}: metrics"):
            self.assertEqual(gauge, 1)
            self.assertGreater(self.group_metric("jackstay_group_failures_total", self.endpoint(name)), failures)
            if repeated and how.startswith("refused"):  # Otherwise, the apiserver logs 503 for a request that is cancelled after a hedge.
                self.assertGreater(self.group_retries(), retries)
        if until_used:
            with self.subTest(f"{what}: the apiserver is used for the group again"):
                self.assertIsNotNone(again, "not used again")
                within(self, f"{what}: time until the apiserver is used for the group again", again, "s", USED_AGAIN)
            with self.subTest(f"{what}: the status is empty again"):
                wait_for("no failing group", lambda: (self.endpoint(name), aggregated.GROUP) not in self.failing(), 10)
                self.assertEqual(self.group_metric("jackstay_group_failing", self.endpoint(name)), 0)

    def test_dark_path_fails_no_read_of_the_group(self):
        self.cut("dark", DARK, SLOWEST_DARK)

    def test_refused_path_fails_no_read_of_the_group(self):
        self.cut("refused", REFUSED, SLOWEST_REFUSED, until_used=LONG)

    def test_refused_path_and_a_false_status_of_the_group_fail_no_read(self):
        self.cut("refused, shared status False", REFUSED, SLOWEST_REFUSED, until_used=False, touch=True)

    @long_form("test_dark_path_fails_no_read_of_the_group drops both directions")
    def test_one_way_path_fails_no_read_of_the_group(self):
        self.cut("one way", DARK, SLOWEST_DARK)

    def dead(self, what, fault, heal, seconds):
        """No apiserver reaches the replicas: the failures reach the clients, and requests are not multiplied."""
        self.wait_served()
        load = Load(self)
        self.observe(load, BEFORE, set())
        begun, during = time.monotonic(), set()
        fault()
        self.observe(load, seconds, during)
        ended = time.monotonic()
        heal()
        self.wait_served()
        self.observe(load, 1, set())
        load.finish()
        self.report(what, load)
        asked = [answer for answer in load.answers(load.readers) if begun <= answer.sent < ended]
        ratio = sum(map(len, self.upstream_requests(asked).values())) / len(asked)
        record(f"{what}: requests to apiservers for each read of the group", ratio, f"requests, {len(asked)} reads", AMPLIFICATION)
        record(f"{what}: slowest read of the group", max(answer.took for answer in asked), "s")
        log(f"    the status during the fault: {sorted(during)}")
        with self.subTest(f"{what}: requests are not multiplied"):
            self.assertLessEqual(ratio, AMPLIFICATION)
        with self.subTest(f"{what}: a failed read has the answer of an apiserver"):
            self.assertEqual([a for a in load.failed(load.readers) if not (a.code == 503 and a.kind.startswith("text/plain")
                                                                          and re.match(b"error trying to reach service: |service unavailable", a.body))], [])
        with self.subTest(f"{what}: no read of core resources fails"):
            self.assertEqual(outcomes(load.failed(load.core)), {})
        with self.subTest(f"{what}: slowest core read"):
            within(self, f"{what}: slowest core read", max(answer.took for answer in load.answers(load.core)), "s", SLOWEST_CORE)
        self.check_writes(what, load)

    def test_zy_dead_replicas_refuse_and_requests_are_not_multiplied(self):
        self.addCleanup(self.restart_backend)
        self.dead("all replicas of an API group killed", self.backend.kill, self.restart_backend, DEAD)

    def restart_backend(self):
        if not self.backend.process.running:
            self.backend.start()

    @long_form("test_zy_dead_replicas_refuse_and_requests_are_not_multiplied has the same for replicas that refuse")
    def test_zz_dark_replicas_do_not_multiply_requests(self):
        self.dead("all replicas of an API group dark", lambda: self.rig.faults.drop_backends(self.backend.backends), self.rig.faults.clear, DARK)

    def create_webhook(self):
        """An admission webhook for ConfigMaps with a label, served by the replicas."""
        authority = base64.b64encode(Path(self.rig.pki.ca).read_bytes()).decode()
        self.rig.control.must("POST", WEBHOOKS, {"metadata": {"name": "groups"}, "webhooks": [{
            "name": WEBHOOK, "sideEffects": "None", "admissionReviewVersions": ["v1"], "failurePolicy": "Fail", "timeoutSeconds": 10,
            "clientConfig": {"service": {**SERVICE, "path": "/admit", "port": 443}, "caBundle": authority},
            "objectSelector": {"matchLabels": {"admission": "groups"}},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"], "scope": "*"}]}]})
        self.addCleanup(self.rig.control.request, "DELETE", f"{WEBHOOKS}/groups")

    @staticmethod
    def admitted():
        return {"metadata": {"name": f"admitted-{uuid.uuid4().hex}", "labels": {"admission": "groups"}}}

    def unreachable_webhook(self, name, how):
        what = f"path of one apiserver to an admission webhook {how}"
        self.wait_served()
        direct = self.rig.api(name, cert=self.rig.admin_cert, timeout=30)
        through = self.rig.api(self.server, cert=self.rig.admin_cert, timeout=30)
        self.rig.faults.cut_backends(name, self.backend.backends, how)
        trial = f"{CONFIGMAPS}?dryRun=All"
        expected = wait_for("the call of the webhook to fail", lambda: (answer := direct.request("POST", trial, self.admitted())).code == 500 and answer, 30)
        sent = []
        while len(sent) < 200 and (not sent or sent[-1][1].code == 201):
            ident = str(uuid.uuid4())
            sent.append((ident, through.request("POST", CONFIGMAPS, self.admitted(), headers={"Audit-ID": ident})))
        ident, answer = sent[-1]
        record(f"{what}: creates until one fails", len(sent), "creates")

        def unchanged(response):
            # The address that the apiserver dials is one of two, and a lost connection has a port.
            text = re.sub(r'(read|write|dial) tcp [^"\\]*(?:\\u003e[^"\\]*)?', "ADDRESS", response.body.decode())
            headers = sorted((key.lower(), value) for key, value in response.headers.items() if key.lower() not in ("audit-id", "date", "content-length"))
            return response.code, text, headers
        log(f"    {answer!r}")
        with self.subTest(f"{what}: the answer of the apiserver is unchanged"):
            self.assertEqual(unchanged(answer), unchanged(expected))
            self.assertEqual(answer.headers.get("Audit-Id"), ident)
        with self.subTest(f"{what}: the create is sent once"):
            found = wait_for("the create in an audit log", lambda: self.rig.audit(
                lambda e: e["auditID"] == ident and e["stage"] == "ResponseComplete", list(self.SETTINGS)), 5)
            self.assertEqual([(e["server"], e["responseStatus"]["code"]) for e in found], [(name, 500)])
        with self.subTest(f"{what}: the status names the endpoint and the webhook"):
            wait_for("the webhook in the status", lambda: self.failing("failing_webhooks", "webhook"), 3)
            self.assertEqual(self.failing("failing_webhooks", "webhook"), {(self.endpoint(name), WEBHOOK)})
        later = [through.request("POST", CONFIGMAPS, self.admitted()).code for _ in range(30)] if how == "refused" else []
        record(f"{what}: later creates that fail", sum(code != 201 for code in later), f"of {len(later)}")
        ended = time.monotonic()
        self.rig.faults.clear()
        if LONG:
            with self.subTest(f"{what}: the status is empty again"):
                wait_for("no failing webhook", lambda: not self.failing("failing_webhooks", "webhook"), 4 * WEBHOOK_KEPT)
                within(self, f"{what}: time until the status is empty", time.monotonic() - ended, "s", WEBHOOK_KEPT)

    def test_webhook_unreachable_from_one_apiserver_is_named(self):
        self.create_webhook()
        for how in ("refused", "dark") if LONG else ("refused",):
            self.unreachable_webhook("f", how)
