"""Reading of a safetensors file's header: is the file whole, and which tensors are in the file. Loads no weights.

8 bytes: length of the header │ header: JSON, name → {dtype, shape, [begin, end]} │ data, without gap or overlap
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

HEADER_MOST = 100_000_000  # bytes: the format's own bound
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class Broken(ValueError):
    """Error of a file that breaks the format; the message has the numbers."""


class Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def size(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


@dataclass(frozen=True)
class Header:
    tensors: dict[str, Tensor]

    def bytes_by_dtype(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for tensor in self.tensors.values():
            sums[tensor.dtype] = sums.get(tensor.dtype, 0) + tensor.size
        return sums


def read_header(path: Path) -> Header:
    """Read the header and check the size of the file. Raises Broken, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > HEADER_MOST or 8 + length > size:
            raise Broken(f"has {size} bytes, its header claims {length}")
        header = Header(_tensors(file.read(length)))
    end = 8 + length + _data_bytes(header)
    if end != size:
        raise Broken(f"has {size} bytes, its header promises {end}")
    return header


def _tensors(text: bytes) -> dict[str, Tensor]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(value, type=Tensor) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Broken(f"has a header that is not the format's JSON ({error})") from error


def _data_bytes(header: Header) -> int:
    """Return the size of the data. Raises Broken unless every tensor begins where the previous tensor ended."""
    end = 0
    for name, tensor in sorted(header.tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.dtype not in BITS:
            raise Broken(f"has tensor {name!r} of unknown dtype {tensor.dtype!r}")
        bits = math.prod(tensor.shape) * BITS[tensor.dtype]
        if min(tensor.shape, default=1) < 0 or tensor.size * 8 != bits:
            raise Broken(f"has tensor {name!r} of shape {tensor.shape} {tensor.dtype} in {tensor.size} bytes")
        if tensor.data_offsets[0] != end:
            raise Broken(f"has tensor {name!r} at byte {tensor.data_offsets[0]} where {end} is expected")
        end = tensor.data_offsets[1]
    return end
