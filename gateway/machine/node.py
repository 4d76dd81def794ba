"""`staccato node`: the runtimes of this machine in one process tree, without a bus or a database of their own.

A runtime has its share of the GPUs, and all runtimes share the host cache, the disk cache and the fork server. A
runtime that dies or gives no sign of life is started again; a runtime that does not get well costs its GPU and nothing
else.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config import Settings
from gateway.machine.processes import StartError, locked, orders_of, signals, start_fork_server
from gateway.machine.runtimes import MachineRuntimes, host_cache
from gateway.ops import gpus
from gateway.ops.supervise import Child, Say, Tier, Tree, unfailing
from gateway.ops.troubles import Troubles
from store.contract.joining.proofs import RUNTIME_ID
from store.settings import PREFIX, SettingsError
from store.tasks import ended
from store.telemetry import observe, signs

RETRY_S = 60.0  # pause after a runtime that did not get well
LOOK_PERIOD_S = 2.0  # between two looks for runtimes that hang
SILENT_S = 30.0  # silence after which a runtime that gave signs of life is ended
NUMBER = "{n}"  # in the path of a file, stands for the number of the runtime


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


class NodeSettings(BaseSettings):
    """Settings of a node alone; the others are `gateway.config.Settings`, and settings of runtimes are passed on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    node_id: str = Field(default_factory=_host_name)  # runtimes are NODE_ID-r1, NODE_ID-r2, ...
    # Files of the runtimes, with {n} in the place of a runtime's number; without {n}, for a node with one runtime.
    nats_credentials: Path | None = None
    join_token_file: Path | None = None
    transport_port: int = Field(0, ge=0, le=65535)  # of the first runtime; the next runtime has the next port; 0: any

    def check(self, runtimes: int) -> None:
        """Raise SettingsError if the settings do not fit a node of so many runtimes."""
        if runtimes < 1:
            raise SettingsError(f"{PREFIX}RUNTIMES={runtimes}: a node has at least 1 runtime")
        last = self.runtime_ids(runtimes)[-1]
        if not RUNTIME_ID.fullmatch(last):
            raise SettingsError(
                f"STACCATO_NODE_ID is {self.node_id!r}, and {last!r} would name a runtime: write letters, digits and "
                "'-', 63 in all"
            )
        for name in ("nats_credentials", "join_token_file"):
            path = getattr(self, name)
            if runtimes > 1 and path is not None and NUMBER not in str(path):
                raise SettingsError(
                    f"{PREFIX}{name.upper()}={path} is one file for {runtimes} runtimes: write {NUMBER} in the place "
                    "of a runtime's number, as r{n}.nk"
                )
        if self.transport_port and self.transport_port + runtimes - 1 > 65535:
            raise SettingsError(
                f"{PREFIX}TRANSPORT_PORT={self.transport_port} leaves no port for {runtimes} runtimes: choose at most "
                f"{65536 - runtimes}"
            )

    def runtime_ids(self, runtimes: int) -> list[str]:
        return [f"{self.node_id}-r{number}" for number in range(1, runtimes + 1)]

    def variables(self, number: int) -> dict[str, str]:
        """Return the variables of the runtime with the number, from 1 on, alone."""
        told = {
            name.upper(): str(path).replace(NUMBER, str(number))
            for name in ("nats_credentials", "join_token_file")
            if (path := getattr(self, name)) is not None
        }
        if self.transport_port:
            told["TRANSPORT_PORT"] = str(self.transport_port + number - 1)
        return {PREFIX + name: value for name, value in told.items()}


def run(settings: Settings, own: NodeSettings, say: Say, show: Say) -> int:
    """Run the runtimes until a signal, and return the exit code. Raises StartError, SettingsError.

    `say` is called with each event, `show` with each line that a runtime writes."""
    observe.no_core_files()
    before = os.umask(0o077)
    try:
        settings, devices = gpus.with_gpus(settings)
        own.check(settings.runtimes)
        with locked(settings.data):
            return asyncio.run(MachineNode(settings, own, devices, unfailing(say), unfailing(show)).serve())
    except gpus.NoSuchGpu as error:
        raise StartError(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StartError(f"{where}{error.strerror}: choose another folder with {PREFIX}DATA") from error
    finally:
        os.umask(before)


class MachineNode:
    """The runtimes of this machine, from the start to the end of the node."""

    def __init__(
        self, settings: Settings, own: NodeSettings, devices: Sequence[Sequence[gpus.Gpu]], say: Say, show: Say
    ) -> None:
        self._settings, self._own, self._devices, self._say, self._show = settings, own, devices, say, show
        self._names = own.runtime_ids(settings.runtimes)
        self._signs = Path(os.environ.get(PREFIX + "SIGNS") or settings.data / "signs")

    async def serve(self) -> int:
        """Serve until a signal, then drain every runtime. Returns the exit code, 130 if a second signal killed the
        runtimes. Raises StartError if no runtime gets well."""
        settings = self._settings
        troubles = Troubles(settings.data, self._say)

        def hear(child: str, line: str) -> None:
            troubles.heard(child, line)
            self._show(f"{child} {line}")

        tree = Tree(settings.data / "logs", self._say, hear, troubles)
        orders, served = orders_of(settings)
        cache = host_cache(settings)
        machine = MachineRuntimes(
            settings, self._names, cache, orders.fileno() if orders else -1, self._devices, self._variables
        )
        keeper = RuntimeKeeper(tree.start(), machine.child, self._names, self._signs, self._say)
        giving = asyncio.create_task(signs.give(keeper.ready))  # until the last runtime has drained
        async with signals(tree) as stop:
            try:
                if served:
                    start_fork_server(tree, settings, served.fileno())
                for name, share in zip(self._names, self._devices, strict=False):
                    self._say(f"{name} has GPU {', '.join(gpu.shown for gpu in share)}")
                await keeper.keep(stop)
                self._say("stopping: streams end or move; a second signal kills")
            finally:
                await tree.stop()
                giving.cancel()
                troubles.end()
                os.close(cache)
                for end in (orders, served):
                    if end is not None:
                        end.close()
        return 130 if tree.killed else 0

    def _variables(self, name: str) -> dict[str, str]:
        folder = self._signs / name
        folder.mkdir(parents=True, exist_ok=True)
        return {PREFIX + "SIGNS": str(folder)} | self._own.variables(self._names.index(name) + 1)


class RuntimeKeeper:
    """Keeps the runtimes of a node alive, and knows which runtimes are ready, by the files of their signs."""

    def __init__(self, tier: Tier, child: Callable[[str], Child], names: Sequence[str], folder: Path, say: Say) -> None:
        """`tier` is to hold the runtimes.

        Args:
            child: returns the process to start for a name.
            names: names of the runtimes.
            folder: a folder for each name, with the signs of the runtime.
            say: called with a sentence for each failure."""
        self._tier, self._child, self._names, self._folder, self._say = tier, child, names, folder, say
        self._lost: dict[str, float] = {}  # runtimes that did not get well → time of the next start
        self._failed = asyncio.Event()
        self._failure = ""  # why the node ends, with `_failed`
        self._changed: dict[
            Path, tuple[int, float]
        ] = {}  # sign → last moment of the file, and when that was seen first
        self._silent: set[str] = set()  # runtimes that were silent at the last look

    async def keep(self, stop: asyncio.Event) -> None:
        """Keep the runtimes alive until `stop` is set. Raises OSError, and StartError if no runtime gets well."""
        for name in self._names:
            for sign in ("alive", "ready"):  # of an earlier node
                (self._folder / name / sign).unlink(missing_ok=True)
            self._start(name)
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._failed)]
        looking = asyncio.create_task(self._look_on())
        try:
            await asyncio.wait([looking, *waits], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(*waits, looking)
        if self._failure:
            raise StartError(self._failure)
        if not stop.is_set():
            looking.result()

    def _start(self, name: str) -> None:
        """Start a runtime. The deaths of a runtime that did not get well before are not said again."""
        say = _say_nothing if name in self._lost else None
        self._tier.start(replace(self._child(name), needed=False), self._give_up, say)

    def _give_up(self, name: str, error: BaseException) -> None:
        if name not in self._lost:
            self._say(f"{name} does not get well, and is tried again every {RETRY_S:g} s: {error}")
        self._lost[name] = time.monotonic() + RETRY_S
        if len(self._lost) == len(self._names):
            self._failure = f"no runtime of this node gets well: {error}"
            self._failed.set()

    def ready(self) -> bool:
        """Whether every runtime that gets well has said within SILENT_S seconds that the runtime is ready."""
        ages = [self._age_s(name, "ready") for name in self._names if name not in self._lost]
        return bool(ages) and all(age_s is not None and age_s < SILENT_S for age_s in ages)

    async def _look_on(self) -> None:
        """Endless: end runtimes that gave signs of life and give none any more, so that the tier starts them again; and
        start runtimes again that did not get well."""
        while True:
            ages = {name: self._age_s(name, "alive") for name in self._names}
            silent = {name for name, age_s in ages.items() if age_s is not None and age_s > SILENT_S}
            for name, age_s in ages.items():
                if age_s is not None:
                    self._lost.pop(name, None)
                elif name not in self._tier.names and time.monotonic() >= self._lost[name]:
                    self._start(name)
                if name in silent & self._silent:  # twice: the whole machine may have stood still before
                    self._say(f"{name} gave no sign of life for {age_s:.0f} s and is started again")
                    self._tier.restart(name)
            self._silent = silent
            await asyncio.sleep(LOOK_PERIOD_S)

    def _age_s(self, name: str, sign: str) -> float | None:
        """Return the seconds since the runtime was seen to give the sign; None: the present process has not given the
        sign. No clock that an operator sets is asked."""
        file, now = self._folder / name / sign, time.monotonic()
        try:
            touched_ns = file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if self._changed.get(file, (-1, now))[0] != touched_ns:
            self._changed[file] = touched_ns, now
        age_s = now - self._changed[file][1]
        return age_s if age_s < self._tier.lived_s(name) else None


def _say_nothing(sentence: str) -> None:
    """Say nothing of a runtime whose failure was said."""
