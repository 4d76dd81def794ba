"""The table of architectures has every name of vLLM's registry, and the page shows the table."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from deploy.docs.manual.architectures import PAGE, page
from store.files.architectures import EITHER_MEASURED, OF_ONE_RELEASE, TABLE, Support

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch


def test_the_page_is_what_its_command_writes() -> None:
    assert PAGE.read_text() == page()


def test_the_table_has_the_names_of_vllms_registry() -> None:
    from vllm import __version__

    from gateway.vllm.front import known

    others = [names for release, names in OF_ONE_RELEASE.items() if not __version__.startswith(release)]
    elsewhere = frozenset().union(*others)
    assert set(TABLE) - elsewhere == known().architectures


def test_a_model_of_each_served_architecture_is_built_by_the_tests() -> None:
    """An architecture without a model among the tests is refused: nobody knows whether models of it can be built."""
    from tests.runtime import families, forms, hybrids, seeing
    from tests.runtime.pooling.models import VECTOR_MODELS

    kinds = [*forms.MIXTURES, *hybrids.HYBRIDS, *seeing.FAMILIES, "gpt_neox"]
    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | hybrids.CLASSES
    built = {families.architecture_of(name) for name in families.FAMILIES} | {classes[kind] for kind in kinds}
    built |= {name.split()[0] for name in VECTOR_MODELS}
    assert built == {name for name, line in TABLE.items() if line.support is not Support.NOT_YET}
    files = {name for name, model in VECTOR_MODELS.items() if model.pooling}
    assert {name for name in files if TABLE[name.split()[0]].support is not Support.EMBEDS} == EITHER_MEASURED


def test_what_is_not_served_has_a_reason_and_what_is_served_has_no_contradiction() -> None:
    refused = [line for line in TABLE.values() if line.support is Support.NOT_YET]
    assert refused and all(line.reason and not line.measured for line in refused)
    assert all(not line.reason for line in TABLE.values() if line.support is Support.SERVED)
