"""Every policy has a page, and the page's command draws the page's picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from runtime.core.turns.registry import POLICIES
from tests.deploy.tools import DEPLOY
from tests.docs.documents import blocks
from tests.docs.shell import run

PAGES = DEPLOY / "docs/policies"
FOLDER = "deploy/docs/policies"
PICTURE = "run: picture"
PICTURE_BYTES_MOST = 60_000


def command(page: str) -> str:
    (block,) = [block for block in blocks(f"{FOLDER}/{page}.md") if block.mark == PICTURE]
    return block.text


def test_there_is_a_page_for_each_policy_and_for_nothing_else() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*POLICIES, "README"}
    assert {picture.stem for picture in PAGES.glob("*.svg")} == {*POLICIES, "attainment"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_page_says_what_when_how_and_from_where(policy: str) -> None:
    text = (PAGES / f"{policy}.md").read_text()
    assert text.startswith(f"# {policy}\n") and f"]({policy}.svg)" in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["When it is the better one", "Parameters", "Source"]
    assert f"({policy}.md)" in (PAGES / "README.md").read_text()


def test_all_pictures_are_of_the_same_workload() -> None:
    said = {command(policy).replace(f"--policy {policy} ", "").replace(f"{policy}.svg", "") for policy in POLICIES}
    assert len(said) == 1, said


@pytest.mark.parametrize("policy", POLICIES)
def test_the_command_of_a_page_draws_its_picture(policy: str, tmp_path: Path) -> None:
    run(command(policy), tmp_path)
    drawn, kept = ((folder / f"{policy}.svg").read_text() for folder in (tmp_path, PAGES))
    for picture in (drawn, kept):
        assert f"{policy}: who held each GPU" in picture and len(picture.encode()) < PICTURE_BYTES_MOST
    assert re.findall(r">\d+ GPUs, \d+ models, 60 s", drawn) == re.findall(r">\d+ GPUs, \d+ models, 60 s", kept)


def test_the_attainment_of_all_is_drawn(tmp_path: Path) -> None:
    whole = command("README")
    quick = f"{sys.executable} " + whole.strip().partition(" ")[2].replace("attainment.svg", f"{tmp_path}/few.svg")
    run(f"{quick} --gpus 2 --models-per-gpu 1 2 --duration 10 --seeds 1", DEPLOY.parent)
    for picture in (tmp_path / "few.svg", PAGES / "attainment.svg"):
        assert all(f">{policy}<" in picture.read_text() for policy in POLICIES)
    assert (PAGES / "attainment.svg").stat().st_size < PICTURE_BYTES_MOST
