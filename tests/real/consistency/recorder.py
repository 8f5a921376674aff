"""Records of clients in Python, in the form of `go/history.go`: one JSON object a line."""

import hashlib
import json
import threading
import time
import uuid

VALUE = "jackstay.test/value"
GROUP = "check.jackstay.test"
COLLECTIONS = {"configmaps": "/api/v1", "leases": "/apis/coordination.k8s.io/v1", "things": f"/apis/{GROUP}/v1"}


def collection(resource, namespace):
    return f"{COLLECTIONS[resource]}/namespaces/{namespace}/{resource}"


def object_item(value):
    """An object as a response shows it. The hash is of all its fields but kind and apiVersion, which lists leave out."""
    metadata = value["metadata"]
    text = json.dumps({k: v for k, v in value.items() if k not in ("kind", "apiVersion")}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return {"key": metadata["name"], "version": int(metadata["resourceVersion"]), "uid": metadata["uid"],
            "value": (metadata.get("annotations") or {}).get(VALUE, ""), "hash": hashlib.sha256(text.encode()).hexdigest()[:16]}


def manifest(resource, key, value, set_label):
    metadata = {"name": key, "labels": {"set": set_label}, "annotations": {VALUE: value}}
    if resource == "configmaps":
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"value": value}}
    if resource == "leases":
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {"holderIdentity": value, "leaseDurationSeconds": 40}}
    return {"apiVersion": f"{GROUP}/v1", "kind": "Thing", "metadata": metadata, "spec": {"value": value}}


class Recorder:
    """Appends the records of one client to a file."""

    def __init__(self, path, client):
        self.file, self.client, self.lock = open(path, "a", buffering=1), client, threading.Lock()
        self.op = self.seq = 0

    def write(self, record):
        with self.lock:
            self.file.write(json.dumps(record) + "\n")

    def value(self):
        """A value that no other write has."""
        with self.lock:
            self.seq += 1
            return f"{self.client}-{self.seq}"

    def invoke(self, verb, resource, key="", form=None, value=""):
        """Records a request before it is sent; returns its number and audit ID."""
        with self.lock:
            self.op += 1
            op = self.op
        ident = str(uuid.uuid4())
        self.write({"kind": "invoke", "client": self.client, "op": op, "verb": verb, "resource": resource, "key": key, "form": form or {}, "value": value,
                    "audit_id": ident, "wall": time.time_ns(), "at": time.monotonic_ns()})
        return op, ident

    def reply(self, op, code, body=None, at=None, **more):
        """Records a complete response. `body` is a dict, if it is JSON."""
        record = {"kind": "return", "client": self.client, "op": op, "code": code, "at": at or time.monotonic_ns(), **more}
        if body is not None and code >= 300:
            record |= {"message": body.get("message", ""), "reason": body.get("reason", "")}
        elif body is not None and "items" in body:
            record |= {"version": int(body["metadata"]["resourceVersion"]), "items": [object_item(o) for o in body["items"]]}
            if body["metadata"].get("continue"):
                record["continue"] = True
        elif body is not None and body.get("kind") == "Status":  # of a deletion
            record["items"] = [{"key": body["details"]["name"], "uid": body["details"]["uid"]}]
        elif body is not None:
            item = object_item(body)
            record |= {"version": item["version"], "items": [item]}
        self.write(record)

    def event(self, op, kind, value):
        record = {"kind": "event", "client": self.client, "op": op, "type": kind, "at": time.monotonic_ns()}
        if kind == "ERROR":
            record |= {"code": value.get("code"), "message": value.get("message")}
        elif kind == "BOOKMARK":
            metadata = value["metadata"]
            record |= {"version": int(metadata["resourceVersion"]), "initial_end": (metadata.get("annotations") or {}).get("k8s.io/initial-events-end") == "true"}
        else:
            record |= object_item(value)
        self.write(record)

    def end(self, op, how, error=""):
        self.write({"kind": "end", "client": self.client, "op": op, "how": how, "error": error, "at": time.monotonic_ns()})
