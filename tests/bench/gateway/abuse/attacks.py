"""Single requests of one tenant that ask for much, for `bench_abuse.py`: requests beyond the default bounds, answered
with 400, and the largest requests within the bounds. A process with the lowest priority sends the requests: a job a
line in, the statuses of the answers a line out.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))

from gateway.core.extent import ExtentLimits
from tests.bench.gateway.child import LAST, ChildProgram

MODEL = "target"  # the attacker's deployment; the neighbour streams from a different model
ATTACKER = "127.0.0.2"  # its address
PAUSE_S = 1.0  # between two requests: the bench asks what a request does to the neighbours, not what a flood does
ANSWER_S = 60.0  # longest wait for one answer
LIMITS = ExtentLimits()
CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/tokenize"
RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Attack:
    """A request, sent again PAUSE_S after each answer until a window ends."""

    name: str
    path: str
    body: Callable[[], dict[str, Any]]  # without the model
    refused: bool = False  # by the default bounds: each answer is a 400

    def text(self) -> bytes:
        return json.dumps({"model": MODEL, **self.body()}, separators=(",", ":")).encode()


def said(content: str = "a", times: int = 1) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}] * times, "max_tokens": 1}


def letters(size: int) -> str:
    """A text of that many bytes in JSON, without a space."""
    return "a" * (size - 2)


# Requests that hold the gateway's loop: beyond the bounds, then at the bounds.
EXTENSIVE = (
    Attack("n=16384", CHAT, lambda: said() | {"n": 16384}, refused=True),
    Attack("100,000 messages", CHAT, lambda: said(times=100_000), refused=True),
    Attack("prompt_logprobs=20", COMPLETIONS, lambda: {"prompt": [5] * 900, "prompt_logprobs": 20}, refused=True),
    Attack("7.9 MB to tokenise", TOKENIZE, lambda: {"prompt": letters(7_900_000)}, refused=True),
    Attack(f"n={LIMITS.answers_max}", CHAT, lambda: said() | {"n": LIMITS.answers_max}),
    Attack(f"{LIMITS.messages_max:,} messages", CHAT, lambda: said(times=LIMITS.messages_max)),
    Attack(
        f"{LIMITS.text_bytes_max >> 20} MiB of text",
        CHAT,
        lambda: said(letters(LIMITS.text_bytes_max - 100)),
    ),
    Attack(
        f"{LIMITS.tokenize_bytes_max >> 10} KiB to tokenise",
        TOKENIZE,
        lambda: {"prompt": letters(LIMITS.tokenize_bytes_max)},
    ),
    Attack(
        f"prompt_logprobs={LIMITS.prompt_logprobs_max}",
        COMPLETIONS,
        lambda: {"prompt": [5] * 900, "prompt_logprobs": LIMITS.prompt_logprobs_max, "max_tokens": 1},
    ),
)

# Requests with a great many faults: vLLM's validation has a list of every fault before the answer tells of ten.
FAULTY = (
    Attack("faulty items", RESPONSES, lambda: {"input": [{"role": "nobody"}] * LIMITS.messages_max}, refused=True),
    Attack("millions of zeros", CHAT, lambda: said() | {"messages": [0] * 3_900_000}, refused=True),
    Attack("a mebibyte of zeros", CHAT, lambda: said() | {"messages": [0] * 524_000}, refused=True),
    Attack("empty conversations", CHAT, lambda: said() | {"messages": [[]] * 349_000}, refused=True),
    Attack("faulty tools", RESPONSES, lambda: {"input": "a", "tools": [{}] * LIMITS.messages_max}, refused=True),
    Attack("faulty tokens", COMPLETIONS, lambda: {"prompt": [1] + [None] * 200_000}, refused=True),
    Attack("faulty stops", CHAT, lambda: said() | {"stop_token_ids": [None] * 1_500_000}, refused=True),
    Attack(
        "faulty biases", CHAT, lambda: said() | {"logit_bias": dict.fromkeys(map(str, range(500_000)))}, refused=True
    ),
)

# Every attack of the bench. A further kind of attack is a tuple in a further file, added to this line.
ATTACKS: dict[str, Attack] = {attack.name: attack for attack in (*EXTENSIVE, *FAULTY)}


@dataclass(frozen=True)
class Job:
    port: int
    key: str
    name: str  # of the attack
    window_s: float


def sent(job: Job) -> Counter[str]:
    """Statuses of the answers in the window; the last request may end after the window."""
    attack, statuses = ATTACKS[job.name], Counter[str]()
    text, end = attack.text(), time.monotonic() + job.window_s
    headers = {"authorization": f"Bearer {job.key}", "content-type": "application/json", "connection": "close"}
    while time.monotonic() < end:
        connection = http.client.HTTPConnection("127.0.0.1", job.port, ANSWER_S, source_address=(ATTACKER, 0))
        try:
            connection.request("POST", attack.path, text, headers)
            answer = connection.getresponse()
            answer.read()
            statuses[str(answer.status)] += 1
        except (OSError, http.client.HTTPException) as error:
            statuses[type(error).__name__] += 1
        finally:
            connection.close()
        time.sleep(PAUSE_S)
    return statuses


class Attacker(ChildProgram):
    """The sending process, from the outside."""

    def __init__(self) -> None:
        super().__init__(__file__, *LAST)

    def run(self, job: Job) -> Counter[str]:
        return Counter(json.loads(self.ask(job)))


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(sent(Job(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
