"""Bindings of csrc, the memory library: handles as objects, error codes as exceptions, and no decisions.

csrc/staccato_memory.h documents every call. A call releases the interpreter lock, and never calls back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import groupby
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "csrc/build/libstaccato_memory.so"
ABI = 5
MIXED = 0xFFFFFFFF  # owner of a page being loaded, or of a page with a load failed in the middle


class Code(IntEnum):
    """Reasons of a failed call."""

    INVALID = -1
    NO_ADDRESSES = -2
    NO_PAGES = -3
    STATE = -4
    DRIVER = -5
    UNSUPPORTED = -6
    NO_MEMORY = -7
    CANCELLED = -8
    TIMEOUT = -9
    DEAD = -10


class PoolError(Exception):
    """A call of the memory library was refused or failed; the message names the call, the numbers and the remedy."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class LibraryMissing(Exception):
    """The memory library is not built, or has another version than the bindings."""


class Backend(IntEnum):
    HOST = 0
    CUDA = 1


class PageState(IntEnum):
    FREE = 0
    MAPPED = 1
    CLEAN = 2
    LIMBO = 3


class Direction(IntEnum):
    TO_DEVICE = 0
    TO_HOST = 1


class FaultPoint(IntEnum):
    """Operations that the fault injector can let fail."""

    MAP = 0
    COPY = 1
    UNMAP = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a model's image: `bytes` bytes at `cache_offset` in the cache, for `offset` in the reservation."""

    offset: int
    cache_offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A layer's share of KV blocks: the share of block i has `bytes` bytes, at offset + i * stride on each side."""

    device_offset: int
    device_stride: int
    host_offset: int
    host_stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PageInfo:
    """A page of the pool. `owner`: the reservation with bytes in the page, even a free page; 0: no reservation; MIXED:
    several reservations."""

    state: PageState
    owner: int


@dataclass(frozen=True, slots=True)
class Stats:
    page_bytes: int
    pages_total: int
    pages_free: int
    pages_mapped: int
    pages_clean: int
    pages_limbo: int
    pages_promised: int
    reserved_bytes: int
    huge_bytes: int
    map_calls: int
    unmap_calls: int
    unmap_failures: int
    copy_calls: int
    to_device_bytes: int
    to_host_bytes: int
    zeroed_bytes: int
    pinned_bytes: int
    pin_calls: int
    map_s: float
    unmap_s: float
    copy_s: float
    pin_s: float


class DevicePool:
    """A pool of pages on a device. Release the reservations and close the pinned caches before closing the device.

    `helpers`: other CUDA devices, by ordinal. A part of every load comes over the links between host and helpers
    (Prism, 5.2); each helper keeps `relay_bytes` bytes for data passing through, 32 MiB if 0. `pinned_most`: the most
    bytes of the host that are registered with the driver at a time; 0: no limit. `lazy`: on the host, a page gets its
    memory when the page is first mapped, and not when the pool is made."""

    def __init__(
        self,
        pool_bytes: int,
        *,
        backend: Backend = Backend.HOST,
        ordinal: int = 0,
        page_bytes: int = 0,
        huge_folios: bool = True,
        exportable: bool = False,
        helpers: Collection[int] = (),
        relay_bytes: int = 0,
        pinned_most: int = 0,
        lazy: bool = False,
    ) -> None:
        self._handle = c_void_p()
        bits = sum(1 << helper for helper in set(helpers))
        config = _Config(
            backend, ordinal, page_bytes, pool_bytes, huge_folios, exportable, bits, lazy, relay_bytes, pinned_most
        )
        _check(_library().stc_device_open(byref(config), byref(self._handle)))
        self.backend = backend
        self.ordinal = ordinal
        self.page_bytes = self.stats().page_bytes

    def close(self) -> None:
        _check(_library().stc_device_close(self._handle))
        self._handle = c_void_p()  # from now on the library refuses every call

    def reserve(self, size: int) -> Reservation:
        return Reservation(self, size)

    def stats(self) -> Stats:
        stats = _Stats()
        _check(_library().stc_device_stats(self._handle, byref(stats)))
        return Stats(**{name: getattr(stats, name) for name in Stats.__dataclass_fields__})

    def memory(self) -> tuple[int, int]:
        """Free bytes and all bytes of the whole device, as its driver or the kernel counts."""
        free, total = c_uint64(), c_uint64()
        _check(_library().stc_device_memory(self._handle, byref(free), byref(total)))
        return free.value, total.value

    def pages(self) -> list[PageInfo]:
        """The page map: state and owner of every page, from page 0 on."""
        return [PageInfo(state, owner) for state, owner, count in self.page_runs() for _ in range(count)]

    def page_runs(self) -> list[tuple[PageState, int, int]]:
        """The page map as runs of equal neighbours: state, owner and number of pages."""
        count = self.stats().pages_total
        pages = (c_uint64 * count)()  # low half: state; high half: owner
        _check(_library().stc_device_pages(self._handle, pages, count))
        runs = [(page, len(list(alike))) for page, alike in groupby(pages)]
        return [(PageState(page & 0xFFFFFFFF), page >> 32, alike) for page, alike in runs]

    def settle(self, timeout_s: float) -> None:
        """Wait until no page is in limbo. Raises PoolError with Code.TIMEOUT."""
        _check(_library().stc_device_settle(self._handle, timeout_s))

    def await_pins(self, timeout_s: float) -> None:
        """Wait until every pinned range is registered, as far as the limit goes. Raises PoolError: Code.TIMEOUT."""
        _check(_library().stc_device_pinned(self._handle, timeout_s))

    def throttle(self, bytes_per_s: float) -> None:
        """Slow copies down to a link of `bytes_per_s` in each direction; 0 lifts the limit."""
        _check(_library().stc_device_throttle(self._handle, bytes_per_s))

    def inject(self, operation: FaultPoint, nth: int) -> None:
        """Let the nth operation of a kind fail once, counted from now on; 0 takes the order back."""
        _check(_library().stc_device_fault(self._handle, operation, nth))

    def stream_ticket(self, stream: int) -> TransferTicket:
        """A ticket for all work put on the CUDA stream so far."""
        ticket = c_uint64()
        _check(_library().stc_stream_ticket(self._handle, stream, byref(ticket)))
        return TransferTicket(self, ticket.value)


class TransferTicket:
    """A transfer under way or over."""

    __slots__ = ("_device", "id")

    def __init__(self, device: DevicePool, ticket_id: int) -> None:
        self._device = device
        self.id = ticket_id

    def done(self) -> bool:
        """Whether the transfer is over. Raises PoolError with the reason if the transfer failed."""
        return _check(_library().stc_ticket_poll(self._device._handle, self.id)) == 1

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is over. Raises PoolError with the reason of a failure, or Code.TIMEOUT."""
        _check(_library().stc_ticket_wait(self._device._handle, self.id, timeout_s))

    def landed_bytes(self) -> int:
        """Bytes transferred from the beginning on without a gap; 2**64 - 1 if the ticket is over and forgotten."""
        landed = c_uint64()
        _check(_library().stc_ticket_landed(self._device._handle, self.id, byref(landed)))
        return landed.value

    def cancel(self) -> None:
        """Ask to cancel the transfer; `wait` tells whether the transfer was cancelled or had ended."""
        _check(_library().stc_ticket_cancel(self._device._handle, self.id))

    def hold_stream(self, stream: int, timeout_s: float) -> None:
        """Let work put on the CUDA stream from now on wait for the transfer."""
        _check(_library().stc_stream_wait(self._device._handle, self.id, stream, timeout_s))


class Reservation:
    """Addresses of one owner, kept while pages come and go."""

    def __init__(self, device: DevicePool, size: int) -> None:
        self._handle = c_void_p()
        place = _Place()
        _check(_library().stc_reserve(device._handle, size, byref(self._handle), byref(place)))
        self.device = device
        self.address: int = place.address
        self.bytes: int = place.bytes
        self.owner: int = place.owner

    def release(self, timeout_s: float = 60) -> None:
        _check(_library().stc_release(self._handle, timeout_s))
        self._handle = c_void_p()

    def map(self, offset: int, size: int, timeout_s: float) -> None:
        _check(_library().stc_map(self._handle, offset, size, timeout_s))

    def map_later(self, offset: int, size: int) -> TransferTicket:
        """Map pages into an empty range on a thread of the library. Raises PoolError if the pool has too few pages."""
        ticket = c_uint64()
        _check(_library().stc_map_later(self._handle, offset, size, byref(ticket)))
        return TransferTicket(self.device, ticket.value)

    def unmap(self, offset: int, size: int, after: TransferTicket | None = None) -> None:
        """Unmap a range; returns at once.

        The pages leave when `after` and every transfer that touches the pages are over. Unmapped pages are passed over.
        """
        _check(_library().stc_unmap(self._handle, offset, size, after.id if after else 0))

    def mark_clean(self, offset: int, size: int) -> None:
        _check(_library().stc_mark_clean(self._handle, offset, size))

    def residency(self, offset: int, size: int) -> tuple[int, int]:
        """Number of mapped bytes, and number of bytes of clean cache, in a range."""
        mapped, clean = c_uint64(), c_uint64()
        _check(_library().stc_residency(self._handle, offset, size, byref(mapped), byref(clean)))
        return mapped.value, clean.value

    def scratch(self, offset: int, size: int, on: bool) -> None:
        """Put ordinary memory of the machine below unmapped pages (`on`), or take the memory away. Only on the host.

        Releasing the reservation takes the memory away as well."""
        _check(_library().stc_scratch(self._handle, offset, size, on))

    def view(self, offset: int, size: int) -> memoryview:
        """Bytes of the reservation. Host only; touching bytes without memory below ends the process."""
        if self.device.backend is not Backend.HOST:
            raise PoolError(
                Code.UNSUPPORTED, "only a host device's memory can be seen from the host: copy it to a cache"
            )
        if offset < 0 or size < 0 or offset + size > self.bytes:
            raise PoolError(Code.INVALID, f"{size} bytes at {offset} do not lie in a reservation of {self.bytes} bytes")
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")

    def export_page(self, offset: int) -> tuple[int, int]:
        """A file descriptor for the page at `offset`, and the page's offset in the file. Close the descriptor."""
        fd, fd_offset = c_int(), c_uint64()
        _check(_library().stc_export_page(self._handle, offset, byref(fd), byref(fd_offset)))
        return fd.value, fd_offset.value

    def load(self, cache: CacheMemory, segments: Iterable[Segment], chunk_bytes: int = 32 << 20) -> TransferTicket:
        """Begin to map and fill the missing pages of the segments; clean pages keep the content.

        Raises PoolError if the pool has too few pages. If the load fails or is cancelled, the pages are as before."""
        array = [_Segment(s.offset, s.cache_offset, s.bytes) for s in segments]
        packed = (_Segment * len(array))(*array)
        ticket = c_uint64()
        _check(
            _library().stc_load(self._handle, cache._handle, packed, len(array), chunk_bytes, byref(ticket)),
        )
        return TransferTicket(self.device, ticket.value)

    def copy(
        self,
        offset: int,
        cache: CacheMemory,
        cache_offset: int,
        size: int,
        direction: Direction,
        after: TransferTicket | None = None,
    ) -> TransferTicket:
        ticket = c_uint64()
        _check(
            _library().stc_copy(
                self._handle,
                offset,
                cache._handle,
                cache_offset,
                size,
                direction,
                after.id if after else 0,
                byref(ticket),
            )
        )
        return TransferTicket(self.device, ticket.value)

    def copy_blocks(
        self,
        cache: CacheMemory,
        pieces: Sequence[Piece],
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        direction: Direction,
        after: TransferTicket | None = None,
    ) -> TransferTicket:
        """Begin to copy all pieces of KV blocks, named by number; neighbours on both sides are copied as one."""
        if len(device_blocks) != len(host_blocks):
            raise PoolError(Code.INVALID, f"{len(device_blocks)} device blocks for {len(host_blocks)} host blocks")
        ids = c_uint32 * len(device_blocks)
        ticket = c_uint64()
        _check(
            _library().stc_copy_blocks(
                self._handle,
                cache._handle,
                _packed_pieces(tuple(pieces)),
                len(pieces),
                ids(*device_blocks),
                ids(*host_blocks),
                len(device_blocks),
                direction,
                after.id if after else 0,
                byref(ticket),
            )
        )
        return TransferTicket(self.device, ticket.value)


class CacheMemory:
    """Memory of the host in a file, shared between processes by descriptor: addresses first, memory by `commit`."""

    def __init__(self, size: int, fd: int = -1) -> None:
        """Open the cache of another process by the descriptor `fd`, which the caller closes; -1 makes a new file."""
        self._handle = c_void_p()
        base, own_fd = c_void_p(), c_int()
        _check(_library().stc_cache_open(fd, size, byref(self._handle), byref(base), byref(own_fd)))
        self.bytes = size
        self.fd = own_fd.value
        self.address: int = base.value or 0

    def close(self) -> None:
        _check(_library().stc_cache_close(self._handle))
        self._handle = c_void_p()

    def commit(self, offset: int, size: int) -> int:
        """Get memory for a range now. Returns the number of bytes in folios of 2 MiB. Raises PoolError."""
        huge_bytes = c_uint64()
        _check(_library().stc_cache_commit(self._handle, offset, size, byref(huge_bytes)))
        return huge_bytes.value

    def discard(self, offset: int, size: int) -> None:
        """Give the memory of a range back to the machine; from now on the range reads as zeroes."""
        _check(_library().stc_cache_discard(self._handle, offset, size))

    def pin(self, device: DevicePool, offset: int, size: int) -> None:
        """Begin to register a range with the device's driver; returns at once. A GPU copies from and to no other
        memory, and a transfer waits for its part. The range must have memory until `unpin`. Raises PoolError."""
        _check(_library().stc_cache_pin(self._handle, device._handle, offset, size))

    def unpin(self, device: DevicePool, offset: int) -> None:
        """End the registration of the range pinned at `offset`; transfers from and to the range must be over."""
        _check(_library().stc_cache_unpin(self._handle, device._handle, offset))

    def view(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > self.bytes:
            raise PoolError(Code.INVALID, f"{size} bytes at {offset} do not lie in a cache of {self.bytes} bytes")
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")


@dataclass(slots=True)
class Captured:
    """The allocation caught by `capture`."""

    bytes: int = 0  # size asked for; 0: no allocation had a fitting size


def capture_install(path: str) -> None:
    """Let `capture` see the allocations of the loaded shared object at `path`; a second call does nothing.

    No other thread may run in the object during the call. Raises PoolError with Code.UNSUPPORTED if the machine is not
    x86-64 Linux with glibc, and with Code.STATE if the object is not loaded.
    """
    _check(_library().stc_capture_install(path.encode()))


@contextmanager
def capture(least: int, most: int, address: int, granule: int = 1) -> Iterator[Captured]:
    """Give `address` to the thread's first allocation of `least` bytes, or of more in whole granules, up to `most`.

    Only posix_memalign calls of installed objects count. An allocation with a stricter alignment than `address` has is
    passed over. `most` bytes of memory must lie at `address`. The result is filled in at the end of the context, after
    an error as well.
    """
    _check(_library().stc_capture_next(least, most, granule, address))
    captured = Captured()
    try:
        yield captured
    finally:
        taken = c_uint64()
        _check(_library().stc_capture_taken(byref(taken)))
        captured.bytes = taken.value


def capture_forget(address: int) -> None:
    """Forget an address given by `capture`: later frees of the address are real.

    Call after the object has freed or abandoned the allocation: until then a free of the address does nothing."""
    _check(_library().stc_capture_forget(address))


# ── the library as C has it ───────────────────────────────────────────────────────────────────────────────────────────


class _Config(ctypes.Structure):
    _fields_ = [
        ("backend", c_uint32),
        ("ordinal", c_int32),
        ("page_bytes", c_uint64),
        ("pool_bytes", c_uint64),
        ("huge_folios", c_uint32),
        ("exportable", c_uint32),
        ("helpers", c_uint32),
        ("lazy", c_uint32),
        ("relay_bytes", c_uint64),
        ("pinned_most", c_uint64),
    ]


class _Stats(ctypes.Structure):
    _fields_ = [(name, c_double if name.endswith("_s") else c_uint64) for name in Stats.__dataclass_fields__]


class _Place(ctypes.Structure):
    _fields_ = [("address", c_uint64), ("bytes", c_uint64), ("owner", c_uint32)]


class _Segment(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("cache_offset", c_uint64), ("bytes", c_uint64)]


class _Piece(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in Piece.__dataclass_fields__]


@cache
def _packed_pieces(pieces: tuple[Piece, ...]) -> ctypes.Array[_Piece]:
    """The pieces as a C array, cached per model: a model has a piece for every layer, and blocks move at every turn."""
    return (_Piece * len(pieces))(
        *(_Piece(p.device_offset, p.device_stride, p.host_offset, p.host_stride, p.bytes) for p in pieces)
    )


_SIGNATURES = {
    "stc_device_open": [c_void_p, c_void_p],
    "stc_device_close": [c_void_p],
    "stc_device_stats": [c_void_p, c_void_p],
    "stc_device_memory": [c_void_p, c_void_p, c_void_p],
    "stc_device_pages": [c_void_p, c_void_p, c_uint64],
    "stc_device_settle": [c_void_p, c_double],
    "stc_device_throttle": [c_void_p, c_double],
    "stc_device_fault": [c_void_p, c_int, c_uint64],
    "stc_reserve": [c_void_p, c_uint64, c_void_p, c_void_p],
    "stc_release": [c_void_p, c_double],
    "stc_map": [c_void_p, c_uint64, c_uint64, c_double],
    "stc_map_later": [c_void_p, c_uint64, c_uint64, c_void_p],
    "stc_unmap": [c_void_p, c_uint64, c_uint64, c_uint64],
    "stc_mark_clean": [c_void_p, c_uint64, c_uint64],
    "stc_residency": [c_void_p, c_uint64, c_uint64, c_void_p, c_void_p],
    "stc_export_page": [c_void_p, c_uint64, c_void_p, c_void_p],
    "stc_scratch": [c_void_p, c_uint64, c_uint64, c_int],
    "stc_cache_open": [c_int, c_uint64, c_void_p, c_void_p, c_void_p],
    "stc_cache_close": [c_void_p],
    "stc_cache_commit": [c_void_p, c_uint64, c_uint64, c_void_p],
    "stc_cache_discard": [c_void_p, c_uint64, c_uint64],
    "stc_cache_pin": [c_void_p, c_void_p, c_uint64, c_uint64],
    "stc_cache_unpin": [c_void_p, c_void_p, c_uint64],
    "stc_device_pinned": [c_void_p, c_double],
    "stc_load": [c_void_p, c_void_p, POINTER(_Segment), c_uint64, c_uint64, c_void_p],
    "stc_copy": [c_void_p, c_uint64, c_void_p, c_uint64, c_uint64, c_int, c_uint64, c_void_p],
    "stc_copy_blocks": [c_void_p, c_void_p, POINTER(_Piece), c_uint64, POINTER(c_uint32), POINTER(c_uint32), c_uint64]
    + [c_int, c_uint64, c_void_p],
    "stc_ticket_poll": [c_void_p, c_uint64],
    "stc_ticket_wait": [c_void_p, c_uint64, c_double],
    "stc_ticket_landed": [c_void_p, c_uint64, c_void_p],
    "stc_ticket_cancel": [c_void_p, c_uint64],
    "stc_stream_ticket": [c_void_p, c_void_p, c_void_p],
    "stc_stream_wait": [c_void_p, c_uint64, c_void_p, c_double],
    "stc_capture_install": [ctypes.c_char_p],
    "stc_capture_next": [c_uint64, c_uint64, c_uint64, c_void_p],
    "stc_capture_taken": [c_void_p],
    "stc_capture_forget": [c_void_p],
}


def check_library() -> None:
    """Load the memory library. Raises LibraryMissing."""
    _library()


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise LibraryMissing(f"{LIBRARY} can't be loaded ({error}): build it with `make -C csrc`") from error
    found = library.stc_abi()
    if found != ABI:
        raise LibraryMissing(f"{LIBRARY} has interface {found}, {ABI} is needed: build it again with `make -C csrc`")
    library.stc_last_error.restype = ctypes.c_char_p
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def _check(code: int) -> int:
    if code < 0:
        raise PoolError(Code(code), _library().stc_last_error().decode(errors="replace"))
    return code
