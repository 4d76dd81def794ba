"""Attainment of the requests' objective by three definitions side by side. Never compare across definitions. Pure.

Token k, from 1, is due at arrival + TTFT + (k - 1) * TBT.

*strict*         a token counts if made by the due time. A request that fell behind stays late until it catches up.
*re-based*       after a late token the next token is due TBT later: each pause costs a single token.
*time-weighted*  the part of a request's time in which the reader had text to read, averaged over requests, as in the
                 published artefact of Aegaeon: a late token starts the clock anew, but the budget grown so far,
                 TTFT + (k - 1) * TBT, is granted again in full: a rule more forgiving than it looks.

Up to a request's first late token the three definitions agree. Tokens at 3, 6, 12, 18, 24 s under TTFT 3 s and TBT 2 s
score 0.2, 0.2 and 0.67.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from store.contract.wire import Attained

LABELS_MOST = 4096
_NEVER = float("inf")


@dataclass(slots=True)
class ObjectiveProgress:
    """Tokens of one request so far, on time and late. Times are seconds on a single clock."""

    arrived_at: float
    ttft_s: float
    tbt_s: float
    before: int = 0  # tokens made earlier on a different device
    sent: int = field(init=False)
    late: int = 0  # tokens, strict
    late_rebased: int = 0
    first_at: float = _NEVER  # when the first token was made
    due_at: float = field(init=False)  # due time of the next token, strict
    last_at: float = field(init=False)  # when the last token was made; before the first token, the arrival
    _rebased_due_at: float = 0.0  # due time of the next token, re-based; meaningful from the first late token on
    _missed: int = 0  # number, from 1, of the last late token, time-weighted; 0: no late token yet
    _since: float = field(init=False)  # when the last late token was made, else the arrival: the clock's start
    _covered_s: float = 0.0  # time before `_since` in which the reader had text to read

    def __post_init__(self) -> None:
        self.sent = self.before
        self.due_at = self.arrived_at + self.ttft_s + self.before * self.tbt_s
        self.last_at = self._since = self.arrived_at

    @property
    def first_late(self) -> bool:
        return self.first_at > self.arrived_at + self.ttft_s

    def deliver(self, began: float, steps: int, step_s: float) -> None:
        """Counts `steps` new tokens; token j, from 1, was made at `began` + j * `step_s`, later than earlier tokens."""
        if not steps:
            return
        last_at = began + steps * step_s
        last_due_at = self.due_at + (steps - 1) * self.tbt_s
        if self._missed or began + step_s > self.due_at or last_at > last_due_at:
            self._deliver_late(began + step_s, steps, step_s)
        if not self.sent:
            self.first_at = began + step_s
        self.sent += steps
        self.due_at = self.arrived_at + self.ttft_s + self.sent * self.tbt_s
        self.last_at = last_at

    def _deliver_late(self, first_at: float, steps: int, step_s: float) -> None:
        """Counts new tokens if one of them is late, or if an earlier token was."""
        if not self._missed:
            self._rebased_due_at = self.due_at
        gain_s = self.tbt_s - step_s
        # Leads change evenly from token to token, so the tokens on time are the first or the last.
        lead_s = self.due_at - first_at
        last_lead_s = lead_s + (steps - 1) * gain_s
        self.late += steps - max(_ahead(lead_s, gain_s, steps), _ahead(last_lead_s, -gain_s, steps))
        self._rebase(first_at, steps, step_s)
        self._weigh(first_at, steps, step_s)

    def _rebase(self, first_at: float, steps: int, step_s: float) -> None:
        gain_s = self.tbt_s - step_s
        on_time = _ahead(self._rebased_due_at - first_at, gain_s, steps)
        if on_time == steps:
            self._rebased_due_at += steps * self.tbt_s
        elif gain_s >= 0:  # only the first token is late; the clock started there leaves the later tokens on time
            self.late_rebased += 1
            self._rebased_due_at = first_at + steps * self.tbt_s
        else:  # steps are slower than TBT: after a late token every token is late
            self.late_rebased += steps - on_time
            self._rebased_due_at = first_at + (steps - 1) * step_s + self.tbt_s

    def _weigh(self, first_at: float, steps: int, step_s: float) -> None:
        """Loops once per late token. A late token renews the whole budget, so late tokens are few."""
        done = 0
        while done < steps:
            at = first_at + done * step_s
            lead_s = self._since + self._budget_s(self.sent + done + 1) - at
            done += _ahead(lead_s, self.tbt_s - step_s, steps - done)
            if done < steps:
                self._covered_s += self._readable_s(self.sent + done)
                self._since = first_at + done * step_s
                done += 1
                self._missed = self.sent + done

    def _budget_s(self, token: int) -> float:
        return self.ttft_s + (token - 1) * self.tbt_s

    def _readable_s(self, sent: int) -> float:
        """Seconds of reading, from the clock's start, that the tokens up to `sent` give."""
        return self._budget_s(sent) if sent > self._missed else 0.0

    def time_share(self, now: float, owed: int) -> float:
        """Time-weighted attainment, 0 to 1. The time in which `owed` missing tokens were due counts as not covered."""
        end = max(now, self.due_at + (owed - 1) * self.tbt_s) if owed else self.last_at
        time_s = end - self.arrived_at
        left_s = max(0.0, end - self._since)
        covered_s = self._covered_s + (min(self._readable_s(self.sent), left_s) if owed else left_s)
        return covered_s / time_s if time_s > 0 else float(not owed)


def _ahead(lead_s: float, gain_s: float, steps: int) -> int:
    """Number of tokens before the first late token, of `steps` tokens.

    The first token is `lead_s` before its deadline; the lead grows by `gain_s` with each next token."""
    if lead_s < 0:
        return 0
    if lead_s + (steps - 1) * gain_s >= 0:
        return steps
    return min(steps - 1, int(lead_s / -gain_s) + 1)


# ── totals ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Attainment:
    """Totals of ended requests by label; the label whose last request ended longest ago stands first.

    At most LABELS_MOST labels are kept; `forgotten` counts labels dropped together with their totals."""

    def __init__(self) -> None:
        self.totals: dict[str, Attained] = {}
        self.forgotten = 0

    def end(self, label: str, progress: ObjectiveProgress, now: float, owed: int = 0, ended: bool = True) -> None:
        """Counts a request that leaves this device.

        If a client leaves before the first token, the request counts only if that token was overdue.

        Args:
            owed: tokens that should have come and never will; 0 if the client wants no more tokens.
            ended: False if the request goes on at a different device and will be counted there. Here only the tokens
                made here count then."""
        if ended and not progress.sent and not owed:
            if now <= progress.due_at:
                return
            owed = 1
        attained = _attained(progress, now, owed)
        if not ended:
            attained = structs.replace(attained, requests=0, first_on_time=0, time_shares=0.0)
        self.totals[label] = add(self.totals.pop(label, NOTHING), attained)
        if len(self.totals) > LABELS_MOST:
            del self.totals[next(iter(self.totals))]
            self.forgotten += 1


NOTHING = Attained()


def _attained(progress: ObjectiveProgress, now: float, owed: int) -> Attained:
    made = progress.sent - progress.before
    return Attained(
        requests=1,
        first_on_time=int(progress.sent > 0 and not progress.first_late),
        tokens=made + owed,
        on_time=made - progress.late,
        on_time_rebased=made - progress.late_rebased,
        time_shares=progress.time_share(now, owed),
    )


def add(one: Attained, other: Attained) -> Attained:
    return Attained(
        requests=one.requests + other.requests,
        first_on_time=one.first_on_time + other.first_on_time,
        tokens=one.tokens + other.tokens,
        on_time=one.on_time + other.on_time,
        on_time_rebased=one.on_time_rebased + other.on_time_rebased,
        time_shares=one.time_shares + other.time_shares,
    )


class AttainedShares(msgspec.Struct, frozen=True):
    """Shares, each 0 to 1, over `requests` ended requests."""

    token: float  # share of tokens on time, strict
    token_rebased: float
    token_time_weighted: float
    first_token: float  # share of requests with the first token on time
    requests: int

    @property
    def least(self) -> float:
        """The smaller of `token` and `first_token`: late first tokens, few among the tokens, must not hide."""
        return min(self.token, self.first_token)


def shares(totals: Iterable[Attained]) -> AttainedShares | None:
    """Shares over the sum of `totals`; None if no request ended."""
    total = NOTHING
    for each in totals:
        total = add(total, each)
    if not total.requests:
        return None
    return AttainedShares(
        token=_share(total.on_time, total.tokens),
        token_rebased=_share(total.on_time_rebased, total.tokens),
        token_time_weighted=total.time_shares / total.requests,
        first_token=total.first_on_time / total.requests,
        requests=total.requests,
    )


def _share(on_time: int, tokens: int) -> float:
    """Share of tokens on time; 1 without tokens: a request may have moved here and ended before its next token."""
    return on_time / tokens if tokens else 1.0
