"""Where a device's time goes: every microsecond since it began is a request's, the platform's or nobody's. Pure.

*gpu*      A step is paid by the requests in it. Who decodes pays an equal part of what a step of them alone takes by
           the books; what it took longer is paid by the prompts in it, by the tokens that they have to compute. The
           pause since the model's last step belongs to the step.
*switch*   What passes, while somebody waits, before a model steps that did not step last, is paid by the requests of
           that model, in equal parts: parking others, waiting for weights, for pages.
*idle*     Nobody wants anything.
*platform* Building and checking engines, steps that failed, and time in which somebody waited who went away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.attainment import LABELS_MOST
from runtime.request import Request, Spent
from store.wire import Accounts


@dataclass(slots=True)
class Account:
    """Of one device process. Times are seconds on its clock, and never go back."""

    begun_us: int
    at_us: int = field(init=False)  # up to here it is known whose time it was
    totals: dict[str, Spent] = field(default_factory=dict)  # by label
    idle_us: int = 0
    platform_us: int = 0

    def __post_init__(self) -> None:
        self.at_us = self.begun_us

    @classmethod
    def open(cls, now: float) -> Account:
        return cls(_us(now))

    def idle(self, now: float) -> None:
        self.idle_us += self._passed(now)

    def platform(self, now: float) -> None:
        self.platform_us += self._passed(now)

    def switched(self, now: float, requests: Sequence[Request]) -> None:
        """A model that did not step last begins a step."""
        for request, us in zip(requests, _parts(self._passed(now), [1] * len(requests)), strict=True):
            request.spent.switch_us += us
            self._total(request.label).switch_us += us

    def stepped(self, now: float, decodes: Sequence[Request], prompts: Sequence[Request], decode_s: float) -> None:
        """`decode_s`: what a step of those who decode takes alone."""
        us = self._passed(now)
        of_decodes = us if not prompts else min(us, _us(decode_s)) if decodes else 0
        self._pay(decodes, _parts(of_decodes, [1] * len(decodes)))
        self._pay(prompts, _parts(us - of_decodes, [max(1, request.to_compute) for request in prompts]))

    def _pay(self, requests: Iterable[Request], parts: Iterable[int]) -> None:
        for request, us in zip(requests, parts, strict=True):
            request.spent.gpu_us += us
            self._total(request.label).gpu_us += us

    def _total(self, label: str) -> Spent:
        total = self.totals.get(label)
        if total is None:
            label = label if len(self.totals) < LABELS_MOST else ""
            total = self.totals[label] = self.totals.get(label) or Spent()
        return total

    def _passed(self, now: float) -> int:
        before, self.at_us = self.at_us, max(self.at_us, _us(now))
        return self.at_us - before

    def shown(self, now: float, waited: bool) -> Accounts:
        """Up to `now`; `waited`: somebody is there, so it will be known later whose the time since the last mark is."""
        since = max(0, _us(now) - self.at_us)
        return Accounts(
            us=self.at_us + since - self.begun_us,
            idle_us=self.idle_us + (0 if waited else since),
            platform_us=self.platform_us,
            open_us=since if waited else 0,
            labels={label: (total.gpu_us, total.switch_us) for label, total in self.totals.items()},
        )

    def check(self) -> None:
        """The invariant."""
        paid = sum(total.gpu_us + total.switch_us for total in self.totals.values())
        known = paid + self.idle_us + self.platform_us
        assert known == self.at_us - self.begun_us, f"{known} of {self.at_us - self.begun_us} us are accounted for"


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _parts(whole: int, weights: Sequence[int]) -> list[int]:
    """Integers in these proportions that make up the whole, each less than 1 from its share."""
    total, sum_, given, parts = sum(weights), 0, 0, []
    for weight in weights:
        sum_ += weight
        upto = whole * sum_ // total
        parts.append(upto - given)
        given = upto
    return parts
