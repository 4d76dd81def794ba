"""The span of a request at the gateway. The spans of the runtime join the trace."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.inference.context import RequestContext
from store.telemetry import tracing
from store.telemetry.tracing import Span, Traces

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/rerank": "rerank",
    "/score": "score",
    "/classify": "classify",
}


def begin(traces: Traces, request_id: str, scope: Scope) -> Span:
    return traces.root("inference", request_id, Headers(scope=scope).get("traceparent", ""))


def end(span: Span, status: int) -> None:
    tracing.said(span, {"http.response.status_code": status})
    if status >= 500:
        tracing.failed(span)
    span.end()


def tell(traces: Traces, span: Span, path: str, context: RequestContext) -> None:
    """Write into the span what became of a request for which a runtime was asked."""
    call, timing, model = context.call, context.timing, context.name
    operation = _OPERATIONS.get(path, "generate_content")
    span.update_name(f"{operation} {model}")
    tracing.said(
        span,
        {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": model,
            "gen_ai.response.finish_reasons": [call.finish],
            "gen_ai.usage.input_tokens": call.prompt_tokens,
            "gen_ai.usage.output_tokens": call.output_tokens,
            "staccato.tenant_id": call.opened.tenant_id,
            "staccato.deployment_id": call.opened.deployment_id,
        },
    )
    if timing is not None and timing.taken_at is not None:
        traces.past("queue", span, tracing.unix_ns(timing.arrived_at), tracing.unix_ns(timing.taken_at))
