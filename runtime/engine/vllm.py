"""vLLM's engine cores, many in one process, over one pool of pages: with its neighbours here and gateway/front.py the
only place that knows vLLM's inside.

One `EngineCore` per model, built in this process and stepped by our loop. What makes that safe (each met in practice):
the cores share process-wide state, so steps never overlap and a core's `shutdown`, which destroys the process groups of
every core, is never called: `close` takes apart only what is the core's own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import structlog
import torch
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.worker.utils import clear_layer_kv_caches

from runtime.engine import ranks
from runtime.engine.base import AHEAD, BadRequest, EngineError, Held, Output
from runtime.engine.moving import MovingScheduler
from runtime.engine.worker import Home
from runtime.memory.images import Image, ImageKey, Images
from runtime.memory.kv import KvRegion
from runtime.memory.lent import lend, take_back
from runtime.memory.native import Backend, PoolError, Ticket
from runtime.memory.weights import Weights
from runtime.request import RequestId
from store.observe import place_of
from store.wire import Departure, Finish, KvForm

log = structlog.get_logger()

INLINE_MOST = 1 << 62  # bytes: arrays always inside the one buffer we ship
GOLDEN_PROMPT, GOLDEN_TOKENS = 16, 8
GOLDEN_ID = "staccato-golden"
CHAIN_LINK_MOST = 400  # characters of one error in the log


class VllmEngine:
    """One EngineCore, its weights and its KV cache."""

    def __init__(self, core: EngineCore, home: Home, kv: KvRegion, images: Images) -> None:
        assert isinstance(core.scheduler, MovingScheduler)
        self._core, self._scheduler = core, core.scheduler
        self._images, self._worker = images, core.model_executor.driver_worker.worker
        self.home, self.kv = home, kv
        self.weights = Weights(home.reservation, home.used, images.cache)
        self._scheduler.take_over(kv, images)
        self._blocks = self._scheduler.blocks
        self._golden: list[int] = []
        self._golden_blocks = -(-(GOLDEN_PROMPT + GOLDEN_TOKENS) // self._scheduler.block_size)
        self._activations = 0
        self._parked = True  # or about to be: what blocks there are go
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)
        self.weights_pages = self.weights.pages
        longest = -(-core.vllm_config.model_config.max_model_len // self._scheduler.block_size)
        self.kv_pages_least = kv.pages_for(1 + longest)
        self.owners = home.reservation.owner, kv.reservation.owner
        self.kv_form = KvForm(self._scheduler.block_size, kv.block_bytes, _layout(core))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = ()) -> None:
        try:
            asked = self._read(request, payload, bool(made))
            if made:
                self._append(asked, made)
                self._scheduler.take_up(asked)
            self._core.add_request(asked)
        except Exception as error:
            raise BadRequest(first_line(error)) from error
        if made:
            self._worker.take_up(asked, b"")

    def _read(self, id: RequestId, payload: bytes, begun: bool) -> Request:
        """As vLLM's scheduler wants it. One that was begun elsewhere said there what its prompt's logprobs are."""
        message: EngineCoreRequest = self._decoder.decode(payload)
        message.request_id = id
        if id in self._scheduler.requests:
            raise BadRequest(f"request {id} is here already: a request has its name for itself")
        if begun:
            if message.sampling_params is None:
                raise BadRequest(f"request {id} makes no tokens: there is nothing to go on with, send it anew")
            message.sampling_params.prompt_logprobs = None
        return self._core.preprocess_add_request(message)[0]

    def _append(self, asked: Request, made: Sequence[int]) -> None:
        """To its output, of which it must have something left to make."""
        vocabulary = self._core.vllm_config.model_config.get_vocab_size()
        if (strange := next((token for token in made if not 0 <= token < vocabulary), None)) is not None:
            raise BadRequest(
                f"token {strange} was made before, but the vocabulary has {vocabulary}: was it another model's request?"
            )
        asked.append_output_token_ids(list(made))
        if check_stop(asked, self._scheduler.max_model_len):
            raise BadRequest(
                f"the {len(made)} tokens that were made before are all of its output: end it with what there is"
            )

    def abort(self, requests: list[RequestId]) -> None:
        self._core.abort_requests(list(requests))

    def busy(self) -> bool:
        return self._scheduler.unfinished > 0

    def step(self) -> list[Output]:
        self._scheduler.prepare()
        outputs, executed = self._core.step()
        self._core.post_step(executed)
        return [self._output(output) for made in outputs.values() for output in made.outputs]

    # ── requests that move ────────────────────────────────────────────────────────────────────────────────────────────

    def stage(self, request: RequestId, first: int) -> list[int] | None:
        return self._scheduler.stage(request, first, self._written())

    def staged(self, request: RequestId) -> bool:
        return self._scheduler.staged(request)

    def leave(self, request: RequestId) -> None:
        self._scheduler.leave(request, self._written())

    def departure(self, request: RequestId) -> Departure:
        left = self._scheduler.departure(request)
        state = self._worker.generator_state(request)
        return Departure(list(left.request.output_token_ids), left.computed, left.host, state)

    def stay(self, request: RequestId) -> None:
        self._scheduler.stay(request)

    def expect(self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False) -> bool:
        try:
            asked = self._read(request, payload, begun=True)
        except Exception as error:
            raise BadRequest(first_line(error)) from error
        tokens = max(1, min(tokens, self._scheduler.max_model_len))
        return not self._parked and self._scheduler.expect(asked, tokens, self._kept(admitted))

    def receive(self, request: RequestId, first: int, host: list[int], admitted: bool = False) -> bool:
        try:
            return self._scheduler.receive(request, first, host, self._kept(admitted))
        except PoolError as error:
            raise EngineError(f"request {request} can't be received: {error}") from error

    def _kept(self, admitted: bool) -> int:
        """Blocks that one that may come leaves free."""
        return 0 if admitted else max(self._golden_blocks, self._scheduler.running_now)

    def received(self, request: RequestId) -> bool:
        return self._scheduler.received(request)

    def adopt(self, request: RequestId, departure: Departure) -> None:
        try:
            asked = self._scheduler.expected(request)
            self._append(asked, departure.made)
            if not 0 < departure.computed < asked.num_tokens:
                raise BadRequest(
                    f"{departure.computed} of {asked.num_tokens} tokens are computed: not none, and not all"
                )
            self._worker.take_up(asked, departure.sampler)
            self._scheduler.adopt(request, departure.computed)
        except Exception as error:
            self._scheduler.forget(request)
            raise error if isinstance(error, EngineError) else BadRequest(first_line(error)) from error

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def held(self) -> Held:
        (soon, later), golden = self._scheduler.blocks_wanted(AHEAD), self._golden_blocks
        wanted = self._blocks.pages_wanted(golden + soon if self._parked else max(1 + golden, soon))
        spare = min(self._blocks.spare, max(0, len(self.kv.mapped) - self._blocks.pages_wanted(later)))
        return Held(self.weights.held_pages, len(self.kv.mapped), wanted, spare)

    def kv_fragmentation(self) -> float:
        return self._blocks.fragmentation

    def fetch(self, kv_pages: int) -> None:
        """Weights first, for a step needs all of them; if they are here still, requests need not wait for that."""
        self._parked = False
        try:
            self._open(kv_pages - len(self.kv.mapped))
            here = self.weights.held_pages == self.weights.pages
            if not here:
                self.weights.fetch()
            self._scheduler.bring_in(leave=self._golden_blocks)  # there may be a check before the first step
            if here:
                self.weights.fetch()
        except PoolError as error:
            raise self._not_fetched(error) from error

    def arrived(self) -> bool:
        try:
            if not ranks.all_say(self.weights.arrived):
                return False
        except PoolError as error:
            raise self._not_fetched(error) from error
        self._scheduler.land()
        return self._scheduler.inside > 0 or self._scheduler.arriving == 0

    def _not_fetched(self, error: PoolError) -> EngineError:
        """Requests that are on their way go back."""
        self._parked = True
        if ranks.size() > 1:  # what is here of the weights may not be there
            self.weights.leave()
            self.weights.evict(self.weights.held_pages, self._written())
        self._scheduler.take_out(None)
        self._scheduler.wait_all_out()
        return EngineError(str(error))

    def park(self) -> None:
        self._parked = True
        self._scheduler.take_out(self._written())
        self.weights.leave()
        held = self.weights.held_pages  # where a fetch was cut short, ranks have other parts
        self.weights.evict(held - ranks.least(held), self._written())

    def parked(self) -> bool:
        if not self._scheduler.all_out():
            return False
        self._give_back(list(self.kv.mapped))
        return True

    def wait(self, timeout_s: float) -> None:
        if (ticket := self.weights.ticket or self._scheduler.ticket) is not None:
            with suppress(PoolError):  # the time is up, or it failed, which the next look will say
                ticket.wait(timeout_s)

    def grow(self, kv_pages: int) -> None:
        try:
            self._open(kv_pages)
        except PoolError as error:
            log.warning("engine.not_grown", pages=kv_pages, error=str(error))

    def shrink(self, kv_pages: int) -> None:
        self._give_back(self._blocks.spare_pages()[:kv_pages])

    def evict(self, weights_pages: int) -> None:
        self.weights.evict(weights_pages, self._written())

    def _open(self, pages: int) -> None:
        if pages > 0:
            self._blocks.open(self.kv.map(pages))

    def _give_back(self, pages: list[int]) -> None:
        self._blocks.retire(self.kv.blocks_on(pages))
        self.kv.unmap(pages, self._written())

    def _written(self) -> Ticket | None:
        """Over when the device is done with all that the steps so far put to it; on the host a step ends with that."""
        if self.kv.reservation.device.backend is Backend.HOST:
            return None
        return self.kv.reservation.device.stream_ticket(torch.cuda.current_stream().cuda_stream)

    # ── integrity ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def move_in(self, image: Image, key: ImageKey, golden: list[int]) -> None:
        """Built: from here on the weights are in the image, and nothing of them is on the device."""
        self.weights.image, self.key, self._golden = image, key, golden
        self.home.settle()

    def check(self) -> str | None:
        image = self.weights.image
        assert image is not None
        self._activations += 1
        if not ranks.all_say(partial(image.sample, self._activations)):
            return self._quarantine("its image in the host cache has changed")
        said = self._say_alone()
        if said != self._golden:
            return self._quarantine(f"it says {said} where it said {self._golden} when it was read from its files")
        return None

    def stray_bytes(self) -> int:
        """Of parameters and buffers that are not where their pages come and go."""
        model = self._worker.model_runner.model
        home = range(self.home.reservation.address, self.home.reservation.address + self.home.reservation.bytes)
        tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.numel())
        return sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in home)

    def say_while_building(self) -> list[int]:
        """What it says to the golden question, while it stands in lent memory."""
        blocks = range(1 + self._golden_blocks)
        size = self.kv.pages_for(len(blocks)) * self.kv.page_bytes
        lend(self.kv.reservation, 0, size)
        self._blocks.open(blocks)
        try:
            said = self._say_alone()
        except BaseException as error:
            clean_up_after(error, partial(self._end_question, blocks, size))
            raise
        self._end_question(blocks, size)
        return said

    def _end_question(self, blocks: range, size: int) -> None:
        """Give the lent memory back. A question that failed still has blocks: its request is ended first."""
        if self._scheduler.requests:
            self._scheduler.finish_requests(GOLDEN_ID, RequestStatus.FINISHED_ABORTED)
        self._blocks.retire(blocks)
        take_back(self.kv.reservation, 0, size)

    def _say_alone(self) -> list[int]:
        config = self._core.vllm_config.model_config
        length = min(GOLDEN_PROMPT, config.max_model_len // 2)
        most = min(GOLDEN_TOKENS, config.max_model_len - length)
        vocabulary = config.get_vocab_size()
        request = EngineCoreRequest(
            request_id=GOLDEN_ID,
            prompt_token_ids=[(7919 * n + 1) % vocabulary for n in range(length)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=GOLDEN_ID,
            data_parallel_rank=None,
        )
        said: list[int] = []
        with self._scheduler.alone():
            self._core.add_request(*self._core.preprocess_add_request(request))
            while self._scheduler.running or self._scheduler.waiting:
                outputs, executed = self._core.step()
                self._core.post_step(executed)
                said += [
                    token for made in outputs.values() for output in made.outputs for token in output.new_token_ids
                ]
                assert executed, "there is no block of KV cache for the golden question"
        return said

    def _quarantine(self, wrong: str) -> str:
        self._images.discard(self.key)
        return wrong

    # ── outputs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _output(self, output: EngineCoreOutput) -> Output:
        finish, cached = output.finish_reason, output.prefill_stats
        return Output(
            RequestId(output.request_id),
            output.new_token_ids,
            None if finish is None else Finish(int(finish)),
            output.stop_reason,
            self._logprobs(output),
            cached.num_cached_tokens if cached else 0,
        )

    def _logprobs(self, output: EngineCoreOutput) -> bytes | None:
        if output.new_logprobs is None and output.new_prompt_logprobs_tensors is None:
            return None
        (data,) = self._encoder.encode(
            EngineCoreOutput(
                request_id="",
                new_token_ids=[],
                new_logprobs=output.new_logprobs,
                new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors,
            )
        )
        return bytes(cast(bytes, data))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Everything of this core and nothing of the others: `EngineCore.shutdown` would end the groups all share."""
        self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._scheduler.wait_all_out()
        core, self._core = self._core, None  # type: ignore[assignment]
        core.structured_output_manager.clear_backend()
        core.scheduler.shutdown()
        context = core.vllm_config.compilation_config.static_forward_context
        clear_layer_kv_caches(context.values())
        self._worker.model_runner.kv_caches.clear()
        context.clear()
        del core, self._scheduler, self._blocks, self._worker
        gc.unfreeze()  # EngineCore froze the heap when it was built: without this nothing of it would be collected
        gc.collect()
        gc.freeze()
        self.kv.reservation.release()
        self.weights.close()
        self.home.leave()


def _layout(core: EngineCore) -> str:
    """How a token's keys and values lie in a block: some kernels for CPUs order them as their instructions like it."""
    assert isinstance(core.scheduler, MovingScheduler)
    group = core.model_executor.driver_worker.worker.model_runner.attn_groups[0][0]
    kernels = group.backend.get_name(), getattr(group.get_metadata_builder(), "isa", "")
    order = core.scheduler.kv_cache_config.kv_cache_layout or ""
    return " ".join(filter(None, (*kernels, order, str(group.kv_cache_spec.dtype).removeprefix("torch."))))


def clean_up_after(error: BaseException, clean_up: Callable[[], object]) -> None:
    """Clean up after an error that the caller raises again.

    A failure of the cleaning becomes a note of the error: it never hides why the cleaning was needed."""
    try:
        clean_up()
    except Exception as failure:
        error.add_note(f"cleaning up failed, too: {type(failure).__name__}: {failure}")


def chain(error: BaseException | None) -> str:
    """One line of the error, its notes and the errors that it was raised from, the last error first.

    For the log of a build: no prompt of a tenant can be in such errors."""
    links: list[str] = []
    while error is not None:
        said = (str(error).strip().splitlines() or [""])[0]
        links += [f"{place_of(error)}: {said}"[:CHAIN_LINK_MOST], *getattr(error, "__notes__", ())]
        error = error.__cause__ or error.__context__
    return " <- ".join(links)


def first_line(error: Exception) -> str:
    """One sentence for a client: vLLM's messages may span pages and name internals below the first line."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])[:500]
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__
