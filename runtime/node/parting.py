"""Cancelled streams, until the device has said how far each stream came.

A request left by its client is charged for the tokens computed, and the device knows the number. The node therefore
keeps a cancelled stream until the device's last delta of the stream, with `Finish.ABORT`, is on the way to the gateway.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from runtime.migration.host import OpenStream
from store.contract.wire import Delta, Finish

ANSWER_S = 60.0  # a device answers between two steps, and not while the device builds an engine


def cancelled(streams: Mapping[int, OpenStream], numbers: Iterable[int], device: bool) -> tuple[list[int], list[Delta]]:
    """Mark streams as cancelled.

    Args:
        streams: the streams of a gateway, by number.
        numbers: streams to cancel. Unknown numbers and streams cancelled earlier are passed over.
        device: whether the device process is up.

    Returns: the numbers of streams for the device to stop, and the last deltas of streams unknown to the device. The
    device answers with the last deltas of the streams that the device stops."""
    now = time.monotonic()
    fresh = [number for number in numbers if number in streams and streams[number].left_at is None]
    for number in fresh:
        streams[number].left_at = now
    there = [number for number in fresh if device and streams[number].compiling is None]
    return there, last_words(streams, [number for number in fresh if number not in there])


def last_words(streams: Mapping[int, OpenStream], numbers: Iterable[int]) -> list[Delta]:
    """The last deltas of streams of a silent device, with as many tokens as the node has heard of."""
    return [Delta(number, [], streams[number].at, Finish.ABORT) for number in numbers]


def unanswered(streams: Mapping[int, OpenStream], now: float) -> list[Delta]:
    """The last deltas of streams that were cancelled more than ANSWER_S ago and had no answer from the device."""
    silent = [n for n, stream in streams.items() if stream.left_at is not None and now - stream.left_at > ANSWER_S]
    return last_words(streams, silent)
