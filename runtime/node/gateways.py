"""Gateways with streams at a node, now or earlier: frames sent to a gateway, and the silence allowed to a gateway."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import structlog
from msgspec import structs

from runtime.core.ledgers.replay_buffer import Ring
from runtime.migration.host import OpenStream
from store.bus import Bus, BusError
from store.contract.silence import Silence
from store.contract.wire import Delta

log = structlog.get_logger()

SILENCE_S = 2.0  # allowed to a gateway without false losses; then streams of the gateway are cancelled
CATCH_UP_S = 2.0  # longest wait until the node has read the bus


@dataclass(slots=True)
class GatewayPeer:
    """A gateway with streams at this node, now or earlier."""

    silence: Silence
    ring: Ring = field(default_factory=Ring)
    streams: dict[int, OpenStream] = field(default_factory=dict)

    def close(self, numbers: Iterable[int]) -> list[int]:
        """Close the streams with the numbers `numbers`; returns the numbers of streams that were open."""
        closed = [number for number in numbers if number in self.streams]
        for number in closed:
            self.streams.pop(number).end()
        return closed


class Gateways(dict[str, GatewayPeer]):
    """Gateways by id. A gateway gets a new id at each start."""

    def __init__(self) -> None:
        super().__init__()
        self.false_losses = 0  # of gateways: taken for dead, then heard again
        # Streams that another gateway, or another stream, took up: by the name at the device, the present name.
        self._names: dict[tuple[str, int], tuple[str, int]] = {}

    def known(self, id: str) -> GatewayPeer:
        """The gateway with the id `id`; an unknown gateway is added, and counts as heard now."""
        return self.setdefault(id, GatewayPeer(Silence(SILENCE_S, time.monotonic())))

    def heard(self, id: str) -> None:
        """Note a sign of life of a known gateway."""
        gateway, now = self.get(id), time.monotonic()
        if gateway is not None and gateway.silence.heard(now):
            self.false_losses += 1
            log.warning("node.gateway_lives", gateway=id, patience_s=round(gateway.silence.limit_s(now), 1))

    def wanted(self, id: str, number: int) -> OpenStream | None:
        """The stream `number` of the gateway `id`; None if the stream is not open at the node, or was cancelled."""
        stream = self[id].streams.get(number) if id in self else None
        return stream if stream is not None and stream.left_at is None else None

    def movable(self, model: str) -> list[tuple[str, int]]:
        """Gateway id and number of every movable stream of `model`; with an empty `model`, of any model.

        Streams of the lowest priority come first; of equal priority, the streams with the least patience. Next come
        streams with a token, because an engine gives no stream away before the first token; then the shortest stream.
        Streams that move or were cancelled are left out."""
        found = [
            (*_leaves_first(stream), id, number)
            for id, gateway in self.items()
            for number, stream in gateway.streams.items()
            if not stream.moving
            and stream.left_at is None
            and model in ("", stream.run.model)
            and not stream.taken_up(id, number)
        ]
        return [(gateway, number) for *_, gateway, number in sorted(found)]

    # ── streams taken up ──────────────────────────────────────────────────────────────────────────────────────────────

    def take_up(self, old: tuple[str, int], new: tuple[str, int]) -> OpenStream | None:
        """Give the stream `old` (gateway and number) the name `new`. Returns the stream; None if it is not open."""
        stream = self[old[0]].streams.pop(old[1], None) if old[0] in self else None
        if stream is not None:
            self.known(new[0]).streams[new[1]] = stream
            self._names[stream.run.gateway, stream.run.stream] = new
        return stream

    def named(self, made: Mapping[str, list[Delta]]) -> Iterator[tuple[str, list[Delta]]]:
        """Yield deltas by gateway, from deltas by the names at the device."""
        if not self._names:
            yield from made.items()
            return
        for gateway, deltas in made.items():
            yield gateway, [delta for delta in deltas if (gateway, delta.stream) not in self._names]
            for delta in deltas:
                if name := self._names.get((gateway, delta.stream)):
                    yield name[0], [structs.replace(delta, stream=name[1])]

    def forget_names(self) -> None:
        """Forget the names of streams that have ended."""
        self._names = {
            old: new for old, new in self._names.items() if new[0] in self and new[1] in self[new[0]].streams
        }

    # ── sums ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def streams(self) -> list[OpenStream]:
        return [stream for gateway in self.values() for stream in gateway.streams.values()]

    @property
    def open_streams(self) -> int:
        return sum(len(gateway.streams) for gateway in self.values())

    def streams_of(self, tenant: str) -> int:
        """Number of the tenant's streams open at the node."""
        return sum([stream.run.tenant == tenant for stream in self.streams])

    @property
    def wait_for_device(self) -> bool:
        """Whether any stream waits for the device: the device hears of a request when the grammar is compiled."""
        return any(stream.compiling is None for stream in self.streams)

    def excuse(self, now: float) -> None:
        """Begin the silence of every gateway anew: no gateway could be heard until now."""
        for gateway in self.values():
            gateway.silence.excuse(now)

    def late(self, late_s: float, now: float) -> None:
        """Take `late_s` seconds, by which the node's loop was late, off the silence of every gateway."""
        for gateway in self.values():
            gateway.silence.late(late_s, now)

    def silent(self, now: float) -> list[str]:
        """Ids of gateways with open streams, silent for too long. `now`: monotonic seconds."""
        return [id for id, gateway in self.items() if gateway.streams and gateway.silence.too_long(now)]

    async def dead(self, bus: Bus) -> list[str]:
        """Ids of gateways to be taken for dead: silent for too long, and every message on the bus was read.

        Returns no id if the bus can't be read within CATCH_UP_S seconds: the silence may be the bus's."""
        if not self.silent(time.monotonic()):
            return []
        try:
            await bus.catch_up(CATCH_UP_S)
        except BusError as error:
            log.warning("node.bus_not_read", error=str(error))
            return []
        return self.silent(time.monotonic())


def _leaves_first(stream: OpenStream) -> tuple[int, float, bool, int]:
    run = stream.run
    return run.priority, run.patience_s, stream.at == 0, run.prompt_tokens + stream.at
