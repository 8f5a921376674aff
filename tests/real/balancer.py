"""L4 load balancers in front of three apiservers, at one address. Both count the connections that they accept."""

import re
import signal
import socket

from rig import ADDRESSES, LOAD_BALANCER, PORT, Process, sh, wait_for
from rig_l4 import find_peer

ENDPOINT = f"{LOAD_BALANCER}:{PORT}"
TABLE = "jackstay_balancer"


class Balancer:
    """The address, and a counter of connects to it. A chain of the type `nat` sees the first packet of each connection."""

    NAME = None

    def __init__(self, rig, addresses=tuple(ADDRESSES.values())):
        self.rig, self.addresses = rig, addresses

    def verdict(self):
        """What happens to the first packet of a connection."""
        return ""

    def start(self):
        if LOAD_BALANCER not in sh("ip", "-o", "addr", "show", "dev", "rig0").stdout:
            sh("ip", "addr", "add", f"{LOAD_BALANCER}/32", "dev", "rig0")
        sh("nft", "-f", "-", input=f"""table ip {TABLE} {{
    chain output {{
        type nat hook output priority -100;
        ip daddr {LOAD_BALANCER} tcp dport {PORT} ct state new counter {self.verdict()}
    }}
}}
""")
        return self

    def stop(self):
        sh("nft", "delete", "table", "ip", TABLE)
        sh("ip", "addr", "del", f"{LOAD_BALANCER}/32", "dev", "rig0")

    def connects(self):
        """Connections to the address so far, by all clients, also those that failed."""
        return int(re.search(r"counter packets (\d+)", sh("nft", "list", "table", "ip", TABLE).stdout)[1])


class HAProxy(Balancer):
    """HAProxy in mode tcp. Its check is a connect, which a stopped apiserver passes, and one without etcd."""

    NAME = "HAProxy"

    def start(self):
        super().start()
        servers = "".join(f"    server {address} {address}:{PORT} check\n" for address in self.addresses)
        config = self.rig.dir / "haproxy-apiservers.cfg"
        config.write_text(f"""global
    maxconn 4000
defaults
    mode tcp
    option redispatch
    timeout connect 5s
    timeout client 10m
    timeout server 10m
frontend apiservers
    bind {ENDPOINT}
    default_backend apiservers
backend apiservers
    balance roundrobin
    option tcp-check
    default-server inter 2s fall 3 rise 2
{servers}""")
        self.process = Process("haproxy-apiservers", [find_peer("haproxy", "HAPROXY_BIN"), "-db", "-f", config], self.rig.dir / "haproxy-apiservers.log").start()

        def listens():
            self.process.require_running()
            return socket.create_connection((LOAD_BALANCER, PORT), 1).close() or True
        wait_for("HAProxy to listen", listens, 15)
        return self

    def stop(self):
        self.process.stop(signal.SIGKILL)
        super().stop()


class Nftables(Balancer):
    """Destination NAT, to each apiserver in turn, without checks: a killed or dark apiserver gets every third connection."""

    NAME = "nftables"

    def verdict(self):
        turns = ", ".join(f"{turn} : {address}" for turn, address in enumerate(self.addresses))
        return f"dnat to numgen inc mod {len(self.addresses)} map {{ {turns} }}"
