"""vLLM's worker, whose weights and KV cache lie where the runtime says: below addresses that outlive their pages.

Weights: a model is loaded as vLLM loads it, then every tensor that can be reached from it moves into the reservation.
What vLLM's CPU kernels keep for themselves, the packed weights of oneDNN's matrix products, is allocated there in the
first place: without packing a step of a small batch takes a third longer.

KV cache: all of it is one allocation of vLLM's; it becomes a region of the pool. On the CPU vLLM would put all blocks
of one layer together; we put all layers of one block together, so that a block has few pages and travels in one piece.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from runtime.engine import ranks
from runtime.engine.base import EngineError
from runtime.engine.runner import PooledRunner
from runtime.memory import native
from runtime.memory.kv import KvRegion
from runtime.memory.lent import lend, take_back
from runtime.memory.native import Device, Reservation

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]

ALIGNMENT = 256  # bytes, of each tensor
SCRATCH_BYTES = 64 << 20  # at a time
PACKED_MOST, TILE_BYTES = 1.25, 1024  # packed weights may be padded, to whole tiles
PACKED_LEAST = 16 << 10  # bytes: oneDNN makes objects of its own of less
BUFFER_BYTES_LEAST = 1 << 16  # vLLM's one allocation for the KV cache is larger, its other zeros of int8 are not


@dataclass(slots=True)
class Building:
    """Where the engine that is being built puts things; filled in on the way."""

    device: Device
    addresses_bytes: int  # generous: only addresses
    read: Callable[[int], None]  # is told how many bytes of its files were
    home: Home = field(init=False)
    kv: KvRegion = field(init=False)

    def release(self) -> None:
        """The build failed: what was reserved so far goes back."""
        if hasattr(self, "home"):
            self.home.leave()
        if hasattr(self, "kv"):
            self.kv.reservation.release()


building: ContextVar[Building] = ContextVar("building")
_compiled: set[tuple[tuple[int, ...], torch.dtype]] = set()  # products that oneDNN has kernels for


class PooledWorker(Worker):
    """Named in the engine's settings; vLLM makes it."""

    def init_device(self) -> None:
        self.distributed_init_method = ranks.vllm_meets() or self.distributed_init_method
        super().init_device()  # type: ignore[no-untyped-call]
        _have_expert_group()
        if current_platform.is_cpu():
            PooledRunner.take_over(self.model_runner)

    def take_up(self, request: Request, generator_state: bytes) -> None:
        """Be ready to go on with a request that was begun elsewhere. A GPU's runner hears of it when it runs."""
        if isinstance(self.model_runner, PooledRunner):
            self.model_runner.take_up(request, generator_state)
        else:
            assert self.use_v2_model_runner, "vLLM's old runner for GPUs can't go on with what it did not begin"

    def generator_state(self, id: str) -> bytes:
        """What `take_up` needs to know elsewhere, beside the tokens; empty where that is nothing."""
        return self.model_runner.generator_state(id) if isinstance(self.model_runner, PooledRunner) else b""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        now = building.get()
        now.home = Home(now.device.reserve(now.addresses_bytes))
        rotary_embedding._ROPE_DICT.clear()  # else models of equal shape share these tables, and the first home
        with now.home.packing():
            super().load_model(load_dummy_weights=load_dummy_weights)
        _check_positions(self.model_runner.model, self.vllm_config.model_config.max_model_len)
        now.home.take_in(self.model_runner.model)

    def determine_available_memory(self) -> int:
        """Addresses for as many blocks as could ever be in use at once; whether there is memory is decided later."""
        block_bytes = sum(spec.page_size_bytes for spec in self.model_runner.get_kv_cache_spec().values())
        stats = building.get().device.stats()
        return min(stats.pages_total * stats.page_bytes, block_bytes * _blocks(self.vllm_config))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if len(kv_cache_config.kv_cache_groups) != 1 or len(kv_cache_config.kv_cache_tensors) != 1:
            groups, tensors = len(kv_cache_config.kv_cache_groups), len(kv_cache_config.kv_cache_tensors)
            raise EngineError(
                f"the model keeps {groups} kinds of KV cache in {tensors} shapes; one is supported: "
                "state-space and encoder-decoder models are not"
            )
        (tensor,) = kv_cache_config.kv_cache_tensors
        page_bytes = tensor.block_stride if tensor.layer_stride > tensor.block_stride else tensor.layer_stride
        tensor.layer_stride, tensor.block_stride = page_bytes, page_bytes * len(tensor.layers)
        now = building.get()
        now.kv = KvRegion(now.device, tensor.block_stride, kv_cache_config.num_blocks)
        super().initialize_from_config(kv_cache_config)

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        return _KvAllocation(building.get().kv) if tag == "kv_cache" else contextlib.nullcontext()


def _check_positions(model: torch.nn.Module, max_model_len: int) -> None:
    """Refuse a model whose tables of rotary embeddings end before its last position: vLLM reads past the end.

    Raises EngineError with the numbers."""
    tables = (getattr(module, "cos_sin_cache", None) for module in model.modules())
    rows = min(
        (len(table) for table in tables if isinstance(table, torch.Tensor) and table.ndim > 1), default=max_model_len
    )
    if rows < max_model_len:
        raise EngineError(
            f"the model's table of positions ends after {rows}, and max_model_len is {max_model_len}: deploy it with "
            f"max_model_len {rows} or less"
        )


def _have_expert_group() -> None:
    """Make vLLM's expert-parallel group where the process has none.

    vLLM makes that group for the first model of a process, and only if this model is a mixture of experts. A runtime's
    first model is the dense toy of the self-check, and mixtures that come later ask for the group. All ranks of a world
    are one group, as vLLM has it without data parallelism; every rank must call this function at the same point."""
    if parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [list(range(world.world_size))],
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        group_name="ep",
    )


def _blocks(config: VllmConfig) -> int:
    """The null block, and for each request of a full batch a context of full length."""
    longest = -(-config.model_config.max_model_len // config.cache_config.block_size)
    return 1 + config.scheduler_config.max_num_seqs * longest


class _KvAllocation(TorchFunctionMode):
    """In place of the one buffer that vLLM allocates for all KV cache: the region."""

    def __init__(self, kv: KvRegion) -> None:
        super().__init__()
        self._kv, self.hits = kv, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args and args[0] >= BUFFER_BYTES_LEAST:
            self.hits += 1
            size = self._kv.block_bytes * self._kv.blocks
            assert args[0] == size, f"vLLM allocates {args[0]} bytes of KV cache, its plan says {size}"
            return as_tensor(self._kv.reservation, 0, size).view(torch.int8)
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None and self.hits != 1:
            raise EngineError(f"vLLM allocated its KV cache {self.hits} times, once was expected: another vLLM?")


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Home:
    """The reservation of one model's weights while it fills up, from the front."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.used = 0
        self.layout: list[tuple[int, int]] = []  # (offset, bytes) of each piece, in order
        self._ready = 0  # bytes, from the front, that are there while building
        self._packed: set[int] = set()  # addresses that oneDNN will free one day
        self._left = False

    def place(self, size: int) -> int:
        """The offset of so many bytes."""
        offset = -(-self.used // ALIGNMENT) * ALIGNMENT
        if offset + size > self.reservation.bytes:
            raise EngineError(
                f"the weights take more than the {self.reservation.bytes} bytes that their files made expect"
            )
        self._make_ready(offset + size)
        self.used = offset + size
        self.layout.append((offset, size))
        return offset

    def _make_ready(self, size: int) -> None:
        if size > self._ready:
            beyond = min(self.reservation.bytes, -(-size // SCRATCH_BYTES) * SCRATCH_BYTES)
            lend(self.reservation, self._ready, beyond - self._ready)
            self._ready = beyond

    @contextlib.contextmanager
    def packing(self) -> Iterator[None]:
        """What oneDNN packs meanwhile is packed into this home."""
        if not current_platform.is_cpu() or not ops._supports_onednn:
            yield
            return
        _install_capture()
        originals = {name: getattr(ops, name) for name in ("create_onednn_mm", "create_onednn_scaled_mm")}
        for name, original in originals.items():
            setattr(ops, name, self._packed_here(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(ops, name, original)

    def _packed_here(self, create: Callable[..., Any]) -> Callable[..., Any]:
        def create_here(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # The handler of an int8 product keeps the address of the weights' scales, not the tensor.
            args = tuple(self._settled(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
            if (shape := (tuple(weight.shape), weight.dtype)) not in _compiled:
                create(weight, *args, **kwargs)  # compiles: what that allocates must not be taken for weights
                _compiled.add(shape)
            size = weight.numel() * weight.element_size()
            if size < PACKED_LEAST:
                raise RuntimeError(f"{size} bytes are not worth packing")  # vLLM takes a plain product then
            most = int(size * PACKED_MOST) + (1 << 16)
            before = self.used, len(self.layout)
            address = self.reservation.address + self.place(most)
            with native.capture(size, most, address, TILE_BYTES) as captured:
                handler = create(weight, *args, **kwargs)
            if not captured.bytes:  # vLLM falls back to a plain product then, with the weight as it is
                self.used = before[0]
                del self.layout[before[1] :]
                raise RuntimeError(f"oneDNN packed {size} bytes where they can't be moved")
            self.used = address - self.reservation.address + captured.bytes
            self.layout[-1] = (address - self.reservation.address, captured.bytes)
            self._packed.add(address)
            handler.dtor = self._then_forget(handler.dtor, address)
            return handler

        return create_here

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor, at an address in this home that stays the tensor's for as long as the model lives."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        here = as_tensor(self.reservation, self.place(flat.nbytes), flat.nbytes)
        here.copy_(flat)
        return here.view(tensor.dtype).view(tensor.shape)

    def take_in(self, model: torch.nn.Module) -> None:
        """Move every tensor of the model here that is not here yet."""
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors_of(model):
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        with torch.no_grad():
            for tensors in by_storage.values():
                self._move(tensors)

    def _move(self, tensors: list[torch.Tensor]) -> None:
        """Tensors of one storage keep sharing it."""
        storage = tensors[0].untyped_storage()
        offset = self.place(storage.nbytes())
        home = as_tensor(self.reservation, offset, storage.nbytes())
        home.copy_(torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage))
        for tensor in tensors:
            start = tensor.storage_offset() * tensor.element_size()
            flat = home[start:] if start else home
            usable = flat.numel() // tensor.element_size() * tensor.element_size()
            tensor.data = flat[:usable].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())

    def settle(self) -> None:
        """All is in an image: what was needed while building goes back to the machine."""
        if self._ready:
            take_back(self.reservation, 0, self._ready)
            self._ready = 0

    def leave(self) -> None:
        """The model is going: the addresses are given back when the last of it is gone."""
        self.settle()
        self._left = True
        if not self._packed:
            self.reservation.release()

    def _then_forget(self, free: Callable[[int], None], address: int) -> Callable[[int], None]:
        """oneDNN frees what it packed; the library lets that pass for as long as it knows the address."""

        def free_and_forget(handler: int) -> None:
            free(handler)
            native.capture_forget(address)
            self._packed.discard(address)
            if self._left and not self._packed:
                self.reservation.release()

        return free_and_forget


def as_tensor(reservation: Reservation, offset: int, size: int) -> torch.Tensor:
    """Bytes of a reservation, mapped or not, as a tensor of uint8."""
    if reservation.device.backend is native.Backend.HOST:
        return torch.frombuffer(reservation.view(offset, size), dtype=torch.uint8)
    # With an index, torch does not ask the driver which device has the address: below it there may be no page yet.
    device = f"cuda:{torch.cuda.current_device()}"
    return torch.as_tensor(_CudaBytes(reservation.address + offset, size), device=device)


class _CudaBytes:
    """Device memory as CuPy and torch hand it to each other."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _install_capture() -> None:
    """For vLLM's compiled CPU kernels, of the instruction set it chose."""
    current_platform.import_kernels()
    for path in Path(vllm.__file__).parent.glob("_C*.so"):
        try:
            return native.capture_install(str(path))
        except native.PoolError as error:
            if error.code is not native.Code.STATE:  # that is another instruction set's, which is not loaded
                raise
    raise EngineError("vLLM's CPU kernels are not loaded")


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor that the model holds: parameters, buffers, attributes, and what its layers' functions enclose."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    todo: list[Any] = [vars(module) for module in model.modules()]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, torch.nn.Module):  # modules are in the list by themselves
            continue
        seen.add(id(item))
        match item:
            case torch.Tensor():
                found.setdefault(id(item), item)
            case dict():
                todo += list(item.values())
            case list() | tuple() | set():
                todo += list(item)
            case FunctionType():
                todo += inspect.getclosurevars(item).nonlocals.values()
            case ops.CPUDNNLGEMMHandler():
                pass  # its tensor holds no weights but the address of an object of this process
            case _ if type(item).__module__.startswith("vllm.") and not type(item).__module__.startswith("vllm.config"):
                todo += list(getattr(item, "__dict__", {}).values())
    return list(found.values())
