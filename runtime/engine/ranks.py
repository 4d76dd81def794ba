"""The ranks of a tensor-parallel group: processes with a device each, which do the same in the same order.

vLLM's schedulers are deterministic, so equal calls make equal steps on every rank, and its collective operations meet.
What ranks could see differently is asked here, for all of them at once: whether a copy is over, whether the host has
room. A process that is not one of several is asked alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import AllreduceOptions, FileStore, ProcessGroupGloo, ReduceOp  # type: ignore[attr-defined]

from runtime.memory.native import Code, PoolError

ANSWER_S = 600.0  # that a rank waits for the others' answer: one of them may be building
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Joined:
    rank: int
    size: int
    vllm: str  # where vLLM's own groups meet; its last part names memory that they share
    gloo: ProcessGroupGloo


_joined: Joined | None = None


def join(rank: int, size: int, folder: str) -> None:
    """This process is the rank of that number, from 0. The others are on this host, and meet it in `folder`."""
    global _joined
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", GLOO_SOCKET_IFNAME=LOOPBACK)  # each sees its own device alone
    store = FileStore(f"{folder}/ours", size)
    gloo = ProcessGroupGloo(store, rank, size, timedelta(seconds=ANSWER_S))
    _joined = Joined(rank, size, f"file://{folder}/{os.path.basename(folder)}", gloo)


def size() -> int:
    return _joined.size if _joined else 1


def rank() -> int:
    return _joined.rank if _joined else 0


def vllm_meets() -> str | None:
    """Where vLLM's groups meet; None where there is but one rank."""
    return _joined.vllm if _joined else None


def least(value: int) -> int:
    """The least that any rank has."""
    if _joined is None:
        return value
    values, options = torch.tensor([value]), AllreduceOptions()
    options.reduceOp = ReduceOp.MIN  # type: ignore[assignment]
    _joined.gloo.allreduce([values], options).wait()  # type: ignore[attr-defined]
    return int(values.item())


def all_say(look: Callable[[], bool]) -> bool:
    """Whether it is so on all ranks. Raises PoolError on all of them where one raises it."""
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
