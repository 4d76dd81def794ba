"""vLLM's model runners: the runner for CPUs, extended to continue requests begun elsewhere, and a GPU runner's graphs;
and the steps and the end of an engine core.

vLLM's newer runner, for GPUs, continues such requests as it is: the scheduler sends the runner all tokens of every
returning request, and the random number for a token follows from the seed and the token's position alone.

CUDA graphs: vLLM's own manager captures decode steps and replays the graphs. A graph holds addresses, and the addresses
of weights and KV cache stay while the engine lives, so a graph outlives pages that leave and come back.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.config import CompilationMode
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.worker import workspace
from vllm.v1.worker.block_table import BlockTable
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.utils import clear_layer_kv_caches
from vllm.v1.worker.workspace import WorkspaceManager

# Each engine has scratch memory of its own, see `EngineScratch`: vLLM would take the memory of every engine of the
# process away when one engine ends.
vars(workspace)["reset_workspace_manager"] = lambda: None

COLLECT_EVERY = 32  # engine cores taken apart from one search for objects in cycles to the next
_taken_apart = itertools.count(1)

DRAW_BELOW = 2**31  # each token of a seeded request takes one number below this from the request's generator


class PageTable(BlockTable):
    """A block table made of vLLM's own by `take_over`: holds numbers of pages instead of numbers of blocks."""

    _pages: int  # of a block

    @classmethod
    def take_over(cls, table: BlockTable, pages: int) -> None:
        assert type(table) is BlockTable, f"this vLLM has a {type(table).__name__}"
        table.__class__ = cls
        assert isinstance(table, cls)
        table._pages = pages

    def append_row(self, block_ids: list[int], row_idx: int) -> None:
        super().append_row([block * self._pages for block in block_ids], row_idx)


class PooledRunner(CPUModelRunner):
    """A runner made of vLLM's own by `take_over`: vLLM has no setting for the runner's class."""

    @classmethod
    def take_over(cls, runner: CPUModelRunner) -> PooledRunner:
        assert type(runner) is CPUModelRunner, f"this vLLM has a {type(runner).__name__}"
        runner.__class__ = cls
        assert isinstance(runner, cls)
        if not (runner.supports_mm_inputs or runner.enable_prompt_embeds):
            # vLLM's buffer for embeddings, unused with tokens alone, is as large as all else that an engine keeps.
            old = runner.inputs_embeds.gpu
            runner.inputs_embeds = runner._make_buffer(1, old.shape[1], dtype=old.dtype, numpy=False)
        return runner

    def zero_blocks_of(self, blocks: torch.Tensor) -> None:
        """Note the memory of the KV cache, a row of bytes for each block, in which new blocks are zeroed."""
        self._blocks = blocks

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero whole blocks. vLLM's own function zeroes layers of full attention alone."""
        for block in block_ids:
            self._blocks[block].zero_()

    def number_pages(self, pages: int) -> None:
        """From now on give kernels numbers of pages: block b begins with page b × `pages`."""
        for table in self.input_batch.block_table.block_tables:
            PageTable.take_over(table, pages)

    def take_up(self, request: Request, generator_state: bytes) -> None:
        """Add a request begun elsewhere, as if this runner had made the request's output.

        `generator_state`: state of the request's random generator. If the state is empty, a new generator with the
        request's seed draws a number for each token of the output."""
        sampling, made = request.sampling_params, list(request.output_token_ids)
        assert sampling is not None
        generator = None
        if sampling.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator(device=self.device)
            if generator_state:
                generator.set_state(torch.frombuffer(bytearray(generator_state), dtype=torch.uint8))
            else:
                assert sampling.seed is not None
                generator.manual_seed(sampling.seed)
                for _ in made:
                    torch.randint(0, DRAW_BELOW, (1,), generator=generator)
        state = CachedRequestState(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            sampling_params=sampling,
            pooling_params=None,
            generator=generator,
            block_ids=tuple([] for _ in self.kv_cache_config.kv_cache_groups),  # sent when the request runs
            num_computed_tokens=0,
            output_token_ids=made,
            lora_request=request.lora_request,
        )
        if self.uses_mrope:
            self._init_mrope_positions(state)
        self.requests[request.request_id] = state
        self.num_prompt_logprobs.pop(request.request_id, None)  # left by an earlier request with equal id

    def generator_state(self, id: str) -> bytes:
        """State of the request's random generator; empty for a request without a seed."""
        generator = self.requests[id].generator
        return b"" if generator is None else bytes(generator.get_state().numpy())

    def _update_states(self, scheduler_output: SchedulerOutput) -> Callable[[], None] | None:
        """Draw no random number in a step that computes a prompt's piece other than the last: the step makes no token.

        vLLM draws a number and then sets the generator back, but generators of a CPU can't be set back. And vLLM
        forgets where the state of an ended request lies in a step that computes something alone: a later request of
        equal id would begin with a block that the request may not have, or that has no page."""
        for id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            self.mamba_state_idx.pop(id, None)
        correct: Callable[[], None] | None = super()._update_states(scheduler_output)
        for id, tokens in scheduler_output.num_scheduled_tokens.items():
            state = self.requests[id]
            if state.generator is None:
                continue
            index = self.input_batch.req_id_to_index[id]
            if state.num_computed_tokens + tokens < state.num_tokens:
                self.input_batch.generators.pop(index, None)
            else:
                self.input_batch.generators[index] = state.generator
        return correct


# ── CUDA graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def graph_settings(batch_most: int, compiled: bool) -> dict[str, Any]:
    """vLLM's settings for graphs of decode steps with at most `batch_most` requests; 0: every step is eager.

    Steps that compute prompts are not replayed. With `compiled`, torch compiles the model for every step, with vLLM's
    own passes; without, nothing is compiled: vLLM's graphs of decode steps need no torch.compile."""
    if batch_most == 0:
        return {"enforce_eager": True}
    sizes = sorted({*(1 << power for power in range(batch_most.bit_length())), batch_most})
    mode = CompilationMode.VLLM_COMPILE if compiled else CompilationMode.NONE
    compilation = {"mode": mode, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    # vLLM's warm-up of compiled kernels runs real requests, and no memory lies below the KV cache yet.
    return {
        "enforce_eager": False,
        "compilation_config": compilation,
        "kernel_config": {"enable_jit_warmup": False},
    }


class EngineScratch(WorkspaceManager):
    """Scratch memory of an engine's kernels on a GPU, in place of vLLM's scratch memory for a process with one engine.

    vLLM replaces the scratch memory when an engine is made. Once graphs are captured, vLLM forbids the memory to grow,
    after a warm-up with the longest prompt, for which a KV cache must have memory. Here engines take turns on one
    stream of the GPU, so all engines share the buffers, and the buffers may grow in any step: graphs keep the buffers
    with which the graphs were captured. What kernels keep from step to step belongs to the engine alone.

    `of`: the scratch memory that vLLM has made with the engine."""

    _shared: ClassVar[list[torch.Tensor | None]] = []

    def __init__(self, of: WorkspaceManager) -> None:
        super().__init__(of._device, of._num_ubatches, of._num_lanes, of._alloc_context)
        self._shared.extend([None] * (len(self._current_workspaces) - len(self._shared)))
        self._current_workspaces = self._shared

    def lock(self) -> None:
        """Do nothing: the buffers may go on growing."""

    def use(self) -> None:
        """Have vLLM's kernels take scratch memory here, until another engine says the same."""
        workspace._manager = self

    def buffers(self) -> list[torch.Tensor | None]:
        """The buffers of now."""
        return list(self._shared)


class DecodeGraphs:
    """CUDA graphs of an engine's decode steps. An engine on a CPU, or with eager steps, has none.

    `scratch`: the engine's scratch memory; None on a CPU."""

    def __init__(self, runner: Any, scratch: EngineScratch | None) -> None:
        manager = getattr(runner, "cudagraph_manager", None)
        self._runner, self._manager = runner, manager if manager is not None and manager.needs_capture() else None
        self._scratch, self._kept = scratch, list[torch.Tensor | None]()

    @property
    def wanted(self) -> bool:
        return self._manager is not None

    @property
    def captured(self) -> bool:
        return self._manager is not None and bool(self._manager.graphs)

    def capture(self) -> None:
        """Capture the graphs, if the engine is to have any. Weights and the first block of KV cache must have memory
        at the final addresses: vLLM runs each step before the capture."""
        if self._manager is not None:
            assert self._scratch is not None
            self._scratch.use()
            self._runner.capture_model()
            self._kept = self._scratch.buffers()
            torch.cuda.synchronize()  # the memory lent for the capture is taken back next

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Within the context, every step is eager: Python of a model's layers runs in eager steps alone."""
        if self._manager is None:
            yield
            return
        before = self._manager._graphs_captured
        self._manager._graphs_captured = False
        try:
            yield
        finally:
            self._manager._graphs_captured = before

    def drop(self) -> None:
        """Free the graphs for good: from now on every step is eager."""
        if self._manager is not None:
            self._manager.release_graphs()
            self._manager, self._kept = None, []


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class BegunStep(NamedTuple):
    """A step that the device computes, or has computed, and whose outputs nobody has read."""

    scheduled: SchedulerOutput
    executed: Future[Any]
    sampled: Future[Any]


class CoreSteps:
    """Steps of an engine core. A step may begin before the tokens of the step before are known, as under vLLM's
    asynchronous scheduling: meanwhile the device computes, and the tokens stay on the device.

    `may_begin`: whether the core's scheduler could schedule a further step now, without tokens of the step under way.
    """

    def __init__(self, core: EngineCore, may_begin: Callable[[], bool]) -> None:
        self._core, self._may_begin = core, may_begin
        self._begun: BegunStep | None = None

    @property
    def ahead(self) -> bool:
        """Whether a step has begun whose outputs no call has returned yet."""
        return self._begun is not None

    def step(self, ahead: bool) -> dict[int, EngineCoreOutputs]:
        """Return the outputs of one step, by client. With `ahead`, begin a further step first if possible."""
        begun, self._begun = self._begun, None
        if begun is None and not ahead:
            outputs, executed = self._core.step()
            self._core.post_step(executed)
            return outputs
        if begun is None and not self._core.scheduler.has_requests():
            return {}
        begun = begun or self._begin()
        if ahead and self._may_begin():
            self._begun = self._begin()
        return self._end(begun)

    def drop(self) -> None:
        """End the step under way, if any, and drop the outputs: requests of the step have ended."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._end(begun)

    def _begin(self) -> BegunStep:
        scheduler, executor = self._core.scheduler, self._core.model_executor
        scheduled = scheduler.schedule()
        with self._core.log_error_detail(scheduled):
            executed = executor.execute_model(scheduled, non_block=True)
            if not scheduled.total_num_scheduled_tokens or self._core.is_pooling_model:  # nothing is sampled
                return BegunStep(scheduled, executed, executed)
            sampled = executor.sample_tokens(scheduler.get_grammar_bitmask(scheduled), non_block=True)
        return BegunStep(scheduled, executed, sampled)

    def _end(self, begun: BegunStep) -> dict[int, EngineCoreOutputs]:
        with self._core.log_error_detail(begun.scheduled):
            output = begun.sampled.result()
            if output is None:  # then `execute_model` has failed, and raises its error here
                begun.executed.result()
                raise RuntimeError("vLLM's step returned no output and no error: another vLLM?")
        return self._core.scheduler.update_from_output(begun.scheduled, output)


def take_apart(core: EngineCore) -> None:
    """Take a core apart by hand, so that the core's objects go when the caller drops the core.

    The objects refer to each other in circles, which Python finds by a visit to the objects of every engine of the
    process: with 60 engines, no model steps for 50 ms. Few objects are left in circles, for a search now and then."""
    if next(_taken_apart) % COLLECT_EVERY == 0:
        gc.collect()
    core.structured_output_manager.clear_backend()
    core.scheduler.shutdown()
    context = core.vllm_config.compilation_config.static_forward_context
    clear_layer_kv_caches(context.values())
    context.clear()
    executor = core.model_executor
    worker = executor.driver_worker.worker
    worker.model_runner.kv_caches.clear()
    for module in worker.model_runner.model.modules():
        vars(module).pop("cpu_linear", None)  # torch keeps a tied weight, and the weight's loader keeps packed weights
        for parameter in module.parameters(recurse=False):
            vars(parameter).clear()  # the loader of a weight is a method of the weight's module
    manager, runner = core.structured_output_manager, worker.model_runner
    for part in (runner, worker, executor.driver_worker, executor, core.scheduler, manager, core):
        vars(part).clear()
