"""Aggregated apiservers: one in this process, with a store for each replica, and one in Go with a common store."""

import collections
import json
import signal
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from kubernetes import CACHE
from rig import Process, wait_for

GROUP, VERSION, RESOURCE, KIND = "aggregated.jackstay.test", "v1", "gauges", "Gauge"
API = f"/apis/{GROUP}/{VERSION}"


class Replica:
    """Serves discovery, lists and watches. `history` holds (version, name) of every object that it has created."""

    def __init__(self, name, address, port, cert, first_version):
        self.name, self.history, self.changed = name, [], threading.Condition()
        self.version, self.stopped = first_version, threading.Event()
        replica = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                replica.serve(self)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*map(str, cert))
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        for work in (self.server.serve_forever, self.write):
            threading.Thread(target=work, daemon=True).start()

    def write(self):
        """Creates an object every 50 ms."""
        while not self.stopped.wait(0.05):
            with self.changed:
                self.version += 2
                self.history.append((self.version, f"{self.name}-{self.version}"))
                self.changed.notify_all()

    def stop(self):
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()

    def serve(self, request):
        url = urlsplit(request.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        groups = {"name": GROUP, "versions": [{"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}],
                  "preferredVersion": {"groupVersion": f"{GROUP}/{VERSION}", "version": VERSION}}
        answers = {
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [groups]},
            f"/apis/{GROUP}": {"kind": "APIGroup", "apiVersion": "v1", **groups},
            API: {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}", "resources": [
                {"name": RESOURCE, "singularName": "gauge", "namespaced": False, "kind": KIND, "verbs": ["get", "list", "watch"]}]},
        }
        if url.path == f"{API}/{RESOURCE}" and query.get("watch"):
            return self.watch(request, int(query.get("resourceVersion") or 0), query.get("allowWatchBookmarks") == "true")
        if url.path == f"{API}/{RESOURCE}":
            with self.changed:
                answer = {"kind": "GaugeList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {"resourceVersion": str(self.version)},
                          "items": [item(*entry) for entry in self.history]}
        else:
            answer = answers.get(url.path)
        body = json.dumps(answer or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}).encode()
        request.send_response(200 if answer else 404)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def watch(self, request, cursor, bookmarks):
        """Sends the events above the cursor, as etcd does for a version in its future, and a bookmark every second."""
        request.send_response(200)
        request.send_header("Content-Type", "application/json")
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        bookmark_at = time.monotonic() + 1
        try:
            while not self.stopped.is_set():
                with self.changed:
                    self.changed.wait(0.2)
                    version, events = self.version, [entry for entry in self.history if entry[0] > cursor]
                for entry in events:
                    cursor = entry[0]
                    send(request, {"type": "ADDED", "object": item(*entry)})
                if bookmarks and time.monotonic() > bookmark_at:
                    bookmark_at += 1
                    send(request, {"type": "BOOKMARK", "object": {"kind": KIND, "apiVersion": f"{GROUP}/{VERSION}",
                                                                  "metadata": {"resourceVersion": str(version)}}})
        except OSError:
            request.close_connection = True


def item(version, name):
    return {"kind": KIND, "apiVersion": f"{GROUP}/{VERSION}", "metadata": {"name": name, "resourceVersion": str(version)}}


def send(request, event):
    data = json.dumps(event).encode() + b"\n"
    request.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    request.wfile.flush()


class Program:
    """An aggregated apiserver in a process of its own, by HTTP/2: replicas with one store, and webhooks
    (go/aggregated.go). An apiserver has one connection to each replica, and waits on it for 45 s when it goes dark."""

    API = f"{GROUP}/{VERSION}"

    def __init__(self, rig, name, addresses, port, cert):
        self.backends = [(address, port) for address in addresses]
        self.store = rig.dir / f"{name}.store"
        listen = ",".join(f"{address}:{port}" for address in addresses)
        self.process = Process(name, [
            CACHE / "load", f"-aggregated={listen}", f"-aggregated-api={self.API}", f"-aggregated-store={self.store}",
            f"-cert={cert[0]}", f"-key={cert[1]}"], rig.dir / f"{name}.log")

    def start(self):
        self.process.start()
        for backend in self.backends:
            wait_for(f"the aggregated apiserver at {backend}", lambda: self.process.require_running() or socket.create_connection(backend, 1).close() or True, 10)
        return self

    def kill(self):
        self.process.stop(signal.SIGKILL)

    def written(self):
        """How often each write was applied, by its name."""
        return collections.Counter(line.split()[1] for line in self.store.read_text().splitlines())
