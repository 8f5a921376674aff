"""Threads that work beside a test, and the client that they use."""

import contextlib
import http.client
import json
import socket
import ssl
import threading

from rig import wait_for


class Worker(threading.Thread):
    """A thread that works until it is stopped. An exception in it fails the test."""

    def __init__(self, case):
        super().__init__(daemon=True)
        self.case, self.stopping, self.failure = case, threading.Event(), None

    def run(self):
        try:
            while not self.stopping.is_set():
                self.work()
        except Exception as error:  # noqa: BLE001
            if not self.stopping.is_set():
                self.failure = error

    def finish(self):
        self.stopping.set()
        self.join(30)
        self.case.assertIsNone(self.failure, type(self).__name__)


class WatchWorker(Worker):
    """A worker that reads a watch of its `client`."""

    def finish(self):
        """Ends the watch. A response keeps its socket open after a close, so that its thread would read until the next event."""
        self.stopping.set()

        def ended():
            connection = self.client.connection
            if connection and connection.sock:
                with contextlib.suppress(OSError):
                    # Not the shutdown of SSLSocket, which takes the TLS state from the thread that reads.
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            self.join(0.1)
            return not self.is_alive()
        wait_for("the watch to end", ended, 30)
        self.client.close()


class Client:
    """An HTTP/1.1 client that keeps its connection."""

    def __init__(self, rig, server, cert=None, token=None):
        self.address = server.removeprefix("https://").rpartition(":")
        self.context = ssl.create_default_context(cafile=str(rig.pki.ca))
        if cert:
            self.context.load_cert_chain(*map(str, cert))
        self.authorization = {"Authorization": f"Bearer {token}"} if token else {}
        self.connection = None

    def send(self, method, path, body=None, timeout=60, headers=()):
        """Sends a request and returns the response, whose body is unread."""
        if not self.connection:
            self.connection = http.client.HTTPSConnection(self.address[0], int(self.address[2]), context=self.context)
        self.connection.timeout = timeout
        if self.connection.sock:
            self.connection.sock.settimeout(timeout)
        data = None if body is None else json.dumps(body)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            self.connection.request(method, path, data, {"Content-Type": kind, "Accept": "application/json", **self.authorization, **dict(headers)})
            return self.connection.getresponse()
        except Exception:
            self.close()
            raise

    def call(self, method, path, body=None, timeout=60, headers=()):
        """Sends a request and returns its code and the object of the response."""
        response = self.send(method, path, body, timeout, headers)
        try:
            return response.status, json.loads(response.read() or b"{}")
        except Exception:
            self.close()
            raise

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None
