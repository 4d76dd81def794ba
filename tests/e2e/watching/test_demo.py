"""`make demo` keeps its promises: the demo ends well, the bill equals the tokens, and no process is left running."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import psutil

from tests.conftest import ROOT


def test_the_tour_ends_with_a_bill_that_equals_what_the_clients_counted() -> None:
    done = subprocess.run(
        [sys.executable, "deploy/demo/tour.py"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"^The bill equals what the clients counted: [1-9]\d+ tokens, 0\.00\d+ USD\.$", done.stdout, re.M)
    picture = "".join(re.findall(r"^[FPWM]{20,}$", done.stdout, re.M))
    assert set(picture) == set("FPWM"), "not every model answered"
    # How many turns the streams take depends on the speed of the machine: a turn has a length in milliseconds.
    runs = re.findall(r"((.)\2*)", picture)
    returned = {letter for letter, times in Counter(letter for _, letter in runs).items() if times > 1}
    assert len(returned) > 1, "no two models were interrupted between two tokens and came back"
    assert re.search(r"^after +0 of 12 MiB of the device are in use", done.stdout, re.M)
    assert re.search(r"^x-staccato-cold: host, x-staccato-wake-ms: \d+$", done.stdout, re.M)
    assert not left_running(), "processes of the tour are still there"


def left_running() -> list[str]:
    data = str(ROOT / ".staccato" / "demo")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STACCATO_DATA") == data or any(data in word for word in process.cmdline()):
                found.append(process.name())
        except psutil.Error:  # the process is gone, or of a foreign user
            continue
    return found
