"""Workloads are functions of their arguments, and have the stated load."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from runtime.sim.trace import Trace, read_lengths, read_trace, read_windows
from runtime.sim.workload import BASE_SIZES, LENGTHS, Gamma, Weibull, Workload, _arrivals, base, replicated, servegen
from tests.sim.traces import real

seeds = st.integers(0, 2**32)


def rows(workload: Workload) -> list[tuple[float, int, int, int]]:
    columns = (workload.at_s, workload.model, workload.prompt_tokens, workload.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def of_first(workload: Workload, models: int) -> list[tuple[float, int, int, int]]:
    return [row for row in rows(workload) if row[1] < models]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    count = draw(st.integers(2, 40))
    at_s = np.array(sorted(draw(st.lists(st.floats(0, 1000), min_size=count, max_size=count))))
    assume(at_s[-1] - at_s[0] > 1e-3)
    model = np.unique(draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)), return_inverse=True)
    tokens = np.arange(1, count + 1, dtype=np.int32)
    return Trace(
        names=tuple(f"model {index}" for index in model[0]),
        at_s=at_s - at_s[0],
        model=model[1].astype(np.int32),
        prompt_tokens=tokens,
        output_tokens=tokens + 1,
    )


# ── the same arguments, the same workload ─────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 30), st.sampled_from(sorted(LENGTHS)), st.floats(0.1, 5), st.floats(0, 2))
def test_a_workload_is_a_function_of_its_arguments(
    seed: int, models: int, lengths: str, cv: float, zipf: float
) -> None:
    once, again, other = (base(models, seed + step, 0.5, 100, lengths=lengths, cv=cv, zipf=zipf) for step in (0, 0, 1))
    assert (rows(once), once.models, once.rates) == (rows(again), again.models, again.rates)
    assert rows(once) != rows(other) or not rows(once)


@given(traces(), seeds, st.integers(1, 20))
def test_a_replicated_trace_is_a_function_of_its_arguments(trace: Trace, seed: int, models: int) -> None:
    assert rows(replicated(trace, models, seed)) == rows(replicated(trace, models, seed))


@given(seeds, st.integers(1, 10), st.integers(1, 10), traces())
def test_a_larger_workload_has_the_requests_of_a_smaller_one(seed: int, few: int, more: int, trace: Trace) -> None:
    assert of_first(base(few + more, seed), few) == rows(base(few, seed))
    assert of_first(replicated(trace, few + more, seed), few) == rows(replicated(trace, few, seed))


def test_seeds_differ_for_real_traces_too() -> None:
    trace = read_trace(real("arena27.csv.zst"))
    assert rows(replicated(trace, 40, 1)) != rows(replicated(trace, 40, 2))


# ── as heavy as they say ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
def test_the_mean_rate_is_the_one_asked_for(rate: float, cv: float) -> None:
    workload = base(2000, seed=5, rate=rate, duration_s=400, cv=cv)
    counts = np.bincount(workload.model, minlength=2000)
    assert abs(counts.mean() - rate * 400) < 4 * counts.std() / math.sqrt(2000)
    assert sum(workload.rates) / 2000 == pytest.approx(rate)


@pytest.mark.parametrize("gaps", [Gamma(0.1), Gamma(1), Gamma(8), Weibull(0.5), Weibull(1), Weibull(3)])
def test_arrivals_are_as_frequent_at_the_beginning_as_later(gaps: Gamma | Weibull) -> None:
    rng = np.random.default_rng(3)
    tenths = [np.histogram(_arrivals(rng, gaps, 1.0, 20.0), bins=10, range=(0, 20))[0] for _ in range(3000)]
    spread = np.std(tenths, axis=0) / math.sqrt(3000)
    assert (np.abs(np.mean(tenths, axis=0) - 2.0) < 5 * spread).all()


def test_poisson_arrivals_have_the_variance_of_poisson() -> None:
    counts = np.bincount(base(4000, seed=1, rate=0.1, duration_s=400).model, minlength=4000)
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_more_variation_comes_in_bursts() -> None:
    spreads = [np.bincount(base(500, 2, cv=cv).model, minlength=500).var() for cv in (0.5, 1.0, 4.0)]
    assert spreads == sorted(spreads)
    assert spreads[2] > 4 * spreads[1]


@given(seeds, st.integers(2, 60), st.floats(0.5, 2))
def test_rates_follow_zipf_in_random_order(seed: int, models: int, zipf: float) -> None:
    rates = base(models, seed, rate=0.1, duration_s=1, zipf=zipf).rates
    ordered = sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(0.1 * models)
    assert [rate / ordered[0] for rate in ordered] == pytest.approx([(rank + 1) ** -zipf for rank in range(models)])


@pytest.mark.parametrize(
    ("lengths", "prompt_median", "output_median"),
    [("sharegpt", 100, 167), ("ox2", 100, 334), ("ix2", 200, 167), ("gpt4", 74, 487), ("code", 1465, 13)],
)
def test_lengths_have_the_medians_of_what_they_are_named_after(
    lengths: str, prompt_median: float, output_median: float
) -> None:
    workload = base(500, seed=9, lengths=lengths)
    assert np.median(workload.prompt_tokens) == pytest.approx(prompt_median, rel=0.05)
    assert np.median(workload.output_tokens) == pytest.approx(output_median, rel=0.05)


def test_sharegpt_has_the_means_that_the_research_states() -> None:
    workload = base(1000, seed=9)
    assert workload.prompt_tokens.mean() == pytest.approx(215, rel=0.03)
    assert workload.output_tokens.mean() == pytest.approx(248, rel=0.03)


def test_sizes_cycle_through_the_base_mix() -> None:
    models = base(9, seed=0).models
    assert [model.name for model in models] == [f"m{index}" for index in range(9)]
    assert [model.parameters for model in models] == [1e9 * size for size in (6, 7, 7, 8, 9, 13, 14, 6, 7)]
    assert all(model.weight_bytes == 2 * model.parameters for model in models)


# ── replication ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(traces(), seeds, st.integers(1, 30))
def test_every_copy_has_the_rows_of_its_model(trace: Trace, seed: int, models: int) -> None:
    originals = np.bincount(trace.model).tolist()
    workload = replicated(trace, models, seed)
    copies = np.bincount(workload.model, minlength=models).tolist()
    turns = models // len(originals)
    assert all(copies.count(count) >= turns * originals.count(count) for count in set(originals))
    assert workload.rates == pytest.approx([count / trace.duration_s for count in copies])
    for index in range(models):
        prompts = set(workload.prompt_tokens[workload.model == index].tolist())
        assert any(prompts == set(trace.prompt_tokens[trace.model == own].tolist()) for own in set(trace.model))


@given(traces(), seeds, st.floats(0.3, 4))
def test_a_longer_workload_begins_the_trace_again(trace: Trace, seed: int, laps: float) -> None:
    lap_s = trace.duration_s
    once, longer = replicated(trace, 3, seed), replicated(trace, 3, seed, duration_s=laps * lap_s)
    assert longer.duration_s == laps * lap_s
    wanted = sorted(
        (at_s + lap * lap_s, *rest)
        for at_s, *rest in rows(once)
        for lap in range(math.ceil(laps))
        if at_s + lap * lap_s < laps * lap_s
    )
    assert sorted(rows(longer)) == [tuple(row) for row in wanted]


def test_copies_of_a_trace_of_one_model_do_not_come_together() -> None:
    at_s = np.arange(100.0)
    tokens = np.ones(100, np.int32)
    workload = replicated(Trace(("one",), at_s, np.zeros(100, np.int32), tokens, tokens), 5, seed=1)
    assert len(np.unique(workload.at_s % 1)) >= 5


# ── clients of a large service ────────────────────────────────────────────────────────────────────────────────────────


def test_models_asked_as_clients_of_servegen_have_the_rate_asked_for_in_the_mean() -> None:
    windows = read_windows(real("servegen_clients_windows.parquet"))
    lengths = read_lengths(real("servegen_clients_lengths.csv.zst"))
    workload = servegen(windows, lengths, 400, seed=3)
    assert rows(workload) == rows(servegen(windows, lengths, 400, seed=3))
    assert np.mean(workload.rates) == pytest.approx(0.1, rel=0.02)
    assert max(workload.rates) <= 1
    counts = np.bincount(workload.model, minlength=400)
    unexpected = counts - np.array(workload.rates) * workload.duration_s
    assert abs(unexpected.mean()) < 4 * unexpected.std() / math.sqrt(400)
    assert 4 <= workload.prompt_tokens.min() and workload.prompt_tokens.max() <= 8000
    assert 2 <= workload.output_tokens.min() and workload.output_tokens.max() <= 4096


# ── what makes no sense is refused ────────────────────────────────────────────────────────────────────────────────────

ONE_MOMENT = Trace(("a",), np.zeros(3), np.zeros(3, np.int32), np.ones(3, np.int32), np.ones(3, np.int32))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["rate", "duration_s", "cv"])
def test_numbers_that_are_not_positive_are_refused_by_name(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {wrong:g}"):
        base(3, 0, **{name: wrong})  # type: ignore[arg-type]


def test_other_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="models are 0"):
        base(0, 0)
    with pytest.raises(ValueError, match="lengths are 'novel': one of sharegpt"):
        base(1, 0, lengths="novel")
    with pytest.raises(ValueError, match="zipf is -1"):
        base(1, 0, zipf=-1)
    with pytest.raises(ValueError, match="cv is 1000: at most 100"):
        base(1, 0, cv=1000)
    with pytest.raises(ValueError, match="models are -1"):
        replicated(ONE_MOMENT, -1, 0)
    with pytest.raises(ValueError, match="lasts 0 s"):
        replicated(ONE_MOMENT, 1, 0)
    with pytest.raises(ValueError, match="duration_s is 0"):
        replicated(ONE_MOMENT, 1, 0, duration_s=0)
    with pytest.raises(ValueError, match="no client"):
        servegen({}, {}, 1, 0)


def test_rows_out_of_order_or_of_unequal_length_are_no_workload() -> None:
    ones = np.ones(2, np.int32)
    with pytest.raises(AssertionError):
        Workload([BASE_SIZES[0]], [1.0], 10.0, np.array([2.0, 1.0]), ones * 0, ones, ones)
    with pytest.raises(AssertionError):
        Workload([BASE_SIZES[0]], [1.0], 10.0, np.array([1.0]), ones * 0, ones, ones)


def test_who_is_popular_is_drawn_by_the_seed() -> None:
    first, second = (base(20, seed, zipf=1.0).rates for seed in (1, 2))
    assert sorted(first) == pytest.approx(sorted(second))
    assert first != second
