"""Compiles every grammar in a separate process: a program started and asked by runtime/node/grammars.py.

A grammar is a program by a tenant: a schema of 30 kB may take minutes and gigabytes to compile. Grammars are therefore
not compiled where models step. The program imports vLLM, reads vocabularies, and forks a child for each grammar. The
child has limits of processor time and of memory and a low priority, and can open neither files nor sockets. The child
writes the compiled grammar, or the reason of the refusal, to the socket that came with the order, and ends. If a child
is killed, the program writes the signal to the child's socket.

vLLM's own code checks and compiles the grammar, with xgrammar, so tokens match vLLM's. Grammars that xgrammar does not
support are refused: vLLM's other libraries can't hand a compiled grammar to another process.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import zlib
from collections import OrderedDict
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NoReturn

os.environ["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"  # vLLM's limit is a thread's, by the clock: children have a limit

from runtime.engine.settings import engine_args  # isort: skip  (sets vLLM's environment, so: first)

import msgspec
import xgrammar as xgr
from vllm import SamplingParams
from vllm.config import ModelConfig, StructuredOutputsConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
from vllm.v1.structured_output.request import get_structured_output_key

from runtime.core.compile_orders import (
    COMPILERS,
    KILLED,
    MADE,
    ORDER_BYTES_MAX,
    REFUSED,
    CompileLimits,
    CompileOrder,
    Order,
)
from store.contract.wire import EngineSpec

VOCABULARIES_KEPT = 16  # artefacts
NICENESS = 10  # a child gets about a tenth of a core that the device process wants, too
REASON_CHARACTERS_MAX = 500
PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # time of day and place in xgrammar's source, before the message
TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
SMALL: tuple[dict[str, object], ...] = (
    {"json": "{}"},
    {"json_object": True},
    {"regex": "a"},
    {"choice": ["a"]},
    {"grammar": 'root ::= "a"'},
    {"grammar": 'start: "a"'},
    {"structural_tag": json.dumps(TAGS)},
)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Vocabulary:
    """An artefact's configuration and tokenizer, for compiling grammars."""

    def __init__(self, spec: EngineSpec) -> None:
        """Read the artefact of `spec`. If vLLM can't read the artefact, raises vLLM's own error."""
        self.config: ModelConfig = engine_args(spec).create_model_config()
        self.tokenizer = cached_tokenizer_from_config(self.config)
        settings = SimpleNamespace(
            structured_outputs_config=StructuredOutputsConfig(), model_config=self.config, speculative_config=None
        )
        self.backend = XgrammarBackend(settings, self.tokenizer, self.config.get_vocab_size())  # type: ignore[arg-type]
        compilers = {name: getattr(self.backend, name) for name in COMPILERS if hasattr(self.backend, name)}
        self.infos = {name: compiler.compile_regex("a").tokenizer_info for name, compiler in compilers.items()}
        for small in SMALL:  # a child can open no file, so modules imported at first use must be imported now
            self.compile(json.dumps(small).encode())

    def compile(self, grammar: bytes) -> str:
        """Compile a grammar.

        `grammar`: arguments of vLLM's StructuredOutputsParams in JSON. Returns the compiled grammar in xgrammar's JSON.
        For a bad grammar, raises errors of vLLM and of xgrammar."""
        params = StructuredOutputsParams(**json.loads(grammar))
        settings = StructuredOutputsConfig(backend="xgrammar")
        SamplingParams(structured_outputs=params)._validate_structured_outputs(self.config, settings, self.tokenizer)
        for name, info in self.infos.items():
            setattr(self.backend, name, xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False))
        made = self.backend.compile_grammar(*get_structured_output_key(params))
        return str(made.ctx.serialize_json())  # type: ignore[attr-defined]


# ── a child ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def answer(vocabulary: Vocabulary, grammar: bytes, limits: CompileLimits) -> bytes:
    """The answer to an order: MADE and the compressed compiled grammar, or REFUSED and a sentence for the client."""
    try:
        text = vocabulary.compile(grammar)
    except MemoryError:
        return REFUSED + limits.too_much_memory().encode()
    except RecursionError:
        return REFUSED + b"the grammar is nested too deep: nest it less"
    except Exception as error:
        said = PLACE.sub("", (str(error).strip() or type(error).__name__).splitlines()[0])[:REASON_CHARACTERS_MAX]
        if "bad_alloc" in said:
            return REFUSED + limits.too_much_memory().encode()
        return REFUSED + f"the grammar can't be compiled: {said}".encode("utf-8", "replace")
    if len(text) > limits.compiled_bytes:
        return REFUSED + limits.too_large(len(text)).encode()
    return MADE + zlib.compress(text.encode(), 1)


def confine(limits: CompileLimits) -> None:
    """Limit the calling process: the kernel lets the process open no file, and ends the process at the limits."""
    with open("/proc/self/statm") as file:
        has_bytes = int(file.read().split()[0]) * resource.getpagesize()
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine is short of memory, the child goes first
    os.nice(NICENESS)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    most = has_bytes + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold tenants' text
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)  # the signal ends the process at any point


def child(vocabulary: Vocabulary, order: CompileOrder, end: socket.socket) -> NoReturn:
    """Work of a child: read the grammar from the socket `end`, write the answer, and end the process."""
    try:
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        confine(order.limits)
        grammar = bytearray()
        while data := end.recv(1 << 20):
            grammar += data
        end.sendall(answer(vocabulary, bytes(grammar), order.limits))
    finally:
        os._exit(0)


# ── the process ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Children:
    """Children that compile grammars, by the number of the order."""

    def __init__(self) -> None:
        self._vocabularies: OrderedDict[tuple[str, str], Vocabulary] = OrderedDict()
        self._children: dict[int, tuple[int, int, socket.socket]] = {}  # order: process id, pidfd, socket

    @property
    def descriptors(self) -> dict[int, int]:
        """Numbers of the orders by the child's pidfd; a pidfd is readable when the child has ended."""
        return {descriptor: number for number, (_, descriptor, _) in self._children.items()}

    def begin(self, order: CompileOrder, end: socket.socket) -> None:
        """Fork a child for the order, or refuse the order through the socket `end` if the vocabulary can't be read."""
        try:
            vocabulary = self._vocabulary(order.spec)
        except Exception as error:
            with end, suppress(OSError):
                reason = f"the model's vocabulary can't be read for a grammar: {type(error).__name__}"
                end.sendall(REFUSED + reason.encode())
            return
        process = os.fork()
        if process == 0:
            child(vocabulary, order, end)
        self._children[order.number] = process, os.pidfd_open(process), end

    def _vocabulary(self, spec: EngineSpec) -> Vocabulary:
        key = spec.path, spec.digest
        if key not in self._vocabularies:
            self._vocabularies[key] = Vocabulary(spec)
        self._vocabularies.move_to_end(key)
        while len(self._vocabularies) > VOCABULARIES_KEPT:
            self._vocabularies.popitem(last=False)
        return self._vocabularies[key]

    def kill(self, number: int) -> None:
        if number in self._children:
            os.kill(self._children[number][0], signal.SIGKILL)  # not reaped yet: the id is still the child's

    def over(self, number: int) -> None:
        """Reap the ended child of order `number`; if the child was killed, write the signal to the order's socket."""
        process, descriptor, end = self._children.pop(number)
        _, status = os.waitpid(process, 0)
        os.close(descriptor)
        with end, suppress(OSError):
            if os.WIFSIGNALED(status):
                end.sendall(KILLED + str(os.WTERMSIG(status)).encode())

    def kill_all(self) -> None:
        for number in self._children:
            self.kill(number)


def main() -> None:
    """Run `python -m runtime.engine.compiling FD`, started by a node. FD is an end of a pair of sockets, for orders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders = socket.socket(fileno=int(sys.argv[1]))
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Order)
    children = Children()
    while True:
        over = children.descriptors
        readable, _, _ = select.select([orders.fileno(), *over], [], [])
        for ready in over.keys() & set(readable):
            children.over(over[ready])
        if orders.fileno() not in readable:
            continue
        data, descriptors, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 1)
        if not data:  # the node is gone
            children.kill_all()
            return
        order = decoder.decode(data)
        if isinstance(order, CompileOrder):
            children.begin(order, socket.socket(fileno=descriptors[0]))
        else:
            children.kill(order.number)


if __name__ == "__main__":
    main()
