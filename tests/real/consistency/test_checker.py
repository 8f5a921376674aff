"""The checker finds each kind of broken history, and nothing in a correct one."""

import json
import unittest

from consistency import checker
from consistency.history import DELETE, PUT, Change, History, read_etcd, read_records


def changes():
    """x is created, changed twice and deleted; y is created and gets another label."""
    return [Change(10, PUT, "x", "ux", "v10", (("set", "a"),)), Change(12, PUT, "y", "uy", "v12", (("set", "a"),)),
            Change(14, PUT, "x", "ux", "v14", (("set", "a"),)), Change(16, PUT, "y", "uy", "v16", (("set", "b"),)),
            Change(18, PUT, "x", "ux", "v18", (("set", "a"),)), Change(20, DELETE, "x")]


def item(key, version, value=None, hash=None, uid=None):
    return {"key": key, "version": version, "value": value or f"v{version}", "uid": uid or f"u{key}", "hash": hash or f"h{version}"}


class Recording:
    """Records of one or more clients; each call takes a nanosecond of the clock unless it gives its time."""

    def __init__(self):
        self.records, self.time = [], 1000
        for at, version, key in ((1, 10, "x"), (2, 12, "y"), (3, 14, "x"), (4, 16, "y"), (5, 18, "x")):
            self.write(key, f"v{version}", version, at=at, client=f"writer-{version}", until=900)
        self.deletion = self.operation("delete", client="writer-20", at=6, until=900, key="x", code=200, items=[{"key": "x", "uid": "ux"}])

    def tick(self):
        self.time += 1
        return self.time

    def operation(self, verb, client="client", key="", form=None, at=None, until=None, code=200, value="", **reply):
        number = len(self.records)
        self.records.append({"kind": "invoke", "client": client, "op": number, "verb": verb, "resource": "configmaps", "key": key,
                             "form": form or {}, "value": value, "audit_id": f"audit-{number}", "at": at or self.tick()})
        if code is not None:
            self.records.append({"kind": "return", "client": client, "op": number, "code": code, "at": until or self.tick(),
                                 **({"message": "some reason"} if code >= 400 else {}), **reply})
        return number

    def write(self, key, value, version, verb="patch", **more):
        return self.operation(verb, key=key, value=value, items=[item(key, version, value)] if version else [], **more)

    def get(self, key, version, rv="0", **more):
        return self.operation("get", key=key, form={"resourceVersion": rv} if rv else {}, items=[item(key, version)], version=version, **more)

    def list(self, version, rv="0", selector="", state=None, **more):
        form = {"resourceVersion": rv, "selector": selector, **more.pop("form", {})}
        found = History(changes()).state(version, selector) if state is None else state
        return self.operation("list", form=form, version=version, items=[item(k, v) for k, v in found.items()], **more)

    def watch(self, rv, events, how="stopped", selector="", form=None, client="watcher", after=0):
        """Events are versions, (type, version), ("BOOKMARK", version) or complete records."""
        known = {e.version: e for e in History(changes()).events(selector)}
        number = self.operation("watch", client=client, form={"resourceVersion": rv, "selector": selector, **(form or {})})
        for event in events:
            if isinstance(event, int):
                one = known[event]
                event = {"type": one.type, "key": one.key, "version": event, "value": one.value, "hash": f"h{event}"}
            elif isinstance(event, tuple):
                event = {"type": event[0], "version": event[1], "key": event[2] if len(event) > 2 else "",
                         **({"value": f"v{event[1]}", "uid": f"u{event[2]}"} if len(event) > 2 else {})}
            self.records.append({"kind": "event", "client": client, "op": number, "at": self.tick(), **event})
        if how:
            self.records.append({"kind": "end", "client": client, "op": number, "how": how, "at": self.tick() + after})
        return number

    def check(self, audits=(), history=None):
        operations, others = read_records(map(json.dumps, self.records))
        return checker.check(operations, others, {"configmaps": History(history or changes())}, audits)


class Rules(unittest.TestCase):
    def setUp(self):
        self.recording = Recording()

    def expect(self, *rules, **more):
        violations = self.recording.check(**more)
        self.assertEqual([v.rule for v in violations], list(rules), "\n".join(map(str, violations)))
        return violations

    # ---- a correct history ----

    def test_correct_history_has_no_violation(self):
        r = self.recording
        r.get("x", 14, client="cache")
        r.list(14, client="cache")
        r.list(18, client="cache")
        r.list(20, rv="", client="recent")
        r.operation("get", key="x", client="recent", code=404)
        r.list(12, rv="12", form={"match": "Exact"}, client="recent")
        r.list(16, rv="14", form={"match": "NotOlderThan"}, client="other")
        r.watch("12", [14, ("BOOKMARK", 15), 16, 18, ("BOOKMARK", 19), 20])
        r.watch("10", [12, 14, 16, 18, 20], selector="set=a", client="labels")
        r.watch("0", [("ADDED", 14, "x"), ("ADDED", 12, "y"), 16, 18, 20], client="cached")
        r.watch("", [("ADDED", 16, "y"), {"type": "BOOKMARK", "version": 20, "initial_end": True}], form={"sendInitialEvents": True}, client="streaming")
        r.records.append({"kind": "final", "resource": "configmaps", "version": 20, "at": r.tick()})
        self.expect(audits=[("audit-0", "a", 200)])

    # ---- watches ----

    def test_ordered(self):
        self.recording.watch("12", [14, 18, 16])
        self.expect("ordered")

    def test_unique(self):
        self.recording.watch("12", [14, 16, 16])
        self.expect("unique")

    def test_reliable(self):
        self.recording.watch("12", [14, 18])
        violation, = self.expect("reliable")
        self.assertEqual(len(violation.records), 3)
        self.assertIn("y at 16", violation.text)

    def test_reliable_with_selector(self):
        self.recording.watch("10", [12, 14, 18], selector="set=a")  # The event with which y leaves the set is missing.
        self.expect("reliable")

    def test_resumable(self):
        self.recording.watch("12", [16, 18])
        self.expect("resumable")
        self.recording = Recording()
        self.recording.watch("14", [14, 16])
        self.expect("resumable")

    def test_bookmarkable(self):
        self.recording.watch("12", [14, ("BOOKMARK", 17), 18])
        self.expect("bookmarkable")
        self.recording = Recording()
        self.recording.watch("12", [("BOOKMARK", 14)])
        self.expect("bookmarkable")

    def test_delivered(self):
        self.recording.watch("12", [14, 16])
        self.recording.records.append({"kind": "final", "resource": "configmaps", "version": 18, "at": self.recording.tick()})
        self.expect("delivered")

    def test_initial_events_are_a_state(self):
        self.recording.watch("0", [("ADDED", 18, "x"), ("ADDED", 12, "y"), 20])
        self.expect("contents")

    def test_initial_events_then_gap(self):
        self.recording.watch("0", [("ADDED", 14, "x"), ("ADDED", 12, "y"), 18])
        self.expect("resumable")

    def test_initial_bookmark_with_missing_object(self):
        self.recording.watch("", [("ADDED", 14, "x"), {"type": "BOOKMARK", "version": 14, "initial_end": True}], form={"sendInitialEvents": True})
        self.expect("contents")

    def test_watch_ends(self):
        for how, more, rules in (("broken", {}, ["watch end"]), ("clean", {}, ["watch end"]), ("clean", {"form": {"timeoutSeconds": 5}, "after": 5 * 10**9}, [])):
            self.recording = Recording()
            self.recording.watch("12", [14], how=how, **more)
            self.expect(*rules)

    def test_watch_that_breaks_in_its_initial_events(self):
        fault = {"kind": "fault", "name": "killed", "at": 1000, "until": 2000, "version": 20}
        for version, events, faults, rules in (
                ("0", [("ADDED", 14, "x")], [fault], []), ("", [], [fault], []), ("0", [("ADDED", 14, "x")], [], ["watch end"]),
                ("0", [("ADDED", 12, "y"), 14], [fault], ["watch end"]), ("12", [], [fault], ["watch end"])):
            self.recording = Recording()
            self.recording.watch(version, events, how="broken")
            self.recording.records += faults
            self.expect(*rules)

    def test_clean_end_in_a_takeover(self):
        self.recording.watch("12", [14], how="clean")
        self.recording.records.append({"kind": "fault", "name": "takeover", "at": 1000, "until": 2000, "version": 20})
        self.expect()

    def test_expired_version(self):
        error = {"type": "ERROR", "code": 410, "message": "too old"}
        self.recording.watch("12", [14, error], how="clean")
        self.expect("watch end")
        self.recording.records.append({"kind": "fault", "name": "compaction", "expires": True, "at": 1000, "until": 2000, "version": 20})
        self.expect()

    # ---- contents ----

    def test_event_with_wrong_value(self):
        self.recording.watch("12", [{"type": "MODIFIED", "key": "x", "version": 14, "value": "v10"}])
        self.expect("contents")

    def test_object_that_never_existed(self):
        self.recording.get("x", 15)
        self.expect("contents")

    def test_list_is_a_state(self):
        self.recording.list(16, state={"x": 14, "y": 12})
        self.expect("contents")
        self.recording = Recording()
        self.recording.list(16, state={"y": 16})
        self.expect("contents")

    def test_pages(self):
        r = self.recording
        for version, key, more in ((14, "x", {"continue": "token"}), (14, "y", {})):
            form = {"limit": 1, "chain": 1, **({"continue": True} if key == "y" else {})}
            r.list(version, rv="12", state={key: 14 if key == "x" else 12}, form=form, **more)
        self.expect()
        r.records[-1]["items"] = [item("x", 14)]
        self.expect("contents")

    def test_bytes(self):
        self.recording.get("x", 14)
        self.recording.watch("12", [{"type": "MODIFIED", "key": "x", "version": 14, "value": "v14", "hash": "other"}])
        self.expect("bytes")

    # ---- reads ----

    def test_monotonic_list(self):
        self.recording.list(16)
        self.recording.list(14)
        violation, = self.expect("monotonic")
        self.assertEqual(len(violation.records), 3)

    def test_monotonic_get_after_event(self):
        self.recording.watch("12", [14], client="client")
        self.recording.get("x", 10)
        self.expect("monotonic")

    def test_monotonic_not_found(self):
        self.recording.get("y", 12)
        self.recording.operation("get", key="y", form={"resourceVersion": "0"}, code=404)
        self.expect("monotonic")

    def test_monotonic_watch(self):
        self.recording.list(18)
        self.recording.watch("0", [("ADDED", 14, "x"), ("ADDED", 12, "y")], client="client")
        self.expect("monotonic")

    def test_concurrent_reads_have_no_order(self):
        self.recording.list(16, at=1000, until=1010)
        self.recording.list(14, at=1005, until=1020)
        self.recording.list(14, client="other")  # Another client has not seen 16.
        self.expect()

    def test_older_number_without_a_change_is_not_older(self):
        self.recording.list(17)
        self.recording.list(16)
        self.expect()

    def test_most_recent_after_acknowledged_write(self):
        self.recording.get("x", 14, rv="")
        self.expect("most recent")
        self.recording = Recording()
        self.recording.list(16, rv="")
        self.expect("most recent")

    def test_write_takes_effect_after_it_was_sent(self):
        self.recording.write("y", "v12", 12, client="late")
        self.recording.records = self.recording.records[:2] + self.recording.records[4:]  # without the original one
        self.expect("most recent")

    def test_requested(self):
        self.recording.list(14, rv="16", form={"match": "NotOlderThan"})
        self.expect("requested")
        self.recording = Recording()
        self.recording.list(16, rv="14", form={"match": "Exact"})
        self.expect("requested")

    # ---- writes ----

    def test_write_applied_twice(self):
        history = [*changes()[:-1], Change(19, PUT, "x", "ux", "v18", (("set", "a"),)), Change(20, DELETE, "x")]
        self.expect("once", history=history)

    def test_acknowledged_write_lost(self):
        self.recording.write("y", "lost", 22)
        self.expect("once")

    def test_refused_write_applied(self):
        self.recording.records[1] |= {"code": 409, "items": [], "message": "conflict"}
        self.expect("once")

    def test_unprocessed_write_applied(self):
        self.recording.records[1] |= {"code": 502, "items": [], "message": "jackstay: not processed", "retry_after": "1"}
        self.expect("once")

    def test_unknown_write_may_be_applied(self):
        self.recording.records[1] |= {"code": 502, "items": [], "message": "jackstay: the connection was lost"}
        self.recording.write("y", "not applied", None, code=504)
        self.recording.operation("patch", key="y", value="no answer", code=None)
        self.expect()

    def test_deletion_lost_and_repeated(self):
        self.recording.operation("delete", key="y", code=200, items=[{"key": "y", "uid": "uy"}])
        self.expect("once")
        self.recording = Recording()
        self.recording.operation("delete", key="x", code=200, items=[{"key": "x", "uid": "ux"}], at=7)
        self.expect("once")

    def test_unknown_write(self):
        self.expect("unknown write", history=[*changes(), Change(22, PUT, "z", "uz", "v22")])
        self.expect("unknown write", history=[*changes(), Change(22, DELETE, "y")])

    def test_sent_once(self):
        self.expect("sent once", audits=[("audit-0", "a", 200), ("audit-0", "b", 409)])
        self.expect(audits=[("audit-0", "a", 429), ("audit-0", "b", 200)])

    # ---- errors ----

    def test_silent_errors(self):
        self.recording.operation("get", key="x", code=0, error="connection reset")
        self.expect("silent error")
        self.recording = Recording()
        self.recording.operation("get", key="x", code=502, message="")
        self.expect("silent error")


class Etcd(unittest.TestCase):
    def test_stored_objects(self):
        import base64

        def field(number, data):
            return bytes([number << 3 | 2, len(data)]) + data

        def entry(key, value):
            return field(1, key) + field(2, value)
        metadata = field(1, b"x") + field(5, b"uid-1") + field(11, entry(b"set", b"a")) + field(12, entry(b"jackstay.test/value", b"v"))
        stored = b"k8s\0" + field(1, b"type") + field(2, field(1, metadata))
        custom = json.dumps({"metadata": {"uid": "uid-2", "annotations": {"jackstay.test/value": "w"}}}).encode()

        def event(version, path, value=None):
            kv = {"key": base64.b64encode(path.encode()).decode(), "mod_revision": version}
            return {"kv": {**kv, "value": base64.b64encode(value).decode()}} if value else {"type": 1, "kv": kv}
        lines = [json.dumps({"Header": {}, "Events": [event(5, "/registry/configmaps/n/x", stored), event(6, "/registry/things/n/y", custom),
                                                      event(7, "/registry/configmaps/other/x", stored)]}),
                 "", json.dumps({"Events": [event(8, "/registry/configmaps/n/x")]}), json.dumps({"Events": None})]
        found = read_etcd(lines, {"configmaps": "configmaps", "things": "things"}, "n")
        self.assertEqual(found["configmaps"].changes, [Change(5, PUT, "x", "uid-1", "v", (("set", "a"),)), Change(8, DELETE, "x", "uid-1", "v", (("set", "a"),))])
        self.assertEqual(found["things"].changes, [Change(6, PUT, "y", "uid-2", "w")])


if __name__ == "__main__":
    unittest.main()
