"""The page on declared state: its commands run against a real gateway; only the runtime is a stand-in."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog
import yaml

from gateway.core.declared.objects import read
from tests.docs.documents import blocks
from tests.docs.shell import run
from tests.gateway.declared.gateway import gateway
from tests.store.files.folders import write_model

PAGE = "deploy/docs/manual/declared.md"


def test_the_folder_of_the_page_is_applied_and_its_key_opens_the_endpoint(tmp_path: Path) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    (block,) = [block for block in blocks(PAGE) if block.mark == "run: declared"]
    with gateway(tmp_path) as served:
        write_model(served.roots / "model")
        said = run(block.text, served.roots, STACCATO_URL=served.url, STACCATO_KEY=served.key)
        again = run(
            "staccato apply -f declared --keys keys", served.roots, STACCATO_URL=served.url, STACCATO_KEY=served.key
        )
    structlog.reset_defaults()
    assert "ModelDeployment  default    chat  Awake" in said and "acme 1 [bold]messages" in said
    assert "POST" in said and "POST" not in again
    documents = yaml.safe_load_all((served.roots / "declared/acme.yaml").read_text())
    assert [read(document).error for document in documents] == ["", ""]
