"""Memory of the C library's heap that builds of engines have left, given back to the machine."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give free pages of the heap back to the machine; other threads that allocate wait meanwhile, for some 10 ms.

    Buffers of builds lie between objects of engines that stay, so the heap never shrinks by itself: a process with 90
    engines of small models had 1.7 GiB. Does nothing where the C library is not glibc."""
    if hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
