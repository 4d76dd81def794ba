"""What the device is busy with is seen from outside, also after its process has died in the middle of it."""

from __future__ import annotations

import os
import subprocess
import sys

from runtime.stepping import Stepping
from tests.conftest import ROOT


def test_between_steps_nothing_is_under_way() -> None:
    stepping = Stepping(Stepping.create())
    assert stepping.under_way() is None
    stepping.begin("one", 5.0)
    assert stepping.under_way() == ("one", 5.0)
    stepping.begin("another-one", 6.0)
    assert stepping.under_way() == ("another-one", 6.0)
    stepping.end()
    assert stepping.under_way() is None


def test_it_outlives_the_process_that_wrote_it() -> None:
    fd = Stepping.create()
    code = f"import os; from runtime.stepping import Stepping; Stepping({fd}).begin('m', 7.0); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, pass_fds=[fd]).returncode == -9
    assert Stepping(fd).under_way() == ("m", 7.0)
    os.close(fd)
