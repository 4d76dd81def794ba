"""vLLM's worker, extended: weights and KV cache lie in reservations of the runtime, at addresses that outlive pages.

Weights: vLLM loads a model as usual, then every tensor reachable from the model moves into the reservation. Packed
weights of oneDNN's matrix products, kept inside vLLM's CPU kernels, are allocated in the reservation from the start:
without packing, a step of a small batch takes a third longer.

KV cache: vLLM allocates the KV cache as one buffer, and the buffer becomes a region of the pool. On the CPU vLLM would
put all blocks of a layer together. This worker puts all layers of a block together, so that a block has few pages and
is copied in one piece. Layers of several kinds share the region (`runtime/engine/groups.py`).
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import vllm
from torch._C import _len_torch_function_stack
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from vllm import _custom_ops as ops
from vllm import forward_context
from vllm.config import VllmConfig
from vllm.config import vllm as vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader import base_loader
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.request import Request
from vllm.v1.worker import workspace

from runtime import slices
from runtime.core.engine import EngineError
from runtime.engine import groups, ranks
from runtime.engine.runner import EngineScratch, PooledRunner
from runtime.memory import native, outside
from runtime.memory.kv import KvRegion
from runtime.memory.lent import lend, take_back
from runtime.memory.native import DevicePool, Reservation

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]

ALIGNMENT = 256  # bytes, of each tensor
SCRATCH_BYTES = 64 << 20  # memory lent at a time
PACKED_MOST, TILE_BYTES = 1.25, 1024  # packed weights may be padded to whole tiles
PACKED_LEAST = 16 << 10  # bytes: oneDNN makes objects of its own of smaller weights
OLD_BYTES_MOST = 64 << 20  # storages left by moved tensors, kept until the model has been asked again
NO_NUMBER = 0xFF  # the value of every byte of a float that is not a number
BUFFER_BYTES_LEAST = 1 << 16  # vLLM's buffer for the KV cache is larger; every further int8 buffer of zeros is smaller


class GrownParameter(NamedTuple):
    """A parameter that a model gets when vLLM finds the parameter in the files: vLLM's backend for architectures of
    transformers adds the bias of an output layer (phi)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as float32


@dataclass(slots=True)
class Building:
    """Places of weights and KV cache of an engine being built; the worker fills in home and KV region."""

    device: DevicePool
    addresses_bytes: int  # for the weights; generous, for addresses cost no memory
    read: Callable[[int], None]  # called with the number of bytes read from the model's files
    grown: list[GrownParameter] = field(default_factory=list)  # found by `reading`, or told before a build on an image
    home: Home = field(init=False)
    kv: KvRegion = field(init=False)
    check_kinds: Callable[[], None] = field(init=False)  # refuses a model by its layers, as `groups.check_kinds` does

    def release(self) -> None:
        """Release the reservations made so far, after a failed build."""
        if hasattr(self, "home"):
            self.home.leave()
        if hasattr(self, "kv"):
            self.kv.reservation.release()

    @contextlib.contextmanager
    def reading(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the context, the files of `model` are read: notes the parameters that the reading adds."""
        before = {name for name, _ in model.named_parameters()}
        yield
        self.grown = [
            GrownParameter(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in model.named_parameters()
            if name not in before
        ]

    def grow(self, model: torch.nn.Module) -> None:
        """Give `model` the noted parameters; their bytes come with the image."""
        device = next(model.parameters()).device
        for added in self.grown:
            path, _, name = added.name.rpartition(".")
            empty = torch.empty(added.shape, dtype=getattr(torch, added.dtype), device=device)
            setattr(model.get_submodule(path), name, torch.nn.Parameter(empty, requires_grad=False))


building: ContextVar[Building] = ContextVar("building")
_compiled: set[tuple[tuple[int, ...], torch.dtype]] = set()  # shapes and types with kernels of oneDNN compiled before


def pause() -> None:
    """A point at which other engines of the process may step, if the build or check around this line is long.

    The point is passed by where torch is told to remember nothing, and by the ranks of a group, which call in step."""
    if ranks.size() == 1 and not torch.is_inference_mode_enabled():
        slices.pause(_put_aside)


def _put_aside() -> Callable[[], None]:
    """Put aside what a build has set for the whole process. Returns the function that sets the same again."""
    config, prefix, dtype = vllm_config._current_vllm_config, vllm_config._current_prefix, torch.get_default_dtype()
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
    _set_globals(None, None, torch.float32)

    def back() -> None:
        _set_globals(config, prefix, dtype)
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    return back


def pause_between_layers(*_: object) -> None:
    """A point in the midst of a step at which other engines of the process may step, as `pause` is between steps."""
    if ranks.size() == 1:
        slices.pause(_put_step_aside)


def _put_step_aside() -> Callable[[], None]:
    """Put aside what vLLM's step has set for the whole process. Returns the function that sets the same again."""
    back, context, remembers = _put_aside(), forward_context._forward_context, torch.inference_mode(mode=False)
    forward_context._forward_context = None
    remembers.__enter__()

    def back_in_step() -> None:
        remembers.__exit__(None, None, None)
        forward_context._forward_context = context
        back()

    return back_in_step


def _set_globals(config: VllmConfig | None, prefix: str | None, dtype: torch.dtype) -> None:
    vllm_config._current_vllm_config, vllm_config._current_prefix = config, prefix
    vllm_config.get_cached_compilation_config.cache_clear()
    torch.set_default_dtype(dtype)


if current_platform.is_cpu():
    # vLLM's loader collects twice in each load, for the memory of a GPU. A full collection visits every engine.
    vars(base_loader)["gc"] = SimpleNamespace(collect=partial(gc.collect, 1))
register_module_module_registration_hook(lambda *_: pause())  # between the layers of a model that is being made


class PooledWorker(Worker):
    """A worker over the runtime's memory. The engine's settings name the class, and vLLM constructs the worker."""

    scratch: EngineScratch | None = None  # on a GPU

    def init_device(self) -> None:
        pause()
        self.distributed_init_method = ranks.vllm_meets() or self.distributed_init_method
        super().init_device()  # type: ignore[no-untyped-call]
        _have_expert_group()
        if current_platform.is_cpu():
            PooledRunner.take_over(self.model_runner)
        else:
            self.scratch = EngineScratch(workspace.current_workspace_manager())
            self.scratch.use()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if self.scratch is not None:
            self.scratch.use()
        return super().execute_model(scheduler_output)

    def take_up(self, request: Request, generator_state: bytes) -> None:
        """Prepare to continue a request begun elsewhere. A runner for GPUs is told of the request at the next step."""
        if isinstance(self.model_runner, PooledRunner):
            self.model_runner.take_up(request, generator_state)
        else:
            assert self.use_v2_model_runner, "vLLM's old runner for GPUs can't go on with what it did not begin"

    def generator_state(self, id: str) -> bytes:
        """State of the request's random generator, for `take_up` elsewhere; empty if tokens alone suffice."""
        return self.model_runner.generator_state(id) if isinstance(self.model_runner, PooledRunner) else b""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        pause()
        now = building.get()
        now.home = Home(now.device.reserve(now.addresses_bytes))
        now.check_kinds = lambda: groups.check_kinds(self.get_kv_cache_spec(), groups.pools(self.vllm_config))
        rotary_embedding._ROPE_DICT.clear()  # else models of equal shape would share tables in the first model's home
        with now.home.packing():
            super().load_model(load_dummy_weights=load_dummy_weights)
        _check_positions(self.model_runner.model, self.vllm_config.model_config.max_model_len)
        pause()
        now.home.found = tensors_of(self.model_runner.model)
        now.home.runner_tensors = lambda: reachable([vars(self.model_runner)])

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs by layer. States are kept at the ends of blocks alone: vLLM's scheduler ends the pieces of a
        prefill there. vLLM's kernel of Mamba 2 for CPUs returns no state from inside a piece."""
        return {
            name: replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
            if isinstance(spec, MambaSpec)
            else spec
            for name, spec in super().get_kv_cache_spec().items()
        }

    def determine_available_memory(self) -> int:
        """Bytes of addresses for as many blocks as could ever be in use at once, at most the pool.

        Whether the blocks get memory is decided later."""
        specs = self.get_kv_cache_spec()
        groups.check_kinds(specs, groups.pools(self.vllm_config))
        if not specs:
            return 0
        stats = building.get().device.stats()
        return min(stats.pages_total * stats.page_bytes, groups.bytes_for_batch(specs, self.vllm_config))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        pause()
        now, plan = building.get(), deepcopy(kv_cache_config)  # the scheduler keeps vLLM's plan
        if not plan.kv_cache_groups:  # an encoder: vLLM's books have the null block alone
            kv_cache_config.num_blocks = plan.num_blocks = 1
            now.kv = KvRegion(now.device, now.device.page_bytes, 1)
            super().initialize_from_config(plan)
            return
        now.kv = KvRegion(now.device, groups.together(plan), plan.num_blocks)
        pages = groups.without_gaps(plan) if current_platform.is_cpu() and groups.latent(plan) else 1
        super().initialize_from_config(plan)
        if isinstance(self.model_runner, PooledRunner):
            memory = as_tensor(now.kv.reservation, 0, now.kv.blocks * now.kv.block_bytes)
            self.model_runner.zero_blocks_of(memory.view(now.kv.blocks, now.kv.block_bytes))
            if pages > 1:
                self.model_runner.number_pages(pages)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up without graphs: graphs are captured later, once the weights lie at their final addresses.

        On a GPU the first block of the KV cache has memory meanwhile: vLLM tries kernels of states on that block."""
        if current_platform.is_cpu():
            return super().compile_or_warm_up_model()
        kv = building.get().kv
        size = kv.pages_for(1) * kv.page_bytes
        lend(kv.reservation, 0, size)
        self.model_runner.capture_model = lambda: 0
        try:
            return super().compile_or_warm_up_model()
        finally:
            del self.model_runner.capture_model
            torch.cuda.synchronize()
            take_back(kv.reservation, 0, size)

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        kept = tag == "kv_cache" and self.get_kv_cache_spec()
        return _KvAllocation(building.get().kv) if kept else contextlib.nullcontext()


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
    """Make vLLM's expert-parallel group if the process has none.

    vLLM makes the group for the first model of a process, and only if the model is a mixture of experts. A runtime's
    first model is the dense toy of the self-check, and mixtures deployed later ask for the group. All ranks of a world
    are one group, as in vLLM without data parallelism; every rank must call the function at the same point."""
    if parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [list(range(world.world_size))],
        world.local_rank,
        torch.distributed.get_backend(world.device_group),
        group_name="ep",
    )


class _KvAllocation(TorchFunctionMode):
    """Within the context, vLLM's allocation of the buffer for the whole KV cache returns the region instead."""

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
    """The reservation of one model's weights, filled from the front."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self.used = 0
        self.layout: list[tuple[int, int]] = []  # (offset, bytes) of each piece, in order
        self._ready = 0  # bytes from the front that have memory during the build
        self._handlers: list[weakref.ref[Any]] = []  # of oneDNN's products, each with a packed weight
        self.found: list[torch.Tensor] = []  # tensors of the model as loaded by vLLM: `take_in` moves the tensors
        self._old: list[torch.UntypedStorage] = []  # overwritten storages of moved tensors
        self._before = self._live()  # blocks of torch's allocator from before the model
        self.runner_tensors: Callable[[], list[torch.Tensor]] = list  # finds tensors that stay outside on purpose
        self.left: dict[int, int] = {}  # what `note_left` found

    def place(self, size: int) -> int:
        """Allocate `size` bytes; returns the offset. Raises EngineError if the reservation is too small."""
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
        """Within the context, oneDNN packs weights into this home."""
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
            pause()
            # The handler of an int8 product keeps the address of the weights' scales, not the tensor.
            args = tuple(self._settled(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
            if (shape := (tuple(weight.shape), weight.dtype)) not in _compiled:
                create(weight, *args, **kwargs)  # compiles: memory of the compiler must not be taken for weights
                _compiled.add(shape)
            size = weight.numel() * weight.element_size()
            if size < PACKED_LEAST:
                raise RuntimeError(f"{size} bytes are not worth packing")  # vLLM then takes a plain product
            most = int(size * PACKED_MOST) + (1 << 16)
            before = self.used, len(self.layout)
            address = self.reservation.address + self.place(most)
            with native.capture(size, most, address, TILE_BYTES) as captured:
                handler = create(weight, *args, **kwargs)
            if not captured.bytes:  # vLLM then takes a plain product with the unpacked weight
                self.used = before[0]
                del self.layout[before[1] :]
                raise RuntimeError(f"oneDNN packed {size} bytes where they can't be moved")
            self.used = address - self.reservation.address + captured.bytes
            self.layout[-1] = (address - self.reservation.address, captured.bytes)
            handler.dtor = partial(_free_and_forget, handler.dtor, address)
            self._handlers.append(weakref.ref(handler))
            return handler

        return create_here

    def _settled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the tensor in this home; the address stays the tensor's while the model lives."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        here = as_tensor(self.reservation, self.place(flat.nbytes), flat.nbytes)
        here.copy_(flat)
        return here.view(tensor.dtype).view(tensor.shape)

    def take_in(self) -> None:
        """Move every tensor found in the model into this home.

        The old memory of a tensor is overwritten with bytes that are no number. If any part of the model still points
        to the old memory, the model's answers change at once, and not only when the memory is used again."""
        by_storage: dict[int, list[torch.Tensor]] = {}
        for tensor in self.found:
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self.found = []
        with torch.no_grad():
            for tensors in by_storage.values():
                pause()
                self._leave_behind(self._move(tensors))

    def note_left(self) -> None:
        """Note blocks of torch's allocator that the model took and still holds outside this home: bytes by address.

        To be called before graphs are captured, which take memory of their own. Without a GPU no block is known:
        torch's allocator for CPUs tells nothing."""
        kept = [tensor.data_ptr() for tensor in self.runner_tensors()] if self._before is not None else []
        self.left = outside.strays(self._before or {}, self._live() or {}, kept)

    def _live(self) -> dict[int, int] | None:
        if self.reservation.device.backend is native.Backend.HOST:
            return None
        return outside.live_blocks(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]

    def _move(self, tensors: list[torch.Tensor]) -> torch.UntypedStorage:
        """Move tensors of one storage; the tensors go on sharing a storage. Returns the old storage."""
        storage = tensors[0].untyped_storage()
        offset = self.place(storage.nbytes())
        home = as_tensor(self.reservation, offset, storage.nbytes())
        home.copy_(_bytes_of(storage))
        for tensor in tensors:
            start = tensor.storage_offset() * tensor.element_size()
            flat = home[start:] if start else home
            usable = flat.numel() // tensor.element_size() * tensor.element_size()
            tensor.data = flat[:usable].view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        return storage

    def _leave_behind(self, storage: torch.UntypedStorage) -> None:
        """Overwrite an old storage held by no tensor. Up to OLD_BYTES_MOST bytes of old storages are kept until
        `forget_old`, lest the memory be used again before the model is asked."""
        if torch._C._storage_Use_Count(storage._cdata) != 1:
            return  # a tensor not found in the model uses the storage
        _bytes_of(storage).fill_(NO_NUMBER)
        if storage.nbytes() + sum(old.nbytes() for old in self._old) <= OLD_BYTES_MOST:
            self._old.append(storage)

    def forget_old(self) -> None:
        """Free the old storages: the model has been asked since the tensors moved."""
        self._old = []

    def settle(self) -> None:
        """Give memory lent for the build back to the machine: an image holds the weights."""
        if self._ready:
            take_back(self.reservation, 0, self._ready)
            self._ready = 0

    def leave(self) -> None:
        """Give the reservation back, and oneDNN's products with packed weights: the model is closed."""
        self.settle()
        self.forget_old()
        self.found = []
        for handler in [handler() for handler in self._handlers]:
            if handler is not None and handler.handler_tensor is not None:
                handler.dtor(handler.handler_tensor.item())
                handler.handler_tensor = None  # vLLM's handler then frees nothing when collected
        self.reservation.release()


def _free_and_forget(free: Callable[[int], None], address: int, handler: int) -> None:
    """Call oneDNN's `free` for a product with packed weights at `address`, then let the memory library forget the
    address. While the library knows the address, a free of the address has no effect."""
    free(handler)
    native.capture_forget(address)


def as_tensor(reservation: Reservation, offset: int, size: int) -> torch.Tensor:
    """Bytes of a reservation, with or without pages, as a tensor of uint8."""
    if reservation.device.backend is native.Backend.HOST:
        return torch.frombuffer(reservation.view(offset, size), dtype=torch.uint8)
    # Without an index, torch would ask the driver for the address's device, and the address may have no page yet.
    device = f"cuda:{torch.cuda.current_device()}"
    return torch.as_tensor(_CudaBytes(reservation.address + offset, size), device=device)


class _CudaBytes:
    """Device memory in the form in which CuPy and torch exchange arrays."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _install_capture() -> None:
    """Install capture in vLLM's CPU kernels of the instruction set chosen by vLLM. Raises EngineError and PoolError."""
    current_platform.import_kernels()
    for path in Path(vllm.__file__).parent.glob("_C*.so"):
        try:
            return native.capture_install(str(path))
        except native.PoolError as error:
            if error.code is not native.Code.STATE:  # STATE: kernels of another instruction set, not loaded
                raise
    raise EngineError("vLLM's CPU kernels are not loaded")


def tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Every tensor held by the model: parameters, buffers, attributes, and tensors enclosed by layers' functions.

    A tensor without memory (on torch's device `meta`) belongs to a tower that vLLM left out."""
    return reachable([vars(module) for module in model.modules()])


def reachable(todo: list[Any]) -> list[torch.Tensor]:
    """Every tensor with memory that can be reached from the objects of `todo`, modules inside of the objects aside."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, torch.nn.Module):  # the list holds every module already
            continue
        seen.add(id(item))
        match item:
            case torch.Tensor():
                if not item.is_meta:
                    found.setdefault(id(item), item)
            case dict():
                todo += list(item.values())
            case list() | tuple() | set():
                todo += list(item)
            case FunctionType():
                todo += inspect.getclosurevars(item).nonlocals.values()
            case ops.CPUDNNLGEMMHandler():
                pass  # the handler's tensor holds no weights: only the address of an object of this process
            case _ if type(item).__module__.startswith("vllm.") and not type(item).__module__.startswith("vllm.config"):
                todo += list(getattr(item, "__dict__", {}).values())
    return list(found.values())
