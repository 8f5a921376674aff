"""Decides whether a recorded history keeps the promises of the Kubernetes API, and shows the smallest violation.

The functions are pure: they read operations (history.read_records) and the full history of each resource
(history.read_etcd). Etcd's revisions are the order in which all writes took effect, so linearizability needs no search
as in Porcupine: each read is compared with the state at the versions that it may show.

    ordered, unique, reliable, resumable, bookmarkable   watches, as etcd's robustness tests name them
    delivered     a watch that is open at the end has received every event
    contents      what a response or an event shows existed at its version; a list is the state at its version
    bytes         an object is the same in every response and event that shows this version of it
    monotonic     no read and no new watch shows an older state than its client has seen
    most recent   a read without a version shows everything that any client had seen before it, acknowledged writes
                  included; a write takes effect after it was sent
    requested     a list shows the version that it names, or one that is not older
    once          an acknowledged write took effect once, one without a known result at most once, a refused one never
    sent once     no apiserver received a write that another one has executed or may have executed
    unknown write nothing but the recorded writes changed an object
    watch end     no watch ends, and no version expires, without a reason that the protocol allows
    silent error  every failure has a Status with a message
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from .history import DELETE, PUT

DETECTED = 10 * 10**9  # nanoseconds; a lost connection is found so long after the fault at the latest
INITIAL = 2 * 10**9  # nanoseconds; initial events arrive so long after the start of a watch at the latest
WRITES = ("create", "update", "patch", "delete")


@dataclass
class Violation:
    rule: str
    text: str
    records: list

    def __str__(self):
        return f"{self.rule}: {self.text}" + "".join(f"\n    {shorten(record)}" for record in self.records)


def shorten(record):
    """A record on one line, without long lists."""
    if not isinstance(record, dict):
        return repr(record)
    shown = {k: v for k, v in record.items() if v not in (None, "", [], {}) and k not in ("items", "wall")}
    if record.get("items"):
        shown["items"] = f"{len(record['items'])} objects"
    return ", ".join(f"{k}={v}" for k, v in shown.items())


class Checker:
    def __init__(self, operations, others, histories, audits=()):
        """`audits` has (audit ID, apiserver, code) of each request that an apiserver has answered."""
        self.operations, self.histories, self.audits = operations, histories, audits
        self.faults = [r for r in others if r["kind"] == "fault"]
        self.final = {r["resource"]: r["version"] for r in others if r["kind"] == "final"}
        self.violations = []
        self.hashes = {}  # (resource, name, version, deleted): (hash, record)

    def report(self, rule, text, *records):
        self.violations.append(Violation(rule, text, [r for r in records if r is not None]))

    def check(self):
        """All violations, the smallest of each rule first."""
        for operation in sorted(self.operations, key=lambda o: not o.invoke.get("reference")):
            self.check_bytes(operation)
        for operation in self.operations:
            history = self.histories[operation.resource]
            self.check_error(operation)
            if operation.verb == "watch":
                self.check_watch(operation, history)
            elif operation.verb == "get":
                self.check_get(operation, history)
            elif operation.verb == "list":
                self.check_list(operation, history)
        self.check_pages()
        for resource, history in self.histories.items():
            self.check_writes([o for o in self.operations if o.resource == resource and o.verb in WRITES], history)
        self.check_audit()
        self.violations.sort(key=lambda v: (v.rule, len(v.records), min((r["at"] for r in v.records if isinstance(r, dict)), default=0)))
        return self.violations

    # ---- objects ----

    def check_bytes(self, operation):
        shown = [(operation.reply, item, False) for item in (operation.reply or {}).get("items") or []]
        shown += [(event, event, event["type"] == "DELETED") for event in operation.events if event["type"] in ("ADDED", "MODIFIED", "DELETED")]
        for record, item, deleted in shown:
            if not item.get("hash"):
                continue
            known = self.hashes.setdefault((operation.resource, item["key"], item["version"], deleted), (item["hash"], record))
            if known[0] != item["hash"]:
                self.report("bytes", f"{item['key']} at version {item['version']} differs", known[1], operation.invoke, record)

    def check_item(self, operation, history, item, record):
        """Whether an object existed; returns false if not."""
        change = history.exactly(item["key"], item["version"])
        if change is None:
            self.report("contents", f"{operation.resource} {item['key']} never had version {item['version']}", operation.invoke, record)
            return False
        if item.get("value") is not None and (item["value"], item.get("uid") or change.uid) != (change.value, change.uid):
            self.report("contents", f"{operation.resource} {item['key']} had value {change.value!r} and uid {change.uid} at version {item['version']}", operation.invoke, record)
            return False
        return True

    # ---- reads ----

    def limits(self, operation):
        """(rule, version, record) of the versions that a read must not be older than."""
        form = operation.form
        if form.get("continue") or form.get("match") == "Exact":
            return []
        if form.get("resourceVersion") and form["resourceVersion"] != "0":
            return [("requested", int(form["resourceVersion"]), None)]
        limits = [("monotonic", *operation.floor)]
        return limits if form.get("resourceVersion") == "0" else [("most recent", *operation.known), *limits]

    def check_get(self, operation, history):
        if not operation.ok and operation.code != 404:
            return
        if operation.ok:
            item = operation.reply["items"][0]
            if not self.check_item(operation, history, item, operation.reply):
                return
        for rule, version, record in self.limits(operation):
            if operation.ok:
                change = history.next_change(operation.key, item["version"])
                if change and change.version <= version:
                    return self.report(rule, f"{operation.resource} {operation.key}: version {item['version']} was replaced by {change.version}, and {version} was known", record, *operation.records)
            else:
                # The object must be absent at some version since then.
                present = history.at(operation.key, version)
                if present and not any(c.kind == DELETE and c.version > version for c in history.by_key[operation.key]):
                    return self.report(rule, f"{operation.resource} {operation.key} was not found, but version {present.version} exists since before {version}", record, *operation.records)

    def check_list(self, operation, history):
        if not operation.ok:
            return
        version, form = operation.reply["version"], operation.form
        selector = form.get("selector", "")
        for item in operation.reply["items"]:
            if not self.check_item(operation, history, item, operation.reply):
                return
        shown = {item["key"]: item["version"] for item in operation.reply["items"]}
        state = history.state(version, selector)
        wrong = {key for key, v in shown.items() if state.get(key) != v}
        if not form.get("continue") and not operation.reply.get("continue"):
            wrong |= state.keys() - shown.keys()
        if wrong:
            key = min(wrong)
            return self.report("contents", f"{operation.resource} {key} had version {state.get(key)} in the state at {version}, the list has {shown.get(key)}", *operation.records)
        if form.get("match") == "Exact" and not form.get("continue") and version != int(form["resourceVersion"]):
            self.report("requested", f"{operation.resource}: exactly {form['resourceVersion']} was requested", *operation.records)
        for rule, limit, record in self.limits(operation):
            change = history.change_between(version, limit, selector)
            if change or (rule == "requested" and version < limit):
                return self.report(rule, f"{operation.resource}: a list at {version}, but {limit} was known" + (f" and {change.key} changed at {change.version}" if change else ""), record, *operation.records)

    def check_pages(self):
        """A list in pages is the state at the version of its first page."""
        chains = defaultdict(list)
        for operation in self.operations:
            if operation.verb == "list" and operation.form.get("chain") is not None:
                chains[operation.client, operation.form["chain"]].append(operation)
        for pages in chains.values():
            if not all(p.ok for p in pages):
                continue
            pages.sort(key=lambda p: p.invoke["at"])
            first = pages[0]
            for page in pages[1:]:
                if page.reply["version"] != first.reply["version"]:
                    self.report("contents", f"{first.resource}: pages at {first.reply['version']} and {page.reply['version']}", first.reply, *page.records)
                    break
            else:
                if pages[-1].reply.get("continue"):
                    continue
                keys = Counter(item["key"] for page in pages for item in page.reply["items"])
                state = self.histories[first.resource].state(first.reply["version"], first.form.get("selector", ""))
                wrong = (state.keys() ^ keys.keys()) | {k for k, n in keys.items() if n > 1}
                if wrong:
                    self.report("contents", f"{first.resource} {min(wrong)} is missing in the pages, repeated or unknown", *first.records, *pages[-1].records)

    # ---- watches ----

    def check_watch(self, operation, history):
        form = operation.form
        events = [e for e in operation.events if e["type"] != "ERROR"]
        if form.get("resourceVersion", "") not in ("", "0") and not form.get("sendInitialEvents"):
            start = int(form["resourceVersion"])
        else:
            start, events = self.check_initial(operation, history, events)
            if start is None:
                return
        self.check_events(operation, history, start, events)
        self.check_end(operation)

    def check_initial(self, operation, history, events):
        """Finds the version whose state the initial events show; returns it and the events after them."""
        changes = [e for e in events if e["type"] != "BOOKMARK"]
        selector = operation.form.get("selector", "")
        marks = [e for e in events if e.get("initial_end")]
        for event in changes:
            if event["type"] == "ADDED" and not self.check_item(operation, history, event, event):
                return None, []
        # Shown objects by (name, version) and in order; a version fits if its state is the first part of them.
        pairs, fitting = [(e["key"], e["version"]) for e in changes], None
        complete = bool(marks) or operation.form.get("complete")
        following = history.events(selector)
        candidates = [0, *(e.version for e in following)]
        for index, version in enumerate(candidates):
            state = set(history.state(version, selector).items())
            shown = pairs[:len(state)]
            if len(shown) < len(state):
                fits = not complete and len(set(shown)) == len(shown) and set(shown) <= state
            else:
                rest = pairs[len(state):]
                expected = following[index:index + len(rest)]
                fits = set(shown) == state and [(e.key, e.version) for e in expected] == rest
            if fits and all(e["type"] == "ADDED" for e in changes[:len(shown)]):
                fitting = (version, following[index].version - 1 if index < len(following) else float("inf"), len(shown))
        if fitting is None:
            # Names the first rule that the events break, for the newest state that the initial events show.
            best = [v for v in candidates if (s := set(history.state(v, selector).items())) and set(pairs[:len(s)]) == s]
            if not best:
                self.report("contents", f"{operation.resource}: the initial events are not the state at any version", operation.invoke, *changes[:2])
                return None, []
            fitting = (best[-1], float("inf"), len(history.state(best[-1], selector)))
        version, last, count = fitting
        form = operation.form
        if not (form.get("resourceVersion", "") not in ("", "0")):
            limits = [("monotonic", *operation.floor)] + ([] if form.get("resourceVersion") == "0" else [("most recent", *operation.known)])
            # With this bookmark, a watch has shown everything up to it.
            reached = max([last, *(e["version"] for e in marks)])
            for rule, limit, record in limits:
                if reached < limit and (marks or form.get("resourceVersion") == "0") and history.change_between(reached, limit, selector):
                    self.report(rule, f"{operation.resource}: a watch began with the state at {version}, but {limit} was known", record, *operation.records, *changes[:1])
                    break
        skipped, rest = 0, []
        for event in events:
            if event["type"] != "BOOKMARK" and skipped < count:
                skipped += 1
            else:
                rest.append(event)
        return version, rest

    def check_order(self, operation, events):
        """Each event comes once, and after all older ones."""
        seen, before = {}, None
        for event in events:
            version = event["version"]
            if version in seen:
                self.report("unique", f"{operation.resource} {event['key']}: the event at {version} came twice", operation.invoke, seen[version], event)
                return False
            if before and version < before["version"]:
                self.report("ordered", f"{operation.resource}: the event at {version} came after the one at {before['version']}", operation.invoke, before, event)
                return False
            seen[version] = before = event
        return True

    def check_events(self, operation, history, start, events):
        """Compares a watch with the events after its start."""
        if not self.check_order(operation, [e for e in events if e["type"] != "BOOKMARK"]):
            return
        selector = operation.form.get("selector", "")
        expected = history.events(selector)
        position = next((i for i, e in enumerate(expected) if e.version > start), len(expected))
        before, bookmark = None, None
        by_version = {e.version: (i, e) for i, e in enumerate(expected)}
        for event in events:
            version = event["version"]
            if event["type"] == "BOOKMARK":
                if position < len(expected) and expected[position].version <= version:
                    self.report("bookmarkable", f"{operation.resource}: a bookmark at {version} before the event of {expected[position].key} at {expected[position].version}", operation.invoke, before, event)
                    return
                bookmark = event
                continue
            if bookmark and version <= bookmark["version"]:
                self.report("bookmarkable", f"{operation.resource}: the event at {version} came after a bookmark at {bookmark['version']}", operation.invoke, bookmark, event)
                return
            if version <= start:
                self.report("resumable", f"{operation.resource}: a watch from {start} shows the event at {version}", operation.invoke, event)
                return
            index, known = by_version.get(version, (None, None))
            if known is None or (known.key, known.type) != (event["key"], event["type"]) or event.get("value") not in (None, known.value):
                self.report("contents", f"{operation.resource}: the event at {version} is {known}", operation.invoke, event)
                return
            if index > position:
                rule = "resumable" if before is None else "reliable"
                self.report(rule, f"{operation.resource}: the event of {expected[position].key} at {expected[position].version} is missing", operation.invoke, before, event)
                return
            position, before = index + 1, event
        final = self.final.get(operation.resource)
        if final and operation.end and operation.end.get("how") == "stopped" and position < len(expected) and expected[position].version <= final:
            missing = expected[position]
            self.report("delivered", f"{operation.resource}: the event of {missing.key} at {missing.version} never came", *operation.records, before)

    def during(self, record, names):
        return any(f["at"] <= record["at"] <= f["until"] for f in self.faults if f["name"] in names)

    def check_end(self, operation):
        """A watch ends when its client or its timeout ends it, when jackstay hands over, or when its version expired."""
        if operation.invoke.get("reference"):
            return
        errors = [e for e in operation.events if e["type"] == "ERROR"]
        expired = operation.code == 410 or any(e.get("code") == 410 for e in errors)
        if expired:
            cursor = max([int(operation.form.get("resourceVersion") or 0), *(e.get("version") or 0 for e in operation.events)])
            at = errors[0] if errors else operation.reply
            if not any(f["version"] >= cursor and f["at"] <= at["at"] for f in self.faults if f.get("expires")):
                self.report("watch end", f"{operation.resource}: version {cursor} expired, and no compaction or restart explains it", operation.invoke, at)
        elif errors:
            self.report("watch end", f"{operation.resource}: an error event {errors[0].get('code')}: {errors[0].get('message')}", operation.invoke, errors[0])
        elif operation.ok and operation.end and operation.end["how"] == "broken":
            if not self.in_initial_events(operation):
                self.report("watch end", f"{operation.resource}: the watch broke: {operation.end.get('error')}", operation.invoke, operation.end)
        elif operation.ok and operation.end and operation.end["how"] == "clean":
            lasted = (operation.end["at"] - operation.invoke["at"]) / 1e9
            timeout = operation.form.get("timeoutSeconds")
            if not (timeout and lasted >= timeout - 2) and not self.during(operation.end, ("takeover",)):
                self.report("watch end", f"{operation.resource}: the watch ended after {lasted:.1f} s", operation.invoke, operation.end)

    def in_initial_events(self, operation):
        """Whether a fault may have broken a watch in its initial events: a clean end would make them look complete."""
        form, end, initial = operation.form, operation.end["at"], operation.invoke["at"] + INITIAL
        return (int(form.get("resourceVersion") or 0) == 0 and not form.get("sendInitialEvents")
                and all(event["type"] == "ADDED" and event["at"] <= initial for event in operation.events)
                and any(f["at"] <= end <= f["until"] + DETECTED for f in self.faults))

    # ---- errors ----

    def check_error(self, operation):
        reply = operation.reply
        if operation.invoke.get("reference") or reply is None:
            return
        if reply.get("error"):
            if not self.during(reply, ("takeover",)):
                self.report("silent error", f"{operation.verb} {operation.resource}: {reply['error']}", *operation.records)
        elif reply["code"] >= 400 and not reply.get("message"):
            self.report("silent error", f"{operation.verb} {operation.resource}: {reply['code']} without a message", *operation.records)

    # ---- writes ----

    def check_writes(self, writes, history):
        values = {}
        for write in writes:
            refused = 400 <= write.code < 500 or (write.reply or {}).get("retry_after")
            if write.verb == "delete":
                continue
            values[write.value] = write
            changes = history.by_value.get(write.value, [])
            if len(changes) > 1:
                self.report("once", f"{write.resource} {write.key}: {write.value} took effect at {changes[0].version} and {changes[1].version}", *write.records)
            elif write.ok and not changes:
                self.report("once", f"{write.resource} {write.key}: {write.value} was acknowledged and never took effect", *write.records)
            elif refused and changes:
                self.report("once", f"{write.resource} {write.key}: {write.value} was refused and took effect at {changes[0].version}", *write.records)
            elif changes and changes[0].version <= write.known[0]:
                self.report("most recent", f"{write.resource} {write.key}: {write.value} took effect at {changes[0].version}, and {write.known[0]} was known before it was sent", write.known[1], *write.records)
            elif write.ok:
                for item in write.reply["items"]:
                    if item["version"] != changes[0].version or not self.check_item(write, history, item, write.reply):
                        self.report("contents", f"{write.resource} {write.key}: {write.value} took effect at {changes[0].version}", *write.records)
        for change in history.changes:
            if change.kind == PUT and change.value and change.value not in values:
                self.report("unknown write", f"{change.key} got the value {change.value!r} at {change.version}", change)
        self.check_deletes([w for w in writes if w.verb == "delete"], history)

    def check_deletes(self, deletes, history):
        """Each acknowledged deletion names the uid that it deleted."""
        deleted = {(c.key, c.uid): c for c in history.changes if c.kind == DELETE}
        done = {}
        for delete in deletes:
            if not delete.ok:
                continue
            ident = (delete.key, delete.reply["items"][0]["uid"])
            if ident not in deleted:
                self.report("once", f"{delete.resource} {delete.key}: an acknowledged deletion of {ident[1]} never took effect", *delete.records)
            elif ident in done:
                self.report("once", f"{delete.resource} {delete.key}: two acknowledged deletions of {ident[1]}", *done[ident].records, *delete.records)
            elif deleted[ident].version <= delete.known[0]:
                self.report("most recent", f"{delete.resource} {delete.key} was deleted at {deleted[ident].version}, and {delete.known[0]} was known before that was requested", delete.known[1], *delete.records)
            done.setdefault(ident, delete)
        unknown = Counter(d.key for d in deletes if not d.ok and not 400 <= d.code < 500)
        for ident, change in deleted.items():
            if ident not in done and change.value:
                unknown[ident[0]] -= 1
                if unknown[ident[0]] < 0:
                    self.report("unknown write", f"{ident[0]} was deleted at {change.version} by none of the recorded requests", change)

    def check_audit(self):
        """A write is sent to a second apiserver only if the first has refused it before doing anything."""
        writes = {o.audit_id: o for o in self.operations if o.verb in WRITES and o.audit_id}
        received = defaultdict(list)
        for ident, server, code in self.audits:
            if ident in writes:
                received[ident].append((server, code))
        for ident, answers in received.items():
            processed = [a for a in answers if a[1] not in (429, 503)]
            if len(processed) > 1:
                self.report("sent once", f"{writes[ident].verb} {writes[ident].resource} was sent to {answers}", *writes[ident].records)


def check(operations, others, histories, audits=()):
    return Checker(operations, others, histories, audits).check()


def summary(operations, violations):
    """Numbers of requests and events, and of violations by rule."""
    verbs = Counter(o.verb for o in operations if not o.invoke.get("reference"))
    failed = Counter(o.code for o in operations if not o.ok and o.reply and not o.invoke.get("reference"))
    own = sum((o.reply or {}).get("message", "").startswith("jackstay: ") for o in operations)
    events = sum(len(o.events) for o in operations if not o.invoke.get("reference"))
    return (f"{sum(verbs.values())} operations ({', '.join(f'{n} {v}' for v, n in sorted(verbs.items()))}), {events} events, "
            f"failures by code {dict(sorted(failed.items()))}, {own} errors of jackstay; {len(violations)} violations "
            f"{dict(sorted(Counter(v.rule for v in violations).items()))}")


def smallest(violations, most=12):
    """The smallest violation of each rule and kind: two are of one kind if they differ in names and numbers only."""
    kinds = {}
    for violation in violations:
        kind = re.sub(r"\b(configmaps|leases|things|k\d)\b|[\d.]+", "", violation.text)
        kinds.setdefault((violation.rule, kind), violation)
    return list(kinds.values())[:most]
