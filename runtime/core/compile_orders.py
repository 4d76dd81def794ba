"""Messages between a node and its compiler of grammars: orders to the compiler, and an answer to every order. Pure."""

from __future__ import annotations

import msgspec

from store.contract.wire import EngineSpec, Finish

ORDER_BYTES_MAX = 64 << 10
MADE, REFUSED, KILLED = b"+", b"-", b"!"  # first byte of an answer; an empty answer: the compiler is gone
# Compilers of vLLM's backend for xgrammar. From 0.33 on the first compiles for the tokens that are not special, and the
# second, for structural tags, for all tokens.
COMPILERS = ("compiler", "full_vocab_compiler")


class CompileLimits(msgspec.Struct, frozen=True):
    """Limits for compiling a grammar, and the sentences that refuse a grammar beyond a limit."""

    cpu_s: float = 5.0  # processor time
    memory_bytes: int = 512 << 20  # beyond the memory of the compiler without a grammar
    compiled_bytes: int = 8 << 20  # size of the compiled form: the device process reads some 50 MB a second

    def too_slow(self) -> str:
        return f"the grammar takes more than {self.cpu_s:g} s to compile: make it smaller, or repeat less in it"

    def too_much_memory(self) -> str:
        return f"the grammar takes more than {self.memory_bytes >> 20} MiB to compile: make it smaller"

    def too_large(self, size: int) -> str:
        return f"the compiled grammar has {size} bytes, at most {self.compiled_bytes}: make the grammar smaller"


class CompileOrder(msgspec.Struct, frozen=True, tag="CompileOrder"):
    """Order to compile a grammar; the text of the grammar comes through a socket sent with the order."""

    number: int
    spec: EngineSpec
    limits: CompileLimits


class DropOrder(msgspec.Struct, frozen=True, tag="DropOrder"):
    """Order to end the child of an earlier order: no request wants the grammar any more."""

    number: int


Order = CompileOrder | DropOrder


class NotCompiled(Exception):
    """A grammar was not compiled; the message is a sentence for the client."""

    def __init__(self, reason: str, finish: Finish = Finish.REFUSED) -> None:
        """`finish`: how the request ends: REFUSED for the grammar's fault, LOST and ERROR for the platform's."""
        super().__init__(reason)
        self.finish = finish
