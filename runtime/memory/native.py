"""Bindings of csrc, the memory library: its handles as objects, its codes as exceptions, nothing decided here.

What each call does stands in csrc/staccato_memory.h. Every call lets go of the interpreter lock; none calls back.
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
ABI = 3
MIXED = 0xFFFFFFFF  # the owner of a page that is being loaded, or whose load failed in the middle


class Code(IntEnum):
    """Why a call failed."""

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
    """The library refused or failed; the message names what, the numbers and the remedy."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class LibraryMissing(Exception):
    """The library is not built, or is another version than these bindings."""


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


class Operation(IntEnum):
    """What the fault injector can fail."""

    MAP = 0
    COPY = 1
    UNMAP = 2


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a model's image: where it belongs in the reservation and where it lies in the cache."""

    offset: int
    cache_offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer's share of a KV block: block i is `bytes` long, at offset + i * stride on each side."""

    device_offset: int
    device_stride: int
    host_offset: int
    host_stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Page:
    """`owner` is the reservation whose bytes are in it, also when it is free; 0: nobody's; MIXED: several owners'."""

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
    map_s: float
    unmap_s: float
    copy_s: float


class Device:
    """One pool of pages. Close its reservations and the caches pinned to it first.

    `helpers` are other CUDA devices, by ordinal, over whose links to the host a part of every load comes (Prism, 5.2);
    each keeps `relay_bytes` for what passes through it."""

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
    ) -> None:
        self._handle = c_void_p()
        bits = sum(1 << helper for helper in set(helpers))
        config = _Config(backend, ordinal, page_bytes, pool_bytes, huge_folios, exportable, bits, relay_bytes)
        _check(_library().stc_device_open(byref(config), byref(self._handle)))
        self.backend = backend
        self.ordinal = ordinal
        self.page_bytes = self.stats().page_bytes

    def close(self) -> None:
        _check(_library().stc_device_close(self._handle))
        self._handle = c_void_p()  # from now on every call is refused

    def reserve(self, size: int) -> Reservation:
        return Reservation(self, size)

    def stats(self) -> Stats:
        stats = _Stats()
        _check(_library().stc_device_stats(self._handle, byref(stats)))
        return Stats(**{name: getattr(stats, name) for name in Stats.__dataclass_fields__})

    def pages(self) -> list[Page]:
        """The page map."""
        return [Page(state, owner) for state, owner, count in self.page_runs() for _ in range(count)]

    def page_runs(self) -> list[tuple[PageState, int, int]]:
        """The page map: state, owner and number of neighbours that are alike."""
        count = self.stats().pages_total
        pages = (c_uint64 * count)()  # of two words each: state, owner
        _check(_library().stc_device_pages(self._handle, pages, count))
        runs = [(page, len(list(alike))) for page, alike in groupby(pages)]
        return [(PageState(page & 0xFFFFFFFF), page >> 32, alike) for page, alike in runs]

    def settle(self, timeout_s: float) -> None:
        """Wait until no page is in limbo."""
        _check(_library().stc_device_settle(self._handle, timeout_s))

    def throttle(self, bytes_per_s: float) -> None:
        """Copies take as long as over a link this fast in each direction; 0 lifts it."""
        _check(_library().stc_device_throttle(self._handle, bytes_per_s))

    def inject(self, operation: Operation, nth: int) -> None:
        """The nth such operation from now on fails, once; 0 takes it back."""
        _check(_library().stc_device_fault(self._handle, operation, nth))

    def stream_ticket(self, stream: int) -> Ticket:
        """A ticket for all that was put on this CUDA stream so far."""
        ticket = c_uint64()
        _check(_library().stc_stream_ticket(self._handle, stream, byref(ticket)))
        return Ticket(self, ticket.value)


class Ticket:
    """One transfer."""

    __slots__ = ("_device", "id")

    def __init__(self, device: Device, ticket_id: int) -> None:
        self._device = device
        self.id = ticket_id

    def done(self) -> bool:
        """Raises what the transfer failed of."""
        return _check(_library().stc_ticket_poll(self._device._handle, self.id)) == 1

    def wait(self, timeout_s: float) -> None:
        """Raises what the transfer failed of, or Code.TIMEOUT."""
        _check(_library().stc_ticket_wait(self._device._handle, self.id, timeout_s))

    def landed_bytes(self) -> int:
        """From the beginning on, without a gap; a number beyond all sizes when the ticket is over and forgotten."""
        landed = c_uint64()
        _check(_library().stc_ticket_landed(self._device._handle, self.id, byref(landed)))
        return landed.value

    def cancel(self) -> None:
        """A wish; `wait` says what became of it."""
        _check(_library().stc_ticket_cancel(self._device._handle, self.id))

    def hold_stream(self, stream: int, timeout_s: float) -> None:
        """What is put on this CUDA stream from now on waits for the transfer."""
        _check(_library().stc_stream_wait(self._device._handle, self.id, stream, timeout_s))


class Reservation:
    """Addresses of one owner, who keeps them while pages come and go."""

    def __init__(self, device: Device, size: int) -> None:
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

    def unmap(self, offset: int, size: int, after: Ticket | None = None) -> None:
        """Returns at once: the pages leave when `after` and every transfer that touches them is over."""
        _check(_library().stc_unmap(self._handle, offset, size, after.id if after else 0))

    def mark_clean(self, offset: int, size: int) -> None:
        _check(_library().stc_mark_clean(self._handle, offset, size))

    def residency(self, offset: int, size: int) -> tuple[int, int]:
        """Bytes that are mapped, bytes that are clean cache."""
        mapped, clean = c_uint64(), c_uint64()
        _check(_library().stc_residency(self._handle, offset, size, byref(mapped), byref(clean)))
        return mapped.value, clean.value

    def scratch(self, offset: int, size: int, on: bool) -> None:
        """Host only: ordinary memory below these empty pages, until it is taken away again or with the reservation."""
        _check(_library().stc_scratch(self._handle, offset, size, on))

    def view(self, offset: int, size: int) -> memoryview:
        """Host only. Touching it where nothing is mapped, and no scratch memory is, ends the process."""
        if self.device.backend is not Backend.HOST:
            raise PoolError(
                Code.UNSUPPORTED, "only a host device's memory can be seen from the host: copy it to a cache"
            )
        if offset < 0 or size < 0 or offset + size > self.bytes:
            raise PoolError(Code.INVALID, f"{size} bytes at {offset} do not lie in a reservation of {self.bytes} bytes")
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")

    def export_page(self, offset: int) -> tuple[int, int]:
        """A file descriptor, the caller's to close, and where the page begins in it."""
        fd, fd_offset = c_int(), c_uint64()
        _check(_library().stc_export_page(self._handle, offset, byref(fd), byref(fd_offset)))
        return fd.value, fd_offset.value

    def load(self, cache: Cache, segments: Iterable[Segment], chunk_bytes: int = 32 << 20) -> Ticket:
        """Map and fill what is missing of these segments; clean pages are taken as they are."""
        array = [_Segment(s.offset, s.cache_offset, s.bytes) for s in segments]
        packed = (_Segment * len(array))(*array)
        ticket = c_uint64()
        _check(
            _library().stc_load(self._handle, cache._handle, packed, len(array), chunk_bytes, byref(ticket)),
        )
        return Ticket(self.device, ticket.value)

    def copy(
        self,
        offset: int,
        cache: Cache,
        cache_offset: int,
        size: int,
        direction: Direction,
        after: Ticket | None = None,
    ) -> Ticket:
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
        return Ticket(self.device, ticket.value)

    def copy_blocks(
        self,
        cache: Cache,
        pieces: Sequence[Piece],
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        direction: Direction,
        after: Ticket | None = None,
    ) -> Ticket:
        """KV blocks by number, all of their pieces; neighbours on both sides travel as one."""
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
        return Ticket(self.device, ticket.value)


class Cache:
    """Memory of the host in one file that processes share by its descriptor: addresses first, memory when committed."""

    def __init__(self, size: int, fd: int = -1) -> None:
        """`fd` of another process's cache stays the caller's to close; without one a new file is made."""
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
        """Memory for this range, now; returns how many bytes of it came in folios of 2 MiB."""
        huge_bytes = c_uint64()
        _check(_library().stc_cache_commit(self._handle, offset, size, byref(huge_bytes)))
        return huge_bytes.value

    def discard(self, offset: int, size: int) -> None:
        """The memory goes back to the machine; the range reads as zeroes."""
        _check(_library().stc_cache_discard(self._handle, offset, size))

    def pin(self, device: Device, offset: int, size: int) -> None:
        _check(_library().stc_cache_pin(self._handle, device._handle, offset, size))

    def view(self, offset: int, size: int) -> memoryview:
        if offset < 0 or size < 0 or offset + size > self.bytes:
            raise PoolError(Code.INVALID, f"{size} bytes at {offset} do not lie in a cache of {self.bytes} bytes")
        return memoryview((ctypes.c_char * size).from_address(self.address + offset)).cast("B")


@dataclass(slots=True)
class Captured:
    """What `capture` caught."""

    bytes: int = 0  # as many as were asked for; 0: no allocation was of the right size


def capture_install(path: str) -> None:
    """Let `capture` see the allocations of this shared object, which must be loaded. Again does no harm.

    Raises Code.UNSUPPORTED where the machine is not x86-64 Linux with glibc, Code.STATE where the object is not loaded.
    """
    _check(_library().stc_capture_install(path.encode()))


@contextmanager
def capture(least: int, most: int, address: int, granule: int = 1) -> Iterator[Captured]:
    """This thread's first allocation of `least` bytes, or of more in whole granules up to `most`, gets `address`.

    Only what the installed objects ask posix_memalign for counts, and `address` must be as aligned as they want it.
    `most` bytes must lie there. The result is filled in when the block ends, however it ends.
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
    """After what was allocated there is freed, or abandoned: until then the object must not free it for real."""
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
        ("relay_bytes", c_uint64),
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
    """Once for each model: a shape has a piece for every layer, and blocks move at every turn."""
    return (_Piece * len(pieces))(
        *(_Piece(p.device_offset, p.device_stride, p.host_offset, p.host_stride, p.bytes) for p in pieces)
    )


_SIGNATURES = {
    "stc_device_open": [c_void_p, c_void_p],
    "stc_device_close": [c_void_p],
    "stc_device_stats": [c_void_p, c_void_p],
    "stc_device_pages": [c_void_p, c_void_p, c_uint64],
    "stc_device_settle": [c_void_p, c_double],
    "stc_device_throttle": [c_void_p, c_double],
    "stc_device_fault": [c_void_p, c_int, c_uint64],
    "stc_reserve": [c_void_p, c_uint64, c_void_p, c_void_p],
    "stc_release": [c_void_p, c_double],
    "stc_map": [c_void_p, c_uint64, c_uint64, c_double],
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
