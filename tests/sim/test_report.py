"""Pictures are well-formed, of bounded size, and show the time of every model."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.sim.report import LaneSpan, attainment_svg, chrome_trace, colour, runs, timeline_svg

SVG = "{http://www.w3.org/2000/svg}"

names = st.text(max_size=12)
spans_of_anything = st.lists(
    st.builds(
        lambda gpu, lane, model, what, start_s, length_s: LaneSpan(gpu, lane, model, what, start_s, start_s + length_s),
        st.integers(0, 9),
        st.sampled_from(["compute", "copy"]),
        names,
        names,
        st.floats(0, 1e6),
        st.floats(0, 1e4),
    ),
    max_size=30,
)


@st.composite
def turns(draw: st.DrawFn) -> list[LaneSpan]:
    """Successive spans on the compute lane of one GPU, of any length, with pauses."""
    at_s, spans = 0.0, []
    for model in draw(st.lists(st.integers(0, 4), min_size=1, max_size=200)):
        begin_s = at_s + draw(st.sampled_from([0.0, 0.0, 0.001, 0.3]))
        at_s = begin_s + draw(st.sampled_from([0.001, 0.01, 0.04, 0.7, 5.0]))
        spans.append(LaneSpan(0, "compute", f"m{model}", "decode", begin_s, at_s))
    return spans


def a_busy_day(count: int, gpus: int = 8, models: int = 88, lasted_s: float = 400.0) -> list[LaneSpan]:
    rng = np.random.default_rng(1)
    step_s = lasted_s * gpus / count
    return [
        LaneSpan(
            index % gpus, "compute", f"m{rng.integers(models)}", "decode", start_s, start_s + step_s * rng.random()
        )
        for index in range(count)
        for start_s in [index // gpus * step_s]
    ]


def parsed(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def said(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


# ── the trace ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(spans_of_anything)
def test_every_span_is_one_slice_of_its_gpu_and_slices_of_a_thread_follow_one_another(spans: list[LaneSpan]) -> None:
    events = msgspec.json.decode(chrome_trace(spans))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    drawn = [
        (event["pid"], threads[event["pid"], event["tid"]], event["args"]["model"], event["cat"]) for event in slices
    ]
    assert Counter(drawn) == Counter((span.gpu, span.lane, span.model, span.what) for span in spans)
    assert sum(event["dur"] for event in slices) / 1e6 == pytest.approx(
        sum(span.end_s - span.start_s for span in spans), abs=1e-6
    )
    free_at: dict[tuple[int, int], float] = {}
    for event in slices:
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= free_at.get(thread, 0.0) - 1e-3
        free_at[thread] = event["ts"] + event["dur"]


def test_gpus_and_lanes_are_named_for_the_viewer() -> None:
    load = LaneSpan(3, "copy", "m1", "load", 1.5, 2.0)
    trace = msgspec.json.decode(chrome_trace([load]))
    assert trace["traceEvents"] == [
        {"ph": "M", "pid": 3, "tid": 0, "name": "process_name", "args": {"name": "GPU 3"}},
        {"ph": "M", "pid": 3, "tid": 1, "name": "thread_name", "args": {"name": "copy"}},
        {"ph": "X", "pid": 3, "tid": 1, "name": "m1 load", "cat": "load", "ts": 1.5e6, "dur": 0.5e6}
        | {"args": {"model": "m1"}},
    ]


# ── the timeline ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(spans_of_anything)
def test_a_timeline_of_any_spans_is_well_formed_and_names_every_model(spans: list[LaneSpan]) -> None:
    root = parsed(timeline_svg(spans, width=400))
    assert "Who held each GPU" in said(root)
    assert sum(text.startswith("GPU ") for text in said(root)) == len({span.gpu for span in spans})


def test_names_are_escaped() -> None:
    wicked = "</text><script>\x00&\"'"
    root = parsed(timeline_svg([LaneSpan(0, "compute", wicked, "decode", 0, 1)]))
    assert "</text><script>�&\"'" in said(root)
    assert not list(root.iter(f"{SVG}script"))
    assert "<&>" in said(parsed(attainment_svg({"<&>": [(1.0, 0.5)]})))


@given(turns())
def test_everybody_is_seen_for_as_long_as_they_had_the_lane(spans: list[LaneSpan]) -> None:
    lasted_s, cells = spans[-1].end_s, 400
    seen: Counter[str] = Counter()
    end = 0
    for left, right, model in runs(spans, 0.0, lasted_s, cells):
        assert end <= left < right <= cells
        end = right
        seen[model] += right - left
    for model in {span.model for span in spans}:
        had = sum(span.end_s - span.start_s for span in spans if span.model == model) / lasted_s * cells
        assert abs(seen[model] - had) < 6


def test_turns_far_shorter_than_a_cell_share_the_lane_as_they_did() -> None:
    lengths = {"m0": 0.5, "m1": 0.3, "m2": 0.1}  # and a pause of 0.1
    spans, at_s = [], 0.0
    for _ in range(1000):
        for model, length_s in lengths.items():
            spans.append(LaneSpan(0, "compute", model, "decode", at_s, at_s + length_s))
            at_s += length_s
        at_s += 0.1
    seen: Counter[str] = Counter()
    for left, right, model in runs(spans, 0.0, at_s, 100):
        seen[model] += right - left
    assert seen == pytest.approx({"m0": 50, "m1": 30, "m2": 10}, abs=1.5)


@given(spans_of_anything, st.randoms(use_true_random=False))
def test_the_order_in_which_spans_are_told_changes_nothing(spans: list[LaneSpan], rng: Random) -> None:
    shuffled = rng.sample(spans, len(spans))
    assert timeline_svg(shuffled, width=400) == timeline_svg(spans, width=400)
    assert chrome_trace(shuffled) == chrome_trace(spans)


@given(turns())
def test_a_cell_goes_to_somebody_who_had_a_part_of_it(spans: list[LaneSpan]) -> None:
    cell_s = spans[-1].end_s / 100
    for left, right, model in runs(spans, 0.0, spans[-1].end_s, 100):
        for cell in range(left, right):
            assert any(
                span.model == model and span.start_s < (cell + 1) * cell_s + 1e-9 and span.end_s > cell * cell_s - 1e-9
                for span in spans
            )


def test_a_long_run_of_short_turns_makes_a_small_file() -> None:
    svg = timeline_svg(a_busy_day(100_000))
    assert len(svg) < 1_000_000
    parsed(svg)


def test_who_was_on_which_gpu_is_drawn_in_their_colour_where_they_were() -> None:
    spans = [
        LaneSpan(0, "compute", "m0", "prefill", 0, 5),
        LaneSpan(0, "compute", "m1", "decode", 5, 10),
        LaneSpan(1, "copy", "m1", "load", 2.5, 5),
    ]
    root = parsed(timeline_svg(spans, width=328))  # 200 pixels, 20 for a second
    paths = {(path.get("stroke"), path.get("class")): path.get("d") for path in root.iter(f"{SVG}path")}
    assert re.fullmatch(r"M64 [\d.]+h100", paths[colour("m0"), "compute"] or "")
    assert re.fullmatch(r"M164 [\d.]+h100", paths[colour("m1"), "compute"] or "")
    assert re.fullmatch(r"M114 [\d.]+h50", paths[colour("m1"), "copy"] or "")
    assert ["100%", "0%"] == [text for text in said(root) if text.endswith("%")]


def test_a_timeline_that_ends_at_a_given_time_begins_at_0_and_shows_nothing_later() -> None:
    spans = [LaneSpan(0, "compute", "m0", "decode", 5, 15), LaneSpan(0, "compute", "m1", "decode", 15, 20)]
    root = parsed(timeline_svg(spans, width=328, title="slack", until_s=10.0))  # 200 pixels, 20 for a second
    paths = {(path.get("stroke"), path.get("class")): path.get("d") for path in root.iter(f"{SVG}path")}
    assert re.fullmatch(r"M164 [\d.]+h100", paths[colour("m0"), "compute"] or "")
    assert (colour("m1"), "compute") not in paths
    assert {"slack", "0 s", "10 s", "50%"} <= set(said(root))


def test_up_to_twelve_models_are_in_a_legend() -> None:
    def legend(models: int) -> list[str]:
        spans = [LaneSpan(0, "compute", f"m{index}", "decode", index, index + 1) for index in range(models)]
        return [text for text in said(parsed(timeline_svg(spans))) if re.fullmatch(r"m\d+", text)]

    assert legend(12) == [f"m{index}" for index in range(12)]
    assert legend(13) == []


def test_a_model_has_the_same_colour_whoever_else_there_is() -> None:
    assert colour("m3") == "#a778db"  # a golden value: pictures of different releases can be compared
    assert colour("llama") == colour("llama") != colour("qwen")
    assert len({colour(f"m{index}") for index in range(100)}) == 100


def test_no_spans_are_a_picture_and_too_narrow_is_refused() -> None:
    parsed(timeline_svg([]))
    with pytest.raises(ValueError, match="width is 100: at least"):
        timeline_svg([], width=100)


@pytest.mark.parametrize(("start_s", "end_s"), [(2.0, 1.0), (0.0, math.nan), (0.0, math.inf)])
def test_a_span_ends_after_it_starts(start_s: float, end_s: float) -> None:
    with pytest.raises(AssertionError):
        LaneSpan(0, "compute", "m0", "decode", start_s, end_s)


# ── attainment ────────────────────────────────────────────────────────────────────────────────────────────────────────

curves_of_anything = st.dictionaries(
    names, st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=10), max_size=5
)


@given(curves_of_anything, st.lists(st.floats(0, 1), max_size=3))
def test_attainment_of_any_policies_is_well_formed_and_inside_the_picture(
    curves: dict[str, list[tuple[float, float]]], bars: list[float]
) -> None:
    root = parsed(attainment_svg(curves, tuple(bars)))
    height = float(root.get("height", ""))
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d", "")):
            assert 0 <= float(x) <= 860 and 0 <= float(y) <= height


def test_bars_are_dashed_and_named_and_policies_stand_in_the_order_of_their_reach() -> None:
    curves = {"request": [(2.0, 0.95), (4.0, 0.5)], "slack": [(2.0, 1.0), (12.0, 0.95)], "prism": [(6.0, 0.91)]}
    root = parsed(attainment_svg(curves, bars=(0.9, 0.95)))
    assert sum(path.get("class") == "bar" for path in root.iter(f"{SVG}path")) == 2
    assert {"90%", "95%"} <= set(said(root))
    assert [text for text in said(root) if text in curves] == ["slack", "prism", "request"]


def test_more_attained_is_higher_and_more_models_are_further_right() -> None:
    root = parsed(attainment_svg({"slack": [(12.0, 0.5), (1.0, 1.0), (6.0, 0.95)]}))
    line = next(path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "line")
    corners = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", line)]
    assert len(corners) == 3
    assert corners == sorted(corners)
    assert [y for _, y in corners] == sorted(y for _, y in corners)
