"""Prints answers of a rank that agrees with another rank: `python -m tests.runtime.group.agreeing RANK FOLDER`.

RANK is 0 or 1, and FOLDER is where the two ranks meet. The answers are printed as JSON."""

from __future__ import annotations

import json
import sys

from runtime.engine import ranks
from runtime.memory.native import Code, PoolError


def answers(rank: int, folder: str) -> list[object]:
    """Ask both ranks for a truth of all ranks, a truth of rank 0 alone, the least number, and a call that fails.

    Args:
        rank: 0 or 1; the call fails at rank 1.
        folder: the meeting place.

    Returns: two truths, a number, and the text of the error.
    """
    ranks.join(rank, 2, folder)
    said: list[object] = [ranks.all_say(lambda: True), ranks.all_say(lambda: rank == 0), ranks.least(5 + rank)]
    try:
        ranks.all_say(lambda: rank == 0 or _fails())
    except PoolError as error:
        said.append(str(error))
    return said


def _fails() -> bool:
    raise PoolError(Code.DRIVER, "no copy")


if __name__ == "__main__":
    print(json.dumps(answers(int(sys.argv[1]), sys.argv[2])))
