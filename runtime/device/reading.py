"""Commands waiting in the device process until an engine has read the compiled grammar of the command's request.

The engine reads on a separate thread. Steps go on meanwhile, and the model has no work before the grammar is read. If
the engine of a model is not built yet, the command does not wait: the engine reads the grammar with the request.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.core.device.request import ModelKey
from runtime.core.engine import Engine
from runtime.ipc import PrepareMove, Start, ToDevice
from store.contract.wire import AbortMove, Delta, Finish


class Readings:
    """Waiting commands, in the order of arrival. False as a bool when no command waits."""

    def __init__(self, engines: Mapping[ModelKey, Engine]) -> None:
        """`engines`: the device's engines by model; the mapping changes while the object lives."""
        self._engines = engines
        self._held: list[tuple[Start | PrepareMove, Engine]] = []

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, command: ToDevice) -> bool:
        """Keep a command if the command's grammar must be read first, and have the engine begin to read.

        Returns whether the command was kept; `read` returns a kept command later."""
        if not isinstance(command, Start | PrepareMove) or not command.grammar:
            return False
        engine = self._engines.get(ModelKey(command.run.model))
        if engine is None:
            return False
        engine.read(command.grammar)
        if engine.has_read(command.grammar):
            return False
        self._held.append((command, engine))
        return True

    def read(self) -> list[Start | PrepareMove]:
        """Remove and return commands with a grammar read by now, and commands with an engine closed meanwhile."""
        if not self._held:
            return []
        waits = [(command, engine) for command, engine in self._held if self._waits(command, engine)]
        over = [command for command, engine in self._held if not self._waits(command, engine)]
        self._held = waits
        return over

    def _waits(self, command: Start | PrepareMove, engine: Engine) -> bool:
        here = self._engines.get(ModelKey(command.run.model)) is engine
        return here and not engine.has_read(command.grammar)

    def drop(self, gateway: str, streams: list[int]) -> list[Delta]:
        """Forget the requests of a gateway's `streams`: the clients have left.

        Returns the last delta of every forgotten `Start`; for a forgotten `PrepareMove` no delta is due."""
        dropped = [held for held in self._held if held[0].run.gateway == gateway and held[0].run.stream in streams]
        self._held = [held for held in self._held if held not in dropped]
        runs = [command.run for command, _ in dropped if isinstance(command, Start)]
        return [Delta(run.stream, [], len(run.made), Finish.ABORT) for run in runs]

    def abort(self, command: ToDevice) -> None:
        """If the command says that a moving request does not come, forget the command that waits for the request."""
        if isinstance(command, AbortMove):
            self._held = [held for held in self._held if getattr(held[0], "move", "") != command.move]
