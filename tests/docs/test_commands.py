"""Every command of the documents is run by a test; a command that cannot be run has a known reason, and exists."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.conftest import ROOT
from tests.docs.documents import DOCUMENTS, Block, blocks, fences, folder, uncommented, within_sentences, words
from tests.docs.parsers import wrong

# The test that runs the blocks with the mark `run: NAME`.
RUN_BY = {
    "newcomer": "tests/docs/test_platform.py",
    "up": "tests/docs/test_platform.py",
    "stopped": "tests/docs/test_platform.py",
    "lost": "tests/docs/test_lost.py",
    "root": "tests/docs/test_platform.py",
    "picture": "tests/docs/test_policies.py",
    "files": "tests/docs/test_files.py",
    "postgres": "tests/docs/test_files.py",
    "resumed": "tests/e2e/faults/test_gateways.py",
    "declared": "tests/docs/test_declared.py",
}
# Needs of the blocks with the mark `needs: NAME`, missing on a test machine, and the number of commands in these
# blocks: change the number only on purpose.
NOT_RUN = {
    "make": ("the set-up of an hour or the whole suite, of which this test is a part", 3),
    "docker": ("a container engine", 12),
    "systemctl": ("root, and systemd as process 1", 28),
    "kubectl": ("a cluster", 16),
    "helm": ("a cluster", 3),
    "internet": ("a hub; tests/gateway/cli/test_cli.py imports from one of its own", 2),
}
SHOWN = ("text", "json")  # languages of blocks not meant to be run
ALL = [block for document in DOCUMENTS for block in blocks(document)]


def unrun() -> list[tuple[str, Block]]:
    return [(block.mark.removeprefix("needs: "), block) for block in ALL if block.mark.startswith("needs: ")]


def test_no_block_is_overlooked() -> None:
    found = Counter(block.document for block in ALL)
    assert {document: fences(document) for document in DOCUMENTS} == {name: found[name] for name in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_who_runs_it_or_what_it_lacks(document: str) -> None:
    for block in blocks(document):
        verb, _, what = block.mark.partition(": ")
        if block.language in SHOWN:
            assert not block.mark, f"{block} is shown and not run: what is the mark for?"
        else:
            assert block.language in ("sh", "python"), f"say what this is, sh, python or text: {block}"
            known = RUN_BY if verb == "run" else NOT_RUN if verb == "needs" else {}
            assert what in known, f"nobody has said how this is checked: {block}"


def test_every_kind_of_run_has_its_test() -> None:
    for mark, path in RUN_BY.items():
        assert f'"run: {mark}"' in (ROOT / path).read_text(), (mark, path)


def test_what_is_not_run_is_counted_and_is_there() -> None:
    counted = Counter({what: 0 for what in NOT_RUN})
    for what, block in unrun():
        counted[what] += len(block.commands)
        for command in block.commands:
            for part in command.split(" | "):
                assert wrong(words(part), folder(block.document)) is None, command
    assert counted == {what: count for what, (_, count) in NOT_RUN.items()}


def test_what_stands_beside_a_command_is_there_too() -> None:
    """Check commands in comments, as in `make up  # or: staccato up …`."""
    offered = [line.partition("# or: ")[2] for block in ALL for line in block.text.splitlines() if "# or: " in line]
    assert offered and not [command for command in offered if wrong(words(uncommented(command)))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_within_sentences_exist_with_their_options(document: str) -> None:
    found = {command: wrong(words(command), folder(document), whole=False) for command in within_sentences(document)}
    assert not {command: said for command, said in found.items() if said}


def test_transcripts_show_commands_that_exist() -> None:
    typed = [line[2:] for block in ALL for line in block.text.splitlines() if line.startswith("$ ")]
    assert len(typed) >= 5 and not [command for command in typed if wrong(words(command))]


def test_files_and_links_of_what_is_not_run_are_there() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([\w./-]+)\)", (ROOT / document).read_text()):
            assert (folder(document) / link).exists(), (document, link)


def test_the_benches_that_the_page_names_are_there() -> None:
    page = (ROOT / "tests/bench/README.md").read_text()
    named = set(re.findall(r"`(?:tests/bench/(?:\w+/)?)?(bench_\w+\.py)`", page))
    assert len(named) > 10 and named <= {path.name for path in (ROOT / "tests/bench").rglob("bench_*.py")}


# ── the checks can fail ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "command",
    [
        "staccato tenants",
        "staccato deploy mine --tbt soon",
        "staccato deploy mine --ttft",
        "staccato deploy mine --colour red",
        "staccato tenant make acme",
        "staccato key create",
        "staccato sim --modells 3",
        "staccato sim --gpu abacus",
        "make coffee",
        "make setup OVEN=hot",
        "python tests/bench/bench_nothing.py",
        "python -m runtime.nothing",
        "promtool test rules tests/none.yml",
        "helm install x deploy/helm/staccato --set runtime.speed=3",
        "kubectl rollout status deployment/staccato-runtime",
        "docker compose --profile tpu up",
        "systemctl restart staccato-everything",
        "cp deploy/nothing.yaml .",
        "curl http://127.0.0.1",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert wrong(words(command))
