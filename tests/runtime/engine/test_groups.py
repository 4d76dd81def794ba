"""Counting of blocks for groups of layers: as vLLM's own lists of blocks, whatever the steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from runtime.core.engine import EngineError
from runtime.engine.groups import Groups, LayerGroup, check_kinds
from store.contract.kv_curve import LayerKind

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch
BLOCKS, ID = 700, "r"
HEADS = dict(num_kv_heads=1, head_size=8, dtype=torch.float32)


@dataclass(frozen=True)
class Shape:
    """A group, and the spec and the manager that vLLM has for such a group."""

    group: LayerGroup
    spec: KVCacheSpec
    manager: type[SingleTypeKVCacheManager]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kind, size = draw(st.sampled_from(list(LayerKind))), draw(st.sampled_from([1, 2, 4, 16]))
    reach = draw(st.integers(1, 40)) * (size if kind is LayerKind.CHUNK else 1)
    group = LayerGroup(kind, size, reach if kind in (LayerKind.WINDOW, LayerKind.CHUNK) else 0, BLOCKS, 1)
    match kind:
        case LayerKind.FULL:
            return Shape(group, FullAttentionSpec(block_size=size, **HEADS), FullAttentionManager)
        case LayerKind.WINDOW:
            windowed = SlidingWindowSpec(block_size=size, sliding_window=reach, **HEADS)
            return Shape(group, windowed, SlidingWindowManager)
        case LayerKind.CHUNK:
            chunked = ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=reach, **HEADS)
            return Shape(group, chunked, ChunkedLocalAttentionManager)
        case LayerKind.STATE:
            state = MambaSpec(block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
            return Shape(group, state, MambaManager)


def managed(shape: Shape) -> SingleTypeKVCacheManager:
    """vLLM's manager of the group, with a pool of its own."""
    pool = BlockPool(BLOCKS, enable_caching=False, hash_block_size=shape.group.size)
    return shape.manager(
        shape.spec,
        block_pool=pool,
        enable_caching=False,
        kv_cache_group_id=0,
        scheduler_block_size=shape.group.size,
    )


def step(manager: SingleTypeKVCacheManager, before: int, after: int) -> None:
    """A step of vLLM's, as `KVCacheManager.allocate_slots` makes it."""
    manager.remove_skipped_blocks(ID, before)
    manager.get_num_blocks_to_allocate(ID, after, [], before, before, after)
    manager.allocate_new_blocks(ID, after, after)
    manager.num_cached_block.setdefault(ID, 0)


@settings(max_examples=700)  # a thousand steps and more of each kind
@given(shape=shapes(), pieces=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_a_group_holds_after_each_step_as_many_blocks_as_vllms_manager(shape: Shape, pieces: list[int]) -> None:
    manager, computed = managed(shape), 0
    for piece in pieces:
        step(manager, computed, computed + piece)
        table = manager.req_to_blocks[ID]
        held = [place for place, block in enumerate(table) if not block.is_null]
        assert shape.group.need(computed, computed + piece) == len(held) == shape.group.held(table)
        computed += piece
        assert set(shape.group.live(computed)) <= set(held), "a block that matters was given back"


@given(shape=shapes(), computed=st.integers(1, 400), piece=st.integers(1, 50))
def test_a_request_that_comes_back_has_exactly_the_blocks_that_matter(shape: Shape, computed: int, piece: int) -> None:
    manager = managed(shape)
    manager.add_local_computed_blocks(ID, [], 0, computed)
    manager.allocate_external_computed_blocks(ID, 0, computed)
    manager.allocate_new_blocks(ID, computed, computed)
    table = manager.req_to_blocks[ID]
    assert list(shape.group.live(computed)) == [place for place, block in enumerate(table) if not block.is_null]
    step(manager, computed, computed + piece)
    assert shape.group.held(manager.req_to_blocks[ID]) == shape.group.need(computed, computed + piece)


@given(several=st.lists(shapes(), min_size=1, max_size=4), early=st.integers(1, 300), more=st.integers(0, 300))
def test_settled_blocks_are_the_first_blocks_however_far_the_request_is(
    several: list[Shape], early: int, more: int
) -> None:
    groups = Groups([shape.group for shape in several])
    settled = groups.settled(early)
    assert groups.live(early + more)[:settled] == groups.live(early)[:settled]
    assert all(
        (place + 1) * groups.groups[group].size <= early and groups.groups[group].kind is LayerKind.FULL
        for group, place in groups.live(early)[:settled]
    )
    assert len(groups.live(early)) <= groups.need(early - 1, early)


def test_kinds_that_cannot_be_parked_are_refused_by_name() -> None:
    check_kinds({"a": FullAttentionSpec(block_size=4, **HEADS)})
    with pytest.raises(EngineError, match="no layer"):
        check_kinds({})
    with pytest.raises(EngineError, match=r"layers\.1 keeps a CrossAttention"):
        check_kinds({"layers.1": CrossAttentionSpec(block_size=4, **HEADS)})
    with pytest.raises(EngineError, match="keeps a RSWA"):
        check_kinds({"layers.2": RSWASpec(block_size=4, rswa_window=8, **HEADS)})
    state = dict(block_size=4, shapes=((1,),), dtypes=(torch.float32,))
    with pytest.raises(EngineError, match="without speculation"):
        check_kinds({"layers.3": MambaSpec(**state, num_speculative_blocks=2)})
    with pytest.raises(EngineError, match="mamba_cache_mode"):
        check_kinds({"layers.4": MambaSpec(**state, mamba_cache_mode="all")})
