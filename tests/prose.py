"""Counts how plainly docstrings, comments and Markdown are written.

Models, requests, tenants, runtimes and pages meet in nearly every sentence of this project; only nouns tell them apart.
Two shares are counted in a file: words that stand for a noun, and sentences that begin with such a word.
`python -m tests.prose FILE...` prints both shares of each file.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRONOUNS = frozenset(
    "it its they them their theirs that those this these who whom whose one ones one's other others another which what"
    " there here such same so all each either nobody somebody everybody nothing something".split()
)
OPENERS = frozenset(
    "it its they those these one ones who whose what which others another nobody somebody all such so of".split()
)
LABEL_WORDS_MAX = 3  # a text with so few words is a label and no sentence
MACHINE_COMMENTS = re.compile(r"# ?(type:|noqa|pragma|SPDX|──)")
SENTENCE_END = re.compile(r"(?<=[.;:!?])\s+|\n\s*\n|\n\s*[-*|]\s+")
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)


class Shares(NamedTuple):
    """Percentages of a text, and the number of counted words."""

    words: int
    pronouns: float  # percent of the words
    openers: float  # percent of the sentences


def shares(path: Path) -> Shares:
    """Shares of a Python or Markdown file."""
    text = path.read_text()
    parts = [CODE_BLOCK.sub("", text)] if path.suffix == ".md" else list(_docstrings_and_comments(text))
    sentences = [words for part in parts for words in _sentences(part)]
    count = sum(map(len, sentences))
    if not count:
        return Shares(0, 0.0, 0.0)
    pronouns = sum(word in PRONOUNS for words in sentences for word in words)
    openers = sum(words[0] in OPENERS for words in sentences)
    return Shares(count, 100 * pronouns / count, 100 * openers / len(sentences))


def _docstrings_and_comments(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not MACHINE_COMMENTS.match(token.string):
            yield token.string.strip("#: ")


def _sentences(text: str) -> Iterator[list[str]]:
    for sentence in SENTENCE_END.split(text):
        words = re.findall(r"[a-z_']+", sentence.lower())
        if len(words) > LABEL_WORDS_MAX:
            yield words


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = shares(Path(name))
        print(f"{found.pronouns:5.1f} % {found.openers:5.1f} % {found.words:6d} words  {name}")
