"""Tests of engines. The tests' process imports vLLM here, before tests/conftest.py freezes the heap."""

import runtime.engine.builder  # noqa: F401
