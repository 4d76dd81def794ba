"""torchvision of the public index is imported beside a CPU build of torch, and transforms pictures."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from deploy.torchvision_alone import DECLARATION, DESCRIBED_IN, declare

FOUND = find_spec("torchvision")


@pytest.mark.filterwarnings("ignore")
def test_pictures_are_scaled_and_an_operator_that_is_only_declared_says_so() -> None:
    from torchvision.ops import nms
    from torchvision.transforms.v2 import functional

    field = torch.arange(16.0).reshape(1, 4, 4)
    assert functional.resize(field, [2, 2], antialias=True).shape == (1, 2, 2)
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match="Couldn't load custom C\\+\\+ ops"):
            nms(torch.zeros(1, 4), torch.zeros(1), 0.5)


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    assert FOUND is not None and FOUND.origin is not None
    here = tmp_path / DESCRIBED_IN
    shutil.copy(Path(FOUND.origin).parent / DESCRIBED_IN, here)
    original = here.read_text().removeprefix(DECLARATION)
    for _ in range(2):
        declare(tmp_path)
        assert here.read_text() == DECLARATION + original
