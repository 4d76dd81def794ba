"""How long things take on one device: a profile, measured or analytic. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from store.wire import EngineSpec

# A time or a size of nothing would let a simulation stand still; beyond 1e18 sums leave the floats.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Count = Annotated[int, msgspec.Meta(gt=0, le=10**18)]


class ModelSize(msgspec.Struct, frozen=True):
    """What a model is, as far as costs depend on it."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: float
    parameters: float


def model_size(spec: EngineSpec) -> ModelSize:
    """Named by its folder. Weights that are quantised pass for fewer parameters of 16 bits."""
    bytes_each = 4 if spec.dtype == "float32" else 2
    name = spec.path.rstrip("/").rsplit("/", 1)[-1]
    return ModelSize(name, spec.weight_bytes, spec.kv_bytes_per_token, spec.weight_bytes / bytes_each)


class ModelCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one device, in seconds and bytes."""

    weight_bytes: Count
    kv_bytes_per_token: NotNegative
    step_s: Positive  # of a decode step, whatever is in it
    step_s_per_request: NotNegative
    step_s_per_token: NotNegative  # of the context of all requests in it
    prefill_s: Positive
    prefill_s_per_token: NotNegative
    prefill_s_per_token2: NotNegative
    load_s: Positive  # nothing of it is on the device → ready to step
    switch_s: NotNegative  # resident, and another model made the last step
    copy_s_per_byte: NotNegative  # of KV cache, to the host or back
    load_fixed_s: NotNegative = 0.0  # of `load_s`, however few of its bytes are missing

    def step(self, requests: int, context: int) -> float:
        return self.step_s + self.step_s_per_request * requests + self.step_s_per_token * context

    def prefill(self, tokens: int) -> float:
        return self.prefill_s + self.prefill_s_per_token * tokens + self.prefill_s_per_token2 * (tokens * tokens)

    def load(self, missing_bytes: int) -> float:
        """Until all weights are there, when so many bytes of them are not."""
        if missing_bytes <= 0:
            return 0.0
        return self.load_fixed_s + (self.load_s - self.load_fixed_s) * (missing_bytes / max(self.weight_bytes, 1))


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What any model costs on one device, by its size."""

    step_s: Positive
    step_s_per_weight_byte: NotNegative
    step_s_per_request: NotNegative
    step_s_per_parameter: NotNegative  # and request: what computing a token takes where memory is not all that counts
    step_s_per_kv_byte: NotNegative  # of the context of all requests
    prefill_s: Positive
    prefill_s_per_parameter: NotNegative  # and token
    prefill_s_per_parameter2: NotNegative  # and token, squared: attention
    load_s: NotNegative
    load_s_per_byte: NotNegative
    switch_s: NotNegative
    copy_s_per_byte: NotNegative

    def costs(self, size: ModelSize) -> ModelCosts:
        return ModelCosts(
            weight_bytes=size.weight_bytes,
            kv_bytes_per_token=size.kv_bytes_per_token,
            step_s=self.step_s + self.step_s_per_weight_byte * size.weight_bytes,
            step_s_per_request=self.step_s_per_request + self.step_s_per_parameter * size.parameters,
            step_s_per_token=self.step_s_per_kv_byte * size.kv_bytes_per_token,
            prefill_s=self.prefill_s,
            prefill_s_per_token=self.prefill_s_per_parameter * size.parameters,
            prefill_s_per_token2=self.prefill_s_per_parameter2 * size.parameters,
            load_s=self.load_s + self.load_s_per_byte * size.weight_bytes,
            switch_s=self.switch_s,
            copy_s_per_byte=self.copy_s_per_byte,
            load_fixed_s=self.load_s,
        )


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well coefficients say what was measured."""

    errors: dict[str, float]  # coefficient → its standard error, in its own unit
    residuals: dict[str, float]  # what was timed → median of |said / measured - 1|


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device. Times are seconds, sizes are bytes."""

    name: str
    kind: Literal["measured", "analytic"]
    conditions: dict[str, str]  # machine, date, command, versions; or the sources of an analytic one
    memory_bytes: Count  # of the pool of pages
    page_bytes: Count
    batched_tokens: Count  # that one step may prefill
    host_bytes_per_s: Positive  # that all devices of a host together can read of its memory
    block_tokens: Count = 1  # in a block of KV cache, of which a request has whole ones
    law: Law | None = None
    models: dict[str, ModelCosts] = {}
    fits: dict[str, Fit] = {}  # of each of `models`; of the law, under "law"

    def costs(self, size: ModelSize) -> ModelCosts:
        """As measured under that name with as many bytes of weights, else by the law. Raises ValueError for neither."""
        measured = self.models.get(size.name)
        if measured is not None and measured.weight_bytes == size.weight_bytes:
            return measured
        if self.law is None:
            raise ValueError(
                f"profile {self.name!r} has no costs of model {size.name!r} and no law for all: "
                "measure it with `staccato profile --models DIR`"
            )
        return self.law.costs(size)


def load_profile(text: str | bytes, where: str) -> Profile:
    """`where` the text came from, for the error. Raises ValueError with one sentence."""
    try:
        profile = msgspec.json.decode(text, type=Profile)
        wrong = _contradiction(profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        wrong = str(error)
    if wrong:
        raise ValueError(f"{where} is no profile: {wrong}; `staccato profile --out {where}` writes one")
    return profile


def _contradiction(profile: Profile) -> str | None:
    if profile.law is None and not profile.models:
        return "it has neither `law` nor `models`"
    for name, costs in profile.models.items():
        if costs.load_fixed_s > costs.load_s:
            return (
                f"load_fixed_s, {costs.load_fixed_s:g}, is more than load_s, {costs.load_s:g}, of which it is a part "
                f"- at `$.models.{name}`"
            )
    return None


# Two slow cores: sooner too much than too little, for a promise that was not made is not broken.
_UNKNOWN = Law(
    step_s=5e-3,
    step_s_per_weight_byte=1 / 10e9,
    step_s_per_request=0.3e-3,
    step_s_per_parameter=2 / 10e9,  # a multiplication and an addition
    step_s_per_kv_byte=1 / 5e9,
    prefill_s=10e-3,
    prefill_s_per_parameter=2 / 10e9,
    prefill_s_per_parameter2=2 / 10e9 / 10e3,  # attention, at 10,000 tokens as much as all else
    load_s=20e-3,
    load_s_per_byte=1 / 3e9,
    switch_s=5e-3,
    copy_s_per_byte=1 / 2e9,
)


def unknown(size: ModelSize) -> ModelCosts:
    """For a device without a profile: a guess to begin with, for an `Estimate` to correct."""
    return _UNKNOWN.costs(size)
