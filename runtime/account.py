"""Where a device's time goes: every microsecond since it began is a request's, the platform's or nobody's. Pure.

*gpu*      A step is paid by the requests in it. Who decodes pays an equal part of what a step of them alone takes by
           the books; what it took longer is paid by the prompts in it, by the tokens that they have to compute. The
           pause since the model's last step belongs to the step.
*switch*   What passes, while somebody waits, before a model steps that did not step last, is paid by the requests of
           that model, in equal parts: parking others, waiting for weights, for pages.
*kv*       Its keys and values, as many as it has when its step ends, for the time since its last one, or since this one
           began. While its model is away they are on the host, and count as *cache*.
*idle*     Nobody wants anything.
*platform* Building and checking engines, steps that failed, and time in which somebody waited who went away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.attainment import LABELS_MOST
from runtime.request import Request, Spent
from store.views import Use, Why
from store.wire import Accounts

Mark = tuple[int, Use, str, int, Why | None]  # until when, for what, which model, of how many requests


@dataclass(slots=True)
class Account:
    """Of one device process. Times are seconds on its clock, and never go back."""

    begun_us: int
    at_us: int = field(init=False)  # up to here it is known whose time it was
    totals: dict[str, Spent] = field(default_factory=dict)  # by label
    paid_us: dict[str, int] = field(default_factory=dict)  # for steps, by tenant, since they were last taken
    idle_us: int = 0
    platform_us: int = 0
    marks: list[Mark] = field(default_factory=list)  # for runtime/timeline.py, which takes them away

    def __post_init__(self) -> None:
        self.at_us = self.begun_us

    @classmethod
    def open(cls, now: float) -> Account:
        return cls(_us(now))

    def idle(self, now: float) -> None:
        self.idle_us += self._passed(now)
        self.marks.append((self.at_us, Use.IDLE, "", 0, None))

    def platform(self, now: float) -> None:
        self.platform_us += self._passed(now)
        self.marks.append((self.at_us, Use.PLATFORM, "", 0, None))

    def switched(self, now: float, requests: Sequence[Request]) -> None:
        """A model that did not step last begins a step."""
        for request, us in zip(requests, _parts(self._passed(now), [1] * len(requests)), strict=True):
            request.spent.switch_us += us
            self._total(request.label).switch_us += us
        self.marks.append((self.at_us, Use.SWITCH, requests[0].model, len(requests), _why(now, requests)))

    def stepped(self, now: float, decodes: Sequence[Request], prompts: Sequence[Request], decode_s: float) -> None:
        """`decode_s`: what a step of those who decode takes alone."""
        us = self._passed(now)
        of_decodes = us if not prompts else min(us, _us(decode_s)) if decodes else 0
        self._pay(decodes, _parts(of_decodes, [1] * len(decodes)))
        self._pay(prompts, _parts(us - of_decodes, [max(1, request.to_compute) for request in prompts]))
        model = (decodes or prompts)[0].model
        self.marks.append((self.at_us, Use.STEPS, model, len(decodes) + len(prompts), None))

    def held(self, began: float, requests: Iterable[Request], token_bytes: int, away_us: int) -> None:
        """These made the step that was just paid; `away_us`: how long their model has been away, all in all."""
        began_us = min(_us(began), self.at_us)
        for request in requests:
            if request.held_us < 0:
                request.held_us, request.away_us = began_us, away_us
            passed_us, bytes = self.at_us - request.held_us, request.context * token_bytes
            on_host_us = min(away_us - request.away_us, passed_us)
            request.spent.cache_byte_us += on_host_us * bytes
            request.spent.kv_byte_us += (passed_us - on_host_us) * bytes
            request.held_us, request.away_us = self.at_us, away_us

    def _pay(self, requests: Iterable[Request], parts: Iterable[int]) -> None:
        for request, us in zip(requests, parts, strict=True):
            request.spent.gpu_us += us
            self._total(request.label).gpu_us += us
            self.paid_us[request.tenant] = self.paid_us.get(request.tenant, 0) + us

    def take(self) -> dict[str, int]:
        """What tenants have paid for steps since the last call."""
        paid_us, self.paid_us = self.paid_us, {}
        return paid_us

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


def _why(now: float, requests: Sequence[Request]) -> Why:
    firsts = sum([not request.sent for request in requests])
    due_s = min([request.progress.due_at for request in requests]) - now
    return Why(len(requests), firsts, round(due_s * 1e3))


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
