"""The device process's work, in shared memory that outlives the process: the model of a step, and since when.

After the process died, the memory names the model stepped last. During a hang, the memory tells how long the step
takes. During a build the device answers no command; the memory names the model and tells the bytes of weights read.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass

import msgspec

from store.contract.wire import ModelState, Residency

_BYTES = 6145
_BEGAN = struct.Struct("<d")  # begin of a step or build, on the monotonic clock shared by processes; 0: none
_KEY = struct.Struct("<H")  # bytes of the model's key; the key follows
_READING = struct.Struct("<QQd")  # bytes read, bytes of all files (0: no files are read), began when; a key follows
_STEP_AT, _READING_AT, _BUILD_AT, _AROUND_AT = 0, 2048, 4096, 6144


@dataclass(frozen=True)
class WeightReading:
    """Weights of a model being read from files."""

    model: str
    read_bytes: int
    files_bytes: int
    since: float  # on the machine's monotonic clock


class Stepping:
    """Three cells in shared memory, for a step, a build and a reading: the device process writes, the node reads."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _BYTES)
        self._model = ""

    @staticmethod
    def create() -> int:
        """Make a file in memory for the cells. Returns the file descriptor, for the caller to close."""
        fd = os.memfd_create("staccato-stepping")
        os.ftruncate(fd, _BYTES)
        return fd

    def begin(self, model: str, now: float) -> None:
        if model != self._model:
            self._write_key(_STEP_AT + _BEGAN.size, model)
            self._model = model
        _BEGAN.pack_into(self._map, _STEP_AT, now)

    def end(self) -> None:
        _BEGAN.pack_into(self._map, _STEP_AT, 0.0)

    def under_way(self) -> tuple[str, float] | None:
        """The model in a step, and when the step began; None between steps."""
        return self._since(_STEP_AT)

    def begin_build(self, model: str, now: float, around_image: bool = False) -> None:
        """Note the begin of a slice of a build; `around_image`: files are read only if the image is gone."""
        self._map[_AROUND_AT] = around_image
        self._write_key(_BUILD_AT + _BEGAN.size, model)
        _BEGAN.pack_into(self._map, _BUILD_AT, now)

    def end_build(self, over: bool = True) -> None:
        """Note the end of a slice of a build; `over`: the build has ended, and reads no further weights."""
        _BEGAN.pack_into(self._map, _BUILD_AT, 0.0)
        if over:
            _READING.pack_into(self._map, _READING_AT, 0, 0, 0.0)

    @property
    def building(self) -> tuple[str, float] | None:
        """The model in a build, and when the build began; None if no engine is being built."""
        return self._since(_BUILD_AT)

    @property
    def around_image(self) -> bool:
        """Whether the build under way is a build around an image."""
        return bool(self._map[_AROUND_AT])

    def read(self, model: str, since: float, read_bytes: int, files_bytes: int) -> None:
        """Note that `read_bytes` of a model's `files_bytes` have been read since the time `since`."""
        if not self.reading or self.reading.model != model:
            _READING.pack_into(self._map, _READING_AT, 0, 0, 0.0)
            self._write_key(_READING_AT + _READING.size, model)
        _READING.pack_into(self._map, _READING_AT, read_bytes, files_bytes, since)

    @property
    def reading(self) -> WeightReading | None:
        read_bytes, files_bytes, since = _READING.unpack_from(self._map, _READING_AT)
        return (
            WeightReading(self._key(_READING_AT + _READING.size), read_bytes, files_bytes, since)
            if files_bytes
            else None
        )

    def clear(self) -> None:
        """Clear the cells of a device process that has ended."""
        self.end()
        self.end_build()

    def shown_in(
        self, models: Mapping[str, ModelState], leaving: Container[str], imaging: Stepping | None = None
    ) -> dict[str, ModelState]:
        """States of models to show: the device's last states, without the models `leaving`.

        The state of a model being loaded from files gets the bytes read by now, by the device or by the process that
        makes the model's image, which writes into the cells of `imaging`."""
        shown = {key: state for key, state in models.items() if key not in leaving}
        reading = (imaging and imaging.reading) or self.reading
        if reading and (state := shown.get(reading.model)) and state.residency is Residency.LOADING:
            shown[reading.model] = msgspec.structs.replace(
                state,
                read_bytes=min(reading.read_bytes, reading.files_bytes),
                files_bytes=reading.files_bytes,
                reading_s=round(time.monotonic() - reading.since, 3),
            )
        return shown

    def _since(self, at: int) -> tuple[str, float] | None:
        (began,) = _BEGAN.unpack_from(self._map, at)
        return (self._key(at + _BEGAN.size), float(began)) if began else None

    def _write_key(self, at: int, model: str) -> None:
        key = model.encode()
        _KEY.pack_into(self._map, at, len(key))
        self._map[at + _KEY.size : at + _KEY.size + len(key)] = key

    def _key(self, at: int) -> str:
        (length,) = _KEY.unpack_from(self._map, at)
        return self._map[at + _KEY.size : at + _KEY.size + length].decode()


class Watchdog:
    """Detects a device that hangs: in a step, in a build, or anywhere while a request waits for the device.

    Time in which the watching process itself did not run does not count as silence."""

    def __init__(self, stepping: Stepping, hang_s: float, build_hang_s: float) -> None:
        self.period_s = min(1.0, hang_s / 4)  # between two looks
        self._stepping, self._hang_s, self._build_hang_s = stepping, hang_s, build_hang_s
        self._silent_s = 0.0
        self._build: tuple[tuple[str, float] | None, WeightReading | None] = (None, None)  # seen at the last look
        self._build_still_s = 0.0  # time since build or reading last changed

    def heard(self) -> None:
        """Note a message of the device."""
        self._silent_s = 0.0

    def look(self, waited_for: bool, now: float) -> str | None:
        """Look at the device, every `period_s`. Returns the reason to end a hanging device, else None.

        `waited_for`: requests wait for the device. A device with requests sends a message every second, unless hung."""
        step, build = self._stepping.under_way(), self._stepping.building
        self._silent_s = self._silent_s + self.period_s if waited_for and not build else 0.0
        seen = (build, self._stepping.reading)
        self._build_still_s = self._build_still_s + self.period_s if build and seen == self._build else 0.0
        self._build = seen
        reads = not self._stepping.around_image or seen[1] is not None
        build_hang_s = self._build_hang_s if reads else self._hang_s
        if build and self._build_still_s > build_hang_s:
            return f"the build of {build[0]} has come no further for {build_hang_s:g} s"
        if step and now - step[1] > self._hang_s:
            return f"a step of {step[0]} takes more than {self._hang_s:g} s"
        if self._silent_s > self._hang_s:
            return f"it has said nothing for {self._hang_s:g} s"
        return None
