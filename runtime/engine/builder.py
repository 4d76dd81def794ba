"""Builds engines: from a model's image in the host cache, or from the model's files; then an image is made as well."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import os
import time
import traceback
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine cores live in this process
os.environ["VLLM_ENABLE_CUDAGRAPH_GC"] = "1"  # else vLLM thaws the whole heap after each capture of graphs

from runtime.engine.settings import check_version, engine_args  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
import structlog
import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.sample import logits_processor, sampler
from vllm.v1.sample.ops import logprobs
from vllm.v1.worker import gpu_worker

from runtime.core.engine import EngineError, Hold, NoHostRoom, Told, WeightSource
from runtime.core.host_index import RunState
from runtime.engine import ranks
from runtime.engine.golden import Golden
from runtime.engine.moving import MovingScheduler
from runtime.engine.runner import graph_settings
from runtime.engine.vllm import VllmEngine, chain, clean_up_after, first_line
from runtime.engine.worker import Building, GrownParameter, building, pause
from runtime.memory import numa, outside
from runtime.memory.arriving import ArrivingImage, read_in
from runtime.memory.disk import DiskCache
from runtime.memory.images import NOTES_BYTES, HostCacheFull, Image, ImageKey, Images, Making
from runtime.memory.lent import write_out
from runtime.memory.native import MIXED, Backend, DevicePool, PageState
from runtime.memory.prefixes import HostPrefixes
from store.contract.device_bytes import DeviceBytes, PrefixCounts
from store.contract.views import Content, PageRun
from store.contract.wire import EngineSpec
from store.files import artefact
from store.files.architectures import Known

# vLLM inspects a new architecture in a separate process, taking seconds, lest CUDA begin too early in the caller. Here
# CUDA may begin: this process builds the model next. vLLM keeps the findings for the gateway's front.
registry._run_in_subprocess = lambda fn: fn()
# For each engine, vLLM registers its kernels for CPUs again, by a search of every module of the process, and looks for
# plug-ins in the files of every installed package. Meanwhile no model of the device steps. Once in a process suffices.
current_platform.register_triton_kernel_overrides = cache(  # type: ignore[method-assign]
    current_platform.register_triton_kernel_overrides
)
vars(logits_processor)["_load_logitsprocs_plugins"] = cache(logits_processor._load_logitsprocs_plugins)
vars(cpu_resource_utils)["_get_cpu_list"] = cache(cpu_resource_utils._get_cpu_list)  # runs a program
# vLLM freezes the heap after each build, and a frozen engine is never collected: the heap would have to thaw, and a
# collection that visits every module keeps all requests waiting for half a second. See `freeze_heap`.
vars(engine_core)["freeze_gc_heap"] = vars(gpu_worker)["freeze_gc_heap"] = lambda: None
# Code compiled at first use keeps all requests on the device waiting: 3.5 s at the first request for logprobs.
vars(sampler)["batched_count_greater_than"] = inspect.unwrap(logprobs.batched_count_greater_than)

log = structlog.get_logger()
_meta = msgspec.msgpack.Encoder()

ADDRESSES_PER_FILE_BYTE = 6  # for wider types, and packed copies beside tied embeddings; addresses cost no memory
ADDRESSES_LEAST = 256 << 20
# Lent memory of a build: weights with gaps between tensors; blocks of the golden question and the last part of weights.
LENT_MOST, LENT_PAGES = 1.05, 6
WEIGHTS_LEAST = 0.75  # an image may be smaller than its weights on file: by tied embeddings, or parts left out
BUILT_S = 30.0  # time to make an image again, if this process did not make the image
KEPT_PART = 32  # up to 1/32 of the host cache is kept, while empty, for requests to be parked
# With GPUs, up to a quarter of the host cache, by all runtimes together: on an H100 a batch of 4.5 GiB was parked in
# 0.7 s where the copy alone takes 0.09 s, since the memory was registered with the driver anew each time.
REGISTERED_PART = 4
IMAGE_FORMAT, FILES_FORMAT = "staccato_image", "staccato_files"


class Meta(msgspec.Struct, frozen=True):
    """Notes kept with an image: the layout, and the model's answers to the golden question."""

    layout: list[tuple[int, int]]  # (offset, bytes) of each piece
    golden: Golden
    sequential: bool  # in a batch the model answers otherwise than alone: the model's requests run one at a time
    grown: list[GrownParameter] = []  # parameters that the model has because the files have the parameters


def freeze_heap() -> None:
    """Take every object of now, modules above all, out of later collections. To be called while there is no engine.

    The objects of engines stay: a collection now and then finds what closed engines have left (`take_apart`)."""
    gc.collect()
    gc.freeze()


def _nobody(read_bytes: int, files_bytes: int) -> None:
    """Take reports of bytes read, and ignore the reports: a `Told`."""


class Builder:
    """Builds engines over one pool of a device.

    Args:
        pool_bytes: size of the pool.
        host_bytes: size of the host cache, the most that images and parked requests may take.
        host_fd: file descriptor of another process's host cache, to share images; -1 to make a new host cache.
        helpers: other GPUs, by ordinal, that help to load.
        pinned_bytes: most bytes of the host cache that are registered with a GPU's driver at a time; 0: no limit.
        numa_node: node of the host next to the GPU, for the threads that copy; -1: any.
        pool_percent: part of the device's memory for the pool; 0: `pool_bytes` is the size.
        disk: folder of images on disk, and the bound on their bytes; an empty folder's name: there are none.
        prefixes: bound on the blocks of ended requests in the host cache, in bytes, and the seconds until an unused
            block goes; 0 bytes: none are kept.
        graphs: on a GPU, the most requests of a decode step that is replayed from a CUDA graph; 0: no graphs.
        compiled: on a GPU, whether torch compiles each model that has graphs.
        async_scheduling: whether a step may begin before the tokens of the step before are known; None: on a GPU alone.
            A GPU computes meanwhile; on a CPU a step ends before the next begins, so each token comes a step later.
        lazy: a page of the pool gets memory when first used; for a process that builds no more than an image."""

    def __init__(
        self,
        pool_bytes: int,
        host_bytes: int,
        host_fd: int = -1,
        helpers: Collection[int] = (),
        pinned_bytes: int = 0,
        numa_node: int = -1,
        pool_percent: int = 0,
        disk: tuple[str, int] = ("", 0),
        prefixes: tuple[int, float] = (0, 0.0),
        graphs: int = 0,
        compiled: bool = False,
        async_scheduling: bool | None = None,
        lazy: bool = False,
    ) -> None:
        numa.bind(numa_node)
        self.version = check_version()
        backend = Backend.HOST if current_platform.is_cpu() else Backend.CUDA
        if pool_percent:
            pool_bytes = outside.pool_bytes(pool_percent, *_device_memory(backend))
        self.device = DevicePool(pool_bytes, backend=backend, helpers=helpers, pinned_most=pinned_bytes, lazy=lazy)
        kept = host_bytes // KEPT_PART, host_bytes // REGISTERED_PART if backend is Backend.CUDA else 0
        self.images = Images.create(host_bytes, *kept) if host_fd < 0 else Images.open(host_fd, *kept)
        if backend is Backend.CUDA:
            self.images.pin_for(self.device)
            ones = torch.ones(16, 16, device="cuda")
            ones @ ones  # cuBLAS takes its workspace, 32 MiB on Hopper, which belongs to no model
        self.images.below = self._disk = DiskCache.at(*disk)
        self.prefixes = HostPrefixes(self.images, *prefixes)
        self._image_bytes: dict[ImageKey, int] = {}  # of images that did not fit, in whole folios
        self._sizes: dict[ImageKey, int] = {}  # exact bytes of images whose engines were built
        self.pages_total, self.page_bytes = self.device.stats().pages_total, self.device.page_bytes
        self.life, self.block_tokens = self.images.life, 0
        self._graphs, self._compiled = (graphs, compiled) if backend is Backend.CUDA else (0, False)
        self._async_scheduling = backend is Backend.CUDA if async_scheduling is None else async_scheduling
        # A second process would need memory of the GPU, which the pool has nearly all of.
        self.makes_images_beside = backend is Backend.HOST
        self.builds_in_pool = backend is Backend.CUDA

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        return self.images.hold(blocks, block_bytes, life)

    def pages_used(self) -> int:
        stats = self.device.stats()
        return stats.pages_mapped + stats.pages_clean

    def device_bytes(self) -> DeviceBytes:
        prefixes = PrefixCounts(**self.prefixes.counts())
        if self.device.backend is Backend.HOST:
            return DeviceBytes(prefixes=prefixes)
        (free, total), stats = self.device.memory(), self.device.stats()
        pool = stats.pages_total * stats.page_bytes
        return DeviceBytes(total, total - free - pool, torch.cuda.memory_reserved(), stats.pinned_bytes, prefixes)

    def page_map(self, models: Mapping[int, str], caches: Mapping[int, str]) -> list[PageRun]:
        runs: list[PageRun] = []
        for state, owner, pages in self.device.page_runs():
            content = _content(state, owner, caches)
            model = "" if content is Content.FREE else models.get(owner) or caches.get(owner, "")
            if runs and (runs[-1].content, runs[-1].model) == (content, model):
                pages += runs.pop().pages
            runs.append(PageRun(pages, content, model))
        return runs

    def close(self) -> None:
        """Close the pool and the host cache. Close all engines first."""
        if self._disk is not None:
            self._disk.close()
        self.prefixes.close()
        self.images.close()  # before the device, which has ranges of the cache pinned
        self.device.close()

    def __call__(self, spec: EngineSpec, told: Told = _nobody, /) -> VllmEngine:
        return self.build(spec, told)

    def build(self, spec: EngineSpec, told: Told = _nobody, **more: Any) -> VllmEngine:
        """Build the engine of a model.

        Args:
            spec: the model.
            told: called during the build with the bytes read and the bytes of all weight files.
            more: further settings of vLLM's.

        Raises EngineError."""
        key, began = self._key(spec), time.monotonic()
        files_bytes = _weight_file_bytes(spec)
        addresses = ADDRESSES_LEAST + ADDRESSES_PER_FILE_BYTE * files_bytes
        now = Building(self.device, addresses, lambda read_bytes: told(read_bytes, files_bytes))
        try:
            self._check_outside(spec)
            image = self._find(spec, key)
            if image is not None and (engine := self._from_image(spec, now, key, image, more)) is not None:
                return engine  # around an image, no memory is left to collect: the other engines do not wait for that
            room = self._room(spec, key)
            if isinstance(room, Image):
                if (engine := self._from_image(spec, now, key, room, more)) is not None:
                    return engine
                room = None
            with room or contextlib.nullcontext():
                engine = self._from_files(spec, now, key, room, more)
            _collect()
            if self._disk is not None and spec.digest:
                self._disk.keep(self.images, key, time.monotonic() - began)
            return engine
        except HostCacheFull as error:
            self._image_bytes[key] = error.asked_bytes - NOTES_BYTES
            _clear(error)  # no search for garbage: there is no model yet, or the model's engine was closed
            torch.cuda.empty_cache()
            raise NoHostRoom(str(error), error.lacks_bytes) from error
        except Exception as error:  # vLLM raises what its layers raise: pydantic, torch, safetensors, OSError, ...
            log.error("engine.not_built", model=spec.key, detail=chain(error))
            _let_go(error)
            raise EngineError(first_line(error)) from error

    def build_pages(self, spec: EngineSpec) -> int:
        """Pages of the pool that a build takes while the build lasts, on a GPU: lent memory is memory of the pool."""
        weights = spec.weight_bytes // ranks.size() * LENT_MOST
        return -(-int(weights) // self.page_bytes) + LENT_PAGES

    def _check_outside(self, spec: EngineSpec) -> None:
        """Raises EngineError if the device has too little memory beside the pool to make the model there first."""
        if self.device.backend is Backend.CUDA:
            torch.cuda.empty_cache()
            if (said := outside.too_little(spec.weight_bytes // ranks.size(), self.device.memory()[0])) is not None:
                raise EngineError(said)

    def has_image(self, spec: EngineSpec) -> bool:
        """Whether the host cache or the disk has the model's image: then a build reads no files of the model.

        An image that another process makes counts as missing: a build would wait for the other process."""
        state = self.images.state(self._key(spec))
        return state is RunState.READY or (state is None and self.on_disk(spec))

    def on_disk(self, spec: EngineSpec, /) -> bool:
        return self._disk is not None and bool(spec.digest) and self._disk.has(self._key(spec))

    def proved(self, spec: EngineSpec, /) -> bool:
        return self._disk is not None and bool(spec.digest) and self._disk.proved(self._key(spec), self._proof(spec))

    def note_proof(self, spec: EngineSpec, /) -> bool:
        if self._disk is None or not spec.digest:
            return True
        return self._disk.note_proof(self._key(spec), self._proof(spec))

    def drop_proof(self, spec: EngineSpec, /) -> None:
        if self._disk is not None and spec.digest:
            self._disk.drop_proof(self._key(spec), self._proof(spec))

    def _proof(self, spec: EngineSpec) -> str:
        """Name of the proof that a device with such a pool serves the model: a smaller pool may have too few pages."""
        told = f"{spec.key} {self.pages_total} {self.page_bytes}"
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def spare_room(self, spec: EngineSpec, later: Sequence[EngineSpec], /) -> int | None:
        key = self._key(spec)
        if self.images.state(key) is not None:
            return 0
        stored = self._disk.open(key) if self.on_disk(spec) and self._disk is not None else None
        if stored is None:
            return None
        stored.close()
        return self.images.spare_room(stored.bytes, [self._key(each) for each in later])

    def _key(self, spec: EngineSpec) -> ImageKey:
        shard = f"{ranks.rank()}/{ranks.size()}"
        # A compiled model rounds otherwise, so its answers to the golden question, kept with the image, are others.
        dtype = f"{spec.dtype} compiled" if self._compiled else spec.dtype
        return ImageKey(_identity(spec), self.version, dtype, shard, _architecture())

    def _find(self, spec: EngineSpec, key: ImageKey) -> Image | ArrivingImage | None:
        """The image, pinned, if every rank has an image; else None: all ranks read files together, or none.

        An image on disk is being read when the call returns. Ranks wait for the end of the reading, and agree on it.
        Images of models without a digest stay off the disk: such a model's files might change under an equal key."""
        image: Image | ArrivingImage | None = self.images.find(key)
        if self._disk is not None and spec.digest:
            if image is None:
                image = read_in(self.images, self._disk, key)
            else:  # made by another process, perhaps, which had no time to write the image
                self._disk.keep(self.images, key, BUILT_S)
        if isinstance(image, ArrivingImage) and ranks.size() > 1:
            image = image.ended()
        if ranks.all_say(lambda: image is not None):
            return image
        if image is not None:
            image.release()
        return None

    def _room(self, spec: EngineSpec, key: ImageKey) -> Making | Image | None:
        """Room in the host cache for an image to be made; or the image, if another runtime has made the image.

        Returns None if room was only looked for. The size of an image is known once the engine was built. A process
        that makes images beside a device then takes the room before the build: room that a build finds at its beginning
        may go to other images before its end, again and again. A device that builds by itself takes no room ahead:
        other runtimes would wait for the image on the threads of their devices.
        Raises HostCacheFull."""
        if self.makes_images_beside and key in self._sizes and ranks.size() == 1:
            return self.images.make(key, self._sizes[key])
        self.images.check_room(self._image_bytes.get(key, int(WEIGHTS_LEAST * spec.weight_bytes)))
        return None

    def _from_files(
        self, spec: EngineSpec, now: Building, key: ImageKey, room: Making | None, more: dict[str, Any]
    ) -> VllmEngine:
        """Read the weights with vLLM, ask the model the golden question, and keep an image of weights and answers."""
        _check_files(spec)
        engine = self._core(spec, now, FILES_FORMAT, more)
        try:
            golden, sequential = engine.prove_built()
            self._sizes[key] = engine.weights.size
            if room is not None and room.bytes != engine.weights.size:
                room.abandon()
                room = None
            match room or self.images.make(key, engine.weights.size):
                case Making() as making:
                    with making:
                        write_out(engine.weights.reservation, engine.weights.size, self.images.cache, making.offset)
                        image = making.seal(_meta.encode(Meta(engine.home.layout, golden, sequential, now.grown)))
                case Image() as image:  # another runtime made the image first
                    pass
            if sequential:
                log.warning("engine.sequential", model=spec.key, detail="in a batch it says otherwise than alone")
            engine.move_in(image, key, golden, sequential, WeightSource.FILES)
            return engine
        except BaseException as error:
            clean_up_after(error, engine.close)
            raise

    def _from_image(
        self, spec: EngineSpec, now: Building, key: ImageKey, image: Image | ArrivingImage, more: dict[str, Any]
    ) -> VllmEngine | None:
        """Build the engine on an image; None, and the image is discarded, if the engine needs another layout."""
        meta = msgspec.msgpack.decode(image.meta, type=Meta)
        now.grown = meta.grown
        try:
            engine = self._core(spec, now, IMAGE_FORMAT, more)
            engine.take_in()
            engine.capture_empty()
        except BaseException:
            image.release()
            raise
        if not ranks.all_say(lambda: engine.home.layout == meta.layout):
            log.warning("engine.image_differs", model=spec.key, pieces=len(engine.home.layout))
            engine.close()
            image.release()
            self.images.discard(key)
            return None
        source = WeightSource.DISK if isinstance(image, ArrivingImage) else WeightSource.HOST
        engine.move_in(image, key, meta.golden, meta.sequential, source)
        return engine

    def _core(self, spec: EngineSpec, now: Building, load_format: str, more: dict[str, Any]) -> VllmEngine:
        args = engine_args(
            spec,
            load_format,
            kv_cache_memory_bytes=self.pages_total * self.page_bytes,
            prefix_cache_retention_interval=None,  # blocks behind a window serve shared prompts until taken again
            worker_cls="runtime.engine.worker.PooledWorker",
            scheduler_cls=MovingScheduler,
            tensor_parallel_size=ranks.size(),
            distributed_executor_backend="external_launcher" if ranks.size() > 1 else None,
            **(self._by_device(spec) | more),
        )
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        pause()
        token = building.set(now)
        try:
            core = EngineCore(config, Executor.get_class(config), log_stats=False)
            async_scheduling = self._async_scheduling and ranks.size() == 1
            return VllmEngine(core, now.home, now.kv, self.images, self.prefixes, async_scheduling)
        except BaseException as error:
            gc.collect()
            clean_up_after(error, now.release)
            raise
        finally:
            building.reset(token)

    def _by_device(self, spec: EngineSpec) -> dict[str, Any]:
        """Settings of vLLM that depend on the device."""
        if self.device.backend is Backend.HOST:
            return {}
        # Graphs hold decode steps, and a model that makes vectors has no decode steps.
        graphs = {} if spec.pools else graph_settings(self._graphs, self._compiled)
        return outside.settings(Path(spec.path), torch.cuda.mem_get_info()[1]) | graphs


@register_model_loader(IMAGE_FORMAT)
class _FromImage(BaseModelLoader):
    """A loader that reads nothing: the weights come with the pages, at a fetch."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        building.get().grow(model)


@register_model_loader(FILES_FORMAT)
class _FromFiles(DefaultModelLoader):
    """vLLM's loader for safetensors, extended to count the bytes read."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        with building.get().reading(model):
            super().load_weights(model, model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        now, read_bytes = building.get(), 0
        now.check_kinds()  # the layers are made, and the files not read yet
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor
            pause()
            read_bytes += tensor.nbytes
            now.read(read_bytes)


def _device_memory(backend: Backend) -> tuple[int, int]:
    """Free bytes and all bytes of the device, once the process has its context there."""
    if backend is Backend.CUDA:
        return torch.cuda.mem_get_info()
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _let_go(error: BaseException | None) -> None:
    """Collect the model of a failed build: the error's frames still hold the model."""
    _clear(error)
    _collect()


def _clear(error: BaseException | None) -> None:
    """Let go of what the frames of an error, and of the errors underneath, hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # torch keeps a model's memory from before the move; does nothing without a GPU


def _content(state: PageState, owner: int, caches: Mapping[int, str]) -> Content:
    match state:
        case PageState.FREE:
            return Content.FREE
        case PageState.CLEAN:
            return Content.CACHE
        case PageState.LIMBO:
            return Content.LEAVING
        case _ if owner == MIXED:
            return Content.LOADING
        case _:
            return Content.KV if owner in caches else Content.WEIGHTS


def _check_files(spec: EngineSpec) -> None:
    """Check that the model's files are still the registered files. Raises EngineError.

    If changed files were built, every runtime that shares the image would get the changed weights."""
    if not spec.digest:
        return
    found = artefact.inspect(Path(spec.path), Known(frozenset([spec.architecture]))).digest
    if found != spec.digest:
        raise EngineError(
            f"the files in {spec.path} have changed since they were registered (digest {found[:12]}, then "
            f"{spec.digest[:12]}): register the folder as a new model, or put back what was there"
        )


def _identity(spec: EngineSpec) -> str:
    """Identity of the weights, for the image's key: the artefact's digest; without a digest, path, sizes and times.

    A language model alone is another set of weights than the whole model."""
    alone = " language_model_only" if spec.language_model_only else ""
    if spec.digest:
        return spec.digest + alone
    stats = [path.stat() for path in sorted(Path(spec.path).glob("*.safetensors"))]
    return f"{spec.path} {[(stat.st_size, stat.st_mtime_ns) for stat in stats]}{alone}"


def _architecture() -> str:
    """The device's architecture, for the image's key: weights packed for an instruction set do not suit another."""
    return torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else torch.cuda.get_device_name()


def _weight_file_bytes(spec: EngineSpec) -> int:
    return sum(path.stat().st_size for path in Path(spec.path).glob("*.safetensors"))
