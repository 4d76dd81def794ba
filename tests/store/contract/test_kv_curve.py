"""Bytes of KV cache as a function of length: smooth for decisions, in whole blocks for plans."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.contract import wire
from store.contract.kv_curve import KeptLayers, KvBlocks, KvCurve, LayerKind, curve_of, written_bytes
from store.contract.wire import EngineSpec

FULL, WINDOW, CHUNK, STATE = LayerKind
KIB, MIB = 1 << 10, 1 << 20
LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=6)
# Published shapes, at two bytes an element.
GPT_OSS = (KeptLayers(WINDOW, 12, 2 * KIB, 128), KeptLayers(FULL, 12, 2 * KIB))  # 20b
GEMMA = (KeptLayers(WINDOW, 52, 8 * KIB, 1024), KeptLayers(FULL, 10, 8 * KIB))  # 3-27b
QWEN = (KeptLayers(STATE, 36, 1_097_728), KeptLayers(FULL, 12, 2 * KIB))  # 3-Next-80B


@st.composite
def models(draw: st.DrawFn) -> tuple[KeptLayers, ...]:
    """Layers of up to four kinds."""
    kinds = draw(st.lists(st.sampled_from(LayerKind), min_size=1, max_size=4, unique=True))
    reach = st.integers(1, 300)
    return tuple(
        KeptLayers(
            kind,
            draw(st.integers(1, 60)),
            draw(st.sampled_from([512, 1024, 2048])) * (40 if kind is STATE else 1),
            draw(reach) if kind in (WINDOW, CHUNK) else 0,
        )
        for kind in kinds
    )


@given(kept=models(), lengths=LENGTHS)
def test_a_sum_over_requests_is_at_most_the_bytes_of_requests_of_mean_length(
    kept: tuple[KeptLayers, ...], lengths: list[int]
) -> None:
    curve = curve_of(kept)
    each = curve.each(lengths)
    assert each == sum(curve.bytes(tokens) for tokens in lengths) <= curve.bytes(sum(lengths), len(lengths))
    assert curve.each([]) == curve.bytes(0, 0) == 0


@given(kept=models(), tokens=st.integers(1, 5000))
def test_the_next_token_adds_the_growth(kept: tuple[KeptLayers, ...], tokens: int) -> None:
    curve = curve_of(kept)
    assert curve.bytes(tokens + 1) == curve.bytes(tokens) + curve.growth(tokens)


@given(kept=models(), most=st.integers(1, 50_000), size=st.integers(0, 1 << 30), requests=st.integers(1, 9))
def test_as_many_tokens_as_fit_some_bytes_and_no_more(
    kept: tuple[KeptLayers, ...], most: int, size: int, requests: int
) -> None:
    curve = curve_of(kept)
    tokens = curve.tokens(size, requests, most)
    assert tokens <= most
    assert curve.bytes(tokens, requests) <= size if tokens >= 0 else curve.bytes(0, requests) > size
    assert tokens == most or curve.bytes(max(0, tokens + 1), requests) > size


@given(kept=models(), tokens=st.integers(1, 5000))
def test_what_lies_still_and_what_changes_until_the_end_is_what_a_request_holds(
    kept: tuple[KeptLayers, ...], tokens: int
) -> None:
    curve = curve_of(kept)
    assert curve.token_bytes * tokens + curve.last(tokens) == curve.bytes(tokens)
    assert curve.last(tokens) == 0 or {each.kind for each in kept} != {FULL}


@given(layers=st.integers(1, 90), size=st.integers(1, 9000), tokens=st.integers(1, 9000), block=st.integers(1, 128))
def test_a_model_that_keeps_every_token_has_a_line(layers: int, size: int, tokens: int, block: int) -> None:
    kept = (KeptLayers(FULL, layers, size),)
    assert curve_of(kept) == KvCurve(layers * size, 0) and written_bytes(kept) == layers * size
    blocks = KvBlocks.of(kept, block)
    assert 0 <= blocks.bytes(tokens) - curve_of(kept).bytes(tokens) < blocks.block_bytes


@given(kept=models(), tokens=st.integers(1, 5000))
def test_the_curve_is_within_a_block_of_each_group_and_above_by_a_chunk_at_most(
    kept: tuple[KeptLayers, ...], tokens: int
) -> None:
    curve, blocks = curve_of(kept), KvBlocks.of(kept, 16)
    chunks = sum(blocks.block_bytes * -(-table.reach // table.size) for table in blocks.tables if table.kind is CHUNK)
    off = curve.bytes(tokens) - blocks.bytes(tokens)
    assert -(2 * len(blocks.tables)) * blocks.block_bytes < off < len(blocks.tables) * blocks.block_bytes + chunks


@given(kept=models(), tokens=st.integers(1, 5000), piece=st.integers(1, 2048))
def test_no_request_holds_more_than_the_peak(kept: tuple[KeptLayers, ...], tokens: int, piece: int) -> None:
    blocks = KvBlocks.of(kept, 16)
    computed = 0
    while computed < tokens:
        step = min(piece, tokens - computed)
        held = sum(table.need(computed, computed + step) for table in blocks.tables)
        assert held <= blocks.peak(tokens, piece)
        computed += step


@pytest.mark.parametrize(
    ("kept", "kib", "block_kib"),
    [
        ((KeptLayers(WINDOW, 2, KIB, 32), KeptLayers(FULL, 2, KIB)), 8448, 64),
        ((KeptLayers(WINDOW, 5, KIB, 32), KeptLayers(FULL, 1, KIB)), 4480, 32),
    ],
    ids=["gpt-oss", "Gemma 3"],
)
def test_windows_count_as_measured_at_4097_tokens(kept: tuple[KeptLayers, ...], kib: int, block_kib: int) -> None:
    """`kib`: as an engine held, with the null block: see `test_windows_give_back_the_blocks_behind`."""
    blocks = KvBlocks.of(kept, 32)
    assert blocks.block_bytes == block_kib << 10
    assert blocks.bytes(4097) + blocks.block_bytes == kib << 10


@pytest.mark.parametrize(
    ("kept", "tokens", "mib"),
    [(GPT_OSS, 1024, 27), (GPT_OSS, 131_072, 3075), (GEMMA, 8192, 1128), (GEMMA, 131_072, 10_728), (QWEN, 1024, 64)],
)
def test_published_shapes_take_what_vllms_rules_give(kept: tuple[KeptLayers, ...], tokens: int, mib: int) -> None:
    blocks = KvBlocks.of(kept, 16)
    assert abs(blocks.bytes(tokens) - mib * MIB) <= blocks.block_bytes * len(blocks.tables)
    assert blocks.block_bytes / MIB == {GPT_OSS: 0.375, GEMMA: 1.25, QWEN: 12.75}[kept]


def test_a_spec_of_an_earlier_version_has_a_line() -> None:
    spec = EngineSpec(
        key="e",
        path="/m",
        digest="",
        architecture="",
        dtype="auto",
        max_model_len=9,
        weight_bytes=1,
        kv_bytes_per_token=7,
        kv_layers=GPT_OSS,
    )
    again = wire.decode(EngineSpec, wire.encode(spec))
    assert again == spec and again.kv == curve_of(GPT_OSS)
    assert wire.replace(spec, kv_layers=msgspec.UNSET).kv == KvCurve(7, 0)
