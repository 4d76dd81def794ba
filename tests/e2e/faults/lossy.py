"""A slow link that loses packets, between the TUN devices of two network namespaces.

Kernels without netem have no such link. `python -m tests.e2e.faults.lossy FD FD DELAY_S LOSS SEED` carries packets
between the devices until killed. A line `PORT` on standard input cuts TCP connections to the port: the connections'
packets are lost until an empty line mends the connections.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_MOST = 1 << 16
QUEUED_MOST = 1000  # packets on their way in a direction; more are lost, as in a router's queue


def tun(name: str) -> int:
    """Make a TUN device. Returns the descriptor that has the device's packets. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Direction:
    """Packets from one device to the other, each `delay_s` later; the share `loss` of packets is lost."""

    def __init__(self, source: int, target: int, delay_s: float, loss: float, chance: random.Random) -> None:
        self.source = source
        self._target, self._delay_s, self._loss, self._chance = target, delay_s, loss, chance
        self._queue: list[tuple[float, int, bytes]] = []  # when due, number, packet
        self._number = 0
        self.cut_port = 0  # TCP port whose packets are lost; 0: none

    def take(self, now: float) -> None:
        while True:
            try:
                packet = os.read(self.source, PACKET_MOST)
            except BlockingIOError:
                return
            lost = self._chance.random() < self._loss or self.cut_port in ports(packet)
            if not lost and len(self._queue) < QUEUED_MOST:
                self._number += 1
                heapq.heappush(self._queue, (now + self._delay_s, self._number, packet))

    def give(self, now: float) -> float:
        """Deliver the packets that are due. Returns the seconds until the next packet is due; 1 without a packet."""
        while self._queue and self._queue[0][0] <= now:
            try:
                os.write(self._target, heapq.heappop(self._queue)[2])
            except OSError:  # the device is down
                pass
        return self._queue[0][0] - now if self._queue else 1.0


def ports(packet: bytes) -> tuple[int, ...]:
    """Both ports of a TCP packet of IPv4; empty for a packet of another protocol."""
    header = (packet[0] & 15) * 4
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP or len(packet) < header + 4:
        return ()
    return struct.unpack_from("!HH", packet, header)


def main() -> None:
    first, second = int(sys.argv[1]), int(sys.argv[2])
    delay_s, loss, chance = float(sys.argv[3]), float(sys.argv[4]), random.Random(int(sys.argv[5]))
    there, back = (Direction(*ends, delay_s, loss, chance) for ends in ((first, second), (second, first)))
    while True:
        now = time.monotonic()
        wait_s = min(there.give(now), back.give(now))
        readable, _, _ = select.select([first, second, sys.stdin], [], [], max(0.0, wait_s))
        if sys.stdin in readable:
            there.cut_port = back.cut_port = int(sys.stdin.readline().strip() or 0)
        for direction in (there, back):
            if direction.source in readable:
                direction.take(time.monotonic())


if __name__ == "__main__":
    main()
