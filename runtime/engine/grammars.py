"""Compiled grammars in the device process: an engine reads grammars compiled by runtime/engine/compiling.py.

When a request enters, vLLM asks a backend of structured outputs to compile the request's grammar. The backend of this
file compiles no grammar, and hands out the grammar that came with the request. The rest of vLLM's structured outputs is
unchanged: masks, the tokens accepted by a grammar, and the end of reasoning. A model's tokenizer is read for the first
grammar, and not in a build: the device makes no step while a tokenizer is read, and a tokenizer of 128,000 tokens takes
half a second and tens of MB.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import xgrammar as xgr
from vllm import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1 import structured_output
from vllm.v1.engine.core import EngineCore
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

from runtime.core.compile_orders import COMPILERS
from runtime.core.engine import BadRequest

READS_KEPT = 8  # grammars kept although no request uses the grammar, for a later request with an equal grammar
READERS = 2  # threads: with a single thread, a grammar slow to read would hold up every later grammar
READER_NICENESS = 10

vars(structured_output)["cached_tokenizer_from_config"] = lambda model_config: None  # for a build: no tokenizer


def _step_back() -> None:
    """Give the calling thread, a reader, a lower priority than the thread that makes steps."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), READER_NICENESS)


_readers = ThreadPoolExecutor(READERS, "grammars", initializer=_step_back)


class ReadyBackend(XgrammarBackend):
    """vLLM's backend, with a `compile_grammar` that returns the grammar in `given` and ignores the text."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        compilers = [vars(self).pop(name) for name in COMPILERS if hasattr(self, name)]
        self.vocabularies = [compiler.compile_regex("a").tokenizer_info for compiler in compilers]
        self.given: xgr.CompiledGrammar | None = None

    def read(self, grammar: bytes) -> xgr.CompiledGrammar:
        """Read a compiled grammar for the vocabulary that the grammar was compiled for.

        xgrammar refuses a grammar for all tokens as a grammar for a part of the tokens, and not the reverse."""
        text = zlib.decompress(grammar).decode()
        for vocabulary in self.vocabularies[:-1]:
            with suppress(xgr.DeserializeFormatError):
                return xgr.CompiledGrammar.deserialize_json(text, vocabulary)
        return xgr.CompiledGrammar.deserialize_json(text, self.vocabularies[-1])

    def compile_grammar(self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None) -> XgrammarGrammar:
        assert self.given is not None, "a request has a grammar, and none was given"
        stops = list(stop_token_ids) if stop_token_ids else None
        matcher = xgr.GrammarMatcher(
            self.given, override_stop_tokens=stops, max_rollback_tokens=self.num_speculative_tokens
        )
        return XgrammarGrammar(vocab_size=self.vocab_size, matcher=matcher, ctx=self.given)

    def destroy(self) -> None:
        self.given = None


class GrammarReader:
    """Grammars of an engine. Requests with equal grammars share a grammar once read."""

    def __init__(self, core: EngineCore) -> None:
        self._manager, self._config = core.structured_output_manager, core.vllm_config
        self._manager._use_async_grammar_compilation = False  # a grammar handed out is ready at once
        self._backend: Future[ReadyBackend] | None = None
        self._reads: OrderedDict[bytes, Future[xgr.CompiledGrammar]] = OrderedDict()
        self._in_use: WeakValueDictionary[bytes, xgr.CompiledGrammar] = WeakValueDictionary()

    def read(self, grammar: bytes) -> None:
        """Begin to read a compiled grammar on a reader's thread, unless the grammar is known."""
        if grammar in self._in_use or grammar in self._reads:
            return
        if self._backend is None:  # a backend reads the whole vocabulary: some 0.4 s for 128,000 tokens
            self._backend = _readers.submit(self._make_backend)
        self._reads[grammar] = _readers.submit(self._read, self._backend, grammar)
        while len(self._reads) > READS_KEPT and next(iter(self._reads.values())).done():
            self._reads.popitem(last=False)

    def has_read(self, grammar: bytes) -> bool:
        """False while the grammar is being read, or waits for a reader's thread."""
        reading = self._reads.get(grammar)
        return reading is None or reading.done()

    @contextmanager
    def given(self, grammar: bytes, sampling: SamplingParams | None) -> Iterator[None]:
        """Within the context, vLLM takes `grammar` for the request's grammar.

        Args:
            grammar: the compiled grammar; empty for a request without a grammar.
            sampling: the request's parameters, with the text of the grammar.

        Waits until the grammar is read. Raises BadRequest if the compiled grammar is missing, and errors of reading."""
        wanted = sampling is not None and sampling.structured_outputs is not None
        if wanted and not grammar:
            raise BadRequest(
                "the request has a grammar and came without its compiled form: "
                "its gateway is older than this runtime, upgrade the gateway"
            )
        if not wanted or not grammar:
            yield
            return
        compiled = self._compiled(grammar)
        assert self._backend is not None and sampling is not None and sampling.structured_outputs is not None
        sampling.structured_outputs._backend = "xgrammar"  # which vLLM's check of a request would have found
        backend = self._manager.backend = self._backend.result()
        backend.given = compiled
        try:
            yield
        finally:
            backend.given = None

    def _compiled(self, grammar: bytes) -> xgr.CompiledGrammar:
        compiled = self._in_use.get(grammar)
        if compiled is None:
            self.read(grammar)
            compiled = self._in_use[grammar] = self._reads[grammar].result()
        return compiled

    def _make_backend(self) -> ReadyBackend:
        config = self._config.model_config
        self._manager.tokenizer = cached_tokenizer_from_config(config)  # for the end of reasoning, too
        return ReadyBackend(self._config, self._manager.tokenizer, config.get_vocab_size())

    def _read(self, backend: Future[ReadyBackend], grammar: bytes) -> xgr.CompiledGrammar:
        return backend.result().read(grammar)
