#!/usr/bin/env python3
"""Makes a long path within a network namespace, until stdin ends.

    long_path.py DEVICE ADDRESS/PREFIX MILLISECONDS

Packets to any other address of the prefix come back to ADDRESS after the time, with source and destination exchanged. So
a server that listens on ADDRESS is also reached at the next address, and each round trip takes twice the time. The
checksums of IP, TCP and ICMP do not depend on the order of the two addresses.
"""

import collections
import fcntl
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000


def main(device, address, milliseconds):
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "address", "add", address, "dev", device], check=True)
    subprocess.run(["ip", "link", "set", device, "up"], check=True)
    print("ready", flush=True)
    delay = float(milliseconds) / 1000
    waiting = collections.deque()
    while True:
        pause = max(0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([tun, 0], [], [], pause)
        if 0 in readable and not os.read(0, 1):
            return
        if tun in readable:
            read(tun, waiting, delay)
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(tun, waiting.popleft()[1])


def read(tun, waiting, delay):
    while True:
        try:
            packet = os.read(tun, 65535)
        except BlockingIOError:
            return
        if packet[0] >> 4 == 4:
            exchanged = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
            waiting.append((time.monotonic() + delay, exchanged))


if __name__ == "__main__":
    main(*sys.argv[1:])
