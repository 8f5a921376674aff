"""The operations of test_clients with Python's package `kubernetes` (urllib3, and WebSocket for streams). Prints the result
of each as a line of JSON."""

import json
import os
import traceback

from kubernetes import client, config
from kubernetes.stream import portforward, stream

NAMESPACE, POD, WORD = (os.environ[f"CLIENT_{name}"] for name in ("NAMESPACE", "POD", "WORD"))
config.load_kube_config(os.environ["CLIENT_KUBECONFIG"])
core = client.CoreV1Api()
RAW = {"_preload_content": False}


def answer(response):
    return {"status": response.status, "body": response.data.decode()}


def manifest(value):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "client", "labels": {"set": "client"}}, "data": {"key": value, "text": "ä\n" * 2000}}


def api(**headers):
    """An API with these headers in each request."""
    own = client.ApiClient()
    for name, value in headers.items():
        own.set_default_header(name.replace("_", "-"), value)
    return client.CoreV1Api(own)


def create():
    return answer(core.create_namespaced_config_map(NAMESPACE, manifest("one"), **RAW))


def listing():
    return answer(core.list_namespaced_config_map(NAMESPACE, label_selector="set=client", **RAW))


def patch():
    # A dict is sent as a strategic merge patch.
    return answer(core.patch_namespaced_config_map("client", NAMESPACE, {"data": {"key": "two"}}, **RAW))


def apply():
    return answer(core.patch_namespaced_config_map(
        "client", NAMESPACE, manifest("three"), field_manager="client", force=True, _content_type="application/apply-patch+yaml", **RAW))


def delete():
    return answer(core.delete_namespaced_config_map("client", NAMESPACE, **RAW))


def watch(version):
    return answer(core.list_namespaced_config_map(NAMESPACE, label_selector="set=client", watch=True, resource_version=version, timeout_seconds=2, **RAW))


def logs():
    response = core.read_namespaced_pod_log(POD, "default", container="ticker", follow=True, tail_lines=1, **RAW)
    text = b""
    for part in response.stream(amt=None):
        text += part
        if text.count(b"\n") >= 3:
            break
    response.close()
    return {"status": response.status, "lines": text.decode().splitlines()[:3]}


def execute():
    one = stream(core.connect_get_namespaced_pod_exec, POD, "default", container="web", stdout=True, stderr=True, stdin=False,
                 command=["sh", "-c", "echo out; echo err >&2; exit 7"], **RAW)
    one.run_forever(timeout=20)
    return {"stdout": one.read_stdout(), "stderr": one.read_stderr(), "code": one.returncode}


def attach():
    one = stream(core.connect_get_namespaced_pod_attach, POD, "default", container="echo", stdin=True, stdout=True, stderr=False, **RAW)
    one.write_stdin(f"{WORD}\n")
    text = ""
    for _ in range(100):
        one.update(timeout=0.2)
        text += one.read_stdout(timeout=0) or ""
        if f"got {WORD}\n" in text:
            break
    one.close()
    return {"line": [line for line in text.splitlines() if WORD in line]}


def forward():
    socket = portforward(core.connect_get_namespaced_pod_portforward, POD, "default", ports="8099").socket(8099)
    socket.setblocking(True)
    socket.sendall(b"GET / HTTP/1.0\r\n\r\n")
    text = b""
    while part := socket.recv(65536):
        text += part
    return {"page": text.partition(b"\r\n\r\n")[2].decode()}


def main():
    version = json.loads(core.list_namespaced_config_map(NAMESPACE, **RAW).data)["metadata"]["resourceVersion"]
    for name, run in (("create", create), ("list", listing), ("patch", patch), ("apply", apply), ("delete", delete), ("watch", lambda: watch(version)),
                      ("logs -f", logs), ("exec", execute), ("attach", attach), ("port-forward", forward)):
        try:
            result = run()
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"op": name, "result": result}), flush=True)


main()
