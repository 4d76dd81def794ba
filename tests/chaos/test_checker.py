"""The checker finds no flaw in a true bill, for any history of clients, and notices every error in a bill."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import CANCELLED, GATEWAY_LOST, GONE, SURE, Billed, flaws
from tests.chaos.devices import Devices
from tests.chaos.history import Ask, End, Seen

PROMPT, MOST = 7, 50
WITH_ROW = (*SURE, *GONE)


@st.composite
def truths(draw: st.DrawFn) -> list[tuple[Seen, Billed | None]]:
    """Records of clients, each with the right row of the bill."""
    found: list[tuple[Seen, Billed | None]] = []
    for number in range(draw(st.integers(1, 8))):
        end = draw(st.sampled_from([*WITH_ROW, End.REFUSED, End.UNREACHED]))
        asked = Ask(number, draw(st.sampled_from(["a", "b"])), "/v1/completions", {"n": number}, "", (PROMPT,), MOST)
        if end not in WITH_ROW:
            found.append((Seen(asked, end, 503 if end is End.REFUSED else 0), None))
            continue
        delivered = draw(st.integers(1, MOST))
        more = draw(st.integers(0, MOST - delivered)) if end in GONE else 0  # computed, and not delivered
        finish = GATEWAY_LOST if end is End.CUT else CANCELLED if end in GONE else "stop"
        seen = Seen(asked, end, 200, f"r{number}", {0: list(range(delivered))})
        if end is End.DONE:
            seen.usage = {"prompt_tokens": PROMPT, "completion_tokens": delivered}
        found.append((seen, Billed(f"r{number}", asked.tenant, PROMPT, 2, delivered + more, finish, (1,))))
    return found


def said(truth: list[tuple[Seen, Billed | None]]) -> list[str]:
    return list(flaws([seen for seen, _ in truth], [row for _, row in truth if row is not None]))


@given(truths())
def test_of_a_true_bill_it_says_nothing(truth: list[tuple[Seen, Billed | None]]) -> None:
    assert said(truth) == []


@given(truths(), st.data())
def test_each_row_that_is_wrong_is_named(truth: list[tuple[Seen, Billed | None]], data: st.DataObject) -> None:
    places = [at for at, (_, row) in enumerate(truth) if row is not None]
    if not places:
        return
    at = data.draw(st.sampled_from(places))
    seen, row = truth[at]
    assert row is not None
    wrong = [
        None,
        replace(row, attempts=(1, 1)),
        replace(row, tenant="another"),
        replace(row, output=seen.tokens - 1 - seen.last_write),
        replace(row, output=MOST + 1),
        replace(row, prompt=2 * PROMPT),
        replace(row, prompt=0, cached=0),
        replace(row, finish="open"),
    ]
    if seen.end in SURE:
        wrong.append(replace(row, output=seen.tokens + 1))
    truth[at] = seen, data.draw(st.sampled_from(wrong))
    assert any(f"r{seen.ask.number}" in flaw for flaw in said(truth))


def test_a_client_that_left_before_it_was_told_a_name_is_billed_for_what_was_computed_and_no_other_is() -> None:
    left = Seen(Ask(1, "a", "/v1/completions", {}, "", (PROMPT,), MOST), End.LEFT)
    cut = Seen(Ask(2, "a", "/v1/completions", {}, "", (PROMPT,), MOST), End.CUT)
    row = Billed("r1", "a", PROMPT, 0, MOST, CANCELLED, (1,))
    assert list(flaws([left], [row])) == []
    assert list(flaws([left], [replace(row, output=MOST + 1)]))
    assert list(flaws([cut], [row])), "it stayed, and got nothing"
    assert list(flaws([left, cut], [row, replace(row, request="r2")])), "one of them stayed"


@given(truths(), st.integers(0, MOST))
def test_a_row_of_a_request_that_nobody_made_is_noticed(truth: list[tuple[Seen, Billed | None]], output: int) -> None:
    row = Billed("r99", "a", PROMPT, 0, output, "stop", (1,))
    assert said([*truth, (truth[0][0], row)])


def test_one_write_is_given_away_by_each_gateway_that_was_killed_and_no_more() -> None:
    asked = Ask(1, "a", "/v1/completions", {}, "", (PROMPT,), MOST)
    seen = [Seen(asked, End.CUT, 200, f"r{n}", {0: [4, 5, 6]}, {0: 1}) for n in (1, 2)]
    rows = [Billed(f"r{n}", "a", PROMPT, 0, 2, GATEWAY_LOST, (1,)) for n in (1, 2)]
    assert list(flaws(seen, rows, gateways_killed=2)) == []
    assert any("tokens are missing" in flaw for flaw in flaws(seen, rows, gateways_killed=1))
    for output, finish in ((1, GATEWAY_LOST), (4, GATEWAY_LOST), (2, "cancelled")):
        rows[1] = replace(rows[1], output=output, finish=finish)
        assert any(f"{output} billed" in flaw for flaw in flaws(seen, rows, gateways_killed=2))


def test_a_client_that_was_told_a_token_twice_is_noticed() -> None:
    asked = Ask(1, "a", "/v1/completions", {}, "", (PROMPT,), MOST)
    rows = [Billed(f"r{n}", "a", PROMPT, 0, 3, "stop", (1,)) for n in (1, 2)]
    seen = [Seen(asked, End.DONE, 200, f"r{n}", {0: tokens}) for n, tokens in ((1, [4, 5, 6]), (2, [4, 4, 5]))]
    assert any("another was told" in flaw for flaw in flaws(seen, rows))


def test_time_of_devices_is_conserved_over_their_lives() -> None:
    def gpu(us: int, gpu_us: int) -> dict[str, object]:
        used = {"t/d": {"gpu_us": gpu_us, "switch_us": 0}}
        time = {"wall_us": us, "idle_us": us - gpu_us, "platform_us": 0, "open_us": 0, "used": used}
        return {"id": "r1", "time": time}

    devices, s = Devices(), 10**6
    devices.look([gpu(10 * s, 4)], 110.0)
    for at in (120.2, 120.7, 121.1):  # reports of 120.0; no later report comes before the process dies at 122.0
        devices.look([gpu(20 * s, 8)], at)
    devices.look([gpu(3 * s // 10, 5)], 122.9)  # the next process, seen 0.6 s late
    devices.look([gpu(s, 5)], 123.0)
    devices.look([gpu(19 * s, 7)], 123.2)  # a killed NATS server has lost the reports written last
    devices.look([gpu(s, 5)], 123.4)
    assert devices.deaths == 1 and list(devices.flaws({"t": 13 + 2 * s})) == []
    (said,) = devices.flaws({"t": 14 + 2 * s})
    assert "2000001} us; 2000000 us passed unseen" in said
    devices.look([gpu(5, 5) | {"time": {**gpu(2 * s, 5)["time"], "idle_us": 0}}], 124.0)  # type: ignore[dict-item]
    assert list(devices.flaws({})) == ["r1: of 2000000 us of the device's time 5 are accounted for"]
