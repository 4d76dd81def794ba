"""Driving engines in tests: requests as written by the gateway's front, models stepped in any order."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.device.request import RequestId
from runtime.core.engine import Engine, Hold, Output, WeightSource
from store.contract.wire import Departure, EngineSpec

if TYPE_CHECKING:
    from runtime.engine.vllm import VllmEngine
    from runtime.memory.native import DevicePool, Reservation

NO_NUMBER = 0xFF
JUNK = 0x41  # every byte of pages that nothing holds


def spec(path: Path, max_model_len: int = 512, key: str | None = None) -> EngineSpec:
    return EngineSpec(
        key=key or path.name,
        path=str(path),
        digest="",
        architecture="",
        dtype="float32",
        max_model_len=max_model_len,
        weight_bytes=0,
        kv_bytes_per_token=0,
    )


def payload(prompt: Sequence[int], salt: str = "", **sampling: object) -> bytes:
    """The payload of a request for `prompt` (token ids). `sampling`: arguments of vLLM's SamplingParams."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackEncoder

    chosen = SamplingParams(**sampling)  # type: ignore[arg-type]
    if chosen.structured_outputs is not None:
        chosen.structured_outputs._backend = "xgrammar"  # as vLLM's front half chooses
    request = EngineCoreRequest(
        request_id="",
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=chosen,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt or None,
        data_parallel_rank=None,
    )
    return bytes(MsgpackEncoder(size_threshold=1 << 62).encode(request)[0])


def awake(engine: Engine, kv_pages: int = 4) -> Engine:
    """Bring the weights and `kv_pages` pages of KV cache to the device. Returns the engine."""
    engine.fetch(kv_pages)
    until(engine.arrived)
    return engine


def asleep(engine: Engine) -> Engine:
    """Park the engine's requests and take every page. Returns the engine."""
    engine.park()
    until(engine.parked)
    engine.evict(engine.held().weights)
    return engine


def until(done: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"{done} is not true after {timeout_s} s"
        time.sleep(1e-4)


def drive(engines: Mapping[str, Engine], rng: random.Random) -> dict[RequestId, list[Output]]:
    """Step engines with work in random order until none has any. Engines that may begin steps ahead often do."""
    made: dict[RequestId, list[Output]] = {}
    while busy := [engine for engine in engines.values() if engine.busy()]:
        for output in rng.choice(busy).step(ahead=rng.random() < 0.7):
            made.setdefault(output.request, []).append(output)
    return made


def parked_about(
    engine: Engine, made: Mapping[str, list[int]], parked_every: int = 0, away: Callable[[], object] = lambda: None
) -> None:
    """Step the engine until no request is left, with as many pages as the engine wants. An engine that may begin steps
    ahead does so two times of three.

    Args:
        engine: an engine that is awake.
        made: for each request, a list to which the request's tokens are appended.
        parked_every: number of steps after which the engine is parked and fetched again; 0: never.
        away: called each time while the engine is parked."""
    steps = 0
    while engine.busy():
        steps += 1
        parks = bool(parked_every) and steps % parked_every == 0
        for output in engine.step(ahead=not parks and steps % 3 > 0):
            made[output.request] += output.tokens
        engine.grow(max(0, engine.held().kv_wanted - engine.held().kv))
        if parks:
            asleep(engine)
            away()
            awake(engine, engine.held().kv_wanted)


def scribble(device: DevicePool) -> None:
    """Overwrite every free page of the device: blocks that are not brought back from the host change answers."""
    device.settle(30)
    size = device.stats().pages_free * device.page_bytes
    reservation = device.reserve(size)
    reservation.map(0, size, 30)
    fill(reservation, 0, size, JUNK)
    reservation.unmap(0, size)
    reservation.release()
    device.settle(30)


def spoil(engine: VllmEngine) -> None:
    """Overwrite every block of an engine without requests with bytes that are no number, but for the null block.

    A request with numbers out of range leaves such blocks."""
    engine._scheduler.reset_prefix_cache()
    block, page = engine.kv.block_bytes, engine.kv.page_bytes
    for number in engine.kv.mapped:
        begin = max(number * page, block)
        fill(engine.kv.reservation, begin, max(0, (number + 1) * page - begin), NO_NUMBER)


def fill(reservation: Reservation, offset: int, size: int, value: int) -> None:
    """Set bytes of a reservation, which have pages, on a CPU or on a GPU."""
    import torch

    from runtime.engine.worker import as_tensor

    if size:
        as_tensor(reservation, offset, size).fill_(value)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class TwoRuntimes:
    """Engines over two pools and one host cache, as in two runtimes of a host."""

    def __init__(self, pool_bytes: int, host_bytes: int, graphs: int = 0) -> None:
        """`graphs`: on a GPU, the most requests of a step that is replayed from a CUDA graph; 0: none."""
        from runtime.engine.builder import Builder

        more = {"graphs": graphs, "async_scheduling": True}
        self.builds = [Builder(pool_bytes, host_bytes, **more)]
        self.builds.append(Builder(pool_bytes, host_bytes, self.builds[0].images.fd, **more))
        self.engines: dict[tuple[str, int], VllmEngine] = {}
        self._imaged: set[str] = set()  # keys of specs that were built once

    def engine(self, asked: EngineSpec, runtime: int = 0, **settings: object) -> VllmEngine:
        """Return the engine of a spec at a runtime. The first of both is built from files, the second from the image.

        Args:
            asked: the spec; its key names the engine.
            runtime: 0 or 1.
            settings: settings of vLLM's."""
        key = asked.key
        if (key, runtime) not in self.engines:
            engine = self.engines[key, runtime] = self.builds[runtime].build(asked, **settings)
            source = WeightSource.HOST if key in self._imaged else WeightSource.FILES
            assert engine.source is source, "the image does not fit the engine: each build would read the files"
            self._imaged.add(key)
        return self.engines[key, runtime]

    def forget(self, key: str) -> None:
        """Close the engines of a spec."""
        for runtime in (0, 1):
            if engine := self.engines.pop((key, runtime), None):
                engine.close()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        for build in reversed(self.builds):
            assert build.pages_used() == 0
            build.close()


def moved(source: VllmEngine, target: VllmEngine, asked: bytes, most: int, longest: int) -> list[int]:
    """Ask the source, move the request to the target in mid-answer, and let the target end the answer.

    Full blocks go ahead of the request, as in a migration while the request runs.

    Args:
        source: an engine that is awake.
        target: an engine of the same spec at another runtime, awake too.
        asked: the payload of the request.
        most: tokens of the answer.
        longest: tokens of the prompt and of the answer together.

    Returns: the tokens that both engines made, in order."""
    assert source.kv_form == target.kv_form
    id, made, staged = RequestId("moving"), list[Output](), list[int]()
    source.add(id, asked)
    while len(made) < most // 2:
        made += source.step()
        source.grow(max(0, source.held().kv_wanted - source.held().kv))
        if made and (more := source.copy(id, len(staged))):
            staged += more
    assert target.prepare(id, asked, longest)
    until(lambda: source.copied(id))
    holds = [held_by_target(source, target, staged)]
    assert target.copy(id, 0, staged) is not None
    departure = departed(source, id)
    holds.append(held_by_target(source, target, departure.host))
    assert departure.host[: len(staged)] == staged and departure.made == tokens(made)
    assert target.copy(id, len(staged), departure.host[len(staged) :]) is not None
    target.commit(id, departure)
    until(lambda: target.copied(id))
    source.abort([id])
    while target.busy():
        made += target.step()
    for hold in holds:
        hold.release()
    return tokens(made)


def held_by_target(source: VllmEngine, target: VllmEngine, blocks: Sequence[int]) -> Hold:
    """Pin blocks of the source on the host for the target, as a device process does: a GPU copies from registered
    memory alone."""
    hold = target._images.hold(blocks, target.kv_form.bytes, source._images.life)
    assert hold is not None
    return hold


def departed(source: VllmEngine, id: RequestId) -> Departure:
    """The departure of a request that has left the source, once its blocks are on the host."""
    while (departure := source.commit(id)) is None:
        pass
    return departure


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def add(engine: VllmEngine, id: RequestId, asked: bytes, made: Sequence[int] = ()) -> None:
    """Add the request, with the grammar, if any, compiled as by a node's child."""
    engine.add(id, asked, made, grammar_of(engine, asked))


def grammar_of(engine: VllmEngine, asked: bytes) -> bytes:
    """The compiled grammar of a payload; empty without one."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder

    request: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(asked)
    params = request.sampling_params.structured_outputs if request.sampling_params else None
    if params is None:
        return b""
    fields = {name: value for name, value in vars(params).items() if value is not None and name[0] != "_"}
    return compiled(engine._core.vllm_config.model_config.model, json.dumps(fields))


@lru_cache
def compiled(path: str, grammar: str) -> bytes:
    from runtime.engine.compiling import Vocabulary

    return zlib.compress(Vocabulary(spec(Path(path))).compile(grammar.encode()).encode())
