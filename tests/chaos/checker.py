"""Is the bill what the clients got? Compares the history of the clients with the rows of the bill.

*delivered* is what came out of a client's socket, *billed* what the rows of its request say.

- A client that read until the connection was closed knows all that it was sent, and is billed exactly that: whether the
  answer was there to its end, ended with an error, or the client had gone away.
- Where a gateway was killed, the one write that it was in may not be counted yet: nobody is billed a token that was not
  delivered, and one request for each kill may lack the tokens of its last write.
- Who vanished is billed no less than it read and no more than it asked for.
- Who was refused is billed nothing.
- The prompt is charged once: to all who got a token, in whole; to nobody twice.
- Each row belongs to one request of its tenant. Each request that began has one, and its last word is booked.
- Who asked the same question was told the same, as far as it was told: so nothing came twice, and nothing was left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.history import End, Seen

SURE = (End.DONE, End.FAILED, End.LEFT, End.CUT)  # ends after which the client knows all that it was sent
GATEWAY_LOST = "gateway_lost"  # how a request ended that its gateway did not survive


@dataclass(frozen=True)
class Billed:
    """The rows of one request."""

    request: str
    tenant: str
    prompt: int
    cached: int
    output: int
    finish: str
    attempts: tuple[int, ...]

    @property
    def cut(self) -> bool:
        return self.finish == GATEWAY_LOST


def billed(rows: Iterable[Mapping[str, object]]) -> list[Billed]:
    """As they stand in the export."""
    found: dict[str, list[Mapping[str, object]]] = defaultdict(list)
    for row in rows:
        found[str(row["request"])].append(row)
    return [
        Billed(
            request,
            str(its[0]["tenant"]),
            _sum(its, "prompt_tokens"),
            _sum(its, "cached_tokens"),
            _sum(its, "output_tokens"),
            str(its[-1]["finish"]),
            tuple(int(str(row["attempt"])) for row in its),
        )
        for request, its in found.items()
    ]


def _sum(rows: Iterable[Mapping[str, object]], name: str) -> int:
    return sum(int(str(row[name])) for row in rows)


def flaws(history: Iterable[Seen], bill: Iterable[Billed], gateways_killed: int = 0) -> Iterator[str]:
    """Each a sentence with the numbers."""
    history, rows = list(history), {one.request: one for one in bill}
    prompts = _prompts(history)
    known = {seen.request: seen for seen in history if seen.request}
    for row in rows.values():
        yield from (f"{row.request}: {said}" for said in _of_row(row))
    for request, seen in known.items():
        if request in rows:
            yield from (f"{request} of {seen.ask.number}: {said}" for said in _of_request(seen, rows[request], prompts))
        elif seen.end is not End.REFUSED:
            yield f"{request} of {seen.ask.number}: it began, and no row of the bill is its"
    given_away = [seen.request for seen in history if seen.request in rows and rows[seen.request].output < seen.tokens]
    if len(given_away) > gateways_killed:
        yield f"{gateways_killed} gateways were killed, and tokens are missing on the bill of {given_away}"
    yield from _nameless(history, [row for row in rows.values() if row.request not in known])
    yield from _contradictions(history)


def _of_row(row: Billed) -> Iterator[str]:
    if len(set(row.attempts)) < len(row.attempts):
        yield f"booked twice, as attempts {row.attempts}"
    if row.finish == "open":
        yield "its last word is not booked"
    if row.cached > row.prompt:
        yield f"{row.cached} cached tokens of a prompt of {row.prompt}"


def _of_request(seen: Seen, row: Billed, prompts: Mapping[str, int]) -> Iterator[str]:
    if row.tenant != seen.ask.tenant:
        yield f"{seen.ask.tenant} asked, {row.tenant} is billed"
    least, most = output_bounds(seen, row.cut)
    if not least <= row.output <= most:
        yield f"{seen.tokens} tokens delivered ({seen.end}), {row.output} billed ({row.finish})"
    prompt = prompts.get(seen.ask.question)
    if seen.end is End.REFUSED and row.prompt:
        yield f"refused, and a prompt of {row.prompt} billed"
    elif prompt is not None and not _prompt_fits(seen, row, prompt):
        yield f"a prompt of {prompt} tokens, {row.prompt} billed ({seen.end}, {seen.tokens} tokens)"
    if seen.end is End.DONE and seen.usage is not None:
        yield from _of_usage(seen, row, seen.usage)


def output_bounds(seen: Seen, cut: bool) -> tuple[int, int]:
    """`cut`: its gateway was killed."""
    if seen.end is End.REFUSED:
        return 0, 0
    least = seen.tokens - seen.last_write if cut and seen.end is not End.DONE else seen.tokens
    return least, seen.tokens if seen.end in SURE else seen.ask.tokens_most


def _prompt_fits(seen: Seen, row: Billed, prompt: int) -> bool:
    if seen.end is End.DONE:
        return row.prompt == prompt
    if len(seen.ask.prompts) > 1:  # some of them may not have had their turn
        return row.prompt <= prompt and (row.prompt > 0 or not row.output)
    return row.prompt == prompt or (row.prompt == 0 and not row.output)


def _of_usage(seen: Seen, row: Billed, usage: Mapping[str, int]) -> Iterator[str]:
    """What the answer itself said."""
    if usage["completion_tokens"] != seen.tokens:
        yield f"{seen.tokens} tokens delivered, the answer says {usage['completion_tokens']}"
    if usage["prompt_tokens"] != row.prompt:
        yield f"the answer says {usage['prompt_tokens']} tokens of prompt, {row.prompt} billed"


def _prompts(history: Iterable[Seen]) -> dict[str, int]:
    """How long the prompt of each question is, as far as anybody was told."""
    found = {}
    for seen in history:
        if seen.ask.prompts:
            found[seen.ask.question] = sum(seen.ask.prompts)
        elif seen.usage is not None:
            found[seen.ask.question] = int(seen.usage["prompt_tokens"])
    return found


def _nameless(history: Iterable[Seen], rows: Iterable[Billed]) -> Iterator[str]:
    """Rows of requests whose clients were not told their name: nothing was delivered to them."""
    asked = Counter(seen.ask.tenant for seen in history if not seen.status and seen.end is not End.UNREACHED)
    for row in rows:
        asked[row.tenant] -= 1
        if row.output:
            yield f"{row.request}: {row.output} tokens billed ({row.finish}), and no client got any of them"
    for tenant, left in sorted(asked.items()):
        if left < 0:
            yield f"{tenant} is billed for {-left} requests that it never made"


def _contradictions(history: Iterable[Seen]) -> Iterator[str]:
    told: dict[tuple[str, int], list[int]] = {}
    for seen in history:
        for choice, said in seen.said.items():
            before = told.get((seen.ask.question, choice), [])
            shorter, longer = sorted((before, said), key=len)
            if longer[: len(shorter)] != shorter:
                yield f"{seen.request} of {seen.ask.number}: choice {choice} is {said}, another was told {before}"
            told[seen.ask.question, choice] = longer
