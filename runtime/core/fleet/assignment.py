"""State machine that assigns models with limited replicas to the runtimes of a fleet. Pure.

The machine keeps no state that a successor could not learn anew: the bucket `places` says where models are wanted, and
the leases say where models are. A model that changes its place is hosted by its old and its new runtimes until the new
runtimes have loaded the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from runtime.core.device.request import ModelKey
from runtime.core.fleet.kvpr import MOVED_AGAIN_S, Candidate, DeviceRoom, demand, place
from runtime.core.fleet.placement import activate, changes, rounds
from store.contract.wire import EngineSpec, Lease, ModelState, Places, Residency, replace

SETTLED_S = 2.5  # after the first lease: by then every running runtime has sent its lease
PLAN_S = 10.0  # between two plans of moves
TAKEN = tuple(1 << power for power in range(13))  # how many times the devices' memory is given out: models take turns
RATE_LEAST = 1e-3  # tokens/s: a smaller mean counts as no demand
TBT_S = 0.1  # objective of a model without requests
TTFT_S = 10.0
CACHE_BYTES_S, FILE_BYTES_S = 10e9, 1e9  # guessed speed of loading weights; the load time is compared with TTFT_S


@dataclass(slots=True)
class Runtime:
    """A running runtime, by its last lease."""

    lease: Lease
    at: float  # when the lease was heard
    tokens_per_s: dict[str, float] = field(default_factory=dict)  # by model, a mean over MOVED_AGAIN_S

    def hear(self, lease: Lease, now: float) -> None:
        if lease.epoch != self.lease.epoch:
            self.tokens_per_s.clear()
        elif now > self.at:
            keep = math.exp(-(now - self.at) / MOVED_AGAIN_S)
            for key, state in lease.models.items():
                before = self.lease.models.get(key)
                made = max(0, state.tokens - before.tokens) if before else 0  # a new device process counts from zero
                rate = keep * self.tokens_per_s.get(key, 0.0) + (1 - keep) * made / (now - self.at)
                self.tokens_per_s[key] = rate if rate > RATE_LEAST else 0.0
        self.lease, self.at = lease, now


class Placing:
    """Places of models: is told of specs, places and leases, and decides on the contents of the bucket `places`."""

    def __init__(self) -> None:
        self._specs: dict[str, EngineSpec] = {}
        self._places: dict[str, Places] = {}  # with term 0; the terms are in `_terms`
        self._terms: dict[str, int] = {}
        self._moved_at: dict[str, float] = {}
        self._runtimes: dict[str, Runtime] = {}
        self._first_at = math.inf
        self._plan_at = -math.inf

    # ── told ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def spec_changed(self, key: str, spec: EngineSpec | None) -> None:
        if spec is None:
            self._specs.pop(key, None)
        else:
            self._specs[key] = spec

    def places_changed(self, key: str, places: Places | None) -> None:
        if places is None:
            self._places.pop(key, None)
            self._terms.pop(key, None)
        elif places.term >= self._terms.get(key, 0):
            self._places[key] = replace(places, term=0)
            self._terms[key] = places.term

    def hear(self, lease: Lease, now: float) -> None:
        self._first_at = min(self._first_at, now)
        known = self._runtimes.get(lease.runtime)
        if known is None:
            self._runtimes[lease.runtime] = Runtime(lease, now)
        else:
            known.hear(lease, now)

    def gone(self, runtime: str) -> None:
        self._runtimes.pop(runtime, None)

    # ── asked ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def places(self) -> dict[str, Places]:
        """Places of each model as last told by `places_changed`, with term 0."""
        return dict(self._places)

    def decide(self, now: float) -> dict[str, Places | None]:
        """Entries of the bucket `places` to write; None: entry to delete. Returns {} in the first SETTLED_S seconds.

        After each write, the caller must call `places_changed`."""
        if now - self._first_at < SETTLED_S:
            return {}
        names = sorted(id for id, runtime in self._runtimes.items() if not runtime.lease.draining)
        limited = [spec for _, spec in sorted(self._specs.items()) if spec.replicas]
        draft = {spec.key: self._places[spec.key] for spec in limited if spec.key in self._places}
        if names:
            for spec in limited:
                draft[spec.key] = self._settled(spec, draft, names)
            if now - self._plan_at >= PLAN_S:
                self._plan_at = now
                largest = max(self._bytes(name) for name in names)
                still = [spec for spec in limited if not draft[spec.key].leaving and spec.weight_bytes <= largest]
                self._plan(still, draft, names, now)
        keys = sorted({*draft, *self._places})
        return {key: draft.get(key) for key in keys if draft.get(key) != self._places.get(key)}

    def _settled(self, spec: EngineSpec, draft: dict[str, Places], names: list[str]) -> Places:
        """Places of the model with the wanted number of runtimes, and without runtimes that the model has left."""
        known = draft.get(spec.key) or Places(runtimes=[])
        copies = min(spec.replicas, len(names))
        wanted = [name for name in known.runtimes if name in names][:copies]
        if len(wanted) < copies:
            wanted += self._more(spec, wanted, copies - len(wanted), draft, names)
        left = {*known.runtimes, *known.leaving} - set(wanted)
        leaving = [name for name in sorted(left) if name in self._runtimes]
        if all(_loadable(self._state(name, spec.key)) for name in wanted):
            leaving = []
        return Places(runtimes=sorted(wanted), leaving=leaving)

    def _more(
        self, spec: EngineSpec, wanted: list[str], count: int, draft: dict[str, Places], names: list[str]
    ) -> list[str]:
        """Choose `count` more runtimes for the model, where the pressure on memory is least."""
        model = _whole(spec, count, self._demand(spec))
        waits = [self._wait_s(spec, name) for name in names]
        for taken in TAKEN:
            rooms = [self._room(name, draft, taken) for name in names]
            for number, name in enumerate(names):
                if name in wanted:
                    rooms[number] = DeviceRoom(0)
            if chosen := activate(model, rooms, waits, TTFT_S):
                return [names[number] for number in chosen]
        return [name for name in names if name not in wanted][:count]  # larger than any device: the runtime reports so

    def _plan(self, specs: list[EngineSpec], draft: dict[str, Places], names: list[str], now: float) -> None:
        """Enter the first round of the moves that spread the pressure better into `draft`."""
        models = [self._candidate(spec, draft[spec.key], names) for spec in specs]
        for taken in TAKEN:
            sizes = [self._bytes(name) * taken for name in names]
            free = list(sizes)
            for model in models:
                for device in model.devices:
                    free[device] -= model.part.weight_bytes
            placed = place(models, sizes, now)
            if all(placed.values()) and min(free) >= 0:
                break
        else:
            return
        for moves in rounds(changes(models, placed), free)[:1]:
            for move in moves:
                wanted = sorted(names[device] for device in placed[move.model])
                leaving = [name for name in draft[move.model].runtimes if name not in wanted]
                draft[move.model] = Places(runtimes=wanted, leaving=leaving)
                self._moved_at[move.model] = now

    # ── books ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _candidate(self, spec: EngineSpec, places: Places, names: list[str]) -> Candidate:
        devices = tuple(names.index(name) for name in places.runtimes)
        moved_at = self._moved_at.get(spec.key, -math.inf)
        return _whole(spec, len(devices), self._demand(spec), devices, moved_at)

    def _room(self, name: str, draft: dict[str, Places], taken: int) -> DeviceRoom:
        """Room of a runtime after placing every model wanted there, models without a limit included.

        Models too large for the runtime take no room. The memory counts `taken` times."""
        room = DeviceRoom(self._bytes(name) * taken)
        for key, spec in self._specs.items():
            if spec.weight_bytes > self._bytes(name):
                continue
            if not spec.replicas:
                room.add(_whole(spec, len(self._runtimes), self._demand(spec)).part)
            elif (places := draft.get(key)) and name in places.runtimes:
                room.add(_whole(spec, len(places.runtimes), self._demand(spec)).part)
        return room

    def _bytes(self, name: str) -> int:
        lease = self._runtimes[name].lease
        return lease.pages_total * lease.page_bytes

    def _state(self, name: str, key: str) -> ModelState | None:
        return self._runtimes[name].lease.models.get(key)

    def _demand(self, spec: EngineSpec) -> float:
        rate = sum(runtime.tokens_per_s.get(spec.key, 0.0) for runtime in self._runtimes.values())
        states = [runtime.lease.models.get(spec.key) for runtime in self._runtimes.values()]
        tbt_s = min((state.tbt_s for state in states if state and state.tbt_s), default=TBT_S)
        return demand(rate, spec.kv.bytes(spec.max_model_len) / spec.max_model_len, tbt_s)

    def _wait_s(self, spec: EngineSpec, name: str) -> float:
        """Seconds to load the model's weights on a runtime: from the host cache if a runtime of the host has loaded the
        model, else from files."""
        host = self._runtimes[name].lease.host_cache
        cached = any(
            runtime.lease.host_cache == host and _loadable(self._state(other, spec.key))
            for other, runtime in self._runtimes.items()
        )
        return spec.weight_bytes / (CACHE_BYTES_S if cached else FILE_BYTES_S)


def _whole(
    spec: EngineSpec, copies: int, demand: float, devices: tuple[int, ...] = (), moved_at: float = -math.inf
) -> Candidate:
    """Candidate for `copies` copies of a model; a copy is a part with its share of the demand and complete weights."""
    return Candidate(
        model=ModelKey(spec.key),
        demand=demand,
        weight_bytes=spec.weight_bytes * copies,
        kv_bytes_least=spec.kv.bytes(spec.max_model_len) * copies,
        move_s=spec.weight_bytes / FILE_BYTES_S,
        devices=devices,
        moved_at=moved_at,
        parts=copies,
    )


def _loadable(state: ModelState | None) -> bool:
    """Whether the model is resident, or could be at once."""
    return state is not None and state.residency in (Residency.RESIDENT, Residency.STAGED)
