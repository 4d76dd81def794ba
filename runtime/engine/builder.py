"""Makes engines: around an image in the host's cache, or from a model's files, making the image."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Collection, Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # cores live in this process

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
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.sample import sampler
from vllm.v1.sample.ops import logprobs

from runtime.engine import ranks
from runtime.engine.base import EngineError, Hold, Told
from runtime.engine.moving import MovingScheduler
from runtime.engine.vllm import VllmEngine, chain, clean_up_after, first_line
from runtime.engine.worker import Building, building
from runtime.memory.images import Image, ImageKey, Images, Making
from runtime.memory.lent import write_out
from runtime.memory.native import MIXED, Backend, Device, PageState
from store import artefact
from store.views import Content, PageRun
from store.wire import EngineSpec

# An architecture that vLLM never saw is looked at in a process of its own, which takes seconds, lest CUDA begin too
# early in this one. Here it may: this process builds the model next. vLLM keeps what it saw for the gateway's front.
registry._run_in_subprocess = lambda fn: fn()
# What is compiled when it is first needed keeps everybody on the device waiting: the first request for logprobs, 3.5 s.
vars(sampler)["batched_count_greater_than"] = inspect.unwrap(logprobs.batched_count_greater_than)

log = structlog.get_logger()
_meta = msgspec.msgpack.Encoder()

ADDRESSES_PER_FILE_BYTE = 6  # wider types, packed copies beside tied embeddings; only addresses
ADDRESSES_LEAST = 256 << 20
KEPT_PART = 32  # of the host's cache, for requests that will be parked
# vLLM's worker wants this part of a GPU's memory free when it starts, whatever kv_cache_memory_bytes says. The pool has
# nearly all of that memory already.
CUDA_SETTINGS: dict[str, Any] = {"gpu_memory_utilization": 0.001}
IMAGE_FORMAT, FILES_FORMAT = "staccato_image", "staccato_files"


class Meta(msgspec.Struct, frozen=True):
    """Kept with an image: how it is laid out, and what the model says."""

    layout: list[tuple[int, int]]
    golden: list[int]


def _nobody(read_bytes: int, files_bytes: int) -> None:
    """Is told."""


class Builder:
    """Builds engines over one pool of `pool_bytes`; `host_bytes` is the most that images and parked requests may take.

    `host_fd` is another process's host cache, to share its images; `helpers` are other GPUs that help to load."""

    def __init__(self, pool_bytes: int, host_bytes: int, host_fd: int = -1, helpers: Collection[int] = ()) -> None:
        self.version = check_version()
        backend = Backend.HOST if current_platform.is_cpu() else Backend.CUDA
        self.device = Device(pool_bytes, backend=backend, helpers=helpers)
        kept = host_bytes // KEPT_PART
        self.images = Images.create(host_bytes, kept) if host_fd < 0 else Images.open(host_fd, kept)
        self.pages_total, self.page_bytes = self.device.stats().pages_total, self.device.page_bytes
        self.life = self.images.life

    def hold(self, blocks: list[int], block_bytes: int, life: int) -> Hold | None:
        return self.images.hold(blocks, block_bytes, life)

    def pages_used(self) -> int:
        stats = self.device.stats()
        return stats.pages_mapped + stats.pages_clean

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
        """After all engines."""
        self.device.close()
        self.images.close()

    def __call__(self, spec: EngineSpec, told: Told = _nobody, /) -> VllmEngine:
        return self.build(spec, told)

    def build(self, spec: EngineSpec, told: Told = _nobody, **more: Any) -> VllmEngine:
        """`more` goes to vLLM's settings."""
        shard = f"{ranks.rank()}/{ranks.size()}"
        key = ImageKey(_identity(spec), self.version, spec.dtype, shard, _architecture())
        files_bytes = _weight_file_bytes(spec)
        addresses = ADDRESSES_LEAST + ADDRESSES_PER_FILE_BYTE * files_bytes
        now = Building(self.device, addresses, lambda read_bytes: told(read_bytes, files_bytes))
        try:
            image = self._find(key)
            if image is not None and (engine := self._from_image(spec, now, key, image, more)) is not None:
                return engine
            return self._from_files(spec, now, key, more)
        except Exception as error:  # vLLM raises what its layers raise: pydantic, torch, safetensors, OSError, ...
            log.error("engine.not_built", model=spec.key, detail=chain(error))
            raise EngineError(first_line(error)) from error
        finally:
            gc.collect()
            torch.cuda.empty_cache()  # torch keeps what a model had before it moved; does nothing without a GPU

    def _find(self, key: ImageKey) -> Image | None:
        """If all ranks have theirs: to read files is for all of them together."""
        image = self.images.find(key)
        if ranks.all_say(lambda: image is not None):
            return image
        if image is not None:
            image.release()
        return None

    def _from_files(self, spec: EngineSpec, now: Building, key: ImageKey, more: dict[str, Any]) -> VllmEngine:
        """Read the weights as vLLM does, ask the model the golden question, keep an image of both."""
        _check_files(spec)
        engine = self._core(spec, now, FILES_FORMAT, more)
        try:
            golden = engine.say_while_building()
            match self.images.make(key, engine.weights.size):
                case Making() as making:
                    with making:
                        write_out(engine.weights.reservation, engine.weights.size, self.images.cache, making.offset)
                        image = making.seal(_meta.encode(Meta(engine.home.layout, golden)))
                case Image() as image:  # another runtime was faster
                    pass
            engine.move_in(image, key, golden)
            return engine
        except BaseException as error:
            clean_up_after(error, engine.close)
            raise

    def _from_image(
        self, spec: EngineSpec, now: Building, key: ImageKey, image: Image, more: dict[str, Any]
    ) -> VllmEngine | None:
        """Build around an image that is there; None if it isn't laid out as this engine needs it."""
        meta = msgspec.msgpack.decode(image.meta, type=Meta)
        try:
            engine = self._core(spec, now, IMAGE_FORMAT, more)
        except BaseException:
            image.release()
            raise
        if not ranks.all_say(lambda: engine.home.layout == meta.layout):
            log.warning("engine.image_differs", model=spec.key, pieces=len(engine.home.layout))
            engine.close()
            image.release()
            self.images.discard(key)
            return None
        engine.move_in(image, key, meta.golden)
        return engine

    def _core(self, spec: EngineSpec, now: Building, load_format: str, more: dict[str, Any]) -> VllmEngine:
        args = engine_args(
            spec,
            load_format,
            kv_cache_memory_bytes=self.pages_total * self.page_bytes,
            disable_hybrid_kv_cache_manager=True,  # layers with a window keep all: one shape of KV cache for each model
            worker_cls="runtime.engine.worker.PooledWorker",
            scheduler_cls=MovingScheduler,
            tensor_parallel_size=ranks.size(),
            distributed_executor_backend="external_launcher" if ranks.size() > 1 else None,
            **({} if self.device.backend is Backend.HOST else CUDA_SETTINGS),
            **more,
        )
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        token = building.set(now)
        try:
            core = EngineCore(config, Executor.get_class(config), log_stats=False)
            return VllmEngine(core, now.home, now.kv, self.images)
        except BaseException as error:
            gc.collect()
            clean_up_after(error, now.release)
            raise
        finally:
            building.reset(token)


@register_model_loader(IMAGE_FORMAT)
class _FromImage(BaseModelLoader):
    """Reads nothing: the weights will be there when their pages come."""

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        pass


@register_model_loader(FILES_FORMAT)
class _FromFiles(DefaultModelLoader):
    """vLLM's for safetensors, which counts what it reads."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="safetensors"))

    def get_all_weights(
        self, model_config: ModelConfig, model: torch.nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        now, read_bytes = building.get(), 0
        for name, tensor in super().get_all_weights(model_config, model):
            yield name, tensor
            read_bytes += tensor.nbytes
            now.read(read_bytes)


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
    """They may have changed since they were registered; then everybody who shares the image would get what is new."""
    if not spec.digest:
        return
    found = artefact.inspect(Path(spec.path), frozenset([spec.architecture])).digest
    if found != spec.digest:
        raise EngineError(
            f"the files in {spec.path} have changed since they were registered (digest {found[:12]}, then "
            f"{spec.digest[:12]}): register the folder as a new model, or put back what was there"
        )


def _identity(spec: EngineSpec) -> str:
    """Of the weights: the artefact's digest, or where there is none the files as they are now."""
    if spec.digest:
        return spec.digest
    stats = [path.stat() for path in sorted(Path(spec.path).glob("*.safetensors"))]
    return f"{spec.path} {[(stat.st_size, stat.st_mtime_ns) for stat in stats]}"


def _architecture() -> str:
    """Of the device: packed weights of one instruction set are no use to another."""
    return torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else torch.cuda.get_device_name()


def _weight_file_bytes(spec: EngineSpec) -> int:
    return sum(path.stat().st_size for path in Path(spec.path).glob("*.safetensors"))
