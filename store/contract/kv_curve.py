"""Bytes of KV cache that requests of a model hold, as a function of their tokens. Pure.

Layers keep for a request what later tokens read: every token (`FULL`), the tokens of a window (`WINDOW`) or of a chunk
(`CHUNK`), or a state of fixed size (`STATE`). A model's config says which layers keep what, and `KeptLayers` writes the
answer down.

`KvCurve` is the smooth function for decisions, for costs and for bills: no decision waits for the size of a block.
`KvBlocks` counts whole blocks as an engine does, for plans. An engine cuts the layers into groups with a block table
each, and the groups share blocks of one size: vLLM's rules for groups are repeated here. The size of a block in tokens
is the engine's. If a plan assumes another size, the plan is wrong by at most a block of each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Generic, TypeVar

import msgspec

BLOCK_TOKENS = 16  # vLLM's block on GPUs
CURVES_MOST = 4096  # curves kept: a fleet has thousands of models of few sizes
Size = TypeVar("Size", int, float)


class LayerKind(StrEnum):
    """What layers keep for a request."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


class KeptLayers(msgspec.Struct, frozen=True, omit_defaults=True):
    """Layers of a model that keep alike."""

    kind: LayerKind
    layers: int
    bytes: int  # of one layer: for each token, or for the state of a request
    reach: int = 0  # tokens of the window or of a chunk; 0 for other kinds
    fixed_bytes: int = 0  # part of `bytes` that does not depend on the dtype of the model

    def widened(self, factor: int) -> KeptLayers:
        """The layers with elements `factor` times as wide."""
        wide = (self.bytes - self.fixed_bytes) * factor + self.fixed_bytes
        return KeptLayers(self.kind, self.layers, wide, self.reach, self.fixed_bytes)


@dataclass(frozen=True, slots=True)
class KvCurve(Generic[Size]):
    """Bytes of KV cache that requests hold: a part for each token, a part for each request, and windows.

    The curve of a spec counts in whole bytes, and the curve of a cost profile may have fractions."""

    token_bytes: Size  # for each token, over the layers that keep every token
    request_bytes: Size  # for each request, over the layers that keep a state
    windows: tuple[tuple[int, Size], ...] = ()  # tokens that a window keeps, bytes for each of the tokens

    def bytes(self, tokens: int, requests: int = 1) -> Size:
        """Bytes that `requests` requests of `tokens` tokens in total hold.

        Exact if the requests are equally long, else an upper bound: one long request fills its window alone."""
        size = self.token_bytes * tokens + self.request_bytes * requests
        for reach, each in self.windows:
            size += each * min(tokens, reach * requests)
        return size

    def each(self, lengths: Sequence[int]) -> Size:
        """Bytes that requests of the given lengths, in tokens, hold together."""
        if not self.windows:
            return self.bytes(sum(lengths), len(lengths))
        size = self.token_bytes * 0
        for tokens in lengths:
            size += self.bytes(tokens)
        return size

    def growth(self, tokens: int) -> Size:
        """Bytes that the next token of a request of `tokens` tokens adds."""
        return self.token_bytes + sum([each for reach, each in self.windows if tokens < reach])

    def tokens(self, size: float, requests: int, most: int) -> int:
        """Tokens in total, at most `most`, with which `requests` equally long requests hold no more than `size` bytes.

        Returns a negative number if not even the states of the requests fit."""
        rest, at = size - self.request_bytes * requests, 0
        slope = self.token_bytes + sum([each for _, each in self.windows])
        for reach, each in self.windows:
            segment = (reach * requests - at) * slope
            if segment > rest:
                break
            rest, at, slope = rest - segment, reach * requests, slope - each
        if not slope:
            return most if rest >= 0 else -1
        return min(most, at + int(rest // slope))

    def last(self, tokens: int) -> Size:
        """Bytes, of those that a request holds, that change until its end: windows and states."""
        return self.bytes(tokens) - self.token_bytes * tokens


class KvForm(msgspec.Struct, frozen=True):
    """Form of the blocks of a model's KV cache. Two engines can read each other's blocks only if forms are equal."""

    tokens: int  # of a block; the fewest if groups of layers have blocks of several lengths
    bytes: int  # size of a block over the layers of a group
    layout: str  # groups, types, order and attention kernels, in the engine's words
    groups: int = 1  # groups of layers, each with blocks of its own

    def __str__(self) -> str:
        return f"{self.tokens} tokens in {self.bytes} bytes, {self.layout}"


def written_bytes(kept: Sequence[KeptLayers]) -> int:
    """Bytes of KV cache that a token writes, whether or not the layers keep the token for long."""
    return sum([each.layers * each.bytes for each in kept if each.kind is not LayerKind.STATE])


@lru_cache(maxsize=CURVES_MOST)
def curve_of(kept: tuple[KeptLayers, ...]) -> KvCurve[int]:
    """Curve of a model with the layers `kept`, with the padding of blocks of BLOCK_TOKENS tokens.

    A window holds part of a block more than its tokens, a token less than a block in the mean."""
    blocks = KvBlocks.of(kept, BLOCK_TOKENS)
    token_bytes = request_bytes = 0
    windows: dict[int, int] = {}
    for table in blocks.tables:
        each = -(-blocks.block_bytes // table.size)
        match table.kind:
            case LayerKind.FULL:
                token_bytes += each
            case LayerKind.STATE:
                request_bytes += blocks.block_bytes
            case LayerKind.CHUNK:
                windows[table.reach] = windows.get(table.reach, 0) + each
            case LayerKind.WINDOW:
                reach = table.reach + table.size - 1
                windows[reach] = windows.get(reach, 0) + each
    return KvCurve(token_bytes, request_bytes, tuple(sorted(windows.items())))


# ── whole blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Places of a request's block table, for a group of layers: a place for each `size` tokens."""

    kind: LayerKind
    size: int  # tokens of a block
    reach: int  # tokens of the window or of a chunk; 0 for other kinds

    def forgotten(self, computed: int) -> int:
        """Number of tokens, from the first on, that the layers never read again once `computed` are computed."""
        match self.kind:
            case LayerKind.FULL:
                return 0
            case LayerKind.WINDOW:
                return max(0, computed - self.reach + 1)
            case LayerKind.CHUNK:
                return computed // self.reach * self.reach
            case LayerKind.STATE:
                return max(0, computed - 1)

    def need(self, before: int, after: int) -> int:
        """Blocks that a request holds after the step that took the request from `before` to `after` tokens."""
        blocks = -(-after // self.size)
        if self.kind is LayerKind.STATE:
            return 1 + (before > 0 and -(-before // self.size) != blocks)
        return blocks - min(self.forgotten(before) // self.size, blocks)


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Blocks of a model: a block table for each group of layers, and blocks of one size for every group."""

    block_bytes: int
    tables: tuple[BlockTable, ...]

    @classmethod
    def of(cls, kept: Sequence[KeptLayers], block_tokens: int) -> KvBlocks:
        """Blocks that vLLM makes for the layers `kept`, if attention has blocks of `block_tokens` tokens.

        Layers that keep alike make up one group. Otherwise each group has as many layers as the smallest kind has, or
        as the largest, if the largest has less than 1.5 times as many: the blocks of all groups have one size, so the
        pages of a block do, too, and a layer with small pages gets more tokens a block."""
        if len(kept) == 1 or all(each.kind is LayerKind.FULL for each in kept):
            (kind,), (reach,) = {each.kind for each in kept}, {each.reach for each in kept}
            size = 1 if kind is LayerKind.STATE else block_tokens
            block_bytes = sum([each.layers * each.bytes for each in kept]) * size
            return cls(block_bytes, (BlockTable(kind, block_tokens, reach),))
        tokens = _tokens_beside_states(kept, block_tokens)
        pages = [each.bytes if each.kind is LayerKind.STATE else tokens * each.bytes for each in kept]
        page, counts = max(pages), [each.layers for each in kept]
        layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        tables: list[BlockTable] = []
        widest = 0
        for each, own in zip(kept, pages, strict=True):
            grows = each.kind is not LayerKind.STATE and page % own == 0  # otherwise the page is padded
            groups = -(-each.layers // layers)
            tables += [BlockTable(each.kind, tokens * (page // own if grows else 1), each.reach)] * groups
            widest = max(widest, -(-each.layers // groups))
        return cls(widest * page, tuple(tables))

    def held(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens, at least 1, holds after a step for its last token alone."""
        return sum([table.need(tokens - 1, tokens) for table in self.tables])

    def bytes(self, tokens: int) -> int:
        return self.held(tokens) * self.block_bytes

    def peak(self, tokens: int, piece: int) -> int:
        """Blocks that an engine must have for a request of `tokens` tokens, if a step computes `piece` tokens at most.

        While a step computes a piece of the prompt, a window or chunk holds the piece as well, and a state the next
        state. A window may begin in mid-block, as a chunk may, if chunks are no whole blocks."""
        most = 0
        for table in self.tables:
            match table.kind:
                case LayerKind.FULL:
                    most += -(-tokens // table.size)
                case LayerKind.STATE:
                    most += 2
                case LayerKind.CHUNK:
                    most += -(-min(tokens, table.reach + piece) // table.size) + (table.reach % table.size > 0)
                case LayerKind.WINDOW:
                    most += -(-min(tokens, table.reach - 1 + piece) // table.size) + 1
        return most


def _tokens_beside_states(kept: Sequence[KeptLayers], block_tokens: int) -> int:
    """Tokens of a block of attention: beside states, as many blocks together as hold a state."""
    state = max([each.bytes for each in kept if each.kind is LayerKind.STATE], default=0)
    token = max([each.bytes for each in kept if each.kind is LayerKind.FULL], default=0)
    return block_tokens * -(-state // (block_tokens * token)) if state and token else block_tokens
