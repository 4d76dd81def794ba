"""How well requests keep their objective, by three definitions side by side. Never compare across them. Pure.

Token k, from 1, is due at arrival + TTFT + (k - 1) * TBT.

*strict*         is it there by then? Who fell behind stays late until it has caught up.
*re-based*       after a late token the next is due TBT after it: each pause costs one token.
*time-weighted*  the share of a request's time in which its reader had something to read, averaged over requests, as the
                 artefact of Aegaeon publishes it: a late token starts the clock anew, but the budget that has grown
                 so far, TTFT + (k - 1) * TBT, is granted again in full, which forgives more than it seems to.

Up to a request's first late token the three agree. Tokens at 3, 6, 12, 18, 24 s under TTFT 3 s and TBT 2 s score 0.2,
0.2 and 0.67.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from store.wire import Attained

LABELS_MOST = 4096
_NEVER = float("inf")


@dataclass(slots=True)
class Progress:
    """How one request keeps its objective so far. Times are seconds on one clock."""

    arrived_at: float
    ttft_s: float
    tbt_s: float
    before: int = 0  # tokens that another device made
    sent: int = field(init=False)
    late: int = 0  # tokens, strict
    late_rebased: int = 0
    first_at: float = _NEVER  # the first token was made
    due_at: float = field(init=False)  # the next token, strict
    last_at: float = field(init=False)  # the last token was made; before the first, the arrival
    _rebased_due_at: float = 0.0  # this and what follows mean something from the first late token on
    _missed: int = 0  # the last token that was late, time-weighted, counted from 1; 0: none
    _since: float = field(init=False)  # when it was made: the clock runs from there
    _covered_s: float = 0.0  # time up to it in which there was something to read

    def __post_init__(self) -> None:
        self.sent = self.before
        self.due_at = self.arrived_at + self.ttft_s + self.before * self.tbt_s
        self.last_at = self._since = self.arrived_at

    @property
    def first_late(self) -> bool:
        return self.first_at > self.arrived_at + self.ttft_s

    def deliver(self, began: float, steps: int, step_s: float) -> None:
        """Token j of `steps` was made at `began` + j * `step_s`, all later than those delivered before."""
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
        """Some token of these is late, or one before them was."""
        if not self._missed:
            self._rebased_due_at = self.due_at
        gain_s = self.tbt_s - step_s
        # Leads change evenly, so those on time are the first ones or the last ones.
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
        elif gain_s >= 0:  # then it is the first that is late, and with the clock that it starts the others are not
            self.late_rebased += 1
            self._rebased_due_at = first_at + steps * self.tbt_s
        else:  # steps are slower than TBT: after a late one, all are
            self.late_rebased += steps - on_time
            self._rebased_due_at = first_at + (steps - 1) * step_s + self.tbt_s

    def _weigh(self, first_at: float, steps: int, step_s: float) -> None:
        """One turn for each late token: after it the whole budget is there again, so there are few."""
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
        """Time since the clock started that tokens up to `sent` give something to read."""
        return self._budget_s(sent) if sent > self._missed else 0.0

    def time_share(self, now: float, owed: int) -> float:
        """Time-weighted attainment, 0 to 1; the time in which `owed` tokens were due is not covered."""
        end = max(now, self.due_at + (owed - 1) * self.tbt_s) if owed else self.last_at
        time_s = end - self.arrived_at
        left_s = max(0.0, end - self._since)
        covered_s = self._covered_s + (min(self._readable_s(self.sent), left_s) if owed else left_s)
        return covered_s / time_s if time_s > 0 else float(not owed)


def _ahead(lead_s: float, gain_s: float, steps: int) -> int:
    """Of `steps` tokens, the first `lead_s` before its deadline and each next one `gain_s` more: how many come before
    one that is late."""
    if lead_s < 0:
        return 0
    if lead_s + (steps - 1) * gain_s >= 0:
        return steps
    return min(steps - 1, int(lead_s / -gain_s) + 1)


# ── totals ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Attainment:
    """Totals of the requests that ended, by label, the least recently ended first.

    There are at most LABELS_MOST; `forgotten` counts those that had to go, and what they knew."""

    def __init__(self) -> None:
        self.totals: dict[str, Attained] = {}
        self.forgotten = 0

    def end(self, label: str, progress: Progress, now: float, owed: int = 0, ended: bool = True) -> None:
        """A request ended. `owed`: tokens that should have come and never will; 0 if the client wants no more. With
        `ended` false it goes on elsewhere, where it will count: only the tokens that were made here do here.

        A client that leaves without a token counts only if one was overdue."""
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


def _attained(progress: Progress, now: float, owed: int) -> Attained:
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


class Shares(msgspec.Struct, frozen=True):
    """Of `requests` that ended, each 0 to 1."""

    token: float  # of tokens on time, strict
    token_rebased: float
    token_time_weighted: float
    first_token: float  # of requests whose first token was on time
    requests: int

    @property
    def least(self) -> float:
        """Late first tokens are few among all tokens: neither share may hide the other."""
        return min(self.token, self.first_token)


def shares(totals: Iterable[Attained]) -> Shares | None:
    """Of all of them together; None when no request ended."""
    total = NOTHING
    for each in totals:
        total = add(total, each)
    if not total.requests:
        return None
    return Shares(
        token=_share(total.on_time, total.tokens),
        token_rebased=_share(total.on_time_rebased, total.tokens),
        token_time_weighted=total.time_shares / total.requests,
        first_token=total.first_on_time / total.requests,
        requests=total.requests,
    )


def _share(on_time: int, tokens: int) -> float:
    """Nothing is late where nothing was made: a request may have moved here and ended before its next token."""
    return on_time / tokens if tokens else 1.0
