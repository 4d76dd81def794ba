"""Measures costs of models on this machine, with real engines, and fits a profile: `staccato profile`.

In a round every model does everything once, so that further load on the machine falls on the models alike: prompts of
growing length, decode steps of growing batches, requests out and back, the model out and back, and a step right after
a different model's step. A step is timed as the device loop times it, around `Engine.step`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from runtime.config import RuntimeSettings
from runtime.core.device.request import RequestId
from runtime.core.engine import Engine, EngineError
from runtime.core.ledgers.costs import Fit, Law, ModelCosts, ModelSize, Profile, model_size
from runtime.memory.native import LibraryMissing, PoolError
from store.contract.wire import EngineSpec
from store.files import artefact
from store.files.architectures import Known
from store.files.model_config import Config
from store.settings import read
from store.telemetry import observe

if TYPE_CHECKING:
    from runtime.engine.builder import Builder

DEMO = Path(__file__).parents[1] / "deploy/demo/models"
# Hidden width and layers of models with random weights, for the law. A model is used if POOL_PART models fit the pool.
SHAPES = ((128, 2), (256, 4), (512, 8), (1024, 12), (2048, 16))
POOL_PART = 8
RANDOM_CONTEXT, CONTEXT_LEAST = 2048, 128  # tokens

ROUNDS_LEAST, ROUNDS_MOST = 3, 9  # after a first round that warms up
ROUNDS_S = 60.0  # after ROUNDS_LEAST rounds, no round begins later
PROMPTS = (16, 64, 256, 1024)  # and the longest prompt of the model
PROMPT_S_MOST = 1.0  # a slower prompt is measured, but prompts of greater length are not
SHORT, LONG_LEAST = 32, 64  # tokens
SHORT_BATCHES, LONG_BATCHES = (1, 2, 4, 8, 16), (1, 2)
STEPS = 5
WAIT_S = 60.0
POLL_S = 1e-3
NO_TIME_S = 1e-6  # least fixed time of a step; every step takes longer

HOST_BYTES = 256 << 20


# ── what was timed ────────────────────────────────────────────────────────────────────────────────────────────────────


def _lists() -> defaultdict[Any, list[float]]:
    return defaultdict(list)


@dataclass
class MeasuredTimes:
    """Measured seconds of a model, a list of repeats for each measurement."""

    step: dict[tuple[int, int], list[float]] = field(default_factory=_lists)  # requests, context
    prefill: dict[int, list[float]] = field(default_factory=_lists)  # tokens
    load: dict[int, list[float]] = field(default_factory=_lists)  # missing bytes
    copy: dict[int, list[float]] = field(default_factory=_lists)  # bytes of KV cache
    switch: list[float] = field(default_factory=list)  # excess over a step that follows a step of the model itself

    def all(self) -> Iterable[list[float]]:
        return itertools.chain(self.step.values(), self.prefill.values(), self.load.values(), self.copy.values())


@dataclass
class MeasuredModel:
    """A model under measurement, with its engine; parked between measurements."""

    size: ModelSize
    engine: Engine
    request: Callable[[Sequence[int], int, str], bytes]  # prompt, max_tokens, salt → payload
    longest: int  # tokens of prompt and answer
    times: MeasuredTimes = field(default_factory=MeasuredTimes)
    made: dict[RequestId, int] = field(default_factory=dict)  # tokens
    asked: int = 0

    def add(self, prompt: int, max_tokens: int) -> RequestId:
        self.asked += 1
        id = RequestId(f"profile/{self.asked}")
        self.engine.add(id, self.request([(7919 * n) % 256 + 2 for n in range(prompt)], max_tokens, id))
        self.made[id] = 0
        return id

    def step(self) -> float:
        """Makes a step and returns its seconds. The KV cache is grown before the step, as by the runtime."""
        held = self.engine.held()
        if held.kv < held.kv_wanted:
            self.engine.grow(held.kv_wanted - held.kv)
        began = time.perf_counter()
        outputs = self.engine.step()
        took_s = time.perf_counter() - began
        for output in outputs:
            self.made[output.request] += len(output.tokens)
        return took_s

    def until_all_began(self) -> None:
        deadline = time.perf_counter() + WAIT_S
        while not all(self.made.values()):
            if time.perf_counter() > deadline:
                raise EngineError(
                    f"{self.size.name}: {len(self.made)} requests got no first token within {WAIT_S:.0f} s, "
                    f"{self.engine.held()}: give more with STACCATO_DEVICE_MEMORY"
                )
            self.step()

    def forget(self) -> None:
        self.engine.abort(list(self.made))
        self.made.clear()

    def come(self) -> float:
        began = time.perf_counter()
        self.engine.fetch(self.engine.held().kv_wanted)
        self._wait(self.engine.arrived)
        return time.perf_counter() - began

    def go(self) -> float:
        began = time.perf_counter()
        self.engine.park()
        self._wait(self.engine.parked)
        return time.perf_counter() - began

    def _wait(self, done: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + WAIT_S
        while not done():
            if time.perf_counter() > deadline:
                raise EngineError(f"{self.size.name}: a transfer is not over after {WAIT_S:.0f} s: see the log")
            self.engine.wait(POLL_S)


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(models: Sequence[MeasuredModel], say: Callable[[str], None]) -> int:
    """Measures the models in rounds, fills in `times` of each, and returns the number of rounds after the warm-up."""
    began = time.perf_counter()
    for number in range(ROUNDS_MOST + 1):
        for model, other in zip(models, [*models[1:], models[0]], strict=True):
            measure_one(model)
            switch(model, other)
        took_s = time.perf_counter() - began
        say(f"round {number} of at most {ROUNDS_MOST}: {took_s:.0f} s")
        if number == 0:
            warm_up_over(models)
        elif number >= ROUNDS_LEAST and took_s > ROUNDS_S:
            break
    return number


def warm_up_over(models: Iterable[MeasuredModel]) -> None:
    """Drops the times of the warm-up; keeps the lengths of prompts not too long to be measured."""
    for model in models:
        model.times = MeasuredTimes(prefill=defaultdict(list, {tokens: [] for tokens in model.times.prefill}))


def measure_one(model: MeasuredModel) -> None:
    model.come()
    prompt = prefill(model)
    decode(model, SHORT, SHORT_BATCHES)
    decode(model, max(LONG_LEAST, prompt - len(LONG_BATCHES) * 2 * STEPS), LONG_BATCHES)
    model.go()
    load(model)


def prefill(model: MeasuredModel) -> int:
    """Measures a prompt of each length; returns the length of the longest prompt measured."""
    lengths = list(model.times.prefill) or [*(n for n in PROMPTS if 2 * n <= model.longest), model.longest - 1]
    for tokens in lengths:
        model.add(tokens, max_tokens=1)
        took_s = model.step()
        model.until_all_began()  # in case a single step was not enough
        model.made.clear()
        model.times.prefill[tokens].append(took_s)
        if took_s > PROMPT_S_MOST and model.times.prefill.keys() != set(lengths):
            break
    return max(model.times.prefill)


def decode(model: MeasuredModel, prompt: int, batches: Sequence[int]) -> None:
    for batch in batches:
        while len(model.made) < batch:
            model.add(prompt, model.longest - prompt)
        model.until_all_began()
        if batch == 1:
            there_and_back(model, prompt)
        context = batch * prompt + sum(model.made.values()) + batch * (STEPS // 2)
        model.times.step[batch, context] += [model.step() for _ in range(STEPS)]
    model.forget()


def there_and_back(model: MeasuredModel, prompt: int) -> None:
    """Measures the copy of a single request's KV cache out and back. The weights stay, so nothing else is copied."""
    kv_bytes = round(model.size.kv.bytes(prompt + sum(model.made.values())))
    model.times.copy[kv_bytes] += [model.go(), model.come()]
    model.step()


def load(model: MeasuredModel) -> None:
    """Measures loading all pages of weights and half of the pages; begins and ends with the model parked."""
    pages = model.engine.weights_pages
    for missing in dict.fromkeys((pages, -(-pages // 2))):
        model.engine.evict(missing)
        model.times.load[model.size.weight_bytes * missing // pages].append(model.come())
        model.go()
    model.engine.evict(pages)


def switch(model: MeasuredModel, other: MeasuredModel) -> None:
    """Measures a step after a step of `other`, less a step after a step of `model` itself."""
    for one in (model, other):
        one.come()
        one.add(SHORT, 4 * STEPS)
        one.until_all_began()
    for _ in range(STEPS):
        other.step()
        after_other_s = model.step()
        model.times.switch.append(after_other_s - model.step())
    for one in (model, other):
        one.forget()
        one.go()
        one.engine.evict(one.engine.weights_pages)


def host_bytes_per_s() -> float:
    """Bytes of host memory read per second, measured by copying on every core at once."""
    from concurrent.futures import ThreadPoolExecutor

    cores = os.cpu_count() or 1
    size = HOST_BYTES // cores
    pairs = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(cores)]
    took_s = []
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(ROUNDS_MOST):
            began = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))
            took_s.append(time.perf_counter() - began)
    return float(size * cores / np.median(took_s))


# ── fitting ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Fitted:
    """Result of a fit by least squares of relative errors: a short step counts as much as a long step."""

    coefficients: dict[str, float]
    errors: dict[str, float]  # standard errors of the coefficients above zero
    residual: float  # median of |predicted / took - 1|


def fit(columns: Mapping[str, Sequence[float]], took_s: Sequence[float]) -> Fitted:
    """Fits non-negative coefficients of the columns to the times `took_s`.

    With few columns, trying every subset of columns is exact, and shorter than an algorithm."""
    names = list(columns)
    scaled = np.column_stack([columns[name] for name in names]) / np.asarray(took_s)[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    names = [name for name, norm in zip(names, norms, strict=True) if norm > 0]
    scaled, norms = scaled[:, norms > 0] / norms[norms > 0], norms[norms > 0]
    best: tuple[int, ...] = ()
    least, said = np.inf, np.zeros(0)
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            solution = np.linalg.lstsq(scaled[:, chosen], np.ones(len(scaled)))[0]
            off = float(np.sum((scaled[:, chosen] @ solution - 1) ** 2))
            if (solution >= 0).all() and off < least * (1 - 1e-9):
                best, least, said = chosen, off, solution
    chosen_columns = scaled[:, best]
    freedom = max(1, len(scaled) - len(best))
    variances = np.diag(np.linalg.pinv(chosen_columns.T @ chosen_columns)) * least / freedom
    coefficients = {name: 0.0 for name in columns}
    errors = {}
    for at, value, variance in zip(best, said, variances, strict=True):
        coefficients[names[at]] = float(value / norms[at])
        errors[names[at]] = float(np.sqrt(max(variance, 0.0)) / norms[at])
    return Fitted(coefficients, errors, float(np.median(np.abs(chosen_columns @ said - 1))))


def model_costs(size: ModelSize, times: MeasuredTimes) -> tuple[ModelCosts, Fit]:
    steps, prefills = _medians(times.step), _prefills(times)
    loads, copies = _medians(times.load), _medians(times.copy)
    step = fit(
        {
            "step_s": [1.0] * len(steps),
            "step_s_per_request": [requests for requests, _ in steps],
            "step_s_per_token": [context for _, context in steps],
        },
        list(steps.values()),
    )
    prefill = fit(
        {
            "prefill_s": [1.0] * len(prefills),
            "prefill_s_per_token": list(prefills),
            "prefill_s_per_token2": [tokens**2 for tokens in prefills],
        },
        list(prefills.values()),
    )
    load = fit({"load_fixed_s": [1.0] * len(loads), "load_s_per_byte": list(loads)}, list(loads.values()))
    fixed_s, per_byte = load.coefficients["load_fixed_s"], load.coefficients["load_s_per_byte"]
    most = max(copies)  # bytes: in the largest copy the fixed time of a copy weighs least
    costs = ModelCosts(
        weight_bytes=size.weight_bytes,
        kv_bytes_per_token=size.kv_bytes_per_token,
        kv_layers=size.kv_layers or msgspec.UNSET,
        step_s_of_windows=msgspec.UNSET,  # a part of the measured time per token
        load_s=fixed_s + per_byte * size.weight_bytes,
        load_fixed_s=fixed_s,
        switch_s=_switch_s(times),
        copy_s_per_byte=copies[most] / most,
        **_with_some_time(step.coefficients | prefill.coefficients),
    )
    errors = {"switch_s": _half_range(times.switch), "copy_s_per_byte": _half_range(times.copy[most]) / most}
    fits = {"step": step, "prefill": prefill, "load": load}
    return costs, _fit_of(fits, errors)


def law(models: Sequence[tuple[ModelSize, MeasuredTimes]]) -> tuple[Law, Fit]:
    """Fits the law to the times of all models at once."""
    steps = [(size, *key, s) for size, times in models for key, s in _medians(times.step).items()]
    prefills = [(size, tokens, s) for size, times in models for tokens, s in _prefills(times).items()]
    loads = [(missing, s) for _, times in models for missing, s in _medians(times.load).items()]
    copies = [(moved, s) for _, times in models for moved, s in _medians(times.copy).items()]
    switches = [_switch_s(times) for _, times in models]
    fits = {
        "step": fit(
            {
                "step_s": [1.0] * len(steps),
                "step_s_per_weight_byte": [size.weight_bytes for size, *_ in steps],
                "step_s_per_request": [requests for _, requests, *_ in steps],
                "step_s_per_parameter": [size.parameters * requests for size, requests, *_ in steps],
                "step_s_per_kv_byte": [size.kv.bytes(context, requests) for size, requests, context, _ in steps],
            },
            [s for *_, s in steps],
        ),
        "prefill": fit(
            {
                "prefill_s": [1.0] * len(prefills),
                "prefill_s_per_parameter": [size.parameters * tokens for size, tokens, _ in prefills],
                "prefill_s_per_parameter2": [size.parameters * tokens**2 for size, tokens, _ in prefills],
            },
            [s for *_, s in prefills],
        ),
        "load": fit(
            {"load_s": [1.0] * len(loads), "load_s_per_byte": [missing for missing, _ in loads]}, [s for _, s in loads]
        ),
        # The fixed time of a copy is left out of the law, made for models with more to copy than the measured models.
        "copy": fit(
            {"copy_fixed_s": [1.0] * len(copies), "copy_s_per_byte": [moved for moved, _ in copies]},
            [s for _, s in copies],
        ),
    }
    found = {name: value for fitted in fits.values() for name, value in fitted.coefficients.items()}
    del found["copy_fixed_s"]
    said = Law(switch_s=float(np.median(switches)), **_with_some_time(found))
    return said, _fit_of(fits, {"switch_s": _half_range(switches)})


def _medians(measured: Mapping[Any, Sequence[float]]) -> dict[Any, float]:
    return {key: float(np.median(times)) for key, times in measured.items()}


def _prefills(times: MeasuredTimes) -> dict[int, float]:
    """Median seconds by prompt length. The time of the smallest decode step stands for a prompt of one token, and fixes
    the start of the line."""
    return {1: _medians(times.step)[min(times.step)]} | _medians(times.prefill)


def _switch_s(times: MeasuredTimes) -> float:
    return max(0.0, float(np.median(times.switch)))


def _half_range(values: Sequence[float]) -> float:
    """Half of the interquartile range."""
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low) / 2


def _with_some_time(coefficients: dict[str, float]) -> dict[str, float]:
    return coefficients | {name: max(coefficients[name], NO_TIME_S) for name in ("step_s", "prefill_s")}


def _fit_of(fits: Mapping[str, Fitted], errors: dict[str, float]) -> Fit:
    all_errors = {name: error for fitted in fits.values() for name, error in fitted.errors.items()} | errors
    return Fit(all_errors, {what: fitted.residual for what, fitted in fits.items()})


# ── the whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def profile(name: str, folders: Sequence[Path], settings: RuntimeSettings, say: Callable[[str], None]) -> Profile:
    """Profile measured with the models in `folders` and with models of random weights.

    `say` gets a line of progress at a time. Raises EngineError, artefact.Refused and ValueError."""
    from runtime.engine import probe
    from runtime.engine.builder import Builder

    size, percent = settings.pool
    build = Builder(size, settings.host_cache, helpers=settings.load_helpers, pool_percent=percent)
    pool_bytes = build.pages_total * build.page_bytes
    with tempfile.TemporaryDirectory(prefix="staccato-profile-") as scratch:
        specs = [*map(spec_of, folders), *random_models(Path(scratch), pool_bytes)]
        batched = probe.batched_tokens(specs[-1])
        models = [start(build, spec, batched, say) for spec in specs]
    rounds = measure(models, say)
    for model in models:
        model.engine.close()
    build.close()
    rows = {model.size.name: model_costs(model.size, model.times) for model in models}
    of_all, fit_of_all = law([(model.size, model.times) for model in models])
    return Profile(
        name=name,
        kind="measured",
        conditions=conditions(models, rounds, settings, build.version, probe.accelerator()),
        memory_bytes=pool_bytes,
        page_bytes=build.page_bytes,
        batched_tokens=batched,
        host_bytes_per_s=host_bytes_per_s(),
        block_tokens=models[0].engine.kv_form.tokens,
        law=of_all,
        models={name: costs for name, (costs, _) in rows.items()},
        fits={"law": fit_of_all} | {name: fitted for name, (_, fitted) in rows.items()},
    )


def model_folders(paths: Iterable[Path]) -> list[Path]:
    """Model folders among `paths`; a path is a model folder or holds model folders.

    Raises ValueError if a path has no model or two folders have equal names."""
    found: list[Path] = []
    for path in paths:
        here = [path] if (path / "config.json").is_file() else sorted(path.glob("*/config.json"))
        if not here:
            raise ValueError(f"{path} is no model and holds none: give folders with a config.json")
        found += [at.parent if at.name == "config.json" else at for at in here]
    if twice := [name for name, count in Counter(path.resolve().name for path in found).items() if count > 1]:
        raise ValueError(f"two folders are named {twice[0]}, and a profile goes by the name: rename one")
    return [path.resolve() for path in found]


def spec_of(folder: Path) -> EngineSpec:
    """Spec of the model in `folder` as for a deployment, with the longest context of the model."""
    architecture = msgspec.json.decode((folder / "config.json").read_bytes(), type=Config).architectures[:1]
    found = artefact.inspect(folder, Known(frozenset(architecture)))
    return EngineSpec(
        key=folder.name,
        path=str(folder),
        digest=found.digest,
        architecture=found.architecture,
        dtype="auto",
        max_model_len=found.context_tokens,
        weight_bytes=found.weight_bytes_as("auto"),
        kv_bytes_per_token=found.kv_bytes_per_token,
        kv_layers=found.kv_layers_as("auto"),
    )


def random_models(folder: Path, pool_bytes: int) -> list[EngineSpec]:
    from runtime.engine import probe

    specs: list[EngineSpec] = []
    for hidden, layers in SHAPES:
        if POOL_PART * probe.llama_bytes(hidden, layers) <= pool_bytes:
            specs.append(probe.write_llama(folder / f"random-{hidden}x{layers}", hidden, layers, RANDOM_CONTEXT))
    if not specs:
        raise ValueError(f"a pool of {pool_bytes} bytes is too small to measure in: raise STACCATO_DEVICE_MEMORY")
    return specs


def start(build: Builder, spec: EngineSpec, batched_tokens: int, say: Callable[[str], None]) -> MeasuredModel:
    from runtime.engine.probe import request

    longest = min(spec.max_model_len, batched_tokens)
    if longest < CONTEXT_LEAST:
        raise ValueError(f"{spec.path}: a context of {longest} tokens is too short to measure, {CONTEXT_LEAST} is not")
    began = time.perf_counter()
    engine = build.build(msgspec.structs.replace(spec, max_model_len=longest), skip_tokenizer_init=True)
    say(f"{spec.key}: {spec.weight_bytes / 1e6:.1f} MB, built in {time.perf_counter() - began:.1f} s")
    return MeasuredModel(model_size(spec), engine, request, longest)


def conditions(
    models: Iterable[MeasuredModel], rounds: int, settings: RuntimeSettings, engine: str, accelerator: str | None
) -> dict[str, str]:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    host = f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB"
    spreads = [_half_range(times) / abs(np.median(times)) for model in models for times in model.times.all()]
    return {
        "machine": f"{accelerator}; {host}" if accelerator else host,
        "threads": str(settings.threads),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "staccato profile",
        "versions": f"staccato {metadata.version('staccato')}, {engine}, torch {metadata.version('torch')}",
        "rounds": str(rounds),
        "spread": f"half of what the middle half of the repeats spans: {np.median(spreads):.1%} of their median in the "
        f"median of all that was timed, {np.max(spreads):.1%} at most",
        "load": f"{os.getloadavg()[0]:.2f} at the end, this included",
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def main() -> None:
    """`python -m runtime.profile --out FILE [DIR...]`: writes a profile; progress and errors go to standard output."""
    parser = argparse.ArgumentParser(prog="runtime.profile")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("models", type=Path, nargs="*")
    asked = parser.parse_args()
    observe.configure_logs("profile")
    try:
        settings = read(RuntimeSettings)
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # before torch is imported, as for the device
        if not asked.out.parent.is_dir():
            raise ValueError(f"there is no folder {asked.out.parent} to write {asked.out.name} into: make it")
        folders = model_folders(asked.models or ([DEMO] if DEMO.is_dir() else []))
        found = profile(asked.out.stem, folders, settings, lambda line: print(line, flush=True))
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    except (EngineError, LibraryMissing, PoolError, artefact.ArtefactRefused, ValueError, OSError) as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)  # vLLM's exit handlers would tear down engines that end with the process anyway


if __name__ == "__main__":
    main()
