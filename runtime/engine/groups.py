"""Groups of layers with a block table each: how many KV blocks a request needs, and which of the blocks still matter.

vLLM puts layers that forget alike into a group. The groups share one pool of block numbers, and a block belongs to one
group at a time. A group's block table has a place for each `size` tokens of the request; places of forgotten tokens
hold the null block. What a group forgets depends on its kind:

    FULL    nothing, as attention to every token does
    WINDOW  tokens further back than the window
    CHUNK   tokens of earlier chunks, as local attention within chunks does
    STATE   everything but the last token's state. When a step begins a block, the state is copied from the block
            before, and the block before is held until the step after
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)
from vllm.v1.worker.utils import AttentionGroup

from runtime.core.engine import EngineError
from store.contract.kv_curve import BlockTable, LayerKind

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # vLLM 0.33
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups  # vLLM 0.32

KINDS: dict[type[KVCacheSpec], LayerKind] = {  # exact types: a subclass may keep its blocks otherwise
    FullAttentionSpec: LayerKind.FULL,
    MLAAttentionSpec: LayerKind.FULL,
    SlidingWindowSpec: LayerKind.WINDOW,
    ChunkedLocalAttentionSpec: LayerKind.CHUNK,
    MambaSpec: LayerKind.STATE,
}


@dataclass(frozen=True, slots=True)
class LayerGroup(BlockTable):
    """Layers that share a block table."""

    most: int  # blocks that a request of full length holds at most, at any time
    layers: int

    def live(self, computed: int) -> range:
        """Places of the block table that matter once `computed` tokens are computed."""
        return range(self.forgotten(computed) // self.size, -(-computed // self.size))

    def held(self, table: Sequence[KVCacheBlock]) -> int:
        """Blocks that a request with this block table holds; null blocks do not count."""
        match self.kind:
            case LayerKind.FULL:
                return len(table)
            case LayerKind.STATE:
                return sum(not block.is_null for block in table)
            case _:  # null blocks come first
                return len(table) - bisect_left(table, True, key=lambda block: not block.is_null)

    def __str__(self) -> str:
        reach = f" of {self.reach}" if self.reach else ""
        return f"{self.layers} {self.kind.value}{reach} by {self.size}"


class Groups:
    """Groups of a model, in vLLM's order.

    The blocks of a request on the host, parked or moving, lie in one order on all engines: first blocks of groups that
    forget nothing, by a block's last token, then blocks of other groups. So the full blocks of a request are always the
    first blocks, however far the request is."""

    def __init__(self, groups: Sequence[LayerGroup]) -> None:
        self.groups = tuple(groups)
        self.keeping = [(number, group) for number, group in enumerate(groups) if group.kind is LayerKind.FULL]
        self.forgetting = [(number, group) for number, group in enumerate(groups) if group.kind is not LayerKind.FULL]
        self.keeping_sizes = [group.size for _, group in self.keeping]

    @classmethod
    def of(cls, config: KVCacheConfig, vllm_config: VllmConfig) -> Groups:
        """The groups of vLLM's plan for a model: none for an encoder. Raises EngineError as `check_kinds` does."""
        specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
        check_kinds(specs, pools(vllm_config))
        return cls([_group(group, vllm_config) for group in config.kv_cache_groups])

    @property
    def block_tokens(self) -> int:
        """The fewest tokens of a block."""
        return min((group.size for group in self.groups), default=1)

    @property
    def most(self) -> int:
        """Blocks that a request of full length holds at most, at any time."""
        return sum(group.most for group in self.groups)

    @property
    def plain(self) -> bool:
        """Whether the model has a single group, and the group forgets nothing."""
        return len(self.groups) == 1 and not self.forgetting

    def live(self, computed: int) -> list[tuple[int, int]]:
        """Places that matter once `computed` tokens are computed, as (group, place), in the order of the host."""
        places = [(number, place) for number, group in self.keeping for place in group.live(computed)]
        if len(self.keeping) > 1:
            places.sort(key=lambda at: ((at[1] + 1) * self.groups[at[0]].size, at[0]))
        return places + [(number, place) for number, group in self.forgetting for place in group.live(computed)]

    def settled(self, computed: int) -> int:
        """Number of blocks, from the first of `live` on, that never change again."""
        return sum(computed // size for size in self.keeping_sizes)

    def need(self, before: int, after: int) -> int:
        """Blocks that a request holds after the step that took the request from `before` to `after` tokens."""
        blocks = 0
        for size in self.keeping_sizes:
            blocks += -(-after // size)
        for _, group in self.forgetting:
            blocks += group.need(before, after)
        return blocks

    def admission(self, tokens: int) -> int:
        """Blocks that must be free for vLLM to begin a request of `tokens` tokens."""
        return sum(min(-(-tokens // group.size), group.most) for group in self.groups)

    def held(self, tables: Sequence[Sequence[KVCacheBlock]]) -> int:
        """Blocks that a request with these block tables, a table for each group, holds."""
        return sum(group.held(table) for group, table in zip(self.groups, tables, strict=True))

    def __str__(self) -> str:
        return ", ".join(map(str, self.groups))


def _group(group: KVCacheGroupSpec, config: VllmConfig) -> LayerGroup:
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    reach = 0
    if type(spec) is SlidingWindowSpec:
        reach = spec.sliding_window + spec.extra_retained_tokens
    elif type(spec) is ChunkedLocalAttentionSpec:
        reach = spec.attention_chunk_size
    most = -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
    return LayerGroup(KINDS[type(spec)], spec.block_size, reach, most, len(group.layer_names))


def pools(config: VllmConfig) -> bool:
    """Whether the model answers with vectors."""
    return config.model_config.runner_type == "pooling"


def check_kinds(specs: Mapping[str, KVCacheSpec], pools: bool = False) -> None:
    """Refuse layers that keep something else than whole blocks of the pool.

    Args:
        specs: vLLM's specs by name of the layer; none for an encoder.
        pools: whether the model answers with vectors. An encoder makes vectors, and no text.

    Raises EngineError with the layer and the kind."""
    if not specs and not pools:
        raise EngineError("no layer of the model keeps a KV cache: the model makes no text token by token")
    for name, spec in ((name, inner) for name, outer in specs.items() for inner in iter_layer_specs(outer)):
        if type(spec) not in KINDS:
            kind = type(spec).__name__.removesuffix("Spec")
            raise EngineError(f"layer {name} keeps a {kind}: only {_served()} can be parked and moved")
        if isinstance(spec, MambaSpec) and spec.num_speculative_blocks:
            raise EngineError(f"layer {name} keeps states for speculation: serve the model without speculation")
        if isinstance(spec, MambaSpec) and spec.mamba_cache_mode not in ("none", "align"):
            raise EngineError(f"layer {name} keeps a state in each block: mamba_cache_mode must be align or none")


def _served() -> str:
    return ", ".join(kind.__name__.removesuffix("Spec") for kind in KINDS)


def bytes_for_batch(specs: Mapping[str, KVCacheSpec], config: VllmConfig) -> int:
    """Bytes for the null block and for as many requests of full length as a batch takes."""
    planned = get_kv_cache_groups(config, dict(specs))
    block_bytes = max(sum(_page_bytes(group, name) for name in group.layer_names) for group in planned)
    most = sum(_group(group, config).most for group in planned)
    return block_bytes * (1 + config.scheduler_config.max_num_seqs * most)


def _page_bytes(group: KVCacheGroupSpec, layer: str) -> int:
    spec = group.kv_cache_spec
    return (spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec).page_size_bytes


def layout(groups: Groups, scheduler: Scheduler, runner: Any) -> str:
    """Layout of a block, as text: the groups, and for each group the kernels, which order a block to suit the
    instructions of the processor, and the types of numbers. Empty for an encoder.

    Args:
        groups: the model's groups.
        scheduler: vLLM's scheduler of the model's engine.
        runner: vLLM's model runner of the model's engine."""
    if not groups.groups:
        return ""
    order = scheduler.kv_cache_config.kv_cache_layout or ""
    parts = [part for parts in runner.attn_groups for part in parts]
    kernels = dict.fromkeys(_kernels(part) for part in parts)
    return "; ".join(filter(None, (*kernels, order, str(groups))))


def _kernels(part: AttentionGroup) -> str:
    spec = part.kv_cache_spec
    types = spec.dtypes if isinstance(spec, MambaSpec) else (getattr(spec, "dtype", ""),)
    isa = getattr(part.get_metadata_builder(), "isa", "")
    return " ".join(filter(None, (part.backend.get_name(), isa, *(str(t).removeprefix("torch.") for t in types))))


class ZeroedKvCache(KVCacheConfig):
    """vLLM's plan of a KV cache whose new blocks are filled with zeros in the step that uses the blocks first."""

    @classmethod
    def of(cls, config: KVCacheConfig) -> ZeroedKvCache:
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


def together(config: KVCacheConfig) -> int:
    """Change vLLM's plan so that all layers of a block lie together. Returns the bytes of a block.

    Groups overlay each other: a block begins with the page of its group's first layer, whichever the group. Blocks of
    narrower groups leave the end of the block unused."""
    size = config.kv_cache_tensors[0].size // config.num_blocks
    used = [0] * len(config.kv_cache_groups)
    for tensor in config.kv_cache_tensors:
        number = next(i for i, group in enumerate(config.kv_cache_groups) if tensor.layers[0] in group.layer_names)
        page_bytes = min(tensor.layer_stride, tensor.block_stride)
        tensor.offset, tensor.layer_stride, tensor.block_stride = used[number], page_bytes, size
        used[number] += page_bytes * len(tensor.layers)
    assert max(used) <= size, f"a block of {size} bytes is too small for layers of {max(used)} bytes"
    return size


def latent(config: KVCacheConfig) -> bool:
    """Whether every layer keeps latent vectors: kernels of such layers for CPUs take pages without gaps alone."""
    specs = [spec for group in config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    return all(isinstance(spec, MLAAttentionSpec) for spec in specs)


def without_gaps(config: KVCacheConfig) -> int:
    """Change a plan made by `together` so that the pages of a layer have no gaps. Returns the pages of a block.

    No byte moves. Each layer is shown all pages of the region from the layer's first page on, and finds its page of
    block b at number b × the pages of a block. Raises EngineError if pages have several sizes."""
    block_bytes, blocks = config.kv_cache_tensors[0].block_stride, config.num_blocks
    pages = {tensor.layer_stride for tensor in config.kv_cache_tensors}
    page_bytes = min(pages)
    if len(pages) > 1 or block_bytes % page_bytes:
        raise EngineError(f"layers keep pages of {sorted(pages)} bytes in a block of {block_bytes}: one size is served")
    for tensor in config.kv_cache_tensors:
        tensor.block_stride = page_bytes
    config.num_blocks = (blocks - 1) * (block_bytes // page_bytes) + 1
    return block_bytes // page_bytes
