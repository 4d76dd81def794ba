"""Passes over all declared objects: look at the platform, decide, call, write the status.

No pass needs an earlier pass. A pass remembers earlier passes only to spare calls: an equal call for an object waits,
twice as long each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from gateway.cli.api import Row
from gateway.core.declared.objects import Declared, Ref, TenantSpec
from gateway.core.declared.observed import Delivered, Observed
from gateway.core.declared.reconciler import Decision, KeyDelivery, RestCall, decide
from gateway.core.declared.status import SYNCED, ObjectStatus, found, troubled
from gateway.declared.platform import CallFailed, Platform

AGAIN_S, AGAIN_S_MOST = 2.0, 300.0  # between two equal calls for an object, at first and at most
UNDER_WAY_S, CALM_S = 2.0, 15.0  # between two passes: while something is under way, and otherwise


class CallReporter(Protocol):
    """Hears of calls, for a log or a terminal."""

    def called(self, ref: Ref, call: RestCall, trouble: CallFailed | None) -> None:
        """A call was made for an object. `trouble`: why the call failed; None: the call was answered."""

    def away(self, error: CallFailed) -> None:
        """The platform could not be looked at."""


class DeclaredSource(Protocol):
    """Where objects are declared, and where their status and keys go."""

    def declared(self) -> list[Declared]:
        """Return the objects, in order."""

    def delivered(self, declared: Declared, secret: str) -> Delivered | None:
        """Return the Secret of a Tenant; None: the namespace has no such Secret. Raises CallFailed."""

    def deliver(self, delivery: KeyDelivery, key_id: str, key: str) -> None:
        """Write a key into its Secret. Raises CallFailed."""

    def tell(self, declared: Declared, status: ObjectStatus) -> None:
        """Show the status of an object, if it differs from the status shown."""

    def release(self, declared: Declared) -> None:
        """Let a deleted object go: the platform has nothing of the object any more."""


@dataclass(frozen=True)
class Attempt:
    """The last call for an object. `trouble`: why the call failed; None: the call was answered."""

    call: RestCall
    again_s: float  # seconds from the call to the next equal call
    at_s: float
    trouble: CallFailed | None = None

    def after(self, call: RestCall, now_s: float) -> Attempt:
        again_s = min(2 * self.again_s, AGAIN_S_MOST) if call == self.call else AGAIN_S
        return Attempt(call, again_s, now_s)


@dataclass(frozen=True)
class Pass:
    """What came out of a pass. `calls`: number of calls made; `synced`: the platform has all that is declared;
    `next_s`: seconds until the next pass is due, unless an object changes before."""

    calls: int
    synced: bool
    settled: bool
    next_s: float
    statuses: Mapping[Ref, ObjectStatus]


class Reconciler:
    """Brings the platform to what a source declares, pass by pass.

    Args:
        source: where objects are declared.
        platform: the platform.
        manager: name that begins every mark of this reconciler's rows.
        url: URL of the gateway for tenants.
        now: seconds of a clock that never goes back.
        reporter: hears of each call.
        prune: whether rows with this manager's mark are deleted once no object declares the rows. Without, an object is
            deleted by its own deletion alone.
        may_act: whether calls may be made now; asked before each call.
    """

    def __init__(
        self,
        source: DeclaredSource,
        platform: Platform,
        manager: str,
        url: str,
        now: Callable[[], float],
        reporter: CallReporter,
        prune: bool = False,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._source, self._platform, self._manager = source, platform, manager
        self._url, self._now, self._reporter = url, now, reporter
        self._prune, self._may_act = prune, may_act
        self._attempts: dict[Ref, Attempt] = {}

    def once(self) -> Pass:
        """Make a pass over all objects. A failed call is told in the status, and raises nothing."""
        declared = self._source.declared()
        try:
            observed = self._platform.observe(_with_keys(declared))
        except CallFailed as error:
            self._reporter.away(error)  # the objects keep their status
            return Pass(0, False, False, UNDER_WAY_S, {})
        if self._prune:
            declared += self._undeclared(declared, observed)
        delivered = self._delivered(declared)
        unknown = {ref for ref, found in delivered.items() if isinstance(found, CallFailed)}
        known = {ref: found for ref, found in delivered.items() if isinstance(found, Delivered)}
        observed = replace(observed, delivered=known)
        self._attempts = {ref: attempt for ref, attempt in self._attempts.items() if ref in {d.ref for d in declared}}
        judged = [each for each in declared if each.ref not in unknown]
        decisions = [(each, decide(each, observed, self._manager, self._url)) for each in judged]
        statuses, calls, settled = dict[Ref, ObjectStatus](), 0, True
        for each, decision in decisions:
            status, called = self._follow(each, decision)
            calls += called
            settled &= decision.settled or decision.gone
            statuses[each.ref] = status
            if decision.gone:
                self._source.release(each)
            else:
                self._source.tell(each, status)
        synced = not unknown and all(decision.gone or _is_synced(statuses[each.ref]) for each, decision in decisions)
        next_s = 0.0 if calls else CALM_S if settled else UNDER_WAY_S
        return Pass(calls, synced, settled, next_s, statuses)

    def _undeclared(self, declared: list[Declared], observed: Observed) -> list[Declared]:
        """Objects that were declared once, and that rows of the platform still stand for."""
        there = {each.ref for each in declared}
        refs = [Ref(kind, namespace, name) for kind, namespace, name in sorted(observed.managers(self._manager))]  # type: ignore[arg-type]
        return [Declared(ref, None, deleting=True) for ref in refs if ref not in there]

    def _delivered(self, declared: list[Declared]) -> dict[Ref, Delivered | CallFailed]:
        """Return the Secret that each Tenant names, or why the Secret can't be read."""
        found = dict[Ref, Delivered | CallFailed]()
        for each in declared:
            if not isinstance(each.spec, TenantSpec) or each.spec.key is None or each.deleting:
                continue
            try:
                seen: Delivered | CallFailed | None = self._source.delivered(each, each.spec.key.secret_name)
            except CallFailed as error:
                self._reporter.away(error)
                seen = error
            if seen is not None:
                found[each.ref] = seen
        return found

    def _follow(self, declared: Declared, decision: Decision) -> tuple[ObjectStatus, int]:
        """Make the decision's call, if there is one and the call is due. Return the status, and how many calls."""
        call, before, now_s = decision.call, self._attempts.get(declared.ref), self._now()
        if call is None:
            if _is_synced(decision.status):
                self._attempts.pop(declared.ref, None)
            return decision.status, 0
        if before and before.call == call and now_s < before.at_s + before.again_s:
            return self._told(decision.status, before.trouble), 0
        if not self._may_act():
            return decision.status, 0
        attempt = before.after(call, now_s) if before else Attempt(call, AGAIN_S, now_s)
        try:
            self._answered(declared, call, self._platform.carry_out(call))
        except CallFailed as error:
            attempt = replace(attempt, trouble=error)
        self._reporter.called(declared.ref, call, attempt.trouble)
        self._attempts[declared.ref] = attempt
        return self._told(decision.status, attempt.trouble), 0 if attempt.trouble else 1

    def _answered(self, declared: Declared, call: RestCall, answer: Row) -> None:
        if call.delivery:
            self._source.deliver(call.delivery, str(answer["id"]), str(answer["key"]))

    def _told(self, status: ObjectStatus, trouble: CallFailed | None) -> ObjectStatus:
        return troubled(status, trouble.reason, str(trouble)) if trouble else status


def _with_keys(declared: list[Declared]) -> list[str]:
    return [each.ref.name for each in declared if each.ref.kind == "Tenant" and not each.deleting]


def _is_synced(status: ObjectStatus) -> bool:
    synced = found(status, SYNCED)
    return synced is not None and synced.status == "True"
