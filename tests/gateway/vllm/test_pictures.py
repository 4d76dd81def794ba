"""Pictures on the way to an engine: names by tenant, and words for a request that the bus does not carry."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of vLLM and torch


def test_a_name_that_two_tenants_chose_is_two_names_and_the_features_of_the_request_stay() -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    from gateway.vllm.pictures import of_tenant

    given = [MultiModalFeatureSpec(None, "image", "mine", PlaceholderRange(0, 4), "hash")]
    names = [of_tenant(given, salt)[0].identifier for salt in ("a", "b", "a")]
    assert names[0] == names[2] != names[1]
    assert given[0].identifier == "mine", "each answer of a request with several names the pictures anew"


def test_a_request_too_large_for_the_bus_says_how_large_its_pictures_make_it() -> None:
    from gateway.vllm.pictures import too_large
    from store.bus import TooLarge

    error = TooLarge(9_000_000, 8_000_000)
    assert too_large(error, 0) == str(error)
    said = too_large(error, 2)
    assert "9000000 bytes with its pictures (2)" in said and "at most 8000000" in said and "smaller" in said
