"""Costs of a model on a device as the profile predicts, corrected by observed durations. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.core.ledgers.costs import ModelCosts

WEIGHT = 0.1  # least weight of a new observation
OUTLIER = 10.0  # an observation counts as at most 10 times the present ratio and at least a tenth
BELIEVED_MOST = 1e3  # bound on the ratio, slower or faster than the profile


class StepTimes:
    """Step times by `costs`, for callers that ask before every step: slots are read faster than fields of a struct."""

    __slots__ = (
        "_step_s",
        "_per_request_s",
        "_per_token_s",
        "_windows",
        "_prefill_s",
        "_per_prompt_s",
        "_per_prompt2_s",
    )

    def __init__(self, costs: ModelCosts) -> None:
        self._step_s: float = costs.step_s
        self._per_request_s: float = costs.step_s_per_request
        self._per_token_s: float = costs.step_s_per_token
        self._windows: tuple[tuple[int, float], ...] = costs.step_s_of_windows or ()
        self._prefill_s: float = costs.prefill_s
        self._per_prompt_s: float = costs.prefill_s_per_token
        self._per_prompt2_s: float = costs.prefill_s_per_token2

    def step(self, requests: int, context: int) -> float:
        seconds = self._step_s + self._per_request_s * requests + self._per_token_s * context
        if self._windows:
            for reach, each_s in self._windows:
                seconds += each_s * min(context, reach * requests)
        return seconds

    def prefill(self, tokens: int, squares: int = 0) -> float:
        """Time of a step with `tokens` of prompts. `squares`: sum of the squared prompt lengths; 0 for one prompt."""
        return self._prefill_s + self._per_prompt_s * tokens + self._per_prompt2_s * (squares or tokens * tokens)


class CostEstimate:
    """Costs of a model on a device: predicted costs times ratios learnt from observed durations."""

    __slots__ = ("costs", "_times", "_step", "_prefill", "_load")

    def __init__(self, costs: ModelCosts) -> None:
        self.costs, self._times = costs, StepTimes(costs)
        self._step, self._prefill, self._load = _Ratio(), _Ratio(), _Ratio()

    @property
    def switch_s(self) -> float:
        return self.costs.switch_s

    def step(self, requests: int, context: int) -> float:
        return self._times.step(requests, context) * self._step.value

    def prefill(self, tokens: int) -> float:
        return self._times.prefill(tokens) * self._prefill.value

    def load(self, missing_bytes: int) -> float:
        return self.costs.load(missing_bytes) * self._load.value

    def copy(self, kv_bytes: int) -> float:
        return self.costs.copy_s_per_byte * kv_bytes

    def observe_step(self, requests: int, context: int, took_s: float) -> None:
        self._step.observe(self._times.step(requests, context), took_s)

    def observe_prefill(self, prompts: Sequence[tuple[int, int]], requests: int, context: int, took_s: float) -> None:
        """Learns from a step with prompts.

        Args:
            prompts: tokens of each prompt, and how many of these were in the prefix cache.
            requests: decoding requests that got a token beside the prompts.
            context: tokens of the decoding requests together.
            took_s: duration of the step, in seconds."""
        beside_s = self.step(requests, context) - self.step(0, 0)
        computed = sum([tokens - cached for tokens, cached in prompts])
        squares = sum([tokens * tokens - cached * cached for tokens, cached in prompts])
        said_s = self._times.prefill(computed, squares)
        self._prefill.observe(said_s, took_s - beside_s)

    def observe_load(self, loaded_bytes: int, took_s: float) -> None:
        self._load.observe(self.costs.load(loaded_bytes), took_s)


class _Ratio:
    """Exponentially weighted mean of observed over predicted time; begins at 1 and moves faster at first."""

    __slots__ = ("value", "_count")

    def __init__(self) -> None:
        self.value = 1.0
        self._count = 0

    def observe(self, predicted_s: float, took_s: float) -> None:
        if predicted_s <= 0:  # no work was done
            return
        self._count += 1
        seen = min(max(took_s / predicted_s, self.value / OUTLIER), self.value * OUTLIER)
        value = self.value + (seen - self.value) * max(WEIGHT, 1 / (self._count + 1))
        self.value = min(max(value, 1 / BELIEVED_MOST), BELIEVED_MOST)
