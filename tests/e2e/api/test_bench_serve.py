"""`vllm bench serve`, vLLM's own load generator, against the gateway. Every request completes with every token."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.bench.gateway.servers import vllm_command, vllm_environment
from tests.e2e.conftest import MODELS, Platform

PROMPTS, OUTPUT_TOKENS = 12, 16


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
def test_vllm_bench_serve_completes_all_its_requests(
    platform: Platform, tmp_path: Path, backend: str, endpoint: str
) -> None:
    before = platform.usage("acme")
    command = vllm_command(
        *("bench", "serve", "--backend", backend, "--base-url", platform.url, "--endpoint", endpoint),
        *("--model", "faq", "--tokenizer", str(MODELS / "faq"), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", "24", "--random-output-len", str(OUTPUT_TOKENS), "--random-range-ratio", "0"),
        *("--num-prompts", str(PROMPTS), "--max-concurrency", "4", "--temperature", "0", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        *("--ready-check-timeout-sec", "0"),
    )
    environment = vllm_environment(tmp_path / "dist") | {"OPENAI_API_KEY": platform.keys["acme"]}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == PROMPTS and not any(result["errors"])
    assert result["output_lens"] == [OUTPUT_TOKENS] * PROMPTS
    asked = {"requests": PROMPTS, "output_tokens": PROMPTS * OUTPUT_TOKENS}
    platform.until(lambda: {name: platform.usage("acme")[name] - before[name] for name in asked} == asked)
