"""How fast does a model come back from the host cache, and how fast does it go?

Three parts: the library alone, a load of 512 MiB into unmapped addresses; the same bytes from an image on disk, beside
what the disk reads by itself (O_DIRECT, as many readers), and beside three loaders that read a file of as many bytes
into the tensors of a model; and an engine of 140 million weights, from `fetch` to `arrived`. Each round measures in
turns, on the same pages: glibc's memcpy and the library's own copy (streaming stores: the roof) into mapped and warm
pages, the scale to zero, and the load, which has to map the pages first. For comparison with the engine, the same
weights are read from files in the page cache: by safetensors, and by transformers, with a copy of every tensor into
warm memory. The answers are ratios, round by round.

`python tests/bench/runtime/bench_load.py [MiB] [library|disk|engine …]`
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from runtime.memory.arriving import READERS, read_in  # noqa: E402
from runtime.memory.disk import EXTENT_BYTES, DiskCache  # noqa: E402
from runtime.memory.images import ImageKey, Images, Making  # noqa: E402
from runtime.memory.native import CacheMemory, DevicePool, Direction, Segment  # noqa: E402
from runtime.memory.weights import Weights  # noqa: E402
from tests.bench.installed import libraries  # noqa: E402
from tests.bench.timing import (  # noqa: E402
    WAIT_S,
    awaited,
    gb_s,
    load,
    milliseconds,
    one_thread,
    ratios,
    seconds,
    spread,
)

if TYPE_CHECKING:
    import torch

    from runtime.engine.builder import Builder
    from runtime.engine.vllm import VllmEngine

ROUNDS, DISK_ROUNDS = 15, 7
MIB = 1 << 20
LOADERS = ("fastsafetensors==0.5.0", "runai-model-streamer==0.17.1", "humanize==4.17.0")
TENSORS = 64  # of the file that loaders read
SHAPE: dict[str, Any] = dict(hidden=1024, layers=11, heads=8, kv_heads=4)  # 140 million weights, 536 MiB
POOL_BYTES, HOST_BYTES = 640 * MIB, 2048 * MIB


# ── the library ───────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_library(image_bytes: int) -> dict[str, object]:
    device = DevicePool(image_bytes)
    cache = CacheMemory(image_bytes)
    huge = cache.commit(0, image_bytes)
    noise = os.urandom(MIB)
    for at in range(0, image_bytes, MIB):
        cache.view(at, MIB)[:] = noise
    reservation = device.reserve(image_bytes)

    def come() -> None:
        reservation.load(cache, [Segment(0, 0, image_bytes)]).wait(WAIT_S)

    rounds = []
    come()
    for n in range(ROUNDS + 1):
        plain_s = seconds(lambda: ctypes.memmove(reservation.address, cache.address, image_bytes))
        roof_s = seconds(lambda: reservation.copy(0, cache, 0, image_bytes, Direction.TO_DEVICE).wait(WAIT_S))
        call_s = seconds(lambda: reservation.unmap(0, image_bytes))
        gone_s = call_s + seconds(lambda: device.settle(WAIT_S))
        load_s = seconds(come)
        assert reservation.view(image_bytes - MIB, MIB) == noise
        if n > 0:  # the first round warms up
            rounds.append((plain_s, roof_s, load_s, call_s, gone_s))
    plain, roof, loads, calls, gone = (list(column) for column in zip(*rounds, strict=True))
    stats = device.stats()
    reservation.release()
    cache.close()
    device.close()
    return {
        "of": "library",
        "image_mib": image_bytes // MIB,
        "in_2_mib_folios": {"pool": stats.huge_bytes == image_bytes, "cache": huge == image_bytes},
        "memcpy_gb_s": gb_s(image_bytes, plain),
        "roof_gb_s": gb_s(image_bytes, roof),
        "load_gb_s": gb_s(image_bytes, loads),
        "load_of_roof": ratios(roof, loads),
        "load_of_memcpy": ratios(plain, loads),
        "unmap_call_ms": milliseconds(calls),
        "unmapped_after_ms": milliseconds(gone),
        "load": load(),
    }


# ── the disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_disk(image_bytes: int) -> dict[str, object]:
    """An image on disk becomes weights on the device; beside it, in each round, what the disk reads by itself, and
    loaders of files."""
    (ROOT / "build").mkdir(exist_ok=True)  # a folder for temporary files may lie in memory
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        loaders = FileLoaders(Path(folder) / "model.safetensors", image_bytes)
        disk = DiskCache(Path(folder), 4 * image_bytes)
        images = Images.create(2 * image_bytes + 16 * MIB)
        device = DevicePool(image_bytes)
        weights = Weights(device.reserve(image_bytes), image_bytes, images.cache)
        key = ImageKey("bench", "", "", "0/1", "")
        noise = os.urandom(MIB)
        made = images.make(key, image_bytes)
        assert isinstance(made, Making)
        for at in range(0, image_bytes, MIB):
            made.view[at : at + MIB] = noise
        made.seal(b"").release()
        written_s = seconds(lambda: write(disk, images, key))
        rounds = []
        for n in range(DISK_ROUNDS + 1):
            images.below = None  # the copy on disk stays
            images.discard(key)
            alone_s = seconds(lambda: read_alone(next(Path(folder).glob("*.image")), images, image_bytes))
            ready_s = seconds(lambda: come_from_disk(weights, images, disk, key))
            assert weights.reservation.view(image_bytes - MIB, MIB) == noise
            weights.leave()
            weights.evict(weights.pages, None)
            device.settle(WAIT_S)
            copy_s = seconds(lambda: come_from_host(weights))
            weights.close()
            device.settle(WAIT_S)
            files_s = loaders.measured()
            if n > 0:
                rounds.append((alone_s, ready_s, copy_s, max(alone_s, copy_s), *files_s.values()))
        disk.close()
        images.close()
    alone, ready, copies, slower, *others = (list(column) for column in zip(*rounds, strict=True))
    return {
        "of": "disk",
        "image_mib": image_bytes // MIB,
        "disk_gb_s": gb_s(image_bytes, alone),
        "ready_gb_s": gb_s(image_bytes, ready),
        "host_copy_gb_s": gb_s(image_bytes, copies),
        "ready_of_disk": ratios(alone, ready),
        "ready_of_slower": ratios(slower, ready),
        "faster_than": {name: ratios(by, ready, 2) for name, by in zip(files_s, others, strict=True)},
        "write_gb_s": round(image_bytes / written_s / 1e9, 2),
        "load": load(),
    }


def write(disk: DiskCache, images: Images, key: ImageKey) -> None:
    disk.keep(images, key, built_s=1.0)
    while disk.writing:
        time.sleep(1e-3)


def read_alone(path: Path, images: Images, size: int) -> None:
    """Read a file past the kernel's cache into memory of the host cache, as many requests at a time as the product."""
    with images.make(ImageKey("alone", "", "", "0/1", ""), size) as room, ThreadPoolExecutor(READERS) as readers:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        view = images.cache.view(room.offset, size)
        list(readers.map(lambda at: os.preadv(fd, [view[at : at + EXTENT_BYTES]], at), range(0, size, EXTENT_BYTES)))
        os.close(fd)


def come_from_disk(weights: Weights, images: Images, disk: DiskCache, key: ImageKey) -> None:
    weights.image = read_in(images, disk, key)
    come_from_host(weights)


def come_from_host(weights: Weights) -> None:
    weights.fetch()
    while not weights.arrived():
        weights.wait(1e-3)


class FileLoaders:
    """A file of weights, and loaders that bring the file's tensors into the tensors of a model, which are warm."""

    def __init__(self, path: Path, size: int) -> None:
        import torch
        from safetensors.torch import save_file

        sys.path.append(str(libraries("loaders", *LOADERS)))
        self._path = path
        self._homes = {f"w{n}": torch.rand(size // TENSORS // 4) for n in range(TENSORS)}
        save_file(self._homes, path)

    def measured(self) -> dict[str, float]:
        """Seconds of each loader, by name. The kernel has nothing of the file when a loader begins."""
        ways = {"vllm": self._vllm, "runai": self._runai, "fastsafetensors": self._fastsafetensors}
        return {name: self._seconds(way) for name, way in ways.items()}

    def _seconds(self, load_weights: Callable[[], None]) -> float:
        fd = os.open(self._path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        return seconds(load_weights)

    def _copied(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._homes[name].copy_(tensor)

    def _vllm(self) -> None:
        """vLLM's own way, with safetensors."""
        from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

        self._copied(safetensors_weights_iterator([str(self._path)], False))

    def _runai(self) -> None:
        from runai_model_streamer import SafetensorsStreamer

        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(self._path))
            self._copied(streamer.get_tensors())

    def _fastsafetensors(self) -> None:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup

        loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
        loader.add_filenames({0: [str(self._path)]})
        read = loader.copy_files_to_device()
        self._copied((name, read.get_tensor(name)) for name in self._homes)
        read.close()
        loader.close()


# ── an engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_engine() -> dict[str, object]:
    from deploy.demo.random_weights import write_random
    from runtime.engine.builder import Builder
    from tests.runtime.engines import spec

    with tempfile.TemporaryDirectory() as folder:
        model = spec(write_random(Path(folder) / "m", "llama", **SHAPE))
        build = Builder(POOL_BYTES, HOST_BYTES)
        engine = build(model)
        engine.close()
        built: dict[str, Any] = {}
        from_image_s = seconds(lambda: built.update(engine=build(model)))
        rounds = [beside(build, built["engine"], Path(model.path)) for _ in range(ROUNDS + 1)][1:]
        build.images.discard(built["engine"].key)
        from_files_s = seconds(lambda: built.update(other=build(model)))  # imports and kernels are warm by now
        size = built["engine"].weights.size
    columns = {name: [one[name] for one in rounds] for name in rounds[0]}
    fetched = columns["fetch"]
    return {
        "of": "engine",
        "image_mib": size // MIB,
        "roof_gb_s": gb_s(size, columns["roof"]),
        "fetch_gb_s": gb_s(size, fetched),
        "fetch_ms": milliseconds(fetched),
        "fetch_of_roof": ratios(columns["roof"], fetched),
        "fetch_of_memcpy": ratios(columns["memcpy"], fetched),
        "faster_than_safetensors": ratios(columns["safetensors"], fetched, 1),
        "faster_than_transformers": ratios(columns["transformers"], fetched, 1),
        "faster_than_building_around_its_image": spread((from_image_s / s for s in fetched), 0),
        "faster_than_building_from_files": spread((from_files_s / s for s in fetched), 0),
        "build_around_image_s": round(from_image_s, 2),
        "build_from_files_s": round(from_files_s, 2),
        "to_zero_ms": milliseconds(columns["to_zero"]),
        "pages_free_after_ms": milliseconds(columns["pages_free"]),
        "load": load(),
    }


def beside(build: Builder, engine: VllmEngine, path: Path) -> dict[str, float]:
    """A round: seconds of the engine, asleep before and after, and of the same bytes by other ways."""
    reservation, image, size = engine.weights.reservation, engine.weights.image, engine.weights.size
    cache = build.images.cache
    assert image is not None

    def come() -> None:
        engine.fetch(1)
        awaited(engine, engine.arrived)

    def go() -> None:
        engine.park()
        assert engine.parked(), "there are no requests to wait for"
        engine.evict(engine.held().weights)

    files_s = {"safetensors": safetensors_s(path), "transformers": transformers_s(path)}
    come()
    memcpy_s = seconds(lambda: ctypes.memmove(reservation.address, cache.address + image.offset, size))
    roof_s = seconds(lambda: reservation.copy(0, cache, image.offset, size, Direction.TO_DEVICE).wait(WAIT_S))
    to_zero_s = seconds(go)
    pages_free_s = to_zero_s + seconds(lambda: build.device.settle(WAIT_S))
    assert build.pages_used() == 0
    fetch_s = seconds(come)
    go()
    build.device.settle(WAIT_S)
    return files_s | {
        "memcpy": memcpy_s,
        "roof": roof_s,
        "to_zero": to_zero_s,
        "pages_free": pages_free_s,
        "fetch": fetch_s,
    }


def safetensors_s(path: Path) -> float:
    from safetensors.torch import load_file

    return copied_s(lambda: load_file(path / "model.safetensors"))


def transformers_s(path: Path) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    return copied_s(lambda: dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters()))


def copied_s(load_weights: Callable[[], Mapping[str, torch.Tensor]]) -> float:
    """Seconds until the weights are in warm memory: both loaders map the file, and read a byte only when it is
    touched."""
    homes = {name: tensor.detach().clone() for name, tensor in load_weights().items()}

    def come() -> None:
        for name, tensor in load_weights().items():
            homes[name].copy_(tensor.detach())

    return seconds(come)


def main() -> None:
    size = int(next((word for word in sys.argv[1:] if word.isdigit()), 512)) * MIB
    parts = {
        "library": lambda: measure_library(size),
        "disk": lambda: measure_disk(size),
        "engine": measure_engine,
    }
    named = [word for word in sys.argv[1:] if word in parts]
    for part in named or parts:
        print(json.dumps(parts[part]()), flush=True)


if __name__ == "__main__":
    one_thread()
    main()
    os._exit(0)  # vLLM's exit handlers would tear down a process that is ending anyway
