"""A device process with models of vectors beside a model of text, more than the device holds at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.demo.random_weights import write_random
from runtime import ipc
from store.contract.wire import Finish, Residency
from tests.runtime.engines import spec
from tests.runtime.pooling.bare import vectors_of_bare_vllm
from tests.runtime.pooling.models import CONTEXT, VECTOR_MODELS, write_vector_model
from tests.runtime.pooling.test_vectors import NEAR, text
from tests.runtime.processes import DeviceProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM, torch and transformers
MIB = 1 << 20
POOL_BYTES, HOST_BYTES = 16 * MIB, 256 * MIB
NAMES = ("BertModel mean", "BertForSequenceClassification", "Qwen3ForCausalLM")
PROMPTS = [[(31 * n * n + 7 * seed + 3) % 500 + 3 for n in range(20 + 9 * seed)] for seed in range(24)]
ROUNDS = 2  # of all prompts at each model: more tokens than a step takes
TALK: dict[str, Any] = dict(prompt=[7, 8, 9] * 20, temperature=0, max_tokens=48)


def numbers(beside: bytes | None) -> list[float]:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.serial_utils import MsgpackDecoder

    made: list[float] = MsgpackDecoder(EngineCoreOutput).decode(beside).pooling_output.tolist()
    return made


async def test_vectors_and_text_are_made_in_turns_by_models_that_do_not_fit_together(tmp_path: Path) -> None:
    folders = {name: write_vector_model(tmp_path / str(n), name) for n, name in enumerate(NAMES)}
    tasks = {name: VECTOR_MODELS[name].task for name in NAMES}
    wanted = await asyncio.to_thread(vectors_of_bare_vllm, folders, tasks, PROMPTS)
    device = await DeviceProcess.start(POOL_BYTES, HOST_BYTES, policy="slack")
    try:
        await device.load({"talker": write_random(tmp_path / "talker", "llama", seed=9)})
        alone = await device.answer(device.ask("talker", TALK))
        for name, folder in folders.items():
            placed = msgspec.structs.replace(spec(folder, CONTEXT, key=name), task=tasks[name])
            device.end.send(ipc.Place(placed))
        await device.until(lambda: all(name in device.state.models for name in NAMES))
        await device.until(lambda: all(model.load_ms or model.error for model in device.state.models.values()))
        talks = [device.ask("talker", TALK, salt=str(n)) for n in range(3)]
        asked = [
            (device.send(name, text(prompt, tasks[name], "tenant"), len(prompt), 0), name, number)
            for _ in range(ROUNDS)
            for number, prompt in enumerate(PROMPTS)
            for name in NAMES
        ]
        await device.until(lambda: all(stream in device.ended for stream, _, _ in asked))
        for stream, name, number in asked:
            assert device.ended[stream] == (Finish.STOP, "") and device.said[stream] == []
            pairs = zip(numbers(device.beside[stream]), wanted[name][number], strict=True)
            assert max(abs(made - bare) for made, bare in pairs) <= NEAR, (name, number)
        assert [await device.answer(stream) for stream in talks] == [alone] * len(talks)
        assert device.state.switches > 1
        assert Residency.STAGED in [model.residency for model in device.state.models.values()], "nothing had to leave"
    finally:
        await device.stop()
