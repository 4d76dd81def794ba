"""Pages held and wanted by a simulated engine, beside the pages taken by the blocks of a real engine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.device.request import ModelKey, Objective, Request, request_id
from runtime.core.ledgers.costs import ModelCosts
from runtime.core.turns.slack import Slack
from runtime.sim.dispatch.baselines import InTurns
from runtime.sim.engine import SimulatedEngine
from runtime.sim.world import World
from tests.sim.small import COSTS, PAGE, profile
from tests.sim.test_world import drawn_work

TOKENS = 64  # tokens per page


@pytest.mark.parametrize("seed", range(5))
def test_in_blocks_it_wants_about_as_many_pages_as_whole_blocks_take(seed: int) -> None:
    block = 128
    contexts = np.random.default_rng(seed).integers(1, 2000, 200).tolist()
    wanted = engine(contexts, block).tell().kv_wanted
    exact = (block + sum(-(-(context + 1) // block) * block for context in contexts)) / TOKENS
    assert wanted == pytest.approx(exact, abs=4 * block / TOKENS / 12**0.5 * len(contexts) ** 0.5)
    assert wanted > 1.05 * engine(contexts, 1).tell().kv_wanted


def test_without_blocks_it_wants_what_the_next_tokens_take() -> None:
    assert engine([63, 127], 1).tell().kv_wanted == 3
    assert engine([63, 128], 1).tell().kv_wanted == 4


@given(
    contexts=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    block_tokens=st.sampled_from([1, 16, 32, 127, 128]),
    token_bytes=st.integers(1, 3 * PAGE),
)
def test_with_the_pages_that_it_wants_it_makes_a_step(contexts: list[int], block_tokens: int, token_bytes: int) -> None:
    costs = msgspec.structs.replace(COSTS, kv_bytes_per_token=token_bytes / 7)
    built = engine(contexts, block_tokens, costs)
    built.kv = built.tell().kv_wanted
    assert built.plan(8, 2048)[0] >= 1 and len(built.streams) == len(contexts)


def test_in_blocks_all_requests_end_where_memory_is_short() -> None:
    world = World(
        drawn_work(1, 60, 20.0, models=2),
        msgspec.structs.replace(profile(26), block_tokens=32),
        Slack,
        InTurns(),
        1,
        Objective(),
        checks=True,
    )
    world.run(600.0)
    world.check()
    assert all(request.sent == request.max_tokens for request in world.requests) and not world.open


def engine(contexts: list[int], block_tokens: int, costs: ModelCosts = COSTS) -> SimulatedEngine:
    """An engine with a request per context; `contexts`: computed tokens."""
    built = SimulatedEngine(costs, PAGE, block_tokens)
    for number, context in enumerate(contexts):
        request = Request(
            id=request_id("g", number),
            gateway="g",
            stream=number,
            model=ModelKey("m0"),
            payload=b"",
            arrived_at=0.0,
            prompt_tokens=context,
            max_tokens=10,
            handed=True,
        )
        built.add(request, 10)
    return built
