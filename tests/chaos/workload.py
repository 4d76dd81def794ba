"""Requests of the clients of a run: seed and number determine a request."""

from __future__ import annotations

import random
from typing import Any

from tests.chaos.history import Ask
from tests.e2e.conftest import AWAKE, MODELS, Platform

NAMES = ("faq", "poet", "weather")
TENANTS = ("acme", "globex", "initech")
# A request of initech may be refused, and has to be paid in advance.
LIMITS = {"requests_per_minute": 240, "concurrent_streams": 4, "monthly_budget": {"amount": "1000.00"}}
PRICE = {"prompt_pico": 3, "cached_pico": 1, "output_pico": 7, "gpu_s_pico": 11, "switch_s_pico": 13}
LENGTHS = (3, 17, 40)  # tokens of prompts, some with a whole block that can be cached
TOKENS = (1, 6, 30, 90, 240)
MESSAGES = ("How do I pay?", "Will it rain?", "Sing of the sea.")


def prepare(platform: Platform) -> None:
    for name in NAMES:
        platform.model(name, MODELS / name)
    platform.post("/api/v1/prices", PRICE)
    for tenant in TENANTS:
        platform.tenant(tenant)
        for name in NAMES:
            platform.deploy(tenant, name, scaling=AWAKE["scaling"])
    limited = platform.request("PATCH", "/api/v1/tenants/initech", {"limits": LIMITS})
    assert limited.status_code == 200, limited.text


def asked(seed: int, number: int, keys: dict[str, str]) -> Ask:
    chance = random.Random(f"{seed} {number}")
    tenant, model = chance.choice(TENANTS), chance.choice(NAMES)
    most = chance.choice(TOKENS)
    body: dict[str, Any] = {"model": model, "max_tokens": most, "ignore_eos": True, "return_token_ids": True}
    sampled = chance.random() < 0.4
    body |= {"temperature": 0.8, "seed": chance.randrange(4)} if sampled else {"temperature": 0}
    if chance.random() < 0.7:
        body |= {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
    if chance.random() < 0.2:
        path, prompts = "/v1/chat/completions", []
        body["messages"] = [{"role": "user", "content": chance.choice(MESSAGES)}]
    else:
        path, prompts = "/v1/completions", [chance.choice(LENGTHS) for _ in range(chance.choice((1, 1, 1, 2)))]
        written = [[5 + chance.randrange(4), *range(6, 5 + length)] for length in prompts]
        body["prompt"] = written if len(written) > 1 else written[0]
    if sampled and chance.random() < 0.3:
        body["n"] = 2
    key = keys[tenant]
    wrong = chance.random()
    if wrong < 0.02:
        body["model"] = "nobody"
    elif wrong < 0.04:
        body["max_tokens"] = 1 << 20
    elif wrong < 0.06:
        key += "x"
    leaves_at = chance.choice((0, 1, 3, 20)) if chance.random() < 0.15 else None
    return Ask(
        number,
        tenant,
        path,
        body,
        key,
        tuple(prompts),
        most * body.get("n", 1) * max(1, len(prompts)),
        leaves_at if leaves_at is None or body.get("stream") else 0,
        bool(leaves_at and body.get("stream")) and chance.random() < 0.4,
    )


def calm(number: int, keys: dict[str, str]) -> Ask:
    """A request of a tenant without limits, whose client stays to the end."""
    tenant, model = TENANTS[number % 2], NAMES[number // 2 % 3]
    body = {"model": model, "prompt": [9, *range(6, 30)], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": number < 6}
    return Ask(number, tenant, "/v1/completions", body, keys[tenant], (25,), 20)
