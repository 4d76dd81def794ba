"""The HTTP exchange with the client while vLLM answers: the request as vLLM reads it, and a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from starlette.requests import Request
from starlette.types import Message, Send

from gateway.core.way import VLLM
from gateway.http.limits import CLOSING
from gateway.http.vllm_errors import Wording
from gateway.inference.context import ModelFront, RequestContext

LEAVING_S = 0.05  # longest time for a handler to notice that the client has left, before the handler is cancelled


class Exchange:
    """An HTTP request after its body was read, and the watch for a client that goes away."""

    def __init__(self, request: Request, send: Send, request_id: str, route: str, body: bytes) -> None:
        self.send = send
        self._receive = request.receive
        self._body: bytes | None = body
        self.path = route
        self._gone = asyncio.Event()
        self._closing: Callable[[], bool] = request.scope.get("extensions", {}).get(CLOSING, lambda: False)
        headers = [(name, value) for name, value in request.scope["headers"] if name != b"x-request-id"]
        headers.append((b"x-request-id", request_id.encode()))
        self._scope = {**request.scope, "path": route, "raw_path": route.encode(), "root_path": "", "headers": headers}

    def wording(self, context: RequestContext) -> Wording:
        """The words for errors of the request: the client reads the name that the client gave, and no path."""
        return Wording(self.path, context.name, (context.target.spec.path, context.target.spec.key))

    async def pass_on(
        self, front: ModelFront, context: RequestContext, send: Send, patience: Coroutine[None, None, object]
    ) -> bool:
        """Let vLLM answer. Returns False if the client left, or `patience` with the client ended, before the end."""
        ended = False

        async def send_while_there(message: Message) -> None:
            """Send a message while the client is there. uvicorn drops messages between the loss of a connection and the
            news of the loss: dropped messages must not be counted."""
            nonlocal ended
            if context.there():
                await send(message)
                ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        context.there = lambda: not (self._gone.is_set() or self._closing())
        answering = asyncio.create_task(front.handle(context, self._scope, self._replay, send_while_there))
        waiting = [asyncio.create_task(self._watch()), asyncio.create_task(patience)]
        try:
            await asyncio.wait([answering, *waiting], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
            return ended
        except OSError:  # the client's socket is gone
            return False
        finally:
            # vLLM runs some handlers in separate tasks. Only the news that the client left ends the tasks.
            self._gone.set()
            if context.way == VLLM:
                await asyncio.wait([answering], timeout=LEAVING_S)
            for task in (answering, *waiting):
                task.cancel()
            await asyncio.gather(answering, *waiting, return_exceptions=True)

    async def _replay(self) -> Message:
        """ASGI `receive` for vLLM: the body once, then nothing until the client goes away."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
