"""Checks whether the bill is right: compares the history of the clients with the rows of the bill.

*Delivered* tokens came out of a client's socket. *Billed* tokens stand in the rows of the client's request.

- A client that stayed knows every token sent, and is billed exactly the delivered tokens, whether the answer was
  complete, ended with an error, or was cut off by the platform.
- A client that went away is billed for computed tokens: at least the delivered tokens, and at most the tokens that
  devices can have made for the request.
- If a gateway was killed, the gateway's last write may not be counted. No client is billed an undelivered token, and a
  single request for each kill may lack the tokens of its last write.
- A refused request is billed nothing.
- The prompt is charged once: in whole if the client got a token, and never twice.
- Each row belongs to a request of the row's tenant. Each request that began has a row, and the final state is booked.
- Clients that asked equal questions got equal answers, as far as the answers came: no token came twice, and no token
  was left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.chaos.history import End, Seen

SURE = (End.DONE, End.FAILED, End.CUT)  # ends of clients that stayed: delivered tokens are billed
GONE = (End.LEFT, End.VANISHED)  # ends of clients that went away: computed tokens are billed
GATEWAY_LOST = "gateway_lost"  # finish of a request that outlived the gateway
CANCELLED = "cancelled"  # finish of a request whose client went away


@dataclass(frozen=True)
class Billed:
    """The bill of one request, the sum of the request's rows."""

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
    """Bills by request, summed from `rows` in the export's form."""
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
    """Flaws of the bill, each as a sentence with numbers."""
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
    """Least and most output tokens that may be billed for the request. `cut`: the gateway was killed."""
    if seen.end is End.REFUSED:
        return 0, 0
    least = seen.tokens - seen.last_write if cut and seen.end is not End.DONE else seen.tokens
    return least, seen.ask.tokens_most if seen.end in GONE else seen.tokens


def _prompt_fits(seen: Seen, row: Billed, prompt: int) -> bool:
    if seen.end is End.DONE:
        return row.prompt == prompt
    if len(seen.ask.prompts) > 1:  # some prompts may not have had a turn
        return row.prompt <= prompt and (row.prompt > 0 or not row.output)
    return row.prompt == prompt or (row.prompt == 0 and not row.output)


def _of_usage(seen: Seen, row: Billed, usage: Mapping[str, int]) -> Iterator[str]:
    """Flaws in the usage that the answer itself reports."""
    if usage["completion_tokens"] != seen.tokens:
        yield f"{seen.tokens} tokens delivered, the answer says {usage['completion_tokens']}"
    if usage["prompt_tokens"] != row.prompt:
        yield f"the answer says {usage['prompt_tokens']} tokens of prompt, {row.prompt} billed"


def _prompts(history: Iterable[Seen]) -> dict[str, int]:
    """Prompt tokens by question, as far as a client knew or was told."""
    found = {}
    for seen in history:
        if seen.ask.prompts:
            found[seen.ask.question] = sum(seen.ask.prompts)
        elif seen.usage is not None:
            found[seen.ask.question] = int(seen.usage["prompt_tokens"])
    return found


def _nameless(history: Iterable[Seen], rows: Iterable[Billed]) -> Iterator[str]:
    """Flaws in rows of requests whose clients were not told the request's id. Nothing was delivered to the clients. A
    client that went away is billed for computed tokens."""
    unnamed = [seen for seen in history if not seen.status and seen.end is not End.UNREACHED]
    asked = Counter(seen.ask.tenant for seen in unnamed)
    left = {tenant: _tokens_most(seen for seen in unnamed if seen.ask.tenant == tenant) for tenant in asked}
    for row in sorted(rows, key=lambda row: -row.output):
        asked[row.tenant] -= 1
        most = left.get(row.tenant, [])
        if row.output and row.finish in (CANCELLED, GATEWAY_LOST) and most and row.output <= most[0]:
            most.pop(0)
        elif row.output:
            yield f"{row.request}: {row.output} tokens billed ({row.finish}), and no client got any of them"
    for tenant, left in sorted(asked.items()):
        if left < 0:
            yield f"{tenant} is billed for {-left} requests that it never made"


def _tokens_most(seen: Iterable[Seen]) -> list[int]:
    """Most tokens that devices can have made, for each request whose client went away, the largest number first."""
    return sorted((each.ask.tokens_most for each in seen if each.end in GONE), reverse=True)


def _contradictions(history: Iterable[Seen]) -> Iterator[str]:
    told: dict[tuple[str, int], list[int]] = {}
    for seen in history:
        for choice, said in seen.said.items():
            before = told.get((seen.ask.question, choice), [])
            shorter, longer = sorted((before, said), key=len)
            if longer[: len(shorter)] != shorter:
                yield f"{seen.request} of {seen.ask.number}: choice {choice} is {said}, another was told {before}"
            told[seen.ask.question, choice] = longer
