"""Models and turns as turn policies and decisions on pages see them: to be read, never written. Pure.

Views list what decisions may read. A `Model` is a `ModelView`, a `Turn` is a `TurnView`. Views are only types: mypy
checks the decisions, and views cost nothing while a device runs. In a simulator compiled by mypyc, `ModelView` is
`Model` itself and `TurnView` is `Turn`."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Protocol

from runtime.core.device.idle import IdleThreshold
from runtime.core.device.model import Phase
from runtime.core.device.request import ModelKey, Request, RequestId
from runtime.core.engine import Held
from runtime.core.ledgers.estimate import CostEstimate
from store.contract.kv_curve import KvCurve
from store.contract.wire import EngineSpec


class QueuesView(Protocol):
    """Requests of a model; `Queues` explains the names."""

    @property
    def waiting(self) -> Mapping[RequestId, Request]: ...

    @property
    def running(self) -> Mapping[RequestId, Request]: ...

    @property
    def context(self) -> int: ...

    @property
    def prompts(self) -> int: ...

    @property
    def ttft_s(self) -> float: ...

    @property
    def idle(self) -> IdleThreshold: ...


class DuesView(Protocol):
    """What is due of a model; `Dues` explains the names."""

    @property
    def running_at(self) -> float: ...

    @property
    def hopeful(self) -> int: ...

    @property
    def stake_s(self) -> float: ...

    @property
    def pace_s(self) -> float: ...

    @property
    def starves_at(self) -> float: ...

    @property
    def high_at(self) -> float: ...


class DeadlinesView(Protocol):
    """Dues of a model, as of the last call of `next_due`."""

    @property
    def dues(self) -> DuesView: ...

    @property
    def within(self) -> DuesView: ...


class PageDemandView(Protocol):
    """Pages that a model needs; `PageDemand` explains the names."""

    @property
    def weights_pages(self) -> int: ...

    @property
    def cramped(self) -> bool: ...

    @property
    def fresh(self) -> bool: ...


class LoadRecordView(Protocol):
    """Ways of a model to the device; `LoadRecord` explains the names."""

    @property
    def load_s(self) -> float: ...

    @property
    def came_at(self) -> float: ...


class TurnRecordView(Protocol):
    """Turns of a model; `TurnRecord` explains the names."""

    @property
    def turn_no(self) -> int: ...


class FairSharesView(Protocol):
    """Tenants' shares of a device; `FairShares` explains the names."""

    @property
    def pool_pages(self) -> int: ...

    @property
    def over(self) -> Set[str]: ...

    def part_over(self) -> float: ...


class TurnView(Protocol):
    """The turn under way; `Turn` explains the names."""

    @property
    def holder(self) -> ModelKey: ...

    @property
    def began_at(self) -> float: ...

    @property
    def steps(self) -> int: ...


class ModelView(Protocol):
    """A model on a device; `Model` explains the names."""

    @property
    def spec(self) -> EngineSpec: ...

    @property
    def costs(self) -> CostEstimate: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def key(self) -> ModelKey: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def used_at(self) -> float: ...

    @property
    def shares(self) -> FairSharesView: ...

    @property
    def queues(self) -> QueuesView: ...

    @property
    def deadlines(self) -> DeadlinesView: ...

    @property
    def demand(self) -> PageDemandView: ...

    @property
    def loads(self) -> LoadRecordView: ...

    @property
    def record(self) -> TurnRecordView: ...

    @property
    def has_requests(self) -> bool: ...

    @property
    def works(self) -> bool: ...

    @property
    def can_step(self) -> bool: ...

    @property
    def needy(self) -> bool: ...

    def next_due(self, now: float) -> float: ...

    def next_due_within(self, now: float) -> float: ...

    @property
    def kv(self) -> KvCurve[int]: ...

    def kv_pages(self, kv_bytes: int) -> int: ...

    def kv_wanted(self, held: Held, room_pages: float) -> int: ...

    def room_over(self, room_pages: float) -> int: ...

    def kv_needed(self, held: Held, total: int, room_pages: float) -> int: ...

    def short(self, held: Held, total: int, room_pages: float) -> int: ...
