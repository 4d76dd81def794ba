"""Makes torchvision importable beside a CPU build of torch: run by `make setup` and by the images for CPUs.

The public index has torchvision for CUDA only. The library of operators needs a torch for CUDA, and without the library
`import torchvision` fails where torchvision describes the operators `nms` and `qnms`. vLLM's picture processors use
torchvision's transforms, which are written in Python, and no operator. The script therefore declares the two operators
in torchvision's file, so that the import succeeds; a call of the operators still fails, and says so. The declaration
does nothing where the library of operators loads, and a second run of the script changes nothing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DESCRIBED_IN = "_meta_registrations.py"
DECLARATION = """\
from torch import library as _operators
from torchvision.extension import _has_ops

if not _has_ops():  # added by Staccato's set-up: no library of operators beside a CPU build of torch
    _declared = _operators.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def declare(folder: Path) -> None:
    """Put the declaration before torchvision's descriptions of operators. `folder`: the package torchvision."""
    described = folder / DESCRIBED_IN
    text = described.read_text()
    if not text.startswith(DECLARATION):
        described.write_text(DECLARATION + text)


def main() -> None:
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        sys.exit("torchvision is not installed: `make setup`")
    declare(Path(found.origin).parent)
    import torchvision  # noqa: F401  (the set-up ends here, with the reason, if the import fails)


if __name__ == "__main__":
    main()
