"""Writes `architectures.md`, beside this file: the table of `store/files/architectures.py` for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from store.files.architectures import EITHER_MEASURED, TABLE, Served, Support

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """\
# Architectures

This page says which architectures of models Staccato serves. The architecture is the name under `architectures` in a
model's `config.json`. The gateway refuses other models, with the reasons below, when a model is registered or imported,
before any weight is read or fetched.

The page is written by `python deploy/docs/manual/architectures.py` from the table in `store/files/architectures.py`. A
test holds the table against the names in vLLM's registry.

- **Measured**: the model's tokens were compared with those of bare vLLM, and were equal, also after the model had been
  parked in mid-answer. Vectors of embeddings and scores were equal but for rounding. The models measured
  were tiny, with random weights, on CPUs.
- **Measured as text**: the same comparison, for deployments with `--language-model-only`. Answers about pictures are
  expected to be right, and were not compared. The golden question of each build finds a model that answers wrongly.

An architecture is served if the tests build a model of the architecture: `make test-long` does so for each name below.

Some architectures come in several forms. Staccato refuses these forms of architectures that are served otherwise:
layers of linear attention, Mamba or convolution in architectures that are not measured with such layers, sparse
attention with an index, and encoder-decoder models.

A model with the file `modules.json` of sentence-transformers makes embeddings. The architecture must be one of those
below under "makes embeddings", or {either}.
The parts of such a model may be the transformer, a pooling in the folder `1_Pooling`, and a normalisation.
"""


def page() -> str:
    """Return the text of the page."""
    either = ", ".join(f"`{name}`" for name in sorted(EITHER_MEASURED))
    return "\n".join([INTRODUCTION.format(either=either), *_sections()])


def _sections() -> Iterator[str]:
    for support in (Support.SERVED, Support.PICTURES, Support.TEXT, Support.EMBEDS, Support.SCORES):
        yield f"## {support.value.capitalize()}\n"
        for word in ("Measured", "Measured as text"):
            lines = {name: line for name, line in TABLE.items() if line.support is support and _word(line) == word}
            for reason in dict.fromkeys(line.reason for line in lines.values()):
                names = [name for name, line in lines.items() if line.reason == reason]
                yield _listed(f"**{word}**{f' ({reason})' if reason else ''}: ", names)
    yield "## Not yet\n"
    for reason in dict.fromkeys(line.reason for line in TABLE.values() if line.support is Support.NOT_YET):
        names = [name for name, line in TABLE.items() if line.support is Support.NOT_YET and line.reason == reason]
        yield _listed(f"{reason[0].upper()}{reason[1:]}: ", names)


def _word(line: Served) -> str:
    return "Measured" if line.measured else "Measured as text"


def _listed(said: str, names: list[str]) -> str:
    text = said + ", ".join(f"`{name}`" for name in sorted(names, key=str.lower)) + "."
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
