"""The ranks of a tensor-parallel group: processes with a device each that make equal calls in equal order.

vLLM's schedulers are deterministic, so equal calls make equal steps on every rank, and collective operations meet.
Whether a copy is over or the host has room could look different to each rank, so the ranks vote here. A process outside
any group answers alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import AllreduceOptions, FileStore, ProcessGroupGloo, ReduceOp  # type: ignore[attr-defined]

from runtime.memory.native import Code, PoolError

ANSWER_S = 600.0  # the longest wait for every rank's answer: a rank may be building
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Joined:
    rank: int
    size: int
    vllm: str  # where vLLM's own groups meet; the last part of the path names shared memory of the groups
    gloo: ProcessGroupGloo


_joined: Joined | None = None


def join(rank: int, size: int, folder: str) -> None:
    """Join this process to a group as the rank `rank`, from 0; returns when all ranks of the group have joined.

    The ranks are processes of one host, and meet in `folder`."""
    global _joined
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", GLOO_SOCKET_IFNAME=LOOPBACK)  # each rank sees only its own device
    store = FileStore(f"{folder}/ours", size)
    gloo = ProcessGroupGloo(store, rank, size, timedelta(seconds=ANSWER_S))
    _joined = Joined(rank, size, f"file://{folder}/{os.path.basename(folder)}", gloo)


def size() -> int:
    return _joined.size if _joined else 1


def rank() -> int:
    return _joined.rank if _joined else 0


def vllm_meets() -> str | None:
    """Where vLLM's groups meet, as a URL; None for a process outside any group."""
    return _joined.vllm if _joined else None


def least(value: int) -> int:
    """The least value of all ranks. Every rank must call at the same point; waits for the slowest rank."""
    if _joined is None:
        return value
    values, options = torch.tensor([value]), AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]
    _joined.gloo.allreduce([values], options).wait()  # type: ignore[attr-defined]
    return int(values.item())


def all_say(look: Callable[[], bool]) -> bool:
    """Whether `look` returns True on all ranks. If `look` raises PoolError on any rank, raises PoolError on all."""
    if _joined is None:
        return look()
    failed: PoolError | None = None
    try:
        said = int(look())
    except PoolError as error:
        failed, said = error, -1
    everywhere = least(said)
    if failed is not None:
        raise failed
    if everywhere < 0:
        raise PoolError(Code.DRIVER, "another rank of the group failed to copy: its log says why")
    return bool(everywhere)
