"""vLLM's engine cores, many in one process, over one pool of pages.

Only this folder and gateway/vllm know the inside of vLLM.

Each model has an `EngineCore`, built in this process and stepped by the device process's loop. The cores share
process-wide state. Two rules make sharing safe, each learned in practice: steps never overlap, and a core's `shutdown`
is never called, for `shutdown` destroys the process groups of every core. `close` takes a core apart instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import structlog
import torch
from msgspec import structs
from pydantic import ValidationError
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from runtime.core.device.request import RequestId
from runtime.core.engine import AHEAD, BadRequest, EngineError, Held, ImageLost, Output, WeightSource
from runtime.engine import golden, ranks
from runtime.engine.blocks import GROWN_AHEAD, Prefixes
from runtime.engine.golden import Golden
from runtime.engine.grammars import GrammarReader
from runtime.engine.groups import layout
from runtime.engine.moving import MovingScheduler
from runtime.engine.runner import CoreSteps, DecodeGraphs, take_apart
from runtime.engine.worker import Home, as_tensor
from runtime.memory.arriving import ArrivingImage
from runtime.memory.disk import TornImage
from runtime.memory.images import Image, ImageKey, Images
from runtime.memory.kv import MAP_WAIT_S, KvRegion
from runtime.memory.lent import lend, take_back
from runtime.memory.native import Backend, PoolError, TransferTicket
from runtime.memory.prefixes import HostPrefixes
from runtime.memory.weights import Weights
from store.contract.wire import ONCE, Departure, Finish, KvForm
from store.telemetry.observe import place_of

log = structlog.get_logger()

INLINE_MOST = 1 << 62  # bytes: arrays always lie inside the single buffer sent to the gateway
GOLDEN_ID = "staccato-golden"
JUNK = 0x41  # the value of every byte of blocks without an owner, in a test of a new model: a finite number
CHAIN_LINK_MOST = 400  # characters of each error in the log


class VllmEngine:
    """The engine of one model (runtime/core/engine.py `Engine`): an EngineCore, weights and KV cache."""

    def __init__(
        self, core: EngineCore, home: Home, kv: KvRegion, images: Images, kept: HostPrefixes, async_scheduling: bool
    ) -> None:
        assert isinstance(core.scheduler, MovingScheduler)
        self._core, self._scheduler = core, core.scheduler
        self._images, self._worker = images, core.model_executor.driver_worker.worker
        self._model = self._worker.model_runner.model
        self._graphs = DecodeGraphs(self._worker.model_runner, self._worker.scratch)
        self._steps, self._async_scheduling = CoreSteps(core, self._scheduler.may_begin_ahead), async_scheduling
        self.home, self.kv = home, kv
        self.weights = Weights(home.reservation, home.used, images.cache)
        self._scheduler.take_over(kv, images)
        self._blocks = self._scheduler.blocks
        self._kept_prefixes, self._prefixes = kept, cast(Prefixes | None, None)
        self._golden = Golden([], [])
        self._golden_blocks = self._scheduler.groups.admission(golden.PROMPT + golden.TOKENS)
        self.sequential, self.source = False, WeightSource.FILES
        self._activations = self._questions = 0
        self._parked = True  # or about to be parked: the engine's blocks are given back
        self._brought_in, self._requests_first = True, False
        self._grammars = GrammarReader(core)
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder(size_threshold=INLINE_MOST)
        self.weights_pages = self.weights.pages
        self.kv_pages_least = kv.pages_for(1 + self._scheduler.groups.most)
        self.owners = home.reservation.owner, kv.reservation.owner
        tables = self._scheduler.groups
        form = layout(tables, self._scheduler, self._worker.model_runner)
        self.kv_form = KvForm(tables.block_tokens, kv.block_bytes, form, len(tables.groups))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: RequestId, payload: bytes, made: Sequence[int] = (), grammar: bytes = b"") -> None:
        try:
            asked = self._read(request, payload, bool(made), grammar)
            if made:
                self._append(asked, made)
                self._scheduler.take_up(asked)
            self._core.add_request(asked)
        except Exception as error:
            raise BadRequest(first_line(error)) from error
        if made:
            self._worker.take_up(asked, b"")

    def _read(self, id: RequestId, payload: bytes, begun: bool, grammar: bytes) -> Request:
        """Decode a request for vLLM's scheduler. Raises BadRequest.

        `begun`: the request was begun elsewhere, so the prompt's logprobs were sent before, and are left out."""
        message: EngineCoreRequest = self._decoder.decode(payload)
        message.request_id = id
        if self.sequential:
            message.cache_salt = ONCE + id  # requests share no prefix blocks, not even of one tenant
        if self._scheduler.pools != (message.pooling_params is not None):
            makes = "vectors" if self._scheduler.pools else "text"
            raise BadRequest(f"the model makes {makes}, and the request wants something else: ask another model")
        if id in self._scheduler.requests:
            raise BadRequest(f"request {id} is here already: a request has its name for itself")
        if begun:
            if message.sampling_params is None:
                raise BadRequest(f"request {id} makes no tokens: there is nothing to go on with, send it anew")
            message.sampling_params.prompt_logprobs = None
        with self._grammars.given(grammar, message.sampling_params):
            return self._core.preprocess_add_request(message)[0]

    def _append(self, asked: Request, made: Sequence[int]) -> None:
        """Append the tokens `made` to the request's output. Raises BadRequest if no token is left to make."""
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

    def read(self, grammar: bytes) -> None:
        self._grammars.read(grammar)

    def has_read(self, grammar: bytes) -> bool:
        return self._grammars.has_read(grammar)

    def abort(self, requests: list[RequestId]) -> None:
        self._core.abort_requests(list(requests))
        self._end_with_requests()

    def _end_with_requests(self) -> None:
        """End the step under way if no request is left: nobody would ask for the step's outputs."""
        if self._steps.ahead and not self.busy():
            self._steps.drop()

    @property
    def ahead(self) -> bool:
        return self._steps.ahead

    def busy(self) -> bool:
        return self._scheduler.unfinished > 0

    def step(self, ahead: bool = False) -> list[Output]:
        self._blocks.take_grown(0.0 if self._scheduler.scheduled_tokens else MAP_WAIT_S)  # no tokens: wait for pages
        self._scheduler.prepare()
        brought_s = self._prefixes.bring(self._scheduler.new_requests()) if self._prefixes is not None else 0.0
        began = time.monotonic()
        outputs = self._steps.step(ahead and self._async_scheduling)
        self._end_with_requests()
        if self._prefixes is not None:
            brought_s += self._prefixes.computed(self._scheduler.scheduled_tokens, time.monotonic() - began)
            self._prefixes.keep_ahead()
        said = [self._output(output) for made in outputs.values() for output in made.outputs]
        if said and brought_s:
            said[0] = structs.replace(said[0], brought_s=brought_s)
        return said

    # ── requests that move ────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(
        self, request: RequestId, payload: bytes, tokens: int, admitted: bool = False, grammar: bytes = b""
    ) -> bool:
        try:
            asked = self._read(request, payload, True, grammar)
        except Exception as error:
            raise BadRequest(first_line(error)) from error
        tokens = max(1, min(tokens, self._scheduler.max_model_len))
        return not self._parked and self._scheduler.prepare_move(asked, tokens, self._kept(admitted))

    def copy(
        self, request: RequestId, first: int, host: list[int] | None = None, admitted: bool = False
    ) -> list[int] | None:
        if host is None:
            return self._scheduler.copy_out(request, first, self._written())
        try:
            return host if self._scheduler.copy_in(request, first, host, self._kept(admitted)) else None
        except PoolError as error:
            raise EngineError(f"request {request} can't be received: {error}") from error

    def _kept(self, admitted: bool) -> int:
        """Blocks that an arriving request must leave free: none if `admitted`, else blocks for a check and a step."""
        return 0 if admitted else max(self._golden_blocks, self._scheduler.next_blocks)

    def copied(self, request: RequestId) -> bool:
        return self._scheduler.copied(request)

    def commit(self, request: RequestId, departure: Departure | None = None) -> Departure | None:
        if departure is None:
            return self._commit_out(request)
        self._commit_in(request, departure)
        return None

    def abort_move(self, request: RequestId) -> None:
        self._scheduler.abort_move(request)

    def _commit_out(self, request: RequestId) -> Departure | None:
        if (left := self._scheduler.commit_out(request, self._written)) is None:
            return None
        state = self._worker.generator_state(request)
        return Departure(list(left.request.output_token_ids), left.computed, left.host, state)

    def _commit_in(self, request: RequestId, departure: Departure) -> None:
        try:
            asked = self._scheduler.expected(request)
            self._append(asked, departure.made)
            if not 0 < departure.computed < asked.num_tokens:
                raise BadRequest(
                    f"{departure.computed} of {asked.num_tokens} tokens are computed: not none, and not all"
                )
            self._worker.take_up(asked, departure.sampler)
            self._scheduler.commit_in(request, departure.computed)
        except Exception as error:
            self._scheduler.forget(request)
            raise error if isinstance(error, EngineError) else BadRequest(first_line(error)) from error

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def held(self) -> Held:
        early, golden = GROWN_AHEAD if self._blocks.grows_behind else 0, self._golden_blocks
        soon, later = self._scheduler.blocks_wanted(AHEAD, early)
        wanted = self._blocks.pages_wanted(golden + soon if self._parked else max(1 + golden, soon))
        spare = min(self._blocks.spare, max(0, len(self.kv.mapped) - self._blocks.pages_wanted(later)))
        return Held(self.weights.held_pages, len(self.kv.mapped) + self.kv.pages_coming, wanted, spare)

    def kv_fragmentation(self) -> float:
        return self._blocks.fragmentation

    def fetch(self, kv_pages: int) -> None:
        """Bring in weights first, for a step needs all weights; if all weights are resident, requests come first."""
        self._parked, self._brought_in = False, False
        try:
            self._blocks.grow(kv_pages - len(self.kv.mapped) - self.kv.pages_coming)
            self._requests_first = self.weights.held_pages == self.weights.pages
            if not self._requests_first:
                self.weights.fetch()
            self._bring_in()
        except (PoolError, TornImage) as error:
            raise self._not_fetched(error) from error

    def _bring_in(self) -> bool:
        """Begin to copy parked requests in, once the KV cache has its pages. Returns whether the copies have begun."""
        if not self._brought_in and self._blocks.land():
            self._brought_in = True
            self._scheduler.bring_in(leave=self._golden_blocks)  # a check may come before the first step
            if self._requests_first:
                self.weights.fetch()
        return self._brought_in

    def arrived(self) -> bool:
        try:
            if not self._bring_in() or not ranks.all_say(self.weights.arrived):
                return False
        except (PoolError, TornImage) as error:
            raise self._not_fetched(error) from error
        self._scheduler.land()
        return self._scheduler.inside > 0 or self._scheduler.arriving == 0

    def _not_fetched(self, error: PoolError | TornImage) -> EngineError:
        """Take arriving requests out again after a failed fetch. Returns the error to raise."""
        self._parked = True
        self._blocks.take_grown(MAP_WAIT_S)
        if ranks.size() > 1:  # ranks may hold different parts of the weights
            self.weights.leave()
            self.weights.evict(self.weights.held_pages, self._written())
        self._scheduler.take_out(None)
        self._scheduler.wait_all_out()
        return ImageLost(str(error)) if isinstance(error, TornImage) else EngineError(str(error))

    def park(self) -> None:
        assert not self.ahead, "a step is under way"
        self._parked = True
        self._blocks.take_grown(MAP_WAIT_S)
        self._scheduler.take_out(self._written())
        self.weights.leave()
        held = self.weights.held_pages  # after a fetch cut short, ranks hold different numbers of pages
        self.weights.evict(held - ranks.least(held), self._written())

    def parked(self) -> bool:
        if not self._scheduler.all_out():
            return False
        self._give_back(list(self.kv.mapped))
        return True

    def wait(self, timeout_s: float) -> None:
        if not (self.kv.wait(timeout_s) or self.weights.wait(timeout_s)) and (ticket := self._scheduler.ticket):
            with suppress(PoolError):  # the time is up, or the copy failed: `arrived` or `parked` reports the failure
                ticket.wait(timeout_s)

    def grow(self, kv_pages: int) -> None:
        with self._blocks.telling_failures(kv_pages):
            self._blocks.grow(kv_pages)

    def shrink(self, kv_pages: int) -> None:
        self._give_back(self._blocks.spare_pages()[:kv_pages])

    def evict(self, weights_pages: int) -> None:
        self.weights.evict(weights_pages, self._written())

    def forget_prefixes(self, salt: str) -> None:
        self._blocks.forget(salt)
        if self._prefixes is not None:
            self._prefixes.forget(salt)

    def _give_back(self, pages: list[int]) -> None:
        blocks = self.kv.blocks_on(pages)
        if self._prefixes is not None:
            self._prefixes.keep(blocks)
        self._blocks.retire(blocks)
        self.kv.unmap(pages, self._written())

    def _written(self) -> TransferTicket | None:
        """A ticket that is over when the device has finished the work of all steps so far.

        Returns None on the host: a step on the host returns after the work."""
        if self.kv.reservation.device.backend is Backend.HOST:
            return None
        return self.kv.reservation.device.stream_ticket(torch.cuda.current_stream().cuda_stream)

    # ── integrity ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def move_in(
        self, image: Image | ArrivingImage, key: ImageKey, golden: Golden, sequential: bool, source: WeightSource
    ) -> None:
        """End the build: from now on the weights lie in the image, and the device holds none of the weights."""
        self.source = source
        self.weights.image, self.key, self._golden = image, key, golden
        self.home.forget_old()
        self.home.settle()
        if left := self.home.left:
            log.warning("engine.strays", blocks=len(left), bytes=sum(left.values()), largest=next(iter(left.values())))
        if sequential:
            self.sequential, self._scheduler.max_num_active_reqs = True, 1
        elif self._kept_prefixes.most_bytes and self._scheduler.may_keep_prefixes():
            space = self._kept_prefixes.space(self.kv)
            self._prefixes = Prefixes(self._blocks, space, self._scheduler.block_size, self._written)
            self._scheduler.keeps_prefixes = True

    def _same(self, said: list[int], before: list[int]) -> bool:
        """Whether two answers to the golden question are equal, numbers of vectors within rounding."""
        return golden.same(said, before, self._core.vllm_config.model_config.dtype, self._scheduler.pools)

    def check(self) -> str | None:
        assert not self.ahead, "a step is under way"
        image = self.weights.image
        assert isinstance(image, Image), "the image has not arrived"
        self._activations += 1
        if not ranks.all_say(partial(image.sample, self._activations)):
            return self._quarantine("its image in the host cache has changed")
        asked = [("", self._golden.first, self._say)]
        if self._activations == 1:  # not each time: last positions double the cost, and tables move with the weights
            asked.append((" at its last positions", self._golden.last, self._say_last))
        for where, before, say in asked:
            with golden.pausing(self._model), self._graphs.put_aside():
                said = say()
            if not self._same(said, before):
                return self._quarantine(f"it says {said}{where} where it said {before} when it was read from its files")
        if self._activations == 1 and self._graphs.captured and not self._graphs_agree():
            log.warning(
                "engine.graphs_dropped", detail="steps replayed from CUDA graphs say otherwise than eager steps"
            )
            self._graphs.drop()
        return None

    def stray_bytes(self) -> int:
        """Bytes of parameters, buffers and further tensors of the model outside the reservation of its weights."""
        home = range(self.home.reservation.address, self.home.reservation.address + self.home.reservation.bytes)
        tensors = (tensor for tensor in (*self._model.parameters(), *self._model.buffers()) if tensor.numel())
        seen = int(sum(tensor.nbytes for tensor in tensors if tensor.data_ptr() not in home))
        return seen + sum(self.home.left.values())

    def take_in(self) -> None:
        """Move the model's tensors into the reservation; the addresses stay fixed while the engine lives."""
        self.home.take_in()
        if self.home.reservation.device.backend is Backend.CUDA:
            torch.cuda.synchronize()  # the memory may be taken back next, and the device still copies
            torch.cuda.empty_cache()  # torch would keep the memory in which vLLM made the model
        self.weights = Weights(self.home.reservation, self.home.used, self._images.cache)
        self.weights_pages = self.weights.pages

    def capture_empty(self) -> None:
        """Capture CUDA graphs, if the engine is to have any, around weights that are still in the image."""
        self.home.forget_old()
        self.home.note_left()
        if self._graphs.wanted:
            as_tensor(self.home.reservation, 0, self.home.used).zero_()  # no number may lead a kernel astray
            with self._lent():
                self._graphs.capture()

    def prove_built(self) -> tuple[Golden, bool]:
        """Ask the model as vLLM built the model, move the model's tensors, and ask again, all in lent memory.

        Returns the answers, and whether requests must run one at a time because the model answers otherwise in a batch.
        Raises EngineError with both answers if the model answers otherwise after the move of the tensors, or when the
        blocks of the question change, and the errors of `golden.watching_attention`."""
        with self._lent():
            with golden.watching_attention(self._core.vllm_config.compilation_config.static_forward_context.values()):
                built = Golden(*self._say_both())
            self.take_in()
            moved = Golden(*self._say_both())
            same = self._same(moved.first, built.first) and self._same(moved.last, built.last)
            if not ranks.all_say(lambda: same):
                now, before = moved.first + moved.last, built.first + built.last
                raise EngineError(
                    f"the model says {now} once its tensors have moved, and {before} as vLLM built it: part of the "
                    "model reads memory that it gave back"
                )
            self.home.forget_old()
            elsewhere = built.first if self._scheduler.pools else self._say_elsewhere()  # a vector takes a single step
            if not ranks.all_say(lambda: elsewhere == built.first):
                raise EngineError(
                    f"the model says {elsewhere} once its KV cache lies in other blocks, and {built.first} otherwise: "
                    "part of a request's state is kept outside the blocks, and would be lost when the request is parked"
                )
            agrees = ranks.all_say(self._agrees_with_itself)
            self.home.note_left()
            self._graphs.capture()
            return built, not agrees

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Lent memory for the blocks of a batch that asks the golden question."""
        blocks = range(min(self.kv.blocks, 1 + golden.BATCH * self._golden_blocks))
        size = self.kv.pages_for(len(blocks)) * self.kv.page_bytes
        lend(self.kv.reservation, 0, size)
        self._blocks.open(blocks)
        try:
            yield
        except BaseException as error:
            clean_up_after(error, partial(self._return_lent, blocks, size))
            raise
        self._return_lent(blocks, size)

    def _return_lent(self, blocks: range, size: int) -> None:
        """Give the lent memory back. Requests of a failed question still have blocks, so the requests end first."""
        self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._blocks.retire(blocks)
        take_back(self.kv.reservation, 0, size)

    def _say_both(self) -> tuple[list[int], list[int]]:
        """The model's answers to the golden question at the first positions and at the last positions."""
        return self._say(), self._say_last()

    def _say(self) -> list[int]:
        (said,) = golden.ask(self._core, [self._question_id()])
        return said.tokens

    def _say_elsewhere(self) -> list[int]:
        """The model's answer if the request's blocks change in mid-answer, and all other blocks are overwritten."""
        (said,) = golden.ask(
            self._core, [self._question_id()], interrupt=partial(self._scheduler.change_blocks, self._copy_lent)
        )
        return said.tokens

    def _copy_lent(self, old: list[int], new: list[int]) -> None:
        """Copy blocks within lent memory, and overwrite every lent block but the new blocks and the null block."""
        lent = as_tensor(self.kv.reservation, 0, self._blocks.num_gpu_blocks * self.kv.block_bytes)
        blocks = lent.view(self._blocks.num_gpu_blocks, self.kv.block_bytes)
        kept = blocks[old].clone()
        blocks[1:].fill_(JUNK)
        blocks[new] = kept

    def _question_id(self) -> str:
        """A new request id for each question: with an earlier question's id, a question would find cached prefixes."""
        self._questions += 1
        return f"{GOLDEN_ID}-{self._questions}"

    def _say_last(self) -> list[int]:
        with golden.at_last_positions(self._model, self._scheduler.max_model_len, self._scheduler.pools):
            return self._say()

    def _agrees_with_itself(self) -> bool:
        """Whether requests of a batch get the answer of a request alone; True if only a single request has room."""
        if self.kv.blocks < 1 + golden.BATCH * self._golden_blocks:
            return True
        tie = golden.tie(self._core.vllm_config.model_config.dtype)
        likeliest = None if self._scheduler.pools else golden.LIKELIEST
        (alone,) = golden.ask(self._core, [self._question_id()], likeliest)
        together = golden.ask(self._core, [self._question_id() for _ in range(golden.BATCH)])
        if self._scheduler.pools:
            return all(self._same(said.tokens, alone.tokens) for said in together)
        return not any(golden.disagrees(alone, said, tie) for said in together)

    def _graphs_agree(self) -> bool:
        """Whether steps replayed from CUDA graphs answer as eager steps do."""
        with self._graphs.put_aside():
            (eager,) = golden.ask(self._core, [self._question_id()], golden.LIKELIEST)
        (replayed,) = golden.ask(self._core, [self._question_id()], golden.LIKELIEST)
        return not golden.disagrees(eager, replayed, golden.tie(self._core.vllm_config.model_config.dtype))

    def _quarantine(self, wrong: str) -> str:
        self._images.discard(self.key)
        return wrong

    # ── outputs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _output(self, output: EngineCoreOutput) -> Output:
        finish, prefill = output.finish_reason, output.prefill_stats
        return Output(
            RequestId(output.request_id),
            output.new_token_ids,
            None if finish is None else Finish(int(finish)),
            output.stop_reason,
            self._beside_tokens(output),
            prefill.num_cached_tokens if prefill else 0,
            prefill.num_cache_creation_tokens if prefill else 0,
        )

    def _beside_tokens(self, output: EngineCoreOutput) -> bytes | None:
        """Log probabilities or the vector of an output, in vLLM's encoding; None for an output with tokens alone."""
        if (output.new_logprobs, output.new_prompt_logprobs_tensors, output.pooling_output) == (None, None, None):
            return None
        (data,) = self._encoder.encode(
            EngineCoreOutput(
                request_id="",
                new_token_ids=[],
                new_logprobs=output.new_logprobs,
                new_prompt_logprobs_tensors=output.new_prompt_logprobs_tensors,
                pooling_output=output.pooling_output,
            )
        )
        return bytes(cast(bytes, data))

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Take this core apart, and leave other cores alone: `EngineCore.shutdown` would end the shared groups."""
        with suppress(Exception):  # the step may be why the engine closes
            self._steps.drop()
        self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self._scheduler.wait_all_out()
        if self._prefixes is not None:
            self._prefixes.close()
        self._graphs.drop()
        self.home.runner_tensors = list  # the function holds the worker, and thus the model
        core, self._core = self._core, None  # type: ignore[assignment]
        self._blocks.take_apart()
        del self._scheduler, self._blocks, self._worker, self._model, self._grammars, self._prefixes
        del self._graphs, self._steps
        take_apart(core)
        del core
        self.kv.release()
        self.weights.close()
        self.home.leave()


def clean_up_after(error: BaseException, clean_up: Callable[[], object]) -> None:
    """Clean up after an error that the caller raises again.

    A failure of the cleaning becomes a note of the error, and never hides the error."""
    try:
        clean_up()
    except Exception as failure:
        error.add_note(f"cleaning up failed, too: {type(failure).__name__}: {failure}")


def chain(error: BaseException | None) -> str:
    """One line of the error, the error's notes and the errors underneath, the last error first.

    For the log of a build: errors of a build hold no prompt of a tenant."""
    links: list[str] = []
    while error is not None:
        said = (str(error).strip().splitlines() or [""])[0]
        links += [f"{place_of(error)}: {said}"[:CHAIN_LINK_MOST], *getattr(error, "__notes__", ())]
        error = error.__cause__ or error.__context__
    return " <- ".join(links)


def first_line(error: Exception) -> str:
    """A sentence for a client: vLLM's messages may span pages, and name internals below the first line."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])[:500]
    text = str(error).strip().splitlines()
    if text and "'_OpNamespace'" in text[0]:  # torch's words for an operator that vLLM was built without
        return f"vLLM has no {text[0].split(chr(39))[-2]} for this processor or GPU: the weights need another machine"
    return text[0][:500] if text else type(error).__name__
