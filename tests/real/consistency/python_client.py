"""A client with Python's package `kubernetes` (HTTP/1.1 on urllib3) that records random requests and watches.

    python_client.py KUBECONFIG NAMESPACE FILE SEED     until SIGTERM

Runs in the virtual environment of tests/real/setup.
"""

import json
import random
import signal
import sys
import threading
import time

import kubernetes
from kubernetes import client, watch

from recorder import GROUP, Recorder, manifest

KEYS = 6


def main(config, namespace, file, seed):
    kubernetes.config.load_kube_config(config)
    out, choose, stopped = Recorder(file, "python"), random.Random(seed), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    core, custom = client.CoreV1Api(), client.CustomObjectsApi()
    core.api_client.set_default_header("User-Agent", "history-python")
    newest = [0]

    def call(verb, resource, key, form, value, send):
        op, ident = out.invoke(verb, resource, key, form, value)
        core.api_client.set_default_header("Audit-ID", ident)
        try:
            response = send()
            data, at = response.data, time.monotonic_ns()
            body = json.loads(data)
        except client.ApiException as error:
            at = time.monotonic_ns()
            try:
                body = json.loads(error.body)
            except (TypeError, ValueError):
                body = {"message": str(error.body or "")}
            return out.reply(op, error.status, body, at=at, retry_after=(error.headers or {}).get("Retry-After"))
        except Exception as error:  # urllib3's and the sockets'
            return out.reply(op, 0, error=repr(error))
        out.reply(op, response.status, body, at=at)
        version = body.get("metadata", {}).get("resourceVersion")
        if version and resource == "configmaps":
            newest[0] = max(newest[0], int(version))

    def act():
        key, value, turn = f"k{choose.randrange(KEYS)}", "", choose.randrange(10)
        raw = {"_preload_content": False}
        if turn == 0:
            value = out.value()
            call("create", "configmaps", key, {}, value, lambda: core.create_namespaced_config_map(namespace, manifest("configmaps", key, value, "a"), **raw))
        elif turn in (1, 2):
            value = out.value()
            call("patch", "configmaps", key, {}, value, lambda: core.patch_namespaced_config_map(key, namespace, manifest("configmaps", key, value, choose.choice("ab")), **raw))
        elif turn == 3:
            call("delete", "configmaps", key, {}, "", lambda: core.delete_namespaced_config_map(key, namespace, **raw))
        elif turn == 4:
            call("get", "configmaps", key, {}, "", lambda: core.read_namespaced_config_map(key, namespace, **raw))
        elif turn in (5, 6):
            call("list", "configmaps", "", {"resourceVersion": "0"}, "", lambda: core.list_namespaced_config_map(namespace, resource_version="0", **raw))
        elif turn == 7:
            call("list", "configmaps", "", {}, "", lambda: core.list_namespaced_config_map(namespace, **raw))
        else:
            options = {"resource_version": "0"} if turn == 8 else {}
            form = {"resourceVersion": "0"} if turn == 8 else {}

            def send():  # this method has no argument for a raw response in every release
                body, code, _ = custom.list_namespaced_custom_object_with_http_info(GROUP, "v1", namespace, "things", **options)
                return type("Response", (), {"data": json.dumps(body).encode(), "status": code})
            call("list", "things", "", form, "", send)

    def follow():
        api = client.CoreV1Api(client.ApiClient())  # a connection of its own
        while not stopped.is_set():
            version = "0" if choose.randrange(3) == 0 or not newest[0] else str(newest[0])
            form = {"resourceVersion": version, "timeoutSeconds": choose.randrange(5, 20)}
            op, ident = out.invoke("watch", "configmaps", "", form)
            api.api_client.set_default_header("Audit-ID", ident)
            opened = False
            try:
                for event in watch.Watch().stream(api.list_namespaced_config_map, namespace, resource_version=version,
                                                  timeout_seconds=form["timeoutSeconds"], allow_watch_bookmarks=version != "0"):
                    if not opened:
                        opened = True
                        out.reply(op, 200)
                    out.event(op, event["type"], event["raw_object"])
                    if stopped.is_set():
                        return out.end(op, "cancelled")
                if not opened:
                    out.reply(op, 200)
                out.end(op, "clean")
            except client.ApiException as error:
                if opened:  # an ERROR event
                    out.event(op, "ERROR", {"code": error.status, "message": error.reason})
                    out.end(op, "clean")
                else:
                    out.reply(op, error.status, {"message": str(error.body or error.reason)})
                time.sleep(0.2)
            except Exception as error:
                if opened:
                    out.end(op, "cancelled" if stopped.is_set() else "broken", repr(error))
                else:
                    out.reply(op, 0, error=repr(error))
                time.sleep(0.2)

    threading.Thread(target=follow, daemon=True).start()
    while not stopped.wait(choose.uniform(0, 0.4)):
        act()


main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
