"""Tiny models with random weights that see pictures: model, tokenizer, picture processor and chat template in a folder.

`write_seeing` writes the folder of a family. `picture` makes a picture, as a data: URL of a PNG.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from deploy.demo.random_weights import SPREAD, _tokenizer
from tests.runtime.forms import CONTEXT, SHAPE, VOCABULARY

PIXELS_LEAST, PIXELS_MOST = 56 * 56, 112 * 112  # sizes to which Qwen's processors scale a picture
TEXT = {name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"}
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SMOL_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PICTURE{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_seeing(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a model folder of a family that sees pictures.

    Args:
        folder: where to write; made if missing.
        family: a name of `FAMILIES`.
        seed: seed of the random weights.

    Returns: the folder.
    """
    config, processor = FAMILIES[family]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, weight in model.named_parameters():
            if "norm" not in name and (weight.ndim > 1 or name.endswith("bias")):
                torch.nn.init.normal_(weight.data, std=SPREAD)
    model.to(torch.float32).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(seed: int, size: tuple[int, int] = (96, 80)) -> str:
    """A picture of random colours in 8 x 8 fields, as a data: URL."""
    chance = random.Random(seed)
    fields = Image.frombytes("RGB", (8, 8), chance.randbytes(3 * 8 * 8))
    written = io.BytesIO()
    fields.resize(size, Image.Resampling.NEAREST).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def about(text: str, *urls: str) -> list[dict[str, Any]]:
    """Messages of a chat with pictures before the text."""
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def _marked(marks: tuple[str, ...], **named: str) -> PreTrainedTokenizerFast:
    """The byte-level tokenizer of the demo's random models, with the marks in the place of the last words."""
    plain = _tokenizer(VOCABULARY - len(marks), CONTEXT)
    plain.add_special_tokens({"additional_special_tokens": [AddedToken(mark, special=True) for mark in marks]})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        bos_token=plain.bos_token,
        eos_token=plain.eos_token,
        pad_token=plain.eos_token,
        extra_special_tokens=named,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    assert len(tokenizer) == VOCABULARY
    return tokenizer


def _qwen(kind: str, vision: dict[str, Any], rope: dict[str, Any]) -> tuple[Any, PreTrainedTokenizerFast]:
    """Config and tokenizer of a Qwen-VL; `kind` is transformers' name of the family."""
    tokenizer = _marked(QWEN_MARKS, image_token="<|image_pad|>", video_token="<|video_pad|>")
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(QWEN_MARKS))
    config = AutoConfig.for_model(
        kind,
        text_config=TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope}},
        vision_config={"hidden_size": 64, "num_heads": 2, "depth": 2, "patch_size": 14, "in_channels": 3} | vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return config, tokenizer


def _qwen2_5_vl() -> tuple[Any, ProcessorMixin]:
    vision = {"out_hidden_size": 128, "intermediate_size": 128, "fullatt_block_indexes": [1], "window_size": 56}
    config, tokenizer = _qwen("qwen2_5_vl", vision, {"mrope_section": [4, 6, 6]})
    bounds = {"min_pixels": PIXELS_LEAST, "max_pixels": PIXELS_MOST}
    return config, Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(**bounds), tokenizer, Qwen2VLVideoProcessor(**bounds), chat_template=_template(QWEN_MARKS)
    )


def _qwen3_vl() -> tuple[Any, ProcessorMixin]:
    vision = {"out_hidden_size": 128, "intermediate_size": 128, "patch_size": 16, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0]}
    config, tokenizer = _qwen("qwen3_vl", vision, {"mrope_section": [6, 5, 5], "mrope_interleaved": True})
    sizes = {"shortest_edge": PIXELS_LEAST, "longest_edge": PIXELS_MOST}
    return config, Qwen3VLProcessor(
        Qwen2VLImageProcessor(patch_size=16, size=sizes),
        tokenizer,
        Qwen3VLVideoProcessor(patch_size=16, size=sizes),
        chat_template=_template(QWEN_MARKS),
    )


def _template(marks: tuple[str, ...]) -> str:
    start, end, image, _ = marks
    return TEMPLATE.replace("PICTURE", start + image + end)


def _smolvlm() -> tuple[Any, ProcessorMixin]:
    side, patch, scale = 64, 16, 2
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)]
    names = ("image_token", "fake_image_token", "global_image_token", "end_of_utterance_token")
    tokenizer = _marked((*SMOL_MARKS, *rows), **dict(zip(names, SMOL_MARKS, strict=True)))
    config = AutoConfig.for_model(
        "smolvlm",
        text_config=TEXT | {"model_type": "llama"},
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": patch,
        },
        scale_factor=scale,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    images = {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
    return config, SmolVLMProcessor(
        SmolVLMImageProcessor(**images, do_image_splitting=True),
        tokenizer,
        SmolVLMVideoProcessor(**images),
        image_seq_len=(side // patch // scale) ** 2,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )


FAMILIES: dict[str, Callable[[], tuple[Any, ProcessorMixin]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
}
