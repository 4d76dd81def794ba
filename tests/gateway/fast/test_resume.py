"""A stream cut at any event, and resumed in other pieces, has the same text and ends as the whole stream would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.position import Part, Position
from gateway.fast.answer import TextPiece
from gateway.fast.resume import SLICE, EventIds, slices
from store.contract.wire import Delta, Finish

TOKENS = st.lists(st.text(max_size=3), min_size=1, max_size=30)  # the text that each token adds


def pieces(tokens: list[str], cuts: set[int]) -> list[TextPiece]:
    """The pieces of a stream, cut behind the tokens `cuts`; the last piece has the finish."""
    found, first = [], 0
    for end in sorted({cut for cut in cuts if 0 < cut < len(tokens)} | {len(tokens)}):
        finish = "stop" if end == len(tokens) else None
        found.append(TextPiece(0, "".join(tokens[first:end]), end - first, finish))
        first = end
    return found


def events(stream: list[TextPiece], seen: Position) -> list[tuple[str, str]]:
    """Ids and data of a stream's events, resumed after `seen`."""
    ids = EventIds(seen)
    said = [ids.marked(Part.TEXT, b"data: <\n")]
    for piece in stream:
        if (lacking := ids.piece(piece)) is not None:
            said.append(ids.named(b"data: " + lacking.text.encode().hex().encode() + b"\n", piece.finish))
    said.append(ids.marked(Part.USAGE, b"data: >\n"))
    found = []
    for event in said:
        if event:
            id, data = event.decode().splitlines()
            found.append((id.removeprefix("id: "), data.removeprefix("data: ")))
    return found


def text(found: list[tuple[str, str]]) -> str:
    return b"".join(bytes.fromhex(data) for _, data in found if data not in "<>").decode()


@given(TOKENS, st.sets(st.integers(1, 29)), st.sets(st.integers(1, 29)), st.integers(0, 40))
def test_a_resumed_stream_goes_on_exactly_after_the_last_event(
    tokens: list[str], cuts: set[int], later: set[int], at: int
) -> None:
    whole = events(pieces(tokens, cuts), Position())
    had = whole[: at % (len(whole) + 1)]
    seen = Position.of(had[-1][0]) if had else Position()
    assert seen is not None
    rest = events(pieces(tokens, later), seen)
    assert text(had) + text(rest) == "".join(tokens)
    both = [*had, *rest]
    assert [data for _, data in both].count("<") == [data for _, data in both].count(">") == 1
    assert sum(id.endswith(".end") for id, _ in both) == 1
    assert both[-1][0] == f"{len(tokens)}.{len(''.join(tokens))}.usage"


@given(st.lists(st.integers(0, 9), max_size=5 * SLICE), st.sampled_from([None, Finish.STOP, Finish.LENGTH]))
def test_slices_of_a_delta_join_to_the_delta(tokens: list[int], finish: Finish | None) -> None:
    parts = list(slices(Delta(1, tokens, 7, finish, stop_reason="x" if finish else None)))
    assert [token for part in parts for token in part.tokens] == tokens
    assert all(len(part.tokens) <= SLICE for part in parts)
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + [finish]
    assert [part.at for part in parts] == [7 + SLICE * number for number in range(len(parts))]
