"""The device's current work is seen from outside, even after the device process has died in the middle of the work."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from runtime.device.stepping import Stepping, Watchdog, WeightReading
from store.contract.wire import ModelState, Residency
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
    begin = f"from runtime.device.stepping import Stepping; Stepping({fd}).begin('m', 7.0)"
    code = f"{begin}; import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, pass_fds=[fd]).returncode == -9
    assert Stepping(fd).under_way() == ("m", 7.0)
    os.close(fd)


LOADING = ModelState(residency=Residency.LOADING, turns=3)


def test_what_is_read_stands_in_the_state_of_the_model_that_is_on_its_way() -> None:
    stepping, began = Stepping(Stepping.create()), time.monotonic()
    said = {"m": LOADING, "other": LOADING, "gone": LOADING}
    assert stepping.shown_in(said, {"gone"}) == {"m": LOADING, "other": LOADING}
    stepping.read("m", began - 2.0, 100, 400)
    shown = stepping.shown_in(said, {"gone"})
    assert shown["other"] == LOADING and shown.keys() == {"m", "other"}
    assert (shown["m"].read_bytes, shown["m"].files_bytes, shown["m"].turns) == (100, 400, 3)
    assert 2.0 <= shown["m"].reading_s < 60.0
    stepping.read("m", began, 500, 400)  # a file may list a weight twice
    assert stepping.shown_in(said, ())["m"].read_bytes == 400
    stepping.read("another-one", began, 0, 7)
    assert stepping.shown_in(said, ())["m"] == LOADING
    stepping.clear()
    assert stepping.reading is None and stepping.shown_in(said, ()) == said


def test_who_is_not_on_its_way_is_not_shown_as_if_it_were() -> None:
    stepping = Stepping(Stepping.create())
    stepping.read("m", time.monotonic(), 100, 400)
    resident = {"m": ModelState(residency=Residency.RESIDENT)}
    assert stepping.shown_in(resident, ()) == resident and stepping.shown_in({}, ()) == {}


def test_steps_and_reading_do_not_write_over_each_other() -> None:
    stepping = Stepping(Stepping.create())
    stepping.read("m" * 500, 1.0, 1, 2)
    stepping.begin("n" * 500, 3.0)
    assert stepping.under_way() == ("n" * 500, 3.0)
    assert stepping.reading == WeightReading("m" * 500, 1, 2, 1.0)


def test_what_is_built_is_seen_beside_steps_and_reading() -> None:
    stepping = Stepping(Stepping.create())
    assert stepping.building is None
    stepping.begin_build("b" * 500, 4.0)
    stepping.begin("n" * 500, 3.0)
    stepping.read("m" * 500, 1.0, 1, 2)
    assert stepping.building == ("b" * 500, 4.0) and stepping.under_way() == ("n" * 500, 3.0)
    stepping.end_build()
    assert stepping.building is None and stepping.reading is None and stepping.under_way() is not None


def looks(watchdog: Watchdog, count: int, waited_for: bool = True) -> list[str | None]:
    return [watchdog.look(waited_for, 0.0) for _ in range(count)]


def test_a_device_that_is_silent_while_somebody_waits_hangs() -> None:
    stepping = Stepping(Stepping.create())
    watchdog = Watchdog(stepping, hang_s=8.0, build_hang_s=99.0)
    assert looks(watchdog, 8) == [None] * 8
    watchdog.heard()
    assert looks(watchdog, 9) == [None] * 8 + ["it has said nothing for 8 s"]
    watchdog.heard()
    assert looks(watchdog, 20, waited_for=False) == [None] * 20
    stepping.begin_build("m", 1.0)
    assert looks(watchdog, 20) == [None] * 20
    stepping.clear()
    assert looks(watchdog, 9)[-1] is not None


def test_a_step_that_never_ends_hangs_whoever_waits() -> None:
    stepping = Stepping(Stepping.create())
    watchdog = Watchdog(stepping, hang_s=2.0, build_hang_s=99.0)
    stepping.begin("m", 10.0)
    assert watchdog.look(False, 12.0) is None
    assert watchdog.look(False, 12.1) == "a step of m takes more than 2 s"
    stepping.end()
    assert watchdog.look(False, 20.0) is None


def test_a_build_hangs_when_it_neither_ends_nor_reads_and_whoever_waits() -> None:
    stepping = Stepping(Stepping.create())
    watchdog = Watchdog(stepping, hang_s=2.0, build_hang_s=5.0)
    hangs = "the build of m has come no further for 5 s"
    stepping.begin_build("m", 1.0)
    assert looks(watchdog, 12, waited_for=False) == [None] * 11 + [hangs]
    for read_bytes in range(4):  # slow, but reading
        stepping.read("m", 1.0, read_bytes, 4)
        assert looks(watchdog, 9) == [None] * 9
    stepping.end_build()
    stepping.begin_build("m", 9.0)  # a repeated build of a model is a new build
    assert looks(watchdog, 11) == [None] * 11
    assert looks(watchdog, 1) == [hangs]


def test_a_build_around_an_image_hangs_as_soon_as_a_step_and_reads_no_files() -> None:
    stepping = Stepping(Stepping.create())
    watchdog = Watchdog(stepping, hang_s=2.0, build_hang_s=99.0)
    stepping.begin_build("m", 1.0, around_image=True)
    hangs = "the build of m has come no further for 2 s"
    assert looks(watchdog, 6, waited_for=False) == [None] * 5 + [hangs]
    stepping.begin_build("m", 2.0, around_image=True)  # the next slice
    assert looks(watchdog, 5) == [None] * 5
    stepping.begin_build("m", 3.0)
    assert looks(watchdog, 20) == [None] * 20
    stepping.begin_build("n", 4.0, around_image=True)
    stepping.read("n", 4.0, 1, 2)  # the image was gone
    assert looks(watchdog, 20) == [None] * 20
