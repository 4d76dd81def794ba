"""Workloads: models, times and lengths of requests for each model, faults of devices. Pure functions of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from runtime.core.ledgers.costs import ModelSize
from runtime.sim.trace import ClientLengths, ClientWindows, Floats, Ints, Trace


class WorkloadTenant(NamedTuple):
    name: str = ""
    weight: float = 1.0


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in the order of arrival; `model` is an index into `models`, `tenant` an index into `tenants`."""

    models: list[ModelSize]
    rates: list[float]  # requests per second, by model
    duration_s: float
    at_s: Floats
    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    tenants: Sequence[WorkloadTenant] = (WorkloadTenant(),)
    tenant: Ints | None = None  # None: requests belong to the first tenant
    high: Flags | None = None  # whether each request has high priority; None: no request has

    def __post_init__(self) -> None:
        tenant = self.model if self.tenant is None else self.tenant
        high = self.model if self.high is None else self.high
        columns = (self.at_s, self.model, self.prompt_tokens, self.output_tokens, tenant, high)
        assert len({len(column) for column in columns}) == 1, [len(column) for column in columns]
        assert len(self.models) == len(self.rates), (len(self.models), len(self.rates))
        assert not len(self.at_s) or 0 <= self.at_s[0] and self.at_s[-1] < self.duration_s, self.duration_s
        assert (np.diff(self.at_s) >= 0).all(), "requests out of order"


def _size(name: str, billions: float, kv_bytes_per_token: int) -> ModelSize:
    parameters = round(billions * 1e9)
    return ModelSize(name, 2 * parameters, kv_bytes_per_token, parameters)  # two bytes per parameter: bfloat16


BASE_SIZES = (
    _size("6B", 6, 230_000),
    _size("7B", 7, 500_000),  # each head has separate keys and values
    _size("7B-gqa", 7, 57_000),
    _size("8B", 8, 131_000),
    _size("9B", 9, 200_000),
    _size("13B", 13, 800_000),
    _size("14B", 14, 196_000),
)


# ── generators ────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Each model draws from a separate random stream. If two workloads differ only in the number of models, the larger
# workload has the models of the smaller workload with equal requests, and capacities compare without noise.


def base(
    models: int,
    seed: int,
    rate: float = 0.1,
    duration_s: float = 400.0,
    lengths: str = "sharegpt",
    cv: float = 1.0,
    zipf: float = 0.0,
    sizes: Sequence[ModelSize] = BASE_SIZES,
) -> Workload:
    """`rate` requests per second and model in the mean, Zipf-distributed over models with exponent `zipf`.

    Gaps between a model's requests are Gamma with coefficient of variation `cv`: 1 is Poisson, more comes in bursts.
    `lengths` is a name in LENGTHS. Raises ValueError if an argument is out of range."""
    _check(models, rate=rate, duration_s=duration_s, cv=cv)
    if cv > _CV_MOST:
        raise ValueError(f"cv is {cv:g}: at most {_CV_MOST}")
    if not (math.isfinite(zipf) and zipf >= 0):
        raise ValueError(f"zipf is {zipf:g}: 0 (all models equal) or more")
    if lengths not in LENGTHS:
        raise ValueError(f"lengths are {lengths!r}: one of {', '.join(LENGTHS)}")
    prompt, output = LENGTHS[lengths]
    rng = np.random.default_rng(seed)
    weights = np.arange(1, models + 1, dtype=np.float64) ** -zipf
    rng.shuffle(weights)
    rates = weights / weights.mean() * rate
    requests = []
    for stream, own_rate in zip(rng.spawn(models), rates, strict=True):
        at_s = _arrivals(stream, Gamma(cv**-2), float(own_rate), duration_s)
        drawn = (prompt(stream, len(at_s)), output(stream, len(at_s)))
        requests.append(_Requests(at_s, _whole(drawn[0], 4, 6000), _whole(drawn[1], 2, 2048)))
    return _merged(requests, sizes, rates.tolist(), duration_s)


def replicated(trace: Trace, models: int, seed: int, duration_s: float | None = None) -> Workload:
    """`models` copies of the trace's models, in random order, each copy's clock turned by a random time.

    Requests turned beyond the end come at the beginning. If `duration_s` is longer than the trace (None: as long), the
    trace begins again. Raises ValueError if an argument is out of range or the trace has no duration."""
    _check(models, **({} if duration_s is None else {"duration_s": duration_s}))
    lap_s = trace.duration_s
    if not lap_s > 0:
        raise ValueError(f"the trace lasts {lap_s:g} s: at least two requests at different times are needed")
    rng = np.random.default_rng(seed)
    rounds = [rng.permutation(len(trace.names)) for _ in range(math.ceil(models / len(trace.names)))]
    of_model = [np.flatnonzero(trace.model == index) for index in range(len(trace.names))]
    rows = [of_model[original] for original in np.concatenate(rounds)[:models]]
    requests = [
        _turned(trace, own, float(stream.random()) * lap_s, duration_s or lap_s)
        for own, stream in zip(rows, rng.spawn(models), strict=True)
    ]
    return _merged(requests, BASE_SIZES, [len(own) / lap_s for own in rows], duration_s or lap_s)


def servegen(
    windows: Mapping[str, ClientWindows],
    lengths: Mapping[str, ClientLengths],
    models: int,
    seed: int,
    rate: float = 0.1,
    duration_s: float = 600.0,
) -> Workload:
    """Requests for each model as from a random client of a large service in ten minutes: bursts and lengths alike.

    Rates of clients span five orders of magnitude, so models get square roots of the rates, scaled to the mean `rate`
    and bounded by 1 request per second. Raises ValueError if an argument is out of range or no client is usable."""
    _check(models, rate=rate, duration_s=duration_s)
    clients = sorted(name for name in windows.keys() & lengths.keys() if len(windows[name].rate) > _WINDOWS_LEAST)
    if not clients:
        raise ValueError(f"no client has more than {_WINDOWS_LEAST} windows and known lengths")
    streams = np.random.default_rng(seed).spawn(models)
    chosen = [clients[stream.integers(len(clients))] for stream in streams]
    places = [stream.integers(len(windows[name].rate)) for stream, name in zip(streams, chosen, strict=True)]
    roots = np.sqrt([min(windows[name].rate[place], 50.0) for name, place in zip(chosen, places, strict=True)])
    rates = np.minimum(roots / roots.mean() * rate, 1.0)
    requests = []
    for stream, name, place, own_rate in zip(streams, chosen, places, rates, strict=True):
        at_s = _arrivals(stream, _gaps(windows[name], int(place)), float(own_rate), duration_s)
        own = lengths[name]
        prompt = quantiles(own.shares, own.prompt_tokens)(stream, len(at_s))
        output = quantiles(own.shares, own.output_tokens)(stream, len(at_s))
        requests.append(_Requests(at_s, _whole(prompt, 4, 8000), _whole(output, 2, 4096)))
    return _merged(requests, BASE_SIZES, rates.tolist(), duration_s)


_CV_MOST = 100
_PROMPT_MOST = 30_000  # tokens
_WINDOWS_LEAST = 50  # windows of a client: clients with fewer were present too shortly to show a pattern


def _check(models: int, **positive: float) -> None:
    if models < 1:
        raise ValueError(f"models are {models}: at least one is needed")
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value:g}: it must be finite and more than 0")


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def divided(workload: Workload, weights: Sequence[float], seed: int, same_models: bool = False) -> Workload:
    """Workload divided among tenants "t0", "t1" and so on in proportion to `weights`.

    Tenants get the models in turns, or, with `same_models`, each request at random, whatever its model."""
    share = np.array(weights) / sum(weights)
    if same_models:
        tenant = np.random.default_rng(seed).choice(len(share), len(workload.at_s), p=share).astype(np.int32)
    else:
        owners: list[int] = []
        for count in range(1, len(workload.models) + 1):  # the tenant furthest behind gets the next model
            owners.append(int(np.argmax(count * share - np.bincount(owners, minlength=len(share)))))
        tenant = np.array(owners, np.int32)[workload.model]
    names = [WorkloadTenant(f"t{index}", weight) for index, weight in enumerate(weights)]
    return replace(workload, tenants=names, tenant=tenant)


def flooded(workload: Workload, times: int, seed: int, prompts: float = 1.0) -> Workload:
    """Workload in which the first tenant has `times` as many requests.

    The added requests come at random times, with lengths drawn from the tenant's requests, but with prompts `prompts`
    times as long."""
    rng = np.random.default_rng(seed)
    own = np.arange(len(workload.at_s)) if workload.tenant is None else np.flatnonzero(workload.tenant == 0)
    more = np.repeat(own, times - 1)
    rows, lengths = np.concatenate([np.arange(len(workload.at_s)), more]), rng.permutation(more)
    at_s = np.concatenate([workload.at_s, rng.random(len(more)) * workload.duration_s])
    longer = _whole(workload.prompt_tokens[lengths] * prompts, 4, _PROMPT_MOST)
    order = np.argsort(at_s, kind="stable")
    return replace(
        workload,
        at_s=at_s[order],
        model=workload.model[rows][order],
        prompt_tokens=np.concatenate([workload.prompt_tokens, longer])[order],
        output_tokens=np.concatenate([workload.output_tokens, workload.output_tokens[lengths]])[order],
        tenant=None if workload.tenant is None else workload.tenant[rows][order],
        high=None if workload.high is None else workload.high[rows][order],
    )


def with_burst(workload: Workload, requests: int, at_s: float, seed: int) -> Workload:
    """Workload in which a model gets `requests` more requests in the second from `at_s` on.

    The model is the model whose tokens take most memory. The prompts have 100 to 300 tokens, the answers 600 to
    1,000."""
    rng = np.random.default_rng([seed, 25])
    model = max(range(len(workload.models)), key=lambda number: workload.models[number].kv.growth(0))
    times = np.concatenate([workload.at_s, at_s + rng.random(requests)])
    order = np.argsort(times, kind="stable")
    none = np.zeros(requests, np.int32)
    prompts, outputs = rng.integers(100, 301, requests), rng.integers(600, 1001, requests)
    return replace(
        workload,
        at_s=times[order],
        model=np.concatenate([workload.model, none + model])[order],
        prompt_tokens=np.concatenate([workload.prompt_tokens, prompts.astype(np.int32)])[order],
        output_tokens=np.concatenate([workload.output_tokens, outputs.astype(np.int32)])[order],
        tenant=None if workload.tenant is None else np.concatenate([workload.tenant, none])[order],
        high=None if workload.high is None else np.concatenate([workload.high, none > 0])[order],
    )


def prioritised(workload: Workload, share: float, seed: int) -> Workload:
    """Workload in which each request has high priority with the probability `share`, 0 to 1."""
    return replace(workload, high=np.random.default_rng([seed, 24]).random(len(workload.at_s)) < share)


# ── lengths ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Distribution = Callable[[np.random.Generator, int], Floats]


def log_normal(median: float, sigma: float) -> Distribution:
    return lambda rng, count: rng.lognormal(math.log(median), sigma, count)


def quantiles(shares: Floats, values: Floats) -> Distribution:
    return lambda rng, count: np.interp(rng.random(count), shares, values)


def log_quantiles(shares: Floats, values: Floats) -> Distribution:
    logs = quantiles(shares, np.log(values))
    return lambda rng, count: np.exp(logs(rng, count))


_SHARES = np.array([0, 0.5, 0.8, 0.95, 0.99, 1])

# Tokens of prompts and of outputs.
LENGTHS: dict[str, tuple[Distribution, Distribution]] = {
    "sharegpt": (log_normal(100, 1.25), log_normal(167, 0.9)),  # means about 215 and 250
    "ox2": (log_normal(100, 1.25), log_normal(2 * 167, 0.9)),
    "ix2": (log_normal(2 * 100, 1.25), log_normal(167, 0.9)),
    "gpt4": (  # ShareGPT-GPT4: quantiles of table 1 of the Llumnix paper
        log_quantiles(_SHARES, np.array([5, 74, 348, 1484, 3388, 6000])),
        quantiles(_SHARES, np.array([5, 487, 781, 988, 1234, 2000])),
    ),
    "code": (log_normal(1465, 0.8), log_normal(13, 1.1)),  # medians of Azure's coding service, 2023
}


def _whole(tokens: Floats, least: int, most: int) -> Ints:
    return np.clip(tokens, least, most).astype(np.int32)


# ── arrivals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class ArrivalGaps(Protocol):
    """Distribution of the gaps between requests of a model, in units of the mean gap."""

    def draw(self, rng: np.random.Generator, count: int) -> Floats: ...

    def residual(self, rng: np.random.Generator) -> float:
        """Time from a random moment to the next request. A random moment falls into long gaps more often."""
        ...


class Gamma(NamedTuple):
    shape: float

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.gamma(self.shape, 1 / self.shape, count)

    def residual(self, rng: np.random.Generator) -> float:
        return rng.random() * rng.gamma(self.shape + 1, 1 / self.shape)


class Weibull(NamedTuple):
    shape: float

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.weibull(self.shape, count) / math.gamma(1 + 1 / self.shape)

    def residual(self, rng: np.random.Generator) -> float:
        longer: float = rng.gamma(1 + 1 / self.shape) ** (1 / self.shape)
        return rng.random() * longer / math.gamma(1 + 1 / self.shape)


def _gaps(windows: ClientWindows, place: int) -> ArrivalGaps:
    """Distribution fitted to a client's window. Below the bounds on the shape, hardly any model would get a request."""
    shape = float(windows.shape[place])
    return Gamma(max(0.02, shape)) if windows.gamma[place] else Weibull(max(0.2, shape))


def _arrivals(rng: np.random.Generator, gaps: ArrivalGaps, rate: float, duration_s: float) -> Floats:
    """Arrivals of a stationary process: the mean rate is equal at the beginning and later, however bursty."""
    chunk = math.ceil(rate * duration_s) + 16
    times = np.array([gaps.residual(rng)])
    while times[-1] < rate * duration_s:
        times = np.concatenate([times, times[-1] + np.cumsum(gaps.draw(rng, chunk))])
    at_s: Floats = times / rate
    return at_s[at_s < duration_s]


# ── putting together ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Requests(NamedTuple):
    """Requests of one model, in any order."""

    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


def _turned(trace: Trace, rows: npt.NDArray[np.intp], by_s: float, duration_s: float) -> _Requests:
    lap_s = trace.duration_s
    laps = math.ceil(duration_s / lap_s)
    once = (trace.at_s[rows] + by_s) % lap_s
    at_s = np.concatenate([once + lap * lap_s for lap in range(laps)])
    kept = at_s < duration_s
    return _Requests(
        at_s[kept],
        np.tile(trace.prompt_tokens[rows], laps)[kept],
        np.tile(trace.output_tokens[rows], laps)[kept],
    )


def _merged(
    requests: Sequence[_Requests], sizes: Sequence[ModelSize], rates: Iterable[float], duration_s: float
) -> Workload:
    at_s = np.concatenate([own.at_s for own in requests])
    model = np.repeat(np.arange(len(requests), dtype=np.int32), [len(own.at_s) for own in requests])
    order = np.argsort(at_s, kind="stable")  # at equal times the model with the smaller index comes first
    return Workload(
        models=[msgspec.structs.replace(sizes[index % len(sizes)], name=f"m{index}") for index in range(len(requests))],
        rates=list(rates),
        duration_s=duration_s,
        at_s=at_s[order],
        model=model[order],
        prompt_tokens=np.concatenate([own.prompt_tokens for own in requests])[order],
        output_tokens=np.concatenate([own.output_tokens for own in requests])[order],
    )


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────

Kind = Literal["dies", "hangs", "drops"]

SILENT_S = 2.0  # silence after which a hanging device is given up
RESTART_S = 20.0  # time until a dead or given-up device is back, empty


class InjectedFault(NamedTuple):
    at_s: float
    device: int
    kind: Kind  # "dies" and "hangs": the device; "drops": the next migration of a request from the device fails


def drawn(count: int, devices: int, duration_s: float, seed: int) -> list[InjectedFault]:
    """Draws `count` faults at random times, of random devices and kinds."""
    rng = np.random.default_rng([seed, count])
    kinds: tuple[Kind, ...] = get_args(Kind)
    at_s = np.sort(rng.random(count) * duration_s).tolist()
    rows = zip(at_s, rng.integers(devices, size=count).tolist(), rng.integers(len(kinds), size=count), strict=True)
    return [InjectedFault(at, device, kinds[kind]) for at, device, kind in rows]
