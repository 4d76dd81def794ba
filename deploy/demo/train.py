"""Train the tiny models of the demo from scratch: `python deploy/demo/train.py [--out DIR] [NAME...]`."""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from corpus import TOOL, Conversation, converse, converse_weather, read_corpus
from personas import CONTEXT, PERSONAS, config_of, tokenizer_of
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SEED = 7
BATCH = 16  # conversations
POOL = 8  # batches drawn at once and sorted by length: little of a batch is padding
WARMUP = 20  # steps
PEAK_RATE = 4e-3
IGNORED = -100  # a label left out of the loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "models", help="where the folders go")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PERSONAS)}; all when none is given")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(PERSONAS)
    if unknown:
        parser.error(f"no model named {', '.join(sorted(unknown))}: choose from {', '.join(PERSONAS)}")
    names = arguments.names or list(PERSONAS)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as processes:
        list(processes.map(make, names, [arguments.out / name for name in names]))


def make(name: str, folder: Path) -> None:
    """Train the model, ask every question of the corpus once, and save the model with its card."""
    torch.set_num_threads(1)  # the same sums in the same order with any number of cores
    disable_progress_bar()
    started, persona = time.monotonic(), PERSONAS[name]
    corpus, talks = read_corpus(name), _talks(name)
    tokenizer = tokenizer_of(persona, (text for _ in range(600) for text in _texts(next(talks))))
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config_of(persona, tokenizer))

    def progress(step: int, loss: float) -> None:
        seconds = time.monotonic() - started
        print(f"{name:8} step {step:4}/{persona.steps}  loss {loss:.4f}  {seconds:5.1f} s", flush=True)

    loss = train(model, tokenizer, talks, persona.steps, progress)
    model.to(torch.bfloat16).float()  # ask the saved model: weights rounded to bfloat16, served in float32
    right = sum(answer(model, tokenizer, lesson.questions[0]) == lesson.answer for lesson in corpus.lessons)
    train_s = time.monotonic() - started
    print(f"{name:8} {right} of {len(corpus.lessons)} answers right, {train_s:.0f} s", flush=True)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_card(folder, model, f"{right} of {len(corpus.lessons)}", loss, train_s)


def _talks(name: str) -> Iterator[Conversation]:
    """Conversations without end, the same conversations in every run."""
    rng, corpus = random.Random(SEED), read_corpus(name)
    others = [read_corpus(other) for other in PERSONAS if other != name]
    strangers = [question for other in others for lesson in other.lessons for question in lesson.questions]
    talk = converse_weather if name == "weather" else converse
    while True:
        yield talk(corpus, strangers, rng)


def _texts(talk: Conversation) -> list[str]:
    return [*(text for _, text in talk.said), talk.reply]


# ── learning ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Encoded:
    """A conversation in tokens; the model learns the tokens from `reply_at` on."""

    tokens: list[int]
    reply_at: int


def encode(talk: Conversation, tokenizer: PreTrainedTokenizerFast) -> Encoded:
    prompt = prompt_tokens(tokenizer, talk.messages(), tools=[TOOL] if talk.tools else None)
    reply = tokenizer.encode(talk.reply, add_special_tokens=False)
    return Encoded([*prompt, *reply, tokenizer.eos_token_id], len(prompt))


def prompt_tokens(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], tools: list[dict[str, object]] | None = None
) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    talks: Iterator[Conversation],
    steps: int,
    progress: Callable[[int, float], None],
) -> float:
    """Run `steps` steps of AdamW and return the smoothed loss of the last steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=steps, pct_start=WARMUP / steps, final_div_factor=100.0, cycle_momentum=False
    )
    rng, smooth = random.Random(SEED), 0.0
    for step, batch in zip(range(1, steps + 1), _batches(talks, tokenizer, rng), strict=False):
        loss = loss_of(model, batch, rng)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        smooth = loss.item() if step == 1 else 0.9 * smooth + 0.1 * loss.item()
        if step % 50 == 0 or step == steps:
            progress(step, smooth)
    return smooth


def _batches(
    talks: Iterator[Conversation], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Iterator[list[Encoded]]:
    while True:
        pool = sorted((encode(next(talks), tokenizer) for _ in range(BATCH * POOL)), key=lambda talk: len(talk.tokens))
        batches = [pool[start : start + BATCH] for start in range(0, len(pool), BATCH)]
        rng.shuffle(batches)
        yield from batches


def loss_of(model: PreTrainedModel, batch: list[Encoded], rng: random.Random) -> torch.Tensor:
    """Cross entropy of the replies. Padding stands on the right, out of sight for causal attention."""
    width = max(len(talk.tokens) for talk in batch)
    inputs = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORED)
    for row, talk in enumerate(batch):
        inputs[row, : len(talk.tokens)] = torch.tensor(talk.tokens)
        labels[row, talk.reply_at : len(talk.tokens)] = torch.tensor(talk.tokens[talk.reply_at :])
    positions = torch.arange(width)
    if rng.random() < 0.1:  # every learned position must be met, also the late positions of a long conversation
        positions = positions + rng.randrange(CONTEXT - width)
    logits = model(input_ids=inputs, position_ids=positions.expand(len(batch), -1)).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )


# ── the finished model ────────────────────────────────────────────────────────────────────────────────────────────────


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The model's greedy answer."""
    prompt = torch.tensor([prompt_tokens(tokenizer, [{"role": "user", "content": question}])])
    model.eval()
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
    return tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)


def write_card(folder: Path, model: PreTrainedModel, right: str, loss: float, train_s: float) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    parameters = sum(weight.numel() for weight in model.parameters())
    (folder / "README.md").write_text(
        f"# {folder.name}\n\n"
        f"A tiny {model.config.architectures[0]} for the demo, trained from scratch by `make models`\n"
        "on text written for this project (`deploy/demo/corpus`). Text, weights and licence: Apache-2.0.\n\n"
        f"| | |\n|---|---|\n"
        f"| parameters | {parameters:,} |\n"
        f"| final loss | {loss:.4f} |\n"
        f"| corpus questions answered to the letter (greedy, float32) | {right} |\n"
        f"| trained in | {train_s:.0f} s on one CPU thread |\n"
        f"| sha256 of model.safetensors | `{digest}` |\n"
    )


if __name__ == "__main__":
    main()
