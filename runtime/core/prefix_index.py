"""Index of KV blocks of ended requests that a device process keeps in the host cache, below the device. Pure.

A chain is the blocks of a conversation, from the beginning of its prompt on. A block serves only together with every
block in front of the block, so the tail of a chain goes before its head. Each tenant is sure of an equal part of the
room: the tenant with the most bytes loses blocks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WEIGHT = 0.2  # part of the last observation in a learnt rate
SHORTEST = 32  # tokens: shorter steps tell little of the time that a prompt takes


@dataclass(slots=True, eq=False)
class KeptBlock:
    """A block of an ended request in the host cache, or on the way there."""

    space: int  # number of the engine's space
    key: bytes  # vLLM's hash of the block and of every block in front
    tenant: str  # the tenant's salt
    host: int  # number of the block in the host cache
    bytes: int
    used_at: float
    checksum: int = 0
    ready: bool = False  # the bytes are there, with their checksum
    copies: int = 0  # copies from or to the block that are under way
    gone: bool = False  # the index has forgotten the block


Place = tuple[int, bytes]  # space and key of a block


class PrefixIndex:
    """Kept blocks of every engine of a device process. `ttl_s`: seconds after the last use until a block goes."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._blocks: dict[Place, KeptBlock] = {}
        self._orders: dict[str, dict[Place, KeptBlock]] = {}  # by tenant; the first block goes first
        self._bytes: dict[str, int] = {}  # by tenant

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def held_bytes(self) -> int:
        return sum(self._bytes.values())

    def get(self, space: int, key: bytes) -> KeptBlock | None:
        return self._blocks.get((space, key))

    def add(self, block: KeptBlock) -> None:
        """Add a block, to go after every block of its tenant."""
        at = block.space, block.key
        assert at not in self._blocks, "a block is kept once"
        self._blocks[at] = self._orders.setdefault(block.tenant, {})[at] = block
        self._bytes[block.tenant] = self._bytes.get(block.tenant, 0) + block.bytes

    def use(self, chain: Sequence[KeptBlock], now: float) -> None:
        """Note a use of blocks, in the order of their chain: the last block is to go first among the blocks."""
        for block in reversed(chain):
            at, order = (block.space, block.key), self._orders[block.tenant]
            order[at] = order.pop(at)
            block.used_at = now

    def remove(self, block: KeptBlock) -> None:
        at = block.space, block.key
        block.gone = True
        del self._blocks[at], self._orders[block.tenant][at]
        self._bytes[block.tenant] -= block.bytes
        if not self._orders[block.tenant]:
            del self._orders[block.tenant], self._bytes[block.tenant]

    def of(self, space: int) -> list[KeptBlock]:
        return [block for block in self._blocks.values() if block.space == space]

    def victims(self, size: int) -> list[KeptBlock]:
        """The next blocks to go, `size` bytes or a little more; fewer if no more can go. Blocks being copied stay."""
        held = dict(self._bytes)
        orders = {tenant: iter([b for b in order.values() if not b.copies]) for tenant, order in self._orders.items()}
        found: list[KeptBlock] = []
        while size > 0 and held:
            tenant = max(held, key=lambda tenant: held[tenant])
            if (block := next(orders[tenant], None)) is None:
                del held[tenant]
                continue
            found.append(block)
            held[tenant] -= block.bytes
            size -= block.bytes
        return found

    def expired(self, now: float) -> list[KeptBlock]:
        """Blocks used last more than `ttl_s` seconds ago, without blocks being copied."""
        found: list[KeptBlock] = []
        for order in self._orders.values():
            for block in order.values():
                if now - block.used_at < self._ttl_s:
                    break
                if not block.copies:
                    found.append(block)
        return found


class BringingCosts:
    """Time to compute the tokens of prompts, and time to bring blocks back: both are learnt."""

    def __init__(self) -> None:
        self._step_s = float("inf")  # the shortest step: what a step takes however few tokens are computed
        self._token_s = 0.0  # 0: not known yet
        self._byte_s = 0.0

    def computed(self, tokens: int, took_s: float) -> None:
        """Learn from a step that computed `tokens` tokens."""
        self._step_s = min(self._step_s, took_s)
        if tokens >= SHORTEST:
            self._token_s = _learnt(self._token_s, (took_s - self._step_s) / tokens)

    def brought(self, size: int, took_s: float) -> None:
        """Learn from blocks of `size` bytes that were brought back."""
        self._byte_s = _learnt(self._byte_s, took_s / size)

    def pays(self, tokens: int, size: int) -> bool:
        """Whether bringing back `size` bytes is cheaper than to compute `tokens` tokens; True if not known yet.

        A refusal lowers the learnt rate a little, so that a single slow copy is tried again some day."""
        if not self._token_s or size * self._byte_s <= tokens * self._token_s:
            return True
        self._byte_s *= 1 - WEIGHT / 2
        return False


def _learnt(rate: float, seen: float) -> float:
    return seen if not rate else rate + WEIGHT * (seen - rate)
