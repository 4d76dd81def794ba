"""Common ground of the tests of engines."""

from __future__ import annotations

import runtime.engine.builder  # noqa: F401  (imported before the first module's heap is frozen: see tests/conftest.py)
