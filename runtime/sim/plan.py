"""Plan for the workload of a trace: the number of GPUs needed, and models unable to keep the objective even alone."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import Count, ModelCosts, ModelSize, NotNegative, Profile
from runtime.sim.capacity import Each
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.fleet import Changes, simulate
from runtime.sim.trace import Trace
from runtime.sim.workload import BASE_SIZES, Workload
from runtime.sim.world import SimulationResult
from store.contract.kv_curve import KeptLayers

BYTES_PER_PARAMETER = 2  # bfloat16


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of a model as stated in a file: parameters, or bytes of weights, or both."""

    kv_bytes_per_token: NotNegative
    parameters: Count | None = None
    weight_bytes: Count | None = None
    kv_layers: tuple[KeptLayers, ...] = ()  # what the layers keep; empty: every layer keeps every token

    def size(self, name: str) -> ModelSize:
        parameters = self.parameters or (self.weight_bytes or 0) // BYTES_PER_PARAMETER
        if not parameters:
            raise ValueError(f"model {name!r} has neither `parameters` nor `weight_bytes`: state one of them")
        weight_bytes = self.weight_bytes or BYTES_PER_PARAMETER * parameters
        return ModelSize(name, weight_bytes, self.kv_bytes_per_token, parameters, self.kv_layers)


class Alone(NamedTuple):
    """Times of a model with a GPU to itself."""

    model: str
    ttft_s: float  # TTFT of the longest prompt, loading included
    step_s: float  # step of a single request at the longest context
    unmeetable: str | None  # reason why the model would be late even alone: a sentence with the remedy


@dataclass(frozen=True)
class CapacityPlan:
    """Answer to a question: `results` for 1, 2, … up to the most GPUs, and the number of GPUs needed."""

    needed: int | None  # None: even the most GPUs are too few
    results: list[SimulationResult]
    alone: list[Alone]


@dataclass(frozen=True)
class Question:
    """Question answered by a `CapacityPlan`; must pickle."""

    workload: Workload
    profile: Profile
    policy: str
    objective: Objective
    sight: Sight = AS_GATEWAYS_SEE

    def with_gpus(self, gpus: int) -> SimulationResult:
        """Simulates `gpus` GPUs. Every request counts: the beginning of a trace is no warm-up."""
        changes = Changes(sight=self.sight)
        return simulate(self.workload, self.profile, self.policy, gpus, self.objective, warm_s=0, changes=changes)


def plan(question: Question, gpus_most: int, attainment: float, each: Each = map) -> CapacityPlan:
    """Simulates 1 to `gpus_most` GPUs.

    The number needed is the smallest from which on the result's `min` is at least `attainment`. Raises ValueError if
    the policy can't run the workload."""
    alone = [_alone(question, index) for index in range(len(question.workload.models))]
    results = list(each(question.with_gpus, range(1, gpus_most + 1)))
    return CapacityPlan(_needed([result.min >= attainment for result in results]), results, alone)


def _needed(enough: list[bool]) -> int | None:
    """Smallest number of GPUs, from 1, from which on `enough` stays true; None if the last is false."""
    failing = [gpus for gpus, is_enough in enumerate(enough, start=1) if not is_enough]
    fewest = failing[-1] + 1 if failing else 1
    return fewest if fewest <= len(enough) else None


# ── a model alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _alone(question: Question, index: int) -> Alone:
    workload, profile = question.workload, question.profile
    rows = workload.model == index
    prompt = int(workload.prompt_tokens[rows].max())
    context = int((workload.prompt_tokens[rows] + workload.output_tokens[rows]).max())
    costs = profile.costs(workload.models[index])
    ttft_s = costs.load_s + _prefill_s(costs, prompt, profile.batched_tokens)
    step_s = costs.step(1, context)
    reasons = [
        *_too_large(costs, context, profile),
        *_too_late(ttft_s, costs.load_s, prompt, question.objective.ttft_s),
        *_too_slow(step_s, context, question.objective.tbt_s),
    ]
    return Alone(workload.models[index].name, ttft_s, step_s, "; ".join(reasons) or None)


def _prefill_s(costs: ModelCosts, tokens: int, batched_tokens: int) -> float:
    whole, rest = divmod(tokens, batched_tokens)
    return whole * costs.prefill(batched_tokens) + (costs.prefill(rest) if rest else 0.0)


def _too_large(costs: ModelCosts, context: int, profile: Profile) -> Iterable[str]:
    needed = costs.weight_bytes + costs.kv.bytes(context)
    if needed > profile.memory_bytes:
        yield (
            f"its weights and its longest context, {context} tokens, take {needed / 1e9:.3g} GB, and a "
            f"{profile.name} has {profile.memory_bytes / 1e9:.3g} GB for them: take a larger GPU or smaller weights"
        )


def _too_late(ttft_s: float, load_s: float, prompt: int, due_s: float) -> Iterable[str]:
    if ttft_s > due_s:
        yield (
            f"the first token is due after {_told(due_s)} s, and loading takes {_told(load_s)} s and its longest "
            f"prompt, {prompt} tokens, {_told(ttft_s - load_s)} s: raise --ttft, shorten prompts, or keep it awake"
        )


def _too_slow(step_s: float, context: int, due_s: float) -> Iterable[str]:
    if step_s > due_s:
        yield (
            f"a token is due every {_told(due_s * 1e3)} ms, and a step of one request at its longest context, "
            f"{context} tokens, takes {_told(step_s * 1e3)} ms: raise --tbt, or take a faster GPU or a smaller model"
        )


def _told(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


# ── the workload of a trace ───────────────────────────────────────────────────────────────────────────────────────────


def as_it_is(trace: Trace, sizes: Mapping[str, ModelSize] | None) -> Workload:
    """Workload with the models of the trace; sizes as stated in `sizes`, or, if None, of the base mix in turns.

    Raises ValueError if `sizes` lacks a model."""
    duration_s = trace.duration_s or 1.0  # a single request, or requests all at once
    requests = np.bincount(trace.model, minlength=len(trace.names))
    return Workload(
        models=[_size(name, index, sizes) for index, name in enumerate(trace.names)],
        rates=(requests / duration_s).tolist(),
        duration_s=duration_s,
        at_s=trace.at_s,
        model=trace.model,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
    )


def _size(name: str, index: int, sizes: Mapping[str, ModelSize] | None) -> ModelSize:
    name = name or "model"  # a trace of a single model need not name the model
    if sizes is None:
        return msgspec.structs.replace(BASE_SIZES[index % len(BASE_SIZES)], name=name)
    if name not in sizes:
        raise ValueError(f"no size is stated of model {name!r}: add it to the file of --sizes")
    return sizes[name]


def read_sizes(path: Path) -> dict[str, ModelSize]:
    """Reads sizes by model from a JSON object, or from a CSV with a column `model`.

    A model has `parameters` or `weight_bytes`, or both, and `kv_bytes_per_token`; in JSON also `kv_layers`, if not
    every layer keeps every token. Raises ValueError, OSError."""
    try:
        if path.suffix == ".json":
            stated = msgspec.json.decode(path.read_bytes(), type=dict[str, Stated])
        else:
            stated = _stated_rows(path)
        return {name: own.size(name) for name, own in stated.items()}
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} states no sizes: {error}") from error


def _stated_rows(path: Path) -> dict[str, Stated]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file, restkey="more")
        stated = {}
        for row in reader:
            name = row.pop("model", None)
            if not name:
                raise ValueError(f"row {reader.line_num} names no model in a column `model`")
            try:
                cells = {column: cell for column, cell in row.items() if cell}
                stated[name] = msgspec.convert(cells, Stated, strict=False)
            except msgspec.ValidationError as error:
                raise ValueError(f"row {reader.line_num}: {error}") from error
    return stated
