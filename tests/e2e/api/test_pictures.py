"""Chats about pictures on two runtimes: bare vLLM's answers, pictures sent again after deaths, usage and refusals."""

from __future__ import annotations

import base64
import contextlib
import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from PIL import Image

from tests.conftest import free_port
from tests.e2e.conftest import Platform
from tests.runtime.bare import Answer, chat_with_bare_vllm
from tests.runtime.seeing import FAMILIES, about, picture, write_seeing

TOKENS, LONG_TOKENS = 24, 400
AGAIN_S = 240  # longest wait for a device process that starts again on a busy machine


def noise(side: int) -> str:
    """A picture that no format makes small, as a data: URL."""
    written = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(0).randbytes(3 * side * side)).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


CHATS = [
    about("What is there?", picture(1)),
    about("And here?", picture(2, (60, 130)), picture(1)),
    about("No picture at all."),
    about("And in all of these?", *(picture(seed, (112, 112)) for seed in range(8))),  # megabytes, once prepared
    about("Is it large?", noise(1650)),  # a file of 8 MB
]
MANY = 3  # index of the chat that no message of the bus could carry whole
pytestmark = pytest.mark.timeout(600)  # the first test starts a platform and builds three models at two runtimes
families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seeing")
    return {family: write_seeing(folder / family.replace("_", "-"), family, seed=1) for family in FAMILIES}


@pytest.fixture(scope="module")
def bare(folders: dict[str, Path]) -> dict[str, list[Answer]]:
    return chat_with_bare_vllm(folders, CHATS, TOKENS)


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    held = {"STACCATO_HOLD_DEADLINE_S": str(AGAIN_S), "STACCATO_RESUME_DEADLINE_S": str(AGAIN_S)}
    platform = Platform(tmp_path_factory.mktemp("pair") / "data", free_port(), held)
    try:
        platform.start("--runtimes", "2", "--device-memory", "48MiB")
        for tenant in ("acme", "globex"):
            platform.tenant(tenant)
        for family, folder in folders.items():
            platform.model(family, folder)
            for tenant in ("acme", "globex"):
                status = platform.deploy(tenant, family)["status"]
                assert status["phase"] in ("awake", "asleep"), status
        yield platform
    finally:
        code = platform.stop()
    assert code == 0


def said(client: openai.OpenAI, family: str, messages: Any, tokens: int = TOKENS) -> Answer:
    extra = {"ignore_eos": True, "top_k": 1, "return_token_ids": True}
    answer: Any = client.chat.completions.create(
        model=family, messages=messages, max_tokens=tokens, temperature=0, extra_body=extra
    )
    return Answer(answer.usage.prompt_tokens, answer.choices[0].token_ids)


@contextlib.contextmanager
def client_of(platform: Platform, tenant: str = "acme") -> Iterator[openai.OpenAI]:
    with platform.client(tenant, timeout=AGAIN_S, max_retries=0) as client:
        yield client


def drain(platform: Platform, runtime: str, on: bool) -> None:
    platform.post(f"/api/v1/gpus/{runtime}:drain", {"on": on})


@families
def test_chats_about_pictures_are_answered_as_by_bare_vllm(
    pair: Platform, bare: dict[str, list[Answer]], family: str
) -> None:
    with client_of(pair) as client:
        assert [said(client, family, chat) for chat in CHATS] == bare[family]
    assert bare[family][0].prompt_tokens > bare[family][2].prompt_tokens, "a picture's placeholders are counted"


@families
def test_a_picture_is_answered_again_at_every_runtime(
    pair: Platform, bare: dict[str, list[Answer]], family: str
) -> None:
    with client_of(pair) as client:
        for away in ("r1", "r2"):
            drain(pair, away, True)
            assert said(client, family, CHATS[0]) == bare[family][0]
            drain(pair, away, False)


def test_pictures_are_answered_again_after_their_devices_died(pair: Platform, bare: dict[str, list[Answer]]) -> None:
    with client_of(pair) as client:
        for family in FAMILIES:
            assert said(client, family, CHATS[MANY]) == bare[family][MANY]
        for device in pair.children("runtime.device"):
            with contextlib.suppress(psutil.NoSuchProcess):
                device.kill()
        for family in FAMILIES:
            assert said(client, family, CHATS[MANY]) == bare[family][MANY]


@families
def test_an_answer_about_a_picture_goes_on_at_another_runtime(pair: Platform, family: str) -> None:
    with client_of(pair) as client, ThreadPoolExecutor(1) as aside:
        expected, busy = said(client, family, CHATS[MANY], LONG_TOKENS), list[str]()
        while not busy:  # on a busy machine, an answer may end before its runtime is found
            asked = aside.submit(said, client, family, CHATS[MANY], LONG_TOKENS)
            while not asked.done() and not busy:
                busy = running(pair)
        drain(pair, busy[0], True)
        assert asked.result(120) == expected
        drain(pair, busy[0], False)


def running(platform: Platform) -> list[str]:
    gpus = platform.get("/api/v1/gpus").json()["data"]
    return [gpu["id"] for gpu in gpus if any(model["running"] for model in gpu["models"].values())]


def test_pictures_are_billed_by_their_placeholders(pair: Platform, bare: dict[str, list[Answer]]) -> None:
    before = pair.usage("globex")["prompt_tokens"]
    with client_of(pair, "globex") as client:
        asked = said(client, "qwen3_vl", CHATS[1]).prompt_tokens
    assert asked == bare["qwen3_vl"][1].prompt_tokens
    pair.until(lambda: pair.usage("globex")["prompt_tokens"] == before + asked)


def test_a_name_chosen_by_a_client_never_shows_another_picture_of_another_tenant(
    pair: Platform, bare: dict[str, list[Answer]]
) -> None:
    def named(url: str | None) -> Any:
        part = {"type": "image_url", "image_url": url and {"url": url}, "uuid": "mine"}
        return [{"role": "user", "content": [part, {"type": "text", "text": "What is there?"}]}]

    with client_of(pair) as ours, client_of(pair, "globex") as theirs:
        said(theirs, "qwen2_5_vl", named(picture(9)))
        assert said(ours, "qwen2_5_vl", named(picture(1))) == bare["qwen2_5_vl"][0]
        with pytest.raises(openai.BadRequestError):
            said(ours, "qwen2_5_vl", named(None))


def blank(side: int) -> str:
    written = io.BytesIO()
    Image.new("1", (side, side)).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


REFUSED: dict[str, tuple[Any, str]] = {
    "an address": (about("?", "http://127.0.0.1:1/a.png"), "no address is fetched"),
    "a file": (about("?", "file:///etc/hostname"), "no address is fetched"),
    "no base64": (about("?", "data:image/png;base64,%%%"), "base64 can't be read"),
    "no picture": (about("?", "data:image/png;base64,AAAA"), "none of PNG, JPEG, WEBP, GIF"),
    "too many pixels": (about("?", blank(8192)), "8192 x 8192 pixels, at most 16777216"),
    "too many pictures": (about("?", *[picture(1)] * 17), "17 pictures"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_picture_to_take_is_refused_with_a_reason(pair: Platform, case: str) -> None:
    messages, reason = REFUSED[case]
    with client_of(pair) as client, pytest.raises(openai.BadRequestError, match=reason):
        said(client, "qwen2_5_vl", messages)


def test_settings_of_the_picture_processor_are_not_a_clients(pair: Platform) -> None:
    with client_of(pair) as client, pytest.raises(openai.BadRequestError, match="prepare pictures"):
        client.chat.completions.create(
            model="qwen2_5_vl", messages=CHATS[0], extra_body={"mm_processor_kwargs": {"max_pixels": 1 << 30}}
        )
