"""Ledger of a device's time: each microsecond since the start belongs to a request, to the platform or is idle. Pure.

*gpu*      The requests of a step's batch pay for the step. Decoding requests pay, in equal parts, the estimated time of
           a step with decoding requests alone. Prompts pay the rest, in proportion to their tokens to compute. The
           pause since the model's last step belongs to the step.
*switch*   If requests wait and the next step is of a different model, the requests of that model pay the time before
           the step, in equal parts: the time of parking models, of waiting for weights and for pages.
*kv*       After each step a request pays for its keys and values for the time since its last step ended, or since its
           first step began. While the model is away, keys and values lie on the host and count as *cache*.
*idle*     The device has no requests and is not busy.
*platform* Building and checking engines, failed steps, and time in which only requests waited that then went away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from runtime.core.device.request import DeviceSpent, Request
from runtime.core.ledgers.attainment import LABELS_MOST
from store.contract.kv_curve import KvCurve
from store.contract.views import Use, Why
from store.contract.wire import Accounts

Mark = tuple[int, Use, str, int, Why | None]  # end in us, use, model, number of requests, reason of a switch


@dataclass(slots=True)
class DeviceTime:
    """Account of one device process. `now` and `began` are seconds on the process's clock, which never goes back."""

    begun_us: int
    at_us: int = field(init=False)  # time accounted for, up to here
    totals: dict[str, DeviceSpent] = field(default_factory=dict)  # by label
    paid_us: dict[str, int] = field(default_factory=dict)  # paid for steps, by tenant, since the last `take`
    idle_us: int = 0
    platform_us: int = 0
    marks: list[Mark] = field(default_factory=list)  # for runtime/core/ledgers/timeline.py; cleared by the device loop

    def __post_init__(self) -> None:
        self.at_us = self.begun_us

    @classmethod
    def open(cls, now: float) -> DeviceTime:
        return cls(_us(now))

    def idle(self, now: float) -> None:
        self.idle_us += self._passed(now)
        self.marks.append((self.at_us, Use.IDLE, "", 0, None))

    def platform(self, now: float) -> None:
        self.platform_us += self._passed(now)
        self.marks.append((self.at_us, Use.PLATFORM, "", 0, None))

    def switched(self, now: float, requests: Sequence[Request]) -> None:
        """Books a switch: a model different from the last stepped model begins a step for `requests`."""
        for request, us in zip(requests, _parts(self._passed(now), [1] * len(requests)), strict=True):
            request.spent.switch_us += us
            self._total(request.label).switch_us += us
        self.marks.append((self.at_us, Use.SWITCH, requests[0].model, len(requests), _why(now, requests)))

    def stepped(self, now: float, decodes: Sequence[Request], prompts: Sequence[Request], decode_s: float) -> None:
        """Books a step. `decode_s`: estimated time of a step with the decoding requests alone."""
        us = self._passed(now)
        of_decodes = us if not prompts else min(us, _us(decode_s)) if decodes else 0
        self._pay(decodes, _parts(of_decodes, [1] * len(decodes)))
        self._pay(prompts, _parts(us - of_decodes, [max(1, request.to_compute) for request in prompts]))
        model = (decodes or prompts)[0].model
        self.marks.append((self.at_us, Use.STEPS, model, len(decodes) + len(prompts), None))

    def held(self, began: float, requests: Iterable[Request], kv: KvCurve[int], away_us: int) -> None:
        """Books the keys, values and states of the requests in the step just paid.

        `kv`: bytes of KV cache by length. `away_us`: total time that the model has been away so far."""
        began_us = min(_us(began), self.at_us)
        for request in requests:
            if request.held_us < 0:
                request.held_us, request.away_us = began_us, away_us
            passed_us, bytes = self.at_us - request.held_us, kv.bytes(request.context)
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
        """Microseconds paid for steps since the last call, by tenant."""
        paid_us, self.paid_us = self.paid_us, {}
        return paid_us

    def _total(self, label: str) -> DeviceSpent:
        total = self.totals.get(label)
        if total is None:
            label = label if len(self.totals) < LABELS_MOST else ""
            total = self.totals[label] = self.totals.get(label) or DeviceSpent()
        return total

    def _passed(self, now: float) -> int:
        before, self.at_us = self.at_us, max(self.at_us, _us(now))
        return self.at_us - before

    def shown(self, now: float, waited: bool) -> Accounts:
        """Accounts up to `now`. With `waited`, requests are there, and the time since the last mark is still open."""
        since = max(0, _us(now) - self.at_us)
        return Accounts(
            us=self.at_us + since - self.begun_us,
            idle_us=self.idle_us + (0 if waited else since),
            platform_us=self.platform_us,
            open_us=since if waited else 0,
            labels={label: (total.gpu_us, total.switch_us) for label, total in self.totals.items()},
        )

    def check(self) -> None:
        """Asserts the invariant: paid, idle and platform time add up to the time accounted for."""
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
    """Splits `whole` into integers in the proportions of `weights`, each less than 1 from its exact part."""
    total, sum_, given, parts = sum(weights), 0, 0, []
    for weight in weights:
        sum_ += weight
        upto = whole * sum_ // total
        parts.append(upto - given)
        given = upto
    return parts
