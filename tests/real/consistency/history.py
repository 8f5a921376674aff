"""The full history of the objects, as etcd has it, and the records that clients wrote.

A history holds all changes of one resource in one namespace. A version is etcd's revision, which is the
`resourceVersion` of the API.
"""

import base64
import bisect
import json
from dataclasses import dataclass, field

PUT, DELETE = "put", "delete"
# The annotation with a write's value. No two writes have the same value.
VALUE = "jackstay.test/value"


@dataclass(frozen=True)
class Change:
    """One revision of one object. The value, uid and labels of a deletion are those of the object before it."""

    version: int
    kind: str
    key: str  # the object's name
    uid: str = ""
    value: str = ""
    labels: tuple = ()


@dataclass(frozen=True)
class Event:
    """A change as a watch with a selector shows it."""

    version: int
    type: str
    key: str
    value: str


def matches(change, selector):
    """Whether a stored object matches `label=value` or `metadata.name=name`."""
    if not selector:
        return True
    name, _, value = selector.partition("=")
    return change.key == value if name == "metadata.name" else (name, value) in change.labels


class History:
    """All changes of one resource, in order."""

    def __init__(self, changes):
        self.changes = []
        self.by_key, self.by_value = {}, {}
        for change in sorted(changes, key=lambda c: c.version):
            of_key = self.by_key.setdefault(change.key, [])
            if change.kind == DELETE and of_key:
                before = of_key[-1]
                change = Change(change.version, DELETE, change.key, before.uid, before.value, before.labels)
            of_key.append(change)
            self.changes.append(change)
            if change.kind == PUT:
                self.by_value.setdefault(change.value, []).append(change)
        self.versions = [c.version for c in self.changes]
        self.versions_of = {key: [c.version for c in changes] for key, changes in self.by_key.items()}
        self.event_lists = {}

    def last_change(self, key, version):
        """The last change of an object up to a version, or None."""
        index = bisect.bisect_right(self.versions_of.get(key, ()), version)
        return self.by_key[key][index - 1] if index else None

    def at(self, key, version):
        """The stored object at a version, or None."""
        change = self.last_change(key, version)
        return change if change and change.kind == PUT else None

    def next_change(self, key, version):
        """The first change of an object after a version, or None."""
        index = bisect.bisect_right(self.versions_of.get(key, ()), version)
        return self.by_key[key][index] if index < len(self.versions_of.get(key, ())) else None

    def exactly(self, key, version):
        """The stored object that this version created, or None."""
        change = self.at(key, version)
        return change if change and change.version == version else None

    def state(self, version, selector=""):
        """{name: version} of all objects at a version."""
        found = {}
        for key in self.by_key:
            change = self.at(key, version)
            if change and matches(change, selector):
                found[key] = change.version
        return found

    def events(self, selector=""):
        """What a watch with this selector shows, from the first change."""
        if selector not in self.event_lists:
            events = []
            for change in self.changes:
                before = self.at(change.key, change.version - 1)
                was = before is not None and matches(before, selector)
                now = change.kind == PUT and matches(change, selector)
                if now:
                    events.append(Event(change.version, "MODIFIED" if was else "ADDED", change.key, change.value))
                elif was:
                    events.append(Event(change.version, "DELETED", change.key, before.value))
            self.event_lists[selector] = events
        return self.event_lists[selector]

    def change_between(self, after, until, selector=""):
        """The first event with after < version <= until, or None."""
        events = self.events(selector)
        index = bisect.bisect_right(events, after, key=lambda e: e.version)
        return events[index] if index < len(events) and events[index].version <= until else None


# ---- etcd ------------------------------------------------------------------------------------------

def fields(data):
    """(number, value) of each field of a protobuf message; values are ints or bytes."""
    position = 0

    def varint():
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
    while position < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, data[position:position + size]
            position += size
        else:
            raise ValueError(f"wire type {key & 7}")


def first(data, number, default=b""):
    return next((value for n, value in fields(data) if n == number), default)


def stored_metadata(value):
    """uid, labels and annotations of a stored object: protobuf (runtime.Unknown), or JSON for custom resources."""
    if not value.startswith(b"k8s\0"):
        metadata = json.loads(value)["metadata"]
        return metadata.get("uid", ""), metadata.get("labels") or {}, metadata.get("annotations") or {}
    metadata = first(first(value[4:], 2), 1)  # Unknown.raw, then ObjectMeta, the first field of every kind

    def table(number):
        return {first(e, 1).decode(): first(e, 2).decode() for n, e in fields(metadata) if n == number}
    return first(metadata, 5).decode(), table(11), table(12)


def read_etcd(lines, prefixes, namespace):
    """{resource: History} from the output of `etcdctl watch --write-out=json`. `prefixes` has the path below /registry
    of each resource."""
    changes = {resource: [] for resource in prefixes}
    for line in lines:
        if not line.strip():
            continue
        for event in json.loads(line).get("Events") or []:
            kv = event["kv"]
            path = base64.b64decode(kv["key"]).decode()
            for resource, prefix in prefixes.items():
                start = f"/registry/{prefix}/{namespace}/"
                if not path.startswith(start):
                    continue
                version, name = int(kv["mod_revision"]), path[len(start):]
                if event.get("type"):
                    changes[resource].append(Change(version, DELETE, name))
                else:
                    uid, labels, annotations = stored_metadata(base64.b64decode(kv["value"]))
                    changes[resource].append(Change(version, PUT, name, uid, annotations.get(VALUE, ""), tuple(sorted(labels.items()))))
    return {resource: History(found) for resource, found in changes.items()}


# ---- records ---------------------------------------------------------------------------------------

@dataclass
class Operation:
    """A request, its response and, for a watch, its events; all as the client recorded them."""

    invoke: dict
    reply: dict = None
    events: list = field(default_factory=list)
    end: dict = None
    # The newest version that this client, and that any client, had seen before the request was sent, and the record
    # that shows it.
    floor: tuple = (0, None)
    known: tuple = (0, None)

    def __getattr__(self, name):
        """A field of the request: verb, resource, key, value, form and so on."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self.invoke.get(name)

    @property
    def form(self):
        return self.invoke.get("form") or {}

    @property
    def code(self):
        return (self.reply or {}).get("code", 0)

    @property
    def ok(self):
        return 200 <= self.code < 300 and not self.reply.get("error")

    @property
    def records(self):
        return [r for r in (self.invoke, self.reply) if r]


def seen_versions(record, operation):
    """The versions that a record shows to its client."""
    if record["kind"] == "event":
        return [record["version"]] if record.get("version") else []
    if record["kind"] != "return" or not operation.ok:
        return []
    return [v for v in (record.get("version"), *(item.get("version") for item in record.get("items") or [])) if v]


def read_records(lines):
    """Operations and other records (faults, the end of the writes), with what was known when each request was sent.

    A response counts for a later request of the same or another client if it was complete before that request began.
    """
    records = [json.loads(line) for line in lines if line.strip()]
    # Requests before responses with the same time: nothing is known earlier than it must be.
    records.sort(key=lambda r: (r["at"], r["kind"] != "invoke"))
    operations, others, floors, known = {}, [], {}, {}
    for record in records:
        if record["kind"] in ("fault", "final"):
            others.append(record)
            continue
        ident = (record["client"], record["op"])
        if record["kind"] == "invoke":
            operation = operations[ident] = Operation(record)
            operation.floor = floors.get((record["client"], record["resource"]), (0, None))
            operation.known = known.get(record["resource"], (0, None))
            continue
        operation = operations[ident]
        if record["kind"] == "return":
            operation.reply = record
        elif record["kind"] == "event":
            operation.events.append(record)
        elif record["kind"] == "end":
            operation.end = record
        versions = seen_versions(record, operation)
        if versions:
            newest = (max(versions), record)
            for table, key in ((floors, (record["client"], operation.resource)), (known, operation.resource)):
                if newest[0] > table.get(key, (0, None))[0]:
                    table[key] = newest
    return list(operations.values()), others


def load(directory, prefixes):
    """Operations, other records, histories and audit entries of a recording."""
    lines = [line for file in sorted(directory.glob("records*")) for line in open(file)]
    operations, others = read_records(lines)
    with open(directory / "etcd") as etcd:
        histories = read_etcd(etcd, prefixes, (directory / "namespace").read_text())
    return operations, others, histories, json.loads((directory / "audit").read_text())
