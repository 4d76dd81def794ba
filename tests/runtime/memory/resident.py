"""Memory below the addresses of a reservation, as the kernel counts."""

from __future__ import annotations

from pathlib import Path

from runtime.memory.native import Reservation


def resident_bytes(reservation: Reservation) -> int:
    """Bytes of memory below the addresses of a reservation. Other memory of the process is not counted: threads of
    earlier tests may still be at work."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first < reservation.address + reservation.bytes and reservation.address < last
        elif inside and name == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total
