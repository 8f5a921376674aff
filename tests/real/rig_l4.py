"""The rig's parts for passthrough tests: jackstay at L4, hosts in namespaces that can lose power, a load balancer, and
HAProxy, nginx and Envoy for comparison."""

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

from kubernetes import RELEASE
from rig import ADDRESSES, LOAD_BALANCER, PORT, REPOSITORY, NeverFulfilled, Jackstay, Process, log, sh, wait_for

REMOTE_ADDRESS = "10.99.1.21"  # of a forwarder to apiserver c, in its own namespace
DEPLOY = REPOSITORY / "deploy"


def passthrough(rig, endpoints=None, port=7450, admin=9650, log_name="jackstay-l4", adapt=None, **listener):
    """jackstay with one passthrough listener; its only credential is for /readyz."""
    crt, key = rig.node_cert("restricted")

    def l4(config):
        config["upstreams"][0]["tls"]["server_name"] = "kubernetes"
        config["upstreams"][0]["health"] = {"readyz": {"path": RELEASE.etcd_check, "interval": "1s", "cert_file": crt, "key_file": key}}
        config["listeners"] = [{"name": "l4", "bind": [f"127.0.0.1:{port}"], "mode": "passthrough", "upstream": "control-plane", **listener}]
        if adapt:
            adapt(config)
    return Jackstay(rig, [], endpoints=endpoints, adapt=l4, log_name=log_name, port=port, admin=admin)


class Host:
    """A host or a pod: a network namespace with one address, connected by a veth pair."""

    def __init__(self, rig, address, gateway, name):
        self.rig, self.address, self.gateway, self.name = rig, address, gateway, name
        self.namespace_process = None

    def start(self):
        number = f"{time.monotonic_ns():x}"[-8:]
        self.namespace_process = Process(f"{self.name}-keeper", ["unshare", "--net", "sleep", "infinity"], self.rig.dir / f"{self.name}-keeper.log").start()
        host = os.readlink("/proc/self/ns/net")
        wait_for("a namespace", lambda: os.readlink(f"/proc/{self.namespace_process.pid}/ns/net") != host, 10, pause=0.01)
        self.link = f"v{number}"
        sh("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace_process.pid)
        sh("ip", "addr", "add", f"{self.gateway}/24", "dev", self.link)
        sh("ip", "link", "set", self.link, "up")
        for command in (f"addr add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up", f"route add default via {self.gateway}"):
            sh(*self.inside(), "ip", *command.split())
        return self

    def inside(self):
        return ["nsenter", f"--net=/proc/{self.namespace_process.pid}/ns/net"]

    def stop(self):
        """Deletes the link and kills all processes in the namespace. The namespace itself can outlive them while a
        connection is open, so the link must go, or the next namespace with this address would not be reachable."""
        if self.namespace_process is None:
            return
        sh("ip", "link", "del", self.link, check=False)
        namespace = os.readlink(f"/proc/{self.namespace_process.pid}/ns/net")
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/net") == namespace:
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass  # The process has exited.
        self.namespace_process.child.wait(10)
        self.namespace_process = None


class RemoteApiserver(Host):
    """A host that forwards bytes to apiserver c; TLS is end to end."""

    def __init__(self, rig, address=REMOTE_ADDRESS, gateway="10.99.1.1", target=ADDRESSES["c"], name="away"):
        super().__init__(rig, address, gateway, name)
        self.target, self.forwarder = target, None

    def start(self):
        super().start()
        self.forwarder = Process(f"{self.name}-forwarder", [
            *self.inside(), "socat", f"TCP-LISTEN:{PORT},bind={self.address},fork,reuseaddr,backlog=256", f"TCP:{self.target}:{PORT}"],
            self.rig.dir / f"{self.name}-forwarder.log").start()
        wait_for(f"{self.name} to listen", self.listens, 10)
        return self

    def listens(self):
        if not self.forwarder.running:
            raise NeverFulfilled(f"{self.name} exited: {self.forwarder.tail()}")
        socket.create_connection((self.address, PORT), 1).close()
        return True

    def power_off(self):
        """Simulates a power loss: the link is deleted first, so that no FIN or RST is sent."""
        self.stop()

    def stop(self):
        if self.namespace_process is None:
            return
        super().stop()
        self.forwarder.child.wait(10)


class LoadBalancer(RemoteApiserver):
    """A load balancer: its address forwards connections to apiserver c."""

    def __init__(self, rig):
        super().__init__(rig, address=LOAD_BALANCER, gateway="10.99.2.1", name="lb")


def connection_ports(pid, port):
    """Local ports of a process's established connections to `port`, by remote address."""
    found = {}
    for line in sh("ss", "-Htnp", "state", "established", f"( dport = :{port} )").stdout.splitlines():
        match = re.search(r"\s\S+:(\d+)\s+\[?(?:::ffff:)?([0-9a-f.:]+)\]?:\d+\s+users:\(\((.*)\)\)", line)
        if match and f"pid={pid}," in match[3]:
            found.setdefault(match[2], set()).add(int(match[1]))
    return found


def install(variant, **values):
    sh(DEPLOY / "nftables/install.sh", variant, *(f"{k}={v}" for k, v in values.items()))


def remove(variant):
    sh(DEPLOY / "nftables/remove.sh", variant)


# ---- other proxies --------------------------------------------------------------------------------

def find_peer(name, variable):
    """The path of another proxy's program, or None."""
    given = os.environ.get(variable)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jackstay/bench" / name
    return given or shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") or (str(cache) if cache.exists() else None)


def haproxy(rig, port):
    servers = "".join(f"    server {n} {a}:{PORT} check inter 1s on-marked-down shutdown-sessions\n" for n, a in ADDRESSES.items())
    config = rig.dir / "haproxy.cfg"
    config.write_text(f"global\n    maxconn 4000\ndefaults\n    mode tcp\n    timeout connect 3s\n    timeout client 1h\n    timeout server 1h\n"
                      f"frontend f\n    bind 127.0.0.1:{port}\n    default_backend b\nbackend b\n    balance leastconn\n{servers}")
    return [find_peer("haproxy", "HAPROXY_BIN"), "-db", "-f", config]


def nginx(rig, port):
    servers = "".join(f"server {a}:{PORT}; " for a in ADDRESSES.values())
    config, module = rig.dir / "nginx.conf", Path("/usr/lib/nginx/modules/ngx_stream_module.so")
    load = f"load_module {module};\n" if module.exists() else ""
    config.write_text(f"{load}daemon off; master_process off; pid {rig.dir}/nginx.pid; error_log stderr;\nevents {{ worker_connections 4096; }}\n"
                      f"stream {{ upstream u {{ least_conn; {servers} }} server {{ listen 127.0.0.1:{port}; proxy_pass u; proxy_connect_timeout 3s; proxy_timeout 1h; }} }}\n")
    return [find_peer("nginx", "NGINX_BIN"), "-c", config]


def envoy(rig, port):
    endpoints = ", ".join(f"{{ endpoint: {{ address: {{ socket_address: {{ address: {a}, port_value: {PORT} }} }} }} }}" for a in ADDRESSES.values())
    config = rig.dir / "envoy.yaml"
    config.write_text(f"""static_resources:
  listeners:
  - name: l4
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: tcp
        typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy, stat_prefix: l4, cluster: u, idle_timeout: 0s }}
  clusters:
  - name: u
    connect_timeout: 3s
    lb_policy: LEAST_REQUEST
    health_checks: [{{ timeout: 1s, interval: 1s, unhealthy_threshold: 2, healthy_threshold: 1, tcp_health_check: {{}} }}]
    load_assignment: {{ cluster_name: u, endpoints: [{{ lb_endpoints: [{endpoints}] }}] }}
""")
    return [find_peer("envoy", "ENVOY_BIN"), "--concurrency", "1", "--disable-hot-restart", "-l", "warn", "-c", config]


PEERS = {"haproxy": (haproxy, "HAPROXY_BIN"), "nginx": (nginx, "NGINX_BIN"), "envoy": (envoy, "ENVOY_BIN")}


def start_peer(rig, name, port):
    """Starts another proxy at L4 for the three apiservers; None if it is not installed."""
    make, variable = PEERS[name]
    if not find_peer(name, variable):
        log(f"    {name} is not installed and is skipped; benches/setup installs it")
        return None
    process = Process(name, make(rig, port), rig.dir / f"{name}.log").start()

    def listens():
        process.require_running()
        return socket.create_connection(("127.0.0.1", port), 1).close() or True
    wait_for(f"{name} to listen", listens, 15)
    return process
