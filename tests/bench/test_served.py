"""Benches with served traces: engines take what the device gives, and a slower machine is slower in every part."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

from runtime.core.engine import Engine
from runtime.core.ledgers.costs import ModelCosts, Profile
from tests.bench.fleet.bench_policies import as_slow
from tests.bench.fleet.served import Watched

COSTS = ModelCosts(
    weight_bytes=1,
    kv_bytes_per_token=1.0,
    step_s=1.0,
    step_s_per_request=1.0,
    step_s_per_token=1.0,
    prefill_s=1.0,
    prefill_s_per_token=1.0,
    prefill_s_per_token2=1.0,
    load_s=1.0,
    switch_s=1.0,
    copy_s_per_byte=1.0,
    load_fixed_s=1.0,
    step_s_of_windows=((128, 1.0),),
)


@pytest.mark.parametrize("method", ["add", "step"])
def test_a_watched_engine_takes_what_an_engine_takes(method: str) -> None:
    watched, engine = (inspect.signature(getattr(each, method)).parameters for each in (Watched, Engine))
    assert [(one.name, one.default) for one in watched.values()] == [(one.name, one.default) for one in engine.values()]


@pytest.mark.parametrize("windows", [True, False])
def test_a_slower_profile_is_slower_in_every_part(windows: bool) -> None:
    costs = COSTS if windows else msgspec.structs.replace(COSTS, step_s_of_windows=msgspec.UNSET)
    sizes: dict[str, Any] = {"memory_bytes": 1, "page_bytes": 1, "batched_tokens": 1, "host_bytes_per_s": 1.0}
    profile = Profile(name="p", kind="measured", conditions={}, models={"m": costs}, **sizes)
    slow = as_slow(profile, 2.0, 3.0).models["m"]
    assert slow.step_s_of_windows == (((128, 2.0),) if windows else msgspec.UNSET)
    times = {
        name: getattr(slow, name) for name in ModelCosts.__struct_fields__ if "_s" in name and "windows" not in name
    }
    assert times == {name: 3.0 if name.startswith("prefill") else 2.0 for name in times}
