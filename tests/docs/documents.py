"""The documents for people: fenced blocks, the commands in the blocks, and the commands within sentences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")),
        *(ROOT / folder / "README.md" for folder in ("gateway", "runtime", "store", "csrc", "tests")),
        *(ROOT / "tests/bench").glob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    )
)
FENCE = re.compile(r"^#+ ([^\n]+)$|^(?:<!-- ([^\n]+) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r" <<(\w+)\n.*?\n\1$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:\.venv/bin/)?(staccato|make|python|promtool)(?= |$)")


@dataclass(frozen=True)
class Block:
    """A fenced block: document, heading above, mark in the comment above, language and text."""

    document: str
    heading: str
    mark: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The block's commands, one a line, without comments and without heredocs."""
        whole = HEREDOC.sub("", self.text).replace("\\\n", " ")
        return [command for line in whole.splitlines() if (command := uncommented(line))]


def blocks(document: str) -> list[Block]:
    found, heading = [], ""
    for match in FENCE.finditer((ROOT / document).read_text()):
        heading = match[1] or heading
        if match[4] is not None:
            found.append(Block(document, heading, match[2] or "", match[3], match[4]))
    return found


def fences(document: str) -> int:
    """Number of fences, counted without regard to the text around: no fence is overlooked."""
    return (ROOT / document).read_text().count("\n```") // 2


def uncommented(line: str) -> str:
    return re.sub(r"(^|\s+)#.*", "", line).strip()


def within_sentences(document: str) -> Iterator[str]:
    """Commands in backticks, without the square brackets around optional words."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    for quoted in re.findall(r"`([^`]+)`", text):
        command = re.sub(r"[\[\]]", "", " ".join(quoted.split()))
        if PROGRAM.match(command):
            yield command


def words(command: str) -> list[str]:
    """The words of the program that a command runs: without a loop around, without settings before the program, without
    pipes and redirections."""
    loop = re.fullmatch(r"for \w+ in [^;]+; do (.*); done", command)
    found = shlex.split(loop[1] if loop else command)
    while found and re.fullmatch(r"\w+=.*", found[0]):
        del found[0]
    for place, word in enumerate(found):
        if word in ("|", "&&", ">"):
            return found[:place]
    return found


def folder(document: str) -> Path:
    return (ROOT / document).parent
