"""A model of eight pages on devices of a few pages, for tests with too little memory."""

from __future__ import annotations

from runtime.core.ledgers.costs import ModelCosts, Profile

PAGE = 1 << 20
COSTS = ModelCosts(
    weight_bytes=8 * PAGE,
    kv_bytes_per_token=PAGE / 64,
    step_s=0.01,
    step_s_per_request=0.001,
    step_s_per_token=0.0,
    prefill_s=0.01,
    prefill_s_per_token=0.0005,
    prefill_s_per_token2=0.0,
    load_s=0.01,
    switch_s=0.0,
    copy_s_per_byte=1e-8,
)


def profile(pages: int) -> Profile:
    return Profile(
        name="small",
        kind="measured",
        conditions={},
        memory_bytes=pages * PAGE,
        page_bytes=PAGE,
        batched_tokens=2048,
        host_bytes_per_s=1e10,
        models={f"m{index}": COSTS for index in range(8)},
    )
