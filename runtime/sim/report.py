"""Pictures of a simulated run: models on each GPU over time, and attainment falling as models are added."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal
from xml.sax.saxutils import escape

import msgspec

Lane = Literal["compute", "copy"]


class LaneSpan(msgspec.Struct, frozen=True):
    """Time in which a model had a lane of a GPU."""

    gpu: int
    lane: Lane
    model: str
    what: str  # prefill, decode, load, …
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        assert -math.inf < self.start_s <= self.end_s < math.inf, self


# ── for a trace viewer ────────────────────────────────────────────────────────────────────────────────────────────────


def chrome_trace(spans: Iterable[LaneSpan]) -> bytes:
    """JSON in the trace event format: a process for each GPU, a thread for each lane of the GPU."""
    events: list[dict[str, object]] = []
    for (gpu, lane), own in _by_lane(spans).items():
        events.append(_metadata(gpu, 0, "process_name", f"GPU {gpu}"))
        for track, following in enumerate(_one_after_another(own)):
            # Viewers expect slices of a thread not to overlap: overlapping copies get a further thread.
            thread = 2 * track + (lane == "copy")
            events.append(_metadata(gpu, thread, "thread_name", lane))
            events += [_slice(span, thread) for span in following]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _metadata(gpu: int, thread: int, name: str, value: str) -> dict[str, object]:
    return {"ph": "M", "pid": gpu, "tid": thread, "name": name, "args": {"name": value}}


def _slice(span: LaneSpan, thread: int) -> dict[str, object]:
    start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
    return {
        "ph": "X",
        "pid": span.gpu,
        "tid": thread,
        "name": f"{span.model} {span.what}",
        "cat": span.what,
        "ts": start_ns / 1e3,  # the format's unit is the microsecond
        "dur": (end_ns - start_ns) / 1e3,
        "args": {"model": span.model},
    }


def _one_after_another(spans: Sequence[LaneSpan]) -> list[list[LaneSpan]]:
    tracks: list[list[LaneSpan]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end_s <= span.start_s), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _by_lane(spans: Iterable[LaneSpan]) -> dict[tuple[int, Lane], list[LaneSpan]]:
    """Spans by GPU and lane, each lane in the order of time; `spans` may come in any order."""
    lanes: dict[tuple[int, Lane], list[LaneSpan]] = {}
    for span in sorted(spans, key=_place):
        lanes.setdefault((span.gpu, span.lane), []).append(span)
    return lanes


def _place(span: LaneSpan) -> tuple[int, bool, float, float, str, str]:
    return span.gpu, span.lane != "compute", span.start_s, span.end_s, span.model, span.what


# ── the timeline ──────────────────────────────────────────────────────────────────────────────────────────────────────

_LEFT, _RIGHT, _TOP = 64, 64, 64
_ROW, _COMPUTE, _COPY, _GAP = 40, 20, 5, 2  # heights: a GPU with margins, the two lanes, the gap between the lanes
_PIXEL = 0.5  # finest width drawn
_NAMED_MOST = 12  # models in the legend

Run = tuple[int, int, str]  # [from, to) in steps of _PIXEL, and the model holding the lane


def timeline_svg(
    spans: Sequence[LaneSpan], width: int = 1200, title: str = "Who held each GPU", until_s: float | None = None
) -> str:
    """SVG of the models on each GPU over time, in a colour for each model; below, thin, the copies.

    `width` is in pixels. With `until_s`, the picture shows the time from 0 to `until_s` whatever was held, so pictures
    can be laid below one another."""
    across = width - _LEFT - _RIGHT
    if across < 200:
        raise ValueError(f"width is {width}: at least {_LEFT + _RIGHT + 200} are needed")
    if until_s is not None:
        spans = [_cut(span, until_s) for span in spans if span.start_s < until_s]
    start_s = 0.0 if until_s is not None else min((span.start_s for span in spans), default=0.0)
    end_s = until_s if until_s is not None else max((span.end_s for span in spans), default=start_s)
    lasted_s = max(end_s - start_s, 1e-9)
    lanes = _by_lane(spans)
    gpus = sorted({span.gpu for span in spans})
    models = sorted({span.model for span in spans}, key=_natural)
    bottom = _TOP + _ROW * len(gpus)
    said = f"{_count(len(gpus), 'GPU')}, {_count(len(models), 'model')}, {lasted_s:.4g} s; thin: copies"
    body = [
        _words(_LEFT, 26, title, "title"),
        _words(_LEFT, 46, said, "quiet"),
        _words(width - _RIGHT + 10, 46, "busy", "quiet"),
    ]
    for tick in _ticks(start_s, end_s, across // 90):
        x = _LEFT + (tick - start_s) / lasted_s * across
        body.append(f'<path class="grid" d="M{x:.1f} {_TOP - 6}V{bottom}"/>')
        body.append(_words(x, bottom + 16, f"{tick:g} s", "quiet middle"))
    drawn: dict[tuple[str, Lane], list[str]] = {}
    for row, gpu in enumerate(gpus):
        top = _TOP + _ROW * row
        busy_s = sum(span.end_s - span.start_s for span in lanes.get((gpu, "compute"), []))
        body.append(_words(_LEFT - 10, top + 15, f"GPU {gpu}", "end"))
        body.append(_words(width - _RIGHT + 10, top + 15, f"{busy_s / lasted_s:.0%}", "quiet"))
        for lane, middle in _middles(top):
            body.append(f'<path class="idle {lane}" d="M{_LEFT} {middle}h{across}"/>')
            for left, right, model in runs(lanes.get((gpu, lane), []), start_s, lasted_s, int(across / _PIXEL)):
                stroke = f"M{_LEFT + left * _PIXEL:g} {middle:g}h{(right - left) * _PIXEL:g}"
                drawn.setdefault((model, lane), []).append(stroke)
    body += _strokes(drawn, _held_s(lanes))
    body += _legend(models, bottom + 44, width)
    return _document(width, bottom + 36 + 22 * _legend_rows(models), "Who held each GPU over time", body)


def _cut(span: LaneSpan, end_s: float) -> LaneSpan:
    return msgspec.structs.replace(span, end_s=min(span.end_s, end_s))


def _middles(top: float) -> tuple[tuple[Lane, float], ...]:
    return ("compute", top + _COMPUTE / 2), ("copy", top + _COMPUTE + _GAP + _COPY / 2)


def _strokes(
    drawn: Mapping[tuple[str, Lane], Sequence[str]], held_s: Mapping[tuple[str, Lane], float]
) -> Iterator[str]:
    """Draws a single path for each model and lane: a few bytes per span, and a single name under the pointer."""
    for (model, lane), strokes in drawn.items():
        name = _safe(f"{model}: {held_s[model, lane]:.4g} s of {lane}")
        yield f'<path class="{lane}" stroke="{colour(model)}" d="{"".join(strokes)}"><title>{name}</title></path>'


def _held_s(lanes: Mapping[tuple[int, Lane], Sequence[LaneSpan]]) -> dict[tuple[str, Lane], float]:
    held: dict[tuple[str, Lane], float] = {}
    for (_, lane), spans in lanes.items():
        for span in spans:
            held[span.model, lane] = held.get((span.model, lane), 0.0) + span.end_s - span.start_s
    return held


def runs(spans: Sequence[LaneSpan], start_s: float, lasted_s: float, cells: int) -> Iterator[Run]:
    """Spans of a lane on a grid of `cells`: each cell goes to a model with a part of the cell, or stays empty.

    The choice is error diffusion, as a printer sets dots: time that a model (or idleness) had but was not given is
    carried on. Every model is therefore shown as long as it had the lane, to within a few cells, however short its
    spans are."""
    cells_had: list[dict[str | None, float]] = [{} for _ in range(cells)]
    per_s = cells / lasted_s
    for span in spans:
        left, right = (span.start_s - start_s) * per_s, (span.end_s - start_s) * per_s
        for cell in range(int(left), min(math.ceil(right), cells)):
            had = cells_had[cell]
            had[span.model] = had.get(span.model, 0.0) + min(right, cell + 1) - max(left, cell)
    owed: dict[str | None, float] = {}
    begin, holder = 0, None
    for cell, had in enumerate(cells_had):
        had[None] = max(0.0, 1.0 - sum(had.values()))
        for model, share in had.items():
            owed[model] = owed.get(model, 0.0) + share
        present = [model for model, share in had.items() if share > 0]
        given = max(present, key=lambda model: owed[model])  # a tie: the model that came first
        owed[given] -= 1.0
        if given != holder:
            if holder is not None:
                yield begin, cell, holder
            begin, holder = cell, given
    if holder is not None:
        yield begin, cells, holder


def _legend_rows(models: Sequence[str]) -> int:
    return math.ceil(min(len(models), _NAMED_MOST) / 6) if len(models) <= _NAMED_MOST else 1


def _legend(models: Sequence[str], y: float, width: int) -> Iterator[str]:
    if len(models) > _NAMED_MOST:
        yield _words(_LEFT, y + 4, "Each model has a colour; its name appears under the pointer.", "quiet")
        return
    column = (width - _LEFT - _RIGHT) / 6
    letters = int(column / 8)
    for place, model in enumerate(models):
        x, top = _LEFT + place % 6 * column, y + 22 * (place // 6)
        yield f'<rect x="{x:.1f}" y="{top - 6}" width="12" height="12" rx="2" fill="{colour(model)}"/>'
        yield _words(x + 18, top + 4, model if len(model) <= letters else f"{model[: letters - 1]}…", "")


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts m2 before m10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in parts)


# ── attainment ────────────────────────────────────────────────────────────────────────────────────────────────────────

Curve = Sequence[tuple[float, float]]  # models per GPU, share attained

_NINES = 3  # 99.9 %: a run of minutes can't tell higher shares apart


def attainment_svg(curves: Mapping[str, Curve], bars: Sequence[float] = (0.9, 0.99)) -> str:
    """SVG with a line of attainment for each policy; `bars` are the shares asked for. Each nine has equal height."""
    width, height, left, right, top, bottom = 860, 460, 64, 200, 76, 56
    most = max((models for curve in curves.values() for models, _ in curve), default=1.0) or 1.0

    def x(models: float) -> float:
        return left + models / most * (width - left - right)

    def y(share: float) -> float:
        nines = -math.log10(max(1 - share, 10.0**-_NINES))
        return height - bottom - nines / _NINES * (height - top - bottom)

    body = [
        _words(left, 28, "Attainment against models per GPU", "title"),
        _words(left, 48, "Share of tokens that came in time; dashed: what is asked for", "quiet"),
        _words((left + width - right) / 2, height - 14, "models per GPU", "quiet middle"),
    ]
    for share in sorted({0.0, 0.5, 0.9, 0.99, 1 - 10.0**-_NINES, *bars}):
        kind = "bar" if share in bars else "grid"
        body.append(f'<path class="{kind}" d="M{left} {y(share):.1f}H{width - right}"/>')
        at_least = "≥ " if 1 - share <= 10.0**-_NINES else ""
        body.append(_words(left - 10, y(share) + 4, f"{at_least}{100 * share:g}%", "quiet end"))
    for models in _ticks(0.0, most, 10):
        body.append(_words(x(models), height - bottom + 20, f"{models:g}", "quiet middle"))
    for place, curve in enumerate(curves.values()):
        corners = [f"{x(models):.1f} {y(share):.1f}" for models, share in sorted(curve)]
        dots = "".join(f"M{corner}h0" for corner in corners)
        if corners:
            body.append(f'<path class="line" stroke="{_hue(place)}" d="M{"L".join(corners)}"/>')
            body.append(f'<path class="dots" stroke="{_hue(place)}" d="{dots}"/>')
    colours = {policy: _hue(place) for place, policy in enumerate(curves)}
    for row, policy in enumerate(sorted(curves, key=lambda policy: -_reach(curves[policy], min(bars, default=0.5)))):
        beside, below = width - right + 24, top + 10 + 24 * row
        body.append(f'<path class="line" stroke="{colours[policy]}" d="M{beside} {below}h20"/>')
        body.append(_words(beside + 28, below + 4, policy if len(policy) <= 20 else f"{policy[:19]}…", ""))
    return _document(width, max(height, top + 24 * len(curves)), "Attainment against models per GPU", body)


def _reach(curve: Curve, bar: float) -> float:
    """Most models per GPU at which `curve` holds `bar`; sorts the legend in the order of the lines, from the right."""
    return max((models for models, share in curve if share >= bar), default=0.0)


# ── what both are drawn with ──────────────────────────────────────────────────────────────────────────────────────────

_STYLE = (
    f".compute{{stroke-width:{_COMPUTE}}}.copy{{stroke-width:{_COPY}}}"
    "text{font:12px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2328}"
    ".title{font-size:16px;font-weight:600}.quiet{fill:#656d76}"
    ".middle{text-anchor:middle}.end{text-anchor:end}"
    ".paper{fill:#fff}path{fill:none}.idle{stroke:#eff1f3}"
    ".grid{stroke:#d8dee4}.bar{stroke:#656d76;stroke-dasharray:5 4}"
    ".line{stroke-width:2.5;stroke-linejoin:round}.dots{stroke-width:7;stroke-linecap:round}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9198a1}.paper{fill:#0d1117}.idle{stroke:#1c2128}"
    ".grid{stroke:#30363d}.bar{stroke:#9198a1}}"
)


def _document(width: float, height: float, label: str, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="8"/>'
    lines = [f'{head} role="img" aria-label="{label}">', f"<style>{_STYLE}</style>", paper, *body, "</svg>"]
    return "\n".join(lines) + "\n"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _words(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{_safe(text)}</text>'


def _safe(text: str) -> str:
    """Text for XML. XML can't express most control characters, so they are replaced."""
    return escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in [low, high], at most about `most`."""
    rough = max(high - low, 1e-9) / max(most, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 9) for index in range(first, last + 1)]


def colour(model: str) -> str:
    """Colour of a model name, equal in every run. The simulator's names, m0, m1, …, get colours far apart."""
    numbered = re.fullmatch(r"m([0-9]{1,9})", model)
    return _hue(int(numbered[1]) if numbered else zlib.crc32(model.encode(errors="replace")))


def _hue(number: int) -> str:
    """Colour by number: hues a golden angle apart, in three shades readable on white and on black."""
    turn = math.tau * (0.70 + number * 0.381966011)
    lightness, chroma = ((0.66, 0.15), (0.76, 0.12), (0.56, 0.16))[number % 3]
    return _srgb(lightness, chroma * math.cos(turn), chroma * math.sin(turn))


def _srgb(lightness: float, a: float, b: float) -> str:
    """Hex colour from Oklab, where equal steps look equal (Ottosson, 2020)."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(part, 0.0), 1.0))):02x}" for part in linear)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
