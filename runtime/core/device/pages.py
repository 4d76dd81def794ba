"""The machine's books of a device's pages, by model: changes are booked when the machine asks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.core.device.request import ModelKey
from runtime.core.engine import Held

_NOTHING = Held()


class Pages:
    """Books of a pool of `total` pages.

    The sum of the models' pages never exceeds `total`, pages on their way included."""

    def __init__(self, total: int, page_bytes: int) -> None:
        self.total, self.page_bytes = total, page_bytes
        self.used = 0
        self._held: dict[ModelKey, Held] = {}

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def held(self) -> Mapping[ModelKey, Held]:
        """Pages of each model. Models that neither hold nor want pages are left out."""
        return self._held

    def of(self, model: ModelKey) -> Held:
        return self._held.get(model, _NOTHING)

    def book(self, model: ModelKey, weights: int = 0, kv: int = 0) -> None:
        """Add to the model's pages, or subtract with negative numbers, when the machine has asked for the change.

        Pages subtracted from the KV cache are spare pages first."""
        held = self._held.get(model, _NOTHING)
        spare = held.kv_spare + kv if kv < 0 else held.kv_spare
        self.settle(model, Held(held.weights + weights, held.kv + kv, held.kv_wanted, spare if spare > 0 else 0))

    def settle(self, model: ModelKey, held: Held) -> None:
        """Replace the model's booked pages by the pages that the engine told."""
        before = self._held.get(model, _NOTHING)
        self.used += held.weights + held.kv - before.weights - before.kv
        assert held.weights >= 0 and held.kv >= 0, f"{model} holds fewer than no pages: {held}"
        assert self.used <= self.total, f"{self.used} of {self.total} pages: {model} went from {before} to {held}"
        if held == _NOTHING:
            self._held.pop(model, None)
        else:
            self._held[model] = held

    def told(self, model: ModelKey, held: Held, moving: bool) -> None:
        """Settle the pages told by an engine. While pages move, the booked pages are more exact and stay."""
        if moving:
            booked = self.of(model)
            held = Held(booked.weights, booked.kv, held.kv_wanted, held.kv_spare)
        self.settle(model, held)

    def mib(self, pages: int) -> str:
        """Number of pages with their size, for a sentence: `12 pages (24 MiB)`."""
        return f"{pages} pages ({pages * self.page_bytes / (1 << 20):.0f} MiB)"

    def too_few(self, weights: int, needed: int, tokens: int) -> str:
        """A sentence on a model that needs more pages than the device has.

        `weights` of the `needed` pages are for the weights, the others for one request of `tokens` tokens."""
        return (
            f"the model needs {self.mib(needed)}, {weights} of them for its weights and the others for one request of "
            f"{tokens} tokens, and the device has {self.mib(self.total)}: give it more memory, or lower max_model_len"
        )

    def too_few_to_build(self, needed: int) -> str:
        """A sentence on a model whose build needs more pages than the device has."""
        return (
            f"the model needs {self.mib(needed)} while it is built, and the device has {self.mib(self.total)}: give it "
            "more memory with STACCATO_DEVICE_MEMORY"
        )

    def check(self) -> None:
        assert self.used == sum(held.weights + held.kv for held in self._held.values()), "the sum of all is not kept"
        assert 0 <= self.used <= self.total, f"{self.used} pages are held of {self.total}"
