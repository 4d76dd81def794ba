"""Profile of a device: durations of steps, loads and copies, measured or analytic. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from runtime.core.device.request import ModelKey
from store.contract.kv_curve import KeptLayers, KvCurve, curve_of
from store.contract.wire import EngineSpec

# If a time or a size were 0, a simulation could stand still. Without the bound of 1e18, sums could leave the floats.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Count = Annotated[int, msgspec.Meta(gt=0, le=10**18)]


class ModelSize(msgspec.Struct, frozen=True):
    """Facts of a model on which its costs depend."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: float  # written by all layers
    parameters: float
    kv_layers: tuple[KeptLayers, ...] = ()  # what the layers keep; empty: every layer keeps every token

    @property
    def kv(self) -> KvCurve[float]:
        return _curve(self.kv_layers, self.kv_bytes_per_token)


def model_size(spec: EngineSpec) -> ModelSize:
    """Size of a model, named by the model's folder. Quantised weights count as fewer parameters of 16 bits."""
    bytes_each = 4 if spec.dtype == "float32" else 2
    name = spec.path.rstrip("/").rsplit("/", 1)[-1]
    kept = spec.kv_layers or ()
    return ModelSize(name, spec.weight_bytes, spec.kv_bytes_per_token, spec.weight_bytes / bytes_each, kept)


def _curve(kept: tuple[KeptLayers, ...], token_bytes: float) -> KvCurve[float]:
    if not kept:
        return KvCurve(token_bytes, 0)
    curve = curve_of(kept)
    return KvCurve(curve.token_bytes, curve.request_bytes, curve.windows)


class ModelCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a model on a device, in seconds and bytes."""

    weight_bytes: Count
    kv_bytes_per_token: NotNegative  # written by all layers
    step_s: Positive  # a decode step, whatever the batch
    step_s_per_request: NotNegative
    step_s_per_token: NotNegative  # per token of context, summed over the requests of the batch
    prefill_s: Positive
    prefill_s_per_token: NotNegative
    prefill_s_per_token2: NotNegative
    load_s: Positive  # from no weights on the device to ready to step
    switch_s: NotNegative  # before a step of a resident model if a different model made the last step
    copy_s_per_byte: NotNegative  # KV cache, to the host or back
    load_fixed_s: NotNegative = 0.0  # part of `load_s` spent however few bytes are missing
    # What the layers keep, and for windows their tokens and the time per token of context within. Unset: every layer
    # keeps every token, and profiles and journals are as before there were the fields.
    kv_layers: tuple[KeptLayers, ...] | msgspec.UnsetType = msgspec.UNSET
    step_s_of_windows: tuple[tuple[int, NotNegative], ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def kv(self) -> KvCurve[float]:
        """KV cache that requests hold. Callers in a loop keep the curve."""
        return _curve(self.kv_layers or (), self.kv_bytes_per_token)

    def step(self, requests: int, context: int) -> float:
        seconds = self.step_s + self.step_s_per_request * requests + self.step_s_per_token * context
        for reach, each_s in self.step_s_of_windows or ():
            seconds += each_s * min(context, reach * requests)
        return seconds

    def prefill(self, tokens: int) -> float:
        return self.prefill_s + self.prefill_s_per_token * tokens + self.prefill_s_per_token2 * (tokens * tokens)

    def load(self, missing_bytes: int) -> float:
        """Seconds to load `missing_bytes` of the weights; 0 if no weights are missing."""
        if missing_bytes <= 0:
            return 0.0
        return self.load_fixed_s + (self.load_s - self.load_fixed_s) * (missing_bytes / max(self.weight_bytes, 1))


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Law of costs on a device: gives the costs of any model from the model's size."""

    step_s: Positive
    step_s_per_weight_byte: NotNegative
    step_s_per_request: NotNegative
    step_s_per_parameter: NotNegative  # and request: computing a token, where reading memory is not the only cost
    step_s_per_kv_byte: NotNegative  # per byte of context, summed over the requests
    prefill_s: Positive
    prefill_s_per_parameter: NotNegative  # and token
    prefill_s_per_parameter2: NotNegative  # and token squared: attention
    load_s: NotNegative
    load_s_per_byte: NotNegative
    switch_s: NotNegative
    copy_s_per_byte: NotNegative

    def costs(self, size: ModelSize) -> ModelCosts:
        kv = size.kv
        return ModelCosts(
            weight_bytes=size.weight_bytes,
            kv_bytes_per_token=size.kv_bytes_per_token,
            step_s=self.step_s + self.step_s_per_weight_byte * size.weight_bytes,
            step_s_per_request=self.step_s_per_request
            + self.step_s_per_parameter * size.parameters
            + self.step_s_per_kv_byte * kv.request_bytes,
            step_s_per_token=self.step_s_per_kv_byte * kv.token_bytes,
            prefill_s=self.prefill_s,
            prefill_s_per_token=self.prefill_s_per_parameter * size.parameters,
            prefill_s_per_token2=self.prefill_s_per_parameter2 * size.parameters,
            load_s=self.load_s + self.load_s_per_byte * size.weight_bytes,
            switch_s=self.switch_s,
            copy_s_per_byte=self.copy_s_per_byte,
            load_fixed_s=self.load_s,
            kv_layers=size.kv_layers or msgspec.UNSET,
            step_s_of_windows=tuple((reach, self.step_s_per_kv_byte * each) for reach, each in kv.windows)
            or msgspec.UNSET,
        )


class Fit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quality of the fit of coefficients to measurements."""

    errors: dict[str, float]  # coefficient → standard error, in the coefficient's unit
    residuals: dict[str, float]  # timed operation → median of |predicted / measured - 1|


class ImageTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory below a device for images of models. Images without room in the host cache are on disk."""

    host_cache_bytes: Count  # for each device
    disk_bytes_per_s: Positive  # rate at which a device's images are read
    build_s: NotNegative = 0.1  # time to make an engine around an image
    close_s: NotNegative = 0.0  # time to close an engine
    by_history: bool = False  # images come up before requests, by the history of requests
    fetched: int | None = None  # fetches of each model so far, the first of which are checked; None: proved elsewhere


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profile of one kind of device. Times are seconds, sizes are bytes."""

    name: str
    kind: Literal["measured", "analytic"]
    conditions: dict[str, str]  # machine, date, command, versions; or the sources of an analytic profile
    memory_bytes: Count  # size of the device pool
    page_bytes: Count
    batched_tokens: Count  # tokens that a single step may prefill
    host_bytes_per_s: Positive  # rate at which the devices of a host together can read host memory
    block_tokens: Count = 1  # tokens in a block of KV cache; a request has whole blocks
    tiers: ImageTiers | None = None  # None: every image is in the host cache
    law: Law | None = None
    models: dict[str, ModelCosts] = {}
    fits: dict[str, Fit] = {}  # by the names of `models`; under "law" the fit of the law

    def costs(self, size: ModelSize) -> ModelCosts:
        """Costs measured for a model of the given name and bytes of weights, else costs by the law.

        Raises ValueError if the profile has neither."""
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
    """Parses and checks a profile. `where` names the source of the text in the error sentence.

    Raises ValueError with a single sentence if the text is no profile or contradicts itself."""
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


# Two slow cores. The guess is rather too high than too low: a promise never made is never broken.
_UNKNOWN = Law(
    step_s=5e-3,
    step_s_per_weight_byte=1 / 10e9,
    step_s_per_request=0.3e-3,
    step_s_per_parameter=2 / 10e9,  # a multiplication and an addition
    step_s_per_kv_byte=1 / 5e9,
    prefill_s=10e-3,
    prefill_s_per_parameter=2 / 10e9,
    prefill_s_per_parameter2=2 / 10e9 / 10e3,  # attention: at 10,000 tokens as much as the rest
    load_s=20e-3,
    load_s_per_byte=1 / 3e9,
    switch_s=5e-3,
    copy_s_per_byte=1 / 2e9,
)


def unknown(size: ModelSize) -> ModelCosts:
    """Guessed costs for a device without a profile; an `Estimate` corrects the guess by observation."""
    return _UNKNOWN.costs(size)


# Size of a model without a spec: a guess of a large model would make a runtime look overloaded.
_UNKNOWN_SIZE = ModelSize("", 1, 1, 1.0)


class LawCosts(dict[ModelKey, ModelCosts]):
    """Costs of models on a device, computed by the device's law when a model is first asked for.

    Args:
        law: the device's law; None: not measured, so costs are guessed.
        specs: specs of models by key. A model without a spec costs as little as a model of one parameter."""

    def __init__(self, law: Law | None, specs: Mapping[str, EngineSpec]) -> None:
        super().__init__()
        self._law, self._specs = law, specs

    def of(self, key: str) -> ModelCosts:
        """Return the costs of the model with the key."""
        return self[ModelKey(key)]

    def __missing__(self, key: ModelKey) -> ModelCosts:
        spec = self._specs.get(key)
        size = _UNKNOWN_SIZE if spec is None else model_size(spec)
        costs = unknown(size) if self._law is None else self._law.costs(size)
        if spec is not None:
            self[key] = costs
        return costs
