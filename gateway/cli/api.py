"""JSON of the control plane as commands see it, and the failure of a command: a sentence and an exit code."""

from __future__ import annotations

from collections.abc import Mapping

ERROR, USAGE, NOT_FOUND, CONFLICT, QUOTA, RETRYABLE = 1, 2, 3, 4, 5, 75

Row = Mapping[str, object]  # a JSON object of the control plane


class CliError(Exception):
    """Ends the command. `status` is the status of the gateway's answer, if the gateway refused."""

    def __init__(self, message: str, exit_code: int = ERROR, status: int | None = None) -> None:
        super().__init__(message)
        self.exit_code, self.status = exit_code, status
