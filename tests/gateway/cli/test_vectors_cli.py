"""Deployments of models that make vectors, by the command line."""

from __future__ import annotations

from pathlib import Path

from gateway.cli.api import USAGE
from gateway.config import Settings
from tests.gateway.cli.test_cli import Staccato
from tests.gateway.cli.test_cli import hub as hub
from tests.gateway.cli.test_cli import settings as settings
from tests.gateway.cli.test_cli import staccato as staccato
from tests.gateway.cli.test_cli import tenant as tenant
from tests.runtime.pooling.models import write_vector_model


def test_an_embedder_is_deployed_with_an_example_for_embeddings_and_refuses_to_chat(
    staccato: Staccato, settings: Settings, tenant: str, tmp_path: Path
) -> None:
    folder = write_vector_model(tmp_path / "vectors", "BertModel")
    ran = staccato("deploy", "embedder", "--model", str(folder), "--tenant", tenant)
    place = f"{settings.url}/t/{tenant}/v1/embeddings"
    assert ran.code == 0 and f"curl {place} -H" in ran.err and '"input": ["Hello"]' in ran.err
    assert staccato("show", "embedder", "--tenant", tenant, "--json").json["task"] == "embed"
    for arguments in (["hello"], []):
        refused = staccato("chat", "embedder", *arguments, "--tenant", tenant, typed="hello\n")
        assert refused.code == USAGE and refused.out == ""
        assert refused.err == (
            f"error: embedder makes vectors or scores, and no text to chat with: send texts to {place}\n"
        )
